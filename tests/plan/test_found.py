"""What both searches find, and how it is printed: the same rows, the same answer, the same formats."""

from __future__ import annotations

import inspect
import io
import json
import sys
from typing import Any, NamedTuple

import pytest

from bridge_memory.cli import main
from bridge_memory.cli.progress import Progress
from bridge_memory.emit.formats import FORMATS, formats_of
from bridge_memory.plan.found import Found, Listed, Refused, Row
from bridge_memory.plan.megatron.search import search as search_megatron
from bridge_memory.plan.torch.search import search as search_torch
from bridge_memory.spec import RunSpec
from bridge_memory.speed.megatron.step_time import StepTime
from bridge_memory.speed.torch.step_time import StepTime as TorchStepTime
from bridge_memory.verdict import Verdict

RUN = RunSpec(model="meta-llama/Llama-3.2-1B")
COMMON = ["--num-gpus", "8", "--gpu", "H100", "--global-batch-size", "64", "--seq-length", "2048"]
MEGATRON = ["search", "meta-llama/Llama-3.2-1B", *COMMON, "--vary", "tp,pp"]
TORCH = ["search", "meta-llama/Llama-3.2-1B", *COMMON, "--engine", "fsdp2", "--vary", "mbs"]


class _Time(NamedTuple):
    seconds: float
    recomputation: float = 0.0
    exposed_communication: float = 0.0
    optimizer: float = 0.0


class _ByPeak(Listed[_Time]):
    def choice(self, number: int) -> object:
        return self[number].peak


def found(*rows: tuple[float, int]) -> Found:
    made = _ByPeak([Row(RUN, peak, 0, 0, _Time(seconds)) for seconds, peak in rows])
    return Found(made, len(rows), 0, Refused())


def test_rows_are_sorted_by_time_then_by_peak() -> None:
    rows = found((2.0, 5), (1.0, 9), (1.0, 8)).rows
    assert [(row.time.seconds, row.peak) for row in rows] == [(1.0, 8), (1.0, 9), (2.0, 5)]


def test_the_best_have_one_row_a_choice() -> None:
    result = found((1.0, 8), (2.0, 8), (3.0, 5))
    assert [row.time.seconds for row in result.best()] == [1.0, 3.0]
    assert [row.time.seconds for row in result.best(1)] == [1.0]
    assert found().best() == found().front() == ()


def test_the_front_gets_smaller_as_it_gets_slower() -> None:
    result = found((1.0, 8), (2.0, 9), (3.0, 5), (4.0, 5), (5.0, 4))
    assert [(row.time.seconds, row.peak) for row in result.front()] == [(1.0, 8), (3.0, 5), (5.0, 4)]
    assert len(result.front(2)) == 2


def test_both_searches_take_and_give_the_same() -> None:
    """What one has beyond the other is its own: arrays and kept costs of Megatron's, a measured factor of torch's."""
    ours, theirs = (inspect.signature(one).parameters for one in (search_megatron, search_torch))
    assert ours.keys() - theirs.keys() == {"batched", "cache"} and theirs.keys() - ours.keys() == {"slower"}
    for name in ours.keys() & theirs.keys():
        assert (ours[name].kind, ours[name].default) == (theirs[name].kind, theirs[name].default), name
    parts = {"seconds", "recomputation", "exposed_communication", "optimizer"}
    assert all(parts <= set(dir(time)) for time in (StepTime, TorchStepTime))


