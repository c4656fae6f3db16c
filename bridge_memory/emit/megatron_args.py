"""A run as Megatron-LM's arguments: all of it that they can say, and the list of what they cannot.

What is written is read back by this package's own reader before it is handed out; the fields in which the run that
comes back differs are what the text leaves to be said elsewhere.
"""

from __future__ import annotations

import shlex
from dataclasses import fields, replace
from typing import Any

from bridge_memory.emit.architecture import LOSS_COEFFICIENT, architecture
from bridge_memory.emit.commands import Emitted
from bridge_memory.emit.left import BY_TRAINER, beside, left_out, left_words
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.readers.megatron_args.arguments import (
    DESTINATIONS,
    INTEGERS,
    LISTS,
    NUMBERS,
    OFF,
    ON,
    PATTERNS,
    WORDS,
)
from bridge_memory.releases import FSDP_MAIN_DTYPES, GRAPHED_BY_MODULES
from bridge_memory.spec import ImplementationSpec, ModelSpec, RunSpec, SpecError
from bridge_memory.spec.parts import MEGATRON_ENGINES

_DEFAULTS: dict[str, Any] = {**INTEGERS, **NUMBERS, **WORDS, **LISTS, **PATTERNS}
#: What Megatron-LM's parser has no option for, although its configs have such a field.
_NO_OPTION = frozenset({"cpu_offloading", "fp8_dot_product_attention", "store_param_remainders"})
#: Fields of ImplementationSpec that arguments of the same name say.
_ALIKE = tuple(
    f.name for f in fields(ImplementationSpec)
    if (f.name in OFF | ON or f.name in _DEFAULTS) and f.name not in _NO_OPTION and not f.name.startswith("cuda_graph")
)  # fmt: skip
#: Destination -> the option that sets it, where that has another name.
_OPTIONS = {to: option for option, to in DESTINATIONS.items() if option in ("fp4_format", "fp8_format")} | {
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}  # fmt: skip
_SWITCHED_OFF = {
    "add_bias_linear": "disable_bias_linear", "apply_rope_fusion": "no_rope_fusion",
    "use_mamba_mem_eff_path": "disable_mamba_mem_eff_path",
}
#: What the arguments say of a model that is named beside them.
_BESIDE_A_MODEL = (
    "hidden_dropout", "attention_dropout", "mtp_num_layers", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
)  # fmt: skip
#: The model is another one than the arguments describe: it is said beside them.
MODEL = "model"


def megatron_arguments(run: RunSpec) -> Emitted:
    """The run as Megatron-LM's arguments. Raises SpecError where Megatron-LM does not run it."""
    engine, impl = run.data_parallel.engine, run.implementation.transformer_impl
    if engine not in MEGATRON_ENGINES:
        raise SpecError(f"engine ({engine}) is not Megatron-LM's; use {' or '.join(MEGATRON_ENGINES)}")
    if run.implementation.torch_layers:
        raise SpecError(f"transformer_impl ({impl}) is not Megatron-LM's; use transformer_engine or local")
    gpus = run.parallel.world_size
    described, said = architecture(run), _arguments(run)
    text = shlex.join(_words(described | said))
    left = _read_back(text, run)
    if left is None:
        own = {name: described[name] for name in _BESIDE_A_MODEL if name in described}
        text = shlex.join(_words(own | said))
        try:
            read = read_arguments_of(text, run, model=run.model)
        except SpecError as error:
            raise SpecError(f"Megatron-LM's arguments cannot say this run: read back, {error}") from None
        left = {MODEL: run.model.name, **beside(run), **left_out(run, read)}
    unset = {MODEL, BY_TRAINER} if run.checkpoint.adopt_optim_states is None else {MODEL}
    rest = {name: value for name, value in left.items() if name not in unset}
    notes = [f"on {gpus} GPU{'s' * (gpus > 1)}"]
    if MODEL in left:
        notes.append(f"the model, which they cannot describe: {run.model.name}")
    if rest:
        notes.append(f"not in the arguments: {left_words(rest)}")
    if f"{LOSS_COEFFICIENT}" in text:
        notes.append(f"the coefficient {LOSS_COEFFICIENT} of losses is an example")
    return Emitted(text, "; ".join(notes), left)


def read_arguments_of(text: str, run: RunSpec, *, model: ModelSpec | None = None) -> RunSpec:
    """The run that this package's reader makes of the arguments on the GPUs and the releases of ``run``. Raises
    SpecError."""
    i = run.implementation
    read = run_from_megatron_args(
        text, world_size=run.parallel.world_size, megatron_core=i.megatron_core,
        transformer_engine=i.transformer_engine, torch=i.torch, model=model,
    )  # fmt: skip
    return replace(read, implementation=replace(read.implementation, gpu_arch=i.gpu_arch))


