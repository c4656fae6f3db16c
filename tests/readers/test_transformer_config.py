"""A TransformerConfig is read as megatron-core builds from it.

Compared with megatron-core's own reading of the same fields (its pattern functions, its heterogeneous config) and
with the Hugging Face reading of the same model.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.readers import resolve_model
from bridge_memory.readers.presets import preset_path
from bridge_memory.readers.transformer_config import model_from_transformer_config
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    ModelSpec,
    MoESpec,
    SpecError,
)

BASE: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def read(**fields: Any) -> ModelSpec:
    return model_from_transformer_config(SimpleNamespace(**(BASE | fields)), vocab_size=512, name="it")


def moe_layers(model: ModelSpec) -> list[int]:
    return [int(isinstance(x.ffn, MoESpec)) for x in model.layers]


def refusal(**fields: Any) -> str:
    with pytest.raises(SpecError) as caught:
        read(**fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_plain_attributes_are_enough_and_defaults_are_megatrons() -> None:
    """Megatron's own: ffn 4 h, h / a wide heads, as many groups as heads, GELU, biases, LayerNorm, dropout 0.1."""
    config = SimpleNamespace(num_layers=2, hidden_size=96, num_attention_heads=6)
    model = model_from_transformer_config(config, vocab_size=512)
    mixer, ffn = model.layers[0].mixer, model.layers[0].ffn
    # No rotary embedding: positions are learned (``gpt_model.py: GPTModel.__init__``).
    assert mixer == AttentionSpec(6, 6, 16, add_qkv_bias=True, add_output_bias=True, rotary=False)
    assert (ffn.ffn_hidden_size, ffn.gated, ffn.activation, ffn.add_bias) == (384, False, "gelu", True)  # type: ignore[union-attr]
    assert (model.normalization, model.hidden_dropout, model.attention_dropout) == ("LayerNorm", 0.1, 0.1)
    assert (model.position_embedding_type, model.rotary_dim) == ("learned_absolute", 0)


@pytest.mark.parametrize(
    ("freq", "expected"),
    [
        (1, [1, 1, 1, 1, 1, 1]),
        (2, [1, 0, 1, 0, 1, 0]),
        ([0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]),
        ("[0]*2+[1]*4", [0, 0, 1, 1, 1, 1]),
        ("([0]*1+[1]*5)", [0, 1, 1, 1, 1, 1]),
        ("[0,1]*3", [0, 1, 0, 1, 0, 1]),
        ("3", [1, 0, 0, 1, 0, 0]),
    ],
)
def test_every_way_to_write_moe_layer_freq(freq: Any, expected: list[int]) -> None:
    assert moe_layers(read(num_moe_experts=4, moe_layer_freq=freq)) == expected


@pytest.mark.parametrize("freq", [0, -1, [1, 0], [2] * 6, "[0]*2+[1]*3", "open('x')", "[0]*10**9", "", 1.5, "1+[1]"])
def test_a_wrong_moe_layer_freq_is_refused(freq: Any) -> None:
    assert "moe_layer_freq" in refusal(num_moe_experts=4, moe_layer_freq=freq)


def test_patterns_are_megatron_cores_own() -> None:
    """gpt_layer_specs / experimental_attention_variant_module_specs and is_layer_window_attention."""
    pytest.importorskip("megatron.core")
    variants = pytest.importorskip("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    from megatron.core.transformer.utils import is_layer_window_attention

    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "experimental_attention_variant": "gated_delta_net",
    }
    for freq in (1, 2, 4, [1, 1, 0, 1, 1, 0]):
        config = SimpleNamespace(num_layers=6, linear_attention_freq=freq)
        model = read(**linear, linear_attention_freq=freq)
        assert [int(isinstance(x.mixer, GatedDeltaNetSpec)) for x in model.layers] == (
            variants.get_linear_attention_pattern(config)
        )
    for freq in (1, 2, 3, 6, None, [1, 0, 0, 1, 1, 0]):
        model = read(window_size=(128, 0), window_attn_skip_freq=freq)
        assert [x.mixer.window_size is not None for x in model.layers] == [  # type: ignore[union-attr]
            is_layer_window_attention((128, 0), freq, i + 1) for i in range(6)
        ]


