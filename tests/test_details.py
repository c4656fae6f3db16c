"""The tensor-by-tensor breakdown is the estimate, taken apart: its rows add up to it."""

from __future__ import annotations

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.readers import resolve_model
from bridge_memory.report.details import stage_details
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec

RUNS = {
    "meta-llama/Llama-3.2-1B": ParallelSpec(world_size=4, pipeline_model_parallel_size=2),
    "deepseek-ai/DeepSeek-V3": ParallelSpec(
        world_size=128, tensor_model_parallel_size=4, pipeline_model_parallel_size=4, expert_model_parallel_size=8,
        expert_tensor_parallel_size=1, num_layers_in_last_pipeline_stage=16,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ParallelSpec(world_size=8, expert_model_parallel_size=8),
}


@pytest.mark.parametrize("name", RUNS)
def test_parameter_rows_add_up_to_the_stage(name: str) -> None:
    result = estimate(RunSpec(model=resolve_model(name), parallel=RUNS[name]))
    for stage in result.stages:
        rows = stage_details(result, stage.stage)
        assert sum(r.total for r in rows if r.section == "parameters") == 2 * stage.parameters


@pytest.mark.parametrize("name", RUNS)
def test_saved_rows_add_up_to_one_microbatch(name: str) -> None:
    """With one microbatch a stage holds one set of saved tensors at its peak."""
    run = RunSpec(
        model=resolve_model(name), parallel=RUNS[name],
        batch=BatchSpec(global_batch_size=RUNS[name].data_parallel_size),
    )
    result = estimate(run)
    for stage in result.stages:
        rows = stage_details(result, stage.stage)
        assert sum(r.total for r in rows if r.section == "saved for backward") == stage.activation_bytes


def test_experts_are_counted_not_listed() -> None:
    name = "deepseek-ai/DeepSeek-V3"
    rows = stage_details(estimate(RunSpec(model=resolve_model(name), parallel=RUNS[name])), 1)
    fc1 = [r for r in rows if r.section == "parameters" and ".experts.linear_fc1" in r.name]
    assert [(r.name, r.count) for r in fc1] == [("mlp.experts.linear_fc1.weight*", 15 * 256 // 8)]
