"""The unmodelled features of a ConfigContainer, and the model provider that it holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any

from bridge_memory.readers.container_registry import PROVIDERS, REFUSED, feature_of, known
from bridge_memory.readers.encoders import OF_THINKER, encoder_of, of_thinker
from bridge_memory.readers.fields import shown
from bridge_memory.readers.megatron_args.sizes import ORDER_OF
from bridge_memory.readers.megatron_args.unmodelled import ArgumentValues
from bridge_memory.readers.nemotron_provider import PROVIDERS as OF_NEMOTRON
from bridge_memory.readers.nemotron_provider import encoders_of_nemotron
from bridge_memory.releases import BRIDGE_DROPS_POOLING_HEAD, DEFAULT_MEGATRON_BRIDGE, release_in
from bridge_memory.spec import EncoderSpec, SpecError
from bridge_memory.spec.fields import MOST
from bridge_memory.spec.unmodelled import ENCODER, UNKNOWN_SIZE, Effect, Unmodelled

#: Parts of the container whose fields are checked.
PARTS = (
    "model", "optimizer", "ddp", "dist", "train", "validation", "dataset", "logger", "checkpoint", "profiling", "rng",
    "rerun_state_machine", "scheduler", "tokenizer", "tensor_inspect", "peft",
)  # fmt: skip


class _ContainerValues:
    """The fields of a container under the names of Megatron-LM's arguments, for the conditions of ``Feature``."""

    parsed = True

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> Any:
        if name in ("bias_swiglu_fusion", "bias_gelu_fusion"):
            return getattr(self._parts["model"], "bias_activation_fusion", False)
        if name == "swiglu":
            return getattr(self._parts["model"], "gated_linear_unit", False)
        for part in self._parts.values():
            value = getattr(part, name, None)
            if value is not None:
                return value
        return None


def provider_of(model: Any) -> str:
    """Name of the supported provider class of ``model``, or of a base class whose ``provide`` it inherits.

    Returns "" if ``model`` is no model provider (a namespace, a TransformerConfig).

    Raises:
        SpecError: The provider is not supported.
    """
    classes = type(model).__mro__
    name = classes[0].__name__
    if not any(cls.__name__ in PROVIDERS or cls.__name__ in REFUSED or "provide" in vars(cls) for cls in classes):
        return ""
    refused = next((cls.__name__ for cls in classes if cls.__name__ in REFUSED), None)
    if refused is not None:
        raise SpecError(f"model is a {name}; {REFUSED[refused]}")
    for cls in classes:
        if cls.__name__ in PROVIDERS:
            return cls.__name__
        if "provide" in vars(cls):
            break
    raise SpecError(
        f"model is a {name}, which makes a model of its own that is not known here; give one of Megatron Bridge's "
        "providers of text models, such as GPTModelProvider"
    )


#: Providers with an encoder whose parameters are counted -> transformers' model_type of the wrapper.
_WRAPPERS = {
    "Exaone45ModelProvider": "exaone4_5",
    "GLM45VModelProvider": "glm4v_moe",
    "Gemma3VLModelProvider": "gemma3",
    "Gemma4DenseVLProvider": "gemma4",
    "Gemma4VLModelProvider": "gemma4",
    "KimiK25VLModelProvider": "kimi_k25",
    "Ministral3ModelProvider": "mistral3",
    "Qwen25VLModelProvider": "qwen2_5_vl",
    "Qwen2AudioModelProvider": "qwen2_audio",
    "Qwen35VLMoEModelProvider": "qwen3_5_moe",
    "Qwen35VLModelProvider": "qwen3_5",
    "Qwen3VLMoEModelProvider": "qwen3_vl_moe",
    "Qwen3VLModelProvider": "qwen3_vl",
    "Step37ModelProvider": "step3p7",
}


