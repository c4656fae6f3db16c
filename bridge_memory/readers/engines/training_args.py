"""Hugging Face's TrainingArguments, as JSON or YAML -> settings of a run.

Sources: transformers ``training_args.py: TrainingArguments`` (4.57, 5.12 and 5.24), ``trainer.py: Trainer``,
``trainer_optimizer.py``, ``modeling_utils.py: gradient_checkpointing_enable``; ``hf_argparser.py: parse_dict`` for
refused keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bridge_memory.readers.engines.accelerate import ReadFile
from bridge_memory.readers.engines.deepspeed import Filler, read_deepspeed
from bridge_memory.readers.engines.fsdp import KNOWN as FSDP_KNOWN
from bridge_memory.readers.engines.fsdp import STRATEGIES, read_fsdp
from bridge_memory.readers.engines.scripts import Loaded, read_script
from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import Settings, Specified, autocast
from bridge_memory.spec import show
from bridge_memory.spec.unmodelled import Effect


class Optimizer(NamedTuple):
    """The optimizer that a value of ``optim`` selects, and its implementation."""

    name: str
    implementation: str = "fused"
    paged: bool = False


#: ``OptimizerNames`` whose states are counted. bitsandbytes updates one parameter at a time, in place.
OPTIMIZERS = {
    "adamw_torch": Optimizer("adamw", "foreach"), "adamw_torch_fused": Optimizer("adamw"),
    "adamw_apex_fused": Optimizer("adamw"), "adamw_hf": Optimizer("adamw", "for-loop"),
    "adafactor": Optimizer("adafactor", "for-loop"), "sgd": Optimizer("sgd", "foreach"),
    "adamw_bnb_8bit": Optimizer("adamw_8bit"), "adamw_8bit": Optimizer("adamw_8bit"),
    "lion_32bit": Optimizer("lion"), "lion_8bit": Optimizer("lion_8bit"),
    "paged_adamw_32bit": Optimizer("adamw", paged=True), "paged_adamw": Optimizer("adamw", paged=True),
    "paged_adamw_8bit": Optimizer("adamw_8bit", paged=True), "paged_lion_32bit": Optimizer("lion", paged=True),
    "paged_lion_8bit": Optimizer("lion_8bit", paged=True),
}  # fmt: skip
#: Values of ``optim`` that are not supported here.
OTHERS = (
    "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "adamw_torch_4bit", "adamw_torch_8bit",
    "ademamix", "adagrad", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "rmsprop", "rmsprop_bnb",
    "rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor",
    "galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "lomo", "adalomo",
    "grokadamw", "schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw",
    "apollo_adamw_layerwise", "stable_adamw",
)  # fmt: skip

#: Reason -> fields that do not change the memory of a training step.
HARMLESS: dict[str, str] = {
    "folders, names and hubs": """
        output_dir overwrite_output_dir logging_dir run_name project trackio_space_id trackio_bucket_id
        trackio_static_space_id push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push
        hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token
    """,
    "logging, saving and evaluation schedules": """
        logging_strategy logging_first_step logging_steps logging_nan_inf_filter log_level log_level_replica
        log_on_each_node report_to disable_tqdm save_strategy save_steps save_total_limit save_safetensors
        save_on_each_node save_only_model restore_callback_states_from_checkpoint load_best_model_at_end
        metric_for_best_model greater_is_better enable_jit_checkpoint resume_from_checkpoint eval_steps eval_delay
        eval_on_start eval_accumulation_steps eval_use_gather_object eval_do_concat_batches batch_eval_metrics
        include_for_metrics
        include_inputs_for_metrics include_tokens_per_second include_num_input_tokens_seen prediction_loss_only
        do_train do_predict past_index label_names use_legacy_prediction_loop
    """,
    "numbers, not sizes": """
        learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon num_train_epochs max_steps lr_scheduler_type
        lr_scheduler_kwargs warmup_ratio warmup_steps seed data_seed full_determinism tf32 average_tokens_across_devices
        optim_args
    """,
    "how data are read": """
        dataloader_drop_last dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory
        dataloader_persistent_workers dataloader_in_order dataloader_multiprocessing_context remove_unused_columns
        ignore_data_skip group_by_length length_column_name
        train_sampling_strategy
    """,
    "how processes are launched": """
        fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
        local_rank ddp_backend ddp_timeout ddp_broadcast_buffers ray_scope tpu_num_cores tpu_metrics_debug _n_gpu
        mp_parameters no_cuda use_mps_device
    """,
    "deprecated, or for another kind of run": """
        fp16_opt_level half_precision_backend fp16_backend jit_mode_eval torchdynamo skip_memory_metrics
        per_gpu_train_batch_size per_gpu_eval_batch_size torch_empty_cache_steps bf16_full_eval fp16_full_eval
        torch_compile_backend torch_compile_mode
    """,
}
#: Fields of scripts and of TRL's SFTConfig in the same files.
OF_SCRIPTS = """
    model_name_or_path dataset_name dataset_path dataset_config dataset_train_split dataset_test_split
    dataset_text_field dataset_num_proc train_file validation_file preprocessing_num_workers overwrite_cache
    tokenizer_name trust_remote_code use_fast_tokenizer cache_dir token config_name chat_template_path
