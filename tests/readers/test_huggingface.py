"""A config.json becomes the model it describes, or one line that names the field.

Parameter counts are those of transformers' own modules on the meta device (``tests/data/hf_parameter_counts.json``,
"counted": "meta") or closed forms that agree with them ("analytic"), compared with the closed form of
``hf_parameters.py``, which knows architectures and nothing of this package's inventory.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import hf_parameters
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_memory.readers import list_presets, model_from_hf_config, resolve_model
from bridge_memory.readers.presets import preset_path
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SpecError,
)

COUNTS = json.loads((Path(__file__).parents[1] / "data" / "hf_parameter_counts.json").read_text())
SMALL_LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def config_of(preset: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(Path(preset_path(preset)).read_text())
    return parsed


def refusal(config: Any) -> str:
    with pytest.raises(SpecError) as caught:
        model_from_hf_config(config, "it")
    line = str(caught.value)
    assert "\n" not in line
    return line


def moe_of(model: ModelSpec) -> MoESpec:
    return next(x.ffn for x in model.layers if isinstance(x.ffn, MoESpec))


# ---- parameters ----


def test_every_config_with_a_published_count_is_a_preset() -> None:
    assert sorted(COUNTS) == sorted(list_presets())


@pytest.mark.parametrize("preset", sorted(COUNTS))
def test_parameters_are_exact_to_the_element(preset: str) -> None:
    assert hf_parameters.main_model(resolve_model(preset)) == COUNTS[preset]["parameters"]


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("deepseek-ai/DeepSeek-V3", 11.61),
        ("deepseek-ai/DeepSeek-R1", 11.61),
        ("zai-org/GLM-4.5", 3.99),
        ("zai-org/GLM-4.5-Air", 2.38),
        ("moonshotai/Kimi-K2-Instruct", 0),
        ("moonshotai/Moonlight-16B-A3B", 0),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 0),
    ],
)
def test_mtp_layers_come_on_top(preset: str, billions: float) -> None:
    assert round(hf_parameters.mtp(resolve_model(preset)) / 1e9, 2) == billions


def test_qwen3_next_says_that_its_mtp_layer_has_no_key() -> None:
    assert any("MTP" in line for line in resolve_model("Qwen3-Next-80B-A3B-Instruct").assumptions)


def test_minimax_m2_has_no_mtp_layers() -> None:
    """Megatron Bridge ``minimax_m2_bridge.py``: "MTP modules are not mapped"; the config names three."""
    model = resolve_model("MiniMax-M2")
    assert model.mtp_num_layers == 0 and any("MTP" in line for line in model.assumptions)


# ---- what the layers are ----


def test_deepseek_v3_has_three_dense_layers_before_58_of_experts() -> None:
    model = resolve_model("DeepSeek-V3")
    assert [isinstance(x.ffn, MLPSpec) for x in model.layers] == [True] * 3 + [False] * 58
    assert model.layers[0].ffn == MLPSpec(ffn_hidden_size=18432, gated=True)
    mla = model.layers[0].mixer
    assert isinstance(mla, MLASpec) and (mla.q_lora_rank, mla.kv_lora_rank) == (1536, 512)
    assert moe_of(model).router_enable_expert_bias
    assert model.rotary_dim == 64


def test_deepseek_v2_lite_projects_queries_without_a_rank_and_routes_without_a_bias() -> None:
    model = resolve_model("DeepSeek-V2-Lite")
    mla = model.layers[0].mixer
    assert isinstance(mla, MLASpec) and mla.q_lora_rank is None
    moe = moe_of(model)
    assert (moe.router_score_function, moe.router_enable_expert_bias) == ("softmax", False)
    assert moe.shared_expert_intermediate_size == 2 * 1408


def test_qwen3_next_keeps_one_softmax_layer_in_four() -> None:
    model = resolve_model("Qwen3-Next-80B-A3B-Instruct")
    kinds = [type(x.mixer) for x in model.layers]
    assert kinds == [GatedDeltaNetSpec, GatedDeltaNetSpec, GatedDeltaNetSpec, AttentionSpec] * 12
    softmax = model.layers[3].mixer
    assert isinstance(softmax, AttentionSpec) and softmax.attention_output_gate
    assert moe_of(model).shared_expert_gate
    assert model.rotary_dim == 64


def test_gpt_oss_slides_on_every_other_layer_and_is_gated() -> None:
    model = resolve_model("gpt-oss-120b")
    assert [x.mixer.window_size for x in model.layers] == [128, None] * 18  # type: ignore[union-attr]
    attention, moe = model.layers[0].mixer, moe_of(model)
    assert isinstance(attention, AttentionSpec) and attention.learnable_softmax_sink
    assert attention.add_qkv_bias and attention.add_output_bias
    assert moe.gated and moe.activation == "quick_gelu" and moe.add_bias and moe.add_router_bias
    assert moe.moe_ffn_hidden_size == 2880


def test_gemma_3_is_gated_and_sees_everything_on_each_sixth_layer() -> None:
    model = resolve_model("gemma-3-27b-pt")
    full = [i for i, x in enumerate(model.layers) if x.mixer.window_size is None]  # type: ignore[union-attr]
    assert full == list(range(5, 62, 6))
    assert all(x.post_layernorms and isinstance(x.ffn, MLPSpec) and x.ffn.gated for x in model.layers)
    assert model.share_embeddings_and_output_weights


def test_nemotron_h_follows_its_pattern() -> None:
    """Nano: 23 Mamba, 6 attention, 23 MoE. 56B: 54 Mamba, 10 attention, 54 MLP. One block a layer."""

    def kinds(preset: str) -> Counter[str]:
        return Counter(type(x.mixer or x.ffn).__name__ for x in resolve_model(preset).layers)

    nano = "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    assert kinds(nano) == {"MambaSpec": 23, "AttentionSpec": 6, "MoESpec": 23}
    assert kinds("Nemotron-H-56B-Base-8K") == {"MambaSpec": 54, "AttentionSpec": 10, "MLPSpec": 54}
    assert not moe_of(resolve_model(nano)).gated
    assert resolve_model(nano).hybrid and resolve_model(nano).position_embedding_type == "none"


def test_nemotron_super_skips_the_blocks_its_search_removed() -> None:
    config = config_of("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    model = resolve_model("Llama-3_3-Nemotron-Super-49B-v1")
    skipped = [b["attention"]["no_op"] for b in config["block_configs"]]
    assert [x.mixer is None for x in model.layers] == skipped
    assert sum(skipped) > 0
    # ffn_mult 5.25 is Llama-3.3-70B's own width.
    assert max(x.ffn.ffn_hidden_size for x in model.layers if x.ffn is not None) == 28672  # type: ignore[union-attr]


def test_latent_experts_work_in_their_own_width() -> None:
    """Nemotron-3's latent MoE: h -> latent -> experts -> latent -> h, the router and shared expert stay in h."""
    config = config_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") | {"moe_latent_size": 1024}
    moe = moe_of(model_from_hf_config(config, "latent"))
    assert moe.latent_size == 1024
    assert hf_parameters.moe(moe, 2688) == (
        128 * 2688 + 2 * 2688 * 1024 + 128 * 2 * 1024 * 1856 + 2 * 2688 * 3712
    )


