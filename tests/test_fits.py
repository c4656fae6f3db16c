"""Whether a run fits a card: the margin with its sources, the verdict, and a card of another generation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge_memory.api.jobs import whole_job
from bridge_memory.cards.rows import GPUS, common_gpus
from bridge_memory.cli import main
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.context import context as context_of
from bridge_memory.readers import resolve_model
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.spec import BatchSpec, ImplementationSpec, ParallelSpec, PrecisionSpec, RunSpec, SpecError
from bridge_memory.spec.gpus import find_gpu, gpu_assumptions
from bridge_memory.verdict import (
    FRAGMENTATION,
    MemoryLimit,
    fits,
    headroom,
    largest_peak,
)

RUNS = Path(__file__).parent / "data" / "measurements" / "runs.jsonl"


def llama(world_size: int = 8, pp: int = 1) -> Estimate:
    parallel = ParallelSpec(world_size=world_size, pipeline_model_parallel_size=pp)
    return estimate(RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B"), parallel=parallel))


def test_fragmentation_is_the_ninetieth_percentile_of_the_measured_ranks() -> None:
    excess = []
    for line in RUNS.read_text().splitlines():
        for rank in json.loads(line).get("measured", ()):
            if "max_reserved_bytes" in rank:
                excess.append(rank["max_reserved_bytes"] / rank["max_allocated_bytes"] - 1)
    excess.sort()
    assert len(excess) == 80
    assert pytest.approx(excess[int(0.9 * len(excess))], abs=0.0005) == FRAGMENTATION


def test_capacity_is_peak_and_margin_and_headroom() -> None:
    result = llama()
    for fit in fits(result):
        assert fit.capacity_bytes == GPUS[fit.gpu].capacity_bytes
        assert fit.capacity_bytes == fit.peak_bytes + fit.margin_bytes + fit.headroom_bytes
        found = [phase for phase in whole_job(result.run, fit.gpu).phases if phase.phase == "training"]
        assert Range(fit.outside_least_bytes, fit.outside_bytes) == total(found[0].outside)
        assert fit.margin_bytes == fit.outside_bytes + int(fit.peak_bytes * FRAGMENTATION)
        assert fit.fits is (fit.headroom_bytes >= 0)


#: fp8 on Hopper keeps a second layout of what Blackwell multiplies as it lies: with it the H100 is too small.
TWO_LAYOUTS = [
    "estimate", "Qwen/Qwen3-8B", "--tp", "2", "--num-gpus", "8", "--fp8", "hybrid", "--micro-batch-size", "2",
    "--seq-length", "6656", "--json",
]  # fmt: skip


def test_a_card_beside_others_is_judged_as_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def cards(*names: str) -> dict[str, dict[str, object]]:
        assert main([*TWO_LAYOUTS, *(word for name in names for word in ("--gpu", name))]) == 0
        return {fit["gpu"]: fit for fit in json.loads(capsys.readouterr().out)["fits"]}

    alone = {**cards("B200"), **cards("H100")}
    assert alone["B200"]["peak_bytes"] != alone["H100"]["peak_bytes"]
    assert [alone[name]["gpu_arch"] for name in ("B200", "H100")] == ["blackwell", "hopper"]
    assert cards("B200", "H100") == cards("H100", "B200") == cards("H100, b200") == alone
    assert {name: fit["verdict"] for name, fit in alone.items()} == {"B200": "fits", "H100": "does not fit"}
    assert cards()["H100"] == alone["H100"] and cards()["B200"] == alone["B200"]


def test_the_report_says_why_a_card_of_another_generation_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TWO_LAYOUTS[:-1], "--gpu", "B200", "--gpu", "H100", "-v"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    peaks = dict(re.findall(r"(B200|H100) +[\d.]+ +([\d.]+) +[\d.]+ +-?[\d.]+ +(?:yes|no)", text))
    assert f"peak {peaks['B200']} GiB FITS B200 (" in text
    assert f"; DOES NOT FIT H100 (peak {peaks['H100']} GiB on this GPU, " in text


def test_a_card_without_the_attention_kernel_that_a_run_names_fits_nothing() -> None:
    result = llama()
    flash = estimate(result.run.with_fields(attention_backend="flash"))
    (fit,) = fits(flash, ["V100-32GB"])
    assert (fit.fits, fit.lacks) == (False, "attention kernel")
    assert fits(result, ["V100-32GB"])[0].lacks == ""


def test_cards_may_be_named() -> None:
    result = llama()
    assert fits(result, ["h100", "B200"]) == fits(result, [GPUS["H100"], GPUS["B200"]])


def test_one_gpu_needs_no_room_for_nccl() -> None:
    result = llama(world_size=1)
    (fit,) = fits(result, [GPUS["H200"]])
    (same,) = fits(llama(world_size=8), [GPUS["H200"]])
    context = total(context_of(GPUS["H200"]))
    # A group of one rank may be made a communicator, or not; NCCL's own kernels are loaded.
    assert context.least < fit.outside_least_bytes < context.least + (128 << 20) < same.outside_least_bytes
    assert context.most < fit.outside_bytes < same.outside_bytes


@pytest.mark.parametrize("world_size", [1, 8])
def test_headroom_is_what_peak_and_margin_leave_and_the_largest_peak_leaves_nothing(world_size: int) -> None:
    """79.10 GiB less what lies outside, and 1.073 peaks."""
    run, h100 = llama(world_size).run, GPUS["H100"]
    outside = total(whole_job(run, h100).phases[-3].outside).most
    assert headroom(h100, 10**10, run) == int(79.10 * 2**30) - outside - 10**10 - int(0.073 * 10**10)
    most = largest_peak(h100, run)
    assert headroom(h100, most, run) >= 0 > headroom(h100, most + 2, run)
    card = MemoryLimit(h100.capacity_bytes, outside)
    assert card.holds(most) and not card.holds(most + 2)


def test_the_worst_stage_decides() -> None:
    result = llama(world_size=4, pp=4)
    worst = max(s.peak_bytes for s in result.stages)
    assert len({s.peak_bytes for s in result.stages}) == 4
    (fit,) = fits(result, [GPUS["H100"]])
    assert fit.capacity_bytes - fit.margin_bytes - fit.headroom_bytes == worst


def test_common_gpus_are_shown_when_none_is_named() -> None:
    shown = [fit.gpu for fit in fits(llama())]
    assert {"A100-40GB", "A100-80GB", "H100", "H200", "B200", "GB200"} <= set(shown)
    assert [GPUS[name].capacity_bytes for name in shown] == sorted(GPUS[name].capacity_bytes for name in shown)
    assert [fit.gpu for fit in fits(llama(), [find_gpu("B200"), find_gpu("A30")])] == ["B200", "A30"]


def test_eighteen_bytes_a_parameter_of_an_8b_model_fit_no_80_gb_card() -> None:
    """Llama-3-8B on one GPU: 8.03 B x 18 bytes = 134.6 GiB before any activation."""
    verdicts = {fit.gpu: fit.fits for fit in fits(llama(world_size=1))}
    assert not verdicts["H100"]
    assert not verdicts["H200"]  # 134.6 GiB and more than 5 GiB of activations and margin
    assert verdicts["B200"]


def test_amds_cards_are_estimated_as_nvidias_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """They are shown when asked for by name, with the assumption; beside an NVIDIA card with that card's rules."""
    assert not any(gpu.vendor == "AMD" for gpu in common_gpus())
    for names, whose in ((["MI300X"], "Hopper"), (["MI300X", "B200"], "Blackwell")):
        argv = ["estimate", "Qwen/Qwen3-0.6B", "--json", *(word for name in names for word in ("--gpu", name))]
        assert main(argv) == 0
        assumed = json.loads(capsys.readouterr().out)["assumptions"]
        (line,) = (words for words in assumed if "AMD" in words)
        assert line.startswith("MI300X is AMD's") and f"NVIDIA's {whose}" in line and "ROCm" in line
    run = run_from_megatron_args(
        "--num-layers 2 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
        "--vocab-size 1000 --micro-batch-size 1", world_size=1, gpu="AMD Instinct MI300X",
    )  # fmt: skip
    assert any("AMD Instinct MI300X is AMD's" in words for words in run.assumptions)


