"""Residuals are kept and shown with the next estimate of the same run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bridge_memory import calibration
from bridge_memory.estimation import estimate
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.spec import SpecError

GIB = 1 << 30


def run_job(container: SimpleNamespace, path: Path, excess: int) -> None:
    """One process standing for stage 0, whose peak is ``excess`` over the prediction."""
    peak = estimate(run_from_config_container(container)).stages[0].peak_bytes

    def read(rank: int, stage: int) -> Reading:
        return Reading(rank, stage, allocated=peak // 2, max_allocated=peak + excess, device_total=80 * GIB)

    report = MemoryReport(None, calibration=path, read=read, emit=lambda text: None)
    state = SimpleNamespace(cfg=container, train_state=SimpleNamespace(step=0))
    report.on_train_start(SimpleNamespace(state=state))
    for step in range(2):
        state.train_state.step = step
        report.on_train_step_end(SimpleNamespace(state=state, skipped_iter=False))
    report.on_train_end(SimpleNamespace(state=state))


def test_the_next_estimate_reaches_the_measured_peak(container: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    run_job(container, path, excess=3 * GIB)
    before = estimate(run_from_config_container(container))
    after = calibration.calibrated(before, calibration.load(path))
    assert after.stages[0].peak_bytes == before.stages[0].peak_bytes + 3 * GIB
    assert after.stages[1:] == before.stages[1:]
    (added,) = set(after.stages[0].components) - set(before.stages[0].components)
    assert added.provenance == "measured" and "residual measured on" in added.name


def test_a_newer_residual_replaces_the_older_one(container: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for excess in (GIB, -GIB):
        run_job(container, path, excess)
    peaks = [r for r in calibration.load(path) if r.component == "peak"]
    assert [r.residual_bytes for r in peaks] == [-GIB]


def test_another_configuration_is_named_and_changes_nothing(container: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    run_job(container, path, GIB)
    container.train.micro_batch_size = 1
    before = estimate(run_from_config_container(container))
    after = calibration.calibrated(before, calibration.load(path))
    assert after.stages == before.stages
    assert "1 other configurations" in after.assumptions[-1]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other"}', '{"schema": "bridge-memory/calibration-1"}'])
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"is not a calibration\.json"):
        calibration.load(path)
    with pytest.raises(SpecError, match="cannot be read"):
        calibration.load(tmp_path / "none.json")
