"""Multi-latent attention: DeepSeek V2 to V3.2, R1, Moonlight, Kimi-K2, Mistral 4, GLM-4.7-Flash, GLM-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bridge_memory.readers.families.common import Family, activation, mlp, model, num_layers
from bridge_memory.readers.families.moe import expert_count, first_dense
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import IndexerSpec, LayerSpec, MLASpec, ModelSpec, MoESpec, SparseSpec

FAMILY = Family()


class Latent(NamedTuple):
    """How one model_type differs from DeepSeek-V3."""

    #: Default of first_k_dense_replace.
    first_dense: int = 0
    #: DeepSeek Sparse Attention: the config has the sizes of its indexer.
    sparse_attention: bool = False
    #: Megatron Bridge builds no MTP layer, even with num_nextn_predict_layers.
    without_mtp: bool = False
    #: Keys that repeat others, or that the config class adds.
    ignored: tuple[str, ...] = ()
    number: str = "n_routed_experts"
    balancing: str = "seq_aux_loss"
    #: The router's scores are a softmax, without a bias.
    plain_softmax: bool = False


MLA: dict[str, Latent] = {
    "deepseek_v2": Latent(),
    "deepseek_v3": Latent(),
    "kimi_k2": Latent(),
    # Bridge: models/glm/glm47_flash_bridge.py.
    "glm4_moe_lite": Latent(first_dense=1, ignored=("partial_rotary_factor",)),
    # transformers 5.12 writes num_experts in addition to n_routed_experts (Bridge: glm5_bridge.py).
    "deepseek_v32": Latent(first_dense=3, sparse_attention=True, ignored=("num_experts", "mlp_bias")),
    # Bridge: models/sarvam/sarvam_provider.py, whose aux loss has a coefficient of 0.
    "sarvam_mla": Latent(first_dense=1, number="num_experts", balancing="none", ignored=("q_head_dim",)),
    # transformers ``models/mistral4/configuration_mistral4.py``; its rotary parameters scale the queries.
    "mistral4": Latent(balancing="none", plain_softmax=True, ignored=("rope_interleave", "partial_rotary_factor")),
    "glm_moe_dsa": Latent(
        first_dense=3, sparse_attention=True, without_mtp=True, ignored=("num_experts", "mlp_bias")
    ),
}


def read_deepseek(f: Fields) -> ModelSpec:
    family = MLA[f.model_type]
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
    # After the up-projection every head has a key and a value; head_dim and qk_head_dim repeat other keys.
    f.ignore("num_key_value_heads", "head_dim", "qk_head_dim", "rope_theta", "rope_scaling", *family.ignored)
    mixers = _sparse_attention(f, mixer, n) if family.sparse_attention else [mixer] * n
    layers: list[LayerSpec]
    if f.has(family.number):
        block = experts(f, family)
        is_moe = first_dense(f, n, family.first_dense)
        dense = None if all(is_moe) else mlp(f, FAMILY)
        f.ignore("intermediate_size")
        layers = [LayerSpec(one, block if moe else dense) for one, moe in zip(mixers, is_moe, strict=True)]
    else:
        f.ignore("first_k_dense_replace", "moe_layer_freq", "num_experts_per_tok", "n_shared_experts")
        f.ignore("moe_intermediate_size", "scoring_func")
        layers = [LayerSpec(one, mlp(f, FAMILY)) for one in mixers]
    depths = f.count("num_nextn_predict_layers")
    if depths and family.without_mtp:
        f.assume(
            f"num_nextn_predict_layers ({depths}): Megatron Bridge builds this model without MTP layers; "
            "mtp_num_layers 0"
        )
        depths = 0
    return model(
        f,
        FAMILY,
        layers,
        hidden_size=hidden_size,
        rotary_dim=mixer.qk_pos_emb_head_dim,
        mtp_num_layers=depths,
        mtp_layer=layers[-1] if depths else None,
    )


def _sparse_attention(f: Fields, mixer: MLASpec, n: int) -> Sequence[MLASpec]:
    """Each layer's attention: with an indexer, or with another layer's selected keys (GLM-5.2).

    Source: transformers ``configuration_glm_moe_dsa.py: GlmMoeDsaConfig.__post_init__``; megatron-core
    ``experimental_attention_variant/dsa.py: DSAttention.__init__``.
    """
    f.ignore("layer_types", "indexer_rope_interleave")
    f.assume(
        "sparse attention is trained as Megatron Bridge's GLM-5: the indexer learns from the chosen keys "
        "(dsa_indexer_use_sparse_loss), and torch's operations run it (dsa_kernel_backend none), which make scores of "
        "all queries and keys"
    )
    types = f.items("indexer_types")
    _, pattern = f.raw("index_topk_pattern")
    freq, offset = f.integer("index_topk_freq", default=1), f.count("index_skip_topk_offset", default=2)
    if types is None and pattern is not None:
        letters = {"F": "full", "S": "shared"}
        types = [letters.get(one, one) for one in pattern] if isinstance(pattern, (str, list)) else [pattern]
    if types is None:
        types = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(n)]
    # Bridge: models/glm_moe_dsa/glm5_bridge.py.
    sparse = SparseSpec(topk=f.integer("index_topk", default=2048), sparse_loss=True, shares_choice="shared" in types)
    shared = replace(mixer, sparse=sparse)
    full = replace(shared, indexer=IndexerSpec(f.integer("index_n_heads"), f.integer("index_head_dim")))
    kinds = {"full": full, "shared": shared}
    if len(types) != n:
        raise f.error(f"indexer_types has {len(types)} entries for num_hidden_layers {n}; give one a layer")
    for kind in types:
        if not isinstance(kind, str) or kind not in kinds:
            raise f.error(f"indexer_types holds {shown(kind)}; known: full, shared")
    return [kinds[kind] for kind in types]


def experts(f: Fields, family: Latent) -> MoESpec:
    """DeepSeek's MoE block. V3 and later models have the expert bias (noaux_tc)."""
    number, topk = expert_count(f, family.number)
    width = f.integer("moe_intermediate_size")
    v3 = f.model_type != "deepseek_v2" and not family.plain_softmax
    scores = {"sigmoid": "sigmoid", "softmax": "softmax"}
    method = f.text("topk_method", default="noaux_tc" if v3 else "greedy")
    return MoESpec(
        num_experts=number,
        topk=topk,
        moe_ffn_hidden_size=width,
        activation=activation(f, FAMILY),
        shared_expert_intermediate_size=width * f.count("n_shared_experts", "num_shared_experts"),
        router_enable_expert_bias=method == "noaux_tc",
        router_score_function=f.choice("scoring_func", scores, default="sigmoid" if v3 else "softmax"),
        router_load_balancing_type=family.balancing,
        # Bridge: models/deepseek/common.py.
        router_num_groups=f.integer("n_group", default=None),
        router_group_topk=f.integer("topk_group", default=None),
    )
