"""A megatron-core TransformerConfig, or any object with its attributes -> ModelSpec. Does not import megatron.

Covers TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig and Megatron Bridge's providers, which
are TransformerConfigs that also hold arguments of GPTModel (position_embedding_type, ...) as attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.readers import gemma4_provider
from bridge_memory.readers.config_attributes import ConfigAttributes
from bridge_memory.readers.fields import MAX_LAYERS, MAX_SIZE, shown
from bridge_memory.readers.layerwise_provider import LAYERWISE
from bridge_memory.readers.patterns import (
    ATTENTION,
    DELTA_NET,
    MAMBA,
    MLA,
    MLP,
    HybridPattern,
    hybrid_pattern,
    pattern_of_ratios,
)
from bridge_memory.releases import ROUTER_BIAS, Release, core_of
from bridge_memory.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    FeedForward,
    GatedDeltaNetSpec,
    IndexerSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SideBySideSpec,
    SparseSpec,
)
from bridge_memory.spec.model import SPARSE_KERNELS
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect, Unmodelled

#: ``activation_func.__name__`` (megatron.core.activations, torch.nn.functional) -> the name in specs.
ACTIVATION_FUNCTIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "fast_gelu": "fast_gelu",
    "openai_gelu": "fast_gelu",
    "gelu_impl": "fast_gelu",
    "erf_gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "squared_relu": "squared_relu",
    "relu": "relu",
}


#: ``position_embedding_type`` of GPTModel and MambaModel -> that of ModelSpec.
POSITIONS = {"rope": "rope", "yarn": "rope", "mrope": "rope", "learned_absolute": "learned_absolute", "none": "none"}

#: Auxiliary losses, each with a coefficient.
_AUXILIARY_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


#: Megatron Bridge's providers whose layers are not megatron-core's.
GEMMA4_DENSE = ("Gemma4DenseProvider", "Gemma4DenseVLProvider")
GEMMA4_WITH_EXPERTS = ("Gemma4ModelProvider", "Gemma4VLModelProvider")


FALCON_H1 = "FalconH1ModelProvider"


def model_from_transformer_config(
    config: object,
    *,
    vocab_size: int,
    name: str = "TransformerConfig",
    model_type: str = "",
    max_sequence_length: int = 0,
    position_embedding_type: str | None = None,
    rotary_percent: float | None = None,
    share_embeddings_and_output_weights: bool | None = None,
    make_vocab_size_divisible_by: int = 128,
    post_layernorms: bool = False,
    pre_layernorms: bool = True,
    core_attention: str = "",
    full_qk_layernorm: bool = False,
    dense_mtp: bool = False,
    router_in_fp32: bool = False,
    activation: str | None = None,
    provider: str = "",
    megatron_core: Release | None = None,
    assumptions: tuple[str, ...] = (),
) -> ModelSpec:
    """Read a megatron-core TransformerConfig as the model that GPTModel or MambaModel builds from it.

    Keywords give what a TransformerConfig does not hold. None: the attribute of that name if ``config`` has it (as
    Bridge's providers do), else GPTModel's default.

    Args:
        config: A TransformerConfig, or any object with its attributes.
        vocab_size: Tokens of the vocabulary.
        name: What results and errors call the model.
        model_type: Empty: "gpt", or "mamba" for hybrids.
        max_sequence_length: Rows of a learned position embedding.
        position_embedding_type: "rope", "learned_absolute" or "none".
        rotary_percent: Fraction of the head dimension that is rotated.
        share_embeddings_and_output_weights: Whether embedding and output layer share weights.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times TP. 0: ``vocab_size`` is
            final.
        post_layernorms: A custom layer spec has norms after attention and after the feed-forward block.
        pre_layernorms: A custom layer spec has norms before attention and the feed-forward block.
        core_attention: That of a custom layer spec (``AttentionSpec.core_attention``).
        full_qk_layernorm: A custom layer spec normalises queries and keys over all heads.
        dense_mtp: MTP depths have a dense feed-forward block.
        router_in_fp32: A custom layer spec has a router with fp32 weights.
        activation: The activation of a custom layer spec.
        provider: The Megatron Bridge provider class that builds other layers than megatron-core's (Gemma 4).
        megatron_core: The release that builds the model, as (major, minor). None: unknown.
        assumptions: Assumptions of the caller, which the model lists.

    Returns:
        The architecture, in global sizes.

    Raises:
        SpecError: An attribute is missing, out of range or not understood.

    Example:
        >>> from types import SimpleNamespace
        >>> import math
        >>> from bridge_memory import model_from_transformer_config
        >>> def silu(x):
        ...     return x / (1 + math.exp(-x))
        >>> config = SimpleNamespace(  # TransformerConfig(...)
        ...     num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16, num_query_groups=4,
        ...     gated_linear_unit=True, activation_func=silu, add_bias_linear=False, normalization="RMSNorm",
        ... )
        >>> model_from_transformer_config(config, vocab_size=32000, position_embedding_type="rope").num_layers
        24
    """
    c = ConfigAttributes(config, name, megatron_core)
    pattern = None if provider == FALCON_H1 else pattern_of(config, name)
    # Bridge's HybridModelProvider.finalize takes an unset num_layers from the pattern.
    n = c.size("num_layers", None if pattern is None else len(pattern.layers))
    if n > MAX_LAYERS:
        raise c.error(f"num_layers is {n}; more than {MAX_LAYERS} cannot be right")
    hidden_size = c.size("hidden_size")
    act = activation or _activation(c)
    kind = _position(c, position_embedding_type, pattern)
    rotary = kind == "rope"
    unmodelled = list(_unmodelled(c))
    depths = c.get("mtp_num_layers", 0)
    if pattern is not None:
        stack = _hybrid_stack(c, pattern, n, depths, _hybrid_kinds(c, pattern, hidden_size, act, rotary))
    else:
        stack = _gpt_stack(c, n, hidden_size, act, rotary, provider, full_qk_layernorm, depths, dense_mtp)
    unmodelled += stack.unmodelled
    streams = c.size("num_residual_streams", 4) if c.flag("enable_hyper_connections") else 1
    if _variant(c) == "dsv4_hybrid":
        assumptions = (*assumptions, *_assumptions_of_compressed(c))
    layers, depths = stack.layers, stack.depths
    hashed = c.count("moe_n_hash_layers")
    mtp_layer = stack.mtp_layer or layers[-1]
    layers = [_by_token(x) if i < hashed else x for i, x in enumerate(layers)]
    if post_layernorms or not pre_layernorms:
        layers = [replace(x, post_layernorms=post_layernorms, pre_layernorms=pre_layernorms) for x in layers]
    if router_in_fp32:
        layers = [
            replace(x, ffn=replace(x.ffn, router_in_fp32=True)) if isinstance(x.ffn, MoESpec) else x for x in layers
        ]
    if core_attention:
        layers = [
            replace(x, mixer=replace(x.mixer, core_attention=core_attention)) if isinstance(x.mixer, AttentionSpec)
            else x for x in layers
        ]
    gemma4 = provider in GEMMA4_DENSE + GEMMA4_WITH_EXPERTS
    percent = rotary_percent if rotary_percent is not None else c.get("rotary_percent", 1.0)
    tied = share_embeddings_and_output_weights
    return ModelSpec(
        name=name,
        model_type=model_type or ("gpt" if pattern is None else "mamba"),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=tuple(layers),
        share_embeddings_and_output_weights=c.flag("share_embeddings_and_output_weights") if tied is None else tied,
        normalization=_normalization(c),
        position_embedding_type=kind,
        max_position_embeddings=max_sequence_length or c.get("seq_length", 0),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        hidden_dropout=c.number("hidden_dropout", 0.1),
        attention_dropout=c.number("attention_dropout", 0.1),
        # Gemma 4 rotates whole heads, of two widths.
        rotary_dim=_rotary_dim(layers, percent) if rotary and not gemma4 else 0,
        per_layer_vocab_size=c.get("per_layer_embed_vocab_size", 0) if layers[0].per_layer_width else 0,
        residual_streams=streams,
        fused_hyper_connections=c.flag("use_fused_mhc"),
        softcapped_logits=bool(provider) and c.get("final_logit_softcapping") is not None,
        mtp_num_layers=depths,
        # gpt_layer_specs.get_gpt_mtp_block_spec: the last decoder layer's spec.
        mtp_layer=mtp_layer if depths else None,
        mtp_use_repeated_layer=c.flag("mtp_use_repeated_layer"),
        hybrid=pattern is not None or provider == FALCON_H1,
        pattern_splits_pipeline=pattern is not None and pattern.splits_pipeline,
        assumptions=assumptions,
        not_modelled=tuple(unmodelled),
    )


def _by_token(layer: LayerSpec) -> LayerSpec:
    """Experts by a table of the vocabulary, without an expert bias (Megatron-LM ``router.py: TopKRouter.__init__``)."""
    if not isinstance(layer.ffn, MoESpec):
        return layer
    return replace(layer, ffn=replace(layer.ffn, experts_by_token=True, router_enable_expert_bias=False))


class _Stack(NamedTuple):
    """The decoder layers, the number of MTP depths, and their layer (None: the last decoder layer's)."""

    layers: Sequence[LayerSpec]
    depths: int
    mtp_layer: LayerSpec | None = None
    unmodelled: tuple[Unmodelled, ...] = ()


def _hybrid_stack(
    c: ConfigAttributes, pattern: HybridPattern, n: int, depths: int, kinds: dict[str, LayerSpec]
) -> _Stack:
    """The layers of a MambaModel, from the symbols of its pattern."""
    if len(pattern.layers) != n:
        key = "hybrid_layer_pattern" if c.get("hybrid_layer_pattern") else "hybrid_override_pattern"
        raise c.error(f"{key} has {len(pattern.layers)} layers and num_layers says {n}")
    layers = [kinds[symbol] for symbol in pattern.layers]
    if not pattern.mtp:
        return _Stack(layers, depths)
    mtp_layer = _hybrid_mtp(pattern, kinds)
    unmodelled: tuple[Unmodelled, ...] = ()
    if mtp_layer is None:
        what = f"MTP depths with the layers {'/'.join(pattern.mtp)}"
        unmodelled = (Unmodelled(what, Effect.UNKNOWN, order="as large as one MTP depth"),)
    return _Stack(layers, depths or len(pattern.mtp), mtp_layer, unmodelled)


def _gpt_stack(
    c: ConfigAttributes, n: int, hidden_size: int, act: str, rotary: bool, provider: str, full_qk_layernorm: bool,
    depths: int, dense_mtp: bool,
) -> _Stack:  # fmt: skip
    """The layers of a GPTModel, or of a provider with its own layers."""
    if provider == FALCON_H1:
        return _Stack([_side_by_side(c, hidden_size, act, rotary)] * n, depths)
    if provider in GEMMA4_DENSE:
        return _Stack(gemma4_provider.dense_layers(c, n, act), depths)
    if provider in GEMMA4_WITH_EXPERTS:
        layers = gemma4_provider.layers_with_experts(c, n, act, lambda: _moe(c, hidden_size, act))
        return _Stack(layers, depths)
    if c.get("heterogeneous_block_specs"):
        return _Stack(_heterogeneous_layers(c, n, hidden_size, act, rotary), depths)
    mixers, mixer_of_depths = _mixers(c, n, hidden_size, rotary, full_qk_layernorm), None
    if provider in LAYERWISE:
        attention = _attention(c, hidden_size, rotary, full_qk_layernorm)
        mixers, mixer_of_depths = LAYERWISE[provider](c, n, attention)
    layers = _gpt_layers(c, n, hidden_size, act, mixers)
    mtp_layer = None
    if (dense_mtp or mixer_of_depths) and depths:
        mtp_layer = LayerSpec(mixer_of_depths or layers[-1].mixer, _mlp(c, hidden_size, act))
    elif depths and _variant(c) == "dsv4_hybrid":
        mtp_layer = LayerSpec(_compressed(c, n), layers[-1].ffn)
    return _Stack(layers, depths, mtp_layer)


def _unmodelled(c: ConfigAttributes) -> Iterator[Unmodelled]:
    if c.flag("qk_l2_norm"):
        yield Unmodelled(
            "qk_l2_norm of the TransformerConfig: a weightless norm of queries and keys", Effect.UP,
            order="as large as queries and keys, in every layer",
        )  # fmt: skip
    if c.flag("use_kitchen"):
        yield Unmodelled(
            "use_kitchen of the TransformerConfig: another quantisation library", Effect.UNKNOWN, order=UNKNOWN_SIZE
        )


def _assumptions_of_compressed(c: ConfigAttributes) -> Iterator[str]:
    if core_of(c) <= (0, 19):
        yield (
            "experimental_attention_variant dsv4_hybrid: megatron-core up to 0.19 refuses it; counted as in "
            "Megatron-LM's main branch of 2026"
        )
    if not c.flag("apply_dsa_kernel_fusion"):
        yield (
            "apply_dsa_kernel_fusion is off: attention gathers the keys of every query, once more in fp32, which is "
            "most of its memory; by torch.gather, whose backward expands the keys (the latest commits select rows)"
        )
    if c.flag("enable_hyper_connections") and not c.flag("use_fused_mhc"):
        yield (
            "use_fused_mhc is off, which Megatron Bridge turns on where it sees a Blackwell GPU: hyper-connections "
            "save an fp32 copy of the streams in both blocks of every layer"
        )


def pattern_of(config: object, name: str = "TransformerConfig") -> HybridPattern | None:
    """The layer pattern of a hybrid; None for GPT. Raises SpecError.

    A hybrid has a pattern, ratios of layers, or ``is_hybrid_model``, in MambaModel's providers or Megatron-LM's
    arguments.
    """
    for key in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        text = getattr(config, key, None)
        if text:
            if not isinstance(text, str):
                at = ConfigAttributes(config, name, None)
                raise at.error(f"{key} is {shown(text)}; it must be text, a letter a layer")
            return hybrid_pattern(_with_mtp(config, text), f"{name}: {key}")
    ratios = [getattr(config, key, None) or 0.0 for key in ("hybrid_attention_ratio", "hybrid_mlp_ratio")]
    if not (getattr(config, "is_hybrid_model", None) or any(ratios)):
        return None
    return pattern_of_ratios(ConfigAttributes(config, name, None).size("num_layers"), *ratios)


def _with_mtp(config: object, text: str) -> str:
    """The pattern with that of the MTP depths appended, as Bridge's HybridModelProvider.finalize does."""
    mtp = getattr(config, "mtp_hybrid_override_pattern", None)
    if not mtp:
        return text
    depths = getattr(config, "mtp_num_layers", None) or 0
    copies = max(1, depths) if getattr(config, "mtp_use_repeated_layer", False) else depths
    return "/".join([text.split("/")[0], *[mtp] * copies])


def _position(c: ConfigAttributes, given: str | None, pattern: HybridPattern | None) -> str:
    default = "none" if pattern is not None else "rope" if c.flag("multi_latent_attention") else "learned_absolute"
    kind = given or c.get("position_embedding_type", default)
    if kind == "relative":
        raise c.error("position_embedding_type is 'relative', which belongs to T5; use a GPT model")
    if not isinstance(kind, str) or kind not in POSITIONS:
        raise c.error(f"position_embedding_type is {shown(kind)}; known: {', '.join(POSITIONS)}")
    return POSITIONS[kind]


def _normalization(c: ConfigAttributes) -> str:
    kind = c.get("normalization", "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        raise c.error(f"normalization is {shown(kind)}; known: LayerNorm, RMSNorm")
    return str(kind)


def _activation(c: ConfigAttributes) -> str:
    function = c.get("activation_func", "gelu")
    word = function if isinstance(function, str) else getattr(function, "__name__", None)
    word = word or getattr(function, "name", "")  # torch.jit.ScriptFunction
    if word not in ACTIVATION_FUNCTIONS:
        known = ", ".join(sorted(ACTIVATION_FUNCTIONS))
        raise c.error(f"activation_func is {shown(function)}, which is not known here; known: {known}")
    return ACTIVATION_FUNCTIONS[word]


def _rotary_dim(layers: Sequence[LayerSpec], percent: float) -> int:
    for layer in layers:
        if isinstance(layer.mixer, SideBySideSpec):
            return int(layer.mixer.attention.kv_channels * percent)
        if isinstance(layer.mixer, CompressedAttentionSpec):
            return layer.mixer.rope_dim
        if isinstance(layer.mixer, MLASpec):
            return layer.mixer.qk_pos_emb_head_dim
        if isinstance(layer.mixer, AttentionSpec):
            return int(layer.mixer.kv_channels * percent)
    return 0


# --------------------------------------------------------------------------------------------------
# Mixers
# --------------------------------------------------------------------------------------------------


def _attention(c: ConfigAttributes, hidden_size: int, rotary: bool, full_qk_layernorm: bool = False) -> AttentionSpec:
    a = c.size("num_attention_heads")
    g = c.size("num_query_groups", a)
    if a % g:
        raise c.error(f"num_attention_heads ({a}) is not divisible by num_query_groups ({g})")
    if c.get("kv_channels") is None and hidden_size % a:
        raise c.error(f"hidden_size ({hidden_size}) is not divisible by num_attention_heads ({a})")
    biased = c.flag("add_bias_linear", True)
    return AttentionSpec(
        num_attention_heads=a,
        num_query_groups=g,
        kv_channels=c.size("kv_channels", hidden_size // a),
        add_qkv_bias=biased or c.flag("add_qkv_bias"),
        add_output_bias=biased,
        qk_layernorm=("full" if full_qk_layernorm else "head") if c.flag("qk_layernorm") else None,
        learnable_softmax_sink=c.get("softmax_type", "vanilla") == "learnable",
        attention_output_gate=c.flag("attention_output_gate"),
        rotary=rotary,
    )


def _mla(c: ConfigAttributes) -> MLASpec:
    """Only linear_proj can have a bias (``multi_latent_attention.py: MultiLatentAttention.__init__``)."""
    return MLASpec(
        num_attention_heads=c.size("num_attention_heads"),
        q_lora_rank=c.size("q_lora_rank") if c.get("q_lora_rank") is not None else None,
        kv_lora_rank=c.size("kv_lora_rank"),
        qk_head_dim=c.size("qk_head_dim"),
        qk_pos_emb_head_dim=c.size("qk_pos_emb_head_dim"),
        v_head_dim=c.size("v_head_dim"),
        qk_layernorm=c.flag("qk_layernorm"),
        add_output_bias=c.flag("add_bias_linear", True),
    )


def _windowed(c: ConfigAttributes, n: int, spec: AttentionSpec) -> list[AttentionSpec]:
    """``spec`` of every layer, with its sliding window. Source: transformer/utils.py is_layer_window_attention."""
    window = c.get("window_size")
    left = window[0] if isinstance(window, tuple | list) and window else window
    if not left or left < 0:
        return [spec] * n
    sliding = replace(spec, window_size=left)
    if c.get("window_attn_skip_freq") is None:
        return [sliding] * n
    return [sliding if one else spec for one in c.pattern("window_attn_skip_freq", n, sparse=True)]


def _rotated(c: ConfigAttributes, n: int, layers: list[AttentionSpec]) -> list[AttentionSpec]:
    """``layers``, some without rotary embeddings. Source: transformer/attention.py SelfAttention.forward."""
    freq = c.get("no_rope_freq")
    if not freq:
        return layers
    # An integer leaves it out of every N-th layer, the sense of the other patterns inverted.
    without = [not one for one in c.pattern("no_rope_freq", n, sparse=True)] if isinstance(freq, int) else (
        c.pattern("no_rope_freq", n)
    )
    return [replace(one, rotary=False) if skips else one for one, skips in zip(layers, without, strict=True)]


def _mixers(c: ConfigAttributes, n: int, hidden_size: int, rotary: bool, full_qk_layernorm: bool) -> Sequence[Mixer]:
    variant = _variant(c)
    if variant not in (None, "gated_delta_net", "dsa", "dsv4_hybrid"):
        raise c.error(
            f"experimental_attention_variant is {shown(variant)}, which is not known here; known: gated_delta_net, "
            "dsa, dsv4_hybrid"
        )
    if variant == "dsv4_hybrid":
        return [_compressed(c, i) for i in range(n)]
    if c.flag("multi_latent_attention"):
        return _sparse(c, n) if variant == "dsa" else [_mla(c)] * n
    if variant == "dsa":
        raise c.error("experimental_attention_variant dsa needs multi_latent_attention; set that to True")
    attention = _rotated(c, n, _windowed(c, n, _attention(c, hidden_size, rotary, full_qk_layernorm)))
    if variant is None:
        return attention
    linear = _gated_delta_net(c)
    is_linear = c.pattern("linear_attention_freq", n, sparse=True)
    return [linear if one else softmax for one, softmax in zip(is_linear, attention, strict=True)]


def _variant(c: ConfigAttributes) -> Any:
    variant = c.get("experimental_attention_variant")
    if variant is None and c.get("linear_attention_type") not in (None, "none"):
        variant = c.get("linear_attention_type")  # its name before megatron-core 0.16
    return variant


def _gated_delta_net(c: ConfigAttributes) -> GatedDeltaNetSpec:
    return GatedDeltaNetSpec(
        num_key_heads=c.size("linear_num_key_heads"),
        num_value_heads=c.size("linear_num_value_heads"),
        key_head_dim=c.size("linear_key_head_dim"),
        value_head_dim=c.size("linear_value_head_dim"),
        conv_kernel=c.size("linear_conv_kernel_dim", 4),
    )


def _sparse(c: ConfigAttributes, n: int) -> Sequence[MLASpec]:
    """Multi-latent attention with an indexer, except in layers that reuse another layer's selected keys.

    Source: ``experimental_attention_variant/dsa.py: is_dsa_skip_topk_layer, DSAttention.__init__``.
    """
    every, offset = c.size("dsa_indexer_topk_freq", 1), max(1, c.count("dsa_indexer_skip_topk_offset"))
    kernels = c.get("dsa_kernel_backend", "none")
    if kernels not in SPARSE_KERNELS:
        raise c.error(f"dsa_kernel_backend is {shown(kernels)}; known: {', '.join(SPARSE_KERNELS)}")
    sparse = SparseSpec(
        topk=c.size("dsa_indexer_topk"),
        kernels=kernels,
        indexer_loss=c.number("dsa_indexer_loss_coeff") > 0,
        sparse_loss=c.flag("dsa_indexer_use_sparse_loss"),
        rotate_activation=c.flag("dsa_indexer_rotate_activation", True),
        scoring_relu=c.flag("dsa_indexer_scoring_relu", True),
        shares_choice=every > 1,
    )
    shared = replace(_mla(c), sparse=sparse)
    full = replace(shared, indexer=IndexerSpec(c.size("dsa_indexer_n_heads"), c.size("dsa_indexer_head_dim")))
    return [shared if max(i + 1 - offset, 0) % every else full for i in range(n)]


def _compressed(c: ConfigAttributes, layer: int) -> CompressedAttentionSpec:
    """DeepSeek-V4's attention of a layer; indices after the last decoder layer are MTP depths.

    Source: Megatron-LM ``deepseek_v4_hybrid_attention.py: DSv4HybridAttention.__init__``, ``csa.py:
    CompressedSparseAttention.__init__``.
    """
    ratios = c.get("csa_compress_ratios")
    if not isinstance(ratios, list | tuple) or len(ratios) <= layer:
        raise c.error(f"csa_compress_ratios has no entry for layer {layer}; give one a layer and MTP depth")
    ratio = ratios[layer]
    if type(ratio) is not int or not 0 <= ratio <= MAX_SIZE:
        raise c.error(f"csa_compress_ratios holds {shown(ratio)}; give whole numbers")
    chooses = ratio == 4 and not c.flag("csa_dense_mode")
    indexer = None
    if chooses:
        indexer = IndexerSpec(
            c.size("dsa_indexer_n_heads"), c.size("dsa_indexer_head_dim"), c.size("dsa_indexer_topk", 2048)
        )
    return CompressedAttentionSpec(
        num_attention_heads=c.size("num_attention_heads"),
        head_dim=c.size("v_head_dim"),
        rope_dim=c.size("qk_pos_emb_head_dim"),
        q_lora_rank=c.size("q_lora_rank"),
        output_groups=c.size("o_groups"),
        output_lora_rank=c.size("o_lora_rank"),
        window_size=c.size("csa_window_size", 128),
        compress_ratio=ratio,
        indexer=indexer,
        fused=c.flag("apply_dsa_kernel_fusion"),
        sparse_loss=c.flag("dsa_indexer_use_sparse_loss"),
        add_output_bias=c.flag("add_bias_linear", True),
    )


# --------------------------------------------------------------------------------------------------
# Feed-forward blocks and whole stacks
# --------------------------------------------------------------------------------------------------


def _clamp(c: ConfigAttributes) -> float | None:
    key = "activation_func_clamp_value"
    return None if c.get(key) is None else c.number(key)


def _mlp(c: ConfigAttributes, hidden_size: int, act: str) -> MLPSpec:
    return MLPSpec(
        ffn_hidden_size=c.size("ffn_hidden_size", 4 * hidden_size),
        gated=c.flag("gated_linear_unit"),
        activation=act,
        add_bias=c.flag("add_bias_linear", True),
        clamp_value=_clamp(c),
    )


def _moe(c: ConfigAttributes, hidden_size: int, act: str) -> MoESpec:
    experts, topk = c.size("num_moe_experts"), c.size("moe_router_topk", 2)
    if topk > experts:
        raise c.error(f"moe_router_topk ({topk}) is larger than num_moe_experts ({experts})")
    shared = c.get("moe_shared_expert_intermediate_size", 0)
    biased = c.flag("add_bias_linear", True)
    return MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=c.size("moe_ffn_hidden_size", c.get("ffn_hidden_size", 4 * hidden_size)),
        gated=c.flag("gated_linear_unit"),
        activation=act,
        add_bias=biased,
        shared_expert_intermediate_size=shared,
        shared_expert_gate=bool(shared) and c.flag("moe_shared_expert_gate"),
        router_enable_expert_bias=c.flag("moe_router_enable_expert_bias"),
        add_router_bias=biased and ROUTER_BIAS(c),
        router_score_function=c.get("moe_router_score_function", "softmax"),
        router_load_balancing_type=_balancing(c),
        router_num_groups=c.get("moe_router_num_groups"),
        router_group_topk=c.get("moe_router_group_topk"),
        latent_size=c.get("moe_latent_size"),
        clamp_value=_clamp(c),
    )


def _balancing(c: ConfigAttributes) -> str:
    """The load-balancing types that run. An auxiliary loss with a coefficient of 0 is not computed (``router.py:
    TopKRouter.is_aux_loss_enabled``; before 0.14 its scores are, and nothing saves them)."""
    given, coefficients = c.get("moe_router_load_balancing_type", "aux_loss"), c.get("moe_aux_loss_coeff", 0.0)
    kinds = [given] if isinstance(given, str) else list(given)
    if not isinstance(coefficients, list | tuple):
        coefficients = [coefficients] * len(kinds)
    if len(coefficients) != len(kinds):
        raise c.error(f"moe_aux_loss_coeff has {len(coefficients)} numbers for {len(kinds)} balancing types")
    kinds_with = zip(kinds, coefficients, strict=True)
    # "noaux_tc" is DeepSeek's name for balancing by the expert bias; megatron-core has no such loss.
    running = [kind for kind, x in kinds_with if (kind not in _AUXILIARY_LOSSES or x) and kind != "noaux_tc"]
    return "+".join(running) or "none"


def _gpt_layers(c: ConfigAttributes, n: int, hidden_size: int, act: str, mixers: Sequence[Mixer]) -> list[LayerSpec]:
    if c.get("num_moe_experts") is None:
        dense = _mlp(c, hidden_size, act)
        return [LayerSpec(mixer, dense) for mixer in mixers]
    moe = _moe(c, hidden_size, act)
    is_moe = [True] * n if c.get("moe_layer_freq") is None else c.pattern("moe_layer_freq", n)
    kinds: dict[bool, FeedForward] = {True: moe}
    if not all(is_moe):
        kinds[False] = _mlp(c, hidden_size, act)
    return [LayerSpec(mixer, kinds[one]) for mixer, one in zip(mixers, is_moe, strict=True)]


def _hybrid_kinds(
    c: ConfigAttributes, pattern: HybridPattern, hidden_size: int, act: str, rotary: bool
) -> dict[str, LayerSpec]:
    """Symbol -> layer. Source: models/mamba/mamba_layer_specs.py."""
    kinds: dict[str, LayerSpec] = {}
    for symbol in dict.fromkeys(pattern.layers + "".join(pattern.mtp)):
        if symbol == MAMBA:
            kinds[symbol] = LayerSpec(_mamba(c, hidden_size), None)
        elif symbol == ATTENTION:
            kinds[symbol] = LayerSpec(_attention(c, hidden_size, rotary), None)
        elif symbol == MLP:
            kinds[symbol] = LayerSpec(None, _mlp(c, hidden_size, act))
        elif symbol == DELTA_NET:
            kinds[symbol] = LayerSpec(_gated_delta_net(c), None)
        elif symbol == MLA:
            kinds[symbol] = LayerSpec(_mla(c), None)
        else:
            kinds[symbol] = LayerSpec(None, _moe(c, hidden_size, act))
    return kinds


def _hybrid_mtp(pattern: HybridPattern, kinds: dict[str, LayerSpec]) -> LayerSpec | None:
    """The layer of the MTP depths if it is one mixer and one feed-forward block, else None."""
    depth, *others = dict.fromkeys(pattern.mtp)
    if others or len(depth) != 2 or kinds[depth[0]].mixer is None or kinds[depth[1]].ffn is None:
        return None
    return LayerSpec(kinds[depth[0]].mixer, kinds[depth[1]].ffn)


def _mamba(c: ConfigAttributes, hidden_size: int) -> MambaSpec:
    """Source: ssm/mamba_mixer.py MambaMixer: expand 2, d_conv 4, chunk 128, RMSNorm, and a bias in the conv only."""
    head_dim = c.size("mamba_head_dim", 64)
    if c.get("mamba_num_heads") is None and 2 * hidden_size % head_dim:
        raise c.error(f"hidden_size x 2 ({2 * hidden_size}) is not divisible by mamba_head_dim ({head_dim})")
    return MambaSpec(
        num_heads=c.size("mamba_num_heads", 2 * hidden_size // head_dim),
        head_dim=head_dim,
        state_dim=c.size("mamba_state_dim", 128),
        num_groups=c.size("mamba_num_groups", 8),
        chunk_size=c.size("mamba_chunk_size", 128),  # Bridge's HybridModelProvider
        memory_efficient=c.flag("use_mamba_mem_eff_path", True),
    )


def _side_by_side(c: ConfigAttributes, hidden_size: int, act: str, rotary: bool) -> LayerSpec:
    """A layer of Falcon-H1. Source: megatron-bridge ``models/falcon_h1/modeling_falconh1/{falconh1_block,
    falconh1_model}.py``."""
    if c.get("hybrid_override_pattern") or c.get("falconh1_ratio", 1.0) != 1.0:
        raise c.error("falconh1_ratio is not 1: layers of another kind beside Falcon-H1's are not estimated")
    for name in ("use_mamba", "use_attention", "use_mlp", "use_mamba_mem_eff_path"):
        if not c.flag(name, True):
            raise c.error(f"{name} is False; Falcon-H1 without one of its parts is not estimated")
    if c.flag("add_bias_linear"):
        raise c.error("add_bias_linear is True; biases of Falcon-H1 are not estimated")
    inner = c.size("expand", 2) * hidden_size
    head_dim = c.size("mamba_head_dim", 64)
    mamba = MambaSpec(
        num_heads=c.size("mamba_num_heads", inner // head_dim),
        head_dim=head_dim,
        state_dim=c.size("mamba_state_dim", 128),
        num_groups=c.size("mamba_num_groups", 1),
        conv_kernel=c.size("d_conv", 4),
        chunk_size=c.size("chunk_size", 128),
        rmsnorm=c.flag("rmsnorm", True),
        conv_bias=c.flag("conv_bias", True),
    )
    scales = (c.get("key_multiplier", 1.0), *c.get("ssm_multipliers", ()))
    scaled = any(x != 1 for x in scales)
    return LayerSpec(
        SideBySideSpec(_attention(c, hidden_size, rotary), mamba, scaled), _mlp(c, hidden_size, act)
    )


def _heterogeneous_layers(c: ConfigAttributes, n: int, hidden_size: int, act: str, rotary: bool) -> list[LayerSpec]:
    """Layers with different sizes. Source: transformer/heterogeneous/heterogeneous_config.py (per_block_parameters)."""
    blocks = c.get("per_block_parameters")
    if blocks is None or len(blocks) != n:
        raise c.error(f"heterogeneous_block_specs without one of per_block_parameters for each of {n} layers")
    attention, mlp = _attention(c, hidden_size, rotary), _mlp(c, hidden_size, act)
    layers = []
    for i, block in enumerate(blocks):
        for part in (block.attention, block.mlp):
            if part.replace_with_linear:
                raise c.error(f"per_block_parameters[{i}] has replace_with_linear; it cannot be estimated")
        groups = block.attention.num_query_groups or attention.num_query_groups
        width = block.mlp.ffn_hidden_size or mlp.ffn_hidden_size
        layers.append(
            LayerSpec(
                None if block.attention.no_op else replace(attention, num_query_groups=groups),
                None if block.mlp.no_op else replace(mlp, ffn_hidden_size=width),
            )
        )
    return layers
