"""What a run asks for that no formula covers, or that megatron-core takes and does nothing with.

Both are listed by name, never dropped in silence: the first under "not modelled", the second among the assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge_memory.releases import CUBLAS_WORKSPACES_FREED, known_releases, nearest_known, release_words
from bridge_memory.spec.layout import Layout
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import ModelSpec
from bridge_memory.spec.run import RunSpec


def gaps(run: RunSpec) -> tuple[str, ...]:
    """One sentence a gap, each beginning with the field's name."""
    return tuple(_gaps(run))


def _gaps(run: RunSpec) -> Iterator[str]:
    impl, precision, optimizer = run.implementation, run.precision, run.optimizer
    if impl.cuda_graph_impl != "none":
        yield f"cuda_graph_impl ({impl.cuda_graph_impl}): the private memory pools of CUDA graphs"
    if impl.delay_wgrad_compute:
        yield "delay_wgrad_compute: inputs and output gradients that wait for the weight gradients"
    if impl.defer_embedding_wgrad_compute:
        yield "defer_embedding_wgrad_compute: output gradients of the logits that wait for the flush"
    if impl.use_transformer_engine_op_fuser:
        yield "use_transformer_engine_op_fuser: what the fused MLP keeps (estimated as the unfused one)"
    if impl.moe_apply_probs_on_input:
        yield "moe_apply_probs_on_input: the scaled copy of the tokens"
    if precision.fp8 and (precision.num_layers_at_start_in_bf16 or precision.num_layers_at_end_in_bf16):
        yield "first_last_layers_bf16: the layers at the ends are counted in fp8 like the rest"
    if optimizer.log_params_norm and optimizer.fused_main_parameters:
        # Megatron-LM training/utils.py: calc_params_l2_norm reads fp32 main parameters where megatron-core has them.
        yield "log_params_norm with use_precision_aware_optimizer: fp32 copies of the parameters in steps that log it"
    if run.peft.freezes:
        yield f"peft ({run.peft.scheme}): activations, which are counted as if every weight trained"
        if not run.peft.dim:
            yield f"peft ({run.peft.scheme}): adapters, their gradients and optimizer state"
    if impl.cpu_offloading_num_layers:
        yield "cpu_offloading_num_layers: the two layers in flight between GPU and host"
    if precision.fp8 and precision.params_dtype == "fp32":
        # TE module/linear.py: _Linear.forward takes fp32 activations (its bias goes to bf16).
        yield f"fp8 ({precision.fp8}) with params_dtype fp32: what stays in fp32 beside the fp8 copies"
    limits = limits_of(run.model)
    if limits.mla and not impl.te:
        # transformer/multi_latent_attention.py: MultiLatentAttention.__init__ hands k_channels to core attention.
        yield (
            "transformer_impl (local) with multi-latent attention: megatron-core builds it with Transformer Engine "
            "only; counted as if the local attention took values of another width than keys"
        )
    tp = run.parallel.tp
    if limits.full_qk_norm and tp > 1:
        # Megatron Bridge 0.3.1 models/olmoe/olmoe_provider.py: OLMoESelfAttention builds norms of all the heads on
        # every rank and feeds them the rank's own heads, which TE's RMSNorm refuses.
        yield (
            f"q and k norms over all heads with tensor_model_parallel_size ({tp}): Megatron Bridge 0.3.1 runs them on "
            "one rank only; counted as divided over the ranks"
        )


def ignored(run: RunSpec, plan: Layout) -> tuple[str, ...]:
    """What the run asks for to no effect, and what is supposed for want of a known rule; one sentence each."""
    return tuple((*_idle_recomputation(run, plan), *_without_effect(run), *_supposed(run)))


def _idle_recomputation(run: RunSpec, plan: Layout) -> Iterator[str]:
    """Source: ``transformer/transformer_layer.py: TransformerLayer.__init__`` and ``transformer/moe/``."""
    r = run.recompute
    if r.granularity == "selective" and r.modules != ("core_attn",):
        wants = idle_modules(run.model, run.implementation.te)
        for name in r.modules:
            if name in wants:
                yield f"recompute_modules ({name}) does nothing without {wants[name]}"
    elif r.granularity == "full" and r.num_layers:
        sizes = [len(chunk.layers) for chunks in plan.stages for chunk in chunks]
        if r.method == "block" and r.num_layers > max(sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) is more than any stage or virtual stage has ({max(sizes)}): "
                "all layers are recomputed"
            )
        elif r.method == "uniform" and not run.model.hybrid and any(size % r.num_layers for size in sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) leaves a last group of fewer layers, which megatron-core up to "
                "0.16 refuses"
            )


def _without_effect(run: RunSpec) -> Iterator[str]:
    """Options that belong to a run and change no byte of it."""
    optimizer, data_parallel, impl = run.optimizer, run.data_parallel, run.implementation
    if data_parallel.overlap_param_gather and not data_parallel.fsdp:
        # distributed/param_and_grad_buffer.py: parameters are gathered where they are kept.
        yield "overlap_param_gather makes no tensor that stays"
    if impl.calculate_per_token_loss:
        yield "calculate_per_token_loss makes no tensor that stays"
    if optimizer.main_grads_dtype != "fp32" and data_parallel.grad_reduce_in_fp32:
        yield (
            f"main_grads_dtype ({optimizer.main_grads_dtype}) makes gradient buffers no smaller: grad_reduce_in_fp32 "
            "keeps them in fp32"
        )
    if impl.use_legacy_models:
        yield "use_legacy_models: the layers of the removed legacy model are counted as megatron-core's local ones"


def idle_modules(model: ModelSpec, te: bool) -> dict[str, str]:
    """Module of selective recomputation that finds nothing in ``model`` -> what it wants, in words."""
    limits = limits_of(model)
    experts = bool(limits.moes)
    wants = {
        "moe": (experts, "a model with experts"),
        "moe_act": (experts, "a model with experts"),
        "shared_experts": (limits.shared_experts, "a model with shared experts"),
        "mlp": (limits.dense, "a model with dense MLP layers"),
        # Transformer Engine's norms before linears are part of them; only those before experts and MLA are modules.
        "layernorm": (experts or limits.mla or not te, "experts, multi-latent attention or transformer_impl local"),
    }
    return {name: want for name, (found, want) in wants.items() if not found}


def _supposed(run: RunSpec) -> Iterator[str]:
    impl = run.implementation
    core, nearest = impl.megatron_core, nearest_known(impl.megatron_core)
    if core != nearest:
        yield (
            f"megatron_core ({release_words(core)}) is not one of the releases whose rules are known, "
            f"{known_releases()}: those of {release_words(nearest)} are taken"
        )
    if impl.torch is not None and CUBLAS_WORKSPACES_FREED(impl):
        yield f"torch ({release_words(impl.torch)}) has a cuBLAS workspace during each product only: none is counted"
    if run.parallel.cp == 1:
        return
    if impl.cp_comm_type == "a2a+p2p":
        yield f"cp_comm_type ({impl.cp_comm_type}) is taken to hold what the ring of p2p holds"
    if impl.cp_comm_type in ("a2a", "all_gather") and limits_of(run.model).mla:
        # TE attention/dot_product_attention/context_parallel.py: attn_forward_func_with_cp.
        yield (
            f"cp_comm_type ({impl.cp_comm_type}) is taken with multi-latent attention, which Transformer Engine 2.11 "
            "refuses and 2.20 does not"
        )
