"""What no formula covers, and what a run asks for to no effect, is said by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory.estimation import Estimate, estimate, peaks
from bridge_memory.inventory.layer import layer_block
from bridge_memory.readers import resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.spec.graphs import static_masks
from bridge_memory.spec.unmodelled import Unmodelled
from bridge_memory.tapes.context import context_of
from bridge_memory.verdict import Verdict, fits

DENSE, EXPERTS, SHARED = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite"


def short(name: str) -> ModelSpec:
    model = resolve_model(name)
    return replace(model, layers=model.layers[:4])


def recomputed(name: str, *modules: str, **implementation: object) -> Estimate:
    return estimate(
        RunSpec(
            model=short(name), recompute=RecomputeSpec(granularity="selective", modules=modules),
            implementation=ImplementationSpec(**implementation),  # type: ignore[arg-type]
        )
    )  # fmt: skip


def said(lines: tuple[str, ...], *words: str) -> bool:
    return any(all(word in line for word in words) for line in lines)


@pytest.mark.parametrize(
    ("model", "module", "wants"),
    [
        (DENSE, "moe", "a model with experts"),
        (DENSE, "shared_experts", "a model with shared experts"),
        (EXPERTS, "shared_experts", "a model with shared experts"),
        (EXPERTS, "mlp", "a model with dense MLP layers"),
        (DENSE, "layernorm", "transformer_impl local"),
        (DENSE, "mlp", ""), (EXPERTS, "moe", ""), (EXPERTS, "moe_act", ""), (EXPERTS, "layernorm", ""),
        (SHARED, "shared_experts", ""), (SHARED, "mlp", ""), (SHARED, "mla_up_proj", ""), (SHARED, "layernorm", ""),
    ],
)  # fmt: skip
def test_a_module_that_is_not_there_is_recomputed_to_no_effect(model: str, module: str, wants: str) -> None:
    """megatron-core takes such a name and does nothing; what it does find changes the estimate."""
    with_it, without = recomputed(model, module), recomputed(model)
    idle = said(with_it.assumptions, f"recompute_modules ({module}) does nothing", wants)
    assert idle == bool(wants)
    assert idle == (with_it.stages == without.stages)


def test_the_norms_of_local_layers_are_modules() -> None:
    assert not said(recomputed(DENSE, "layernorm", transformer_impl="local").assumptions, "does nothing")


def test_block_recomputation_of_more_layers_than_there_are_recomputes_them_all() -> None:
    four, nine = (
        estimate(
            RunSpec(model=short(DENSE), recompute=RecomputeSpec(granularity="full", method="block", num_layers=n))
        )
        for n in (4, 9)
    )
    assert four.stages == nine.stages
    assert said(nine.assumptions, "recompute_num_layers (9)", "all layers are recomputed")
    assert not said(four.assumptions, "recompute_num_layers")


@pytest.mark.parametrize(
    ("core", "taken"),
    [((0, 8), "0.9"), ((0, 9), ""), ((0, 16), ""), ((0, 20), ""), ((0, 21), "0.20"), ((9, 9), "0.20")],
)
def test_a_release_whose_rules_are_not_known_is_said(core: tuple[int, int], taken: str) -> None:
    found = estimate(RunSpec(model=short(DENSE), implementation=ImplementationSpec(megatron_core=core)))
    line = f"megatron_core ({core[0]}.{core[1]}) is outside of the releases with known rules, 0.9 to 0.20: the rules"
    assert said(found.assumptions, line, f"of {taken} apply") == bool(taken)


def test_fp8_beside_fp32_weights_is_not_modelled() -> None:
    fp32, bf16 = (
        estimate(RunSpec(model=short(DENSE), precision=PrecisionSpec(params_dtype=dtype, fp8="hybrid")))
        for dtype in ("fp32", "bf16")
    )
    assert said(fp32.not_modelled, "fp8 (hybrid) with params_dtype fp32")
    assert not bf16.not_modelled


@pytest.mark.parametrize(("core", "listed"), [((0, 17), False), ((0, 18), True), ((0, 20), True)])
def test_the_layout_of_a_layer_wise_optimizer_is_taken_for_the_older_one(core: tuple[int, int], listed: bool) -> None:
    """Megatron-LM computes it from 0.18 on, unless told otherwise."""
    optimizer = OptimizerSpec(optimizer="muon", use_layer_wise_distributed_optimizer=True)
    run = RunSpec(
        model=short(DENSE), optimizer=optimizer,
        data_parallel=DataParallelSpec(use_distributed_optimizer=False),
        implementation=ImplementationSpec(megatron_core=core),
    )  # fmt: skip
    assert said(estimate(run).assumptions, "use_layer_wise_param_layout") is listed


def test_multi_latent_attention_without_transformer_engine_is_not_megatron_cores() -> None:
    local = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)
    assert said(estimate(RunSpec(model=short(SHARED), implementation=local)).not_modelled, "transformer_impl (local)")
    assert not estimate(RunSpec(model=short(SHARED))).not_modelled
    assert not estimate(RunSpec(model=short(DENSE), implementation=local)).not_modelled


@pytest.mark.slow
def test_multi_latent_attention_of_transformers_is_not_taken_for_megatrons_local_one() -> None:
    run = RunSpec(model="deepseek-ai/DeepSeek-V3", parallel=ParallelSpec(world_size=8)).with_fields(engine="zero3")
    assert run.implementation.torch_layers and not estimate(run).not_modelled


def test_norms_over_all_heads_are_bridges_on_one_tensor_parallel_rank_only() -> None:
    """Megatron Bridge 0.3.1, OLMoESelfAttention: norms of hidden_size on every rank, over its share of heads."""
    one, two = (
        estimate(
            RunSpec(
                model=short("allenai/OLMoE-1B-7B-0924"),
                parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=tp),
            )
        )
        for tp in (1, 2)
    )
    assert said(two.not_modelled, "norms over all heads", "tensor_model_parallel_size (2)")
    assert not one.not_modelled


@pytest.mark.parametrize(
    ("model", "comm", "words"),
    [
        (DENSE, "p2p", ""), (DENSE, "a2a", ""), (SHARED, "p2p", ""),
        (DENSE, "all_gather", ""), (DENSE, "a2a+p2p", "is assumed to allocate the same as p2p"),
        (SHARED, "a2a", "Transformer Engine 2.11 refuses"),
        (SHARED, "all_gather", "Transformer Engine 2.11 refuses"),
    ],
)  # fmt: skip
def test_a_way_of_context_parallelism_that_is_counted_as_another_is_said(model: str, comm: str, words: str) -> None:
    found = estimate(
        RunSpec(
            model=short(model), parallel=ParallelSpec(world_size=2, context_parallel_size=2),
            implementation=ImplementationSpec(cp_comm_type=comm),
        )
    )  # fmt: skip
    assert said(found.assumptions, f"cp_comm_type ({comm})", words) == bool(words)


def test_logged_parameter_norms_cost_memory_where_megatron_core_has_no_fp32_parameters() -> None:
    """Megatron-LM training/utils.py: calc_params_l2_norm reads fp32 main parameters, or makes copies. A fused
    precision-aware optimizer keeps its own; one that megatron-core makes fp32 main parameters for does not."""

    def listed(**optimizer: object) -> bool:
        run = RunSpec(model=short(DENSE), optimizer=OptimizerSpec(**optimizer))  # type: ignore[arg-type]
        return said(estimate(run).not_modelled, "log_params_norm", "use_precision_aware_optimizer")

    assert listed(log_params_norm=True, use_precision_aware_optimizer=True)
    assert not listed(log_params_norm=True)
    assert not listed(use_precision_aware_optimizer=True)
    assert not listed(log_params_norm=True, use_precision_aware_optimizer=True, fp8_recipe="tensorwise")


@pytest.mark.parametrize(("backend", "model"), [("deepep", EXPERTS), ("hybridep", EXPERTS), ("deepep", DENSE)])
def test_buffers_that_a_flex_dispatcher_allocates_itself_are_said(backend: str, model: str) -> None:
    run = RunSpec(
        model=short(model),
        parallel=ParallelSpec(world_size=2, expert_model_parallel_size=2 if model == EXPERTS else 1),
        implementation=ImplementationSpec(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend),
    )
    said = [line for line in estimate(run).assumptions if "are outside of torch's allocator" in line]
    assert bool(said) == (model == EXPERTS)
    if said:
        assert said[0].casefold().startswith(backend)


def gap_of(answer: Estimate, field: str) -> Unmodelled:
    (found,) = (feature for feature in answer.unmodelled if feature.startswith(field))
    return found


def of_graphs(**fields: object) -> Estimate:
    parallel = ParallelSpec(world_size=2, pipeline_model_parallel_size=2)
    run = RunSpec(model=short(DENSE), parallel=parallel, implementation=ImplementationSpec(cuda_graph_impl="local"))
    return estimate(run.with_fields(**fields))


def test_graphs_add_at_most_what_the_passes_need() -> None:
    """A pool of their own for the layers: at most the peak less what is there between steps, on the rank that needs
    most of it; where nothing is left behind, no more than the layers do not share with what runs beside them."""
    answer = of_graphs()
    found = gap_of(answer, "cuda_graph_impl")
    static = [s.static_bytes - sum(c.bytes for c in s.carried_over) for s in answer.stages]
    assert found.of_job and found.least is not None and found.most is not None
    assert 0 <= found.least < found.most < max(s.peak_bytes - n for s, n in zip(answer.stages, static, strict=True))
    assert answer.peak_bounds.most == answer.peak_stage.peak_bytes + found.most
    expandable = gap_of(of_graphs(expandable_segments=True), "cuda_graph_impl")
    assert expandable.most is not None
    assert found.least == expandable.least <= expandable.most < found.most


def test_graphs_that_add_everything_again_have_a_bound() -> None:
    """Where layers are not divided: nothing to all that the passes need."""
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    answer = of_graphs(**again, megatron_core=(0, 15))
    found = gap_of(answer, "cuda_graph_impl")
    static = [s.static_bytes - sum(c.bytes for c in s.carried_over) for s in answer.stages]
    assert found.least == 0
    assert found.most == max(s.peak_bytes - n for s, n in zip(answer.stages, static, strict=True))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, True), ({"cuda_graph_modules": ("attn", "moe_router")}, False), ({"cuda_graph_impl": "none"}, False),
        ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, False),
    ],
)  # fmt: skip
def test_whole_layers_with_dropless_experts_are_not_captured(fields: dict[str, Any], said: bool) -> None:
    """Their sizes are on the device, and the host waits for them in ``_maybe_dtoh_and_synchronize``."""
    graphs = {"cuda_graph_impl": "transformer_engine", "world_size": 8, "expert_model_parallel_size": 8, **fields}
    answer = estimate(RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(**graphs))
    assert any("cannot capture dropless experts" in words for words in answer.assumptions) is said


def test_graphs_alone_leave_no_verdict_unknown() -> None:
    """On a card with room for both ends, and on one with room for neither."""
    answer = of_graphs(micro_batch_size=8, global_batch_size=64)
    assert [feature for feature in answer.unmodelled if not feature.of_job] == []
    large, small = fits(answer, ["B300", "A10"])
    assert large.verdict in (Verdict.FITS, Verdict.TIGHT)
    assert small.verdict is Verdict.DOES_NOT_FIT


def deferring(limit: int, **fields: object) -> RunSpec:
    """Two stages of TP 2, 8 microbatches of 2048 tokens."""
    run = RunSpec(
        model=short(DENSE), batch=BatchSpec(seq_length=2048, global_batch_size=8),
        parallel=ParallelSpec(
            world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True
        ),
        implementation=ImplementationSpec(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit),
    )  # fmt: skip
    return run.with_fields(**fields)


@pytest.mark.parametrize(("limit", "waiting"), [(0, 7), (5, 5), (22, 8)])
def test_deferred_weight_gradients_of_the_logits_are_counted(limit: int, waiting: int) -> None:
    """A microbatch's hidden states, 2048 x 2048 / 2, and gradients of its 2048 x 128,256 / 2 logits, in bf16: of seven
    when the last runs, of five at most, of all eight. On the last stage alone; two buffers more gather hidden states.
    """
    one = 2048 * (2048 // 2 + 128_256 // 2) * 2
    run = deferring(limit)
    answer = estimate(run)
    assert not [feature for feature in answer.unmodelled if "defer_embedding" in feature]
    first, last = answer.stages
    found = [sum(c.bytes for c in stage.components if "deferred output-layer weight gradients" in c.name)
             for stage in (first, last)]
    assert found == [0, waiting * one]
    assert sum(c.bytes for c in last.components) == last.peak_bytes
    plain = estimate(run.with_fields(defer_embedding_wgrad_compute=False)).stages
    assert first.peak_bytes == plain[0].peak_bytes
    gathered = [sum(c.bytes for c in stage.components if c.name == "global memory buffer (mpu)")
                for stage in (last, plain[1])]
    assert gathered[0] - gathered[1] == 2 * 2048 * 2048 * 2
    assert [p.peak_bytes for p in peaks(run)] == [first.peak_bytes, last.peak_bytes]


def test_what_waits_of_the_last_microbatch_is_there_while_its_layers_run_backward() -> None:
    """One microbatch: nothing waits of earlier ones, but its own does."""
    run = deferring(0, global_batch_size=1)
    more = {}
    for deferred in (True, False):
        stage = estimate(run.with_fields(defer_embedding_wgrad_compute=deferred)).stages[1]
        more[deferred] = dict(stage.phases)["backward"]
    assert more[True] > more[False]


def test_delayed_weight_gradients_are_counted_and_not_listed() -> None:
    """With fc1's gathered input, both gradients and fc2's input of the experts waiting, a layer's backward is higher;
    the local implementation's linears delay nothing, and that is said."""
    model = resolve_model(EXPERTS)
    run = RunSpec(
        model=replace(model, layers=model.layers[:2]),
        parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8),
        implementation=ImplementationSpec(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True),
    )
    assert not [feature for feature in estimate(run).unmodelled if "delay_wgrad" in feature]
    local = run.with_fields(transformer_impl="local", moe_permute_fusion=False)
    assert any("delay_wgrad_compute does nothing" in line for line in estimate(local).assumptions)

    def backward(run: RunSpec) -> int:
        return layer_block(run.model.layers[0], context_of(run)).cost.backward_peak

    plain = run.with_fields(delay_wgrad_compute=False)
    assert backward(run) > backward(plain)
    assert backward(local) == backward(local.with_fields(delay_wgrad_compute=False))


