"""Phases of a job: ranges that hold the true peaks, whatever a job does, and nothing that raises."""

from __future__ import annotations

import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from allocator import CONTEXT, GIB, Allocator

from bridge_memory import ParallelSpec, RunSpec
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import PhaseRecord, PhasesRecord
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading, read_cuda
from bridge_memory.live.phases import Phases, phase_records
from bridge_memory.outside.phase import Phase

RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))


def phases_in(path: Path) -> dict[str, PhaseRecord]:
    _, found = journal.phases(path.read_text().splitlines())
    assert found is not None
    return {" + ".join(phase.phases): phase for phase in found.phases}


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize("seed", range(60))
def test_ranges_hold_the_true_peak(seed: int) -> None:
    """Random jobs: phases in any order and again, the cache emptied, reports in between, readings that fail, a release
    of torch without the counters, and statistics that others reset: then the least stays true, and the most where the
    fall was seen."""
    draw = random.Random(seed)
    gpu, phases = Allocator(), Phases()
    resets, counters, fails = seed % 3 == 1, seed % 4 != 2, seed % 5 == 3

    def read() -> Reading:
        found = gpu.read(0, 0)
        if fails and draw.random() < 0.2:
            return Reading(0, 0, error="no driver")
        return found if counters else Reading(*[getattr(found, n) for n in Reading.__dataclass_fields__][:8])

    gpu.begin("build")
    for _ in range(draw.randrange(2, 12)):
        for _ in range(draw.randrange(8)):
            gpu.malloc(draw.randrange(1, 1 << 20))
            if draw.random() < 0.6:
                gpu.free(draw.randrange(gpu.allocated + 1))
            if draw.random() < 0.2:
                gpu.empty_cache()
            if resets and draw.random() < 0.1:
                gpu.reset()
            if draw.random() < 0.2:
                phases.now(read())
        phase = draw.choice(list(Phase))
        phases.begin((phase,), read())
        gpu.begin(str(phase))
    for held in phases.now(read()):
        for (least, most), true in zip((held.allocated, held.reserved), gpu.true[held.phases[0]], strict=True):
            assert least <= true
            assert resets or fails or (most is not None and true <= most)


def test_a_phase_that_goes_higher_than_all_before_is_exact_and_the_reserved_memory_of_later_ones_too() -> None:
    gpu, phases = Allocator(), Phases()
    gpu.use(30, keep=20)
    phases.begin((Phase.TRAINING,), gpu.read(0, 0))
    gpu.use(25)
    phases.begin((Phase.SAVE,), gpu.read(0, 0))
    gpu.use(2)
    built, trained, saved = phases.now(gpu.read(0, 0))
    assert built.allocated == (30 * GIB, 30 * GIB) and trained.allocated == (45 * GIB, 45 * GIB)
    assert saved.allocated == (20 * GIB, 22 * GIB)  # at most what it began with and all that it asked for
    assert saved.reserved == (45 * GIB, 45 * GIB)  # nothing was reserved meanwhile


def test_statistics_that_others_reset_leave_a_lower_end() -> None:
    gpu, phases = Allocator(), Phases()
    gpu.use(30, keep=10)
    old = gpu.read(0, 0)
    phases.begin((Phase.TRAINING,), Reading(0, 0, old.allocated, old.max_allocated, old.reserved, old.max_reserved))
    gpu.use(50)
    gpu.reset()
    gpu.use(5)
    last = gpu.read(0, 0)
    now = phases.now(Reading(0, 0, last.allocated, last.max_allocated, last.reserved, last.max_reserved))
    assert now[1].allocated == (15 * GIB, None)


