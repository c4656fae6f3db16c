"""GPT-2 and GPT-3, BLOOM, StarCoder 1: LayerNorm, biases on all linears, and other key names."""

from __future__ import annotations

from bridge_memory.readers.families.common import ACTIVATIONS, Family, heads, model, num_layers
from bridge_memory.readers.fields import Fields
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec

FAMILY = Family(tied=True, normalization="LayerNorm")


def _layers(f: Fields, hidden_size: int, groups: int | None, activation: str) -> list[LayerSpec]:
    a, g, d = heads(f, hidden_size, None)
    mixer = AttentionSpec(
        num_attention_heads=a,
        num_query_groups=groups or g,
        kv_channels=d,
        add_qkv_bias=True,
        add_output_bias=True,
        rotary=False,
    )
    ffn = MLPSpec(
        ffn_hidden_size=f.integer("n_inner", "intermediate_size", default=4 * hidden_size),
        gated=False,
        activation=activation,
        add_bias=True,
    )
    return [LayerSpec(mixer, ffn)] * num_layers(f)


def read_gpt2(f: Fields) -> ModelSpec:
    """Learned positions, tied embeddings. Dropout is the config's (0.1 in GPT-2 and 3)."""
    if f.flag("add_cross_attention"):
        raise f.error("add_cross_attention is true; only decoders without cross attention can be estimated")
    f.ignore("summary_type", "summary_first_dropout", "validate_runner_input", "inference_runner")
    f.ignore("scale_attention_softmax_in_fp32", "pre_allocate_kv_cache", "max_batch_size")
    groups = None
    if f.model_type == "gpt_bigcode":
        groups = 1 if f.flag("multi_query", default=True) else None
    hidden_size = f.integer("n_embd", "hidden_size")
    name = f.choice("activation_function", ACTIVATIONS, default="gelu_new")
    layers = _layers(f, hidden_size, groups, name)
    return model(
        f,
        FAMILY,
        layers,
        hidden_size=hidden_size,
        rotary_dim=0,
        position_embedding_type="learned_absolute",
        default_dropout=0.1,
    )


def read_bloom(f: Fields) -> ModelSpec:
    """ALiBi, a layer norm on the word embeddings, tied embeddings."""
    hidden_size = f.integer("hidden_size", "n_embed")
    layers = _layers(f, hidden_size, None, "gelu")
    return model(
        f,
        FAMILY,
        layers,
        hidden_size=hidden_size,
        rotary_dim=0,
        position_embedding_type="alibi",
        embedding_layernorm=True,
    )
