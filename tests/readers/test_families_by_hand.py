"""Families that transformers has no class of: their parameters counted by hand, and models that are refused by name."""

from __future__ import annotations

from typing import Any

import hf_parameters
import pytest
from bridge_stubs import require_bridge

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


# ---- every bridge of Megatron Bridge 0.6.2 ----

TEXT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = TEXT | {"head_dim": 16}
EXPERTS = HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = HEADS | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
MLA = {k: v for k, v in ROUTED.items() if k != "head_dim"} | LATENT
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
INDEXER = {"index_n_heads": 4, "index_head_dim": 8}
ERNIE = HEADS | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
HYBRID = {
    "model_type": "nemotron_h", "vocab_size": 512, "hidden_size": 96, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160, "hybrid_override_pattern": "M-*-",
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2,
}  # fmt: skip
NAS = TEXT | {
    "block_configs": [
        {"attention": {"n_heads_in_group": 3, "no_op": False}, "ffn": {"ffn_mult": 1.5, "no_op": False}}
    ] * 4,
}  # fmt: skip


def beside(key: str, model_type: str, text: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A wrapper's config; ``others`` are its other parts, a vision tower where none is given."""
    return {key: {"model_type": model_type, **text}, **(others or {"vision_config": {"hidden_size": 32}})}


#: Architecture that Megatron Bridge has a bridge for -> (model_type of its config.json, the rest of it).
READ: dict[str, tuple[str, dict[str, Any]]] = {
    "BailingMoeV2ForCausalLM": ("bailing_moe_v2", EXPERTS | {"num_shared_experts": 1, "use_qk_norm": True}),
    "DeciLMForCausalLM": ("nemotron-nas", NAS),
    "DeepseekV2ForCausalLM": ("deepseek_v2", MLA),
    "DeepseekV3ForCausalLM": ("deepseek_v3", MLA),
    "Ernie4_5_MoeForCausalLM": ("ernie4_5_moe", ERNIE),
    "Exaone4ForCausalLM": ("exaone4", HEADS),
    "Exaone4_5_ForConditionalGeneration": ("exaone4_5", beside("text_config", "exaone4", HEADS)),
    "ExaoneMoEForCausalLM": ("exaone_moe", EXPERTS),
    "ExaoneMoeForCausalLM": ("exaone_moe", EXPERTS),
    "Gemma2ForCausalLM": ("gemma2", HEADS),
    "Gemma3ForCausalLM": ("gemma3_text", HEADS),
    "Gemma3ForConditionalGeneration": ("gemma3", beside("text_config", "gemma3_text", HEADS)),
    "GemmaForCausalLM": ("gemma", HEADS),
    "Glm4MoeForCausalLM": ("glm4_moe", ROUTED),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", MLA),
    "Glm4vMoeForConditionalGeneration": ("glm4v_moe", beside("text_config", "glm4v_moe_text", ROUTED)),
    "GlmMoeDsaForCausalLM": ("glm_moe_dsa", MLA | INDEXER),
    "GptOssForCausalLM": ("gpt_oss", LOCAL),
    "HYV3ForCausalLM": ("hy_v3", EXPERTS | {"num_shared_experts": 1}),
    "KimiK25ForConditionalGeneration": ("kimi_k25", beside("text_config", "kimi_k2", MLA)),
    "KimiK2ForCausalLM": ("kimi_k2", MLA),
    "LlamaForCausalLM": ("llama", TEXT),
    "MiMoForCausalLM": ("mimo", TEXT),
    "MiMoV2FlashForCausalLM": ("mimo_v2_flash", {k: v for k, v in MIMO.items() if k != "model_type"}),
    "MiniMaxM2ForCausalLM": ("minimax_m2", LOCAL),
    "MiniMaxM3SparseForConditionalGeneration": (
        "minimax_m3_vl",
        beside("text_config", "minimax_m3_vl_text", LOCAL | {
            "dense_intermediate_size": 192, "shared_intermediate_size": 48, "hidden_act": "swigluoai",
            "moe_layer_freq": [0, 1, 1, 1], "rotary_dim": 8, "num_nextn_predict_layers": 1,
            "sparse_attention_config": {
                "sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": 2, "sparse_index_dim": 8,
            },
        }),
    ),
    "Mistral3ForConditionalGeneration": ("mistral3", beside("text_config", "ministral3", HEADS)),
    "MistralForCausalLM": ("mistral", TEXT),
    "NemotronForCausalLM": ("nemotron", TEXT),
    "NemotronHForCausalLM": ("nemotron_h", HYBRID),
    "NemotronH_Nano_Omni_Reasoning_V3": (
        "NemotronH_Nano_Omni_Reasoning_V3",
        beside("llm_config", "nemotron_h", HYBRID, vision_config={}, sound_config={}),
    ),
    "NemotronH_Nano_VL_V2": ("NemotronH_Nano_VL_V2", beside("llm_config", "nemotron_h", HYBRID)),
    "OlmoeForCausalLM": ("olmoe", {k: v for k, v in EXPERTS.items() if k not in ("head_dim", "moe_intermediate_size")}),
    "Qwen2AudioForConditionalGeneration": ("qwen2_audio", beside("text_config", "qwen2", TEXT, audio_config={})),
    "Qwen2ForCausalLM": ("qwen2", TEXT),
    "Qwen2_5OmniForConditionalGeneration": (
        "qwen2_5_omni",
        {
            "thinker_config": beside("text_config", "qwen2_5_omni_text", TEXT, audio_config={}, vision_config={}),
            "talker_config": {}, "token2wav_config": {},
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", beside("text_config", "qwen2_5_vl_text", TEXT)),
    "Qwen3ASRForConditionalGeneration": (
        "qwen3_asr", {"thinker_config": beside("text_config", "qwen3_asr_text", HEADS, audio_config={})}
    ),
    "Qwen3ForCausalLM": ("qwen3", HEADS),
    "Qwen3MoeForCausalLM": ("qwen3_moe", EXPERTS),
    "Qwen3NextForCausalLM": ("qwen3_next", EXPERTS | DELTA),
    "Qwen3OmniMoeForConditionalGeneration": (
        "qwen3_omni_moe",
        {
            "thinker_config": beside("text_config", "qwen3_omni_moe_text", EXPERTS, audio_config={}, vision_config={}),
            "talker_config": {"text_config": {}}, "code2wav_config": {},
        },
    ),
    "Qwen3VLForConditionalGeneration": ("qwen3_vl", beside("text_config", "qwen3_vl_text", HEADS)),
    "Qwen3VLMoeForConditionalGeneration": ("qwen3_vl_moe", beside("text_config", "qwen3_vl_moe_text", EXPERTS)),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", HEADS | DELTA),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", beside("text_config", "qwen3_5_text", HEADS | DELTA)),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", EXPERTS | DELTA),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", beside("text_config", "qwen3_5_moe_text", EXPERTS | DELTA)),
    "SarvamMLAForCausalLM": ("sarvam_mla", MLA | {"n_routed_experts": None, "num_experts": 4, "q_lora_rank": None}),
    "SarvamMoEForCausalLM": ("sarvam_moe", EXPERTS | {"num_shared_experts": 1}),
    "Step3p5ForCausalLM": ("step3p5", {k: v for k, v in STEP.items() if k != "model_type"}),
    "Step3p7ForConditionalGeneration": (
        "step3p7", beside("text_config", "step3p5", {k: v for k, v in STEP.items() if k != "model_type"})
    ),
}  # fmt: skip

#: Architecture -> (model_type, what the refusal names).
REFUSED = {
    "Ernie4_5_VLMoeForConditionalGeneration": ("ernie4_5_vl_moe", "two pools of experts"),
    "NemotronLabsDiffusionModel": ("nemotron_labs_diffusion", "diffusion"),
}
#: Models that diffuse, which come with Bridge's recipes: their configs are no decoder's.
DIFFUSION = {"FluxTransformer2DModel", "LLaDAModelLM", "WanTransformer3DModel"}
#: Wrappers of what is refused: the model_type of the language model inside.
INSIDE = {"ernie4_5_vl_moe": "ernie4_5_vl_moe_text"}
#: Those of Bridge's own modules; their parameters are held against transformers in ``test_huggingface_siblings``.
BRIDGED = {
    "DeepseekV4ForCausalLM": "deepseek_v4", "FalconH1ForCausalLM": "falcon_h1", "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4ForConditionalGeneration": "gemma4",
}  # fmt: skip


@pytest.mark.parametrize("architecture", READ)
def test_what_megatron_bridge_has_a_bridge_for_is_read(architecture: str) -> None:
    model_type, rest = READ[architecture]
    model = model_from_hf_config({"model_type": model_type, "architectures": [architecture], **rest}, architecture)
    assert peaks(RunSpec(model=model, batch=BatchSpec(seq_length=64)))
    assert hf_parameters.main_model(model) == model_parameters(model)[0]
    assert not any("has no specific reader" in line for line in model.assumptions)
    wrapped = any(k in rest for k in ("text_config", "llm_config", "thinker_config"))
    assert wrapped == any("with their gradients" in line for line in model.not_modelled)


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_no_block_describes_is_refused_by_name(architecture: str) -> None:
    model_type, word = REFUSED[architecture]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [architecture], **HEADS}
    if model_type in INSIDE:
        config["text_config"] = {"model_type": INSIDE[model_type], **HEADS}
    with pytest.raises(SpecError, match=f"is not estimated: .*{word}"):
        model_from_hf_config(config, architecture)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}, "hidden_size_per_layer_input"),
        ({"enable_moe_block": True, "hidden_size_per_layer_input": 0}, "num_experts is missing"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": ["full", *["full_attention"] * 3]}, "layer_types holds 'full'"),
    ],
)
def test_a_gemma_4_that_bridge_would_not_build_is_refused_in_a_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        model_from_hf_config({"model_type": "gemma4_text", **HEADS, **changes}, "gemma")
    assert "\n" not in str(caught.value)


