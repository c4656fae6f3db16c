"""megatron-core's own Megatron-FSDP on the meta device: its buckets, and what is alive while a chunk runs."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from bridge_memory.rehearsal.megatron_config import TORCH_DTYPES
from bridge_memory.rehearsal.model import build_chunks
from bridge_memory.rehearsal.passes import end_of_pass, run_backward
from bridge_memory.rehearsal.patches.collectives import Done
from bridge_memory.rehearsal.patches.replace import META, replaced
from bridge_memory.rehearsal.rank import on_rank
from bridge_memory.rehearsal.tracker import Tracker, _Storage
from bridge_memory.spec import DataParallelSpec, RunSpec


@dataclass(frozen=True)
class BucketFound:
    """One parameter group: elements of its bucket and of this rank's part of each buffer."""

    size: int
    numel: int
    experts: bool
    unit: bool
    weights: int
    main: int
    gradients: int


@dataclass(frozen=True)
class FsdpPasses:
    """Bytes of one chunk's second microbatch on top of what stays, where ``between`` is what was there before it."""

    buckets: tuple[BucketFound, ...]
    #: After wrapping: weights, main parameters, gradients.
    static_bytes: int
    #: What stays whole from the first forward pass on.
    root_bytes: int
    #: Alive between the two microbatches.
    between_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_at: str
    backward_at: str


class _Everything(Tracker):
    """Counts the storages that buckets get and give back, too. Nothing is static: parameters are views of buckets."""

    def _note(self, tensor: torch.Tensor, name: str) -> bool:
        # A DTensor is as large as the whole parameter and has no storage of its own.
        return type(tensor).__name__ != "DTensor" and super()._note(tensor, name)

    def resized(self, storage: Any, nbytes: int) -> None:
        key = storage._cdata
        if key not in self._live and nbytes:
            made = self._live[key] = _Storage(0, "bucket", "resize_", None, next(self._serial))
            made.ref = weakref.ref(storage, self._forget(key))
        super().resized(storage, nbytes)


@contextmanager
def _no_gpu_for_fsdp() -> Iterator[None]:
    """What Megatron-FSDP asks of CUDA and of other ranks beyond what models do."""

    @contextmanager
    def coalesced(*_: object, **__: object) -> Iterator[Any]:
        yield Done()

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, "empty_cache", lambda: None))
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: 0))
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            stack.enter_context(replaced(torch.distributed, name, lambda *a, **k: Done()))
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core.distributed") and "fsdp" in name:
                stack.enter_context(replaced(module, "_GLOBAL_MEMORY_BUFFER", None))
                stack.enter_context(replaced(module, "_coalescing_manager", coalesced))
                for check in ("validate_uneven_dtensor", "update_uneven_dtensor_chunk_metadata"):
                    stack.enter_context(replaced(module, check, lambda *a, **k: None))
        yield


