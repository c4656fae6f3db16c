"""``MemoryReport(html=...)``: a page beside the journal, read again by itself, that cannot end training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import ParallelSpec, RunSpec, estimate
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord, RunRecord, StageRecord
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.live.loggers import charts, metrics
from bridge_memory.report.history import MOST_REPORTS, History
from bridge_memory.report.page.one_file import MOST_BYTES, blocks_page

GIB = 1 << 30
RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))


def drawn(page: str) -> list[Any]:
    held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    assert held
    return json.loads(held[1])


def series(chart: Any, name: str) -> list[tuple[float, float]]:
    (one,) = [s for s in chart["data"]["series"] if s["name"].startswith(name)]
    return [(point[0], point[1]) for point in one["points"]]


def trained(folder: Path, steps: int, **more: Any) -> list[str]:
    """Pages as they were after each step whose peak rises by 1 GiB a step."""
    pages = []
    done = 0

    def read(rank: int, stage: int) -> Reading:
        return Reading(rank, stage, 5 * GIB, (20 + done) * GIB, 30 * GIB, 30 * GIB, 80 * GIB, 31 * GIB)

    target = folder / "memory.html"
    report = MemoryReport(None, run=RUN, every=1, emit=lambda text: None, read=read, html=target, **more)
    report.start()
    for done in range(1, steps + 1):  # noqa: B007
        report.step()
        pages.append(target.read_text())
    report.end()
    return [*pages, target.read_text()]


def test_predicted_and_measured_over_the_steps(tmp_path: Path) -> None:
    *pages, last = trained(tmp_path, 3)
    stage = estimate(RUN).stages[0]
    assert all('http-equiv="refresh"' in page for page in pages) and 'http-equiv="refresh"' not in last
    bars, steps = drawn(last)
    assert bars["data"]["measured"]["0"]["peak_bytes"] == 23 * GIB
    assert sum(bars["data"]["stages"][0]["parts"].values()) == bars["data"]["stages"][0]["peak_bytes"]
    assert series(steps, "measured peak") == [(0, 20.0), (1, 21.0), (2, 22.0), (3, 23.0)]
    assert series(steps, "measured between") == [(n, 5.0) for n in range(4)]
    # The machine has no CUDA device, and neither has the estimate.
    assert series(steps, "predicted peak")[0][1] == pytest.approx(stage.peak_bytes / GIB, rel=0.01)
    assert "Llama-3.2-1B" in last and "training is over" in last


@pytest.mark.parametrize("bad", ["a folder", "nowhere", "a file as a folder"])
def test_a_page_that_cannot_be_written_ends_nothing(tmp_path: Path, bad: str) -> None:
    (tmp_path / "file").write_text("")
    target = {"a folder": tmp_path, "nowhere": Path("/proc/none/x.html"), "a file as a folder": tmp_path / "file" / "x"}
    emitted: list[str] = []
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, every=1, emit=emitted.append, html=target[bad],
                          read=lambda rank, stage: Reading(rank, stage, GIB, GIB, GIB, GIB, GIB, GIB))  # fmt: skip
    report.start()
    for _ in range(4):
        report.step()
    report.end()
    assert len(emitted) == 5 and len(list(journal.read(tmp_path / "r.jsonl"))) == 6
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".bridge")]


def test_a_long_run_stays_small() -> None:
    stages = [
        StageRecord(stage=n, ranks=8, predicted_static=GIB, predicted_peak=2 * GIB, allocated=GIB, reserved=3 * GIB,
                    max_allocated=2 * GIB, device_total=80 * GIB, measured=2 * GIB, residual=0) for n in range(16)
    ]  # fmt: skip
    history = History([RunRecord(model="m")])
    for step in range(20 * MOST_REPORTS):
        history.add(ReportRecord(iteration=step, stages=stages, moment="steady"))
    assert len(history.reports) <= MOST_REPORTS
    kept = [r.iteration for r in history.reports]
    assert kept == sorted(kept) and kept[0] == 0 and kept[-1] == 20 * MOST_REPORTS - 1
    assert len(blocks_page(history.title, history.blocks()).encode()) <= MOST_BYTES


def test_another_run_in_the_same_journal_starts_anew() -> None:
    records = [RunRecord(model="a"), ReportRecord(iteration=1), RunRecord(model="b"), ReportRecord(iteration=7)]
    history = History(records)
    assert history.title.endswith("b") and [r.iteration for r in history.reports] == [7]
    assert "no report yet" in blocks_page("x", History().blocks())


def test_a_report_without_a_prediction_is_drawn() -> None:
    record = ReportRecord(iteration=1, stages=[StageRecord(stage=0, ranks=1, max_allocated=GIB, allocated=GIB)])
    (steps,) = drawn(blocks_page("x", History([record]).blocks()))
    assert series(steps, "measured peak") == [(1, 1.0)]


class Writer:
    def __init__(self) -> None:
        self.layouts: list[Any] = []

    def add_scalar(self, *args: Any) -> None: ...

    def add_custom_scalars(self, layout: Any) -> None:
        self.layouts.append(layout)


def test_tensorboard_has_predicted_and_measured_in_one_chart() -> None:
    from types import SimpleNamespace

    from bridge_memory.live.loggers import Loggers

    stage = StageRecord(stage=3, predicted_peak=2 * GIB, max_allocated=2 * GIB, residual=0, measured=2 * GIB)
    values = metrics([stage])
    (chart,) = charts(values).values()
    kind, tags = chart["stage 3"]
    assert kind == "Multiline" and all(sum(bool(re.match(tag, name)) for name in values) == 1 for tag in tags)
    assert {tag.strip("^$") for tag in tags} == {
        "memory/stage_3/predicted_peak_gib", "memory/stage_3/max_allocated_gib"
    }  # fmt: skip
    writer, all_of_them = Writer(), Loggers()
    for step in range(3):
        all_of_them.log(SimpleNamespace(tensorboard_logger=writer), values, step)
    assert len(writer.layouts) == 1


def test_tensorboard_itself_takes_the_layout(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_custom_scalars(charts({"memory/stage_0/max_allocated_gib": 1.0}))
    writer.close()
    assert any(path.stat().st_size for path in tmp_path.iterdir())
