"""What the allocator adds to optimizer states, counted by hand.

Qwen2.5-0.5B: hidden size 896, FFN 4864, 14 heads and 2 groups of 64, 24 layers, 151,936 tied rows.

A block of the caching allocator is split only where more than 1 MiB remains. Tensors of 10 MiB and more lie in segments
of whole 2 MiB, those from 1 to 10 MiB together in segments of 20 MiB.
"""

from __future__ import annotations

from bridge_memory import DataParallelSpec, OptimizerSpec, ParallelSpec, PrecisionSpec, RunSpec, explain
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
