"""A run's engine by its name."""

from __future__ import annotations

from importlib import import_module

from bridge_memory.engines.engine import Engine
from bridge_memory.spec import RunSpec, SpecError

#: Engines of a module that is called otherwise.
_MODULES = {"zero1": "zero_1_and_2", "zero2": "zero_1_and_2", "megatron_deepspeed": "zero_1_and_2"}
#: Not there yet.
_NEXT = ("megatron_deepspeed",)


def engine_of(run: RunSpec, rank: int | None = None) -> Engine:
    """The engine that ``run.data_parallel.engine`` names: ``ENGINE`` of the module of that name in this room, which
    alone is imported. ``rank``: of this global rank, where those of a stage differ; None: of the fullest."""
    if run.data_parallel.engine in _NEXT:
        raise SpecError(f"engine ({run.data_parallel.engine}) is not estimated yet; use megatron_ddp or megatron_fsdp")
    module = _MODULES.get(run.data_parallel.engine, run.data_parallel.engine)
    engine: Engine = import_module(f"{__package__}.{module}").ENGINE(run, rank=rank)
    return engine
