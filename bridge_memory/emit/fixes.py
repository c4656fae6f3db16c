"""Changes of a run as flags of the command line, and the change to try first where it does not fit a GPU."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from bridge_memory.arguments.flags import FLAGS, SPECS, spelling
from bridge_memory.components import GIB
from bridge_memory.emit.commands import left_idle
from bridge_memory.spec import RunSpec
from bridge_memory.spec.fields import called
from bridge_memory.spec.parts import MEGATRON_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.plan.changes import Effect


#: Fields that the flag of another sets too (``arguments/run.py``).
_SET_BESIDE = ("optimizer.fp8_recipe",)


def try_first(
    run: RunSpec, gpu: Gpu, needs: Callable[[RunSpec], str | None] = lambda run: "",
    hopeless: Callable[[RunSpec], bool] = lambda run: False,
) -> str:  # fmt: skip
    """"try first: --recompute-granularity full ... (9% slower)", or that no single option makes it fit.

    ``needs``: what a run with which the step fits needs beside for the rest of its job, as flags; None: that does not
    fit. A change with which it does not is named where there is no other. ``hopeless``: of a run whether ``needs`` is
    known to give None, before its step is looked at.
    """
    from bridge_memory.plan.changes import WhatIf
    from bridge_memory.speed.hardware import HARDWARE

    found = WhatIf(run, HARDWARE.get(gpu.name))
    for effect in found.to_try(gpu, without=hopeless):
        more = needs(effect.run)
        if more is not None:
            return f"try first: {fix_words(effect, run)}{f' and {more}' if more else ''}"
    of_step = next(found.to_try(gpu), None)
    if of_step is None:
        alone = state_alone(run, gpu)
        why = f" ({alone})" if alone else ""
        if run.implementation.torch_layers:
            return f"no single option makes it fit{why}: `bridge-memory whatif --pairs` looks further"
        further = "fit" if run.data_parallel.engine in MEGATRON_ENGINES and not alone else "whatif --pairs"
        return f"no single option makes it fit{why}: `bridge-memory {further}` and `search` look further"
    return f"try first: {fix_words(of_step, run)}, with which only the step fits"


def state_alone(run: RunSpec, gpu: Gpu) -> str:
    """"model state alone is 46.0 GiB: no change of activations can make it fit"; "" where it leaves room."""
    from bridge_memory.estimation import model_state
    from bridge_memory.verdict import headroom

    alone = max(model_state(run))
    if headroom(gpu, alone, run) >= 0:
        return ""
    return f"model state alone is {alone / GIB:.1f} GiB: no change of activations can make it fit"


def fix_words(effect: Effect, run: RunSpec) -> str:
    """Flags that make the changes of ``effect`` to ``run``, and what they cost."""
    cost = "time unknown"
    if effect.slowdown is not None:
        percent = round(100 * (effect.slowdown - 1))
        cost = f"{abs(percent)}% {'slower' if percent > 0 else 'faster'}" if percent else "as fast"
    return f"{flag_words(effect, run)} ({cost})"


def flag_words(effect: Effect, run: RunSpec, *, megatrons: bool = False) -> str:
    """"--tp 4 without --num-layers-in-last-pipeline-stage": what has to be typed, or not, beside the flags of ``run``;
    ``megatrons``: in Megatron-LM's spelling."""
    add, drop = changed_flags(effect, run, megatrons=megatrons)
    return " ".join([shlex.join(add)] * bool(add) + [f"without {flag}" for flag in drop])


def changed_flags(effect: Effect, run: RunSpec, *, megatrons: bool = False) -> tuple[list[str], list[str]]:
    """(words to add to the command line of ``run``, flags to take out of it)."""
    add: dict[str, list[str]] = {}
    drop: list[str] = []
    for change in effect.changes:
        for name, _ in change.fields:
            if name in _SET_BESIDE:
                continue
            field = next((flag.field for flag in FLAGS if name in (flag.field, _called(flag.field))), None)
            assert field is not None, name  # a test goes through all changes
            flag = _megatrons(field) if megatrons else spelling(field)
            group, _, of_group = field.partition(".")
            # What changes go together for: modules of two of them are one list.
            value, before = (getattr(getattr(of, group), of_group) for of in (effect.run, run))
            if value is None:
                if before is not None and flag not in drop:
                    drop.append(flag)
            elif value is True or value is False:
                add[flag] = [flag if value else flag.replace("--", "--no-", 1)]
            elif isinstance(value, tuple):
                add[flag] = [flag, *value] if megatrons else [flag, ",".join(value)]
            else:
                add[flag] = [flag, str(value)]
    for field in left_idle(run, effect.run):
        flag = _megatrons(field) if megatrons else spelling(field)
        add.pop(flag, None)
        if flag not in drop:
            drop.append(flag)
    return [word for words in add.values() for word in words], drop


def _megatrons(field: str) -> str:
    """Megatron-LM's spelling of a flag is the last one."""
    return next(flag.names.split()[-1] for flag in FLAGS if flag.field == field)


def _called(field: str) -> str:
    """What ``RunSpec.with_fields`` takes for "group.field"."""
    group, _, name = field.partition(".")
    return called(SPECS[group], name)
