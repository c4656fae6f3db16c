"""Self-attention of transformers' classes: separate projections, unfused rotary embedding, eager or fused attention.

Source: ``models/llama/modeling_llama.py: LlamaAttention, eager_attention_forward``, ``integrations/{sdpa_attention,
flash_attention}.py``. On a GPU torch's scaled_dot_product_attention is assumed to run FlashAttention without a mask and
the memory-efficient kernel with one (``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: select_sdp_backend``).
Shapes: T = s b tokens; a heads, g groups, d per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bridge_memory.inventory.torch import compiled, gpt_oss, liger, torchtune
from bridge_memory.inventory.torch.norms import norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.releases import FAMILIES_OF_5, SDPA_SHARES_KEYS, SDPA_TAKES_VIEWS
from bridge_memory.spec import AttentionSpec
from bridge_memory.tapes.context import TorchLayers


class Shared(NamedTuple):
    """Rotary tables, which the model makes once for all layers."""

    cos: Array | None = None
    sin: Array | None = None


def record_attention(t: Torch, spec: AttentionSpec, x: Array, shared: Shared) -> Array:
    """``LlamaAttention.forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    a, d, h = spec.num_attention_heads, spec.kv_channels, ctx.hidden_size
    tokens = ctx.tokens
    if spec.learnable_softmax_sink:
        t.r.parameter("self_attn.sinks", (a,))
    query, key, value, gate = _projected(t, spec, x)
    norms_rotated = spec.qk_layernorm is not None and t.hf.family.qk_norm == "rotated"
    if spec.rotary and shared.cos is not None and t.hf.liger("rope"):
        query, key = liger.rotated(t, "query", query), liger.rotated(t, "key", key)
    elif t.hf.family.rotary == "half tables" and shared.cos is not None and shared.sin is not None:
        before = query, key
        query = gpt_oss.rotated(t, "query", query, shared.cos, shared.sin)
        key = gpt_oss.rotated(t, "key", key, shared.cos, shared.sin)
        t.keep_alive(*before)
    elif t.hf.compiled and shared.cos is not None:
        query, key = compiled.rotated(t, query, key)
    elif t.hf.family.rotary == "torchtune" and shared.cos is not None:
        query, key = torchtune.rotated(t, query, key)
    elif t.hf.family.rotary == "complex" and shared.cos is not None:
        query, key = _rotated_complex(t, shared.cos, query, key)
    elif shared.cos is not None and shared.sin is not None and spec.rotary:
        before = query, key
        tables = _tables(t, shared.cos, shared.sin)
        share = ctx.rotary_dim * t.hf.family.rotary_share / d
        query = rotate_halves(t, "query", query, *tables, share=share)
        key = rotate_halves(t, "key", key, *tables, share=share)
        t.keep_alive(*before, *tables)
    if norms_rotated:
        query, key = _normed(t, spec, 0, query), _normed(t, spec, 1, key)
    if t.hf.spec.use_cache and not t.hf.spec.gradient_checkpointing:
        # cache_utils.py: DynamicLayer.update concatenates them with an empty cache.
        cached = t.copy("cached keys", key), t.copy("cached values", value)
        t.keep_alive(key, value)
        key, value = cached
    if t.hf.modules == "torchtune":
        key, value = _repeated(t, spec, key, value)
    out = attend(t, spec, query, key, value)
    if gate is not None:
        out, before_gate = t.mul("attention output, gated", out, t.saves_output("attention gate", gate)), out
        t.keep_alive(before_gate)
    y = t.linear(f"self_attn.{t.hf.family.output}", out, tokens, a * spec.value_channels, h, bias=spec.add_output_bias)
    if t.hf.family.own_attention:
        t.keep_alive(x, query, out, *t.variables)
        t.variables.clear()
        return y
    t.keep_alive(x, query, key, value, out, gate)
    return y


