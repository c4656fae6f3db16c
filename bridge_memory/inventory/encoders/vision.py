"""Vision encoders of transformers, block by block: what is before the layers, a layer, what is after them.

Source: transformers 4.57 and 5.12, ``models/{qwen2_5_vl,glm4v}/modeling_*.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bridge_memory.inventory.encoders.ops import INT64, EncoderOps
from bridge_memory.inventory.torch.attention import rotate_halves
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.releases import ENCODERS_RETURN_WHAT_IS_SELECTED, ENCODERS_SHARE_TABLES, FAMILIES_OF_5


class Tables(NamedTuple):
    """Rotary tables, [n, d] each."""

    cos: Array
    sin: Array


def tables_of(t: EncoderOps, width: int) -> Tables:
    """The tables as an input of a layer; what holds them counts them."""
    elements = t.patches * t.s.head_dim
    cos, sin = (
        t.input(f"rotary table: {name}", elements, width, grad=False, counted=False)
        for name in ("cos", "sin")
    )
    return Tables(cos, sin)


def shared_tables(t: EncoderOps) -> None:
    """Tables in fp32, which layers save as they are (``Qwen2_5_VLVisionRotaryEmbedding.forward``); before, a table had
    the dtype of the module, and each layer saved a copy of its own in fp32."""
    if ENCODERS_SHARE_TABLES(t.hf.spec):
        for name in ("cos", "sin"):
            kept_by_layers(t, t.constant(f"rotary table: {name}", t.patches * t.s.head_dim, FP32))


def table_width(t: EncoderOps) -> int:
    """Bytes of an element of the tables of Qwen2.5-VL, GLM-4V and Qwen3-Omni."""
    return FP32 if ENCODERS_SHARE_TABLES(t.hf.spec) else t.parameter_width


def table_bytes(t: EncoderOps) -> Any:
    """Bytes of the tables, which the encoder's forward holds in the dtype that the module was cast to
    (megatron-core ``transformer/module.py: Float16Module`` casts buffers too); none if layers save them."""
    if ENCODERS_SHARE_TABLES(t.hf.spec) and t.layers_reached:
        return 0
    return 2 * t.patches * t.s.head_dim * table_width(t)


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
    """``Qwen2_5_VLVisionBlock.forward``, ``Glm4vVisionBlock.forward``: RMSNorms, joined queries, keys and values, a
    gated MLP. [n, h] -> [n, h]."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    tables = tables_of(t, table_width(t))
    entered = t.rms_norm("blocks.*.norm1", x, n, h)
    y = _attention(t, entered, tables, segment=segment, qkv_bias=qkv_bias, bias=bias)
    t.keep_alive(entered)
    x = added(t, "hidden states after attention", x, y)
    entered = t.rms_norm("blocks.*.norm2", x, n, h)
    y = gated_mlp(t, "blocks.*.mlp", entered, n, h, s.ffn_hidden_size, bias=bias)
    t.keep_alive(entered)
    return added(t, "hidden states after the MLP", x, y)


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


def added(t: EncoderOps, name: str, residual: Array, y: Array) -> Array:
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
    shared_tables(t)
    return windowed_patches(t)


