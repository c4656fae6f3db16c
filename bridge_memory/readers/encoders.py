"""Multimodal configs: the language model, and the modality encoders with their projectors.

Encoders are counted (``EncoderSpec``) if the config states all their sizes. Shapes follow transformers'
``modeling_<model_type>.py``. Those that Megatron Bridge takes from transformers also have a structure, by which their
activations are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import isqrt
from typing import Any, NamedTuple

from bridge_memory.readers.fields import Fields, shown
from bridge_memory.readers.nested_defaults import nested_width
from bridge_memory.spec import EncoderSpec, EncoderStructure, SpecError
from bridge_memory.spec.encoders import after_convolutions
from bridge_memory.spec.unmodelled import ENCODER, Effect, Unmodelled

#: Keys of the language model's config, outermost first (an omni model's "thinker" is itself a wrapper).
_INNER = ("thinker_config", "text_config", "llm_config", "language_config")
#: Parts that Megatron Bridge does not build: it trains only the thinker of an omni model.
_NOT_BUILT = ("talker_config", "token2wav_config", "code2wav_config")
#: Nested configs that are no part of the model.
_NO_PART = ("quantization_config", "compression_config", "sparse_attention_config", "img_token_compression_config",
            "dual_chunk_attention_config", "preprocessor_config")
#: Wrappers whose tie_word_embeddings overrides the language model's (Megatron Bridge: models/qwen_vl/*_bridge.py,
#: exaone45_bridge.py, minimax_m3_bridge.py).
_OUTER_TIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "exaone4_5", "minimax_m3_vl")
#: Wrappers whose language model Megatron Bridge builds without MTP layers (models/glm_vl/glm_45v_bridge.py).
_WITHOUT_MTP = ("glm4v_moe",)


class Encoders(NamedTuple):
    """A config, split into the language model and the modality encoders."""

    #: The language model's config.
    text: Mapping[str, Any]
    #: The key under which it was found; "" if the config itself is the language model's.
    key: str
    assumptions: tuple[str, ...]
    not_modelled: tuple[str, ...]
    counted: tuple[EncoderSpec, ...] = ()


def split_multimodal(config: Mapping[str, Any], name: str) -> Encoders:
    """Split a multimodal wrapper's config into the language model and the encoders. Raises SpecError."""
    key, text, outer = "", config, config
    others: dict[str, Mapping[str, Any]] = {}
    left: list[str] = []
    while True:
        inner = next((k for k in _INNER if text.get(k) is not None), None)
        parts = {k: v for k, v in text.items() if k.endswith("_config") and k != inner and isinstance(v, Mapping)}
        left += [k for k in parts if k in _NOT_BUILT]
        others |= {k: v for k, v in parts.items() if k not in (*_NOT_BUILT, *_NO_PART)}
        if inner is None:
            break
        if not isinstance(text[inner], Mapping):
            raise SpecError(f"{name}: {inner} is {shown(text[inner])}; it must be an object")
        outer, key, text = text, inner, dict(text[inner])
        if config.get("model_type") in _OUTER_TIES and outer.get("tie_word_embeddings") is not None:
            text["tie_word_embeddings"] = outer["tie_word_embeddings"]
        for shared in ("tie_word_embeddings", "vocab_size"):
            if outer.get(shared) is not None and text.get(shared) is None:
                text[shared] = outer[shared]
    if not key and not isinstance(config.get("vision_config"), Mapping):
        return Encoders(config, "", (), ())
    text = {k: v for k, v in text.items() if k not in others}
    names = " and ".join(others) or "other modality encoders"
    encoders = encoders_of_wrapper(config, names, name)
    assumptions = [] if encoders else [
        f"language model only: the parameters and activations of {names} are left out"
    ]
    for encoder in encoders:
        words = f"{describe_encoder(encoder)}, on the first stage"
        recorded = encoder.structure is not None
        assumptions.append(words if recorded else f"{words}; activations are those of the language model only")
    if left:
        assumptions.append(f"{' and '.join(left)}: Megatron Bridge builds the thinker alone")
    if config.get("model_type") in _WITHOUT_MTP and text.pop("num_nextn_predict_layers", None):
        assumptions.append("Megatron Bridge builds this model without MTP layers; mtp_num_layers 0")
    if encoders:
        return Encoders(text, key, tuple(assumptions), (), encoders)
    count = encoder_parameters(config, name)
    held = f"{count} parameters" if count else "parameters"
    what = f"{names}: {held} with their gradients and optimizer state, and activations"
    return Encoders(text, key, tuple(assumptions), (Unmodelled(what, Effect.UP, order=ENCODER),))


