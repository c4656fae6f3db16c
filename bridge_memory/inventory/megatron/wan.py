"""Wan as Megatron Bridge implements it: video patches, modulated by the timestep, which attend to a text.

Source: megatron-bridge 0.6.2 ``diffusion/models/wan/{wan_model,wan_layer_spec,wan_step}.py``,
``diffusion/models/common/dit_attention.py``, ``diffusion/common/flow_matching/flow_matching_pipeline.py``. T patches of
this context-parallel rank, T_sp under sequence parallelism, S of all; X tokens of the text, of width w.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.attention import attend_to_text, core_attention, rope_of
from bridge_memory.inventory.megatron.mlp import dense_mlp
from bridge_memory.releases import QKV_OUTPUT_HELD
from bridge_memory.spec import AttentionSpec, DiffusionSpec, LayerSpec, MLPSpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor

FP32 = 4


def record_wan_layer(r: Recorder, layer: LayerSpec, x: Tensor) -> Tensor:
    """``WanLayerWithAdaLN.forward``: [T_sp, h] -> [T_sp, h]. Modulations are expanded views, whose gradients, as large
    as the hidden states, wait until the layer's first operation has its backward."""
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MLPSpec)
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    h, size = ctx.hidden_size, ctx.tokens_sp * ctx.hidden_size * ctx.act
    tape.part = Part.ATTENTION
    r.parameter("adaLN.modulation", (1, 6, h), use=Use.ROUTER)
    embedded = tape.input("embedding of the timestep", 0)
    embedded.grad_bytes = 6 * h * ctx.act
    summed = tape.make("modulations", embedded, 6 * h * ctx.act, save_output=True)
    shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = tape.views(
        "modulations, expanded", summed, *((f"{name} of the {block}", size) for block in ("attention", "MLP")
                                           for name in ("shift", "scale", "gate")),
    )  # fmt: skip
    entering = _modulated(r, "norm1", x, scale, shift)
    y = _self_attention(r, layer.mixer, entering)
    biased = tape.make("attention output + bias", y, size, alias=True)
    x = _gated(r, "hidden states after attention", x, biased, gate)
    r.norm_parameters("norm3", h)
    r.parameter("norm3.bias", (h,))
    normed = _layer_norm(r, "norm3", x, ctx.tokens_sp, size)
    y = _cross_attention(r, layer.mixer, normed)
    tape.keep_alive(biased, normed)
    crossed = tape.make("cross-attention output + bias", y, size, alias=True)
    x = tape.make("hidden states after cross-attention", (x, crossed), size, alias=True)
    tape.part = Part.MLP
    into_mlp = _modulated(r, "norm2", x, scale_mlp, shift_mlp)
    f = divide(layer.ffn.ffn_hidden_size, ctx.tp, "ffn_hidden_size", "tensor_model_parallel_size")
    y = dense_mlp(r, "mlp", into_mlp, h, f, layer.ffn)
    tape.keep_alive(crossed)
    biased = tape.make("MLP output + bias", y, size, alias=True)
    out = _gated(r, "layer output", x, biased, gate_mlp)
    tape.keep_alive(entering, into_mlp, biased)
    r.arrange(first, "cross_attention", "mlp", "full_self_attention", "adaLN", "norm3")
    return out


def _statistics(r: Recorder, name: str, rows: Any) -> tuple[Tensor, Tensor]:
    mean = r.tape.tensor(f"{name} mean", FP32 * rows, grad=False, item=4)
    return mean, r.tape.tensor(f"{name} rstd", FP32 * rows, grad=False, item=4)


