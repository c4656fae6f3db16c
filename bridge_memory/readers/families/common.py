"""Shared by most decoder families: attention, MLP, rotary width, windows, and the fields outside the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bridge_memory.readers.fields import MAX_LAYERS, Fields, shown
from bridge_memory.spec import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, divide

#: Hugging Face activation -> the function that Megatron runs (Bridge: model_bridge.py ACTIVATION_MAPPING; gelu
#: variants that it does not list are the tanh form, megatron.core.activations.fast_gelu).
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "fast_gelu",
    "quick_gelu": "quick_gelu",
    # The clamped gate of gpt-oss (Bridge: minimax_m3_bridge.py).
    "swigluoai": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "xielu": "xielu",
}

NO_BRIDGE = "Megatron Bridge 0.6.2 has no bridge for this model: read as megatron-core's modules would build it"
NORM_AFTER = "the norms of the blocks' outputs are counted as the same two norms before the blocks"


class Family(NamedTuple):
    """How one model_type differs from Llama. Defaults are those of its transformers config class."""

    #: Default of tie_word_embeddings.
    tied: bool = False
    #: The keys that enable a bias on q, k and v, and their default.
    bias_keys: tuple[str, ...] = ("attention_bias",)
    qkv_bias: bool = False
    #: Bias of the output projection: "as qkv", "never", or the key that enables it.
    output_bias: str = "as qkv"
    qk_layernorm: str | None = None
    gated: bool = True
    activation: str = "silu"
    #: Overrides the config's activation (gpt-oss: the config says silu, the model runs a clamped quick GELU).
    fixed_activation: str | None = None
    normalization: str = "RMSNorm"
    post_layernorms: bool = False
    #: Megatron Bridge's layers (``LayerSpec.pre_layernorms``, ``AttentionSpec.core_attention``).
    pre_layernorms: bool = True
    core_attention: str = ""
    #: Layers with a sliding window: "none", "all", "qwen" (by Qwen's keys), "alternate" (even layers), "pattern" (all
    #: except every n-th).
    window: str = "none"
    #: Where some layers have a window, only those have rotary embeddings.
    rotary_in_windows: bool = False
    #: Of "pattern": n, unless the config says it.
    window_every: int = 6
    rotary_factor: float = 1.0
    #: Default of head_dim; None: hidden_size / num_attention_heads.
    head_dim: int | None = None
    #: Default of mlp_bias, a bias on the MLP's linears.
    mlp_bias: bool = False
    #: A tanh over the logits unless final_logit_softcapping is null.
    softcapped_logits: bool = False
    #: Keys of this family that change nothing.
    ignored: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()


def num_layers(f: Fields) -> int:
    n: int = f.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=MAX_LAYERS)
    return n


def rotary_factor(f: Fields, default: float) -> float:
    """partial_rotary_factor, at the top level or in rope_parameters or rope_scaling."""
    for inner in ("rope_parameters", "rope_scaling"):
        value = f.mapping(inner).get("partial_rotary_factor")
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise f.error(f"{inner}.partial_rotary_factor is {shown(value)}; it must lie in (0, 1]")
            default = float(value)
    f.ignore("rope_theta", "rotary_emb_base")
    return f.number("partial_rotary_factor", "rotary_pct", "rotary_percent", default=default, most=1.0)


def _yarn(f: Fields, layers: Sequence[LayerSpec]) -> bool:
    """Whether Bridge gives the model YaRN's positions (``model_bridge.py: hf_config_to_provider_kwargs``), which
    multi-latent attention has inside it."""
    scaled = [f.config.get(key) for key in ("rope_parameters", "rope_scaling")]
    kinds = [one.get("rope_type", one.get("type")) for one in scaled if isinstance(one, Mapping)]
    return "yarn" in kinds and not any(isinstance(layer.mixer, MLASpec) for layer in layers)


def heads(f: Fields, hidden_size: int, head_dim: int | None) -> tuple[int, int, int]:
    """(a, g, d): attention heads, query groups, head dimension."""
    a = f.integer("num_attention_heads", "n_head")
    g = f.integer("num_key_value_heads", default=a)
    if a % g:
        raise f.error(f"num_attention_heads ({a}) is not divisible by num_key_value_heads ({g})")
    d = f.integer("head_dim", "attention_head_dim", default=head_dim)
    if d is None:
        try:
            d = divide(hidden_size, a, "hidden_size", "num_attention_heads", "set head_dim")
        except ValueError as error:
            raise f.error(str(error)) from None
    return a, g, d


def attention(f: Fields, family: Family, hidden_size: int) -> AttentionSpec:
    a, g, d = heads(f, hidden_size, family.head_dim)
    bias = f.flag(*family.bias_keys, default=family.qkv_bias) if family.bias_keys else family.qkv_bias
    if family.output_bias in ("as qkv", "never"):
        output_bias = bias and family.output_bias == "as qkv"
    else:
        output_bias = f.flag(family.output_bias)
    qk_layernorm = family.qk_layernorm
    # The key of Qwen3-Coder, GLM and MiniMax. For families without such a norm it stays unread; true is then refused.
    if qk_layernorm is not None and not f.flag("use_qk_norm", default=True):
        qk_layernorm = None
    return AttentionSpec(
        num_attention_heads=a,
        num_query_groups=g,
        kv_channels=d,
        add_qkv_bias=bias,
        add_output_bias=output_bias,
        qk_layernorm=qk_layernorm,
        core_attention=family.core_attention,
    )


def activation(f: Fields, family: Family) -> str:
    """The activation, under its name in specs."""
    key = "hidden_activation" if f.has("hidden_activation") else "hidden_act"
    if key == "hidden_act" and not f.has(key) and f.has("activation_function"):
        key = "activation_function"
    chosen = f.choice(key, ACTIVATIONS, default=family.activation)
    f.ignore("hidden_act", "hidden_activation")
    return family.fixed_activation or chosen


def mlp(f: Fields, family: Family) -> MLPSpec:
    return MLPSpec(
        ffn_hidden_size=f.integer("intermediate_size"),
        gated=family.gated,
        activation=activation(f, family),
        add_bias=f.flag("mlp_bias", default=family.mlp_bias),
    )


def layer_types(f: Fields, n: int, known: Sequence[str], *keys: str) -> Sequence[str] | None:
    """layer_types, or the first of ``keys`` that is there, with one entry of ``known`` per layer; None if absent.
    Raises SpecError."""
    key = next((key for key in keys if f.has(key)), "layer_types")
    types = f.items(key)
    f.ignore(*keys)
    if types is None:
        return None
    if len(types) != n:
        raise f.error(f"{key} has {len(types)} entries for num_hidden_layers {n}; give one a layer")
    for kind in types:
        if kind not in known:
            raise f.error(f"{key} holds {shown(kind)}; known here: {', '.join(known)}")
    return types


def windows(f: Fields, family: Family, n: int) -> list[int | None]:
    """The sliding window of each layer in tokens; None: full attention."""
    # transformers 5 writes 0 for a disabled window.
    size = f.count("sliding_window") or None
    types = layer_types(f, n, ("full_attention", "sliding_attention"))
    if family.window == "qwen":
        use = f.flag("use_sliding_window", default=False)
        first = f.count("max_window_layers", default=0)
        if not use:
            return [None] * n
        if types is None:
            return [size if i >= first else None for i in range(n)]
    if types is not None:
        return [size if kind == "sliding_attention" else None for kind in types]
    if size is None or family.window == "none":
        return [None] * n
    if family.window == "alternate":
        return [size if i % 2 == 0 else None for i in range(n)]
    if family.window == "pattern":
        every = f.integer("sliding_window_pattern", "_sliding_window_pattern", default=family.window_every)
        return [size if (i + 1) % every else None for i in range(n)]
    return [size] * n


def attentions(f: Fields, family: Family, spec: AttentionSpec, n: int) -> list[AttentionSpec]:
    """One AttentionSpec per layer; equal ones are one object."""
    lengths = windows(f, family, n)
    f.ignore("sliding_window_pattern", "_sliding_window_pattern")
    everywhere = not family.rotary_in_windows or not any(lengths)
    per_window = {w: replace(spec, window_size=w, rotary=everywhere or bool(w)) for w in lengths}
    return [per_window[w] for w in lengths]


def model(
    f: Fields,
    family: Family,
    layers: Sequence[LayerSpec],
    *,
    hidden_size: int,
    rotary_dim: int,
    position_embedding_type: str = "rope",
    mtp_num_layers: int = 0,
    mtp_layer: LayerSpec | None = None,
    hybrid: bool = False,
    embedding_layernorm: bool = False,
    default_dropout: float = 0.0,
) -> ModelSpec:
    """The ModelSpec of ``layers`` with the fields that all families share; refuses unread keys (``Fields.finish``)."""
    vocab_size = f.integer("vocab_size")
    positions = f.integer(
        "max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx", default=0
    )
    if position_embedding_type == "learned_absolute" and not positions:
        raise f.error("max_position_embeddings is missing; the learned position embedding has that many rows")
    if rotary_dim % 2:
        raise f.error(
            f"the rotated part of a head is {rotary_dim} wide; it must be even (head_dim, partial_rotary_factor)"
        )
    if position_embedding_type == "rope":
        kinds = {"rope": "rope", "rotary": "rope", "nope": "none"}
        position_embedding_type = f.choice("position_embedding_type", kinds, default="rope")
        rotary_dim = rotary_dim if position_embedding_type == "rope" else 0
    tied = f.flag("tie_word_embeddings", default=family.tied)
    output_bias = f.flag("lm_head_bias", default=False)
    attention_dropout = f.number("attention_dropout", "attn_pdrop", default=default_dropout, most=1.0)
    hidden_dropout = f.number(
        "hidden_dropout", "resid_pdrop", "residual_dropout", default=default_dropout, most=1.0
    )
    f.ignore(*family.ignored)
    f.finish()
    multiple = vocabulary_multiple(f, vocab_size)
    for sentence in family.assumptions:
        f.assume(sentence)
    return ModelSpec(
        name=f.name,
        model_type=f.model_type,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=tuple(layers),
        share_embeddings_and_output_weights=tied,
        normalization=family.normalization,
        position_embedding_type=position_embedding_type,
        max_position_embeddings=positions,
        make_vocab_size_divisible_by=multiple,
        hidden_dropout=hidden_dropout,
        attention_dropout=attention_dropout,
        embedding_layernorm=embedding_layernorm,
        output_bias=output_bias,
        rotary_dim=rotary_dim,
        yarn=position_embedding_type == "rope" and _yarn(f, layers),
        mtp_num_layers=mtp_num_layers,
        mtp_layer=mtp_layer,
        hybrid=hybrid,
        softcapped_logits=family.softcapped_logits and f.config.get("final_logit_softcapping", 30.0) is not None,
        assumptions=tuple(f.assumptions),
        not_modelled=tuple(f.not_modelled),
    )


def vocabulary_multiple(f: Fields, vocab_size: int) -> int:
    """make_vocab_size_divisible_by: the user's, or 1 with an assumption."""
    if f.vocabulary_multiple is not None:
        return f.vocabulary_multiple
    f.assume(
        f"vocab_size {vocab_size} is padded only to a multiple of the tensor parallel size: Megatron Bridge "
        "and mbridge keep a Hugging Face vocabulary as it is (Megatron-LM pads to a multiple of 128 x TP)"
    )
    return 1
