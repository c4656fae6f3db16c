"""Seconds of one step by the time model of the run's engine: Megatron's, or that of PyTorch's engines and DeepSpeed."""

from __future__ import annotations

from bridge_memory.spec import RunSpec
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron import step_time as megatron
from bridge_memory.speed.torch import step_time as torch


def step_time(
    run: RunSpec, hardware: Hardware, constants: Constants = DEFAULT
) -> megatron.StepTime | torch.StepTime:
    """The time of one step of ``run``."""
    if run.data_parallel.engine in torch.TIMED:
        return torch.step_time(run, hardware, constants)
    return megatron.step_time(run, hardware, constants)


def tokens_per_second_per_gpu(run: RunSpec, seconds: float) -> float:
    """Of a step that takes so many seconds."""
    return run.sequences_per_step * run.batch.seq_length / seconds / run.parallel.world_size


def not_timed(run: RunSpec) -> tuple[str, ...]:
    """What of ``run`` changes its step time and is in no time model, by the names of its fields."""
    return torch.not_timed(run) if run.data_parallel.engine in torch.TIMED else megatron.not_timed(run)
