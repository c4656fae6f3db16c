"""Sentences for an estimate's assumptions: options of the run that have no effect, and what is assumed of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from bridge_memory.releases import (
    CUBLAS_WORKSPACES_FREED,
    EXPERTS_FUSED_BY_OPS,
    LAYER_WISE_LAYOUT,
    OLDEST_NAMED,
    core_of,
    known_releases,
    nearest_known,
    release_words,
)
from bridge_memory.spec.adapters import idle_targets
from bridge_memory.spec.canonical import idle_checkpoint_options
from bridge_memory.spec.checkpoint import DEFAULT_CHECKPOINT_SPEC
from bridge_memory.spec.engine_options import DEFAULT_DEEPSPEED_OPTIONS, DEFAULT_FSDP_OPTIONS
from bridge_memory.spec.errors import show
from bridge_memory.spec.graphs import BEFORE_EXPERTS, waits_for_experts
from bridge_memory.spec.layout import Layout
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import GatedDeltaNetSpec, KimiDeltaSpec, Mamba1Spec, MambaSpec, ModelSpec, ShortConvSpec
from bridge_memory.spec.parts import ImplementationSpec
from bridge_memory.spec.run import RunSpec
from bridge_memory.spec.transformers import family_of
from bridge_memory.spec.unmodelled import NoEffect
from bridge_memory.workspaces.driver import driver_buffers

#: Mixers that run in kernels where packages are installed -> (their name, the packages, what the kernels change).
_MIXERS_WITH_KERNELS: dict[type, tuple[str, str, str]] = {
    MambaSpec: ("Mamba layers", "causal_conv1d and mamba_ssm", "whose kernels save far less"),
    Mamba1Spec: ("Mamba layers", "causal_conv1d and mamba_ssm", "whose kernels save far less"),
    GatedDeltaNetSpec: (
        "gated delta nets", "causal_conv1d and flash-linear-attention", "whose kernels save far less"
    ),
    KimiDeltaSpec: (
        "Kimi delta attention", "causal_conv1d and flash-linear-attention", "whose kernels save far less"
    ),
    ShortConvSpec: ("short convolutions", "causal_conv1d", "whose kernel saves as much"),
}


def ignored(run: RunSpec, plan: Layout) -> tuple[str, ...]:
    """Options without effect, and assumptions where no rule is known; one sentence each."""
    return tuple((*_idle_recomputation(run, plan), *_without_effect(run), *_assumed(run)))


def _idle_recomputation(run: RunSpec, plan: Layout) -> Iterator[str]:
    """Source: ``transformer/transformer_layer.py: TransformerLayer.__init__`` and ``transformer/moe/``."""
    r = run.recompute
    if r.granularity == "selective" and r.modules != ("core_attn",):
        wants = idle_modules(run.model, run.implementation.te)
        for name in r.modules:
            if name in wants:
                yield NoEffect(f"recompute_modules ({name}) does nothing without {wants[name]}")
    elif r.granularity == "full" and r.num_layers:
        sizes = [len(chunk.layers) for chunks in plan.stages for chunk in chunks]
        if r.method == "block" and r.num_layers > max(sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) is more than the layers of any stage or virtual stage "
                f"({max(sizes)}): all layers are recomputed"
            )
        elif r.method == "uniform" and not run.model.hybrid and any(size % r.num_layers for size in sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) leaves a last group of fewer layers, which megatron-core up to "
                "0.16 refuses"
            )


#: Fields of ImplementationSpec that are about more than megatron-core's layers, or are spoken of elsewhere.
_OF_ANY_LAYERS = frozenset(
    ("transformer_impl", "gpu_arch", "torch", "expandable_segments", "cublas_workspace_bytes", "create_attention_mask",
     "calculate_per_token_loss", "use_legacy_models", "cuda_graph_impl", "cpu_offloading_num_layers",
     "min_offloaded_tensor_size", "moe_apply_probs_on_input", "moe_imbalance", "policy_loss", "policy_entropy",
     "policy_chunk_size", "policy_forward_only", "policy_defers_fp32", "policy_rescales")
)  # fmt: skip
_OF_MEGATRON_LAYERS = tuple(f.name for f in fields(ImplementationSpec) if f.name not in _OF_ANY_LAYERS)
_DEFAULT_IMPLEMENTATION = ImplementationSpec()


def _of_megatron_layers(impl: ImplementationSpec) -> Iterator[str]:
    """Options of megatron-core's layers in a run of others."""
    for name in _OF_MEGATRON_LAYERS:
        value = getattr(impl, name)
        if value != getattr(_DEFAULT_IMPLEMENTATION, name):
            words = release_words(value) if name in OLDEST_NAMED else value if isinstance(value, str) else show(value)
            yield NoEffect(
                f"{name} ({words}) does nothing with transformer_impl {impl.transformer_impl}: it is for layers of "
                "megatron-core"
            )