def encoders_of_wrapper(config: Mapping[str, Any], names: str, name: str = "config") -> tuple[EncoderSpec, ...]:
    """The encoders of a wrapper's config: of an omni model's thinker one for each modality, else all as one; none if
    the size of one is unknown."""
    thinker = config.get("thinker_config")
    if config.get("model_type") != "qwen3_omni_moe" or not isinstance(thinker, Mapping):
        found = [encoder_of(config, names, name)]
    else:
        found = [
            encoder_of(of_thinker(thinker.get("text_config"), key, thinker[key]), key, name)
            for key in OF_THINKER if thinker.get(key) is not None
        ]
    known = tuple(one for one in found if one is not None)
    return known if len(known) == len(found) else ()


#: Encoder's key in the config of Qwen3-Omni's thinker -> its own model_type.
OF_THINKER = {
    "vision_config": "qwen3_omni_moe_vision_encoder", "audio_config": "qwen3_omni_moe_audio_encoder",
}  # fmt: skip


def of_thinker(text: Any, key: str, encoder: Any) -> dict[str, Any]:
    """The config of one encoder, as a wrapper's."""
    return {"model_type": OF_THINKER[key], "text_config": text, key: encoder}


def encoder_of(
    config: Mapping[str, Any], names: str, name: str = "config", *, keeps_head: bool = False
) -> EncoderSpec | None:
    """A wrapper's encoders as Megatron Bridge 0.6 builds them, as one EncoderSpec; None if their size is unknown.

    ``keeps_head``: SigLIP has its pooling head unless its config disables it (before ``BRIDGE_DROPS_POOLING_HEAD``)."""
    kind = str(config.get("model_type"))
    if kind == "gemma3" and not keeps_head and isinstance(config.get("vision_config"), Mapping):
        # models/gemma_vl/modeling_gemma3_vl.py: without the pooling head
        config = {**config, "vision_config": {**config["vision_config"], "vision_use_head": False}}
    count = encoder_parameters(config, name)
    if not count or kind in _NO_BRIDGE:
        return None
    sharded = _SHARDED[kind](Fields(config["vision_config"], name, kind)) if kind in _SHARDED else 0
    projector = (0, 0)
    if kind in _PROJECTORS:
        width = _of(Fields(config["text_config"], name, kind), "hidden_size")
        projector = _PROJECTORS[kind](Fields(config["vision_config"], name, kind), width)
    return EncoderSpec(names, count, sharded, structure_of(config, name), _ALWAYS_FROZEN.get(kind, ()), *projector)


def structure_of(config: Mapping[str, Any], name: str = "config") -> EncoderStructure | None:
    """The structure of a wrapper's encoder that transformers runs in training; None if its activations are not recorded
    or a size is missing."""
    kind = str(config.get("model_type"))
    read = _STRUCTURES.get(kind)
    parts = config.get("text_config", config), config.get("vision_config", config.get("audio_config"))
    if read is None or not all(isinstance(part, Mapping) for part in parts):
        return None
    text, encoder = parts
    try:
        width = _of(Fields(nested_width(text or {}), name, kind), "hidden_size")
        return read(Fields(encoder or {}, name, kind), width, Fields(config, name, kind))
    except SpecError:
        return None


def describe_encoder(encoder: EncoderSpec) -> str:
    """An encoder's parameters and their sharding, in words."""
    how = "whole on every tensor-parallel rank"
    if encoder.sharded:
        how = f"of which {encoder.sharded} are sharded over tensor-parallel ranks"
    return f"{encoder.name}: {encoder.parameters} parameters, {how}"


