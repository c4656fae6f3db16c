"""The overload factor up to which stages fit, against a search that evaluates everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bridge_memory import ParallelSpec, RunSpec, SpecError, peaks
from bridge_memory.job.overload import PER_UNIT, most_overload, overload
from bridge_memory.verdict import MemoryLimit

EXPERTS = (
    "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "zai-org/GLM-4.5-Air",
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
)  # fmt: skip
GIB = 1 << 30


OUTSIDE = 2 * GIB


def run_of(
    model: str = "Qwen/Qwen3-30B-A3B", *, tp: int = 1, pp: int = 1, ep: int = 8, dp: int = 1, **fields: Any
) -> RunSpec:
    world = pp * max(tp, 1) * ep * dp
    parallel = ParallelSpec(
        world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1,
    )  # fmt: skip
    return RunSpec(model=model, parallel=parallel).with_fields(**fields)


def needed(run: RunSpec, factor: float) -> list[int]:
    """Bytes of each stage with its margin."""
    found = [stage.peak_bytes for stage in peaks(run.with_fields(moe_imbalance=factor))]
    return [peak + OUTSIDE + int(0.073 * peak) for peak in found]


def last_that_fits(need: Callable[[float], int], card: int, most: float) -> float | None:
    """By bisection over all hundredths below ``most``, and ``most``."""
    if need(1.0) > card:
        return None
    if need(most) <= card:
        return most
    low, high = PER_UNIT, int(most * PER_UNIT) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(min(most, middle / PER_UNIT)) <= card else (low, middle)
    return low / PER_UNIT


@st.composite
def cases(draw: st.DrawFn) -> tuple[RunSpec, float]:
    """A run, and where between its balanced and its worst peak the card ends."""
    fields: dict[str, Any] = {
        "moe_token_dispatcher_type": draw(st.sampled_from(["alltoall", "allgather", "flex"])),
        "moe_permute_fusion": draw(st.booleans()), "seq_length": draw(st.sampled_from([128, 1000, 4096])),
        "moe_expert_capacity_factor": draw(st.sampled_from([None, None, 1.0, 1.25])),
        "moe_imbalance": draw(st.sampled_from([1.0, 1.7])),
    }  # fmt: skip
    fields |= draw(st.sampled_from([
        {}, {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"fp8": "e4m3", "fp8_recipe": "mxfp8", "gpu_arch": "blackwell"},
    ]))  # fmt: skip
    try:
        run = run_of(
            draw(st.sampled_from(EXPERTS)), tp=draw(st.sampled_from([1, 2])), pp=draw(st.sampled_from([1, 2, 4])),
            ep=draw(st.sampled_from([2, 8, 16])), **fields,
        )  # fmt: skip
    except SpecError:
        assume(False)
    return run, draw(st.floats(-0.1, 1.1))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases())
def test_it_fits_and_a_hundredth_above_it_does_not(case: tuple[RunSpec, float]) -> None:
    run, share = case
    most = most_overload(run)
    assume(most > 1)
    least, worst = max(needed(run, 1.0)), max(needed(run, most))
    card = least + int(share * (worst - least))
    found = overload(run, MemoryLimit(card, OUTSIDE))
    assert found is not None
    assert found.most == most
    assert found.factor == last_that_fits(lambda factor: max(needed(run, factor)), card, most)
    stages = range(run.parallel.pp)
    alone = [last_that_fits(lambda factor, i=i: needed(run, factor)[i], card, most) for i in stages]  # type: ignore[misc]
    assert list(found.stages) == alone
    assert found.any == (worst <= card)
    if found.factor is not None and not found.any:
        above = needed(run, min(most, found.factor + 1 / PER_UNIT))
        assert above[found.stage] == max(above) > card


@settings(max_examples=25, deadline=None)
@given(cases(), st.floats(0, 1), st.floats(0, 1))
def test_no_stage_needs_less_with_more_overload(case: tuple[RunSpec, float], first: float, other: float) -> None:
    """What the search rests on."""
    run, most = case[0], most_overload(case[0])
    low, high = sorted(1 + share * (most - 1) for share in (first, other))
    assert all(a <= b for a, b in zip(needed(run, low), needed(run, high), strict=True))


def test_a_larger_card_takes_no_less() -> None:
    run = run_of(pp=4)
    found = [overload(run, MemoryLimit(card * GIB, OUTSIDE)) for card in range(10, 120, 10)]
    factors = [0 if one is None or one.factor is None else one.factor for one in found]
    assert factors == sorted(factors)
    assert factors[0] == 0 < factors[-1]


NO_MATTER = {
    "dense": lambda: RunSpec(model="meta-llama/Llama-3.2-1B"),
    "one expert-parallel rank": lambda: run_of(ep=1, dp=8),
    "padded to capacity": lambda: run_of(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_MATTER)
def test_nothing_where_routing_does_not_matter(case: str) -> None:
    assert overload(NO_MATTER[case](), MemoryLimit(80 * GIB, OUTSIDE)) is None


def test_the_most_is_every_token_on_one_rank() -> None:
    """128 experts, 8 a token. On 8 ranks all of a token's experts are on one; of 64 a rank has two, a quarter of 8."""
    assert most_overload(run_of(ep=8)) == 8
    assert most_overload(run_of(ep=64)) == 64 * 2 / 8


def test_the_most_with_a_capacity() -> None:
    """4096 x 8 / 128 x 1.3 = 332.8: 333 tokens an expert of 256 in balance."""
    assert most_overload(run_of(moe_expert_capacity_factor=1.3)) == 333 / 256


def test_a_budget_of_rows_bounds_what_experts_take() -> None:
    """HybridEP drops what comes beyond the rank's rows: far less than without a budget."""
    flex = {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "megatron_core": (0, 19),
        "use_transformer_engine_op_fuser": True,
    }  # fmt: skip
    free, bound = run_of(**flex), run_of(**flex, moe_expert_rank_capacity_factor=1.3)
    card = max(needed(bound, 2.0))
    limited, other = overload(bound, MemoryLimit(card, OUTSIDE)), overload(free, MemoryLimit(card, OUTSIDE))
    assert limited is not None
    assert other is not None
    assert other.factor is not None
    assert limited.factor is not None
    assert 1 < other.factor < limited.factor
