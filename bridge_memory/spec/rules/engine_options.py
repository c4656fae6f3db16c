"""What engines outside megatron-core refuse: its flags, parallel sizes they lack, and options of other engines."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bridge_memory.spec.checkpoint import CheckpointSpec
from bridge_memory.spec.engine_options import (
    DEFAULT_DDP_OPTIONS,
    DEFAULT_DEEPSPEED_OPTIONS,
    DEFAULT_FSDP_OPTIONS,
)
from bridge_memory.spec.errors import SpecError, show
from bridge_memory.spec.fields import Checked, called
from bridge_memory.spec.layout_string import parse_layout_string
from bridge_memory.spec.parts import ENGINE_OPTIONS, TORCH_OPTIMIZERS, WITH_MEGATRON_LAYOUTS

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec

_DEFAULTS: dict[str, Checked] = {
    "ddp": DEFAULT_DDP_OPTIONS, "fsdp": DEFAULT_FSDP_OPTIONS, "deepspeed": DEFAULT_DEEPSPEED_OPTIONS,
}  # fmt: skip
#: Fields of megatron-core's data parallelism and optimizers: group, field, the value that means "not used".
_OF_MEGATRON: tuple[tuple[str, str, Any], ...] = (
    ("parallel", "num_distributed_optimizer_instances", 1), ("data_parallel", "overlap_grad_reduce", False),
    ("data_parallel", "overlap_param_gather", False), ("data_parallel", "bucket_size", None),
    ("optimizer", "use_precision_aware_optimizer", False), ("optimizer", "use_layer_wise_distributed_optimizer", False),
    ("optimizer", "optimizer_cpu_offload", False), ("optimizer", "log_params_norm", False),
    ("precision", "fp8", None), ("precision", "fp4", None), ("precision", "fp32_residual_connection", False),
    *(("checkpoint", f.name, f.default) for f in fields(CheckpointSpec)),
)  # fmt: skip
_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
#: Fields of FSDPOptions that only one of the two engines has.
_OF_FSDP1 = ("sharding_strategy", "limit_all_gathers", "use_orig_params")
_OF_FSDP2 = ("reshard_after_forward", "pin_memory")
#: Optimizers that are modelled for DeepSpeed's flat partitions.
_ZERO_OPTIMIZERS = ("adam", "adamw", "sgd", "lion")


def check_engine(run: RunSpec) -> None:
    """Raise SpecError for fields that the engine does not support."""
    d, o = run.data_parallel, run.optimizer
    if run.implementation.own_layers and d.engine in WITH_MEGATRON_LAYOUTS:
        raise SpecError(
            f"transformer_impl ({run.implementation.transformer_impl}): engine {d.engine} runs megatron-core's layers; "
            "use transformer_engine or local, or engine fsdp2"
        )
    own = ENGINE_OPTIONS.get(d.engine)
    for group, default in _DEFAULTS.items():
        given = getattr(run, group)
        if given is not default and group != own and given != default:
            raise _foreign(run, group, default)
    if d.of_megatron:
        if o.optimizer in TORCH_OPTIMIZERS:
            raise SpecError(
                f"optimizer ({o.optimizer}) is not one of megatron-core's, which engine {d.engine} needs; use adam, "
                "sgd or muon, or engine fsdp2, ddp or single"
            )
        for name, off in (("torch_implementation", "foreach"), ("paged", False)):
            if getattr(o, name) != off:
                raise SpecError(
                    f"{name} ({show(getattr(o, name))}) is for torch's optimizers, not engine {d.engine}; drop it"
                )
        if d.sync_each_batch:
            raise SpecError(f"sync_each_batch (True) is for engines ddp, fsdp1 and fsdp2, not {d.engine}; drop it")
        return
    _check_outside(run)
    if own == "fsdp":
        _check_fsdp(run)
    elif own == "deepspeed":
        _check_deepspeed(run)


def _foreign(run: RunSpec, group: str, default: Checked) -> SpecError:
    """The refusal of an option of another engine."""
    given = getattr(run, group)
    name = next(f.name for f in fields(given) if getattr(given, f.name) != getattr(default, f.name))
    owners = [engine for engine, options in ENGINE_OPTIONS.items() if options == group]
    return SpecError(
        f"{called(type(given), name)} ({show(getattr(given, name))}) is for engine {' or '.join(owners)}, not "
        f"{run.data_parallel.engine}; drop it, or set engine to {owners[-1] if group == 'fsdp' else owners[0]}"
    )


def _check_outside(run: RunSpec) -> None:
    d, o, p = run.data_parallel, run.optimizer, run.parallel
    allowed = _SIZES[:2] if d.engine == "megatron_deepspeed" else ()
    for name in _SIZES:
        size = getattr(p, name)
        if size != 1 and name not in allowed:
            others = "megatron_ddp" if name in _SIZES[2:] else "megatron_ddp or megatron_deepspeed"
            raise SpecError(f"{name} ({size}) is not supported with engine {d.engine}; set it to 1, or use {others}")
    if p.virtual_pipeline_model_parallel_size not in (None, 1):
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({p.virtual_pipeline_model_parallel_size}) is not supported with "
            f"engine {d.engine}; drop it"
        )
    if p.pipeline_model_parallel_layout and len(parse_layout_string(p.pipeline_model_parallel_layout)) > p.pp:
        raise SpecError(
            f"pipeline_model_parallel_layout ({show(p.pipeline_model_parallel_layout)}) has virtual stages, which "
            f"engine {d.engine} has not; give pipeline_model_parallel_size ({p.pp}) stages"
        )
    for group, name, off in _OF_MEGATRON:
        value = getattr(getattr(run, group), name)
        if value != off:
            raise SpecError(
                f"{name} ({show(value)}) is megatron-core's and does nothing with engine {d.engine}; drop it"
            )
    if d.engine == "single" and p.data_parallel_size != 1:
        raise SpecError(
            f"world_size ({p.world_size}) with engine single leaves {p.data_parallel_size} data-parallel ranks that "
            "share nothing; set it to 1, or use engine ddp"
        )
    if d.sync_each_batch and d.engine not in ("ddp", "fsdp1", "fsdp2"):
        raise SpecError(f"sync_each_batch (True) is for engines ddp, fsdp1 and fsdp2, not {d.engine}; drop it")
    if o.optimizer == "muon":
        raise SpecError(f"optimizer (muon) is not supported with engine {d.engine}; use adamw, or engine megatron_ddp")
    if o.paged and o.optimizer not in ("adam", "adamw", "adamw_8bit", "lion", "lion_8bit"):
        raise SpecError(f"paged (True) needs one of bitsandbytes' optimizers, not {o.optimizer}; drop it")


def _check_fsdp(run: RunSpec) -> None:
    engine, f = run.data_parallel.engine, run.fsdp
    default = _DEFAULTS["fsdp"]
    for name in _OF_FSDP2 if engine == "fsdp1" else _OF_FSDP1:
        if getattr(f, name) != getattr(default, name):
            other = "fsdp2" if engine == "fsdp1" else "fsdp1"
            raise SpecError(
                f"{called(type(f), name)} ({show(getattr(f, name))}) is for engine {other}, not {engine}; drop it"
            )
    if engine == "fsdp1" and run.peft.freezes and f.auto_wrap_policy == "NO_WRAP":
        # ``_flat_param.py: _validate_tensors_to_flatten``; with use_orig_params frozen weights get gradients too, since
        # they are views of a flat parameter that trains.
        raise SpecError(
            "fsdp_auto_wrap_policy (NO_WRAP) puts frozen and trained weights in one flat parameter, which trains as a "
            "whole; wrap layers with TRANSFORMER_BASED_WRAP, or use engine fsdp2"
        )
    if not f.pin_memory and not f.offload_params:
        raise SpecError("fsdp_pin_memory (False) does nothing without fsdp_offload_params; drop it")
    if f.shard_degree is None:
        return
    ranks = run.parallel.data_parallel_size
    if ranks % f.shard_degree:
        raise SpecError(
            f"fsdp_shard_degree ({f.shard_degree}) does not divide the data-parallel size ({ranks}); use a divisor of "
            "it"
        )
    if engine == "fsdp1" and f.sharding_strategy not in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        raise SpecError(
            f"fsdp_shard_degree ({f.shard_degree}) needs fsdp_sharding_strategy HYBRID_SHARD, not "
            f"{f.sharding_strategy}; drop one of them"
        )


def _check_deepspeed(run: RunSpec) -> None:
    engine, z, o = run.data_parallel.engine, run.deepspeed, run.optimizer
    stage = z.stage if engine == "megatron_deepspeed" else int(engine[-1])
    if z.bf16_optimizer_states and not z.bf16_master_weights_and_grads:  # config.py: _do_sanity_check
        raise SpecError(
            "bf16_optimizer_states (True) needs bf16_master_weights_and_grads, without which DeepSpeed refuses it; set "
            "bf16_master_weights_and_grads to True"
        )
    if z.stage != 1 and engine != "megatron_deepspeed":
        raise SpecError(f"stage ({z.stage}) is given by the engine's name, {engine}; drop it")
    if stage > 3:
        raise SpecError(f"stage ({z.stage}) is not a stage of ZeRO; use 0 to 3")
    if run.parallel.pp > 1 and stage > 1:  # deepspeed/runtime/pipe/engine.py: PipelineEngine.__init__
        raise SpecError(
            f"stage ({stage}) is refused by DeepSpeed's pipeline engine with pipeline_model_parallel_size "
            f"({run.parallel.pp}); use stage 0 or 1"
        )
    if stage < 3:
        if z.offload_param_device != "none":
            raise SpecError(
                f"offload_param_device ({z.offload_param_device}) needs engine zero3, which alone divides parameters, "
                f"not {engine}; drop it"
            )
        if z.offload_optimizer_device == "nvme":
            raise SpecError(f"offload_optimizer_device (nvme) needs engine zero3, not {engine}; use cpu")
        if z.offload_optimizer_ratio != 1:
            raise SpecError(
                f"offload_optimizer_ratio ({z.offload_optimizer_ratio}) needs engine zero3, not {engine}; drop it"
            )
    ranks = run.parallel.data_parallel_size
    if z.zero_hpz_partition_size < ranks and ranks % z.zero_hpz_partition_size:  # groups.py: _ensure_divisibility
        raise SpecError(
            f"zero_hpz_partition_size ({z.zero_hpz_partition_size}) does not divide the data-parallel size ({ranks}); "
            "use the GPUs of a node"
        )
    if stage == 0 and z.offload_optimizer_device != "none":
        raise SpecError(
            f"offload_optimizer_device ({z.offload_optimizer_device}) needs stage 1 or more, not 0; drop it"
        )
    if o.optimizer not in _ZERO_OPTIMIZERS or o.paged:
        raise SpecError(
            f"optimizer ({'paged ' * o.paged}{o.optimizer}) is not supported with engine {engine}; use "
            f"{', '.join(_ZERO_OPTIMIZERS)}, or engine fsdp2 or ddp"
        )
