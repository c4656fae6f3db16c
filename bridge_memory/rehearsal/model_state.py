"""Weights, gradients and optimizer state of a rank: megatron-core's DDP buffers and its optimizer."""

from __future__ import annotations

from typing import Any

import torch

from bridge_memory.components import allocated
from bridge_memory.rehearsal import te_kernels
from bridge_memory.rehearsal.megatron_config import TORCH_DTYPES
from bridge_memory.rehearsal.patches.device import tensors_call_themselves_cuda
from bridge_memory.rehearsal.results import BufferLayout
from bridge_memory.rehearsal.tracker import parts_of
from bridge_memory.spec import RunSpec


def distributed(run: RunSpec, chunk: torch.nn.Module, index: int) -> Any:
    """The chunk on the device, in its training dtype, in megatron-core's own DDP.

    DDP lays out the buffers and hooks the gradients. The order is Megatron-LM's and Bridge's: to the GPU,
    Float16Module, DDP (``training/training.py: get_model``).
    """
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    ddp = run.data_parallel
    wanted = {
        "grad_reduce_in_fp32": ddp.grad_reduce_in_fp32,
        "overlap_grad_reduce": ddp.overlap_grad_reduce,
        "overlap_param_gather": ddp.overlap_param_gather,
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "bucket_size": ddp.bucket_size,
        "num_distributed_optimizer_instances": run.parallel.num_distributed_optimizer_instances,
        "fp8_param_gather": run.precision.fp8_param,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_in_gradients(run),
        "delay_wgrad_compute": run.implementation.delay_wgrad_compute,
    }
    known = {f.name for f in fields(DistributedDataParallelConfig)}
    config = DistributedDataParallelConfig(**{k: v for k, v in wanted.items() if k in known})
    model: Any = chunk.to(torch.cuda.current_device())
    if run.precision.params_dtype in ("bf16", "fp16"):
        model = Float16Module(chunk.config, model)
    return DistributedDataParallel(
        config=chunk.config, ddp_config=config, module=model, disable_bucketing=index > 0
    )


def gathers_in_gradients(run: RunSpec) -> bool:
    """Whether parameters are gathered in the gradient buffer: mxfp8 parameters can be in no buffer, and training loops
    set this option (Megatron-LM ``arguments.py: validate_args``; Bridge ``mixed_precision.py:
    bf16_with_mxfp8_mixed``)."""
    p = run.precision
    return p.fp8 is not None and p.fp8_param and p.fp8_recipe == "mxfp8" and run.data_parallel.use_distributed_optimizer


def buffer_layouts(ddp: Any) -> list[BufferLayout]:
    out = []
    for experts, group in ((False, ddp.buffers), (True, ddp.expert_parallel_buffers)):
        for buffer in group:
            weights = None if getattr(buffer, "shared_buffer", None) is not None else buffer.param_data
            storage = None if weights is None else weights.untyped_storage()._cdata
            own = sum(
                allocated(part.nbytes)
                for part in (parts_of(p)[0] for p in buffer.params)
                if part.untyped_storage()._cdata != storage
            )
            out.append(
                BufferLayout(
                    experts=experts,
                    elements=buffer.numel,
                    parameter_bytes=own + (0 if weights is None else weights.numel() * weights.element_size()),
                    gradient_bytes=buffer.grad_data.numel() * buffer.grad_data.element_size(),
                )
            )
    return out


