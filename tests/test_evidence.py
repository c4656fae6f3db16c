"""What stands behind an answer: errors of measured runs of the same kind, and when they make a verdict tight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import bridge_memory.evidence as evidence
from bridge_memory.cards.rows import GPUS
from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.evidence import Evidence, Kind, evidence_of, kind_of
from bridge_memory.report.answer import answer_of
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.verdict import Verdict, fits, largest_peak

KIND = Kind("Hopper", "TE", "dense", "1F1B")
RUNS = Path(__file__).parent / "data" / "measurements" / "runs.jsonl"


def test_the_kind_of_a_run() -> None:
    run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=2))
    assert str(kind_of(run)) == "Hopper, TE, MoE, 1F1B"
    virtual = run.with_fields(virtual_pipeline_model_parallel_size=2, fp8="e4m3")
    assert str(kind_of(virtual, "blackwell")) == "Blackwell, TE, MoE, interleaved 1F1B, fp8"
    named = run.with_fields(pipeline_model_parallel_layout="Et*12|t*12|t*12|t*12L")
    assert kind_of(named).schedule == "interleaved 1F1B"


def test_of_many_errors_nine_in_ten_count_and_of_few_all() -> None:
    many = Evidence(KIND, tuple(n / 1000 for n in range(11)))
    assert many.band == pytest.approx(0.009)
    assert str(many) == "accuracy: within 0.9% on 90% of 11 measured runs (Hopper, TE, dense, 1F1B)"
    few = Evidence(KIND, (0.001, 0.02), small_models=2)
    assert few.band == 0.02 and str(few) == (
        "accuracy: within 2.0% on all 2 measured runs (Hopper, TE, dense, 1F1B; all small test models)"
    )
    none = Evidence(KIND, ())
    assert none.band is None and str(none) == "accuracy: not measured for Hopper, TE, dense, 1F1B"


def test_toys_count_where_there_is_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2))
    for own, errors, toys in (((0.01,), (0.01, 0.5), 1), (tuple([0.01] * 10), (0.01,) * 10, 0)):
        monkeypatch.setattr(evidence, "_table", lambda own=own: {KIND: (own, (0.5,))})
        found = evidence_of(run)
        assert (found.errors, found.small_models) == (errors, toys)


def test_within_the_band_of_the_card_the_verdict_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that holds the peak and a hundredth more: tight where predictions are off by 2 %, not by half of one."""
    result = estimate(RunSpec(model="openai-community/gpt2", batch=BatchSpec(seq_length=1024)))
    peak = result.peak_stage.peak_bytes
    card = GPUS["H100"]
    room = largest_peak(card, result.run)
    card = replace(card, capacity_bytes=card.capacity_bytes - int((room - peak * 1.01) * 1.073))
    for band, verdict in ((0.02, Verdict.TIGHT), (0.005, Verdict.FITS)):
        monkeypatch.setattr(evidence, "_table", lambda band=band: {kind_of(result.run): ((band,), ())})
        (fit,) = fits(result, [card])
        assert fit.verdict is verdict and fit.fits
        assert answer_of(result, [fit]).words.startswith("TIGHT on H100" if band > 0.01 else "FITS H100")
    too_small = replace(card, capacity_bytes=card.capacity_bytes - int(peak * 0.02))
    assert fits(result, [too_small])[0].verdict is Verdict.DOES_NOT_FIT


@pytest.mark.slow
def test_the_table_is_what_the_measured_runs_give(tmp_path: Path) -> None:
    """``bridge-memory accuracy tests/data/measurements/runs.jsonl --evidence bridge_memory/evidence.json --force``"""
    made = tmp_path / "evidence.json"
    assert main(["accuracy", str(RUNS), "--evidence", str(made), "--output", str(tmp_path / "text.txt")]) == 0
    assert json.loads(made.read_text()) == json.loads(Path(evidence.PATH).read_text())
