"""What stands behind an answer: errors of measured runs of the same kind, and when they make a verdict tight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import bridge_memory.evidence as evidence
from bridge_memory import model_from_hf_config
from bridge_memory.cards.rows import GPUS
from bridge_memory.estimation import estimate
from bridge_memory.evidence import Errors, Evidence, Kind, evidence_of, kind_of
from bridge_memory.report.answer import answer_of
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.verdict import Verdict, fits, largest_peak

KIND = Kind("Hopper", "TE", "dense", "1F1B")


def test_the_kind_of_a_run() -> None:
    run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=2))
    assert str(kind_of(run)) == "Hopper, TE, MoE, 1F1B"
    virtual = run.with_fields(virtual_pipeline_model_parallel_size=2, fp8="e4m3")
    assert str(kind_of(virtual, GPUS["B200"])) == "Blackwell, TE, MoE, interleaved 1F1B, fp8"
    named = run.with_fields(pipeline_model_parallel_layout="Et*12|t*12|t*12|t*12L")
    assert kind_of(named).schedule == "interleaved 1F1B"
    assert kind_of(run.with_fields(engine="fsdp2", pipeline_model_parallel_size=1)).engine == "PyTorch FSDP2"


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("A100-80GB", "Ampere"), ("A10", "Ampere of compute capability 8.6"), ("H200", "Hopper"),
        ("GB200", "Blackwell"),
        ("B300", "Blackwell of compute capability 10.3"), ("RTX-5090", "Blackwell of compute capability 12.0"),
        ("MI300X", "AMD CDNA3"), ("V100-32GB", "Volta"),
    ],
)  # fmt: skip
def test_evidence_is_of_gpus_of_the_same_vendor_and_compute_capability(gpu: str, words: str) -> None:
    assert kind_of(RunSpec(model="meta-llama/Llama-3.2-1B"), GPUS[gpu]).gpu == words


def test_every_card_without_a_measured_run_says_so() -> None:
    """Megatron was never measured on AMD's GPUs, nor any run on consumer cards."""
    result = estimate(RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8)))
    said = {fit.gpu: fit.evidence for fit in fits(result, list(GPUS))}
    measured = (8, 0), (9, 0), (10, 0)
    never = [gpu.name for gpu in GPUS.values() if gpu.vendor == "AMD" or gpu.capability not in measured]
    assert len(never) > 15 and all(said[name].startswith("accuracy: not measured for") for name in never)
    assert "real-size run" in said["H100"] and "real-size run" in said["B200"] and "AMD" in said["MI300X"]


def test_an_unknown_model_type_has_no_evidence(tmp_path: Path) -> None:
    config = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 128256, "hidden_act": "silu", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    known, unknown = (
        RunSpec(model=model_from_hf_config({**config, "model_type": name}, "mine")) for name in ("llama", "zorglub")
    )
    assert evidence_of(known).runs.values
    assert str(evidence_of(unknown)) == (
        "accuracy: not measured for Hopper, TE, a model_type without a reader of its own (zorglub), no pipeline"
    )


def test_of_many_errors_nine_in_ten_count_and_of_few_all() -> None:
    many = Errors(tuple(n / 1000 for n in range(11)))
    assert many.band == pytest.approx(0.009)
    few = Errors((0.001, 0.02))
    assert str(Evidence(KIND, many)) == "accuracy: 11 real-size runs, 90% within 0.9% (Hopper, TE, dense, 1F1B)"
    assert str(Evidence(KIND, few, many)) == (
        "accuracy: 2 real-size runs, worst 2.0%; 11 small test models, 90% within 0.9% (Hopper, TE, dense, 1F1B)"
    )
    assert str(Evidence(KIND, Errors(), Errors((0.00002,)))) == (
        "accuracy: no real-size run measured; 1 small test model, off by 0.01% (Hopper, TE, dense, 1F1B)"
    )
    assert Evidence(KIND).band is None and str(Evidence(KIND)) == "accuracy: not measured for Hopper, TE, dense, 1F1B"


def test_small_test_models_count_where_there_is_little_else() -> None:
    small = Errors((0.5,))
    assert Evidence(KIND, Errors((0.01,)), small).band == 0.5
    assert Evidence(KIND, Errors((0.01,) * 10), small).band == pytest.approx(0.01)


def test_within_the_band_of_the_card_the_verdict_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that holds the peak and a hundredth more: tight where predictions are off by 2 %, not by half of one."""
    result = estimate(RunSpec(model="openai-community/gpt2", batch=BatchSpec(seq_length=1024)))
    peak = result.peak_stage.peak_bytes
    card = GPUS["H100"]
    room = largest_peak(card, result.run)
    card = replace(card, capacity_bytes=card.capacity_bytes - int((room - peak * 1.01) * 1.073))
    for band, verdict in ((0.02, Verdict.TIGHT), (0.005, Verdict.FITS)):
        monkeypatch.setattr(evidence, "_table", lambda band=band: {kind_of(result.run): (Errors((band,)), Errors())})
        (fit,) = fits(result, [card])
        assert fit.verdict is verdict and fit.fits
        assert answer_of(result, [fit]).words.startswith("TIGHT on H100" if band > 0.01 else "FITS H100")
    too_small = replace(card, capacity_bytes=card.capacity_bytes - int(peak * 0.02))
    assert fits(result, [too_small])[0].verdict is Verdict.DOES_NOT_FIT
