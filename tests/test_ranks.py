"""Global ranks and their pipeline stages are megatron-core's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_memory.spec import ParallelSpec, SpecError
from bridge_memory.spec.ranks import rank_of_stage, stage_of_rank


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_ranks_stage_is_megatron_cores(data) -> None:
    """Against ``RankGenerator``: the pipeline group of a rank lists its stages in order."""
    pytest.importorskip("megatron.core")
    from megatron.core.parallel_state import RankGenerator

    tp, pp, cp, dp = (data.draw(st.sampled_from([1, 2, 3])) for _ in range(4))
    before = data.draw(st.booleans())
    order = "tp-cp-ep-pp-dp" if before else "tp-cp-ep-dp-pp"
    parallel = ParallelSpec(
        world_size=tp * pp * cp * dp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        context_parallel_size=cp, sequence_parallel=False,
    )
    for group in RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order).get_ranks("pp"):
        assert [stage_of_rank(parallel, rank, pp_before_dp=before) for rank in group] == list(range(pp))


def test_a_stages_first_rank_is_on_it_and_the_one_before_is_not() -> None:
    """64 ranks over 4 stages: 16 in a row each."""
    parallel = ParallelSpec(world_size=64, tensor_model_parallel_size=4, pipeline_model_parallel_size=4)
    assert [rank_of_stage(parallel, s) for s in range(4)] == [0, 16, 32, 48]
    assert [stage_of_rank(parallel, r) for r in (0, 15, 16, 63)] == [0, 0, 1, 3]


def test_what_is_not_there_is_refused() -> None:
    parallel = ParallelSpec(world_size=8, pipeline_model_parallel_size=2)
    for rank in (-1, 8):
        with pytest.raises(SpecError, match=r"^rank \("):
            stage_of_rank(parallel, rank)
    for stage in (-1, 2):
        with pytest.raises(SpecError, match=r"^stage \("):
            rank_of_stage(parallel, stage)