def _read_back(text: str, run: RunSpec) -> dict[str, Any] | None:
    """What the arguments leave out; None where they describe another model, or are not read."""
    try:
        left = left_out(run, read_arguments_of(text, run))
    except SpecError:
        return None
    return None if any(name.startswith("model.") for name in left) else beside(run) | left


def _words(values: dict[str, Any]) -> list[str]:
    """Destinations as options, those at Megatron-LM's defaults left out."""
    words: list[str] = []
    for name, value in values.items():
        option = "--" + _OPTIONS.get(name, name).replace("_", "-")
        if name in ON or name == "check_for_nan_in_loss_and_grad":
            if not value:
                words.append("--" + _SWITCHED_OFF.get(name, f"no_{name}").replace("_", "-"))
        elif name in OFF:
            words += [option] if value else []
        elif value is None or value == _DEFAULTS.get(name) or (value,) == _DEFAULTS.get(name):
            continue
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)] if tuple(value) != _DEFAULTS.get(name) and value else []
        else:
            words += [option, str(value)]
    return words


def _arguments(run: RunSpec) -> dict[str, Any]:
    """Destination -> value, of everything but the model."""
    p, b, impl = run.parallel, run.batch, run.implementation
    virtual = p.vpp > 1 and not (p.pipeline_model_parallel_layout or run.model.pattern_splits_pipeline)
    said: dict[str, Any] = {
        "tensor_model_parallel_size": p.tp, "pipeline_model_parallel_size": p.pp,
        "num_virtual_stages_per_pipeline_rank": p.vpp if virtual else None, "context_parallel_size": p.cp,
        "sequence_parallel": p.sp and p.tp > 1,
        "decoder_first_pipeline_num_layers": p.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": p.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": p.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": p.account_for_loss_in_pipeline_split,
        "microbatch_group_size_per_vp_stage": p.microbatch_group_size_per_vp_stage,
        "num_distributed_optimizer_instances": p.num_distributed_optimizer_instances,
        "seq_length": b.seq_length, "micro_batch_size": b.micro_batch_size,
        "global_batch_size": b.global_batch_size or run.num_microbatches * b.micro_batch_size * p.data_parallel_size,
    }  # fmt: skip
    if not run.model.pattern_splits_pipeline:
        said["pipeline_model_parallel_layout"] = p.pipeline_model_parallel_layout
    if run.model.has_experts:
        said["expert_model_parallel_size"] = p.ep
        said["expert_tensor_parallel_size"] = None if p.etp == p.tp else p.etp
    said |= _precision(run) | _optimizer(run) | _data_parallel(run) | _recompute(run) | _checkpoint(run)
    for name in _ALIKE:
        if run.model.has_experts or not name.startswith("moe_"):
            said[name] = getattr(impl, name)
    said["apply_rope_fusion"] = run.fuses_rotation
    fused = said.pop("bias_activation_fusion", impl.bias_activation_fusion)
    said |= {
        "bias_swiglu_fusion": fused, "bias_gelu_fusion": fused,
        "create_attention_mask_in_dataloader": impl.create_attention_mask,
        "fine_grained_activation_offloading": bool(impl.offload_modules),
    }  # fmt: skip
    if impl.te:
        said.pop("use_legacy_models")
    if impl.cross_entropy_fusion_impl not in ("native", "te"):  # which the parser does not take
        said.pop("cross_entropy_fusion_impl")
    if not impl.offload_modules:
        said.pop("min_offloaded_tensor_size", None)
    if impl.cuda_graph_impl != "none":
        modules = "cuda_graph_modules" if GRAPHED_BY_MODULES(impl) else "cuda_graph_scope"
        said |= {"cuda_graph_impl": impl.cuda_graph_impl, modules: impl.cuda_graph_modules}
        # validate_args asks for it.
        said["check_for_nan_in_loss_and_grad"] = impl.cuda_graph_impl != "full_iteration"
    return said