def test_a_blackwell_of_capability_12_is_said_to_keep_a_second_fp8_layout(capsys: pytest.CaptureFixture[str]) -> None:
    """Transformer Engine's ``is_non_tn_fp8_gemm_supported`` is true of 10.x and false of 12.x."""
    for card, said in (("RTX-5090", True), ("B200", False)):
        assert main(["estimate", "Qwen/Qwen3-0.6B", "--fp8", "hybrid", "--gpu", card, "--json"]) == 0
        assumed = json.loads(capsys.readouterr().out)["assumptions"]
        assert any("second layout" in words for words in assumed) is said


def test_before_ampere_attention_is_unfused() -> None:
    """Llama-3-8B, s = 8192, b = 1: unfused attention keeps the probabilities, bf16 [b, a, s, s], of each of 32 layers
    of 32 heads, and on one stage of one microbatch nothing else of attention is larger."""
    def on(arch: str) -> int:
        run = llama().run.with_(
            batch=BatchSpec(seq_length=8192), implementation=ImplementationSpec(gpu_arch=arch)
        )
        return estimate(run).peak_stage.peak_bytes

    probabilities = 2 * 32 * 8192**2 * 32
    for arch in ("volta", "turing"):
        assert on(arch) - on("ampere") > probabilities
    assert on("ada") == on("ampere")


