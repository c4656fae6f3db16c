"""Vision encoders of transformers, block by block: what is before the layers, a layer, what is after them.

Source: transformers 4.57 and 5.12, ``models/{qwen2_5_vl,glm4v}/modeling_*.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bridge_memory.inventory.encoders.ops import INT64, EncoderOps
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.releases import FAMILIES_OF_5


class Tables(NamedTuple):
    """Rotary tables, [n, d] each."""

    cos: Array
    sin: Array


def tables_of(t: EncoderOps) -> Tables:
    """The tables as an input of a layer; what holds them counts them."""
    elements = t.patches * t.s.head_dim
    cos, sin = (
        t.input(f"rotary table: {name}", elements, t.parameter_width, grad=False, counted=False)
        for name in ("cos", "sin")
    )
    return Tables(cos, sin)


def table_bytes(t: EncoderOps) -> Any:
    """Bytes of the tables, which the encoder's forward holds in the dtype that the module was cast to
    (megatron-core ``transformer/module.py: Float16Module`` casts buffers too)."""
    return 2 * t.patches * t.s.head_dim * t.parameter_width


def patch_embedding(t: EncoderOps, *, bias: bool) -> Array:
    """``Qwen2_5_VisionPatchEmbed.forward``: pixels, cast to the dtype of the weights, through a convolution whose
    stride is its kernel."""
    s = t.s
    kernel = s.channels, s.temporal_patch_size, s.patch_size, s.patch_size
    elements = t.patches * s.channels * s.temporal_patch_size * s.patch_size**2
    pixels = t.input("pixel values", elements, FP32, grad=False, counted=False)
    narrow = t.cast("pixel values in the dtype of the weights", pixels, t.parameter_width)
    out = t.convolution("patch_embed.proj", narrow, t.patches * s.hidden_size, (s.hidden_size, *kernel), bias=bias)
    t.keep_alive(narrow)
    return out


def gated_layer(t: EncoderOps, x: Array, *, segment: int, qkv_bias: bool, bias: bool) -> Array:
    """``Qwen2_5_VLVisionBlock.forward``, ``Glm4vVisionBlock.forward``: RMSNorms, joined queries, keys and values, a gated
    MLP. [n, h] -> [n, h]."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    tables = tables_of(t)
    entered = t.rms_norm("blocks.*.norm1", x, n, h)
    y = _attention(t, entered, tables, segment=segment, qkv_bias=qkv_bias, bias=bias)
    t.keep_alive(entered)
    x = _added(t, "hidden states after attention", x, y)
    entered = t.rms_norm("blocks.*.norm2", x, n, h)
    y = gated_mlp(t, "blocks.*.mlp", entered, n, h, s.ffn_hidden_size, bias=bias)
    t.keep_alive(entered)
    return _added(t, "hidden states after the MLP", x, y)


def _attention(
    t: EncoderOps, x: Array, tables: Tables, *, segment: int, qkv_bias: bool, bias: bool
) -> Array:
    """``Qwen2_5_VLVisionAttention.forward``."""
    n, h = t.patches, t.s.hidden_size
    joined = t.dense("blocks.*.attn.qkv", x, n, h, 3 * h, bias=qkv_bias)
    query, key, value = t.heads_of_qkv(joined, n)
    query, key = t.rotated_in_fp32(query, key, *tables)
    out = t.attend(query, key, value, n, segment=segment, split=True)
    y = t.dense("blocks.*.attn.proj", out, n, h, h, bias=bias)
    t.keep_alive(x, query, key, value, out)
    return y


def gated_mlp(t: EncoderOps, module: str, x: Array, n: Any, width: int, inner: int, *, bias: bool) -> Array:
    """``Qwen2_5_VLMLP.forward``: down(act(gate(x)) up(x))."""
    gate = t.dense(f"{module}.gate_proj", x, n, width, inner, bias=bias)
    act = t.activation(f"{module} activation of the gate", gate)
    up = t.dense(f"{module}.up_proj", x, n, width, inner, bias=bias)
    down = t.dense(f"{module}.down_proj", t.mul(f"{module} product", act, up), n, inner, width, bias=bias)
    t.keep_alive(x)
    return down


