"""Estimates that reports are tried on: one stage and sixteen, dense, experts, hybrids, MTP, peaks of each kind."""

from __future__ import annotations

from functools import cache

from bridge_memory.estimation import Estimate, estimate
from bridge_memory.readers import resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
)

LLAMA, DEEPSEEK = "meta-llama/Meta-Llama-3-8B", "deepseek-ai/DeepSeek-V3"

_RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "one GPU": ("openai-community/gpt2", {"batch": BatchSpec(seq_length=1024)}),
    "four stages": (
        LLAMA,
        {
            "parallel": ParallelSpec(world_size=32, tensor_model_parallel_size=2, pipeline_model_parallel_size=4),
            "batch": BatchSpec(global_batch_size=64),
        },
    ),
    "one microbatch": (
        "meta-llama/Llama-3.1-405B",
        {
            "parallel": ParallelSpec(
                world_size=128, tensor_model_parallel_size=8, pipeline_model_parallel_size=16,
                account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True,
            ),
            "batch": BatchSpec(global_batch_size=1),
        },
    ),
    "sixteen stages": (
        DEEPSEEK,
        {
            "parallel": ParallelSpec(
                world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
                expert_model_parallel_size=64, expert_tensor_parallel_size=1,
                pipeline_model_parallel_layout="Etttt|(tttt|)*14tmL",
            ),
        },
    ),
    "uneven": (
        DEEPSEEK,
        {
            "parallel": ParallelSpec(
                world_size=128, tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
                expert_model_parallel_size=8, expert_tensor_parallel_size=1, num_layers_in_last_pipeline_stage=16,
            ),
        },
    ),
    "recomputed experts": (
        "Qwen/Qwen3-30B-A3B",
        {
            "parallel": ParallelSpec(
                world_size=32, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3,
                expert_model_parallel_size=8,
            ),
            "batch": BatchSpec(seq_length=8192, global_batch_size=128),
            "recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        },
    ),
    "virtual stages": (
        "meta-llama/Meta-Llama-3-70B",
        {
            "parallel": ParallelSpec(
                world_size=64, tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
                virtual_pipeline_model_parallel_size=10,
            ),
            "batch": BatchSpec(seq_length=8192, global_batch_size=128),
            "recompute": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        },
    ),
    "hybrid": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"parallel": ParallelSpec(world_size=8, expert_model_parallel_size=8)},
    ),
    "optimizer step": (
        "meta-llama/Llama-3.2-1B",
        {
            "batch": BatchSpec(seq_length=128),
            "precision": PrecisionSpec(),
            "data_parallel": DataParallelSpec(use_distributed_optimizer=False, grad_reduce_in_fp32=False),
        },
    ),
}

NAMES = tuple(_RUNS)


@cache
def result(name: str) -> Estimate:
    model, groups = _RUNS[name]
    return estimate(RunSpec(model=resolve_model(model), **groups))  # type: ignore[arg-type]
