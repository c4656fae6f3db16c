"""Families that transformers trains and Megatron does not: parameters of their published sizes, and configs that are
refused in a line."""

from __future__ import annotations

from typing import Any

import hf_parameters
import pytest

from bridge_memory import SpecError
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers import model_from_hf_config

#: The defaults of transformers' config classes, which name these checkpoints: moonshotai/Kimi-Linear-48B-A3B-Instruct
#: (under the keys of its published config), ai21labs/Jamba-v0.1, meituan-longcat/LongCat-Flash-Chat; and AFMoE's.
KIMI: dict[str, Any] = {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "intermediate_size": 9216,
    "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
    "num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "mla_use_nope": True, "model_max_length": 1048576, "tie_word_embeddings": False,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": [5, 9, 13, 17, 21, 25],
        "kda_layers": [i for i in range(1, 28) if i not in (5, 9, 13, 17, 21, 25)],
    },
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_experts": 16,
    "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 8,
    "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256,
    "tie_word_embeddings": False,
}  # fmt: skip
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash", "vocab_size": 131072, "hidden_size": 6144, "num_layers": 28,
    "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512,
    "zero_expert_num": 256, "moe_topk": 12, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
AFMOE: dict[str, Any] = {
    "model_type": "afmoe", "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 1408, "num_hidden_layers": 32, "num_dense_layers": 1, "num_attention_heads": 16,
    "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 6, "num_shared_experts": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "counted"),
    [(KIMI, 49_133_074_464), (JAMBA, 51_570_323_328), (LONGCAT, 560_664_958_976), (AFMOE, 19_232_600_000)],
    ids=lambda one: one["model_type"] if isinstance(one, dict) else "",
)
def test_parameters_are_those_of_transformers(config: dict[str, Any], counted: int) -> None:
    """``counted``: parameters of transformers' model on the meta device (5.24, 5.12, 4.57 and 5.12). The first is
    called 48B, and the report of LongCat-Flash says 560 billion."""
    model = model_from_hf_config(config, "a model")
    assert model_parameters(model)[0] == counted == hf_parameters.main_model(model)


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (KIMI, {"linear_attn_config": {"full_attn_layers": [5], "kda_layers": [1]}}, "names layer 2 neither"),
        (KIMI, {"linear_attn_config": {"full_attn_layers": [28], "kda_layers": []}}, "holds 28; the layers"),
        (KIMI, {"linear_attn_config": {"full_attn_layers": 5, "kda_layers": []}}, "must list layers"),
        (KIMI, {"linear_attn_config": {"head_dim": "128"}}, "linear_attn_config.head_dim is '128'"),
        (KIMI, {"layer_types": ["linear_attention"]}, "layer_types has 1 entries for num_hidden_layers 27"),
        (KIMI, {"attention_bias": True}, "attention_bias is true"),
        (JAMBA, {"attn_layer_offset": 8}, "attn_layer_offset \\(8\\) is not smaller"),
        (JAMBA, {"num_experts_per_tok": 17}, "num_experts_per_tok \\(17\\) is larger"),
        (JAMBA, {"mamba_dt_rank": "automatic"}, "mamba_dt_rank is 'automatic'"),
        (LONGCAT, {"zero_expert_type": "copy"}, "zero_expert_type is copy"),
        (LONGCAT, {"num_hidden_layers": 29}, "num_hidden_layers \\(29\\) is not twice num_layers \\(28\\)"),
        (LONGCAT, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (AFMOE, {"num_dense_layers": 33}, "num_dense_layers \\(33\\) is larger"),
        (AFMOE, {"layer_types": ["full_attention"] * 31}, "layer_types has 31 entries for num_hidden_layers 32"),
        (AFMOE, {"layer_types": [["full_attention"]] * 32}, "layer_types holds \\['full_attention'\\]"),
    ],
)  # fmt: skip
def test_what_fits_no_class_is_refused_in_a_line(config: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        model_from_hf_config({**config, **changes}, "a model")
    assert "\n" not in str(caught.value)


def test_a_model_without_experts_in_any_layer_is_read() -> None:
    model = model_from_hf_config({**AFMOE, "num_dense_layers": 32}, "a model")
    assert not model.has_experts
