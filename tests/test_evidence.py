"""What stands behind an answer: errors of measured runs of the same kind, and when they make a verdict tight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import NormalDist

import pytest

import bridge_memory.evidence as evidence
from bridge_memory import model_from_hf_config
from bridge_memory.cards.rows import GPUS
from bridge_memory.estimation import estimate
from bridge_memory.evidence import Band, Errors, Evidence, Kind, Row, band_of, evidence_of, kind_of
from bridge_memory.report.answer import answer_of
from bridge_memory.residual import relative
from bridge_memory.spec import BatchSpec, EncoderSpec, ParallelSpec, RunSpec
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
    seeing = replace(run, model=replace(run.model, encoders=(EncoderSpec("vision_config", parameters=600_000_000),)))
    assert kind_of(seeing).model == "MoE and modality encoder"


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
    measured = (8, 0), (9, 0), (10, 0), (10, 3)
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
    assert many.within == pytest.approx(0.009)
    few = Errors((0.001, 0.02))
    assert str(Evidence(KIND, many)) == "accuracy: 11 real-size runs, 90% within 0.9% (Hopper, TE, dense, 1F1B)"
    assert str(Evidence(KIND, few, many)) == (
        "accuracy: 2 real-size runs, worst 2.0%; 11 small test models, 90% within 0.9% (Hopper, TE, dense, 1F1B)"
    )
    assert str(Evidence(KIND, Errors(), Errors((0.00002,)))) == (
        "accuracy: no real-size run measured; 1 small test model, off by 0.01% (Hopper, TE, dense, 1F1B)"
    )
    assert str(Evidence(KIND)) == "accuracy: not measured for Hopper, TE, dense, 1F1B" and Evidence(KIND).above == 0


def test_small_test_models_count_where_there_is_little_else() -> None:
    small = Errors((0.5,))
    assert Evidence(KIND, Errors((0.01,)), small).above == 0.5
    assert Evidence(KIND, Errors((0.01,) * 10), small).above == pytest.approx(0.01)


# ---- the band ----


def test_a_band_is_the_five_and_ninety_five_per_cent_quantiles() -> None:
    """By hand: of 19 errors the places 0.05 x 20 = 1 and 0.95 x 20 = 19 are the smallest and the largest; of 39 they
    are the second and the second last; of 29, 1.5 and 28.5, halfway between two."""
    errors = [-0.03, *(n / 1000 for n in range(17)), 0.04]
    assert band_of(errors, "x") == Band(-0.03, 0.04, 19, "x") and band_of(errors[1:], "x") is None
    assert band_of([-0.5, -0.02, *[0.0] * 35, 0.03, 0.5][::-1], "x") == Band(-0.02, 0.03, 39, "x")
    assert band_of([-0.03, -0.01, *[0.0] * 25, 0.02, 0.04], "x") == Band(-0.02, 0.03, 29, "x")


def test_nine_in_ten_of_new_runs_lie_in_the_band_of_the_least_number_of_runs() -> None:
    """The order-statistics argument, drawn: mean coverage of the band of 19 runs is 90 %, of the range of 10
    82 %."""
    draw = Random("coverage")

    def coverage(low: float, high: float) -> float:
        return NormalDist().cdf(high) - NormalDist().cdf(low)

    bands, ranges = [], []
    for _ in range(4000):
        errors = [draw.gauss(0, 1) for _ in range(19)]
        band = band_of(errors, "x")
        assert band is not None
        bands.append(coverage(band.low, band.high))
        ranges.append(coverage(min(errors[:10]), max(errors[:10])))
    assert sum(bands) / 4000 == pytest.approx(0.9, abs=0.005)
    assert sum(ranges) / 4000 == pytest.approx(9 / 11, abs=0.01)


def test_a_band_in_bytes_has_the_sign_of_a_residual() -> None:
    """(measured - predicted) / measured: 125 measured where 100 are predicted is +20 %, 80 is -25 %."""
    band = Band(-0.25, 0.2, 19, "x")
    assert band.around(100) == (80, 125)
    assert (relative(80, 100), relative(125, 100)) == (band.low, band.high)
    assert band.above == pytest.approx(0.25) and Band(-0.2, -0.1, 19, "x").above == 0


def table(monkeypatch: pytest.MonkeyPatch, rows: dict[Kind, Row]) -> None:
    monkeypatch.setattr(evidence, "_table", lambda: rows)


def test_too_few_runs_fall_back_to_a_wider_class_which_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2))
    assert kind_of(run) == KIND

    def of(number: int) -> Row:
        return Row(runs=(0.0,) * number)

    other_gpu = KIND._replace(gpu="Ampere", schedule="no pipeline")
    other_model, other_engine = KIND._replace(model="MoE"), KIND._replace(engine="PyTorch FSDP2")
    for rows, words in (
        ({KIND: of(19), other_gpu: of(9)}, "of its kind"),
        ({KIND: of(10), other_gpu: of(9), other_model: of(9)}, "any of TE, dense"),
        ({other_gpu: of(9), other_model: of(10), other_engine: of(9)}, "any of Megatron DDP"),
        ({other_model: of(10), other_engine: of(9)}, "any engine"),
        ({other_gpu: of(19)}, "any of TE, dense, none on Hopper"),
        ({KIND._replace(gpu="Ampere", engine="PyTorch FSDP2"): of(19)}, "any engine, none on Hopper"),
    ):
        table(monkeypatch, rows)
        band = evidence_of(run).band
        assert band is not None and (band.of, band.runs) == (words, 19)
    table(monkeypatch, {KIND: Row(runs=(0.0,) * 18, reserved=(0.1,) * 50, small=(0.2,) * 50)})
    assert evidence_of(run).band is None
    told = answer_of(estimate(run), [])
    assert told.band is None
    assert told.band_words == "90% band: none, too few runs of its kind were measured"


def test_a_band_of_other_generations_alone_says_so() -> None:
    """No run of any kind was measured on Turing; the sentence before the band says "not measured"."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B")
    for gpu, none_on in (("H100", ""), ("T4", "none on Turing")):
        told = answer_of(estimate(run), fits(estimate(run), [gpu]))
        assert ("none on" in (told.band_words or "")) is bool(none_on) and none_on in (told.band_words or "")


