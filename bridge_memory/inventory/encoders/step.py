"""Step-3.7's perception encoder with its projector, as Megatron Bridge runs it: images of one size, a sequence each.

Source: megatron-bridge 0.6.2 ``models/stepfun/modelling_step37/{vision_model,utils,image_insert_embedding}.py``, a
module of its own without parallelism and recomputation. Pixels come in the dtype of the weights.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.encoders.ops import EncoderOps
from bridge_memory.inventory.encoders.vision import added
from bridge_memory.inventory.torch.ops import Array

STEM = ("conv1", "ln_pre", "positional_embedding")


def stem(t: EncoderOps) -> Array:
    """``Step37VisionModel.forward`` before its blocks: patches plus learned positions, which all images share."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    pixels = t.constant("pixel values", n * s.channels * s.patch_size**2, t.parameter_width)
    x = t.convolution("conv1", pixels, n * h, (h, s.channels, s.patch_size, s.patch_size), bias=False)
    t.parameter("positional_embedding", (s.positions, h))
    trains = t.trains("positional_embedding")
    own = t.make(
        "positions", (), 0, t.parameter_width, trains=trains,
        backward_workspace=s.positions * h * t.parameter_width if trains else 0,
    )
    placed = t.make(
        "patches with positions", (x, t.spread("positions of all images", own, n * h)), n * h, x.width, alias=True
    )
    t.keep_alive(pixels)
    return t.layer_norm("ln_pre", placed, n, h)


def layer(t: EncoderOps, x: Array) -> Array:
    """``EncoderVisionBlock.forward``: the output of attention and of the MLP are multiplied with a weight a channel."""
    s, n, h = t.s, t.patches, t.s.hidden_size
    at = "transformer.resblocks.*"
    y = _attention(t, f"{at}.attn", t.layer_norm(f"{at}.ln_1", x, n, h))
    x = added(t, "hidden states after attention", x, _scaled(t, f"{at}.ls_1", y))
    entered = t.layer_norm(f"{at}.ln_2", x, n, h)
    inner = t.dense(f"{at}.mlp.c_fc", entered, n, h, s.ffn_hidden_size)
    y = t.dense(f"{at}.mlp.c_proj", _quick_gelu(t, f"{at}.mlp", inner), n, s.ffn_hidden_size, h)
    t.keep_alive(entered)
    return added(t, "hidden states after the MLP", x, _scaled(t, f"{at}.ls_2", y))


def _scaled(t: EncoderOps, name: str, x: Array) -> Array:
    """``EncoderLayerScale.forward``."""
    t.parameter(f"{name}.gamma", (t.s.hidden_size,))
    out = t.mul_weight(f"{name} output", x, f"{name}.gamma")
    t.keep_alive(x)
    return out


def _quick_gelu(t: EncoderOps, name: str, x: Array) -> Array:
    """transformers ``activations.py: QuickGELUActivation``: x sigmoid(1.702 x)."""
    gate = t.saves_output(f"{name} gate", t.scale(f"{name} input, scaled", x))
    return t.mul(f"{name} activation", x, gate)


def _attention(t: EncoderOps, at: str, x: Array) -> Array:
    """``EncoderVisionAttention.forward``."""
    n, h = t.patches, t.s.hidden_size
    t.parameter(f"{at}.in_proj_weight", (3 * h, h))
    t.parameter(f"{at}.in_proj_bias", (3 * h,))
    joined = t.linear(f"{at}.in_proj", x, n, h, 3 * h, bias=True, declare=False)
    query, key, value = t.split("queries, keys and values", joined, n * h, n * h, n * h)
    query, key = _rotated(t, "query", query), _rotated(t, "key", key)
    out = t.attend(query, key, value, n, segment=0, split=False)
    t.keep_alive(x)
    y = t.dense(f"{at}.out_proj", out, n, h, h)
    t.keep_alive(joined, query, key, value, out)
    return y


def _rotated(t: EncoderOps, name: str, x: Array) -> Array:
    """``apply_rotary_emb``: x cos + rotated(x) sin, of tables that every call makes for one image, each product times
    a scale; the sum is concatenated with two empty parts of the head."""
    table = t.s.positions * t.s.head_dim
    cos = t.constant(f"{name}: cosines", table, t.parameter_width)
    straight = t.scale(f"{name} times cosines, scaled", t.mul(f"{name} times cosines", x, cos))
    half = x.elements // 2
    even, odd = t.slice(f"{name}: even", x, half), t.slice(f"{name}: odd", x, half)
    turned = t.cat(f"{name}: turned", t.scale(f"{name}: odd, negated", odd), even)
    sin = t.constant(f"{name}: sines", table, t.parameter_width)
    crossed = t.scale(f"{name} times sines, scaled", t.mul(f"{name} times sines", turned, sin))
    t.keep_alive(straight)
    both = t.add(f"{name} rotated", straight, crossed)
    out = t.cat(f"{name} rotated, joined", both)
    t.keep_alive(both)
    return out


def head(t: EncoderOps, x: Array) -> Array:
    """Two convolutions with stride 2 over the patches of an image, and ``align_projector``."""
    s, h = t.s, t.s.hidden_size
    rows = t.patches // s.merge_size**2
    y = t.convolution("vit_downsampler1", x, 4 * rows * 2 * h, (2 * h, h, 3, 3))
    y = t.convolution("vit_downsampler2", y, rows * 4 * h, (4 * h, 2 * h, 3, 3))
    return t.dense("align_projector", y, rows, 4 * h, s.out_size, bias=s.projector_bias)


def held(t: EncoderOps) -> Any:
    """Bytes of ``hidden_state`` of ``Step37VisionModel.forward`` while its blocks run, unless they save it."""
    return 0 if t.layers_reached else t.patches * t.s.hidden_size * t.parameter_width


def inserted(t: EncoderOps, found: Array, given: Array) -> Array:
    """``ImageInsertEmbedding.insert_features``: token embeddings [s, b, h], cloned, and the features of each image
    written into them."""
    cloned = t.copy("token embeddings, cloned", found)
    by_image = t.in_place("features by image", given)
    out = t.written("embeddings with features", cloned, by_image)
    t.keep_alive(found, given)
    return out
