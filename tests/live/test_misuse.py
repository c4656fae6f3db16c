"""Arguments that are none, threads and signals: said where the object is made, or without effect on training."""

from __future__ import annotations

import copy
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from test_patience import GIB, DictStore, Job, quiet

from bridge_memory import RunSpec, SpecError
from bridge_memory.live import MemoryReport, gather, install, uninstall
from bridge_memory.live.cuda import Reading
from bridge_memory.live.guard import Attempts
from bridge_memory.spec import ParallelSpec

RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))
NO_FILE, NO_FUNCTION = (3, b"x", "", True, ["x"]), (3, "print")
NO_NUMBER = ("0.1", -1, None, float("nan"), float("inf"), True)
WRONG = [
    *[(name, value) for name in ("path", "calibration", "html") for value in NO_FILE],
    *[(name, value) for name in ("threshold", "deadline") for value in NO_NUMBER],
    *[("emit", value) for value in NO_FUNCTION], *[("read", value) for value in (*NO_FUNCTION, None)],
    *[("every", value) for value in (0, -5, 1.5, "10", True)], *[("run", value) for value in ("Llama", 3, {})],
]  # fmt: skip


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, GIB, 2 * GIB, 2 * GIB, 2 * GIB, 80 * GIB, 4 * GIB)


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}-{value!r}" for name, value in WRONG])
def test_an_argument_that_is_none_is_refused_where_the_report_is_made(name: str, value: Any) -> None:
    """threshold="0.1" once made a text of as many characters as there were bytes, on rank 0, at the first report."""
    with pytest.raises(SpecError, match=rf"^{name} \(.*; give ") as refusal:
        MemoryReport(**{name: value})
    assert "\n" not in str(refusal.value)
    if name in ("path", "html", "deadline", "emit", "read"):
        with pytest.raises(SpecError, match=rf"^{name} \("):
            install(**{name: value})
    uninstall()


def test_arguments_of_every_kind_that_is_one(tmp_path: Any) -> None:
    MemoryReport(tmp_path / "a", run=RUN, every=1, calibration="b", html="c", threshold=0, deadline=0.0, emit=None)
    MemoryReport(None, run=lambda: RUN, threshold=10**6, emit=quiet, read=reading)


@pytest.mark.parametrize("figure", ["many", 1.5, None, True, [0] * 9])
def test_a_figure_that_is_none_is_no_reading(figure: Any) -> None:
    shown: list[str] = []
    with MemoryReport(run=RUN, emit=shown.append, read=lambda rank, stage: Reading(rank, stage, max_allocated=figure)):
        pass
    assert len(shown) == 1 and "rank 0 has no reading (TypeError: max_allocated)" in shown[0]


# ---- time ----


