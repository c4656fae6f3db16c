"""The drop-in beside Megatron Bridge 0.6.2's own functions, on the containers that its recipes make.

Every public function, figures to the last bit and text to the last character: on recipes as their functions return
them, as ``validate()`` leaves them, and changed at random. Skipped where that release is not installed.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import os
import pkgutil
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from bridge_stubs import require_bridge

from bridge_memory import theoretical_memory_utils as ours
from bridge_memory.spec import SpecError


class Outcome(NamedTuple):
    """What a function did: ``result`` has types and all digits, ``error`` is None where it answered."""

    result: str
    printed: str
    error: Exception | None


class Recipe(NamedTuple):
    name: str
    #: As the recipe returns it.
    built: Any
    #: As Bridge's own validation leaves it, which is what training starts from.
    validated: Any


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    require_bridge()
    module = importlib.import_module("megatron.bridge.training.utils.theoretical_memory_utils")
    if not hasattr(module, "estimate_training_memory"):
        pytest.skip("megatron-bridge is older than 0.6: it states other closed forms")
    return module


@pytest.fixture(scope="module")
def recipes(theirs: ModuleType) -> Iterator[list[Recipe]]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    from bridge_recipes import bridge_on_cpu, build, recipe_names

    environment, logged = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    found = []
    with bridge_on_cpu() as module, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = {name: getattr(module, name) for name in recipe_names(module)} | performance_recipes()
        for name, recipe in made.items():
            with contextlib.suppress(Exception):  # its config is not at hand
                config = build(recipe)
                found.append(Recipe(name, snapshot(config), validated(config)))
    yield found
    logging.disable(logged)
    os.environ.clear()
    os.environ.update(environment)  # Bridge exports a container's env_vars


def performance_recipes() -> dict[str, Any]:
    from megatron.bridge import perf_recipes

    made: dict[str, Any] = {}
    for entry in pkgutil.walk_packages(perf_recipes.__path__, f"{perf_recipes.__name__}."):
        for name, value in vars(importlib.import_module(entry.name)).items():
            if name.endswith("_config") and "gpu_" in name and callable(value):
                made[name] = value
    return made


def snapshot(config: Any) -> Any:
    """A container of its own as far as the drop-in reads it."""
    kept = copy.copy(config)
    kept.model, kept.train, kept.optimizer = map(copy.copy, (config.model, config.train, config.optimizer))
    return kept


def validated(config: Any) -> Any:
    """``config`` after ``runtime_config_update``, on its smallest world, with the vocabulary that setup sets. Some end
    half-way (a GPU or a dataset is not there): then what is left undone of the model is done here."""
    from bridge_recipes import smallest_world
    from megatron.bridge.training import config as bridge

    model = config.model
    world, asked = smallest_world(config), bridge.get_world_size_safe
    bridge.get_world_size_safe = lambda: world
    try:
        bridge.runtime_config_update(config)
    except Exception:
        model.kv_channels = model.kv_channels or model.hidden_size // max(1, model.num_attention_heads)
        model.expert_tensor_parallel_size = model.expert_tensor_parallel_size or model.tensor_model_parallel_size
    finally:
        bridge.get_world_size_safe = asked
    if model.vocab_size is None:
        model.vocab_size, model.should_pad_vocab = 128256, True
    return config


def call(module: Any, function: str, *args: Any, **words: Any) -> Outcome:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            result = getattr(module, function)(*args, **words)
    except Exception as error:
        return Outcome("", printed.getvalue(), error)
    return Outcome(repr(result), printed.getvalue(), None)


def every_call(config: Any, microbatches: int | None) -> Iterator[tuple[Any, ...]]:
    """(function, positional arguments, keywords) of all that the module offers."""
    for include in (True, False):
        yield "estimate_training_memory", (config, microbatches), {"include_activation": include}
    for verbose in (True, False):
        yield "compute_weight_and_optimizer_memory", (config,), {"verbose": verbose}
        yield "compute_activation_memory", (config, microbatches), {"verbose": verbose}
        yield "report_theoretical_memory", (config,), {"num_microbatches": microbatches, "verbose": verbose}


def lines_of(module: Any, config: Any, microbatches: int | None) -> list[str]:
    """Formatted estimates in all units, "" where there is no estimate."""
    try:
        estimate = module.estimate_training_memory(config, microbatches)
    except Exception:
        return []
    bare = module.estimate_training_memory(config, include_activation=False)
    sizes = [repr((e.memory_mb, e.memory_gb)) for e in estimate.model_state_components]
    sizes += [repr((e.total_memory_mb, e.total_memory_gb, e.weight_and_optimizer_bytes)) for e in (estimate, bare)]
    return sizes + [
        module.format_training_memory_estimate(e, unit=u) for e in (estimate, bare) for u in ("MB", "GB", "gb")
    ]


def differences(theirs: ModuleType, config: Any, microbatches: int | None) -> tuple[list[Any], int]:
    """(what differs, calls that Bridge answers). Where Bridge fails, ours may answer, or refuse in a line."""
    found, answered = [], 0
    for function, args, words in every_call(config, microbatches):
        expected, got = call(theirs, function, *args, **words), call(ours, function, *args, **words)
        if expected.error is None:
            answered += 1
            if got != expected:
                found.append((function, words, expected, got))
        elif got.error is not None and not isinstance(got.error, SpecError):
            found.append((function, words, expected, got))
    expected_lines = lines_of(theirs, config, microbatches)
    if expected_lines and lines_of(ours, config, microbatches) != expected_lines:
        found.append(("format_training_memory_estimate", microbatches))
    return found, answered


def test_names_signatures_and_fields_are_bridges(theirs: ModuleType) -> None:
    public = {n for n, v in vars(theirs).items() if getattr(v, "__module__", "") == theirs.__name__ and n[0] != "_"}
    public |= {n for n in vars(theirs) if n.startswith("NUM_BYTES_")}
    assert len(public) == 9
    for name in public:
        expected, got = getattr(theirs, name), getattr(ours, name)
        if isinstance(expected, int):
            assert got == expected
        elif isinstance(expected, type):
            assert [(f.name, f.default) for f in fields(got)] == [(f.name, f.default) for f in fields(expected)]
            properties = {n for n, v in vars(expected).items() if isinstance(v, property)}
            assert properties <= {n for n, v in vars(got).items() if isinstance(v, property)}
            assert got.__dataclass_params__.frozen and got.__slots__ == expected.__slots__
        else:
            parameters = {n: p for n, p in inspect.signature(got).parameters.items() if n != "method"}
            assert [(n, p.kind, p.default) for n, p in parameters.items()] == [
                (n, p.kind, p.default) for n, p in inspect.signature(expected).parameters.items()
            ], name


def test_every_recipe_has_bridges_figures_and_text(theirs: ModuleType, recipes: list[Recipe]) -> None:
    assert len(recipes) > 950
    unanswered: dict[str, set[str]] = {"built": set(), "validated": set()}
    for recipe in recipes:
        for state, names in unanswered.items():
            for microbatches in (None, 1, 6):
                found, answered = differences(theirs, getattr(recipe, state), microbatches)
                assert not found, (recipe.name, state, found)
                if answered < 8:
                    names.add(recipe.name)
            if recipe.name not in names:  # whatever has figures can be remarked on
                assert all(remark and "\n" not in remark for remark in ours.remarks(getattr(recipe, state)))
    # Bridge fails on vanilla_gpt, which the user fills in, and where a stand-in config has not the layers that the
    # recipe states for its stages.
    assert len(unanswered["validated"]) < 0.02 * len(recipes)
    # A vocabulary or head size that only validation sets: ours may answer, and the others are still compared.
    assert len(unanswered["built"]) < 0.3 * len(recipes)


#: Field -> values; the last ones are wrong. "optimizer." and "train." are other parts, "." the container.
CHANGES: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1, 2, 8, None, 0),
    "pipeline_model_parallel_size": (1, 2, 4, 16, None, -1),
    "virtual_pipeline_model_parallel_size": (None, 1, 2, 5, 0),
    "context_parallel_size": (1, 2, 16, None, 0),
    "expert_model_parallel_size": (1, 8, None, 0),
    "expert_tensor_parallel_size": (1, 3, None, 0),
    "num_layers": (1, 8, 61, None, 0),
    "num_layers_in_first_pipeline_stage": (None, 1, 4, 7, 0),
    "num_layers_in_last_pipeline_stage": (None, 2, 4, 13, 0),
    "pipeline_model_parallel_layout": (None, "Et*4|t*4L", [["embedding", "decoder"], ["decoder", "loss"]]),
    "account_for_embedding_in_pipeline_split": (True, False),
    "account_for_loss_in_pipeline_split": (True, False),
    "hidden_size": (1000, 4096, 0, None),
    "ffn_hidden_size": (4097, 16384, 0, None),
    "num_attention_heads": (7, 32, 0, None),
    "num_query_groups": (None, 0, 1, 3),
    "kv_channels": (64, 192, None),
    "seq_length": (77, 8192, None),
    "vocab_size": (50257, 1, 0, -1, None),
    "should_pad_vocab": (True, False, None),
    "make_vocab_size_divisible_by": (1, 128, 0, None),
    "share_embeddings_and_output_weights": (True, False),
    "gated_linear_unit": (True, False),
    "activation_func": ("silu", "gelu", "relu", None),
    "num_moe_experts": (None, 0, 8, 256, -1),
    "moe_layer_freq": (1, 2, True, [0, 1] * 4, (1,) * 8, [0, 2, "x", None] * 2, [1], 0, "every-other", None),
    "moe_router_topk": (1, 8, None, 0, -1),
    "num_experts_routed_to": (2, None),
    "moe_ffn_hidden_size": (None, 0, 768, -1),
    "moe_shared_expert_intermediate_size": (None, 0, 1024, -1),
    "moe_latent_size": (None, 0, 512),
    "mtp_num_layers": (None, 0, 1, 2),
    "sequence_parallel": (True, False),
    "recompute_granularity": ("selective", "full", None),
    "params_dtype": ("float32", "float16"),
    "fp8": ("hybrid", None),
    "multi_latent_attention": (True, False),
    "optimizer.use_distributed_optimizer": (True, False),
    "optimizer.use_precision_aware_optimizer": (True, False),
    "train.micro_batch_size": (1, 3, None),
    ".data_parallel_size": (1, 3, 64, None, 0),
}


def changed(config: Any, draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A copy with one to six fields set to something else, and what was set; None of a field may be its absence."""
    import torch.nn.functional as functional

    config, changes = snapshot(config), {}
    for name in draw.sample(sorted(CHANGES), draw.randint(1, 6)):
        value = changes[name] = draw.choice(CHANGES[name])
        part, _, field = name.rpartition(".")
        holder = config if name.startswith(".") else getattr(config, part or "model")
        if name == "activation_func" and value is not None:
            value = getattr(functional, value)
        setattr(holder, field, value)
    return config, changes


