"""Rank, world size and pipeline stage of this process. Initialises nothing."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

from bridge_memory.spec import ParallelSpec
from bridge_memory.spec.ranks import stage_of_rank


@dataclass(frozen=True, slots=True)
class Place:
    rank: int
    world_size: int
    stage: int


def place(stages: int) -> Place:
    """The place of this process. ``stages``: pipeline stages of the run, used where megatron-core is not
    initialised."""
    rank, world = _rank_and_world()
    stage = _megatron_stage()
    if stage is None:
        sizes = ParallelSpec(world_size=world, pipeline_model_parallel_size=stages)
        stage = stage_of_rank(sizes, rank) if world % stages == 0 else 0
    return Place(rank, world, stage)


def world_size() -> int:
    """Number of ranks of the job."""
    return _rank_and_world()[1]


def _rank_and_world() -> tuple[int, int]:
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _megatron_stage() -> int | None:
    state: Any = sys.modules.get("megatron.core.parallel_state")
    try:
        if state is not None and state.model_parallel_is_initialized():
            return int(state.get_pipeline_model_parallel_rank())
    except Exception:
        return None
    return None
