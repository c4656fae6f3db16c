"""What a reduction of DeepSpeed's ZeRO-1 and 2 makes, and when: parameter by parameter gradients fill a bucket, and the
one that does not fit any more has it reduced first.

With ``contiguous_gradients`` they are copied into a flat buffer and leave their own tensors, but for one that is larger
than the buffer; without, all stay in tensors of their own. Slices of several partitions are joined anew, cast where the
dtype of communication is another, and what belongs to this rank is copied out.

Source: deepspeed 0.19.8 ``runtime/zero/stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads,
reduce_ipg_grads, average_tensor, gradient_reduction_w_predivide, allreduce_bucket, copy_grads_in_partition,
_add_to_grad_partition_buffer, buffered_reduce_fallback``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bridge_memory.engines.torch_modules import rounded
from bridge_memory.spec import RunSpec


class Flat(NamedTuple):
    """The trained parameters of a model, one after the other, in elements."""

    numel: int
    padded: int
    #: Of one partition. Of the fullest rank's: the parameters that lie in it wholly or in part, and the largest part of
    #: one parameter; and which rank that is.
    partition: int
    touched: int
    largest: int
    fullest: int
    frozen_bytes: int

    def own_part(self, start: int, numel: int) -> int:
        """Elements of a parameter at ``start`` that lie in the fullest rank's partition."""
        low = self.fullest * self.partition
        return max(0, min(start + numel, low + self.partition) - max(start, low))


class Widths(NamedTuple):
    """Bytes of an element."""

    gradient: int
    communicated: int
    #: Gradients of the partition are fp32 though the others are not, and reductions are added to them.
    compact: bool


class Gradient(NamedTuple):
    """One that takes part in a reduction, in elements."""

    place: int
    #: Where it lies among the flat parameters.
    start: int
    numel: int


class Held(NamedTuple):
    """Of gradients, in bytes, beyond the buckets and beyond those of earlier microbatches that are counted apart."""

    #: All that is there.
    most: int = 0
    #: Of it what is there until the optimizer's step.
    stays: int = 0
    #: Of what is counted apart: gone by now.
    freed: int = 0


class Reduction(NamedTuple):
    """One reduction."""

    #: Of the module whose gradient had it happen, and the bytes of that gradient; -1 once all are there.
    place: int
    trigger: int
    #: At its worst, that gradient among it.
    held: Held


class Replay(NamedTuple):
    """The reductions of one backward pass; and what is there when a place begins."""

    reductions: list[Reduction]
    before: dict[int, Held]


def contiguous(run: RunSpec) -> bool:
    """Whether gradients are copied into a buffer; always where the optimizer is on the host
    (``DeepSpeedZeroOptimizer.__init__``)."""
    return run.deepspeed.contiguous_gradients or run.deepspeed.offload_optimizer_device != "none"


