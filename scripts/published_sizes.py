"""Sizes of models that Megatron Bridge's recipes name and whose config is not among the presets, each with its source.

``bridge_recipes.py`` puts them over the defaults of the model's class in transformers. ``billions`` is how many
parameters the model's card or report gives it; tests/readers/test_published_sizes.py counts transformers' own modules.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """Sizes of one model."""

    #: Part of the config ("" is its top) -> fields. The name of a preset stands for its text model's sizes.
    fields: dict[str, Any]
    source: str
    #: Parameters, encoders included; None where the name or the card does not say.
    billions: float | None = None
    #: The sizes of the encoder are the class's defaults, which may be another model's.
    encoder_unknown: bool = False


_BRIDGE_OLD = "megatron-bridge 0.3.1"
_CLASS = "the defaults of transformers' class, which are this model's"
#: The vision encoder of Gemma 3 (arXiv:2503.19786, section 2.1): SigLIP So400m at 896 x 896.
_SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 896, "patch_size": 14,
}  # fmt: skip
_GEMMA3 = f"{_BRIDGE_OLD} models/gemma/gemma3_provider.py: Gemma3ModelProvider{{}}, arXiv:2503.19786"


def _qwen_vision(out: int, intermediate: int) -> dict[str, Any]:
    """Qwen2.5-VL's encoder (arXiv:2502.13923, table 1), with the width of the language model."""
    return {"hidden_size": 1280, "intermediate_size": intermediate, "out_hidden_size": out}


def _dense_qwen3_5(layers: int, h: int, f: int, heads: int, groups: int, *, value_heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "hidden_size": h,
        "intermediate_size": f, "num_attention_heads": heads, "num_key_value_heads": groups,
        "linear_num_value_heads": value_heads, "vocab_size": 248320,
    }


def _ministral(layers: int, h: int, f: int, *, tied: bool = False) -> dict[str, dict[str, Any]]:
    text = {
        "num_hidden_layers": layers, "hidden_size": h, "intermediate_size": f, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": tied,
    }
    return {"text_config": text, "": {"tie_word_embeddings": tied}}


_MINISTRAL = "megatron-bridge 0.6.2 models/ministral3/ministral3_provider.py: Ministral3ModelProvider{}"
_SLIME = "slime's and miles' scripts/models/qwen3.5-{}.sh"