"""
_READ = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "activation_checkpointing", "activation_checkpointing_kwargs", "bf16", "fp16",
    "optim", "adafactor", "fsdp", "fsdp_config", "deepspeed", "torch_compile", "max_grad_norm", "use_liger_kernel",
    "liger_kernel_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph", "use_cache",
    "accelerator_config", "parallelism_config", "use_cpu", "auto_find_batch_size", "max_length", "max_seq_length",
    "packing",
)  # fmt: skip


def read_training_args(
    config: Mapping[str, Any], settings: Settings, specified: Specified, read_file: ReadFile, *,
    deepspeed: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Read parsed TrainingArguments into ``settings``. ``deepspeed``: a DeepSpeed config given separately, which
    replaces their ``deepspeed``."""
    diagnostics = settings.diagnostics
    top = Section(config, "", diagnostics)
    for names in HARMLESS.values():
        top.ignore(*names.split())
    _batch(top, settings)
    mixed = _precision(top)
    optimizer = _optimizer(top, settings, specified)
    settings.set(
        optimizer__clip_grad=float(top.number("max_grad_norm", 1.0)),
        transformers__torch_compile=top.flag("torch_compile") or None,
        transformers__use_cache=top.flag("use_cache", None),
    )
    top.ignore("torch_compile_backend", "torch_compile_mode")
    loaded = read_script(top, settings, specified, mixed)
    checkpointing = _checkpointing(top, settings, loaded)
    _liger(top, settings)
    _unmodelled(top, settings)
    own = top.raw("deepspeed")
    table = deepspeed if deepspeed is not None else own
    if isinstance(table, str):
        table = read_file(table)
    if table is not None and not isinstance(table, Mapping):
        top.problem("deepspeed", f"is {show(table)}", "give a DeepSpeed config or its file")
        table = None
    sharded = _fsdp_words(top)
    if table is not None and sharded is not None:
        top.problem("fsdp", "stands beside deepspeed", "use one of them")
    if table:
        _deepspeed(table, top, settings, specified, mixed, optimizer)
    elif sharded is not None:
        _fsdp(top, settings, specified, read_file, sharded, mixed, _weights(loaded, specified, settings))
    else:
        table = top.raw("fsdp_config")
        if any(table.values()) if isinstance(table, Mapping) else table:
            diagnostics.assume("fsdp_config does nothing without fsdp")
        _as_launched(top, settings, mixed, checkpointing, loaded, specified)
    top.ignore("fsdp_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_static_graph")
    known = [*_READ, *(name for names in HARMLESS.values() for name in names.split())]
    top.ignore(*OF_SCRIPTS.split())
    for key in top.unread():
        top.ignored(key, known, "no field of TrainingArguments, whose parser refuses it unless the script has it")


def _batch(top: Section, settings: Settings) -> None:
    micro = top.integer("per_device_train_batch_size", 8, least=1)
    if not top.has("per_device_train_batch_size"):
        settings.diagnostics.assume("per_device_train_batch_size 8, the Trainer's default")
    settings.accumulation = top.integer("gradient_accumulation_steps", 1, least=1)
    length = top.integer("max_length", None, least=1) or top.integer("max_seq_length", None, least=1)
    settings.set(batch__micro_batch_size=micro, batch__seq_length=length,
                 batch__packed_sequences=top.flag("packing") or None)


