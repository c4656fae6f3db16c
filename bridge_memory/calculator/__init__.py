"""The interface of GPU memory calculators, computed by this package's estimate.

    from bridge_memory.calculator import EngineConfig, GPUConfig, GPUMemoryCalculator, ModelConfig, TrainingConfig

    result = GPUMemoryCalculator(
        ModelConfig(name="meta-llama/Llama-3.1-8B"), TrainingConfig(batch_size=1, dtype="bf16"),
        engine_config=EngineConfig(type="deepspeed", zero_stage=3), gpu_config=GPUConfig(num_gpus=8, gpu_memory_gb=80),
    ).calculate()
    result.total_memory_per_gpu_gb, result.fits_on_gpu, result.estimate

Nothing is computed here: ``result.estimate`` is the full answer, with every tensor, assumption and unmodelled feature.
Figures that end in ``_gb`` are in GiB (2**30 bytes).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bridge_memory.calculator.form import (
    EngineConfig,
    Form,
    GPUConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
    as_mapping,
    read_form,
)
from bridge_memory.calculator.runs import card_of, run_of
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB, Role
from bridge_memory.estimation import estimate, peaks
from bridge_memory.job.job import fits_of_jobs
from bridge_memory.readers.engines.files import read_table
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.result import Estimate
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.verdict import Fit, headroom

__all__ = [
    "EngineConfig",
    "Form",
    "GPUConfig",
    "GPUMemoryCalculator",
    "MemoryBreakdown",
    "MemoryResult",
    "ModelConfig",
    "ParallelismConfig",
    "TrainingConfig",
]

_PARTS = (ModelConfig, TrainingConfig, ParallelismConfig, EngineConfig, GPUConfig)
#: Largest batch that is tried.
MOST_BATCH = 1 << 14


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """The peak of the GPU with the highest peak by role, GiB; the fields add up to it."""

    model_params_gb: float
    gradients_gb: float
    optimizer_states_gb: float
    activations_gb: float
    #: Persistent workspaces and tables, and temporaries of the operation at the peak.
    overhead_gb: float

    @property
    def total_memory_gb(self) -> float:
        return float(sum(asdict(self).values()))


@dataclass(frozen=True, kw_only=True)
class MemoryResult:
    """The answer. ``_gb`` is GiB; the peak is what torch reports as max_memory_allocated."""

    total_memory_per_gpu_gb: float
    #: Of all GPUs, each at the peak of its pipeline stage.
    total_memory_all_gpus_gb: float
    #: Host memory of offloaded states, on all GPUs together.
    cpu_memory_gb: float
    breakdown: MemoryBreakdown
    #: The verdict of ``fit`` is "fits" or "tight"; False also where an unmodelled feature may decide.
    fits_on_gpu: bool
    #: Peak and margin (context, NCCL, fragmentation) as a share of the GPU's memory.
    memory_utilization_percent: float
    #: The largest ``batch_size`` with ``fits_on_gpu``; None where 1 does not fit.
    recommended_batch_size: int | None
    estimate: Estimate = field(repr=False)
    fit: Fit = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the estimate."""
        out: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("total_memory_per_gpu_gb", "total_memory_all_gpus_gb", "cpu_memory_gb", "fits_on_gpu",
                         "memory_utilization_percent", "recommended_batch_size")
        }  # fmt: skip
        return {**out, "verdict": str(self.fit.verdict), "breakdown": asdict(self.breakdown)}


