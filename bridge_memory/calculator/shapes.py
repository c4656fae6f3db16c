"""A ModelSpec from a model's numbers, with the assumptions made."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import log
from typing import Any

from bridge_memory.calculator.form import ModelConfig, parameter_count
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers import model_from_hf_config, resolve_model
from bridge_memory.readers.presets import find_presets
from bridge_memory.spec import ModelSpec, SpecError

#: Published decoders whose shapes are used for a model with that number of parameters, smallest first.
PUBLISHED = (
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-1.5B", "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-13b-hf", "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-32B", "meta-llama/Llama-2-70b-hf", "openai/GPT-3-175B", "meta-llama/Llama-3.1-405B",
)  # fmt: skip
#: Smaller ones, as their config.json has them; they are no presets.
SMALL: dict[str, dict[str, Any]] = {
    name: {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads // 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    }
    for name, hidden, ffn, layers, heads in (
        ("HuggingFaceTB/SmolLM2-135M", 576, 1536, 30, 9), ("HuggingFaceTB/SmolLM2-360M", 960, 2560, 32, 15),
    )
}  # fmt: skip
#: Share of the parameters by which a published model may differ before its number of layers is changed.
ALIKE = 0.1


def model_of(config: ModelConfig) -> tuple[ModelSpec, list[str]]:
    """(model, assumptions). A name that is a preset, a path or a Hub id takes precedence over numbers. Raises
    SpecError."""
    presets = find_presets(config.name)
    if len(presets) == 1:
        return resolve_model(presets[0]), [f"the published {presets[0]}, whatever other sizes say (model.name)"]
    if "/" in config.name:
        try:
            return resolve_model(config.name), []
        except SpecError:
            if not (config.num_parameters or config.hidden_size):
                raise
            assumed = [f"the sizes given: {config.name} could not be read"]
    else:
        assumed = []
    if config.hidden_size and config.num_layers:
        model, more = _of_sizes(config)
    elif config.num_parameters:
        model, more = nearest(parameter_count(config.num_parameters), config.name)
    else:
        raise SpecError(
            "model: it has neither num_parameters nor hidden_size and num_layers; give them, or a preset as name "
            "(`bridge-memory models` lists them)"
        )
    return model, assumed + more


@cache
def _published() -> tuple[tuple[str, ModelSpec, int], ...]:
    models = [(name, model_from_hf_config(config, name)) for name, config in SMALL.items()]
    models += [(name, resolve_model(name)) for name in PUBLISHED]
    return tuple((name, model, model_parameters(model)[0]) for name, model in models)


def nearest(parameters: float, called: str = "custom") -> tuple[ModelSpec, list[str]]:
    """The published shape nearest to so many parameters; where none is near, with more or fewer of its layers.
    ``called``: the model's own name. Raises SpecError where one layer is more than that."""
    name, model, count = min(_published(), key=lambda row: abs(log(row[2] / parameters)))
    changed = ""
    if abs(count - parameters) > ALIKE * parameters:
        layer = (count - model_parameters(replace(model, layers=model.layers[:1]))[0]) / max(1, model.num_layers - 1)
        layers = max(1, model.num_layers + round((parameters - count) / layer))
        model = replace(model, layers=model.layers[:1] * layers)
        count, changed = model_parameters(model)[0], f" with {layers} layer{'s' * (layers > 1)}"
        if abs(count - parameters) > ALIKE * parameters:
            raise SpecError(
                f"num_parameters ({parameters:.4g}) is unlike any published shape: {name}{changed} has {count:.4g}; "
                "give hidden_size and num_layers (calculate --config)"
            )
    size = f"{count / 1e9:.2f} B parameters"
    if called == "custom":
        called = f"{count / 1e9:.3g}B like {name}"
    words = f"the shape of {name}, the nearest published{changed and ','}{changed} ({size})"
    return replace(model, name=called), [words]


def _of_sizes(config: ModelConfig) -> tuple[ModelSpec, list[str]]:
    """A Llama of these sizes. Its FFN width is what makes the count right, and embeddings are tied where it is then
    nearer to the usual 8/3 of hidden_size (which has as many parameters as 4 of it without a gate)."""
    h, layers, vocab = config.hidden_size or 1, config.num_layers or 1, config.vocab_size
    heads = config.num_attention_heads
    if heads is None:
        heads = next((n for n in (h // 128, h // 64) if n and h % n == 0), 1)
    if h % heads:
        raise SpecError(f"model.hidden_size ({h}) is not divisible by model.num_attention_heads ({heads}); correct one")
    common: dict[str, Any] = {
        "hidden_size": h, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocab,
        "max_position_embeddings": config.max_seq_len, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    wanted = None if config.num_parameters is None else parameter_count(config.num_parameters)
    if config.moe_enabled:
        return _experts(config, common, wanted)
    if wanted is None:
        usual = -(-(8 * h // 3) // 256) * 256
        words = f"a Llama of these sizes with an FFN of {usual} (8/3 of hidden_size)"
        return _llama(config, {**common, "intermediate_size": usual}, words)
    attention, norms = 4 * h * h, 2 * h
    options = []
    for tied in (False, True):
        each = (wanted - vocab * h * (1 if tied else 2) - h) / layers - attention - norms
        options.append((each / (3 * h), tied))
    width, tied = min(options, key=lambda option: abs(log(max(option[0], 1) / (8 / 3 * h))))
    if not h <= width <= 8 * h:
        raise SpecError(
            f"model.num_parameters ({wanted:.4g}) does not go with hidden_size {h}, num_layers {layers} and vocab_size "
            f"{vocab}: the FFN would be {width:.0f} wide; correct one of them"
        )
    rounded = max(64, round(width / 64) * 64)
    words = f"a Llama of these sizes with an FFN of {rounded}{', tied embeddings' if tied else ''}"
    return _llama(config, {**common, "intermediate_size": rounded, "tie_word_embeddings": tied}, words, wanted)


def _llama(
    config: ModelConfig, fields: dict[str, Any], words: str, wanted: float | None = None
) -> tuple[ModelSpec, list[str]]:
    model = model_from_hf_config({"model_type": "llama", **fields}, config.name)
    count = model_parameters(model)[0]
    asked = "" if wanted is None else f" of the {wanted / 1e9:.4g} B asked for"
    return model, [f"{words}: {count / 1e9:.4g} B parameters{asked}"]


def _experts(
    config: ModelConfig, common: dict[str, Any], wanted: float | None
) -> tuple[ModelSpec, list[str]]:
    h = config.hidden_size or 1
    width = config.expert_intermediate_size or 4 * h
    shared = config.shared_expert_intermediate_size
    if shared:
        fields = {
            "model_type": "qwen2_moe", **common, "num_experts": config.num_experts, "num_experts_per_tok": config.top_k,
            "moe_intermediate_size": width, "shared_expert_intermediate_size": shared, "intermediate_size": width,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "num_key_value_heads": common["num_attention_heads"],
        }  # fmt: skip
    else:
        fields = {
            "model_type": "mixtral", **common, "num_local_experts": config.num_experts,
            "num_experts_per_tok": config.top_k, "intermediate_size": width,
            "num_key_value_heads": common["num_attention_heads"],
        }  # fmt: skip
    model = model_from_hf_config(fields, config.name)
    count = model_parameters(model)[0]
    asked = "" if wanted is None else f"; num_parameters says {wanted / 1e9:.4g} B, which the sizes decide here"
    kind = "Qwen2-MoE" if shared else "Mixtral"
    words = f"a {kind} of these sizes, every layer with experts of {width}: {count / 1e9:.4g} B parameters{asked}"
    return model, [words]
