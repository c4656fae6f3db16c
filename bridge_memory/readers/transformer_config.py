"""A megatron-core TransformerConfig (or anything with its attributes) -> ModelSpec. Imports no megatron.

Covers TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig and Megatron Bridge's providers,
which are TransformerConfigs with the model's outer arguments (position_embedding_type, ...) as attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.readers.fields import MAX_LAYERS, MAX_SIZE, shown
from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.spec import (
    AttentionSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SpecError,
)

#: ``activation_func.__name__`` -> our name (megatron.core.activations, torch.nn.functional).
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


class _Config:
    """Attribute access with one-line refusals."""

    def __init__(self, config: object, name: str) -> None:
        self.config = config
        self.name = name

    def error(self, message: str) -> SpecError:
        return SpecError(f"{self.name}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        value = getattr(self.config, key, None)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is not set on {type(self.config).__name__}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
            raise self.error(f"{key} is {shown(value)}; it must be a positive integer")
        return value


def model_from_transformer_config(
    config: object,
    *,
    vocab_size: int,
    name: str = "TransformerConfig",
    model_type: str = "gpt",
    max_sequence_length: int = 0,
    position_embedding_type: str | None = None,
    rotary_percent: float | None = None,
    share_embeddings_and_output_weights: bool | None = None,
    make_vocab_size_divisible_by: int = 128,
    post_layernorms: bool = False,
    full_qk_layernorm: bool = False,
    activation: str | None = None,
    assumptions: tuple[str, ...] = (),
) -> ModelSpec:
    """The model that GPTModel or MambaModel builds from ``config``.

    What a TransformerConfig does not hold comes as keywords; None takes the attribute of that name where
    ``config`` has one (Bridge's providers), else GPTModel's default. ``make_vocab_size_divisible_by`` 0: the
    vocab_size is final. ``post_layernorms``, ``full_qk_layernorm`` and ``activation``: what a custom layer spec
    changes.
    Raises SpecError naming the attribute.
    """
    c = _Config(config, name)
    n = c.size("num_layers")
    if n > MAX_LAYERS:
        raise c.error(f"num_layers is {n}; more than {MAX_LAYERS} cannot be right")
    hidden_size = c.size("hidden_size")
    act = activation or _activation(c)
    is_mamba = _is_mamba(c)
    if is_mamba:
        layers = _hybrid_layers(c, n, hidden_size, act)
    elif c.get("heterogeneous_block_specs"):
        layers = _heterogeneous_layers(c, n, hidden_size, act)
    else:
        layers = _gpt_layers(c, n, hidden_size, act, full_qk_layernorm)
    layers = [replace(layer, post_layernorms=post_layernorms) for layer in layers]
    kind = position_embedding_type or c.get(
        "position_embedding_type", "none" if is_mamba else "rope" if c.get("multi_latent_attention") else None
    )
    if kind is None:
        kind = "learned_absolute"
    kind = {"yarn": "rope", "mrope": "rope"}.get(kind, kind)
    percent = rotary_percent if rotary_percent is not None else c.get("rotary_percent", 1.0)
    depths = c.get("mtp_num_layers", 0)
    tied = share_embeddings_and_output_weights
    if tied is None:
        tied = bool(c.get("share_embeddings_and_output_weights", False))
    return ModelSpec(
        name=name,
        model_type=model_type,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        layers=tuple(layers),
        share_embeddings_and_output_weights=tied,
        normalization=c.get("normalization", "LayerNorm"),
        position_embedding_type=kind,
        max_position_embeddings=max_sequence_length or c.get("seq_length", 0),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        hidden_dropout=float(c.get("hidden_dropout", 0.1)),
        attention_dropout=float(c.get("attention_dropout", 0.1)),
        rotary_dim=_rotary_dim(layers, percent) if kind == "rope" else 0,
        mtp_num_layers=depths,
        # gpt_layer_specs.get_gpt_mtp_block_spec: the last decoder layer's spec.
        mtp_layer=layers[-1] if depths else None,
        hybrid=is_mamba,
        assumptions=assumptions,
        not_modelled=tuple(
            f"{key} of the TransformerConfig"
            for key in ("qk_l2_norm", "use_kitchen")
            if c.get(key, False)
        ),
    )


def _activation(c: _Config) -> str:
    function = c.get("activation_func", "gelu")
    word = function if isinstance(function, str) else getattr(function, "__name__", None)
    word = word or getattr(function, "name", "")  # torch.jit.ScriptFunction
    if word not in ACTIVATION_FUNCTIONS:
        known = ", ".join(sorted(ACTIVATION_FUNCTIONS))
        raise c.error(f"activation_func is {shown(function)}, which is not known here; known: {known}")
    return ACTIVATION_FUNCTIONS[word]


def _rotary_dim(layers: Sequence[LayerSpec], percent: float) -> int:
    for layer in layers:
        if isinstance(layer.mixer, MLASpec):
            return layer.mixer.qk_pos_emb_head_dim
        if isinstance(layer.mixer, AttentionSpec):
            return int(layer.mixer.kv_channels * percent)
    return 0


# --------------------------------------------------------------------------------------------------
# Mixers
# --------------------------------------------------------------------------------------------------


def _attention(c: _Config, hidden_size: int, full_qk_layernorm: bool, rotary: bool = True) -> AttentionSpec:
    a = c.size("num_attention_heads")
    g = c.size("num_query_groups", a)
    if a % g:
        raise c.error(f"num_attention_heads ({a}) is not divisible by num_query_groups ({g})")
    if c.get("kv_channels") is None and hidden_size % a:
        raise c.error(f"hidden_size ({hidden_size}) is not divisible by num_attention_heads ({a})")
    biased = bool(c.get("add_bias_linear", True))
    softmax = c.get("softmax_type", "vanilla")
    return AttentionSpec(
        num_attention_heads=a,
        num_query_groups=g,
        kv_channels=c.size("kv_channels", hidden_size // a),
        add_qkv_bias=biased or bool(c.get("add_qkv_bias", False)),
        add_output_bias=biased,
        qk_layernorm=("full" if full_qk_layernorm else "head") if c.get("qk_layernorm", False) else None,
        learnable_softmax_sink=softmax == "learnable",
        attention_output_gate=bool(c.get("attention_output_gate", False)),
        rotary=rotary,
    )


def _mla(c: _Config) -> MLASpec:
    if c.get("add_bias_linear", True):
        raise c.error("add_bias_linear is True with multi_latent_attention; set it to False")
    return MLASpec(
        num_attention_heads=c.size("num_attention_heads"),
        q_lora_rank=c.size("q_lora_rank") if c.get("q_lora_rank") is not None else None,
        kv_lora_rank=c.size("kv_lora_rank"),
        qk_head_dim=c.size("qk_head_dim"),
        qk_pos_emb_head_dim=c.size("qk_pos_emb_head_dim"),
        v_head_dim=c.size("v_head_dim"),
        qk_layernorm=bool(c.get("qk_layernorm", False)),
    )


def _pattern(c: _Config, key: str, n: int, *, sparse: bool) -> tuple[bool, ...]:
    return layer_pattern(c.get(key), n, f"{c.name}: {key}", sparse=sparse)


def _windowed(c: _Config, n: int, spec: AttentionSpec) -> list[AttentionSpec]:
    """Source: transformer/utils.py is_layer_window_attention."""
    window = c.get("window_size")
    if not window:
        return [spec] * n
    left = window[0] if isinstance(window, (tuple, list)) else window
    if left < 0:
        return [spec] * n
    sliding = replace(spec, window_size=left)
    skip = c.get("window_attn_skip_freq")
    if skip is None:
        return [sliding] * n
    return [sliding if one else spec for one in _pattern(c, "window_attn_skip_freq", n, sparse=True)]


def _mixers(c: _Config, n: int, hidden_size: int, full_qk_layernorm: bool) -> Sequence[Mixer]:
    if c.get("multi_latent_attention", False):
        return [_mla(c)] * n
    attention = _windowed(c, n, _attention(c, hidden_size, full_qk_layernorm))
    variant = c.get("experimental_attention_variant")
    if variant is None and c.get("linear_attention_type") not in (None, "none"):
        variant = c.get("linear_attention_type")  # its name before megatron-core 0.16
    if variant is None:
        return attention
    if variant != "gated_delta_net":
        raise c.error(f"experimental_attention_variant is {shown(variant)}; only gated_delta_net is known")
    linear = GatedDeltaNetSpec(
        num_key_heads=c.size("linear_num_key_heads"),
        num_value_heads=c.size("linear_num_value_heads"),
        key_head_dim=c.size("linear_key_head_dim"),
        value_head_dim=c.size("linear_value_head_dim"),
        conv_kernel=c.size("linear_conv_kernel_dim", 4),
    )
    is_linear = _pattern(c, "linear_attention_freq", n, sparse=True)
    return [linear if one else softmax for one, softmax in zip(is_linear, attention, strict=True)]


# --------------------------------------------------------------------------------------------------
# Feed-forward blocks and whole stacks
# --------------------------------------------------------------------------------------------------


def _mlp(c: _Config, hidden_size: int, act: str) -> MLPSpec:
    return MLPSpec(
        ffn_hidden_size=c.size("ffn_hidden_size", 4 * hidden_size),
        gated=bool(c.get("gated_linear_unit", False)),
        activation=act,
        add_bias=bool(c.get("add_bias_linear", True)),
    )


def _moe(c: _Config, hidden_size: int, act: str) -> MoESpec:
    experts, topk = c.size("num_moe_experts"), c.size("moe_router_topk", 2)
    if topk > experts:
        raise c.error(f"moe_router_topk ({topk}) is larger than num_moe_experts ({experts})")
    shared = c.get("moe_shared_expert_intermediate_size", 0)
    balancing = c.get("moe_router_load_balancing_type", "aux_loss")
    biased = bool(c.get("add_bias_linear", True))
    return MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=c.size("moe_ffn_hidden_size", c.get("ffn_hidden_size", 4 * hidden_size)),
        gated=bool(c.get("gated_linear_unit", False)),
        activation=act,
        add_bias=biased,
        shared_expert_intermediate_size=shared,
        shared_expert_gate=bool(shared) and bool(c.get("moe_shared_expert_gate", False)),
        router_enable_expert_bias=bool(c.get("moe_router_enable_expert_bias", False)),
        # transformer/moe/router.py: Router has a bias with add_bias_linear.
        add_router_bias=biased,
        router_score_function=c.get("moe_router_score_function", "softmax"),
        router_load_balancing_type=balancing if isinstance(balancing, str) else "+".join(balancing),
        latent_size=c.get("moe_latent_size"),
    )


def _gpt_layers(c: _Config, n: int, hidden_size: int, act: str, full_qk_layernorm: bool) -> list[LayerSpec]:
    mixers = _mixers(c, n, hidden_size, full_qk_layernorm)
    if c.get("num_moe_experts") is None:
        dense = _mlp(c, hidden_size, act)
        return [LayerSpec(mixer, dense) for mixer in mixers]
    moe = _moe(c, hidden_size, act)
    is_moe = [True] * n if c.get("moe_layer_freq") is None else _pattern(c, "moe_layer_freq", n, sparse=False)
    kinds: dict[bool, FeedForward] = {True: moe}
    if not all(is_moe):
        kinds[False] = _mlp(c, hidden_size, act)
    return [LayerSpec(mixer, kinds[one]) for mixer, one in zip(mixers, is_moe, strict=True)]


def _is_mamba(c: _Config) -> bool:
    """Only MambaModel's providers and arguments carry a hybrid pattern or are marked so."""
    return bool(c.get("is_hybrid_model", False) or c.get("hybrid_override_pattern"))


def _hybrid_layers(c: _Config, n: int, hidden_size: int, act: str) -> list[LayerSpec]:
    """Source: ssm/mamba_hybrid_layer_allocation.py (Symbols), models/mamba/mamba_layer_specs.py."""
    pattern = c.get("hybrid_override_pattern")
    if not pattern:
        raise c.error("is_hybrid_model without hybrid_override_pattern; give the pattern, ratios are not read")
    if len(pattern) != n:
        raise c.error(f"hybrid_override_pattern has {len(pattern)} layers and num_layers says {n}")
    rotary = c.get("position_embedding_type", "none") == "rope"
    kinds: dict[str, LayerSpec] = {}
    for symbol in dict.fromkeys(pattern):
        if symbol == "M":
            kinds[symbol] = LayerSpec(_mamba(c, hidden_size), None)
        elif symbol == "*":
            kinds[symbol] = LayerSpec(_attention(c, hidden_size, False, rotary), None)
        elif symbol == "-":
            kinds[symbol] = LayerSpec(None, _mlp(c, hidden_size, act))
        elif symbol == "E":
            kinds[symbol] = LayerSpec(None, _moe(c, hidden_size, act))
        else:
            raise c.error(f"hybrid_override_pattern holds {shown(symbol)}; known: M, *, -, E")
    return [kinds[symbol] for symbol in pattern]


def _mamba(c: _Config, hidden_size: int) -> MambaSpec:
    """Source: ssm/mamba_mixer.py MambaMixer: expand 2, d_conv 4, chunk 128, RMSNorm, a conv bias only."""
    head_dim = c.size("mamba_head_dim", 64)
    if c.get("mamba_num_heads") is None and 2 * hidden_size % head_dim:
        raise c.error(f"hidden_size x 2 ({2 * hidden_size}) is not divisible by mamba_head_dim ({head_dim})")
    return MambaSpec(
        num_heads=c.size("mamba_num_heads", 2 * hidden_size // head_dim),
        head_dim=head_dim,
        state_dim=c.size("mamba_state_dim", 128),
        num_groups=c.size("mamba_num_groups", 8),
    )


def _heterogeneous_layers(c: _Config, n: int, hidden_size: int, act: str) -> list[LayerSpec]:
    """Source: transformer/heterogeneous/heterogeneous_config.py (per_block_parameters)."""
    blocks = c.get("per_block_parameters")
    if blocks is None or len(blocks) != n:
        raise c.error(f"heterogeneous_block_specs without one of per_block_parameters for each of {n} layers")
    attention, mlp = _attention(c, hidden_size, False), _mlp(c, hidden_size, act)
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
