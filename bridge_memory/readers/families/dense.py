"""Dense decoders: Llama and what differs from it only by a bias, a norm, an activation or a window."""

from __future__ import annotations

from bridge_memory.readers.families.common import (
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

_ROTARY_HALF = {"rotary_factor": 0.5}
_GEMMA = Family(tied=True, activation="gelu_pytorch_tanh", head_dim=256)

DENSE: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=False, output_bias=False, window="all"),
    "ministral3": Family(qkv_bias=False, output_bias=False, window="all"),
    # transformers' Qwen2Attention: bias on q, k, v, none on o, and no key for it.
    "qwen2": Family(qkv_bias=True, output_bias=False, window="qwen"),
    "qwen3": Family(qk_layernorm="head", window="qwen", head_dim=128),
    "gemma": _GEMMA,
    "gemma2": Family(
        tied=True, activation="gelu_pytorch_tanh", head_dim=256, post_layernorms=True, window="alternate"
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
    "phi3": Family(qkv_bias=False, output_bias=False, window="all", ignored=("attention_bias",)),
    "granite": Family(),
    "smollm3": Family(ignored=("no_rope_layers", "no_rope_layer_interval"), window="qwen"),
    # OLMo's norm has no weights; Megatron's has, and a conversion sets them to one and zero.
    "olmo": Family(
        normalization="LayerNorm",
        assumptions=("OLMo's layer norms have no weights; counted as Megatron's, which have 2h each",),
    ),
    "olmo2": Family(
        qk_layernorm="full",
        assumptions=("OLMo 2 norms the outputs of its blocks; counted as the same two norms before them",),
    ),
    "glm": Family(output_bias=False, tied=False, **_ROTARY_HALF, head_dim=128),  # type: ignore[arg-type]
    "glm4": Family(
        output_bias=False, post_layernorms=True, head_dim=128, **_ROTARY_HALF  # type: ignore[arg-type]
    ),
    "nemotron": Family(
        normalization="LayerNorm", gated=False, activation="relu2", **_ROTARY_HALF  # type: ignore[arg-type]
    ),
    "seed_oss": Family(qkv_bias=True, output_bias=False, ignored=("attention_out_bias",)),
}


def read_dense(f: Fields) -> ModelSpec:
    return dense_model(f, DENSE[f.model_type])


def dense_model(f: Fields, family: Family) -> ModelSpec:
    """A stack of equal layers: softmax attention and one MLP."""
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    spec = attention(f, family, hidden_size)
    ffn = mlp(f, family)
    layers = [
        LayerSpec(mixer, ffn, post_layernorms=family.post_layernorms)
        for mixer in attentions(f, family, spec, n)
    ]
    hidden_dropout = f.number("resid_pdrop", default=0.0, most=1.0)
    return model(
        f,
        family,
        layers,
        hidden_size=hidden_size,
        rotary_dim=int(spec.kv_channels * rotary_factor(f, family.rotary_factor)),
        hidden_dropout=hidden_dropout,
    )
