"""What to change where no configuration of a search fits: offloading, or the GPUs with which one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge_memory.estimation import peaks
from bridge_memory.plan.found import Found, Refused
from bridge_memory.plan.nearest import TIMES, Nearest, surest_of
from bridge_memory.plan.torch.space import AXES, Space, changed_fields, configurations
from bridge_memory.spec import RunSpec, SpecError


def smallest(space: Space, given: frozenset[str]) -> RunSpec | None:
    """The configuration of a space with the lowest peak. ``given``: axes that flags fix."""
    runs = [run for alike in configurations(_small(space, given), Refused()) for run in alike]
    return min(runs, key=lambda run: peaks(run)[0].peak_bytes, default=None)


def nearest(space: Space, given: frozenset[str], searched: Callable[[Space], Found]) -> Iterator[Nearest]:
    """Of a space in which nothing fits: offloading, and the fewest GPUs, with which the fastest configuration or the
    smallest does, with the reserve and its whole job, if there are such. ``given``: axes that flags fix. ``searched``
    searches a space and judges jobs (``Found.on``). What is looked at has one sequence a microbatch and checkpoints
    every layer, where these are free.
    """
    small = _small(space, given)
    number = next(iter(space.bases.values())).parallel.world_size

    if "offload" not in given and "offload" in small.fixed:
        row = surest_of(searched, small._replace(fixed=small.fixed - {"offload"}))
        if row is not None:
            changed = changed_fields(row.run, space.bases[row.run.data_parallel.engine])
            yield Nearest({name: changed[name] for name in AXES["offload"] if name in changed}, number, row)
    for times in TIMES:
        bases = _with(small.bases, {"parallel.world_size": times * number})
        row = surest_of(searched, small._replace(bases=bases)) if bases else None
        if row is not None:
            yield Nearest({}, times * number, row)
            break


def _small(space: Space, given: frozenset[str]) -> Space:
    small = space if "mbs" in space.fixed else space._replace(micro_batches=(1, 1))
    if "checkpointing" in given:
        return small
    checkpointed = {"transformers.gradient_checkpointing": True, "transformers.use_reentrant": False}
    bases = {**small.bases, **_with(small.bases, checkpointed)}
    return small._replace(bases=bases, fixed=small.fixed | {"checkpointing"})


def _with(bases: Mapping[str, RunSpec], fields: Mapping[str, Any]) -> dict[str, RunSpec]:
    """The runs that can have these fields."""
    found = {}
    for engine, run in bases.items():
        try:
            found[engine] = run.with_fields(**fields)
        except SpecError:
            continue
    return found
