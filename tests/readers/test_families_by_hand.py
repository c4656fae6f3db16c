"""Families that transformers has no class of: their parameters counted by hand, and models that are refused by name."""

from __future__ import annotations

from typing import Any

import hf_parameters
import pytest

from bridge_memory import BatchSpec, RunSpec, peaks
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers import model_from_hf_config
from bridge_memory.spec import AttentionSpec, MoESpec, SpecError

STEP: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "head_dim": 16,
    "use_qk_norm": True,
    "use_head_wise_attn_gate": True,
    "layer_types": ["full_attention", *["sliding_attention"] * 3, "sliding_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16,
    },
    "sliding_window": 32,
    "moe_layers_enum": "2,3",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 48,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 128,
}  # fmt: skip

MIMO: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "hybrid_layer_pattern": [0, 1, 1],
    "sliding_window_size": 32,
    "add_swa_attention_sink_bias": True,
    "moe_layer_freq": [0, 1, 1],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "scoring_func": "sigmoid",
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 128,
}


def test_step_has_other_heads_where_it_slides() -> None:
    """Full: q, gate 64 + 64, k, v 32 + 32 from 64, and 64 back. Sliding: 96 + 96 + 32 + 32, and 96 back. Two norms of
    16 for q and k each layer, two of 64 around. Dense MLP 3 x 64 x 160; experts 4 x 3 x 64 x 32, the shared one
    3 x 64 x 48 and a router of 4 x 64."""
    model = model_from_hf_config(STEP, "step")
    full = 64 * (64 + 64 + 32 + 32) + 64 * 64 + 2 * 16
    sliding = 64 * (96 + 96 + 32 + 32) + 96 * 64 + 2 * 16
    dense, sparse = 3 * 64 * 160, 4 * 3 * 64 * 32 + 3 * 64 * 48 + 4 * 64
    by_hand = 2 * 512 * 64 + 64 + full + 3 * sliding + 2 * dense + 2 * sparse + 4 * 2 * 64
    assert hf_parameters.main_model(model) == by_hand
    run = RunSpec(model=model, batch=BatchSpec(seq_length=64))
    assert model_parameters(model) == (by_hand, 2 * 64 * 64 + 3 * 64 + sliding + dense + 2 * 64)
    assert peaks(run)
    moe = model.layers[3].ffn
    assert isinstance(moe, MoESpec) and moe.router_enable_expert_bias and moe.router_score_function == "sigmoid"


def test_mimo_has_narrower_values_and_more_groups_where_it_slides() -> None:
    """q 4 x 24, k 24 and v 16 a group; 4 x 16 back to 64. Sliding layers have a sink a head."""
    model = model_from_hf_config(MIMO, "mimo")
    full = 64 * (96 + 24 + 16) + 64 * 64
    sliding = 64 * (96 + 2 * 24 + 2 * 16) + 64 * 64 + 4
    dense, sparse = 3 * 64 * 160, 4 * 3 * 64 * 32 + 4 * 64
    by_hand = 2 * 512 * 64 + 64 + full + 2 * sliding + dense + 2 * sparse + 3 * 2 * 64
    assert hf_parameters.main_model(model) == by_hand
    assert model_parameters(model) == (by_hand, 0)
    assert peaks(RunSpec(model=model, batch=BatchSpec(seq_length=64)))
    assert [m.mixer.num_query_groups for m in model.layers if isinstance(m.mixer, AttentionSpec)] == [1, 2, 2]
    assert model.rotary_dim == 12
