"""The canonical form of a RunSpec: fields without effect on the run are at their defaults.

A dense model has no token dispatcher; an unset size equals its default; two layout strings can be equivalent. Readers
keep what their source says. Comparisons and cache keys use the canonical form.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

from bridge_memory.releases import ADOPTED_BESIDE_CORE
from bridge_memory.spec.checkpoint import CheckpointSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.layout_string import parse_layout_string
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from bridge_memory.spec.parts import (
    HYBRIDEP_DOMAIN,
    RECOMPUTE_MODULES,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
)
from bridge_memory.spec.run import GROUPS, RunSpec
from bridge_memory.spec.transformers import TransformersSpec


def canonical(run: RunSpec) -> RunSpec:
    """``run`` without names and assumptions, with every field that has no effect at its default.

    Its estimate equals that of ``run`` byte for byte. Runs with equal canonical forms are the same run.
    """
    return RunSpec(
        model=_model(run),
        parallel=_parallel(run),
        batch=replace(run.batch, global_batch_size=run.sequences_per_step),
        precision=_precision(run),
        optimizer=_optimizer(run),
        data_parallel=_data_parallel(run),
        peft=run.peft if run.peft.freezes else PeftSpec(),
        recompute=_recompute(run.recompute),
        implementation=_implementation(run),
        ddp=run.ddp,
        fsdp=run.fsdp,
        deepspeed=run.deepspeed,
        transformers=_transformers(run),
        checkpoint=_checkpoint(run),
    )


_DEFAULTS = {cls: {f.name: f.default for f in fields(cls)} for cls in GROUPS.values()}


_Group = TypeVar(
    "_Group", PrecisionSpec, OptimizerSpec, DataParallelSpec, RecomputeSpec, ImplementationSpec, CheckpointSpec
)


def _reset(group: _Group, *names: str) -> _Group:
    """``group`` with these fields at their defaults."""
    default = _DEFAULTS[type(group)]
    changes: dict[str, Any] = {name: default[name] for name in names}
    return replace(group, **changes)


def _model(run: RunSpec) -> ModelSpec:
    model = run.model
    rotary = model.position_embedding_type == "rope"
    kinds = {kind: _layer(kind, rotary) for kind in dict.fromkeys(model.layers)}
    return replace(
        model,
        name="",
        # The class that transformers runs.
        model_type=model.model_type if run.implementation.torch_layers else "",
        # Rows of the embedding, already padded.
        vocab_size=model.padded_vocab_size(run.parallel.tp),
        make_vocab_size_divisible_by=0,
        layers=tuple(kinds[kind] for kind in model.layers),
        mtp_layer=_layer(model.mtp_layer, rotary) if model.mtp_num_layers and model.mtp_layer else None,
        mtp_use_repeated_layer=model.mtp_use_repeated_layer and model.mtp_num_layers > 1,
        # Only a learned position embedding has a row per position.
        max_position_embeddings=(
            model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
        ),
        rotary_dim=model.rotary_dim if rotary else 0,
        yarn=False,  # apply_rope_fusion says it
        assumptions=(),
        not_modelled=(),
    )


def _layer(layer: LayerSpec, rotary: bool) -> LayerSpec:
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, rotary=mixer.rotary and rotary)
    if isinstance(ffn, MoESpec):
        ffn = replace(ffn, expert_bias_in_published_count=False)
        if (ffn.router_num_groups or 1) <= (ffn.router_group_topk or 1):
            # Every group is selected: no limit.
            ffn = replace(ffn, router_num_groups=None, router_group_topk=None)
    return replace(layer, mixer=mixer, ffn=ffn)


def _parallel(run: RunSpec) -> ParallelSpec:
    p = run.parallel
    virtual = layout(run.model, p).virtual_pipeline_model_parallel_size
    text = p.pipeline_model_parallel_layout
    return replace(
        p,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        expert_tensor_parallel_size=p.etp if run.model.has_experts else None,
        sequence_parallel=p.sp and p.tp > 1,
        pipeline_model_parallel_layout=None if text is None else "|".join(parse_layout_string(text)),
        microbatch_group_size_per_vp_stage=(p.microbatch_group_size_per_vp_stage or p.pp) if virtual > 1 else None,
    )


def _transformers(run: RunSpec) -> TransformersSpec:
    spec = run.transformers
    if run.implementation.torchtitan and spec.compile_loss is None:
        spec = replace(spec, compile_loss=run.layers_compiled)
    return spec


def _precision(run: RunSpec) -> PrecisionSpec:
    p = run.precision
    if p.fp8 is None:
        p = _reset(p, "fp8_recipe", "fp8_param", "fp8_dot_product_attention")
    if not p.quantizes:
        p = _reset(p, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    i = run.implementation
    if i.attention_kernel != "unfused" or p.params_dtype == "fp32" or i.apply_query_key_layer_scaling:
        p = _reset(p, "attention_softmax_in_fp32")
    return p


def _optimizer(run: RunSpec) -> OptimizerSpec:
    o = run.optimizer
    if run.data_parallel.of_megatron:
        # Without it the communicator of the gradients' norm is not made.
        o = replace(_reset(o, "torch_implementation"), clip_grad=float(o.clip_grad > 0))
    if o.optimizer != "sgd":
        o = _reset(o, "sgd_momentum")
    if o.optimizer not in ("adam", "adamw", "sgd"):
        o = _reset(o, "torch_implementation")
    if not o.optimizer_cpu_offload:
        o = _reset(o, "optimizer_offload_fraction")
    if not o.use_precision_aware_optimizer:
        o = _reset(o, "store_param_remainders", "fp8_recipe")
    elif o.fp8_recipe == "delayed":  # as None: ``OptimizerSpec.fused_main_parameters``
        o = _reset(o, "fp8_recipe")
    return o


def _data_parallel(run: RunSpec) -> DataParallelSpec:
    d = run.data_parallel
    if not d.overlap_grad_reduce:
        d = _reset(d, "bucket_size")
    if run.precision.params_dtype == "fp32":
        d = _reset(d, "grad_reduce_in_fp32")
    if d.grad_comm_dtype == ("fp32" if d.grad_reduce_in_fp32 else run.precision.params_dtype):
        d = _reset(d, "grad_comm_dtype")
    if not d.fsdp_double_buffer:
        d = _reset(d, "fsdp_db_use_persist_buf_on_alloc_fail", "megatron_fsdp_max_pool_double_buffer")
    return d


def idle_checkpoint_options(run: RunSpec) -> dict[str, str]:
    """Fields of ``run.checkpoint`` without effect on it -> what they need, in words."""
    c, idle = run.checkpoint, {}
    if not run.data_parallel.use_distributed_optimizer:
        idle["dist_ckpt_optim_fully_reshardable"] = "use_distributed_optimizer"
    if idle or not c.dist_ckpt_optim_fully_reshardable:
        idle["distrib_optim_fully_reshardable_mem_efficient"] = "dist_ckpt_optim_fully_reshardable"
    if not (run.precision.quantized_param and run.implementation.te):
        idle["stream_ckpt_dequant"] = "parameters in fp8 or fp4"
    elif run.precision.recipe == "tensorwise":
        idle["stream_ckpt_dequant"] = "another fp8_recipe than tensorwise"
    if not (run.model.has_experts and run.data_parallel.engine == "megatron_ddp"):
        idle["experts_in_one_tensor"] = "experts under megatron_ddp"
    if (needed := _adopting_needs(run)) is not None:
        idle["adopt_optim_states"] = needed
    if run.parallel.data_parallel_size * run.parallel.cp == 1:
        what = "more than one data-parallel rank"
        idle |= {"ckpt_fully_parallel_save": what, "ckpt_fully_parallel_load": what}
    return idle


def _adopting_needs(run: RunSpec) -> str | None:
    """What ``adopt_optim_states`` needs, in words; None where it has an effect (Bridge ``training/optim.py:
    memory_efficient_fp32_optimizer_state_loading``)."""
    o, d = run.optimizer, run.data_parallel
    if not (d.engine == "megatron_ddp" and d.use_distributed_optimizer):
        return "megatron_ddp's use_distributed_optimizer"
    if o.optimizer != "adam" or o.use_precision_aware_optimizer or o.optimizer_cpu_offload:
        return "Adam with fp32 moments on the GPU (no use_precision_aware_optimizer, no optimizer_cpu_offload)"
    return None if run.checkpoint.resumes_optimizer else "load_optim and save_optim"


def adopts_optim_states(run: RunSpec) -> bool:
    """Whether a resume's fp32 moments are there once."""
    wanted = run.checkpoint.adopt_optim_states
    wanted = ADOPTED_BESIDE_CORE(run.implementation) if wanted is None else wanted
    return wanted and _adopting_needs(run) is None