def test_a_plain_loop_journals_the_phases_it_names(tmp_path: Path) -> None:
    gpu = Allocator()
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, emit=quiet, read=gpu.read)
    with gpu.phase("build"):
        gpu.use(10, keep=10)
    with report.phase("load"), gpu.phase("load"):
        gpu.use(34)
    report.start()
    for step in range(4):
        with gpu.phase("first step" if not step else "training"):
            gpu.use(12, keep=0 if step else 5)
        report.step()
        if step == 2:
            report.phase("evaluation")
            with gpu.phase("evaluation"):
                gpu.use(3)
            report.phase("training")
            with report.phase("save"), gpu.phase("save"):
                gpu.use(1)
                gpu.outside += GIB
    report.end()
    with report.phase("save"), gpu.phase("save"):
        gpu.use(2)
    found = phases_in(tmp_path / "r.jsonl")
    assert list(found) == ["build", "load", "first step", "training", "evaluation", "save"]
    for name, phase in found.items():
        gpu.holds(phase, name)
        assert (phase.ranks, phase.worst_rank, phase.stage) == (1, 0, 0)
    assert found["load"].allocated == (44 * GIB, 44 * GIB)
    assert found["save"].times == 2
    assert (found["load"].outside, found["save"].outside) == (CONTEXT, CONTEXT + GIB)


def test_a_loop_that_calls_step_alone_separates_nothing_before_it(tmp_path: Path) -> None:
    gpu = Allocator()
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, emit=quiet, read=gpu.read)
    for _ in range(3):
        gpu.use(9)
        report.step()
    report.end()
    assert list(phases_in(tmp_path / "r.jsonl")) == ["build + first step", "training"]


def test_steps_between_reports_read_nothing_and_phases_read_once(tmp_path: Path) -> None:
    gpu, read = Allocator(), []

    def counted(rank: int, stage: int) -> Reading:
        read.append(rank)
        return gpu.read(rank, stage)

    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, every=1000, emit=quiet, read=counted)
    report.start()
    for _ in range(50):
        report.step()
    assert len(read) == 3
    with report.phase("save"):
        pass
    assert len(read) == 5


@pytest.mark.parametrize("name", ["saving", "", None, 3, [], "SAVE"], ids=repr)
def test_an_unknown_phase_is_no_error(
    tmp_path: Path, name: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bridge_memory.live import guard

    monkeypatch.setattr(guard, "_warned", set())
    gpu = Allocator()
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, emit=quiet, read=gpu.read)
    report.start()
    with report.phase(name):
        gpu.use(1)
    report.step()
    report.end()
    assert list(phases_in(tmp_path / "r.jsonl")) == ["build", "first step", "training"]
    assert "is not a phase; name build, load, first step, training" in capsys.readouterr().err


def test_an_error_in_a_phase_is_the_loops(tmp_path: Path) -> None:
    gpu = Allocator()
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, emit=quiet, read=gpu.read)
    report.start()
    with pytest.raises(ZeroDivisionError), report.phase("save"):
        raise ZeroDivisionError
    assert "save" in phases_in(tmp_path / "r.jsonl")  # on disk although the job ends here


@pytest.mark.parametrize("read", [lambda *of: 1 / 0, lambda *of: None, lambda *of: Reading(*of, error="x")],
                         ids=["raises", "nothing", "an error"])  # fmt: skip
def test_readings_that_fail_make_no_phases(tmp_path: Path, read: Any) -> None:
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, emit=quiet, read=read)
    with report.phase("load"):
        pass
    report.start()
    report.step()
    with report.phase("evaluation"), report.phase("save"):
        pass
    report.end()
    assert journal.phases((tmp_path / "r.jsonl").read_text().splitlines())[1] is None


def test_ranks_of_a_stage_and_of_others_with_other_phases() -> None:
    """The fuller rank of a stage speaks for it; a phase that one stage alone passed is of that stage."""
    readings = []
    for rank, (stage, gib, phase) in enumerate(
        [(0, 3, Phase.SAVE), (0, 7, Phase.SAVE), (1, 5, Phase.EVALUATION), (1, 1, Phase.SAVE)]
    ):
        gpu, phases = Allocator(), Phases()
        phases.begin((phase,), gpu.read(rank, stage))
        gpu.use(gib)
        held = phases.now(gpu.read(rank, stage))
        readings.append(Reading(rank, stage, phases=held))
    found = [(r.phases, r.stage, r.ranks, r.worst_rank) for r in phase_records(readings)]
    assert [one for one in found if one[0] != ("build",)] == [
        (("evaluation",), 1, 1, 2), (("save",), 0, 2, 1), (("save",), 1, 1, 3),
    ]  # fmt: skip
    # As they come through the store.
    assert [Reading.from_json(reading.to_json()) for reading in readings] == readings


# ---- the real torch.cuda, faked below its functions ----


