"""Megatron Bridge's Gemma 4 providers -> layers. Does not import megatron.

Sliding and full-attention layers have different head widths. Source: megatron-bridge 0.6.2
``models/gemma/{gemma4_provider,modeling_gemma4}.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bridge_memory.readers.config_attributes import ConfigAttributes
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec


def dense_layers(c: ConfigAttributes, n: int, activation: str) -> list[LayerSpec]:
    """The layers of ``Gemma4DenseProvider``.

    The last num_kv_shared_layers attend to keys and values of the last earlier layer of their kind
    (``Gemma4DenseSelfAttention.__init__``), and may have MLPs twice as wide.
    """
    sliding = _windows(c, n)
    shared, width = c.get("num_kv_shared_layers", 0), c.get("per_layer_embed_dim", 0)
    if not c.get("per_layer_embed_vocab_size", 0):
        width = 0
    first = n - shared if shared else n
    layers = []
    for i in range(n):
        attention = _attention(c, sliding[i], c.get("global_kv_channels"), c.get("num_global_query_groups"))
        borrows = i >= first and sliding[i] in sliding[:first]
        lends = i < first < n and sliding[i] not in sliding[i + 1 : first]
        wide = 2 if c.flag("use_double_wide_mlp") and 0 < first <= i else 1
        layers.append(
            LayerSpec(
                replace(attention, borrows_keys=borrows, lends_keys=lends),
                MLPSpec(wide * c.size("ffn_hidden_size"), gated=True, activation=activation),
                arrangement="gemma4_dense", per_layer_width=width, all_layers_width=n * width,
            )
        )
    return layers


def layers_with_experts(c: ConfigAttributes, n: int, activation: str, moe: Callable[[], MoESpec]) -> list[LayerSpec]:
    """The layers of ``Gemma4ModelProvider``."""
    pattern = c.get("interleaved_attn_pattern")
    if not (isinstance(pattern, tuple | list) and len(pattern) == 2 and sum(pattern) > 0):
        raise c.error(f"interleaved_attn_pattern is {str(pattern)[:60]}; give the numbers of sliding and full layers")
    # models/gemma/gemma3_provider.py: _is_local_attn_layer
    kinds = [(i + 1) % sum(pattern) != 0 for i in range(n)]
    groups = c.get("num_global_key_value_heads")
    attention = {kind: _attention(c, kind, c.get("global_head_dim"), groups) for kind in (True, False)}
    experts = moe()
    return [LayerSpec(attention[kind], experts, arrangement="gemma4") for kind in kinds]


def _attention(c: ConfigAttributes, sliding: bool, channels: int | None, groups: int | None) -> AttentionSpec:
    window = c.get("window_size")
    window = window[0] + 1 if isinstance(window, tuple | list) else window
    heads, a, g = c.size("kv_channels"), c.size("num_attention_heads"), c.size("num_query_groups")
    if not sliding:
        heads, g = channels or heads, groups or g
    if a % g:
        raise c.error(f"num_attention_heads ({a}) is not divisible by the query groups ({g}) of a layer")
    return AttentionSpec(
        num_attention_heads=a, num_query_groups=g, kv_channels=heads, qk_layernorm="head",
        window_size=window if sliding else None, value_norm=True,
        keys_are_values=not sliding and c.flag("attention_k_eq_v"),
    )


def _windows(c: ConfigAttributes, n: int) -> list[bool]:
    """Which layers have a sliding window (``_is_gemma4_sliding_layer``)."""
    if not c.get("window_size"):
        return [False] * n
    freq = c.get("window_attn_skip_freq")
    if isinstance(freq, list):
        if len(freq) < n:
            raise c.error(f"window_attn_skip_freq has {len(freq)} entries for {n} layers; give one a layer")
        return [kind == "sliding_attention" if isinstance(kind, str) else bool(kind) for kind in freq[:n]]
    if isinstance(freq, int) and freq > 0:
        return [(i + 1) % freq != 0 for i in range(n)]
    return [True] * n
