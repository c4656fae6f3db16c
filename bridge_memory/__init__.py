"""How much GPU memory a training run takes, on which pipeline stage, because of which tensors.

    >>> from bridge_memory import ParallelSpec, RunSpec, estimate, fits
    >>> run = RunSpec(model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2))
    >>> result = estimate(run)
    >>> [fit.fits for fit in fits(result, ["H100"])]
    [True]

Before a run: ``estimate``, ``peaks``, ``explain``, ``fits``. To plan one: ``search``, ``fit``, ``whatif``, ``balance``.
``diff`` compares two. During it: ``MemoryReport`` and ``MemoryReportCallback``. After it: ``compare``, ``why``.
``rehearse`` runs the real training stack without a GPU. ``SpecError``, a ValueError of one line, says what cannot be
estimated and what to give instead.

Sizes are bytes, as integers. references/api.md lists every name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge_memory.components import Component
from bridge_memory.estimation import Estimate, StageEstimate, StagePeak, clear_caches, estimate, explain, peaks
from bridge_memory.readers import list_presets, model_from_hf_config, resolve_model
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    CheckpointSpec,
    CompressedAttentionSpec,
    DataParallelSpec,
    DDPOptions,
    DeepSpeedOptions,
    DiffusionSpec,
    EncoderSpec,
    EncoderStructure,
    FSDPOptions,
    GatedDeltaNetSpec,
    ImplementationSpec,
    IndexerSpec,
    KimiDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    ShortConvSpec,
    SideBySideSpec,
    SparseSpec,
    SpecError,
)
from bridge_memory.spec.transformers import TransformersSpec

if TYPE_CHECKING:
    from bridge_memory.api.comparing import Comparison, compare
    from bridge_memory.api.explaining import diff, why
    from bridge_memory.api.jobs import fits, whole_job
    from bridge_memory.api.planning import balance, fit, search, whatif
    from bridge_memory.api.post_training import post_training
    from bridge_memory.api.rehearsing import RehearsalResult, RehearsalRow, rehearse
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.comparison.residuals import StageResidual
    from bridge_memory.difference import ChangedComponent, ChangedField, Configuration, Difference
    from bridge_memory.failure.causes import Finding
    from bridge_memory.failure.remedies import Remedy
    from bridge_memory.failure.why import Why
    from bridge_memory.job.job import Job, PhaseMemory
    from bridge_memory.live import MemoryReport, install, uninstall
    from bridge_memory.live.hugging_face import MemoryReportCallback
    from bridge_memory.live.runs import run_of_accelerator, run_of_deepspeed, run_of_torchtitan, run_of_trainer
    from bridge_memory.plan.changes import Change, Effect, WhatIf
    from bridge_memory.plan.found import Found, Row
    from bridge_memory.plan.megatron.balance import Balanced
    from bridge_memory.plan.megatron.fit import Fitted
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.engines.run import run_from_files
    from bridge_memory.readers.megatron_args import run_from_megatron_args
    from bridge_memory.readers.transformer_config import model_from_transformer_config
    from bridge_memory.rehearsal.world import RehearsalUnavailable
    from bridge_memory.rollout.answer import Limits, Rollout
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.verdict import Fit, Verdict

#: The one place of the release: pyproject.toml reads it here.
__version__ = "0.2.0"

__all__ = [
    "AttentionSpec",
    "Balanced",
    "BatchSpec",
    "Change",
    "ChangedComponent",
    "ChangedField",
    "CheckpointSpec",
    "Comparison",
    "Component",
    "CompressedAttentionSpec",
    "Configuration",
    "DDPOptions",
    "DataParallelSpec",
    "DeepSpeedOptions",
    "Difference",
    "DiffusionSpec",
    "Effect",
    "EncoderSpec",
    "EncoderStructure",
    "Estimate",
    "FSDPOptions",
    "Finding",
    "Fit",
    "Fitted",
    "Found",
    "GatedDeltaNetSpec",
    "Gpu",
    "ImplementationSpec",
    "IndexerSpec",
    "Job",
    "KimiDeltaSpec",
    "LayerSpec",
    "Limits",
    "MLASpec",
    "MLPSpec",
    "Mamba1Spec",
    "MambaSpec",
    "MemoryReport",
    "MemoryReportCallback",
    "MoESpec",
    "ModelSpec",
    "OptimizerSpec",
    "ParallelSpec",
    "PeftSpec",
    "PhaseMemory",
    "PrecisionSpec",
    "RecomputeSpec",
    "RehearsalResult",
    "RehearsalRow",
    "RehearsalUnavailable",
    "Remedy",
    "Rollout",
    "Row",
    "RunSpec",
    "ShortConvSpec",
    "SideBySideSpec",
    "SparseSpec",
    "SpecError",
    "StageEstimate",
    "StagePeak",
    "StageResidual",
    "TransformersSpec",
    "Verdict",
    "WhatIf",
    "Why",
    "balance",
    "clear_caches",
    "compare",
    "diff",
    "estimate",
    "explain",
    "find_gpu",
    "fit",
    "fits",
    "install",
    "list_presets",
    "model_from_hf_config",
    "model_from_transformer_config",
    "peaks",
    "post_training",
    "rehearse",
    "resolve_model",
    "run_from_config_container",
    "run_from_files",
    "run_from_megatron_args",
    "run_of_accelerator",
    "run_of_deepspeed",
    "run_of_torchtitan",
    "run_of_trainer",
    "search",
    "uninstall",
    "whatif",
    "whole_job",
    "why",
]


#: What an estimate does not need, and the module that has it: imported when it is asked for.
_ELSEWHERE = {
    name: module
    for module, names in {
        "bridge_memory.api.comparing": ("Comparison", "compare"),
        "bridge_memory.api.explaining": ("diff", "why"),
        "bridge_memory.api.jobs": ("fits", "whole_job"),
        "bridge_memory.api.planning": ("balance", "fit", "search", "whatif"),
        "bridge_memory.api.post_training": ("post_training",),
        "bridge_memory.api.rehearsing": ("RehearsalResult", "RehearsalRow", "rehearse"),
        "bridge_memory.comparison.residuals": ("StageResidual",),
        "bridge_memory.difference": ("ChangedComponent", "ChangedField", "Configuration", "Difference"),
        "bridge_memory.failure.causes": ("Finding",),
        "bridge_memory.failure.remedies": ("Remedy",),
        "bridge_memory.failure.why": ("Why",),
        "bridge_memory.job.job": ("Job", "PhaseMemory"),
        "bridge_memory.live": ("MemoryReport", "install", "uninstall"),
        "bridge_memory.live.hugging_face": ("MemoryReportCallback",),
        "bridge_memory.live.runs": (
            "run_of_accelerator", "run_of_deepspeed", "run_of_torchtitan", "run_of_trainer",
        ),
        "bridge_memory.plan.changes": ("Change", "Effect", "WhatIf"),
        "bridge_memory.plan.found": ("Found", "Row"),
        "bridge_memory.plan.megatron.balance": ("Balanced",),
        "bridge_memory.plan.megatron.fit": ("Fitted",),
        "bridge_memory.readers.config_container": ("run_from_config_container",),
        "bridge_memory.readers.engines.run": ("run_from_files",),
        "bridge_memory.readers.megatron_args": ("run_from_megatron_args",),
        "bridge_memory.readers.transformer_config": ("model_from_transformer_config",),
        "bridge_memory.rehearsal.world": ("RehearsalUnavailable",),
        "bridge_memory.rollout.answer": ("Limits", "Rollout"),
        "bridge_memory.cards.gpu": ("Gpu",),
        "bridge_memory.spec.gpus": ("find_gpu",),
        "bridge_memory.verdict": ("Fit", "Verdict"),
    }.items()
    for name in names
}  # fmt: skip


if not TYPE_CHECKING:  # With it a type checker would take every name for one that is there.

    def __getattr__(name: str) -> Any:
        if name not in _ELSEWHERE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_ELSEWHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
