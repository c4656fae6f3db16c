"""Audio encoders of transformers: ``models/qwen2_audio/modeling_qwen2_audio.py``, of transformers 4.57 and 5.12, and
``models/qwen3_omni_moe/modeling_qwen3_omni_moe.py``, of 5.12."""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.encoders.ops import INT64, EncoderOps
from bridge_memory.inventory.encoders.vision import added, kept_by_layers, plain_mlp
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.spec.encoders import after_convolutions, audio_chunks, longest_window, padded_chunk


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


# ---- Qwen3-Omni ----


def _chunks(t: EncoderOps) -> list[int]:
    """Features of each chunk of one sample's sounds; chunks are padded to the longest before the convolutions."""
    return [n for item in t.run.items for n in audio_chunks(t.s, item) * item.number]


def qwen3_omni_frames(t: EncoderOps) -> Any:
    """Rows of the hidden states: features of all chunks without their padding."""
    return t.samples * sum(_chunks(t))


def qwen3_omni_held(t: EncoderOps) -> Any:
    """Variables of the encoder's forward: spectrograms, their chunks unless the first convolution saves them, convolved
    chunks (``padded_embeds``), and frames with positions (``padded_embed``)."""
    chunks, s = _chunks(t), t.s
    number, longest = t.samples * len(chunks), max(chunks, default=0)
    spectrograms = t.patches * s.mel_bins
    if not t.trains("conv2d1"):
        spectrograms = spectrograms + number * s.mel_bins * padded_chunk(s, t.run.items)
    made = number * longest * (s.channels * after_convolutions(s.mel_bins) + s.hidden_size)
    return (spectrograms + made) * t.compute_width


def qwen3_omni_stem(t: EncoderOps) -> Array:
    """``Qwen3OmniMoeAudioEncoder.forward`` before its layers: chunks of the spectrograms through three convolutions
    with stride 2 and a linear, plus positions that do not train; the padding is left out."""
    s, h, c = t.s, t.s.hidden_size, t.s.channels
    chunks = _chunks(t)
    number = t.samples * len(chunks)
    columns = padded_chunk(s, t.run.items)
    given = t.input("spectrogram", t.patches * s.mel_bins, FP32, grad=False, counted=False)
    narrow = t.cast("spectrogram in the dtype of the weights", given, t.parameter_width)
    bins = s.mel_bins
    y = padded = t.make("chunks of the spectrogram, padded", (narrow,), number * bins * columns, narrow.width)
    entering = 1
    for i in (1, 2, 3):
        bins, columns = (bins + 1) // 2, (columns + 1) // 2
        x = t.convolution(f"conv2d{i}", y, number * c * bins * columns, (c, entering, 3, 3))
        y, entering = t.activation(f"conv2d{i} activation", x), c
    joined = t.copy("convolved chunks, joined", y)
    t.keep_alive(y)  # a list of parts
    turned = t.copy("convolved chunks by frame", joined)
    out = t.dense("conv_out", turned, number * columns, c * bins, h, bias=False)
    t.keep_alive(joined)
    placed = t.make("frames with positions", (out,), number * columns * h, out.width, alias=True)
    t.keep_alive(out)
    rows = qwen3_omni_frames(t)
    index = t.constant("frames that are no padding", rows, INT64)
    found = t.make(
        "frames without padding", (placed, index), rows * h, placed.width, saves=(index.tensor,),
    )
    t.keep_alive(narrow, padded, y, placed, index)
    return found


def qwen3_omni_layer(t: EncoderOps, x: Array) -> Array:
    """``Qwen3OmniMoeAudioEncoderLayer.forward``: attention within windows of a few chunks."""
    s, h, n = t.s, t.s.hidden_size, qwen3_omni_frames(t)
    at = "layers.*"
    y = t.layer_norm(f"{at}.self_attn_layer_norm", x, n, h)
    query, key, value = (t.dense(f"{at}.self_attn.{name}_proj", y, n, h, h) for name in "qkv")
    out = t.attend(query, key, value, n, segment=longest_window(s, t.run.items), split=True)
    y_after = t.dense(f"{at}.self_attn.out_proj", out, n, h, h)
    t.keep_alive(y, query, key, value, out)
    x = added(t, "hidden states after attention", x, y_after)
    y = t.layer_norm(f"{at}.final_layer_norm", x, n, h)
    y = plain_mlp(t, f"{at}.fc1", f"{at}.fc2", y, n, s.ffn_hidden_size)
    return added(t, "hidden states after the MLP", x, y)


def qwen3_omni_head(t: EncoderOps, x: Array) -> Array:
    """The last norm and two linears."""
    s, h, n = t.s, t.s.hidden_size, qwen3_omni_frames(t)
    y = t.layer_norm("ln_post", x, n, h)
    y = t.activation("act output", t.dense("proj1", y, n, h, h))
    return t.dense("proj2", y, n, h, s.out_size)
