"""What the allocator adds to optimizer states, counted by hand.

Qwen2.5-0.5B: hidden size 896, FFN 4864, 14 heads and 2 groups of 64, 24 layers, 151,936 tied rows.

A block of the caching allocator is split only where more than 1 MiB remains. Tensors of 10 MiB and more lie in segments
of whole 2 MiB, those from 1 to 10 MiB together in segments of 20 MiB.
"""

from __future__ import annotations

import pytest

from bridge_memory import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    explain,
)
from bridge_memory.components import Part

LAYERS = 24
#: In fp32 the embedding is 519.3125 MiB (of 520). A layer's qkv is 3.9375 MiB, of which 5 leave 0.3125 of 20, and its
#: fc1 is 33.25 (of 34). What remains beside proj (6 of 3.0625) and fc2 (16.625 of 18) is split off.
EMBEDDING_4 = 720_896
MATRICES_4 = LAYERS * (327_680 // 5 + 786_432)
#: In two bytes the embedding is 259.65625 MiB (of 260); 10 qkv of 1.96875 MiB leave 0.3125 of 20, 13 proj of 1.53125
#: leave 0.09375. What remains beside fc1 (16.625 of 18) and fc2 (2 of 8.3125) is split off.
ALL_2 = 360_448 + LAYERS * (327_680 // 10 + 98_304 // 13)
ALL_4 = EMBEDDING_4 + MATRICES_4


def rests(world_size: int = 1, *, distributed: bool = False, **optimizer: object) -> int:
    run = RunSpec(
        model="Qwen/Qwen2.5-0.5B", parallel=ParallelSpec(world_size=world_size),
        data_parallel=DataParallelSpec(use_distributed_optimizer=distributed), optimizer=OptimizerSpec(**optimizer),
    )
    return sum(c.bytes for c in explain(run, 0).components if c.part is Part.ALLOCATOR)


def test_every_fp32_state_has_the_same_rests() -> None:
    """SGD keeps main parameters and momentum, Adam one state more."""
    assert rests(optimizer="sgd") - rests(optimizer="sgd", sgd_momentum=0.0) == ALL_4
    assert rests(optimizer="adam") - rests(optimizer="sgd") == ALL_4


def test_muon_has_one_state_for_matrices_and_two_for_the_embedding() -> None:
    without = rests(optimizer="sgd", sgd_momentum=0.0)
    assert rests(optimizer="muon") - without == MATRICES_4 + 2 * EMBEDDING_4


def test_main_parameters_have_the_rests_of_their_width() -> None:
    """A precision-aware Adam on 8 ranks: fp32 main parameters, and fp16 ones of half the width."""
    aware = {"distributed": True, "use_precision_aware_optimizer": True, "store_param_remainders": False}
    fp32, fp16 = (rests(8, main_params_dtype=dtype, **aware) for dtype in ("fp32", "fp16"))
    assert fp32 - fp16 == ALL_4 // 8 - ALL_2 // 8


def test_fused_adam_copies_fp32_parameters_too() -> None:
    """Weights, gradients, both moments and FusedAdam's main parameters, 4 bytes each of 494,032,768 elements; without
    a precision-aware optimizer fp32 parameters are their own main parameters."""

    def states(**optimizer: object) -> int:
        run = RunSpec(
            model="Qwen/Qwen2.5-0.5B", parallel=ParallelSpec(world_size=1),
            precision=PrecisionSpec(params_dtype="fp32"), optimizer=OptimizerSpec(**optimizer),
        )
        return explain(run, 0).optimizer_bytes

    assert states() == 2 * 4 * 494_032_768
    assert states(use_precision_aware_optimizer=True) == 3 * 4 * 494_032_768
    fp16 = {"main_params_dtype": "fp16", "store_param_remainders": False}
    assert states(use_precision_aware_optimizer=True, **fp16) == (4 + 4 + 2) * 494_032_768


#: Elements of Qwen2.5-0.5B: the embedding, and 24 layers of qkv with bias, proj, fc1 and fc2, and two norms; a norm.
ELEMENTS = 151_936 * 896 + 24 * (1152 * 897 + 896 * 896 + 3 * 4864 * 896 + 2 * 896) + 896


@pytest.mark.parametrize(
    ("te", "moments", "main", "bytes_each"),
    [
        ((2, 12), "bf16", "fp32", 8), ((2, 13), "bf16", "fp32", 0), ((2, 12), "fp32", "fp32", 0),
        ((2, 13), "fp16", "fp32", 8), ((2, 13), "fp8", "fp32", 8), ((2, 13), "fp32", "fp16", 4),
        ((2, 13), "bf16", "fp16", 4), ((2, 13), "fp8", "fp16", 12),
    ],
)  # fmt: skip
def test_a_step_has_fp32_copies_of_narrow_states(
    te: tuple[int, int], moments: str, main: str, bytes_each: int
) -> None:
    """``fused_adam.py: FusedAdam.step`` makes them all before its kernel runs, four bytes an element and state; from
    2.13 on two moments in bf16 are updated as they are. On one GPU the step is the peak of a short sequence."""
    run = RunSpec(
        model="Qwen/Qwen2.5-0.5B", batch=BatchSpec(seq_length=64),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, main_params_dtype=main
        ),
        implementation=ImplementationSpec(transformer_engine=te),
    )  # fmt: skip
    found = explain(run, 0)
    if not bytes_each:
        assert found.peak_phase != "optimizer step"
        return
    assert (found.peak_phase, found.peak_operation) == ("optimizer step", "fp32 copies of optimizer states")
    assert found.peak_bytes - found.static_bytes == pytest.approx(bytes_each * ELEMENTS, rel=1e-4)


def test_experts_step_after_all_others() -> None:
    """OLMoE over 8 ranks with EP 8: 8 of 64 experts of 3 x 2048 x 1024, 16 layers, are more than an eighth of all else;
    copies of one moment of theirs."""
    run = RunSpec(
        model="allenai/OLMoE-1B-7B-0924", batch=BatchSpec(seq_length=64),
        parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8),
        optimizer=OptimizerSpec(use_precision_aware_optimizer=True, exp_avg_dtype="fp8"),
    )  # fmt: skip
    found = explain(run, 0)
    assert found.peak_bytes - found.static_bytes == 4 * 16 * 8 * 3 * 2048 * 1024
