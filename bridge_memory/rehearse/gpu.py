"""Rehearse one rank for real on one GPU: its own parameters, DDP, optimizer and schedule, without its peers.

Collectives and point-to-point go to torch's fake backend, which does nothing, so that loss values are
meaningless; every expert is taken to get the same number of tokens. Everything that allocates is Megatron's own
code. Needs a CUDA build of torch; Transformer Engine is used when it is installed and asked for.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bridge_memory.rehearse import patches
from bridge_memory.rehearse.model import build_chunks
from bridge_memory.rehearse.world import RehearsalUnavailable, fake_world, rank_of_stage, stage_of_rank
from bridge_memory.spec import MoESpec, RunSpec, SpecError


@dataclass(frozen=True, slots=True)
class Phase:
    """torch.cuda's figures at the end of a phase, its peak since the phase began, in bytes."""

    name: str
    allocated: int
    max_allocated: int
    reserved: int


@dataclass(slots=True)
class Measured:
    """One rehearsal on a GPU."""

    run: RunSpec
    rank: int
    stage: int
    gpu: str
    phases: list[Phase] = field(default_factory=list)

    def lines(self) -> list[str]:
        from bridge_memory.estimate import estimate

        predicted = estimate(self.run).stages[self.stage]
        gib = 1 << 30
        out = [
            f"{self.run.model.name}: rank {self.rank}, pipeline stage {self.stage}, on {self.gpu}; "
            "loss values are meaningless",
            f"{'':<22}{'allocated':>14}{'max allocated':>16}{'reserved':>14}",
        ]
        out += [
            f"{p.name:<22}{p.allocated / gib:>10.4f} GiB{p.max_allocated / gib:>12.4f} GiB"
            f"{p.reserved / gib:>10.4f} GiB"
            for p in self.phases
        ]
        last = self.phases[-1]
        out.append(
            f"{'predicted':<22}{predicted.static_bytes / gib:>10.4f} GiB{predicted.peak_bytes / gib:>12.4f} GiB"
        )
        out.append(f"peak: {predicted.peak_bytes / last.max_allocated - 1:+.2%}")
        return out

    def as_record(self) -> dict[str, Any]:
        """One line of the format of tests/data/measurements/runs.jsonl."""
        from importlib.metadata import PackageNotFoundError, version

        def release(name: str) -> str | None:
            try:
                return version(name)
            except PackageNotFoundError:
                return None

        last = self.phases[-1]
        return {
            "id": f"rehearsal/{self.run.model.name}/{self.stage}",
            "family": f"rehearsal/{self.run.model.name}",
            "framework": {
                "name": "megatron-core", "megatron_core": release("megatron-core"),
                "transformer_engine": release("transformer-engine"), "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "gpu": self.gpu,
            "world_size": self.run.parallel.world_size,
            "config": {"kind": "rehearsal", "command": sys.argv[1:]},
            "measured": [
                {
                    "rank": self.rank, "allocated_bytes": last.allocated,
                    "max_allocated_bytes": last.max_allocated, "after_step": len(self.phases),
                }
            ],
            "phases": [
                {
                    "name": p.name, "allocated_bytes": p.allocated, "max_allocated_bytes": p.max_allocated,
                    "reserved_bytes": p.reserved,
                }
                for p in self.phases
            ],
        }  # fmt: skip


def rehearse_on_gpu(
    run: RunSpec,
    stage: int | None = None,
    *,
    rank: int | None = None,
    steps: int = 2,
    snapshot: str | None = None,
) -> Measured:
    """Run ``steps`` training steps of one rank on the current GPU. Raises SpecError, RehearsalUnavailable."""
    if not torch.cuda.is_available():
        raise RehearsalUnavailable(
            "device cuda needs a GPU and torch with CUDA; --device cpu rehearses without either"
        )
    if steps < 1:
        raise SpecError(f"steps ({steps}) must be at least 1; 2 shows the peak that counts")
    if run.implementation.te and not patches.has_te():
        raise RehearsalUnavailable(
            "transformer_impl (transformer_engine) is not installed here; install it or give "
            "--transformer-impl local"
        )
    rank = rank_of_stage(run.parallel, stage or 0) if rank is None else rank
    measured = Measured(run, rank, stage_of_rank(run.parallel, rank), torch.cuda.get_device_name())
    if snapshot:
        torch.cuda.memory._record_memory_history()
    with fake_world(run.parallel, rank), _helped(run):
        _train(run, measured, steps)
    if snapshot:
        torch.cuda.memory._dump_snapshot(snapshot)
        torch.cuda.memory._record_memory_history(enabled=None)
    return measured


@contextmanager
def _helped(run: RunSpec) -> Iterator[None]:
    """On a GPU megatron-core needs little: norms without Apex, and peers that answer nothing."""
    with ExitStack() as stack:
        if not run.implementation.te:
            stack.enter_context(patches.norms_without_apex())
            stack.enter_context(patches.local_core_attention())
        stack.enter_context(patches.objects_of_peers())
        moe = next((x.ffn for x in run.model.layers if isinstance(x.ffn, MoESpec)), None)
        if moe is not None:
            stack.enter_context(patches.balanced_routing(moe.topk, moe.num_experts))
        yield


def _train(run: RunSpec, measured: Measured, steps: int) -> None:
    from megatron.core import tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from bridge_memory.rehearse.run import distributed, optimizer

    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    chunks = build_chunks(run)
    wrapped = [distributed(run, chunk, i) for i, chunk in enumerate(chunks)]
    adam = optimizer(run, wrapped)
    _note(measured, "model built")
    config = chunks[0].config
    config.deallocate_pipeline_outputs = True  # Megatron-LM and Bridge switch it on
    config.grad_scale_func = adam.scale_loss
    batch = _batch(run)
    schedule = get_forward_backward_func()
    for step in range(steps):
        for ddp in wrapped:
            ddp.zero_grad_buffer()
        adam.zero_grad()
        schedule(
            forward_step_func=_forward_step,
            data_iterator=[_forever(batch) for _ in wrapped] if len(wrapped) > 1 else _forever(batch),
            model=wrapped if len(wrapped) > 1 else wrapped[0],
            num_microbatches=run.num_microbatches,
            seq_length=run.batch.seq_length,
            micro_batch_size=run.batch.micro_batch_size,
            forward_only=False,
        )
        _note(measured, f"step {step + 1}: passes")
        adam.step()
        _note(measured, f"step {step + 1}: optimizer")


def _forever(batch: tuple[torch.Tensor, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    while True:
        yield batch


def _forward_step(iterator: Any, model: Any) -> tuple[Any, Any]:
    ids, positions, labels, mask = next(iterator)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = torch.sum(output.view(-1).float() * mask.view(-1)) / mask.sum()
        return value, {"loss": value.detach()}

    return model(ids, positions, None, labels=labels), loss


def _batch(run: RunSpec) -> tuple[torch.Tensor, ...]:
    shape = (run.batch.micro_batch_size, run.batch.seq_length // run.parallel.cp)
    ids = torch.randint(0, run.model.vocab_size, shape, device="cuda")
    positions = torch.arange(shape[1], device="cuda").expand(shape)
    return ids, positions, ids.clone(), torch.ones(shape, device="cuda")


def _note(measured: Measured, name: str) -> None:
    torch.cuda.synchronize()
    measured.phases.append(
        Phase(
            name,
            torch.cuda.memory_allocated(),
            torch.cuda.max_memory_allocated(),
            torch.cuda.memory_reserved(),
        )
    )
    torch.cuda.reset_peak_memory_stats()
