"""Kimi-Linear: layers of Kimi delta attention, and of multi-latent attention without rotary embeddings, before experts.

Source: transformers 5.24 ``models/kimi_linear/configuration_kimi_linear.py`` and ``modeling_kimi_linear.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge_memory.readers.families.common import Family, activation, layer_types, mlp, model, num_layers
from bridge_memory.readers.families.moe import first_dense
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import KimiDeltaSpec, LayerSpec, MLASpec, ModelSpec, MoESpec

FAMILY = Family()


def read_kimi_linear(f: Fields) -> ModelSpec:
    hidden_size, n = f.integer("hidden_size"), num_layers(f)
    if f.flag("attention_bias"):
        raise f.error("attention_bias is true; biases of Kimi-Linear are not estimated, set it to false")
    if f.flag("tie_word_embeddings"):
        raise f.error("tie_word_embeddings is true; transformers' class has no tied weights, set it to false")
    full = MLASpec(
        num_attention_heads=f.integer("num_attention_heads"), q_lora_rank=f.integer("q_lora_rank", default=None),
        kv_lora_rank=f.integer("kv_lora_rank", default=512), qk_head_dim=f.integer("qk_nope_head_dim", default=128),
        qk_pos_emb_head_dim=f.integer("qk_rope_head_dim", default=64), v_head_dim=f.integer("v_head_dim", default=128),
    )
    published = f.mapping("linear_attn_config")
    linear = KimiDeltaSpec(
        num_heads=_size(f, published, "num_heads", "linear_num_heads", 32),
        head_dim=_size(f, published, "head_dim", "linear_head_dim", 128),
        conv_kernel=_size(f, published, "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
    )
    experts = f.integer("num_local_experts", "num_experts", default=256)
    topk = f.integer("num_experts_per_tok", "num_experts_per_token", default=8)
    if topk > experts:
        raise f.error(f"num_experts_per_token ({topk}) is larger than num_experts ({experts})")
    width = f.integer("moe_intermediate_size", default=1024)
    routed = MoESpec(
        num_experts=experts, topk=topk, moe_ffn_hidden_size=width, activation=activation(f, FAMILY),
        shared_expert_intermediate_size=width * f.count("n_shared_experts", "num_shared_experts", default=1),
        router_enable_expert_bias=True, router_score_function="sigmoid",
        router_num_groups=f.integer("n_group", "num_expert_group", default=None),
        router_group_topk=f.integer("topk_group", default=None),
    )
    dense, sparse = mlp(f, FAMILY), first_dense(f, n, 1)
    layers = [
        LayerSpec(full if kind == "full_attention" else linear, routed if moe else dense)
        for kind, moe in zip(_kinds(f, published, n), sparse, strict=True)
    ]
    f.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_scaling", "rope_parameters")
    f.ignore("mla_use_nope", "use_grouped_topk", "moe_router_activation_func", "moe_renormalize", "model_max_length")
    if f.count("num_nextn_predict_layers"):
        f.assume("num_nextn_predict_layers: transformers builds Kimi-Linear without MTP layers")
    return model(f, FAMILY, layers, hidden_size=hidden_size, rotary_dim=0, position_embedding_type="none")


def _size(f: Fields, published: Mapping[str, Any], inner: str, key: str, default: int) -> int:
    """A size of delta attention: of linear_attn_config, as the published config has it, else as transformers saves it.
    """
    saved: int = f.integer(key, default=default)
    value = published.get(inner, saved)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 10**6:
        raise f.error(f"linear_attn_config.{inner} is {shown(value)}; it must be a positive integer")
    return value


def _kinds(f: Fields, published: Mapping[str, Any], n: int) -> Sequence[str]:
    """Each layer's attention; layers in linear_attn_config count from 1."""
    types = layer_types(f, n, ("linear_attention", "full_attention"))
    if types is not None:
        return types
    lists = [published.get(key) for key in ("full_attn_layers", "kda_layers")]
    if None in lists:
        return ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(n)]
    kinds: dict[int, str] = {}
    for key, numbers, kind in zip(
        ("full_attn_layers", "kda_layers"), lists, ("full_attention", "linear_attention"), strict=True
    ):
        if not isinstance(numbers, list):
            raise f.error(f"linear_attn_config.{key} is {shown(numbers)}; it must list layers, counted from 1")
        for i in numbers:
            if isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= n:
                raise f.error(f"linear_attn_config.{key} holds {shown(i)}; the layers are 1 to {n}")
            kinds[i] = kind
    missing = next((i for i in range(1, n + 1) if i not in kinds), None)
    if missing is not None:
        raise f.error(f"linear_attn_config names layer {missing} neither in full_attn_layers nor in kda_layers")
    return [kinds[i] for i in range(1, n + 1)]