def test_layers_in_flight_to_the_host_are_two() -> None:
    """The bound is twice what the backward pass of one layer needs, however many are offloaded."""
    run = RunSpec(model=short(DENSE), batch=BatchSpec(seq_length=2048), parallel=ParallelSpec(world_size=1))

    def bound(layers: int) -> int | None:
        moved = replace(run, implementation=ImplementationSpec(cpu_offloading_num_layers=layers))
        return gap_of(estimate(moved), "cpu_offloading_num_layers").most

    saved = layer_block(run.model.layers[0], context_of(run)).cost.retained
    found = bound(1)
    assert found is not None
    assert found == bound(2)
    assert 2 * saved <= found <= 4 * saved


def graphed(model: ModelSpec, *modules: str, **fields: object) -> RunSpec:
    run = RunSpec(model=model, batch=BatchSpec(seq_length=4096, micro_batch_size=2, global_batch_size=32))
    impl = ImplementationSpec(cuda_graph_impl="transformer_engine", cuda_graph_modules=modules)
    return replace(run, implementation=impl).with_fields(**fields)


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        # Without stages one microbatch is captured; each of 16 layers has its mask.
        ({"world_size": 1}, 16),
        # The last stage has one microbatch in flight and 4 layers, the first four.
        ({"world_size": 4, "pipeline_model_parallel_size": 4}, 4),
        ({"world_size": 2, "context_parallel_size": 2}, 16 / 2),
        # Two chunks of 4 layers: 2 microbatches have been through the first, one through the second.
        (
            {"world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            2 * 4 + 4,
        ),
    ],
)
def test_graphs_of_transformer_engine_keep_a_mask_for_every_layer_and_microbatch(
    fields: dict[str, object], least: float
) -> None:
    """[2, 1, 4096, 4096] in bool each: ``TransformerLayer.get_layer_static_inputs``."""
    run = graphed(resolve_model(DENSE), **fields)
    assert static_masks(run).least == least * 2 * 4096 * 4096
    found = gap_of(estimate(run), "cuda_graph_impl")
    assert found.least is not None and found.most is not None
    assert least * 2 * 4096 * 4096 <= found.least <= found.most


@pytest.mark.parametrize(("rank", "masks"), [(0, 4), (3, 1)])
def test_the_first_stage_has_most_masks(rank: int, masks: int) -> None:
    """As many microbatches as there are stages behind it, itself among them."""
    fields = {"world_size": 4, "pipeline_model_parallel_size": 4}
    found = static_masks(graphed(resolve_model(DENSE), **fields))
    assert (found.most, found.least)[rank == 3] == masks * 4 * 2 * 4096 * 4096


@pytest.mark.parametrize(
    ("run", "masks"),
    [
        (graphed(resolve_model(DENSE), "attn"), 16), (graphed(resolve_model(DENSE), "mlp"), 0),
        (graphed(resolve_model(DENSE), cuda_graph_impl="local"), 0),
        # Of a hybrid the layers of attention alone.
        (graphed(resolve_model("nvidia/Nemotron-H-56B-Base-8K")), 10),
    ],
)  # fmt: skip
def test_masks_are_those_of_graphed_attention(run: RunSpec, masks: int) -> None:
    found = static_masks(run)
    assert found.least == found.most == masks * 2 * 4096 * 4096
