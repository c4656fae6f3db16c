"""``accelerate``'s YAML (``accelerate config``) -> settings of a run.

Sources: accelerate ``commands/config/config_args.py: ClusterConfig``, ``commands/launch.py``, ``utils/launch.py``,
``utils/dataclasses.py: DeepSpeedPlugin`` (1.15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from bridge_memory.readers.engines.deepspeed import Filler, read_deepspeed
from bridge_memory.readers.engines.fsdp import KNOWN as FSDP_KNOWN
from bridge_memory.readers.engines.fsdp import read_fsdp
from bridge_memory.readers.engines.sections import Section
from bridge_memory.readers.engines.settings import Settings, Specified, autocast
from bridge_memory.spec.unmodelled import Effect

#: A function that reads a file named in another one.
ReadFile = Callable[[str], Mapping[str, Any]]

TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
         "MULTI_MUSA", "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA", "TPU")  # fmt: skip
PRECISIONS = ("no", "fp16", "bf16", "fp8")
#: Where and how processes are launched.
HARMLESS = (
    "machine_rank", "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network",
    "gpu_ids", "num_machines", "enable_cpu_affinity", "debug", "tpu_name", "tpu_zone", "tpu_use_cluster",
    "tpu_use_sudo", "tpu_env", "tpu_vm", "command_file", "commands", "mpirun_config", "downcast_bf16", "fp8_config",
    "num_cpu_threads_per_process", "use_cpu", "compute_environment",
)  # fmt: skip
_KNOWN = (*HARMLESS, "distributed_type", "mixed_precision", "num_processes", "fsdp_config", "deepspeed_config",
          "parallelism_config", "megatron_lm_config", "dynamo_config", "dynamo_backend", "fp16")  # fmt: skip
_DEEPSPEED_HARMLESS = (
    "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names", "zero3_init_flag", "offload_optimizer_nvme_path", "offload_param_nvme_path",
)  # fmt: skip
#: Keys that accelerate refuses together with deepspeed_config_file (``_deepspeed_config_checks``).
_BESIDE_FILE = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
                "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
                "zero3_save_16bit_model")  # fmt: skip


def read_accelerate(
    config: Mapping[str, Any], settings: Settings, specified: Specified, read_file: ReadFile, *,
    filler: Filler | None = None, deepspeed_read: bool = False,
) -> None:  # fmt: skip
    """Read a parsed YAML into ``settings``.

    ``filler``: what fills in "auto" of its DeepSpeed config; None: accelerate. ``deepspeed_read``: another file gives
    the DeepSpeed config, which overrides the YAML's.
    """
    diagnostics = settings.diagnostics
    top = Section(config, "", diagnostics)
    kind = top.choice("distributed_type", TYPES)
    if kind is None and not top.has("distributed_type"):
        top.problem("distributed_type", "is missing", f"accelerate asks for one of {', '.join(TYPES[:4])}")
    if top.raw("compute_environment") not in (None, "LOCAL_MACHINE"):
        diagnostics.assume(f"compute_environment ({top.raw('compute_environment')}) is read as LOCAL_MACHINE")
    precision = top.choice("mixed_precision", PRECISIONS, "fp16" if top.flag("fp16") else "no")
    top.ignore("fp16", *HARMLESS)
    count = top.integer("num_processes", 1 if kind == "NO" else None, least=1, below=1 << 24)
    if kind == "MULTI_GPU" and count == 1:
        top.problem("num_processes", "is 1", "MULTI_GPU needs 2 or more; use distributed_type NO for one GPU")
    if count is None and kind is not None and specified.world_size is None:
        diagnostics.assume("accelerate's YAML says no num_processes (--num-gpus)")
    settings.world_size = count or settings.world_size
    for name in ("fsdp_config", "deepspeed_config", "megatron_lm_config", "parallelism_config", "dynamo_config"):
        top.table(name)
    _dynamo(top, settings)
    _parallelism(top.table("parallelism_config"), settings, kind, specified.world_size or settings.world_size)
    if kind == "MEGATRON_LM":
        diagnostics.refuse(
            "distributed_type", "is MEGATRON_LM", "give Megatron-LM's own arguments with --megatron-args"
        )
    elif kind == "DEEPSPEED":
        _deepspeed(top.table("deepspeed_config"), settings, specified, read_file, precision, filler, deepspeed_read)
    elif kind == "FSDP":
        section = top.table("fsdp_config")
        settings.set(precision__params_dtype="fp32")  # trainable parameters are upcast under mixed precision
        read_fsdp(section, settings, mixed_precision=None if precision == "no" else _dtype(precision),
                  version=1, wrap="NO_WRAP", use_orig_params=True, prefix="fsdp_")
        for key in section.unread():
            section.ignored(key, [f"fsdp_{name}" for name in FSDP_KNOWN], "accelerate passes over it")
    elif kind in ("NO", "MULTI_GPU"):
        _mixed(settings, precision, specified)
        settings.set(data_parallel__engine="single" if kind == "NO" else "ddp")
        if kind == "NO":
            settings.world_size = 1
    elif kind is not None:
        diagnostics.refuse(
            "distributed_type", f"is {kind}, which is not counted here", f"use one of {', '.join(TYPES[:4])}"
        )
    if precision == "fp8":
        diagnostics.feature(
            "mixed_precision (fp8): linears in fp8, counted in bf16",
            Effect.EITHER,
            order="a byte for each element that linears save, and for each weight",
        )
    top.refuse_unread(_KNOWN, "accelerate refuses it")


def _dtype(precision: str) -> str:
    return "bf16" if precision == "fp8" else precision


def _mixed(settings: Settings, precision: str, specified: Specified) -> None:
    """torch.autocast: parameters keep the dtype in which the script loaded them, fp32 by default."""
    weights = specified.weights or "fp32"
    mixed = None if precision == "no" else _dtype(precision)
    settings.set(precision__params_dtype=weights, transformers__autocast=autocast(mixed, weights, settings))


def _dynamo(top: Section, settings: Settings) -> None:
    dynamo = top.table("dynamo_config")
    backend = dynamo.raw("dynamo_backend") or dynamo.raw("backend") or top.raw("dynamo_backend") or "no"
    if str(backend).lower() != "no":
        settings.set(transformers__torch_compile=True)


def _parallelism(section: Section, settings: Settings, kind: str | None, world: int | None) -> None:
    if not section.data:
        return
    prefix = "parallelism_config_"
    sizes = {
        name: section.integer(f"{prefix}{name}_size", 1, least=1)
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    if kind != "FSDP":
        settings.diagnostics.problem(section.where, "is for FSDP2, and accelerate refuses it elsewhere", "remove it")
    for name in ("tp", "cp", "sp"):
        if sizes[name] > 1:
            settings.diagnostics.refuse(
                section.named(f"{prefix}{name}_size"), f"is {sizes[name]}, which is not counted here", "set it to 1"
            )
    product = prod(sizes.values())
    if world is not None and product not in (1, world):  # parallelism_config.py: _validate_accelerator
        settings.diagnostics.problem(
            section.where,
            f"has sizes of a product of {product}, and there are {world} processes",
            "make the product the processes",
        )
    if sizes["dp_replicate"] > 1 and sizes["dp_shard"] > 1:
        settings.set(fsdp__shard_degree=sizes["dp_shard"])


def _deepspeed(
    section: Section, settings: Settings, specified: Specified, read_file: ReadFile, precision: str,
    filler: Filler | None, elsewhere: bool,
) -> None:  # fmt: skip
    diagnostics = settings.diagnostics
    section.ignore(*_DEEPSPEED_HARMLESS)
    path = section.text("deepspeed_config_file")
    world = settings.world_size or specified.world_size
    specified = replace(specified, world_size=world)
    if path is not None and path != "none":
        for name in _BESIDE_FILE:
            if section.raw(name) is not None:
                section.problem(name, "stands beside deepspeed_config_file, which accelerate refuses",
                                "say it in the DeepSpeed file")
        if not elsewhere:
            read_deepspeed(read_file(path), settings, specified, filler or _accelerate(settings, precision))
        return
    # DeepSpeedPlugin.__post_init__, and the launcher's defaults.
    config: dict[str, Any] = {
        "gradient_accumulation_steps": section.raw("gradient_accumulation_steps", "auto"),
        "gradient_clipping": section.raw("gradient_clipping", "auto"),
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {
            "stage": section.raw("zero_stage", 2),
            "offload_optimizer": {"device": section.raw("offload_optimizer_device", "none")},
            "offload_param": {"device": section.raw("offload_param_device", "none")},
            "stage3_gather_16bit_weights_on_model_save": section.flag("zero3_save_16bit_model", False),
        },
    }
    if precision in ("bf16", "fp8"):
        config["bf16"] = {"enabled": True}
    elif precision == "fp16":
        config["fp16"] = {"enabled": True}
    for key in section.unread():
        known = (*_DEEPSPEED_HARMLESS, *_BESIDE_FILE, "deepspeed_config_file")
        section.ignored(key, known, "accelerate passes over it")
    if diagnostics.problems or elsewhere:
        return
    read_deepspeed(config, settings, specified, filler or _accelerate(settings, precision), where=section.where)


def _accelerate(settings: Settings, precision: str) -> Filler:
    """The filler of accelerate without a Trainer (``_prepare_deepspeed``, ``set_mixed_precision``)."""
    return Filler(who="accelerate", values={
        "gradient_accumulation_steps": 1, "gradient_clipping": 1.0,
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        "fp16.enabled": precision == "fp16", "bf16.enabled": precision in ("bf16", "fp8"),
        "train_micro_batch_size_per_gpu": settings.get("batch", "micro_batch_size"),
    })  # fmt: skip
