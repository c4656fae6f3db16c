"""The RunSpec of a report from the objects of a training loop.

    MemoryReport(run=lambda: run_of_accelerator(accelerator, model, micro_batch_size=4, seq_length=2048))
    MemoryReport(run=lambda: run_of_deepspeed(engine, seq_length=2048))
    MemoryReport(run=lambda: run_of_torchtitan(job_config))

The objects are read by the readers of the corresponding files; accelerate, DeepSpeed and torchtitan are not imported.
Each function raises SpecError where the run cannot be estimated, and whatever an unexpected object raises;
``MemoryReport`` turns either into one warning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from bridge_memory.live.place import world_size
from bridge_memory.readers import model_from_hf_config
from bridge_memory.readers.engines.accelerate import read_accelerate
from bridge_memory.readers.engines.deepspeed import read_deepspeed
from bridge_memory.readers.engines.peft import read_peft
from bridge_memory.readers.engines.run import apply_world_size, fields_of
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.readers.engines.torchtitan import read_torchtitan
from bridge_memory.readers.engines.training_args import read_training_args
from bridge_memory.readers.resolve import resolve_model
from bridge_memory.releases import release_in, release_words
from bridge_memory.spec import ModelSpec, ParallelSpec, RunSpec, SpecError, show
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.transformers import FAMILIES

#: torch's dtypes by their last word.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def run_of_trainer(
    args: Any, model: Any, *, seq_length: int | None = None, micro_batch_size: int | None = None
) -> RunSpec:
    """Read what a Trainer of Hugging Face holds as the run that it trains.

    Args:
        args: Its TrainingArguments.
        model: Its model, wrapped or not.
        seq_length: Tokens of a sequence. None: 4096.
        micro_batch_size: Sequences of a batch. None: as ``args`` say.

    Returns:
        The run, on the GPUs of the job that this process is part of.

    Raises:
        SpecError: The run cannot be estimated.

    Example:
        >>> from bridge_memory import run_of_trainer
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        ... )
        >>> from transformers import TrainingArguments
        >>> args = TrainingArguments(output_dir="out", per_device_train_batch_size=4, use_cpu=True, report_to=[])
        >>> run = run_of_trainer(args, model, seq_length=512)
        >>> run.data_parallel.engine, run.batch.micro_batch_size
        ('single', 4)
    """
    spec = model_of(model)
    settings = Settings(Diagnostics("TrainingArguments"))
    known = _known(spec)
    given = args.to_dict()
    # TrainingArguments convert some fields: words become lists, files become tables.
    given["fsdp"] = [getattr(word, "value", word) for word in given.get("fsdp") or []]
    filled = getattr(args, "hf_deepspeed_config", None)
    if filled is not None:
        given["deepspeed"] = dict(filled.config)
    if getattr(args, "n_gpu", 1) > 1 and known.world_size == 1:
        raise SpecError(f"n_gpu is {args.n_gpu}: DataParallel in one process is not estimated; start it with torchrun")
    given["use_cpu"] = False
    given["dtype"] = _adapted(_inner(model), settings)
    read_training_args(given, settings, known, _no_files)
    if getattr(args, "world_size", 1) > 1 and settings.engine is None:
        settings.set(data_parallel__engine="ddp")
    settings.set(batch__seq_length=seq_length, batch__micro_batch_size=micro_batch_size)
    return _run(spec, settings, model)


def run_of_accelerator(
    accelerator: Any, model: Any, *, micro_batch_size: int, seq_length: int, optimizer: Any = None
) -> RunSpec:
    """Read what a loop with accelerate holds as the run that it trains.

    Args:
        accelerator: The ``accelerate.Accelerator``.
        model: The Hugging Face model that it prepared.
        micro_batch_size: Sequences of a batch of one GPU.
        seq_length: Tokens of a sequence.
        optimizer: The optimizer that it prepared. None: torch's AdamW.

    Returns:
        The run, on the GPUs of the job that this process is part of.

    Raises:
        SpecError: The run cannot be estimated.

    Example:
        >>> from accelerate import Accelerator
        >>> from bridge_memory import MemoryReport, run_of_accelerator
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        ... )
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(model)
        >>> run = run_of_accelerator(accelerator, model, micro_batch_size=4, seq_length=512)
        >>> report = MemoryReport(run=run)  # with report: ... report.step()
    """
    spec = model_of(model)
    settings = Settings(Diagnostics("accelerate"))
    known = _known(spec)
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    precision = str(accelerator.mixed_precision)
    settings.set(batch__micro_batch_size=micro_batch_size)
    config: dict[str, Any] = {
        "distributed_type": kind if known.world_size != 1 or kind in ("FSDP", "DEEPSPEED") else "NO",
        "mixed_precision": precision, "num_processes": known.world_size,
    }  # fmt: skip
    if kind == "DEEPSPEED":
        read_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, settings, known)
    else:
        if kind == "FSDP":
            config["fsdp_config"] = _fsdp(accelerator.state.fsdp_plugin)
        read_accelerate(config, settings, known, _no_files)
    settings.accumulation = settings.accumulation or int(accelerator.gradient_accumulation_steps)
    settings.set(batch__micro_batch_size=micro_batch_size, batch__seq_length=seq_length)
    _optimizer(optimizer, settings)
    return _run(spec, settings, model)


def run_of_deepspeed(engine: Any, *, seq_length: int, model: Any = None) -> RunSpec:
    """Read what ``deepspeed.initialize`` returned as the run that it trains.

    Args:
        engine: The DeepSpeed engine.
        seq_length: Tokens of a sequence.
        model: The Hugging Face model. None: the engine's module.

    Returns:
        The run, on the GPUs of the job that this process is part of.

    Raises:
        SpecError: The run cannot be estimated.

    Example:
        >>> from types import SimpleNamespace
        >>> from bridge_memory import run_of_deepspeed
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
        ... )
        >>> engine = SimpleNamespace(  # engine, *_ = deepspeed.initialize(model=model, config=...)
        ...     module=model,
        ...     config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
        ... )
        >>> run_of_deepspeed(engine, seq_length=512).data_parallel.engine
        'zero2'
    """
    model = engine.module if model is None else model
    spec = model_of(model)
    settings = Settings(Diagnostics("DeepSpeed"))
    config = getattr(engine, "config", None)
    read_deepspeed(config if isinstance(config, Mapping) else engine._config._param_dict, settings, _known(spec))
    settings.set(batch__seq_length=seq_length)
    if settings.get("optimizer", "optimizer") is None:
        _optimizer(getattr(engine, "basic_optimizer", None), settings)
    return _run(spec, settings, model)


def run_of_torchtitan(job_config: Any, model: ModelSpec | str | None = None) -> RunSpec:
    """Read torchtitan's JobConfig as the run that it trains.

    Args:
        job_config: The JobConfig, a dataclass.
        model: What is trained, where ``job_config`` names no model that is known here.

    Returns:
        The run, on the GPUs of the job that this process is part of.

    Raises:
        SpecError: The run cannot be estimated, or its model is not known.

    Example:
        >>> from dataclasses import dataclass, field
        >>> from bridge_memory import run_of_torchtitan
        >>> @dataclass
        ... class JobConfig:  # torchtitan.config.JobConfig
        ...     model: dict = field(default_factory=lambda: {"name": "llama3", "flavor": "8B"})
        ...     training: dict = field(default_factory=lambda: {"local_batch_size": 2, "seq_len": 4096})
        ...     activation_checkpoint: dict = field(default_factory=lambda: {"mode": "none"})
        >>> run_of_torchtitan(JobConfig()).model.name
        'meta-llama/Llama-3.1-8B'
    """
    if not dataclasses.is_dataclass(job_config) or isinstance(job_config, type):
        raise SpecError(f"job_config ({show(job_config)}) is not torchtitan's; give its JobConfig")
    settings = Settings(Diagnostics("torchtitan"))
    table = {k: _written(v) for k, v in dataclasses.asdict(job_config).items()}
    read_torchtitan(
        {k: v for k, v in table.items() if isinstance(v, Mapping)}, settings, Specified(world_size=world_size())
    )
    name = model if model is not None else settings.model
    if name is None:
        raise SpecError("the model of this job_config is not known here; give model=")
    return _run(resolve_model(name) if isinstance(name, str) else name, settings, None)


def model_of(model: Any) -> ModelSpec:
    """The spec of a Hugging Face model, wrapped or not, from its config. Raises SpecError."""
    for _ in range(8):
        config = getattr(model, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            kind = str(getattr(config, "_name_or_path", "") or type(config).__name__)
            return model_from_hf_config(config.to_dict(), kind)
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None:
            break
        model = inner
    raise SpecError(f"model ({type(model).__name__}) has no Hugging Face config; give MemoryReport a RunSpec as run")


def _known(spec: ModelSpec) -> Specified:
    import sys

    release = release_in(getattr(sys.modules.get("transformers"), "__version__", None))
    known = Specified(world_size=world_size(), hidden_size=spec.hidden_size)
    return known if release is None else dataclasses.replace(known, transformers=release)


def _no_files(path: str) -> Mapping[str, Any]:
    raise SpecError(f"{path} is not read here; give its contents")


def _written(value: Any) -> Any:
    """The fields of a dataclass as TOML would hold them."""
    if not isinstance(value, Mapping):
        return value
    return {k: _written(v) for k, v in value.items() if v is not None}


def _fsdp(plugin: Any) -> dict[str, Any]:
    """A FullyShardedDataParallelPlugin as its accelerate YAML."""
    def name(value: Any) -> Any:
        return getattr(value, "name", value)

    wrap = plugin.auto_wrap_policy
    offload = plugin.cpu_offload
    found = {
        "fsdp_version": getattr(plugin, "fsdp_version", 1), "fsdp_sharding_strategy": name(plugin.sharding_strategy),
        "fsdp_reshard_after_forward": plugin.reshard_after_forward, "fsdp_use_orig_params": plugin.use_orig_params,
        "fsdp_backward_prefetch": name(plugin.backward_prefetch), "fsdp_forward_prefetch": plugin.forward_prefetch,
        "fsdp_auto_wrap_policy": "NO_WRAP" if wrap is None else (
            "SIZE_BASED_WRAP" if "size" in getattr(wrap, "__name__", "") else "TRANSFORMER_BASED_WRAP"),
        "fsdp_offload_params": offload if isinstance(offload, bool) else bool(
            getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")),
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
    }  # fmt: skip
    if found["fsdp_version"] == 1:
        found["fsdp_reshard_after_forward"] = None
    return {k: v for k, v in found.items() if v is not None}


#: Class of an optimizer -> (spec's name, its implementation where that is fixed).
_OPTIMIZERS = {
    "AdamW": ("adamw", None), "Adam": ("adam", None), "SGD": ("sgd", None), "FusedAdam": ("adamw", "fused"),
    "DeepSpeedCPUAdam": ("adamw", None), "Lion": ("lion", "fused"), "FusedLion": ("lion", "fused"),
    "AdamW8bit": ("adamw_8bit", "fused"), "PagedAdamW8bit": ("adamw_8bit", "fused"),
    "Adafactor": ("adafactor", "for-loop"),
}  # fmt: skip


def _optimizer(optimizer: Any, settings: Settings) -> None:
    """Set the optimizer behind accelerate's wrapper. An unknown one counts as AdamW, which becomes an assumption."""
    inner = getattr(optimizer, "optimizer", optimizer)
    known = _OPTIMIZERS.get(type(inner).__name__)
    if known is None:
        settings.set(optimizer__optimizer="adamw")
        settings.diagnostics.assume(f"torch's AdamW instead of the optimizer ({type(inner).__name__})")
        return
    defaults = getattr(inner, "defaults", {})
    asked = "fused" if defaults.get("fused") else "for-loop" if defaults.get("foreach") is False else "foreach"
    settings.set(optimizer__optimizer=known[0], optimizer__torch_implementation=known[1] or asked)
    if known[0] == "sgd":
        settings.set(optimizer__sgd_momentum=float(defaults.get("momentum", 0.0)))
    if type(inner).__name__.startswith("Paged"):
        settings.set(optimizer__paged=True)


