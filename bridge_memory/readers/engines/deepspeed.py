"""DeepSpeed's JSON -> settings of a run. "auto" values are filled in as accelerate or the HF Trainer does.

Sources: ``deepspeed/runtime/config.py: DeepSpeedConfig``, ``runtime/zero/config.py``, ``zero/offload_config.py``,
``runtime/precision_config.py`` (0.19); transformers ``integrations/deepspeed.py: HfTrainerDeepSpeedConfig``; accelerate
``accelerator.py: _prepare_deepspeed``, ``utils/dataclasses.py: DeepSpeedPlugin``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge_memory.readers.engines.sections import AUTO, Diagnostics, Section
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.spec import show
from bridge_memory.spec.unmodelled import Effect

#: ``runtime/constants.py: GRADIENT_CLIPPING_DEFAULT``.
DEFAULT_CLIPPING = 1.0
ENGINE_OF_STAGE = {1: "zero1", 2: "zero2", 3: "zero3"}

#: Reason -> top-level keys that do not change the memory of a training step.
HARMLESS = {
    "logging and timers": (
        "steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "log_level", "timers",
        "tensorboard", "wandb", "csv_monitor", "comet", "monitor", "comms_logger",
    ),
    "the learning rate": ("scheduler",),
    "numbers, not sizes": (
        "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op", "disable_allgather",
        "seq_parallel_communication_data_type", "vocabulary_size", "disable_python_gc",
    ),
    "checks and bookkeeping": (
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "checkpoint",
        "use_data_before_expert_parallelism", "autotuning", "managed_gradient_accumulation", "data_types", "aio",
        "datastates_ckpt", "nebula",
    ),
}  # fmt: skip
#: Blocks that are unmodelled features -> (effect, what, the switch that enables them (None: presence), order).
UNMODELLED = {
    "flops_profiler": (Effect.UP, "what the profiler keeps while it runs", "enabled", "a few numbers for each module"),
    "data_efficiency": (
        Effect.EITHER, "sequences and layers that it leaves out", "enabled", "activations of what it leaves out",
    ),
    "curriculum_learning": (
        Effect.DOWN, "shorter sequences at the start of training", "enabled",
        "none at the full length, which is counted",
    ),
    "progressive_layer_drop": (Effect.DOWN, "layers that it leaves out", "enabled", "activations of those layers"),
    "hybrid_engine": (
        Effect.UP, "inference containers and their workspace", "enabled", "2 bytes for each weight, and a workspace",
    ),
    "compression_training": (Effect.UNKNOWN, "compressed weights", None, "up to a copy of the weights"),
    "quantize_training": (Effect.UNKNOWN, "quantised weights", "enabled", "up to a copy of the weights"),
    "weight_quantization": (Effect.UNKNOWN, "quantised weights", None, "up to a copy of the weights"),
    "sparse_attention": (Effect.EITHER, "another attention", None, "the scores of every head, in every layer"),
    "eigenvalue": (Effect.UP, "products with the Hessian", "enabled", "as large as the gradients, twice"),
    "amp": (Effect.UNKNOWN, "Apex's copies and casts of weights", "enabled", "up to 6 bytes for each weight"),
    "msamp": (
        Effect.UNKNOWN, "weights, gradients and states in fp8", "enabled",
        "up to half of weights, gradients and states",
    ),
    "compile": (
        Effect.EITHER, "what the compiler keeps in place of eager operations", "deepcompile",
        "what element-wise operations save, and parameters gathered ahead",
    ),
    "expert_parallel": (Effect.UNKNOWN, "experts divided over ranks", None, "the experts' weights and states"),
    "graph_harvesting": (
        Effect.UP, "the private pool of a CUDA graph", None, "up to what forward and backward passes need",
    ),
    "elasticity": (
        Effect.EITHER, "batch sizes that it chooses", "enabled", "activations in proportion to the micro batch",
    ),
    "tensor_parallel": (
        Effect.UNKNOWN, "linears divided over ranks", None, "weights, states and activations, divided over the ranks",
    ),
    "torch_autocast": (
        Effect.UNKNOWN, "parameters in fp32, cast where they are used", "enabled",
        "2 bytes for each weight, and its cast copies",
    ),
}
_DEEPSPEED_IGNORES = "DeepSpeed ignores it"
#: Keys of ``zero_optimization`` with fields of the same name in ``DeepSpeedOptions`` -> (type, minimum).
_ZERO = {
    "reduce_bucket_size": ("integer", 1), "allgather_bucket_size": ("integer", 1), "overlap_comm": ("flag", 0),
    "contiguous_gradients": ("flag", 0), "reduce_scatter": ("flag", 0), "round_robin_gradients": ("flag", 0),
    "stage3_prefetch_bucket_size": ("integer", 0), "stage3_param_persistence_threshold": ("integer", 0),
    "stage3_model_persistence_threshold": ("integer", 1), "stage3_max_live_parameters": ("integer", 0),
    "stage3_max_reuse_distance": ("integer", 0), "sub_group_size": ("integer", 1),
    "zero_hpz_partition_size": ("integer", 1), "stage3_gather_16bit_weights_on_model_save": ("flag", 0),
}  # fmt: skip
#: Alternative key -> the key above; DeepSpeed accepts both (``populate_by_name``).
_ALIASES = {
    "prefetch_bucket_size": "stage3_prefetch_bucket_size",
    "param_persistence_threshold": "stage3_param_persistence_threshold",
    "model_persistence_threshold": "stage3_model_persistence_threshold",
    "max_live_parameters": "stage3_max_live_parameters", "max_reuse_distance": "stage3_max_reuse_distance",
    "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}  # fmt: skip
#: Options that stages below 3 ignore.
_OF_STAGE_3 = (
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size", "zero_hpz_partition_size",
    "stage3_gather_16bit_weights_on_model_save",
)  # fmt: skip
_ZERO_HARMLESS = (
    "allgather_partitions", "use_multi_rank_bucket_allreduce", "load_from_fp32_weights", "elastic_checkpoint",
    "ignore_unused_parameters", "legacy_stage1", "compute_grad_norm", "module_granularity_threshold",
    "stage3_module_granularity_threshold", "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params", "memory_efficient_linear", "pipeline_loading_checkpoint",
    "override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks", "cpu_offload_use_pin_memory",
    "save_muon_momentum_buffer_in_memory", "leaf_module",
)  # fmt: skip
_ZERO_UNMODELLED = {
    "zero_quantized_weights": (
        False, Effect.EITHER, "weights gathered in int8", "as large as the gathered weights of one module",
    ),
    "zero_quantized_nontrainable_weights": (
        False, Effect.DOWN, "frozen weights kept in int8", "half of the frozen weights",
    ),
    "zero_quantized_gradients": (
        False, Effect.EITHER, "gradients exchanged in int4", "as large as one bucket of gradients",
    ),
    "zeropp_loco_param": (None, Effect.UP, "error feedback of quantised gradients", "as large as the gradients"),
    "mics_shard_size": (
        -1, Effect.UP, "parameters divided over fewer ranks (MiCS)",
        "16 bytes for each parameter that is not divided further",
    ),
    "mics_hierarchical_params_gather": (
        False, Effect.UP, "a second copy of gathered parameters", "as large as the gathered weights of one module",
    ),
    "zenflow": (None, Effect.UNKNOWN, "which gradients stay on the GPU", "up to all gradients"),
    "parameter_alignment": (False, Effect.UP, "padding between parameters", "a few bytes for each parameter tensor"),
    "stage3_allgather_sequential": (
        False, Effect.DOWN, "no flattening buffer of gathered parameters",
        "as large as the gathered weights of one module",
    ),
    "allgather_sequential": (
        False, Effect.DOWN, "no flattening buffer of gathered parameters",
        "as large as the gathered weights of one module",
    ),
}
_OPTIMIZERS = {"adam": "adam", "adamw": "adamw", "lion": "lion", "sgd": "sgd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filler:
    """The program that fills in the "auto" values of a DeepSpeed config.

    Attributes:
        who: Its name in messages.
        values: Dotted key -> the value that it fills in (None: unknown).
        refuses: Dotted keys that must equal its value if they are not "auto" -> its name for them (``fill_match``).
    """

    who: str
    values: Mapping[str, Any] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)


def hidden_size_values(hidden_size: int, *, stage3: bool = True) -> dict[str, int]:
    """Bucket sizes, in elements, that accelerate and the Trainer derive from hidden size h: h^2, 0.9 h^2 and 10 h."""
    values = {"zero_optimization.reduce_bucket_size": hidden_size * hidden_size}
    if stage3:
        values["zero_optimization.stage3_prefetch_bucket_size"] = int(0.9 * hidden_size * hidden_size)
        values["zero_optimization.stage3_param_persistence_threshold"] = 10 * hidden_size
    return values


def filled(config: Mapping[str, Any], filler: Filler, specified: Specified, diagnostics: Diagnostics) -> dict[str, Any]:
    """A copy with every "auto" filled in by ``filler``, or dropped: DeepSpeed reads the others as its defaults
    (``config_utils.py: DeepSpeedConfigModel.__init__``)."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    zero = out.get("zero_optimization")
    stage3 = isinstance(zero, dict) and zero.get("stage") == 3
    values = dict(filler.values)
    sized = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    if specified.hidden_size is not None:
        values |= hidden_size_values(specified.hidden_size, stage3=stage3 or filler.who != "the HF Trainer")
    _fill(out, "", values, filler, diagnostics, [f"zero_optimization.{name}" for name in sized])
    return out