def test_a_guessed_model_has_no_band() -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B")
    assert evidence_of(run).band is not None
    assert evidence_of(run.with_(model=replace(run.model, generic=True))).band is None


def test_within_the_band_of_the_card_the_verdict_is_tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that holds the peak and a hundredth more: tight where the upper end of the band is 2 % above the
    prediction, not where it is half a per cent above it, however low the lower end is."""
    result = estimate(RunSpec(model="openai-community/gpt2", batch=BatchSpec(seq_length=1024)))
    peak = result.peak_stage.peak_bytes
    card = GPUS["H100"]
    room = largest_peak(card, result.run)
    card = replace(card, capacity_bytes=card.capacity_bytes - int((room - peak * 1.01) * 1.073))
    other = kind_of(result.run)._replace(gpu="Ampere")  # of this kind nothing is measured
    for high, verdict in ((0.02, Verdict.TIGHT), (0.005, Verdict.FITS)):
        table(monkeypatch, {other: Row(runs=(-0.5, *(0.0,) * 17, high))})
        (fit,) = fits(result, [card])
        assert fit.verdict is verdict and fit.fits
        assert answer_of(result, [fit]).words.startswith("TIGHT on H100" if high > 0.01 else "FITS H100")
        assert fit.band is not None and fit.band.most_bytes == round(peak / (1 - high))
        assert fit.band.least_bytes == round(peak / 1.5)
        assert fit.margin_bytes == fit.reserved_bytes + fit.outside_bytes  # the band is in neither
    outside = fit.outside_bytes - fit.outside_least_bytes
    uncertain = replace(card, capacity_bytes=card.capacity_bytes - int(peak * 0.02))
    assert fits(result, [uncertain])[0].verdict is Verdict.TIGHT  # by what lies outside of torch
    too_small = replace(card, capacity_bytes=card.capacity_bytes - int(peak * 0.02) - outside)
    assert fits(result, [too_small])[0].verdict is Verdict.DOES_NOT_FIT
