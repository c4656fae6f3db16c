"""The time model set right by measured steps."""

from __future__ import annotations

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.cli import main
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.measured import MeasuredStep, calibrated
from bridge_memory.speed.megatron.step_time import step_time

H100 = hardware_of("H100")
LLAMA = "meta-llama/Llama-3.1-8B"


def run(**parallel: int) -> RunSpec:
    return RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=16, **parallel),
        batch=BatchSpec(micro_batch_size=4, global_batch_size=64),
    )


QUIET, LOUD = run(context_parallel_size=1), run(tensor_model_parallel_size=8)


@pytest.mark.parametrize("factor", (0.5, 1.0, 1.7))
def test_one_step_moves_all_rates_together(factor: float) -> None:
    """The measured one takes what was measured, and every other as many times longer."""
    before = {r: step_time(r, H100).seconds for r in (QUIET, LOUD)}
    found = calibrated([MeasuredStep("it", LOUD, factor * before[LOUD])], H100)
    for r, seconds in before.items():
        assert step_time(r, H100, found.constants).seconds == pytest.approx(factor * seconds, rel=1e-9)
    assert "ranks stay" in found.words and f"{1 / factor:.3g}" in found.words


def test_steps_with_and_without_communication_move_their_rates_apart() -> None:
    """A machine that computes as thought, and whose links are half as fast as thought."""
    slow = DEFAULT._replace(
        nvlink_sharp=DEFAULT.nvlink_sharp / 2, network=DEFAULT.network / 2, nvlink_latency=2 * DEFAULT.nvlink_latency,
        network_latency=2 * DEFAULT.network_latency,
    )  # fmt: skip
    truth = [MeasuredStep(str(i), r, step_time(r, H100, slow).seconds) for i, r in enumerate((QUIET, LOUD))]
    found = calibrated(truth, H100).constants
    assert found.gemm_hopper == pytest.approx(DEFAULT.gemm_hopper, rel=0.05)
    assert found.nvlink_sharp == pytest.approx(slow.nvlink_sharp, rel=0.1)
    other = run(tensor_model_parallel_size=4, context_parallel_size=2)
    there = step_time(other, H100, slow).seconds
    assert step_time(other, H100, found).seconds == pytest.approx(there, rel=0.03)
    assert abs(step_time(other, H100).seconds / there - 1) > 0.1


def test_what_is_no_measurement_is_refused() -> None:
    with pytest.raises(SpecError, match="within 10 times"):
        calibrated([MeasuredStep("it", QUIET, 1000 * step_time(QUIET, H100).seconds)], H100)


SEARCH = ["search", LLAMA, "--num-gpus", "8", "--gpu", "H100", "--global-batch-size", "64", "--vary", "tp,mbs"]


def test_search_says_what_was_calibrated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--measured-step-time", "tp2,mbs1=9.5", "--format", "csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    at = {name: i for i, name in enumerate(header.split(","))}
    measured = [row.split(",") for row in rows if row.split(",")[at["tp"]] == "2" and row.split(",")[at["mbs"]] == "1"]
    assert [float(row[at["step_seconds"]]) for row in measured] == [pytest.approx(9.5)]
    assert main([*SEARCH, "--measured-step-time", "tp2,mbs1=9.5"]) == 0
    assert "all rates x" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ("tp2", "does not end in = and the seconds"), ("tp2=fast", "does not end in = and the seconds"),
        ("tp2=-1", "does not end in = and the seconds"), ("tp2=nan", "does not end in = and the seconds"),
        ("xp2=1", "'xp2', which is no size"), ("tp2,tp2=1", "which is there twice"),
        ("tp3=1", "is not divisible by"), ("recompute:attention=1", "is unknown"), ("tp2=0.0001", "within 10 times"),
    ),
)  # fmt: skip
def test_bad_measurements_are_one_line(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SEARCH, "--measured-step-time", text]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out
