"""A log, a journal or a memory snapshot compared with the estimate of its run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.cards.gpu import Gpu
from bridge_memory.comparison.logs import MeasuredRank, arguments_in, latest_of_each_rank
from bridge_memory.comparison.phases import PhaseComparison, compare_phases
from bridge_memory.comparison.residuals import Predicted, StageResidual, predicted_of, residuals
from bridge_memory.comparison.snapshot import (
    MOST_OF_A_SNAPSHOT,
    Attribution,
    at_peak,
    attribute,
    is_snapshot,
    read_snapshot,
)
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.files import read_bytes, text_of
from bridge_memory.residual import relative
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.ranks import stage_of_rank

SCHEMA = "bridge-memory/compare/2"
#: Bytes: some weeks of logs.
MOST_OF_A_LOG = 256 << 20


class LogComparison(NamedTuple):
    """Figures of a log or a journal, stage by stage."""

    #: The file's text.
    text: str
    stages: Sequence[StageResidual]
    #: None of a journal, which has its prediction, without a run.
    estimate: Estimate | None

    def beyond(self, tolerance: float | None) -> list[int]:
        """Stages whose peak is off by more than ``tolerance``, a share of what was measured."""
        return [] if tolerance is None else [s.stage for s in self.stages if s.beyond(tolerance)]

    def phases(self, gpu: Gpu | None = None) -> PhaseComparison | None:
        """The phases of a journal that has them, on ``gpu`` or on the one that it names."""
        return compare_phases(self.text.splitlines(), None if self.estimate is None else self.estimate.run, gpu)

    def as_json(
        self, measured: str, tolerance: float | None = None, phases: PhaseComparison | None = None
    ) -> dict[str, Any]:
        """``measured``: what the file is called."""
        return {
            "schema": SCHEMA, "measured": measured, "stages": [s.as_json() for s in self.stages],
            **({} if phases is None else {"phases": phases.as_json()}),
            "tolerance": tolerance, "beyond": self.beyond(tolerance),
        }  # fmt: skip


class SnapshotComparison(NamedTuple):
    """A snapshot at its peak, block by block."""

    attribution: Attribution
    #: Pipeline stage that it is of.
    stage: int
    #: None without a run.
    estimate: Estimate | None

    @property
    def predicted_peak(self) -> int | None:
        """Bytes."""
        return None if self.estimate is None else self.estimate.stages[self.stage].peak_bytes

    def beyond(self, tolerance: float | None) -> list[int]:
        """The stage, where its peak is off by more than ``tolerance``, a share of what was measured."""
        off = None if tolerance is None else self.error
        return [self.stage] if off is not None and abs(off) > (tolerance or 0.0) else []

    @property
    def error(self) -> float | None:
        """Measured minus predicted peak, as a share of the measured one."""
        return relative(self.attribution.alive.peak_bytes, self.predicted_peak)

    def as_json(self, measured: str, tolerance: float | None = None) -> dict[str, Any]:
        """``measured``: what the file is called."""
        found = self.attribution
        return {
            "schema": SCHEMA,
            "measured": measured,
            "snapshot": {
                "device": found.alive.device,
                "peak_bytes": found.alive.peak_bytes,
                "end_bytes": found.alive.end_bytes,
                "predicted_peak_bytes": self.predicted_peak,
                "attributed_share": found.attributed_share,
                "groups": [
                    {
                        "group": str(g.group), "measured_bytes": g.measured, "predicted_bytes": g.predicted,
                        "blocks": g.blocks,
                    }
                    for g in found.groups
                ],
                "unattributed": [{"frames": frames, "bytes": size} for frames, size in found.unattributed],
            },
            "tolerance": tolerance,
            "beyond": self.beyond(tolerance),
        }  # fmt: skip

#: Marks of memory lines of verl, NeMo-RL and slime, which are read beside the phases of a step (``rollout/log.py``).
_OF_POST_TRAINING = ("memory allocated (GB):", "GPU Memory after optimizer offload:", "] Memory-Usage ")


def compare(
    path: str, run: RunSpec | None, *, stage: int = 0, device: int | None = None, pp_before_dp: bool = False
) -> LogComparison | SnapshotComparison:
    """Compare what was measured in a file with the estimate of ``run``; None: of the run that the file describes.

    ``stage``: pipeline stage of the rank that a snapshot is of; ``device``: device of a snapshot (None: the fullest);
    ``pp_before_dp``: ranks of a log run through pipeline stages before data-parallel replicas. Raises SpecError.
    """
    # Read once: a pipe (`compare <(zcat log.gz)`) holds it once.
    data = read_bytes(
        path, "give a log, JSON lines or a snapshot; of a long log its lines about memory",
        most_after=lambda head: MOST_OF_A_SNAPSHOT if is_snapshot(head) else MOST_OF_A_LOG,
    )  # fmt: skip
    if is_snapshot(data):
        return _snapshot(path, data, run, stage, device)
    text = text_of(data, errors="replace")
    predicted, measured, result = _log(path, text.splitlines(), run)

    def stage_of(rank: int) -> int:
        assert result is not None
        return stage_of_rank(result.run.parallel, rank, pp_before_dp=pp_before_dp)

    return LogComparison(text, residuals(predicted, measured, stage_of), result)


def _snapshot(path: str, data: bytes, run: RunSpec | None, stage: int, device: int | None) -> SnapshotComparison:
    alive = at_peak(read_snapshot(data, path), device)
    if run is None:
        return SnapshotComparison(attribute(alive, ()), stage, None)
    result = estimate(run)
    if not 0 <= stage < len(result.stages):
        raise SpecError(f"--snapshot-stage {stage} does not exist; the run has {len(result.stages)} stages")
    return SnapshotComparison(attribute(alive, result.stages[stage].components), stage, result)


def _log(
    path: str, lines: list[str], run: RunSpec | None
) -> tuple[list[Predicted], list[MeasuredRank], Estimate | None]:
    """(predicted, measured, the estimate of the run where it is known) of a log or of our JSON lines."""
    if any(f'"{journal.SCHEMA}"' in line for line in lines):
        predicted, measured = _journal(path, lines)
        if run is None:
            return predicted, measured, None
        result = estimate(run)
        return predicted_of(result), measured, result
    measured = latest_of_each_rank(lines)
    if not measured:
        for line in lines:
            journal.check_schema(line)
        if any(mark in line for line in lines for mark in ("out of memory", "OutOfMemoryError")):
            raise SpecError(f"{path} is a failure, without figures by step; `bridge-memory why {path}` reads it")
        if any(mark in line for line in lines for mark in _OF_POST_TRAINING):
            raise SpecError(
                f"{path} is a log of reinforcement learning; `bridge-memory rollout --verl CONFIG --log FILE` (or "
                "--nemo-rl, --slime) sets its memory lines beside the phases of a step"
            )
        raise SpecError(
            f"{path} holds no memory figures; give a log with lines like '[Rank 0] (after 2 iterations) memory (MB) | "
            "allocated: ...', our JSON lines or a snapshot"
        )
    if run is None:
        run = run_printed_in(path, lines)
    result = estimate(run)
    return predicted_of(result), measured, result


def run_printed_in(path: str, lines: Sequence[str]) -> RunSpec:
    """The run of the arguments that Megatron-LM printed at its start. Raises SpecError, also where a log has none."""
    printed = arguments_in(lines)
    if printed is None:
        raise SpecError(
            f"{path} does not say what ran (no block of Megatron-LM arguments); name the MODEL and its flags, or "
            "give --megatron-args"
        )
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.megatron_args import container

    return run_from_config_container(container(printed))


def _journal(path: str, lines: list[str]) -> tuple[list[Predicted], list[MeasuredRank]]:
    """The last run of the file and its last report."""
    report: ReportRecord | None = None
    for record in journal.records(lines):
        report = record if isinstance(record, ReportRecord) else None
    if report is None:
        raise SpecError(f"{path} holds no report after its last start; let the run do two steps")
    if not report.stages:
        raise SpecError(f"{path} has a damaged report; give a file that MemoryReport wrote")
    predicted = [
        Predicted(s.stage, s.predicted_static, s.predicted_peak)
        for s in report.stages if s.predicted_static is not None and s.predicted_peak is not None
    ]  # fmt: skip
    measured = [
        MeasuredRank(s.worst_rank, report.iteration, s.allocated, s.max_allocated, s.reserved, stage=s.stage)
        for s in report.stages if s.worst_rank is not None
    ]  # fmt: skip
    if not predicted:
        raise SpecError(f"{path} holds no prediction; name the MODEL and its flags, or give --megatron-args")
    return predicted, measured
