"""Every argument of Megatron-LM's own parser is read, harmless for a reason, or listed by name when it is set.

Twice: against the parser of 0.19.2 as it is recorded in ``tests/data/megatron_lm_arguments.json``, and against the one
that is first on the path, in a process of its own, where there is one (wheels of megatron-core from 0.17 on hold it):

    pip install --no-deps --python-version 3.12 --only-binary=:all: --target FOLDER megatron-core==0.19.2
    PYTHONPATH=FOLDER python -m pytest tests/readers/test_megatron_parser.py
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.readers.megatron_args import read_arguments
from bridge_memory.readers.megatron_args.arguments import (
    DESTINATIONS,
    HARMLESS,
    KNOWN,
    OFF,
    ON,
    READ,
    SWITCHED_OFF_BY,
    UNMODELLED,
    Arguments,
    by_destination,
)
from bridge_memory.readers.megatron_args.harmless import REASONS
from bridge_memory.readers.megatron_args.unmodelled import Feature, same
from bridge_memory.spec.unmodelled import Effect

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "megatron_lm_arguments.json"


def holds_the_parser(folder: str) -> bool:
    return (Path(folder or ".") / "megatron" / "training" / "arguments.py").is_file()


@functools.cache
def parser_on_the_path(folder: str) -> Any:
    """What ``scripts/maintain/megatron_lm_namespaces.py --parser`` writes of the release in ``folder``."""
    script = str(ROOT / "scripts" / "maintain" / "megatron_lm_namespaces.py")
    made = subprocess.run(
        [sys.executable, "-W", "ignore", script, "--parser", "/dev/stdout"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folder}, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout[made.stdout.index("{\n"):])


@pytest.fixture(params=["recorded", "on the path"])
def parser(request: pytest.FixtureRequest) -> Any:
    """The release, its parser's defaults (by destination), options of other names, and the fields of its configs."""
    if request.param == "recorded":
        return json.loads(RECORDED.read_text())
    pytest.importorskip("torch")
    folder = next(filter(holds_the_parser, sys.path), None)
    if folder is None:
        pytest.skip("no megatron-core with megatron/training/arguments.py is on the path")
    return parser_on_the_path(folder)


def test_every_argument_has_one_class_and_every_harmless_one_a_reason() -> None:
    assert not READ & HARMLESS.keys() and not (READ | HARMLESS.keys()) & UNMODELLED.keys()
    listed = [name for names in REASONS.values() for name in names.split()]
    assert len(listed) == len(set(listed)) == len(HARMLESS)
    assert all(len(reason) > 20 for reason in REASONS)


def test_every_destination_of_the_parser_is_known(parser: Any) -> None:
    assert not parser["defaults"].keys() - KNOWN - DESTINATIONS.keys()


def test_every_name_that_validate_args_adds_is_known() -> None:
    runs = json.loads(RECORDED.read_text())["runs"]
    assert not {name for run in runs.values() for name in run["namespace"]} - KNOWN - DESTINATIONS.keys()


def test_an_argument_of_a_future_release_is_in_no_class() -> None:
    """The test above would say so, and the reader lists it."""
    assert "brand_new" not in KNOWN
    (feature,) = Arguments(read_arguments(SimpleNamespace(brand_new=2))).not_modelled()
    assert feature == "--brand-new: not an argument this reader knows" and feature.effect is Effect.UNKNOWN


def test_every_option_finds_its_destination(parser: Any) -> None:
    for option, (destination, value) in parser["options"].items():
        found = by_destination({option: True})
        assert found.keys() <= KNOWN | DESTINATIONS.keys(), option
        if destination in READ | UNMODELLED.keys():
            assert found == {destination: True if value is None else value}, option


#: Defaults that a release of ours does not share, or that are another spelling of the same.
_OTHER_DEFAULTS = {
    "attention_backend": ("AttnBackend.auto",),
    # Nothing before 0.18, and no_shard; the reader knows.
    "data_parallel_sharding_strategy": ("no_shard", "optim_grads_params"),
    "moe_router_load_balancing_type": ("aux_loss",),
    "no_load_optim": (None,), "no_save_optim": (None,),
}


def test_defaults_of_what_is_read_are_megatron_lms(parser: Any) -> None:
    unset = Arguments(read_arguments(SimpleNamespace()))
    for name in READ & parser["defaults"].keys():
        ours = list(unset[name]) if isinstance(unset[name], tuple) else unset[name]
        assert parser["defaults"][name] in (ours, *_OTHER_DEFAULTS.get(name, ())), name
    for name in (OFF | ON) & parser["defaults"].keys():
        default = parser["defaults"][name]
        assert (default or False if name in ("no_load_optim", "no_save_optim") else default) is (name in ON), name
    assert set(SWITCHED_OFF_BY.values()) <= ON | {name for name, entry in UNMODELLED.items() if entry.default is True}