def encoder_parameters(config: Mapping[str, Any], name: str = "config") -> int | None:
    """Parameters of the encoders and their projectors: all but those of the language model and the output layer.

    None if the wrapper's model_type is not supported, or its config omits a size.
    """
    count = _COUNTS.get(str(config.get("model_type")))
    # Before transformers 4.52 the text's fields stood beside vision_config; published files still have them there.
    text, vision = config.get("text_config", config), config.get("vision_config", config.get("audio_config"))
    if count is None or not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        return None
    kind = str(config.get("model_type"))
    try:
        width = _of(Fields(nested_width(text), name, kind), "hidden_size")
        return count(Fields(vision, name, kind), width, Fields(config, name, kind))
    except SpecError:
        return None


def _of(fields: Fields, key: str, default: int | None = None) -> int:
    """An integer field."""
    value: int = fields.integer(key) if default is None else fields.integer(key, default=default)
    return value


def _linear(inputs: int, outputs: int, bias: bool = True) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _plain_block(h: int, f: int) -> int:
    """Two LayerNorms, attention and an MLP without a gate, all with biases."""
    return 4 * h + 4 * _linear(h, h) + _linear(h, f) + _linear(f, h)


def _qwen2_5(v: Fields, text: int, outer: Fields) -> int:
    """Window attention, RMSNorms and a gated MLP; EXAONE 4.5's encoder has fewer key and value heads."""
    h, f = _of(v, "hidden_size"), _of(v, "intermediate_size")
    heads = _of(v, "num_heads")
    kv = h // heads * _of(v, "num_key_value_heads", heads)
    block = 2 * h + _linear(h, h + 2 * kv) + _linear(h, h) + 2 * _linear(h, f) + _linear(f, h)
    merged = h * _of(v, "spatial_merge_size") ** 2
    return (
        _patches(v, h, bias=False) + _of(v, "depth") * block + h + _linear(merged, merged)
        + _linear(merged, _of(v, "out_hidden_size"))
    )


def _qwen3(v: Fields, text: int, outer: Fields) -> int:
    """LayerNorms and an ungated MLP; each layer of deepstack_visual_indexes has a merger (not in Qwen3.5)."""
    h, f, merge = _of(v, "hidden_size"), _of(v, "intermediate_size"), _of(v, "spatial_merge_size")
    block = _plain_block(h, f)
    merged = h * merge**2
    merger = _linear(merged, merged) + _linear(merged, _of(v, "out_hidden_size"))
    deep = len(v.items("deepstack_visual_indexes") or ())
    return (
        _patches(v, h, bias=True) + _of(v, "num_position_embeddings") * h + _of(v, "depth") * block
        + 2 * h + merger + deep * (2 * merged + merger)
    )


def _qwen3_sharded(v: Fields) -> int:
    """The parameters of ``_qwen3`` that tensor parallelism shards: linears of megatron-core's blocks and of mergers,
    without the biases of row-parallel ones (Megatron Bridge
    ``models/qwen_vl/modelling_qwen3_vl/{vision_model,utils}.py``)."""
    h, f, merge = _of(v, "hidden_size"), _of(v, "intermediate_size"), _of(v, "spatial_merge_size")
    block = _linear(h, 3 * h) + h * h + _linear(h, f) + f * h
    merged = h * merge**2
    merger = _linear(merged, merged) + merged * _of(v, "out_hidden_size")
    return _of(v, "depth") * block + (1 + len(v.items("deepstack_visual_indexes") or ())) * merger


def _qwen3_projector(v: Fields, text: int) -> tuple[int, int]:
    """Parameters of the mergers, and how many of them are sharded (``modelling_qwen3_vl/model.py: freeze``)."""
    h, merge = _of(v, "hidden_size"), _of(v, "spatial_merge_size")
    merged, out = h * merge**2, _of(v, "out_hidden_size")
    deep = len(v.items("deepstack_visual_indexes") or ())
    one = _linear(merged, merged) + _linear(merged, out)
    sharded = (1 + deep) * (_linear(merged, merged) + merged * out)
    return 2 * h + one + deep * (2 * merged + one), sharded


