"""Buffers that outlive the step: scratch of the blocks, workspaces of libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.stack import chunk_lasting
from bridge_memory.inventory.workspaces import lasting_workspaces
from bridge_memory.inventory.workspaces import lasting_workspaces
from bridge_memory.layout import Chunk
from bridge_memory.spec import RunSpec


@dataclass(frozen=True, slots=True)
class LastingBuffer:
    """One buffer of a rank, in bytes, with its provenance (see ``estimate.PROVENANCES``)."""

    name: str
    bytes: int
    provenance: str


def lasting_buffers(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> list[LastingBuffer]:
    """Everything that stays allocated after a step besides model state."""
    shared: dict[str, int] = {}
    for chunk in chunks:
        for name, nbytes in chunk_lasting(run.model, chunk, ctx):
            shared[name] = max(nbytes, shared.get(name, 0))
    dummies = sum(b for n, b in shared.items() if n.startswith("dummy weight gradient"))
    out = [LastingBuffer(n, b, "formula") for n, b in shared.items() if not n.startswith("dummy")]
    if dummies:
        out.append(LastingBuffer("stand-in weight gradients, one a weight shape", dummies, "formula"))
    out += [LastingBuffer(w.name, w.bytes, w.provenance) for w in lasting_workspaces(run, chunks, ctx)]
    out += [LastingBuffer(w.name, w.bytes, w.provenance) for w in lasting_workspaces(run, chunks, ctx)]
    return out
