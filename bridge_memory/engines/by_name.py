"""A run's engine by its name."""

from __future__ import annotations

from importlib import import_module

from bridge_memory.engines.engine import Engine
from bridge_memory.spec import RunSpec

#: Engines of a module that is called otherwise.
_MODULES = {"zero1": "zero_1_and_2", "zero2": "zero_1_and_2"}


def engine_of(run: RunSpec, rank: int | None = None) -> Engine:
    """The engine that ``run.data_parallel.engine`` names: ``ENGINE`` of the module of that name in this room, which
    alone is imported. ``rank``: of this global rank, where those of a stage differ; None: of the fullest."""
    module = _MODULES.get(run.data_parallel.engine, run.data_parallel.engine)
    engine: Engine = import_module(f"{__package__}.{module}").ENGINE(run, rank=rank)
    return engine
