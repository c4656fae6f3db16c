"""What the driver counts beyond torch's allocator: context, loaded kernels, NCCL, buffers of other libraries."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from bridge_memory.cards.generations import AMD
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside import communicators as comm
from bridge_memory.outside import nccl
from bridge_memory.outside.amount import Amount, Range, exactly, total
from bridge_memory.outside.nccl import MIB
from bridge_memory.outside.phase import Phase
from bridge_memory.spec.run import RunSpec
from bridge_memory.workspaces.driver import DISPATCHERS, driver_buffers


class _Measured(NamedTuple):
    capability: tuple[int, int]
    nbytes: int
    source: str


#: Bare contexts in public logs.
MEASURED = (
    _Measured((8, 6), 256 * MIB, "public log of a RTX 3090"),
    _Measured((8, 9), 426 * MIB, "public log of a RTX 6000 Ada"),
)
#: Bytes of a bare context where none was measured: between the measured ones, and 512 MiB.
BARE = (256 * MIB, 512 * MIB)
#: Bytes of the kernels of torch, cuBLAS, cuDNN and Transformer Engine that a job loads (lazily since CUDA 11.7).
KERNELS = (100 * MIB, 300 * MIB)


def context(gpu: Gpu) -> tuple[Amount, ...]:
    """The context and the kernels that a training process loads, on one card. nvidia-smi shows 0.5 to 0.6 GiB of them
    together on A100 and H100 (assumed)."""
    found = next((m for m in MEASURED if m.capability == gpu.capability and gpu.vendor != AMD), None)
    bare = Amount("CUDA context", *BARE, Provenance.ASSUMED, "256 and 426 MiB on measured cards of other kinds")
    if found is not None:
        bare = Amount("CUDA context", found.nbytes, found.nbytes, Provenance.MEASURED, found.source)
    return bare, Amount("loaded kernels", *KERNELS, Provenance.ASSUMED, "torch, cuBLAS, cuDNN, Transformer Engine")


def outside(run: RunSpec, gpu: Gpu, stage: int, phase: Phase) -> tuple[Amount, ...]:
    """All that the driver counts beyond torch's allocator on a rank of a stage in a phase.

    Args:
        run: The run.
        gpu: Its card.
        stage: The pipeline stage.
        phase: The phase; buffers of expert dispatchers exist from the first step on.

    Returns:
        Amounts in bytes, with the range that sources leave.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, find_gpu
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8))
        >>> [amount.name for amount in outside(run, find_gpu("H100"), 0, Phase.BUILD)][:2]
        ['CUDA context', 'loaded kernels']
    """
    found = comm.communicators(run, gpu, stage)
    amounts = [*context(gpu), *([nccl.modules()] if found else [])]
    for one in found:
        amounts += one.at(phase)
    return (*amounts, *_buffers(run, phase))


def _buffers(run: RunSpec, phase: Phase) -> list[Amount]:
    """Those of libraries; an expert dispatcher makes its own at its first token."""
    early = phase in (Phase.BUILD, Phase.LOAD, Phase.RESUME)
    return [
        exactly(found.of, found.nbytes, source="workspaces/driver.py")
        for found in driver_buffers(run)
        if not (early and found.name in DISPATCHERS)
    ]


def outside_bytes_of(run: RunSpec, gpu: Gpu, phase: Phase = Phase.TRAINING) -> Range:
    """Bytes of ``outside`` on the stage with the most, for searches: cached by what of the run decides them."""
    found = outside_of_sizes(
        comm.traits_of(run), comm.sizes_of(run.parallel), gpu, nccl.release_of_torch(run.implementation.torch), phase
    )
    buffers = total(_buffers(run, phase)).most
    return Range(found.least + buffers, found.most + buffers)


@lru_cache(maxsize=1 << 16)
def outside_of_sizes(traits: comm.Traits, sizes: comm.Sizes, gpu: Gpu, release: nccl.Release, phase: Phase) -> Range:
    """``outside_bytes_of`` without the buffers of libraries, for a search that keeps the traits of its runs."""
    machine = nccl.machine_of(gpu)
    kinds = {1: ((True, True),), 2: ((True, False), (False, True))}
    ends = kinds.get(sizes.pp, ((True, False), (False, False), (False, True)))
    stages = [comm.of_stage(traits, sizes, machine, release, *end) for end in ends]
    found = [comm.bytes_of(stage, phase) for stage in stages]
    rest = total([*context(gpu), *([nccl.modules()] if any(stages) else [])])
    return Range(rest.least + max(one.least for one in found), rest.most + max(one.most for one in found))