@pytest.mark.parametrize("arch", ["volta", "turing"])
def test_kernels_that_a_generation_lacks_are_refused(arch: str) -> None:
    with pytest.raises(SpecError, match=rf"attention_backend \(flash\) does not run on gpu_arch \({arch}\)"):
        ImplementationSpec(attention_backend="flash", gpu_arch=arch)
    with pytest.raises(SpecError, match=rf"gpu_arch \({arch}\) does not support context_parallel_size \(2\)"):
        RunSpec(
            model=resolve_model("Qwen/Qwen3-0.6B"), parallel=ParallelSpec(world_size=2, context_parallel_size=2),
            implementation=ImplementationSpec(gpu_arch=arch),
        )  # fmt: skip


def test_what_a_card_cannot_compute_in_does_not_fit_it() -> None:
    """Qwen3-0.6B in mxfp8 takes 10 GiB: there is room on every card, and only Blackwell can run it."""
    run = RunSpec(
        model=resolve_model("Qwen/Qwen3-0.6B"), parallel=ParallelSpec(world_size=8),
        precision=PrecisionSpec(fp8="e4m3", fp8_recipe="mxfp8"),
    )  # fmt: skip
    found = {fit.gpu: fit for fit in fits(estimate(run))}
    assert all(fit.headroom_bytes > 0 for fit in found.values())
    assert {name for name, fit in found.items() if fit.fits} == {"B200", "GB200", "B300"}
    assert (found["A100-80GB"].lacks, found["H200"].lacks, found["B200"].lacks) == ("fp8", "mxfp8", "")


@pytest.mark.parametrize(("gpu", "emulates"), [("V100-32GB", True), ("T4", True), ("A100-80GB", False), ("L4", False)])
def test_bf16_on_a_card_without_it_is_said(gpu: str, emulates: bool) -> None:
    """Tensor cores multiply bf16 from compute capability 8.0 on (NVIDIA, CUDA C++ Programming Guide)."""
    run = RunSpec(model=resolve_model("meta-llama/Llama-3.2-1B"))
    narrow = run.with_fields(params_dtype="fp16")
    said = [any("bf16" in words for words in gpu_assumptions(find_gpu(gpu), one)) for one in (run, narrow)]
    assert said == [emulates, False]
