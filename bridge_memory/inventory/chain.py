"""A chain of blocks costs what its blocks cost, one after the other: while block i runs forward or backward, the saved
tensors of the blocks before it are alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bridge_memory.inventory.recorder import BlockInventory
from bridge_memory.inventory.tape import BlockCost


@dataclass(frozen=True, slots=True)
class Link:
    """One element of the chain: what it keeps, and its own peaks (its saved tensors included)."""

    label: str
    saved: int
    forward_peak: int
    forward_operation: str
    backward_peak: int
    backward_operation: str
    #: ``backward_peak`` where the schedule holds the gradient of its output to the end.
    backward_peak_held: int
    #: Saved bytes by module: ((module, bytes), ...).
    modules: tuple[tuple[str, int], ...]
    #: Bytes in host memory between the passes.
    offloaded: int = 0
    #: ``forward_peak`` up to its last router, where the graph of that router's probabilities reaches the chunk's input.
    routed_peak: int = 0
    #: What its backward leaves behind until its next forward, and of that the gradient of its input.
    left: int = 0
    left_gradient: int = 0

    def beside(self, nbytes: int, at_least: int = 0) -> Link:
        """The same element where its backward finds ``nbytes`` more, and has ``at_least`` so many at some moment."""
        return replace(
            self, backward_peak=max(self.backward_peak + nbytes, at_least),
            backward_peak_held=max(self.backward_peak_held + nbytes, at_least),
        )

    def kept_on_gpu(self) -> Link:
        """The same element where nothing is sent away."""
        modules = (*self.modules, ("kept from offloading", self.offloaded))
        return replace(self, saved=self.saved + self.offloaded, modules=modules, offloaded=0)


@dataclass(frozen=True, slots=True)
class ChunkInventory:
    """One virtual chunk on one rank, for one microbatch."""

    saved: int
    forward_peak: int
    forward_operation: str
    backward_peak: int
    backward_operation: str
    modules: tuple[tuple[str, int], ...]
    output_bytes: int
    #: What backward leaves behind until the next forward takes its place.
    left: int = 0


@lru_cache(maxsize=8192)
def plain_link(inventory: BlockInventory, label: str) -> Link:
    c = inventory.cost
    return Link(
        label, c.saved, c.forward_peak, c.forward_peak_op, c.backward_peak, c.backward_peak_op,
        c.backward_peak_held, _modules(c), c.offloaded, c.early[0],
    )


def _modules(cost: BlockCost) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for t in cost.saved_tensors:
        sums[t.module] = sums.get(t.module, 0) + t.bytes
    return tuple(sums.items())


def change_last_of(links: list[tuple[Link, int]], position: int, link: Link) -> None:
    """Put ``link`` in the place of the last of those in a row at ``position``."""
    same, count = links[position]
    links[position : position + 1] = [(same, count - 1)] * (count > 1) + [(link, 1)]


def compose(links: Sequence[tuple[Link, int]], output_bytes: int = 0) -> ChunkInventory:
    """A chain's saved bytes and peaks.

    ``output_bytes``: the chunk's output travels on; the schedule holds its gradient to the end of the chunk's
    backward pass (``schedules.py: backward_step``), beside all links but the last, whose own output it is of.
    What links leave behind in backward is there while those before them run backward, and in the next forward
    pass until their own routers run.
    """
    before = 0
    forward = backward = 0
    forward_op = backward_op = ""
    modules: dict[str, int] = {}
    left = all_left = sum(count * link.left for link, count in links)
    for position, (link, count) in enumerate(links, 1):
        # The last is the highest; but the one before it where the last counts the output itself, and the first where
        # most is left behind.
        for k in {count - 1, max(0, count - 2), *((0,) if link.left else ())}:
            base, after = before + k * link.saved, left - (k + 1) * link.left
            if base + link.forward_peak + after > forward:
                forward, forward_op = base + link.forward_peak + after, link.forward_operation
            following = link if k < count - 1 else links[position][0] if position < len(links) else None
            after -= following.left_gradient if following else 0  # the gradient of this link's output
            back = base + after + link.backward_peak + output_bytes
            if output_bytes and position == len(links) and k == count - 1:
                back = base + after + link.backward_peak_held
            if back > backward:
                backward, backward_op = back, link.backward_operation
        before += count * link.saved
        left -= count * link.left
        for name, nbytes in link.modules:
            modules[name] = modules.get(name, 0) + count * nbytes
    return ChunkInventory(
        before, max(forward, before), forward_op, max(backward, before), backward_op,
        tuple(modules.items()), output_bytes, all_left,
    )