def windowed_patches(t: EncoderOps) -> Array:
    """Patches, in the order of the windows."""
    return indexed(t, "patches by window", patch_embedding(t, bias=False), t.patches // t.s.merge_size**2)


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
    shared_tables(t)
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


# ---- layers with separate projections of queries, keys and values ----


def plain_mlp(t: EncoderOps, first: str, second: str, x: Array, n: Any, inner: int) -> Array:
    """``SiglipMLP.forward``: two linears around an activation."""
    h = t.s.hidden_size
    y = t.activation(f"{first} activation", t.dense(first, x, n, h, inner))
    return t.dense(second, y, n, inner, h)


# ---- SigLIP and Gemma 3's projector ----


def siglip_stem(t: EncoderOps) -> Array:
    """``SiglipVisionEmbeddings.forward``: patches plus learned positions, which all images share."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    pixels = t.input("pixel values", n * s.channels * s.patch_size**2, FP32, grad=False, counted=False)
    narrow = t.cast("pixel values in the dtype of the weights", pixels, t.parameter_width)
    kernel = h, s.channels, s.patch_size, s.patch_size
    x = t.convolution("embeddings.patch_embedding", narrow, n * h, kernel)
    name = "embeddings.position_embedding.weight"
    t.parameter(name, (s.positions, h))
    trains = t.trains(name)
    found = t.make(
        "position embeddings", (), s.positions * h, t.parameter_width, trains=trains,
        backward_workspace=s.positions * h * t.parameter_width if trains else 0,
    )
    out = t.make("patches with positions", (x, t.spread("positions of all images", found, n * h)), n * h, x.width,
                 alias=True)  # fmt: skip
    t.keep_alive(narrow, x, found)
    return out


def siglip_layer(t: EncoderOps, x: Array) -> Array:
    """``SiglipEncoderLayer.forward``."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    at = "encoder.layers.*"
    y = t.layer_norm(f"{at}.layer_norm1", x, n, h)
    query, key, value = (t.dense(f"{at}.self_attn.{name}_proj", y, n, h, h) for name in "qkv")
    out = t.attend_whole(query, key, value, n, None, aligned=True)
    t.keep_alive(y)
    y = t.dense(f"{at}.self_attn.out_proj", out, n, h, h)
    t.keep_alive(query, key, value, out)
    x = added(t, "hidden states after attention", x, y)
    y = t.layer_norm(f"{at}.layer_norm2", x, n, h)
    y = plain_mlp(t, f"{at}.mlp.fc1", f"{at}.mlp.fc2", y, n, s.ffn_hidden_size)
    return added(t, "hidden states after the MLP", x, y)


def gemma3_head(t: EncoderOps, x: Array) -> Array:
    """The last norm, and Bridge's ``Gemma3VLMultimodalProjector.forward``: patches are copied to images, pooled, normed
    by Transformer Engine and projected."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    rows = n // s.merge_size**2
    y = t.layer_norm("post_layernorm", x, n, h)
    if s.pooling_head:
        _pooling_head(t, y)
    images = t.copy("patches as images", y)
    t.keep_alive(y)
    pooled = t.make("pooled patches", (images,), rows * h, images.width, saves=(images.tensor,))
    t.keep_alive(images)
    name = "multi_modal_projector.mm_soft_embed_norm"
    t.parameter(f"{name}.weight", (h,))
    statistics = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
    rows_first = t.copy("pooled patches by row", pooled)
    normed = t.make(
        f"{name} output", (rows_first,), rows * h, pooled.width, saves=(rows_first.tensor, statistics),
        also=(statistics,), trains=t.trains(f"{name}.weight"),
    )
    return t.dense("multi_modal_projector.proj", normed, rows, h, s.out_size, bias=False)


def _pooling_head(t: EncoderOps, x: Array) -> None:
    """``SiglipMultiheadAttentionPoolingHead.forward``, whose output nobody takes: no gradient reaches its weights. Keys
    and values are projected together, of a copy of the images by position, and copied (torch ``nn/functional.py:
    multi_head_attention_forward, _in_projection_packed``)."""
    h, f = t.s.hidden_size, t.s.ffn_hidden_size
    for name, shape in (
        ("probe", (1, 1, h)), ("attention.in_proj_weight", (3 * h, h)), ("attention.in_proj_bias", (3 * h,)),
        ("attention.out_proj.weight", (h, h)), ("attention.out_proj.bias", (h,)), ("layernorm.weight", (h,)),
        ("layernorm.bias", (h,)), ("mlp.fc1.weight", (f, h)), ("mlp.fc1.bias", (f,)), ("mlp.fc2.weight", (h, f)),
        ("mlp.fc2.bias", (h,)),
    ):
        t.parameter(f"head.{name}", shape)
    t.tape.op("pooling head", x.tensor, (), workspace=5 * t.patches * h * t.compute_width)


# ---- Pixtral and Mistral 3's projector ----


def pixtral_stem(t: EncoderOps) -> Array:
    """``PixtralVisionModel.forward``: the patches of all images in one row, with a norm. The block mask and the tables
    are made here; layers save them."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    pixels = t.input("pixel values", n * s.channels * s.patch_size**2, FP32, grad=False, counted=False)
    narrow = t.cast("pixel values in the dtype of the weights", pixels, t.parameter_width)
    kernel = h, s.channels, s.patch_size, s.patch_size
    conv = t.convolution("patch_conv", narrow, n * h, kernel, bias=False)
    row = t.copy("patches of all images in a row", conv)
    x = t.rms_norm("ln_pre", row, n, h)
    for name in ("cos", "sin"):
        table = t.constant(f"rotary table: {name}", n * s.head_dim, t.parameter_width)
        kept_by_layers(t, table)
    if t.hf.attention != "flash_attention_2":
        kept_by_layers(t, t.constant("mask of the images", n * n, t.parameter_width))
    t.keep_alive(narrow, conv)
    return x


def kept_by_layers(t: EncoderOps, made: Array) -> None:
    """What the layers save is counted once, where it is made; nothing of it if no layer has a gradient."""
    if t.layers_reached:
        t.tape.op(f"{made.tensor.name}, kept by layers", made.tensor, (), saves=(made.tensor,), trains=True)


def pixtral_held(t: EncoderOps) -> Any:
    """``patch_embeds_list``; and the hidden states of every layer, which ``get_image_features`` asks for, or of
    the last one alone (``select_hidden_states``)."""
    asked = 0 if ENCODERS_RETURN_WHAT_IS_SELECTED(t.hf.spec) else t.s.num_layers
    return (1 + asked) * t.patches * t.s.hidden_size * t.compute_width


def pixtral_layer(t: EncoderOps, x: Array) -> Array:
    """``PixtralAttentionLayer.forward``."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    at = "transformer.layers.*"
    tables = tables_of(t, t.parameter_width)
    mask = t.input("mask of the images", n * n, t.parameter_width, grad=False, counted=False)
    y = t.rms_norm(f"{at}.attention_norm", x, n, h)
    query, key, value = (t.dense(f"{at}.attention.{name}_proj", y, n, h, h, bias=False) for name in "qkv")
    before = query, key
    query, key = rotate_halves(t, "query", query, *tables, share=1), rotate_halves(t, "key", key, *tables, share=1)
    t.keep_alive(*before)
    out = t.attend_whole(query, key, value, n, mask, aligned=t.per_sample % 8 == 0)
    t.keep_alive(y)
    y = t.dense(f"{at}.attention.o_proj", out, n, h, h, bias=False)
    t.keep_alive(query, key, value, out)
    x = added(t, "hidden states after attention", x, y)
    entered = t.rms_norm(f"{at}.ffn_norm", x, n, h)
    y = gated_mlp(t, f"{at}.feed_forward", entered, n, h, s.ffn_hidden_size, bias=False)
    t.keep_alive(entered)
    return added(t, "hidden states after the MLP", x, y)


def mistral3_head(t: EncoderOps, x: Array) -> Array:
    """``Mistral3MultiModalProjector.forward``: a norm, patches unfolded and merged image by image, two linears."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    rows, wide, out = n // s.merge_size**2, h * s.merge_size**2, s.out_size
    at = "multi_modal_projector"
    y = t.rms_norm(f"{at}.norm", x, n, h)
    unfolded = t.copy("patches unfolded", y)
    joined = t.copy("unfolded patches of all images", unfolded)
    t.keep_alive(y, unfolded)
    y = t.dense(f"{at}.patch_merger.merging_layer", joined, rows, wide, h, bias=False)
    t.keep_alive(joined)
    y = t.dense(f"{at}.linear_1", y, rows, h, out, bias=s.projector_bias)
    y = t.activation(f"{at}.act output", y)
    return t.dense(f"{at}.linear_2", y, rows, out, out, bias=s.projector_bias)


# ---- Qwen3-Omni ----


def qwen3_omni_stem(t: EncoderOps) -> Array:
    """``Qwen3OmniMoeVisionEncoder.forward``: patches plus positions, each the weighted sum of four learned ones, in
    fp32."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    shared_tables(t)
    x = patch_embedding(t, bias=True)
    t.parameter("pos_embed.weight", (s.positions, h))
    trains = t.trains("pos_embed.weight")
    index = t.constant("places of four positions", 4 * n, INT64)
    weights = t.constant("weights of four positions", 4 * n, FP32)
    found = t.make(
        "four positions", (index,), 4 * n * h, t.parameter_width, saves=(index.tensor,), trains=trains,
        backward_workspace=s.positions * h * t.parameter_width if trains else 0,
    )
    weighted = t.make("weighted positions", (t.widened(found, FP32), weights), 4 * n * h, FP32, saves=(weights.tensor,),
                      backward_workspace=0)  # fmt: skip
    total = t.summed("positions in fp32", weighted, n * h)
    narrow = t.cast("positions", total, x.width)
    out = t.add("patches with positions", x, narrow)
    t.keep_alive(x, index, weights, total, narrow)
    return out


def qwen3_omni_layer(t: EncoderOps, x: Array) -> Array:
    """``Qwen3OmniMoeVisionBlock.forward``."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    tables = tables_of(t, table_width(t))
    entered = t.layer_norm("blocks.*.norm1", x, n, h)
    y = _attention(t, entered, tables, segment=longest(t, whole=True), qkv_bias=True, bias=True)
    t.keep_alive(entered)
    x = added(t, "hidden states after attention", x, y)
    entered = t.layer_norm("blocks.*.norm2", x, n, h)
    y = plain_mlp(t, "blocks.*.mlp.linear_fc1", "blocks.*.mlp.linear_fc2", entered, n, s.ffn_hidden_size)
    t.keep_alive(entered)
    return added(t, "hidden states after the MLP", x, y)


def qwen3_deep_merger(t: EncoderOps, x: Array) -> Array:
    """A merger of ``merger_list``; the language model adds its features to the output of one of its first layers."""
    features = qwen3_merger(t, "merger_list.*", x, after=True)
    t.tape.op("features of the deep stack", features.tensor, (), saves=(features.tensor,), trains=True)
    return features


def qwen3_merger(t: EncoderOps, module: str, x: Array, *, after: bool = False) -> Array:
    """``Qwen3OmniMoeVisionPatchMerger.forward``; ``after``: it norms joined patches."""
    s, n = t.s, t.patches
    wide = s.hidden_size * s.merge_size**2
    rows = n // s.merge_size**2
    y = t.layer_norm(f"{module}.ln_q", x, rows if after else n, wide if after else s.hidden_size)
    y = t.dense(f"{module}.mlp.0", y, rows, wide, wide)
    y = t.activation(f"{module}.mlp.1 output", y)
    return t.dense(f"{module}.mlp.2", y, rows, wide, s.out_size)


def qwen3_omni_head(t: EncoderOps, x: Array) -> Array:
    y = qwen3_merger(t, "merger", x)
    t.keep_alive(x)
    return y