def test_defaults_of_what_is_not_modelled_are_megatron_lms(parser: Any) -> None:
    wrong = {
        name: default
        for name, default in parser["defaults"].items()
        if name in UNMODELLED and not same(default, UNMODELLED[name].default)
    }
    assert not wrong


def test_where_nothing_is_set_nothing_is_listed(parser: Any) -> None:
    assert not Arguments(read_arguments(SimpleNamespace(**parser["defaults"]))).not_modelled()


def test_every_field_of_the_configs_is_known(parser: Any) -> None:
    """Newer Megatron-LM makes arguments of these fields, so each must be known by name."""
    assert not set(parser["fields"]) - KNOWN - DESTINATIONS.keys() - _OTHER_NAMES


#: Fields that Megatron-LM sets from arguments of other names, or that hold functions.
_OTHER_NAMES = {
    "params_dtype", "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
    "param_sync_func", "enable_autocast", "autocast_dtype", "gradient_accumulation_fusion", "pipeline_dtype",
    "_cpu_offloading_context", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "add_bias_linear", "gated_linear_unit", "activation_func", "init_method", "output_layer_init_method",
    "embedding_init_method", "bias_activation_fusion", "persist_layer_norm", "bias_dropout_fusion",
    "apply_rope_fusion", "fp8_quantizer_factory", "fp4_quantizer_factory", "store_param_remainders",
    "grad_reduce_in_fp32", "bucket_size",
    # Arguments add ddp_ to these.
    "num_buckets", "pad_buckets_for_high_nccl_busbw", "param_name_patterns_for_fp32_local_accumulation",
    "experimental_attention_variant_loss_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func",
}  # fmt: skip


# ---- what is not modelled is listed when it is set, and only then ----

#: What else must be set for an argument to have an effect.
_BESIDE: dict[str, dict[str, Any]] = {
    name: beside
    for beside, names in (
        ({"fp8": "hybrid"}, "fp8_amax_history_len fp8_wgrad moe_router_padding_for_fp8 "
         "moe_router_padding_for_quantization moe_permute_padding_for_fp8_quantization "
         "disable_parameter_transpose_cache"),
        ({"optimizer": "dist_muon"}, "muon_scalar_optimizer muon_tp_mode"),
        ({"optimizer_cpu_offload": True}, "use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d"),
        ({"bias_gelu_fusion": False}, "activation_func_clamp_value hidden_activation_clamp"),
        ({"use_legacy_models": True}, "use_flash_attn"),
        ({"sequence_parallel": True}, "clone_scatter_output_in_embedding"),
    )
    for name in names.split()
}  # fmt: skip


@pytest.mark.parametrize("name", UNMODELLED)
def test_what_is_not_modelled_is_listed_when_it_is_set(name: str) -> None:
    entry = UNMODELLED[name]
    other = False if entry.default is True else 7 if entry.default in (None, 0, 1) else True
    beside, option = _BESIDE.get(name, {}), "--" + name.replace("_", "-")

    def listed(**values: Any) -> list[Any]:
        return [feature for feature in Arguments(read_arguments(values)).not_modelled() if feature.startswith(option)]

    (feature,) = listed(**beside, **{name: other})
    assert entry.what in feature and feature.effect is entry.effect
    if entry.default is not None:
        assert not listed(**beside, **{name: entry.default})
    assert bool(beside) is not bool(listed(**{name: other}))


def test_a_larger_batch_in_evaluation_is_listed_and_an_equal_one_is_not() -> None:
    """``validate_args`` fills in that of training."""
    def listed(size: int) -> bool:
        return bool(Arguments(read_arguments({"micro_batch_size": 2, "eval_micro_batch_size": size})).not_modelled())

    assert listed(4) and not listed(2) and not listed(1)


def test_what_a_file_or_a_checkpoint_says_is_in_parsed_arguments() -> None:
    values = {"use_checkpoint_args": True, "tensor_parallel_num_weight_shards": 2, "yaml_cfg": "a.yaml"}
    assert len(Arguments(read_arguments(values)).not_modelled()) == 3
    assert not Arguments(read_arguments(SimpleNamespace(**values))).not_modelled()


@pytest.mark.parametrize(
    ("value", "default", "alike"),
    [
        (1.0, "1", True), ("none", None, True), ([], None, True), (False, None, True), ("0", 0, True), ("1e0", 1, True),
        ("True", True, True), (2, 1, False), ("mean", "sum", False), (True, None, False), ("0", 1, False),
        ("adam", "lion", False), (True, False, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_they_are_told(value: object, default: object, alike: bool) -> None:
    assert same(value, default) is alike
    assert Feature(default, Effect.UP, "").applies(Arguments(read_arguments({})), value) is not alike
