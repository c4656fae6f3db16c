"""Vision encoders that Megatron Bridge builds of megatron-core's modules: those of Qwen3-VL, Qwen3.5-VL and EXAONE 4.5.

Source: megatron-bridge 0.6.2 ``models/qwen_vl/modelling_qwen3_vl/{vision_model,transformer_block,attention,utils}.py``;
its configuration is made anew (``transformer_config.py: get_vision_model_config``): LayerNorm, no sequence and no
context parallelism, no fusions, no fp8, rotation in fp32. Tensor parallelism and full recomputation are the language
model's; of its selective recomputation the granularity is copied and the modules are not, so that it is attention's.
All frames are packed into one row of n patches, a sequence each. Shapes: [n, 1, h]. EXAONE 4.5's
(``models/exaone/exaone45/modelling_exaone45/{vision_model,transformer_config,utils}.py``) has Qwen2.5-VL's windows, a
sequence each in most layers, RMSNorms, a gated MLP, and fewer keys and values than queries.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from bridge_memory.inventory.encoders.ops import INT64, EncoderOps
from bridge_memory.inventory.encoders.vision import added, indexed, patch_embedding
from bridge_memory.inventory.layer import record_parts
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, PeftSpec
from bridge_memory.spec.encoders import features, pixels_of
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Repeated
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def inside(t: EncoderOps, rows: Any, width: int, normalization: str = "LayerNorm") -> BlockContext:
    """The context of the encoder's blocks: ``rows`` of ``width`` instead of the language model's tokens."""
    ctx = copy(t.r.ctx)
    ctx.hidden_size, ctx.normalization, ctx.rotary, ctx.rotary_dim = width, normalization, True, t.s.head_dim
    ctx.hidden_dropout = ctx.attention_dropout = 0.0
    ctx.fp8, ctx.fp8_param, ctx.fp8_attention, ctx.residual = None, False, False, ctx.act
    ctx.residual_streams, ctx.packed = 1, True
    ctx.seq = ctx.tokens = ctx.tokens_sp = rows
    ctx.batch, ctx.cp, ctx.ep = 1, 1, 1
    ctx.hidden_bytes = rows * width * ctx.act
    ctx.as_encoder(attention_again=t.attention_again)
    ctx.impl = replace(
        t.r.ctx.impl, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, tp_comm_overlap=False,
    )
    return ctx


def recorded(
    t: EncoderOps, module: str, ctx: BlockContext, body: Callable[[Recorder], Tensor], elements: Any
) -> Array:
    """What ``body`` records of a ``module`` of the encoder with its context."""
    r = t.r
    outer, before, first = r.ctx, (r.unquantized, r.frozen), len(r.rows)
    trains = t.trains(module)
    if outer.adapters is None or outer.adapters.scheme != "lora":
        ctx.adapters = None if trains else PeftSpec(scheme="frozen", target_modules=())
        r.frozen = not trains
    r.ctx, r.unquantized = ctx, True
    with r.tape.freezing(r.frozen):
        out = body(r)
    r.ctx, (r.unquantized, r.frozen) = outer, before
    if trains is (outer.adapters is not None):  # named where it is not as with the run's other weights
        r.rows[first:] = [
            Repeated(tuple(replace(p, trains=trains) for p in parameters), times)
            for parameters, times in r.rows[first:]
        ]
    return Array(out, elements, t.compute_width)


def qwen3_stem(t: EncoderOps) -> Array:
    """``Qwen3VLVisionModel.forward`` before its blocks: patches and interpolated positions, four of the table for each
    patch (``fast_pos_embed_interpolate``)."""
    s, n = t.s, t.patches
    x = patch_embedding(t, bias=True)
    elements = n * s.hidden_size
    t.parameter("pos_embed.weight", (s.positions, s.hidden_size))
    places = t.constant("positions of the corners", 4 * n, INT64)
    weights = t.constant("weights of the corners", 4 * n, t.parameter_width)
    trains = t.trains("pos_embed.weight")
    four = t.make(
        "position embeddings of the corners", (places,), 4 * elements, t.parameter_width, trains=trains,
        saves=(places.tensor,), backward_workspace=s.positions * s.hidden_size * t.parameter_width,
    )
    weighted = t.make("position embeddings, weighted", (four, weights), 4 * elements, four.width,
                      saves=(weights.tensor,))
    t.keep_alive(four)
    summed = t.make("position embeddings, summed", (weighted,), elements, four.width)
    repeated = t.copy("position embeddings of the frames", summed)
    ordered = t.copy("position embeddings by merged patches", repeated)
    joined = t.copy("position embeddings, joined", ordered)
    t.keep_alive(weighted, summed, ordered)
    return added(t, "patches and positions", x, joined)


def qwen3_layer(t: EncoderOps, x: Array) -> Array:
    """A TransformerLayer of megatron-core with ``Qwen3VLSelfAttention``."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    attention = AttentionSpec(
        s.num_heads, s.num_heads, s.head_dim, add_qkv_bias=True, add_output_bias=True, rotary_in_fp32=True
    )
    layer = LayerSpec(attention, MLPSpec(s.ffn_hidden_size, gated=False, activation="fast_gelu", add_bias=True))

    def body(r: Recorder) -> Tensor:
        return record_parts(r, layer, x.tensor)

    return recorded(t, "decoder.layers", inside(t, n, h), body, n * h)


