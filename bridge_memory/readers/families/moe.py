"""Mixture-of-experts decoders with softmax attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.readers.families.common import (
    NO_BRIDGE,
    NORM_AFTER,
    Family,
    activation,
    attention,
    attentions,
    mlp,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import AttentionSpec, LayerSpec, ModelSpec, MoESpec

MOE: dict[str, Family] = {
    "mixtral": Family(bias_keys=(), window="all"),
    "qwen2_moe": Family(bias_keys=("qkv_bias",), qkv_bias=True, output_bias="never", window="qwen"),
    "qwen3_moe": Family(qk_layernorm="head", window="qwen"),
    "olmoe": Family(qk_layernorm="full"),
    "flex_olmo": Family(qk_layernorm="full", assumptions=(NORM_AFTER, NO_BRIDGE)),
    "glm4_moe": Family(output_bias="never", rotary_factor=0.5),
    "solar_open": Family(output_bias="never", head_dim=128, assumptions=(NO_BRIDGE,)),
    "phimoe": Family(normalization="LayerNorm", window="all"),
    "dots1": Family(qk_layernorm="head", window="qwen"),
    "minimax_m2": Family(
        bias_keys=(),
        # Keys of MiniMax-Text-01 for linear attention and dense MLPs, which M2 does not have.
        ignored=(
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_beta",
            "mlp_intermediate_size",
            "shared_moe_mode",
        ),
    ),
    # transformers' GptOssConfig has attention_bias True; the experts run a clamped quick GELU, regardless of
    # hidden_act (Bridge: gpt_oss_bridge.py).
    "gpt_oss": Family(
        qkv_bias=True,
        fixed_activation="quick_gelu",
        window="alternate",
        head_dim=64,
        ignored=("swiglu_alpha",),
    ),
    "granitemoe": Family(),
    "granitemoeshared": Family(),
}


def expert_count(f: Fields, *keys: str) -> tuple[int, int]:
    """(E, k), k no larger than E."""
    experts = _one_for_all(f, *keys)
    topk = _one_for_all(f, "num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_topk", "moe_k")
    if topk > experts:
        raise f.error(f"num_experts_per_tok ({topk}) is larger than {keys[0]} ({experts})")
    return experts, topk


def _one_for_all(f: Fields, *keys: str) -> int:
    """A size, or a list with the same size for every layer (Hunyuan)."""
    _, value = f.raw(*keys)
    if isinstance(value, list) and value and all(type(one) is int and one == value[0] > 0 for one in value):
        return int(value[0])
    size: int = f.integer(*keys)
    return size


def sparse_layers(f: Fields, n: int) -> list[bool]:
    """Which layers are MoE, by Qwen's rule: every decoder_sparse_step-th, except mlp_only_layers."""
    step = f.integer("decoder_sparse_step", default=1)
    dense = f.items("mlp_only_layers") or ()
    for i in dense:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n:
            raise f.error(f"mlp_only_layers holds {shown(i)}; the layers are 0 to {n - 1}")
    return [(i + 1) % step == 0 and i not in dense for i in range(n)]


def first_dense(f: Fields, n: int, default: int = 0) -> list[bool]:
    """Which layers are MoE, by DeepSeek's rule: after first_k_dense_replace dense layers every moe_layer_freq-th.

    mlp_layer_types (transformers 5), or a list of 0 and 1 as moe_layer_freq, gives them layer by layer instead.
    ``default``: of first_k_dense_replace.
    """
    types = f.items("mlp_layer_types")
    if types is not None:
        f.ignore("first_k_dense_replace", "moe_layer_freq")
        return each_layer(f, "mlp_layer_types", types, n, {"dense": False, "sparse": True})
    if isinstance(f.config.get("moe_layer_freq"), list):
        f.ignore("first_k_dense_replace")
        return each_layer(f, "moe_layer_freq", f.items("moe_layer_freq") or (), n, {0: False, 1: True})
    first = f.count("first_k_dense_replace", default=default)
    if first > n:
        raise f.error(f"first_k_dense_replace ({first}) is larger than num_hidden_layers ({n})")
    freq = f.integer("moe_layer_freq", default=1)
    return [i >= first and i % freq == 0 for i in range(n)]


def each_layer(f: Fields, key: str, given: Sequence[Any], n: int, words: dict[Any, bool]) -> list[bool]:
    """Which layers are MoE, from a list with one of ``words`` per layer. Raises SpecError."""
    if len(given) != n:
        raise f.error(f"{key} has {len(given)} entries for num_hidden_layers {n}; give one a layer")
    for word in given:
        if isinstance(word, (list, dict)) or word not in words:
            raise f.error(f"{key} holds {shown(word)}; known: {', '.join(map(str, words))}")
    return [words[word] for word in given]