def _projected(t: Torch, spec: AttentionSpec, x: Array) -> tuple[Array, Array, Array, Array | None]:
    """(queries, keys, values, gate of the output or None); queries and keys are normed if the class does that."""
    ctx = t.r.ctx
    a, g, d, h = spec.num_attention_heads, spec.num_query_groups, spec.kv_channels, ctx.hidden_size
    tokens, bias = ctx.tokens, spec.add_qkv_bias
    if t.hf.family.fused_qkv:
        joined = t.linear("self_attn.qkv_proj", x, tokens, h, (a + 2 * g) * d, bias=bias)
        query, key, value = (
            t.slice(f"{name} part of qkv", joined, tokens * heads * d)
            for name, heads in (("query", a), ("key", g), ("value", g))
        )
        return query, key, value, None
    gate: Array | None = None
    if spec.attention_output_gate and not t.hf.family.separate_gate:
        both = t.linear("self_attn.q_proj", x, tokens, h, 2 * a * d, bias=bias)
        query, gate = t.split("queries and gates", both, tokens * a * d, tokens * a * d)
        gate = t.copy("gates by head", gate)
    else:
        query = t.linear("self_attn.q_proj", x, tokens, h, a * d, bias=bias)
    # Norms are recorded in the order in which the class runs them.
    order = t.hf.family.qk_norm if spec.qk_layernorm else ""
    query = _normed(t, spec, 0, query) if order == "each" else query
    key = t.linear("self_attn.k_proj", x, tokens, h, g * d, bias=bias)
    key = _normed(t, spec, 1, key) if order == "each" else key
    value = t.linear("self_attn.v_proj", x, tokens, h, g * spec.value_channels, bias=bias)
    if spec.attention_output_gate and t.hf.family.separate_gate:
        gate = t.linear("self_attn.gate_proj", x, tokens, h, a * d)
    if order == "all":
        query, key = _normed(t, spec, 0, query), _normed(t, spec, 1, key)
    return query, key, value, gate


def _normed(t: Torch, spec: AttentionSpec, which: int, x: Array) -> Array:
    """Queries (0) or keys (1) through their norm, of each head or of all heads together."""
    heads, d, tokens = (spec.num_attention_heads, spec.num_query_groups)[which], spec.kv_channels, t.r.ctx.tokens
    rows, width = (tokens * heads, d) if spec.qk_layernorm == "head" else (tokens, heads * d)
    return norm(t, f"self_attn.{t.hf.family.qk_norms[which]}", x, rows, width)


# ---- rotary embedding ----


def _tables(t: Torch, cos: Array, sin: Array) -> tuple[Array, Array]:
    """The tables by which the layer multiplies; interleaved ones have each value twice
    (``models/glm/modeling_glm.py``), gathered ones are picked by position (``models/phimoe/modeling_phimoe.py``, 4).
    """
    if t.hf.family.rotary == "gathered":
        return t.copy("cos of the positions", cos), t.copy("sin of the positions", sin)
    if t.hf.family.rotary != "interleaved":
        return cos, sin
    return t.copy("cos of pairs", cos), t.copy("sin of pairs", sin)


def rotate_halves(t: Torch, name: str, x: Array, cos: Array, sin: Array, *, share: float) -> Array:
    """``apply_rotary_pos_emb``: x cos + rotate_half(x) sin; saves the tables, which all layers share. If only a
    ``share`` of a head is rotated, the other part is concatenated afterwards."""
    whole, turning, passing = x, x, None
    partly = 0 < share < 1
    if partly or (share == 1 and (t.hf.family.rotary in ("interleaved", "joined") or t.hf.family.fused_qkv)):
        turning = t.slice(f"{name}: rotary part", whole, round(x.elements * share))
        passing = t.slice(f"{name}: pass-through part", whole, x.elements - turning.elements)
    straight = t.mul(f"{name} times cos", turning, cos)
    half = turning.elements // 2
    first = t.slice(f"{name}: first half", turning, half)
    second = t.slice(f"{name}: second half", turning, half)
    negated = t.scale(f"{name}: second half negated", second)
    turned = t.cat(f"{name}: halves swapped", negated, first)
    crossed = t.mul(f"{name} times sin", turned, sin)
    out = t.add(f"rotated {name}", straight, crossed)
    if passing is not None:
        out = t.cat(f"rotated {name} joined", out, passing)
    back = t.hf.family.rotary_in_fp32 or t.hf.family.rotary_cast_back
    return t.cast(f"rotated {name}", out, x.width) if back else out