def test_torchs_own_counters_are_read_and_nvmls_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of statistics as ``torch.cuda.memory_stats`` has them; nothing is asked before CUDA is in use."""
    torch = pytest.importorskip("torch")
    import os

    from bridge_memory.live import cuda

    def never(*of: Any) -> Any:
        raise AssertionError("this starts CUDA")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", never)
    assert read_cuda(0, 0).error == "CUDA is not in use"
    stats = {
        "allocated_bytes.all.current": 1, "allocated_bytes.all.peak": 2, "allocated_bytes.all.allocated": 9,
        "reserved_bytes.all.current": 3, "reserved_bytes.all.peak": 4, "reserved_bytes.all.allocated": 8,
    }  # fmt: skip
    process = types.SimpleNamespace
    others = [process(pid=os.getpid(), usedGpuMemory=70), process(pid=1, usedGpuMemory=5)]
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: others if handle == "GPU-ab" else [],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    cuda._nvml.cache_clear()
    for name, value in {
        "is_initialized": lambda: True, "memory_stats": lambda: stats, "mem_get_info": lambda: (20, 100),
        "current_device": lambda: 0, "get_device_properties": lambda device: process(uuid="ab"),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    found = read_cuda(2, 1)
    assert (found.device_used, found.allocated_ever, found.reserved_ever, found.process) == (80, 9, 8, 70)
    others[0].usedGpuMemory = None  # as on WSL
    assert read_cuda(2, 1).process == 0
    nvml.nvmlDeviceGetComputeRunningProcesses = never
    assert read_cuda(2, 1).process == 0 and not read_cuda(2, 1).error
    cuda._nvml.cache_clear()


# ---- the journal ----


def test_a_journal_of_phases_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    one = PhaseRecord(phases=("build", "load"), stage=1, allocated=(1, None), reserved=(2, 3), driver=4, outside=0)
    journal.append(path, PhasesRecord(world_size=2, phases=(one,)))
    whole = path.read_bytes()
    assert journal.phases(whole.splitlines())[1] == PhasesRecord(world_size=2, phases=(one,))
    for cut in range(len(whole) - 1):
        assert journal.phases([whole[:cut]])[1] is None
    # Of another run after it: those phases are not this run's.
    started = b'{"schema":"bridge-memory/live-1","event":"run"}'
    assert journal.phases([whole, started])[1] is None
    # Reports are what they were: those who read them see no new kind.
    assert list(journal.read(path)) == []


@pytest.mark.parametrize("wrong", [
    {}, {"stage": 0}, {"stage": "x", "phases": ["save"]}, {"stage": 0, "phases": []}, {"stage": 0, "phases": "save"},
    {"stage": 0, "phases": [3, None]}, {"stage": 1 << 80, "phases": ["save"]},
], ids=repr)  # fmt: skip
def test_what_is_no_phase_is_left_out(wrong: dict[str, Any]) -> None:
    assert PhasesRecord.from_json({"phases": [wrong, 7, None]}) == PhasesRecord()


@pytest.mark.parametrize(
    "wrong", [None, 3, [], [1], [2, 1], [-1, 2], ["1", 2], [1, 2, 3], [True, 2], [1.5, 2]], ids=repr
)
def test_what_is_no_range_is_not_known(wrong: Any) -> None:
    record = PhaseRecord.from_json({"phases": ["save"], "stage": 0, "allocated": wrong, "driver": "x"})
    assert record == PhaseRecord(phases=("save",), stage=0)


def test_threads_and_handlers_that_name_phases_meanwhile_end_nothing(tmp_path: Path) -> None:
    import threading

    gpu = Allocator()
    gpu.use(1)
    report = MemoryReport(tmp_path / "r.jsonl", run=RUN, every=1, emit=quiet, read=gpu.read)
    report.start()
    failed: list[BaseException] = []

    def saves() -> None:
        try:
            for _ in range(50):
                with report.phase("save"):
                    report.phase("evaluation")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=saves) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        report.step()
    for thread in threads:
        thread.join()
    report.end()
    # Phases are of one thread: what others name may be lost, and the reports are whole.
    assert not failed and phases_in(tmp_path / "r.jsonl")
    assert len(list(journal.read(tmp_path / "r.jsonl"))) == 32
