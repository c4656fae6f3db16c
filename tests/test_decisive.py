"""What decides the peak, compared with whole estimates in which the one thing is stated."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import DataParallelSpec, ImplementationSpec, ParallelSpec, RunSpec, SpecError, estimate, peaks
from bridge_memory.cli import main
from bridge_memory.decisive import OF_RELEASE, Decisive, Kind, decisive
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, DEFAULT_TRANSFORMER_ENGINE, OLDEST_NAMED, RELEASES
from bridge_memory.spec import BatchSpec, RecomputeSpec

FULL = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
NEMOTRON = RunSpec(
    model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    parallel=ParallelSpec(world_size=8, context_parallel_size=2, expert_model_parallel_size=4),
    batch=BatchSpec(seq_length=32768), recompute=FULL,
)  # fmt: skip
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
RUNS = {
    "hybrid, recomputed": NEMOTRON,
    "dense, TE's loss": RunSpec(
        model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2),
        implementation=ImplementationSpec(**FUSED),
    ),
    "gated delta nets": RunSpec(
        model="Qwen/Qwen3-Next-80B-A3B-Instruct",
        parallel=ParallelSpec(world_size=64, expert_model_parallel_size=64), batch=BatchSpec(seq_length=16384),
    ),
    "latent attention": RunSpec(
        model="deepseek-ai/DeepSeek-V2-Lite", parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8),
        recompute=RecomputeSpec(granularity="selective", modules=("mla_up_proj", "moe_act", "layernorm")),
    ),
    "experts, local": RunSpec(
        model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8),
        implementation=ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False),
    ),
    "sharded": RunSpec(
        model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8),
        data_parallel=DataParallelSpec(
            engine="megatron_fsdp", data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=False
        ),
    ),
}  # fmt: skip


def highest(run: RunSpec) -> int:
    return max(stage.peak_bytes for stage in peaks(run))


def stated(run: RunSpec, **releases: tuple[int, int]) -> RunSpec:
    return run.with_(implementation=replace(run.implementation, **releases))  # type: ignore[arg-type]


def of_kind(run: RunSpec, kind: Kind) -> list[Decisive]:
    return [found for found in decisive(estimate(run)) if found.kind is kind]


def test_a_hybrid_of_an_older_release_is_named_with_its_rule() -> None:
    (found,) = of_kind(NEMOTRON, Kind.RELEASE)
    assert (found.words, found.why) == ("with megatron-core 0.17", "it ignores full recomputation in hybrid models")
    assert found.peak_bytes == highest(stated(NEMOTRON, megatron_core=(0, 17)))


@pytest.mark.parametrize("name", RUNS)
def test_every_release_that_moves_the_peak_is_named(name: str) -> None:
    """All releases of the range are estimated here, with none of the knowledge of which rules were asked."""
    run = RUNS[name]
    base = highest(run)
    named = {found.words: found.peak_bytes for found in of_kind(run, Kind.RELEASE)}
    for field, package, assumed, last in (
        ("megatron_core", "megatron-core", DEFAULT_MEGATRON_CORE, RELEASES[1]),
        ("transformer_engine", "Transformer Engine", DEFAULT_TRANSFORMER_ENGINE, (2, 22)),
    ):
        oldest = OLDEST_NAMED[field]
        minors = range(assumed[1], oldest[1] - 1, -1), range(assumed[1], last[1] + 1)
        for order in minors:
            seen = base
            for minor in order:
                release = (assumed[0], minor)
                try:
                    there = highest(stated(run, **{field: release}))
                except SpecError:
                    break
                words = f"with {package} {release[0]}.{release[1]}"
                if min(abs(there - base), abs(there - seen)) > OF_RELEASE * base:
                    assert named.pop(words) == there, words
                    seen = there
    assert not [words for words in named if not words.startswith("with torch")]


def test_what_was_stated_is_not_questioned() -> None:
    assert of_kind(stated(NEMOTRON, megatron_core=DEFAULT_MEGATRON_CORE), Kind.RELEASE) == []


def test_other_runs_of_the_process_do_not_change_the_words() -> None:
    """Rules that only a hybrid asks change in the same release as others."""
    dense = RUNS["dense, TE's loss"]
    before = decisive(estimate(dense))
    decisive(estimate(NEMOTRON))
    assert decisive(estimate(dense)) == before


def test_assumptions_are_whole_estimates() -> None:
    run = RunSpec(
        model="Qwen/Qwen3-30B-A3B",
        parallel=ParallelSpec(
            world_size=32, tensor_model_parallel_size=2, expert_model_parallel_size=4, pipeline_model_parallel_size=2
        ),
    )
    found = {one.words: one.peak_bytes for one in of_kind(run, Kind.ASSUMPTION)}
    imbalance = next(words for words in found if "moe_imbalance" in words)
    assert found[imbalance] == highest(run.with_fields(moe_imbalance=2.0))
    of_tp = next(words for words in found if words.startswith("with expert_tensor_parallel_size 1"))
    assert found[of_tp] == highest(run.with_fields(expert_tensor_parallel_size=1))
    batch = next(words for words in found if words.startswith("with a global batch of"))
    assert found[batch] == highest(run.with_fields(global_batch_size=int(batch.split()[-1])))
    told = run.with_fields(moe_imbalance=1.5, expert_tensor_parallel_size=2, global_batch_size=64)
    assert of_kind(told, Kind.ASSUMPTION) == []


def test_bf16_weights_under_fsdp2_are_named_with_what_fp32_would_take() -> None:
    """accelerate keeps 8,030,261,248 parameters, two moments and gradients in fp32 over eight ranks: twice as much."""
    run = RunSpec(
        model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8),
        batch=BatchSpec(seq_length=512, global_batch_size=8), data_parallel=DataParallelSpec(engine="fsdp2"),
    )  # fmt: skip
    (found,) = of_kind(run, Kind.ASSUMPTION)
    assert "accelerate" in found.words and found.peak_bytes is not None
    assert found.peak_bytes - highest(run) > 3 * 2 * 8_030_261_248 / 8


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["estimate", *argv]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_every_output_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "--num-gpus", "8", "--cp", "2", "--ep", "4", "--seq-length",
        "32768", "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
        "--gpu", "H100",
    )  # fmt: skip
    document: dict[str, Any] = json.loads(command(capsys, *argv, "--json"))
    lines = [one["text"] for one in document["decisive"]]
    assert any(line.startswith("with megatron-core 0.17: ") for line in lines)
    for text in (command(capsys, *argv), command(capsys, *argv, "-v"), command(capsys, *argv, "--format", "html")):
        assert all(line in text for line in lines)
        assert document["run"]["releases"] in text and document["run"]["precision"] in text
    brief = command(capsys, *argv, "--brief")
    assert all(line in brief for line in lines if line.startswith("with megatron-core"))
    assert document["run"]["releases"] in brief and document["run"]["precision"] in brief


def test_an_option_that_does_nothing_stands_on_the_first_screen(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "nvidia/Nemotron-H-56B-Base-8K", "--megatron-core", "0.16", "--recompute-granularity", "full",
        "--recompute-method", "uniform", "--recompute-num-layers", "1",
    )  # fmt: skip
    assert "recompute_granularity (full) does nothing: " in command(capsys, *argv)
    assert "--moe-router-dtype does nothing: " in command(capsys, "Llama-3.2-1B", "--moe-router-dtype", "fp32")