def _added(t: EncoderOps, name: str, residual: Array, y: Array) -> Array:
    out = t.add(name, residual, y)
    t.keep_alive(residual, y)
    return out


def indexed(t: EncoderOps, name: str, x: Array, rows: Any) -> Array:
    """``x[index]`` of ``rows`` rows: saves the index; backward writes the gradient into zeros of the size of x
    (``FunctionsManual.cpp: index_backward``)."""
    index = t.constant(f"{name}: index", rows, INT64)
    out = t.make(name, (x, index), x.elements, x.width, saves=(index.tensor,))
    t.keep_alive(index)
    return out


# ---- Qwen2.5-VL ----


def qwen2_5_stem(t: EncoderOps) -> Array:
    """Patches, in the order of the windows."""
    x = patch_embedding(t, bias=False)
    return indexed(t, "patches by window", x, t.patches // t.s.merge_size**2)


def qwen2_5_layer(t: EncoderOps, x: Array, *, whole: bool) -> Array:
    """``whole``: it attends to whole images."""
    return gated_layer(t, x, segment=longest(t, whole=whole), qkv_bias=True, bias=True)


def longest(t: EncoderOps, *, whole: bool) -> int:
    """Patches of the longest segment: a frame, or a window of it."""
    s = t.s
    frame = max((item.height * item.width for item in t.run.items), default=0)
    if whole or not s.window_size:
        return frame
    side = s.window_size // s.patch_size // s.merge_size * s.merge_size
    return max((min(item.height, side) * min(item.width, side) for item in t.run.items), default=0)


def qwen2_5_head(t: EncoderOps, x: Array) -> Array:
    """``Qwen2_5_VLPatchMerger.forward``, and the order of the patches restored."""
    s, n = t.s, t.patches
    wide = s.hidden_size * s.merge_size**2
    rows = n // s.merge_size**2
    y = t.rms_norm("merger.ln_q", x, n, s.hidden_size)
    y = t.dense("merger.mlp.0", y, rows, wide, wide)
    y = t.activation("merger.mlp.1 output", y)
    y = t.dense("merger.mlp.2", y, rows, wide, s.out_size)
    t.keep_alive(x)
    out = indexed(t, "features in the order of the patches", y, rows)
    if FAMILIES_OF_5(t.hf.spec):
        t.keep_alive(x, y)  # ``last_hidden_state`` of what it returns
    return out


# ---- GLM-4.5V ----


def glm4v_stem(t: EncoderOps) -> Array:
    """Patches with a norm, plus positions that are sampled from a learned grid in fp32
    (``Glm4vVisionEmbeddings.forward``)."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    x = t.rms_norm("post_conv_layernorm", patch_embedding(t, bias=True), n, h)
    name = "embeddings.position_embedding.weight"
    t.parameter(name, (s.positions, h))
    trains = t.trains(name)
    wide = t.make("grid of positions in fp32", (), s.positions * h, FP32, trains=trains)
    places = t.constant("places in the grid", 2 * n, FP32)
    sampled = t.make(
        "positions in fp32", (wide, places), n * h, FP32, saves=(wide.tensor, places.tensor),
    )
    narrow = t.cast("positions", sampled, x.width)
    out = t.add("patches with positions", x, narrow)
    t.keep_alive(x, wide, places, sampled, narrow)
    return out


def glm4v_layer(t: EncoderOps, x: Array) -> Array:
    return gated_layer(t, x, segment=longest(t, whole=True), qkv_bias=t.s.qkv_bias, bias=False)


def glm4v_head(t: EncoderOps, x: Array) -> Array:
    """The last norm, the convolution that joins patches, and ``Glm4vVisionPatchMerger.forward``."""
    s, n, h, out = t.s, t.patches, t.s.hidden_size, t.s.out_size
    rows = n // s.merge_size**2
    y = t.rms_norm("post_layernorm", x, n, h)
    y = t.convolution("downsample", y, rows * out, (out, h, s.merge_size, s.merge_size))
    joined = y
    y = t.dense("merger.proj", y, rows, out, out, bias=False)
    y = t.layer_norm("merger.post_projection_norm", y, rows, out)
    y = t.activation("merger.act1 output", y)
    y = gated_mlp(t, "merger", y, rows, out, s.merger_size, bias=False)
    t.keep_alive(joined)
    return y