def _fill(
    table: dict[str, Any],
    where: str,
    values: Mapping[str, Any],
    filler: Filler,
    diagnostics: Diagnostics,
    sized: list[str],
) -> None:
    for key in list(table):
        name = f"{where}{key}"
        if isinstance(table[key], dict):
            _fill(table[key], f"{name}.", values, filler, diagnostics, sized)
        elif table[key] == AUTO:
            if values.get(name) is not None:
                table[key] = values[name]
                if name in sized:
                    diagnostics.assume(f"{name} is {table[key]:,}, as {filler.who} makes it of the model's hidden size")
            else:
                del table[key]
        elif name in filler.refuses and values.get(name) is not None and table[key] != values[name]:
            diagnostics.problem(
                name,
                f"is {show(table[key])}, and {filler.refuses[name]} is {show(values[name])}, which "
                f"{filler.who} refuses",
                'set one to the other, or set it to "auto"',
            )


def read_deepspeed(
    config: Mapping[str, Any],
    settings: Settings,
    specified: Specified,
    filler: Filler | None = None,
    *,
    where: str = "",
) -> None:
    """Read a parsed DeepSpeed config into ``settings``. ``where``: the table that contains it, for messages."""
    diagnostics = settings.diagnostics
    if filler is None:  # as accelerate, and the Trainer by default
        filler = Filler(who="accelerate or the HF Trainer", values={"gradient_clipping": 1.0})
    top = Section(filled(config, filler, specified, diagnostics), where, diagnostics)
    for keys in HARMLESS.values():
        top.ignore(*keys)
    for key, (effect, what, switch, order) in UNMODELLED.items():
        block = top.raw(key)
        if isinstance(block, Mapping):
            block = block.get(switch, False) if switch else bool(block)
        if block and block != AUTO:
            diagnostics.feature(f"{top.named(key)}: {what}", effect, order=order)
    if not any(key in top.data for key in _known()):
        diagnostics.problem(
            where or "the file", "holds no key of a DeepSpeed config", "give one, with zero_optimization"
        )
        return
    stage = _zero(top, settings)
    _precision(top, settings)
    _optimizer(top, settings, stage)
    _batch(top, settings, specified)
    settings.set(
        optimizer__clip_grad=float(top.number("gradient_clipping", DEFAULT_CLIPPING)),
        deepspeed__communication_data_type=top.choice("communication_data_type", ("fp32", "bf16", "fp16")),
        deepspeed__grad_accum_dtype=top.table("data_types").choice("grad_accum_dtype", ("fp32", "bf16", "fp16")),
    )
    _checkpointing(top.table("activation_checkpointing"))
    sequence = top.integer("sequence_parallel_size", 1, least=1)
    if sequence > 1:
        diagnostics.refuse(
            top.named("sequence_parallel_size"),
            f"is {sequence}: DeepSpeed-Ulysses is not counted here",
            "set it to 1 for an estimate without it",
        )
    for key in top.unread():
        top.ignored(key, _known(), _DEEPSPEED_IGNORES)