def routed(f: Fields, family: Family) -> tuple[MoESpec, list[bool]]:
    """(the MoE block of a family, which layers have it). Load-balancing types are those that Bridge sets."""
    n = num_layers(f)
    kind = f.model_type
    act = activation(f, family)
    every = [True] * n
    if kind in ("qwen2_moe", "qwen3_moe"):
        experts, topk = expert_count(f, "num_experts", "num_local_experts")
        shared = 0 if kind == "qwen3_moe" else f.count("shared_expert_intermediate_size")
        block = MoESpec(
            num_experts=experts,
            topk=topk,
            moe_ffn_hidden_size=f.integer("moe_intermediate_size"),
            activation=act,
            shared_expert_intermediate_size=shared,
            shared_expert_gate=shared > 0,
        )
        return block, sparse_layers(f, n)
    if kind in ("glm4_moe", "dots1", "solar_open"):
        experts, topk = expert_count(f, "n_routed_experts")
        width = f.integer("moe_intermediate_size")
        block = MoESpec(
            num_experts=experts,
            topk=topk,
            moe_ffn_hidden_size=width,
            activation=act,
            shared_expert_intermediate_size=width * f.count("n_shared_experts"),
            router_enable_expert_bias=True,
            router_score_function="sigmoid",
            router_load_balancing_type="seq_aux_loss",
            router_num_groups=f.integer("n_group", default=None),
            router_group_topk=f.integer("topk_group", default=None),
        )
        f.ignore("scoring_func")
        return block, first_dense(f, n)
    # From here on intermediate_size is the expert's width.
    experts, topk = expert_count(f, "num_experts" if kind in ("olmoe", "flex_olmo") else "num_local_experts")
    block = MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=f.integer("intermediate_size"),
        activation=act,
    )
    if kind == "phimoe":
        block = replace(block, noisy_input=f.number("input_jitter_noise", default=0.0) > 0)
    elif kind == "olmoe":
        block = replace(block, router_load_balancing_type="seq_aux_loss")
    elif kind == "gpt_oss":
        block = replace(
            block, add_bias=True, add_router_bias=True, router_load_balancing_type="none",
            clamp_value=f.number("swiglu_limit", default=7.0),
        )  # fmt: skip
    elif kind == "minimax_m2":
        block = replace(
            block,
            router_score_function=f.choice(
                "scoring_func", {"sigmoid": "sigmoid", "softmax": "softmax"}, default="sigmoid"
            ),
            router_enable_expert_bias=f.flag("use_routing_bias", default=True),
            expert_bias_in_published_count=True,
            shared_expert_intermediate_size=f.count("shared_intermediate_size"),
        )
    elif kind == "granitemoeshared":
        block = replace(block, shared_expert_intermediate_size=f.count("shared_intermediate_size"))
    return block, every


def mixers(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """The softmax attention of each layer."""
    kind = f.model_type
    if kind == "glm4_moe" and f.flag("use_qk_norm"):
        family = family._replace(qk_layernorm="head")
    if kind == "minimax_m2":
        styles = {"per_layer": "full", "per_head": "head"}
        family = family._replace(qk_layernorm=f.choice("qk_norm_type", styles, default="per_layer"))
        types = f.items("attn_type_list")
        if types is not None and (len(types) != n or any(one != 1 for one in types)):
            raise f.error(f"attn_type_list is {shown(types)}; it must hold 1 (softmax) for each of {n} layers")
    spec = attention(f, family, hidden_size)
    if kind == "gpt_oss":
        spec = replace(spec, learnable_softmax_sink=True)
    return attentions(f, family, spec, n)


def mtp_depths(f: Fields) -> int:
    """Number of MTP depths."""
    if f.model_type == "minimax_m2":
        # Bridge minimax_m2_bridge.py maps none, transformers has none.
        f.ignore("num_mtp_modules", "mtp_transformer_layers", "use_mtp")
        if depths := f.count("num_mtp_modules"):
            f.assume(
                f"num_mtp_modules ({depths}): Megatron Bridge builds this model without MTP layers; "
                "mtp_num_layers 0"
            )
        return 0
    return f.count("num_nextn_predict_layers")


def read_moe(f: Fields) -> ModelSpec:
    family = MOE[f.model_type]
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    block, is_moe = routed(f, family)
    stack = mixers(f, family, hidden_size, n)
    dense = None if all(is_moe) else mlp(f, family)
    f.ignore("intermediate_size", "mlp_bias")
    layers = [LayerSpec(mixer, block if moe else dense) for mixer, moe in zip(stack, is_moe, strict=True)]
    depths = mtp_depths(f)
    head_dim = stack[0].kv_channels
    factor = rotary_factor(f, family.rotary_factor)
    rotary = f.integer("rotary_dim", default=int(head_dim * factor), least=0, most=head_dim)
    return model(
        f,
        family,
        layers,
        hidden_size=hidden_size,
        rotary_dim=rotary,
        mtp_num_layers=depths,
        mtp_layer=layers[-1] if depths else None,
    )
