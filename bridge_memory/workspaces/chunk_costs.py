"""Chunks of a stage, as the schedule takes them."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.schedule.events import ChunkCost, LayerTurns, OverlapCost
from bridge_memory.tapes.chain import ChunkInventory


def chunk_costs(inventories: Sequence[ChunkInventory]) -> list[ChunkCost]:
    """The chunks of a stage for the schedule."""
    # The only chunk of a stage counts what it carries over itself.
    several = len(inventories) > 1
    return [
        ChunkCost(i.retained, i.forward_peak, i.backward_peak, None, i.carried_over if several else 0)
        for i in inventories
    ]


def overlap_cost(chunk: ChunkInventory, held: int) -> OverlapCost | None:
    """The parts of a chunk that overlapped schedules run separately; ``held``: ``OverlapCost.held``. None if it
    offloads: copies from host memory run a whole layer ahead of the nodes, behind which other tensors wait
    (``fine_grained_activation_offload.py: on_group_start_backward``), so that what a turn has is not known."""
    if chunk.offloads:
        return None
    before, entering, leaving, forward, backward, layers = chunk.by_layer()
    turns = tuple([LayerTurns(*each) for each in layers])
    return OverlapCost(before, entering, leaving, forward, backward, turns, held)