def _known() -> list[str]:
    return [
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "bf16",
        "fp16", "gradient_clipping", "zero_optimization", "communication_data_type", "activation_checkpointing",
        *(key for keys in HARMLESS.values() for key in keys), *UNMODELLED,
    ]


def _zero(top: Section, settings: Settings) -> int:
    diagnostics = settings.diagnostics
    zero = top.table("zero_optimization")
    stage: int = zero.integer("stage", 0, below=1 << 30)
    if stage not in (0, 1, 2, 3):
        zero.problem("stage", f"is {stage}", "it must be 0, 1, 2 or 3")
        stage = 0
    if stage == 0 and not diagnostics.problems:
        diagnostics.refuse(
            zero.named("stage"),
            "is 0: DeepSpeed without ZeRO is not counted here",
            "set stage 1, 2 or 3, or estimate with --engine ddp",
        )
    if stage:
        settings.set(data_parallel__engine=ENGINE_OF_STAGE[stage])
    options: dict[str, Any] = {}
    for alias, name in _ALIASES.items():
        if zero.has(alias):
            value = zero.flag(alias) if _ZERO[name][0] == "flag" else zero.integer(alias)
            if value is not None:
                options[name] = value
    for name, (kind, least) in _ZERO.items():
        value = zero.flag(name, None) if kind == "flag" else zero.integer(name, least=least, below=1 << 63)
        if value is not None:
            options[name] = value
    if options.get("stage3_model_persistence_threshold", 0) >= 1 << 40:
        del options["stage3_model_persistence_threshold"]  # sys.maxsize, DeepSpeed's word for no limit
    for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "stage3_max_live_parameters",
                 "stage3_max_reuse_distance", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if name in options:
            options[name] = min(options[name], (1 << 40) - 1)  # as good as no limit
    if stage < 3:
        # engine.py: _configure_zero_optimizer passes them to stage 3 only. One file may serve several stages.
        idle = [name for name in _OF_STAGE_3 if options.pop(name, None) is not None]
        if idle and stage:
            diagnostics.assume(f"{', '.join(idle)} of the DeepSpeed config: nothing at stage {stage} reads them")
    _offload(zero, stage, options, diagnostics)
    zero.ignore(*_ZERO_HARMLESS)
    for name, (default, effect, what, order) in _ZERO_UNMODELLED.items():
        zero.unmodelled(name, default, effect, what, order=order)
    if isinstance(zero.data.get("offload_optimizer"), Mapping) and zero.flag("round_robin_gradients") and stage == 3:
        zero.ignore("round_robin_gradients")
    zero.refuse_unread(
        [*_ZERO, *_ALIASES, *_ZERO_HARMLESS, *_ZERO_UNMODELLED, "stage", "offload_optimizer", "offload_param"],
        "DeepSpeed refuses it",
    )
    settings.set(**{f"deepspeed__{name}": value for name, value in options.items()})
    return stage