def _precision(top: Section) -> str | None:
    bf16, fp16 = top.flag("bf16"), top.flag("fp16")
    if bf16 and fp16:
        top.problem("fp16", "is true, and so is bf16, which the Trainer refuses", "set one")
    return "bf16" if bf16 else "fp16" if fp16 else None


def _optimizer(top: Section, settings: Settings, specified: Specified) -> str:
    word = top.choice("optim", (*OPTIMIZERS, *OTHERS), "adamw_torch_fused")
    if top.flag("adafactor"):
        word = "adafactor"
    if word in OTHERS:
        settings.diagnostics.refuse(
            "optim", f"is {word}, whose states are not counted here", f"use one of {', '.join(OPTIMIZERS)}"
        )
        return str(word)
    found = OPTIMIZERS[word]
    momentum = 0.0 if found.name == "sgd" else None
    settings.set(optimizer__optimizer=found.name, optimizer__torch_implementation=found.implementation,
                 optimizer__paged=found.paged or None, optimizer__sgd_momentum=momentum)
    if top.has("optim_args"):
        settings.diagnostics.assume("optim_args change numbers of the optimizer, not its states")
    return str(word)


def _checkpointing(top: Section, settings: Settings, loaded: Loaded) -> bool:
    # From 5.23 on the names with "activation" come first (``TrainingArguments.__post_init__``).
    old = top.flag("gradient_checkpointing", bool(loaded.checkpointing))
    on: bool = top.flag("activation_checkpointing", old)
    tables = top.table("gradient_checkpointing_kwargs"), top.table("activation_checkpointing_kwargs")
    kwargs = tables[1] if top.raw("activation_checkpointing_kwargs") is not None else tables[0]
    if on:
        settings.set(transformers__gradient_checkpointing=True,
                     transformers__use_reentrant=kwargs.flag("use_reentrant", None))
        kwargs.unmodelled("every_n_layers", 1, Effect.UP, "what layers keep that are not checkpointed",
                          order="the activations of all layers but every n-th")
        kwargs.unmodelled("offload", False, Effect.DOWN, "inputs of checkpoints in host memory",
                          order="layers x sequence x hidden elements")
    kwargs.ignore("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop", "every_n_layers",
                  "offload")
    kwargs.refuse_unread(("use_reentrant", "preserve_rng_state"), "torch's checkpoint refuses it")
    return on


def _liger(top: Section, settings: Settings) -> None:
    """``liger_kernel/transformers/monkey_patch.py: apply_liger_kernel_to_llama``: its defaults, overridden by
    liger_kernel_config."""
    if not top.flag("use_liger_kernel"):
        top.ignore("liger_kernel_config")
        return
    section = top.table("liger_kernel_config")
    defaults = {
        "rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": True
    }  # fmt: skip
    on = tuple(name for name, default in defaults.items() if section.flag(name, default))
    settings.set(transformers__liger_kernel=on)
    section.ignore("geglu", "layer_norm")
    section.refuse_unread(tuple(defaults), "Liger refuses it")


