"""megatron-core itself, through the phases of a job beside the step, on tensors without data: what is alive when."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from bridge_memory.rehearsal.megatron_config import TORCH_DTYPES
from bridge_memory.rehearsal.model import build_chunks
from bridge_memory.rehearsal.model_state import distributed, optimizer
from bridge_memory.rehearsal.patches.device import tensors_call_themselves_cuda
from bridge_memory.rehearsal.patches.replace import META, replaced
from bridge_memory.rehearsal.rank import on_rank, rank_in_stage
from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.spec import RunSpec


class Measured(NamedTuple):
    """Bytes on the device: the most during a phase, and what is alive after it."""

    peak: int
    after: int


class InPlace:
    """In the place of ``TorchDistLoadShardedStrategy``: gives the tensors that the real one fills."""

    stream_ckpt_dequant = can_handle_sharded_objects = True

    def load(self, sharded: Any, folder: Any, *more: Any) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        def filled(leaf: Any) -> Any:
            return leaf.data.detach() if isinstance(leaf, ShardedTensor) else leaf.data

        return dict_list_map_outplace(filled, sharded)


def _common(sharded: Any) -> Any:
    """What the checkpoint has beside tensors and objects: hyperparameters of the optimizer."""
    from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    apart = (ShardedBase, LocalNonpersistentObject, torch.Tensor)
    plain, _ = extract_matching_values(sharded, lambda leaf: not isinstance(leaf, apart))
    return copy.deepcopy(plain)


def _of_no_folder(sharded: Any) -> dict[str, Any]:
    """What stands in for functions of ``serialization.py`` that read a checkpoint's folder, by release."""
    common = type("Common", (), {"load_common": lambda self, folder: _common(sharded)})()
    return {
        "verify_checkpoint": lambda folder: None,
        "load_common_state_dict": lambda folder: _common(sharded),
        "verify_checkpoint_and_load_strategy": lambda folder, strategy, *more: (strategy, common),
    }


