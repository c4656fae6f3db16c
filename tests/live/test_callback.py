"""The callback never raises into training, and costs nothing on steps without a report."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading

GIB = 1 << 30


def job(container: Any, step: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        state=SimpleNamespace(cfg=container, train_state=SimpleNamespace(step=step)), skipped_iter=False
    )


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, 10 * GIB, 20 * GIB, 22 * GIB, 22 * GIB, 80 * GIB, 24 * GIB)


def fail(*args: Any) -> Any:
    raise RuntimeError("broken on purpose")


class Hostile:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # pytest looks at its parameters
            raise AttributeError(name)
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "broken",
    [
        {"read": fail},
        {"emit": fail},
        {"path": "/proc/none/report.jsonl"},
        {"calibration": "/proc/none/calibration.json"},
        {"path": "\0"},
    ],
)
def test_whatever_fails_training_goes_on(container: SimpleNamespace, broken: dict[str, Any]) -> None:
    report = MemoryReport(**{"path": None, "read": reading, "emit": lambda text: None, **broken})
    for step in range(3):
        context = job(container, step)
        report.on_train_start(context) if not step else report.on_train_step_end(context)
    report.on_train_end(context)


@pytest.mark.parametrize("context", [None, Hostile(), SimpleNamespace(state=Hostile()), job(None), job(Hostile())])
def test_whatever_bridge_passes_training_goes_on(context: Any) -> None:
    report = MemoryReport(None, read=reading, emit=lambda text: None)
    for event in ("on_train_start", "on_train_step_end", "on_train_step_end", "on_train_end"):
        getattr(report, event)(context)


def test_a_model_that_cannot_be_estimated_still_gets_torchs_figures(container: SimpleNamespace, tmp_path: Path) -> None:
    container.model.num_layers = 7  # not over 4 stages
    shown: list[str] = []
    report = MemoryReport(tmp_path / "r.jsonl", read=reading, emit=shown.append)
    report.on_train_start(job(container))
    record = list(journal.read(tmp_path / "r.jsonl"))[-1]
    assert isinstance(record, ReportRecord)
    assert record.stages[0].max_allocated == 20 * GIB
    assert record.stages[0].predicted_peak is None
    assert "20.00" in shown[-1]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_files_that_are_pipes_are_not_waited_for(container: SimpleNamespace, tmp_path: Path) -> None:
    """Opening a named pipe waits for its other end, which may never come."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    work = threading.Thread(target=train_a_little, args=(container, pipe), daemon=True)
    work.start()
    work.join(30)
    assert not work.is_alive()


def train_a_little(container: SimpleNamespace, pipe: Path) -> None:
    report = MemoryReport(pipe, calibration=pipe, every=1, read=reading, emit=lambda text: None)
    report.on_train_start(job(container))
    for step in range(4):
        report.on_train_step_end(job(container, step))
    report.on_train_end(job(container))


@pytest.mark.parametrize(
    "told", [None, 3, Reading("x", []), Reading(0, 0, max_allocated="many"), Reading(0, 0, error="e" * 10**6)]
)  # fmt: skip
def test_whatever_a_reading_is_training_goes_on(container: SimpleNamespace, told: Any) -> None:
    report = MemoryReport(None, every=1, read=lambda rank, stage: told, emit=lambda text: None)
    for step in range(3):
        report.on_train_step_end(job(container, step))
    report.on_train_end(job(container))


def test_interrupts_are_not_swallowed(container: SimpleNamespace) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    report = MemoryReport(None, read=reading, emit=interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.on_train_start(job(container))
    report.on_train_end(job(container))


def test_a_step_without_a_report_reads_and_prints_nothing(container: SimpleNamespace) -> None:
    read: list[int] = []

    def counted(rank: int, stage: int) -> Reading:
        read.append(rank)
        return reading(rank, stage)

    report = MemoryReport(None, every=1000, read=counted, emit=lambda text: None)
    report.on_train_start(job(container))
    for step in range(2):
        report.on_train_step_end(job(container, step))
    assert len(read) == 3
    contexts = [job(container, step) for step in range(2, 902)]
    started = time.process_time()
    for context in contexts:
        report.on_train_step_end(context)
    cost = (time.process_time() - started) / len(contexts)
    assert len(read) == 3
    assert cost < 100e-6, f"{cost * 1e6:.1f} us a step"
    report.on_train_end(contexts[-1])


def test_skipped_steps_make_no_optimizer_state(container: SimpleNamespace, tmp_path: Path) -> None:
    """A loss scale that overflows skips the optimizer: Adam's moments come with the first step that counts."""
    report = MemoryReport(tmp_path / "r.jsonl", every=100, read=reading, emit=lambda text: None)
    report.on_train_start(job(container))
    for step, skipped in enumerate((True, True, False, True, False)):
        context = job(container, step)
        context.skipped_iter = skipped
        report.on_train_step_end(context)
    records = journal.read(tmp_path / "r.jsonl")
    moments = [(r.iteration, r.moment) for r in records if isinstance(r, ReportRecord)]
    assert moments == [(0, "model built"), (3, "after step 1"), (5, "steady")]
    report.on_train_end(job(container))
