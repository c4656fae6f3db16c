"""What to change where no layout of a search fits: state that takes fewer bytes, or more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge_memory.plan.found import Found
from bridge_memory.plan.megatron.space import Space
from bridge_memory.plan.nearest import TIMES, Nearest, surest_of
from bridge_memory.spec import RunSpec, SpecError

#: Adam's moments in bf16, beside fp32 weights of the optimizer; gradients summed in bf16; the whole optimizer in host
#: memory, for which Megatron-LM's arguments ask for a precision-aware one (``training/arguments.py: validate_args``).
_MOMENTS = {
    "optimizer.use_precision_aware_optimizer": True, "optimizer.exp_avg_dtype": "bf16",
    "optimizer.exp_avg_sq_dtype": "bf16",
}  # fmt: skip
_GRADIENTS = {"data_parallel.grad_reduce_in_fp32": False}
_OFFLOAD = {
    "optimizer.optimizer_cpu_offload": True, "optimizer.optimizer_offload_fraction": 1.0,
    "optimizer.use_precision_aware_optimizer": True,
}  # fmt: skip
#: In the order to try them: the step is as long with the first two, and longer by copies with the last.
STATES: tuple[dict[str, Any], ...] = (_MOMENTS, {**_MOMENTS, **_GRADIENTS}, _OFFLOAD)


def nearest(space: Space, searched: Callable[[Space], Found]) -> Iterator[Nearest]:
    """Of a space in which nothing fits: the first of ``STATES`` and the fewest GPUs with which the fastest layout or
    the smallest does, with the reserve and its whole job, if there are such. ``searched`` searches a space and judges
    jobs (``Found.on``). What is looked at runs whole layers again, of one sequence a microbatch, where these are free.
    """
    small = space
    if "mbs" not in {*space.fixed, *space.ranges, *space.only, *space.without}:
        small = small._replace(ranges={**space.ranges, "mbs": (1, 1)})
    if "recompute" not in {*space.fixed, *space.only, *space.without}:
        small = small._replace(only={**space.only, "recompute": frozenset({"full"})})

    for fields in STATES:
        bases = tuple(_with(run, fields) for run in (small.base, *small.others))
        able = [run for run in bases if run is not None]
        row = surest_of(searched, small._replace(base=able[0], others=tuple(able[1:]))) if able else None
        if row is not None:
            yield Nearest(fields, space.num_gpus, row)
            break
    for times in TIMES:
        row = surest_of(searched, small._replace(num_gpus=times * space.num_gpus))
        if row is not None:
            yield Nearest({}, times * space.num_gpus, row)
            break


def _with(run: RunSpec, fields: Mapping[str, Any]) -> RunSpec | None:
    """The run with these fields; None where it has them already or cannot have them."""
    try:
        changed = run.with_fields(**fields)
    except SpecError:
        return None
    return changed if changed != run else None
