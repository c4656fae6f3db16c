"""fp8 under Transformer Engine: every recipe, on the GPU generation that has it, layer by layer.

The quantizers' own Python lays out the copies; experts get counts that have to be padded.
"""

from __future__ import annotations

import pytest
from test_layers import check, run_of

from bridge_memory.rehearsal.run import rehearse_layer
from bridge_memory.spec import PrecisionSpec, RunSpec

RECIPES = [
    ("hopper", "delayed"), ("hopper", "tensorwise"), ("hopper", "blockwise"),
    ("blackwell", "tensorwise"), ("blackwell", "mxfp8"),
]  # fmt: skip


#: NVFP4 among them.
FORMATS = [*RECIPES, ("blackwell", "nvfp4")]

#: Of the larger of both.
PEAKS = 0.002


def in_fp8(run: RunSpec, recipe: str) -> RunSpec:
    if recipe == "nvfp4":
        return run.with_(precision=PrecisionSpec(fp4="e2m1"))
    return run.with_(precision=PrecisionSpec(fp8="e4m3" if recipe == "mxfp8" else "hybrid", fp8_recipe=recipe))


@pytest.mark.parametrize(("arch", "recipe"), FORMATS)
@pytest.mark.parametrize("model", ["gqa", "mha", "mla", "squared relu"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_dense_layers(model: str, tp: int, arch: str, recipe: str) -> None:
    check(in_fp8(run_of(model, tp=tp, gpu_arch=arch), recipe), peaks=PEAKS)


@pytest.mark.parametrize(("arch", "recipe"), FORMATS)
@pytest.mark.parametrize("model", ["mixtral", "fine experts", "deepseek"])
@pytest.mark.parametrize("tp", [1, 2])
def test_experts(model: str, tp: int, arch: str, recipe: str) -> None:
    check(in_fp8(run_of(model, tp=tp, ep=4, gpu_arch=arch), recipe), peaks=PEAKS)


@pytest.mark.parametrize(("arch", "recipe"), RECIPES)
@pytest.mark.parametrize(("model", "ep"), [("mixtral", 2), ("fine experts", 8)])
def test_experts_one_by_one(model: str, ep: int, arch: str, recipe: str) -> None:
    """Each is padded on its own. Peaks: the last expert's tokens, which are there when all outputs are joined, are
    those of an average expert, and fewer in the uneven routing of the rehearsal."""
    check(in_fp8(run_of(model, ep=ep, gpu_arch=arch, moe_grouped_gemm=False), recipe), peaks=0.008)


@pytest.mark.parametrize(("arch", "recipe"), [r for r in RECIPES if r[1] != "delayed"])
@pytest.mark.parametrize("modules", ["mlp", "core_attn"])
def test_recomputation_in_dense_layers(modules: str, arch: str, recipe: str) -> None:
    check(in_fp8(run_of("gqa", tp=2, recompute=modules, gpu_arch=arch), recipe), peaks=PEAKS)


@pytest.mark.parametrize(("arch", "recipe"), [r for r in RECIPES if r[1] != "delayed"])
@pytest.mark.parametrize("modules", ["moe_act,mla_up_proj,layernorm", "moe_act", "shared_experts"])
def test_recomputation_in_deepseek(modules: str, arch: str, recipe: str) -> None:
    check(in_fp8(run_of("deepseek", tp=2, ep=4, recompute=modules, gpu_arch=arch), recipe), peaks=PEAKS)


def test_weights_are_kept_in_two_layouts_on_hopper_and_in_one_on_blackwell() -> None:
    """TP1, h = 4096, f = 14336, 32 heads and 8 groups of 128: fc1 2 f h, fc2 f h, qkv (32 + 16) 128 h, proj h h
    elements, a byte each and layout."""
    weights = 3 * 14336 * 4096 + 48 * 128 * 4096 + 4096 * 4096
    for arch, layouts in (("hopper", 2), ("blackwell", 1)):
        persistent = rehearse_layer(in_fp8(run_of("gqa", gpu_arch=arch), "tensorwise"), 1).persistent
        workspace = 32 * 2**20 + 1024  # of cuBLAS, made in the first linear
        linears = (a.bytes for a in persistent if ".linear_" in a.module and a.bytes not in (4, workspace))
        assert sum(linears) == layouts * weights
