"""Records of rehearsals are read by ``bridge-memory accuracy``, and predicted at the rank that was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory.accuracy.predictions import predict_all
from bridge_memory.accuracy.records import load_runs
from bridge_memory.accuracy.runs import run_of, with_unstated
from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.record import Phase, append_record, record_of
from bridge_memory.spec import ImplementationSpec, ParallelSpec, RunSpec, SpecError


def runs() -> list[RunSpec]:
    """Dense, MoE and MLA; 8, 32 and 64 GPUs."""
    return [
        RunSpec(
            model=resolve_model("meta-llama/Meta-Llama-3-8B"),
            parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=4),
        ),
        RunSpec(
            model=resolve_model("Qwen/Qwen3-30B-A3B"),
            parallel=ParallelSpec(world_size=32, pipeline_model_parallel_size=4, expert_model_parallel_size=8),
            implementation=ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False),
        ),
        RunSpec(
            model=resolve_model("deepseek-ai/DeepSeek-V2-Lite"),
            parallel=ParallelSpec(world_size=64, expert_model_parallel_size=8),
        ),
    ]


def fake_phases(static: int, peak: int) -> list[Phase]:
    return [Phase("model built", static // 2, static // 2, peak), Phase("second step", static, peak, peak)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The last rank of each run, measured at 99 % and 102 % of what is predicted for its stage."""
    path = tmp_path / "records.jsonl"
    for run in runs():
        rank = run.parallel.world_size - 1
        stage = estimate(run).stages[-1]
        phases = fake_phases(round(stage.static_bytes / 0.99), round(stage.peak_bytes / 1.02))
        append_record(path, record_of(run, rank, "NVIDIA H200", 2, phases, ["bridge-memory", "rehearse"]))
    return path


def test_a_record_reads_back_as_the_run_that_was_measured(corpus: Path) -> None:
    records = load_runs(corpus)
    # Transformer Engine and torch were not stated: what such a record is assumed to have run with.
    stated = [run.with_(implementation=with_unstated(run.implementation)) for run in runs()]
    assert [run_of(r) for r in records] == stated
    assert all(r.config["command"] == ["bridge-memory", "rehearse"] for r in records)
    assert all(r.framework["python"] for r in records)


def test_the_measured_rank_is_predicted(corpus: Path) -> None:
    for outcome in predict_all(load_runs(corpus)):
        assert outcome.status == "ok", outcome.reason
        assert outcome.allocated_error == pytest.approx(0.01, abs=1e-6)
        assert outcome.max_allocated_error == pytest.approx(-0.02, abs=1e-6)


def test_validate_reads_the_file(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(corpus), "--worst", "1", "--summary"]) == 0
    text = capsys.readouterr().out
    assert "every record was predicted" in text
    assert "3/3 runs" in text


def test_a_record_whose_world_is_not_its_runs_is_not_predicted(corpus: Path) -> None:
    lines = [json.loads(line) for line in corpus.read_text().splitlines()]
    lines[0]["world_size"] = 16
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    outcomes = predict_all(load_runs(corpus))
    assert [o.status for o in outcomes] == ["not_modelled", "ok", "ok"]
    assert "world_size (16)" in outcomes[0].reason


def test_a_record_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    """A line that another program left without its end stays a line of its own."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"id": "by hand"}')
    append_record(path, {"id": "second"})
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["by hand", "second"]
    assert [p.name for p in tmp_path.iterdir()] == ["records.jsonl"]
    with pytest.raises(SpecError, match="nowhere") as refusal:
        append_record(tmp_path / "nowhere" / "records.jsonl", {})
    assert "\n" not in str(refusal.value)
