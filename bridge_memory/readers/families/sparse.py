"""Mixture-of-experts decoders that differ mainly in their config keys and in which layers have experts.

ERNIE 4.5, EXAONE MoE, Hy3, Hunyuan, MiniMax-M3, Llama 4, Ling 2.0, Sarvam, Step 3.5 and MiMo-V2: softmax attention,
then a dense MLP, or routed and shared experts. Source of what Megatron builds: Megatron Bridge ``models/<family>``. It
has no bridge for Hunyuan and Llama 4: their layers are those of transformers, built of megatron-core's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from bridge_memory.readers.families import layerwise_attention
from bridge_memory.readers.families.common import (
    NO_BRIDGE,
    Family,
    activation,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.families.moe import expert_count, first_dense
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec


class Sparse(NamedTuple):
    """How one model_type differs: config keys first, then the block that Megatron builds."""

    family: Family
    #: Keys of the number of experts and of the width of one.
    number: tuple[str, ...] = ("num_experts", "num_local_experts")
    width: tuple[str, ...] = ("moe_intermediate_size",)
    #: Key of the width of a dense layer's MLP.
    dense_width: str = "intermediate_size"
    #: Total width of the shared experts, from the width of one expert.
    shared: Callable[[Fields, int], int] = lambda f, width: width * f.count("num_shared_experts", default=1)
    #: Which of n layers are MoE.
    is_moe: Callable[[Fields, int], list[bool]] = first_dense
    attention: Callable[[Fields, Family, int, int], Sequence[AttentionSpec]] = layerwise_attention.windows_only
    score: str = "sigmoid"
    #: The key of the score function; ``score`` is its default.
    score_key: str = "scoring_func"
    expert_bias: bool = True
    #: The key that enables the expert bias; "": ``expert_bias`` applies.
    bias_key: str = ""
    #: Whether transformers counts the expert bias as a parameter.
    bias_published: bool = False
    balancing: str = "none"
    #: Megatron Bridge builds no MTP layer, even if the config has one.
    without_mtp: bool = False
    router_in_fp32: bool = False
    #: The feed-forward block of an MTP depth is dense.
    dense_mtp: bool = False
    #: Norms after attention and the feed-forward block, in addition to those before.
    post_layernorms: bool = False
    ignored: tuple[str, ...] = ()


def _ernie_layers(f: Fields, n: int) -> list[bool]:
    """transformers ``modeling_ernie4_5_moe.py: Ernie4_5_MoeDecoderLayer``."""
    start, end = f.count("moe_layer_start_index", default=1), f.integer("moe_layer_end_index", default=-1, least=-1)
    every = f.integer("moe_layer_interval", default=1)
    end = n - 1 if end == -1 else end
    if every != 1 or end < n - 1:
        # Ernie45Bridge reads moe_layer_start_index only.
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


def _step_layers(f: Fields, n: int) -> list[bool]:
    """Bridge ``step35_bridge.py``: a list of layers, or "3,4,5"; every layer where it is absent."""
    key, given = f.raw("moe_layers_enum")
    if given is None:
        return [True] * n
    words = given.split(",") if isinstance(given, str) else given
    if not isinstance(words, (list, tuple)):
        raise f.error(f"{key} is {shown(given)}; it must list layers, such as 3,4,5")
    numbers = [int(w) if isinstance(w, str) and w.strip().isdecimal() else w for w in words if w != ""]
    return _numbered(f, key, numbers, n)


def _numbered(f: Fields, key: str, numbers: Sequence[object], n: int) -> list[bool]:
    for i in numbers:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n:
            raise f.error(f"{key} holds {shown(i)}; the layers are 0 to {n - 1}")
    chosen = set(numbers)
    return [i in chosen for i in range(n)]


def _after_dense(f: Fields, n: int) -> list[bool]:
    first = f.count("num_dense_layers", default=1)
    if first > n:
        raise f.error(f"num_dense_layers ({first}) is larger than num_hidden_layers ({n})")
    return [i >= first for i in range(n)]


def _every_layer(f: Fields, n: int) -> list[bool]:
    return [True] * n


def _minimax_shared(f: Fields, width: int) -> int:
    """Bridge ``minimax_m3_bridge.py: provider_bridge``."""
    each = f.count("shared_intermediate_size")
    return each * f.count("n_shared_experts", default=1)


SPARSE: dict[str, Sparse] = {
    "ernie4_5_moe": Sparse(
        Family(
            tied=True,
            bias_keys=("use_bias",),
            assumptions=("ERNIE biases softmax scores, Megatron only sigmoid scores: Bridge trains it with sigmoid",),
        ),
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
        attention=layerwise_attention.exaone,
        balancing="global_aux_loss",
        dense_mtp=True,
        ignored=("is_moe_layer",),
    ),
    "hy_v3": Sparse(
        Family(qk_layernorm="head", head_dim=128),
        is_moe=lambda f, n: first_dense(f, n, 1),
        # The published config repeats keys under older names.
        ignored=("enable_moe_fp32_combine", "expert_hidden_dim", "moe_router_use_sigmoid", "qk_norm",
                 "moe_router_enable_expert_bias", "enable_lm_head_fp32", "enable_attention_fp32_softmax"),
    ),
    "hunyuan_v1_moe": Sparse(
        Family(qk_layernorm="head", assumptions=(NO_BRIDGE,)),
        width=("intermediate_size",),
        shared=lambda f, width: width,
        is_moe=_every_layer,
        # transformers has one shared expert, as wide as the others, and no cross-layer attention.
        ignored=("cla_share_factor", "moe_intermediate_size", "num_shared_expert", "use_mixed_mlp_moe", "norm_type"),
        score="softmax",
        expert_bias=False,
        balancing="aux_loss",
    ),
    "minimax_m3_vl_text": Sparse(
        # SwiGLU-OAI, regardless of hidden_act.
        Family(bias_keys=(), qk_layernorm="head", fixed_activation="quick_gelu"),
        number=("num_local_experts",),
        width=("intermediate_size",),
        dense_width="dense_intermediate_size",
        shared=_minimax_shared,
        attention=layerwise_attention.minimax_m3,
        balancing="aux_loss",
        without_mtp=True,
        router_in_fp32=True,
        ignored=("swiglu_alpha", "swiglu_limit", "use_gemma_norm", "num_mtp_modules"),
    ),
    "llama4_text": Sparse(
        Family(assumptions=(NO_BRIDGE,)),
        number=("num_local_experts",),
        width=("intermediate_size",),
        dense_width="intermediate_size_mlp",
        shared=lambda f, width: width,
        is_moe=_llama4_layers,
        attention=layerwise_attention.llama4,
        expert_bias=False,
        balancing="aux_loss",
        ignored=("attn_scale", "attn_temperature_tuning", "floor_scale", "attention_chunk_size"),
    ),
    "afmoe": Sparse(
        Family(qk_layernorm="head", head_dim=128),
        number=("num_experts",),
        shared=lambda f, width: width * f.count("num_shared_experts", default=2),
        is_moe=_after_dense,
        attention=layerwise_attention.afmoe,
        bias_published=True,
        post_layernorms=True,
        score_key="score_func",
        # transformers' class reads none of the published config's other keys.
        ignored=("mup_enabled", "route_norm", "num_expert_groups", "num_limited_groups", "load_balance_coeff"),
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
    "step3p5": Sparse(
        Family(),
        number=("moe_num_experts",),
        shared=lambda f, width: f.count("share_expert_dim", "share_expert_dims"),
        is_moe=_step_layers,
        attention=layerwise_attention.step,
        score_key="moe_router_activation",
        bias_key="use_moe_router_bias",
        balancing="aux_loss",
        dense_mtp=True,
        ignored=("attention_other_setting", "mtp_layer_types", "partial_rotary_factors", "norm_expert_weight",
                 "moe_layer_offset", "moe_every_n_layer", "moe_router_scaling_factor", "use_moe", "att_impl_type"),
    ),
    "mimo_v2_flash": Sparse(
        Family(bias_keys=()),
        number=("n_routed_experts",),
        shared=lambda f, width: width * f.count("n_shared_experts"),
        attention=layerwise_attention.mimo_v2,
        ignored=("hybrid_block_size", "attention_projection_layout", "sliding_window", "sliding_window_size"),
    ),
}


def read_sparse(f: Fields) -> ModelSpec:
    kind = SPARSE[f.model_type]
    family = kind.family
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    if f.flag("use_cla"):
        raise f.error("use_cla is true; layers that share keys and values cannot be estimated")
    for key in ("mlp_bias", "use_bias"):
        if f.flag(key):
            raise f.error(f"{key} is true; Megatron would build experts with biases, which no such model has")
    is_moe = kind.is_moe(f, n)
    block = _experts(f, kind) if any(is_moe) else None
    if block is None:  # sizes of experts that no layer has
        f.ignore(*kind.number, *kind.width, "num_experts_per_tok", "num_shared_experts", "n_shared_experts")
    dense = None
    if kind.dense_mtp or not all(is_moe):
        dense = MLPSpec(f.integer(kind.dense_width), gated=True, activation=activation(f, family))
    mixers = kind.attention(f, family, hidden_size, n)
    layers = [LayerSpec(mixer, block if moe else dense) for mixer, moe in zip(mixers, is_moe, strict=True)]
    scaled = f.model_type == "afmoe" and f.flag("mup_enabled")
    if kind.post_layernorms:
        layers = [replace(layer, post_layernorms=True) for layer in layers]
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
    return replace(made, mtp_use_repeated_layer=repeated and depths > 0, scaled_embeddings=scaled)


def _experts(f: Fields, kind: Sparse) -> MoESpec:
    experts, topk = expert_count(f, *kind.number)
    width = f.integer(*kind.width)
    return MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=width,
        activation=activation(f, kind.family),
        shared_expert_intermediate_size=kind.shared(f, width),
        router_enable_expert_bias=f.flag(kind.bias_key) if kind.bias_key else kind.expert_bias,
        expert_bias_in_published_count=kind.bias_published,
        router_score_function=f.choice(kind.score_key, {"sigmoid": "sigmoid", "softmax": "softmax"}, kind.score),
        router_in_fp32=kind.router_in_fp32,
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
