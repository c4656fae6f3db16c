"""A run over its steps, from its journal: predicted and measured memory by stage, as blocks of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from bridge_memory.calibration.records import ReportRecord, RunRecord, StageRecord
from bridge_memory.components import GIB, Role
from bridge_memory.report.document import Bullets, Chart, Column, Drawn, Grid, Words
from bridge_memory.residual import SIGN_PERCENT, percent

#: Reports that are kept; beyond that, every second of the older ones is dropped.
MOST_REPORTS = 400
#: Stages with a chart each: those with the highest peaks.
MOST_CHARTS = 6
#: A GPU's capacity is drawn where it is at most so many times the highest line.
_NEAR = 1.6
#: Beginning of the note with the verdict (``live.table.verdict``).
_VERDICT = "verdict: "


class History:
    """The last run of a journal. ``add`` takes records in order; memory and time are bounded."""

    def __init__(self, records: Iterable[RunRecord | ReportRecord] = ()) -> None:
        self.run: RunRecord | None = None
        self.reports: list[ReportRecord] = []
        for record in records:
            self.add(record)

    def add(self, record: RunRecord | ReportRecord) -> None:
        if isinstance(record, RunRecord):
            self.run, self.reports = record, []
            return
        self.reports.append(record)
        if len(self.reports) > MOST_REPORTS:
            # The first reports are of other moments (model built, first step); the last is the current one.
            self.reports = [*self.reports[:2], *self.reports[2:-1:2], self.reports[-1]]

    @property
    def title(self) -> str:
        model = self.run.model if self.run else ""
        return f"GPU memory of {model}" if model else "GPU memory by pipeline stage"

    def under(self) -> str:
        """One line: moment, iteration, time, GPUs."""
        if not self.reports:
            return "no report yet"
        last = self.reports[-1]
        words = [f"{last.moment}, iteration {last.iteration:,}"]
        if last.time:
            words.append(f"{datetime.fromtimestamp(last.time, timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
        if self.run and self.run.machine and self.run.machine["gpu"]:
            words.append(f"{last.world_size:,} x {self.run.machine['gpu']}")
        return "; ".join(words)

    def blocks(self) -> list[Drawn]:
        """The error of the prediction, stages as bars, each stage over the steps, and a table."""
        if not self.reports:
            return [Bullets("", ("no report yet",))]
        last = self.reports[-1]
        found: list[Drawn] = [_answer(last)]
        bars = self._bars(last)
        if bars is not None:
            found.append(bars)
        worst = sorted((s for s in last.stages if s.max_allocated is not None), key=lambda s: -(s.max_allocated or 0))
        left_out = len(worst) - MOST_CHARTS
        for stage in sorted(worst[:MOST_CHARTS], key=lambda s: s.stage):
            found.append(self._steps(stage))
        if left_out > 0:
            names = ", ".join(str(s.stage) for s in sorted(worst[MOST_CHARTS:], key=lambda s: s.stage))
            found.append(Bullets("", (f"stages {names} have lower peaks; they are in the table",)))
        found.append(_table(last))
        notes = [note for note in last.notes if not note.startswith(_VERDICT)]
        if last.missing_ranks:
            notes.append(f"no reading in time from {len(last.missing_ranks):,} ranks")
        if notes:
            found.append(Bullets("Notes", tuple(notes)))
        return [*found, *self._about()]

    def _bars(self, last: ReportRecord) -> Chart | None:
        predicted = self.run.predicted if self.run else ()
        measured = {s.stage: s for s in last.stages}
        rows: list[dict[str, Any]] = []
        for stage in predicted:
            parts = dict.fromkeys(map(str, Role), 0)
            for component in stage["components"]:
                role = component.get("role", "")
                if role in parts:
                    parts[role] += component.get("bytes", 0)
            rows.append({
                "stage": stage["stage"], "label": str(stage["stage"]), "number": 1, "peak_bytes": stage["peak"],
                "peak_phase": "", "parts": parts,
            })  # fmt: skip
        if not rows or not all(row["peak_bytes"] > 0 for row in rows):
            return None
        found = {
            str(n): {"peak_bytes": s.max_allocated, "static_bytes": s.allocated} for n, s in measured.items()
            if s.max_allocated is not None
        }  # fmt: skip
        return Chart("Predicted peaks by role, and measured peaks", "stages", {"stages": rows, "measured": found})

    def _steps(self, stage: StageRecord) -> Chart:
        """One stage over the steps, GiB: measured figures as curves, predicted ones as lines."""
        measured = {name: self._series(stage.stage, name) for name in ("max_allocated", "allocated", "reserved")}
        steps = [point[0] for points in measured.values() for point in points] or [0, 1]
        ends = sorted({min(steps), max(steps)}) if min(steps) < max(steps) else [min(steps), min(steps) + 1]
        series: list[dict[str, Any]] = [
            _line("measured peak (max_allocated)", "measured", measured["max_allocated"], "solid"),
            _line("measured between steps (allocated)", "good", measured["allocated"], "solid"),
            _line("reserved by the allocator", "some", measured["reserved"], "solid"),
        ]
        levels = [
            ("predicted peak", "predicted", stage.predicted_peak),
            ("predicted between steps", "other", stage.predicted_static),
        ]
        highest = max([0, stage.predicted_peak or 0, *(p[1] * GIB for points in measured.values() for p in points)])
        if (stage.device_total or 0) < _NEAR * highest:  # a much larger card would compress the lines
            levels.append(("GPU memory", "limit", stage.device_total))
        for name, tone, level in levels:
            if level is not None:
                series.append({"name": name, "tone": tone, "line": "dashed", "dots": False,
                               "points": [[x, level / GIB] for x in ends]})  # fmt: skip
        data = {
            "x": {"title": "iteration"}, "y": {"title": "memory", "unit": "GiB", "zero": True},
            "series": [one for one in series if one["points"]],
        }  # fmt: skip
        return Chart(f"Stage {stage.stage} over the steps", "plot", data)

    def _series(self, stage: int, figure: str) -> list[list[Any]]:
        """[iteration, GiB, moment] of each report that has the figure."""
        get: Callable[[StageRecord], int | None] = lambda record: getattr(record, figure)  # noqa: E731
        return [
            [report.iteration, value / GIB, report.moment]
            for report in self.reports for record in report.stages
            if record.stage == stage and (value := get(record)) is not None
        ]  # fmt: skip

    def _about(self) -> list[Drawn]:
        if self.run is None:
            return []
        found: list[Drawn] = []
        titles: Mapping[str, Sequence[str]] = {
            "Assumed": self.run.assumptions, "Not modelled": self.run.not_modelled,
            "Packages of this machine": [f"{name} {version}" for name, version in self.run.versions.items()],
        }  # fmt: skip
        found += [Bullets(title, tuple(items)) for title, items in titles.items() if items]
        return found


def _line(name: str, tone: str, points: list[list[Any]], line: str) -> dict[str, Any]:
    return {"name": name, "tone": tone, "line": line, "dots": len(points) <= 60, "points": points}


def words_off(share: float) -> str:
    """The error of a prediction in words; ``share``: as ``residual.relative`` has it."""
    if abs(share) < 0.0005:
        return "equal to the measured figure"
    return f"{abs(share):.1%} too {'low' if share > 0 else 'high'}"


def _answer(last: ReportRecord) -> Words:
    """The error of the stage with the largest error, and the verdict's line."""
    off = [(s.error, s) for s in last.stages if s.error is not None]
    verdict = [note for note in last.notes if note.startswith(_VERDICT)]
    if not off:
        return Words("", ("there is no prediction to compare the measured figures with", *verdict), "open")
    share, worst = max(off, key=lambda one: abs(one[0]))
    of = f"stage {worst.stage}" if len(last.stages) > 1 else "the GPU"
    words = f"the prediction for {of}{' (the largest error)' * (len(off) > 1)} is {words_off(share)}"
    tone = "good" if abs(share) <= 0.03 else "open" if abs(share) <= 0.10 else "bad"
    return Words("", (words, *verdict), tone)


def _gib(value: int | None, sign: str = "") -> str:
    return "-" if value is None else f"{value / GIB:{sign}.2f}"


def _table(last: ReportRecord) -> Grid:
    heads = (
        "stage", "predicted between steps", "allocated", "predicted peak", "max allocated", "difference", "%",
        "reserved",
        "free", "worst rank", "spread", "retries",
    )  # fmt: skip
    rows = tuple(
        (
            str(s.stage), _gib(s.predicted_static), _gib(s.allocated), _gib(s.predicted_peak), _gib(s.max_allocated),
            _gib(s.residual, "+"),
            percent(s.error), _gib(s.reserved),
            _gib(s.headroom), "-" if s.worst_rank is None else str(s.worst_rank), _gib(s.spread),
            "-" if s.retries is None else str(s.retries),
        )
        for s in last.stages
    )  # fmt: skip
    return Grid(f"The last report, GiB; difference: {SIGN_PERCENT}", tuple(Column(head) for head in heads), rows)