def _without_effect(run: RunSpec) -> Iterator[str]:
    """Options that change no byte of this run."""
    optimizer, data_parallel, impl = run.optimizer, run.data_parallel, run.implementation
    if impl.torch_layers:
        yield from _of_megatron_layers(impl)
    else:
        yield from _idle_offloading(run)
    if data_parallel.overlap_param_gather and not data_parallel.fsdp:
        # distributed/param_and_grad_buffer.py: parameters are gathered where they are kept.
        yield "overlap_param_gather allocates nothing that outlives its operation"
    by_ops = impl.use_transformer_engine_op_fuser and impl.te_grouped_gemm and EXPERTS_FUSED_BY_OPS(impl)
    if by_ops and run.model.has_experts and run.recompute.selects("moe_act"):
        yield NoEffect("recompute_modules (moe_act) does nothing with use_transformer_engine_op_fuser")
    if impl.min_offloaded_tensor_size != ImplementationSpec().min_offloaded_tensor_size and not impl.offload_modules:
        yield NoEffect(
            f"min_offloaded_tensor_size ({impl.min_offloaded_tensor_size}) does nothing without offload_modules"
        )
    if impl.cuda_graph_modules and impl.cuda_graph_impl == "none":
        modules = ", ".join(impl.cuda_graph_modules)
        yield NoEffect(f"cuda_graph_modules ({modules}) does nothing without cuda_graph_impl")
    if impl.delay_wgrad_compute and not impl.te:
        # tensor_parallel/layers.py: backward_dw, which does nothing.
        yield NoEffect("delay_wgrad_compute does nothing with transformer_impl local")
    if impl.calculate_per_token_loss:
        yield "calculate_per_token_loss allocates nothing that outlives its operation"
    if optimizer.main_grads_dtype != "fp32" and data_parallel.grad_reduce_in_fp32:
        yield NoEffect(
            f"main_grads_dtype ({optimizer.main_grads_dtype}) has no effect on gradient buffers: grad_reduce_in_fp32 "
            "keeps them in fp32"
        )
    engine, deepspeed = data_parallel.engine, run.deepspeed
    if deepspeed.allgather_bucket_size != DEFAULT_DEEPSPEED_OPTIONS.allgather_bucket_size:
        # deepspeed runtime/utils.py: all_gather_dp_groups, where torch has all_gather_into_tensor.
        yield NoEffect("allgather_bucket_size has no effect: parameters are gathered in place, in one piece")
    if engine == "zero3":
        for name in ("overlap_comm", "round_robin_gradients"):
            if getattr(deepspeed, name):
                yield f"{name} allocates nothing that outlives its operation with engine zero3"
    if engine == "fsdp2" and run.fsdp.backward_prefetch != DEFAULT_FSDP_OPTIONS.backward_prefetch:
        yield NoEffect("backward_prefetch does nothing with FSDP2: fully_shard always prefetches the previous layer")
    if impl.torch_layers and not impl.own_layers:
        has = family_of(run.model.model_type, run.transformers).liger
        for name in run.transformers.liger_kernel:
            if name not in has:
                yield NoEffect(
                    f"liger_kernel ({name}) does nothing: Liger has none for model_type {run.model.model_type}"
                )
    if run.peft.trains_adapters:
        for target in idle_targets(
            run.peft, run.model, limits_of(run.model), torch_layers=impl.torch_layers
        ):
            yield NoEffect(f"peft.target_modules ({target}) names no linear of this model")
    for name, needed in idle_checkpoint_options(run).items():
        if getattr(run.checkpoint, name) != getattr(DEFAULT_CHECKPOINT_SPEC, name):
            yield NoEffect(f"{name} does nothing without {needed}")
    if impl.use_legacy_models:
        yield "use_legacy_models: the layers of the removed legacy model are counted as megatron-core's local ones"


def idle_modules(model: ModelSpec, te: bool) -> dict[str, str]:
    """Modules of selective recomputation that ``model`` does not have -> what they need, in words."""
    limits = limits_of(model)
    experts = bool(limits.moes)
    wants = {
        "moe": (experts, "a model with experts"),
        "moe_act": (experts, "a model with experts"),
        "shared_experts": (limits.shared_experts, "a model with shared experts"),
        "mlp": (limits.dense, "a model with dense MLP layers"),
        "mhc": (model.residual_streams > 1, "hyper-connections"),
        # Transformer Engine's norms before linears are part of them; only those before experts and MLA are modules.
        "layernorm": (experts or limits.mla or not te, "experts, multi-latent attention or transformer_impl local"),
    }
    return {name: want for name, (found, want) in wants.items() if not found}


