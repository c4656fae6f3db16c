"""One layer under Transformer Engine: the inventory's tape against the real code, tensor by tensor, peaks included.

megatron-core's TE layer specs and Transformer Engine's autograd functions run for real on meta tensors; only the
kernels are replaced (``rehearsal/te_kernels``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from installed import HERE
from test_saved_tensors import ALLGATHER, CASES, LOCAL, MODELS, UNFUSED, Case, model

from bridge_memory.rehearsal.compare import LayerComparison, compare_layer
from bridge_memory.rehearsal.run import rehearse_layer
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    MLPSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
)

TE = ImplementationSpec(transformer_engine=HERE)
EAGER = replace(
    TE, bias_activation_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
    apply_rope_fusion=False, masked_softmax_fusion=False,
)  # fmt: skip
OF_LOCAL = {
    id(LOCAL): TE, id(UNFUSED): EAGER, id(ALLGATHER): replace(TE, moe_token_dispatcher_type="allgather")
}  # fmt: skip


def run_of(
    model: str, *, tp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, batch: int = 1, recompute: str = "",
    **impl: Any,
) -> RunSpec:
    return RunSpec(
        model=MODELS[model],
        parallel=ParallelSpec(
            world_size=64, tensor_model_parallel_size=tp, context_parallel_size=cp, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        ),
        batch=BatchSpec(seq_length=4096, micro_batch_size=batch),
        implementation=replace(TE, **impl),
        recompute=RecomputeSpec(granularity="selective", modules=tuple(recompute.split(",")))
        if recompute
        else RecomputeSpec(),
    )


def check(run: RunSpec, *, saved: float = 0.002, peaks: float = 0.004) -> LayerComparison:
    found = compare_layer(run, 1)
    explained = "\n" + "\n".join(found.lines())
    assert abs(found.saved_error) <= saved, explained
    assert abs(found.forward_error) <= peaks, explained
    assert abs(found.backward_error) <= peaks, explained
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_local_layers_are_tested_with(case: Case) -> None:
    check(replace(case, implementation=OF_LOCAL[id(case.implementation)]).run())


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("how", ["p2p", "a2a", "all_gather"])
@pytest.mark.parametrize("model", ["gqa", "mha"])
def test_context_parallelism(model: str, how: str, cp: int) -> None:
    check(run_of(model, cp=cp, cp_comm_type=how))
    if cp < 8:
        check(run_of(model, tp=2, cp=cp, cp_comm_type=how, batch=2))


@pytest.mark.parametrize("cp", [2, 8])
def test_context_parallelism_of_multi_latent_attention(cp: int) -> None:
    check(run_of("mla", tp=2, cp=cp))


@pytest.mark.parametrize(
    "modules", ["moe_act", "moe_act,core_attn", "moe", "layernorm,moe_act", "shared_experts,layernorm"]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_recomputation_in_a_mixture(modules: str, tp: int) -> None:
    check(run_of("shared experts", tp=tp, ep=4, recompute=modules))


@pytest.mark.parametrize(
    "modules", ["mla_up_proj", "mla_up_proj,moe_act,layernorm", "core_attn,shared_experts", "moe"]
)
def test_recomputation_in_deepseek(modules: str) -> None:
    check(run_of("deepseek", tp=2, ep=8, recompute=modules))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("model", ["mixtral", "fine experts", "deepseek"])
@pytest.mark.parametrize("tp", [1, 2])
def test_fused_permutation(model: str, dispatcher: str, tp: int) -> None:
    check(run_of(model, tp=tp, ep=4, moe_permute_fusion=True, moe_token_dispatcher_type=dispatcher))


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize(("model", "etp"), [("fine experts", 4), ("fine experts", 1), ("deepseek", 2)])
def test_outputs_are_summed_over_etp_in_the_routers_dtype(
    model: str, etp: int, dtype: str, dispatcher: str
) -> None:
    check(
        run_of(
            model, tp=4, ep=8, etp=etp, moe_router_dtype=dtype, moe_token_dispatcher_type=dispatcher,
            moe_permute_fusion=True,
        )
    )  # fmt: skip


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core says in the environment which backends may be used, and stops where it said otherwise before."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


WINDOW = {
    "window": model(AttentionSpec(32, 8, 128, window_size=1024), MLPSpec(14336, gated=True), 4096),
    "window and sink": model(
        AttentionSpec(32, 8, 128, window_size=1024, learnable_softmax_sink=True), MLPSpec(14336, gated=True), 4096
    ),
    # Three heads a rank: no fused softmax.
    "odd": model(AttentionSpec(6, 2, 128), MLPSpec(2048, gated=True), 768),
}


@pytest.mark.parametrize("seq", [512, 4096])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["gqa", "mha", "sink", "output gate", "mla", *WINDOW])
@pytest.mark.usefixtures("backends")
def test_unfused_attention(name: str, dtype: str, seq: int) -> None:
    """Masks of s x s and what masking in place costs; fp32 knows nothing else."""
    run = run_of("gqa", tp=2, attention_backend="unfused")
    run = replace(
        run, model=(MODELS | WINDOW)[name], batch=BatchSpec(seq_length=seq), precision=PrecisionSpec(params_dtype=dtype)
    )
    check(run, saved=1e-4, peaks=1e-4)


@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_fused_router(dtype: str | None) -> None:
    """Its scores are fp32 from 2.13 on, whatever the logits are."""
    router = {"moe_router_fusion": True, "moe_permute_fusion": True, "moe_router_dtype": dtype}
    check(run_of("fine experts", tp=2, ep=4, **router), saved=1e-4)


@pytest.mark.parametrize(("model", "arch"), [("gqa", "blackwell"), ("gqa", "ampere"), ("sink", "hopper")])
@pytest.mark.usefixtures("backends")
def test_deterministic_attention(model: str, arch: str) -> None:
    """FlashAttention, with a gradient for each split; from 2.12 on none of both kernels for sinks."""
    check(run_of(model, tp=4, gpu_arch=arch, nvte_deterministic=True), saved=1e-4, peaks=1e-4)


def test_dense_layer_by_hand() -> None:
    """TP1, s = 4096, b = 1, h = 4096, 32 heads and 8 groups of 128, f = 14336, bf16.

    Residual stream and normed input of attention and MLP: 4 * 2 s h, and 4 s for each reciprocal; rotated query:
    2 s h; rotated key and value: 2 * 2 s 8 128; output 2 s h and 4 bytes a head and token of log-sum-exp; fc1's
    output 2 s 2 f and the activation 2 s f. The random state takes 16 bytes.
    """
    s, h, f = 4096, 4096, 14336
    by_hand = 4 * 2 * s * h + 2 * 4 * s + 2 * s * h + 4 * s * 1024 + 2 * s * h + 4 * 32 * s + 6 * s * f + 16
    assert rehearse_layer(run_of("gqa"), 1).saved_bytes == by_hand
