"""Hugging Face config.json -> ModelSpec, from the dict alone.

A family is one entry of ``READERS``: model_type -> a function of ``Fields``. Keys that the function does not read are
refused if their names suggest a size or a structure (``fields.Fields.finish``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bridge_memory.readers.encoders import split_multimodal
from bridge_memory.readers.families.bridged import read_deepseek_v4, read_falcon_h1, read_gemma4
from bridge_memory.readers.families.deepseek import MLA, read_deepseek
from bridge_memory.readers.families.delta_net import DELTA_NET, read_delta_net
from bridge_memory.readers.families.dense import DENSE, read_dense
from bridge_memory.readers.families.generic import read_generic
from bridge_memory.readers.families.gpt2 import read_bloom, read_gpt2
from bridge_memory.readers.families.hybrid import read_nemotron_h, read_nemotron_nas
from bridge_memory.readers.families.interleaved import read_bamba, read_granite_hybrid, read_jamba, read_lfm2
from bridge_memory.readers.families.kimi_linear import read_kimi_linear
from bridge_memory.readers.families.longcat import read_longcat
from bridge_memory.readers.families.moe import MOE, read_moe
from bridge_memory.readers.families.sparse import SPARSE, read_sparse
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.readers.nested_defaults import NESTED_DEFAULTS, NESTED_SIZES
from bridge_memory.spec import ModelSpec, SpecError

READERS: dict[str, Callable[[Fields], ModelSpec]] = {
    **dict.fromkeys(DENSE, read_dense),
    **dict.fromkeys(MOE, read_moe),
    **dict.fromkeys(DELTA_NET, read_delta_net),
    **dict.fromkeys(SPARSE, read_sparse),
    **dict.fromkeys(MLA, read_deepseek),
    "gpt2": read_gpt2,
    "gpt_bigcode": read_gpt2,
    "bloom": read_bloom,
    "nemotron_h": read_nemotron_h,
    "nemotron-nas": read_nemotron_nas,
    "granitemoehybrid": read_granite_hybrid,
    "bamba": read_bamba,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2,
    "jamba": read_jamba,
    "kimi_linear": read_kimi_linear,
    "longcat_flash": read_longcat,
    "gemma4_text": read_gemma4,
    "falcon_h1": read_falcon_h1,
    "deepseek_v4": read_deepseek_v4,
}

#: Model types that ``read_generic`` must not read -> what their layers have that the inventory does not model.
UNKNOWN_BLOCKS = {
    "gemma3n_text": "per-layer embeddings, alternating updates and layers that share keys and values",
    "kimi_k3": "Kimi delta attention, with a gate for every channel of a key",
    "zamba2": "attention blocks that layers share, each with adapters of its own",
    "ernie4_5_vl_moe_text": "two pools of experts of different widths, for text and for images",
    "ernie4_5_moe_vl": "two pools of experts of different widths, for text and for images",
    "nemotron_labs_diffusion": "diffusion over blocks of tokens, with attention of its own",
    "bitnet": "norms inside of attention and MLP",
    "diffllama": "differential attention",
    "nanochat": "norms without weights",
}

#: Aliases of a text architecture, mostly the model_type of the language model inside a multimodal wrapper.
ALIASES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_asr_text": "qwen3",
    "minimax_m3": "minimax_m3_vl_text",
    "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe",
    "Glm4vMoe_text": "glm4_moe",
}


def model_from_hf_config(
    config: Mapping[str, Any], name: str, *, make_vocab_size_divisible_by: int | None = None
) -> ModelSpec:
    """Read a Hugging Face config as the model that Megatron builds from it.

    Args:
        config: The parsed config.json.
        name: What results and errors call the model.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times TP. None: to a multiple of TP
            only, as Megatron Bridge does (listed in the model's assumptions).

    Returns:
        The architecture, in global sizes. Dropout follows Megatron Bridge and mbridge: hidden dropout is 0 unless the
        config sets it, attention dropout is the config's.

    Raises:
        SpecError: A key is missing, out of range or not understood.

    Example:
        >>> from bridge_memory import model_from_hf_config
        >>> config = {
        ...     "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24,
        ...     "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
        ...     "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        ...     "tie_word_embeddings": False,
        ... }
        >>> model_from_hf_config(config, "mine").num_layers
        24
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"{name}: the config is {shown(config)}; it must be a JSON object")
    encoders = split_multimodal(config, name)
    config = dict(encoders.text)
    defaults = _fill_defaults(config, encoders.key) if encoders.key else []
    model_type = config.get("model_type")
    if model_type is None:
        raise SpecError(f"{name}: model_type is missing; add it (llama, qwen3_moe, deepseek_v3, ...)")
    if not isinstance(model_type, str):
        raise SpecError(f"{name}: model_type is {shown(model_type)}; it must be a string")
    if model_type in UNKNOWN_BLOCKS:
        raise SpecError(f"{name}: model_type {shown(model_type)} is not estimated: {UNKNOWN_BLOCKS[model_type]}")
    f = Fields(config, name, ALIASES.get(model_type, model_type), make_vocab_size_divisible_by)
    for sentence in (*encoders.assumptions, *defaults):
        f.assume(sentence)
    f.not_modelled += encoders.not_modelled
    model = READERS.get(f.model_type, read_generic)(f)
    return replace(model, encoders=encoders.counted) if encoders.counted else model


def _fill_defaults(text: dict[str, Any], key: str) -> list[str]:
    """Add the class defaults of sizes that a nested config omits. Returns one assumption, or none."""
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in NESTED_DEFAULTS:
        return []
    filled = {
        field: default
        for field, default in zip(NESTED_SIZES, NESTED_DEFAULTS[model_type], strict=True)
        if text.get(field) is None and default is not None
    }
    text.update(filled)
    values = ", ".join(f"{field} {default}" for field, default in filled.items())
    return [f"absent from {key}, so transformers' defaults of {model_type}: {values}"] if filled else []
