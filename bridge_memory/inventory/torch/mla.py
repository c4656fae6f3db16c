"""Multi-latent attention of transformers' classes: latents, and queries and keys concatenated from two parts.

Source: ``models/deepseek_v3/modeling_deepseek_v3.py: DeepseekV3Attention``, and that of deepseek_v2. Shapes: T tokens;
a heads, whose queries and keys are n + r wide and whose values are v wide; latents of width l.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.attention import Shared, attend
from bridge_memory.inventory.torch.norms import norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.releases import SDPA_TAKES_VIEWS
from bridge_memory.spec import AttentionSpec, MLASpec


def record_mla(t: Torch, spec: MLASpec, x: Array, shared: Shared, module: str = "self_attn") -> Array:
    """[T, h] -> [T, h]. ``module``: its name in the layer."""
    ctx = t.r.ctx
    tokens, h, a = ctx.tokens, ctx.hidden_size, spec.num_attention_heads
    n, r, v, latent = spec.qk_head_dim, spec.qk_pos_emb_head_dim, spec.v_head_dim, spec.kv_lora_rank
    if spec.q_lora_rank is None:
        queries = t.linear(f"{module}.q_proj", x, tokens, h, a * (n + r))
    else:
        low = t.linear(f"{module}.q_a_proj", x, tokens, h, spec.q_lora_rank)
        low = norm(t, f"{module}.q_a_layernorm", low, tokens, spec.q_lora_rank)
        queries = t.linear(f"{module}.q_b_proj", low, tokens, spec.q_lora_rank, a * (n + r))
    rotates = t.hf.family.latent != "unrotated"
    q_pass, q_turning = t.split("queries", queries, tokens * a * n, tokens * a * r) if rotates else (queries, queries)
    compressed = t.linear(f"{module}.kv_a_proj_with_mqa", x, tokens, h, latent + r)
    k_latent, k_turning = t.split("compressed keys and values", compressed, tokens * latent, tokens * r)
    k_latent = norm(t, f"{module}.kv_a_layernorm", k_latent, tokens, latent)
    if t.hf.family.scaled_latents:
        q_pass, q_turning = t.scale("queries, scaled", q_pass), t.scale("rotary part of queries, scaled", q_turning)
        unscaled, k_latent = k_latent, t.scale("latent of keys and values, scaled", k_latent)
        t.keep_alive(unscaled)
    both = t.linear(f"{module}.kv_b_proj", k_latent, tokens, latent, a * (n + v))
    k_pass, value = t.split("keys and values", both, tokens * a * n, tokens * a * v)
    if t.hf.family.latent == "unrotated":
        query, key = queries, _written_keys(t, k_pass, k_turning, tokens * a * (n + r))
        out = attend(t, AttentionSpec(a, a, n + r, v_channels=v), query, key, value, joined=(False, True))
        y = t.linear(f"{module}.o_proj", out, tokens, a * v, h, bias=spec.add_output_bias)
        t.keep_alive(x, queries, compressed, k_latent, value, key, out)
        return y
    before = q_turning, k_turning
    if t.hf.family.rotary == "polar":
        q_turned, k_turned = _rotated_complex(t, shared, *before)
    else:
        assert shared.cos is not None and shared.sin is not None
        q_turned, k_turned = (
            _interleaved(t, name, part, shared.cos, shared.sin)
            for name, part in (("rotary queries", q_turning), ("rotary keys", k_turning))
        )
    t.keep_alive(*before)
    spread = t.scale("rotated keys of every head", k_turned)._replace(elements=tokens * a * r)
    spread.tensor.bytes = 0
    spread.tensor.grad_bytes = spread.bytes * k_turned.differentiable
    spread.tensor.whole = k_turned.tensor
    query = t.cat("concatenated queries", q_pass, q_turned)
    key = t.cat("concatenated keys", k_pass, spread)
    if t.hf.family.scaled_queries:
        query = t.scale("scaled queries", query)
    parts = value
    if t.hf.attention == "sdpa" and not SDPA_TAKES_VIEWS(t.hf.spec):
        value = t.copy("contiguous values", value)
    heads = AttentionSpec(a, a, n + r, v_channels=v)
    out = attend(t, heads, query, key, value, joined=(True, True))
    y = t.linear(f"{module}.o_proj", out, tokens, a * v, h, bias=spec.add_output_bias)
    t.keep_alive(x, queries, compressed, q_pass, k_pass, parts, q_turned, k_turned, query, key, out)
    return y


def _written_keys(t: Torch, passing: Array, turning: Array, elements: Any) -> Array:
    """``KimiLinearAttention.expand_kv``: a new tensor, into which both parts of keys are written; the second is one for
    all heads, so that its gradient is summed over them."""
    keys = t.constant("keys", elements, passing.width)
    keys = t.written("keys, first part", keys, passing)
    spread = t.spread("second part of keys, of every head", turning, elements - passing.elements)
    return t.written("keys, second part", keys, spread)


def _rotated_complex(t: Torch, shared: Shared, *given: Array) -> list[Array]:
    """``models/deepseek_v2/modeling_deepseek_v2.py: apply_rotary_emb``: copies in fp32, multiplied as complex numbers
    by a complex table, and cast back one after the other."""
    assert shared.cos is not None
    wide = [t.cast(f"{x.tensor.name} in fp32", x, FP32) for x in given]
    turned = []
    for x, x32 in zip(given, wide, strict=True):
        kept = (shared.cos.tensor,) if x32.differentiable else ()
        product = t.make(f"{x.tensor.name} times the table", (x32,), x.elements, FP32, saves=kept)
        turned.append(t.cast(f"{x.tensor.name}, rotated", product, x.width))
    t.keep_alive(*wide)
    return turned


def _interleaved(t: Torch, name: str, x: Array, cos: Array, sin: Array) -> Array:
    """``apply_rotary_pos_emb_interleave``: pairs are first deinterleaved in a copy."""
    apart = t.copy(f"{name}, pairs apart", x)
    straight = t.mul(f"{name} times cos", apart, cos)
    half = apart.elements // 2
    first = t.slice(f"{name}: first half", apart, half)
    second = t.slice(f"{name}: second half", apart, half)
    turned = t.cat(f"{name}: halves swapped", t.scale(f"{name}: second half negated", second), first)
    crossed = t.mul(f"{name} times sin", turned, sin)
    out = t.add(f"{name}, rotated", straight, crossed)
    t.keep_alive(apart)
    return out