def test_nemotron_3_super_adds_an_mtp_depth_of_attention_and_latent_experts() -> None:
    config = config_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") | {
        "moe_latent_size": 1024,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
    }
    model = model_from_hf_config(config, "super")
    assert model.mtp_layer is not None
    assert isinstance(model.mtp_layer.mixer, AttentionSpec)
    assert isinstance(model.mtp_layer.ffn, MoESpec) and model.mtp_layer.ffn.latent_size == 1024
    config["mtp_hybrid_override_pattern"] = "MM*"
    assert "mtp_hybrid_override_pattern" in refusal(config)


def test_bias_of_qwen2_is_on_q_k_v_alone_and_has_no_key() -> None:
    mixer = resolve_model("Qwen2-7B").layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.add_qkv_bias, mixer.add_output_bias) == (True, False)


def test_gpt2_and_bloom_keep_their_own_positions() -> None:
    gpt2, bloom = resolve_model("gpt2"), resolve_model("bloom")
    assert (gpt2.position_embedding_type, gpt2.max_position_embeddings) == ("learned_absolute", 1024)
    assert (bloom.position_embedding_type, bloom.embedding_layernorm) == ("alibi", True)
    assert (gpt2.hidden_dropout, gpt2.attention_dropout) == (0.1, 0.1)
    assert gpt2.normalization == bloom.normalization == "LayerNorm"


def test_dropout_is_off_in_models_whose_config_does_not_speak_of_it() -> None:
    for preset in ("Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V3", "gemma-2-9b", "Mixtral-8x7B-v0.1"):
        assert resolve_model(preset).hidden_dropout == resolve_model(preset).attention_dropout == 0.0


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_vocabulary_is_padded_no_further_than_tensor_parallelism_needs(tp: int) -> None:
    """Bridge and mbridge convert a vocabulary as it is; 50257 rows over 8 ranks still need 7 more."""
    assert resolve_model("Meta-Llama-3-8B").padded_vocab_size(tp) == 128256
    assert resolve_model("gpt2").padded_vocab_size(tp) == {1: 50257, 2: 50258, 8: 50264}[tp]