def test_changed_containers_have_bridges_figures_or_are_refused_where_bridge_fails(
    theirs: ModuleType, recipes: list[Recipe]
) -> None:
    draw, equal, failed = random.Random(62), 0, 0
    for _ in range(4000):
        name, _, config = draw.choice(recipes)
        config, changes = changed(config, draw)
        found, answered = differences(theirs, config, draw.choice((None, 1, 4, 32)))
        assert not found, (name, changes, found)
        equal += answered
        failed += answered == 0
    # The draw reaches both sides: half of all calls answered, and some containers that Bridge does not answer at all.
    assert equal > 4000 * 8 / 2 and failed > 400


def test_wrong_values_that_bridge_names_are_value_errors_of_ours_too(theirs: ModuleType, recipes: list[Recipe]) -> None:
    base = next(r.validated for r in recipes if r.name.startswith("qwen3_30b_a3b_pretrain"))
    wrong = (
        ("tensor_model_parallel_size", 0), ("pipeline_model_parallel_size", -1), ("context_parallel_size", 0),
        ("expert_model_parallel_size", 0), ("moe_ffn_hidden_size", -1), ("num_layers", 0), ("moe_layer_freq", 0),
        ("moe_layer_freq", [1, 0]), ("moe_layer_freq", "every-other"), ("num_layers_in_first_pipeline_stage", 10**6),
        ("moe_shared_expert_intermediate_size", -8),
    )  # fmt: skip
    for field, value in wrong:
        config = snapshot(base)
        setattr(config.model, field, value)
        for module in (theirs, ours):
            with pytest.raises(ValueError):
                module.estimate_training_memory(config)
    for module in (theirs, ours):
        with pytest.raises(ValueError, match=r"^Unsupported memory unit: TB$"):
            module.format_training_memory_estimate(module.estimate_training_memory(base), unit="tb")


def test_a_mimo_provider_is_passed_over_in_silence(theirs: ModuleType) -> None:
    from megatron.bridge.models.megatron_mimo.megatron_mimo_provider import MegatronMIMOProvider

    class Sub(MegatronMIMOProvider):
        pass

    for cls in (MegatronMIMOProvider, Sub):
        config = SimpleNamespace(model=object.__new__(cls))
        for module in (theirs, ours):
            assert call(module, "report_theoretical_memory", config, verbose=True) == Outcome("None", "", None)
        assert ours.remarks(config) == () and ours.theoretical_memory_line(config) == ""
