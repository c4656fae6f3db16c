"""A file of measurements beside its prediction: a log, a journal of JSON lines or a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.comparison import SCHEMA
from bridge_memory.comparison.logs import MeasuredRank, arguments_in, latest_of_each_rank
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
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.ranks import stage_of_rank

#: Bytes: some weeks of logs.
MOST_OF_A_LOG = 256 << 20


class ComparedLog(NamedTuple):
    """A log or a journal: its stages, and the estimate where the run is known."""

    text: str
    rows: list[StageResidual]
    result: Estimate | None

    def beyond(self, tolerance: float | None) -> list[int]:
        """Stages whose peak is off by more than the share ``tolerance``."""
        return [] if tolerance is None else [r.stage for r in self.rows if r.beyond(tolerance)]

    def as_json(self, measured: str, tolerance: float | None) -> dict[str, Any]:
        """By the schema ``SCHEMA``; ``measured``: what the file is called."""
        return {
            "schema": SCHEMA,
            "measured": measured,
            "stages": [r.as_json() for r in self.rows],
            "tolerance": tolerance,
            "beyond": self.beyond(tolerance),
        }


class ComparedSnapshot(NamedTuple):
    """A snapshot at its peak, and the estimate of its stage where the run is known. Bytes."""

    stage: int
    attribution: Attribution
    result: Estimate | None
    predicted_peak: int | None
    predicted_static: int | None

    def beyond(self, tolerance: float | None) -> bool:
        """Whether the peak is off by more than the share ``tolerance``."""
        peak = self.attribution.alive.peak_bytes
        return (
            tolerance is not None
            and self.predicted_peak is not None
            and abs(peak - self.predicted_peak) > tolerance * peak
        )

    def as_json(self, measured: str, tolerance: float | None) -> dict[str, Any]:
        """By the schema ``SCHEMA``; ``measured``: what the file is called."""
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
            "beyond": [self.stage] if self.beyond(tolerance) else [],
        }  # fmt: skip


def read_measured(path: str) -> bytes:
    """The file, within a bound. Raises SpecError for one that cannot be read."""
    # Read once: a pipe (`compare <(zcat log.gz)`) holds it once.
    return read_bytes(
        path, "give a log, JSON lines or a snapshot; of a long log its lines about memory",
        most_after=lambda head: MOST_OF_A_SNAPSHOT if is_snapshot(head) else MOST_OF_A_LOG,
    )  # fmt: skip


def compared(
    path: str, data: bytes, run: RunSpec | None, *, stage: int = 0, device: int | None = None,
    pp_before_dp: bool = False,
) -> ComparedLog | ComparedSnapshot:  # fmt: skip
    """What ``data``, the file at ``path``, measured beside the prediction of ``run``, or of the run that it describes.

    ``stage`` and ``device``: of a snapshot, the pipeline stage of its rank and the device (None: the fullest).
    ``pp_before_dp``: ranks of a log run through pipeline stages before data-parallel replicas. Raises SpecError for a
    file that holds no figures or does not say what ran.
    """
    if is_snapshot(data):
        return _snapshot(path, data, run, stage, device)
    text = text_of(data, errors="replace")
    predicted, measured, result = _read(path, text.splitlines(), run)

    def stage_of(rank: int) -> int:
        assert result is not None
        return stage_of_rank(result.run.parallel, rank, pp_before_dp=pp_before_dp)

    return ComparedLog(text, residuals(predicted, measured, stage_of), result)


def _snapshot(path: str, data: bytes, run: RunSpec | None, number: int, device: int | None) -> ComparedSnapshot:
    alive = at_peak(read_snapshot(data, path), device)
    if run is None:
        return ComparedSnapshot(number, attribute(alive, ()), None, None, None)
    result = estimate(run)
    stages = result.stages
    if not 0 <= number < len(stages):
        raise SpecError(f"--snapshot-stage {number} does not exist; the run has {len(stages)} stages")
    stage = stages[number]
    return ComparedSnapshot(
        number, attribute(alive, stage.components), result, stage.peak_bytes, stage.static_bytes
    )


def _read(
    path: str, lines: Sequence[str], given: RunSpec | None
) -> tuple[list[Predicted], list[MeasuredRank], Estimate | None]:
    """(predicted, measured, the estimate of the run where it is known) of a log or of our JSON lines."""
    if any(journal.SCHEMA in line for line in lines):
        predicted, measured = _journal(path, lines)
        if given is None:
            return predicted, measured, None
        result = estimate(given)
        return predicted_of(result), measured, result
    measured = latest_of_each_rank(lines)
    if not measured:
        raise SpecError(
            f"{path} holds no memory figures; give a log with lines like '[Rank 0] (after 2 iterations) memory (MB) | "
            "allocated: ...', our JSON lines or a snapshot"
        )
    if given is None:
        printed = arguments_in(lines)
        if printed is None:
            raise SpecError(
                f"{path} does not say what ran (no block of Megatron-LM arguments); name the MODEL and its flags, or "
                "give --megatron-args"
            )
        from bridge_memory.readers.config_container import run_from_config_container
        from bridge_memory.readers.megatron_args import container

        given = run_from_config_container(container(printed))
    result = estimate(given)
    return predicted_of(result), measured, result


def _journal(path: str, lines: Sequence[str]) -> tuple[list[Predicted], list[MeasuredRank]]:
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
