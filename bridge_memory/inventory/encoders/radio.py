"""RADIO in megatron-core's blocks with a projector, as Megatron Bridge's Nemotron-VL and Nemotron-Omni run it.

Source: megatron-core 0.19 ``models/vision/radio.py: RADIOViTModel.forward``, ``models/multimodal/llava_model.py:
LLaVAModel.forward, pixel_shuffle``, ``models/vision/multimodal_projector.py``; megatron-bridge 0.6.2
``models/nemotron_{vl,omni}/*_provider.py``: LayerNorm, biases, no sequence and no context parallelism, no
recomputation; fusions are the language model's.

An image of Nemotron-VL is cut into tiles of one size, a sequence each, and its positions are sampled from a random crop
of the table. Nemotron-Omni packs images, or pairs of frames, of any size into one row, and interpolates positions.
Class tokens go before each tile or image. Shapes: [s, tiles, h], or [n, 1, h].
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from bridge_memory.inventory.encoders.megatron import inside, recorded
from bridge_memory.inventory.encoders.ops import EncoderOps
from bridge_memory.inventory.encoders.vision import added
from bridge_memory.inventory.layer import record_parts
from bridge_memory.inventory.megatron.mlp import activation
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor

#: Modules by the names that LLaVAModel gives them.
VISION, PROJECTION = "vision_model", "vision_projection"
#: What runs before the layers.
STEM = tuple(f"{VISION}.{name}" for name in ("embedder", "video_embedder", "class_token", "position_embeddings"))


def images(t: EncoderOps) -> Any:
    """Tiles, images and steps of videos of the microbatch, each with class tokens."""
    return t.samples * sum(item.number * item.frames for item in t.run.items)


def rows(t: EncoderOps) -> Any:
    """Rows of the hidden states of layers: patches and class tokens."""
    return t.patches + images(t) * t.s.class_tokens


def held(t: EncoderOps) -> Any:
    """Bytes of the variables of ``RADIOViTModel.forward``: of tiles of one size ``pos_enc``; else the lists of images
    with positions (``chunks``) and of these before class tokens (``out``), and with pairs of frames those before
    positions (``embedded_chunks``). Also the input of the first layer, unless that saves it."""
    arrays = 1 if t.s.tiles else 2 + (t.s.temporal_patch_size > 1)
    frozen = t.r.ctx.adapters is None and not any(t.trains(module) for module in (*STEM, f"{VISION}.decoder.layers"))
    number = arrays * t.patches + (rows(t) if frozen else 0)
    return number * t.s.hidden_size * t.parameter_width


def stem(t: EncoderOps) -> Array:
    """Patches through a linear, whose output is gathered, plus positions, after class tokens."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    width, tp = t.parameter_width, t.r.ctx.tp
    t.parameter(f"{VISION}.class_token", (s.class_tokens, h))
    t.parameter(f"{VISION}.position_embeddings", (1, s.positions, h))
    inner = s.channels * s.patch_size**2
    part = divide(h, tp, "hidden_size of an encoder", "tensor_model_parallel_size")
    pixels = t.input("pixel values", n * inner, width, grad=False, counted=False)
    entering = t.copy("pixels by patch", pixels) if s.tiles else pixels
    embedders = [f"{VISION}.embedder"]
    if s.temporal_patch_size > 1:
        embedders.append(f"{VISION}.video_embedder")
    for at, name in enumerate(embedders):
        frames = s.temporal_patch_size if at else 1
        t.r.parameter(
            f"{name}.weight", (part, frames * inner), sharded=tp > 1, use=Use.ROUTER, trains=t._exception(name)
        )
    depth = s.temporal_patch_size
    video = depth > 1 and any(item.frames > 1 for item in t.run.items)
    embedder = embedders[video]
    inner *= depth if video else 1
    parts = [entering]
    if video:  # ``_apply_temporal_grouping``: pairs of frames, the last of which is a variable of ``forward``
        last = max(item.height * item.width for item in t.run.items)
        made = (("pixels by pair of frames", n - last), ("pixels of the last pair", last))
        parts = [t.make(name, (entering,), patches * inner, width) for name, patches in made]
    trains = t.trains(embedder)
    y = t.make(
        "embedded patches on this rank", parts, n * part, width, trains=trains,
        saves=[part.tensor for part in parts] if trains else (),
        backward_workspace=inner * part * width if trains else 0,
    )
    if tp > 1:
        y = t.make("embedded patches", (y,), n * h, width, workspace=n * h * width)
    if depth > 1:
        x = _positioned(t, t.copy("embedded patches of all images", y))
        t.keep_alive(y, parts[-1])
    else:
        x = _positioned(t, y)
    class_trains = t.trains(f"{VISION}.class_token")
    joined = t.make("patches after class tokens", (x,), rows(t) * h, width, trains=class_trains, alias=True)
    t.keep_alive(x)
    return t.copy("patches by position", joined) if s.tiles else joined


