"""megatron-core's data parallelism and optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.releases import MUON_SHARDED
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.parts import SHARDING_STRATEGIES

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_data_parallel(run: RunSpec) -> None:
    """Options of Megatron-FSDP: MLM; ``distributed/fsdp/mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__``."""
    d = run.data_parallel
    if not d.fsdp:
        for name in ("data_parallel_sharding_strategy", "suggested_communication_unit_size", "grad_comm_dtype",
                     "fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail",
                     "megatron_fsdp_max_pool_double_buffer"):  # fmt: skip
            if getattr(d, name) not in (None, False):
                raise SpecError(
                    f"{name} ({getattr(d, name)}) is for engine megatron_fsdp, not {d.engine}; drop it, or set engine "
                    "to megatron_fsdp"
                )
        return
    for name in ("fsdp_db_use_persist_buf_on_alloc_fail", "megatron_fsdp_max_pool_double_buffer"):
        if getattr(d, name) and not d.fsdp_double_buffer:
            raise SpecError(f"{name} (True) does nothing without fsdp_double_buffer; set that to True, or drop it")
    if d.data_parallel_sharding_strategy is None:
        raise SpecError(
            "engine (megatron_fsdp) needs data_parallel_sharding_strategy; set it to optim_grads_params, which divides "
            "all, or to " + " or ".join(SHARDING_STRATEGIES[:-1])
        )
    if not d.use_distributed_optimizer:
        raise SpecError(
            "use_distributed_optimizer (False) is not supported with engine megatron_fsdp; set it to True (what is "
            "divided says data_parallel_sharding_strategy)"
        )
    if run.optimizer.optimizer == "muon" or run.optimizer.use_layer_wise_distributed_optimizer:
        raise SpecError(
            f"optimizer ({run.optimizer.optimizer}) is not supported with engine megatron_fsdp; use adam or sgd, or "
            "engine megatron_ddp"
        )


def check_optimizer(run: RunSpec) -> None:
    o, d, p = run.optimizer, run.data_parallel, run.parallel
    if o.use_precision_aware_optimizer:  # OC
        if o.optimizer != "adam":
            raise SpecError(f"use_precision_aware_optimizer (True) needs optimizer adam, not {o.optimizer}; drop it")
        if not d.use_distributed_optimizer:
            raise SpecError("use_precision_aware_optimizer (True) needs use_distributed_optimizer; set that to True")
    elif not o.main_grads_dtype == o.main_params_dtype == o.exp_avg_dtype == o.exp_avg_sq_dtype == "fp32":
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(o, name) != "fp32":
                raise SpecError(
                    f"{name} ({getattr(o, name)}) other than fp32 needs use_precision_aware_optimizer; set that to True"
                )
    if o.optimizer == "muon" and not MUON_SHARDED(run.implementation):
        if d.use_distributed_optimizer:
            raise SpecError("use_distributed_optimizer (True) is not supported with optimizer muon; set it to False")
        if run.precision.params_dtype == "fp16":
            raise SpecError("params_dtype (fp16) is not supported with optimizer muon; use bf16")
    if d.overlap_param_gather and not d.use_distributed_optimizer:  # MLM
        raise SpecError("overlap_param_gather (True) needs use_distributed_optimizer; set that to True or drop it")
    if p.num_distributed_optimizer_instances > 1 and not d.use_distributed_optimizer:  # MLM
        raise SpecError(
            f"num_distributed_optimizer_instances ({p.num_distributed_optimizer_instances}) needs "
            "use_distributed_optimizer; set that to True"
        )
