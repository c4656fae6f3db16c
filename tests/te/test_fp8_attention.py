"""Attention in fp8 as Transformer Engine's own Python runs it: every saved byte of a layer, and both peaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from installed import HERE

from bridge_memory import SpecError, resolve_model
from bridge_memory.caveats.unmodelled import unmodelled_features
from bridge_memory.inventory.layer import layer_block
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.world import installed_release, quiet
from bridge_memory.releases import MXFP8_ATTENTION
from bridge_memory.spec import BatchSpec, ImplementationSpec, PrecisionSpec, RunSpec
from bridge_memory.tapes.context import context_of

CORE = installed_release() or (0, 16)


def run_of(model: str, recipe: str, arch: str, batch: int = 1) -> RunSpec:
    return RunSpec(
        model=resolve_model(model),
        batch=BatchSpec(seq_length=1024, micro_batch_size=batch),
        precision=PrecisionSpec(fp8="hybrid", fp8_recipe=recipe, fp8_dot_product_attention=True),
        implementation=ImplementationSpec(megatron_core=CORE, transformer_engine=HERE, gpu_arch=arch),
    )


LLAMA = "meta-llama/Llama-3.1-8B"
RECIPES = [("tensorwise", "blackwell"), ("mxfp8", "blackwell"), ("delayed", "hopper"), ("delayed", "blackwell")]


@pytest.mark.parametrize(("recipe", "arch"), RECIPES)
@pytest.mark.parametrize(("model", "batch"), [(LLAMA, 1), (LLAMA, 2), ("deepseek-ai/DeepSeek-V2-Lite", 1)])
def test_a_layer(model: str, batch: int, recipe: str, arch: str) -> None:
    run = run_of(model, recipe, arch, batch)
    if recipe == "mxfp8" and not MXFP8_ATTENTION(run.implementation):
        pytest.skip("mxfp8's recipe is not told of attention")
    with quiet():
        done = compare_layer(run, 0, None)
    for error in (done.saved_error, done.forward_error, done.backward_error):
        assert abs(error) < 0.0005, done


def kept(run: RunSpec) -> dict[str, int]:
    return {t.name: t.bytes for t in layer_block(run.model.layers[0], context_of(run)).cost.tensors}


def test_what_the_function_keeps() -> None:
    """32 heads of queries, 8 of keys and of values, of 128 each: one byte an element; mxfp8 has two layouts with a
    scale for each 32 elements of a row, and of a column."""
    elements = 1024 * (32 + 8 + 8) * 128
    assert kept(run_of(LLAMA, "tensorwise", "blackwell"))["query, key and value in fp8"] == elements
    delayed = kept(run_of(LLAMA, "delayed", "hopper"))
    assert delayed["attention output in fp8"] == 1024 * 32 * 128
    assert "core_attention output" not in delayed
    new = ImplementationSpec(megatron_core=(0, 19), transformer_engine=(2, 20), gpu_arch="blackwell")
    mxfp8 = replace(run_of(LLAMA, "mxfp8", "blackwell"), implementation=new)
    assert kept(mxfp8)["query, key and value in fp8"] == 2 * elements + 2 * elements // 32


def test_recipes_that_are_not_told_compute_in_bf16() -> None:
    for recipe in ("blockwise", "mxfp8"):
        run = run_of(LLAMA, recipe, "blackwell")
        old = replace(run, implementation=replace(run.implementation, megatron_core=(0, 16)))
        assert "query, key and value in fp8" not in kept(old)


def test_what_does_not_run_is_refused() -> None:
    run = run_of(LLAMA, "delayed", "hopper")
    with pytest.raises(SpecError, match=r"fp8_dot_product_attention .* needs fp8"):
        replace(run, precision=PrecisionSpec(fp8_dot_product_attention=True))
    with pytest.raises(SpecError, match="runs on Blackwell alone"):
        run_of(LLAMA, "tensorwise", "hopper")
    for backend in ("flash", "unfused"):
        with pytest.raises(SpecError, match="use fused or auto"):
            replace(run, implementation=replace(run.implementation, attention_backend=backend))
    assert not any("attention" in feature for feature in unmodelled_features(run))
