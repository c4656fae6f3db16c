"""A run written as JSON reads back as an equal run, and nothing else is read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bridge_memory.readers import resolve_model
from bridge_memory.readers.presets import list_presets
from bridge_memory.readers.run_spec import run_from_json, run_to_json
from bridge_memory.spec import (
    BatchSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)


def again(run: RunSpec) -> RunSpec:
    return run_from_json(json.loads(json.dumps(run_to_json(run))))


@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_reads_back_equal(preset: str) -> None:
    run = RunSpec(model=resolve_model(preset), batch=BatchSpec(seq_length=1024))
    assert again(run) == run


def test_every_group_reads_back_equal() -> None:
    """A value away from the default in every group, of every kind: number, text, flag, list, pair, None."""
    run = RunSpec(
        model=resolve_model("deepseek-ai/DeepSeek-V3"),
        parallel=ParallelSpec(
            world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
            expert_model_parallel_size=64, expert_tensor_parallel_size=1, sequence_parallel=True,
            pipeline_model_parallel_layout="Et*4|(tttt|)*14tmL",
        ),
        batch=BatchSpec(seq_length=8192, micro_batch_size=2, global_batch_size=8192),
        precision=PrecisionSpec(fp8="e4m3", fp8_recipe="blockwise"),
        optimizer=OptimizerSpec(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", sgd_momentum=0.5),
        recompute=RecomputeSpec(granularity="selective", modules=("mla_up_proj", "moe_act")),
        implementation=ImplementationSpec(
            megatron_core=(0, 15), transformer_engine=(2, 7), moe_imbalance=1.5, cublas_workspace_bytes=1 << 20
        ),
        assumptions=("one",), not_modelled=("two",),
    )  # fmt: skip
    assert again(run) == run
    assert again(run).implementation.megatron_core == (0, 15)


def test_one_kind_of_layer_is_written_once() -> None:
    written = run_to_json(RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B")))
    assert len(written["model"]["layer_kinds"]) == 1
    assert written["model"]["layers"] == [[0, 32]]


def test_anything_else_is_refused_in_one_line_that_names_the_field() -> None:
    good = run_to_json(RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B")))
    layer = good["model"]["layer_kinds"][0]
    for broken, named in (
        (None, "run is"),
        ({}, "run.model"),
        ({**good, "parallel": {"world_size": "8"}}, "run.parallel.world_size"),
        ({**good, "parallel": {"tensor_parallel": 8}}, "run.parallel.tensor_parallel"),
        ({**good, "recompute": {"modules": "core_attn"}}, "run.recompute.modules"),
        ({**good, "model": {**good["model"], "layers": [[1, 32]]}}, "run.model.layers"),
        ({**good, "model": {**good["model"], "layer_kinds": [{**layer, "mixer": {"type": "RNN"}}]}}, "mixer.type"),
        ({**good, "parallel": {"world_size": 3, "tensor_model_parallel_size": 2}}, "world_size"),
    ):
        with pytest.raises(SpecError, match=named) as refusal:
            run_from_json(broken)
        assert "\n" not in str(refusal.value)


def test_a_field_at_its_default_is_left_out() -> None:
    run = RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B"))
    assert set(run_to_json(run)) == {"model"}
    moved = replace(run, batch=BatchSpec(seq_length=8192))
    assert run_to_json(moved)["batch"] == {"seq_length": 8192}
