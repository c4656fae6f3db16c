"""``compare`` of a journal with phases: each beside the whole job, and whatever a journal holds, no traceback."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import ParallelSpec, RunSpec, SpecError, compare, whole_job
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import Bounds, PhaseRecord, PhasesRecord, ReportRecord, RunRecord, StageRecord
from bridge_memory.cli import main
from bridge_memory.comparison.phases import Figure, compare_phases
from bridge_memory.job.job import PhaseMemory
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.outside.amount import Range, total
from bridge_memory.readers.run_spec import run_to_json
from bridge_memory.web import worker

GIB = 1 << 30
RUN = RunSpec(
    model="meta-llama/Llama-3.1-8B",
    parallel=ParallelSpec(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
)
FLAGS = ("meta-llama/Llama-3.1-8B", "--num-gpus", "4", "--tp", "2", "--pp", "2")
JOB = whole_job(RUN, "H100")


def exactly(phase: PhaseMemory, *names: str) -> PhaseRecord:
    """A record of what is predicted, at the lower ends."""
    outside, reserved = total(phase.outside).least, phase.reserved.least
    allocated = total(phase.allocated).least
    return PhaseRecord(
        phases=names or (str(phase.phase),), stage=phase.stage, ranks=2, times=1, worst_rank=2 * phase.stage,
        allocated=(allocated, allocated), reserved=(reserved, reserved), driver=outside + reserved, outside=outside,
    )  # fmt: skip


def written(
    path: Path, phases: Sequence[PhaseRecord] = (), gpu: str = "NVIDIA H100 80GB HBM3", run: RunSpec | None = RUN
) -> Path:
    start = RunRecord(machine={"gpu": gpu, "facts": {}, "notes": []}, run={} if run is None else run_to_json(run))
    journal.append(path, start)
    stages = [StageRecord(stage=n, ranks=1, predicted_static=1, predicted_peak=2, allocated=1, max_allocated=2,
                          reserved=3, worst_rank=n) for n in range(2)]  # fmt: skip
    journal.append(path, ReportRecord(iteration=2, moment="steady", world_size=4, stages=stages))
    if phases:
        journal.append(path, PhasesRecord(world_size=4, phases=phases))
    return path


def document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["compare", *argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    schema = json.loads((Path(journal.__file__).parents[1] / "report" / "compare.schema.json").read_text())
    pytest.importorskip("jsonschema").validate(found, schema)
    return found


def everything() -> list[PhaseRecord]:
    return [exactly(phase) for stage in JOB.stages for phase in stage]


def test_what_was_predicted_is_within_its_ranges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "r.jsonl", everything())
    phases = document(capsys, str(path))["phases"]
    assert phases["gpu"] == "H100" and phases["worst"]["error"] == 0 and len(phases["rows"]) == 14
    for row, phase in zip(phases["rows"], [phase for stage in JOB.stages for phase in stage], strict=True):
        assert (row["phases"], row["stage"]) == ([str(phase.phase)], phase.stage)
        assert row["driver"] == {
            "measured_bytes": [phase.driver.least] * 2, "predicted_bytes": list(phase.driver), "error": 0
        }  # fmt: skip
        assert row["allocated"]["predicted_bytes"] == list(total(phase.allocated))
    assert main(["compare", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Phases on H100: all within their ranges" in out and "resume" in out


def test_the_worst_phase_is_named_with_its_stage_and_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver of saving on stage 1 at 1.25 times the upper end: a fifth of what was measured."""
    records = everything()
    (place,) = [i for i, r in enumerate(records) if (r.phases, r.stage) == (("save",), 1)]
    (phase,) = [phase for phase in JOB.stages[1] if phase.phase == "save"]
    driver = phase.driver.most * 5 // 4
    reserved = driver - (outside := total(phase.outside).least)
    records[place] = PhaseRecord(
        phases=("save",), stage=1, allocated=(1, None), reserved=(reserved, reserved), driver=driver, outside=outside
    )
    path = written(tmp_path / "r.jsonl", records)
    worst = document(capsys, str(path))["phases"]["worst"]
    assert worst == {"phases": ["save"], "stage": 1, "figure": "driver", "error": pytest.approx(0.2, abs=1e-6)}
    page = tmp_path / "page.html"
    for more in ((), FLAGS):
        assert main(["compare", str(path), *more]) == 0
        out = capsys.readouterr().out
        assert "furthest off is save (stage 1), 20.0% too low: memory of the driver" in " ".join(out.split())
        assert main(["compare", str(path), *more, "--output", str(page), "--force"]) == 0
        assert "furthest off is save (stage 1), 20.0% too low" in page.read_text()
        capsys.readouterr()


