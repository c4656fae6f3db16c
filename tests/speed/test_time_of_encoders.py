"""Seconds that an encoder adds to the stage that runs it. Its operations are those that torch counts:
``tests/hugging_face/test_encoders_of_transformers.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import BatchSpec, EncoderSpec, EncoderStructure, ParallelSpec, RunSpec, resolve_model, search
from bridge_memory.spec.layout import layout
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import Step, step_time

SIGLIP = EncoderStructure(
    kind="siglip", hidden_size=1152, ffn_hidden_size=4304, num_layers=27, num_heads=16, out_size=2048, patch_size=14,
    image_size=896, merge_size=4, positions=4096,
)
LLAMA = resolve_model("meta-llama/Llama-3.2-1B")
H100 = hardware_of("H100")


def beside(frozen: tuple[str, ...] = (), **batch: Any) -> RunSpec:
    model = replace(LLAMA, encoders=(EncoderSpec("vision", 400_000_000, structure=SIGLIP, frozen=frozen),))
    parallel = ParallelSpec(world_size=2, pipeline_model_parallel_size=2)
    return RunSpec(model=model, parallel=parallel, batch=BatchSpec(global_batch_size=8, seq_length=4096, **batch))


def more(run: RunSpec) -> list[float]:
    """Seconds of a microbatch that the encoder adds to each stage."""
    plain = run.with_(model=LLAMA)
    return [
        Step(run, H100).seconds_of(of) - Step(plain, H100).seconds_of(of)
        for of in layout(run.model, run.parallel).shapes(run.model)
    ]


def test_the_first_stage_takes_longer() -> None:
    """By the products of its layers, by hand, at between a quarter and the whole of the card's rate."""
    n, h, f = 4096, 1152, 4304
    forward = 27 * (2 * n * (4 * h * h + 2 * h * f) + 4 * n * n * h)
    first, last = more(beside())
    assert last == 0.0
    assert 3 * forward / 989e12 < first < 12 * forward / 989e12


def test_it_grows_with_images_and_less_if_it_is_frozen() -> None:
    one, two, frozen = (more(run)[0] for run in (beside(), beside(images_per_sample=2), beside(frozen=("",))))
    assert 1.7 * one < two < 2.05 * one  # a larger product fills the processors better
    assert 1.7 * one < more(beside(micro_batch_size=2))[0] < 2.05 * one
    assert 0.25 * one < frozen < 0.45 * one


def test_a_search_counts_it_as_a_single_run_does() -> None:
    found = search(beside(), gpu="H100")
    for row in found.best(4):
        assert row.time.seconds == pytest.approx(step_time(row.run, H100).seconds, rel=1e-9)