#: Part of the hub name -> its sizes. The first part that the name contains counts.
PUBLISHED_SIZES: dict[str, Published] = {
    "gemma-2-27b": Published(
        {"": {
            "num_hidden_layers": 46, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
            "num_key_value_heads": 16, "head_dim": 128, "layer_types": ["sliding_attention", "full_attention"],
        }},
        f"{_BRIDGE_OLD} models/gemma/gemma2_provider.py: Gemma2ModelProvider27B", 27.2,
    ),
    "gemma-3-1b": Published(
        {"": {
            "num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
        }},
        _GEMMA3.format("1B"), 1.0,
    ),
    "gemma-3-4b": Published(
        {"text_config": {
            "num_hidden_layers": 34, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 1024,
        }, "vision_config": _SIGLIP},
        _GEMMA3.format("4B"), 4.3,
    ),
    "gemma-3-12b": Published(
        {"text_config": "google/gemma-3-12b-pt", "vision_config": _SIGLIP}, "the preset google/gemma-3-12b-pt", 12.2,
    ),
    "gemma-3-27b": Published(
        {"text_config": "google/gemma-3-27b-pt", "vision_config": _SIGLIP}, "the preset google/gemma-3-27b-pt", 27.4,
    ),
    "Qwen2-0.5B": Published(
        {"": {
            "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        }},
        f"{_BRIDGE_OLD} models/qwen/qwen_provider.py: Qwen2ModelProvider500M", 0.49,
    ),
    "Qwen2-1.5B": Published(
        {"": {
            "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
            "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
        }},
        f"{_BRIDGE_OLD} models/qwen/qwen_provider.py: Qwen2ModelProvider1P5B", 1.54,
    ),
    "Qwen2.5-VL-3B": Published(
        {"text_config": "Qwen/Qwen2.5-3B", "vision_config": _qwen_vision(2048, 3420),
         "": {"tie_word_embeddings": True}},
        "the preset Qwen/Qwen2.5-3B, arXiv:2502.13923", 3.75,
    ),
    "Qwen2.5-VL-7B": Published(
        {"text_config": "Qwen/Qwen2.5-7B", "vision_config": _qwen_vision(3584, 3420)},
        "the preset Qwen/Qwen2.5-7B, arXiv:2502.13923", 8.29,
    ),
    "Qwen2.5-VL-32B": Published(
        {"text_config": "Qwen/Qwen2.5-32B", "vision_config": _qwen_vision(5120, 3456)},
        "the preset Qwen/Qwen2.5-32B, arXiv:2502.13923", 33.5,
    ),
    "Qwen2.5-VL-72B": Published(
        {"text_config": "Qwen/Qwen2.5-72B", "vision_config": _qwen_vision(8192, 3456)},
        "the preset Qwen/Qwen2.5-72B, arXiv:2502.13923", 73.4,
    ),
    "Qwen3-VL-8B": Published(
        {"text_config": "Qwen/Qwen3-8B", "vision_config": {"out_hidden_size": 4096}},
        "the preset Qwen/Qwen3-8B; the encoder is the class's, whose width is the language model's", 8.77,
    ),
    "Qwen2-Audio-7B": Published(
        {"text_config": {
            "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 156032,
        }},
        "arXiv:2407.10759, section 2: Qwen-7B (arXiv:2309.16609, table 1) with the tokenizer of Qwen2-Audio", 8.4,
    ),
    "Qwen3.5-0.8B": Published(
        {"text_config": _dense_qwen3_5(24, 1024, 3584, 8, 2, value_heads=16) | {"tie_word_embeddings": True},
         "vision_config": {"out_hidden_size": 1024}, "": {"tie_word_embeddings": True}},
        _SLIME.format("0.8B"), encoder_unknown=True,
    ),
    "Qwen3.5-2B": Published(
        {"text_config": _dense_qwen3_5(24, 2048, 6144, 8, 2, value_heads=16) | {"tie_word_embeddings": True},
         "vision_config": {"out_hidden_size": 2048}, "": {"tie_word_embeddings": True}},
        _SLIME.format("2B"), encoder_unknown=True,
    ),
    "Qwen3.5-4B": Published(
        {"text_config": _dense_qwen3_5(32, 2560, 9216, 16, 4, value_heads=32) | {"tie_word_embeddings": True},
         "vision_config": {"out_hidden_size": 2560}, "": {"tie_word_embeddings": True}},
        _SLIME.format("4B"), encoder_unknown=True,
    ),
    "Qwen3.5-9B": Published({"vision_config": {"out_hidden_size": 4096}}, _CLASS, 9.4),
    "Qwen3.5-27B": Published(
        {"text_config": _dense_qwen3_5(64, 5120, 17408, 24, 4, value_heads=48),
         "vision_config": {"out_hidden_size": 5120}},
        _SLIME.format("27B"), 27.4,
    ),
    "Qwen3.5-35B-A3B": Published({"vision_config": {"out_hidden_size": 2048}}, _CLASS, 35.1),
    "Qwen3.5-122B-A10B": Published(
        {"text_config": {
            "num_hidden_layers": 48, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 2, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64, "vocab_size": 248320,
        }, "vision_config": {"out_hidden_size": 3072}},
        _SLIME.format("122B-A10B"), 122.0,
    ),
    "EXAONE-4.0-1.2B": Published(
        {"": {
            "num_hidden_layers": 30, "layer_types": ["full_attention"], "hidden_size": 2048,
            "intermediate_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "vocab_size": 102400, "tie_word_embeddings": True, "sliding_window": None, "sliding_window_pattern": None,
        }},
        "arXiv:2507.11407, table 1", 1.28,
    ),
    "EXAONE-4.5-33B": Published(
        {"text_config": {
            "num_hidden_layers": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 153600, "sliding_window": 4096,
        }, "vision_config": {
            "depth": 28, "hidden_size": 2048, "intermediate_size": 5120, "num_heads": 32, "num_key_value_heads": 8,
            "out_hidden_size": 5120, "fullatt_block_indexes": [6, 13, 20, 27], "window_size": 112,
        }},
        "TensorRT-LLM's tests/unittest/_torch/modeling/test_modeling_exaone4_5.py", 34.0,  # as the hub counts them
    ),
    "Kimi-K2.5": Published(
        {"vision_config": {
            "vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_hidden_layers": 27,
            "vt_num_attention_heads": 16, "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
            "merge_kernel_size": [2, 2], "text_hidden_size": 7168,
        }},
        "the preset moonshotai/Kimi-K2-Instruct; its encoder: transformers 5.24 "
        "models/kimi_k25/configuration_kimi_k25.py, the defaults of its class",
    ),
    "K-EXAONE-236B-A23B": Published(
        {"": {
            "num_hidden_layers": 48, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 47, "hidden_size": 6144, "intermediate_size": 18432,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 2048, "vocab_size": 153600,
            "sliding_window": 128,
        }},
        "arXiv:2601.01739, table 1", 236.0,
    ),
    "GLM-4.5V": Published(
        {"text_config": "zai-org/GLM-4.5-Air"},
        "the preset zai-org/GLM-4.5-Air; the encoder is the class's, which is written for this checkpoint", 107.0,
    ),
    "GLM-5.2": Published(
        {}, "the defaults of transformers' class, GLM-5's; Bridge's layouts of GLM-5.2 have its 78 layers", 744.0,
    ),
    "DeepSeek-V4-Flash": Published({}, _CLASS, 284.0),
    "DeepSeek-V4-Pro": Published(
        {"": {
            "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536,
            "o_groups": 16, "n_routed_experts": 384, "moe_intermediate_size": 3072, "index_topk": 1024,
            "layer_types": ["heavily_compressed_attention"] * 2 + [
                "heavily_compressed_attention" if i % 2 else "compressed_sparse_attention" for i in range(59)
            ],
            "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 58,
        }},
        "DeepSeek-V4's model card and report, arXiv:2606.19348", 1600.0,
    ),
    "Ministral-3-3B": Published(_ministral(26, 3072, 9216, tied=True), _MINISTRAL.format("3B"), 3.85),
    "Ministral-3-8B": Published(_ministral(34, 4096, 14336), _MINISTRAL.format("8B"), 8.9),
    "Ministral-3-14B": Published(_ministral(40, 5120, 16384), _MINISTRAL.format("14B"), 13.9),
    "MiniMax-M3": Published(
        {"text_config": {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57}},
        "the defaults of transformers' class, with as many dense layers at the beginning as its 428 B parameters leave",
        428.0,
    ),
    "Nano-12B-v2-VL": Published({}, "megatron-bridge 0.6.2's provider, which has all sizes but the vocabulary"),
}


def published(name: str) -> Published | None:
    """The sizes of a hub name; None: they are not at hand."""
    return next((found for part, found in PUBLISHED_SIZES.items() if part in name), None)
