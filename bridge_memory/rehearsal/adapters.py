"""Megatron Bridge's LoRA on the chunks of a rehearsal: freezes their weights and adds adapters to their linears.

Bridge's ``peft`` needs only megatron-core, torch and Transformer Engine. It is imported here without
``megatron/bridge/__init__.py``, which imports every model.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge_memory.rehearsal.imports import supply_typing_override
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.spec import RunSpec

PACKAGE = "megatron.bridge"


def adapt(run: RunSpec, chunks: list[Any]) -> None:
    """Freeze ``chunks`` and add the adapters of ``run.peft``, as ``peft/base.py: PEFT.__call__`` does before DDP."""
    if not run.peft.freezes:
        return
    lora, adapter = _bridge()
    # Ranks that share an expert's adapter synchronise its values; meta tensors have none.
    with replaced(adapter, "_synchronize_shared_expert_parameters", lambda self: None):
        lora(dim=run.peft.dim, target_modules=list(run.peft.target_modules))(chunks, training=True)


def _bridge() -> tuple[Any, Any]:
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec(PACKAGE) is None:
        raise RehearsalUnavailable(
            "peft.scheme (lora) is rehearsed with Megatron Bridge's own adapters; install megatron-bridge"
        )
    supply_typing_override()
    with _without_its_models():
        found = importlib.import_module(f"{PACKAGE}.peft.lora")
    return found.LoRA, found.ParallelLinearAdapter


@contextmanager
def _without_its_models() -> Iterator[None]:
    """Register the package without running its ``__init__``, unless it is imported already."""
    if PACKAGE in sys.modules:
        yield
        return
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    package = types.ModuleType(PACKAGE)
    package.__path__ = list(found.submodule_search_locations or ())
    package.__spec__ = found
    sys.modules[PACKAGE] = package
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == PACKAGE]:
            del sys.modules[name]
