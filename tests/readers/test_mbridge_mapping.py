"""Our reading of a config and mbridge's (``AutoBridge.from_config``) agree, field by field.

Every preset whose model_type mbridge knows, and small configs of the types it knows and no preset has. Where the
two differ, the field and the reason stand in DIFFERENCES; a difference that is gone fails the test too.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.readers import list_presets, model_from_hf_config, resolve_model
from bridge_memory.readers.mbridge_mapping import model_from_mbridge
from bridge_memory.readers.presets import preset_path
from bridge_memory.spec import SpecError

for needed in ("torch", "megatron.core", "transformers"):
    pytest.importorskip(needed)
pytest.importorskip("mbridge", exc_type=ImportError)

KNOWN = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gemma3_text")

#: model_type -> {field: why mbridge has another value}. Ours follows Megatron Bridge and the published model.
NO_AUX_LOSS = "mbridge trains by reinforcement learning and sets the aux loss to none; pretraining has one"
GEMMA = {
    "layers.ffn.activation": "gelu where Bridge and transformers run the tanh form",
    "layers.mixer.window_size": "the window is in mbridge's own layer, not in the TransformerConfig",
}
DIFFERENCES: dict[str, dict[str, str]] = {
    "qwen2_moe": {
        "layers.ffn.router_load_balancing_type": NO_AUX_LOSS,
        "layers.ffn.shared_expert_gate": "not set in the TransformerConfig, though mbridge maps its weight "
        "(qwen2moe.py: shared_experts.gate_weight)",
    },
    "qwen3_moe": {"layers.ffn.router_load_balancing_type": NO_AUX_LOSS},
    "mixtral": {"layers.ffn.router_load_balancing_type": NO_AUX_LOSS},
    "deepseek_v3": {
        "layers.ffn.router_load_balancing_type": NO_AUX_LOSS,
        "layers.ffn.router_num_groups": "deepseek_v3.py reads no n_group; Bridge does (deepseek/common.py)",
        "layers.ffn.router_group_topk": "as above",
    },
    "glm4_moe": {
        "layers.ffn.router_load_balancing_type": "glm4moe.py names a loss and no coefficient, so that it is 0",
        "layers.ffn.router_num_groups": "glm4moe.py reads no n_group; Bridge does (CONFIG_MAPPING)",
        "layers.ffn.router_group_topk": "as above",
        "mtp_num_layers": "glm4moe.py reads no num_nextn_predict_layers: it drops GLM-4.5's MTP layer",
        "mtp_layer": "as above",
    },
    "gemma3": GEMMA,
    "gemma3_text": GEMMA,
    "mimo": {},
    "qwen2_5_vl": {},
}
#: Of the source, not of the model.
PROVENANCE = ("model_type", "assumptions", "not_modelled")

SMALL = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "head_dim": 16,
}
TEXT = {k: v for k, v in SMALL.items() if k != "hidden_act"}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | {"model_type": "gemma3_text", "sliding_window": 8, "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 2},
    },
    "mimo": SMALL | {"attention_bias": True, "num_nextn_predict_layers": 1},
    "qwen2_5_vl": {
        "text_config": SMALL
        | {"model_type": "qwen2_5_vl_text", "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen2_5_vl"},
    },
}


def config_of(preset: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(preset_path(preset)).read_text())
    return config


def differing(ours: Any, theirs: Any, path: str = "") -> set[str]:
    """Names of the fields in which two specs differ; layers are compared one by one under one name."""
    if is_dataclass(ours) and type(ours) is type(theirs):
        found: set[str] = set()
        for field in (f for f in fields(ours) if f.compare):
            if field.init:
                name = f"{path}.{field.name}" if path else field.name
                found |= differing(getattr(ours, field.name), getattr(theirs, field.name), name)
        return found
    if path == "layers" and len(ours) == len(theirs):
        return set().union(*(differing(a, b, path) for a, b in zip(ours, theirs, strict=True)))
    return set() if ours == theirs else {path}


def agrees(model_type: str, ours: Any, theirs: Any) -> None:
    found = differing(ours, theirs) - set(PROVENANCE)
    allowed = set(DIFFERENCES.get(model_type, {}))
    # An MTP layer is the last decoder layer: it differs where that does.
    repeated = {f.replace("mtp_layer.", "layers.") for f in found if f.startswith("mtp_layer.")}
    assert {f for f in found if not f.startswith("mtp_layer.")} == allowed
    assert repeated <= allowed


@pytest.mark.parametrize("preset", [p for p in list_presets() if config_of(p)["model_type"] in KNOWN])
def test_a_preset_is_read_as_mbridge_reads_it(preset: str) -> None:
    config = config_of(preset)
    agrees(config["model_type"], resolve_model(preset), resolve_model(preset, mapping="mbridge"))


@pytest.mark.parametrize("model_type", OTHERS)
def test_types_without_a_preset_are_read_as_mbridge_reads_them(model_type: str) -> None:
    config = OTHERS[model_type] | {"model_type": model_type}
    agrees(model_type, model_from_hf_config(config, "it"), model_from_mbridge(config, "it"))


def test_a_llama_with_biases_keeps_the_output_bias_that_mbridge_drops() -> None:
    """transformers' Llama has a bias on o_proj as well; mbridge's llama.py sets add_qkv_bias alone."""
    config = SMALL | {"model_type": "llama", "attention_bias": True}
    found = differing(model_from_hf_config(config, "it"), model_from_mbridge(config, "it"))
    assert found - set(PROVENANCE) == {"layers.mixer.add_output_bias"}


def test_every_type_that_mbridge_knows_is_compared_here_or_is_another_wrapper() -> None:
    from mbridge import AutoBridge

    wrappers = {"glm4v", "glm4v_moe", "internvl_chat"}  # vision-language, remote code or a vision tower of Megatron
    assert set(AutoBridge.list_supported_models()) <= set(KNOWN) | set(OTHERS) | wrappers


def test_a_type_that_mbridge_does_not_know_is_refused_with_the_way_out() -> None:
    with pytest.raises(SpecError, match=r"mbridge does not know model_type .bloom.*--mapping builtin"):
        resolve_model("bloom", mapping="mbridge")


def test_what_mbridge_cannot_read_is_one_line() -> None:
    config = config_of("Qwen/Qwen3-8B") | {"num_attention_heads": "many"}
    with pytest.raises(SpecError) as caught:
        model_from_mbridge(config, "it")
    assert "\n" not in str(caught.value)


def test_an_unknown_mapping_is_refused() -> None:
    with pytest.raises(SpecError, match="builtin, mbridge"):
        resolve_model("gpt2", mapping="megatron")