#: Kind of an encoder's structure -> (what freezing the encoder freezes of it, the projector), by the beginning of the
#: names of modules (Megatron Bridge ``models/*/modeling_*.py: freeze``).
_FROZEN = {
    "qwen2_5_vl": (("patch_embed", "blocks"), ("merger",)),
    "glm4v": (("patch_embed", "blocks"), ("merger",)),
    "qwen3_vl": (("patch_embed", "pos_embed", "decoder.layers"), ("merger", "decoder.deepstack_merger_list")),
    "exaone4_5": (("patch_embed", "decoder.layers"), ("merger",)),
    "radio": (("vision_model",), ("vision_projection",)),
    "moonvit": (("patch_embed", "encoder"), ("mm_projector",)),
    "step3p7": (("conv1", "ln_pre", "positional_embedding", "transformer", "vit_downsampler"), ("align_projector",)),
    "siglip": (("embeddings", "encoder", "post_layernorm", "head"), ("multi_modal_projector",)),
    "pixtral": (("patch_conv", "ln_pre", "transformer"), ("multi_modal_projector",)),
    "qwen3_omni_vision": (("patch_embed", "pos_embed", "blocks", "merger"), ()),
    "qwen3_omni_audio": (("conv", "layers", "ln_post", "proj"), ()),
    "qwen2_audio": (("conv1", "conv2", "embed_positions", "layers", "layer_norm"), ("multi_modal_projector",)),
}


def _frozen(model: Any, encoder: EncoderSpec) -> tuple[str, ...]:
    """The modules of an encoder that a provider freezes; "": all of an encoder whose modules are not known."""
    modality = "audio" if encoder.structure is not None and encoder.structure.audio else "vision"
    names = f"freeze_{modality}_model", f"freeze_{modality}_projection"
    if encoder.name == "model.sound_config":
        names = "freeze_sound_encoder", "freeze_sound_projection"
    whole, projector = (bool(getattr(model, name, False)) for name in names)
    if encoder.structure is None:
        return (*(("encoder",) if whole else ()), *(("projector",) if projector else ()))
    of_encoder, of_projector = _FROZEN[encoder.structure.kind]
    given = (*encoder.frozen, *(of_encoder if whole else ()), *(of_projector if projector else ()))
    return tuple(dict.fromkeys(given))


def language_model_frozen(model: Any) -> bool:
    """Whether the language model is frozen, and a counted encoder or its projector trains beside it."""
    if not getattr(model, "freeze_language_model", False):
        return False

    def trains(encoder: EncoderSpec) -> bool:
        if encoder.structure is None:
            return encoder.trains
        return not {name for names in _FROZEN[encoder.structure.kind] for name in names} <= set(encoder.frozen)

    return any(trains(encoder) for encoder in encoders_of(model))


def encoders_of(model: Any) -> tuple[EncoderSpec, ...]:
    """The provider's modality encoder with its projector, if its size is known."""
    provider = provider_of(model)
    if provider in OF_NEMOTRON:
        return tuple(replace(found, frozen=_frozen(model, found)) for found in encoders_of_nemotron(model))
    if provider == "Qwen3OmniModelProvider":
        return tuple(_of_thinker(model))
    if provider not in _WRAPPERS:
        return ()
    path, *others = PROVIDERS[provider]
    if any(_at(model, other) is not None for other in others):
        return ()
    *_, key = path.split(".")
    outer = getattr(model, "hf_config", None)
    config = {
        "projector_bias": getattr(model, "projector_bias", None), **_as_mapping(outer),
        "model_type": _WRAPPERS[provider],
        "text_config": {"hidden_size": getattr(model, "hidden_size", None)}, key: _as_mapping(_at(model, path)),
    }
    bridge = release_in(getattr(sys.modules.get("megatron.bridge"), "__version__", None)) or DEFAULT_MEGATRON_BRIDGE
    found = encoder_of(config, f"model.{path}", keeps_head=bridge < BRIDGE_DROPS_POOLING_HEAD)
    if found is None:
        return ()
    if found.structure is not None and getattr(model, "vision_dp_when_cp", False):
        found = replace(found, structure=replace(found.structure, dealt=True))
    return (replace(found, frozen=_frozen(model, found)),)