# ---- other ways to write the same config ----


def test_new_names_for_dtype_and_rope_change_nothing() -> None:
    old = config_of("zai-org/GLM-4.5-Air")
    new = {k: v for k, v in old.items() if k not in ("torch_dtype", "rope_theta", "partial_rotary_factor")}
    new |= {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    assert model_from_hf_config(new, "x") == model_from_hf_config(old, "x")
    assert model_from_hf_config(new, "x").rotary_dim == 64


@pytest.mark.parametrize(
    "words",
    [
        {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"},  # transformers 5.3 to 5.22
        {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},  # 5.23 and 5.24, as saved
    ],
)
def test_a_pattern_in_words_is_the_pattern_in_symbols(words: dict[str, str]) -> None:
    old = config_of("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    new = {k: v for k, v in old.items() if k not in ("hybrid_override_pattern", "num_hidden_layers")}
    new["layers_block_type"] = [words[symbol] for symbol in old["hybrid_override_pattern"]]
    new["mtp_layers_block_type"] = [words["*"], words["E"]]
    assert model_from_hf_config(new, "x") == model_from_hf_config(old, "x")


def test_keys_of_published_files_that_hold_no_memory_are_let_through() -> None:
    """Verbatim configs of Qwen3-Coder, MiniMax-M2, Nemotron-Nano-9B-v2 and DeepSeek-V3 name these."""
    extras: dict[str, dict[str, Any]] = {
        "Qwen/Qwen3-30B-A3B": {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
        "MiniMaxAI/MiniMax-M2": {
            "attn_type_list": [1] * 62,
            "layernorm_full_attention_beta": 1.0,
            "mlp_intermediate_size": 8192,
            "shared_moe_mode": "sigmoid",
        },
        "nvidia/Nemotron-H-56B-Base-8K": {"num_query_groups": 8, "time_step_limit": [0.0, float("inf")]},
        "deepseek-ai/DeepSeek-V3": {
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"},
        },
        "Qwen/Qwen2.5-7B": {"dual_chunk_attention_config": {"chunk_size": 262144}},
    }
    for preset, extra in extras.items():
        assert model_from_hf_config(config_of(preset) | extra, preset) == resolve_model(preset)


def test_a_multimodal_wrapper_is_its_text_encoder_and_says_so() -> None:
    text = config_of("google/gemma-3-12b-pt")
    wrapped = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    model = model_from_hf_config(wrapped, "x")
    assert model.layers == resolve_model("gemma-3-12b-pt").layers
    assert any("vision_config" in line and "left out" in line for line in model.assumptions)


def test_a_nested_config_leaves_its_class_defaults_out() -> None:
    """google/gemma-3-4b-pt names five fields of its text tower: 3,880,263,168 parameters with 262,208 rows."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    model = model_from_hf_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "x")
    assert hf_parameters.main_model(model) == 3_880_263_168
    assert any("vocab_size 262208" in line for line in model.assumptions)


def test_another_family_with_the_usual_names_is_read_with_its_assumptions() -> None:
    """A dense decoder by the names alone: 2 x 1000 x 64 embeddings, 2 layers of q, k, v, o, three matrices, norms."""
    config = SMALL_LLAMA | {"model_type": "newcomer", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    model = model_from_hf_config(config, "x")
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert hf_parameters.main_model(model) == 2 * 1000 * 64 + 2 * layer + 64
    assert any("newcomer" in line and "RMSNorm" in line and "gated" in line for line in model.assumptions)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": -64}, ["hidden_size", "-64"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": 64.5}, ["hidden_size", "64.5"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", "0"]),
        ({"num_attention_heads": 5}, ["num_attention_heads", "5"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"hidden_size": 66}, ["hidden_size (66)", "num_attention_heads (4)"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000"]),
        ({"vocab_size": []}, ["vocab_size"]),
        ({"intermediate_size": {}}, ["intermediate_size"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "'no'"]),
        ({"hidden_act": "mish"}, ["hidden_act", "'mish'"]),
        ({"hidden_act": 3}, ["hidden_act"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"attention_dropout": 2.0}, ["attention_dropout"]),
        ({"model_type": None}, ["model_type"]),
        ({"model_type": 7}, ["model_type"]),
        ({"text_config": 7}, ["text_config"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "1", "2"]),
        ({"num_local_experts": 8}, ["num_local_experts=8"]),
        ({"mamba_d_state": 16, "hash_heads": 3}, ["mamba_d_state=16", "hash_heads=3"]),
    ],
)
def test_an_absurd_llama_is_refused_by_field(change: dict[str, Any], words: list[str]) -> None:
    line = refusal(SMALL_LLAMA | change)
    assert all(word in line for word in words), line


@pytest.mark.parametrize("config", [[], "llama", 3, None])
def test_what_is_no_object_is_refused(config: Any) -> None:
    assert "JSON object" in refusal(config)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("preset", ["Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"])
def test_a_missing_size_is_never_guessed(preset: str, key: str) -> None:
    config = config_of(preset)
    del config[key]
    assert f"{key} is missing" in refusal(config)


@pytest.mark.parametrize(
    ("preset", "change", "words"),
    [
        ("Qwen/Qwen3-30B-A3B", {"num_experts_per_tok": 200}, ["num_experts_per_tok (200)", "num_experts (128)"]),
        ("Qwen/Qwen3-30B-A3B", {"mlp_only_layers": [48]}, ["mlp_only_layers", "48"]),
        ("deepseek-ai/DeepSeek-V3", {"first_k_dense_replace": 62}, ["first_k_dense_replace (62)"]),
        ("deepseek-ai/DeepSeek-V3", {"index_topk": 2048, "index_n_heads": 64}, ["index_n_heads=64"]),
        ("deepseek-ai/DeepSeek-V3", {"attention_bias": True}, ["attention_bias"]),
        ("nvidia/Nemotron-H-56B-Base-8K", {"hybrid_override_pattern": "M-X"}, ["hybrid_override_pattern", "'X'"]),
        ("nvidia/Nemotron-H-56B-Base-8K", {"num_hidden_layers": 52}, ["118", "52"]),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", {"block_configs": []}, ["block_configs", "80"]),
        ("MiniMaxAI/MiniMax-M2", {"attn_type_list": [0] * 62}, ["attn_type_list"]),
        ("google/gemma-2-9b", {"use_qk_norm": True}, ["use_qk_norm"]),
        ("openai-community/gpt2", {"n_positions": None, "n_ctx": None}, ["max_position_embeddings"]),
        ("openai/gpt-oss-20b", {"experts_per_token": 8}, ["experts_per_token", "num_experts_per_tok", "disagree"]),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"linear_num_key_heads": 3}, ["linear_num_key_heads (3)"]),
    ],
)
def test_a_contradiction_is_refused_by_field(preset: str, change: dict[str, Any], words: list[str]) -> None:
    line = refusal(config_of(preset) | change)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("attention", "n_heads_in_group", 7),
        ("attention", "n_heads_in_group", 0.5),
        ("attention", "n_heads_in_group", None),
        ("attention", "replace_with_linear", True),
        ("ffn", "ffn_mult", float("inf")),
        ("ffn", "ffn_mult", 10**400),
        ("ffn", "ffn_mult", -1),
        ("ffn", "ffn_mult", None),
        ("ffn", "intermediate_size", 1e300),
        ("ffn", "num_experts", 4),
    ],
)
def test_a_damaged_block_config_is_refused_by_layer_and_field(part: str, key: str, value: Any) -> None:
    config = config_of("nvidia/Llama-3_3-Nemotron-Super-49B-v1")
    config["block_configs"][79][part][key] = value
    line = refusal(config)
    assert f"block_configs[79].{part}" in line and key in line


@pytest.mark.parametrize("model_type", ["cohere", "phi", "falcon"])
def test_a_layer_that_megatron_cannot_build_is_refused(model_type: str) -> None:
    assert "parallel" in refusal(SMALL_LLAMA | {"model_type": model_type})


def test_an_encoder_is_refused() -> None:
    bert = SMALL_LLAMA | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert "decoder" in refusal(bert)


# ---- anything else ----

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([10**12, -(10**30), 0.5, float("nan"), float("inf"), "", "silu", [], [1], {}, {"a": 1}]),
    st.text(max_size=4),
)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_damage_to_a_config_is_a_model_or_one_line(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from([config_of(p) for p in PRESETS_OF_EACH_FAMILY])))
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        if data.draw(st.booleans()):
            config.pop(key, None)
        else:
            config[key] = data.draw(VALUES)
    try:
        model = model_from_hf_config(config, "it")
    except SpecError as error:
        assert "\n" not in str(error) and str(error).startswith("it")
    else:
        assert hf_parameters.main_model(model) > 0


def _one_of_each_family() -> list[str]:
    families = {config_of(preset)["model_type"]: preset for preset in list_presets()}
    return sorted(families.values())


PRESETS_OF_EACH_FAMILY = _one_of_each_family()


def test_mixers_known_to_the_closed_form_are_all_that_presets_hold() -> None:
    """The counts above cover every kind of block; a new kind must come with its count."""
    kinds = {type(x.mixer) for p in list_presets() for x in resolve_model(p).layers}
    assert kinds == {AttentionSpec, MLASpec, MambaSpec, GatedDeltaNetSpec, type(None)}