@pytest.mark.parametrize("command", (MEGATRON, TORCH), ids=("megatron", "torch"))
def test_the_answer_comes_first_and_adds_up(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert main(command) == 0
    answer = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert answer.startswith("Fastest ") and f"{best['step_seconds']:#.3g} s per step" in answer
    rate = 64 * 2048 / best["step_seconds"] / 8
    assert f"{rate:,.0f} tokens/s/GPU" in answer
    words = answer.partition("FITS H100: peak ")[2].partition(" free")[0].replace(",", "").split()
    numbers = [float(word) for word in words if word[0].isdigit() and not word.endswith(")")]
    peak, margin, capacity, free = numbers  # of the whole job, as estimate gives them (test_same_number)
    assert peak + margin + free == pytest.approx(capacity, abs=1e-9)  # as shown
    assert peak == pytest.approx(best["peak_bytes"] / 2**30, abs=0.06)


def test_what_must_be_free_is_free_in_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """--headroom is not margin: what it asks for is still free."""
    answers = []
    for more in ([], ["--headroom", "5"]):
        assert main([*MEGATRON, *more]) == 0
        answers.append(capsys.readouterr().out.partition("\n\n")[0])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("how", FORMATS)
@pytest.mark.parametrize(("trainer", "command"), (("megatron", MEGATRON), ("torch", TORCH)))
def test_every_format_is_written_or_refused(
    how: str, trainer: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("yaml")
    mixed = ["--mixed-precision", "bf16", "--transformers-version", "5.0"] if trainer == "torch" else []
    code = main([*command, *mixed, "--emit", how])
    captured = capsys.readouterr()
    if how in ("deepspeed", "torchtitan"):  # FSDP2 of transformers has neither; megatron-core has no file at all
        assert code == 2 and captured.err.count("\n") == 1
    else:
        assert code == (0 if how in formats_of(trainer) else 2), captured.err
        assert bool(captured.out) == (code == 0)


def test_what_accelerate_calls_no_is_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """YAML 1.1 reads a bare "no" as False, which accelerate refuses."""
    yaml = pytest.importorskip("yaml")
    fp32 = ["--precision", "fp32", "--engine", "ddp"]
    assert main(["search", "meta-llama/Llama-3.2-1B", *COMMON, *fp32, "--vary", "mbs", "--emit", "accelerate"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["mixed_precision"] == "no" and config["distributed_type"] == "MULTI_GPU"


# ---- progress ----


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(stream: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a search of three looks, a second apart, writes to stderr."""
    now = [0.0]
    monkeypatch.setattr("bridge_memory.cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("layout") as progress:
        for looked_at in (10, 2000, 30000):
            now[0] += 1.0
            progress(looked_at, looked_at // 2)
    return str(stream.getvalue())


def test_progress_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    assert "30,000 layouts, 15,000 fit (Ctrl-C" in drawn(_Terminal(), monkeypatch)


def test_progress_says_of_how_many_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    now, stream = [0.0], _Terminal()
    monkeypatch.setattr("bridge_memory.cli.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with Progress("layout") as progress:
        now[0] += 4.0
        progress.done(0.25)  # a quarter took 4 s: three quarters take 12
        progress(30000, 15000)
    assert "30,000 of about 120,000 layouts, 15,000 fit, 12 s left" in stream.getvalue()


def test_progress_is_not_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(io.StringIO(), monkeypatch) == ""


def test_progress_is_silent_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert drawn(_Terminal(), monkeypatch) == ""


@pytest.mark.parametrize("most", [0, 3, 40, 79, 80])
def test_row_1_is_the_fastest_of_the_front_whose_job_fits_where_the_first_dozen_does_not(most: int) -> None:
    """``most``: bytes that a job may need; peaks go down from 100 to 1, as rows get slower."""
    result = found(*((float(at), 100 - at) for at in range(100)))
    result = result._replace(whole=lambda row: Verdict.FITS if row.peak <= most else Verdict.DOES_NOT_FIT)
    rows = result.ranked(5).rows
    assert rows[0].peak == (most or 100)
    assert len(set(rows)) == len(rows) == 5


def test_row_1_is_one_that_may_fit_before_slower_ones_that_do() -> None:
    result = found(*((float(at), 100 - at) for at in range(100)))
    whole = {False: Verdict.TIGHT, True: Verdict.FITS}
    result = result._replace(
        whole=lambda row: Verdict.DOES_NOT_FIT if row.peak > 97 else whole[row.peak <= 20]
    )
    assert [row.peak for row in result.ranked(4).rows] == [97, 100, 99, 98]
