"""A model as Megatron-LM's arguments: its architecture by argparse's destinations.

Of each kind of layer the first one is described. Whether that is the whole model is not decided here: what is written
is read back, and a model that comes back as another one is not described by these arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, TypeVar

from bridge_memory.readers.patterns import ATTENTION, DELTA_NET, MAMBA, MLA, MLP, MOE
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RunSpec,
)
from bridge_memory.spec.layout_string import parse_layout_string

_Block = TypeVar("_Block")
#: The class of a hybrid's layer -> its symbol in a pattern.
_SYMBOLS = {
    MambaSpec: MAMBA, AttentionSpec: ATTENTION, MLPSpec: MLP, MoESpec: MOE, GatedDeltaNetSpec: DELTA_NET, MLASpec: MLA
}  # fmt: skip
#: A coefficient for losses whose own the model does not hold; any but 0 computes them.
LOSS_COEFFICIENT = 0.001


def architecture(run: RunSpec) -> dict[str, Any]:
    """Destination -> value, of everything that makes the model of ``run``."""
    model = run.model
    layers = [*model.layers, *([model.mtp_layer] if model.mtp_layer else [])]
    ffns = [layer.ffn for layer in layers]
    mixers = [layer.mixer for layer in layers]
    attention, latent = _first(AttentionSpec, mixers), _first(MLASpec, mixers)
    delta, mamba = _first(GatedDeltaNetSpec, mixers), _first(MambaSpec, mixers)
    dense, experts = _first(MLPSpec, ffns), _first(MoESpec, ffns)
    found: dict[str, Any] = {
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "normalization": model.normalization,
        "position_embedding_type": model.position_embedding_type,
        "max_position_embeddings": max(model.max_position_embeddings, run.batch.seq_length),
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "hidden_dropout": model.hidden_dropout, "attention_dropout": model.attention_dropout,
        **_vocabulary(model),
    }  # fmt: skip
    if model.position_embedding_type == "learned_absolute" and model.max_position_embeddings:
        found["max_position_embeddings"] = model.max_position_embeddings
    if wide := dense or experts:
        found |= _activation(wide)
        found["ffn_hidden_size"] = dense.ffn_hidden_size if dense else experts.moe_ffn_hidden_size if experts else 0
    if attention:
        found |= _attention(model, attention)
    if latent:
        found |= _latent(latent)
    if not (attention or latent):
        found["num_attention_heads"] = run.parallel.tp  # Megatron-LM asks for some; no layer has them.
    found["add_bias_linear"] = any(_biased(layer) for layer in layers)
    found["add_qkv_bias"] = bool(attention and attention.add_qkv_bias)
    if delta:
        found |= _delta_net(model, delta)
    if mamba:
        found |= {
            "mamba_num_heads": mamba.num_heads, "mamba_head_dim": mamba.head_dim, "mamba_state_dim": mamba.state_dim,
            "mamba_num_groups": mamba.num_groups, "use_mamba_mem_eff_path": mamba.memory_efficient,
        }  # fmt: skip
    if experts:
        found |= _experts(model, experts)
    if model.mtp_num_layers:
        found |= {
            "mtp_num_layers": model.mtp_num_layers, "mtp_use_repeated_layer": model.mtp_use_repeated_layer
        }  # fmt: skip
    if model.hybrid:
        found |= {"is_hybrid_model": True, "hybrid_layer_pattern": _pattern(run)}
    return found


def _first(kind: type[_Block], blocks: Sequence[Any]) -> _Block | None:
    return next((block for block in blocks if isinstance(block, kind)), None)


def _biased(layer: LayerSpec) -> bool:
    return bool(getattr(layer.ffn, "add_bias", False) or getattr(layer.mixer, "add_output_bias", False))


def _vocabulary(model: ModelSpec) -> dict[str, Any]:
    if not model.make_vocab_size_divisible_by:
        return {"vocab_size": model.vocab_size, "padded_vocab_size": model.vocab_size}
    return {"vocab_size": model.vocab_size, "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by}


def _activation(block: MLPSpec | MoESpec) -> dict[str, Any]:
    return {
        "swiglu": block.gated and block.activation == "silu",
        "quick_geglu": block.gated and block.activation == "quick_gelu",
        "squared_relu": not block.gated and block.activation == "squared_relu",
        "activation_func_clamp_value": block.clamp_value,
    }  # fmt: skip


def _attention(model: ModelSpec, spec: AttentionSpec) -> dict[str, Any]:
    softmax = [layer.mixer for layer in model.layers]
    windows = [isinstance(mixer, AttentionSpec) and mixer.window_size is not None for mixer in softmax]
    found: dict[str, Any] = {
        "num_attention_heads": spec.num_attention_heads, "kv_channels": spec.kv_channels,
        "qk_layernorm": spec.qk_layernorm == "head", "attention_output_gate": spec.attention_output_gate,
        "softmax_type": "learnable" if spec.learnable_softmax_sink else "vanilla",
    }  # fmt: skip
    if spec.num_query_groups != spec.num_attention_heads:
        found |= {"group_query_attention": True, "num_query_groups": spec.num_query_groups}
    if model.rotary_dim and model.position_embedding_type == "rope":
        found["rotary_percent"] = model.rotary_dim / spec.kv_channels
    still = [isinstance(mixer, AttentionSpec) and not mixer.rotary for mixer in softmax]
    if model.position_embedding_type == "rope" and any(still):
        found["no_rope_freq"] = _frequency(still)
    if any(windows):
        size = next(m.window_size for m in softmax if isinstance(m, AttentionSpec) and m.window_size is not None)
        found["window_size"] = f"{size},0"
        if not all(windows):
            found["window_attn_skip_freq"] = _frequency(windows)
    return found


def _latent(spec: MLASpec) -> dict[str, Any]:
    found: dict[str, Any] = {
        "multi_latent_attention": True, "num_attention_heads": spec.num_attention_heads,
        "q_lora_rank": spec.q_lora_rank, "kv_lora_rank": spec.kv_lora_rank, "qk_head_dim": spec.qk_head_dim,
        "qk_pos_emb_head_dim": spec.qk_pos_emb_head_dim, "v_head_dim": spec.v_head_dim,
        "qk_layernorm": spec.qk_layernorm,
    }  # fmt: skip
    if spec.sparse is not None:
        found |= {
            "experimental_attention_variant": "dsa", "dsa_indexer_topk": spec.sparse.topk,
            "dsa_kernel_backend": spec.sparse.kernels,
            "dsa_indexer_loss_coeff": LOSS_COEFFICIENT if spec.sparse.indexer_loss else 0.0,
            "dsa_indexer_use_sparse_loss": spec.sparse.sparse_loss,
            "dsa_indexer_rotate_activation": spec.sparse.rotate_activation,
            "dsa_indexer_scoring_relu": spec.sparse.scoring_relu,
        }  # fmt: skip
    if spec.indexer is not None:
        found |= {"dsa_indexer_n_heads": spec.indexer.num_heads, "dsa_indexer_head_dim": spec.indexer.head_dim}
    return found


def _delta_net(model: ModelSpec, spec: GatedDeltaNetSpec) -> dict[str, Any]:
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": _frequency([isinstance(x.mixer, GatedDeltaNetSpec) for x in model.layers]),
        "linear_num_key_heads": spec.num_key_heads, "linear_num_value_heads": spec.num_value_heads,
        "linear_key_head_dim": spec.key_head_dim, "linear_value_head_dim": spec.value_head_dim,
        "linear_conv_kernel_dim": spec.conv_kernel,
    }  # fmt: skip


def _experts(model: ModelSpec, spec: MoESpec) -> dict[str, Any]:
    kinds = spec.router_load_balancing_type.split("+")
    found: dict[str, Any] = {
        "num_experts": spec.num_experts, "moe_router_topk": spec.topk, "moe_ffn_hidden_size": spec.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": spec.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": spec.shared_expert_gate,
        "moe_router_enable_expert_bias": spec.router_enable_expert_bias,
        "moe_router_score_function": spec.router_score_function,
        "moe_router_load_balancing_type": kinds,
        "moe_router_num_groups": spec.router_num_groups, "moe_router_group_topk": spec.router_group_topk,
        "moe_latent_size": spec.latent_size,
    }  # fmt: skip
    if kinds != ["none"]:
        found["moe_aux_loss_coeff"] = [LOSS_COEFFICIENT] * len(kinds) if len(kinds) > 1 else LOSS_COEFFICIENT
    if not model.hybrid:
        routed = [isinstance(layer.ffn, MoESpec) for layer in model.layers]
        found["moe_layer_freq"] = 1 if all(routed) else _frequency(routed)
    return found


def _frequency(wanted: Sequence[bool]) -> str:
    """Megatron's expression of a list with an entry a layer: "([0]*3+[1]*58)"."""
    parts = [f"[{int(one)}]*{len(list(many))}" for one, many in groupby(wanted)]
    return f"({'+'.join(parts)})"


def _pattern(run: RunSpec) -> str:
    """"M-M*|M-M-/*-": symbols of the layers, and of each MTP depth."""
    model = run.model
    symbols = [_SYMBOLS.get(type(layer.mixer or layer.ffn), "?") for layer in model.layers]
    text = "".join(symbols)
    if model.pattern_splits_pipeline:
        left = iter(symbols)
        chunks = parse_layout_string(run.parallel.pipeline_model_parallel_layout or "")
        text = "|".join("".join(islice(left, chunk.count("t"))) for chunk in chunks)
    depth = model.mtp_layer
    if depth is not None and model.mtp_num_layers:
        one = "".join(_SYMBOLS.get(type(block), "?") for block in (depth.mixer, depth.ffn) if block is not None)
        text = "/".join([text, *[one] * model.mtp_num_layers])
    return text
