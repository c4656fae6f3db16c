"""Mapping between global ranks and pipeline stages.

Source: megatron-core ``parallel_state.py: RankGenerator``. In its default order, tp-cp-ep-dp-pp, the pipeline is the
outermost dimension: the ranks of a stage are contiguous.
"""

from __future__ import annotations

from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.parts import ParallelSpec


def stage_of_rank(parallel: ParallelSpec, rank: int, *, pp_before_dp: bool = False) -> int:
    """Pipeline stage of a global rank; ``pp_before_dp`` for the order tp-cp-ep-pp-dp (``--use-tp-pp-dp-mapping``)."""
    if not 0 <= rank < parallel.world_size:
        raise SpecError(
            f"rank ({rank}) is outside world_size ({parallel.world_size}); use 0 to {parallel.world_size - 1}"
        )
    if pp_before_dp:
        return rank // (parallel.tp * parallel.cp) % parallel.pp
    return rank // ranks_per_stage(parallel)


def rank_of_stage(parallel: ParallelSpec, stage: int) -> int:
    """The first rank of a pipeline stage, in the default order."""
    if not 0 <= stage < parallel.pp:
        raise SpecError(
            f"stage ({stage}) is not one of the {parallel.pp} pipeline stages; use 0 to {parallel.pp - 1}"
        )
    return stage * ranks_per_stage(parallel)


def place_in_data_parallel(parallel: ParallelSpec, rank: int) -> tuple[int, int]:
    """(index of a global rank in its dense data-parallel group, DP x CP; index in its expert data-parallel group), in
    the default order."""
    in_stage = rank % ranks_per_stage(parallel)
    return in_stage // parallel.tp, in_stage // (parallel.etp * parallel.ep)


def ranks_per_stage(parallel: ParallelSpec) -> int:
    """Ranks of one pipeline stage."""
    return parallel.world_size // parallel.pp