class Reductions:
    """All of one backward pass, in the order in which gradients come.

    ``partitioned``: stage 2, which frees what is not this rank's. ``apart``: gradients are those of earlier
    microbatches, or made before the first is reduced, and counted apart. ``own``: bytes that this rank's take once the
    first of them is reduced.
    """

    def __init__(
        self, run: RunSpec, flat: Flat, widths: Widths, *, partitioned: bool, apart: bool, own: int
    ) -> None:  # fmt: skip
        self.run, self.flat, self.widths = run, flat, widths
        self.partitioned, self.apart, self.own = partitioned, apart, own
        self.contiguous = contiguous(run)
        self.limit = run.deepspeed.reduce_bucket_size
        self.bucket: list[Gradient] = []
        self.elements = 0
        #: In tensors of their own; of them those that go at the next reduction, and those that stay until the step.
        self.loose = self.lingering = self.staying = 0
        #: In this rank's buffer; gone of what is counted apart.
        self.kept = self.freed = 0
        self.found: list[Reduction] = []

    def replay(self, gradients: Iterable[Gradient], *, hooks: bool = True) -> Replay:
        """``hooks``: each gradient has just been made when it is looked at."""
        before: dict[int, Held] = {}
        for g in gradients:
            before.setdefault(g.place, self._held(0))
            nbytes = self._bytes(g)
            if self.elements and self.elements + g.numel > self.limit:
                self._reduce(g.place, nbytes if hooks else 0)
            self.bucket.append(g)
            self.elements += g.numel
            if self.contiguous and g.numel <= self.limit:
                self.freed += nbytes if self.apart else 0
            elif not self.apart:
                self.loose += nbytes
        if self.elements:
            self._reduce(-1, 0)
        return Replay(self.found, before)

    def _bytes(self, gradient: Gradient) -> int:
        return rounded(gradient.numel * self.widths.gradient)

    def _held(self, more: int) -> Held:
        return Held(self.loose + self.kept + more, self.kept + self.staying, self.freed)

    def _reduce(self, place: int, trigger: int) -> None:
        made = self._held(trigger)
        self.loose -= self.lingering
        self.lingering = 0
        mine = [self.flat.own_part(g.start, g.numel) > 0 for g in self.bucket]
        joined, added = self._copied()
        found = max(made, self._held(trigger + joined))
        if any(mine) and (self.contiguous or self.widths.compact):
            self.kept = self.own
            if not self.widths.compact:
                added = 0
            elif self.contiguous and self.run.deepspeed.reduce_scatter:
                added = max(joined, added)  # the buffer is there before what is added to it
            found = max(found, self._held(trigger + added))
        self.found.append(Reduction(place, trigger, found))
        for g, own in zip(self.bucket, mine, strict=True):
            if not self.contiguous or g.numel > self.limit:
                self._after_reduction(self._bytes(g), own=own)
        self.bucket, self.elements = [], 0

    def _after_reduction(self, nbytes: int, *, own: bool) -> None:
        """What becomes of a gradient in a tensor of its own once it is reduced."""
        if own and self.contiguous and (not self.widths.compact or not self.partitioned):
            freed = True  # moved into this rank's buffer, or added to it and cleared
        elif own:
            freed = False
            self.staying += 0 if self.widths.compact or self.apart else nbytes
        elif self.partitioned and self.run.deepspeed.overlap_comm and not self.contiguous:
            freed = False
            self.lingering += nbytes
        else:
            freed = self.partitioned
        if freed and self.apart:
            self.freed += nbytes
        elif freed:
            self.loose -= nbytes

    def _copied(self) -> tuple[int, int]:
        """Bytes: the joined gradients and their cast; then, in place of the first, what is added in fp32."""
        each = [
            _copied(self.widths, sum(n for n, _ in group), len(group) > 1, max(added for _, added in group))
            for group in self._collectives()
        ]
        return max(joined for joined, _ in each), max(added for _, added in each)

    def _collectives(self) -> Iterable[list[tuple[int, int]]]:
        """(elements, of them this rank's that are added at once) of each slice, by collective. Slices go one after the
        other into one, which is done as soon as it has more elements than a bucket may have
        (``allreduce_and_scatter``): a parameter that is larger has some of its partitions reduced by themselves, and
        one slice alone is not copied."""
        if not self.contiguous:
            yield [(g.numel, self.flat.own_part(g.start, g.numel)) for g in self.bucket]
            return
        if not self.run.deepspeed.reduce_scatter:
            yield [(self.elements, max(self.flat.own_part(g.start, g.numel) for g in self.bucket))]
            return
        group: list[tuple[int, int]] = []
        for elements, own in self._slices():
            group.append((elements, elements if own else 0))
            if sum(n for n, _ in group) > self.limit:
                yield group
                group = []
        if group:
            yield group

    def _slices(self) -> Iterable[tuple[int, bool]]:
        """Of each gradient by partition; those of one partition that follow each other are one, unless each is added to
        this rank's buffer by itself."""
        last, elements = -1, 0
        for g in self.bucket:
            low, end = g.start, g.start + g.numel
            while low < end:
                rank = low // self.flat.partition
                high = min(end, (rank + 1) * self.flat.partition)
                if rank == last and not (self.widths.compact and rank == self.flat.fullest):
                    elements += high - low
                else:
                    if elements:
                        yield elements, last == self.flat.fullest
                    last, elements = rank, high - low
                low = high
        yield elements, last == self.flat.fullest


def _copied(widths: Widths, elements: int, joined: bool, added: int) -> tuple[int, int]:
    """Of gradients that one collective reduces; ``added``: elements of the largest that is added in fp32."""
    cast = rounded(elements * widths.communicated) if widths.communicated != widths.gradient else 0
    whole = rounded(elements * widths.gradient) if joined else 0
    sums = rounded(added * 4) if widths.compact and widths.communicated != 4 else 0
    return whole + cast, (cast or whole) + sums