def _inner(model: Any) -> Any:
    """The model inside an engine's wrappers."""
    while getattr(model, "module", None) is not None:
        model = model.module
    return model


def _loaded(model: Any, settings: Settings) -> None:
    """Set what the built model itself determines: attention, checkpointing, dtypes."""
    inner = _inner(model)
    config = getattr(inner, "config", None)
    attention = getattr(config, "_attn_implementation", None)
    if attention in ("eager", "sdpa", "flash_attention_2"):
        settings.set(transformers__attn_implementation=attention)
    # The first name is transformers' from 5.23 on, which warns of the second.
    on = getattr(inner, "is_activation_checkpointing", None)
    if getattr(inner, "is_gradient_checkpointing", False) if on is None else on:
        settings.set(transformers__gradient_checkpointing=True)
    elif getattr(config, "use_cache", False) and settings.get("transformers", "use_cache") is None:
        settings.set(transformers__use_cache=True)
    dtype = _DTYPES.get(str(_adapted(inner, settings)))
    frozen = settings.engine == "fsdp2" and settings.get("peft", "scheme") is not None
    if dtype is not None and (settings.engine in ("single", "ddp") or frozen):
        settings.set(precision__params_dtype=dtype)
        if dtype != "fp32":
            settings.groups.get("transformers", {}).pop("autocast", None)


