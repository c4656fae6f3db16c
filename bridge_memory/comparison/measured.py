"""A file of measured memory, whichever of the known kinds it is: our journal, a log, or a memory snapshot."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bridge_memory.calibration import journal
from bridge_memory.calibration.journal import SCHEMA as JOURNAL
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.comparison.logs import MeasuredRank, arguments_in, latest_of_each_rank
from bridge_memory.comparison.residuals import Predicted, predicted_of
from bridge_memory.comparison.snapshot import MOST_OF_A_SNAPSHOT, is_snapshot
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.files import read_bytes
from bridge_memory.spec import RunSpec, SpecError

#: Bytes: some weeks of logs.
MOST_OF_A_LOG = 256 << 20
#: Predicted, measured, and the estimate of the run where the run is known.
Both = tuple[list[Predicted], list[MeasuredRank], Estimate | None]


def read_measured(path: str | os.PathLike[str]) -> bytes:
    """What the file holds, read once: a pipe (``compare <(zcat log.gz)``) holds it once. Raises SpecError."""
    return read_bytes(
        path, "give a log, JSON lines or a snapshot; of a long log its lines about memory",
        most_after=lambda head: MOST_OF_A_SNAPSHOT if is_snapshot(head) else MOST_OF_A_LOG,
    )  # fmt: skip


def predicted_and_measured(path: str | os.PathLike[str], text: str, given: RunSpec | Estimate | None) -> Both:
    """Of a log or of a journal, whose ``text`` came from ``path``.

    ``given``: the run. None: a journal holds its own prediction, and a log of Megatron-LM the arguments that it printed.
    Raises SpecError where there are no figures, or nothing says what ran.
    """
    lines = text.splitlines()
    if any(JOURNAL in line for line in lines):
        predicted, measured = _journal(path, lines)
        if given is None:
            return predicted, measured, None
        result = estimated(given)
        return predicted_of(result), measured, result
    measured = latest_of_each_rank(lines)
    if not measured:
        raise SpecError(
            f"{path} holds no memory figures; give a log with lines like '[Rank 0] (after 2 iterations) memory (MB) | "
            "allocated: ...', our JSON lines or a snapshot"
        )
    result = estimated(_printed(path, lines) if given is None else given)
    return predicted_of(result), measured, result


def estimated(given: RunSpec | Estimate) -> Estimate:
    """The estimate of a run, or the one that was given."""
    return given if isinstance(given, Estimate) else estimate(given)


def _printed(path: str | os.PathLike[str], lines: Sequence[str]) -> RunSpec:
    """The run of the arguments that Megatron-LM printed into its log."""
    printed = arguments_in(lines)
    if printed is None:
        raise SpecError(
            f"{path} does not say what ran (no block of Megatron-LM arguments); name the MODEL and its flags, or "
            "give --megatron-args"
        )
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.megatron_args import container

    return run_from_config_container(container(printed))


def _journal(path: str | os.PathLike[str], lines: Sequence[str]) -> tuple[list[Predicted], list[MeasuredRank]]:
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
