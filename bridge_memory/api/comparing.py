"""``compare``: what a run was predicted to take, and what it was measured to take."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge_memory.cards.gpu import Gpu
from bridge_memory.comparison.compare import SnapshotComparison
from bridge_memory.comparison.compare import compare as compared
from bridge_memory.comparison.logs import MeasuredRank
from bridge_memory.comparison.phases import PhaseComparison
from bridge_memory.comparison.residuals import StageResidual, predicted_of, residuals
from bridge_memory.comparison.snapshot import Attribution
from bridge_memory.components import GIB
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import find_gpu

#: Bytes: less is a number of GiB that was meant.
_LEAST = 1 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured memory, stage by stage. All sizes are bytes.

    Example:
        >>> from bridge_memory import RunSpec, compare, estimate
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> peak = estimate(run).peak_stage.peak_bytes
        >>> found = compare(run, {0: peak + 2**30})
        >>> found.worst.residual == 2**30
        True
        >>> found.beyond(0.5), found.beyond(0.001)
        ((), (0,))
    """

    #: One for each stage of the prediction; empty for a snapshot without a run.
    stages: tuple[StageResidual, ...]
    #: The estimate of the run; None where a journal's own prediction was taken.
    estimate: Estimate | None = None
    #: What was alive at the peak, by the part of the model that allocated it; of a snapshot alone.
    attribution: Attribution | None = None
    #: The phases of the job, from build to save, each measured and as the whole job is predicted; of a journal alone.
    phases: PhaseComparison | None = None

    @property
    def worst(self) -> StageResidual | None:
        """The stage whose peak was furthest off, as a share of what was measured; None where nothing was measured."""
        measured = [s for s in self.stages if s.error is not None]
        return max(measured, key=lambda s: abs(s.error or 0.0), default=None)

    def beyond(self, tolerance: float) -> tuple[int, ...]:
        """Stages whose peak is off by more than ``tolerance``, a share of what was measured: 0.05 is 5 %."""
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not tolerance >= 0:
            raise SpecError(f"tolerance ({show(tolerance)}) is no share; give 0 or more, such as 0.05")
        return tuple(s.stage for s in self.stages if s.beyond(tolerance))

    def __str__(self) -> str:
        """One line a stage, in GiB."""
        lines = []
        for s in self.stages:
            line = f"stage {s.stage}: predicted {s.predicted_peak / GIB:.2f} GiB"
            if s.max_allocated is not None:
                line += f", measured {s.max_allocated / GIB:.2f} GiB"
                line += "" if not s.error else f": {100 * abs(s.error):.1f} % too {'low' if s.error > 0 else 'high'}"
            lines.append(line)
        if self.attribution is not None and not lines:
            lines = [f"measured {self.attribution.alive.peak_bytes / GIB:.2f} GiB"]
        return "\n".join(lines)


def compare(
    run: RunSpec | Estimate | None,
    measured: str | os.PathLike[str] | Mapping[int, int] | Sequence[int],
    *,
    stage: int = 0,
    device: int | None = None,
    use_tp_pp_dp_mapping: bool = False,
    gpu: str | Gpu | None = None,
) -> Comparison:
    """Set what was measured of a run beside its prediction, stage by stage.

    Args:
        run: The run, or its estimate. None: a journal holds its own prediction, and a log of Megatron-LM the arguments
            that it printed.
        measured: A file, or numbers. The file is a log of Megatron-LM or Megatron Bridge, a journal of MemoryReport, or
            a pickle of ``torch.cuda.memory._dump_snapshot``. Numbers are ``max_memory_allocated`` in bytes by stage: a
            dict from stage to bytes, or a list with one number a stage.
        stage: Pipeline stage of the rank that a snapshot is of.
        device: Device of a snapshot. None: the one that holds most.
        use_tp_pp_dp_mapping: Ranks of a log run through pipeline stages before data-parallel replicas.
        gpu: The card that a journal's phases are predicted on. None: the one that the journal names.

    Returns:
        ``stages``, each with ``predicted_peak``, ``max_allocated`` and ``residual`` (measured minus predicted) in bytes
        and ``error`` (that as a share of measured). A snapshot has its ``attribution`` too,
        a journal ``phases``: each with allocated, reserved, outside and driver memory, measured and predicted.

    Raises:
        SpecError: The file holds no figures of memory, nothing says what ran, or a stage is not one of the run.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, compare
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-8B",
        ...     parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=2),
        ... )
        >>> found = compare(run, {0: 40 * 2**30, 1: 38 * 2**30})
        >>> [stage.max_allocated for stage in found.stages] == [40 * 2**30, 38 * 2**30]
        True
        >>> found.worst.residual == found.worst.max_allocated - found.worst.predicted_peak
        True
    """
    if run is not None and not isinstance(run, (RunSpec, Estimate)):
        raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec(model=...), an Estimate, or None for a file")
    if not isinstance(measured, (str, os.PathLike)):
        if run is None:
            raise SpecError("run (None) leaves numbers without a prediction; give RunSpec(model=...)")
        return _of_numbers(run if isinstance(run, Estimate) else estimate(run), measured)
    if isinstance(run, Estimate):
        run = run.run
    if run is not None:
        _check_stage("stage", stage, run.parallel.pp)
    found = compared(os.fspath(measured), run, stage=stage, device=device, pp_before_dp=use_tp_pp_dp_mapping)
    if isinstance(found, SnapshotComparison):
        return Comparison(tuple(_stages_of(found)), found.estimate, found.attribution)
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    return Comparison(tuple(found.stages), found.estimate, phases=found.phases(card))


def _stages_of(found: SnapshotComparison) -> list[StageResidual]:
    """The stage of a snapshot's rank; none where nothing was predicted."""
    if found.estimate is None:
        return []
    (predicted,) = [p for p in predicted_of(found.estimate) if p.stage == found.stage]
    peak = found.attribution.alive.peak_bytes
    rank = MeasuredRank(rank=0, iteration=None, max_allocated=peak, stage=found.stage)
    return residuals([predicted], [rank], lambda rank: found.stage)


def _of_numbers(result: Estimate, measured: Mapping[int, int] | Sequence[int]) -> Comparison:
    if isinstance(measured, (bytes, bytearray)) or not isinstance(measured, (Mapping, Sequence)):
        raise SpecError(f"measured ({show(measured)}) is no file and no numbers; give a path, or bytes by stage")
    by_stage = dict(measured) if isinstance(measured, Mapping) else dict(enumerate(measured))
    ranks = []
    for stage, size in by_stage.items():
        _check_stage("measured", stage, len(result.stages))
        if type(size) is not int or size < _LEAST:
            raise SpecError(
                f"measured[{stage}] ({show(size)}) is no peak in bytes; give torch.cuda.max_memory_allocated(), or "
                "int(GiB * 2**30)"
            )
        ranks.append(MeasuredRank(rank=stage, iteration=None, max_allocated=size, stage=stage))
    return Comparison(tuple(residuals(predicted_of(result), ranks, lambda rank: rank)), result)


def _check_stage(argument: str, stage: object, number: int) -> None:
    if type(stage) is not int or not 0 <= stage < number:
        raise SpecError(f"{argument} ({show(stage)}) is not a stage of the run; give a number from 0 to {number - 1}")
