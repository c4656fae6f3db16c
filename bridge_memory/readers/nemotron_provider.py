"""The encoders of Megatron Bridge's Nemotron-VL and Nemotron-Omni providers, whose sizes are in their code.

Source: megatron-bridge 0.6.2 ``models/nemotron_vl/nemotron_vl_provider.py: NemotronVLModelProvider.provide``,
``models/nemotron_omni/nemotron_omni_provider.py: _build_vision_config, _build_vision_projection_config,
_build_sound_encoder``, megatron-core ``models/multimodal/llava_model.py: LLaVAModel.__init__``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from bridge_memory.readers.config_attributes import ConfigAttributes
from bridge_memory.spec import EncoderSpec, EncoderStructure

#: Providers of these models.
PROVIDERS = ("NemotronVLModelProvider", "NemotronOmniModelProvider", "NemotronNano12Bv2VLModelProvider")
#: RADIO ViT-H in patches of 16 pixels, with a table of positions for 2,048 x 2,048 of them.
HIDDEN, FFN, LAYERS, HEADS, PATCH, POSITIONS = 1280, 5120, 32, 16, 16, 128 * 128
#: Side of a tile and of a frame; and into how many of them ``NemotronNanoVLV2ImageProcessor`` cuts the largest image.
TILE, TILES = 512, 12
#: Inner width of Nemotron-VL's projector.
PROJECTOR = 20480


def encoders_of_nemotron(model: Any) -> tuple[EncoderSpec, ...]:
    """RADIO, and Parakeet if the provider has a sound encoder, each with its projector; none of another kind of vision
    model, or without the width of the language model."""
    width = getattr(model, "hidden_size", None)
    if getattr(model, "vision_model_type", None) != "radio" or type(width) is not int or width < 1:
        return ()
    found: tuple[EncoderSpec, ...] = (_radio(model, width),)
    config = getattr(model, "sound_config", None)
    if getattr(model, "has_sound", False) and isinstance(config, Mapping):
        found += _parakeet(model, config, width)
    return found


def videos_of(task_encoder: Any) -> dict[str, Any]:
    """Fields of a BatchSpec: the video and sound of a sample of ``NemotronOmniEnergonTaskEncoderConfig``, whose pairs
    of frames RADIO embeds (``models/nemotron_omni/data/collate_fn.py: _prepare_temporal_rows``)."""
    if not getattr(task_encoder, "use_temporal_video_embedder", False):
        return {}
    frames, seconds = getattr(task_encoder, "video_nframes", 0), getattr(task_encoder, "max_audio_duration", None)
    found: dict[str, Any] = {"images_per_sample": 0, "video_frames": frames, "image_size": f"{TILE}x{TILE}"}
    return found if seconds is None else {**found, "audio_seconds": seconds}


def _projector(model: Any, inputs: int, inner: int, width: int) -> tuple[int, int]:
    """(parameters, of which tensor parallelism shards) of a norm and two linears of the language model's kind."""
    bias = bool(getattr(model, "add_bias_linear", False))
    norm = inputs * (2 if getattr(model, "normalization", "RMSNorm") == "LayerNorm" else 1)
    sharded = inputs * inner + inner * width + (inner if bias else 0)
    return norm + sharded + (width if bias else 0), sharded


def _radio(model: Any, width: int) -> EncoderSpec:
    omni = hasattr(model, "radio_force_eval_mode")
    c = ConfigAttributes(model, "model", None)
    fp8 = getattr(model, "fp8", None) or getattr(model, "use_vision_backbone_fp8_arch", not omni)
    tokens = c.count("vision_class_token_len") or 8
    if fp8:  # ``LLaVAModel.__init__``: a multiple of what fp8 asks for
        tokens = 32 if getattr(model, "fp8_recipe", None) == "mxfp8" else 16
    inner = c.count("vision_proj_ffn_hidden_size") or PROJECTOR
    depth = c.count("temporal_patch_dim") or 1
    separate = bool(getattr(model, "separate_video_embedder", False)) and depth > 1
    pixels = 3 * PATCH**2
    embedders = HIDDEN * pixels * (1 + depth if separate else depth)
    linears = HIDDEN * 3 * HIDDEN + 3 * HIDDEN + HIDDEN * HIDDEN + 2 * HIDDEN * FFN + FFN
    sharded = embedders + LAYERS * linears
    block = linears + 2 * HIDDEN + 4 * HIDDEN  # biases of row-parallel linears, and two norms
    projector, projector_sharded = _projector(model, 4 * HIDDEN, inner, width)
    dynamic = bool(getattr(model, "dynamic_resolution", False))
    structure = EncoderStructure(
        kind="radio", hidden_size=HIDDEN, ffn_hidden_size=FFN, num_layers=LAYERS, num_heads=HEADS, out_size=width,
        merger_size=inner, patch_size=PATCH, temporal_patch_size=depth, merge_size=2, positions=POSITIONS,
        class_tokens=tokens, image_size=0 if dynamic else TILE, tiles=0 if dynamic else TILES,
        projector_bias=bool(getattr(model, "add_bias_linear", False)),
    )
    return EncoderSpec(
        "model.vision_model_type", (tokens + POSITIONS) * HIDDEN + embedders + LAYERS * block + projector,
        sharded + projector_sharded, structure, (), projector, projector_sharded,
    )


def _parakeet(model: Any, config: Mapping[str, Any], width: int) -> tuple[EncoderSpec, ...]:
    """transformers' ``ParakeetEncoder``, whole on every rank, and Megatron's projector."""
    keys = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_mel_bins", "subsampling_factor")
    sizes: list[Any] = [config.get(key) for key in keys]
    if any(type(n) is not int or n < 1 for n in sizes):
        return ()
    h, layers, f, bins, factor = sizes
    bias = 1 if config.get("convolution_bias", False) else 0  # of linears too: ``BridgeSoundEncoder``
    own = ConfigAttributes(SimpleNamespace(**config), "model.sound_config", None)
    kernel, channels = own.size("conv_kernel_size", 9), own.size("subsampling_conv_channels", 256)
    feed_forward = 2 * h * f + bias * (f + h)
    attention = 5 * h * h + 4 * bias * h + 2 * h
    convolution = 3 * h * h + h * kernel + bias * 4 * h + 2 * h
    stages = factor.bit_length() - 1
    subsampling = 10 * channels + (stages - 1) * (10 * channels + channels * channels + channels)
    subsampling += (channels * (bins // factor) + 1) * h
    encoder = layers * (2 * feed_forward + attention + convolution + 10 * h) + subsampling
    c = ConfigAttributes(model, "model", None)
    inner = c.count("sound_projection_hidden_size") or 4096
    projector, sharded = _projector(model, c.count("sound_hidden_size") or h, inner, width)
    return (EncoderSpec("model.sound_config", encoder + projector, sharded, None, (), projector, sharded),)
