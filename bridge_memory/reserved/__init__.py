"""What torch's caching allocator reserves for a run: every storage that the estimate counts is allocated and freed in
order, on its stream, in a model of the allocator.

Reserved memory is what ``torch.cuda.max_memory_reserved`` reports: the most that the allocator has requested from the
device. It exceeds the most that is allocated for reasons that depend on the order: streams do not share memory, and a
block that is reused for something smaller leaves a remainder. Optimizer states are allocated at the end of the first
step, where activations were.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.estimation import peaks
from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.workspaces.caching_allocator import Reserved, Trace

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
    shards, with and without expandable segments. As ``trace_of``; raises SpecError for what the estimate refuses;
    ``why_not`` says what cannot be replayed."""
    if stage is None:
        stage = max(peaks(run), key=lambda found: found.peak_bytes).stage
    return trace_of(run, stage, steps=steps).both()


def trace_of(run: RunSpec, stage: int, uneven: float = 1.0, steps: int | None = None) -> Trace:
    """What training on a rank of a stage asks its allocator for. ``uneven``: layers of experts get at each pass between
    the run's number of tokens and this times it, where their sizes vary (``sizes_vary``). ``steps``: of Megatron's; by
    default as many as reserved memory needs to settle."""
    if run.data_parallel.engine == _MEGATRON:
        from bridge_memory.reserved import megatron

        return megatron.trace_of(run, stage, uneven, steps or megatron.STEPS)
    from bridge_memory.reserved import torch_engines

    return torch_engines.trace_of(run)


def sizes_vary(run: RunSpec) -> bool:
    """Whether routing that is not even changes what the allocator reserves, beyond what it allocates."""
    if run.data_parallel.engine != _MEGATRON:
        return False
    from bridge_memory.reserved import megatron

    return megatron.sizes_vary(run)


def held(run: RunSpec, stage: int, uneven: float = 1.0) -> int:
    """The most that ``trace_of`` reserves with the allocator as the run has it, bytes."""
    return trace_of(run, stage, uneven).held(expandable=run.implementation.expandable_segments)