def _checkpoint(run: RunSpec) -> CheckpointSpec:
    # Megatron-FSDP has one format.
    idle = idle_checkpoint_options(run)
    found = _reset(run.checkpoint, *idle, *["ckpt_format"] * run.data_parallel.fsdp)
    return found if "adopt_optim_states" in idle else replace(found, adopt_optim_states=adopts_optim_states(run))


def _recompute(r: RecomputeSpec) -> RecomputeSpec:
    if r.granularity is None:
        return RecomputeSpec()
    if r.granularity == "full":
        return _reset(r, "modules")
    return replace(r, modules=tuple(name for name in RECOMPUTE_MODULES if name in r.modules))


#: Fields of ImplementationSpec without effect on a model without experts.
_OF_EXPERTS = tuple(f.name for f in fields(ImplementationSpec) if f.name.startswith("moe_"))
#: Activations that have fused kernels, which ``bias_activation_fusion`` enables.
_FUSED_ACTIVATIONS = ("silu", "gelu", "quick_gelu")


def idle_options(run: RunSpec) -> list[str]:
    """Fields of ``run.implementation`` without effect on it, some of them twice."""
    model, limits = run.model, limits_of(run.model)
    i = run.implementation
    idle: list[str] = []
    if not limits.experts:
        idle += _OF_EXPERTS
    elif i.moe_token_dispatcher_type != "flex":
        idle += (
            "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_hybridep_ranks_per_nvlink_domain"
        )
    elif i.moe_flex_dispatcher_backend == "deepep":
        idle.append("moe_hybridep_ranks_per_nvlink_domain")
    else:
        idle.append("moe_flex_dispatcher_num_sms")
    if not run.precision.quantizes:
        idle.append("moe_router_padding_for_quantization")
    if not i.moe_paged_stash:
        idle.append("moe_paged_stash_buffer_size_factor_cuda")
    if not i.te:
        idle.append("use_transformer_engine_op_fuser")
    if i.cuda_graph_impl == "none":
        idle.append("cuda_graph_modules")
    if not limits.shared_experts:
        idle.append("moe_shared_expert_overlap")
    ffns = [kind.ffn for kind in (*dict.fromkeys(model.layers), model.mtp_layer) if kind is not None]
    activations = {ffn.activation for ffn in ffns if isinstance(ffn, MLPSpec | MoESpec)}
    if not activations & set(_FUSED_ACTIVATIONS):
        idle.append("bias_activation_fusion")
    if not any(isinstance(ffn, MoESpec) and ffn.activation == "squared_relu" for ffn in ffns):
        idle.append("use_fused_weighted_squared_relu")
    latent = any(isinstance(mixer, MLASpec) for mixer in limits.mixers)
    if not latent and (model.position_embedding_type != "rope" or model.yarn):
        idle.append("apply_rope_fusion")
    if i.te or run.precision.params_dtype == "fp32":
        idle.append("masked_softmax_fusion")
    if not i.cross_entropy_loss_fusion:
        idle.append("cross_entropy_fusion_impl")
    if run.parallel.cp == 1:
        idle.append("cp_comm_type")
    if run.parallel.tp == 1 or not run.parallel.sp or not i.te:
        idle.append("tp_comm_overlap")
    if run.parallel.pp == 1:
        idle.append("deallocate_pipeline_outputs")
    if model.hybrid:
        idle.append("cpu_offloading_num_layers")
    if i.moe_hybridep_ranks_per_nvlink_domain == HYBRIDEP_DOMAIN:
        idle.append("moe_hybridep_ranks_per_nvlink_domain")
    return idle


def _implementation(run: RunSpec) -> ImplementationSpec:
    i = run.implementation
    if i.moe_token_dispatcher_type == "alltoall_seq":
        i = replace(i, moe_token_dispatcher_type="alltoall")
    i = _reset(i, *idle_options(run))
    return replace(i, apply_rope_fusion=False) if run.model.yarn and run.model.position_embedding_type == "rope" else i
