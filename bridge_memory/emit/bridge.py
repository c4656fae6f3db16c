"""A run as assignments to a Megatron Bridge ConfigContainer ``cfg``: everything but the architecture, which is the
recipe's.

A recipe has settings of its own that are nobody's default, so that every setting is written, also one at its default.
What is written is read back by this package's own reader before it is handed out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NamedTuple

from bridge_memory.emit.architecture import LOSS_COEFFICIENT, architecture
from bridge_memory.emit.commands import Emitted
from bridge_memory.emit.left import beside, left_out, left_words
from bridge_memory.readers.config_container import run_of_container
from bridge_memory.readers.megatron_args import container
from bridge_memory.readers.megatron_args.model_override import size_arguments
from bridge_memory.releases import DEFAULT_MEGATRON_BRIDGE, GRAPHED_BY_MODULES, Running
from bridge_memory.spec import ImplementationSpec, RunSpec, SpecError
from bridge_memory.spec.canonical import idle_options
from bridge_memory.spec.dtypes import TORCH_NAMES
from bridge_memory.spec.parts import HYBRIDEP_DOMAIN, MEGATRON_ENGINES

#: Fields of ImplementationSpec that a container does not hold, or says in other words.
_OTHERWISE = frozenset({
    "megatron_core", "transformer_engine", "torch", "gpu_arch", "expandable_segments", "cublas_workspace_bytes",
    "nvte_deterministic", "distillation", "create_attention_mask", "moe_imbalance", "use_legacy_models",
    "moe_hybridep_ranks_per_nvlink_domain", "attention_backend", "cuda_graph_impl", "cuda_graph_modules",
    "cpu_offloading_num_layers", "offload_modules", "moe_flex_dispatcher_num_sms",
})  # fmt: skip
_ALIKE = tuple(f.name for f in fields(ImplementationSpec) if f.name not in _OTHERWISE)
#: What of the architecture a command line changes, or a list with an entry a layer.
_OF_THE_MODEL = (
    "num_layers", "moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "no_rope_freq",
    "hybrid_layer_pattern", "mtp_num_layers", "hidden_dropout", "attention_dropout", "vocab_size",
    "make_vocab_size_divisible_by",
)  # fmt: skip
#: Fields of MixedPrecisionConfig that are written.
_PRECISION = (
    "fp32", "bf16", "fp16", "params_dtype", "grad_reduce_in_fp32", "fp8", "fp8_recipe", "fp8_param", "fp8_param_gather",
    "fp8_dot_product_attention", "fp4", "fp4_param", "fp4_param_gather", "first_last_layers_bf16",
    "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "reuse_grad_buf_for_mxfp8_param_ag",
)  # fmt: skip
#: Options that go with the recipe's blocks, and stay the recipe's where the model has no use for them: megatron-core
#: refuses some of them then.
_OF_THE_BLOCKS = frozenset({
    "bias_activation_fusion", "use_fused_weighted_squared_relu", "apply_rope_fusion", "moe_shared_expert_overlap",
})  # fmt: skip


class Expression(NamedTuple):
    """A value that is written as Python, and what is read of it."""

    text: str
    value: Any

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class LoRA:
    """``megatron.bridge.peft.lora.LoRA``, by whose name adapters are read."""

    dim: int
    target_modules: list[str]

    def __str__(self) -> str:
        return f"LoRA(dim={self.dim}, target_modules={json.dumps(self.target_modules)})"


#: A word of the text -> the import that it needs.
_IMPORTS = {
    "torch.": "import torch",
    "AttnBackend.": "from megatron.core.transformer.enums import AttnBackend",
    "LoRA(": "from megatron.bridge.peft.lora import LoRA",
    "MixedPrecisionConfig(": "from megatron.bridge.training.mixed_precision import MixedPrecisionConfig",
}


def bridge_overrides(run: RunSpec) -> Emitted:
    """The run as assignments to a recipe's container ``cfg``. Raises SpecError where Megatron Bridge does not run
    it."""
    engine, impl = run.data_parallel.engine, run.implementation.transformer_impl
    if engine not in MEGATRON_ENGINES:
        raise SpecError(f"engine ({engine}) is not Megatron Bridge's; use {' or '.join(MEGATRON_ENGINES)}")
    if run.implementation.torch_layers:
        raise SpecError(f"transformer_impl ({impl}) is not Megatron Bridge's; use transformer_engine or local")
    described = architecture(run)
    said = {**_model(run, described), **_others(run)}
    left, ours = _read_back(run, said, described), True
    if left is None:
        said, ours = {**_model(run, {}), **_others(run)}, False
        left = _read_back(run, said, None)
    assert left is not None  # the model is the run's own
    gpus = run.parallel.world_size
    notes = [f"cfg: the container of a recipe for {run.model.name or 'this model'}, on {gpus} GPU{'s' * (gpus > 1)}"]
    if not ours:
        notes.append("number of layers, vocabulary, MTP depths, dropout and load balancing are the recipe's")
    if left:
        notes.append(f"not in the assignments: {left_words(left)}")
    return Emitted(_text(said), "; ".join(notes), left)


def _text(said: dict[str, Any]) -> str:
    lines = [f"cfg.{name} = {_python(value)}" for name, value in said.items()]
    imports = [line for word, line in _IMPORTS.items() if any(word in text for text in lines)]
    return "\n".join([*imports, *[""] * bool(imports), *lines])


def _python(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{name}={_python(one)}" for name, one in value.items())
        return f"MixedPrecisionConfig({inside})"
    if value is None or isinstance(value, (bool, Expression, LoRA)):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _dtype(name: str) -> Expression:
    return Expression(text := f"torch.{TORCH_NAMES[name][0]}", text)


# ---- what is written ----


def _model(run: RunSpec, described: dict[str, Any]) -> dict[str, Any]:
    """"model.field" -> value; ``described``: the architecture, or {} where the recipe's stays."""
    p, impl, experts = run.parallel, run.implementation, run.model.has_experts
    split = run.model.pattern_splits_pipeline
    found: dict[str, Any] = {
        name: described[name] for name in _OF_THE_MODEL
        if name in described and not (name == "num_layers" and run.model.hybrid)
    }  # fmt: skip
    if described:
        found["mtp_num_layers"] = run.model.mtp_num_layers or None
        found["should_pad_vocab"] = run.model.make_vocab_size_divisible_by > 0
        for name in ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "no_rope_freq"):
            if isinstance(text := found.get(name), str):
                found[name] = Expression(text, text)
        if experts:
            found |= _balancing(described)
    found |= {
        "tensor_model_parallel_size": p.tp, "pipeline_model_parallel_size": p.pp,
        "virtual_pipeline_model_parallel_size": p.vpp if p.vpp > 1 and not p.pipeline_model_parallel_layout else None,
        "context_parallel_size": p.cp, "sequence_parallel": p.sp and p.tp > 1,
        "num_layers_in_first_pipeline_stage": p.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": p.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": p.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": p.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": None if split else p.pipeline_model_parallel_layout,
        "microbatch_group_size_per_vp_stage": p.microbatch_group_size_per_vp_stage,
        "seq_length": run.batch.seq_length,
    }  # fmt: skip
    if experts:
        # Said where it is tensor parallelism too: a provider may have resolved its own None before.
        found |= {"expert_model_parallel_size": p.ep, "expert_tensor_parallel_size": p.etp}
    found |= _recompute(run)
    idle = _OF_THE_BLOCKS & set(idle_options(run))
    found |= {
        name: getattr(impl, name) for name in _ALIKE if (experts or not name.startswith("moe_")) and name not in idle
    }
    if run.model.yarn:
        found["apply_rope_fusion"] = run.fuses_rotation
    found |= {
        "attention_backend": Expression(f"AttnBackend.{impl.attention_backend}", impl.attention_backend),
        "fp32_residual_connection": run.precision.fp32_residual_connection,
        "cuda_graph_impl": impl.cuda_graph_impl,
        "cpu_offloading": impl.cpu_offloading_num_layers > 0,
        "cpu_offloading_num_layers": impl.cpu_offloading_num_layers,
        "fine_grained_activation_offloading": bool(impl.offload_modules), "offload_modules": impl.offload_modules,
    }  # fmt: skip
    if impl.attention_kernel == "unfused":
        found["attention_softmax_in_fp32"] = run.precision.attention_softmax_in_fp32
    if GRAPHED_BY_MODULES(impl):
        found |= {"cuda_graph_scope": None, "cuda_graph_modules": impl.cuda_graph_modules}
    else:
        found["cuda_graph_scope"] = impl.cuda_graph_modules or None
    if experts:
        # The deprecated switches overrule the options that they became.
        found |= {
            "moe_enable_deepep": False, "moe_router_padding_for_fp8": False,
            "moe_flex_dispatcher_num_sms": impl.moe_flex_dispatcher_num_sms,
            "moe_deepep_num_sms": None, "moe_hybridep_num_sms": None,
        }  # fmt: skip
    return {f"model.{name}": value for name, value in found.items()}


