"""Tokens of a mixture of experts on one rank: capacity, imbalance, who gathers them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb
from statistics import fmean

import pytest

from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.megatron.moe import ranks_per_token
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ImplementationSpec, MoESpec, ParallelSpec, RunSpec
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.recorder import Scratch

#: h 2048, 128 experts of width 768, 8 a token.
QWEN = resolve_model("Qwen/Qwen3-30B-A3B")
TOKENS = 1000


def layer(**impl: object) -> BlockCost:
    run = RunSpec(model=QWEN, batch=BatchSpec(seq_length=TOKENS), implementation=ImplementationSpec(**impl))
    return layer_block(QWEN.layers[0], context_of(run)).cost


def received(cost: BlockCost) -> int:
    """Tokens at the experts, from what the activation keeps: [R, 2 x 768] in bf16."""
    return sum(t.bytes for t in cost.tensors if t.name == "experts fc1 output") // (2 * 2 * 768)


def test_balanced_tokens_are_topk_times_the_sequence() -> None:
    assert received(layer()) == 8 * TOKENS
    assert received(layer(moe_imbalance=1.5)) == 12 * TOKENS


def test_a_capacity_bounds_what_imbalance_brings() -> None:
    """1000 x 8 / 128 x 1.25 = 78.125: at most 79 tokens an expert, 10112 in all, whatever the imbalance."""
    assert received(layer(moe_expert_capacity_factor=1.25)) == 8000
    assert received(layer(moe_expert_capacity_factor=1.25, moe_imbalance=1.2)) == 9600
    assert received(layer(moe_expert_capacity_factor=1.25, moe_imbalance=3.0)) == 79 * 128


def test_a_capacity_below_one_drops_tokens() -> None:
    """1000 x 8 / 128 x 0.5 = 31.25: 32 tokens an expert."""
    assert received(layer(moe_expert_capacity_factor=0.5)) == 32 * 128


def test_padded_experts_get_their_capacity_and_no_token_more() -> None:
    for imbalance in (1.0, 2.0):
        cost = layer(moe_expert_capacity_factor=1.25, moe_pad_expert_input_to_capacity=True, moe_imbalance=imbalance)
        assert received(cost) == 79 * 128


def test_the_allgather_dispatcher_gathers_over_the_experts_own_group() -> None:
    """token_dispatcher.py gathers over pg_collection.tp_ep: ETP x EP ranks, not TP x EP. With tp 4, ep 4 and etp 1
    that is 4 x 250 tokens of the 1000, in a buffer of 4 x 250 x 2048 x 2 bytes that stays."""
    parallel = ParallelSpec(
        world_size=4, tensor_model_parallel_size=4, expert_model_parallel_size=4, expert_tensor_parallel_size=1
    )
    run = RunSpec(model=QWEN, parallel=parallel, batch=BatchSpec(seq_length=TOKENS),
                  implementation=ImplementationSpec(moe_token_dispatcher_type="allgather"))
    persistent = layer_block(QWEN.layers[0], context_of(run)).persistent
    assert persistent[Scratch.MPU, ()] == 1000 * 2048 * 2
    whole = replace(parallel, world_size=16, expert_tensor_parallel_size=4)
    persistent = layer_block(QWEN.layers[0], context_of(replace(run, parallel=whole))).persistent
    assert persistent[Scratch.MPU, ()] == 4 * 1000 * 2048 * 2


def test_deepep_keeps_a_place_on_every_node_and_rank_of_it() -> None:
    """128 experts on 16 ranks of two nodes, 8 per token of 4096: DeepEP ``csrc/deep_ep.cpp: internode_dispatch``:
    is_token_in_rank [N, 16] bool, send_rdma_head [N, 2] int32, send_nvl_head [tokens that pass, 8] int32, recv_src_meta
    of 8 bytes. A token goes to a node unless all its experts are on the other, to a rank likewise."""
    run = RunSpec(
        model=resolve_model("Qwen/Qwen3-30B-A3B"),
        parallel=ParallelSpec(world_size=16, expert_model_parallel_size=16),
        batch=BatchSpec(seq_length=4096),
        implementation=ImplementationSpec(moe_token_dispatcher_type="flex", moe_router_dtype="fp32"),
    )
    cost = layer_block(run.model.layers[0], context_of(run)).cost

    def reached(parts: int) -> int:
        return round(4096 * parts * (1 - comb(128 - 128 // parts, 8) / comb(128, 8)))

    (handle,) = (t.bytes for t in cost.tensors if t.name == "DeepEP's handle")
    assert handle == 4096 * 16 + 4 * 4096 * 2 + 4 * 8 * reached(2) + 8 * reached(16)


@pytest.mark.parametrize("selected", (None, 1, 2, 3))
@pytest.mark.parametrize("ep", (1, 2, 4, 8, 16))
def test_ranks_of_a_token_by_every_choice(selected: int | None, ep: int) -> None:
    """16 experts in 4 groups, of which some are selected, and 3 of their experts: each choice is as likely."""
    spec = MoESpec(16, 3, 64, router_num_groups=selected and 4, router_group_topk=selected)
    chosen = [[e for e in range(16) if e // 4 in groups] for groups in combinations(range(4), selected or 4)]
    hit = fmean(len({e * ep // 16 for e in experts}) for of in chosen for experts in combinations(of, 3))
    assert ranks_per_token(spec, ep) == pytest.approx(hit)