class GPUMemoryCalculator:
    """A run in the calculator's terms. Raises SpecError, a ValueError of one line, for wrong or unknown fields."""

    def __init__(
        self,
        model_config: ModelConfig | None = None,
        training_config: TrainingConfig | None = None,
        parallelism_config: ParallelismConfig | None = None,
        engine_config: EngineConfig | None = None,
        gpu_config: GPUConfig | None = None,
    ) -> None:
        given = {
            "model": model_config, "training": training_config, "parallelism": parallelism_config,
            "engine": engine_config, "hardware": gpu_config,
        }  # fmt: skip
        for part, kind in zip(given.values(), _PARTS, strict=True):
            if part is not None and not isinstance(part, kind):
                name = kind.__name__
                raise SpecError(f"{name} ({show(part)}) is no {name}; give one, or tables to from_dict")
        form = Form(**{name: part for name, part in given.items() if part is not None})  # type: ignore[arg-type]
        mapping = as_mapping(form)
        if gpu_config is None:
            del mapping["hardware"]
        self._read(mapping, Diagnostics("calculator"))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], name: str = "configuration") -> GPUMemoryCalculator:
        """From a parsed file. Raises SpecError."""
        calculator = cls.__new__(cls)
        calculator._read(config, Diagnostics(name))
        return calculator

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> GPUMemoryCalculator:
        """From a JSON file. Raises SpecError."""
        name = os.fspath(path)
        return cls.from_dict(read_table(name, "give a calculator's JSON"), os.path.basename(name))

    def _read(self, config: Mapping[str, Any], notes: Diagnostics) -> None:
        self.form = read_form(config, notes)
        #: The estimated run.
        self.run: RunSpec = run_of(self.form, notes)
        #: The GPU that it has to fit.
        self.gpu: Gpu = card_of(self.form.hardware.gpu_memory_gb)

    def calculate(self) -> MemoryResult:
        """Estimate the run. Raises SpecError for what cannot be estimated."""
        result = estimate(self.run)
        (fit,) = fits_of_jobs(result, [self.gpu])
        worst, parallel = result.peak_stage, self.run.parallel
        ranks = parallel.world_size // len(result.stages)
        gib = {role: worst.bytes_of(role) / GIB for role in Role}
        return MemoryResult(
            total_memory_per_gpu_gb=worst.peak_bytes / GIB,
            total_memory_all_gpus_gb=sum(stage.peak_bytes for stage in result.stages) * ranks / GIB,
            cpu_memory_gb=sum(stage.host_bytes for stage in result.stages) * ranks / GIB,
            breakdown=MemoryBreakdown(
                model_params_gb=gib[Role.WEIGHTS], gradients_gb=gib[Role.GRADIENTS],
                optimizer_states_gb=gib[Role.OPTIMIZER], activations_gb=gib[Role.ACTIVATION],
                overhead_gb=gib[Role.BUFFERS] + gib[Role.TRANSIENT],
            ),
            fits_on_gpu=fit.fits,
            memory_utilization_percent=100 * (fit.peak_bytes + fit.margin_bytes) / fit.capacity_bytes,
            recommended_batch_size=self._largest_batch(), estimate=result, fit=fit,
        )  # fmt: skip

    def _largest_batch(self) -> int | None:
        """The largest micro batch whose whole job fits: near the largest whose step does with its margin."""
        low, high = _last(self._step_fits, 0, 1)
        below = 1
        while not self._job_fits(low):  # another phase needs more
            low, high, below = max(0, low - below), low, 2 * below
        low, _ = _last(self._job_fits, low, high)
        return low or None

    def _with(self, batch: int) -> RunSpec:
        was = self.run.batch
        steps = (was.global_batch_size or was.micro_batch_size) // was.micro_batch_size
        return self.run.with_(batch=replace(was, micro_batch_size=batch, global_batch_size=steps * batch))

    def _step_fits(self, batch: int) -> bool:
        try:
            run = self._with(batch)
        except SpecError:
            return False
        peak = max(stage.peak_bytes for stage in peaks(run))
        return headroom(self.gpu, peak, run) >= 0

    def _job_fits(self, batch: int) -> bool:
        try:
            return batch == 0 or fits_of_jobs(estimate(self._with(batch)), [self.gpu])[0].fits
        except SpecError:
            return False


def _last(fits: Callable[[int], bool], low: int, high: int) -> tuple[int, int]:
    """The largest number from ``low`` on that ``fits``, as ``low`` does, and the next: by steps that double, then by
    halving."""
    step = high - low
    while high <= MOST_BATCH and fits(high):
        step *= 2
        low, high = high, high + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low, high
