"""Whole model chunks under Transformer Engine: what each component keeps, and the peaks of both passes.

First, middle and last stages, with each loss; virtual stages, MTP, tied weights and full recomputation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from chunk_comparison import compare_chunk
from installed import HERE
from test_fp8 import RECIPES, in_fp8
from test_saved_by_component import CASES, COMPILED_LOSS, LOCAL, SHARDINGS, Case, assert_peaks, full

from bridge_memory import ParallelSpec, resolve_model
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.summary import rows
from bridge_memory.spec import ImplementationSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

TE = ImplementationSpec(transformer_engine=HERE)
TE_LOSS = replace(TE, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
TE_AND_COMPILED_LOSS = replace(
    COMPILED_LOSS, transformer_impl=TE.transformer_impl, transformer_engine=HERE, moe_grouped_gemm=True
)
SELECTED = RecomputeSpec(granularity="selective", modules=("mlp",))
OF_LOCAL = {id(LOCAL): TE, id(COMPILED_LOSS): TE_AND_COMPILED_LOSS}


def with_te(case: Case) -> Case:
    return replace(case, implementation=OF_LOCAL[id(case.implementation)])


def kept(run: RunSpec, stage: int, chunk: int) -> None:
    components = compare_chunk(run, stage, chunk)
    report = "\n" + "\n".join(line for c in components for line in c.lines())
    for component in components:
        assert abs(component.error) <= 0.002, report


def peaks(run: RunSpec, stage: int, chunk: int) -> None:
    passes = rehearse(run, stage).chunks[chunk].passes
    shape = layout(run.model, run.parallel).shapes(run.model)[stage][chunk]
    ours = chunk_inventory(run.model, shape, context_of(run))
    assert_peaks(ours, passes)


#: Without the fusion every use of a weight makes a gradient; with it the output layer's is a stand-in.
UNFUSED = replace(TE, gradient_accumulation_fusion=False)
USED_TWICE = [replace(case, implementation=UNFUSED) for case in CASES if case.pp == 1 or case.mtp == 2]


@pytest.mark.parametrize("case", [*map(with_te, CASES), *(Case("llama", 3, implementation=TE_LOSS, **sharding)
                                                          for sharding in SHARDINGS)], ids=str)  # fmt: skip
def test_a_chunk(case: Case) -> None:
    run = case.run()
    kept(run, case.stage, case.chunk)
    peaks(run, case.stage, case.chunk)


@pytest.mark.parametrize("case", USED_TWICE, ids=str)
def test_a_chunk_without_gradient_accumulation_fusion(case: Case) -> None:
    run = case.run()
    kept(run, case.stage, case.chunk)
    peaks(run, case.stage, case.chunk)


@pytest.mark.parametrize("recompute", [full("uniform", 1), SELECTED], ids=["full", "mlp"])
@pytest.mark.parametrize("tp", [1, 8])
def test_a_chunk_with_an_unfused_activation(tp: int, recompute: RecomputeSpec) -> None:
    """The first pass keeps nothing for backward, but fc1's output is a variable while its halves are activated."""
    case = Case("llama", 1, tp=tp, implementation=replace(TE, bias_activation_fusion=False), recompute=recompute)
    peaks(case.run(), 1, 0)


@pytest.mark.parametrize(("arch", "recipe"), RECIPES)
@pytest.mark.parametrize("recompute", [full("uniform", 1), SELECTED], ids=["full", "mlp"])
def test_a_chunk_in_fp8_makes_one_layout_in_its_first_pass(recompute: RecomputeSpec, arch: str, recipe: str) -> None:
    case = Case("llama", 1, tp=4, implementation=replace(TE, gpu_arch=arch), recompute=recompute)
    peaks(in_fp8(case.run(), recipe), 1, 0)


@pytest.mark.parametrize(("arch", "recipe"), RECIPES)
@pytest.mark.parametrize("mtp", [1, 2])
@pytest.mark.parametrize("model", ["llama", "llama 2k", "moe 2k"])
def test_recomputed_mtp_depths_in_fp8_run_forward_alone(model: str, mtp: int, arch: str, recipe: str) -> None:
    """megatron-core up to 0.17 gives Transformer Engine's checkpoint their inputs by name: nothing is kept for them,
    and their weights have no layout for backward."""
    implementation = replace(TE, gpu_arch=arch)
    case = Case(model, 1, pp=2, mtp=mtp, implementation=implementation, recompute=full("uniform", 1))
    run = in_fp8(case.run(), recipe)
    peaks(run, 1, 0)
    for row in rows(rehearse(run, 1)):
        if row.name in ("fp8 weight copies", "saved for backward, per microbatch"):
            assert row.predicted == pytest.approx(row.found, rel=0.001), row


@pytest.mark.parametrize("how", ["a2a", "p2p", "all_gather"])
@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-2-7b-hf"])
def test_what_attention_exchanges_is_the_peak_where_nothing_else_is_kept(model: str, how: str) -> None:
    """A first stage that recomputes fully: nothing is there in forward beside one layer's attention."""
    spec = resolve_model(model)
    run = RunSpec(
        model=replace(spec, layers=spec.layers[:2]),
        parallel=ParallelSpec(world_size=8, context_parallel_size=4, pipeline_model_parallel_size=2),
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        implementation=replace(TE, cp_comm_type=how),
    )
    peaks(run, 0, 0)


@pytest.mark.parametrize(("arch", "recipe"), [(arch, recipe) for arch, recipe in RECIPES if recipe != "delayed"])
@pytest.mark.parametrize("model", ["llama 2k", "moe 2k"])
def test_layers_at_the_ends_stay_in_bf16(model: str, arch: str, recipe: str) -> None:
    """``first_last_layers_bf16``: the first layer of the first stage, and the last of the last."""
    case = Case(model, 0, implementation=replace(TE_LOSS, gpu_arch=arch))
    run = in_fp8(case.run(), recipe)
    mixed = run.with_fields(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=1)
    for stage in (0, run.parallel.pp - 1):
        kept(mixed, stage, 0)
        peaks(mixed, stage, 0)
        (copies,) = [row for row in rows(rehearse(mixed, stage)) if row.name == "fp8 weight copies"]
        assert copies.predicted == pytest.approx(copies.found, rel=0.001)