def _of_thinker(model: Any) -> Iterator[EncoderSpec]:
    for key in OF_THINKER:
        part = _as_mapping(_at(model, f"thinker_config.{key}"))
        config = of_thinker({"hidden_size": getattr(model, "hidden_size", None)}, key, part)
        found = encoder_of(config, f"model.thinker_config.{key}")
        if found is not None:
            yield replace(found, frozen=_frozen(model, found))


def _as_mapping(config: Any) -> dict[str, Any]:
    """A Hugging Face config, or a part of one, as a dict that includes class defaults."""
    if isinstance(config, Mapping):
        return dict(config)
    written = getattr(config, "to_dict", None)
    return dict(written()) if callable(written) else {}


def _at(model: Any, path: str) -> Any:
    for key in path.split("."):
        model = getattr(model, key, None)
    return model


def unmodelled_encoders(model: Any) -> Iterator[Unmodelled]:
    """One for each modality encoder that is not counted: its size is unknown, or it is frozen."""
    provider = provider_of(model)
    counted = {encoder.name for encoder in encoders_of(model)}
    for path in PROVIDERS.get(provider, ()):
        encoder = _at(model, path)
        if encoder is None or f"model.{path}" in counted:
            continue
        what = f"a modality encoder{_size(encoder)}; only the language model is counted"
        yield Unmodelled(f"model.{path}: {what}", Effect.UP, order=ENCODER)
    if not provider:
        for path in ("vision_config", "vision_transformer_config"):
            if getattr(model, path, None):
                yield Unmodelled(f"model.{path}: the vision encoder", Effect.UP, order=ENCODER)


def _size(encoder: Any) -> str:
    """The parameters of a transformer of these sizes, in words: the linears of its layers only."""

    def first(*keys: str) -> int:
        found = (encoder.get(key) if isinstance(encoder, dict) else getattr(encoder, key, None) for key in keys)
        return next((value for value in found if isinstance(value, int) and value > 0), 0)

    layers = first("num_hidden_layers", "depth", "encoder_layers", "num_layers")
    width = first("hidden_size", "d_model", "embed_dim")
    inner = first("intermediate_size", "encoder_ffn_dim") or 4 * width
    if not layers or not width:
        return ""
    return f" of about {layers * (4 * width * width + 2 * width * inner) / 1e9:.1f} B parameters"


def teacher_of(model: Any) -> Any:
    """A distillation's teacher, if it is a provider with known sizes; else None."""
    teacher = getattr(model, "teacher", None)
    sizes = ("num_layers", "hidden_size", "num_attention_heads")
    return teacher if all(type(getattr(teacher, name, None)) is int for name in sizes) else None


def distillation_of(model: Any) -> str:
    """``ImplementationSpec.distillation``, from modelopt's config (``distill/plugins/megatron.py:
    setup_distillation_config``). "none" also for losses that are not modelled."""
    kd = getattr(model, "kd_config", None)
    another = any(getattr(kd, name, None) for name in ("logit_kl_topk", "criterion"))
    if teacher_of(model) is None or another:
        return "none"
    return "logits" if getattr(kd, "skip_lm_loss", True) else "logits and lm"


def _counted_of_distillation(name: str, model: Any) -> bool:
    """Whether the estimate includes what a field of a distillation adds."""
    if name == "teacher":
        return teacher_of(model) is not None
    pairs = getattr(getattr(model, "kd_config", None), "intermediate_layer_pairs", None)
    return distillation_of(model) != "none" and not pairs


