"""bridge-memory: where every byte of GPU memory of a Megatron training run goes.

    run = RunSpec(model=resolve_model("deepseek-ai/DeepSeek-V3"), parallel=ParallelSpec(...))
    result = estimate(run)
    result.peak_stage.peak_bytes

``SpecError``, a ValueError, names what cannot be estimated.
"""

from __future__ import annotations

from bridge_memory.components import Component
from bridge_memory.estimate import Estimate, StageEstimate, estimate
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.spec import (
    BatchSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

__version__ = "0.1.0"

__all__ = [
    "BatchSpec",
    "Component",
    "Estimate",
    "ImplementationSpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "RecomputeSpec",
    "RunSpec",
    "SpecError",
    "StageEstimate",
    "estimate",
    "list_presets",
    "resolve_model",
]
