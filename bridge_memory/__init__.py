"""bridge-memory: where every byte of GPU memory of a Megatron training run goes.

    run = RunSpec(model=resolve_model("deepseek-ai/DeepSeek-V3"), parallel=ParallelSpec(...))
    result = estimate(run)
    result.peak_stage.peak_bytes

``SpecError``, a ValueError, names what cannot be estimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge_memory.components import Component
from bridge_memory.estimate import Estimate, StageEstimate, StagePeak, clear_caches, estimate, explain, peaks
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

if TYPE_CHECKING:
    from bridge_memory.live import MemoryReport, install, uninstall

__version__ = "0.1.0"

__all__ = [
    "BatchSpec",
    "Component",
    "DataParallelSpec",
    "Estimate",
    "ImplementationSpec",
    "MemoryReport",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PeftSpec",
    "PrecisionSpec",
    "RecomputeSpec",
    "RunSpec",
    "SpecError",
    "StageEstimate",
    "StagePeak",
    "clear_caches",
    "estimate",
    "explain",
    "install",
    "list_presets",
    "peaks",
    "resolve_model",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    """The training-time report, imported when it is asked for: an estimate does not need it."""
    if name in ("MemoryReport", "install", "uninstall"):
        from bridge_memory import live

        return getattr(live, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