def _offload(zero: Section, stage: int, options: dict[str, Any], diagnostics: Diagnostics) -> None:
    devices = ("none", "cpu", "nvme")
    optimizer = zero.table("offload_optimizer")
    device = optimizer.choice("device", devices, "none")
    if zero.flag("cpu_offload"):  # deprecated: offload_optimizer.device "cpu"
        device = "cpu"
    if device != "none":
        options["offload_optimizer_device"] = device
        options["offload_optimizer_pin_memory"] = optimizer.flag("pin_memory", True)
        ratio = optimizer.number("ratio", 1.0, most=1.0)
        if ratio < 1 and stage != 3:
            optimizer.problem("ratio", f"is {ratio:g}", "below 1 it is for stage 3; set it to 1, or stage to 3")
        elif ratio < 1:
            options["offload_optimizer_ratio"] = ratio
        if device == "nvme" and stage != 3:
            optimizer.problem("device", "is 'nvme'", 'NVMe is for stage 3; use "cpu", or set stage to 3')
        if optimizer.flag("super_offload"):
            diagnostics.feature(
                f"{optimizer.named('super_offload')}: what it keeps on the GPU",
                Effect.EITHER,
                order="gradients of a bucket or two, up to all optimizer states of the GPU's share",
            )
    optimizer.ignore("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init", "pin_memory", "ratio",
                     "cpuadam_cores_perc", "super_offload", "buffer_size")
    optimizer.refuse_unread(("device", "nvme_path", "buffer_count", "pin_memory", "ratio"), "DeepSpeed refuses it")
    parameters = zero.table("offload_param")
    device = parameters.choice("device", devices, "none")
    if zero.flag("cpu_offload_param"):
        device = "cpu"
    if device != "none" and stage != 3:
        # engine.py: _configure_zero_optimizer passes it to stage 3 only; accelerate sets it for every stage.
        if stage:
            diagnostics.assume(
                f"{zero.named('offload_param')} does nothing: parameters are offloaded with stage 3 alone"
            )
    elif device != "none":
        options["offload_param_device"] = device
        options["offload_param_pin_memory"] = parameters.flag("pin_memory", True)
        if device == "nvme":
            for name in ("buffer_count", "buffer_size"):
                value = parameters.integer(name, least=1)
                if value is not None:
                    options[f"offload_param_{name}"] = value
    parameters.ignore("nvme_path", "max_in_cpu", "pin_memory", "buffer_count", "buffer_size")
    parameters.refuse_unread(("device", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pin_memory"),
                             "DeepSpeed refuses it")


def _precision(top: Section, settings: Settings) -> None:
    old = not top.has("bf16") and top.has("bfloat16")
    bf16, fp16 = top.table("bfloat16" if old else "bf16"), top.table("fp16")
    top.ignore("bf16", "bfloat16")
    both = bf16.flag("enabled"), fp16.flag("enabled")
    if all(both):
        top.problem("bf16.enabled", "is true, and so is fp16.enabled", "disable one")
    if not any(both):
        top.diagnostics.assume("weights in fp32, since the DeepSpeed config enables neither bf16 nor fp16")
    settings.set(precision__params_dtype="bf16" if both[0] else "fp16" if both[1] else "fp32")
    if both[0]:
        settings.set(
            deepspeed__bf16_master_weights_and_grads=bf16.flag("bf16_master_weights_and_grads", None),
            deepspeed__bf16_optimizer_states=bf16.flag("bf16_optimizer_states", None),
        )
    if both[1]:
        fp16.unmodelled("fp16_master_weights_and_grads", False, Effect.DOWN, "fp16 master weights and gradients",
                        order="4 bytes for each parameter of the rank's share")
    bf16.ignore("immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads",
                "bf16_optimizer_states")
    fp16.ignore("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale",
                "consecutive_hysteresis", "fp16_master_weights_and_grads")
    bf16.refuse_unread(("enabled", "bf16_master_weights_and_grads"), "DeepSpeed refuses it")
    fp16.refuse_unread(("enabled", "auto_cast", "loss_scale", "hysteresis"), "DeepSpeed refuses it")


def _optimizer(top: Section, settings: Settings, stage: int) -> None:
    if not top.has("optimizer"):
        return
    section = top.table("optimizer")
    kind = section.text("type")
    params = section.table("params")
    section.ignore("legacy_fusion")
    if kind is None:
        if not section.has("type"):
            section.problem("type", "is missing", 'name the optimizer, such as "AdamW"')
        return
    name = _OPTIMIZERS.get(kind.lower())
    if name is None:
        settings.diagnostics.refuse(
            section.named("type"),
            f"is {show(kind)}: its states are not counted here",
            f"use one of {', '.join(_OPTIMIZERS)}",
        )
        return
    # engine.py: _configure_basic_optimizer, get_optimizer_configuration. FusedAdam and FusedLion update in one kernel.
    torch_adam = params.flag("torch_adam") if name in ("adam", "adamw") else False
    settings.set(
        optimizer__optimizer=name,
        optimizer__torch_implementation="foreach" if torch_adam or name == "sgd" else "fused",
        optimizer__sgd_momentum=float(params.number("momentum", 0.0)) if name == "sgd" else None,
    )
    if params.has("max_grad_norm"):
        params.problem("max_grad_norm", "is no parameter of the optimizer, and DeepSpeed refuses it",
                       "use gradient_clipping")


def _batch(top: Section, settings: Settings, specified: Specified) -> None:
    """``_set_batch_related_parameters``, and ``_batch_assertion``."""
    train = top.integer("train_batch_size", least=1)
    micro = top.integer("train_micro_batch_size_per_gpu", least=1)
    steps = top.integer("gradient_accumulation_steps", least=1)
    world = specified.world_size or settings.world_size
    if train and micro and world is None:
        world = train // (micro * (steps or 1)) if train % (micro * (steps or 1)) == 0 else None
        if world and steps:
            settings.world_size = world
            settings.diagnostics.assume(
                f"{world} GPUs, as the three batch sizes of the DeepSpeed config say (--num-gpus)"
            )
        else:
            world = None
    if train and world:
        if micro and steps and train != micro * steps * world:
            top.problem(
                "train_batch_size", f"is {train}, not train_micro_batch_size_per_gpu x gradient_accumulation_steps x "
                f"GPUs ({micro} x {steps} x {world} = {micro * steps * world})",
                "correct one of them, or leave it out",
            )
        elif micro and not steps:
            steps = _quotient(top, train, micro * world, "train_micro_batch_size_per_gpu x GPUs")
        elif not micro:
            micro = _quotient(top, train, (steps or 1) * world, "gradient_accumulation_steps x GPUs")
    settings.set(batch__micro_batch_size=micro)
    settings.accumulation = steps or 1


def _quotient(top: Section, train: int, by: int, what: str) -> int | None:
    if train % by:
        top.problem("train_batch_size", f"is {train}, which {what} ({by}) does not divide", "choose a multiple")
        return None
    return train // by


def _checkpointing(section: Section) -> None:
    """activation_checkpointing affects only models that call ``deepspeed.checkpointing``: Megatron-DeepSpeed's do,
    transformers' do not."""
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        if section.flag(key):
            section.diagnostics.assume(
                f"{section.named(key)} does nothing: models of transformers checkpoint with torch's own function"
            )
    section.ignore("number_checkpoints", "synchronize_checkpoint_boundary", "profile")
    for key in section.unread():
        section.ignored(key, ("partition_activations", "cpu_checkpointing"), _DEEPSPEED_IGNORES)
