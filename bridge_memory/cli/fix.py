"""The cheapest single change with which a run fits a GPU, in the flags of the command line."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.run_flags import FLAGS, SPECS, spelling
from bridge_memory.spec import RunSpec
from bridge_memory.spec.fields import called

if TYPE_CHECKING:
    from bridge_memory.plan.changes import Effect
    from bridge_memory.report.gpus import Gpu


def cheapest_fix(run: RunSpec, gpu: Gpu) -> str:
    """"cheapest fix: --recompute-granularity full ... (9% slower)", or that no single option makes it fit."""
    from bridge_memory.plan.changes import WhatIf, hardware_for
    from bridge_memory.report.gpus import largest_peak
    from bridge_memory.spec.driver import driver_bytes
    from bridge_memory.spec.gaps import gaps

    room = largest_peak(gpu, run.parallel.world_size, driver_bytes(run))
    known = len(gaps(run))
    found = [
        e for e in WhatIf(run, hardware_for(run, gpu.name)).singles if e.peak <= room and len(gaps(e.run)) <= known
    ]  # fmt: skip
    if not found:
        if run.implementation.hugging_face:
            return "no single option makes it fit: `bridge-memory whatif --pairs` looks further"
        return "no single option makes it fit: `bridge-memory whatif` and `search` look further"
    best = min(found, key=lambda e: (e.slowdown is None, e.slowdown or 0.0, e.peak))
    return f"cheapest fix: {fix_words(best)}"


def fix_words(effect: Effect) -> str:
    """Its flags, and what they cost."""
    words: list[str] = []
    for change in effect.changes:
        for name, value in change.fields:
            words += _flag(name, value)
    cost = "time unknown"
    if effect.slowdown is not None:
        percent = round(100 * (effect.slowdown - 1))
        cost = f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}" if percent else "as fast"
    return f"{shlex.join(words)} ({cost})"


def _called(field: str) -> str:
    """What ``RunSpec.with_fields`` takes for "group.field"."""
    group, _, name = field.partition(".")
    return called(SPECS[group], name)


def _flag(name: str, value: Any) -> list[str]:
    field = next((flag.field for flag in FLAGS if name in (flag.field, _called(flag.field))), None)
    flag = spelling(field) if field else f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if value is True or value is False:
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