def exaone_layer(t: EncoderOps, x: Array) -> Array:
    """A TransformerLayer of megatron-core, with the sequences of windows or of frames."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    attention = AttentionSpec(
        s.num_heads, s.num_query_groups or s.num_heads, s.head_dim, add_qkv_bias=True, add_output_bias=True
    )
    layer = LayerSpec(attention, MLPSpec(s.ffn_hidden_size, gated=True, activation="silu", add_bias=True))

    def body(r: Recorder) -> Tensor:
        return record_parts(r, layer, x.tensor)

    return recorded(t, "decoder.layers", inside(t, n, h, "RMSNorm"), body, n * h)


def exaone_head(t: EncoderOps, x: Array) -> Array:
    """The merger, whose rows are put in the order of the patches, split by image and concatenated."""
    s = t.s
    y = merger(t, "merger", x, normalization="RMSNorm")
    ordered = indexed(t, "features in the order of the patches", y, t.patches // s.merge_size**2)
    t.keep_alive(y)
    out = t.copy("features of all images", ordered)
    t.keep_alive(x, ordered)
    return out


def exaone_held(t: EncoderOps) -> Any:
    """Bytes of the angles [n, 1, 1, d] in fp32, a variable of ``Exaone45VisionModel.forward``."""
    return t.patches * t.s.head_dim * FP32


def deep_merger(t: EncoderOps, x: Array) -> Array:
    """A merger of ``deepstack_merger_list``; the language model adds its features after one of its first layers."""
    made = merger(t, "decoder.deepstack_merger_list.*", x, after=True)
    if t.dealt:
        made = gathered(t, made)
    t.tape.op("features of the deep stack", made.tensor, (), saves=(made.tensor,), trains=True)
    return made


def gathered(t: EncoderOps, x: Array) -> Array:
    """``AllGatherVisionEmbeddings``: the features of all context-parallel ranks, and these concatenated. Its backward
    sums the gradient in place and returns a part of it."""
    elements = t.samples * features(t.s, t.run.items) * t.s.out_size
    parts = t.make("features by context-parallel rank", (x,), elements, x.width, alias=True)
    return t.copy("features of all context-parallel ranks", parts)


def merger(
    t: EncoderOps, module: str, x: Array, *, after: bool = False, normalization: str = "LayerNorm"
) -> Array:
    """``Qwen3VLVisionPatchMerger.forward``; ``after``: it norms joined patches."""
    s, n = t.s, t.patches
    wide = s.hidden_size * s.merge_size**2
    rows = n // s.merge_size**2
    ctx = inside(t, rows, wide, normalization)

    def body(r: Recorder) -> Tensor:
        y = r.norm(f"{module}.patch_norm", x.tensor, wide if after else s.hidden_size, rows if after else n)
        mid = r.column_linear(f"{module}.linear_fc1", y, wide, wide // ctx.tp, bias=True)
        act = r.tape.make(f"{module} activation", mid, mid.bytes, saves=(mid,))
        out = r.row_linear(f"{module}.linear_fc2", act, wide // ctx.tp, s.out_size, bias=True)
        # ``gemm_bias_unfused_add`` of row-parallel linears (TE ``module/linear.py``).
        return r.tape.make(f"{module}.linear_fc2 output + bias", out, rows * s.out_size * ctx.act, alias=True)

    return recorded(t, module, ctx, body, rows * s.out_size)


def qwen3_head(t: EncoderOps, x: Array) -> Array:
    """The merger, and its output split by image and concatenated."""
    y = merger(t, "merger", x)
    out = t.copy("features of all images", y)
    t.keep_alive(x, y)
    return gathered(t, out) if t.dealt else out


def held(t: EncoderOps) -> Any:
    """Bytes of the variables of ``Qwen3VLVisionModel.forward``: the positions, and the angles [n, 1, 1, d] in fp32.
    Images that were dealt to ranks are a view of a copy of all pixels (``qwen3vl_cp_split``)."""
    pixels = t.samples * pixels_of(t.s, t.run.items) * FP32 if t.dealt else 0
    return pixels + t.patches * (t.s.hidden_size * t.compute_width + t.s.head_dim * FP32)