def test_phases_that_nothing_separated_are_compared_with_the_highest(tmp_path: Path) -> None:
    build, load = JOB.stages[0][0], JOB.stages[0][1]
    record = exactly(load, "build", "load")
    path = written(tmp_path / "r.jsonl", [record])
    found = compare_phases(path.read_text().splitlines(), None, None)
    assert found is not None
    (row,) = found.rows
    assert row.name == "build + load" and row.error == 0
    assert row.driver.predicted == Range(
        max(build.driver.least, load.driver.least), max(build.driver.most, load.driver.most)
    )


def test_memory_of_other_processes_is_left_out_where_nvml_tells_it(tmp_path: Path) -> None:
    """20 GiB of a neighbour on the same GPU."""
    phase = JOB.stages[0][3]
    one = exactly(phase)
    assert one.driver is not None and one.outside is not None
    shared = PhaseRecord(
        phases=one.phases, stage=0, allocated=one.allocated, reserved=one.reserved, driver=one.driver + 20 * GIB,
        outside=one.outside + 20 * GIB, process=one.driver,
    )  # fmt: skip
    alone = PhaseRecord(
        phases=("save",), stage=0, reserved=one.reserved, driver=one.driver + 20 * GIB, outside=one.outside + 20 * GIB
    )
    found = compare_phases(written(tmp_path / "r.jsonl", [shared, alone]).read_text().splitlines(), None, None)
    assert found is not None
    told, whole = found.rows
    assert told.driver.measured == (one.driver, one.driver) and told.error == 0
    assert whole.driver.measured == (one.driver + 20 * GIB, one.driver + 20 * GIB)


@pytest.mark.parametrize(("measured", "predicted", "error"), [
    ((5, 6), (6, 9), 0.0), ((9, 12), (6, 9), 0.0), ((10, 12), (6, 9), 0.1), ((2, 4), (5, 9), -0.25),
    ((2, None), (5, 9), 0.0), ((10, None), (5, 9), 0.1), ((0, 0), (5, 9), None), ((0, 0), (0, 9), 0.0),
], ids=repr)  # fmt: skip
def test_the_error_of_ranges(measured: Bounds, predicted: tuple[int, int], error: float | None) -> None:
    assert Figure(measured, Range(*predicted)).error == error
    assert Figure(measured, None).error is None and Figure(None, Range(*predicted)).error is None


# ---- what a journal lacks ----


@pytest.mark.parametrize(("gpu", "run", "argv", "said"), [
    ("", RUN, (), "does not name its GPU; give --gpu NAME"), ("Wafer 9000", RUN, (), "Wafer 9000"),
    ("NVIDIA H100 80GB HBM3", None, (), "does not say what ran"),
    ("NVIDIA A100-SXM4-80GB", RUN.with_fields(fp8="hybrid"), (), "fp8"),
], ids=("no GPU", "unknown GPU", "no run", "a GPU that cannot"))  # fmt: skip
def test_without_a_prediction_the_figures_are_shown_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpu: str, run: RunSpec | None, argv: tuple[str, ...], said: str
) -> None:
    path = written(tmp_path / "r.jsonl", everything(), gpu, run)
    phases = document(capsys, str(path), *argv)["phases"]
    assert phases["gpu"] is None and phases["worst"] is None and said in phases["notes"][0]
    assert phases["rows"][0]["driver"]["measured_bytes"] and phases["rows"][0]["driver"]["predicted_bytes"] is None
    assert main(["compare", str(path), *argv]) == 0
    out = capsys.readouterr().out
    assert said in " ".join(out.split()) and "measured" in out
    if run is not None and "A100" not in gpu:
        assert document(capsys, str(path), "--gpu", "H100")["phases"]["worst"]["error"] == 0