def _unmodelled(top: Section, settings: Settings) -> None:
    top.unmodelled("neftune_noise_alpha", None, Effect.UP, "noise of the size of the embeddings' output",
                   order="two times s b h elements")
    top.unmodelled("label_smoothing_factor", 0.0, Effect.UP, "log-probabilities of all tokens",
                   order="4 s b V bytes, once or twice")
    top.unmodelled("auto_find_batch_size", False, Effect.DOWN, "a smaller batch where the first one does not fit",
                   order="half of the activations, a quarter and so on")
    top.unmodelled("optim_target_modules", None, Effect.EITHER, "which parameters the optimizer updates",
                   order="up to all gradients and optimizer states")
    top.unmodelled("parallelism_config", None, Effect.UNKNOWN, "accelerate's tensor and context parallelism",
                   order="weights, states and activations, divided over the ranks")
    top.unmodelled("debug", "", Effect.UP, "what debugging keeps",
                   order="a few numbers for each module")
    batch = top.integer("per_device_eval_batch_size", 8, least=1)
    evaluates = top.raw("eval_strategy", top.raw("evaluation_strategy", "no"))
    if top.flag("do_eval") or str(evaluates).lower() not in ("no", "false"):
        train = top.integer("per_device_train_batch_size", 8, least=1)
        if batch > train:
            settings.set(transformers__eval_micro_batch_size=batch)
        else:
            top.diagnostics.assume(
                "evaluation holds less than training: its batches are no larger and keep nothing for "
                "backward (no compute_metrics, which gathers logits)"
            )
    top.ignore("evaluation_strategy")
    if top.flag("use_cpu"):
        top.diagnostics.refuse("use_cpu", "is true: nothing runs on a GPU", "set it to false")
    accelerator = top.raw("accelerator_config")
    if isinstance(accelerator, Mapping):
        section = top.table("accelerator_config")
        if section.flag("split_batches"):
            top.diagnostics.refuse(
                "accelerator_config.split_batches",
                "is true, which is not counted here",
                "set it to false and divide the batch size by the GPUs",
            )
        kwargs = section.table("gradient_accumulation_kwargs")
        if kwargs.flag("sync_each_batch"):
            top.diagnostics.feature(
                "accelerator_config.gradient_accumulation_kwargs.sync_each_batch: gradients reduced in every "
                "step of accumulation",
                Effect.DOWN,
                order="up to the whole gradients",
            )


def _weights(loaded: Loaded, specified: Specified, settings: Settings) -> str:
    """The dtype in which a script loads weights (``modeling_utils.py: PreTrainedModel.from_pretrained``)."""
    if specified.weights is not None:
        return specified.weights
    if loaded.weights is not None:
        return loaded.weights
    if specified.transformers >= (5, 0):
        settings.diagnostics.assume(
            "weights loaded in bf16, the checkpoint's own dtype, as transformers 5 does by default (--precision)"
        )
        return "bf16"
    settings.diagnostics.assume("weights loaded in fp32, as transformers 4 does by default (--precision)")
    return "fp32"


def _sharded_weights(loaded: str, mixed: str | None, settings: Settings) -> str:
    """accelerate upcasts trainable parameters under mixed precision; frozen weights keep their dtype."""
    return "fp32" if mixed is not None and settings.get("peft", "scheme") is None else loaded


def _as_launched(
    top: Section, settings: Settings, mixed: str | None, checkpointing: bool, loaded: Loaded, specified: Specified
) -> None:
    """TrainingArguments that enable neither DeepSpeed nor FSDP: the engine of ``accelerate launch``, else DDP.

    The Trainer's mixed precision overrides the launcher's. By default DDP finds unused parameters unless layers are
    checkpointed (``trainer.py``).
    """
    if settings.engine in ("fsdp1", "fsdp2"):
        # The launcher's mixed precision, if the Trainer sets none.
        narrow = mixed or settings.get("fsdp", "param_dtype")
        shards = _sharded_weights(_weights(loaded, specified, settings), narrow, settings)
        settings.set(fsdp__param_dtype=mixed, fsdp__reduce_dtype=mixed, precision__params_dtype=shards)
        return
    if settings.engine in ("zero1", "zero2", "zero3"):
        settings.set(precision__params_dtype=mixed)
        return
    weights = _weights(loaded, specified, settings)
    settings.set(
        data_parallel__engine=settings.engine or "ddp", precision__params_dtype=weights,
        transformers__autocast=autocast(mixed, weights, settings),
        ddp__find_unused_parameters=top.flag("ddp_find_unused_parameters", not checkpointing),
        ddp__bucket_cap_mb=top.number("ddp_bucket_cap_mb"), ddp__static_graph=top.flag("ddp_static_graph", None),
    )  # fmt: skip


def _fsdp_words(top: Section) -> list[str] | None:
    """The words of ``fsdp``; None if FSDP is off. True means full_shard."""
    value = top.raw("fsdp")
    if value in (None, False, "", []):
        return None
    if value is True:
        return ["full_shard"]
    words = value.split() if isinstance(value, str) else [str(v) for v in value] if isinstance(value, list) else None
    if words is None:
        top.problem("fsdp", f"is {show(value)}", 'give words such as "full_shard auto_wrap", or true')
        return None
    known = ("offload", "auto_wrap", *(name.lower() for name in STRATEGIES))
    for word in words:
        if word not in known:
            top.problem("fsdp", f"has {show(word)}, which is unknown", f"use {', '.join(known)}")
    if words == ["offload"]:
        top.problem("fsdp", "is offload alone, which the Trainer refuses", 'give "full_shard offload"')
    if "full_shard" in words and "shard_grad_op" in words:
        top.problem("fsdp", "has full_shard and shard_grad_op", "keep one")
    return words


