"""Families for which Megatron Bridge has its own modules or attention variant: Gemma 4, Falcon-H1, DeepSeek-V4.

Their config is converted to the fields of Bridge's provider, which ``transformer_config`` reads. Source:
``provider_bridge`` of megatron-bridge 0.6.2 in ``models/gemma/gemma4_bridge.py``,
``models/falcon_h1/falconh1_bridge.py`` and ``models/deepseek/deepseek_v4_bridge.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bridge_memory.readers.families.common import (
    Family,
    activation,
    heads,
    layer_types,
    num_layers,
    vocabulary_multiple,
)
from bridge_memory.readers.families.moe import expert_count
from bridge_memory.readers.fields import MAX_LAYERS, Fields, shown
from bridge_memory.spec import ModelSpec

#: DeepSeek-V4's layer types -> tokens per compressed key.
_COMPRESSION = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_GELU = Family(activation="gelu_pytorch_tanh")


def read_gemma4(f: Fields) -> ModelSpec:
    from bridge_memory.readers.transformer_config import GEMMA4_DENSE, GEMMA4_WITH_EXPERTS

    n, hidden_size = num_layers(f), f.integer("hidden_size", default=2304)
    kinds = layer_types(f, n, ("full_attention", "sliding_attention"))
    sliding = [kind == "sliding_attention" for kind in kinds] if kinds else [(i + 1) % 6 != 0 for i in range(n)]
    # ``Gemma4TextConfig.__post_init__``
    sliding[-1] = False
    a, g, d = heads(f, hidden_size, 256)
    f.ignore("partial_rotary_factor")
    if f.flag("attention_bias"):
        raise f.error("attention_bias is true; Megatron Bridge builds Gemma 4 without biases, set it to false")
    everywhere = dict(
        num_layers=n, hidden_size=hidden_size, num_attention_heads=a, num_query_groups=g, kv_channels=d,
        ffn_hidden_size=f.integer("intermediate_size", default=9216), activation_func=activation(f, _GELU),
        attention_k_eq_v=f.flag("attention_k_eq_v"), final_logit_softcapping=f.raw("final_logit_softcapping")[1],
        qk_layernorm=True, add_bias_linear=False, gated_linear_unit=True,
    )  # fmt: skip
    wide, groups = f.integer("global_head_dim", default=512), f.integer("num_global_key_value_heads", default=None)
    window = f.integer("sliding_window", default=512)
    f.ignore("use_bidirectional_attention", "rope_parameters")
    f.ignore("num_experts", "top_k_experts", "moe_intermediate_size", "expert_intermediate_size")
    shared, width = f.count("num_kv_shared_layers"), f.count("hidden_size_per_layer_input", default=256)
    words, double = f.count("vocab_size_per_layer_input", default=262_144), f.flag("use_double_wide_mlp")
    if not f.flag("enable_moe_block"):
        f.assume(
            "Megatron Bridge builds Gemma 4 without experts of megatron-core's local modules: run it with "
            "transformer_impl local"
        )
        return _from_provider_fields(
            f, GEMMA4_DENSE[0], tied=True, window_size=(window - 1, 0), window_attn_skip_freq=sliding,
            global_kv_channels=wide, num_global_query_groups=groups, num_kv_shared_layers=shared,
            per_layer_embed_dim=width, per_layer_embed_vocab_size=words, use_double_wide_mlp=double, **everywhere,
        )  # fmt: skip
    if shared or width or double:
        raise f.error(
            "enable_moe_block with num_kv_shared_layers, hidden_size_per_layer_input or use_double_wide_mlp; Megatron "
            "Bridge builds none of them beside experts, set them to 0"
        )
    full = sliding.index(False)
    pattern = (full, next((i for i, one in enumerate(sliding[full:]) if one), n - full))
    if sliding != [(i + 1) % sum(pattern) != 0 for i in range(n)]:
        raise f.error("layer_types does not repeat; Megatron Bridge has as many sliding layers before every full one")
    number, topk = f.integer("num_experts"), f.integer("top_k_experts")
    if topk > number:
        raise f.error(f"top_k_experts ({topk}) is larger than num_experts ({number})")
    return _from_provider_fields(
        f, GEMMA4_WITH_EXPERTS[0], tied=True, window_size=window, interleaved_attn_pattern=pattern,
        global_head_dim=wide, num_global_key_value_heads=groups, num_moe_experts=number, moe_router_topk=topk,
        moe_ffn_hidden_size=f.integer("moe_intermediate_size"), moe_aux_loss_coeff=0.001,
        moe_shared_expert_intermediate_size=everywhere["ffn_hidden_size"], **everywhere,
    )  # fmt: skip


def read_falcon_h1(f: Fields) -> ModelSpec:
    from bridge_memory.readers.transformer_config import FALCON_H1

    hidden_size = f.integer("hidden_size")
    a, g, d = heads(f, hidden_size, None)
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"):
        if f.flag(key):
            raise f.error(f"{key} is true; biases of Falcon-H1 are not estimated")
    number, expand = f.integer("mamba_n_heads", default=128), f.integer("mamba_expand", default=2)
    inner = f.integer("mamba_d_ssm", default=expand * hidden_size)
    width = f.raw("mamba_d_head")[1]
    if width in (None, "auto"):
        width = inner // number
    if width * number != inner:
        raise f.error(f"mamba_n_heads ({number}) x mamba_d_head ({shown(width)}) is not mamba_d_ssm ({inner})")
    f.ignore("layers_block_type", "layer_types", "mamba_use_mlp", "mamba_norm_before_gate", "time_step_limit")
    f.ignore("attention_in_multiplier", "attention_out_multiplier", "mlp_multipliers", "lm_head_multiplier")
    f.ignore("ssm_in_multiplier", "ssm_out_multiplier", "mlp_expansion_factor", "rope_theta", "rope_parameters")
    return _from_provider_fields(
        f, FALCON_H1, tied=False, num_layers=num_layers(f), hidden_size=hidden_size, num_attention_heads=a,
        num_query_groups=g, kv_channels=d, ffn_hidden_size=f.integer("intermediate_size"),
        mamba_num_heads=number, mamba_head_dim=width, mamba_state_dim=f.integer("mamba_d_state", default=256),
        mamba_num_groups=f.integer("mamba_n_groups", default=1), expand=expand,
        d_conv=f.integer("mamba_d_conv", default=4), conv_bias=f.flag("mamba_conv_bias", default=True),
        chunk_size=f.integer("mamba_chunk_size", default=256), rmsnorm=f.flag("mamba_rms_norm"),
        key_multiplier=f.number("key_multiplier", default=1.0, least=float("-inf")),
        ssm_multipliers=tuple(f.items("ssm_multipliers") or ()), activation_func=activation(f, Family()),
        add_bias_linear=False, gated_linear_unit=True,
    )  # fmt: skip


def read_deepseek_v4(f: Fields) -> ModelSpec:
    n, depths = num_layers(f), f.count("num_nextn_predict_layers", default=1)
    width, head = f.integer("moe_intermediate_size", default=2048), f.integer("head_dim", default=512)
    number, topk = expert_count(f, "n_routed_experts")
    kinds = f.items("mlp_layer_types")
    hashed = f.count("num_hash_layers", default=3 if kinds is None else list(kinds).count("hash_moe"))
    rope = f.integer("qk_rope_head_dim", default=int(head * f.number("partial_rotary_factor", default=64 / 512)))
    for key in ("attention_bias", "mlp_bias"):
        if f.flag(key):
            raise f.error(f"{key} is true; Megatron Bridge builds DeepSeek-V4 without biases, set it to false")
    f.ignore("num_key_value_heads", "intermediate_size", "num_local_experts", "compress_rope_theta", "rope_theta")
    f.ignore("rope_parameters", "rope_scaling", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "topk_method")
    f.ignore("expert_dtype", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    return _from_provider_fields(
        f, "", tied=False, experimental_attention_variant="dsv4_hybrid", multi_latent_attention=True, num_layers=n,
        hidden_size=f.integer("hidden_size", default=4096),
        num_attention_heads=f.integer("num_attention_heads", default=64), v_head_dim=head, qk_pos_emb_head_dim=rope,
        q_lora_rank=f.integer("q_lora_rank", default=1024), o_groups=f.integer("o_groups", default=8),
        o_lora_rank=f.integer("o_lora_rank", default=1024), csa_compress_ratios=_ratios(f, n, depths),
        csa_window_size=f.integer("sliding_window", default=128), enable_hyper_connections=True,
        dsa_indexer_n_heads=f.integer("index_n_heads", default=64),
        dsa_indexer_head_dim=f.integer("index_head_dim", default=128),
        dsa_indexer_topk=f.integer("index_topk", default=512), num_residual_streams=f.integer("hc_mult", default=4),
        num_moe_experts=number, moe_router_topk=topk, moe_ffn_hidden_size=width, moe_n_hash_layers=hashed,
        moe_shared_expert_intermediate_size=width * f.count("n_shared_experts", default=1),
        moe_router_score_function=f.text("scoring_func", default="sqrtsoftplus"),
        moe_router_enable_expert_bias=True, moe_router_load_balancing_type="none", mtp_num_layers=depths,
        activation_func=activation(f, Family()), add_bias_linear=False, gated_linear_unit=True, qk_layernorm=True,
        activation_func_clamp_value=f.config.get("swiglu_limit", 10.0) or None,
    )  # fmt: skip


def _ratios(f: Fields, n: int, depths: int) -> list[int]:
    """Tokens per compressed key of each layer and MTP depth (Bridge: ``_dsv4_compress_ratios``)."""
    given, types, rates = f.items("compress_ratios"), f.items("layer_types"), f.mapping("compress_rates")
    ratios: Sequence[Any]
    if given is not None:
        ratios = given
    elif types is not None:
        for kind in types:
            if not isinstance(kind, str) or kind not in _COMPRESSION:
                raise f.error(f"layer_types holds {shown(kind)}; known here: {', '.join(_COMPRESSION)}")
        ratios = [rates.get(kind, _COMPRESSION[kind]) for kind in types]
    else:  # ``DeepseekV4Config.__post_init__``
        ratios = [128, 128, *(4 if i % 2 else 128 for i in range(max(n - 2, 0)))][:n]
    if len(ratios) == n:
        ratios = [*ratios, *[0] * depths]
    if not n + depths <= len(ratios) <= MAX_LAYERS:
        raise f.error(f"compress_ratios has {len(ratios)} entries for {n} layers and {depths} MTP depths")
    return list(ratios[: n + depths])


def _from_provider_fields(f: Fields, provider: str, *, tied: bool, **fields: Any) -> ModelSpec:
    """The model of a provider with these fields, plus those that all families share."""
    from bridge_memory.readers.transformer_config import model_from_transformer_config

    vocab_size = f.integer("vocab_size")
    positions = f.integer("max_position_embeddings", default=0)
    share = f.flag("tie_word_embeddings", default=tied)
    dropouts = {
        "hidden_dropout": f.number("hidden_dropout", default=0.0, most=1.0),
        "attention_dropout": f.number("attention_dropout", default=0.0, most=1.0),
    }
    f.finish()
    multiple = vocabulary_multiple(f, vocab_size)
    outer = {"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0, **dropouts}
    model = model_from_transformer_config(
        SimpleNamespace(**outer, **fields), vocab_size=vocab_size, name=f.name, model_type=f.model_type,
        max_sequence_length=positions, share_embeddings_and_output_weights=share,
        make_vocab_size_divisible_by=multiple, provider=provider, assumptions=tuple(f.assumptions),
    )  # fmt: skip
    return replace(model, not_modelled=(*f.not_modelled, *model.not_modelled))
