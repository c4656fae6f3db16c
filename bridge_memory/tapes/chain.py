"""A chain of blocks: while block i runs forward or backward, the saved tensors of the blocks before it are alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from bridge_memory.components import Part, Provenance
from bridge_memory.tapes.alive import TURNS, BlockCost
from bridge_memory.tapes.blocks import Block
from bridge_memory.tapes.symbolic import chosen, largest

Parts = tuple[tuple[tuple[Part, Provenance], int], ...]


class Concurrent(NamedTuple):
    """Bytes that a data-parallel engine holds while one link runs."""

    #: During its forward.
    forward: int = 0
    #: During its backward; of a MoE layer, while the gradients of its experts are made.
    backward: int = 0
    #: During the rest of a MoE layer's backward.
    backward_at_end: int = 0
    #: At a moment of its backward at which nothing else of the link is alive.
    least_backward: int = 0
    #: Of ``backward``: gradients that stay until the optimizer's step.
    gradients: int = 0
    #: Of earlier microbatches' unsharded gradients, which are counted elsewhere: bytes that are freed by then, during
    #: its backward and at the moment of ``least_backward``.
    freed: int = 0
    freed_at_least: int = 0
    #: At a moment of its forward at which nothing else of the link is alive.
    least_forward: int = 0
    #: When its backward begins, in addition to its saved tensors; 0 if that is less than while it runs.
    entering_backward: int = 0


NOTHING = Concurrent()


class Link(NamedTuple):
    """One element of a chain: the bytes that it retains, and its peaks, which include these."""

    label: Label
    retained: int
    forward_peak: int
    backward_peak: int
    #: ``backward_peak`` if the schedule holds the gradient of its output to the end.
    backward_peak_held: int
    #: The operation at either peak; a function, since most callers do not need it.
    forward_name: Callable[[], str]
    backward_name: Callable[[], str]
    #: The parts of ``retained``: those of ``cost``, and ``more``.
    cost: BlockCost | None = None
    more: Parts = ()
    #: Bytes in host memory between the passes.
    offloaded: int = 0
    #: Bytes of saved tensors, beyond ``retained``, that lose their storage once the last link of the chunk that has any
    #: of these has run forward, and are recomputed, all of the chunk, when that link runs backward.
    discarded: int = 0
    #: ``forward_peak`` up to its last router, if the graph of that router's probabilities reaches the chunk's input.
    routed_peak: int = 0
    #: Bytes carried over from its backward to its next forward, and of these the gradient of its input.
    carried_over: int = 0
    carried_over_gradient: int = 0
    #: Number of decoder layers in this link; 1 for any other block.
    layers: int = 1
    #: Of ``backward_peak``: gradients that wait for the optimizer; and bytes of earlier microbatches' gradients that
    #: are freed by then (``Concurrent.freed``).
    gradients: int = 0
    freed: int = 0
    #: Of ``backward_peak``: tensors that stay throughout, and so are alive at an engine's ``least_backward`` too.
    waiting: int = 0

    def with_concurrent(self, nbytes: int, at_least: int = 0) -> Link:
        """The same link with ``nbytes`` more alive during its backward, which peaks at ``at_least`` or more."""
        return self._replace(
            backward_peak=largest(self.backward_peak + nbytes, at_least),
            backward_peak_held=largest(self.backward_peak_held + nbytes, at_least),
        )

    def with_waiting(self, nbytes: int) -> Link:
        """The same link with ``nbytes`` more alive from the beginning of its backward until the engine has finished
        with it."""
        return self.with_concurrent(nbytes)._replace(waiting=self.waiting + nbytes)

    def with_gradients(self, nbytes: int) -> Link:
        """The same link with ``nbytes`` of gradients alive throughout its backward."""
        return self._replace(
            backward_peak=self.backward_peak + nbytes, backward_peak_held=self.backward_peak_held + nbytes
        )

    def with_kept(self, nbytes: Any, part: Part) -> Link:
        """The same link, which keeps ``nbytes`` more that were there before it ran."""
        return self.with_gradients(nbytes)._replace(
            retained=self.retained + nbytes, forward_peak=self.forward_peak + nbytes,
            more=(*self.more, ((part, Provenance.FORMULA), nbytes)),
        )

    def at_end(self) -> int:
        """Its backward peak once its router has run backward; 0 without a router."""
        _, plain, held, _ = self.cost.before_landmark if self.cost is not None else (0, 0, 0, 0)
        return max(plain, held) + self.carried_over if plain else 0

    def with_engine(self, held: Concurrent, at_end: int) -> Link:
        """The same link while a data-parallel engine holds ``held``. ``at_end``: result of the method of that name."""
        concurrent, least = held.backward_at_end, held.least_backward
        least = chosen(least > 0, least + self.waiting, 0)
        if at_end:
            concurrent, least = held.backward, at_end + largest(concurrent, least)
        entering = held.entering_backward
        least = largest(least, chosen(entering > 0, self.retained + self.waiting + entering, 0))
        freed = chosen(least > self.backward_peak + concurrent, held.freed_at_least, held.freed)
        return self._replace(
            forward_peak=largest(self.forward_peak + held.forward, held.least_forward),
            backward_peak=largest(self.backward_peak + concurrent, least),
            backward_peak_held=largest(self.backward_peak_held + concurrent, least),
            routed_peak=chosen(self.routed_peak > 0, self.routed_peak + held.forward, 0),
            gradients=held.gradients,
            freed=freed,
        )

    def keeping(self, nbytes: int, part: Part) -> Link:
        """The same link, which keeps ``nbytes`` of what it would discard."""
        more = (*self.more, ((part, Provenance.FORMULA), nbytes))
        return self._replace(retained=self.retained + nbytes, discarded=self.discarded - nbytes, more=more)

    def kept_on_gpu(self) -> Link:
        """The same link without offloading."""
        more = (*self.more, ((Part.NOT_OFFLOADED, Provenance.FORMULA), self.offloaded))
        return self._replace(retained=self.retained + self.offloaded, more=more, offloaded=0)

    def in_turns(self, gradient: int) -> tuple[int, int, int, tuple[int, ...], tuple[int, ...]]:
        """(what it saves, its peaks, and the most alive at each of ``TURNS``: ``ChunkInventory.by_layer``).
        ``gradient``: of the chunk's output, which is alive during backward."""
        saved, forward, backward = self.retained + self.discarded, self.forward_peak, self.backward_peak + gradient
        turns = self.cost.turns if self.cost is not None else None
        if turns is not None:
            assert self.cost is not None
            # What the chunk, or its engine, has in addition.
            more, back = forward - self.cost.forward_peak, backward - self.cost.backward_peak
            return saved, forward, backward, tuple(n + more for n in turns[0]), tuple(n + back for n in turns[1])
        # It runs in the turns of the first node; then there is its output, or its gradient.
        given, out = (self.cost.input_bytes, self.cost.output_bytes) if self.cost is not None else (0, 0)
        start = TURNS.index((False, 0))
        last = len(TURNS) - 1
        return (
            saved, forward, backward, (*[given] * start, forward, *[saved + out] * (last - start)),
            (*[saved + gradient + out] * last, backward),
        )

    def parts(self) -> Iterator[tuple[tuple[Part, Provenance], int]]:
        """``retained`` by part of the model and provenance."""
        if self.cost is not None:
            yield from self.cost.by_part().items()
        yield from self.more


