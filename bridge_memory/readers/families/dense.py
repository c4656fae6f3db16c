"""Dense decoders: Llama, and families that differ from it only by biases, norms, activation or windows."""

from __future__ import annotations

from typing import Any

from bridge_memory.readers.families.common import (
    NO_BRIDGE,
    NORM_AFTER,
    Family,
    attention,
    attentions,
    mlp,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.fields import Fields
from bridge_memory.spec import LayerSpec, ModelSpec

_SOFTCAPPED = (
    "attn_logit_softcapping is taken to be inside the attention kernel; Megatron Bridge before 0.6 keeps the scores of "
    "every head"
)
_NO_BIAS: dict[str, Any] = {"bias_keys": ()}

DENSE: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(**_NO_BIAS, window="all"),
    "ministral": Family(**_NO_BIAS, window="all"),
    "ministral3": Family(**_NO_BIAS, window="all"),
    # transformers' Qwen2Attention: a bias on q, k and v but not on o, without a key.
    "qwen2": Family(bias_keys=(), qkv_bias=True, output_bias="never", window="qwen"),
    "qwen3": Family(qk_layernorm="head", window="qwen", head_dim=128),
    # A Qwen2 with MTP layers; its attention_bias key says true.
    "mimo": Family(qkv_bias=True, output_bias="never", window="qwen"),
    "gemma": Family(tied=True, activation="gelu_pytorch_tanh", head_dim=256),
    "gemma2": Family(
        tied=True, activation="gelu_pytorch_tanh", head_dim=256, post_layernorms=True, window="alternate",
        softcapped_logits=True, core_attention="flex", assumptions=(_SOFTCAPPED,),
    ),
    "vaultgemma": Family(
        tied=True, activation="gelu_pytorch_tanh", head_dim=256, window="alternate",
        assumptions=(_SOFTCAPPED, NO_BRIDGE),
    ),
    "gemma3_text": Family(
        tied=True,
        activation="gelu_pytorch_tanh",
        head_dim=256,
        qk_layernorm="head",
        post_layernorms=True,
        window="pattern",
        ignored=("use_bidirectional_attention",),
    ),
    "phi3": Family(**_NO_BIAS, window="all", ignored=("attention_bias",)),
    "granite": Family(),
    "smollm3": Family(tied=True, window="qwen", ignored=("no_rope_layers", "no_rope_layer_interval")),
    # OLMo's norm has no weights. Megatron's has; a conversion sets them to one and zero.
    "olmo": Family(
        normalization="LayerNorm",
        assumptions=("OLMo's layer norms have no weights; counted as Megatron's, which have 2h each",),
    ),
    "olmo2": Family(qk_layernorm="full", assumptions=(NORM_AFTER,)),
    "olmo3": Family(qk_layernorm="full", window="pattern", window_every=4, assumptions=(NORM_AFTER,)),
    "exaone4": Family(
        **_NO_BIAS, qk_layernorm="head", window="all", rotary_in_windows=True, post_layernorms=True,
        pre_layernorms=False, core_attention="local",
    ),
    "glm": Family(output_bias="never", rotary_factor=0.5, head_dim=128),
    "glm4": Family(output_bias="never", rotary_factor=0.5, head_dim=128, post_layernorms=True),
    "glm4v_text": Family(
        bias_keys=(), qkv_bias=True, output_bias="never", rotary_factor=0.5, post_layernorms=True
    ),
    "hunyuan_v1_dense": Family(qk_layernorm="head", assumptions=(NO_BRIDGE,)),
    "apertus": Family(qk_layernorm="head", gated=False, activation="xielu", ignored=("qk_norm", "post_norm")),
    "nemotron": Family(normalization="LayerNorm", gated=False, activation="relu2", rotary_factor=0.5),
    "seed_oss": Family(qkv_bias=True, output_bias="attention_out_bias", head_dim=128),
    "gpt_neox": Family(
        qkv_bias=True,
        mlp_bias=True,
        normalization="LayerNorm",
        gated=False,
        activation="gelu",
        rotary_factor=0.25,
        ignored=("use_parallel_residual",),
    ),
}


def read_dense(f: Fields) -> ModelSpec:
    return dense_model(f, DENSE[f.model_type])


def dense_model(f: Fields, family: Family) -> ModelSpec:
    """A model of layers with softmax attention and an MLP, which differ at most by their window."""
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    spec = attention(f, family, hidden_size)
    ffn = mlp(f, family)
    layers = [
        LayerSpec(mixer, ffn, family.post_layernorms, family.pre_layernorms)
        for mixer in attentions(f, family, spec, n)
    ]
    depths = f.count("num_nextn_predict_layers")
    return model(
        f,
        family,
        layers,
        hidden_size=hidden_size,
        rotary_dim=int(spec.kv_channels * rotary_factor(f, family.rotary_factor)),
        mtp_num_layers=depths,
        mtp_layer=layers[-1] if depths else None,
    )