def _rotated_complex(t: Torch, table: Array, query: Array, key: Array) -> tuple[Array, Array]:
    """torchtitan ``models/llama3/model/model.py: apply_rotary_emb``: copies in fp32, complex products, cast back; all
    are variables that live until the function returns."""
    query32, key32 = t.cast("query in fp32", query, FP32), t.cast("key in fp32", key, FP32)
    turned = []
    for name, x in (("query", query32), ("key", key32)):
        kept = (table.tensor,) if x.differentiable else ()
        turned.append(t.make(f"{name} times the table", (x,), x.elements, FP32, saves=kept))
    out = t.cast("rotated query", turned[0], query.width), t.cast("rotated key", turned[1], key.width)
    t.keep_alive(query, key, query32, key32, *turned)
    return out


# ---- attention ----


def attend(
    t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array, *, joined: tuple[bool, bool] = (False, False)
) -> Array:
    """Attention with the model's ``attn_implementation``; query, key and value are [b, a, s, d]. ``joined``: whether
    queries, and keys, are contiguous, as those that were concatenated are."""
    implementation = t.hf.attention
    if implementation == "eager":
        return _eager(t, spec, query, key, value, joined)
    if implementation == "flash_attention_2":
        query, key, value = _cast_for_kernel(t, query, key, value)
    if implementation == "flash_attention_2":
        return _flash(t, spec, query, key, value)
    masked = needs_mask(t.hf, spec.window_size, t.r.ctx.seq, packed=t.r.ctx.packed)
    repeats = t.hf.family.own_masks or not (SDPA_SHARES_KEYS(t.hf.spec) or t.hf.family.never_masked)
    repeats = repeats and t.hf.modules != "torchtune"
    if masked or repeats:
        key, value = _repeated(t, spec, key, value)
    elif t.hf.family.fused_qkv and not SDPA_TAKES_VIEWS(t.hf.spec):
        value = t.copy("contiguous values", value)
    given = query, key, value
    query, key, value = _cast_for_kernel(t, *given)
    kernel = t.hf.spec.sdpa_kernel or ("efficient" if masked else "flash")
    if kernel == "flash" and not masked:
        out = _flash(t, spec, query, key, value, shared=not repeats and t.hf.modules != "torchtune")
    else:
        if not masked and not repeats:
            key, value = _repeated(t, spec, key, value)
        out = _efficient(t, spec, query, key, value, masked=masked)
    t.keep_alive(*given)
    return out


def _cast_for_kernel(t: Torch, *arrays: Array) -> Sequence[Array]:
    """Arrays in the compute dtype: under autocast rotated queries and keys are in fp32 until here."""
    return [t.cast(f"{array.tensor.name}, cast", array, t.compute_width) for array in arrays]


def needs_mask(hf: TorchLayers, window: int | None, seq: Any, *, packed: bool = False) -> bool:
    """Whether sdpa gets a mask [b, 1, s, s] (``masking_utils.py: create_causal_mask, _ignore_causal_mask_sdpa``).

    If the batch has no mask, releases before 5 make one from the position ids, in case sequences are packed
    (``find_packed_sequence_indices``).
    """
    spec = hf.spec
    if hf.family.never_masked:
        return False
    if hf.family.always_masked:
        return True
    if spec.attention_mask == "padded" or packed:
        return True
    own = hf.family.own_masks or hf.family.typed_masks
    by_axes = hf.family.rotary_axes > 1  # positions of three axes say nothing of packs
    if spec.attention_mask == "none" and not spec.use_cache and not own and hf.packing_is_supposed and not by_axes:
        return True
    return window is not None and bool(seq >= window)