def _modulated(r: Recorder, name: str, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``WanAdaLN.normalize_modulate``, one compiled kernel: norm(x) (1 + scale) + shift."""
    statistics = _statistics(r, name, r.ctx.tokens_sp)
    size = r.ctx.tokens_sp * r.ctx.hidden_size * r.ctx.act
    scaled = r.tape.make(f"{name} and scale", (x, scale), 0, saves=(x, *statistics), also=statistics)
    scaled.grad_bytes = size
    return r.tape.make(f"{name} output, modulated", (scaled, shift), size, alias=True)


def _gated(r: Recorder, name: str, residual: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    """``WanAdaLN.scale_add``, one compiled kernel: residual + gate y."""
    product = r.tape.make(f"{name}: gated part", (y, gate), 0, saves=(y,))
    product.grad_bytes = y.bytes
    return r.tape.make(name, (residual, product), y.bytes, alias=True)


def _layer_norm(r: Recorder, name: str, x: Tensor, rows: Any, size: Any) -> Tensor:
    """``nn.LayerNorm``."""
    statistics = _statistics(r, name, rows)
    return r.tape.make(f"{name} output", x, size, saves=(x, *statistics), also=statistics)


def _self_attention(r: Recorder, spec: AttentionSpec, x: Tensor) -> Tensor:
    """``DiTSelfAttention``."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    at, d = "full_self_attention", spec.kv_channels
    heads = divide(spec.num_attention_heads, ctx.tp, "num_attention_heads", "tensor_model_parallel_size")
    width, part = heads * d, ctx.tokens * heads * d * ctx.act
    mixed = r.column_linear(f"{at}.linear_qkv", x, ctx.hidden_size, 3 * width, bias=True)
    query, key, value = tape.views("split qkv", mixed, ("query", part), ("key", part), ("value", part))
    query = _norm_across_heads(r, f"{at}.q_layernorm", query, width, ctx.tokens, sliced=True)
    key = _norm_across_heads(r, f"{at}.k_layernorm", key, width, ctx.tokens, sliced=True)
    before = (query, key) if QKV_OUTPUT_HELD(ctx.impl) else ()
    query, key = (rope_of(r, f"{name} rope", x, part, d) for name, x in (("query", query), ("key", key)))
    contiguous = tape.make("contiguous value", value, part)
    out = core_attention(
        r, (query, key, contiguous), heads=heads, q_width=width, kv_width=width, v_width=width, out_width=width,
        grouped=False, causal=False,
    )
    y = r.row_linear(f"{at}.linear_proj", out, width, ctx.hidden_size, bias=True)
    tape.keep_alive(*before, query, key, value)
    r.arrange(first, *(f"{at}.{m}" for m in ("linear_proj", "linear_qkv", "q_layernorm", "k_layernorm")))
    return y


def _norm_across_heads(r: Recorder, name: str, x: Tensor, width: Any, rows: Any, *, sliced: bool) -> Tensor:
    """RMSNorm over the heads of all ranks, which are gathered for it and divided again. ``sliced``: x is a part of
    another tensor."""
    ctx, tape = r.ctx, r.tape
    whole, part = rows * width * ctx.tp * ctx.act, rows * width * ctx.act
    r.parameter(f"{name}.weight", (width * ctx.tp,), use=Use.ROUTER)
    if ctx.tp > 1:
        # A contiguous part is sent; what is received is concatenated (``mappings.py: _gather_along_last_dim``).
        x = tape.make(f"{name} input of all ranks", x, whole, workspace=part + whole, backward_workspace=0)
    if ctx.tp > 1 or sliced:
        x = tape.make(f"{name} input", x, whole)
    rstd = tape.tensor(f"{name} rstd", FP32 * rows, grad=False, item=4)
    x = tape.make(f"{name} output", x, whole, saves=(x, rstd), also=(rstd,))
    if ctx.tp > 1:
        mine = tape.make(f"{name} output of this rank", x, part, backward_workspace=part + whole)
        x = tape.make(f"{name} output, contiguous", mine, part)
    return x


@contextmanager
def _text_rows(r: Recorder) -> Iterator[None]:
    """Linears inside work on the text's tokens. Under sequence parallelism they gather the text of every rank, which
    has all of it."""
    outer = r.ctx
    ctx = copy(outer)
    assert outer.diffusion is not None
    rows = outer.diffusion.text_tokens // outer.cp
    ctx.tokens_sp = rows
    ctx.tokens = ctx.seq = rows * outer.tp if outer.sp else rows
    r.ctx = ctx
    yield
    r.ctx = outer


def _cross_attention(r: Recorder, spec: AttentionSpec, x: Tensor) -> Tensor:
    """``DiTCrossAttention``: queries of the patches, keys and values of the text."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    assert ctx.diffusion is not None
    at, d, wide = "cross_attention", spec.kv_channels, ctx.diffusion.text_width
    heads = divide(spec.num_attention_heads, ctx.tp, "num_attention_heads", "tensor_model_parallel_size")
    width = heads * d
    text = tape.input("text", 0)
    text.grad_bytes = text_gradient(ctx.diffusion, ctx)
    with _text_rows(r):
        rows = r.ctx.tokens
        mixed = r.column_linear(f"{at}.linear_kv", text, wide, 2 * width, bias=True)
    part = rows * width * ctx.act
    key, value = tape.views("split kv", mixed, ("key of the text", part), ("value of the text", part))
    query = r.column_linear(f"{at}.linear_q", x, ctx.hidden_size, width, bias=True)
    query = _norm_across_heads(r, f"{at}.q_layernorm", query, width, ctx.tokens, sliced=False)
    key = _norm_across_heads(r, f"{at}.k_layernorm", key, width, rows, sliced=True)
    contiguous = tape.make("contiguous value of the text", value, part)
    out = attend_to_text(r, (query, key, contiguous), heads=heads, width=width, rows=rows)
    y = r.row_linear(f"{at}.linear_proj", out, width, ctx.hidden_size, bias=True)
    tape.keep_alive(query, key, value)
    r.arrange(
        first, *(f"{at}.{m}" for m in ("linear_proj", "linear_q", "linear_kv", "q_layernorm", "k_layernorm"))
    )
    return y


# ---- before and after the layers ----


def patch_bytes(spec: DiffusionSpec, ctx: BlockContext, width: int) -> Any:
    """Bytes of the latents of this context-parallel rank, [T, c p], in elements of ``width`` bytes."""
    return ctx.tokens * spec.patch_elements * width


def held_by_the_step(spec: DiffusionSpec, ctx: BlockContext) -> Any:
    """Bytes that ``FlowMatchingPipeline.step`` holds while the model runs forward: latents and noisy latents in 16
    bits, noise in fp32, of the whole sequence. The model saves the noisy ones unless they were divided."""
    of_all = patch_bytes(spec, ctx, 1) * ctx.cp
    return of_all * (ctx.act + FP32) + (of_all * ctx.act if ctx.cp > 1 else 0)


def text_gradient(spec: DiffusionSpec, ctx: BlockContext) -> Any:
    """Bytes of the gradient of the embedded text."""
    return spec.text_tokens // ctx.cp * spec.text_width * ctx.act


def record_wan_inputs(r: Recorder, spec: DiffusionSpec) -> None:
    """Embeddings of patches, timestep and text, and the angles of the rotary embedding (``WanModel.forward``)."""
    ctx, tape = r.ctx, r.tape
    h, wide = ctx.hidden_size, spec.text_width
    kernel = (spec.in_channels, spec.patch_temporal, spec.patch_spatial, spec.patch_spatial)
    for name, shape in (
        ("patch_embedding", (h, *kernel)), ("text_embedding.0", (wide, spec.text_dim)),
        ("text_embedding.2", (wide, wide)), ("time_embedder.linear_1", (h, spec.freq_dim)),
        ("time_embedder.linear_2", (h, h)), ("time_proj", (6 * h, h)),
    ):
        r.parameter(f"{name}.weight", shape, use=Use.ROUTER)
        r.parameter(f"{name}.bias", shape[:1], use=Use.ROUTER)
    latents = tape.input("noisy latents", patch_bytes(spec, ctx, ctx.act), requires_grad=False)
    x = tape.make(
        "embedded patches", latents, 0 if ctx.sp else ctx.tokens * h * ctx.act, saves=(latents,),
        backward_workspace=h * spec.patch_elements * ctx.act, trains=True,
    )
    if ctx.sp:
        # This rank's part is a view of the whole, which its first layer keeps.
        others = tape.tensor("embedded patches of the other ranks", (ctx.tokens - ctx.tokens_sp) * h * ctx.act)
        tape.op("embedded patches, whole", x, (others,), saves=(others,))
        x.grad_bytes = ctx.tokens * h * ctx.act
        x = tape.make("embedded patches of this rank", x, ctx.hidden_bytes)
    _timestep(r, spec)
    rows = spec.text_tokens // ctx.cp
    given = tape.input("text, embedded", rows * spec.text_dim * ctx.act, requires_grad=False)
    first = tape.make("text_embedding.0 output", given, rows * wide * ctx.act, saves=(given,), trains=True,
                      backward_workspace=spec.text_dim * wide * ctx.act)
    act = tape.make("text_embedding.1 output", first, first.bytes, saves=(first,))
    text = tape.make("text", act, first.bytes, saves=(act,), save_output=True, trains=True,
                     backward_workspace=wide * wide * ctx.act)
    angles = ctx.tokens * ctx.cp * spec.head_dim * FP32
    table = tape.tensor("angles of the rotary embedding", angles, grad=False, item=4)
    tape.op("angles of the rotary embedding", text, table, saves=(table,), workspace=2 * angles)
    tape.output(x)


def _timestep(r: Recorder, spec: DiffusionSpec) -> None:
    """``ParallelTimestepEmbedding`` and ``time_proj``: one row each."""
    row, tape = r.ctx.hidden_size * r.ctx.act, r.tape
    waves = tape.input("waves of the timestep", spec.freq_dim * r.ctx.act, requires_grad=False)
    x = tape.make("time_embedder.linear_1 output", waves, row, saves=(waves,), trains=True)
    x = tape.make("time_embedder.act output", x, row, saves=(x,))
    x = tape.make("time_embedder.linear_2 output", x, row, saves=(x,), trains=True)
    x = tape.make("time_proj_act_fn output", x, row, saves=(x,))
    x = tape.make("time_proj output", x, 6 * row, saves=(x,), trains=True,
                  backward_workspace=6 * row * r.ctx.hidden_size)
    tape.keep_alive(x)


def record_wan_head(r: Recorder, spec: DiffusionSpec) -> None:
    """``Head`` and the loss of flow matching: the squared difference from noise - latents, in fp32."""
    ctx, tape = r.ctx, r.tape
    h, out = ctx.hidden_size, spec.out_elements
    r.parameter("head.modulation", (1, 2, h), use=Use.ROUTER)
    r.parameter("head.head.weight", (out, h), use=Use.ROUTER)
    r.parameter("head.head.bias", (out,), use=Use.ROUTER)
    size = ctx.tokens_sp * h * ctx.act
    x = tape.input("hidden states", ctx.hidden_bytes)
    normed = _layer_norm(r, "head.norm", x, ctx.tokens_sp, size)
    product = tape.make("head.norm output, scaled", normed, size, saves=(normed,), backward_workspace=size)
    moved = tape.make("head.head input", product, size, alias=True)
    tape.keep_alive(product)
    y = tape.make("prediction", moved, ctx.tokens_sp * out * ctx.act, saves=(moved,),
                  backward_workspace=h * out * ctx.act)
    if ctx.sp:
        y = tape.make("prediction of all ranks", y, ctx.tokens * out * ctx.act)
    wide = ctx.tokens * out * FP32
    target = tape.input("target", wide, requires_grad=False)
    prediction = tape.make("prediction in fp32", y, wide)
    loss = tape.make("squared difference", (prediction, target), wide, saves=(prediction, target))
    weighted = tape.make("weighted loss", loss, wide)
    tape.keep_alive(loss, weighted, target, y)
    tape.output(tape.make("loss of each patch", weighted, ctx.tokens * FP32))