def test_every_bridge_is_in_one_of_the_tables() -> None:
    require_bridge()
    from megatron.bridge import AutoBridge

    assert set(AutoBridge.list_supported_models()) <= {*READ, *REFUSED, *BRIDGED, *DIFFUSION}


def test_indexers_that_megatron_bridge_keeps_frozen_are_counted() -> None:
    """Three layers: queries of 2 heads of 8 and one key from 96, and their two norms of 8."""
    _, rest = READ["MiniMaxM3SparseForConditionalGeneration"]
    model = model_from_hf_config({"model_type": "minimax_m3_vl", **rest}, "m3")
    assert any(f"{3 * (96 * 3 * 8 + 2 * 8)} frozen weights" in line for line in model.not_modelled)


def test_configs_that_transformers_5_saves_are_read() -> None:
    """It writes num_local_experts for Qwen's num_experts, 0 for a window that is off, dtype and rope_parameters."""
    saved = TEXT | {"head_dim": 16, "dtype": "bfloat16", "transformers_version": "5.12.1"}
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    qwen = model_from_hf_config(saved | experts | {"model_type": "qwen3_moe", "sliding_window": 0}, "qwen")
    assert all(isinstance(layer.ffn, MoESpec) and layer.ffn.num_experts == 4 for layer in qwen.layers)
    assert all(isinstance(m.mixer, AttentionSpec) and m.mixer.window_size is None for m in qwen.layers)
    assert model_from_hf_config(saved | {"model_type": "glm", "rope_parameters": rope}, "glm").rotary_dim == 4
    del experts["num_local_experts"]
    sparse = {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "n_routed_experts": 4, "n_shared_experts": 1}
    glm = model_from_hf_config(saved | LATENT | experts | sparse | {"model_type": "glm4_moe_lite"}, "glm")
    assert [isinstance(layer.ffn, MoESpec) for layer in glm.layers] == [False, False, True, True]
