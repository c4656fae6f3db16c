"""Four processes with gloo: stages differ, one rank's reading fails, a rank is slow. Nothing hangs, nothing raises."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord, RunRecord

GIB = 1 << 30


def test_a_job_of_four_ranks_reports_whatever_happens_to_one_of_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("job.py")
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in ranks]
    assert [p.returncode for p in ranks] == [0] * 4, outputs
    assert (tmp_path / "done").exists()
    assert time.monotonic() - started < 90

    records = list(journal.read(tmp_path / "report.jsonl"))
    assert [type(r) for r in records] == [RunRecord] + [ReportRecord] * 4
    reports = {r.iteration: r for r in records[1:]}
    assert list(reports) == [0, 1, 2, 4]  # model built, first and second step, then every log_interval

    # Stages differ, and each is held against its own prediction.
    for report in reports.values():
        assert [s.stage for s in report.stages] == [0, 1, 2, 3]
    steady = reports[4]
    assert steady.missing_ranks == ()
    for stage in steady.stages:
        assert stage.max_allocated == (20 + stage.stage) * GIB
        assert stage.outside == GIB
        assert stage.headroom == (80 - 1 - 24 - stage.stage) * GIB
        assert stage.residual == stage.max_allocated - stage.predicted_peak
    assert steady.stages[0].predicted_peak > steady.stages[2].predicted_peak

    # Every stage has its phases, also the rank that was slow and the one whose reading failed once.
    _, phases = journal.phases((tmp_path / "report.jsonl").read_text().splitlines())
    assert phases is not None and phases.world_size == 4
    by_name = {
        name: [p.stage for p in phases.phases if p.phases == (name,)] for name in ("build", "first step", "training")
    }
    assert by_name == {"build": [0, 1, 2, 3], "first step": [0, 1, 3], "training": [0, 1, 2, 3]}
    assert all(p.outside == GIB and p.worst_rank == p.stage for p in phases.phases)

    # One rank's reading failed: named, the others stand.
    failed = reports[1].stages[2]
    assert failed.allocated is None and "the reading failed" in failed.failed["2"]
    assert reports[1].stages[3].allocated == 13 * GIB

    # A rank was slow: missing in that report, back in the next.
    assert reports[2].missing_ranks == (3,)
    assert "no reading in time from ranks 3" in outputs[0][0]

    # Rank 0 alone prints, Bridge's line first; the logging rank has the figures although one logger is broken.
    assert outputs[0][0].startswith("Theoretical memory footprints: weight and optimizer=")
    assert all(not out for out, _ in outputs[1:])
    # gloo on a CPU: said in the header of every table, and in the journal. The last report is one line.
    assert outputs[0][0].count("no CUDA device is in use: library workspaces as on a Hopper GPU") == 3
    machine = records[0].machine
    assert machine is not None and machine["gpu"] == "" and machine["facts"]["torch"]["source"] == "imported"
    scalars = (tmp_path / "scalars.txt").read_text().splitlines()
    assert "4 memory/stage_3/max_allocated_gib 23.0" in scalars
    assert "wandb_logger failed" in outputs[3][1]
    assert "on_train_step_end failed" in outputs[1][1]
