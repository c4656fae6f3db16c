"""What a rehearsal measures: buffers, passes, chunks and ranks."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.rehearsal.tracker import Alive, Peak, SavedRecord
from bridge_memory.spec import RunSpec


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer of megatron-core's DDP: padded elements, and the bytes of its two halves."""

    experts: bool
    elements: int
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One forward and one backward pass for one microbatch, in bytes.

    Measured on the second microbatch. ``saved`` is alive between the passes because backward needs it;
    ``held`` because a module's attribute or a caller holds it; ``persistent`` was there before and stays
    (caches, scratch buffers). The peaks count everything the passes made or were handed and what the first
    microbatch left behind, and neither ``persistent`` nor parameters, gradient buffers or neighbours.
    """

    saved: tuple[SavedRecord, ...]
    held: tuple[Alive, ...]
    persistent: tuple[Alive, ...]
    forward_peak: Peak
    backward_peak: Peak
    #: Still alive after backward, until the next forward pass takes its place.
    left: tuple[Alive, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(r.bytes for r in self.saved)

    @property
    def held_bytes(self) -> int:
        return sum(r.bytes for r in self.held)

    @property
    def forward_bytes(self) -> int:
        """The forward peak less what is held, of which the next microbatch's takes the place."""
        return self.forward_peak.bytes - self.held_bytes

    @property
    def backward_bytes(self) -> int:
        """The backward peak less what is held."""
        return self.backward_peak.bytes - self.held_bytes


@dataclass(frozen=True, slots=True)
class ChunkRehearsal:
    """One model chunk (virtual stage); its parameters without adapters."""

    chunk: int
    parameters: dict[str, tuple[int, ...]]
    passes: PassRecord


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rank of the job."""

    run: RunSpec
    rank: int
    stage: int
    chunks: tuple[ChunkRehearsal, ...]
    buffers: tuple[BufferLayout, ...]
    #: Master parameters and moments; None where the optimizer needs Transformer Engine.
    optimizer_bytes: int | None
    #: What linears keep of their weights in fp8 from one microbatch to the next.
    fp8_copies_bytes: int = 0
    #: Weights without gradients, each a tensor of its own, which are in no buffer.
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
