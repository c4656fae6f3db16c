"""bridge-memory: where every byte of GPU memory of a Megatron training run goes.

    run = RunSpec(model="deepseek-ai/DeepSeek-V3", parallel=ParallelSpec(world_size=2048, ...))
    peaks(run)                         bytes at the peak of every stage, for searches
    explain(run, stage=0)              the components of one stage
    estimate(run)                      all of it: stages with components, parameters, assumptions, gaps
    fits(estimate(run), [find_gpu("H100")])

A run may come from elsewhere: ``run_from_megatron_args``, ``run_from_config_container``; its model too:
``resolve_model``, ``model_from_hf_config``, ``model_from_transformer_config``. ``SpecError``, a ValueError of one line,
names what cannot be estimated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge_memory.components import Component
from bridge_memory.estimation import Estimate, StageEstimate, StagePeak, clear_caches, estimate, explain, peaks
from bridge_memory.readers import list_presets, model_from_hf_config, resolve_model
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
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.megatron_args import run_from_megatron_args
    from bridge_memory.readers.transformer_config import model_from_transformer_config
    from bridge_memory.report.gpus import find_gpu, fits

__version__ = "0.2.0"

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
    "find_gpu",
    "fits",
    "install",
    "list_presets",
    "model_from_hf_config",
    "model_from_transformer_config",
    "peaks",
    "resolve_model",
    "run_from_config_container",
    "run_from_megatron_args",
    "uninstall",
]


#: What an estimate does not need, and the module that has it: imported when it is asked for.
_ELSEWHERE = {
    "MemoryReport": "bridge_memory.live",
    "find_gpu": "bridge_memory.report.gpus",
    "fits": "bridge_memory.report.gpus",
    "install": "bridge_memory.live",
    "model_from_transformer_config": "bridge_memory.readers.transformer_config",
    "run_from_config_container": "bridge_memory.readers.config_container",
    "run_from_megatron_args": "bridge_memory.readers.megatron_args",
    "uninstall": "bridge_memory.live",
}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_ELSEWHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
