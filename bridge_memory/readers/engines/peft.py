"""peft's ``adapter_config.json`` (the fields of ``LoraConfig``) -> settings of a run.

Source: peft ``tuners/lora/config.py: LoraConfig``, ``tuners/tuners_utils.py: check_target_module_exists`` (0.21).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.spec.parts import ALL_LINEAR

#: Scales, initialisation and provenance of the adapter: no effect on the memory of a training step.
HARMLESS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_alpha",
    "fan_in_fan_out", "use_rslora", "init_lora_weights", "alpha_pattern", "megatron_core", "layers_pattern",
    "qalora_group_size", "runtime_config", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
)  # fmt: skip
#: Options with which other parameters train than two matrices of rank r per target.
OTHER_PARAMETERS = (
    "exclude_modules", "modules_to_save", "layers_to_transform", "rank_pattern", "trainable_token_indices",
    "layer_replication", "lora_bias", "target_parameters", "use_qalora", "use_bdlora", "velora_config",
    "monteclora_config", "arrow_config", "kasa_config", "alora_invocation_tokens", "megatron_config",
    "ensure_weight_tying",
)  # fmt: skip
#: ``model_type`` -> peft's default targets (``utils/constants.py:
#: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING``), for supported types.
DEFAULT_TARGETS = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen3"),
                    ("q_proj", "v_proj")),
    "gpt2": ("c_attn",), "bloom": ("query_key_value",),
}  # fmt: skip
_KNOWN = (*HARMLESS, *OTHER_PARAMETERS, "peft_type", "r", "target_modules", "lora_dropout", "bias", "use_dora")


def read_peft(config: Mapping[str, Any], settings: Settings, specified: Specified) -> None:
    """Read a parsed adapter_config.json into ``settings``; problems are in ``settings.diagnostics``."""
    diagnostics = settings.diagnostics
    top = Section(config, "", diagnostics)
    kind = top.text("peft_type", "LORA")
    if kind.upper() != "LORA":
        diagnostics.refuse("peft_type", f"is {kind}, which is not counted here", "only LORA is")
    bias = top.text("bias", "none")
    if bias != "none":
        diagnostics.refuse("bias", f"is {bias}: biases that train are not counted here", 'set it to "none"')
    for name in OTHER_PARAMETERS:
        if top.raw(name):
            diagnostics.refuse(name, "trains other parameters, which are not counted here", "leave it out")
    settings.set(
        peft__scheme="lora", peft__dim=top.integer("r", 8, least=1),
        peft__target_modules=targets_of(top, "target_modules", top.raw("target_modules"), specified),
        peft__use_dora=top.flag("use_dora") or None,
        transformers__lora_dropout=top.number("lora_dropout", most=1.0) or None,
    )  # fmt: skip
    top.ignore(*HARMLESS)
    top.refuse_unread(_KNOWN, "peft refuses it")


def targets_of(top: Section, key: str, value: Any, specified: Specified) -> tuple[str, ...] | None:
    """The target linears in ``value``, the file's entry ``key``. If it is None, peft's default for the model type.
    Records a problem and returns None for anything that is not a list of names or "all-linear"."""
    if value is None:
        found = DEFAULT_TARGETS.get(specified.model_type or "llama")
        if found is None:
            what = f"is missing, and peft knows none for {specified.model_type}"
            top.problem(key, what, "name the linears, or all-linear")
        else:
            top.diagnostics.assume(f"{', '.join(found)}, which peft takes where {top.named(key)} is missing")
        return found
    if isinstance(value, str):
        if value.lower() == ALL_LINEAR:
            return (ALL_LINEAR,)
        top.problem(key, f"is {value!r}, a regular expression", "give a list of linears, or all-linear")
    elif not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        top.problem(key, "is no list of names", "give a list of linears, or all-linear")
    elif any("." in name for name in value):
        name = next(name for name in value if "." in name)
        top.problem(key, f"holds {name!r}, the end of a full name", "give the linear's own name")
    else:
        return tuple(sorted(value))
    return None
