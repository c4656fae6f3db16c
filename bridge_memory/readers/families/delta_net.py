"""Qwen3-Next and Qwen3.5: layers of gated delta nets and of gated softmax attention, dense or MoE.

Source of what Megatron builds: Megatron Bridge ``models/qwen/qwen3_next_bridge.py``, ``qwen35_bridge.py`` and
``models/qwen_vl/qwen35_vl_bridge.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.readers.families.common import (
    Family,
    activation,
    attention,
    layer_types,
    mlp,
    model,
    num_layers,
    rotary_factor,
)
from bridge_memory.readers.families.moe import expert_count, sparse_layers
from bridge_memory.readers.fields import Fields
from bridge_memory.spec import AttentionSpec, GatedDeltaNetSpec, LayerSpec, Mixer, ModelSpec, MoESpec

DELTA_NET: dict[str, Family] = dict.fromkeys(
    ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
    Family(qk_layernorm="head", rotary_factor=0.25, head_dim=256),
)


def read_delta_net(f: Fields) -> ModelSpec:
    family = DELTA_NET[f.model_type]
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    spec = replace(attention(f, family, hidden_size), attention_output_gate=True)
    stack = _mixers(f, spec, n)
    if f.model_type == "qwen3_5_text":
        layers = [LayerSpec(mixer, mlp(f, family)) for mixer in stack]
    else:
        block = _experts(f, family)
        is_moe = sparse_layers(f, n)
        dense = None if all(is_moe) else mlp(f, family)
        f.ignore("intermediate_size")
        layers = [LayerSpec(mixer, block if moe else dense) for mixer, moe in zip(stack, is_moe, strict=True)]
    depths = _mtp_depths(f)
    return model(
        f,
        family,
        layers,
        hidden_size=hidden_size,
        rotary_dim=int(spec.kv_channels * rotary_factor(f, family.rotary_factor)),
        mtp_num_layers=depths,
        mtp_layer=layers[-1] if depths else None,
    )


def _mixers(f: Fields, spec: AttentionSpec, n: int) -> Sequence[Mixer]:
    """Each layer's mixer, by layer_types; by default every full_attention_interval-th is softmax attention."""
    linear = GatedDeltaNetSpec(
        num_key_heads=f.integer("linear_num_key_heads"),
        num_value_heads=f.integer("linear_num_value_heads"),
        key_head_dim=f.integer("linear_key_head_dim"),
        value_head_dim=f.integer("linear_value_head_dim"),
        conv_kernel=f.integer("linear_conv_kernel_dim", default=4),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise f.error(
            f"linear_num_value_heads ({linear.num_value_heads}) is not divisible by linear_num_key_heads "
            f"({linear.num_key_heads})"
        )
    f.ignore("use_sliding_window", "max_window_layers", "sliding_window")
    every = f.integer("full_attention_interval", default=4)
    types = layer_types(f, n, ("linear_attention", "full_attention"))
    if types is None:
        types = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    return [linear if kind == "linear_attention" else spec for kind in types]


def _experts(f: Fields, family: Family) -> MoESpec:
    experts, topk = expert_count(f, "num_experts", "num_local_experts")
    shared = f.count("shared_expert_intermediate_size")
    return MoESpec(
        num_experts=experts,
        topk=topk,
        moe_ffn_hidden_size=f.integer("moe_intermediate_size"),
        activation=activation(f, family),
        shared_expert_intermediate_size=shared,
        shared_expert_gate=shared > 0,
        router_load_balancing_type="global_aux_loss",
    )


def _mtp_depths(f: Fields) -> int:
    if f.model_type == "qwen3_next":
        f.assume("Qwen3-Next's checkpoint has one MTP layer and its config no key for it: mtp_num_layers 0")
        return 0
    if f.flag("mtp_use_dedicated_embeddings"):
        raise f.error("mtp_use_dedicated_embeddings is true; Megatron's MTP shares the embedding, set it to false")
    return f.count("mtp_num_hidden_layers", "num_nextn_predict_layers")