def _fsdp(
    top: Section,
    settings: Settings,
    specified: Specified,
    read_file: ReadFile,
    words: list[str],
    mixed: str | None,
    weights: str,
) -> None:
    """``TrainingArguments.__post_init__`` of 4.57 and ``_process_fsdp_args`` of 5: ``fsdp`` with ``fsdp_config``."""
    given = top.raw("fsdp_config", {})
    table = read_file(given) if isinstance(given, str) else given
    if not isinstance(table, Mapping):
        top.problem("fsdp_config", f"is {show(table)}", "give a table or its file")
        table = {}
    config = {str(k).removeprefix("fsdp_"): v for k, v in table.items()}
    newer = specified.transformers >= (5, 0)
    version = 2 if newer else 1
    strategies = [w for w in words if w.upper() in STRATEGIES]
    if strategies:
        two = str(config.get("version", version)) == "2"
        if two and strategies[0] not in ("full_shard", "shard_grad_op"):
            top.problem("fsdp", f"has {strategies[0]}, which FSDP2 does not know", "set fsdp_config.version to 1")
        elif two:
            config.setdefault("reshard_after_forward", strategies[0] == "full_shard")
        elif newer:
            config.setdefault("reshard_after_forward", strategies[0])
        else:
            config.setdefault("sharding_strategy", strategies[0])
    if "offload" in words:
        config.setdefault("offload_params", True)
    wraps = newer or "auto_wrap" in words
    if not newer:
        config.setdefault("auto_wrap_policy", "NO_WRAP" if not wraps else (
            "SIZE_BASED_WRAP" if config.get("min_num_params") else "TRANSFORMER_BASED_WRAP"))
    section = Section(config, "fsdp_config", settings.diagnostics)
    settings.set(precision__params_dtype=_sharded_weights(weights, mixed, settings))
    read_fsdp(section, settings, mixed_precision=mixed, version=version, wrap="TRANSFORMER_BASED_WRAP",
              use_orig_params=True)
    for key in section.unread():
        section.ignored(key, FSDP_KNOWN, "the Trainer passes over it")


def _deepspeed(
    table: Mapping[str, Any], top: Section, settings: Settings, specified: Specified, mixed: str | None, optimizer: str
) -> None:
    """``HfTrainerDeepSpeedConfig.trainer_config_process``: the values that it fills in, and those that must agree."""
    micro, steps = settings.get("batch", "micro_batch_size"), settings.accumulation
    world = specified.world_size or settings.world_size
    values = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps,
        "train_batch_size": micro * steps * world if micro and steps and world else None,
        "gradient_clipping": float(top.number("max_grad_norm", 1.0)), "fp16.enabled": mixed == "fp16",
        "bf16.enabled": mixed == "bf16", "amp.enabled": False,
    }  # fmt: skip
    names = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x GPUs",
        "gradient_clipping": "max_grad_norm", "fp16.enabled": "fp16", "bf16.enabled": "bf16",
    }  # fmt: skip
    # accelerate: set_mixed_precision adds the dtype's block if the file has none.
    config = dict(table)
    if mixed is not None:
        config.setdefault(mixed, {"enabled": True})
    # The Trainer's data loader determines it, whatever the DeepSpeed config says.
    config.setdefault("train_micro_batch_size_per_gpu", micro)
    if "gradient_accumulation_steps" not in config and steps and steps > 1:
        # DeepSpeedPlugin.__post_init__ sets 1, and accelerate takes DeepSpeed's.
        settings.diagnostics.assume(
            f"1 step of accumulation, in place of gradient_accumulation_steps ({steps}), which the "
            "DeepSpeed config does not say"
        )
    filler = Filler(who="the HF Trainer", values=values, refuses=names)
    read_deepspeed(config, settings, specified, filler)
    if "optimizer" in config:
        settings.diagnostics.assume(f"the DeepSpeed config's optimizer, in place of optim ({optimizer})")
