"""The JSON-lines file survives a kill at any moment, and is read whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord, RunRecord, StageRecord, record_of


def iterations(path: Path) -> list[int]:
    return [r.iteration for r in journal.read(path) if isinstance(r, ReportRecord)]


def test_lines_that_a_kill_cut_off_are_skipped_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    journal.append(path, ReportRecord(iteration=1))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole + whole[:cut])
        journal.append(path, ReportRecord(iteration=2))
        assert iterations(path) == ([1, 1, 2] if cut >= len(whole) - 1 else [1, 2])


def test_what_was_appended_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    code = (
        "import sys; from bridge_memory.calibration import journal\n"
        "from bridge_memory.calibration.records import ReportRecord, StageRecord\n"
        "stages = [StageRecord(stage=0)] * 50\n"
        "for i in range(10**6): journal.append(sys.argv[1], ReportRecord(iteration=i, stages=stages))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    end = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size > 150_000) and time.monotonic() < end:
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    read = iterations(path)
    assert len(read) > 2 and read == list(range(len(read)))


def test_foreign_lines_are_not_records(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"loss": 1.0}\n[1, 2]\n\x00\n{"schema": "bridge-memory/live-1", "event": "epoch"}\n')
    assert list(journal.read(path)) == []


#: Two lines as the first release wrote them, which had no machine, and a stage without a reading no static_residual.
OLD = (
    '{"schema":"bridge-memory/live-1","event":"run","time":1.5,"versions":{"torch":"2.9.0"},"model":"Llama",'
    '"config_digest":"00ff","assumptions":["a"],"not_modelled":[],"predicted":[{"stage":0,"static":3,"activation":4,'
    '"transient":0,"peak":7,"components":[{"name":"weights","bytes":3,"role":"weights","provenance":"exact",'
    '"shard":"tp","lifetime":"model"}]}]}\n'
    '{"schema":"bridge-memory/live-1","event":"report","time":2.5,"iteration":4,"moment":"steady","world_size":2,'
    '"missing_ranks":[1],"stages":[{"stage":0,"ranks":1,"failed":{},"predicted_static":3,"predicted_activation":4,'
    '"predicted_transient":0,"predicted_peak":7,"allocated":3,"max_allocated":9,"reserved":10,"outside":1,'
    '"headroom":5,"retries":0,"ooms":0,"device_total":80,"worst_rank":0,"spread":0,"compared":"max_allocated",'
    '"expected":7,"measured":9,"residual":2,"static_residual":0},{"stage":1,"ranks":0,"failed":{"1":"no driver"},'
    '"predicted_static":3,"predicted_activation":4,"predicted_transient":0,"predicted_peak":7,"allocated":null,'
    '"max_allocated":null,"worst_rank":null,"residual":null,"later":"unknown"}],"notes":["n"],"later":1}\n'
)


def test_journals_of_earlier_and_later_releases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    path.write_text(OLD)
    run, report = journal.read(path)
    assert isinstance(run, RunRecord) and isinstance(report, ReportRecord)
    assert (run.model, run.versions, run.machine, run.config_digest) == ("Llama", {"torch": "2.9.0"}, None, "00ff")
    assert run.predicted[0]["peak"] == 7 and run.predicted[0]["components"][0]["role"] == "weights"
    first, second = report.stages
    assert (report.iteration, report.missing_ranks, first.residual, first.worst_rank) == (4, (1,), 2, 0)
    assert (second.failed, second.allocated, second.static_residual) == ({"1": "no driver"}, None, None)
    # What is written is read by them: no key that they had is gone.
    journal.append(tmp_path / "again.jsonl", report)
    again = json.loads((tmp_path / "again.jsonl").read_text())
    old = json.loads(OLD.splitlines()[1])
    assert {key: again[key] for key in old if key not in ("stages", "later")} == {
        key: value for key, value in old.items() if key not in ("stages", "later")
    }
    assert again["stages"][0] == old["stages"][0]


def test_nothing_is_refused() -> None:
    """Whatever a line holds, there is a record: what is no figure is not known."""
    wrong = {"stages": [{}, {"stage": 1, "allocated": "x", "failed": 3}, 7], "iteration": None, "missing_ranks": 4}
    assert ReportRecord.from_json(wrong) == ReportRecord(stages=(StageRecord(stage=1),))
    assert record_of({"event": []}) is None
    assert RunRecord.from_json({"predicted": {}, "versions": [], "machine": 1}) == RunRecord()
