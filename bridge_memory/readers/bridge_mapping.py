"""``--mapping bridge``: a Hugging Face config, read through Megatron Bridge's AutoBridge and provider -> ModelSpec."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.fields import shown
from bridge_memory.spec import ModelSpec, SpecError


def model_from_bridge(
    config: Mapping[str, Any], name: str = "config", *, make_vocab_size_divisible_by: int | None = None
) -> ModelSpec:
    """Read ``config`` through ``AutoBridge.from_hf_config``.

    The provider is read as the model of a ConfigContainer, with the same refusals. Needs megatron-bridge and its
    dependencies, but no process group and no weights. ``make_vocab_size_divisible_by`` as in ``model_from_hf_config``.

    Raises:
        SpecError: Megatron Bridge cannot be imported, has no bridge for the config's architecture, or cannot read the
            config.
    """
    provider = provider_of(config, name)
    train = SimpleNamespace(micro_batch_size=1, global_batch_size=1)
    # The container reader needs a whole run; one rank will do, and only the model is kept.
    alone = SimpleNamespace(model=provider, train=train, mixed_precision="bf16_mixed", data_parallel_size=1)
    if getattr(provider, "moe_token_dispatcher_type", None) == "flex":
        # The dispatcher is not part of the model, and "flex" needs more than one rank.
        provider.moe_token_dispatcher_type = "alltoall"
    run = run_from_config_container(alone, name=name)
    model = replace(
        run.model,
        model_type=str(config.get("model_type", "")),
        assumptions=("read through Megatron Bridge's AutoBridge", *run.model.assumptions),
        not_modelled=(*run.model.not_modelled, *run.not_modelled),
    )
    if make_vocab_size_divisible_by is not None:
        return replace(model, make_vocab_size_divisible_by=make_vocab_size_divisible_by)
    if getattr(provider, "should_pad_vocab", False):
        return model
    sentence = (
        f"vocab_size {model.vocab_size} is padded only to a multiple of the tensor parallel size: Megatron Bridge "
        "keeps a Hugging Face vocabulary as it is"
    )
    return replace(model, make_vocab_size_divisible_by=1, assumptions=(*model.assumptions, sentence))


def provider_of(config: Mapping[str, Any], name: str) -> Any:
    """Megatron Bridge's provider for a parsed config.json, without weights. Raises SpecError."""
    with _quiet():
        try:
            from megatron.bridge import AutoBridge
            from transformers import AutoConfig, PretrainedConfig
        except Exception as error:  # a half-installed Megatron Bridge raises many kinds of errors
            raise SpecError(
                f"mapping bridge needs megatron-bridge ({_one_line(error)}); pip install megatron-bridge, or use "
                "--mapping builtin"
            ) from None
        if not config.get("architectures"):
            raise SpecError(
                f"{name}: architectures is missing, by which Megatron Bridge chooses its bridge; add it "
                '(["Qwen3ForCausalLM"], ...), or use --mapping builtin'
            )
        model_type = config.get("model_type")
        # Remote code is never run: Megatron Bridge only needs the architecture's name.
        fields = {k: v for k, v in config.items() if k not in ("model_type", "auto_map")}
        try:
            try:
                hf_config = AutoConfig.for_model(model_type, **fields)
            except ValueError:  # model types whose config class is in the model's repository
                hf_config = PretrainedConfig(**fields)
                hf_config.model_type = model_type
            return AutoBridge.from_hf_config(hf_config).to_megatron_provider(load_weights=False)
        except Exception as error:  # whatever Megatron Bridge, transformers or megatron-core think of this config
            if not set(config["architectures"]) & set(AutoBridge.list_supported_models()):
                raise SpecError(
                    f"{name}: Megatron Bridge has no bridge for {shown(config['architectures'])}; use --mapping builtin"
                ) from None
            raise SpecError(f"{name}: Megatron Bridge cannot read this config: {_one_line(error)}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warnings that importing Megatron Bridge and reading a config print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
