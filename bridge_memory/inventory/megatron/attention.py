"""Softmax attention: multi-head, grouped-query, gated, with or without rotary embedding.

Source: megatron-core ``transformer/attention.py: SelfAttention``, ``transformer/dot_product_attention.py`` (local),
TE ``attention/dot_product_attention/{backends,utils}.py``. Shapes: q = a d / t, kv = g d / t (values: g d_v / t),
tokens T = s b.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.cards.rows import MULTIPROCESSORS
from bridge_memory.releases import (
    ALL_GATHER_MAKES_TWO_OUTPUTS,
    ATTENTION_TOKENS_FIRST,
    FLASH_PADS_VALUES,
    FP8_ATTENTION_KEEPS_ONE_STATISTIC,
    MASK_MADE_BY_EACH_LAYER,
    QKV_OUTPUT_HELD,
    RING_SUMS_EACH_STEP,
    SOFTMAX_MAKES_A_GRADIENT,
    STEPS_OF_ALL_GATHER_DROPPED,
)
from bridge_memory.spec import AttentionSpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder, Scratch
from bridge_memory.tapes.symbolic import largest, smallest
from bridge_memory.tapes.tape import Region, Tensor


def record_attention(
    r: Recorder, spec: AttentionSpec, x: Tensor, *, normed: bool = False, scaled_key: bool = False
) -> Tensor:
    """From the residual stream [T_sp, h] to the output of linear_proj [T_sp, h], with the input norm unless ``x`` is
    ``normed``. ``scaled_key``: the key is multiplied by a constant (Falcon-H1)."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    a = divide(spec.num_attention_heads, ctx.tp, "num_attention_heads", "tensor_model_parallel_size")
    d = spec.kv_channels
    # With fewer groups than ranks every rank computes one group, after a gather.
    g = largest(1, spec.num_query_groups // ctx.tp)
    q_width, kv_width, v_width, out_width = a * d, g * d, g * spec.value_channels, a * spec.value_channels
    gate_heads = spec.num_attention_heads if spec.attention_output_gate else 0
    qkv_width = divide(
        (spec.num_attention_heads + gate_heads) * d + spec.num_query_groups * (d + spec.value_channels),
        ctx.tp, "width of linear_qkv", "tensor_model_parallel_size",
    )
    h = ctx.hidden_size
    q_bytes = ctx.tokens * q_width * ctx.act
    key_bytes, value_bytes = ctx.tokens * kv_width * ctx.act, ctx.tokens * v_width * ctx.act

    with r.offload("qkv_linear"):
        qkv, region = _input_projection(r, spec, x, qkv_width, normed)
    if spec.num_query_groups < ctx.tp:
        # q, k and v are views of the gathered tensor, which is concatenated from the ranks' parts
        # (``SelfAttention.get_query_key_value_tensors``, ``mappings.py: _gather_along_last_dim``). Its gradient is
        # concatenated before it is scattered (``_reduce_scatter_along_last_dim``).
        gathered = qkv_width * ctx.tp * ctx.tokens * ctx.act
        qkv = tape.make("gathered qkv", qkv, gathered, workspace=gathered, backward_workspace=gathered)

    query, key, value, gate = qkv, qkv, qkv, qkv
    rotated = spec.rotary and ctx.rotary
    te = ctx.te and not spec.core_attention
    # q, k and v reach Transformer Engine's attention as slices of one tensor. It uses slices whose heads alternate
    # (sbh3d) and makes contiguous copies of any others (``get_qkv_layout``).
    sliced = te and not rotated and not spec.qk_layernorm and (a != g or spec.num_query_groups < ctx.tp)
    if not te or gate_heads or scaled_key or sliced:
        parts = [("query", q_bytes), ("gate", q_bytes)][: 1 + bool(gate_heads)]
        query, *gates, key, value = tape.views("split qkv", qkv, *parts, ("key", key_bytes), ("value", value_bytes))
        gate = gates[0] if gates else qkv
    separate, raw_key = False, key
    if (not te or not spec.qk_layernorm) and 1 < g < a:
        # The reshape of a grouped query to [s, b, a, d] is a copy.
        query = tape.make("query", query, q_bytes)
    if spec.qk_layernorm:
        width_q, width_k = (d, d) if spec.qk_layernorm == "head" else (q_width, kv_width)
        rows_q = ctx.tokens * (a if spec.qk_layernorm == "head" else 1)
        rows_k = ctx.tokens * (g if spec.qk_layernorm == "head" else 1)
        query = _sub_norm(r, "self_attention.q_layernorm", query, width_q, rows_q, copy=ctx.te)
        if not spec.borrows_keys:
            key = _sub_norm(r, "self_attention.k_layernorm", key, width_k, rows_k, copy=ctx.te)
        separate = True
    if scaled_key:
        key, separate = tape.make("scaled key", key, key_bytes), True
    if spec.keys_are_values:
        value = raw_key
    if spec.borrows_keys:
        key, value = _borrowed(r, key, d, g, value_bytes)
    elif spec.value_norm:
        value = _norm_of_values(r, value, spec.value_channels, ctx.tokens * g)
    if spec.lends_keys:
        # ``_stored_kv``, an attribute, holds them until the next forward pass.
        stored = tape.tensor("key and value for later layers", 0, grad=False)
        tape.op(stored.name, (key, value), stored, saves=(key, value))
    if gate_heads and 1 < g < a:  # else a view, which keeps the mixed tensor of q, k and v alive
        gate = tape.make("gate", gate, q_bytes)
    before_rope = (query, key, value, gate) if QKV_OUTPUT_HELD(ctx.impl) else (gate,)
    if rotated:
        rope = _rope_in_fp32 if spec.rotary_in_fp32 else rope_of
        query = rope(r, "query rope", query, q_bytes, d)
        key = rope(r, "key rope", key, key_bytes, d)
        separate = True
    if spec.learnable_softmax_sink:
        r.parameter("self_attention.core_attention.softmax_offset", (a,), sharded=ctx.tp > 1)
    inputs = tuple(dict.fromkeys((query, key, value)))
    selected = ctx.recomputes("core_attn")
    with tape.checkpoint("core_attn", inputs, enabled=selected), r.offload("core_attn"):
        if separate and te and not sequences_first(r):
            # q and k are separate tensors by now, so TE makes v contiguous, which frees the mixed tensor
            # (``utils.py: get_qkv_layout``). The local code, and a checkpoint, keep the view.
            value = tape.make("value", value, value_bytes)
        elif sliced and not separate and not sequences_first(r):
            if g == 1:
                query = tape.make("query", query, q_bytes)
            key, value = tape.make("key", key, key_bytes), tape.make("value", value, value_bytes)
        out = core_attention(
            r, tuple(dict.fromkeys((query, key, value))), heads=a,
            q_width=q_width, kv_width=kv_width, v_width=v_width, out_width=out_width,
            grouped=a != g, sink=spec.learnable_softmax_sink, window=spec.window_size is not None,
            module=spec.core_attention,
        )
    if spec.attention_output_gate:
        # sigmoid(gate.float()) * out, one compiled kernel: saves its inputs.
        out = tape.make("gated attention output", (out, gate), q_bytes, saves=(out, gate))
    with r.offload("attn_proj"):
        y = r.row_linear(
            "self_attention.linear_proj", out, out_width, h, bias=spec.add_output_bias,
            original=r.proj_keeps_original and not spec.attention_output_gate,
        )
    tape.keep_alive(*before_rope, *inputs)  # variables of Attention.forward
    if region is not None:
        tape.discard(*region)
    r.arrange(first, *(f"self_attention.{m}" for m in _MODULES))
    return y


#: Submodules, in the order in which they are registered.
_MODULES = ("core_attention", "linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")


def _input_projection(
    r: Recorder, spec: AttentionSpec, x: Tensor, qkv_width: int, normed: bool
) -> tuple[Tensor, tuple[Region, Tensor] | None]:
    """Input norm and linear_qkv; returns the mixed tensor and what to discard after linear_proj, if anything."""
    ctx, tape = r.ctx, r.tape
    name = "self_attention.linear_qkv"
    if ctx.te or normed:
        fused_norm = not normed
        return r.column_linear(name, x, ctx.hidden_size, qkv_width, bias=spec.add_qkv_bias, fused_norm=fused_norm), None
    recompute = ctx.recomputes("layernorm")
    with r.offload("attn_norm"), tape.discardable("input_layernorm", (x,), enabled=recompute) as region:
        held = r.hold(r.norm("input_layernorm", x, ctx.hidden_size, ctx.tokens_sp))
    qkv = r.column_linear(name, held, ctx.hidden_size, qkv_width, bias=spec.add_qkv_bias)
    return qkv, (region, held) if recompute else None


def _sub_norm(r: Recorder, name: str, x: Tensor, width: int, rows: int, *, copy: bool) -> Tensor:
    """Norm over heads. ``copy``: its input is a contiguous copy of the strided slice, which the norm saves."""
    source = r.tape.make(f"{name} input", x, width * rows * r.ctx.act) if copy else x
    return r.norm(name, source, width, rows)


def _norm_of_values(r: Recorder, x: Tensor, width: int, rows: int) -> Tensor:
    """A norm without a weight, in torch (megatron-bridge ``models/gemma/modeling_gemma4.py:
    Gemma4DenseSelfAttention._v_norm, Gemma4SelfAttention.get_query_key_value_tensors``)."""
    return r.torch_norm("value norm", x, width, rows, scaled=False, copies=1)


def _borrowed(r: Recorder, key: Tensor, d: int, heads: int, value_bytes: int) -> tuple[Tensor, Tensor]:
    """Key and value of another layer, which counts them. The layer's own key is still normed, and then dropped
    (megatron-bridge ``models/gemma/modeling_gemma4.py: Gemma4DenseSelfAttention.get_query_key_value_tensors``)."""
    rows, tape = r.ctx.tokens * heads, r.tape
    r.norm_parameters("self_attention.k_layernorm", d)
    tape.op("own key", (), (), workspace=3 * 4 * rows * d)
    tape.keep_alive(key)
    key, value = tape.input("another layer's key", 0), tape.input("another layer's value", 0)
    key.grad_bytes, value.grad_bytes = rows * d * r.ctx.act, value_bytes
    return key, value


def rotation_fused(ctx: BlockContext) -> bool:
    """Whether one kernel rotates; the settings have the option off where YaRN keeps it from it."""
    return ctx.impl.apply_rope_fusion and ctx.te


def rope_of(r: Recorder, name: str, x: Tensor, nbytes: int, head_dim: int) -> Tensor:
    """Rotary embedding of q or k. Fused: TE saves the frequencies only, which all layers share. Unfused: the cosine and
    sine are saved, and there are four temporaries."""
    if rotation_fused(r.ctx):
        return r.tape.make(name, x, nbytes)
    angles = cosine_and_sine(r, name, r.ctx.rotary_dim or head_dim)
    return r.tape.make(
        name, x, nbytes, saves=(angles,), also=(angles,), workspace=3 * nbytes, backward_workspace=2 * nbytes
    )


def _rope_in_fp32(r: Recorder, name: str, x: Tensor, nbytes: int, head_dim: int) -> Tensor:
    """megatron-bridge ``models/qwen_vl/modelling_qwen3_vl/rope.py: apply_rotary_pos_emb_absolute``: unfused, of a copy
    in fp32, with cosine and sine in fp32; the result is cast back."""
    tape, wide = r.tape, nbytes // r.ctx.act * 4
    copy = tape.make(f"{name} input in fp32", x, wide)
    angles = tape.tensor(f"{name} cosine and sine", 2 * 4 * r.ctx.seq * head_dim, grad=False)
    turned = tape.make(
        f"{name} in fp32", copy, wide, saves=(angles,), also=(angles,), workspace=2 * wide, backward_workspace=2 * wide
    )
    return tape.make(name, turned, nbytes)


def cosine_and_sine(r: Recorder, name: str, width: int) -> Tensor:
    """Two [s, 1, 1, d_rope] tensors in the compute dtype, made for each use
    (``rope_utils.py: _apply_rotary_pos_emb_bshd``)."""
    return r.tape.tensor(f"{name} cosine and sine", 2 * r.ctx.seq * width * r.ctx.act, grad=False)


def core_attention(
    r: Recorder,
    qkv: tuple[Tensor, ...],
    *,
    heads: int,
    q_width: int,
    kv_width: int,
    v_width: int,
    out_width: int,
    grouped: bool,
    recomputed: bool = False,
    sink: bool = False,
    window: bool = False,
    causal: bool = True,
    module: str = "",
) -> Tensor:
    """softmax(q k^T) v for ``heads`` local heads; widths are local and summed over heads.

    ``module``: ``AttentionSpec.core_attention``.

    ``recomputed``: q, k and v are discarded after attention and recomputed before its backward; they stay until the
    recomputed part has run backward, whether or not attention saves them (``random.py:
    CheckpointWithoutOutput._recompute``).

    Flash and cuDNN fused attention save q, k, v, the output and an fp32 log-sum-exp per head and token; their
    backward needs an fp32 accumulator of dq and an fp32 row sum. FlashAttention works on [b, s, a, d]: with more than
    one sequence it copies q, k and v to that layout and its output back (TE ``backends.py: FlashAttention.forward``),
    and saves its copies. Unfused attention saves the probabilities [b, a, s, s], and with dropout a one-byte mask and
    the dropped probabilities.
    """
    ctx, tape, te = r.ctx, r.tape, r.ctx.te and not module
    out_bytes = ctx.tokens * out_width * ctx.act
    rows = ctx.tokens * heads
    if module == "flex":
        return _flex(r, qkv, rows, out_bytes)
    kernel = "unfused" if module else attention_kernel(r, sink=sink, equal_heads=kv_width == v_width, window=window)
    batch_first = sequences_first(r)
    if batch_first:
        widths = (("query", q_width), ("key", kv_width), ("value", v_width))
        given = qkv if len(qkv) == 3 else qkv * 3
        qkv = tuple(
            tape.make(f"{name} [b, s]", x, ctx.tokens * width * ctx.act)
            for x, (name, width) in zip(given, widths, strict=True)
        )
    if kernel != "unfused":
        padded = kernel == "flash" and kv_width != v_width
        whole = qkv
        if padded:
            qkv = (*qkv[:-1], tape.make("padded value", qkv[-1], ctx.tokens * kv_width * ctx.act))
            v_width, out_bytes = kv_width, ctx.tokens * q_width * ctx.act
        q_bytes, kv_bytes = (ctx.tokens * w * ctx.act for w in (q_width, kv_width + v_width))
        transposed = kernel == "flash" and ctx.batch > 1 and not batch_first
        if transposed or (len(qkv) == 1 and (ctx.cp > 1 or kernel == "flash")):
            qkv = _contiguous(r, qkv, q_bytes, kv_bytes)
        if ctx.cp > 1:
            out = _context_parallel(
                r, qkv, heads=heads, q_width=q_width, kv_bytes=kv_bytes, out_bytes=out_bytes, kernel=kernel,
                batch_first=batch_first, recomputed=recomputed, causal=causal,
            )
        else:
            if fp8_attention(r):
                return _in_fp8(r, qkv, heads, q_width, kv_width, v_width, out_bytes, batch_first=batch_first)
            statistics = softmax_statistics(r, rows)
            # FlashAttention makes gradients of keys and values for every query head, then sums those of a group.
            expanded = 2 * q_bytes if grouped and kernel == "flash" else 0
            out = tape.make(
                "core_attention output", qkv, out_bytes, saves=(*qkv, *statistics), save_output=True, also=statistics,
                backward_workspace=_gradient_sums(r, kernel, heads, q_width) + expanded,
            )
        if transposed:
            out = tape.make("core_attention output [s, b]", out, out_bytes, alias=True)
        if padded:
            cut = ctx.tokens * out_width * ctx.act
            (part,) = tape.views("cut", out, ("core_attention output, cut", cut))
            out = tape.make("core_attention output without padding", part, cut)
            tape.keep_alive(*whole, *qkv)  # variables of DotProductAttention.forward
        if batch_first:
            out = tape.make("core_attention output [s, b]", out, ctx.tokens * out_width * ctx.act, alias=True)
        return out
    scores_elements = rows * ctx.seq * ctx.cp
    scores_bytes = scores_elements * ctx.act
    made = _full_mask(r) if te else None
    if len(qkv) == 1:
        parts = [("query", q_width), ("key", kv_width), ("value", v_width)]
        qkv = tape.views("split qkv", qkv[0], *((name, ctx.tokens * width * ctx.act) for name, width in parts))
    variables = qkv if te else ()  # of DotProductAttention.forward
    unpacked = te and ctx.packed
    if unpacked:  # one row per sequence (``ConvertTHDtoBSHD``)
        widths = (("query", q_width), ("key", kv_width), ("value", v_width))
        qkv = tuple(
            tape.make(f"{name} by sequences", x, ctx.tokens * width * ctx.act)
            for x, (name, width) in zip(qkv, widths, strict=True)
        )
    if batch_first:  # back to [s, b], by a reshape of a view; repeating keys and values copies them anyway
        again = qkv[:1] if grouped else qkv
        qkv = (*(tape.make(f"{x.name} [s, b]", x, x.bytes) for x in again), *qkv[len(again) :])
    if grouped:
        repeated = ctx.tokens * q_width * ctx.act
        query, key, value = qkv[0], *qkv[-2:]
        qkv = (query, tape.make("repeated key", key, repeated), tape.make("repeated value", value, repeated))
    if not te:
        r.keep(Scratch.MPU, scores_bytes)
    scores = tape.make(
        "attention scores", qkv[:2], scores_bytes, saves=qkv[:2], workspace=scores_bytes if te else 0
    )
    if sink and made:  # replaces scores and mask
        scores = tape.make("attention scores with sink", scores, (scores_elements + rows) * ctx.act)
        wider = tape.tensor("attention mask with sink", made.bytes + ctx.seq * ctx.cp, grad=False)
        tape.op(wider.name, (made,), wider)
        made = wider
    if fused_softmax(r, heads, sink, te=te):
        # Backward writes over the output's gradient (scaled_*_masked_softmax_backward), or makes a new one.
        own = te and SOFTMAX_MAKES_A_GRADIENT(ctx.impl)
        probs = tape.make("attention probabilities", scores, scores_bytes, save_output=True, alias=not own)
    else:
        probs = _softmax(r, scores, scores_elements, rows if sink else 0, made, window=window, te=te)
    if unpacked:  # rows of padding are zeros (``UnfusedDotProductAttention._forward``)
        assert made is not None
        probs = tape.make("attention probabilities without padding", probs, scores_bytes, saves=(made,))
    if ctx.attention_dropout:
        kept = tape.tensor("attention dropout mask", scores_elements, grad=False, item=1)
        probs = tape.make("dropped probabilities", probs, scores_bytes, saves=(kept,), also=(kept,))
    # Recomputed, the local code's value is a view. Autograd keeps its gradient in the strides of the view: a copy of
    # the transposed one (torch ``accumulate_grad.h: AccumulateGrad::accumulateGrad``). Those of repeated values are
    # summed. Dropped probabilities, which nothing else saves, are freed by then.
    copied = 0 if te or grouped or not ctx.recomputes("core_attn") else qkv[-1].grad_bytes
    if ctx.attention_dropout:
        copied = largest(0, copied - scores_bytes)
    context = tape.make(
        "attention context", (probs, qkv[-1]), out_bytes, saves=(probs, qkv[-1]), backward_workspace=copied
    )
    out = tape.make("core_attention output", context, out_bytes, alias=not unpacked)
    tape.keep_alive(scores, probs, context, *qkv, *variables, *([made] if made else []))
    if batch_first:
        out = tape.make("core_attention output [s, b]", out, out_bytes, alias=True)
    return out


def _flex(r: Recorder, qkv: tuple[Tensor, ...], rows: Any, out_bytes: Any) -> Tensor:
    """torch's compiled FlexAttention saves q, k and v as it gets them, the output, which has the strides of the query,
    and an fp32 log-sum-exp per head and token. Backward makes the fp32 row sums of output times gradient (torch
    ``_inductor/kernel/flex/flex_attention.py: flex_attention, flex_attention_backward``). The masks of blocks are made
    once, of 16 bytes for each 128 x 128 scores."""
    statistics = r.tape.tensor("log-sum-exp of the scores", 4 * rows, grad=False)
    return r.tape.make(
        "core_attention output", qkv, out_bytes, saves=(*qkv, statistics), save_output=True, also=(statistics,),
        backward_workspace=4 * rows,
    )


def attend_to_text(r: Recorder, qkv: tuple[Tensor, Tensor, Tensor], *, heads: int, width: int, rows: Any) -> Tensor:
    """Attention of this rank's tokens to ``rows`` others. ``width``: of all local heads."""
    ctx, kernel = r.ctx, attention_kernel(r)
    out_bytes = ctx.tokens * width * ctx.act
    if ctx.cp > 1:
        return _context_parallel(
            r, qkv, heads=heads, q_width=width, kv_bytes=2 * rows * width * ctx.act, out_bytes=out_bytes,
            kernel=kernel, batch_first=False, recomputed=False, causal=False,
        )
    statistics = softmax_statistics(r, ctx.tokens * heads)
    return r.tape.make(
        "attention to the text", qkv, out_bytes, saves=(*qkv, *statistics), save_output=True, also=statistics,
        backward_workspace=_gradient_sums(r, kernel, heads, width),
    )


def fp8_attention(r: Recorder) -> bool:
    """Whether attention of this layer computes in fp8, which only cuDNN's does (TE ``utils.py:
    get_attention_backend``). Under context parallelism it is counted as if it did not."""
    return r.ctx.fp8_attention and r.fp8 and r.ctx.cp == 1


def softmax_statistics(r: Recorder, rows: int, *, fp8: bool = False) -> tuple[Tensor, ...]:
    """What flash and fused attention keep of the softmax of ``rows`` = T a rows, with and without context parallelism:
    an fp32 log-sum-exp of each (TE ``backends.py: FlashAttention.forward``, ``cpp_extensions/fused_attn.py:
    fused_attn_fwd``); in ``fp8``, before ``FP8_ATTENTION_KEEPS_ONE_STATISTIC``, a reciprocal of its sum too."""
    kept = [r.tape.tensor("softmax log-sum-exp", 4 * rows, grad=False, item=4)]
    if fp8 and not FP8_ATTENTION_KEEPS_ONE_STATISTIC(r.ctx.impl):
        kept.append(r.tape.tensor("softmax reciprocal sums", 4 * rows, grad=False, item=4))
    return tuple(kept)


def _gradient_sums(r: Recorder, kernel: str, heads: int, q_width: int, *, ranks: int = 1) -> Any:
    """Bytes in which attention's backward sums the query's gradient in fp32, and one fp32 sum per row.

    FlashAttention 2 pads heads to a multiple of 32, above 128 of 64. Deterministic, it has one gradient for each part
    of the keys, as many as fill the GPU (flash-attn 2.8 ``csrc/flash_attn/flash_api.cpp: mha_bwd``: dq_accum, nsplits).
    cuDNN's is assumed to be FlashAttention's documented algorithm. ``ranks``: those that divide the heads among them,
    each with all tokens.
    """
    ctx, d, parts = r.ctx, q_width // heads, 1
    if kernel == "flash":
        multiple = 32 if d <= 128 else 64
        d = -(-d // multiple) * multiple
        if ctx.impl.deterministic_attention:
            parts = -(-MULTIPROCESSORS[ctx.impl.gpu_arch] * ranks // (ctx.batch * heads))
    return 4 * ctx.tokens * heads * (parts * d + 1)


def _in_fp8(
    r: Recorder, qkv: tuple[Tensor, ...], heads: int, q_width: int, kv_width: int, v_width: int, out_bytes: int, *,
    batch_first: bool,
) -> Tensor:  # fmt: skip
    """cuDNN's attention in fp8: it saves queries, keys and values in fp8, and the output in the format that its
    backward needs.

    With mxfp8 both layouts are saved, with padded scales per head; other recipes save one. With the delayed recipe the
    output is made in fp8 and dequantized to 16 bits, and so are gradients. Source: TE ``backends.py:
    _fused_attn_forward_impl, _fused_attn_backward_impl``, ``utils.py: combine_and_quantize, mxfp8_transpose_swizzle``.
    """
    ctx, tape = r.ctx, r.tape
    mxfp8, delayed = ctx.fp8_recipe == "mxfp8", ctx.fp8_recipe == "delayed"
    d = q_width // heads
    groups = kv_width // d

    def quantized(width: int, n: int) -> int:
        elements = ctx.tokens * width
        if not mxfp8:
            return elements
        one = width // n
        rows, columns = -(-(one // 32) // 4) * 4, -(-one // 128) * 128
        return 2 * elements + ctx.tokens * n * rows + ctx.tokens // 32 * n * columns

    value_head = v_width // groups
    nbytes = quantized(q_width, heads) + quantized(kv_width, groups) + quantized(v_width, groups)
    copy = tape.tensor("query, key and value in fp8", nbytes, grad=False, item=1)
    statistics = softmax_statistics(r, ctx.tokens * heads, fp8=True)
    small = tape.tensor("attention output in fp8", ctx.tokens * heads * value_head, grad=False, item=1)
    also = (copy, *statistics, *((small,) if delayed else ()))
    backward = 4 * ctx.tokens * q_width + 4 * ctx.tokens * heads + quantized(heads * value_head, heads)
    if delayed:
        backward += ctx.tokens * (q_width + kv_width + v_width)
    out = tape.make(
        "core_attention output", qkv, out_bytes, saves=also, save_output=not delayed, also=also,
        backward_workspace=backward,
    )
    return tape.make("core_attention output [s, b]", out, out_bytes, alias=True) if batch_first else out


def _softmax(
    r: Recorder, scores: Tensor, elements: int, sinks: int, made: Tensor | None, *, window: bool, te: bool
) -> Tensor:
    """torch's softmax of ``elements`` scores and ``sinks`` more, one column (``fused_softmax.py:
    FusedScaleMaskSoftmax.forward_torch_softmax, SoftmaxOne``, TE ``softmax.py``, ``backends.py:
    UnfusedDotProductAttention.forward``). ``made``: the mask that Transformer Engine's attention has made.

    16-bit scores are cast to fp32 first, and the copy is masked in place; else a view of the GEMM's output is.
    Transformer Engine has joined the column of sinks to ``scores``; megatron-core does so after masking.
    """
    ctx, tape = r.ctx, r.tape
    wide = ctx.act == 2 and (te or ctx.attention_softmax_in_fp32)
    width = 4 if wide else ctx.act
    x, whole = scores, elements + sinks
    if te:
        elements = whole
    if wide:
        x = tape.make("attention scores fp32", x, 4 * elements)
    masked, view = x, not wide and not (sinks and te)
    causal = not (window or sinks or (te and ctx.packed))
    mask = _te_mask(r, made, causal=causal) if made else _causal_mask(r, window=window)
    x = _fill(r, x, mask, view)
    if sinks and not te:
        x = tape.make("attention scores with sink", x, whole * width)
    name = "attention probabilities fp32" if wide else "attention probabilities"
    probs = tape.make(name, x, whole * width, save_output=True)
    if wide:
        probs = tape.make("attention probabilities", probs, elements * ctx.act)
    tape.keep_alive(masked, *([mask] if mask else []))  # variables, which matters where nothing is saved for backward
    return probs


def _full_mask(r: Recorder) -> Tensor:
    """The boolean mask [s, s] that Transformer Engine makes from int32 distances in each layer, whichever softmax
    follows (``dot_product_attention/utils.py: get_full_mask``)."""
    nbytes = (r.ctx.seq * r.ctx.cp) ** 2
    mask = r.tape.tensor("attention mask", nbytes, grad=False)
    r.tape.op("attention mask", (), mask, workspace=14 * nbytes)
    return mask


def _te_mask(r: Recorder, made: Tensor, *, causal: bool) -> Tensor:
    """The mask that ``masked_fill_`` saves: a causal one is ``made`` joined with the mask that all layers share; masks
    of windows, sinks and packed sequences are ``made`` itself (TE ``softmax.py: forward_torch_softmax``)."""
    if not causal:
        return made
    r.keep(Scratch.CAUSAL_MASK, made.bytes)
    mask = r.tape.tensor("causal mask", made.bytes, grad=False)
    r.tape.op(mask.name, (made,), mask)
    return mask


def _causal_mask(r: Recorder, *, window: bool) -> Tensor | None:
    """The boolean mask [s, s] of the local unfused softmax, or None if it is counted elsewhere.

    Each layer makes one from fp32 masks (a window's from boolean ones), and autograd saves it; before 0.16 all layers
    shared a cached mask. A causal mask from the data loader is counted with the batch
    (``workspaces.batch.batch_bytes``).
    Source: ``transformer/utils.py: get_default_causal_mask, get_sliding_window_causal_mask``.
    """
    ctx, tape = r.ctx, r.tape
    nbytes = (ctx.seq * ctx.cp) ** 2
    if not MASK_MADE_BY_EACH_LAYER(ctx.impl):
        r.keep(Scratch.CAUSAL_MASK, nbytes)
        return None
    if ctx.impl.create_attention_mask and not window:
        return None
    mask = tape.tensor("causal mask", nbytes, grad=False)
    tape.op("causal mask", (), mask, workspace=(3 if window else 7) * nbytes)
    return mask


def _fill(r: Recorder, scores: Tensor, mask: Tensor | None, view: bool) -> Tensor:
    """``masked_fill_``: in place in forward, a separate gradient in backward; two more temporaries if it masks a
    ``view`` (PyTorch ``torch/csrc/autograd/functions/tensor.cpp: CopySlices::apply_impl``). ``mask`` is None if it is
    counted elsewhere."""
    filled = r.tape.make(
        "masked scores", scores, 0, saves=(mask,) if mask else (),
        backward_workspace=2 * scores.grad_bytes if view else 0,
    )
    filled.grad_bytes = scores.grad_bytes
    return filled


def attention_kernel(r: Recorder, *, sink: bool = False, equal_heads: bool = True, window: bool = False) -> str:
    """ "flash", "fused" or "unfused": the backend that Transformer Engine selects for these tensors.

    Source: TE ``dot_product_attention/utils.py: get_attention_backend``. Neither FlashAttention nor cuDNN supports
    fp32; FlashAttention supports no sink; FlashAttention 2, before Hopper, needs values as wide as keys
    (``equal_heads``), to which later releases pad them (``dot_product_attention.py: _pad_qkv_head_dim``). cuDNN
    supports no ``window`` with dropout, and no sink where only deterministic algorithms are allowed. A run for which no
    backend is left is refused (``spec.rules.attention: check_kernels``).
    """
    ctx, chosen = r.ctx, r.ctx.impl.attention_kernel
    if fp8_attention(r):
        return "fused"
    if chosen == "unfused" or ctx.params_dtype == "fp32":
        return "unfused"
    if ctx.impl.attention_backend == "auto":
        takes_flash = not sink and (equal_heads or FLASH_PADS_VALUES(ctx.impl))
        takes_fused = ctx.impl.cudnn_attends(sink=sink)
        if not (takes_flash if chosen == "flash" else takes_fused):
            chosen = "flash" if takes_flash else "fused" if takes_fused else "unfused"
    if chosen == "fused" and window and ctx.attention_dropout:
        return "unfused" if sink else "flash"
    return chosen


def fused_softmax(r: Recorder, heads: int, sink: bool, *, te: bool) -> bool:
    """Whether a masked-softmax kernel runs. Source: ``fused_softmax.py:
    FusedScaleMaskSoftmax.is_kernel_available``, TE ``softmax.py`` (the same name)."""
    ctx = r.ctx
    s = ctx.seq * ctx.cp
    # Transformer Engine's has a separate switch: the environment variable NVTE_MASKED_SOFTMAX_FUSION, on by default.
    if not (te or ctx.impl.masked_softmax_fusion) or ctx.act != 2 or sink or (ctx.batch * heads) % 4:
        return False
    return 16 < s < 16384 and s % 8 == 0 if te else 16 < s <= 4096 and s % 4 == 0


def sequences_first(r: Recorder) -> bool:
    """Whether megatron-core copies query, key and value to [b, s, a, d]; with one sequence that is a view."""
    ctx = r.ctx
    return ctx.rotary and rotation_fused(ctx) and ctx.batch > 1 and not ATTENTION_TOKENS_FIRST(ctx.impl)


def _contiguous(r: Recorder, qkv: tuple[Tensor, ...], q_bytes: int, kv_bytes: int) -> tuple[Tensor, Tensor]:
    """Contiguous copies: of the query, and of key and value together."""
    query, rest = r.tape.tensor("contiguous query", q_bytes), r.tape.tensor("contiguous key and value", kv_bytes)
    r.tape.op("contiguous query, key and value", qkv, (query, rest))
    return query, rest


def _context_parallel(
    r: Recorder, qkv: tuple[Tensor, ...], *, heads: int, q_width: int, kv_bytes: int, out_bytes: int,
    kernel: str, batch_first: bool, recomputed: bool, causal: bool,
) -> Tensor:  # fmt: skip
    """Flash or fused attention over a sequence divided among c ranks (TE ``context_parallel.py``). ``kv_bytes``: of
    keys and values together. ``batch_first``: they are [b, s, a, d], and the output's gradient is copied to that layout
    for cuDNN.

    a2a (``AttnFuncWithCPAndQKVOA2A``): q, k and v are exchanged for all tokens of a / c heads, and saved in that form;
    the output is exchanged back and saved in both forms (the second by linear_proj).
    p2p (``AttnFuncWithCPAndKVP2P``): keys and values pass around a ring, and the last received are saved. Keys, values,
    output and statistics of every step stay until the outputs are summed in fp32; backward holds two pairs of (kv, dkv)
    buffers. Counted for the last rank of the ring: under a causal mask the others attend with half of their queries in
    some steps. Later releases sum after each step: while the receive buffer for the next keys and values is made, those
    of this step and the two before are alive, and the outputs of two steps; during a step's attention there is one
    buffer fewer, and the outputs of three steps.
    all_gather (``AttnFuncWithCPAndKVAllGather``): keys and values are gathered and reordered in both passes, and their
    gradients cover the whole sequence. Earlier releases save the two halves of the output in addition to the output;
    later ones make a second, empty output in forward.
    """
    ctx, tape = r.ctx, r.tape
    c = ctx.cp
    rows = ctx.tokens * heads
    q_bytes = ctx.tokens * q_width * ctx.act
    statistics = softmax_statistics(r, rows)
    exchanged = ctx.impl.cp_comm_type == "a2a"
    accumulate = _gradient_sums(r, kernel, heads, q_width, ranks=c if exchanged else 1)
    query, keys_values = qkv[0], qkv[1:]
    if exchanged:
        # Temporaries of an exchange: the contiguous send buffer, and the last tensor received before it is reordered.
        # Variables of the function hold its inputs, and in backward also all saved tensors.
        sent = q_bytes + kv_bytes + kv_bytes // 2
        whole = tape.make(
            "q, k, v of whole sequences", (query, *keys_values), q_bytes + kv_bytes, workspace=sent,
            saves=(query, *keys_values) if recomputed else (),
            backward_workspace=sent + q_bytes + kv_bytes + 2 * out_bytes,
        )
        out = tape.make(
            "attention output of whole sequences", whole, out_bytes, saves=(whole, *statistics), save_output=True,
            also=statistics, backward_workspace=accumulate,
        )
        result = tape.make(
            "core_attention output", out, out_bytes, workspace=2 * out_bytes, backward_workspace=2 * out_bytes
        )
        tape.keep_alive(query, *keys_values, whole)
        return result
    if ctx.impl.cp_comm_type == "all_gather":
        halves = tape.tensor("attention output of each step", out_bytes, grad=False)
        # Both gathered tensors, one of them copied in order. In backward also their gradients, those of each of the two
        # steps (2 c + 1 of 2 c chunks in all), and the reordered gradients.
        gathered, in_order = c * kv_bytes, c * kv_bytes * 3 // 2
        ordered = q_bytes + (6 * c - 1) * kv_bytes // 2 + largest(c * kv_bytes, accumulate) // 2
        if STEPS_OF_ALL_GATHER_DROPPED(ctx.impl):
            outputs = 2 if ALL_GATHER_MAKES_TWO_OUTPUTS(ctx.impl) else 1
            return tape.make(
                "core_attention output", (query, *keys_values), out_bytes, saves=(query, *keys_values, *statistics),
                save_output=True, also=statistics, backward_workspace=ordered,
                workspace=largest(gathered + outputs * out_bytes, in_order - out_bytes),
            )
        return tape.make(
            "core_attention output", (query, *keys_values), out_bytes, also=(halves, *statistics),
            saves=(query, *keys_values, halves, *statistics), backward_workspace=ordered,
            workspace=largest(gathered, in_order - 2 * out_bytes),
        )
    kv = tape.make("key and value ring buffer", keys_values, kv_bytes)
    step = out_bytes + 4 * rows
    # Packed sequences: the sum is in the output's dtype, each step attends to copies of halves of keys and values
    # (under a causal mask), and statistics are copied to be summed, those of each step transposed.
    copies = kv_bytes // 2 if ctx.packed and causal else 0
    around = (c - 1) * kv_bytes + c * step + (16 * rows if ctx.packed else 4 * out_bytes // ctx.act + 4 * rows)
    if RING_SUMS_EACH_STEP(ctx.impl):
        buffers = smallest(c, 4)
        around = (buffers - 1) * kv_bytes + 2 * step
        if c > 2:
            around = largest(around, (buffers - 2) * kv_bytes + 3 * step)
        else:
            # The last step is added to the first: statistics of the sum before and after, and temporaries made from
            # them and from those of both steps.
            around += 5 * 4 * rows
    around += copies
    gradient_copy = out_bytes if batch_first and kernel == "fused" else 0
    out = tape.make(
        "core_attention output", (query, kv), out_bytes,
        saves=(query, kv, *statistics, *(keys_values if recomputed else ())), save_output=True, also=statistics,
        workspace=around,
        backward_workspace=accumulate + 4 * kv_bytes + q_bytes + gradient_copy + (4 * rows if ctx.packed else 0),
    )
    tape.keep_alive(*keys_values)
    return out