class Label(str, Enum):
    """What a link of a chunk is."""

    EMBEDDING = "embedding"
    #: Part of a modality encoder of transformers, on the first chunk.
    ENCODER = "modality encoder"
    LAYER = "layer"
    RECOMPUTED = "recomputed layers"
    OFFLOADED = "offloaded layer"
    FINAL_NORM = "final norm"
    MTP = "MTP"
    LOSS = "loss"
    #: The only link of a chunk without layers.
    PASSED_ON = "passed on"


class EngineBytes(NamedTuple):
    """What a data-parallel engine gathers and reduces while the links of one chunk run."""

    #: For each decoder layer, in order.
    layers: tuple[Concurrent, ...]
    embedding: Concurrent = NOTHING
    final_norm: Concurrent = NOTHING
    #: The largest of all depths.
    mtp: Concurrent = NOTHING
    loss: Concurrent = NOTHING


#: Links in order, each with how often it is repeated.
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
    #: Bytes carried over from backward until the next forward replaces them.
    carried_over: int = 0
    #: Of ``retained``: the output, which was sent to the next stage.
    kept: int = 0

    @property
    def forward_operation(self) -> str:
        return self.forward_name()

    @property
    def backward_operation(self) -> str:
        return self.backward_name()

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded to host memory between the passes."""
        return any([link.offloaded for link, _ in self.links])

    def by_layer(self) -> tuple[int, int, int, int, int, tuple[Any, ...]]:
        """Where layers are scheduled one by one (``models/common/model_chunk_schedule_plan.py``): (retained by the
        blocks before them; alive when these have run forward, and when all after them has run backward; the most alive
        while they run forward, and backward; the layers: of each its number, what it saves, its forward and its
        backward peak, and the most alive of it at each of ``alive.TURNS`` in forward and in backward).

        What links discard between the passes is there during both.
        """
        links = list(self.links)
        before = forward_before = backward_before = 0
        while links and links[0][0].label in (Label.EMBEDDING, Label.ENCODER):
            link, count = links.pop(0)
            last = before + (count - 1) * link.retained
            forward_before = largest(forward_before, last + link.forward_peak)
            backward_before = largest(backward_before, last + link.backward_peak + self.output_bytes)
            before += count * link.retained
        received = len(links) == len(self.links)
        while links and links[-1][0].label in (Label.LOSS, Label.FINAL_NORM):
            links.pop()
        first = links[0][0].cost if links else None
        given = first.input_bytes if first is not None else 0
        # The schedule holds what was received; the gradient of the first layer's input, and of the chunk's output.
        entering, leaving = before + given, before + given * received + given + self.output_bytes
        layers = tuple([(count, *link.in_turns(self.output_bytes)) for link, count in links])
        return (
            before, entering, leaving, largest(forward_before, entering), largest(backward_before, leaving), layers,
        )

    def parts(self) -> dict[tuple[Part, Provenance], int]:
        """``retained`` by part of the model and provenance."""
        return parts_of(self.links, self.kept)

    def at_peak(self, *, backward: bool) -> AtPeak:
        """What is alive at the chunk's forward or backward peak: links that have run forward and not yet backward.

        The running link is among them if the peak has room for all that it retains. Else it has not saved everything
        yet (or has freed some of it), and what it holds counts as temporary.
        """
        highest = self.backward_peak if backward else self.forward_peak
        passed: list[tuple[Link, int]] = []
        for link, before, forward, back in peaks_by_link(self):
            present = before - sum([one.retained for one, _ in passed])
            if (back if backward else forward) == highest:
                gradients, freed = (link.gradients, link.freed) if backward else (0, 0)
                kept = self.kept if backward else 0
                if highest - before - kept - gradients + freed >= link.retained + link.discarded:
                    passed.append((link, 1))
                    present += link.discarded
                return AtPeak(tuple(passed), kept, gradients, freed, present)
            passed.append((link, 1))
        return AtPeak(self.links, self.kept, 0, 0)  # the peak is between forward and backward


class AtPeak(NamedTuple):
    """What is alive of one microbatch at a peak of its chunk, in bytes."""

    #: Links whose retained tensors are all alive.
    links: Links
    #: The output that was sent.
    kept: int
    #: Gradients made so far, which wait for the optimizer; those of earlier microbatches freed by then
    #: (``Concurrent``).
    gradients: int
    freed: int
    #: Tensors without storage between the passes (``Link.discarded``) that are there.
    present: int = 0

    def parts(self) -> dict[tuple[Part, Provenance], int]:
        """Retained bytes by part of the model and provenance, and what is there of the tensors without storage between
        the passes: streams, and the norms of what was aggregated from them."""
        found = parts_of(self.links, self.kept)
        if self.present:
            key = (Part.HYPER_CONNECTIONS, Provenance.FORMULA)
            found[key] = found.get(key, 0) + self.present
        return found


def parts_of(links: Iterable[tuple[Link, int]], kept: int = 0) -> dict[tuple[Part, Provenance], int]:
    """Bytes that these links retain, by part of the model and provenance. ``kept``: bytes of an output that was sent.
    """
    out: dict[tuple[Part, Provenance], int] = {}
    for link, count in links:
        for key, nbytes in link.parts():
            out[key] = out.get(key, 0) + count * nbytes
    if kept:
        key = (Part.PIPELINE, Provenance.FORMULA)
        out[key] = out.get(key, 0) + kept
    return out


def plain_link(found: Block, label: Label) -> Link:
    """A block as a link."""
    c = found.cost
    return Link(
        label, c.retained, c.forward_peak, c.backward_peak, c.backward_peak_held, c.forward_name, c.backward_name, c,
        (), c.offloaded, c.discarded, c.before_landmark_forward,
    )


def change_last_of(links: list[tuple[Link, int]], position: int, link: Link) -> None:
    """Replace the last repetition of the link at ``position`` by ``link``."""
    same, count = links[position]
    links[position : position + 1] = [(same, count - 1)] * (count > 1) + [(link, 1)]


def with_engine(links: Sequence[tuple[Link, int]], held: EngineBytes) -> list[tuple[Link, int]]:
    """The same chain with the bytes that an engine holds during each link; a link of several layers has the largest of
    these layers' bytes."""
    others = {
        Label.EMBEDDING: held.embedding, Label.ENCODER: held.embedding, Label.FINAL_NORM: held.final_norm,
        Label.MTP: held.mtp, Label.LOSS: held.loss,
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
    """The largest value of each field."""
    return held[0] if len(held) == 1 else Concurrent(*[reduce(largest, values) for values in zip(*held, strict=True)])


def compose(links: Sequence[tuple[Link, int]], output_bytes: int = 0, *, kept: int = 0) -> ChunkInventory:
    """A chain's retained bytes and peaks.

    ``output_bytes``: the chunk sends its output; the schedule holds the gradient of the output to the end of the
    chunk's backward pass (``schedules.py: backward_step``). It is added to all links but the last, which counts the
    gradient of its own output itself. ``kept``: bytes of the output, if it stays until the chunk's backward pass is
    over. Bytes that links carry over from backward are alive while the links before them run backward, and in the next
    forward pass until the link's own router runs. What links discard between the passes is alive during both, until the
    last of these links has run forward.
    """
    before = 0
    discarding = _discarding(links)
    forward = backward = 0
    forward_name = backward_name = _nothing
    carried = all_carried = sum(count * link.carried_over for link, count in links)
    number = len(links)
    for position, (link, count) in enumerate(links, 1):
        # Of repetitions of one link the last is the highest. But the one before it can be, if the last counts the
        # output's gradient itself or if bytes are carried over; and the first, if that one carries over most.
        ends = {count - 1}
        if count > 1 and (all_carried or (output_bytes and position == number)):
            ends |= {count - 2, 0} if link.carried_over else {count - 2}
        held = link.retained + link.discarded
        for k in ends:
            base, after = before + k * held, carried - (k + 1) * link.carried_over
            forward, forward_name = higher(forward, forward_name, base + link.forward_peak + after, link.forward_name)
            following = link if k < count - 1 else links[position][0] if position < number else None
            after -= following.carried_over_gradient if following else 0  # is the gradient of this link's output
            back = base + after + link.backward_peak + output_bytes
            if output_bytes and position == number and k == count - 1:
                back = base + after + link.backward_peak_held
            backward, backward_name = higher(backward, backward_name, back, link.backward_name)
        before += count * held
        carried -= count * link.carried_over
        if position == discarding:
            before = sum(n * one.retained for one, n in links[:position])
    retained = before + kept
    return ChunkInventory(
        retained, largest(forward, retained), forward_name, largest(backward + kept, retained), backward_name,
        tuple(links), output_bytes, all_carried, kept,
    )


def _discarding(links: Sequence[tuple[Link, int]]) -> int:
    """Position, from 1, of the last link that discards between the passes; 0: none does."""
    every = [type(link.discarded) is not int or link.discarded > 0 for link, _ in links]
    return max([i for i, discards in enumerate(every, 1) if discards], default=0)


T = TypeVar("T")


def _nothing() -> str:
    return ""


def higher(best: Any, what: T, other: Any, what_else: T) -> tuple[Any, T]:
    """(the higher of two peaks, what belongs to it), the first of equals; of arrays of peaks always the first's."""
    if type(other) is int:
        return (other, what_else) if other > best else (best, what)
    return largest(best, other), what


class LinkPeaks(NamedTuple):
    """One link of a chunk, in bytes of one microbatch: ``before``: held by the links before it; ``forward`` and
    ``backward``: everything alive at its peaks, with that."""

    link: Link
    before: int
    forward: int
    backward: int


def peaks_by_link(chunk: ChunkInventory) -> Iterator[LinkPeaks]:
    """The peaks of every link of a chunk, in order. ``compose`` finds the highest of these from the few links that can
    be it."""
    before, carried = 0, sum(count * link.carried_over for link, count in chunk.links)
    every = [link for link, count in chunk.links for _ in range(count)]
    discarding = _discarding([(link, 1) for link in every])
    for position, link in enumerate(every):
        carried -= link.carried_over
        following = every[position + 1] if position + 1 < len(every) else None
        back = link.backward_peak + chunk.output_bytes + chunk.kept
        if following is None and chunk.output_bytes:
            back = link.backward_peak_held + chunk.kept
        left = carried - (following.carried_over_gradient if following else 0)
        yield LinkPeaks(link, before, before + carried + link.forward_peak, before + left + back)
        before += link.retained + link.discarded
        if position + 1 == discarding:
            before = sum([one.retained for one in every[:discarding]])
