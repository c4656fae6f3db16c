"""Mixture-of-experts decoders that differ by what they call an expert, and by which layers have any.

ERNIE 4.5, EXAONE MoE, Hy3, Hunyuan, MiniMax-M3, Llama 4, Ling 2.0 and Sarvam: softmax attention, then a dense
MLP or routed experts beside shared ones. Source of what Megatron builds: Megatron Bridge ``models/<family>``; it has no
bridge for Hunyuan and Llama 4, whose layers are those of transformers in megatron-core's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bridge_memory.readers.families.common import (
    NO_BRIDGE,
    Family,
    activation,
    attention,
    attentions,
    layer_types,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.families.moe import expert_count, first_dense
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec

class Sparse(NamedTuple):
    """How one model_type differs. Keys first, then what Megatron makes of the block."""

    family: Family
    #: Number of experts, and width of one.
    number: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: tuple[str, ...] = ("moe_intermediate_size",)
    #: Width of a dense layer's MLP.
    dense_width: str = "intermediate_size"
    #: Total width of the shared experts, given the width of one.
    shared: Callable[[Fields, int], int] = lambda f, width: width * f.count("num_shared_experts", default=1)
    #: Which layers are MoE, of n.
    is_moe: Callable[[Fields, int], list[bool]] = first_dense
    score: str = "sigmoid"
    expert_bias: bool = True
    #: transformers counts the expert bias as a parameter.
    bias_published: bool = False
    balancing: str = "none"
    #: Megatron Bridge builds no MTP layer, whatever the config says.
    without_mtp: bool = False
    #: The layer inside an MTP depth is dense.
    dense_mtp: bool = False
    ignored: tuple[str, ...] = ()


def _ernie_layers(f: Fields, n: int) -> list[bool]:
    """transformers ``modeling_ernie4_5_moe.py: Ernie4_5_MoeDecoderLayer``."""
    start, end = f.count("moe_layer_start_index", default=1), f.integer("moe_layer_end_index", default=-1, least=-1)
    every = f.integer("moe_layer_interval", default=1)
    end = n - 1 if end == -1 else end
    if every != 1 or end < n - 1:
        # Ernie45Bridge reads where they begin only.
        raise f.error(
            f"moe_layer_interval ({every}) and moe_layer_end_index ({end}) leave dense layers between or after those "
            "with experts; Megatron Bridge builds experts in every layer from moe_layer_start_index on"
        )
    return [i >= start for i in range(n)]


def _llama4_layers(f: Fields, n: int) -> list[bool]:
    """transformers ``configuration_llama4.py``: moe_layers, else every interleave_moe_layer_step-th."""
    every = f.integer("interleave_moe_layer_step", default=1)
    listed = f.items("moe_layers")
    if listed is None:
        return [(i + 1) % every == 0 for i in range(n)]
    return _numbered(f, "moe_layers", listed, n)


def _numbered(f: Fields, key: str, numbers: Sequence[object], n: int) -> list[bool]:
    for i in numbers:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n:
            raise f.error(f"{key} holds {shown(i)}; the layers are 0 to {n - 1}")
    chosen = set(numbers)
    return [i in chosen for i in range(n)]


def _every_layer(f: Fields, n: int) -> list[bool]:
    return [True] * n


def _minimax_shared(f: Fields, width: int) -> int:
    """Bridge ``minimax_m3_bridge.py: provider_bridge``."""
    each = f.count("shared_intermediate_size")
    return each * f.count("n_shared_experts", default=1)


SPARSE: dict[str, Sparse] = {
    # ERNIE biases softmax scores and Megatron sigmoid ones; Bridge sets sigmoid.
    "ernie4_5_moe": Sparse(
        Family(tied=True, bias_keys=("use_bias",)),
        number=("moe_num_experts",),
        shared=lambda f, width: width * f.count("moe_num_shared_experts", default=2),
        is_moe=_ernie_layers,
        bias_published=True,
        balancing="aux_loss",
        without_mtp=True,
        ignored=("moe_norm_min", "moe_use_aux_free", "moe_gate", "moe_capacity"),
    ),
    "exaone_moe": Sparse(
        Family(bias_keys=(), qk_layernorm="head", window="pattern"),
        is_moe=lambda f, n: first_dense(f, n, 1),
        balancing="global_aux_loss",
        dense_mtp=True,
        ignored=("is_moe_layer",),
    ),
    "hy_v3": Sparse(
        Family(qk_layernorm="head", head_dim=128),
        is_moe=lambda f, n: first_dense(f, n, 1),
        # The published config repeats its keys under older names.
        ignored=("enable_moe_fp32_combine", "expert_hidden_dim", "moe_router_use_sigmoid", "qk_norm",
                 "moe_router_enable_expert_bias", "enable_lm_head_fp32", "enable_attention_fp32_softmax"),
    ),
    "hunyuan_v1_moe": Sparse(
        Family(qk_layernorm="head", assumptions=(NO_BRIDGE,)),
        width=("intermediate_size",),
        shared=lambda f, width: width,
        is_moe=_every_layer,
        score="softmax",
        expert_bias=False,
        balancing="aux_loss",
    ),
    "minimax_m3_vl_text": Sparse(
        # SwiGLU-OAI, whatever hidden_act says.
        Family(bias_keys=(), qk_layernorm="head", fixed_activation="quick_gelu"),
        number=("num_local_experts",),
        width=("intermediate_size",),
        dense_width="dense_intermediate_size",
        shared=_minimax_shared,
        balancing="aux_loss",
        without_mtp=True,
        ignored=("swiglu_alpha", "swiglu_limit", "use_gemma_norm", "num_mtp_modules"),
    ),
    "llama4_text": Sparse(
        Family(assumptions=(NO_BRIDGE,)),
        number=("num_local_experts",),
        width=("intermediate_size",),
        dense_width="intermediate_size_mlp",
        shared=lambda f, width: width,
        is_moe=_llama4_layers,
        expert_bias=False,
        balancing="aux_loss",
        ignored=("attn_scale", "attn_temperature_tuning", "floor_scale", "attention_chunk_size"),
    ),
    "bailing_moe_v2": Sparse(
        Family(bias_keys=("use_qkv_bias",), output_bias="never", qk_layernorm="head"),
        shared=lambda f, width: width,
        ignored=("num_shared_experts", "max_window_layers", "output_dropout", "moe_router_enable_expert_bias",
                 "moe_shared_expert_intermediate_size", "rotary_dim"),
    ),
    "sarvam_moe": Sparse(
        Family(bias_keys=("use_qkv_bias",), output_bias="never", qk_layernorm="head"),
        ignored=("max_window_layers", "output_dropout", "moe_router_enable_expert_bias",
                 "moe_shared_expert_intermediate_size"),
    ),
}


def read_sparse(f: Fields) -> ModelSpec:
    kind = SPARSE[f.model_type]
    family = kind.family
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    for key in ("mlp_bias", "use_bias"):
        if f.flag(key):
            raise f.error(f"{key} is true; Megatron would build experts with biases, which no such model has")
    is_moe = kind.is_moe(f, n)
    block = _experts(f, kind) if any(is_moe) else None
    dense = None
    if kind.dense_mtp or not all(is_moe):
        dense = MLPSpec(f.integer(kind.dense_width), gated=True, activation=activation(f, family))
    mixers = _mixers(f, family, hidden_size, n)
    layers = [LayerSpec(mixer, block if moe else dense) for mixer, moe in zip(mixers, is_moe, strict=True)]
    depths, repeated = _mtp_depths(f, kind), f.flag("mtp_share_layers")
    mtp = LayerSpec(mixers[-1], dense) if kind.dense_mtp else layers[-1]
    head_dim = mixers[0].kv_channels
    rotary = int(head_dim * rotary_factor(f, family.rotary_factor))
    rotary = f.integer("rotary_dim", default=rotary, least=0, most=head_dim)
    f.ignore(kind.dense_width, "intermediate_size", *kind.ignored)
    made = model(
        f,
        family,
        layers,
        hidden_size=hidden_size,
        rotary_dim=rotary,
        mtp_num_layers=depths,
        mtp_layer=mtp if depths else None,
    )
    return replace(made, mtp_use_repeated_layer=repeated and depths > 0)


def _experts(f: Fields, kind: Sparse) -> MoESpec:
    experts, topk = expert_count(f, *kind.number)
    width = f.integer(*kind.width)
    return MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=width,
        activation=activation(f, kind.family),
        shared_expert_intermediate_size=kind.shared(f, width),
        router_enable_expert_bias=kind.expert_bias,
        expert_bias_in_published_count=kind.bias_published,
        router_score_function=kind.score,
        router_load_balancing_type=kind.balancing,
        router_num_groups=f.integer("n_group", default=None),
        router_group_topk=f.integer("topk_group", default=None),
    )


def _mtp_depths(f: Fields, kind: Sparse) -> int:
    depths = f.count("num_nextn_predict_layers")
    if depths and kind.without_mtp:
        f.assume(
            f"num_nextn_predict_layers ({depths}): Megatron Bridge builds this model without MTP layers; "
            "mtp_num_layers 0"
        )
        return 0
    return depths


def _mixers(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    if f.model_type == "llama4_text":
        return _llama4_attention(f, attention(f, family, hidden_size), n)
    if f.model_type == "minimax_m3_vl_text":
        return [_minimax_attention(f, attention(f, family, hidden_size), hidden_size, n)] * n
    stack = attentions(f, family, attention(f, family, hidden_size), n)
    if f.model_type == "exaone_moe":  # Bridge's no_rope_freq: only sliding layers rotate
        return [one if one.window_size else replace(one, rotary=False) for one in stack]
    return stack


def _llama4_attention(f: Fields, spec: AttentionSpec, n: int) -> Sequence[AttentionSpec]:
    """Layers of no_rope_layers 1 rotate; the others see all tokens and have no norm of queries and keys."""
    layer_types(f, n, ("chunked_attention", "full_attention"))
    every = f.integer("no_rope_layer_interval", default=4)
    rotates = f.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n)]
    if len(rotates) != n:
        raise f.error(f"no_rope_layers has {len(rotates)} entries for num_hidden_layers {n}; give one a layer")
    if f.flag("use_qk_norm", default=True):
        f.not_modelled.append("use_qk_norm (qk_l2_norm): queries and keys before and after their norm without weights")
    without = replace(spec, rotary=False)
    return [spec if one else without for one in rotates]


def _minimax_attention(f: Fields, spec: AttentionSpec, hidden_size: int, n: int) -> AttentionSpec:
    """Full attention on every layer; Megatron Bridge keeps the indexers as frozen weights and runs none of them."""
    types = layer_types(f, n, ("full_attention", "minimax_m3_sparse")) or []
    heads, width = f.integer("index_n_heads", default=4), f.integer("index_head_dim", default=128)
    indexers = sum(kind != "full_attention" for kind in types)
    sparse = f.mapping("sparse_attention_config")
    if sparse and not types:
        f.not_modelled.append("sparse_attention_config: the frozen weights of the indexers, replicated on every rank")
    if indexers:
        # transformers modeling_minimax_m3_vl.py: MiniMaxM3VLIndexer.
        weights = indexers * (hidden_size * (heads + 1) * width + 2 * width)
        f.not_modelled.append(
            f"indexers of {indexers} layers: {weights} frozen weights, which Megatron Bridge replicates and does not run"
        )
    f.ignore("index_block_size", "index_topk_blocks", "index_local_blocks")
    return spec
