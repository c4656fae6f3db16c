"""Our reading of a config and Megatron Bridge's (``AutoBridge.from_hf_config``) agree, field by field.

Where the two differ, the field and the reason stand in DIFFERENCES; a difference that is gone fails the test too.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from bridge_stubs import require_bridge
from test_families_by_hand import MIMO, STEP

from bridge_memory.readers import model_from_hf_config
from bridge_memory.readers.bridge_mapping import model_from_bridge
from bridge_memory.readers.resolve import model_from_config
from bridge_memory.spec import SpecError

SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
HEADS = {"head_dim": 16}
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = SIZES | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "aux_loss_alpha": 0.001,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
GELU = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
SHARED = {"num_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}

#: Architecture -> the config.
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **HEADS, **SIZES},
    "Qwen2ForCausalLM": {"model_type": "qwen2", **SIZES},
    "Qwen3ForCausalLM": {"model_type": "qwen3", **HEADS, **SIZES},
    "Qwen3MoeForCausalLM": {"model_type": "qwen3_moe", **HEADS, **EXPERTS},
    "Qwen3NextForCausalLM": {
        "model_type": "qwen3_next", **HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 48,
    },
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5_text", **HEADS, **SIZES, **DELTA, "mtp_num_hidden_layers": 1},
    "Qwen3_5MoeForCausalLM": {
        "model_type": "qwen3_5_moe_text", **HEADS, **EXPERTS, **DELTA, "shared_expert_intermediate_size": 48,
        "mtp_num_hidden_layers": 1,
    },
    "MistralForCausalLM": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "Gemma2ForCausalLM": {"model_type": "gemma2", **HEADS, **SIZES, **GELU, "sliding_window": 8},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", **HEADS, **SIZES, **GELU, "sliding_window": 8},
    "GemmaForCausalLM": {"model_type": "gemma", **HEADS, **SIZES, **GELU},
    "NemotronForCausalLM": {"model_type": "nemotron", **SIZES, "hidden_act": "relu2"},
    "OlmoeForCausalLM": {
        "model_type": "olmoe", **{k: v for k, v in EXPERTS.items() if k != "moe_intermediate_size"}
    },
    "GptOssForCausalLM": {"model_type": "gpt_oss", **HEADS, **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Exaone4ForCausalLM": {"model_type": "exaone4", **SIZES, **WINDOWS},
    "ExaoneMoeForCausalLM": {
        "model_type": "exaone_moe", **HEADS, **EXPERTS, **SHARED, **WINDOWS, "n_group": 1, "topk_group": 1,
    },
    "Glm4MoeForCausalLM": {
        "model_type": "glm4_moe", **HEADS, **ROUTED, "use_qk_norm": True, "num_nextn_predict_layers": 1,
    },
    "Glm4MoeLiteForCausalLM": {"model_type": "glm4_moe_lite", **ROUTED, **LATENT, "num_nextn_predict_layers": 1},
    "DeepseekV2ForCausalLM": {"model_type": "deepseek_v2", **ROUTED, **LATENT},
    "DeepseekV3ForCausalLM": {"model_type": "deepseek_v3", **ROUTED, **LATENT, "num_nextn_predict_layers": 1},
    "KimiK2ForCausalLM": {"model_type": "kimi_k2", **ROUTED, **LATENT, "scoring_func": "sigmoid"},
    "HYV3ForCausalLM": {"model_type": "hy_v3", **HEADS, **EXPERTS, **SHARED, "router_scaling_factor": 2.0},
    "Ernie4_5_MoeForCausalLM": {
        "model_type": "ernie4_5_moe", **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "num_nextn_predict_layers": 1,
    },
    "BailingMoeV2ForCausalLM": {
        "model_type": "bailing_moe_v2", **HEADS, **EXPERTS, **SHARED, "n_group": 2, "topk_group": 1,
        "use_qk_norm": True,
    },
    "SarvamMoEForCausalLM": {"model_type": "sarvam_moe", **HEADS, **EXPERTS, **SHARED, "num_nextn_predict_layers": 0},
    "SarvamMLAForCausalLM": {
        "model_type": "sarvam_mla", **EXPERTS, **SHARED, **LATENT, "q_lora_rank": None, "num_nextn_predict_layers": 0,
    },
    "MiniMaxM2ForCausalLM": {
        "model_type": "minimax_m2", **HEADS, **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", **SIZES}, "vision_config": {},
        "tie_word_embeddings": True,
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text", **SIZES, **HEADS}, "vision_config": {},
        "tie_word_embeddings": True,
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "model_type": "qwen3_vl_moe", "text_config": {"model_type": "qwen3_vl_moe_text", **EXPERTS, **HEADS},
        "vision_config": {}, "tie_word_embeddings": False,
    },
    "Qwen3_5ForConditionalGeneration": {
        "model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **SIZES, **HEADS, **DELTA},
        "vision_config": {}, "tie_word_embeddings": True,
    },
    "Qwen3_5MoeForConditionalGeneration": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text", **EXPERTS, **HEADS, **DELTA, "shared_expert_intermediate_size": 48,
        },
        "vision_config": {}, "tie_word_embeddings": False,
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **SIZES, **HEADS, **GELU, "sliding_window": 8},
        "vision_config": {}, "tie_word_embeddings": True,
    },
    "Mistral3ForConditionalGeneration": {
        "model_type": "mistral3", "text_config": {"model_type": "ministral3", **SIZES, **HEADS}, "vision_config": {},
    },
    "Glm4vMoeForConditionalGeneration": {
        "model_type": "glm4v_moe",
        "text_config": {
            "model_type": "glm4v_moe_text", **ROUTED, **HEADS, "use_qk_norm": True, "attention_bias": True,
            "num_nextn_predict_layers": 1,
        },
        "vision_config": {},
    },
    "Qwen2AudioForConditionalGeneration": {
        "model_type": "qwen2_audio", "text_config": {"model_type": "qwen2", **SIZES}, "audio_config": {},
    },
    "Exaone4_5_ForConditionalGeneration": {
        "model_type": "exaone4_5", "text_config": {"model_type": "exaone4", **SIZES, **HEADS, **WINDOWS},
        "vision_config": {}, "tie_word_embeddings": False,
    },
    "Step3p5ForCausalLM": {**STEP, "tie_word_embeddings": False},
    "MiMoV2FlashForCausalLM": {
        **MIMO, "tie_word_embeddings": False, "swa_rope_theta": 1e4, "rope_theta": 5e6, "layernorm_epsilon": 1e-5,
        "attention_value_scale": 0.7, "hidden_act": "silu", "attention_dropout": 0.0,
    },
    "FalconH1ForCausalLM": {
        "model_type": "falcon_h1", **HEADS, **SIZES, "mamba_n_heads": 8, "mamba_d_ssm": 192, "mamba_d_head": 24,
        "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_rms_norm": True, "key_multiplier": 0.5,
    },
    "Gemma4ForCausalLM": {
        "model_type": "gemma4_text", **HEADS, **SIZES, **GELU, "num_kv_shared_layers": 2, "sliding_window": 8,
        "final_logit_softcapping": 30.0, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "DeepseekV4ForCausalLM": {
        "model_type": "deepseek_v4", **{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "head_dim": 64,
        "num_key_value_heads": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "q_lora_rank": 24, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 8, "sliding_window": 8, "rope_scaling": {"factor": 16, "original_max_position_embeddings": 64},
    },
    "MiMoForCausalLM": {"model_type": "mimo", **SIZES, "attention_bias": True, "num_nextn_predict_layers": 1},
}  # fmt: skip

#: Architecture -> {field: why Megatron Bridge's provider reads otherwise}.
WINDOW = "megatron-core counts the tokens before a query, transformers the query too"
PUBLISHED = "a provider says nothing of what transformers counts"
DIFFERENCES: dict[str, dict[str, str]] = {
    "Gemma2ForCausalLM": {"layers.mixer.window_size": WINDOW},
    "GptOssForCausalLM": {"layers.mixer.window_size": WINDOW},
    "Exaone4ForCausalLM": {
        "layers.mixer.window_size": "exaone4_bridge.py sets none", "layers.mixer.rotary": "it rotates in every layer",
    },
    "ExaoneMoeForCausalLM": {"layers.mixer.window_size": WINDOW},
    "Qwen3VLMoeForConditionalGeneration": {"encoders.frozen": "its provider freezes them by default"},
    "KimiK2ForCausalLM": {"max_position_embeddings": "kimi_bridge.py sets 4096"},
    "Exaone4_5_ForConditionalGeneration": {"layers.mixer.window_size": WINDOW},
    "Glm4vMoeForConditionalGeneration": {
        "layers.ffn.router_num_groups": "glm_45v_bridge.py reads no n_group",
        "layers.ffn.router_group_topk": "as above",
    },
    "MiMoV2FlashForCausalLM": {"hidden_dropout": "mimo_v2_flash_bridge.py leaves megatron-core's default"},
    "DeepseekV4ForCausalLM": {"max_position_embeddings": "deepseek_v4_bridge.py sets 4096"},
    "DeepseekV2ForCausalLM": {"max_position_embeddings": "deepseek_v2_bridge.py sets 4096"},
    "Ernie4_5_MoeForCausalLM": {"layers.ffn.expert_bias_in_published_count": PUBLISHED},
    "MiniMaxM2ForCausalLM": {
        "layers.ffn.expert_bias_in_published_count": PUBLISHED,
        "layers.mixer.qk_layernorm": "norms over all heads are in minimax_m2_provider.py's layer spec",
    },
}
#: Of the source, not of the model.
PROVENANCE = ("name", "model_type", "assumptions", "not_modelled")


def differences(ours: Any, theirs: Any, path: str = "") -> set[str]:
    if type(ours) is not type(theirs):
        return {path}
    if is_dataclass(ours):
        found: set[str] = set()
        for field in fields(ours):
            if field.compare and field.name not in PROVENANCE:
                inner = f"{path}.{field.name}".removeprefix(".")
                found |= differences(getattr(ours, field.name), getattr(theirs, field.name), inner)
        return found
    if isinstance(ours, tuple) and len(ours) == len(theirs):
        return set().union(*(differences(a, b, path) for a, b in zip(ours, theirs, strict=True)))
    return set() if ours == theirs else {path}


def encoders_written_out(config: dict[str, Any]) -> dict[str, Any]:
    """With the sizes of towers, which an empty config leaves to the defaults of its class."""
    from transformers import AutoConfig

    for key in ("vision_config", "audio_config"):
        if config.get(key) == {}:
            whole = AutoConfig.for_model(**config)
            config = {**config, key: getattr(whole, key).to_dict()}
    return config


@pytest.mark.parametrize("architecture", CONFIGS)
def test_both_read_the_same_model(architecture: str) -> None:
    bridge = require_bridge()
    if tuple(map(int, bridge.__version__.split(".")[:2])) < (0, 6):
        pytest.skip("what differs is known of Megatron Bridge 0.6")
    from megatron.bridge import AutoBridge

    if architecture not in AutoBridge.list_supported_models():
        pytest.skip(f"this Megatron Bridge has no bridge for {architecture}")
    config = encoders_written_out({**CONFIGS[architecture], "architectures": [architecture]})
    ours = model_from_hf_config(config, architecture)
    theirs = model_from_bridge(config, architecture)
    assert differences(ours, theirs) == set(DIFFERENCES.get(architecture, {}))


def test_an_architecture_without_a_bridge_is_one_line() -> None:
    require_bridge()
    with pytest.raises(SpecError, match=r"no bridge for \['PhiForCausalLM'\]; use --mapping builtin"):
        model_from_bridge({"model_type": "phi", "architectures": ["PhiForCausalLM"]}, "phi")


def test_a_config_without_architectures_is_one_line() -> None:
    require_bridge()
    with pytest.raises(SpecError, match="architectures is missing"):
        model_from_bridge({"model_type": "llama"}, "llama")


def test_without_megatron_bridge_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(SpecError, match=r"needs megatron-bridge .*; pip install megatron-bridge") as caught:
        model_from_config(CONFIGS["LlamaForCausalLM"], "llama", "bridge")
    assert "\n" not in str(caught.value)
