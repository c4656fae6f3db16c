"""``--mapping mbridge``: the TransformerConfig that mbridge itself makes of a Hugging Face config -> ModelSpec."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from bridge_memory.readers.fields import shown
from bridge_memory.readers.transformer_config import model_from_transformer_config
from bridge_memory.spec import ModelSpec, SpecError


def model_from_mbridge(
    config: Mapping[str, Any], name: str = "config", *, make_vocab_size_divisible_by: int | None = None
) -> ModelSpec:
    """Read ``config`` through ``mbridge.AutoBridge.from_config``; the vocabulary as in ``model_from_hf_config``.

    Needs the ``megatron`` extra (mbridge, megatron-core, torch, transformers); no process group. Raises SpecError
    where they are missing, mbridge does not know the model_type, or cannot read the config.
    """
    if config.get("model_type") == "gemma3_text":  # mbridge knows the text model inside its wrapper alone
        tied = config.get("tie_word_embeddings") is not False
        config = {"model_type": "gemma3", "text_config": dict(config), "tie_word_embeddings": tied}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = mbridge_of(config, name)
    model_type = str(config["model_type"])
    text = next(
        (getattr(bridge.hf_config, k) for k in ("text_config", "llm_config") if hasattr(bridge.hf_config, k)),
        bridge.hf_config,
    )
    gemma = model_type == "gemma3"
    assumptions = ["read through mbridge's TransformerConfig"]
    if make_vocab_size_divisible_by is None:
        # LLMBridge._model_provider pads only when told to; 1 leaves what TP divides as it is.
        make_vocab_size_divisible_by = 1
        assumptions.append(
            f"vocab_size {text.vocab_size} is padded only to a multiple of the tensor parallel size: mbridge keeps a "
            "Hugging Face vocabulary as it is"
        )
    if "vision_config" in config:
        assumptions.append("language model only: the parameters and activations of vision_config are left out")
    return model_from_transformer_config(
        bridge.config,
        vocab_size=text.vocab_size,
        name=name,
        model_type=model_type,
        max_sequence_length=text.max_position_embeddings,
        position_embedding_type="rope",
        # Of mbridge's types only GLM's rotate a part; their _get_gptmodel_args pass this field on.
        rotary_percent=float(getattr(text, "partial_rotary_factor", None) or 1.0),
        share_embeddings_and_output_weights=bool(getattr(bridge.hf_config, "tie_word_embeddings", False)),
        make_vocab_size_divisible_by=make_vocab_size_divisible_by,
        # gemma3/__init__.py _model_provider: these two are set while the model is built.
        post_layernorms=gemma,
        activation="gelu" if gemma else None,
        assumptions=tuple(assumptions),
    )


def mbridge_of(config: Mapping[str, Any], name: str) -> Any:
    """mbridge's Bridge for a parsed config.json, for one rank that holds everything."""
    try:
        from mbridge import AutoBridge
        from mbridge.core.parallel_states import ParallelStates
        from transformers import AutoConfig, PretrainedConfig
    except Exception as error:  # a half-installed Megatron fails in many ways
        raise SpecError(
            f"mapping mbridge needs mbridge, megatron-core, torch and transformers ({_one_line(error)}); "
            "pip install '.[megatron]' in the folder of bridge-memory, or use --mapping builtin"
        ) from None
    model_type = config.get("model_type")
    known = AutoBridge.list_supported_models()
    if model_type not in known:
        raise SpecError(
            f"{name}: mbridge does not know model_type {shown(model_type)} (it knows {', '.join(sorted(known))}); "
            "use --mapping builtin"
        )
    fields = {k: v for k, v in config.items() if k != "model_type"}
    try:
        try:
            hf_config = AutoConfig.for_model(model_type, **fields)
        except ValueError:  # mimo, internvl_chat: their config classes are remote code
            hf_config = PretrainedConfig(**fields)
            hf_config.model_type = model_type
        # Given its parallel sizes, mbridge asks no process group for them.
        states = ParallelStates(vpp_size=None)
        with _position_argument_renamed():
            return AutoBridge.from_config(hf_config, parallel_states=states)
    except Exception as error:  # whatever mbridge, transformers or megatron-core think of this config
        raise SpecError(f"{name}: mbridge cannot read this config: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class _position_argument_renamed:
    """While open, DeepSeek-V3's bridge may pass ``max_position_embeddings`` to MLATransformerConfig.

    megatron-core 0.14 renamed that field to ``original_max_position_embeddings`` and mbridge 0.15.1 still uses the
    old name, so that it cannot build the config at all. The field belongs to YaRN and holds no memory.
    """

    def __enter__(self) -> None:
        from mbridge.models.deepseek_v3 import DeepseekV3Bridge
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        self._bridge = DeepseekV3Bridge
        self._before = DeepseekV3Bridge.__dict__.get("TransformerConfigClass", MLATransformerConfig)
        names = MLATransformerConfig.__dataclass_fields__
        if "max_position_embeddings" in names:
            return

        def renamed(**kwargs: Any) -> Any:
            kwargs["original_max_position_embeddings"] = kwargs.pop("max_position_embeddings")
            return MLATransformerConfig(**kwargs)

        DeepseekV3Bridge.TransformerConfigClass = staticmethod(renamed)

    def __exit__(self, *_: object) -> None:
        self._bridge.TransformerConfigClass = self._before
