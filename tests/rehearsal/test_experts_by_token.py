"""A router that looks the experts of a token up in a table (DeepSeek-V4's first layers), in megatron-core's own layer:
in the place of its top-k run the operations of Megatron-LM's ``router.py: TopKRouter._hash_routing``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core.transformer.moe import router

from bridge_memory.inventory.layer import layer_block
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
)
from bridge_memory.tapes.context import context_of

TOKENS, WORDS, EXPERTS, K = 2048, 32000, 64, 6


def by_token(logits: Any, topk: int, *_: Any, score_function: str, scaling_factor: Any = None, **__: Any) -> Any:
    scores = logits.float()
    scores = torch.sigmoid(scores) if score_function == "sigmoid" else torch.nn.functional.softplus(scores).sqrt()
    scores = scores.type_as(logits)
    ids = torch.empty((logits.shape[0],), dtype=torch.int64, device=logits.device)
    chosen = torch.empty((WORDS, topk), dtype=torch.int32, device=logits.device)[ids].long()
    shares = scores.gather(1, chosen)
    shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
    shares = shares * (scaling_factor or 1.5)
    probs = torch.zeros_like(logits).scatter(1, chosen, shares)
    return probs, torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_experts_by_token(score: str) -> None:
    if score == "sqrtsoftplus" and (installed_release() or (0, 0)) < (0, 19):
        pytest.skip("the router of megatron-core 0.19 has it")
    ffn = MoESpec(
        EXPERTS, K, 512, router_score_function=score, router_load_balancing_type="none", experts_by_token=True,
    )
    layer = LayerSpec(AttentionSpec(8, 2, 64), ffn)
    run = RunSpec(
        model=ModelSpec("two layers", "test", 512, WORDS, (layer,) * 2), parallel=ParallelSpec(),
        batch=BatchSpec(seq_length=TOKENS),
        implementation=ImplementationSpec(
            transformer_impl="local", moe_grouped_gemm=False, moe_router_dtype="fp32",
            megatron_core=installed_release(),
        ),
    )
    learned = replace(layer, ffn=replace(ffn, experts_by_token=False))
    assert layer_block(layer, context_of(run)).cost.retained != layer_block(learned, context_of(run)).cost.retained
    with replaced(router, "topk_routing_with_score_function", by_token):
        found = compare_layer(run, 1)
    explained = "\n" + "\n".join(found.lines())
    assert abs(found.saved_error) <= 0.0002, explained
    assert abs(found.forward_error) <= 0.005, explained
    assert abs(found.backward_error) <= 0.005, explained
