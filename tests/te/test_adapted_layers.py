"""LoRA beside frozen weights: what layers and chunks keep, and their peaks, against Megatron Bridge's own transform.

Bridge freezes megatron-core's modules and wraps their linears; Transformer Engine's Python runs over kernels that make
their outputs only. Skipped where Megatron Bridge is not installed.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from installed import HERE
from test_layers import check, run_of
from test_saved_by_component import Case, full
from test_stages import TE, TE_LOSS, kept

from bridge_memory.estimation import estimate
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.rehearsal.run import rehearse, rehearse_layer
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import PeftSpec, PrecisionSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

if find_spec("megatron.bridge") is None:
    pytest.skip("megatron.bridge is not installed", allow_module_level=True)

CORE = installed_release()
MLA = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
LOCAL: dict[str, Any] = {"transformer_impl": "local", "moe_grouped_gemm": False}


def adapted(run: RunSpec, *targets: str) -> RunSpec:
    """The run with adapters of rank 16, under the megatron-core that is installed."""
    return run.with_(
        peft=PeftSpec(scheme="lora", dim=16, target_modules=targets or PeftSpec().target_modules),
        implementation=replace(run.implementation, megatron_core=CORE),
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gqa", "mha", "qk norm", "output gate", "mla"])
def test_dense_layers(model: str, tp: int) -> None:
    check(adapted(run_of(model, tp=tp)))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("target", PeftSpec().target_modules)
def test_one_target(target: str, tp: int) -> None:
    """The other linears are frozen and have no adapter: nothing of their inputs is kept, nor is a norm's output."""
    check(adapted(run_of("gqa", tp=tp), target))


@pytest.mark.parametrize("model", ["mla", "deepseek"])
def test_latent_attention(model: str) -> None:
    check(adapted(run_of(model, tp=2, ep=8 if model == "deepseek" else 1), *MLA))


@pytest.mark.parametrize(("tp", "etp"), [(1, None), (2, None), (2, 1)])
@pytest.mark.parametrize("model", ["mixtral", "fine experts", "shared experts", "deepseek"])
def test_experts(model: str, tp: int, etp: int | None) -> None:
    check(adapted(run_of(model, tp=tp, ep=4, etp=etp)))


@pytest.mark.parametrize("targets", [("linear_qkv", "linear_proj"), ("linear_fc2",)])
def test_experts_without_an_adapter_of_their_own(targets: tuple[str, ...]) -> None:
    check(adapted(run_of("fine experts", tp=2, ep=4), *targets))


@pytest.mark.parametrize("recomputed", ["layernorm", "layernorm,mla_up_proj"])
def test_recomputed_norms_that_nothing_saved(recomputed: str) -> None:
    """They were once gone from backward, where the recomputation refers to them."""
    check(adapted(run_of("mla", recompute=recomputed)))


@pytest.mark.skipif((CORE or (0, 0)) < (0, 19), reason="LoRATopKRouter of the Bridge before calls its router otherwise")
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_the_routers_adapter(dtype: str | None) -> None:
    check(adapted(run_of("fine experts", tp=2, ep=4, moe_router_dtype=dtype), "router", "linear_qkv"))


@pytest.mark.parametrize(
    ("model", "modules"),
    [("gqa", "core_attn"), ("gqa", "mlp"), ("shared experts", "layernorm,moe_act"), ("shared experts", "moe"),
     ("deepseek", "mla_up_proj,moe_act,layernorm")],
)  # fmt: skip
def test_selective_recomputation(model: str, modules: str) -> None:
    check(adapted(run_of(model, tp=2, ep=4 if model != "gqa" else 1, recompute=modules)))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("targets", [(), ("linear_fc2",)])
@pytest.mark.parametrize("model", ["gqa", "mixtral"])
def test_a_base_in_fp8(model: str, targets: tuple[str, ...], recipe: str) -> None:
    """Adapters multiply in bf16: they keep what the base in fp8 does not."""
    arch = "blackwell" if recipe == "mxfp8" else "hopper"
    run = run_of(model, tp=2, ep=4 if model == "mixtral" else 1, gpu_arch=arch)
    check(adapted(run.with_(precision=PrecisionSpec(fp8="hybrid", fp8_recipe=recipe)), *targets))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gqa", "mha", "mixtral", "shared experts"])
def test_local_modules(model: str, tp: int) -> None:
    check(adapted(run_of(model, tp=tp, ep=1 if model in ("gqa", "mha") else 4, **LOCAL)))


def test_a_target_that_names_a_layer_is_beside_that_layer() -> None:
    check(adapted(run_of("gqa", tp=2), "*.layers.1.*.linear_qkv"))