def _teacher(teacher: Any, values: ArgumentValues) -> str:
    """The order of magnitude of a distillation's teacher, in words: its weights in bf16 and the logits of its loss.

    The teacher is frozen and sharded over the student's tensor- and pipeline-parallel ranks. Source: Megatron Bridge
    ``models/distillation_provider.py: DistillationProvider``, which refuses virtual stages.
    """

    def size(key: str, default: int = 1) -> int:
        value = getattr(teacher, key, None)
        value = values[key] if value is None else value
        return value if type(value) is int and 0 < value <= MOST else default

    if any(type(getattr(teacher, key, None)) is not int for key in ("num_layers", "hidden_size", "vocab_size")):
        return ORDER_OF["export_kd_teacher_load"]
    t, layers, h = size("tensor_model_parallel_size"), size("num_layers"), size("hidden_size")
    gated = 3 if getattr(teacher, "gated_linear_unit", False) else 2
    experts = size("num_moe_experts", 0)
    expert = gated * h * size("moe_ffn_hidden_size", size("ffn_hidden_size", 4 * h)) * experts
    dense = 4 * h * h + (0 if experts else gated * h * size("ffn_hidden_size", 4 * h))
    ends = 2 * size("vocab_size") * h
    over_experts = size("expert_model_parallel_size") * size("expert_tensor_parallel_size", t)
    on_rank = (layers * (dense / t + expert / over_experts) + ends / t) / size("pipeline_model_parallel_size")
    tokens = size("seq_length") * size("micro_batch_size") / size("context_parallel_size")
    logits = 4 * tokens * size("vocab_size") / t
    billions = (layers * (dense + expert) + ends) / 1e9
    return (
        f"about {2 * on_rank / 2**30:.1f} GiB of its weights on a rank ({billions:.1f} B parameters in bf16, divided "
        f"as the student's), and on the last stage {logits / 2**30:.1f} GiB each time its logits or the student's are "
        "held in fp32"
    )


def not_modelled(parts: Mapping[str, Any]) -> Iterator[Unmodelled]:
    """Unmodelled features of a container: fields that change memory and are not counted, and unknown fields.

    Each sentence is "part.field: what". ``parts``: name -> the part as Bridge changes it before training (a view), or
    the part itself. Fields that the registry does not list are reported if they differ from their default.
    """
    values = _ContainerValues(parts)
    for part, holder in parts.items():
        if holder is None:
            continue
        defaults = _defaults(holder)
        attributes = _attributes(holder) if part == "model" or not defaults else ()
        for name in dict.fromkeys((*defaults, *attributes)):
            value = getattr(holder, name, None)
            feature = feature_of(part, name)
            if feature is not None:
                if part == "model" and name in ("teacher", "kd_config") and _counted_of_distillation(name, holder):
                    continue
                if feature.applies(values, value):
                    found = feature.described(values, _label(part, name, value))
                    teaches = part == "model" and name == "teacher"
                    yield Unmodelled(found, found.effect, order=_teacher(value, values)) if teaches else found
            elif defaults and not known(part, name) and value is not None and not _same(value, defaults.get(name)):
                yield Unmodelled(f"{_label(part, name, value)}: a field that is not known here", Effect.UNKNOWN,
                          order=UNKNOWN_SIZE)  # fmt: skip


def _attributes(holder: Any) -> list[str]:
    """The attributes of a part: Bridge sets some that are no fields of the model's class, for newer megatron-cores."""
    part = getattr(holder, "__wrapped__", holder)
    try:
        return [name for name in vars(part) if not name.startswith("_")]
    except TypeError:  # no __dict__
        return []


def _defaults(holder: Any) -> dict[str, Any]:
    """Field -> default of the part's class if that is a dataclass, and of the TransformerConfig that Bridge's model
    configs hold."""
    part = getattr(holder, "__wrapped__", holder)
    classes = [cls for cls in (type(part), type(getattr(part, "transformer", None))) if is_dataclass(cls)]
    return {f.name: _default(f) for cls in classes for f in fields(cls) if not f.name.startswith("_")}


def _default(f: Field[Any]) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else None


def _same(value: Any, default: Any) -> bool:
    try:
        return bool(value == default) or (not value and not default)
    except (TypeError, ValueError, RuntimeError):
        return False


def _label(part: str, name: str, value: Any) -> str:
    plain = isinstance(value, (str, int, float)) and not isinstance(value, bool)
    return f"{part}.{name} ({shown(value)})" if plain else f"{part}.{name}"
