"""Options of a run that do nothing, and what is assumed of it: sentences for its assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_memory.releases import (
    CUBLAS_WORKSPACES_FREED,
    EXPERTS_FUSED_BY_OPS,
    LAYER_WISE_LAYOUT,
    known_releases,
    nearest_known,
    release_words,
)
from bridge_memory.spec.adapters import idle_targets
from bridge_memory.spec.engine_options import DEFAULT_DEEPSPEED_OPTIONS, DEFAULT_FSDP_OPTIONS
from bridge_memory.spec.layout import Layout
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import GatedDeltaNetSpec, ModelSpec
from bridge_memory.spec.parts import ImplementationSpec
from bridge_memory.spec.run import RunSpec
from bridge_memory.spec.transformers import family_of
from bridge_memory.workspaces.driver import driver_buffers


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
    by_ops = impl.use_transformer_engine_op_fuser and impl.te_grouped_gemm and EXPERTS_FUSED_BY_OPS(impl)
    if by_ops and run.model.has_experts and run.recompute.selects("moe_act"):
        yield "recompute_modules (moe_act) does nothing with use_transformer_engine_op_fuser"
    if impl.min_offloaded_tensor_size != ImplementationSpec().min_offloaded_tensor_size and not impl.offload_modules:
        yield f"min_offloaded_tensor_size ({impl.min_offloaded_tensor_size}) does nothing without offload_modules"
    if impl.delay_wgrad_compute and not impl.te:
        # tensor_parallel/layers.py: backward_dw, which does nothing.
        yield "delay_wgrad_compute delays nothing with transformer_impl local"
    if impl.calculate_per_token_loss:
        yield "calculate_per_token_loss makes no tensor that stays"
    if optimizer.main_grads_dtype != "fp32" and data_parallel.grad_reduce_in_fp32:
        yield (
            f"main_grads_dtype ({optimizer.main_grads_dtype}) makes gradient buffers no smaller: grad_reduce_in_fp32 "
            "keeps them in fp32"
        )
    engine, deepspeed = data_parallel.engine, run.deepspeed
    if deepspeed.allgather_bucket_size != DEFAULT_DEEPSPEED_OPTIONS.allgather_bucket_size:
        # deepspeed runtime/utils.py: all_gather_dp_groups, where torch has all_gather_into_tensor.
        yield "allgather_bucket_size makes no tensor: parameters are gathered in place, in one piece"
    if engine == "zero3":
        for name in ("overlap_comm", "round_robin_gradients"):
            if getattr(deepspeed, name):
                yield f"{name} makes no tensor that stays with engine zero3"
    if engine == "fsdp2" and run.fsdp.backward_prefetch != DEFAULT_FSDP_OPTIONS.backward_prefetch:
        yield "backward_prefetch is FSDP1's: fully_shard always gathers the layer before"
    if impl.torch_layers and not impl.own_layers:
        has = family_of(run.model.model_type, run.transformers).liger
        for name in run.transformers.liger_kernel:
            if name not in has:
                yield f"liger_kernel ({name}): Liger has none for model_type {run.model.model_type}"
    if run.peft.trains_adapters:
        for target in idle_targets(
            run.peft, run.model, limits_of(run.model), torch_layers=impl.torch_layers
        ):
            yield f"peft.target_modules ({target}) names no linear of this model"
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
    if impl.torch_layers:
        yield from _supposed_of_transformers(run)
    for found in driver_buffers(run):
        with_what = f", {found.supposed}" if found.supposed else ""
        yield (
            f"{found.of} ({found.nbytes / (1 << 30):.2f} GiB on every rank{with_what}) lie outside of "
            "torch's allocator: they are in the margin of each GPU and in no peak"
        )
    if run.batch.packed_sequences:
        yield "packed sequences fill every micro batch: micro_batch_size x seq_length tokens"
    core, nearest = impl.megatron_core, nearest_known(impl.megatron_core)
    if core != nearest:
        yield (
            f"megatron_core ({release_words(core)}) is not one of the releases whose rules are known, "
            f"{known_releases()}: those of {release_words(nearest)} are taken"
        )
    if impl.torch is not None and CUBLAS_WORKSPACES_FREED(impl):
        yield f"torch ({release_words(impl.torch)}) has a cuBLAS workspace during each product only: none is counted"
    if run.optimizer.use_layer_wise_distributed_optimizer and LAYER_WISE_LAYOUT(impl):
        yield (
            "use_layer_wise_distributed_optimizer is taken to deal out whole parameters, as without Megatron-LM's "
            "use_layer_wise_param_layout, which is on by default there and divides embeddings, norms and biases evenly"
        )
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


def _supposed_of_transformers(run: RunSpec) -> Iterator[str]:
    spec = run.transformers
    family = family_of(run.model.model_type, spec)
    if run.model.model_type == "kimi_k2":
        yield "kimi_k2's own class is remote code: counted as transformers' deepseek_v3, whose shapes it has"
    if spec.attn_implementation == "sdpa" and "sdpa" not in family.attention:
        yield f"model_type {run.model.model_type} has no sdpa: eager attention is counted (--attn-implementation)"
    elif spec.attn_implementation == "sdpa" and spec.sdpa_kernel is None:
        yield (
            "scaled_dot_product_attention runs FlashAttention where it is handed no mask, else the memory-efficient "
            "kernel (--sdpa-kernel)"
        )
    if spec.attn_implementation == "flash_attention_2" and family.eager == "sinks":
        yield (
            "flash_attention_2 is counted as the kernels of FlashAttention 3 that take sinks, which keep the same; "
            "transformers 5 takes these in its place, 4 runs without the sinks unless "
            "attn_implementation=\"kernels-community/vllm-flash-attn3\" is asked for"
        )
    if run.model.hybrid or any(isinstance(layer.mixer, GatedDeltaNetSpec) for layer in run.model.layers):
        packages = "mamba_ssm" if run.model.hybrid else "flash-linear-attention"
        runs = (
            f"run in the kernels of causal_conv1d and {packages}" if spec.mixer_kernels else
            f"run in torch's operations, as without causal_conv1d and {packages}, whose kernels keep far less "
            "(--mixer-kernels)"
        )
        yield f"{'Mamba layers' if run.model.hybrid else 'gated delta nets'} {runs}"
    if spec.attention_mask == "ones":
        yield "batches come with an attention mask of ones, of which no mask of scores is made (--attention-mask)"