def _positioned(t: EncoderOps, x: Array) -> Array:
    """``RADIOViTModel.apply_pos_enc``: the table of positions in fp32, of which an image's are taken."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    trains = t.trains(f"{VISION}.position_embeddings")
    own = s.positions * h * t.parameter_width if trains else 0
    table = t.make("positions in fp32", (), s.positions * h, FP32, trains=trains, backward_workspace=own)
    if s.tiles:
        grid = t.constant("places in the table of positions", 2 * n, FP32)
        # ``grid_sampler_2d_backward`` makes a gradient of the table for each tile.
        every = t.spread("positions of all tiles", table, images(t) * s.positions * h)
        found = t.make("positions by tile, in fp32", (every, grid), n * h, FP32, saves=(table.tensor, grid.tensor))
        t.keep_alive(table)
        places = t.cast("positions by tile", found, x.width)
        t.keep_alive(found)
        return added(t, "patches and positions", x, places)
    # Image by image: to a square, of which the image's part is taken. The sums of those before wait.
    side = max((max(item.height, item.width) for item in t.run.items), default=0)
    patches = max((item.height * item.width for item in t.run.items), default=0)
    others = t.make("patches and positions of the other images", (x,), (n - patches) * h, x.width)
    square = t.make("positions of a square in fp32", (table,), side * side * h, FP32)
    t.keep_alive(table)
    narrow = t.cast("positions of a square", square, x.width)
    t.keep_alive(square)
    one = added(t, "patches and positions of an image", x, narrow)
    out = t.make("patches and positions", (others, one), n * h, x.width, alias=True)
    t.keep_alive(x, others, one)
    return out


def layer(t: EncoderOps, x: Array) -> Array:
    """A TransformerLayer of megatron-core (``vit_layer_specs.py``)."""
    s, n, h = t.s, rows(t), t.s.hidden_size
    attention = AttentionSpec(s.num_heads, s.num_heads, s.head_dim, add_qkv_bias=True, add_output_bias=True)
    spec = LayerSpec(attention, MLPSpec(s.ffn_hidden_size, gated=False, activation="fast_gelu", add_bias=True))

    def body(r: Recorder) -> Tensor:
        return record_parts(r, spec, x.tensor)

    return recorded(t, f"{VISION}.decoder.layers", _inside(t, n, h), body, n * h)


def _inside(t: EncoderOps, number: Any, width: int) -> BlockContext:
    """The context of blocks, with the language model's fusions but that of biases and activations."""
    ctx, impl = inside(t, number, width), t.r.ctx.impl
    ctx.rotary = False
    ctx.impl = replace(impl, bias_activation_fusion=False, tp_comm_overlap=False)
    if t.s.tiles and t.run.items:
        ctx.packed, ctx.batch = False, images(t)
        ctx.seq = number // ctx.batch
    return ctx


def head(t: EncoderOps, x: Array) -> Array:
    """Class tokens dropped, 2 x 2 patches joined, and ``MultimodalProjector.forward``."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    if s.tiles:
        x = t.copy("patches by tile", x)
    y = t.slice("patches without class tokens", x, n * h)
    if s.temporal_patch_size > 1:
        y = t.copy("patches by pair of frames", y)
    if s.tiles or s.temporal_patch_size > 1:
        y = t.copy("patches, shuffled along rows", y)
        y = t.copy("patches, shuffled along columns", y)
        y = t.copy("joined patches by position", y)
    else:
        y = t.copy("joined patches of all images", y)
    out = _projected(t, y)
    if not s.tiles:
        t.keep_alive(x)  # of which ``chunks`` are views
    return out


def _projected(t: EncoderOps, x: Array) -> Array:
    """A norm fused with the first of two linears, of the language model's kind."""
    s = t.s
    wide, number = s.hidden_size * s.merge_size**2, t.patches // s.merge_size**2
    ctx = copy(_inside(t, number, s.out_size))
    ctx.normalization = t.r.ctx.normalization
    inner = divide(s.merger_size, ctx.tp, "merger_size of an encoder", "tensor_model_parallel_size")

    def body(r: Recorder) -> Tensor:
        at = f"{PROJECTION}.encoder"
        mid = r.column_linear(f"{at}.linear_fc1", x.tensor, wide, inner, bias=s.projector_bias, fused_norm=True)
        act = activation(r, f"{at} activation", mid, number, inner, gated=False, bias=s.projector_bias, kind="")
        return r.row_linear(f"{at}.linear_fc2", act, inner, s.out_size, bias=s.projector_bias)

    return recorded(t, PROJECTION, ctx, body, number * s.out_size)
