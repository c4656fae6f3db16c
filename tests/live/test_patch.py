"""``install()`` on Megatron-LM's module names: the table comes beside its reports, whose output and results stay."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_jobs import megatron_lm_args

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.estimation import estimate
from bridge_memory.live import install, uninstall
from bridge_memory.live.cuda import Reading
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.megatron_args import container as as_container
from bridge_memory.readers.megatron_args import run_from_megatron_args

GIB = 1 << 30


def test_the_arguments_are_read_as_from_the_command_line() -> None:
    """Two readers, one run: the parsed namespace, and the words that were parsed."""
    words = """--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16
        --group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --disable-bias-linear
        --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
        --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 --bf16 --hidden-dropout 0
        --attention-dropout 0 --micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer
        --recompute-granularity selective"""
    ours = run_from_config_container(as_container(megatron_lm_args()))
    theirs = run_from_megatron_args(words, world_size=8)
    assert [s.components for s in estimate(ours).stages] == [s.components for s in estimate(theirs).stages]


@pytest.fixture
def megatron_training(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Modules with the names and signatures of Megatron-LM's ``megatron.training``, which only newer wheels ship."""
    usage = types.ModuleType("megatron.training.theoretical_memory_usage")
    utils = types.ModuleType("megatron.training.utils")
    training = types.ModuleType("megatron.training.training")
    calls: list[str] = []

    def report_theoretical_memory(args: Any, num_microbatches: Any = None, verbose: bool = False) -> tuple[float, ...]:
        calls.append("theoretical")
        print(f"Theoretical memory footprints: theirs, {num_microbatches} microbatches, verbose {verbose}")
        return 1.0, 2.0, 3.0

    def report_memory(name: str) -> str:
        calls.append(name)
        return "returned"

    usage.report_theoretical_memory = report_theoretical_memory  # type: ignore[attr-defined]
    utils.report_memory = report_memory  # type: ignore[attr-defined]
    # training.py imports both by name.
    training.report_theoretical_memory = report_theoretical_memory  # type: ignore[attr-defined]
    training.report_memory = report_memory  # type: ignore[attr-defined]
    training.calls = calls  # type: ignore[attr-defined]
    for module in (usage, utils, training):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield training
    uninstall()


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, 5 * GIB, 9 * GIB, 10 * GIB, 10 * GIB, 80 * GIB, 12 * GIB)


def test_an_existing_script_gets_the_table_beside_its_own_reports(
    megatron_training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM 0.17 and later, and Bridge 0.6, report in the first and in the second iteration: one table."""
    before = megatron_training.report_memory
    args = megatron_lm_args()
    with install(tmp_path / "report.jsonl", prometheus=tmp_path / "memory.prom", read=reading) as installed:
        assert len(installed.patched) >= 4
        assert install() is installed
        for iteration in (1, 2):
            returned = megatron_training.report_theoretical_memory(args, num_microbatches=8, verbose=True)
            assert returned == (1.0, 2.0, 3.0)
            assert megatron_training.report_memory(f"(after {iteration} iterations)") == "returned"
    assert megatron_training.report_memory is before
    assert megatron_training.calls == [
        "theoretical", "(after 1 iterations)", "theoretical", "(after 2 iterations)",
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("Theoretical memory footprints: theirs, 8 microbatches, verbose True\n") == 2
    assert out.count("Theoretical memory footprints") == 2
    assert out.count("GPU memory by pipeline stage") == 1
    assert "Megatron Bridge's line" not in out
    _, report = journal.read(tmp_path / "report.jsonl")
    assert isinstance(report, ReportRecord)
    assert report.stages[0].max_allocated == 9 * GIB
    assert f"bridge_memory_max_allocated_bytes{{stage=\"0\"}} {9 * GIB}\n" in (tmp_path / "memory.prom").read_text()
    assert report.stages[0].residual == 9 * GIB - report.stages[0].predicted_peak


def test_another_run_of_the_process_gets_a_table_of_its_own(
    megatron_training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(None, read=reading)
    for _ in range(2):
        args = megatron_lm_args()
        for _ in range(2):
            megatron_training.report_theoretical_memory(args=args)
            megatron_training.report_memory("x")
    assert capsys.readouterr().out.count("GPU memory by pipeline stage") == 2


def test_what_cannot_be_read_still_gets_torchs_figures(
    megatron_training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "report.jsonl", read=reading)
    args = megatron_lm_args(vocab_size=None, padded_vocab_size=None)
    assert megatron_training.report_theoretical_memory(args) == (1.0, 2.0, 3.0)
    assert megatron_training.report_memory("x") == "returned"
    assert megatron_training.calls == ["theoretical", "x"]
    report = list(journal.read(tmp_path / "report.jsonl"))[-1]
    assert isinstance(report, ReportRecord)
    assert report.stages[0].max_allocated == 9 * GIB and report.stages[0].predicted_peak is None


def test_a_report_that_breaks_never_reaches_training(
    megatron_training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def emit(text: str) -> None:
        raise OSError("the disk is full")

    install(tmp_path, read=reading, emit=emit)  # a path that cannot be written either
    for args in (megatron_lm_args(), None, 3, object()):
        assert megatron_training.report_theoretical_memory(args) == (1.0, 2.0, 3.0)
        assert megatron_training.report_memory("x") == "returned"


def test_what_megatrons_report_raises_is_its_own(megatron_training: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def report_theoretical_memory(args: Any) -> None:
        raise ZeroDivisionError("theirs")

    for module in (megatron_training, sys.modules["megatron.training.theoretical_memory_usage"]):
        monkeypatch.setattr(module, "report_theoretical_memory", report_theoretical_memory)
    install(None, read=reading)
    with pytest.raises(ZeroDivisionError, match="theirs"):
        megatron_training.report_theoretical_memory(megatron_lm_args())
    uninstall()


def test_a_module_that_imported_ours_gets_the_original_back(
    megatron_training: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A module that is loaded after install() imports our function, under whatever name; another keeps a copy that
    nobody finds."""
    original = megatron_training.report_memory
    install(None, read=reading)
    later = types.ModuleType("a_module_that_came_later")
    later.renamed = megatron_training.report_memory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, later.__name__, later)
    hidden = [megatron_training.report_theoretical_memory, megatron_training.report_memory]
    assert later.renamed is not original
    uninstall()
    assert later.renamed is original
    assert hidden[0](megatron_lm_args()) == (1.0, 2.0, 3.0)
    assert hidden[1]("x") == "returned"
    assert "GPU memory by pipeline stage" not in capsys.readouterr().out


