"""Delayed weight gradients: what waits for them, in one layer of the real code.

Transformer Engine's linears put what they need into their store and megatron-core's modules make the gradients
(``backward_dw``) where its schedule of overlapped layers does: experts' when their node has run backward, all others
when the layer has.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import pytest
from test_layers import check, run_of

from bridge_memory.spec import MLPSpec, PrecisionSpec, RunSpec


def delayed(run: RunSpec) -> RunSpec:
    """Of a layer that runs as one function, on both sides: nodes of the overlapped schedule, which alone may delay,
    free and keep otherwise (``tests/test_reserved_megatron.py``)."""
    implementation, out = copy(run.implementation), copy(run)
    object.__setattr__(implementation, "delay_wgrad_compute", True)
    object.__setattr__(out, "implementation", implementation)
    return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["mixtral", "fine experts", "shared experts", "deepseek"])
def test_what_waits_is_what_the_real_store_holds(model: str, tp: int, fused: bool) -> None:
    plain = run_of(model, tp=tp, ep=4, gradient_accumulation_fusion=fused)
    check(plain, saved=1e-4, peaks=1e-4)
    check(delayed(plain), saved=1e-4, peaks=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["moe_act", "shared_experts", "layernorm,moe_act", "core_attn"])
def test_beside_recomputation(recompute: str, tp: int) -> None:
    check(delayed(run_of("shared experts", tp=tp, ep=4, recompute=recompute)), saved=1e-4, peaks=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("model", ["shared experts", "deepseek"])
def test_in_fp8_quantized_gradients_wait(model: str, recipe: str, tp: int) -> None:
    card = "blackwell" if recipe == "mxfp8" else "hopper"
    run = replace(run_of(model, tp=tp, ep=4, gpu_arch=card), precision=PrecisionSpec(fp8="hybrid", fp8_recipe=recipe))
    check(delayed(run))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_dense_layers_of_a_mixture(tp: int) -> None:
    run = run_of("deepseek", tp=tp, ep=4)
    experts = run.model.layers[1]
    dense = replace(experts, ffn=MLPSpec(18432, gated=True))
    check(delayed(replace(run, model=replace(run.model, layers=(experts, dense)))), saved=1e-4, peaks=1e-4)
