"""Tensors that a fully parallel load broadcasts: megatron-core's own exchange, of one rank's tensors and another's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from job_oracle import job
from test_job_loads import QWEN

from bridge_memory.job.megatron.loading import exchanged
from bridge_memory.outside.amount import Range, total
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.spec import ParallelSpec, RunSpec

RUN = RunSpec(model=QWEN, parallel=ParallelSpec(world_size=8, expert_model_parallel_size=4))


def measured(run: RunSpec, *, at_once: bool) -> int:
    """Bytes above the built model while weights are exchanged. ``at_once``: no broadcast is over before the last has
    begun."""
    from megatron.core.dist_checkpointing import exchange_utils
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    with job(run) as real:
        sharded = real._sharded()
        apply_factories(sharded)
        mine = {i: t for i, t in enumerate(nested_values(sharded)) if isinstance(t, ShardedTensor)}
        experts = {i: t for i, t in mine.items() if ".experts." in t.key}
        others = {
            (i, rank): replace(t, data=None) for i, t in experts.items()
            for rank in range(1, run.parallel.ep)
        }  # fmt: skip
        assert mine and (bool(experts) == run.model.has_experts)
        loads = {**dict.fromkeys(mine, 0), **dict.fromkeys(others, 1)}
        needs = {shard: [0, 1] for shard in mine} | {shard: [1, 2] for shard in others}
        held: list[Any] = []

        def broadcast(tensor: torch.Tensor, *, async_op: bool, **more: Any) -> None:
            if at_once and async_op:
                held.append(tensor)

        before = real.tracker.live_bytes
        real.tracker.reset_peak()
        with replaced(torch.distributed, "broadcast", broadcast):
            exchange_utils.exchange_loaded_tensors_broadcast(
                {i: t.data for i, t in mine.items()}, {},
                exchange_utils.ShardDistribution(loads, set(), {**mine, **others}, needs), None,
            )  # fmt: skip
        peak: int = real.tracker.peak().bytes
    return peak - before


def predicted(run: RunSpec) -> Range:
    return total(exchanged(run, 0))


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
def test_tensors_of_other_ranks_experts_are_received_and_dropped(at_once: bool) -> None:
    least, most = predicted(RUN.with_fields(ckpt_fully_parallel_load=True))
    assert 0 < least < most
    assert measured(RUN, at_once=at_once) == pytest.approx(most if at_once else least, rel=0.01)


def test_where_each_expert_is_on_one_rank_nothing_is_exchanged() -> None:
    run = RUN.with_fields(ckpt_fully_parallel_load=True, world_size=4)
    assert predicted(run) == Range(0, 0)


def test_tensors_of_a_dense_model_are_received_in_place() -> None:
    from test_job_loads import LLAMA

    run = RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=2))
    assert measured(run, at_once=True) == 0
    assert predicted(run.with_fields(ckpt_fully_parallel_load=True)) == Range(0, 0)
