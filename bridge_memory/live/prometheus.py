"""The figures of a report as a file of Prometheus's text format, for node exporter's textfile collector.

Node exporter reads ``*.prom`` of its ``--collector.textfile.directory`` at every scrape, so the file is written whole
or not at all. Names follow Prometheus's rules: base units (bytes), one metric a figure, stages as a label.
Source of the format: Prometheus "Exposition formats", version 0.0.4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge_memory.calibration.records import PhaseRecord, ReportRecord, StageRecord
from bridge_memory.files import write_whole
from bridge_memory.spec import SpecError, show

SUFFIX = ".prom"
#: Field of a stage's record -> (name, help).
_OF_STAGES = {
    "predicted_static": ("predicted_static_bytes", "Weights, gradients and optimizer state, predicted."),
    "predicted_peak": ("predicted_peak_bytes", "Peak of a training step, predicted."),
    "allocated": ("allocated_bytes", "Allocated by torch on the rank with the highest peak."),
    "max_allocated": ("max_allocated_bytes", "Most that torch allocated, on the rank with most."),
    "reserved": ("reserved_bytes", "Reserved by torch's allocator on that rank."),
    "outside": ("outside_bytes", "Counted by the driver outside of torch on that rank."),
    "headroom": ("free_bytes", "Least free memory of any rank."),
    "device_total": ("device_bytes", "Memory of the GPU."),
    "retries": ("alloc_retries", "Most retries of torch's allocator on any rank."),
    "ooms": ("ooms", "Allocations that failed, on that rank."),
}  # fmt: skip


def check_prometheus(path: object) -> None:
    """Raise SpecError for a file that node exporter does not read."""
    if path is not None and not os.fspath(path).endswith(SUFFIX):  # type: ignore[call-overload]
        raise SpecError(f"prometheus ({show(path)}) does not end in {SUFFIX}, which node exporter reads; name it so")


def write(path: str | os.PathLike[str], report: ReportRecord, phases: Sequence[PhaseRecord]) -> None:
    """Write the file. Raises OSError."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text(report, phases))


def text(report: ReportRecord, phases: Sequence[PhaseRecord] = ()) -> str:
    """The metrics of a report and of the phases up to it."""
    lines = [
        *_metric("iteration", "Training step of this report.", [({}, report.iteration)]),
        *_metric("report_time_seconds", "Unix time of this report.", [({}, report.time)]),
        *_metric("missing_ranks", "Ranks without a reading in time.", [({}, len(report.missing_ranks))]),
    ]
    for field, (name, words) in _OF_STAGES.items():
        lines += _metric(name, words, [(_stage(s), getattr(s, field)) for s in report.stages])
    of_phases = [
        ({"phase": " + ".join(p.phases), "stage": str(p.stage)}, p) for p in phases
    ]  # fmt: skip
    lines += _metric(
        "phase_allocated_bytes", "Peak of torch in a phase of the job, at least.",
        [(labels, None if p.allocated is None else p.allocated[0]) for labels, p in of_phases],
    )  # fmt: skip
    lines += _metric(
        "phase_device_bytes", "Used of the GPU at the end of a phase, as the driver counts it.",
        [(labels, p.driver) for labels, p in of_phases],
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def _stage(record: StageRecord) -> dict[str, str]:
    return {"stage": str(record.stage)}


def _metric(
    name: str, words: str, samples: Sequence[tuple[dict[str, str], int | float | None]]
) -> Iterator[str]:
    """A gauge; nothing where no sample is known."""
    known = [(labels, value) for labels, value in samples if value is not None]
    if not known:
        return
    full = f"bridge_memory_{name}"
    yield f"# HELP {full} {words}"
    yield f"# TYPE {full} gauge"
    for labels, value in known:
        inside = ",".join(f'{label}="{_escaped(of)}"' for label, of in labels.items())
        yield f"{full}{{{inside}}} {value!r}" if inside else f"{full} {value!r}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