def test_a_journal_without_phases_is_what_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "r.jsonl")
    assert "phases" not in document(capsys, str(path))
    assert main(["compare", str(path)]) == 0
    assert "Phases" not in capsys.readouterr().out


def test_phases_of_the_run_before_are_not_of_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(written(tmp_path / "r.jsonl", everything()))
    assert "phases" not in document(capsys, str(path))


def test_a_journal_of_another_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.jsonl"
    small = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))
    report = MemoryReport(path, run=small, emit=lambda text: None, read=lambda *of: Reading(*of, GIB, GIB, GIB, GIB, 9))
    report.start()
    report.step()
    one_gpu = ("--num-gpus", "1", "--gpu", "H100")
    phases = document(capsys, str(path), "meta-llama/Llama-3.1-8B", *one_gpu)["phases"]
    assert phases["notes"] == ["the journal is of another configuration than the given one"]
    assert not document(capsys, str(path), "meta-llama/Llama-3.2-1B", *one_gpu)["phases"]["notes"]


@pytest.mark.parametrize("seed", range(25))
def test_whatever_a_journal_says_of_phases_there_is_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Phases out of order, twice, unknown, on stages that are none, with figures that are none."""
    draw = random.Random(seed)
    odd: list[Any] = [None, 0, 1, 5 * GIB, -1, "x", [], {}, [1, 2], [2, 1], [1, None], [None, 1], True, 1e300, 1 << 70]
    names = ["build", "save", "resume", "training", "rollout", "", 7, "first step"]
    records = [
        {
            "phases": [draw.choice(names) for _ in range(draw.randrange(1, 4))],
            "stage": draw.choice([0, 1, 2, -1, 99]),
            **{key: draw.choice(odd) for key in ("ranks", "times", "worst_rank", "allocated", "reserved", "driver",
                                                 "outside", "process")},
        }
        for _ in range(draw.randrange(1, 9))
    ]  # fmt: skip
    path = written(tmp_path / "r.jsonl")
    line = json.dumps({"schema": journal.SCHEMA, "event": "phases", "phases": records, "time": "never"})
    path.write_text(path.read_text() + line + "\n" + line[: draw.randrange(len(line))])
    found = document(capsys, str(path))
    assert main(["compare", str(path)]) == 0
    assert "phases" not in found or all(row["phases"] for row in found["phases"]["rows"])


# ---- in Python and on the page ----


def test_python_and_the_page_have_the_phases_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_bound_memory", lambda more: None)  # of a process of its own
    path = written(tmp_path / "r.jsonl", everything())
    said = document(capsys, str(path))["phases"]
    found = compare(None, path).phases
    assert found is not None and found.as_json() == said
    asked = {"question": None, "path": str(path), "name": "r.jsonl"}
    answer = worker._compare(asked, None)
    assert answer["phases"] == said
    assert compare(None, written(tmp_path / "none.jsonl")).phases is None


def test_the_card_of_phases_is_the_journals_or_the_given_one(tmp_path: Path) -> None:
    named = compare(None, written(tmp_path / "a.jsonl", everything()), gpu="H200").phases
    unnamed = written(tmp_path / "b.jsonl", everything(), gpu="")
    assert named is not None and named.gpu == "H200"
    (none, given) = compare(None, unnamed).phases, compare(None, unnamed, gpu="H100").phases
    assert none is not None and none.gpu is None and given is not None and given.gpu == "H100"
    with pytest.raises(SpecError, match="Wafer"):
        compare(None, unnamed, gpu="Wafer 9000")
