"""LongCat-Flash: layers of two latent attentions and two MLPs, with experts of which some return their input.

Source: transformers 5.12 ``models/longcat_flash/configuration_longcat_flash.py`` and ``modeling_longcat_flash.py``.
"""

from __future__ import annotations

from bridge_memory.readers.families.common import Family, activation, model
from bridge_memory.readers.fields import MAX_LAYERS, Fields
from bridge_memory.spec import LayerSpec, MLASpec, ModelSpec, MoESpec

FAMILY = Family()


def read_longcat(f: Fields) -> ModelSpec:
    hidden_size = f.integer("hidden_size")
    halves = f.integer("num_hidden_layers", default=None, most=2 * MAX_LAYERS)
    n = f.integer("num_layers", default=None if halves is None else halves // 2, most=MAX_LAYERS)
    if not n:
        raise f.error("num_layers is missing; it is the number of layers, each of two attentions")
    if halves not in (None, n, 2 * n):  # the class sets it to twice num_layers
        raise f.error(f"num_hidden_layers ({halves}) is not twice num_layers ({n})")
    for key in ("attention_bias", "router_bias"):
        if f.flag(key):
            raise f.error(f"{key} is true; biases of LongCat-Flash are not estimated, set it to false")
    kind = f.text("zero_expert_type", default="identity")
    if kind != "identity":
        raise f.error(f"zero_expert_type is {kind}; transformers has experts that return their input (identity)")
    mixer = MLASpec(
        num_attention_heads=f.integer("num_attention_heads"), q_lora_rank=f.integer("q_lora_rank"),
        kv_lora_rank=f.integer("kv_lora_rank"), qk_head_dim=f.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=f.integer("qk_rope_head_dim"), v_head_dim=f.integer("v_head_dim"),
    )
    experts, zeros, topk = f.integer("n_routed_experts"), f.count("zero_expert_num"), f.integer("moe_topk")
    if topk > experts:
        raise f.error(f"moe_topk ({topk}) is larger than n_routed_experts ({experts})")
    ffn = MoESpec(
        num_experts=experts, topk=topk, moe_ffn_hidden_size=f.integer("expert_ffn_hidden_size"),
        activation=activation(f, FAMILY), zero_experts=zeros,
        shortcut_ffn_hidden_size=f.integer("ffn_hidden_size"),
    )
    f.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling")
    f.ignore("mla_scale_q_lora", "mla_scale_kv_lora", "attention_method", "moe_intermediate_size")
    f.ignore("intermediate_size", "num_experts_per_tok")
    return model(f, FAMILY, [LayerSpec(mixer, ffn)] * n, hidden_size=hidden_size, rotary_dim=mixer.qk_pos_emb_head_dim)
