"""The table: each stage's worst rank against its own prediction."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from bridge_memory import RunSpec, estimate, find_gpu, fits, whole_job
from bridge_memory.live.cuda import Reading, read_cuda
from bridge_memory.live.prediction import BUILT, FIRST_STEP, STEADY, Prediction, predict
from bridge_memory.live.table import notes, stage_records, text_table, verdict
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.report.answer import room_words

GIB = 1 << 30


def reading(rank: int, stage: int, allocated: int, peak: int) -> Reading:
    return Reading(
        rank, stage, allocated, peak, reserved=peak, max_reserved=peak + GIB, device_total=80 * GIB,
        device_used=peak + 2 * GIB, retries=rank,
    )  # fmt: skip


def test_a_run_that_behaves_as_predicted_has_no_residual(container: SimpleNamespace) -> None:
    prediction = predict(run_from_config_container(container))
    readings = [reading(s.stage, s.stage, s.static, s.peak) for s in prediction.stages]
    records = stage_records(prediction, readings, STEADY)
    assert [r.residual for r in records] == [0] * 4
    assert notes(prediction, records) == []


def test_before_the_first_step_there_are_no_adam_moments(container: SimpleNamespace) -> None:
    """Built: 2 bytes of weights, 4 of gradients, 4 of master weights a parameter; moments are 8 more."""
    stage = predict(run_from_config_container(container)).stages[1]
    parameters = 2 * (2048 * (16 + 2 * 8 + 16) * 128 + 3 * 2048 * 8192 + 2 * 2048)
    assert abs(stage.built / (10 * parameters) - 1) < 0.001
    assert stage.expected(BUILT) == ("allocated", stage.built)
    assert stage.expected(FIRST_STEP) == ("allocated", stage.static)
    assert stage.static >= stage.built + 8 * parameters


def test_the_worst_rank_of_a_stage_and_the_spread(container: SimpleNamespace) -> None:
    prediction = predict(run_from_config_container(container))
    readings = [reading(rank, 0, 10 * GIB, peak * GIB) for rank, peak in ((0, 30), (1, 34), (2, 31))]
    record = stage_records(prediction, readings, STEADY)[0]
    assert (record.worst_rank, record.max_allocated, record.spread) == (1, 34 * GIB, 4 * GIB)
    assert record.headroom == (80 - 2 - 35) * GIB
    assert record.retries == 2
    assert record.outside == 2 * GIB


def test_a_stage_beyond_the_threshold_names_the_likely_component(container: SimpleNamespace) -> None:
    """Gradients that are there twice show between steps; logits that are there twice show at the peak only."""
    prediction = predict(run_from_config_container(container))
    stage = prediction.stages[0]
    twice = next(c for c in stage.components if c.role == "gradients")
    records = stage_records(prediction, [reading(0, 0, stage.static + twice.bytes, stage.peak + twice.bytes)], STEADY)
    (line,) = notes(prediction, records, threshold=0.01)
    assert line.startswith("stage 0: measured - predicted +") and "model state" in line
    saved = max((c for c in stage.components if c.role == "activation"), key=lambda c: c.bytes)
    records = stage_records(prediction, [reading(0, 0, stage.static, stage.peak + saved.bytes)], STEADY)
    (line,) = notes(prediction, records, threshold=0.01)
    assert saved.name in line
    records = stage_records(prediction, [reading(0, 0, stage.static, 20 * stage.peak)], STEADY)
    (line,) = notes(prediction, records)
    assert line.endswith("no component has that size")
    assert notes(prediction, records, threshold=10.0) == []


def test_a_table_without_prediction_or_without_readings_still_shows_the_other_half(container: SimpleNamespace) -> None:
    prediction = predict(run_from_config_container(container))
    measured_only = text_table(stage_records(None, [reading(0, 0, GIB, 3 * GIB)], STEADY), "t").splitlines()
    assert "3.00" in measured_only[3] and "-" in measured_only[3]
    broken = replace(reading(0, 0, GIB, GIB), error="no driver")
    predicted_only = stage_records(prediction, [broken], STEADY)
    assert predicted_only[0].residual is None
    assert notes(prediction, predicted_only) == ["stage 0: rank 0 has no reading (no driver)"]
    assert len(text_table(predicted_only, "t").splitlines()) == 3 + 4


def test_a_machine_without_a_gpu_gives_a_reading_with_an_error() -> None:
    result = read_cuda(3, 1)
    assert (result.rank, result.stage) == (3, 1)
    assert result.error or result.device_total  # one or the other, never an exception


def on_cards(prediction: Prediction, card: int) -> list[str]:
    readings = [replace(reading(s.stage, s.stage, s.static, s.peak), device_total=card) for s in prediction.stages]
    return verdict(prediction, stage_records(prediction, readings, STEADY), STEADY)


def test_the_verdict_is_that_of_the_fullest_stage_on_the_card_it_runs_on(container: SimpleNamespace) -> None:
    """To the byte: capacity = peak + margin fits, one less does not; what is not modelled may decide."""
    prediction = replace(predict(run_from_config_container(container)), not_modelled=())
    fullest = max(prediction.stages, key=lambda s: s.peak)
    outside = reading(0, 0, 0, 0).outside
    assert outside > 0
    needed = fullest.peak + int(0.073 * fullest.peak) + outside
    (fits,), (over,) = on_cards(prediction, needed), on_cards(prediction, needed - 1)
    assert f" (stage {fullest.stage}) " in fits
    assert fits.startswith("verdict: fits: ") and fits.endswith(" GiB, 0.00 free")
    assert over.startswith("verdict: does not fit: ") and ", over by " in over
    (unknown,) = on_cards(replace(prediction, not_modelled=("some_option: more memory",)), needed)
    assert unknown.startswith("verdict: unknown") and unknown.endswith("features that are not modelled decide")
    assert verdict(None, [], STEADY) == [] == verdict(prediction, stage_records(prediction, [], STEADY), STEADY)


def test_before_steps_are_steady_the_verdict_is_that_of_the_estimate_by_the_whole_job() -> None:
    """Llama-3.1-8B on one B200: training fits, and a resume, which holds Adam's state twice, does not."""
    for gpu, world_size, phase in (("B200", 1, "resume"), ("H200", 8, ""), ("H100", 8, "")):
        run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(
            world_size=world_size, gpu_arch=find_gpu(gpu).arch, adopt_optim_states=False
        )
        (fit,), job = fits(estimate(run), [gpu]), whole_job(run, gpu)
        prediction = replace(predict(run), job=job)
        read = replace(reading(0, 0, GIB, GIB), device_total=fit.capacity_bytes)
        (line,) = verdict(prediction, stage_records(prediction, [read], BUILT), BUILT)
        assert line.startswith(f"verdict: {fit.verdict}: ") and (f": {phase}, driver peak" in line) == bool(phase)
        assert line.endswith(", ".join(room_words(fit.capacity_bytes, fit.peak_bytes, fit.headroom_bytes, "stage 0")))
        more = replace(read, device_used=read.device_used + 200 * GIB)  # beside torch, once all communicators exist
        (line,) = verdict(prediction, stage_records(prediction, [more], STEADY), STEADY)
        assert line.startswith("verdict: does not fit: predicted")
