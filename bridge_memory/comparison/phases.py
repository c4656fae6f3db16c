"""The phases of a job that a journal holds, compared with those of the whole job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bridge_memory.calibration import config_digest, journal
from bridge_memory.calibration.records import Bounds, PhaseRecord, RunRecord
from bridge_memory.cards.gpu import Gpu
from bridge_memory.estimation import estimate
from bridge_memory.job.job import Job, job_of
from bridge_memory.outside.amount import Range, total
from bridge_memory.readers.run_spec import run_from_json
from bridge_memory.residual import relative
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.gpus import check_computes, find_gpu

#: Figures of a phase, in the order of a table.
FIGURES = ("allocated", "reserved", "outside", "driver")


class Figure(NamedTuple):
    """Bytes, measured and predicted; None: not known."""

    measured: Bounds | None = None
    predicted: Range | None = None

    @property
    def error(self) -> float | None:
        """Measured minus predicted as a share of measured, from the nearest ends of the two ranges; 0 where they
        meet."""
        if self.measured is None or self.predicted is None:
            return None
        least, most = self.measured
        if least > self.predicted.most:
            return relative(least, self.predicted.most)
        if most is not None and most < self.predicted.least:
            return relative(most, self.predicted.least)
        return 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "measured_bytes": self.measured and list(self.measured),
            "predicted_bytes": self.predicted and list(self.predicted), "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseResidual:
    """A phase on one stage, or several phases that nothing separated, of which the highest figures are compared."""

    record: PhaseRecord
    allocated: Figure
    reserved: Figure
    outside: Figure
    #: Reserved memory at its peak, and the memory outside of torch at the end of the phase.
    driver: Figure

    @property
    def name(self) -> str:
        return " + ".join(self.record.phases)

    @property
    def decisive(self) -> str:
        """The figure that a phase is judged by."""
        return "driver" if self.driver.error is not None else "allocated"

    @property
    def error(self) -> float | None:
        """That of the decisive figure."""
        found: Figure = getattr(self, self.decisive)
        return found.error

    def as_json(self) -> dict[str, Any]:
        record = self.record
        return {
            "phases": list(record.phases), "stage": record.stage, "ranks": record.ranks, "times": record.times,
            "worst_rank": record.worst_rank, "device_used_bytes": record.driver, "process_bytes": record.process,
            **{name: getattr(self, name).as_json() for name in FIGURES},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseComparison:
    """Every phase on every stage, in order of time. ``gpu``: None where nothing is predicted, as ``notes`` say."""

    gpu: str | None
    rows: tuple[PhaseResidual, ...]
    notes: tuple[str, ...]

    @property
    def worst(self) -> PhaseResidual | None:
        """The one that is furthest off; None where none is predicted."""
        return max((r for r in self.rows if r.error is not None), key=_off, default=None)

    @property
    def worst_of_each(self) -> list[PhaseResidual]:
        """Of each phase the stage that is furthest off; of equals the one with most."""
        by_name: dict[str, list[PhaseResidual]] = {}
        for row in self.rows:
            by_name.setdefault(row.name, []).append(row)
        return [max(rows, key=lambda row: (_off(row), (row.driver.measured or (0, 0))[0])) for rows in by_name.values()]

    def as_json(self) -> dict[str, Any]:
        worst = self.worst
        return {
            "gpu": self.gpu, "rows": [row.as_json() for row in self.rows],
            "worst": None if worst is None else {
                "phases": list(worst.record.phases), "stage": worst.record.stage, "figure": worst.decisive,
                "error": worst.error,
            },
            "notes": list(self.notes),
        }  # fmt: skip


def _off(row: PhaseResidual) -> float:
    return abs(row.error or 0.0)


def compare_phases(lines: Iterable[str], run: RunSpec | None, gpu: Gpu | None) -> PhaseComparison | None:
    """The phases of the last run of a journal; None where it has none, as of earlier releases. ``run``, ``gpu``: None
    for those that the journal names."""
    start, found = journal.phases(lines)
    if found is None or not found.phases:
        return None
    notes, job = [], None
    try:
        job = _job(start, run, gpu)
    except SpecError as error:
        notes.append(f"phases are not predicted: {error}")
    if run is not None and start is not None and start.config_digest not in ("", config_digest(run)):
        notes.append("the journal is of another configuration than the given one")
    return PhaseComparison(
        None if job is None else job.gpu.name, tuple(_row(record, job) for record in found.phases), tuple(notes)
    )


def _job(start: RunRecord | None, run: RunSpec | None, gpu: Gpu | None) -> Job:
    if run is None:
        if start is None or not start.run:
            raise SpecError("the journal does not say what ran; name the MODEL and its flags")
        run = run_from_json(start.run)
    if gpu is None:
        name = start.machine["gpu"] if start is not None and start.machine is not None else ""
        if not name:
            raise SpecError("the journal does not name its GPU; give --gpu NAME")
        gpu = find_gpu(name)
    check_computes(gpu, run.precision)
    implementation = replace(run.implementation, gpu_arch=gpu.arch or run.implementation.gpu_arch)
    return job_of(estimate(run.with_(implementation=implementation)), gpu)


def _row(record: PhaseRecord, job: Job | None) -> PhaseResidual:
    outside = _outside(record)
    driver = None
    if outside is not None and record.reserved is not None:
        least, most = record.reserved
        driver = least + outside, None if most is None else most + outside
    ranges = _predicted(job, record)
    return PhaseResidual(
        record, Figure(record.allocated, ranges.get("allocated")), Figure(record.reserved, ranges.get("reserved")),
        Figure(None if outside is None else (outside, outside), ranges.get("outside")),
        Figure(driver, ranges.get("driver")),
    )  # fmt: skip


def _outside(record: PhaseRecord) -> int | None:
    """Memory of this process outside of torch, where NVML tells processes apart; else of the whole GPU."""
    if record.outside is None or record.driver is None or record.process is None:
        return record.outside
    return max(0, record.outside - max(0, record.driver - record.process))


def _predicted(job: Job | None, record: PhaseRecord) -> dict[str, Range]:
    """Figure -> the highest of the phases; nothing where one of them is not modelled."""
    if job is None or not 0 <= record.stage < len(job.stages):
        return {}
    found = [phase for phase in job.stages[record.stage] if str(phase.phase) in record.phases]
    if len(found) != len(set(record.phases)):
        return {}
    return {
        "allocated": _highest([total(phase.allocated) for phase in found]),
        "reserved": _highest([phase.reserved for phase in found]),
        "outside": _highest([total(phase.outside) for phase in found]),
        "driver": _highest([phase.driver for phase in found]),
    }


def _highest(ranges: Sequence[Range]) -> Range:
    return Range(max(one.least for one in ranges), max(one.most for one in ranges))
