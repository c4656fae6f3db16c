"""The results of a rehearsal: buffers, passes, chunks, ranks."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.rehearsal.tracker import Alive, Peak, SavedRecord
from bridge_memory.spec import RunSpec


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer of megatron-core's DDP: elements with padding, bytes of parameters and of gradients."""

    experts: bool
    elements: int
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One forward and one backward pass for one microbatch, in bytes.

    Measured on the second microbatch. ``saved`` is alive between the passes because backward needs it, ``held`` because
    a module's attribute or the caller refers to it; ``persistent`` is alive before the microbatch and after it (caches,
    scratch buffers). The peaks count inputs, everything that the passes allocate and what is carried over from the
    first microbatch; not ``persistent``, parameters, gradient buffers or other layers.
    """

    saved: tuple[SavedRecord, ...]
    held: tuple[Alive, ...]
    persistent: tuple[Alive, ...]
    forward_peak: Peak
    backward_peak: Peak
    #: Carried over: alive after backward until the next forward pass replaces it.
    left: tuple[Alive, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(r.bytes for r in self.saved)

    @property
    def held_bytes(self) -> int:
        return sum(r.bytes for r in self.held)

    @property
    def forward_bytes(self) -> int:
        """The forward peak without ``held``, which the next microbatch replaces."""
        return self.forward_peak.bytes - self.held_bytes

    @property
    def backward_bytes(self) -> int:
        """The backward peak without ``held``."""
        return self.backward_peak.bytes - self.held_bytes


@dataclass(frozen=True, slots=True)
class ChunkRehearsal:
    """One model chunk (virtual stage). ``parameters``: name -> local shape, without adapters."""

    chunk: int
    parameters: dict[str, tuple[int, ...]]
    passes: PassRecord


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rank of the job, in bytes."""

    run: RunSpec
    rank: int
    stage: int
    chunks: tuple[ChunkRehearsal, ...]
    buffers: tuple[BufferLayout, ...]
    #: Master parameters and moments; None where the optimizer cannot be built here.
    optimizer_bytes: int | None
    #: fp8 copies of weights that linears keep between microbatches.
    fp8_copies_bytes: int = 0
    #: Weights without gradients: separate tensors, in no buffer.
    frozen_bytes: int = 0

    @property
    def parameters(self) -> int:
        from math import prod

        return sum(prod(shape) for chunk in self.chunks for shape in chunk.parameters.values())

    @property
    def weights_bytes(self) -> int:
        return sum(b.parameter_bytes for b in self.buffers) + self.frozen_bytes

    @property
    def gradients_bytes(self) -> int:
        return sum(b.gradient_bytes for b in self.buffers)
