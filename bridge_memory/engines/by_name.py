"""A run's engine by its name."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from bridge_memory.engines.engine import Engine
from bridge_memory.spec import RunSpec

#: Engine -> its module, if that has another name.
_MODULES = {"zero1": "zero_1_and_2", "zero2": "zero_1_and_2"}


def engine_of(run: RunSpec, rank: int | None = None) -> Engine:
    """The engine that ``run.data_parallel.engine`` names: ``ENGINE`` of the module of that name in this package; only
    this module is imported. ``rank``: a global rank, if ranks of a stage differ; None: the rank with the most memory.
    """
    engine: Engine = _made_by(run.data_parallel.engine)(run, rank=rank)
    return engine


@cache
def _made_by(name: str) -> Any:
    return import_module(f"{__package__}.{_MODULES.get(name, name)}").ENGINE
