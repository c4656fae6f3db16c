"""The input format of GPU memory calculators: model, training, parallelism, engine, hardware.

    {"model": {"name": "llama2-7b", "num_parameters": "7B", "num_layers": 32, "hidden_size": 4096,
               "num_attention_heads": 32, "vocab_size": 32000, "max_seq_len": 4096},
     "training": {"batch_size": 4, "dtype": "bf16", "optimizer": "adamw", "activation_checkpointing": 4},
     "parallelism": {"data_parallel_size": 8}, "engine": {"type": "deepspeed", "zero_stage": 3},
     "hardware": {"num_gpus": 8, "gpu_memory_gb": 80}}

Unknown words are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bridge_memory.readers.engines.sections import Notes, Section
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import finite

#: Words of ``engine.type`` -> the form's own name of the engine.
ENGINES = {
    "pytorch_ddp": "pytorch_ddp", "pytorch": "pytorch_ddp", "ddp": "pytorch_ddp", "deepspeed": "deepspeed",
    "megatron_lm": "megatron_lm", "megatron": "megatron_lm", "megatron-lm": "megatron_lm", "fsdp": "fsdp",
    "megatron_deepspeed": "megatron_deepspeed", "megatron-deepspeed": "megatron_deepspeed",
}  # fmt: skip
DTYPES = {
    "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "half": "fp16", "bf16": "bf16",
    "bfloat16": "bf16", "int8": "int8", "int4": "int4",
}  # fmt: skip
OPTIMIZERS = ("adam", "adamw", "sgd", "adamw_8bit")
DEVICES = ("none", "cpu", "nvme")
STRATEGIES = ("no_shard", "shard_grad_op", "full_shard")
INTERCONNECTS = ("infiniband", "nvlink", "ethernet_10g", "ethernet_25g", "ethernet_100g", "ethernet_200g")
TABLES = ("model", "training", "parallelism", "engine", "hardware")
COUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([kmbt]?)\s*", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@dataclass(kw_only=True)
class ModelConfig:
    """The model: a preset, a path or a Hub id (``name``), or its sizes."""

    name: str = "custom"
    #: A number, or text such as "7B", "350M", "7e9".
    num_parameters: float | str | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    vocab_size: int = 32000
    #: Tokens of a sequence.
    max_seq_len: int = 2048
    largest_layer_params: float | str | None = None
    moe_enabled: bool = False
    num_experts: int = 8
    top_k: int = 2
    #: None: four times hidden_size.
    expert_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None


@dataclass(kw_only=True)
class TrainingConfig:
    """How it trains; ``batch_size`` is that of one GPU."""

    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    optimizer: str = "adamw"
    dtype: str = "bf16"
    #: 0: none, 4: every layer is run again in backward.
    activation_checkpointing: int = 0


@dataclass(kw_only=True)
class ParallelismConfig:
    """Parallel sizes; None: what is left of the GPUs."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int | None = None
    sequence_parallel: bool = False


@dataclass(kw_only=True)
class EngineConfig:
    """Who keeps model state."""

    type: str = "pytorch_ddp"
    #: 0 to 3; None: 2 with DeepSpeed, 1 with Megatron and DeepSpeed.
    zero_stage: int | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    zero_init: bool = True
    sharding_strategy: str = "full_shard"


@dataclass(kw_only=True)
class GPUConfig:
    """The GPUs."""

    num_gpus: int = 1
    gpu_memory_gb: float = 80
    total_gpu_memory_gb: float | None = None
    num_nodes: int | None = None
    gpus_per_node: int | None = None
    interconnect_type: str | None = None


