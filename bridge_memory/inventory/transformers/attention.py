"""Self-attention of transformers' classes: projections apart, unfused rotary embedding, eager or fused attention.

Source: ``models/llama/modeling_llama.py: LlamaAttention``, ``integrations/{sdpa_attention,flash_attention}.py``. On a GPU
torch's scaled_dot_product_attention is taken to run FlashAttention where no mask is handed over (``aten/src/ATen/
native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``). Shapes: T tokens, s b; a heads, g groups, d a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bridge_memory.inventory.transformers.ops import FP32, Array, Torch
from bridge_memory.spec import AttentionSpec


class Shared(NamedTuple):
    """What the model makes once for all layers."""

    cos: Array | None = None
    sin: Array | None = None
    mask: Array | None = None


def record_attention(t: Torch, spec: AttentionSpec, x: Array, shared: Shared) -> Array:
    """``LlamaAttention.forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    a, g, d, h = spec.num_attention_heads, spec.num_query_groups, spec.kv_channels, ctx.hidden_size
    tokens, bias = ctx.tokens, spec.add_qkv_bias
    query, key, value = (
        t.linear(f"self_attn.{module}", x, tokens, h, heads * d, bias=bias)
        for module, heads in (("q_proj", a), ("k_proj", g), ("v_proj", g))
    )
    if shared.cos is not None and shared.sin is not None:
        before = query, key
        query = _rotated(t, "query", query, shared.cos, shared.sin)
        key = _rotated(t, "key", key, shared.cos, shared.sin)
        t.keep_alive(*before)
    out = _attend(t, spec, query, key, value, shared)
    y = t.linear("self_attn.o_proj", out, tokens, a * d, h, bias=spec.add_output_bias)
    t.keep_alive(x, query, key, value, out)
    return y


def _rotated(t: Torch, name: str, x: Array, cos: Array, sin: Array) -> Array:
    """``apply_rotary_pos_emb``: x cos + rotate_half(x) sin; keeps the tables, which all layers share."""
    straight = t.mul(f"{name} times cos", x, cos)
    half = x.elements // 2
    first = t.slice(f"{name}: first half", x, half)
    second = t.slice(f"{name}: second half", x, x.elements - half)
    turned = t.cat(f"{name}: halves exchanged", t.scale(f"{name}: second half negated", second), first)
    crossed = t.mul(f"{name} times sin", turned, sin)
    return t.add(f"rotated {name}", straight, crossed)


def _attend(t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array, shared: Shared) -> Array:
    return _flash(t, spec, query, key, value)


def _flash(t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array) -> Array:
    """FlashAttention 2 keeps q, k, v, its output and the log-sum-exp of scores in fp32, [b, a, s]. Backward sums the
    query's gradient in fp32, has the statistics' product with the gradient, [b, a, s] of fp32, and gradients of keys
    and values a query head where groups share them (torch ``native/transformers/cuda/flash_attn/flash_api.cpp:
    mha_bwd``; flash-attn ``csrc/flash_attn/flash_api.cpp``)."""
    rows = t.r.ctx.tokens * spec.num_attention_heads
    lse = t.tape.tensor("softmax log-sum-exp", FP32 * rows, grad=False)
    seeds = t.tape.tensor("seed and offset of dropout", 16, grad=False)
    out_elements = rows * spec.value_channels
    scratch: Any = FP32 * query.elements + FP32 * rows
    if spec.num_query_groups != spec.num_attention_heads:
        scratch = scratch + 2 * query.elements * query.width
    return t.make(
        "attention output", (query, key, value), out_elements, query.width,
        saves=(query.tensor, key.tensor, value.tensor, lse, seeds), also=(lse, seeds), save_output=True,
        backward_workspace=scratch,
    )
