"""Delayed weight gradients: what waits for them, in one layer of the real code.

Transformer Engine's linears put what they need into their store and megatron-core's modules make the gradients
(``backward_dw``) where its schedule of overlapped layers does: experts' when their node has run backward, all others
when the layer has.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_layers import check, run_of

from bridge_memory.inventory.context import context_of
from bridge_memory.inventory.layer import layer_block
from bridge_memory.spec import PrecisionSpec, RunSpec


def delayed(run: RunSpec) -> RunSpec:
    return run.with_fields(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["mixtral", "fine experts", "shared experts", "deepseek"])
def test_what_waits_is_what_the_real_store_holds(model: str, tp: int, fused: bool) -> None:
    plain = run_of(model, tp=tp, ep=4, gradient_accumulation_fusion=fused)
    check(plain, saved=1e-4, peaks=1e-4)
    check(delayed(plain), saved=1e-4, peaks=1e-4)
