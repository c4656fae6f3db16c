"""Unseen siblings: small models of each family, built by transformers itself on the meta device and counted.

Each config is read twice: as the config class writes it in full, and as it is saved (without class defaults).
"""

from __future__ import annotations

import json
from typing import Any

import hf_parameters
import pytest

from bridge_memory import BatchSpec, RunSpec, peaks
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers import model_from_hf_config
from bridge_memory.readers.nested_defaults import NESTED_DEFAULTS, NESTED_SIZES
from bridge_memory.spec import ModelSpec, MoESpec, SpecError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
LOCAL = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = GROUPED | {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12}
INDEXER = {"q_lora_rank": 24, "num_key_value_heads": 6, "index_n_heads": 4, "index_head_dim": 8, "num_experts": 4}
LLAMA4 = LOCAL | {"intermediate_size_mlp": 192, "head_dim": 16}
M3 = {
    "head_dim": 16, "rotary_dim": 8, "dense_intermediate_size": 192, "shared_intermediate_size": 48,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
GPT = {"vocab_size": 512, "n_embd": 96, "n_layer": 4, "n_head": 6, "n_positions": 64}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}

SIBLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with every bias": ("llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "llama with its own head width": ("llama", GROUPED | {"head_dim": 32}),
    "tied llama": ("llama", GROUPED | {"tie_word_embeddings": True}),
    "mistral with its own head width": ("mistral", GROUPED | {"head_dim": 32}),
    "ministral": ("ministral", GROUPED | {"head_dim": 32}),
    "tied qwen2": ("qwen2", GROUPED | {"tie_word_embeddings": True}),
    "qwen3 with biases": ("qwen3", GROUPED | {"attention_bias": True, "head_dim": 24}),
    "gemma": ("gemma", GROUPED | {"head_dim": 24}),
    "vaultgemma": ("vaultgemma", GROUPED | {"head_dim": 24}),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 24}),
    "gemma3_text": ("gemma3_text", GROUPED | {"head_dim": 24}),
    "phi3": ("phi3", GROUPED),
    "granite with biases": ("granite", GROUPED | {"attention_bias": True}),
    "granitemoe": ("granitemoe", LOCAL),
    "granitemoeshared": ("granitemoeshared", LOCAL | {"shared_intermediate_size": 32}),
    "olmo2": ("olmo2", GROUPED),
    "olmo3": ("olmo3", GROUPED),
    "olmoe": ("olmoe", {k: v for k, v in EXPERTS.items() if k != "moe_intermediate_size"}),
    "flex_olmo": ("flex_olmo", {k: v for k, v in EXPERTS.items() if k != "moe_intermediate_size"}),
    "exaone4": ("exaone4", GROUPED),
    "glm": ("glm", GROUPED | {"head_dim": 16}),
    "glm4": ("glm4", GROUPED | {"head_dim": 16, "attention_bias": True}),
    "nemotron": ("nemotron", GROUPED),
    "smollm3": ("smollm3", GROUPED),
    "seed_oss": ("seed_oss", GROUPED | {"head_dim": 16}),
    "gpt_neox": ("gpt_neox", SIZES),
    "mixtral": ("mixtral", LOCAL),
    "gpt_oss": ("gpt_oss", LOCAL | {"head_dim": 16}),
    "qwen2_moe with dense layers": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "qwen2_moe without biases": (
        "qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64, "qkv_bias": False}
    ),
    "qwen3_moe with a dense layer": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [0], "head_dim": 16}),
    "qwen3_next": ("qwen3_next", EXPERTS | DELTA | {"shared_expert_intermediate_size": 64, "head_dim": 16}),
    "qwen3_5": ("qwen3_5_text", GROUPED | DELTA | {"head_dim": 16}),
    "tied qwen3_5 with biases": (
        "qwen3_5_text", GROUPED | DELTA | {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS | DELTA | {"shared_expert_intermediate_size": 64, "head_dim": 16}),
    "deepseek_v2": ("deepseek_v2", ROUTED | LATENT | {"q_lora_rank": 24, "num_key_value_heads": 6}),
    "deepseek_v3 without a query rank": (
        "deepseek_v3", ROUTED | LATENT | {"q_lora_rank": None, "num_key_value_heads": 6}
    ),
    "glm4_moe_lite": ("glm4_moe_lite", ROUTED | LATENT | {"q_lora_rank": 24, "num_key_value_heads": 6}),
    "deepseek_v32": ("deepseek_v32", ROUTED | LATENT | INDEXER),
    "glm_moe_dsa": ("glm_moe_dsa", ROUTED | LATENT | INDEXER),
    "glm_moe_dsa with layers that share an indexer": (
        "glm_moe_dsa", ROUTED | LATENT | INDEXER | {"index_topk_freq": 2, "index_skip_topk_offset": 1}
    ),
    "glm4_moe": ("glm4_moe", ROUTED | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        GROUPED | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 3},
    ),
    "exaone_moe": ("exaone_moe", EXPERTS | {"num_shared_experts": 2}),
    "exaone_moe with two dense layers": ("exaone_moe", EXPERTS | {"first_k_dense_replace": 2, "head_dim": 32}),
    "hy_v3": ("hy_v3", EXPERTS | {"num_shared_experts": 2, "head_dim": 16}),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe", GROUPED | {"num_experts": 4, "moe_topk": 2, "attention_bias": True, "head_dim": 16}
    ),
    "hunyuan_v1_moe with a number a layer": (
        "hunyuan_v1_moe", GROUPED | {"num_experts": 4, "moe_topk": [2, 2, 2, 2], "head_dim": 16}
    ),
    "llama4": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4 with experts everywhere": ("llama4_text", LLAMA4 | {"attention_bias": True}),
    "minimax_m3": ("minimax_m3_vl_text", LOCAL | M3),
    "dots1": ("dots1", ROUTED | {"head_dim": 16}),
    "gpt2": ("gpt2", GPT),
    "gpt2 with its own width": ("gpt2", GPT | {"n_inner": 100}),
    "gpt_bigcode (one key and value head)": ("gpt_bigcode", GPT),
    "bloom": ("bloom", {"vocab_size": 512, "hidden_size": 96, "n_layer": 4, "n_head": 6}),
    # Families without a reader of their own.
    "stablelm": ("stablelm", GROUPED),
    "starcoder2": ("starcoder2", GROUPED),
    "arcee": ("arcee", GROUPED),
    "helium": ("helium", GROUPED | {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", GROUPED | {"head_dim": 16}),
    "ernie4_5 with biases": ("ernie4_5", GROUPED | {"head_dim": 16, "use_bias": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", GROUPED | {"head_dim": 16, "attention_bias": True}),
    "ministral3": ("ministral3", GROUPED | {"head_dim": 16}),
}

GEMMA4 = GROUPED | {
    "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0,
}  # fmt: skip
V4 = {k: v for k, v in SIZES.items() if k != "intermediate_size"} | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 64, "q_lora_rank": 24,
    "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8, "sliding_window": 8,
}  # fmt: skip
FALCON = GROUPED | {"mamba_n_heads": 8, "mamba_d_ssm": 192, "mamba_d_state": 16, "mamba_n_groups": 2}
#: Models that Megatron Bridge builds of modules of its own -> (config, weights that its linear_qkv has and
#: transformers has not, counted by hand from h = 96).
BRIDGED: dict[str, tuple[str, dict[str, Any], int]] = {
    "falcon_h1": ("falcon_h1", FALCON, 0),
    "falcon_h1 with a norm of its mixer": (
        "falcon_h1", FALCON | {"mamba_rms_norm": True, "mamba_conv_bias": False, "tie_word_embeddings": True}, 0
    ),
    "gemma4 with embeddings layer by layer": (
        "gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}, 0
    ),
    # Keys, values and a norm of keys: of a sliding layer, 2 groups of 16, and of a full one, 2 of 32.
    "gemma4 with shared keys": (
        "gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        96 * 2 * 2 * 16 + 16 + 96 * 2 * 2 * 32 + 32,
    ),
    # Values of the full layer, one group of 32.
    "gemma4 whose values are keys": (
        "gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}, 96 * 32
    ),
    "gemma4 with experts": (
        "gemma4_text",
        GEMMA4 | {
            "attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4,
            "top_k_experts": 2, "moe_intermediate_size": 32,
        },
        96 * 32,
    ),
    "deepseek_v4": ("deepseek_v4", V4, 0),
    "deepseek_v4 with a window alone in its first layer": (
        "deepseek_v4",
        V4 | {"layer_types": ["sliding_attention", *["compressed_sparse_attention", "heavily_compressed_attention"],
                              "compressed_sparse_attention"]},
        0,
    ),
}  # fmt: skip


def config_of(model_type: str, **fields: Any) -> Any:
    """The config as the installed transformers makes it; skips what it does not know."""
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return transformers.AutoConfig.for_model(model_type, **fields)


def parameters(config: Any) -> int:
    if config.model_type == "apertus":  # XIELUActivation.__init__ reads a value, which a tensor on meta has not
        config.hidden_act = "silu"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    xielu = 2 * config.num_hidden_layers if config.model_type == "apertus" else 0
    return sum(p.numel() for p in model.parameters()) + xielu


def counted_by(model: ModelSpec) -> int:
    """By the closed form; models of Bridge's own modules, of which it says nothing, by the inventory."""
    if model.model_type in {model_type for model_type, _, _ in BRIDGED.values()}:
        return model_parameters(model)[0]
    return hf_parameters.main_model(model)


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_a_sibling_has_the_parameters_transformers_gives_it(sibling: str) -> None:
    model_type, fields = SIBLINGS[sibling]
    config = config_of(model_type, **fields)
    counted = parameters(config)
    saved = json.loads(config.to_json_string(use_diff=True))
    model = model_from_hf_config(saved, "saved")
    assert hf_parameters.main_model(model) == counted
    assert hf_parameters.main_model(model_from_hf_config(config.to_dict(), "full")) == counted
    assert model_parameters(model)[0] == counted


@pytest.mark.parametrize("sibling", BRIDGED)
def test_a_model_of_bridges_own_modules_has_the_parameters_transformers_gives_it(sibling: str) -> None:
    model_type, fields, more = BRIDGED[sibling]
    config = config_of(model_type, **fields)
    counted = parameters(config) + more
    saved = json.loads(config.to_json_string(use_diff=True))
    for read in (saved, config.to_dict()):
        model = model_from_hf_config(read, sibling)
        assert model_parameters(model)[0] == counted
    assert peaks(RunSpec(model=model, batch=BatchSpec(seq_length=64)))


#: Of transformers' decoders, those that we count otherwise, and why.
OTHERWISE = {"olmo": "its norms have no weights, Megatron's have"}


@pytest.mark.slow
def test_every_decoder_of_transformers_is_counted_right_or_refused() -> None:
    """Each causal model of the installed transformers with its class's own sizes, four layers of it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

    wrong, counted = {}, 0
    for model_type in DECODERS:
        try:
            config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=4)
            full = config.to_dict()
        except Exception:  # a config class that wants more than its defaults
            continue
        architecture = DECODERS[model_type]
        full["architectures"] = [architecture if isinstance(architecture, str) else architecture[0]]
        try:
            model = model_from_hf_config(full, model_type)
        except SpecError:
            continue
        if model.encoders or any("language model only" in line for line in model.assumptions):
            continue
        try:
            published = parameters(config)
        except (AttributeError, KeyError, TypeError, ValueError):  # defaults that make no model
            continue
        counted += 1
        # The router's bias is a parameter in some releases of transformers and a buffer in others.
        ffns = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoESpec)]
        biases = sum(ffn.num_experts for ffn in ffns if ffn.expert_bias_in_published_count)
        ours = counted_by(model)
        if ours not in (published, published + biases):
            wrong[model_type] = (ours, published)
    assert counted > 30
    assert wrong.keys() == OTHERWISE.keys(), wrong


def test_olmo_gains_weights_for_its_norms_and_says_so() -> None:
    """OLMo's LayerNorms have none: 2 norms in each of 4 layers and the last, 2 x 96 values each."""
    config = transformers.AutoConfig.for_model("olmo", **GROUPED)
    model = model_from_hf_config(config.to_dict(), "olmo")
    assert hf_parameters.main_model(model) == parameters(config) + 9 * 2 * 96
    assert any("norm" in line for line in model.assumptions)


@pytest.mark.parametrize("model_type", sorted(NESTED_DEFAULTS))
def test_defaults_of_nested_configs_are_those_of_transformers(model_type: str) -> None:
    config = config_of(model_type)
    for field, default in zip(NESTED_SIZES, NESTED_DEFAULTS[model_type], strict=True):
        if default is not None:
            assert getattr(config, field) == default
    nested = {"model_type": "wrapper", "text_config": {"model_type": model_type}, "vision_config": {}}
    assert counted_by(model_from_hf_config(nested, "nested")) == parameters(config)


ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl_text", GROUPED),
    "qwen3_vl": ("qwen3_vl_text", GROUPED | {"head_dim": 16}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", EXPERTS | {"head_dim": 16}),
    "qwen3_5": ("qwen3_5_text", GROUPED | DELTA | {"head_dim": 16}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text", EXPERTS | DELTA | {"head_dim": 16, "shared_expert_intermediate_size": 48}
    ),
    "gemma3": ("gemma3_text", GROUPED | {"head_dim": 16}),
    "mistral3": ("mistral", GROUPED | {"head_dim": 16}),
    "llama4": ("llama4_text", LLAMA4),
    "glm4v": ("glm4v_text", GROUPED),
    "glm4v_moe": ("glm4v_moe_text", ROUTED | {"head_dim": 16}),
    "exaone4_5": ("exaone4", GROUPED | {"head_dim": 16}),
    "minimax_m3_vl": ("minimax_m3_vl_text", LOCAL | M3),
    "qwen2_audio": ("qwen2", GROUPED),
}


def wrapper_config(wrapper: str) -> Any:
    model_type, fields = ENCODERS[wrapper]
    config = config_of(wrapper, text_config={"model_type": model_type, **fields})
    if int(transformers.__version__.split(".")[0]) < 5 and wrapper != "llama4":
        config.text_config.rope_scaling = {"rope_type": "default", "mrope_section": [1, 1, 1]}
    if wrapper == "gemma3":  # as every published one says; SigLIP's pooling head is not counted
        config.vision_config.vision_use_head = False
    return config


@pytest.mark.parametrize("wrapper", ENCODERS)
def test_the_text_encoder_of_a_wrapper_has_the_parameters_transformers_gives_it(wrapper: str) -> None:
    """The wrapper's language model (embedding, layers, norm) plus the head, unless it is tied."""
    from transformers.models.auto.modeling_auto import AutoModel

    config = wrapper_config(wrapper)
    with torch.device("meta"):
        encoder = AutoModel.from_config(config.text_config)
    model = model_from_hf_config(config.to_dict(), wrapper)
    head = 0 if model.share_embeddings_and_output_weights else 512 * 96
    assert hf_parameters.main_model(model) == sum(p.numel() for p in encoder.parameters()) + head
    # What is not modelled beside it is said, unless its encoder is.
    assert model.encoders or any("language model only" in line for line in model.assumptions)


#: Parts of names of Qwen3-VL's tower that megatron-core's tensor parallelism divides: column-parallel linears with
#: their biases, and the weights alone of row-parallel ones.
DIVIDED = (
    "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight",
)


@pytest.mark.parametrize("wrapper", ENCODERS)
def test_what_stands_beside_the_text_encoder_is_counted_and_listed(wrapper: str) -> None:
    """The wrapper without its language model: towers and what joins them to it."""
    from transformers.models.auto.modeling_auto import AutoModel

    config = wrapper_config(wrapper)
    if type(config) not in transformers.MODEL_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} makes no model of {wrapper} without its head")
    with torch.device("meta"):
        whole = AutoModel.from_config(config)
        encoder = AutoModel.from_config(config.text_config)
    # Llama 4's has its output layer inside.
    beside = sum(p.numel() for name, p in whole.named_parameters() if "lm_head" not in name)
    beside -= sum(p.numel() for p in encoder.parameters())
    model = model_from_hf_config(config.to_dict(), wrapper)
    if wrapper in ("glm4v", "llama4"):  # Megatron Bridge builds none
        assert any(f" {beside} parameters" in line for line in model.not_modelled), (beside, model.not_modelled)
        return
    (found,) = model.encoders
    assert found.parameters == beside
    if wrapper.startswith("qwen3"):
        visual = [(name, p.numel()) for name, p in whole.named_parameters() if "visual" in name]
        assert found.sharded == sum(n for name, n in visual if name.endswith(DIVIDED))
    elif wrapper != "exaone4_5":
        assert found.sharded == 0
