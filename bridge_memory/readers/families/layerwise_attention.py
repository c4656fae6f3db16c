"""Softmax attention whose layers differ by more than their window.

Each function takes the config, its family, h and the number of layers, and returns one AttentionSpec per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.readers.families.common import Family, attention, attentions, heads, layer_types
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import AttentionSpec
from bridge_memory.spec.unmodelled import Effect, Unmodelled


def windows_only(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    return attentions(f, family, attention(f, family, hidden_size), n)


def exaone(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Only sliding-window layers have rotary embeddings (Bridge's no_rope_freq)."""
    stack = windows_only(f, family, hidden_size, n)
    return [one if one.window_size else replace(one, rotary=False) for one in stack]


def afmoe(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Gated attention; only sliding-window layers have rotary embeddings (``AfmoeAttention.forward``)."""
    spec = replace(attention(f, family, hidden_size), attention_output_gate=True)
    window, every = f.integer("sliding_window", default=1024), f.integer("global_attn_every_n_layers", default=4)
    types = layer_types(f, n, ("sliding_attention", "full_attention"))
    if types is None:
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(n)]
    sliding, full = replace(spec, window_size=window), replace(spec, rotary=False)
    return [sliding if kind == "sliding_attention" else full for kind in types]


def llama4(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Layers with 1 in no_rope_layers have rotary embeddings and chunked attention; the others attend to all tokens and
    have no norm of queries and keys."""
    spec = attention(f, family, hidden_size)
    layer_types(f, n, ("chunked_attention", "full_attention"))
    every = f.integer("no_rope_layer_interval", default=4)
    rotates = f.items("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n)]
    if len(rotates) != n:
        raise f.error(f"no_rope_layers has {len(rotates)} entries for num_hidden_layers {n}; give one a layer")
    if f.flag("use_qk_norm", default=True):
        norms = "use_qk_norm (qk_l2_norm): queries and keys before and after their norm without weights"
        f.not_modelled.append(Unmodelled(norms, Effect.UP, order="as large as queries and keys, in every layer"))
    without = replace(spec, rotary=False)
    return [spec if one else without for one in rotates]


def minimax_m3(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Full attention in every layer: Megatron Bridge keeps the indexers as frozen weights and does not run them.

    layer_types (transformers 5), or the published sparse_attention_config, gives their number.
    """
    spec = attention(f, family, hidden_size)
    published = f.mapping("sparse_attention_config")
    types = layer_types(f, n, ("full_attention", "minimax_m3_sparse"))
    if types is None:
        frequencies = published.get("sparse_attention_freq") or ()
        types = ["minimax_m3_sparse" if one else "full_attention" for one in frequencies]
    number = published.get("sparse_num_index_heads") or f.integer("index_n_heads", default=4)
    width = published.get("sparse_index_dim") or f.integer("index_head_dim", default=128)
    f.ignore("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks")
    indexers = sum(kind == "minimax_m3_sparse" for kind in types)
    if indexers:
        # transformers modeling_minimax_m3_vl.py: MiniMaxM3VLIndexer.
        weights = indexers * (hidden_size * (number + 1) * width + 2 * width)
        held = f"{weights} frozen weights, whole on every rank; Megatron Bridge does not run them"
        f.not_modelled.append(
            Unmodelled(
                f"indexers of {indexers} layers: {held}", Effect.UP, order="2 bytes for each of them",
                most=4 * weights,
            )
        )
    return [spec] * n


def step(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Sliding-window layers have other numbers of heads; one gate per head becomes Megatron's gate as wide as queries.

    The published layer_types lists the MTP layers after the decoder's. Source: Bridge ``step35_bridge.py:
    provider_bridge``, ``step35_provider.py: Step35DecoderLayer``; megatron-core up to 0.19 has no head_wise_attn_gate.
    """
    a = f.integer("num_attention_heads")
    full = AttentionSpec(
        num_attention_heads=a,
        num_query_groups=f.integer("num_attention_groups", default=a),
        kv_channels=f.integer("head_dim", default=128),
        qk_layernorm="head" if f.flag("use_qk_norm") else None,
        attention_output_gate=f.flag("use_head_wise_attn_gate"),
    )
    if full.attention_output_gate:
        f.assume(
            "use_head_wise_attn_gate: Megatron Bridge makes it attention_output_gate, which has a gate of the queries' "
            "width in place of one value a head"
        )
    types = f.items("layer_types")
    if types is None:
        return [full] * n
    other = f.mapping("attention_other_setting")
    sliding = replace(
        full,
        num_attention_heads=_size(f, other, "num_attention_heads", 96),
        num_query_groups=_size(f, other, "num_attention_groups", 8),
        kv_channels=_size(f, other, "head_dim", 128),
        window_size=f.integer("sliding_window", default=512),
    )
    if len(types) < n:
        raise f.error(f"layer_types has {len(types)} entries for num_hidden_layers {n}; give one a layer")
    kinds = {"full_attention": full, "sliding_attention": sliding}
    for kind in types:
        if not isinstance(kind, str) or kind not in kinds:
            raise f.error(f"layer_types holds {shown(kind)}; known here: {', '.join(kinds)}")
    return [kinds[kind] for kind in types[:n]]


def _size(f: Fields, inner: object, key: str, default: int) -> int:
    value = inner.get(key, default) if isinstance(inner, dict) else default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise f.error(f"attention_other_setting.{key} is {shown(value)}; it must be a positive integer")
    return value


def mimo_v2(f: Fields, family: Family, hidden_size: int, n: int) -> Sequence[AttentionSpec]:
    """Values are narrower than keys. Sliding-window layers (1 in hybrid_layer_pattern) have another number of query
    groups, and an attention sink. Source: Bridge ``models/mimo_v2_flash``."""
    a, g, d = heads(f, hidden_size, None)
    for key, value in (("swa_num_attention_heads", a), ("swa_head_dim", d)):
        if f.integer(key, default=value) != value:
            raise f.error(f"{key} is {f.config[key]}; Megatron Bridge builds sliding layers with {value} as the others")
    full = AttentionSpec(a, g, d, v_channels=f.integer("v_head_dim", default=d))
    f.ignore("swa_v_head_dim", "add_swa_attention_sink_bias", "attention_value_scale", "attention_chunk_size")
    if f.flag("add_full_attention_sink_bias"):
        raise f.error("add_full_attention_sink_bias is true; Megatron Bridge builds sinks in sliding layers only")
    pattern = f.items("hybrid_layer_pattern")
    if pattern is None:
        raise f.error("hybrid_layer_pattern is missing; it says which layer slides (1)")
    if len(pattern) != n or any(one not in (0, 1) for one in pattern):
        raise f.error(f"hybrid_layer_pattern is {shown(pattern)}; it must hold a 0 or 1 for each of {n} layers")
    sliding = replace(
        full,
        num_query_groups=f.integer("swa_num_key_value_heads", default=g),
        window_size=f.integer("sliding_window_size", "sliding_window", default=128),
        learnable_softmax_sink=True,
    )
    return [sliding if one else full for one in pattern]