def _flash(
    t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array, *, shared: bool = True
) -> Array:
    """FlashAttention 2 saves q, k, v, its output and the log-sum-exp of scores, [b, a, s] in fp32. Backward sums the
    query's gradient in fp32, makes the row sums of output times gradient, [b, a, s] in fp32, and gradients of keys and
    values for every query head if groups share them (torch ``native/transformers/cuda/flash_attn/flash_api.cpp:
    mha_bwd``; flash-attn ``csrc/flash_attn/flash_api.cpp``)."""
    rows = t.r.ctx.tokens * spec.num_attention_heads
    lse = t.tape.tensor("log-sum-exp of the scores", FP32 * rows, grad=False)
    seeds = t.tape.tensor("seed and offset of dropout", 16, grad=False)
    out_elements = rows * spec.value_channels
    scratch: Any = FP32 * query.elements + FP32 * rows
    if t.hf.modules == "torchtune":
        # Flex attention sums each gradient in a separate kernel (torch ``_inductor/kernel/flex/flex_attention.py``).
        scratch = 2 * FP32 * rows
    if shared and spec.num_query_groups != spec.num_attention_heads:
        scratch = scratch + 2 * query.elements * query.width
    out = t.make(
        "attention output", (query, key, value), out_elements, query.width,
        saves=(query.tensor, key.tensor, value.tensor, lse, seeds), also=(lse, seeds), save_output=True,
        backward_workspace=scratch,
    )
    t.tape.kept_by_checkpoint += [out.tensor, lse]
    return out


def _efficient(
    t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array, *, masked: bool
) -> Array:
    """The memory-efficient kernel: keys and values for every query head. Every layer makes the mask in the dtype of the
    scores (torch ``native/transformers/attention.cpp: convert_boolean_attn_mask``), and saves it.

    Its backward sums the query's gradient in fp32 (``mem_eff_attention/kernel_backward.h: kNeedsAccumGradQ``).
    """
    ctx = t.r.ctx
    rows = ctx.tokens * spec.num_attention_heads
    lse = t.tape.tensor("log-sum-exp of the scores", FP32 * rows, grad=False)
    seeds = t.tape.tensor("seed and offset of dropout", 16, grad=False)
    mask: tuple[Array, ...] = ()
    typed = t.hf.family.own_masks or t.hf.family.typed_masks
    made_here = not typed or (t.hf.family.always_masked and spec.window_size is not None)
    if masked and made_here:
        mask = (t.constant("attention bias of the mask", ctx.batch * ctx.seq * ctx.seq, query.width),)
    given = query, key, value, *mask
    out = t.make(
        "attention output", given, rows * spec.value_channels, query.width,
        saves=(*(each.tensor for each in given), lse, seeds), also=(lse, seeds), save_output=True,
        backward_workspace=FP32 * query.elements + FP32 * rows,
    )
    return out


def _repeated(t: Torch, spec: AttentionSpec, key: Array, value: Array) -> tuple[Array, Array]:
    """``repeat_kv``: a copy for every query head, if groups share keys and values. Of a single group it is an expanded
    view, whose gradient first has the size of all heads."""
    times = spec.num_attention_heads // spec.num_query_groups
    if times > 1 and _expands(t, spec):
        sizes = key.elements * times, value.elements * times
        return t.spread("keys of every head", key, sizes[0]), t.spread("values of every head", value, sizes[1])
    if times == 1:
        t.variables += [key, value] if t.hf.family.own_attention else []
        return key, value
    key, value = t.copy("keys of every head", key, times), t.copy("values of every head", value, times)
    t.variables += [key, value] if t.hf.family.own_attention else []
    return key, value


def _expands(t: Torch, spec: AttentionSpec) -> bool:
    """Whether keys and values of every head are views: releases before ``SDPA_TAKES_VIEWS`` copy what sdpa takes."""
    takes_views = t.hf.attention == "eager" or SDPA_TAKES_VIEWS(t.hf.spec)
    own = t.hf.family.own_attention or t.hf.modules != "transformers"
    return spec.num_query_groups == 1 and takes_views and not own