def _wrapped(run: RunSpec, chunk: torch.nn.Module, index: int) -> Any:
    """As Megatron-LM does it: Float16Module, then Megatron-FSDP (``training/training.py: get_model``)."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    from bridge_memory.engines.megatron_ddp import bucket_elements

    d = run.data_parallel
    main = torch.float32 if d.grad_reduce_in_fp32 else None
    wanted = {
        "grad_reduce_in_fp32": d.grad_reduce_in_fp32, "overlap_grad_reduce": True, "overlap_param_gather": True,
        "use_distributed_optimizer": True, "bucket_size": bucket_elements(run) if index == 0 else None,
        "data_parallel_sharding_strategy": d.data_parallel_sharding_strategy, "use_megatron_fsdp": True,
        "use_custom_fsdp": True, "preserve_fp32_weights": not run.optimizer.fused_main_parameters,
        "megatron_fsdp_use_decoupled_grad": run.optimizer.use_precision_aware_optimizer,
        "megatron_fsdp_main_grads_dtype": main,
        "suggested_communication_unit_size": d.suggested_communication_unit_size,
        "fsdp_double_buffer": d.fsdp_double_buffer,
        "fsdp_db_use_persist_buf_on_alloc_fail": d.fsdp_db_use_persist_buf_on_alloc_fail,
        "megatron_fsdp_max_pool_double_buffer": d.megatron_fsdp_max_pool_double_buffer,
        "megatron_fsdp_grad_comm_dtype": TORCH_DTYPES[d.grad_comm_dtype] if d.grad_comm_dtype else None,
    }  # fmt: skip
    known = {f.name for f in fields(DistributedDataParallelConfig)}
    config = DistributedDataParallelConfig(**{k: v for k, v in wanted.items() if k in known})
    model: Any = chunk.to(META)
    if run.precision.params_dtype in ("bf16", "fp16"):
        model = Float16Module(chunk.config, model)
    with replaced(torch.Tensor, "is_meta", False, add=True):
        return _fsdp()(config=chunk.config, ddp_config=config, module=model, disable_bucketing=index > 0)


def _fsdp() -> Any:
    try:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    except ImportError:
        from megatron.core.distributed.custom_fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel


def _buckets(wrapped: Any) -> Iterator[BucketFound]:
    def kept(buffer: Any) -> int:
        return 0 if buffer is None else buffer.data.numel()

    for group in wrapped.param_and_grad_buffer.parameter_groups:
        buffer = group.main_grad_buffer
        yield BucketFound(
            buffer.bucket_index.size, sum(p.numel() for p in group.params), group.is_expert_param,
            group.fsdp_unit_id is not None, kept(group.model_weight_buffer), kept(group.main_weight_buffer),
            kept(buffer),
        )


def _whole(wrapped: Any) -> int:
    """Bytes of the gathered weights that are alive now."""
    buffers = [group.model_weight_buffer for group in wrapped.param_and_grad_buffer.parameter_groups]
    gathered = [b for b in buffers if b is not None and b.is_data_distributed]
    return sum({
        s._cdata: s.nbytes() for b in gathered for s in (p.untyped_storage() for p in b.params)
    }.values())  # fmt: skip


def fsdp_passes(run: RunSpec, rank: int = 0) -> FsdpPasses:
    """The first chunk of a rank under Megatron-FSDP, two microbatches long."""
    _fsdp()
    with on_rank(replace(run, data_parallel=DataParallelSpec()), rank):
        chunk: Any = build_chunks(run)[0]
        tracker = _Everything()
        with _no_gpu_for_fsdp(), tracker.following(chunk):
            wrapped = _wrapped(run, chunk, 0)
            gc.collect()
            tracker._names = {id(m): name for name, m in chunk.named_modules()}
            static, buckets = tracker.live_bytes, tuple(_buckets(wrapped))
            s, b = run.batch.seq_length // run.parallel.cp, run.batch.micro_batch_size
            ids = torch.empty((b, s), dtype=torch.int64, device=META)
            labels, positions = torch.empty_like(ids), torch.empty_like(ids)
            mask = torch.empty((b, s), dtype=torch.float32, device=META)
            found: list[Any] = []
            before = root = 0
            for microbatch in range(2):
                gc.collect()
                before = tracker.live_bytes
                gc.disable()
                tracker.reset_peak()
                losses = wrapped(ids, positions, None, labels=labels)
                loss = torch.sum(losses.view(-1).float() * mask.view(-1))
                del losses
                forward = tracker.peak()
                edge, gradient = end_of_pass(loss)
                del loss
                tracker.in_backward = True
                tracker.reset_peak()
                run_backward(edge, gradient)
                del edge
                backward = tracker.peak()
                tracker.in_backward = False
                gc.enable()
                if not microbatch:
                    root = _whole(wrapped)
                found = [forward, backward]
    forward, backward = found
    return FsdpPasses(
        buckets, static, root, before, forward.bytes - before, backward.bytes - before,
        f"{forward.module}: {forward.operation}", f"{backward.module}: {backward.operation}",
    )


def fsdp_built(run: RunSpec, rank: int = 0) -> tuple[int, int]:
    """Bytes of the first chunk of a rank: the most while it is built and wrapped, and what stays."""
    _fsdp()
    with on_rank(replace(run, data_parallel=DataParallelSpec()), rank):
        tracker = _Everything()
        with _no_gpu_for_fsdp(), tracker.following(torch.nn.Module()):
            chunk: Any = build_chunks(run)[0]
            wrapped = _wrapped(run, chunk, 0)
            peak = tracker.peak().bytes
            gc.collect()
            assert wrapped is not None
            return peak, tracker.live_bytes
