"""Megatron-DeepSpeed: Megatron's tensor and pipeline parallelism with DeepSpeed's ZeRO.

With more than one pipeline stage DeepSpeed's schedule is 1F1B, and the ZeRO stage is 0 or 1
(``spec.rules.engine_options``): gradients are reduced once per step. Stage 0 keeps the same as stage 1, unsharded.

Source: deepspeed 0.19.8 ``runtime/pipe/engine.py: PipelineEngine.__init__, _exec_reduce_grads``, ``runtime/pipe/
schedule.py: TrainSchedule.num_pipe_buffers``, and those of the engines of ZeRO.
"""

from __future__ import annotations

from bridge_memory.engines.engine import Engine
from bridge_memory.engines.zero3 import ZeRO3
from bridge_memory.engines.zero_1_and_2 import ZeRO12
from bridge_memory.spec import RunSpec


class _Undivided(ZeRO12):
    """ZeRO stage 0."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        super().__init__(run, rank=rank)
        self.stage_number, self.ranks = 1, 1


def engine(run: RunSpec, *, rank: int | None = None) -> Engine:
    """The engine of the run's ZeRO stage."""
    if run.deepspeed.stage == 3:
        return ZeRO3(run, rank=rank)
    return (_Undivided if run.deepspeed.stage == 0 else ZeRO12)(run, rank=rank)


ENGINE = engine
