"""``install()`` on Megatron-LM's module names: its reports become ours, its own output and results stay."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_jobs import megatron_lm_args

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.estimate import estimate
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
    """Modules with the names and signatures of Megatron-LM's ``megatron.training`` (it is not on PyPI)."""
    usage = types.ModuleType("megatron.training.theoretical_memory_usage")
    utils = types.ModuleType("megatron.training.utils")
    training = types.ModuleType("megatron.training.training")
    calls: list[str] = []

    def report_theoretical_memory(args: Any, num_microbatches: Any = None, verbose: bool = False) -> None:
        calls.append("theirs")

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


def test_an_existing_script_gets_the_line_and_the_table(
    megatron_training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = megatron_training.report_memory
    with install(tmp_path / "report.jsonl", read=reading) as installed:
        assert len(installed.patched) >= 4
        assert install() is installed
        megatron_training.report_theoretical_memory(megatron_lm_args(), num_microbatches=8, verbose=True)
        assert megatron_training.report_memory("(after 2 iterations)") == "returned"
        megatron_training.report_memory("again")
    assert megatron_training.report_memory is before
    assert megatron_training.calls == ["(after 2 iterations)", "again"]
    out = capsys.readouterr().out
    assert "Theoretical memory footprints: weight and optimizer=" in out and "activation=" in out
    assert out.count("GPU memory by pipeline stage") == 1
    _, report = journal.read(tmp_path / "report.jsonl")
    assert isinstance(report, ReportRecord)
    assert report.stages[0].max_allocated == 9 * GIB
    assert report.stages[0].residual == 9 * GIB - report.stages[0].predicted_peak


def test_what_cannot_be_estimated_falls_back_to_the_original(
    megatron_training: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(None, read=reading)
    megatron_training.report_theoretical_memory(megatron_lm_args(vocab_size=None, padded_vocab_size=None))
    assert megatron_training.calls == ["theirs"]
    assert megatron_training.report_memory("x") == "returned"


def test_a_report_that_breaks_never_reaches_training(
    megatron_training: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def emit(text: str) -> None:
        raise OSError("the disk is full")

    install(tmp_path, read=reading, emit=emit)  # a path that cannot be written either
    megatron_training.report_theoretical_memory(megatron_lm_args())
    assert megatron_training.report_memory("x") == "returned"
