"""What torch's caching allocator reserves for a run: every storage that the estimate counts is allocated and freed in
order, on its stream, in a model of the allocator.

Reserved memory is what ``torch.cuda.max_memory_reserved`` reports: the most that the allocator has requested from the
device. It exceeds the most that is allocated for reasons that depend on the order: streams do not share memory, and a
block that is reused for something smaller leaves a remainder. Optimizer states are allocated at the end of the first
step, where activations were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.workspaces.caching_allocator import Reserved

_MEGATRON = "megatron_ddp"  # the other engines are imported where they are asked for


def why_not(run: RunSpec) -> str | None:
    """Why a run cannot be replayed, in one line; None if it can."""
    if run.data_parallel.engine == _MEGATRON:
        from bridge_memory.reserved import megatron

        return megatron.why_not(run)
    from bridge_memory.reserved import torch_engines

    return torch_engines.why_not(run)


def replayed(run: RunSpec, stage: int | None = None, steps: int | None = None) -> Reserved:
    """Replays the whole model, or a pipeline stage (the one with the highest peak), on the rank with the largest
    shards. ``steps``: of Megatron's; by default as many as reserved memory needs to settle. Raises SpecError for what
    the estimate refuses; ``why_not`` says what cannot be replayed."""
    if run.data_parallel.engine == _MEGATRON:
        from bridge_memory.reserved import megatron

        return megatron.replayed(run, stage, steps or megatron.STEPS)
    from bridge_memory.reserved import torch_engines

    return torch_engines.replayed(run)


def held(run: RunSpec, stage: int) -> int:
    """The most that ``replayed`` finds reserved with the allocator as the run has it."""
    if run.data_parallel.engine == _MEGATRON:
        from bridge_memory.reserved import megatron

        return megatron.held(run, stage)
    return replayed(run, stage).held(expandable=run.implementation.expandable_segments)


def uneven(run: RunSpec, stage: int, factor: float) -> int | None:
    """As ``held``, with routing that gives up to ``factor`` times the tokens; None where sizes do not vary."""
    if run.data_parallel.engine != _MEGATRON:
        return None
    from bridge_memory.reserved import megatron

    return megatron.held(run, stage, factor) if megatron.sizes_vary(run) else None


def fits_with_retries(run: RunSpec, stage: int, capacity: int) -> bool:
    """Whether training goes on with no more than ``capacity`` bytes reserved, where ``replayed`` reserves more: the
    allocator returns cached memory and tries again."""
    if run.data_parallel.engine != _MEGATRON:
        return False
    from bridge_memory.reserved import megatron

    return megatron.fits_with_retries(run, stage, capacity)