def _qwen2_5_sharded(v: Fields) -> int:
    """The same for EXAONE 4.5 (``models/exaone/exaone45/modelling_exaone45/vision_model.py``)."""
    h, f = _of(v, "hidden_size"), _of(v, "intermediate_size")
    heads = _of(v, "num_heads")
    kv = h // heads * _of(v, "num_key_value_heads", heads)
    block = _linear(h, h + 2 * kv) + h * h + 2 * _linear(h, f) + f * h
    merged = h * _of(v, "spatial_merge_size") ** 2
    return _of(v, "depth") * block + _linear(merged, merged) + merged * _of(v, "out_hidden_size")


def _glm4v(v: Fields, text: int, outer: Fields) -> int:
    h, out, f = _of(v, "hidden_size"), _of(v, "out_hidden_size"), _of(v, "intermediate_size")
    qkv = _linear(h, 3 * h, v.flag("attention_bias"))
    block = 2 * h + qkv + _linear(h, h, bias=False) + 3 * h * out  # the blocks' MLP is as wide as the output
    positions = (_of(v, "image_size") // _of(v, "patch_size")) ** 2
    downsample = _of(v, "spatial_merge_size") ** 2 * h * out + out
    merger = out * out + 2 * out + 3 * out * f
    return _patches(v, h, bias=True) + positions * h + _of(v, "depth") * block + 2 * h + downsample + merger


def _gemma3(v: Fields, text: int, outer: Fields) -> int:
    """SigLIP, with its pooling head unless the config disables it, and Gemma's projection and norm."""
    h, f = _of(v, "hidden_size"), _of(v, "intermediate_size")
    positions = (_of(v, "image_size") // _of(v, "patch_size")) ** 2
    mlp = _linear(h, f) + _linear(f, h)
    block = 4 * h + 4 * _linear(h, h) + mlp
    head = h + _linear(h, 3 * h) + _linear(h, h) + 2 * h + mlp if v.flag("vision_use_head", default=True) else 0
    patches = _linear(_of(v, "num_channels", 3) * _of(v, "patch_size") ** 2, h)
    return patches + positions * h + _of(v, "num_hidden_layers") * block + 2 * h + head + h * text + h


def _gemma4(v: Fields, text: int, outer: Fields) -> int:
    """``Gemma4VisionModel`` with ``Gemma4MultimodalEmbedder``, whose norm has no weight; without an audio encoder."""
    if outer.raw("audio_config")[1] is not None:
        raise outer.error("audio_config is not counted; set it to null")
    h, d = _of(v, "hidden_size"), _of(v, "head_dim")
    heads, groups = _of(v, "num_attention_heads"), _of(v, "num_key_value_heads")
    bias = v.flag("attention_bias")
    attention = _linear(h, heads * d, bias) + 2 * _linear(h, groups * d, bias) + _linear(heads * d, h, bias) + 2 * d
    layer = attention + 3 * h * _of(v, "intermediate_size") + 4 * h
    patches = 2 * _of(v, "position_embedding_size") * h + 3 * _of(v, "patch_size") ** 2 * h
    return patches + _of(v, "num_hidden_layers") * layer + h * text


def _mistral3(v: Fields, text: int, outer: Fields) -> int:
    """Pixtral's encoder, a patch merger and a projector."""
    h, f = _of(v, "hidden_size"), _of(v, "intermediate_size")
    block = 2 * h + 4 * h * _of(v, "num_attention_heads") * _of(v, "head_dim") + 3 * h * f
    layer = outer.raw("vision_feature_layer")[1]
    features = h * (len(layer) if isinstance(layer, (list, tuple)) else 1)
    bias = outer.flag("multimodal_projector_bias")
    merge = _of(outer, "spatial_merge_size", 2) ** 2
    projector = h + merge * h * h + _linear(features, text, bias) + _linear(text, text, bias)
    patches = _of(v, "num_channels", 3) * _of(v, "patch_size") ** 2 * h
    return patches + h + _of(v, "num_hidden_layers") * block + projector


def _llama4(v: Fields, text: int, outer: Fields) -> int:
    h, f, out = _of(v, "hidden_size"), _of(v, "intermediate_size"), _of(v, "projector_output_dim")
    patch = _of(v, "patch_size")
    positions = (_of(v, "image_size") // patch) ** 2 + 1
    block = _plain_block(h, f)
    adapter = f * _of(v, "projector_input_dim") + out * out
    ends = _of(v, "num_channels", 3) * patch**2 * h + h + positions * h + 4 * h
    return ends + _of(v, "num_hidden_layers") * block + adapter + _of(v, "vision_output_dim") * text


def _minimax_m3(v: Fields, text: int, outer: Fields) -> int:
    h, f, p = _of(v, "hidden_size"), _of(v, "intermediate_size"), _of(outer, "projector_hidden_size")
    block = _plain_block(h, f)
    merged = text * _of(v, "spatial_merge_size") ** 2
    projector = _linear(h, p) + _linear(p, text) + _linear(merged, p) + _linear(p, text)
    channels = _of(v, "num_channels", 3)
    patches = channels * _of(v, "temporal_patch_size") * _of(v, "patch_size") ** 2 * h
    return patches + 2 * h + _of(v, "num_hidden_layers") * block + projector


def _step3p7(v: Fields, text: int, outer: Fields) -> int:
    """A perception encoder with scaled blocks and two convolutions after them, and a projector (Megatron Bridge
    ``models/stepfun/modelling_step37/{vision_model,utils,image_insert_embedding}.py``)."""
    h, patch = _of(v, "width"), _of(v, "patch_size")
    f = int(h * v.number("mlp_ratio", default=8960 / 1536))
    block = _plain_block(h, f)
    scales = 0 if v.raw("ls_init_value")[1] is None else 2 * h
    norms = 2 * h * (v.flag("use_ln_pre") + v.flag("use_ln_post", default=True))
    first = h * v.flag("use_cls_token")
    positions = first + (_of(v, "image_size") // patch) ** 2 * h if v.flag("use_abs_posemb", default=True) else 0
    ends = _of(v, "num_channels", 3) * patch**2 * h + first + positions + norms
    merged = _linear(9 * h, 2 * h) + _linear(18 * h, 4 * h)
    return ends + _of(v, "layers") * (block + scales) + merged + _linear(4 * h, text, outer.flag("projector_bias"))


def _vt(v: Fields, key: str) -> int:
    return _of(v, f"vt_{key}" if v.raw(f"vt_{key}")[1] is not None else key)


def _kimi_grid(v: Fields) -> tuple[int, int, int]:
    """Patches along each side that the projector joins, and rows and columns of the grid of positions."""
    merge = v.items("merge_kernel_size") or (2, 2)
    if len(set(merge)) != 1 or type(merge[0]) is not int:
        raise v.error(f"merge_kernel_size is {shown(merge)}; it must be the same number twice")
    prefix = "init_" if v.raw("init_pos_emb_height")[1] is not None else ""
    return merge[0], _of(v, f"{prefix}pos_emb_height"), _of(v, f"{prefix}pos_emb_width")


def _kimi(v: Fields, text: int, outer: Fields) -> int:
    """MoonViT and ``PatchMergerMLP`` (``modeling_kimi_k25.py`` of moonshotai/Kimi-K2.5)."""
    h, f = _vt(v, "hidden_size"), _vt(v, "intermediate_size")
    _, rows, columns = _kimi_grid(v)
    block = _plain_block(h, f)
    patches = _linear(3 * _of(v, "patch_size") ** 2, h) + rows * columns * h
    return patches + _vt(v, "num_hidden_layers") * block + 2 * h + _kimi_projector(v, text)[0]


def _kimi_projector(v: Fields, text: int) -> tuple[int, int]:
    h, merge = _vt(v, "hidden_size"), _kimi_grid(v)[0]
    wide = h * merge**2
    return 2 * h + _linear(wide, wide) + _linear(wide, _of(v, "text_hidden_size", text)), 0


def _qwen2_audio(v: Fields, text: int, outer: Fields) -> int:
    """Whisper's encoder, without bias in the key projection, and one projector."""
    h, f = _of(v, "d_model"), _of(v, "encoder_ffn_dim")
    block = 4 * h + 3 * _linear(h, h) + h * h + _linear(h, f) + _linear(f, h)
    convolutions = _linear(3 * _of(v, "num_mel_bins"), h) + _linear(3 * h, h)
    layers = _of(v, "encoder_layers") * block
    return convolutions + _of(v, "max_source_positions") * h + layers + 2 * h + _linear(h, text)


def _qwen3_omni_audio(v: Fields, text: int, outer: Fields) -> int:
    """Three convolutions and a linear, whose positions are no parameters; layers; two linears."""
    h, f, c = _of(v, "d_model"), _of(v, "encoder_ffn_dim"), _of(v, "downsample_hidden_size")
    block = _plain_block(h, f)
    convolutions = _linear(9, c) + 2 * _linear(9 * c, c) + c * after_convolutions(_of(v, "num_mel_bins")) * h
    return convolutions + _of(v, "encoder_layers") * block + 2 * h + _linear(h, h) + _linear(h, _of(v, "output_dim"))


def _layers(v: Fields, key: str) -> tuple[int, ...]:
    """Layers by number, from 0; none where the list is absent."""
    numbers = v.items(key) or ()
    if any(type(i) is not int for i in numbers):
        raise v.error(f"{key} is {shown(numbers)}; it must list layers by number")
    return tuple(numbers)


def _structure_qwen2_5(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    return EncoderStructure(
        kind="qwen2_5_vl", hidden_size=_of(v, "hidden_size"), ffn_hidden_size=_of(v, "intermediate_size"),
        num_layers=_of(v, "depth"), num_heads=_of(v, "num_heads"), out_size=_of(v, "out_hidden_size"),
        patch_size=_of(v, "patch_size"), temporal_patch_size=_of(v, "temporal_patch_size"),
        channels=_of(v, "in_channels", 3), merge_size=_of(v, "spatial_merge_size"), window_size=_of(v, "window_size"),
        full_layers=_layers(v, "fullatt_block_indexes"),
    )


def _structure_exaone(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    """Windows have the sides that the class gives them, whatever the config says."""
    return replace(
        _structure_qwen2_5(v, text, outer), kind="exaone4_5", window_size=112,
        num_query_groups=_of(v, "num_key_value_heads", _of(v, "num_heads")),
    )


def _structure_qwen3(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    return EncoderStructure(
        kind="qwen3_vl", hidden_size=_of(v, "hidden_size"), ffn_hidden_size=_of(v, "intermediate_size"),
        num_layers=_of(v, "depth"), num_heads=_of(v, "num_heads"), out_size=_of(v, "out_hidden_size"),
        patch_size=_of(v, "patch_size"), temporal_patch_size=_of(v, "temporal_patch_size"),
        channels=_of(v, "in_channels", 3), merge_size=_of(v, "spatial_merge_size"),
        positions=_of(v, "num_position_embeddings"),
        deepstack_layers=_layers(v, "deepstack_visual_indexes"),
    )


def _structure_qwen3_omni(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    return replace(_structure_qwen3(v, text, outer), kind="qwen3_omni_vision")


def _structure_qwen3_omni_audio(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    chunk = 2 * _of(v, "n_window")
    return EncoderStructure(
        kind="qwen3_omni_audio", hidden_size=_of(v, "d_model"), ffn_hidden_size=_of(v, "encoder_ffn_dim"),
        num_layers=_of(v, "encoder_layers"), num_heads=_of(v, "encoder_attention_heads"), out_size=_of(v, "output_dim"),
        channels=_of(v, "downsample_hidden_size"), mel_bins=_of(v, "num_mel_bins"), chunk_frames=chunk,
        chunks_attended=max(1, _of(v, "n_window_infer") // chunk),
    )


def _structure_glm4v(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    out = _of(v, "out_hidden_size")
    return EncoderStructure(
        kind="glm4v", hidden_size=_of(v, "hidden_size"), ffn_hidden_size=out, num_layers=_of(v, "depth"),
        num_heads=_of(v, "num_heads"), out_size=out, patch_size=_of(v, "patch_size"),
        temporal_patch_size=_of(v, "temporal_patch_size"), channels=_of(v, "in_channels", 3),
        merge_size=_of(v, "spatial_merge_size"), merger_size=_of(v, "intermediate_size"),
        positions=(_of(v, "image_size") // _of(v, "patch_size")) ** 2, qkv_bias=v.flag("attention_bias"),
    )


def _structure_gemma3(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    side = _of(v, "image_size") // _of(v, "patch_size")
    tokens = isqrt(_of(outer, "mm_tokens_per_image", 256))
    return EncoderStructure(
        kind="siglip", hidden_size=_of(v, "hidden_size"), ffn_hidden_size=_of(v, "intermediate_size"),
        num_layers=_of(v, "num_hidden_layers"), num_heads=_of(v, "num_attention_heads"), out_size=text,
        patch_size=_of(v, "patch_size"), channels=_of(v, "num_channels", 3), merge_size=max(1, side // tokens),
        positions=side**2, image_size=_of(v, "image_size"),
        pooling_head=v.flag("vision_use_head", default=True),
    )


def _structure_mistral3(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    return EncoderStructure(
        kind="pixtral", hidden_size=_of(v, "hidden_size"), ffn_hidden_size=_of(v, "intermediate_size"),
        num_layers=_of(v, "num_hidden_layers"), num_heads=_of(v, "num_attention_heads"), out_size=text,
        patch_size=_of(v, "patch_size"), channels=_of(v, "num_channels", 3),
        merge_size=_of(outer, "spatial_merge_size", 2), projector_bias=outer.flag("multimodal_projector_bias"),
    )


def _structure_kimi(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    """Sizes have the prefix of the repository's config, or none as in transformers 5.24."""
    merge, rows, columns = _kimi_grid(v)
    return EncoderStructure(
        kind="moonvit", hidden_size=_vt(v, "hidden_size"), ffn_hidden_size=_vt(v, "intermediate_size"),
        num_layers=_vt(v, "num_hidden_layers"), num_heads=_vt(v, "num_attention_heads"),
        out_size=_of(v, "text_hidden_size", text), patch_size=_of(v, "patch_size"), merge_size=merge,
        positions=rows * columns,
    )


def _structure_step(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    """Of the published kind: rotary embeddings and learned positions, a norm before the blocks and none after them."""
    switches = {"use_ln_pre": (False, True), "use_ln_post": (True, False), "use_cls_token": (False, False),
                "use_abs_posemb": (True, True), "use_rope2d": (True, True)}  # fmt: skip
    for key, (default, asked) in switches.items():
        if v.flag(key, default=default) is not asked:
            raise v.error(f"{key} is {not asked}; activations of this encoder are not recorded, set it to {asked}")
    if v.raw("hidden_act")[1] != "quick_gelu" or v.raw("ls_init_value")[1] is None:
        raise v.error("hidden_act or ls_init_value are not Step-3.7's; use quick_gelu and a number")
    h, side = _of(v, "width"), _of(v, "image_size") // _of(v, "patch_size")
    if side % 4:
        raise v.error(f"image_size has {side} patches a side, no multiple of 4; use 728 with patches of 14")
    return EncoderStructure(
        kind="step3p7", hidden_size=h, ffn_hidden_size=int(h * v.number("mlp_ratio", default=8960 / 1536)),
        num_layers=_of(v, "layers"), num_heads=_of(v, "heads"), out_size=text, patch_size=_of(v, "patch_size"),
        channels=_of(v, "num_channels", 3), merge_size=4, positions=side**2, image_size=_of(v, "image_size"),
        projector_bias=outer.flag("projector_bias"),
    )


def _structure_qwen2_audio(v: Fields, text: int, outer: Fields) -> EncoderStructure:
    return EncoderStructure(
        kind="qwen2_audio", hidden_size=_of(v, "d_model"), ffn_hidden_size=_of(v, "encoder_ffn_dim"),
        num_layers=_of(v, "encoder_layers"), num_heads=_of(v, "encoder_attention_heads"), out_size=text,
        positions=_of(v, "max_source_positions"), mel_bins=_of(v, "num_mel_bins"),
    )


def _patches(v: Fields, h: int, *, bias: bool) -> int:
    """The patch embedding: a convolution over the pixels of a patch in temporal_patch_size frames."""
    return _linear(_of(v, "in_channels", 3) * _of(v, "temporal_patch_size") * _of(v, "patch_size") ** 2, h, bias)


#: model_type of a wrapper -> function of (encoder's config, hidden size of the language model, wrapper's config) that
#: returns the number of parameters.
_COUNTS: dict[str, Callable[[Fields, int, Fields], int]] = {
    "qwen2_5_vl": _qwen2_5,
    "exaone4_5": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "mistral3": _mistral3,
    "llama4": _llama4,
    "minimax_m3_vl": _minimax_m3,
    "step3p7": _step3p7,
    "kimi_k25": _kimi,
    "qwen2_audio": _qwen2_audio,
    "qwen3_omni_moe_vision_encoder": _qwen3,
    "qwen3_omni_moe_audio_encoder": _qwen3_omni_audio,
}
#: Wrappers with known encoders that Megatron Bridge does not build.
_NO_BRIDGE = ("glm4v", "llama4")
#: Wrappers whose encoder Megatron Bridge builds of megatron-core's modules -> function that returns the parameters
#: that tensor parallelism shards.
_SHARDED: dict[str, Callable[[Fields], int]] = {
    "qwen3_vl": _qwen3_sharded,
    "qwen3_vl_moe": _qwen3_sharded,
    "qwen3_5": _qwen3_sharded,
    "qwen3_5_moe": _qwen3_sharded,
    "exaone4_5": _qwen2_5_sharded,
}

#: Wrappers whose encoder has parts of which one may train alone -> function of (encoder's config, hidden size of the
#: language model) that returns the parameters of the projector, and how many of them tensor parallelism shards.
_PROJECTORS: dict[str, Callable[[Fields, int], tuple[int, int]]] = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3_projector),
    "gemma4": lambda v, text: (_of(v, "hidden_size") * text, 0),
    "kimi_k25": _kimi_projector,
    "step3p7": lambda v, text: (4 * _of(v, "width") * text, 0),
}
#: model_type of a wrapper whose encoder Megatron Bridge takes from transformers -> function of the same arguments that
#: returns its structure.
_STRUCTURES: dict[str, Callable[[Fields, int, Fields], EncoderStructure]] = {
    "qwen2_5_vl": _structure_qwen2_5,
    "exaone4_5": _structure_exaone,
    "glm4v_moe": _structure_glm4v,
    "qwen3_vl": _structure_qwen3,
    "qwen3_vl_moe": _structure_qwen3,
    "qwen3_5": _structure_qwen3,
    "qwen3_5_moe": _structure_qwen3,
    "gemma3": _structure_gemma3,
    "mistral3": _structure_mistral3,
    "kimi_k25": _structure_kimi,
    "step3p7": _structure_step,
    "qwen2_audio": _structure_qwen2_audio,
    "qwen3_omni_moe_vision_encoder": _structure_qwen3_omni,
    "qwen3_omni_moe_audio_encoder": _structure_qwen3_omni_audio,
}
#: model_type of a wrapper -> modules of its encoder that never train (``requires_grad_(False)`` in their class).
_ALWAYS_FROZEN = {"qwen2_audio": ("embed_positions",)}
