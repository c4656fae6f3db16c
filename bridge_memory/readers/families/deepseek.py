"""Multi-latent attention: DeepSeek V2 and V3, R1, Moonlight, Kimi-K2."""

from __future__ import annotations

from bridge_memory.readers.families.common import Family, activation, mlp, model, num_layers
from bridge_memory.readers.families.moe import expert_count, first_dense
from bridge_memory.readers.fields import Fields
from bridge_memory.spec import LayerSpec, MLASpec, ModelSpec, MoESpec

FAMILY = Family()


def read_deepseek(f: Fields) -> ModelSpec:
    hidden_size = f.integer("hidden_size")
    n = num_layers(f)
    if f.flag("attention_bias"):
        raise f.error("attention_bias is true; Megatron's MLA has no biases, set it to false")
    mixer = MLASpec(
        num_attention_heads=f.integer("num_attention_heads"),
        q_lora_rank=f.integer("q_lora_rank", default=None),
        kv_lora_rank=f.integer("kv_lora_rank"),
        qk_head_dim=f.integer("qk_nope_head_dim"),
        qk_pos_emb_head_dim=f.integer("qk_rope_head_dim"),
        v_head_dim=f.integer("v_head_dim"),
    )
    # Every head has its own key and value after the up-projection; head_dim and qk_head_dim repeat the parts.
    f.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_scaling")
    layers: list[LayerSpec]
    if f.has("n_routed_experts"):
        block = experts(f)
        is_moe = first_dense(f, n)
        dense = None if all(is_moe) else mlp(f, FAMILY)
        f.ignore("intermediate_size")
        layers = [LayerSpec(mixer, block if moe else dense) for moe in is_moe]
    else:
        f.ignore("first_k_dense_replace", "moe_layer_freq", "num_experts_per_tok", "n_shared_experts")
        f.ignore("moe_intermediate_size", "scoring_func")
        layers = [LayerSpec(mixer, mlp(f, FAMILY))] * n
    depths = f.count("num_nextn_predict_layers")
    return model(
        f,
        FAMILY,
        layers,
        hidden_size=hidden_size,
        rotary_dim=mixer.qk_pos_emb_head_dim,
        mtp_num_layers=depths,
        mtp_layer=layers[-1] if depths else None,
    )


def experts(f: Fields) -> MoESpec:
    """DeepSeek's MoE block. The expert bias (noaux_tc) belongs to V3 and its children."""
    number, topk = expert_count(f, "n_routed_experts")
    width = f.integer("moe_intermediate_size")
    v3 = f.model_type != "deepseek_v2"
    scores = {"sigmoid": "sigmoid", "softmax": "softmax"}
    method = f.text("topk_method", default="noaux_tc" if v3 else "greedy")
    return MoESpec(
        num_experts=number,
        topk=topk,
        moe_ffn_hidden_size=width,
        activation=activation(f, FAMILY),
        shared_expert_intermediate_size=width * f.count("n_shared_experts"),
        router_enable_expert_bias=method == "noaux_tc",
        router_score_function=f.choice("scoring_func", scores, default="sigmoid" if v3 else "softmax"),
        router_load_balancing_type="seq_aux_loss",
        # Bridge: models/deepseek/common.py.
        router_num_groups=f.integer("n_group", default=None),
        router_group_topk=f.integer("topk_group", default=None),
    )
