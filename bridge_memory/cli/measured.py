"""``--measured-step-time LAYOUT=SECONDS``: a layout in short, and how long its step took."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge_memory.plan.megatron.space import AXES, Space
from bridge_memory.spec import SpecError, show

if TYPE_CHECKING:
    from bridge_memory.speed.measured import MeasuredStep

_SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp", "mbs")
_SIZE = re.compile(rf"({'|'.join(_SIZES)})(\d{{1,6}})")
_RECOMPUTE = "recompute:"
HOW = "write it like tp2,pp8,mbs1,recompute:mlp=58.2 (recompute: none, full, or modules with + between them)"


def measured_steps(texts: list[str], space: Space) -> list[MeasuredStep]:
    """What was measured, as runs; what a layout does not name is as in the flags. Raises SpecError."""
    return [_measured(text, space) for text in texts]


def named_seconds(text: str, how: str) -> tuple[str, str, float]:
    """(what ``LAYOUT=SECONDS`` names, the flag with its value for messages, the seconds). Raises SpecError, which says
    ``how`` to write it."""
    flag = f"--measured-step-time ({show(text)})"
    name, equals, last = text.rpartition("=")
    try:
        seconds = float(last)
    except ValueError:
        seconds = 0.0
    if not (equals and 0 < seconds < 1e6):
        raise SpecError(f"{flag} does not end in = and the seconds of a step; {how}")
    return name, flag, seconds


def _measured(text: str, space: Space) -> MeasuredStep:
    from bridge_memory.speed.measured import MeasuredStep

    name, flag, seconds = named_seconds(text, HOW)
    base = space.base
    parallel: dict[str, Any] = {"world_size": space.num_gpus}
    batch: dict[str, Any] = {"global_batch_size": space.global_batch_size or base.batch.global_batch_size}
    for axis, (low, high) in space.ranges.items():
        if low == high:
            field = AXES[axis][0].split(".")[1]
            (batch if axis == "mbs" else parallel)[field] = None if axis == "vpp" and low == 1 else low
    recompute = base.recompute
    seen: set[str] = set()
    for item in filter(None, name.split(",")):
        size = _SIZE.fullmatch(item)
        what = size[1] if size else "recompute" if item.startswith(_RECOMPUTE) else ""
        if not what or what in seen:
            raise SpecError(f"{flag} has {show(item)}, which is {'there twice' if what else 'no size'}; {HOW}")
        seen.add(what)
        if size:
            field = AXES[what][0].split(".")[1]
            number: int | None = int(size[2])
            (batch if what == "mbs" else parallel)[field] = None if what == "vpp" and number == 1 else number
        else:
            recompute = _recompute(recompute, item.removeprefix(_RECOMPUTE))
    try:
        run = base.with_(
            parallel=replace(base.parallel, **parallel), batch=replace(base.batch, **batch), recompute=recompute
        )
    except SpecError as error:
        raise SpecError(f"{flag}: {error}") from None
    return MeasuredStep(name, run, seconds)


def _recompute(base: Any, how: str) -> Any:
    if how == "none":
        return replace(base, granularity=None, method=None, num_layers=None)
    if how == "full":
        return replace(base, granularity="full", method="uniform", num_layers=1)
    return replace(base, granularity="selective", method=None, num_layers=None, modules=tuple(how.split("+")))