@dataclass(kw_only=True)
class Form:
    """All five."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    hardware: GPUConfig = field(default_factory=GPUConfig)


def parameter_count(value: object) -> float:
    """Parameters from 7e9, "7B", "350M", "7e9". Raises SpecError."""
    if isinstance(value, str) and (found := COUNT.fullmatch(value)):
        value = float(found[1]) * _SCALE[found[2].lower()]
    if not finite(value) or isinstance(value, str):
        raise SpecError(f"num_parameters ({show(value)}) is no number of parameters; give one such as 7e9 or \"7B\"")
    number = float(value)  # type: ignore[arg-type]
    if not 1e5 <= number <= 1e14:
        raise SpecError(f"num_parameters ({show(value)}) is not within 1e5 and 1e14; give parameters, such as \"7B\"")
    return number


def as_mapping(form: Form) -> dict[str, Any]:
    """The form as a parsed file, without what is None."""
    return {
        table: {f.name: value for f in fields(part) if (value := getattr(part, f.name)) is not None}
        for table in TABLES
        for part in (getattr(form, table),)
    }


def read_form(config: Mapping[str, Any], notes: Notes) -> Form:
    """The form of a parsed file. What is wrong with it is in ``notes``."""
    config = dict(config)
    if isinstance(config.get("model"), str):  # a preset's name instead of the table
        config["model"] = {"name": config["model"]}
    for alias in ("gpu", "gpus"):
        if alias in config and "hardware" not in config:
            notes.problem(alias, "is unknown", "call it hardware")
    top = Section(config, "", notes)
    for table in TABLES:
        top.raw(table)
    form = Form(
        model=_model(top.table("model")), training=_training(top.table("training")),
        parallelism=_parallelism(top.table("parallelism")), engine=_engine(top.table("engine")),
        hardware=_hardware(top),
    )  # fmt: skip
    top.ignore("node_config", "description", "_comment", "comment", "gpu", "gpus")
    top.refuse_unread(TABLES, "nothing reads it")
    _agree(form, top, notes)
    return form


def _model(section: Section) -> ModelConfig:
    found = ModelConfig(
        name=section.text("name", "custom"), num_layers=section.integer("num_layers", least=1, below=10_001),
        hidden_size=section.integer("hidden_size", least=1, below=10**6),
        num_attention_heads=section.integer("num_attention_heads", least=1, below=10**5),
        vocab_size=section.integer("vocab_size", 32000, least=1, below=10**8),
        max_seq_len=section.integer("max_seq_len", 2048, least=1, below=2**28),
        num_parameters=_parameters(section, "num_parameters"),
        largest_layer_params=_parameters(section, "largest_layer_params"),
        moe_enabled=section.flag("moe_enabled"), num_experts=section.integer("num_experts", 8, least=1, below=10**5),
        top_k=section.integer("top_k", 2, least=1, below=10**5),
        expert_intermediate_size=section.integer("expert_intermediate_size", least=1, below=10**7),
        shared_expert_intermediate_size=section.integer("shared_expert_intermediate_size", least=1, below=10**7),
    )
    if found.moe_enabled and found.top_k > found.num_experts:
        section.problem("top_k", f"is {found.top_k}", f"it must be at most num_experts ({found.num_experts})")
    section.refuse_unread([f.name for f in fields(ModelConfig)], "nothing reads it")
    return found


def _parameters(section: Section, key: str) -> float | None:
    value = section.raw(key)
    if value is None:
        return None
    try:
        return parameter_count(value)
    except SpecError:
        section.problem(key, f"is {show(value)}", 'give a number of parameters such as 7e9 or "7B"')
        return None


def _training(section: Section) -> TrainingConfig:
    found = TrainingConfig(
        batch_size=section.integer("batch_size", 1, least=1, below=2**20),
        gradient_accumulation_steps=section.integer("gradient_accumulation_steps", 1, least=1, below=2**20),
        optimizer=section.choice("optimizer", OPTIMIZERS, "adamw"),
        dtype=DTYPES[section.choice("dtype", DTYPES, "bf16")],
        activation_checkpointing=section.integer("activation_checkpointing", 0, below=5),
    )
    if found.dtype in ("int8", "int4"):
        section.problem("dtype", f"is {found.dtype}, in which nothing trains: it is a format of frozen weights",
                        f"use bf16, or estimate with --peft lora --load-in-{found.dtype.removeprefix('int')}bit")
    section.ignore("gradient_clipping")
    section.refuse_unread([f.name for f in fields(TrainingConfig)], "nothing reads it")
    return found


def _parallelism(section: Section) -> ParallelismConfig:
    found = ParallelismConfig(
        tensor_parallel_size=section.integer("tensor_parallel_size", 1, least=1, below=2**20),
        pipeline_parallel_size=section.integer("pipeline_parallel_size", 1, least=1, below=2**20),
        data_parallel_size=section.integer("data_parallel_size", least=1, below=2**24),
        sequence_parallel=section.flag("sequence_parallel"),
    )
    section.refuse_unread([f.name for f in fields(ParallelismConfig)], "nothing reads it")
    return found


def _engine(section: Section) -> EngineConfig:
    found = EngineConfig(
        type=ENGINES[section.choice("type", ENGINES, "pytorch_ddp")], zero_stage=section.integer("zero_stage", below=4),
        offload_optimizer=section.choice("offload_optimizer", DEVICES, "none"),
        offload_param=section.choice("offload_param", DEVICES, "none"), zero_init=section.flag("zero_init", True),
        sharding_strategy=section.choice("sharding_strategy", STRATEGIES, "full_shard"),
    )
    own = {"deepspeed": ("zero_stage", "offload_optimizer", "offload_param", "zero_init"),
           "megatron_deepspeed": ("zero_stage", "offload_optimizer", "offload_param", "zero_init"),
           "fsdp": ("sharding_strategy",)}.get(found.type, ())  # fmt: skip
    for name in ("zero_stage", "offload_optimizer", "offload_param", "sharding_strategy"):
        idle = {"zero_stage": 0, "sharding_strategy": "full_shard"}.get(name, "none")
        if name not in own and section.has(name) and getattr(found, name) not in (idle, None):
            section.problem(name, f"is {show(getattr(found, name))}, which engine {found.type} has not",
                            "drop it, or change engine.type")
    section.refuse_unread([f.name for f in fields(EngineConfig)], "nothing reads it")
    return found


def _hardware(top: Section) -> GPUConfig:
    section = top.table("hardware")
    nodes = section.integer("num_nodes", least=1, below=2**20)
    each = section.integer("gpus_per_node", least=1, below=2**12)
    of_nodes = nodes * each if nodes and each else None
    found = GPUConfig(
        num_gpus=section.integer("num_gpus", of_nodes or 1, least=1, below=2**24),
        gpu_memory_gb=section.number("gpu_memory_gb", 80, least=1.0, most=1e5),
        total_gpu_memory_gb=section.number("total_gpu_memory_gb"), num_nodes=nodes, gpus_per_node=each,
        interconnect_type=section.choice("interconnect_type", INTERCONNECTS),
    )
    if of_nodes and found.num_gpus != of_nodes:
        section.problem("num_gpus", f"is {found.num_gpus}, not num_nodes x gpus_per_node ({of_nodes})", "correct one")
    section.refuse_unread([f.name for f in fields(GPUConfig)], "nothing reads it")
    return found


def _agree(form: Form, top: Section, notes: Notes) -> None:
    p, gpus = form.parallelism, form.hardware.num_gpus
    model = p.tensor_parallel_size * p.pipeline_parallel_size
    sizes = f"tensor x pipeline parallel size ({p.tensor_parallel_size} x {p.pipeline_parallel_size})"
    hardware = isinstance(top.data.get("hardware"), Mapping) and top.data["hardware"].get("num_gpus")
    if p.data_parallel_size is not None:
        needed = model * p.data_parallel_size
        if not hardware and gpus == 1:
            form.hardware.num_gpus = needed
        elif gpus != needed:
            notes.problem("hardware.num_gpus", f"is {gpus}, not {sizes} x data parallel size ({p.data_parallel_size})",
                          f"set it to {needed}, or leave data_parallel_size out")
    elif gpus % model:
        if not hardware and gpus == 1:
            form.hardware.num_gpus = model
        else:
            fix = f"use a multiple of {model}"
            notes.problem("hardware.num_gpus", f"is {gpus}, which {sizes} does not divide", fix)
    total = form.hardware.total_gpu_memory_gb
    if total is not None and abs(total - form.hardware.num_gpus * form.hardware.gpu_memory_gb) > 0.01 * total:
        notes.problem("hardware.total_gpu_memory_gb", f"is {total:g}, not num_gpus x gpu_memory_gb "
                      f"({form.hardware.num_gpus * form.hardware.gpu_memory_gb:g})", "leave it out")