def _eager(
    t: Torch, spec: AttentionSpec, query: Array, key: Array, value: Array, joined: tuple[bool, bool]
) -> Array:
    """Eager attention with scores [b, a, s, s]: saves the softmax in fp32 and its copy in the model's dtype.

    ``torch.matmul`` multiplies contiguous batches of heads: with more than one sequence it copies queries, and also
    keys and values unless ``repeat_kv`` has copied them.
    """
    ctx = t.r.ctx
    key, value = _repeated(t, spec, key, value)
    variables = [key, value]
    scores = ctx.tokens * ctx.seq * spec.num_attention_heads
    several = ctx.batch > 1
    shared = spec.num_attention_heads != spec.num_query_groups and not _expands(t, spec)
    left, right = _cast_for_kernel(t, query, key)
    # Queries concatenated from two halves are contiguous.
    sinks = t.hf.family.eager == "sinks"
    left = t.copy("contiguous queries", left) if several and not sinks and not joined[0] else left
    right = t.copy("contiguous keys", right) if several and not shared and not joined[1] else right
    products = t.matmul("products of queries and keys", left, right, scores)
    logits = t.scale("attention scores", products)
    if t.hf.family.softcapped:
        for what in ("divided", "tanh", "multiplied"):
            before = logits
            logits = (t.saves_output if what == "tanh" else t.scale)(f"attention scores, {what}", logits)
            t.keep_alive(before)
    if t.hf.family.eager == "gpt2":
        return _eager_of_gpt2(t, spec, logits, value, variables)
    masked = _masked(t, logits)
    if t.hf.family.eager == "sinks":
        narrow, less = gpt_oss.probabilities(t, masked, ctx.tokens * spec.num_attention_heads)
        return _weighted(t, spec, narrow, value, (*variables, less), copied=several and not shared)
    wide = t.cast("masked scores in fp32", masked, FP32)
    probabilities = t.saves_output("attention probabilities in fp32", wide)
    narrow = t.cast("attention probabilities", probabilities, query.width)
    t.keep_alive(masked, probabilities)
    return _weighted(t, spec, narrow, value, variables, copied=several and not shared)


def _weighted(
    t: Torch, spec: AttentionSpec, probabilities: Array, value: Array, variables: Sequence[Array], *, copied: bool
) -> Array:
    """The product of probabilities and values, which are ``copied`` if not contiguous; probabilities are returned to
    the layer."""
    ctx = t.r.ctx
    if t.hf.family.eager != "llama":
        probabilities = t.cast("attention probabilities, cast", probabilities, value.width)
    narrow = t.dropout("attention dropout", probabilities, ctx.attention_dropout)
    t.keep_alive(probabilities)
    (left,), (right,) = _cast_for_kernel(t, narrow), _cast_for_kernel(t, value)
    right = t.copy("contiguous values", right) if copied else right
    width = spec.num_attention_heads * spec.value_channels
    out = t.matmul("attention output by head", left, right, ctx.tokens * width)
    done = t.copy("attention output", out)
    t.keep_alive(*variables, narrow)
    (t.variables if t.hf.family.own_attention else t.returned).append(narrow)
    return done


def _eager_of_gpt2(t: Torch, spec: AttentionSpec, scores: Array, value: Array, variables: list[Array]) -> Array:
    """``models/gpt2/modeling_gpt2.py: eager_attention_forward``: before 5 the causal mask, a buffer of the module, is
    applied first; the softmax is in the dtype of the scores, under autocast in fp32."""
    if not FAMILIES_OF_5(t.hf.spec):
        before, scores = scores, t.scale("scores of the past", scores)
        t.keep_alive(before)
    masked = _masked(t, scores)
    wide = t.precise("masked scores in fp32", masked)
    probabilities = t.saves_output("attention probabilities", wide)
    t.keep_alive(masked)
    return _weighted(t, spec, probabilities, value, variables, copied=bool(t.r.ctx.batch > 1))


def _masked(t: Torch, logits: Array) -> Array:
    """Scores plus a mask in the dtype of the parameters."""
    before, logits = logits, t.widened(logits, max(logits.width, t.parameter_width))
    masked = t.make("masked scores", (logits,), logits.elements, logits.width, alias=True)
    t.keep_alive(before)
    return masked