def _adapted(model: Any, settings: Settings) -> str | None:
    """Read peft's adapters and bitsandbytes' quantisation. Returns the dtype of the model's own weights (frozen ones
    where adapters train); None where there are several."""
    parameters = list(model.parameters()) if hasattr(model, "parameters") else []
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return _one_dtype(p for p in parameters if p.requires_grad)
    (config, *others) = adapters.values()
    if others:
        settings.diagnostics.refuse("peft_config", f"has {len(adapters)} adapters", "train one")
    read_peft({k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}, settings, Specified())
    own = _one_dtype(p for p in parameters if not p.requires_grad and p.is_floating_point())
    quantization: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    if isinstance(quantization, Mapping) and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        four = bool(quantization.get("load_in_4bit"))
        settings.set(
            transformers__load_in_4bit=four or None, transformers__load_in_8bit=None if four else True,
            transformers__bnb_4bit_use_double_quant=(
                bool(quantization.get("bnb_4bit_use_double_quant")) and four
            ) or None,
            transformers__prepare_model_for_kbit_training=True if own == "float32" else None,
        )
        if four:
            compute = str(quantization.get("bnb_4bit_compute_dtype")).rsplit(".", 1)[-1]
            settings.set(transformers__bnb_4bit_compute_dtype=_DTYPES.get(compute))
    elif own != "float32" and _one_dtype(p for p in parameters if p.requires_grad) == own:
        settings.set(transformers__autocast_adapter_dtype=False)
    return own


def _one_dtype(parameters: Iterable[Any]) -> str | None:
    found = {str(p.dtype).rsplit(".", 1)[-1] for p in parameters}
    return found.pop() if len(found) == 1 else None


def _run(spec: ModelSpec, settings: Settings, model: Any) -> RunSpec:
    import sys

    world = world_size()
    if model is not None:
        _loaded(model, settings)
    release = release_in(getattr(sys.modules.get("transformers"), "__version__", None))
    if release is not None:
        last = FAMILIES[spec.model_type].until if spec.model_type in FAMILIES else release
        if release > last:
            installed, read = release_words(release), release_words(last)
            settings.diagnostics.assume(f"layers as in transformers {read}: those of {installed} were not read")
        settings.set(transformers__transformers_version=min(release, last))
    settings.diagnostics.check()
    given = fields_of(settings)
    apply_world_size(given, settings, world)
    groups: dict[str, Any] = {name: GROUPS[name](**fields) for name, fields in given.items() if name != "parallel"}
    return RunSpec(
        model=spec, parallel=ParallelSpec(world_size=world), assumptions=tuple(settings.diagnostics.assumptions),
        not_modelled=tuple(settings.diagnostics.not_modelled), **groups,
    )  # fmt: skip