def _precision(run: RunSpec) -> dict[str, Any]:
    s = run.precision
    ends = s.num_layers_at_start_in_bf16 or s.num_layers_at_end_in_bf16
    said: dict[str, Any] = {
        "bf16": s.params_dtype == "bf16", "fp16": s.params_dtype == "fp16",
        "fp32_residual_connection": s.fp32_residual_connection,
        "attention_softmax_in_fp32": s.attention_softmax_in_fp32 and run.implementation.attention_kernel == "unfused",
        "fp8": s.fp8, "fp4": s.fp4, "fp8_param_gather": bool(s.fp8 and s.fp8_param),
        "fp4_param_gather": bool(s.fp4 and s.fp4_param),
        # OptimizerConfig reads it too, without fp8.
        "fp8_recipe": s.fp8_recipe if s.fp8 else run.optimizer.fp8_recipe,
    }  # fmt: skip
    if s.quantizes and ends:
        said |= {
            "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": s.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": s.num_layers_at_end_in_bf16,
        }  # fmt: skip
    return said


def _optimizer(run: RunSpec) -> dict[str, Any]:
    o = run.optimizer
    said: dict[str, Any] = {
        "optimizer": o.optimizer, "log_params_norm": o.log_params_norm, "clip_grad": o.clip_grad,
        "optimizer_cpu_offload": o.optimizer_cpu_offload,
        "use_precision_aware_optimizer": o.use_precision_aware_optimizer, "main_grads_dtype": o.main_grads_dtype,
        "main_params_dtype": o.main_params_dtype, "exp_avg_dtype": o.exp_avg_dtype,
        "exp_avg_sq_dtype": o.exp_avg_sq_dtype,
    }  # fmt: skip
    if o.optimizer == "sgd":
        said["sgd_momentum"] = o.sgd_momentum
    if o.optimizer_cpu_offload:
        said["optimizer_offload_fraction"] = o.optimizer_offload_fraction
    return said


def _data_parallel(run: RunSpec) -> dict[str, Any]:
    d, dtype = run.data_parallel, run.precision.params_dtype
    whole = run.optimizer.use_layer_wise_distributed_optimizer
    said: dict[str, Any] = {
        # Muon's layer-wise optimizer is Muon with a distributed one.
        "use_distributed_optimizer": whole if run.optimizer.optimizer == "muon" else d.use_distributed_optimizer,
        "overlap_grad_reduce": d.overlap_grad_reduce, "overlap_param_gather": d.overlap_param_gather,
        "ddp_bucket_size": d.bucket_size,
        "grad_reduce_in_bf16": dtype == "bf16" and not d.grad_reduce_in_fp32
        and not (d.fsdp and FSDP_MAIN_DTYPES(run.implementation)),  # which say it, and not how it is communicated
        # What bf16 does anyway, unless main gradients are in bf16 too.
        "accumulate_allreduce_grads_in_fp32": d.grad_reduce_in_fp32 and (
            dtype == "fp16" or run.optimizer.main_grads_dtype != "fp32"
        ),
    }  # fmt: skip
    if d.fsdp:
        said |= {
            "use_megatron_fsdp": True, "data_parallel_sharding_strategy": d.data_parallel_sharding_strategy,
            "suggested_communication_unit_size": d.suggested_communication_unit_size,
            "megatron_fsdp_main_grads_dtype": "fp32" if d.grad_reduce_in_fp32 else None,
            "megatron_fsdp_grad_comm_dtype": d.grad_comm_dtype, "fsdp_double_buffer": d.fsdp_double_buffer,
            "fsdp_db_use_persist_buf_on_alloc_fail": d.fsdp_db_use_persist_buf_on_alloc_fail,
            "megatron_fsdp_max_pool_double_buffer": d.megatron_fsdp_max_pool_double_buffer,
        }  # fmt: skip
    return said


def _checkpoint(run: RunSpec) -> dict[str, Any]:
    c = run.checkpoint
    return {
        "ckpt_format": "fsdp_dtensor" if run.data_parallel.fsdp else c.ckpt_format,
        "dist_ckpt_optim_fully_reshardable": c.dist_ckpt_optim_fully_reshardable,
        "distrib_optim_fully_reshardable_mem_efficient": c.distrib_optim_fully_reshardable_mem_efficient,
        "ckpt_fully_parallel_save": c.ckpt_fully_parallel_save, "ckpt_fully_parallel_load": c.ckpt_fully_parallel_load,
        "async_save": c.async_save, "use_persistent_ckpt_worker": c.async_save,
        "stream_ckpt_dequant": c.stream_ckpt_dequant, "no_load_optim": not c.load_optim,
        "no_save_optim": not c.save_optim,
    }  # fmt: skip


def _recompute(run: RunSpec) -> dict[str, Any]:
    r = run.recompute
    if r.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": r.modules}
    if r.granularity is None:
        return {}
    return {
        "recompute_granularity": r.granularity, "recompute_method": r.method, "recompute_num_layers": r.num_layers,
        "distribute_saved_activations": r.distribute_saved_activations,
    }  # fmt: skip
