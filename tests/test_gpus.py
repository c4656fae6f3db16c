"""Which GPUs an estimate fits on: names people type, capacities torch reports, a margin with its sources."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge_memory.estimate import Estimate, estimate
from bridge_memory.readers import resolve_model
from bridge_memory.report import gpus
from bridge_memory.report.gpus import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GIB,
    GPUS,
    NCCL_BYTES,
    check_computes,
    find_gpu,
    fits,
    lacks,
)
from bridge_memory.spec import ParallelSpec, PrecisionSpec, RunSpec, SpecError

RUNS = Path(__file__).parent / "data" / "measurements" / "runs.jsonl"


def llama(world_size: int = 8, pp: int = 1) -> Estimate:
    parallel = ParallelSpec(world_size=world_size, pipeline_model_parallel_size=pp)
    return estimate(RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B"), parallel=parallel))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100", "H100"),
        ("h100", "H100"),
        ("NVIDIA H100 80GB", "H100"),
        ("H100-SXM", "H100"),
        ("a100-80gb", "A100-80GB"),
        ("A100 40GB", "A100-40GB"),
        ("a100_80", "A100-80GB"),
        ("NVIDIA H200", "H200"),
        ("b200", "B200"),
        ("GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi300x", "MI300X"),
        ("RTX 4090", "RTX-4090"),
    ],
)
def test_a_gpu_is_found_by_the_names_people_type(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_every_card_is_found_by_its_own_name_and_description() -> None:
    for name, gpu in GPUS.items():
        assert find_gpu(name) is gpu
    assert set(gpus._ALIASES.values()) <= set(GPUS)
    assert not {gpus._key(name) for name in GPUS} & set(gpus._ALIASES)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("A100", "A100-40GB or A100-80GB"), ("H300", "H100"), ("V100", "V100-16GB or V100-32GB"), ("", "lists them")],
)
def test_an_unknown_or_ambiguous_gpu_is_refused_with_near_ones(typed: str, hint: str) -> None:
    with pytest.raises(SpecError, match=re.escape(repr(typed))) as caught:
        find_gpu(typed)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GPUS)
def test_a_capacity_is_a_little_below_the_figure_on_the_box(name: str) -> None:
    """The driver keeps 1 to 8 % (error correction on GDDR cards takes most); where vendors count 288 GB in powers of
    ten, torch's GiB are 7 % fewer again."""
    printed = re.search(r"(\d+) ?GB", GPUS[name].description)
    assert printed is not None
    assert 0.9 < GPUS[name].capacity_bytes / GIB / int(printed[1]) < 1


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
    peak = result.peak_stage.peak_bytes
    for fit in fits(result):
        assert fit.capacity_bytes == GPUS[fit.gpu].capacity_bytes
        assert fit.capacity_bytes == peak + fit.margin_bytes + fit.headroom_bytes
        assert fit.margin_bytes == CONTEXT_BYTES + NCCL_BYTES + int(peak * FRAGMENTATION)
        assert fit.fits is (fit.headroom_bytes >= 0)


def test_one_gpu_needs_no_room_for_nccl() -> None:
    result = llama(world_size=1)
    (fit,) = fits(result, [GPUS["H200"]])
    assert fit.margin_bytes == CONTEXT_BYTES + int(result.peak_stage.peak_bytes * FRAGMENTATION)


def test_the_worst_stage_decides() -> None:
    result = llama(world_size=4, pp=4)
    worst = max(s.peak_bytes for s in result.stages)
    assert len({s.peak_bytes for s in result.stages}) == 4
    (fit,) = fits(result, [GPUS["H100"]])
    assert fit.capacity_bytes - fit.margin_bytes - fit.headroom_bytes == worst


def test_common_gpus_are_shown_when_none_is_named() -> None:
    shown = [fit.gpu for fit in fits(llama())]
    assert {"A100-40GB", "A100-80GB", "H100", "H200", "B200", "GB200", "MI300X"} <= set(shown)
    assert [GPUS[name].capacity_bytes for name in shown] == sorted(GPUS[name].capacity_bytes for name in shown)
    assert [fit.gpu for fit in fits(llama(), [find_gpu("B200"), find_gpu("A30")])] == ["B200", "A30"]


def test_eighteen_bytes_a_parameter_of_an_8b_model_fit_no_80_gb_card() -> None:
    """Llama-3-8B on one GPU: 8.03 B x 18 bytes = 134.6 GiB before any activation."""
    verdicts = {fit.gpu: fit.fits for fit in fits(llama(world_size=1))}
    assert not verdicts["H100"]
    assert not verdicts["H200"]  # 134.6 GiB and more than 5 GiB of activations and margin
    assert verdicts["B200"]


#: What Transformer Engine's check_fp8_support, check_fp8_block_scaling_support and check_mxfp8_support say of a card.
COMPUTES = {
    "V100-32GB": "", "A100-80GB": "", "RTX-3090": "", "MI250X": "",
    "L4": "delayed tensorwise", "L40S": "delayed tensorwise", "RTX-4090": "delayed tensorwise",
    "H100": "delayed tensorwise blockwise", "H200": "delayed tensorwise blockwise",
    "GH200-144GB": "delayed tensorwise blockwise", "RTX-PRO-6000": "delayed tensorwise blockwise",
    "RTX-5090": "delayed tensorwise blockwise", "MI300X": "delayed tensorwise blockwise",
    "B200": "delayed tensorwise blockwise mxfp8", "GB200": "delayed tensorwise blockwise mxfp8",
    "B300": "delayed tensorwise blockwise mxfp8", "MI355X": "delayed tensorwise blockwise mxfp8",
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTES)
def test_a_card_computes_in_the_formats_of_its_generation(name: str) -> None:
    assert not lacks(GPUS[name], PrecisionSpec())
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        precision = PrecisionSpec(fp8="hybrid", fp8_recipe=recipe)
        if recipe in COMPUTES[name].split():
            check_computes(GPUS[name], precision)
            continue
        with pytest.raises(SpecError, match=f"--gpu {name}, of compute capability") as refusal:
            check_computes(GPUS[name], precision)
        text = str(refusal.value)
        assert text.startswith("fp8 (hybrid)" if not COMPUTES[name] else f"fp8_recipe ({recipe})")
        assert "B200" in text and "\n" not in text


def test_an_architectures_workspaces_go_with_its_capability() -> None:
    """NVIDIA's Hopper is 9.0, Blackwell 10.x and 12.x; everything before has Ampere's workspaces."""
    for gpu in GPUS.values():
        if gpu.description.startswith("NVIDIA"):
            assert gpu.arch == ("ampere" if gpu.capability < (9, 0) else "hopper" if gpu.capability < (10, 0) else
                                "blackwell"), gpu.name  # fmt: skip


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