def test_what_succeeds_slowly_is_not_paid_at_every_report(
    container: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A printer of 3 s once cost 3 s at each of them."""
    clock = [0.0]
    monkeypatch.setattr("bridge_memory.live.guard.time", type("", (), {"monotonic": lambda: clock[0]}))

    def slow(*args: object) -> None:
        clock[0] += 3.0

    attempts = Attempts("a slow printer")
    for _ in range(2000):  # a step of 1 s, a report after each
        clock[0] += 1.0
        attempts(slow)
    lost = clock[0] - 2000.0
    assert 9.0 <= lost <= 9.0 + 0.021 * clock[0]  # three reports whatever they take, then 2 %
    assert capsys.readouterr().err.count("\n") == 1
    quick = Attempts("a quick printer")
    assert [quick(lambda: True) for _ in range(100)] == [True] * 100


def test_a_report_on_rank_0_alone_waits_once(container: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    collect = gather.collect

    def recorded(store: Any, moment: str, ranks: Any, *, deadline: float) -> Any:
        waited.append(deadline if ranks else 0.0)
        return collect(store, moment, ranks, deadline=deadline / 100)

    monkeypatch.setattr(gather, "collect", recorded)
    shown: list[str] = []
    job = Job(container, monkeypatch, rank=0)
    job.train(10, emit=shown.append, deadline=30.0)
    assert [seconds for seconds in waited if seconds] == [30.0, gather.GRACE]
    assert all("ranks 1-3; MemoryReport belongs on every rank" in text for text in shown if "GPU memory by" in text)


# ---- threads ----


class Patient(DictStore):
    """Says how many threads ask it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.asking: set[int] = set()
        self.most = 0

    def check(self, keys: list[str]) -> bool:
        self.asking.add(threading.get_ident())
        self.most = max(self.most, len(self.asking))
        time.sleep(0.01)
        return super().check(keys)


def test_steps_of_many_threads_are_counted_and_one_of_them_reports(
    container: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of them once waited for the other ranks one beside the other, at the store that NCCL asks too."""
    store = Patient()
    Job(container, monkeypatch, 0, store)
    report = MemoryReport(run=RUN, every=1, deadline=0.5, emit=quiet, read=reading)
    gate = threading.Barrier(8)

    def train() -> None:
        gate.wait()
        report.step()

    threads = [threading.Thread(target=train, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert store.most == 1 and report.steps == 8


def test_a_report_can_be_copied() -> None:
    report = MemoryReport(run=RUN, emit=quiet, read=reading)
    for again in (copy.deepcopy(report), pickle.loads(pickle.dumps(report._reporter._alone))):
        assert again is not None


# ---- signals ----


class Preempted(Exception):
    """What a scheduler's signal makes of training."""


def function(number: int, frame: Any) -> None:
    raise Preempted


def once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Preempted


class Handler:
    def method(self, number: int, frame: Any) -> None:
        raise Preempted

    def __call__(self, *given: Any) -> None:
        self.method(*given)


def named(name: str, number: int, frame: Any) -> None:
    raise Preempted(name)


HANDLERS = {"function": function, "once": once, "method": Handler().method, "object": Handler(),
            "partial": partial(named, "x")}  # fmt: skip


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler) and None
    signal.signal(signal.SIGUSR1, before)


def interrupt(*args: object) -> Any:
    signal.raise_signal(signal.SIGUSR1)
    time.sleep(0)
    raise AssertionError("nothing interrupted it")


class Interrupted(DictStore):
    def __getattribute__(self, name: str) -> Any:
        return interrupt if name == "check" else super().__getattribute__(name)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signals")
@pytest.mark.parametrize("how", HANDLERS)
@pytest.mark.parametrize("where", ["run", "read", "emit", "store", "machine", "calibration"])
def test_what_a_handler_of_a_signal_raises_is_trainings(
    monkeypatch: pytest.MonkeyPatch, container: Any, handled: Callable[[Any], None], tmp_path: Any, how: str, where: str
) -> None:
    """A preemption that came during a report was once a warning of ours, and training went on until it was killed."""
    Job(container, monkeypatch, 0, Interrupted() if where == "store" else DictStore())
    monkeypatch.setenv("WORLD_SIZE", "4" if where == "store" else "1")
    given: dict[str, Any] = {"run": RUN, "read": reading, "emit": quiet}
    report = MemoryReport(**given | ({where: interrupt} if where in given else {}))
    if where == "machine":
        monkeypatch.setattr("bridge_memory.live.machine._device", interrupt)
    if where == "calibration":
        report = MemoryReport(tmp_path / "journal", **given)
        monkeypatch.setattr("bridge_memory.calibration.journal.append", interrupt)
    handled(HANDLERS[how])
    with pytest.raises(Preempted):
        report.step()


def test_an_error_of_ours_inside_of_a_handler_is_ours(handled: Callable[[Any], None]) -> None:
    """A report that a handler makes, as the last of a job, raises nothing into it."""
    shown: list[str] = []

    def broken(rank: int, stage: int) -> Reading:
        raise RuntimeError("no GPU any more")

    report = MemoryReport(run=RUN, emit=shown.append, read=broken)
    handled(lambda number, frame: report.step())
    signal.raise_signal(signal.SIGUSR1)
    assert report.steps == 1 and len(shown) == 1
