"""Every field of every config class of the installed Megatron Bridge is read, harmless for a reason, or listed."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import sys
import typing
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from bridge_stubs import require_bridge  # noqa: E402

from bridge_memory.readers.config_container import run_from_config_container  # noqa: E402
from bridge_memory.readers.container_registry import (  # noqa: E402
    HARMLESS,
    PROVIDERS,
    READ,
    REFUSED,
    UNMODELLED,
    feature_of,
    known,
)
from bridge_memory.readers.container_unmodelled import not_modelled, provider_of  # noqa: E402
from bridge_memory.spec import SpecError  # noqa: E402

#: What Bridge 0.6 sets on a model of DeepSeek-V4 for a megatron-core that is yet to come, Falcon-H1 on itself, Step-3.5
#: on its provider beside the fields, and recipes under names that nothing reads.
LATER = {
    "model": {
        "actual_vocab_size", "apply_dsa_kernel_fusion", "cp_partition_mode", "csa_compress_ratios",
        "csa_compress_rotary_base",
        "csa_dense_mode", "csa_window_size", "enable_hyper_connections", "mhc_sinkhorn_iterations", "moe_n_hash_layers",
        "d_inner", "moe_a2a_overlap", "mtp_eval_in_bf16",
        "norm_topk_prob", "num_residual_streams", "o_groups", "o_lora_rank", "rotary_percents", "swiglu_limits",
        "swiglu_limits_shared", "use_fused_mhc",
    },
}  # fmt: skip
#: Releases up to 0.3.1, of which the registry keeps the fields.
EARLIER = {
    "model": {
        "attention_chunk_size", "bias_dropout_add_fusion", "mamba_stack_spec", "max_position_embeddings",
        "nope_layer_interval", "vision_transformer_config",
    },
    "ddp": {"preserve_fp32_weights"},
    "dist": {"lazy_init"},
    "tokenizer": {"legacy_tokenizer"},
    "dataset": {
        "_processor", "collate_impl", "dataset_dict", "dataset_name", "dataset_subset", "delete_raw", "download_mode",
        "hf_filter_lambda", "hf_filter_lambda_kwargs", "hf_kwargs", "image_folder", "image_processor", "maker_kwargs",
        "maker_name", "pack_sequences_in_batch", "packed_sequence_specs", "process_example_fn", "rewrite",
        "split_val_from_train", "val_proportion",
    },
}  # fmt: skip


def subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


@pytest.fixture(scope="module")
def bridge() -> Any:
    module = require_bridge()
    for found in pkgutil.walk_packages(module.__path__, "megatron.bridge."):
        if ".recipes" not in found.name and ".inference" not in found.name:
            try:
                importlib.import_module(found.name)
            except Exception:
                continue
    return module


def models() -> list[type]:
    """megatron-core's configs, every provider that is not refused, and the model configs that hold a transformer."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    found = [TransformerConfig, MLATransformerConfig]
    for cls in dict.fromkeys(subclasses(TransformerConfig)):
        refused = any(base.__name__ in REFUSED for base in cls.__mro__)
        if dataclasses.is_dataclass(cls) and hasattr(cls, "provide") and not refused:
            found.append(cls)
    for name in ("gpt", "hybrid"):
        try:
            module = importlib.import_module(f"megatron.training.models.{name}")
        except ImportError:
            continue
        found += [cls for cls in vars(module).values() if isinstance(cls, type) and cls.__name__ in PROVIDERS]
    return found


def parts() -> dict[str, list[type]]:
    """Part of the container -> its classes, with all that are derived from them."""
    from megatron.bridge.training.config import ConfigContainer

    with suppress(ImportError):  # before 0.6
        import megatron.bridge.diffusion.data.wan.wan_energon_datamodule  # noqa: F401

    hints = typing.get_type_hints(ConfigContainer)
    found: dict[str, list[type]] = {"model": models()}
    for field in dataclasses.fields(ConfigContainer):
        if field.name in ("model", "env_vars") or field.name.startswith("_"):
            continue
        kinds = [kind for kind in (hints[field.name], *typing.get_args(hints[field.name])) if isinstance(kind, type)]
        classes = dict.fromkeys(cls for kind in kinds for cls in (kind, *subclasses(kind)))
        found[field.name] = [
            cls for cls in classes if dataclasses.is_dataclass(cls) and cls.__module__.split(".")[0] == "megatron"
        ]
    return found


def fields_of(classes: list[type]) -> dict[str, type]:
    """Field -> the first class that has it."""
    found: dict[str, type] = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            found.setdefault(field.name, cls)
    return found


def test_every_field_of_every_config_class_is_known(bridge: Any) -> None:
    """A field that a future release adds fails here, and is no number that is wrong."""
    unknown = [
        f"{part}.{name} of {cls.__name__}"
        for part, classes in parts().items()
        for name, cls in fields_of(classes).items()
        # Models of diffusion over images and of several parts are refused with their data.
        if not known(part, name) and not (part == "dataset" and "diffusion" in cls.__module__)
        and not (part == "dataset" and "MIMO" in cls.__name__)
    ]  # fmt: skip
    assert not unknown


def test_every_entry_of_the_registry_is_a_field(bridge: Any) -> None:
    import megatron.bridge

    if tuple(map(int, megatron.bridge.__version__.split(".")[:2])) < (0, 6):
        pytest.skip("the registry's fields are those of 0.6")
    classes = parts()
    gone = {}
    for part in sorted({*READ, *UNMODELLED, *HARMLESS}):
        entries = {*READ.get(part, ()), *UNMODELLED.get(part, {}), *HARMLESS.get(part, {})}
        gone[part] = sorted(entries - set(fields_of(classes[part])) - EARLIER.get(part, set()) - LATER.get(part, set()))
    assert not {part: names for part, names in gone.items() if names}