def _idle_offloading(run: RunSpec) -> Iterator[str]:
    """Source: ``transformer_layer.py: TransformerLayer._set_offload_modules``, ``moe/experts.py``."""
    limits, te = limits_of(run.model), run.implementation.te
    experts = bool(limits.moes)
    wants = {
        "expert_fc1": (experts, "a model with experts"),
        "moe_act": (experts, "a model with experts"),
        "attn_norm": (limits.mla or not te, "multi-latent attention or transformer_impl local"),
        "mlp_norm": (experts or not te, "experts or transformer_impl local"),
    }
    for name in run.implementation.offload_modules:
        found, want = wants.get(name, (True, ""))
        if not found:
            yield NoEffect(f"offload_modules ({name}) does nothing without {want}")


def _assumed(run: RunSpec) -> Iterator[str]:
    impl = run.implementation
    if impl.torch_layers:
        yield from _assumed_of_transformers(run)
    for found in driver_buffers(run):
        with_what = f", {found.supposed}" if found.supposed else ""
        yield (
            f"{found.of} ({found.nbytes / (1 << 30):.2f} GiB on every rank{with_what}) are outside of "
            "torch's allocator: in the margin of each GPU, not in the peak"
        )
    if waits_for_experts(run):
        yield (
            f"cuda_graph_impl ({impl.cuda_graph_impl}) of whole layers cannot capture dropless experts, whose tokens "
            f"the host counts: set cuda_graph_modules to {','.join(BEFORE_EXPERTS)}"
        )
    if run.batch.packed_sequences:
        yield "packed sequences fill every micro batch to micro_batch_size x seq_length tokens"
    core, nearest = core_of(impl), nearest_known(core_of(impl))
    if core != nearest:
        yield (
            f"megatron_core ({release_words(core)}) is outside of the releases with known rules, "
            f"{known_releases()}: the rules of {release_words(nearest)} apply"
        )
    if impl.torch is not None and CUBLAS_WORKSPACES_FREED(impl):
        yield (
            f"torch ({release_words(impl.torch)}) allocates cuBLAS workspaces only during each matrix product: none is "
            "counted"
        )
    if run.optimizer.use_layer_wise_distributed_optimizer and LAYER_WISE_LAYOUT(impl):
        yield (
            "use_layer_wise_distributed_optimizer is assumed to distribute whole parameters, as without Megatron-LM's "
            "use_layer_wise_param_layout, which is on by default there and shards embeddings, norms and biases evenly"
        )
    if run.parallel.cp == 1:
        return
    if impl.cp_comm_type == "a2a+p2p":
        yield f"cp_comm_type ({impl.cp_comm_type}) is assumed to allocate the same as p2p"
    if impl.cp_comm_type in ("a2a", "all_gather") and limits_of(run.model).mla:
        # TE attention/dot_product_attention/context_parallel.py: attn_forward_func_with_cp.
        yield (
            f"cp_comm_type ({impl.cp_comm_type}) with multi-latent attention is counted, although Transformer Engine "
            "2.11 refuses it (2.20 does not)"
        )


def _assumed_of_transformers(run: RunSpec) -> Iterator[str]:
    spec = run.transformers
    family = family_of(run.model.model_type, spec)
    if run.model.model_type == "kimi_k2":
        yield "kimi_k2's own class is remote code: counted as transformers' deepseek_v3, which has the same shapes"
    if spec.attn_implementation == "sdpa" and "sdpa" not in family.attention:
        yield f"model_type {run.model.model_type} has no sdpa: counted with eager attention (--attn-implementation)"
    elif spec.attn_implementation == "sdpa" and spec.sdpa_kernel is None:
        yield (
            "scaled_dot_product_attention runs FlashAttention without a mask, else the memory-efficient kernel "
            "(--sdpa-kernel)"
        )
    if spec.attn_implementation == "flash_attention_2" and family.eager == "sinks":
        yield (
            "flash_attention_2 is counted as FlashAttention 3 kernels with sinks, which save the same; transformers 5 "
            "uses these instead, 4 ignores the sinks unless attn_implementation is "
            "\"kernels-community/vllm-flash-attn3\""
        )
    kinds = {type(layer.mixer) for layer in run.model.layers}
    for kind, (name, packages, change) in _MIXERS_WITH_KERNELS.items():
        if kind in kinds:
            runs = (
                f"run in the kernels of {packages}" if spec.mixer_kernels else
                f"run in torch operations, as without {packages}, {change} (--mixer-kernels)"
            )
            yield f"{name} {runs}"
    if spec.attention_mask == "ones":
        yield "the attention mask of batches is all ones, so no mask of scores is allocated (--attention-mask)"