def test_a_heterogeneous_config_is_the_model_its_block_configs_say() -> None:
    """megatron-core's own HeterogeneousTransformerConfig of Llama-3.3-Nemotron-Super-49B."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from torch.nn.functional import silu

    text = Path(preset_path("nvidia/Llama-3_3-Nemotron-Super-49B-v1")).read_text()
    config = HeterogeneousTransformerConfig(
        heterogeneous_layers_config_encoded_json=text,
        num_layers=80,
        hidden_size=8192,
        num_attention_heads=64,
        ffn_hidden_size=28672,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        normalization="RMSNorm",
    )
    model = model_from_transformer_config(config, vocab_size=128256, position_embedding_type="rope")
    assert model.layers == resolve_model("Llama-3_3-Nemotron-Super-49B-v1").layers


def test_megatron_cores_mla_config_is_deepseek_v3s_attention() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer import MLATransformerConfig

    hf = json.loads(Path(preset_path("deepseek-ai/DeepSeek-V3")).read_text())
    config = MLATransformerConfig(
        num_layers=61,
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        qk_layernorm=True,
        add_bias_linear=False,
        multi_latent_attention=True,
    )
    model = model_from_transformer_config(config, vocab_size=hf["vocab_size"])
    assert model.layers[0].mixer == resolve_model("DeepSeek-V3").layers[0].mixer
    assert (model.position_embedding_type, model.rotary_dim) == ("rope", 64)


def without_published_count(layer: LayerSpec) -> LayerSpec:
    """How a model card counts its parameters is in no TransformerConfig."""
    if isinstance(layer.ffn, MoESpec):
        return replace(layer, ffn=replace(layer.ffn, expert_bias_in_published_count=False))
    return layer


def test_a_hybrid_provider_is_nemotron_3_nano() -> None:
    """The attributes Bridge's NemotronHBridge sets on its MambaModelProvider (nemotron_h_bridge.py)."""
    hf = json.loads(Path(preset_path("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")).read_text())

    def squared_relu() -> None:
        """Only its name is read."""

    provider = SimpleNamespace(
        num_layers=52,
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf["head_dim"],
        ffn_hidden_size=hf["intermediate_size"],
        hybrid_override_pattern=hf["hybrid_override_pattern"],
        is_hybrid_model=True,
        mamba_num_heads=hf["mamba_num_heads"],
        mamba_head_dim=hf["mamba_head_dim"],
        mamba_state_dim=hf["ssm_state_size"],
        mamba_num_groups=hf["n_groups"],
        num_moe_experts=hf["n_routed_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf["moe_shared_expert_intermediate_size"],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.0001,
        activation_func=squared_relu,
        gated_linear_unit=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding_type="none",
    )
    model = model_from_transformer_config(provider, vocab_size=hf["vocab_size"])
    ours = resolve_model("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    ours = replace(ours, layers=tuple(without_published_count(x) for x in ours.layers))
    assert (model.layers, model.hybrid, model.rotary_dim) == (ours.layers, True, 0)


def test_a_hybrid_without_a_pattern_has_the_layers_of_its_ratios() -> None:
    """mamba_hybrid_layer_allocation.py: ratios of 0, the default, leave Mamba alone; else one attention layer in the
    middle of six, then three MLPs over the five that are left, towards the end."""
    assert all(isinstance(x.mixer, MambaSpec) for x in read(is_hybrid_model=True).layers)
    mixed = read(is_hybrid_model=True, hybrid_attention_ratio=0.17, hybrid_mlp_ratio=0.5)
    assert "".join("M" if isinstance(x.mixer, MambaSpec) else "*" if x.mixer else "-" for x in mixed.layers) == "M--*M-"


@pytest.mark.parametrize(
    ("kinds", "coefficients", "running"),
    [
        ("aux_loss", 1e-3, "aux_loss"), ("aux_loss", 0.0, "none"), ("sinkhorn", 0.0, "sinkhorn"),
        (["aux_loss", "seq_aux_loss"], [1e-3, 0.0], "aux_loss"), (["aux_loss", "seq_aux_loss"], 1e-3,
                                                                  "aux_loss+seq_aux_loss"),
    ],
)  # fmt: skip
def test_an_auxiliary_loss_without_a_coefficient_is_none(kinds: Any, coefficients: Any, running: str) -> None:
    """Held to megatron-core's own question, whose default coefficient is 0."""
    fields = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients}
    model = read(num_moe_experts=4, **fields)
    assert model.layers[0].ffn.router_load_balancing_type == running  # type: ignore[union-attr]
    router_module = pytest.importorskip("megatron.core.transformer.moe.router")
    router = object.__new__(router_module.TopKRouter)  # nothing but the question
    router.config, router.routing_type = SimpleNamespace(**fields), kinds
    if isinstance(kinds, str) or isinstance(coefficients, list):
        assert router.is_aux_loss_enabled() is ("aux_loss" in running)


@pytest.mark.parametrize(("release", "bias"), [((0, 14), False), ((0, 15), True), ((0, 16), True)])
def test_biases_reach_the_router_from_0_15_on(release: tuple[int, int], bias: bool) -> None:
    """router.py: Router.__init__ of 0.13.1, 0.14.0, 0.15.3 and 0.16.1."""
    config = SimpleNamespace(num_layers=1, hidden_size=96, num_attention_heads=6, num_moe_experts=4)
    model = model_from_transformer_config(config, vocab_size=512, megatron_core=release)
    assert model.layers[0].ffn.add_router_bias is bias  # type: ignore[union-attr]


def test_an_mtp_depth_is_the_last_layer_again() -> None:
    model = read(num_moe_experts=4, moe_layer_freq="[0]*2+[1]*4", mtp_num_layers=2)
    assert (model.mtp_num_layers, model.mtp_layer) == (2, model.layers[-1])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_layers": None}, "num_layers"),
        ({"hidden_size": "96"}, "hidden_size"),
        ({"hidden_size": 97}, "hidden_size (97)"),
        ({"num_query_groups": 4}, "num_query_groups (4)"),
        ({"activation_func": "mish"}, "activation_func"),
        ({"num_moe_experts": 1}, "moe_router_topk (2)"),
        ({"multi_latent_attention": True}, "kv_lora_rank"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant"),
        ({"hybrid_override_pattern": "M*"}, "hybrid_override_pattern"),
        ({"hybrid_override_pattern": "M*-X-M"}, "'X'"),
        ({"heterogeneous_block_specs": True}, "per_block_parameters"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(change: dict[str, Any], word: str) -> None:
    assert word in refusal(**change)


# ---- attention that differs from layer to layer (Step-3.5, MiMo-V2) ----

STEP = dict(
    num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=2, kv_channels=16, ffn_hidden_size=160,
    gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm", position_embedding_type="rope",
    window_size=None, mtp_num_layers=1,
    layer_types=["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
    sliding_attention_setting={
        "window_size": [512, 0], "num_attention_heads": 6, "num_query_groups": 3, "kv_channels": 16,
    },
)  # fmt: skip
MIMO = dict(
    num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=1, kv_channels=24, v_head_dim=16,
    ffn_hidden_size=160, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
    position_embedding_type="rope", window_size=128, hybrid_attention_pattern=[0, 1, 1],
    full_attn_num_query_groups=1, swa_num_query_groups=2, mtp_num_layers=1,
)  # fmt: skip


def layerwise(provider: str, fields: dict[str, Any], **changes: Any) -> ModelSpec:
    config = SimpleNamespace(**{**fields, **changes})
    return model_from_transformer_config(config, vocab_size=512, provider=provider)


def test_step_slides_with_heads_of_its_own_and_its_mtp_depths_go_on() -> None:
    model = layerwise("Step35ModelProvider", STEP)
    full, sliding, _ = (layer.mixer for layer in model.layers)
    assert isinstance(full, AttentionSpec) and isinstance(sliding, AttentionSpec)
    assert (full.num_attention_heads, full.num_query_groups, full.window_size) == (4, 2, None)
    assert (sliding.num_attention_heads, sliding.num_query_groups, sliding.window_size) == (6, 3, 512)
    assert model.mtp_layer is not None and model.mtp_layer.mixer == sliding
    # Beyond its end a depth sees all tokens.
    short = layerwise("Step35ModelProvider", STEP, layer_types=STEP["layer_types"][:3])
    assert short.mtp_layer is not None and short.mtp_layer.mixer == full


def test_mimo_has_narrow_values_and_a_sink_where_it_slides() -> None:
    model = layerwise("MiMoV2FlashModelProvider", MIMO)
    full, sliding, _ = (layer.mixer for layer in model.layers)
    assert isinstance(full, AttentionSpec) and isinstance(sliding, AttentionSpec)
    assert (full.value_channels, full.num_query_groups, full.window_size) == (16, 1, None)
    assert (sliding.value_channels, sliding.num_query_groups, sliding.window_size) == (16, 2, 128)
    assert sliding.learnable_softmax_sink and not full.learnable_softmax_sink
    assert model.mtp_layer is not None and model.mtp_layer.mixer == sliding


@pytest.mark.parametrize(
    ("provider", "fields", "changes", "said"),
    [
        ("Step35ModelProvider", STEP, {"sliding_attention_setting": None}, "sliding_attention_setting is not set"),
        ("Step35ModelProvider", STEP, {"sliding_attention_setting": [1]}, "it must be a dict"),
        ("Step35ModelProvider", STEP, {"sliding_attention_setting": {"window_size": 8}}, "'num_attention_heads'"),
        ("Step35ModelProvider", STEP, {"layer_types": ["chunked"]}, "layer_types holds 'chunked'"),
        ("Step35ModelProvider", STEP, {"mtp_num_layers": 2}, "MTP depths of both kinds"),
        ("MiMoV2FlashModelProvider", MIMO, {"hybrid_attention_pattern": [0, 1]}, "a 0 or 1 for each of 3 layers"),
        ("MiMoV2FlashModelProvider", MIMO, {"swa_num_query_groups": 3}, "is not divisible by the query groups"),
    ],
)
def test_layerwise_attention_that_says_too_little_is_refused_in_a_line(
    provider: str, fields: dict[str, Any], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        layerwise(provider, fields, **changes)
    assert "\n" not in str(caught.value)
