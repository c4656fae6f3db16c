"""Megatron-LM arguments -> ModelSpec, with Megatron-LM's own defaults.

Sources: ``megatron/training/arguments.py`` (add_*_args, validate_args, core_transformer_config_from_args),
``megatron/core/transformer/transformer_config.py``, ``megatron/core/ssm/mamba_hybrid_layer_allocation.py``
and, for vocabularies, ``megatron/training/tokenizer/tokenizer.py`` and ``megatron/core/tokenizers``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bridge_memory.readers.megatron_args.arguments import Arguments
from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.spec import (
    AttentionSpec,
    FeedForward,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SpecError,
)

#: Tokens of the GPT-2 byte-pair vocabulary (``gpt2-vocab.json``), Megatron-LM's usual tokenizer.
GPT2_VOCABULARY = 50257
#: Last release whose NullTokenizer counts its end-of-document token on top of ``--vocab-size``.
_LAST_NULL_TOKENIZER_WITH_EOD = (0, 14)


@dataclass(frozen=True, slots=True)
class HybridPattern:
    """A hybrid layer pattern taken apart: decoder segments (one a pipeline chunk, if split) and MTP
    depths."""

    segments: tuple[str, ...]
    mtp: tuple[str, ...]

    @property
    def layers(self) -> str:
        return "".join(self.segments)


def hybrid_pattern(a: Arguments) -> HybridPattern | None:
    """The layer pattern of a Mamba hybrid: ``M`` Mamba, ``*`` attention, ``-`` MLP, ``E`` MoE; None for GPT.

    ``|`` splits pipeline chunks and ``/`` starts an MTP depth. Without a pattern, the two ratios place the
    layers as
    ``mamba_hybrid_layer_allocation.py: _allocate_auto`` does.
    """
    text = a.text("hybrid_layer_pattern", "") or a.text("hybrid_override_pattern", "")
    if not text:
        ratios = a.number("hybrid_attention_ratio", 0.0), a.number("hybrid_mlp_ratio", 0.0)
        if not (a.flag("is_hybrid_model") or any(ratios) or "mamba" in a.text("spec", "")):
            return None
        return HybridPattern((_pattern_of_ratios(a.required("num_layers"), *ratios),), ())
    decoder, *mtp = text.strip("'\"").split("/")
    segments = tuple(decoder.split("|"))
    unknown = set("".join(segments)) - set("M*-E")
    if unknown:
        letters = "".join(sorted(unknown))
        raise SpecError(f"--hybrid-layer-pattern holds {letters!r}; only M, *, -, E, | and / are understood")
    return HybridPattern(segments, tuple(mtp))


def _pattern_of_ratios(layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """Attention evenly spaced between Mamba sections, then MLPs evenly over what is left, right-justified."""
    pattern = ["M"] * layers
    attention = round(layers * attention_ratio)
    mamba = layers - attention
    _spread(pattern, "*", mamba / (attention + 1))
    mlp = round(layers * mlp_ratio)
    if mlp:
        _spread(pattern, "-", (mamba - mlp) / mlp)
    return "".join(pattern)


def _spread(pattern: list[str], symbol: str, section: float) -> None:
    left = section
    for i, kind in enumerate(pattern):
        if kind != "M":
            continue
        if left < 0.5:
            pattern[i] = symbol
            left += section
        else:
            left -= 1


def vocabulary(a: Arguments, megatron_core: tuple[int, int]) -> tuple[int, str | None]:
    """Tokens before padding, and what had to be supposed about them."""
    size = a.optional_integer("vocab_size")
    tokenizer = a.text("tokenizer_type", "GPT2BPETokenizer")
    if size is None:
        supposed = None
        if tokenizer not in ("GPT2BPETokenizer", "GPT2BPE"):
            supposed = f"GPT-2's {GPT2_VOCABULARY} tokens: the size of {tokenizer} is not in the arguments"
        return GPT2_VOCABULARY, supposed
    if tokenizer == "NullTokenizer" and (
        megatron_core <= _LAST_NULL_TOKENIZER_WITH_EOD or a.flag("legacy_tokenizer")
    ):
        size += 1
    return size, None


def model_spec(a: Arguments, megatron_core: tuple[int, int], name: str = "megatron-lm") -> ModelSpec:
    """The architecture that the arguments describe."""
    hidden = a.required("hidden_size")
    heads = a.required("num_attention_heads")
    pattern = hybrid_pattern(a)
    position = _position_embedding(a)
    mixer = _attention(a, hidden, heads, position)
    dense, moe = _mlp(a, hidden), _moe(a, hidden)
    if pattern is not None:
        layers = tuple(_hybrid_layer(kind, a, hidden, mixer, dense, moe) for kind in pattern.layers)
    else:
        count = a.optional_integer("num_layers") or a.required("encoder_num_layers")
        is_moe = (False,) * count
        if moe:
            is_moe = layer_pattern(a.text("moe_layer_freq", "1"), count, "--moe-layer-freq")
        layers = tuple(LayerSpec(mixer, moe if use and moe else dense) for use in is_moe)
    mtp_depths, mtp_layer, gaps = _mtp(a, pattern, layers, mixer, dense, moe)
    vocab, supposed = vocabulary(a, megatron_core)
    padded = a.optional_integer("padded_vocab_size")
    rotary_width = (
        a.integer("qk_pos_emb_head_dim", 64) if isinstance(mixer, MLASpec)
        else int(mixer.kv_channels * a.number("rotary_percent", 1.0))
    )
    return ModelSpec(
        name=name,
        model_type="mamba" if pattern is not None else "gpt",
        hidden_size=hidden,
        vocab_size=padded or vocab,
        layers=layers,
        share_embeddings_and_output_weights=not a.flag("untie_embeddings_and_output_weights"),
        normalization=a.choice("normalization", "LayerNorm", ("LayerNorm", "RMSNorm")),
        position_embedding_type=position,
        max_position_embeddings=a.integer("max_position_embeddings", 0),
        make_vocab_size_divisible_by=0 if padded else a.integer("make_vocab_size_divisible_by", 128),
        hidden_dropout=a.number("hidden_dropout", 0.1),
        attention_dropout=a.number("attention_dropout", 0.1),
        rotary_dim=rotary_width if position == "rope" else 0,
        mtp_num_layers=mtp_depths,
        mtp_layer=mtp_layer,
        mtp_use_repeated_layer=a.flag("mtp_use_repeated_layer"),
        hybrid=pattern is not None,
        pattern_splits_pipeline=pattern is not None and len(pattern.segments) > 1,
        assumptions=(supposed,) if supposed else (),
        not_modelled=gaps,
    )


def _position_embedding(a: Arguments) -> str:
    if a.flag("no_position_embedding"):
        return "none"
    kind = "rope" if a.flag("use_rotary_position_embeddings") else "learned_absolute"
    kind = a.choice(
        "position_embedding_type", kind, ("learned_absolute", "rope", "yarn", "mrope", "relative", "none")
    )
    if kind == "relative":
        raise SpecError("--position-embedding-type is 'relative', which belongs to T5; use a GPT model")
    return "rope" if kind in ("yarn", "mrope") else kind


def _attention(a: Arguments, hidden: int, heads: int, position: str) -> AttentionSpec | MLASpec:
    if a.flag("multi_latent_attention"):
        return MLASpec(
            num_attention_heads=heads,
            q_lora_rank=a.optional_integer("q_lora_rank"),
            kv_lora_rank=a.integer("kv_lora_rank", 32),
            qk_head_dim=a.integer("qk_head_dim", 128),
            qk_pos_emb_head_dim=a.integer("qk_pos_emb_head_dim", 64),
            v_head_dim=a.integer("v_head_dim", 128),
            qk_layernorm=a.flag("qk_layernorm"),
        )
    channels = a.optional_integer("kv_channels")
    if channels is None:
        if hidden % heads:
            raise SpecError(f"--hidden-size ({hidden}) is not divisible by --num-attention-heads ({heads}); "
                            "give --kv-channels")
        channels = hidden // heads
    groups = heads
    if a.flag("group_query_attention") or a.integer("num_query_groups", 1) > 1:
        groups = a.integer("num_query_groups", 1)
    bias = not a.flag("disable_bias_linear")
    window = a.raw("window_size")
    return AttentionSpec(
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=channels,
        add_qkv_bias=bias or a.flag("add_qkv_bias"),
        add_output_bias=bias,
        qk_layernorm="head" if a.flag("qk_layernorm") else None,
        window_size=_window(window) if window is not None else None,
        learnable_softmax_sink=a.text("softmax_type", "vanilla") == "learnable",
        attention_output_gate=a.flag("attention_output_gate"),
        rotary=position == "rope",
    )


def _window(value: object) -> int | None:
    numbers = re.findall(r"-?\d+", str(value))
    return int(numbers[0]) if numbers and int(numbers[0]) >= 0 else None


def _activation(a: Arguments) -> tuple[str, bool]:
    """Name and whether the first linear makes two halves (gate and value)."""
    if a.flag("swiglu"):
        return "silu", True
    if a.flag("quick_geglu"):
        return "quick_gelu", True
    return ("squared_relu" if a.flag("squared_relu") else "gelu"), False


def _ffn_hidden_size(a: Arguments, hidden: int) -> int:
    """``validate_args``: 4h, and for SwiGLU two thirds of it rounded down to a multiple of 64."""
    given = a.optional_integer("ffn_hidden_size")
    if given is not None:
        return given
    return int(4 * hidden * 2 / 3) // 64 * 64 if a.flag("swiglu") else 4 * hidden


def _mlp(a: Arguments, hidden: int) -> MLPSpec:
    activation, gated = _activation(a)
    return MLPSpec(_ffn_hidden_size(a, hidden), gated, activation, add_bias=not a.flag("disable_bias_linear"))


def _moe(a: Arguments, hidden: int) -> MoESpec | None:
    experts = a.optional_integer("num_experts") or a.optional_integer("num_moe_experts")
    if not experts:
        return None
    activation, gated = _activation(a)
    return MoESpec(
        num_experts=experts,
        topk=a.integer("moe_router_topk", 2),
        moe_ffn_hidden_size=a.optional_integer("moe_ffn_hidden_size") or _ffn_hidden_size(a, hidden),
        gated=gated,
        activation=activation,
        add_bias=not a.flag("disable_bias_linear"),
        shared_expert_intermediate_size=a.integer("moe_shared_expert_intermediate_size", 0),
        shared_expert_gate=a.flag("moe_shared_expert_gate"),
        router_enable_expert_bias=a.flag("moe_router_enable_expert_bias"),
        router_score_function=a.text("moe_router_score_function", "softmax"),
        router_load_balancing_type=a.text("moe_router_load_balancing_type", "aux_loss"),
        router_num_groups=a.optional_integer("moe_router_num_groups"),
        router_group_topk=a.optional_integer("moe_router_group_topk"),
        latent_size=a.optional_integer("moe_latent_size"),
    )


def _mamba(a: Arguments, hidden: int) -> MambaSpec:
    """``mamba_mixer.py: MambaMixer``: an inner width of 2h unless the number of heads says otherwise."""
    head_dim = a.integer("mamba_head_dim", 64)
    return MambaSpec(
        num_heads=a.optional_integer("mamba_num_heads") or 2 * hidden // head_dim,
        head_dim=head_dim,
        state_dim=a.integer("mamba_state_dim", 128),
        num_groups=a.integer("mamba_num_groups", 8),
    )


def _hybrid_layer(
    kind: str, a: Arguments, hidden: int, attention: AttentionSpec | MLASpec, dense: MLPSpec, moe: MoESpec |
    None
) -> LayerSpec:
    if kind == "M":
        return LayerSpec(_mamba(a, hidden), None)
    if kind == "*":
        return LayerSpec(attention, None)
    if kind == "E" and moe is None:
        raise SpecError("--hybrid-layer-pattern holds E (a MoE layer) without --num-experts; add it")
    return LayerSpec(None, moe if kind == "E" else dense)


def _mtp(
    a: Arguments,
    pattern: HybridPattern | None,
    layers: tuple[LayerSpec, ...],
    attention: AttentionSpec | MLASpec,
    dense: MLPSpec,
    moe: MoESpec | None,
) -> tuple[int, LayerSpec | None, tuple[str, ...]]:
    """Depths, the layer of one depth, and what could not be read."""
    depths = a.integer("mtp_num_layers", 0)
    if pattern is not None and pattern.mtp:
        depths = depths or len(pattern.mtp)
        kinds = set(pattern.mtp)
        if len(kinds) == 1 and (kind := kinds.pop()) in ("*E", "*-"):
            ffn: FeedForward | None = moe if kind == "*E" else dense
            return depths, LayerSpec(attention, ffn), ()
        return depths, layers[-1], (f"MTP depths with the layers {'/'.join(pattern.mtp)}",)
    return (depths, layers[-1], ()) if depths else (0, None, ())