def test_no_field_is_in_two_tables() -> None:
    for part in {*READ, *UNMODELLED, *HARMLESS}:
        tables = [set(READ.get(part, ())), set(UNMODELLED.get(part, {})), set(HARMLESS.get(part, {}))]
        assert sum(map(len, tables)) == len(set.union(*tables)), part


def test_every_field_that_counts_as_read_is_asked_for_somewhere() -> None:
    readers = ROOT / "bridge_memory" / "readers"
    names = ("config_container", "container_fields", "diffusion_provider", "gemma4_provider", "layerwise_provider",
             "transformer_config")  # fmt: skip
    source = " ".join((readers / f"{name}.py").read_text() for name in names)
    words = set(re.findall(r"\w+", source))
    unread = {f"{part}.{name}" for part, names in READ.items() for name in names if name not in words}
    assert not unread


def test_a_config_of_defaults_lists_nothing(bridge: Any) -> None:
    """megatron-core's and Bridge's plain defaults ask for nothing that is not counted."""
    from megatron.bridge.training.config import (
        CheckpointConfig,
        DistributedDataParallelConfig,
        DistributedInitConfig,
        LoggerConfig,
        OptimizerConfig,
        ProfilingConfig,
        TrainingConfig,
    )
    from megatron.core.transformer.transformer_config import TransformerConfig

    plain = {
        "model": TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4),
        "optimizer": OptimizerConfig(),
        "ddp": DistributedDataParallelConfig(),
        "dist": DistributedInitConfig(),
        "train": TrainingConfig(micro_batch_size=1, global_batch_size=1),
        "logger": LoggerConfig(),
        "checkpoint": CheckpointConfig(),
        "profiling": ProfilingConfig(),
    }
    assert list(not_modelled(plain)) == []


def test_every_provider_of_the_release_is_known_or_refused_by_name(bridge: Any) -> None:
    from megatron.bridge.models.model_provider import ModelProviderMixin

    for cls in dict.fromkeys(subclasses(ModelProviderMixin)):
        if cls.__module__.startswith("megatron.bridge.") and "provide" in vars(cls):
            assert {base.__name__ for base in cls.__mro__} & {*PROVIDERS, *REFUSED} or cls.__abstractmethods__, cls


# ---- without Megatron Bridge ----


def test_a_field_of_a_newer_release_is_listed_where_it_is_set() -> None:
    @dataclasses.dataclass
    class NewerConfig:
        num_layers: int = 2
        folds_in_time: int = 0
        parallel_output: bool = True

    newer = NewerConfig(folds_in_time=3, parallel_output=False)
    listed = [str(feature) for feature in not_modelled({"model": newer})]
    assert listed == [
        "model.folds_in_time (3): a field that is not known here",
        "model.parallel_output: logits that are gathered over tensor-parallel ranks",
    ]
    assert list(not_modelled({"model": NewerConfig()})) == []


def test_details_without_their_option_are_not_listed() -> None:
    model = SimpleNamespace(clone_scatter_output_in_embedding=False, sequence_parallel=False)
    assert not list(not_modelled({"model": model}))
    model.sequence_parallel = True
    assert [feature.split(":")[0] for feature in not_modelled({"model": model})] == [
        "model.clone_scatter_output_in_embedding"
    ]
    assert feature_of("ddp", "reuse_grad_buf_for_mxfp8_param_ag") is None  # said once, of the optimizer


@pytest.mark.parametrize(
    ("training", "listed"),
    [
        ({"fp8_quantization_recipe": "mxfp8"}, False),  # DeepSeek-V4's: what the run does anyway
        ({"fp8_quantization_recipe": "mxfp8", "fp8_format": "hybrid"}, True),
        ({"fp8_quantization_recipe": "mxfp8", "fp8_param": True}, True),
        ({"fp8_quantization_recipe": "blockwise"}, True),
        ({}, True),  # bf16
    ],
)
def test_a_quantisation_by_layer_that_says_what_the_run_says_is_not_listed(
    training: dict[str, Any], listed: bool
) -> None:
    configs = {"all": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}}
    model = SimpleNamespace(fp8="e4m3", fp8_recipe="mxfp8", quant_recipe=SimpleNamespace(configs=configs, matchers=[]))
    assert bool(list(not_modelled({"model": model}))) is listed


def test_parts_of_sequences_matter_where_ranks_share_one() -> None:
    model = SimpleNamespace(cp_partition_mode="contiguous", context_parallel_size=1)
    assert not list(not_modelled({"model": model}))
    model.context_parallel_size = 2
    assert [feature.split(" ")[0] for feature in not_modelled({"model": model})] == ["model.cp_partition_mode"]


class GPTModelProvider:
    def provide(self) -> None: ...


class MyDefaults(GPTModelProvider):
    """Sets sizes only: a GPT."""


class MyModel(GPTModelProvider):
    def provide(self) -> None: ...


class FluxProvider(GPTModelProvider):
    def provide(self) -> None: ...


class MyFluxProvider(FluxProvider):
    def provide(self) -> None: ...


def test_a_provider_that_makes_a_model_of_its_own_is_refused() -> None:
    assert provider_of(MyDefaults()) == "GPTModelProvider"
    assert provider_of(SimpleNamespace()) == ""
    with pytest.raises(SpecError, match="model is a MyModel, which makes a model of its own"):
        provider_of(MyModel())
    with pytest.raises(SpecError, match="model is a MyFluxProvider; diffusion models"):
        run_from_config_container(SimpleNamespace(model=MyFluxProvider()))
