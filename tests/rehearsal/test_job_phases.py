"""Forward passes of an evaluation, and the building of a job, beside megatron-core's own.

Loads and saves need Transformer Engine's optimizer: ``tests/te/test_job_loads.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from job_oracle import forward_only, job

from bridge_memory.job.megatron.building import building
from bridge_memory.job.megatron.evaluation import forward_passes
from bridge_memory.outside.amount import total
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import BatchSpec, ImplementationSpec, ParallelSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.model import ModelSpec

LOCAL = ImplementationSpec(
    transformer_impl="local", moe_grouped_gemm=False, megatron_core=installed_release() or (0, 16)
)


def first_layers(name: str, number: int, after: int = 0) -> ModelSpec:
    model = resolve_model(name)
    return replace(model, layers=model.layers[after : after + number], mtp_num_layers=0, mtp_layer=None)


LLAMA, QWEN = first_layers("meta-llama/Llama-3.2-1B", 4), first_layers("Qwen/Qwen3-30B-A3B", 2)
DEEPSEEK = first_layers("deepseek-ai/DeepSeek-V3", 3, after=2)
FULL = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
SHAPES = {
    "one GPU": (LLAMA, ParallelSpec()),
    "TP 2": (LLAMA, ParallelSpec(world_size=2, tensor_model_parallel_size=2)),
    "TP 2, SP": (LLAMA, ParallelSpec(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True)),
    "PP 2": (LLAMA, ParallelSpec(world_size=2, pipeline_model_parallel_size=2)),
    "virtual stages": (
        LLAMA, ParallelSpec(world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    ),
    "experts": (QWEN, ParallelSpec(world_size=4, expert_model_parallel_size=4)),
    "experts, PP 2": (
        QWEN, ParallelSpec(world_size=8, expert_model_parallel_size=4, pipeline_model_parallel_size=2)
    ),
    "MLA": (
        DEEPSEEK,
        ParallelSpec(
            world_size=16, expert_model_parallel_size=8, tensor_model_parallel_size=2, sequence_parallel=True
        ),
    ),
}  # fmt: skip
STAGES = [
    pytest.param(model, parallel, recompute, stage, id=f"{name}, {recompute.granularity}, stage {stage}")
    for name, (model, parallel) in SHAPES.items() for recompute in (RecomputeSpec(), FULL)
    for stage in range(parallel.pp)
]  # fmt: skip


@pytest.mark.parametrize(("model", "parallel", "recompute", "stage"), STAGES)
def test_forward_passes_of_an_evaluation(
    model: ModelSpec, parallel: ParallelSpec, recompute: RecomputeSpec, stage: int
) -> None:
    run = RunSpec(
        model=model, parallel=parallel, recompute=recompute, implementation=LOCAL, batch=BatchSpec(seq_length=4096)
    )
    ours = [0] * (parallel.vpp or 1)
    for moment in forward_passes(run, stage):
        ours[moment.chunk] = max(ours[moment.chunk], moment.nbytes)
    assert ours == [pytest.approx(peak, rel=0.01) for peak in forward_only(run, stage)]


@pytest.mark.parametrize("name", ["one GPU", "TP 2", "virtual stages", "experts"])
def test_building(name: str) -> None:
    model, parallel = SHAPES[name]
    run = RunSpec(model=model, parallel=parallel, implementation=LOCAL)
    with job(run) as real:
        peak = real.phases["build"].peak
    amounts = building(run, 0)
    assert amounts is not None
    least, most = total(amounts)
    assert least * 0.999 <= peak <= most * 1.001
