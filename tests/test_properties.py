"""Random runs: an estimate, the same one by every way of asking, or one line that names a field. Nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_runs import asked_runs

from bridge_memory import clear_caches, estimate, explain, list_presets, peaks, resolve_model
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

Ask = Callable[[], RunSpec]


def some(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))


def made(ask: Ask) -> RunSpec | None:
    """The run that is asked for, if there is one and it can be estimated."""
    try:
        run = ask()
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
        for component in (*stage.components, *stage.leftovers):
            assert type(component.bytes) is int and component.bytes >= 0, component
        assert stage.static_bytes <= stage.peak_bytes


def check_refusal(error: SpecError) -> None:
    text = str(error)
    assert text and "\n" not in text
    named = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z0-9]+", text))
    assert named & FIELDS, f"names no field: {text}"


def check_run(ask: Ask) -> None:
    try:
        check_estimate(ask())
    except SpecError as error:
        check_refusal(error)


@some(400)
@given(asked_runs())
def test_a_random_run_is_estimated_or_refused_by_a_field(ask: Ask) -> None:
    check_run(ask)


@pytest.mark.slow
@some(4000)
@given(asked_runs())
def test_thousands_of_random_runs_are_estimated_or_refused_by_a_field(ask: Ask) -> None:
    check_run(ask)


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


def check_ways_of_asking(ask: Ask) -> None:
    run = made(ask)
    if run is None:
        return
    result = estimate(run)
    assert [(p.stage, p.static_bytes, p.peak_bytes) for p in peaks(run)] == [
        (s.stage, s.static_bytes, s.peak_bytes) for s in result.stages
    ]
    for stage in result.stages:
        assert explain(run, stage.stage) == stage


@some(200)
@given(asked_runs())
def test_peaks_and_explanations_are_those_of_the_estimate(ask: Ask) -> None:
    check_ways_of_asking(ask)


@pytest.mark.slow
@some(2500)
@given(asked_runs())
def test_peaks_and_explanations_are_those_of_thousands_of_estimates(ask: Ask) -> None:
    check_ways_of_asking(ask)


# ---- one answer, whatever was asked before ----


def cold(run: RunSpec) -> Estimate:
    clear_caches()
    return estimate(run)


def check_orders(asked: list[Ask], order: list[int]) -> None:
    runs = [run for ask in asked if (run := made(ask)) is not None]
    expected = [cold(run) for run in runs]
    clear_caches()
    for i in order:
        if i < len(runs):
            assert estimate(runs[i]) == expected[i]
            assert [p.peak_bytes for p in peaks(runs[i])] == [s.peak_bytes for s in expected[i].stages]


ORDERS = st.lists(st.integers(0, 3), min_size=2, max_size=8)


@some(60)
@given(st.lists(asked_runs(), min_size=2, max_size=4), ORDERS)
def test_the_order_of_asking_changes_nothing(asked: list[Ask], order: list[int]) -> None:
    """Recordings of one run serve another; what comes of them is what it would be alone."""
    check_orders(asked, order)


@pytest.mark.slow
@some(600)
@given(st.lists(asked_runs(), min_size=2, max_size=4), ORDERS)
def test_hundreds_of_orders_change_nothing(asked: list[Ask], order: list[int]) -> None:
    check_orders(asked, order)


#: Fields that change sizes, or what is decided by them, on one model: its recordings serve each other most.
NEIGHBOURS = st.lists(
    st.fixed_dictionaries(
        {
            "tp": st.sampled_from([1, 2, 4]), "cp": st.sampled_from([1, 2]), "ep": st.sampled_from([1, 2, 8]),
            "batch": st.integers(1, 3), "seq": st.sampled_from([512, 1024, 4096]), "modules": st.sets(
                st.sampled_from(["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"])
            ), "full": st.booleans(), "sp": st.booleans(),
        }
    ),
    min_size=2, max_size=5,
)  # fmt: skip


def neighbours(name: str, choices: list[dict]) -> list[Ask]:
    def ask(c: dict) -> Ask:
        return lambda: RunSpec(
            model=resolve_model(name),
            parallel=ParallelSpec(
                world_size=c["tp"] * c["cp"] * c["ep"], tensor_model_parallel_size=c["tp"],
                context_parallel_size=c["cp"], expert_model_parallel_size=c["ep"],
                expert_tensor_parallel_size=1 if c["ep"] > 1 else None,
                sequence_parallel=c["sp"] if c["tp"] > 1 else None,
            ),
            batch=BatchSpec(seq_length=c["seq"], micro_batch_size=c["batch"]),
            recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1)
            if c["full"]
            else RecomputeSpec(granularity="selective", modules=tuple(sorted(c["modules"]))),
        )

    return [ask(c) for c in choices]


@some(60)
@given(st.sampled_from(["deepseek-ai/DeepSeek-V2-Lite", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"]), NEIGHBOURS,
       ORDERS)  # fmt: skip
def test_the_order_of_layouts_of_one_model_changes_nothing(name: str, choices: list[dict], order: list[int]) -> None:
    check_orders(neighbours(name, choices), order)
