"""torchtitan's TOML -> settings of a run.

Sources: torchtitan 0.2.2 ``config/job_config.py: JobConfig`` (the last release that reads TOML; the fields of 0.3's
``config/configs.py`` have the same names), ``config/manager.py``, ``models/llama3/infra/parallelize.py``,
``components/optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import DTYPES, Settings, Specified
from bridge_memory.spec import show
from bridge_memory.spec.unmodelled import Effect

#: (name, flavor) -> the preset with the same shapes.
MODELS = {
    ("llama3", "8B"): "meta-llama/Llama-3.1-8B", ("llama3", "70B"): "meta-llama/Llama-3.1-70B",
    ("llama3", "405B"): "meta-llama/Llama-3.1-405B", ("qwen3", "0.6B"): "Qwen/Qwen3-0.6B",
    ("qwen3", "1.7B"): "Qwen/Qwen3-1.7B", ("qwen3", "4B"): "Qwen/Qwen3-4B", ("qwen3", "8B"): "Qwen/Qwen3-8B",
    ("qwen3", "14B"): "Qwen/Qwen3-14B", ("qwen3", "32B"): "Qwen/Qwen3-32B",
    ("qwen3", "30B-A3B"): "Qwen/Qwen3-30B-A3B", ("qwen3", "235B-A22B"): "Qwen/Qwen3-235B-A22B",
    ("deepseek_v3", "671B"): "deepseek-ai/DeepSeek-V3", ("gpt_oss", "20b"): "openai/gpt-oss-20b",
    ("gpt_oss", "120b"): "openai/gpt-oss-120b",
}  # fmt: skip
#: Name -> its flavors (``models/NAME/__init__.py``).
FLAVORS = {
    "llama3": ("debugmodel", "debugmodel_flex_attn", "debugmodel_varlen_attn", "8B", "8B_flex", "8B_varlen", "70B",
               "405B"),
    "llama4": ("debugmodel", "17bx16e", "17bx128e", "debugmodel_irope", "17bx16e_irope", "17bx128e_irope"),
    "qwen3": ("debugmodel", "0.6B", "1.7B", "4B", "8B", "14B", "32B", "debugmodel_moe", "30B-A3B", "235B-A22B"),
    "deepseek_v3": ("debugmodel", "debugmodel_flex_attn", "16B", "236B", "671B"),
    "gpt_oss": ("debugmodel", "20b", "120b"),
}  # fmt: skip
#: Models whose torchtitan layers are modelled, and options of its selective checkpointing.
RECORDED = ("llama3",)
SELECTIVE = ("op", *map(str, range(1, 17)))
#: Tables that do not change the memory of a training step.
HARMLESS = ("job", "profiling", "metrics", "lr_scheduler", "comm", "debug", "experimental", "dataloader")
TABLES = (
    *HARMLESS, "model", "optimizer", "training", "parallelism", "checkpoint", "activation_checkpoint",
    "compile", "quantize", "float8", "mx", "memory_estimation", "fault_tolerance", "validation",
)  # fmt: skip
_REFUSES = "torchtitan refuses it"
_PARALLELISM_HARMLESS = (
    "disable_loss_parallel", "enable_async_tensor_parallel", "module_fqns_per_model_part", "spmd_backend",
    "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
    "pipeline_parallel_microbatch_size", "pipeline_parallel_expert_parallel_overlap", "context_parallel_load_balancer",
    "context_parallel_rotate_method", "context_parallel_ptrr_mask_key", "expert_tensor_parallel_degree",
    "expert_parallel_comm_backend", "enable_sequence_parallel", "pipeline_parallel_split_points",
    "enable_compiled_autograd",
)  # fmt: skip


def read_torchtitan(config: Mapping[str, Any], settings: Settings, specified: Specified) -> None:
    """Read a parsed TOML into ``settings``; problems are in ``settings.diagnostics``."""
    diagnostics = settings.diagnostics
    top = Section(config, "", diagnostics)
    top.ignore(*HARMLESS)
    settings.set(transformers__attention_mask="none")
    own = _model(top.table("model"), settings) in RECORDED
    if own:
        settings.set(implementation__transformer_impl="torchtitan")
    else:
        diagnostics.assume("torchtitan's layers are counted as those of transformers, without a mask")
    parallel = _parallelism(top.table("parallelism"), settings, specified)
    _training(top.table("training"), settings, parallel)
    _optimizer(top.table("optimizer"), settings)
    _checkpointing(top.table("activation_checkpoint"), settings, own=own)
    compiled = top.table("compile")
    if compiled.flag("enable"):
        parts = compiled.raw("components", ["model", "loss"])
        if not isinstance(parts, list) or not {"model", "loss"}.issuperset(map(str, parts)):
            compiled.problem("components", "is not a list of model and loss", 'give ["model", "loss"], or drop it')
            parts = []
        settings.set(transformers__torch_compile="model" in parts)
        if own:
            settings.set(transformers__compile_loss="loss" in parts)
    compiled.ignore("components", "backend", "enable_async_tensor_parallel", "model_backend_override")
    compiled.refuse_unread(("enable", "components", "backend"), _REFUSES)
    checkpoint = top.table("checkpoint")
    if checkpoint.flag("enable") or checkpoint.flag("enable_checkpoint"):
        diagnostics.assume("checkpoints are saved shard by shard through host memory (checkpoint.enable)")
    for name, what in (("validation", "validation steps"), ("fault_tolerance", "what torchft keeps")):
        if top.table(name).flag("enable"):
            diagnostics.feature(
                f"{name}.enable: {what}, apart from training steps",
                Effect.UP,
                outside=True,
                order="activations of one layer and the logits; with torchft, a copy of the rank's share",
            )
    if top.table("memory_estimation").flag("enable"):
        diagnostics.refuse("memory_estimation.enable", "is true: nothing trains", "set it to false")
    top.ignore("quantize", "float8", "mx")  # switched on by model.converters
    top.refuse_unread(TABLES, _REFUSES)


def _model(section: Section, settings: Settings) -> str:
    """Read the model's table. Returns the model's name."""
    name, flavor = section.text("name", "llama3"), section.text("flavor", "debugmodel")
    if flavor not in FLAVORS.get(name, (flavor,)):
        section.problem("flavor", f"is {show(flavor)}, which {name} does not have",
                        f"use one of {', '.join(FLAVORS[name])}")
    settings.model = MODELS.get((name, flavor.removesuffix("_flex").removesuffix("_varlen")))
    converters = section.raw("converters", [])
    if not isinstance(converters, list):
        section.problem("converters", f"is {show(converters)}", "it must be a list")
        converters = []
    for converter in converters:
        settings.diagnostics.feature(
            f"model.converters ({show(converter)}): counted in the dtype without it",
            Effect.EITHER,
            order="a byte for each element that linears save, and for each gathered weight",
        )
    section.ignore("hf_assets_path", "tokenizer_path", "print_after_conversion", "name", "flavor")
    section.refuse_unread(("name", "flavor", "converters", "hf_assets_path"), _REFUSES)
    return str(name)


def _parallelism(section: Section, settings: Settings, specified: Specified) -> dict[str, int]:
    """``parallel_dims.py: ParallelDims``: data_parallel_shard_degree -1 takes the remaining ranks."""
    degrees = {
        name: section.integer(f"{name}_degree", 1, least=1)
        for name in ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel",
                     "expert_parallel")
    }  # fmt: skip
    shard = section.integer("data_parallel_shard_degree", -1, least=-1)
    if shard == 0:
        section.problem("data_parallel_shard_degree", "is 0", "it must be -1 or a positive integer")
        shard = -1
    replicate = degrees["data_parallel_replicate"]
    others = replicate * degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["context_parallel"]
    world = specified.world_size or settings.world_size
    if shard == -1 and world is not None:
        if world % others:
            section.problem("data_parallel_shard_degree", f"is -1, and {world} GPUs are not divided by the other "
                            f"degrees ({others})", "choose degrees whose product divides the GPUs")
            shard = 1
        else:
            shard = world // others
    elif shard > 0:
        if world is not None and world != shard * others:
            section.problem("data_parallel_shard_degree", f"is {shard}: with the other degrees {shard * others} GPUs, "
                            f"not {world}", "make the product of the degrees the number of GPUs, or set it to -1")
        settings.world_size = shard * others
    for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel"):
        if degrees[name] > 1:
            settings.diagnostics.refuse(
                section.named(f"{name}_degree"),
                f"is {degrees[name]}: torchtitan's {name} is not counted here",
                "set it to 1",
            )
    policy = section.choice("fsdp_reshard_after_forward", ("default", "always", "never"), "default")
    if shard > 1 or shard == -1:
        # parallelize.py: apply_fsdp. "default" is "always" without pipeline parallelism.
        settings.set(data_parallel__engine="fsdp2", fsdp__auto_wrap_policy="torchtitan",
                     fsdp__reshard_after_forward={"never": False}.get(policy))
        if policy == "always":
            settings.diagnostics.assume(
                "fsdp_reshard_after_forward always: final norm and output layer are counted as with "
                "default, gathered until backward"
            )
        if replicate > 1 and shard > 1:
            settings.set(fsdp__shard_degree=shard)
    else:
        settings.set(data_parallel__engine="ddp" if replicate > 1 else "single")
        if replicate > 1:
            settings.set(ddp__bucket_cap_mb=100)  # apply_ddp
    section.unmodelled("enable_fsdp_symm_mem", False, Effect.UP, "symmetric memory of collectives", outside=True,
                       order="as large as two gathered units")
    section.ignore(*_PARALLELISM_HARMLESS)
    section.refuse_unread(("data_parallel_shard_degree", "data_parallel_replicate_degree", *_PARALLELISM_HARMLESS,
                           *(f"{name}_degree" for name in degrees), "fsdp_reshard_after_forward"), _REFUSES)
    return {"replicate": replicate, "shard": shard}


def _training(section: Section, settings: Settings, parallel: Mapping[str, int]) -> None:
    micro = section.integer("local_batch_size", None, least=1) or section.integer("batch_size", 8, least=1)
    total = section.integer("global_batch_size", -1, least=-1)
    settings.set(batch__micro_batch_size=micro, batch__seq_length=section.integer("seq_len", 2048, least=1),
                 optimizer__clip_grad=float(section.number("max_norm", 1.0)))
    if total > 0:
        settings.set(batch__global_batch_size=total)
    else:
        settings.accumulation = 1
    dtype = DTYPES[section.choice("dtype", ("float32", "bfloat16"), "float32")]
    compute = DTYPES[section.choice("mixed_precision_param", ("bfloat16", "float32"), "bfloat16")]
    reduce = DTYPES[section.choice("mixed_precision_reduce", ("float32",), "float32")]
    settings.set(precision__params_dtype=dtype)
    if settings.engine == "fsdp2":
        settings.set(fsdp__param_dtype=compute, fsdp__reduce_dtype=reduce,
                     fsdp__offload_params=section.flag("enable_cpu_offload") or None)
    elif compute != dtype:
        settings.set(transformers__autocast=compute)  # maybe_enable_amp
    section.ignore("enable_cpu_offload", "dataset", "dataset_path", "steps", "gc_freq", "gc_debug", "dataloader",
                   "deterministic", "seed", "warmup_steps", "data_parallel_degree", "enable_fp8_linear",
                   "disable_cuda_graphs")
    section.refuse_unread(("local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "dtype",
                           "mixed_precision_param", "mixed_precision_reduce", "enable_cpu_offload"), _REFUSES)


def _optimizer(section: Section, settings: Settings) -> None:
    name = section.choice("name", ("Adam", "AdamW"), "AdamW")
    how = section.choice("implementation", ("for-loop", "foreach", "fused"), "fused")
    settings.set(optimizer__optimizer=name.lower(), optimizer__torch_implementation=how)
    section.unmodelled("early_step_in_backward", False, Effect.DOWN, "gradients that end with each parameter's step",
                       order="the gradients of the rank's share")
    section.ignore("lr", "beta1", "beta2", "eps", "weight_decay", "fused")
    section.refuse_unread(("name", "lr", "eps", "weight_decay", "implementation", "early_step_in_backward"), _REFUSES)


def _checkpointing(section: Section, settings: Settings, *, own: bool) -> None:
    """``distributed/activation_checkpoint.py: apply_ac``."""
    mode = section.choice("mode", ("selective", "full", "memory_budget", "none"), "selective")
    option = section.raw("selective_ac_option", "2")
    if mode == "full":
        settings.set(transformers__gradient_checkpointing=True, transformers__use_reentrant=False)
    elif mode == "selective" and own and str(option) in SELECTIVE:
        settings.set(transformers__selective_ac_option=str(option))
        if section.raw("per_op_sac_force_recompute_mm_shapes_by_fqns"):
            settings.diagnostics.feature(
                "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: counted without",
                Effect.EITHER,
                order="what those products save, in every layer",
            )
    elif mode != "none":
        described = f"selective, {show(option)}" if mode == "selective" else mode
        settings.diagnostics.feature(
            f"activation_checkpoint.mode ({described}): which operations are run again; counted as none",
            Effect.DOWN,
            order="up to what all layers save, less their inputs",
        )
    section.ignore("selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns", "early_stop", "memory_budget",
                   "visualize_memory_budget_pareto", "preserve_rng_state", "determinism_check", "debug")
    section.refuse_unread(("mode", "selective_ac_option"), _REFUSES)
