"""A chain of blocks costs what its blocks cost, one after the other: while block i runs forward or backward, the saved
tensors of the blocks before it are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from bridge_memory.components import Part, Provenance
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.blocks import Block
from bridge_memory.tapes.symbolic import largest

Parts = tuple[tuple[tuple[Part, Provenance], int], ...]


class Concurrent(NamedTuple):
    """Bytes that a data-parallel engine holds beside a link while it runs."""

    forward: int = 0
    #: While the gradients of experts are made, or of all that it has.
    backward: int = 0
    #: While the others are made.
    backward_at_end: int = 0
    #: At some moment, without anything else of the link.
    least_backward: int = 0
    #: Of what is there while it runs backward: gradients that stay until the optimizer's step.
    gradients: int = 0
    #: Of earlier microbatches' whole gradients, which are counted apart: what is not there any more while it runs
    #: backward, and at the moment of ``least_backward``.
    gone: int = 0
    gone_at_least: int = 0
    #: At some moment of its forward, without anything else of the link.
    least_forward: int = 0
    #: When its backward begins, beside all that it keeps; 0 where that is less than while it runs.
    entering_backward: int = 0


NOTHING = Concurrent()


class Link(NamedTuple):
    """One element of the chain: what it keeps, and its own peaks (what it keeps included), in bytes."""

    label: Label
    retained: int
    forward_peak: int
    backward_peak: int
    #: ``backward_peak`` where the schedule holds the gradient of its output to the end.
    backward_peak_held: int
    #: What runs at either peak, for those who ask.
    forward_name: Callable[[], str]
    backward_name: Callable[[], str]
    #: ``retained`` by part of the model, but for ``more``.
    cost: BlockCost | None = None
    more: Parts = ()
    #: Bytes in host memory between the passes.
    offloaded: int = 0
    #: ``forward_peak`` up to its last router, where the graph of that router's probabilities reaches the chunk's input.
    routed_peak: int = 0
    #: What its backward leaves behind until its next forward, and of that the gradient of its input.
    residue: int = 0
    residue_gradient: int = 0
    #: Decoder layers that it stands for, 1 where it is none.
    layers: int = 1
    #: Of ``backward_peak``: gradients that earlier links made and the optimizer waits for; and how many of earlier
    #: microbatches' are gone then (``Concurrent.gone``).
    gradients: int = 0
    gone: int = 0
    #: Of ``backward_peak``: what others wait for, which is there at an engine's ``least_backward`` too.
    waiting: int = 0

    def with_concurrent(self, nbytes: int, at_least: int = 0) -> Link:
        """The same element where its backward finds ``nbytes`` more, and has ``at_least`` so many at some moment."""
        return self._replace(
            backward_peak=largest(self.backward_peak + nbytes, at_least),
            backward_peak_held=largest(self.backward_peak_held + nbytes, at_least),
        )

    def with_waiting(self, nbytes: int) -> Link:
        """The same element where its backward finds ``nbytes`` more, from its beginning to what an engine does after
        it."""
        return self.with_concurrent(nbytes)._replace(waiting=self.waiting + nbytes)

    def with_gradients(self, nbytes: int) -> Link:
        """The same element beside gradients that wait all through its backward."""
        return self._replace(
            backward_peak=self.backward_peak + nbytes, backward_peak_held=self.backward_peak_held + nbytes
        )

    def at_end(self) -> int:
        """Its backward peak once its router has run backward; 0 where it has none."""
        _, plain, held, _ = self.cost.before_landmark if self.cost is not None else (0, 0, 0, 0)
        return max(plain, held) + self.residue if plain else 0

    def with_engine(self, held: Concurrent, at_end: int) -> Link:
        """The same element where a data-parallel engine holds so much beside it; ``at_end``: its own."""
        beside, least = held.backward_at_end, held.least_backward
        least += self.waiting if least else 0
        if at_end:
            beside, least = held.backward, at_end + max(beside, least)
        if held.entering_backward:
            least = max(least, self.retained + self.waiting + held.entering_backward)
        gone = held.gone_at_least if least > self.backward_peak + beside else held.gone
        return self._replace(
            forward_peak=max(self.forward_peak + held.forward, held.least_forward),
            backward_peak=max(self.backward_peak + beside, least),
            backward_peak_held=max(self.backward_peak_held + beside, least),
            routed_peak=self.routed_peak + held.forward if self.routed_peak else 0,
            gradients=held.gradients,
            gone=gone,
        )

    def kept_on_gpu(self) -> Link:
        """The same element where nothing is sent away."""
        more = (*self.more, ((Part.NOT_OFFLOADED, Provenance.FORMULA), self.offloaded))
        return self._replace(retained=self.retained + self.offloaded, more=more, offloaded=0)

    def parts(self) -> Iterator[tuple[tuple[Part, Provenance], int]]:
        """``retained`` by part of the model."""
        if self.cost is not None:
            yield from self.cost.by_part().items()
        yield from self.more


class Label(str, Enum):
    """What a link of a chunk is."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    RECOMPUTED = "recomputed layers"
    OFFLOADED = "offloaded layer"
    FINAL_NORM = "final norm"
    MTP = "MTP"
    LOSS = "loss"
    #: In place of all others, where a chunk has none.
    PASSED_ON = "passed on"


