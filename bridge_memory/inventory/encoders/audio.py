"""Audio encoders of transformers: ``models/qwen2_audio/modeling_qwen2_audio.py``, of transformers 4.57 and 5.12."""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.encoders.ops import EncoderOps
from bridge_memory.inventory.encoders.vision import added, kept_by_layers, plain_mlp
from bridge_memory.inventory.torch.ops import FP32, Array


def frames(t: EncoderOps) -> Any:
    """Rows of the hidden states: the second convolution halves the columns of the spectrogram."""
    return t.samples * sum(item.number * (item.frames // 2) for item in t.run.items)


def qwen2_audio_stem(t: EncoderOps) -> Array:
    """``Qwen2AudioEncoder.forward``: two convolutions, and positions that do not train. Bridge makes the mask of the
    padding, which layers save."""
    s, h, columns = t.s, t.s.hidden_size, t.patches
    rows = frames(t)
    given = t.input("spectrogram", columns * s.mel_bins, FP32, grad=False, counted=False)
    narrow = t.cast("spectrogram in the dtype of the weights", given, t.parameter_width)
    y = t.activation("conv1 activation", t.convolution("conv1", narrow, columns * h, (h, s.mel_bins, 3)))
    y = t.activation("conv2 activation", t.convolution("conv2", y, rows * h, (h, h, 3)))
    t.parameter("embed_positions.weight", (s.positions, h))
    out = t.make("frames with positions", (y,), rows * h, y.width, alias=True)
    t.keep_alive(narrow, y)
    if t.hf.attention != "flash_attention_2":
        kept_by_layers(t, t.constant("mask of the padding", rows * (columns_of(t) // 2), t.parameter_width))
    return out


def columns_of(t: EncoderOps) -> int:
    """Columns of the longest spectrogram."""
    return max((item.frames for item in t.run.items), default=0)


def qwen2_audio_layer(t: EncoderOps, x: Array) -> Array:
    """``Qwen2AudioEncoderLayer.forward``: queries, scaled, and keys and values copied to heads."""
    s, h, n = t.s, t.s.hidden_size, frames(t)
    mask = t.input("mask of the padding", n * (columns_of(t) // 2), t.parameter_width, grad=False, counted=False)
    at = "layers.*"
    y = t.layer_norm(f"{at}.self_attn_layer_norm", x, n, h)
    query = t.scale("queries, scaled", t.dense(f"{at}.self_attn.q_proj", y, n, h, h))
    query = t.copy("queries by head", query)
    key = t.copy("keys by head", t.dense(f"{at}.self_attn.k_proj", y, n, h, h, bias=False))
    value = t.copy("values by head", t.dense(f"{at}.self_attn.v_proj", y, n, h, h))
    out = t.attend_whole(query, key, value, n, mask, aligned=columns_of(t) // 2 % 8 == 0)
    t.keep_alive(y)
    y = t.dense(f"{at}.self_attn.out_proj", out, n, h, h)
    t.keep_alive(query, key, value, out)
    x = added(t, "hidden states after attention", x, y)
    y = t.layer_norm(f"{at}.final_layer_norm", x, n, h)
    y = plain_mlp(t, f"{at}.fc1", f"{at}.fc2", y, n, s.ffn_hidden_size)
    return added(t, "hidden states after the MLP", x, y)


def qwen2_audio_head(t: EncoderOps, x: Array) -> Array:
    """Frames pooled in pairs, the last norm and ``Qwen2AudioMultiModalProjector.forward``."""
    s, h = t.s, t.s.hidden_size
    rows = frames(t) // 2
    pooled = t.make("pooled frames", (x,), rows * h, x.width, saves=(x.tensor,))
    y = t.layer_norm("layer_norm", pooled, rows, h)
    return t.dense("multi_modal_projector.linear", y, rows, h, s.out_size)