class Job:
    """One rank: ``phases`` has every phase that has run."""

    def __init__(self, run: RunSpec, tracker: Tracker) -> None:
        self.run, self.tracker = run, tracker
        self.phases: dict[str, Measured] = {}
        whole = run.checkpoint.dist_ckpt_optim_fully_reshardable
        self.metadata = {
            "distrib_optim_sharding_type": "fully_reshardable" if whole else "dp_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient":
                run.checkpoint.distrib_optim_fully_reshardable_mem_efficient,
            "chained_optim_avoid_prefix": True, "dp_cp_group": None, "singleton_local_shards": False,
        }  # fmt: skip
        tracker.reset_peak()
        self.chunks = build_chunks(run)
        self.wrapped = [distributed(run, chunk, i) for i, chunk in enumerate(self.chunks)]
        self.optimizer = optimizer(run, self.wrapped)
        if run.checkpoint.distrib_optim_fully_reshardable_mem_efficient:
            for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                one.data_parallel_group_gloo = one.data_parallel_group
        self._note("build")

    def _note(self, name: str) -> None:
        gc.collect()
        self.phases[name] = Measured(self.tracker.peak().bytes, self.tracker.live_bytes)
        self.tracker.reset_peak()

    def _sharded(self, **more: Any) -> dict[str, Any]:
        names = ["model"] if len(self.chunks) == 1 else [f"model{i}" for i in range(len(self.chunks))]
        found = {name: chunk.sharded_state_dict(metadata=self.metadata) for name, chunk in
                 zip(names, self.chunks, strict=True)}  # fmt: skip
        if more:
            found["optimizer"] = self.optimizer.sharded_state_dict(found, metadata=self.metadata, **more)
        return found

    def load(self, *, with_optimizer: bool) -> None:
        """Of weights, or of weights and optimizer."""
        self._load(with_optimizer=with_optimizer)
        self._note("resume" if with_optimizer else "load")

    def _load(self, *, with_optimizer: bool) -> None:
        """The order of Bridge's ``training/checkpointing.py: _load_checkpoint_from_path``."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import serialization

        sharded = self._sharded(is_loading=True) if with_optimizer else self._sharded()
        with ExitStack() as stack:
            for name, stands_in in _of_no_folder(sharded).items():
                if hasattr(serialization, name):
                    stack.enter_context(replaced(serialization, name, stands_in))
            loaded = dist_checkpointing.load(sharded, "nowhere", InPlace(), validate_access_integrity=False)
        for name, chunk in zip((n for n in sharded if n.startswith("model")), self.chunks, strict=True):
            chunk.load_state_dict(loaded[name], strict=True)
        if with_optimizer:
            with torch.no_grad():
                self.optimizer.load_state_dict(loaded["optimizer"])
        else:
            self.optimizer.reload_model_params()

    def steps(self, number: int) -> None:
        """Optimizer steps with the gradients that are in the buffers."""
        for _ in range(number):
            with torch.no_grad():
                for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
                    one._copy_model_grads_to_main_grads()
                    one.optimizer.step()
            self.optimizer.zero_grad()
        self._note("steps")

    def save(self) -> None:
        """Until the tensors are staged one by one."""
        with replaced(torch.Tensor, "cpu", lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu")):
            sharded = self._sharded(is_loading=False)
        del sharded
        self._note("save")


@contextmanager
def _beside_the_host() -> Iterator[None]:
    """Tensors in host memory beside those on the device, for an offloaded optimizer: what is sent there is zeros."""
    copy, of_host = torch.Tensor.copy_, property(lambda t: t.is_meta)

    def sent(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(t.shape, dtype=t.dtype, device="cpu")

    def copied(t: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return t if source.is_meta and not t.is_meta else copy(t, source, *args, **kwargs)

    with (
        replaced(torch.Tensor, "is_cuda", of_host), replaced(torch.Tensor, "cpu", sent),
        replaced(torch.Tensor, "pin_memory", lambda t, *args: t), replaced(torch.Tensor, "copy_", copied),
    ):  # fmt: skip
        yield


@contextmanager
def job(run: RunSpec, stage: int = 0) -> Iterator[Job]:
    """A rank of ``stage`` that has built its model and optimizer."""
    with on_rank(run, rank_in_stage(run, stage)):
        tracker = Tracker()
        with tracker, tensors_call_themselves_cuda(), ExitStack() as stack:
            if run.optimizer.optimizer_cpu_offload:
                stack.enter_context(_beside_the_host())
            yield Job(run, tracker)


def forward_only(run: RunSpec, stage: int) -> list[int]:
    """For each chunk of a stage, the peak of the second forward pass without gradients, without what persists."""
    peaks = []
    with on_rank(run, rank_in_stage(run, stage)):
        chunks = build_chunks(run)
        for i, chunk in enumerate(chunks):
            peaks.append(_forward_only(run, chunk, distributed(run, chunk, i)))
    return peaks


def _forward_only(run: RunSpec, chunk: Any, ddp: Any) -> int:
    ddp.eval()
    length, b = run.batch.rows
    s = length // run.parallel.cp
    tracker = Tracker([*chunk.parameters(), *chunk.buffers(), *(p.main_grad for p in chunk.parameters())])
    with torch.no_grad(), tracker.watching(chunk):
        ids = torch.empty((b, s), dtype=torch.int64, device=META)
        mask = torch.empty((b, s), dtype=torch.float32, device=META)
        for tensor in (ids, mask):
            tracker.ignore(tensor)
        rows = s // run.parallel.tp if run.parallel.sp else s

        def forward() -> torch.Tensor:
            if not chunk.pre_process:
                shape, dtype = (rows, b, run.model.hidden_size), TORCH_DTYPES[run.precision.params_dtype]
                chunk.set_input_tensor(torch.empty(shape, dtype=dtype, device=META))
            out: torch.Tensor = ddp(ids, ids, None, labels=ids if chunk.post_process else None)
            return torch.sum(out.view(-1).float() * mask.view(-1)) if chunk.post_process else out

        out = forward()
        del out
        gc.collect()
        before = tracker.keys()
        tracker.reset_peak()
        out = forward()
        (found,) = tracker.without(before & tracker.keys(), tracker.peak())
        del out
        return found.bytes