class EngineBytes(NamedTuple):
    """What a data-parallel engine gathers and reduces while the links of one chunk run."""

    #: Of every decoder layer, in order.
    layers: tuple[Concurrent, ...]
    embedding: Concurrent = NOTHING
    final_norm: Concurrent = NOTHING
    #: The most of all depths.
    mtp: Concurrent = NOTHING
    loss: Concurrent = NOTHING


#: Links in order, and how often each comes.
Links = tuple[tuple[Link, int], ...]


class ChunkInventory(NamedTuple):
    """One virtual chunk on one rank, for one microbatch, in bytes."""

    retained: int
    forward_peak: int
    forward_name: Callable[[], str]
    backward_peak: int
    backward_name: Callable[[], str]
    links: Links
    output_bytes: int
    #: What backward leaves behind until the next forward takes its place.
    residue: int = 0
    #: Of ``retained``: the output, which was sent.
    kept: int = 0

    @property
    def forward_operation(self) -> str:
        return self.forward_name()

    @property
    def backward_operation(self) -> str:
        return self.backward_name()

    @property
    def offloads(self) -> bool:
        """Whether anything goes to host memory between the passes, and could stay."""
        return any([link.offloaded for link, _ in self.links])

    def apart(self) -> tuple[int, int, int, int]:
        """What its embedding keeps, and its (last) loss; the most that one link between needs beyond what it keeps,
        forward and backward. Losses of MTP depths are among these: each follows its depth where layers are scheduled
        one by one (``models/common/model_chunk_schedule_plan.py``)."""
        links = [link for link, _ in self.links]
        embedding = links.pop(0).retained if links and links[0].label is Label.EMBEDDING else 0
        loss = links.pop().retained if links and links[-1].label is Label.LOSS else 0
        return (
            embedding, loss,
            max([link.forward_peak - link.retained for link in links], default=0),
            max([link.backward_peak - link.retained for link in links], default=0),
        )

    def parts(self) -> dict[tuple[Part, Provenance], int]:
        """``retained`` by part of the model and how it is known."""
        return parts_of(self.links, self.kept)

    def at_peak(self, *, backward: bool) -> AtPeak:
        """What of it is there at its own peak, forward or backward: links that have run forward and not yet backward.

        The running link's is listed where there is room for all that it keeps; else a moment is the peak at which it
        does not hold it (yet, or any more), and what it holds then counts as in passing.
        """
        highest = self.backward_peak if backward else self.forward_peak
        passed: list[tuple[Link, int]] = []
        for link, before, forward, back in follow(self):
            if (back if backward else forward) == highest:
                gradients, gone = (link.gradients, link.gone) if backward else (0, 0)
                kept = self.kept if backward else 0
                if highest - before - kept - gradients + gone >= link.retained:
                    passed.append((link, 1))
                return AtPeak(tuple(passed), kept, gradients, gone)
            passed.append((link, 1))
        return AtPeak(self.links, self.kept, 0, 0)  # between two passes, with everything


class AtPeak(NamedTuple):
    """What is there of one microbatch at a peak of its chunk, in bytes."""

    #: Those of which all that they keep is there.
    links: Links
    #: Of an output that was sent.
    kept: int
    #: Made so far, for the optimizer; and those of earlier microbatches that are gone (``Concurrent``).
    gradients: int
    gone: int

    def parts(self) -> dict[tuple[Part, Provenance], int]:
        """What is kept by part of the model and how it is known."""
        return parts_of(self.links, self.kept)


def parts_of(links: Iterable[tuple[Link, int]], kept: int = 0) -> dict[tuple[Part, Provenance], int]:
    """What so many of each link keep, by part of the model and how it is known; ``kept``: of an output that was
    sent."""
    out: dict[tuple[Part, Provenance], int] = {}
    for link, count in links:
        for key, nbytes in link.parts():
            out[key] = out.get(key, 0) + count * nbytes
    if kept:
        key = (Part.PIPELINE, Provenance.FORMULA)
        out[key] = out.get(key, 0) + kept
    return out


