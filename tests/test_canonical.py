"""The canonical form of a run has its estimate, and drops only what no estimate reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_runs import Asked, asked_runs

from bridge_memory import ParallelSpec, RunSpec, SpecError, estimate
from bridge_memory.spec.canonical import canonical

LLAMA = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=16))


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked_runs())
def test_it_has_the_same_estimate(asked: Asked) -> None:
    """Byte for byte, with whatever else the run says in vain."""
    try:
        run = asked.run()
        found = estimate(run)
    except SpecError:
        assume(False)
    plain = canonical(run)
    assert canonical(plain) == plain
    again = estimate(plain)
    assert [s.components for s in again.stages] == [s.components for s in found.stages]
    assert [(s.peak_phase, s.layers, s.carried_over) for s in again.stages] == [
        (s.peak_phase, s.layers, s.carried_over) for s in found.stages
    ]


def test_a_dense_model_has_no_dispatcher_and_an_unset_size_is_its_default() -> None:
    told = LLAMA.with_fields(moe_token_dispatcher_type="allgather", moe_grouped_gemm=False, cp_comm_type="a2a",
                             expert_tensor_parallel_size=1, global_batch_size=16, name="my Llama")
    assert told != LLAMA and canonical(told) == canonical(LLAMA)


def test_two_spellings_of_a_layout_are_one() -> None:
    one = LLAMA.with_fields(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*16|t*16,L")
    other = replace(one.parallel, pipeline_model_parallel_layout="E" + 16 * "t" + "|" + 16 * "t" + "L")
    assert canonical(one) == canonical(one.with_(parallel=other))


def test_what_is_read_stays() -> None:
    for change in (
        {"tensor_model_parallel_size": 2}, {"seq_length": 8192}, {"exp_avg_dtype": "bf16",
                                                                  "use_precision_aware_optimizer": True},
        {"recompute_granularity": "selective"}, {"bias_activation_fusion": False}, {"hidden_dropout": 0.1},
        {"apply_rope_fusion": False}, {"grad_reduce_in_fp32": False}, {"gpu_arch": "ampere"},
    ):  # fmt: skip
        assert canonical(LLAMA.with_fields(**change)) != canonical(LLAMA), change
