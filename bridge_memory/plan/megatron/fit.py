"""What a run has to recompute to fit a GPU in the least time, while its layout stays.

Megatron recomputes nothing, a set of modules (selective), the first k layers of every virtual stage (full, block) or
every layer (full, uniform): a finite lattice, which is evaluated whole, so that the first row is its optimum. Groups of
several layers (uniform with more than one) are not in it.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge_memory.estimation import peaks
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import Found, Refused
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import AXES, Space, layouts
from bridge_memory.spec import RunSpec
from bridge_memory.speed.hardware import Hardware


def fit(
    run: RunSpec, hardware: Hardware, *, capacity: int, outside: Callable[[RunSpec], Range]
) -> tuple[Space, Found]:
    """Every choice of recomputation for ``run`` that fits, the fastest first, and the space of all. Arguments as for
    ``search``. Raises SpecError where no time is known."""
    layout = frozenset(AXES) - {"recompute"}
    space = Space(run, run.parallel.world_size, hardware.domain, layout, exhaustive=True)
    return space, search(space, hardware, capacity=capacity, outside=outside)


def lowest(space: Space) -> tuple[int, RunSpec]:
    """The lowest peak of all choices, bytes, and the run that has it."""
    runs = [run for alike in layouts(space, Refused()) for run in alike]
    return min(((max(stage.peak_bytes for stage in peaks(run)), run) for run in runs), key=lambda found: found[0])