def optimizer(run: RunSpec, wrapped: list[Any]) -> Any:
    """megatron-core's own optimizer over the chunks of a rank."""
    from dataclasses import fields

    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    opt, ddp, precision = run.optimizer, run.data_parallel, run.precision
    wanted = {
        "optimizer": opt.optimizer,
        "lr": 1e-4,
        "bf16": precision.params_dtype == "bf16",
        "fp16": precision.params_dtype == "fp16",
        "params_dtype": TORCH_DTYPES[precision.params_dtype],
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "use_precision_aware_optimizer": opt.use_precision_aware_optimizer,
        "main_grads_dtype": TORCH_DTYPES[opt.main_grads_dtype],
        "main_params_dtype": TORCH_DTYPES[opt.main_params_dtype],
        "exp_avg_dtype": TORCH_DTYPES[opt.exp_avg_dtype],
        "exp_avg_sq_dtype": TORCH_DTYPES[opt.exp_avg_sq_dtype],
        "store_param_remainders": opt.store_param_remainders,
        # Megatron-LM's default is delayed; without a recipe 0.13 creates no main parameters.
        "fp8_recipe": opt.fp8_recipe or "delayed",
        "sgd_momentum": opt.sgd_momentum,
        "overlap_param_gather": ddp.overlap_param_gather,
        "optimizer_cpu_offload": opt.optimizer_cpu_offload,
        "optimizer_offload_fraction": opt.optimizer_offload_fraction,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_in_gradients(run),
        "delay_wgrad_compute": run.implementation.delay_wgrad_compute,
    }
    known = {f.name for f in fields(OptimizerConfig)}
    config = OptimizerConfig(**{k: v for k, v in wanted.items() if k in known})
    return get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)


def optimizer_state(run: RunSpec, wrapped: list[Any]) -> int | None:
    """Bytes of master parameters and moments after an optimizer step; None where the optimizer cannot be built here.

    Without Transformer Engine and Apex the optimizer is torch's AdamW, which has no precision-aware states. Offloading
    and Muon are not covered with them either.
    """
    opt = run.optimizer
    if opt.optimizer != "adam" or opt.optimizer_cpu_offload:
        return None
    if opt.use_precision_aware_optimizer and not te_kernels.loaded():
        return None
    if opt.use_precision_aware_optimizer and run.precision.fp8 is not None and run.precision.fp8_param:
        return None  # shards of fp8 parameters are None until an optimizer loads them
    weights = {p.untyped_storage()._cdata for ddp in wrapped for p in ddp.parameters()}
    if not weights:
        return 0  # a stage without layers
    found: dict[int, int] = {}
    with tensors_call_themselves_cuda():
        top = optimizer(run, wrapped)
        for part in getattr(top, "chained_optimizers", [top]):
            if part.optimizer is None:
                continue  # of parameters that are all frozen (``distrib_optimizer.py: is_stub_optimizer``)
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.empty_like(parameter)
                    _count(parameter, weights, found)
            part.optimizer.step()
            for state in part.optimizer.state.values():
                for tensor in state.values():
                    _count(tensor, weights, found)
    if run.data_parallel.use_distributed_optimizer:
        return sum(found.values())  # The estimate too sums shards without rounding each.
    return sum(map(allocated, found.values()))


def fp8_copies(chunk: torch.nn.Module) -> int:
    """Bytes of quantized weights that modules cache (TE ``module/base.py: get_weight_workspace``)."""
    cached = (held for module in chunk.modules() for held in getattr(module, "_fp8_workspaces", {}).values())
    return sum(part.untyped_storage().nbytes() for tensor in cached for part in parts_of(tensor))


def _outside_buffers(wrapped: list[Any]) -> int:
    """Bytes of fp8 parameters outside of DDP's buffers: the second layout, and scales."""
    buffers = [b for ddp in wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    mapped = {b.param_data.untyped_storage()._cdata for b in buffers if b.param_data is not None}
    mapped |= {parts_of(p)[0].untyped_storage()._cdata for b in buffers for p in b.params}
    quantized = [p for ddp in wrapped for p in ddp.parameters() if len(parts_of(p)) > 1]
    found = {s._cdata: s.nbytes() for p in quantized for part in parts_of(p) if (s := part.untyped_storage())}
    return sum(nbytes for key, nbytes in found.items() if key not in mapped)


def _count(tensor: Any, weights: set[int], found: dict[int, int]) -> None:
    if isinstance(getattr(tensor, "_data", None), torch.Tensor):  # fp8: data and scale
        tensor = tensor._data
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage.nbytes()