def _balancing(described: dict[str, Any]) -> dict[str, Any]:
    """The losses that balance experts: a recipe's own coefficient stays, unless it is 0."""
    kinds = described["moe_router_load_balancing_type"]
    if len(kinds) > 1:
        return {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": [LOSS_COEFFICIENT] * len(kinds)}
    kind, coefficient = {"moe_router_load_balancing_type": kinds[0]}, "cfg.model.moe_aux_loss_coeff"
    if kinds == ["none"]:
        return kind
    return kind | {"moe_aux_loss_coeff": Expression(f"{coefficient} or {LOSS_COEFFICIENT}", LOSS_COEFFICIENT)}


def _environment(run: RunSpec) -> Expression:
    """Variables that change memory, over the recipe's others."""
    i = run.implementation
    found = {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{i.expandable_segments}",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": str(int(not i.nvte_deterministic)),
    }  # fmt: skip
    if i.cublas_workspace_bytes is not None:
        found["CUBLAS_WORKSPACE_CONFIG"] = f":{i.cublas_workspace_bytes >> 10}:1"
    if run.model.has_experts and i.moe_flex_dispatcher_backend == "hybridep":
        domain = i.moe_hybridep_ranks_per_nvlink_domain or HYBRIDEP_DOMAIN
        found["NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"] = str(domain)
    if i.offload_modules:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"  # from Transformer Engine 2.10 on
    return Expression(f"{{**(getattr(cfg, 'env_vars', None) or {{}}), {json.dumps(found)[1:-1]}}}", found)


def _recompute(run: RunSpec) -> dict[str, Any]:
    r = run.recompute
    found: dict[str, Any] = {
        "recompute_granularity": r.granularity, "recompute_method": r.method, "recompute_num_layers": r.num_layers,
        "distribute_saved_activations": r.distribute_saved_activations,
    }  # fmt: skip
    return found | ({"recompute_modules": r.modules} if r.granularity == "selective" else {})


def _others(run: RunSpec) -> dict[str, Any]:
    """"part.field" -> value of what is not the model's."""
    d, o, b, p, peft = run.data_parallel, run.optimizer, run.batch, run.parallel, run.peft
    found: dict[str, Any] = {
        "train.micro_batch_size": b.micro_batch_size,
        "train.global_batch_size": b.global_batch_size
        or run.num_microbatches * b.micro_batch_size * p.data_parallel_size,
        "dataset.seq_length": b.seq_length,
        "dataset.skip_getting_attention_mask_from_dataset": not run.implementation.create_attention_mask,
        "mixed_precision": _precision(run), "comm_overlap": None,
        "ddp.use_distributed_optimizer": d.use_distributed_optimizer,
        "ddp.overlap_grad_reduce": d.overlap_grad_reduce, "ddp.overlap_param_gather": d.overlap_param_gather,
        "ddp.bucket_size": d.bucket_size,
        "ddp.num_distributed_optimizer_instances": p.num_distributed_optimizer_instances,
        "ddp.use_megatron_fsdp": d.fsdp, "dist.use_megatron_fsdp": d.fsdp,
    }  # fmt: skip
    if run.implementation.cuda_graph_impl == "full_iteration":
        found["rerun_state_machine.check_for_nan_in_loss"] = False
    c = run.checkpoint
    found |= {
        f"checkpoint.{name}": value
        for name, value in {
            "ckpt_format": "fsdp_dtensor" if d.fsdp else c.ckpt_format,
            "dist_ckpt_optim_fully_reshardable": c.dist_ckpt_optim_fully_reshardable,
            # True is refused with the above.
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "fully_parallel_save": c.ckpt_fully_parallel_save, "fully_parallel_load": c.ckpt_fully_parallel_load,
            "async_save": c.async_save, "load_optim": c.load_optim, "save_optim": c.save_optim,
            "also_save_hf_checkpoint": c.also_save_hf_checkpoint,
        }.items()
    }  # fmt: skip
    if c.async_save:
        found["checkpoint.use_persistent_ckpt_worker"] = True
    if c.load_optim:
        found["checkpoint.finetune"] = False
    if d.fsdp:
        found |= {
            f"ddp.{name}": value
            for name, value in {
                "data_parallel_sharding_strategy": d.data_parallel_sharding_strategy,
                "megatron_fsdp_main_grads_dtype": _dtype("fp32") if d.grad_reduce_in_fp32 else None,
                "megatron_fsdp_grad_comm_dtype": d.grad_comm_dtype and _dtype(d.grad_comm_dtype),
                "fsdp_double_buffer": d.fsdp_double_buffer, "nccl_ub": False,
                "fsdp_db_use_persist_buf_on_alloc_fail": d.fsdp_db_use_persist_buf_on_alloc_fail,
                "megatron_fsdp_max_pool_double_buffer": d.megatron_fsdp_max_pool_double_buffer,
            }.items()
        }  # fmt: skip
        if d.suggested_communication_unit_size is not None:
            found["ddp.suggested_communication_unit_size"] = d.suggested_communication_unit_size
    found |= {
        f"optimizer.{name}": value
        for name, value in {
            "optimizer": o.optimizer, "use_distributed_optimizer": d.use_distributed_optimizer,
            "overlap_param_gather": d.overlap_param_gather,
            "use_precision_aware_optimizer": o.use_precision_aware_optimizer,
            "main_grads_dtype": _dtype(o.main_grads_dtype), "main_params_dtype": _dtype(o.main_params_dtype),
            "exp_avg_dtype": _dtype(o.exp_avg_dtype), "exp_avg_sq_dtype": _dtype(o.exp_avg_sq_dtype),
            "store_param_remainders": o.store_param_remainders, "optimizer_cpu_offload": o.optimizer_cpu_offload,
            "use_layer_wise_distributed_optimizer": o.use_layer_wise_distributed_optimizer,
        }.items()
    }  # fmt: skip
    if o.optimizer == "sgd":
        found["optimizer.sgd_momentum"] = o.sgd_momentum
    if o.optimizer_cpu_offload:
        found["optimizer.optimizer_offload_fraction"] = o.optimizer_offload_fraction
    found["optimizer.clip_grad"] = o.clip_grad
    found["logger.log_params_norm"] = o.log_params_norm
    found["env_vars"] = _environment(run)
    found["peft"] = LoRA(peft.dim, list(peft.target_modules)) if peft.trains_adapters else None
    return found


def _precision(run: RunSpec) -> dict[str, Any]:
    """Arguments of ``MixedPrecisionConfig``."""
    s, d = run.precision, run.data_parallel
    dtype = _dtype(s.params_dtype)
    found: dict[str, Any] = {
        s.params_dtype: True, "params_dtype": dtype, "pipeline_dtype": dtype,
        "grad_reduce_in_fp32": d.grad_reduce_in_fp32,
    }  # fmt: skip
    if s.fp8:
        found |= {"fp8": s.fp8, "fp8_param_gather": s.fp8_param}
        if s.fp8_dot_product_attention:
            found["fp8_dot_product_attention"] = True
        if s.fp8_param and s.fp8_recipe == "mxfp8" and not d.fsdp:
            found["reuse_grad_buf_for_mxfp8_param_ag"] = True  # ConfigContainer.validate asks for it
    if s.fp4:
        found |= {"fp4": s.fp4, "fp4_param_gather": s.fp4_param}
    # OptimizerConfig reads it too, without fp8.
    found["fp8_recipe"] = s.fp8_recipe if s.fp8 else run.optimizer.fp8_recipe or "delayed"
    if s.quantizes and (s.num_layers_at_start_in_bf16 or s.num_layers_at_end_in_bf16):
        found |= {
            "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": s.num_layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": s.num_layers_at_end_in_bf16,
        }  # fmt: skip
    return found


# ---- what is read back ----


def _read_back(run: RunSpec, said: dict[str, Any], described: dict[str, Any] | None) -> dict[str, Any] | None:
    """What ``said`` leaves out; None where it describes another model than the run's, or is not read. ``described``:
    the architecture as arguments; None: another model with these sizes takes its place."""
    i = run.implementation
    try:
        read = run_of_container(
            applied(_recipe(run, described), said),
            Running(i.megatron_core, i.transformer_engine, i.torch), world_size=run.parallel.world_size,
            gpu_arch=i.gpu_arch, bridge=DEFAULT_MEGATRON_BRIDGE,
        )
        if described is None:
            read = RunSpec(**{f.name: getattr(read, f.name) for f in fields(read)} | {"model": run.model})
    except SpecError as error:
        if described is None:
            raise SpecError(f"Megatron Bridge's container cannot say this run: read back, {error}") from None
        return None
    left = left_out(run, read)
    another = described is not None and any(name.startswith("model.") for name in left)
    return None if another else beside(run) | left


def _recipe(run: RunSpec, described: dict[str, Any] | None) -> SimpleNamespace:
    """A container of nothing but the architecture."""
    sizes = described
    if sizes is None:
        sizes = size_arguments(run.model)
        sizes["add_bias_linear"] = not sizes.pop("disable_bias_linear")
    plain = {"seq_length": run.batch.seq_length, "micro_batch_size": 1, **sizes}
    values = {name: value for name, value in plain.items() if value is not None}
    made = container(SimpleNamespace(**values), Running(run.implementation.megatron_core))
    # Bridge sets those fields of a precision that a part has.
    for name in _PRECISION:
        if not hasattr(made.model, name):
            setattr(made.model, name, None)
    settings = {part: SimpleNamespace(**dict.fromkeys(_PRECISION)) for part in ("optimizer", "ddp")}
    parts = ("train", "dist", "logger", "dataset", "checkpoint", "rerun_state_machine")
    return SimpleNamespace(
        model=made.model, **settings, **{part: SimpleNamespace() for part in parts}
    )


def applied(config: SimpleNamespace, said: dict[str, Any]) -> SimpleNamespace:
    """``config`` with the assignments made."""
    for name, value in said.items():
        part, dot, field = name.partition(".")
        if isinstance(value, dict):
            value = SimpleNamespace(**{key: _plain(one) for key, one in value.items()})
        setattr(getattr(config, part) if dot else config, field or part, _plain(value))
    return config




def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Expression) else value
