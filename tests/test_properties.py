"""Random runs: an estimate, the same one by every way of asking, or one line that names a field. Nothing else."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_runs import MODULES, Asked, asked_runs

from bridge_memory import clear_caches, estimate, explain, list_presets, peaks
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.result import Estimate
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

#: Every name a refusal may blame: the fields of the spec, and the flags and keys that stand for them.
FIELDS = {
    f.name
    for cls in (
        ModelSpec, LayerSpec, AttentionSpec, MLASpec, MambaSpec, GatedDeltaNetSpec, MLPSpec, MoESpec, RunSpec,
        ParallelSpec, BatchSpec, PrecisionSpec, OptimizerSpec, DataParallelSpec, PeftSpec, RecomputeSpec,
        ImplementationSpec,
    )
    for f in fields(cls)
} | {
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "num_layers",
    "num_moe_experts", "data_parallel_size", "moe_router_topk",
}


def some(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def made(asked: Asked) -> RunSpec | None:
    """The run that is asked for, if there is one and it can be estimated."""
    try:
        run = asked.run()
        peaks(run)
    except SpecError:
        return None
    return run


# ---- an answer, or one line ----


def check_estimate(run: RunSpec) -> None:
    """Every layer is on one stage; bytes are whole numbers (and not sizes that are still worked out) and not less than
    nothing; a step leaves no more than its peak."""
    result = estimate(run)
    assert len(result.stages) == run.parallel.pp
    assert sorted(i for s in result.stages for i in s.layers) == list(range(run.model.num_layers))
    for stage in result.stages:
        assert type(stage.parameters) is int and stage.parameters >= 0
        for component in (*stage.components, *stage.carried_over):
            assert type(component.bytes) is int and component.bytes >= 0, component
        assert stage.static_bytes <= stage.peak_bytes


def check_refusal(error: SpecError) -> None:
    text = str(error)
    assert text and "\n" not in text
    named = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z0-9]+", text))
    assert named & FIELDS, f"names no field: {text}"


def check_run(asked: Asked) -> None:
    try:
        check_estimate(asked.run())
    except SpecError as error:
        check_refusal(error)


@some(400)
@given(asked_runs())
def test_a_random_run_is_estimated_or_refused_by_a_field(asked: Asked) -> None:
    check_run(asked)


@pytest.mark.slow
@some(4000)
@given(asked_runs())
def test_thousands_of_random_runs_are_estimated_or_refused_by_a_field(asked: Asked) -> None:
    check_run(asked)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 1 << 50), st.floats(allow_nan=True), st.text(max_size=8),
    st.lists(st.integers(-2, 5), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def check_damaged(name: str, data: st.DataObject) -> None:
    config = dict(resolve_config(name)[1])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2, unique=True)):
        if data.draw(st.booleans()):
            del config[key]
        else:
            config[key] = data.draw(JUNK)
    try:
        model = model_from_hf_config(config, name)
        if model.num_layers <= 512:
            check_estimate(RunSpec(model=model))
    except SpecError as error:
        assert str(error) and "\n" not in str(error)


@some(150)
@given(st.sampled_from(list_presets()), st.data())
def test_a_damaged_config_is_estimated_or_refused(name: str, data: st.DataObject) -> None:
    """One or two keys of a real config removed or replaced by junk."""
    check_damaged(name, data)


@pytest.mark.slow
@some(800)
@given(st.sampled_from(list_presets()), st.data())
def test_hundreds_of_damaged_configs_are_estimated_or_refused(name: str, data: st.DataObject) -> None:
    check_damaged(name, data)


# ---- one answer, however it is asked for ----


def check_ways_of_asking(asked: Asked) -> None:
    run = made(asked)
    if run is None:
        return
    result = estimate(run)
    assert [(p.stage, p.static_bytes, p.peak_bytes) for p in peaks(run)] == [
        (s.stage, s.static_bytes, s.peak_bytes) for s in result.stages
    ]
    for stage in result.stages:
        assert explain(run, stage.stage) == stage


@pytest.mark.slow
@some(200)
@given(asked_runs())
def test_peaks_and_explanations_are_those_of_the_estimate(asked: Asked) -> None:
    check_ways_of_asking(asked)


@pytest.mark.slow
@some(2500)
@given(asked_runs())
def test_peaks_and_explanations_are_those_of_thousands_of_estimates(asked: Asked) -> None:
    check_ways_of_asking(asked)


# ---- one answer, whatever was asked before ----


def cold(run: RunSpec) -> Estimate:
    clear_caches()
    return estimate(run)


def check_orders(asked: list[Asked], order: list[int]) -> None:
    runs = [run for wish in asked if (run := made(wish)) is not None]
    expected = [cold(run) for run in runs]
    clear_caches()
    for i in order:
        if i < len(runs):
            assert estimate(runs[i]) == expected[i]
            assert [p.peak_bytes for p in peaks(runs[i])] == [s.peak_bytes for s in expected[i].stages]


ORDERS = st.lists(st.integers(0, 3), min_size=2, max_size=8)


@some(60)
@given(st.lists(asked_runs(), min_size=2, max_size=4), ORDERS)
def test_the_order_of_asking_changes_nothing(asked: list[Asked], order: list[int]) -> None:
    """Recordings of one run serve another; what comes of them is what it would be alone."""
    check_orders(asked, order)


@pytest.mark.slow
@some(600)
@given(st.lists(asked_runs(), min_size=2, max_size=4), ORDERS)
def test_hundreds_of_orders_change_nothing(asked: list[Asked], order: list[int]) -> None:
    check_orders(asked, order)


#: Fields that change sizes, or what is decided by them, on one model: its recordings serve each other most.
NEIGHBOURS = st.lists(
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2, 4]), "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 8]),
            "full": st.booleans(), "sp": st.booleans(), "micro_batch_size": st.integers(1, 3),
            "seq_length": st.sampled_from([512, 1024, 4096]), "recompute_modules": MODULES,
        }
    ),
    min_size=2, max_size=5,
)  # fmt: skip


def neighbour(name: str, tp: int, cp: int, ep: int, full: bool, sp: bool, **fields: Any) -> Asked:
    more = {"recompute_granularity": "selective"}
    if full:
        more = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        del fields["recompute_modules"]
    return Asked(name, {
        "world_size": tp * cp * ep, "tensor_model_parallel_size": tp, "context_parallel_size": cp,
        "expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1 if ep > 1 else None,
        "sequence_parallel": sp if tp > 1 else None, **more, **fields,
    })  # fmt: skip


@some(60)
@given(st.sampled_from(["deepseek-ai/DeepSeek-V2-Lite", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"]), NEIGHBOURS,
       ORDERS)  # fmt: skip
def test_the_order_of_layouts_of_one_model_changes_nothing(name: str, choices: list[dict], order: list[int]) -> None:
    check_orders([neighbour(name, **choice) for choice in choices], order)
