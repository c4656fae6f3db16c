"""Temporaries of the reductions of DeepSpeed's ZeRO-1 and 2: gradients fill a bucket one after the other, and the one
that does not fit triggers its reduction first.

With ``contiguous_gradients`` they are copied into a flat buffer and freed, except one that is larger than the buffer;
else all stay in separate tensors. Slices of several partitions are concatenated, cast if the dtype of communication
differs, and this rank's slices are copied out.

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
    #: Elements of one partition; of the parameters that the estimated rank's partition contains at least in part; of
    #: the largest part of a parameter in it; and the number of that rank.
    partition: int
    touched: int
    largest: int
    fullest: int
    frozen_bytes: int

    def own_part(self, start: int, numel: int) -> int:
        """Elements of a parameter at ``start`` that are in the estimated rank's partition."""
        low = self.fullest * self.partition
        return max(0, min(start + numel, low + self.partition) - max(start, low))


class Widths(NamedTuple):
    """Bytes per element."""

    gradient: int
    communicated: int
    #: Reductions are added to fp32 gradients of the partition, although other gradients are not fp32.
    compact: bool


class Gradient(NamedTuple):
    """A gradient that is reduced; sizes in elements."""

    place: int
    #: Position of its parameter among the flat parameters.
    start: int
    numel: int


class Held(NamedTuple):
    """Bytes of gradients, without the buckets and without those of earlier microbatches, which are counted elsewhere.
    """

    #: Alive now.
    most: int = 0
    #: The part of it that stays until the optimizer's step.
    stays: int = 0
    #: The part of what is counted elsewhere that is freed by now.
    freed: int = 0


class Reduction(NamedTuple):
    """One reduction."""

    #: Place of the module whose gradient triggers it, and bytes of that gradient; -1 for the reduction after the last.
    place: int
    trigger: int
    #: Its peak, that gradient included.
    held: Held


class Replay(NamedTuple):
    """The reductions of one backward pass, and what is alive when a place begins."""

    reductions: list[Reduction]
    before: dict[int, Held]


def contiguous(run: RunSpec) -> bool:
    """Whether gradients are copied into a buffer; always if the optimizer is offloaded
    (``DeepSpeedZeroOptimizer.__init__``)."""
    return run.deepspeed.contiguous_gradients or run.deepspeed.offload_optimizer_device != "none"


class Reductions:
    """All reductions of one backward pass, in the order in which gradients are made.

    ``partitioned``: stage 2, which frees gradients of other partitions. ``counted_elsewhere``: gradients are of earlier
    microbatches, or made before the first reduction, and the caller counts them. ``own``: bytes of this rank's
    gradients once the first of them is reduced.
    """

    def __init__(
        self, run: RunSpec, flat: Flat, widths: Widths, *, partitioned: bool, counted_elsewhere: bool, own: int
    ) -> None:  # fmt: skip
        self.run, self.flat, self.widths = run, flat, widths
        self.partitioned, self.counted_elsewhere, self.own = partitioned, counted_elsewhere, own
        self.contiguous = contiguous(run)
        self.limit = run.deepspeed.reduce_bucket_size
        self.bucket: list[Gradient] = []
        self.elements = 0
        #: Bytes in separate tensors; of these, freed at the next reduction, and staying until the step.
        self.loose = self.lingering = self.staying = 0
        #: Bytes in this rank's buffer; bytes freed of what is counted elsewhere.
        self.kept = self.freed = 0
        self.found: list[Reduction] = []

    def replay(self, gradients: Iterable[Gradient], *, hooks: bool = True) -> Replay:
        """``hooks``: reductions run in hooks, so that each gradient has just been made when it is visited."""
        before: dict[int, Held] = {}
        for g in gradients:
            before.setdefault(g.place, self._held(0))
            nbytes = self._bytes(g)
            if self.elements and self.elements + g.numel > self.limit:
                self._reduce(g.place, nbytes if hooks else 0)
            self.bucket.append(g)
            self.elements += g.numel
            if self.contiguous and g.numel <= self.limit:
                self.freed += nbytes if self.counted_elsewhere else 0
            elif not self.counted_elsewhere:
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
                added = max(joined, added)  # the buffer is allocated before gradients are added to it
            found = max(found, self._held(trigger + added))
        self.found.append(Reduction(place, trigger, found))
        for g, own in zip(self.bucket, mine, strict=True):
            if not self.contiguous or g.numel > self.limit:
                self._after_reduction(self._bytes(g), own=own)
        self.bucket, self.elements = [], 0

    def _after_reduction(self, nbytes: int, *, own: bool) -> None:
        """Frees a gradient in a separate tensor after its reduction, or counts it as lingering or staying."""
        if own and self.contiguous and (not self.widths.compact or not self.partitioned):
            freed = True  # moved into this rank's buffer, or added to it and cleared
        elif own:
            freed = False
            self.staying += 0 if self.widths.compact or self.counted_elsewhere else nbytes
        elif self.partitioned and self.run.deepspeed.overlap_comm and not self.contiguous:
            freed = False
            self.lingering += nbytes
        else:
            freed = self.partitioned
        if freed and self.counted_elsewhere:
            self.freed += nbytes
        elif freed:
            self.loose -= nbytes

    def _copied(self) -> tuple[int, int]:
        """(bytes of concatenated gradients and their cast, bytes of the cast and what is added in fp32)."""
        each = [
            _copied(self.widths, sum(n for n, _ in group), len(group) > 1, max(added for _, added in group))
            for group in self._collectives()
        ]
        return max(joined for joined, _ in each), max(added for _, added in each)

    def _collectives(self) -> Iterable[list[tuple[int, int]]]:
        """Slices of each collective: (elements, elements of this rank that are added together). Slices are collected
        until a collective has more elements than a bucket may have (``allreduce_and_scatter``): partitions of a
        larger parameter are reduced separately, and a single slice is not copied."""
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
        """(elements, whether this rank's) of each gradient by partition; consecutive slices of one partition are
        merged, unless each is added to this rank's buffer separately."""
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
    """Bytes as ``Reductions._copied``, for one collective; ``added``: elements of the largest slice added in fp32."""
    cast = rounded(elements * widths.communicated) if widths.communicated != widths.gradient else 0
    whole = rounded(elements * widths.gradient) if joined else 0
    sums = rounded(added * 4) if widths.compact and widths.communicated != 4 else 0
    return whole + cast, (cast or whole) + sums
