"""MoonViT with its projector, as Megatron Bridge runs it for Kimi-K2.5: the classes of the model's repository, which
``models/kimi_vl/modeling_kimi_k25_vl.py: KimiK25VLModel`` loads, whole on every rank and without recomputation.

Source: ``modeling_kimi_k25.py: MoonViT3dPretrainedModel, MoonViTEncoderLayer, tpool_patch_merger, PatchMergerMLP`` of
moonshotai/Kimi-K2.5. Attention is flash-attn's, all images in one row; without flash-attn Bridge runs eager attention.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.encoders.ops import EncoderOps
from bridge_memory.inventory.encoders.vision import added, kept_by_layers, plain_mlp
from bridge_memory.inventory.torch.ops import FP32, Array


def stem(t: EncoderOps) -> Array:
    """``MoonVision3dPatchEmbed.forward``: patches, plus a learned grid of positions that is interpolated to the size of
    each image; and the complex rotary table, [n, d/2], which the layers save."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    kernel = s.channels, s.patch_size, s.patch_size
    pixels = t.input("pixel values", n * s.channels * s.patch_size**2, FP32, grad=False, counted=False)
    narrow = t.cast("pixel values in the dtype of the weights", pixels, t.parameter_width)
    x = t.convolution("patch_embed.proj", narrow, n * h, (h, *kernel))
    t.parameter("patch_embed.pos_emb.weight", (s.positions, h))
    trains = t.trains("patch_embed.pos_emb")
    own = _once_an_image(t) * s.positions * h * t.parameter_width if trains else 0
    found = t.make("positions by image", (), n * h, t.parameter_width, trains=trains, backward_workspace=own)
    joined = t.cat("positions of all images", found)
    out = t.add("patches with positions", x, joined)
    t.keep_alive(narrow, x, found)
    kept_by_layers(t, t.constant("rotary table", n * s.head_dim, FP32))
    return out


def layer(t: EncoderOps, x: Array) -> Array:
    """``MoonViTEncoderLayer.forward``: LayerNorms, joined queries, keys and values, an MLP without a gate."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    at = "encoder.blocks.*"
    entered = t.layer_norm(f"{at}.norm0", x, n, h)
    joined = t.dense(f"{at}.wqkv", entered, n, h, 3 * h)
    query, key, value = t.split("queries, keys and values", joined, n * h, n * h, n * h)
    query, key = _rotated(t, query, key)
    out = t.attend(query, key, value, n, segment=0, split=False)
    y = t.dense(f"{at}.wo", out, n, h, h)
    t.keep_alive(entered, joined, query, key, value, out)
    x = added(t, "hidden states after attention", x, y)
    entered = t.layer_norm(f"{at}.norm1", x, n, h)
    y = plain_mlp(t, f"{at}.mlp.fc0", f"{at}.mlp.fc1", entered, n, s.ffn_hidden_size)
    t.keep_alive(entered)
    return added(t, "hidden states after the MLP", x, y)


def _rotated(t: EncoderOps, query: Array, key: Array) -> tuple[Array, Array]:
    """``apply_rope``: copies in fp32 as complex numbers, times the table, and back."""
    wide = t.cast("queries in fp32", query, FP32), t.cast("keys in fp32", key, FP32)
    turned = [t.scale(f"{x.tensor.name}, times the table", x) for x in wide]
    out = t.cast("rotated queries", turned[0], query.width), t.cast("rotated keys", turned[1], key.width)
    t.keep_alive(query, key, *wide, *turned)
    return out


def head(t: EncoderOps, x: Array) -> Array:
    """The last norm; patches put in the order of the merged ones and averaged over time, image by image; and the
    projector."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    rows, wide = n // s.merge_size**2, h * s.merge_size**2
    y = t.layer_norm("encoder.final_layernorm", x, n, h)
    by_image = t.slice("patches by image", y, n * h)
    summed = n * h * y.width if _once_an_image(t) > 1 else 0  # the gradient of a slice has the size of all patches
    turned = t.make("patches by merged patch", (by_image,), n * h, y.width, backward_workspace=summed)
    merged = t.copy("averaged patches", turned)
    t.keep_alive(y)
    y = t.layer_norm("mm_projector.pre_norm", merged, n, h)
    y = t.activation("mm_projector.proj.1 output", _by_image(t, "mm_projector.proj.0", y, rows, wide, wide))
    t.keep_alive(merged)
    return _by_image(t, "mm_projector.proj.2", y, rows, wide, s.out_size)


def _once_an_image(t: EncoderOps) -> int:
    """Gradients of a weight that are alive at once: of one image; with more of them also their sum so far and the new
    sum (``torch/csrc/autograd/input_buffer.cpp``)."""
    return 3 if t.samples * sum(item.number for item in t.run.items) > 1 else 1


def _by_image(t: EncoderOps, module: str, x: Array, rows: Any, inputs: int, outputs: int) -> Array:
    """A linear that runs for each image."""
    t.parameter(f"{module}.weight", (outputs, inputs))
    t.parameter(f"{module}.bias", (outputs,))
    trains = t.trains(f"{module}.weight")
    own = _once_an_image(t) * inputs * outputs * t.parameter_width
    return t.make(
        f"{module} output", (x,), rows * outputs, t.compute_width, saves=(x.tensor,) if trains else (), trains=trains,
        backward_workspace=own if trains else 0,
    )


def held(t: EncoderOps) -> Any:
    """Bytes of variables: the patches that enter the layers and the rotary table, unless layers save them; and pixels
    in the dtype of the weights, unless the first convolution does."""
    s, n = t.s, t.patches
    pixels = 0 if t.trains("patch_embed.proj") else n * s.channels * s.patch_size**2 * t.parameter_width
    return pixels + (0 if t.layers_reached else n * (s.hidden_size * t.parameter_width + s.head_dim * FP32))
