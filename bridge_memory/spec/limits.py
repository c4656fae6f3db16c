"""Checks of a model by itself, and the sizes of it that parallel sizes must divide.

Computed once per model. TC = megatron-core 0.16.1 ``transformer/transformer_config.py:
TransformerConfig.__post_init__``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from math import gcd
from typing import NamedTuple

from bridge_memory.spec.errors import SpecError, show
from bridge_memory.spec.fields import MOST, check_fraction, check_ints
from bridge_memory.spec.model import (
    SPARSE_KERNELS,
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ShortConvSpec,
    SideBySideSpec,
)


class Limits(NamedTuple):
    """Sizes of a model that a parallel size must divide, with their greatest common divisors (0: no such size)."""

    #: (Megatron's name, size) of the sizes that TP and expert TP divide.
    tp: tuple[tuple[str, int], ...]
    tp_gcd: int
    etp: tuple[tuple[str, int], ...]
    etp_gcd: int
    #: Numbers of experts, which EP divides; empty for a dense model.
    experts: tuple[int, ...]
    experts_gcd: int
    #: Numbers of query groups: TP divides them or, from 0.16 on, is a multiple of them.
    groups: tuple[int, ...]
    groups_gcd: int
    mixers: tuple[object, ...]
    moes: tuple[MoESpec, ...]
    mla: bool
    #: Whether any layer has a dense feed-forward block, one with biases, or a norm over all heads of q and k.
    dense: bool
    dense_bias: bool
    full_qk_norm: bool
    expert_bias: bool
    shared_experts: bool


def limits_of(model: ModelSpec) -> Limits:
    """Check the model by itself, then collect what parallel sizes must divide. Raises SpecError."""
    known = model.limits
    if isinstance(known, Limits):
        return known
    limits = _limits_of(model)
    model.keep_limits(limits)
    return limits


def _limits_of(model: ModelSpec) -> Limits:
    kinds = dict.fromkeys((*model.layers, *((model.mtp_layer,) if model.mtp_layer else ())))
    _check_model(model)
    for kind in kinds:
        _check_layer(kind)
    mixers = tuple(dict.fromkeys(m for k in kinds for m in _mixers(k)))
    ffns = tuple(dict.fromkeys(k.ffn for k in kinds if k.ffn is not None))
    moes = tuple(f for f in ffns if isinstance(f, MoESpec))
    tp = dict.fromkeys(pair for block in (*mixers, *ffns) for pair in _divided_by_tp(block))
    if not model.make_vocab_size_divisible_by:
        tp["vocab_size (not padded)", model.vocab_size] = None
    etp = dict.fromkeys(("moe_ffn_hidden_size", f.moe_ffn_hidden_size) for f in moes)
    experts = tuple(dict.fromkeys(f.num_experts for f in moes))
    groups = tuple(dict.fromkeys(m.num_query_groups for m in mixers if isinstance(m, AttentionSpec)))
    return Limits(
        tp=tuple(tp),
        tp_gcd=gcd(*(size for _, size in tp)),
        etp=tuple(etp),
        etp_gcd=gcd(*(size for _, size in etp)),
        experts=experts,
        experts_gcd=gcd(*experts),
        groups=groups,
        groups_gcd=gcd(*groups),
        mixers=mixers,
        moes=moes,
        mla=any(isinstance(m, MLASpec | CompressedAttentionSpec) for m in mixers),
        dense=any(isinstance(f, MLPSpec) for f in ffns),
        dense_bias=any(isinstance(f, MLPSpec) and f.add_bias for f in ffns),
        full_qk_norm=any(isinstance(m, AttentionSpec) and m.qk_layernorm == "full" for m in mixers),
        expert_bias=any(f.add_bias for f in moes),
        shared_experts=any(f.shared_expert_intermediate_size for f in moes),
    )


def _mixers(layer: LayerSpec) -> tuple[object, ...]:
    """The mixers of a layer: none, one, or the two of a SideBySideSpec."""
    if isinstance(layer.mixer, SideBySideSpec):
        return layer.mixer.attention, layer.mixer.mamba
    return () if layer.mixer is None else (layer.mixer,)


def _divided_by_tp(block: object) -> Iterator[tuple[str, int]]:
    """(Megatron's name, size) of the sizes that TP divides. Source: TC, ``ssm/mamba_mixer.py: MambaMixer.__init__``,
    ``tensor_parallel/layers.py``."""
    if isinstance(block, AttentionSpec | MLASpec):
        yield "num_attention_heads", block.num_attention_heads
    elif isinstance(block, MambaSpec):
        yield "mamba_num_heads", block.num_heads
        yield "mamba_num_groups", block.num_groups
    elif isinstance(block, GatedDeltaNetSpec):
        yield "linear_num_key_heads", block.num_key_heads
        yield "linear_num_value_heads", block.num_value_heads
    elif isinstance(block, MLPSpec):
        yield "ffn_hidden_size", block.ffn_hidden_size
    elif isinstance(block, MoESpec) and block.shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size", block.shared_expert_intermediate_size


_INTS: dict[type, tuple[str, ...]] = {
    AttentionSpec: ("num_attention_heads", "num_query_groups", "kv_channels"),
    CompressedAttentionSpec: (
        "num_attention_heads", "head_dim", "rope_dim", "q_lora_rank", "output_groups", "output_lora_rank",
        "window_size",
    ),
    MLASpec: ("num_attention_heads", "kv_lora_rank", "qk_head_dim", "v_head_dim"),
    MambaSpec: ("num_heads", "head_dim", "state_dim", "num_groups", "conv_kernel", "chunk_size"),
    GatedDeltaNetSpec: ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel"),
    ShortConvSpec: ("kernel",),
    Mamba1Spec: ("inner_size", "state_dim", "dt_rank", "conv_kernel"),
    KimiDeltaSpec: ("num_heads", "head_dim", "conv_kernel"),
    MLPSpec: ("ffn_hidden_size",),
    MoESpec: ("num_experts", "topk", "moe_ffn_hidden_size"),
}

#: Each expert is a separate entry in the list of parameters. More than these come from a damaged config, and would
#: exhaust the memory of the machine that runs the estimate.
MOST_EXPERTS = 8192
MOST_EXPERT_WEIGHTS = 500_000
MOST_MTP_LAYERS = 64
#: Largest multiple to which a vocabulary is padded: no kernel needs one near this.
MOST_VOCAB_PADDING = 2**20


def _check_model(model: ModelSpec) -> None:
    check_ints(model, "hidden_size", "vocab_size", "residual_streams")
    if not model.layers:
        raise SpecError("num_layers (0) is below 1; give a model of one layer or more")
    for name in ("mtp_num_layers", "max_position_embeddings", "rotary_dim", "per_layer_vocab_size"):
        _check_count(model, name)
    _check_count(model, "make_vocab_size_divisible_by", MOST_VOCAB_PADDING)
    if model.mtp_num_layers > MOST_MTP_LAYERS:
        raise SpecError(f"mtp_num_layers ({model.mtp_num_layers}) is beyond any model; give at most {MOST_MTP_LAYERS}")
    experts = sum(layer.ffn.num_experts for layer in model.layers if isinstance(layer.ffn, MoESpec))
    if experts > MOST_EXPERT_WEIGHTS:
        raise SpecError(
            f"num_moe_experts over num_layers ({model.num_layers}) make {experts} experts in all; give at most "
            f"{MOST_EXPERT_WEIGHTS}"
        )
    for name in ("hidden_dropout", "attention_dropout"):
        check_fraction(name, getattr(model, name), below_one=True)
    if model.mtp_num_layers and model.mtp_layer is None:
        raise SpecError(f"mtp_num_layers ({model.mtp_num_layers}) without an MTP layer; give mtp_layer, or set it to 0")


def _check_count(owner: object, name: str, most: int = MOST) -> None:
    value = getattr(owner, name)
    if type(value) is not int or not 0 <= value < most:
        raise SpecError(f"{name} ({show(value)}) is not an integer from 0 to 2**{most.bit_length() - 1}; give one")


def _check_layer(layer: LayerSpec) -> None:
    for block in (*_mixers(layer), layer.ffn):
        if block is None:
            continue
        check_ints(block, *_INTS[type(block)])
        if isinstance(block, AttentionSpec):
            _check_divides(block, "num_query_groups", "num_attention_heads")  # transformer/attention.py: Attention
            if block.v_channels is not None:
                check_ints(block, "v_channels")
                if block.attention_output_gate:
                    raise SpecError(
                        f"v_channels ({block.v_channels}) with attention_output_gate: the gate is as wide as the "
                        "queries; unset one of them"
                    )
        elif isinstance(block, MLASpec):
            _check_count(block, "qk_pos_emb_head_dim")
            if block.q_lora_rank is not None:
                check_ints(block, "q_lora_rank")
            if block.indexer is not None:
                check_ints(block.indexer, "num_heads", "head_dim")
            if block.sparse is not None:
                check_ints(block.sparse, "topk")
                if block.sparse.kernels not in SPARSE_KERNELS:
                    known = ", ".join(SPARSE_KERNELS)
                    raise SpecError(f"dsa_kernel_backend ({show(block.sparse.kernels)}) is unknown; use one of {known}")
            elif block.indexer is not None:
                raise SpecError("MLASpec has an indexer and no sparse attention; set sparse too")
        elif isinstance(block, CompressedAttentionSpec):
            _check_count(block, "compress_ratio")
            if block.num_attention_heads * block.head_dim % block.output_groups:
                raise SpecError(
                    f"num_attention_heads x head_dim ({block.num_attention_heads * block.head_dim}) is not divisible "
                    f"by o_groups ({block.output_groups}); change o_groups"
                )
            if block.indexer is not None:
                check_ints(block.indexer, "num_heads", "head_dim", "topk")
        elif isinstance(block, MambaSpec):
            _check_divides(block, "num_groups", "num_heads")  # MambaMixer
        elif isinstance(block, GatedDeltaNetSpec):
            _check_divides(block, "num_key_heads", "num_value_heads")  # TC
        elif isinstance(block, MoESpec):
            _check_moe(block)


def _check_divides(block: object, name: str, of: str) -> None:
    n, size = getattr(block, name), getattr(block, of)
    if size % n:
        raise SpecError(f"{of} ({size}) is not divisible by {name} ({n}); use {divisors(size, n)}")


def _check_moe(moe: MoESpec) -> None:
    """TC."""
    if moe.num_experts > MOST_EXPERTS:
        raise SpecError(f"num_moe_experts ({moe.num_experts}) is beyond any model; give at most {MOST_EXPERTS}")
    if moe.topk > moe.num_experts:
        raise SpecError(f"moe_router_topk ({moe.topk}) is larger than num_moe_experts ({moe.num_experts}); lower it")
    _check_count(moe, "shared_expert_intermediate_size")
    if moe.latent_size is not None:
        check_ints(moe, "latent_size")
    _check_groups(moe)
    if moe.router_enable_expert_bias and moe.router_score_function not in ("sigmoid", "sqrtsoftplus"):
        raise SpecError(
            "moe_router_enable_expert_bias (True) needs moe_router_score_function sigmoid, not "
            f"{show(moe.router_score_function)}; change one of them"
        )


def _check_groups(moe: MoESpec) -> None:
    """TC, and ``moe_utils.py: group_limited_topk``, which selects experts of the selected groups only."""
    groups, chosen = moe.router_num_groups, moe.router_group_topk
    if not groups or not chosen:
        return
    check_ints(moe, "router_num_groups", "router_group_topk")
    if moe.num_experts % groups:
        raise SpecError(
            f"num_moe_experts ({moe.num_experts}) is not divisible by moe_router_num_groups ({groups}); use "
            f"{divisors(moe.num_experts, groups)}"
        )
    if chosen > groups:
        raise SpecError(
            f"moe_router_group_topk ({chosen}) is larger than moe_router_num_groups ({groups}); use at most {groups}"
        )
    within = moe.num_experts // groups * chosen
    if moe.topk > within:
        raise SpecError(
            f"moe_router_topk ({moe.topk}) is larger than the {within} experts of moe_router_group_topk ({chosen}) "
            "groups; lower it, or choose from more groups"
        )


def divisors(size: int, near: int, *, above: bool = True) -> str:
    """Sizes near ``near`` that divide ``size``, for a message: the next one ``above``, and the largest ones below."""
    most = min(size, 100_000)
    higher = (n for n in range(near + 1, most + 1 if above else 0) if size % n == 0)
    lower = (n for n in range(min(near, most), 0, -1) if size % n == 0)
    return " or ".join(map(str, islice(chain(islice(higher, 1), lower), 3)))


def next_multiple(value: int, of: int) -> int:
    """The smallest multiple of ``of`` that is at least ``value``."""
    return -(-value // of) * of