def plain_link(found: Block, label: Label) -> Link:
    """A block as it is."""
    c = found.cost
    return Link(
        label, c.retained, c.forward_peak, c.backward_peak, c.backward_peak_held, c.forward_name, c.backward_name, c,
        (), c.offloaded, c.before_landmark_forward,
    )


def change_last_of(links: list[tuple[Link, int]], position: int, link: Link) -> None:
    """Put ``link`` in the place of the last of those in a row at ``position``."""
    same, count = links[position]
    links[position : position + 1] = [(same, count - 1)] * (count > 1) + [(link, 1)]


def with_engine(links: Sequence[tuple[Link, int]], held: EngineBytes) -> list[tuple[Link, int]]:
    """The same chain with what an engine holds beside each link; one of several layers has the most of theirs."""
    others = {
        Label.EMBEDDING: held.embedding, Label.FINAL_NORM: held.final_norm, Label.MTP: held.mtp, Label.LOSS: held.loss,
    }
    out: list[tuple[Link, int]] = []
    layer = 0
    for link, count in links:
        at_end = link.at_end()
        if link.label in others:
            out.append((link.with_engine(others[link.label], at_end), count))
            continue
        for _ in range(count):
            out.append((link.with_engine(most(held.layers[layer : layer + link.layers]), at_end), 1))
            layer += link.layers
    return out


def most(held: Sequence[Concurrent]) -> Concurrent:
    """The most of each."""
    return held[0] if len(held) == 1 else Concurrent(*map(max, zip(*held, strict=True)))


def compose(links: Sequence[tuple[Link, int]], output_bytes: int = 0, *, kept: int = 0) -> ChunkInventory:
    """A chain's retained bytes and peaks.

    ``output_bytes``: the chunk's output travels on; the schedule holds its gradient to the end of the chunk's
    backward pass (``schedules.py: backward_step``), beside all links but the last, whose own output it is of.
    ``kept``: of that output itself, which stays until the chunk's backward pass is over.
    What links leave behind in backward is there while those before them run backward, and in the next forward
    pass until their own routers run.
    """
    before = 0
    forward = backward = 0
    forward_name = backward_name = _nothing
    residue = all_residue = sum(count * link.residue for link, count in links)
    number = len(links)
    for position, (link, count) in enumerate(links, 1):
        # The last is the highest; but the one before it where the last counts the output itself or where something is
        # left behind, and the first where most is left behind.
        ends = {count - 1}
        if count > 1 and (all_residue or (output_bytes and position == number)):
            ends |= {count - 2, 0} if link.residue else {count - 2}
        for k in ends:
            base, after = before + k * link.retained, residue - (k + 1) * link.residue
            forward, forward_name = higher(forward, forward_name, base + link.forward_peak + after, link.forward_name)
            following = link if k < count - 1 else links[position][0] if position < number else None
            after -= following.residue_gradient if following else 0  # the gradient of this link's output
            back = base + after + link.backward_peak + output_bytes
            if output_bytes and position == number and k == count - 1:
                back = base + after + link.backward_peak_held
            backward, backward_name = higher(backward, backward_name, back, link.backward_name)
        before += count * link.retained
        residue -= count * link.residue
    retained = before + kept
    return ChunkInventory(
        retained, largest(forward, retained), forward_name, largest(backward + kept, retained), backward_name,
        tuple(links), output_bytes, all_residue, kept,
    )


T = TypeVar("T")


def _nothing() -> str:
    return ""


def higher(best: Any, what: T, other: Any, what_else: T) -> tuple[Any, T]:
    """The higher of two peaks, the first of equals, and what belongs to it, which says nothing for arrays of peaks."""
    if type(other) is int:
        return (other, what_else) if other > best else (best, what)
    return largest(best, other), what


class Passing(NamedTuple):
    """One link of a chunk while it runs, in bytes of one microbatch: what the links before it keep, and all that is
    alive at its own peaks, forward and backward, with that."""

    link: Link
    before: int
    forward: int
    backward: int


def follow(chunk: ChunkInventory) -> Iterator[Passing]:
    """A chunk link by link, in order: what ``compose`` looks for the highest of, at the few links that can be it."""
    before, residue = 0, sum(count * link.residue for link, count in chunk.links)
    every = [link for link, count in chunk.links for _ in range(count)]
    for position, link in enumerate(every):
        residue -= link.residue
        following = every[position + 1] if position + 1 < len(every) else None
        back = link.backward_peak + chunk.output_bytes + chunk.kept
        if following is None and chunk.output_bytes:
            back = link.backward_peak_held + chunk.kept
        left = residue - (following.residue_gradient if following else 0)
        yield Passing(link, before, before + residue + link.forward_peak, before + left + back)
        before += link.retained