def test_dense_layer_by_hand() -> None:
    """TP1, s = 4096, b = 1, h = 4096, 32 heads and 8 groups of 128, f = 14336, rank 16, bf16.

    Adapters keep their inputs: both norms' outputs 2 * 2 s h, attention's 2 s h, the activation's 2 s f, and of r
    features 4 * 2 s r. The base: the residual stream 2 * 2 s h with 4 s a reciprocal, rotated query 2 s h, key and
    value 2 * 2 s 8 128, 4 bytes a head and token, fc1's output 2 s 2 f. The random state takes 16 bytes.
    """
    s, h, f, r = 4096, 4096, 14336, 16
    adapters = 2 * 2 * s * h + 2 * s * h + 2 * s * f + 4 * 2 * s * r
    base = 2 * 2 * s * h + 2 * 4 * s + 2 * s * h + 4 * s * 1024 + 4 * 32 * s + 4 * s * f + 16
    assert rehearse_layer(adapted(run_of("gqa")), 1).saved_bytes == adapters + base


# ---- chunks ----

CASES = [
    *(Case("llama", 0, pp=pp, tp=tp) for pp in (1, 2) for tp in (1, 2)),
    *(Case("llama", 1, pp=2, tp=tp) for tp in (1, 2)),
    *(Case("tied", stage, pp=pp, tp=2) for pp, stage in ((1, 0), (2, 1))),
    Case("gpt", 0, pp=1, tp=2, batch=2),
    Case("moe", 0, pp=1, tp=2),
    Case("deepseek", 0, pp=2, tp=2),
    *(Case(m, stage, pp=2, tp=2, recompute=r) for m in ("llama", "moe") for stage in (0, 1)
      for r in (full("uniform", 1), full("block", 1))),
    Case("llama", 0, pp=2, vpp=2, chunk=1, tp=2),
    *(Case(m, 0, pp=1, tp=2, mtp=1) for m in ("llama", "tied")),
    Case("deepseek", 1, pp=2, tp=2, mtp=2),
]  # fmt: skip


def _chunk(case: Case, *targets: str) -> None:
    _run(adapted(case.run(), *targets), case)


def _run(run: RunSpec, case: Case) -> None:
    kept(run, case.stage, case.chunk)
    passes = rehearse(run, case.stage).chunks[case.chunk].passes
    shape = layout(run.model, run.parallel).shapes(run.model)[case.stage][case.chunk]
    ours = chunk_inventory(run.model, shape, context_of(run))
    assert ours.forward_peak == pytest.approx(passes.forward_bytes, rel=0.001)
    assert ours.backward_peak == pytest.approx(passes.backward_bytes, rel=0.001)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chunk(case: Case) -> None:
    """Nothing before the first adapter is kept; frozen output layers keep no hidden states."""
    _chunk(replace(case, implementation=TE))


@pytest.mark.parametrize("target", ["linear_proj", "linear_fc2"])
def test_the_first_layer_keeps_nothing_before_its_first_adapter(target: str) -> None:
    _chunk(Case("llama", 0, pp=2, tp=2, implementation=TE), target)


@pytest.mark.parametrize("targets", [(), ("linear_fc2",)], ids=["all", "fc2"])
def test_the_only_layer_of_the_first_chunk_counts_its_input_once(targets: tuple[str, ...]) -> None:
    """``GPTModel.forward`` refers to it until the end, which is that of the layer. fc2's adapter alone makes a gradient
    of its input, which has none."""
    case = Case("llama", 0, pp=2, implementation=TE)
    run = adapted(case.run(), *targets)
    _run(run.with_(model=replace(run.model, layers=run.model.layers[:2])), case)


def test_experts_adapters_alone_have_an_optimizer() -> None:
    """On a stage where every other parameter is frozen."""
    run = adapted(Case("moe", 0, pp=1, implementation=TE).run(), "linear_fc2")
    assert rehearse(run, 0).optimizer_bytes == estimate(run).stages[0].optimizer_bytes > 0


def test_a_fused_loss() -> None:
    _chunk(Case("llama", 1, pp=2, tp=2, implementation=TE_LOSS))


def test_the_state_is_that_of_the_adapters() -> None:
    """megatron-core's buffers and optimizer of the wrapped chunk hold adapters alone."""
    run = adapted(Case("llama", 0, pp=2, tp=2, implementation=TE).run())
    found = rehearse(run, 0)
    stage = estimate(run).stages[0]
    assert stage.gradients_bytes == found.gradients_bytes
    assert stage.weights_bytes == found.weights_bytes
    assert HERE is not None and found.optimizer_bytes == stage.optimizer_bytes