class Hostile:
    """An entry of sys.modules that runs code of its own whatever it is asked."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Misleading:
    """Its ``__dict__`` is no dict."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise KeyError("no namespace")


@pytest.mark.parametrize("kind", [lambda: None, int, Hostile, Misleading, object])
def test_whatever_stands_among_the_modules_is_left_alone(
    megatron_training: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setitem(sys.modules, "aaa_strange", kind())
    original = megatron_training.report_memory
    with install(None, read=reading):
        assert megatron_training.report_memory is not original
    assert megatron_training.report_memory is original


def test_a_source_that_is_strange_is_not_patched(
    megatron_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.training.utils", Hostile())
    with install(None, read=reading):
        assert megatron_training.report_memory("x") == "returned"


def test_threads_that_install_at_a_time_patch_once(megatron_training: Any) -> None:
    """Eight threads: patched by one of them, and one uninstall() takes it out."""
    original = megatron_training.report_memory
    for _ in range(30):
        together = threading.Barrier(8)

        def work(together: threading.Barrier = together) -> None:
            together.wait()
            install(None, read=reading)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert megatron_training.report_memory.__wrapped__ is original
        uninstall()
        assert megatron_training.report_memory is original


@pytest.mark.parametrize(("changes", "start"), [
    ({}, ["build", "first step", "training"]), ({"log_interval": 1}, ["build", "first step"]),
    ({"iteration": 7}, ["build", "first step", "training", "resume"]),
    ({"finetune": True, "load": "x"}, ["build", "load", "first step", "training"]),
], ids=("pretraining", "logged at once", "resumed", "tuned"))  # fmt: skip
def test_phases_of_a_script(
    megatron_training: Any, tmp_path: Path, changes: dict[str, Any], start: list[str]
) -> None:
    """Megatron-LM's first report comes after some steps; a script names what follows."""
    from allocator import Allocator

    gpu, args = Allocator(), megatron_lm_args(**changes)
    with install(tmp_path / "report.jsonl", read=gpu.read) as installed:
        with gpu.phase("start"):
            gpu.use(30, keep=20)
        megatron_training.report_theoretical_memory(args)
        megatron_training.report_memory("x")
        with gpu.phase("training"):
            gpu.use(12)
        with installed.phase("save"), gpu.phase("save"):
            gpu.use(3)
        with installed.phase("no such phase"):
            pass
        with gpu.phase("training"):
            gpu.use(13)
    _, found = journal.phases((tmp_path / "report.jsonl").read_text().splitlines())
    assert found is not None
    by_name = {p.phases: p for p in found.phases}
    assert set(by_name) == {tuple(start), ("training",), ("save",)}
    for names, true in ((tuple(start), "start"), (("training",), "training"), (("save",), "save")):
        gpu.holds(by_name[names], true)
    assert by_name["training",].allocated == (33 * GIB, 33 * GIB)
