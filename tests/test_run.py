"""A RunSpec says what it wants: a model's name will do, and what is no spec is refused in one line."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from bridge_memory import RunSpec, SpecError, resolve_model
from bridge_memory.spec import OptimizerSpec, ParallelSpec, PrecisionSpec, RecomputeSpec
from bridge_memory.spec import run as run_module
from bridge_memory.spec.run import GROUPS

NAME = "meta-llama/Llama-3.1-8B"
MODEL = resolve_model(NAME)


def refusal(**given: Any) -> str:
    with pytest.raises(SpecError) as error:
        RunSpec(**given)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_may_be_named() -> None:
    run = RunSpec(model=NAME)
    assert run == RunSpec(model=MODEL)
    assert run.with_fields(model="Qwen/Qwen3-8B").model.name == "Qwen/Qwen3-8B"


def test_a_name_nobody_knows_is_answered_with_near_ones() -> None:
    assert "Llama-3.1-8B" in refusal(model="Llama-9.1-8B")


def test_without_a_reader_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_resolve", None)
    assert "import bridge_memory.readers" in refusal(model=NAME)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("value", [{"tp": 8}, {}, None, 8, "tp8"])
def test_what_is_no_group_is_refused_by_its_name(group: str, value: object) -> None:
    line = refusal(model=MODEL, **{group: value})
    assert line.startswith(f"{group} (") and GROUPS[group].__name__ in line


def test_a_dict_of_a_groups_fields_is_answered_with_the_group() -> None:
    line = refusal(model=MODEL, parallel={"world_size": 16, "tensor_model_parallel_size": 8})
    assert line.endswith("give ParallelSpec(world_size=16, tensor_model_parallel_size=8)")


@pytest.mark.parametrize("value", [None, 3, {"hidden_size": 4096}, ParallelSpec()])
def test_what_is_no_model_is_refused(value: object) -> None:
    assert refusal(model=value).startswith("model (")


def test_one_sentence_is_not_a_tuple_of_sentences() -> None:
    assert refusal(model=MODEL, assumptions="balanced").startswith("assumptions ('balanced')")


def test_every_group_of_a_run_is_named_once() -> None:
    assert [f.name for f in fields(RunSpec)] == ["model", *GROUPS, "teacher", "assumptions", "not_modelled"]


# ---- single fields ----

RUN = RunSpec(model=MODEL, parallel=ParallelSpec(world_size=16))


def test_a_field_finds_its_group() -> None:
    changed = RUN.with_fields(
        tensor_model_parallel_size=4, use_precision_aware_optimizer=True, exp_avg_dtype="bf16",
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1, hidden_dropout=0.1,
    )  # fmt: skip
    assert changed == RunSpec(
        model=replace(MODEL, hidden_dropout=0.1),
        parallel=ParallelSpec(world_size=16, tensor_model_parallel_size=4),
        optimizer=OptimizerSpec(use_precision_aware_optimizer=True, exp_avg_dtype="bf16"),
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )
    assert RUN.with_fields() == RUN


def test_a_field_of_two_groups_is_named_in_full() -> None:
    with pytest.raises(SpecError, match=r"write precision\.fp8_recipe or optimizer\.fp8_recipe"):
        RUN.with_fields(fp8_recipe="mxfp8")
    changed = RUN.with_fields(**{"precision.fp8": "e4m3", "precision.fp8_recipe": "mxfp8"})
    assert changed.precision == PrecisionSpec(fp8="e4m3", fp8_recipe="mxfp8")


def test_a_whole_group_may_stand_beside_its_fields() -> None:
    changed = RUN.with_fields(parallel=ParallelSpec(world_size=32), tensor_model_parallel_size=8)
    assert changed.parallel == ParallelSpec(world_size=32, tensor_model_parallel_size=8)


def test_fields_of_the_run_itself_come_before_those_of_its_groups() -> None:
    changed = RUN.with_fields(assumptions=("the run's",), **{"model.assumptions": ("the model's",)})
    assert changed.assumptions == ("the run's",)
    assert changed.model.assumptions == ("the model's",)


@pytest.mark.parametrize(
    ("name", "near"),
    [("tensor_parallel_size", "tensor_model_parallel_size"), ("method", "recompute"), ("zzz", "model")],
)
def test_a_name_that_no_group_has_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=f"^{name} is no field of a RunSpec; .*{near}"):
        RUN.with_fields(**{name: 1})


def test_a_name_of_several_lines_is_answered_in_one() -> None:
    with pytest.raises(SpecError, match=r"^'a\\nb' is no field of a RunSpec"):
        RUN.with_fields(**{"a\nb": 1})


def test_a_changed_run_is_checked_again() -> None:
    with pytest.raises(SpecError, match="sequence_parallel"):
        RUN.with_fields(sequence_parallel=True)
