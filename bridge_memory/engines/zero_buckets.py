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

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
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


@dataclass(frozen=True, eq=False, slots=True)
class Gradients:
    """The gradients of a model in its order, of each the place of its module, and in elements its size and the position
    of its parameter among the flat parameters."""

    places: tuple[int, ...]
    numels: tuple[int, ...]
    starts: tuple[int, ...]


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


class Plan(NamedTuple):
    """How gradients are reduced.

    ``hooks``: in hooks, in the order of backward, so that each gradient has just been made when it is visited; else
    after it, in the model's. ``partitioned``: stage 2, which frees gradients of other partitions.
    ``counted_elsewhere``: gradients are of earlier microbatches, or made before the first reduction, and the caller
    counts them. ``own``: bytes of this rank's gradients once the first of them is reduced. ``norm``: of an offloaded
    optimizer bytes per element of a copy that is made of each, for its norm, before it goes to host memory
    (``set_norm_for_param_grad_in_gpu``); else 0.
    """

    flat: Flat
    widths: Widths
    #: ``reduce_bucket_size``, elements.
    limit: int
    contiguous: bool
    reduce_scatter: bool
    overlaps: bool
    hooks: bool
    partitioned: bool
    counted_elsewhere: bool
    own: int
    norm: int = 0


@lru_cache(maxsize=64)  # the same for all configurations of a search
def replay(gradients: Gradients, plan: Plan) -> Replay:
    """All reductions of one backward pass."""
    return _Reductions(gradients, plan).replay()


class _Reductions:
    """The state of a replay. Gradients have the numbers of the order in which they are visited."""

    def __init__(self, gradients: Gradients, plan: Plan) -> None:
        self.plan, flat = plan, plan.flat
        order = slice(None, None, -1 if plan.hooks else 1)
        self.places, self.numels = gradients.places[order], gradients.numels[order]
        self.starts = gradients.starts[order]
        self.bytes_of = {n: rounded(n * plan.widths.gradient) for n in set(self.numels)}
        #: This rank's gradients, in order, and how many elements of each are in its partition.
        low = flat.fullest * flat.partition
        high = low + flat.partition
        self.own = {
            i: flat.own_part(start, n)
            for i, (start, n) in enumerate(zip(self.starts, self.numels, strict=True))
            if start < high and start + n > low
        }
        self.owned = list(self.own)
        #: Bytes in separate tensors; of these, freed at the next reduction, and staying until the step.
        self.loose = self.lingering = self.staying = 0
        #: Bytes in this rank's buffer; bytes freed of what is counted elsewhere.
        self.kept = self.freed = 0
        self.found: list[Reduction] = []

    def replay(self) -> Replay:
        plan, number = self.plan, len(self.numels)
        # One that is copied into the bucket is freed, if it is counted elsewhere; another is in a tensor, if not.
        counts = {
            n: size * ((plan.contiguous and n <= plan.limit) == plan.counted_elsewhere)
            for n, size in self.bytes_of.items()
        }
        counted = [0, *accumulate([counts[n] for n in self.numels])]
        elements = [0, *accumulate(self.numels)]
        #: Of each place the first gradient.
        firsts = dict(zip(reversed(self.places), range(number - 1, -1, -1), strict=True))
        begins = sorted((i, place) for place, i in firsts.items())
        before: dict[int, Held] = {}
        at = 0

        def count(end: int) -> None:
            """Those before ``end`` are made."""
            nonlocal at
            if plan.counted_elsewhere:
                self.freed += counted[end] - counted[at]
            else:
                self.loose += counted[end] - counted[at]
            at = end

        start = 0
        while start < number:
            end = max(start + 1, bisect_right(elements, elements[start] + plan.limit) - 1)
            # The gradient that triggers a reduction is visited before it.
            while begins and begins[0][0] <= end:
                first, place = begins.pop(0)
                count(first)
                before[place] = self._held(0)
            count(end)
            if end < number:
                self._reduce(start, end, self.places[end], self.bytes_of[self.numels[end]] if plan.hooks else 0)
            else:
                self._reduce(start, end, -1, 0)
            start = end
        return Replay(self.found, before)

    def _held(self, more: int) -> Held:
        return Held(self.loose + self.kept + more, self.kept + self.staying, self.freed)

    def _reduce(self, start: int, end: int, place: int, trigger: int) -> None:
        """Those from ``start`` to before ``end``, which are in the bucket."""
        plan = self.plan
        made = self._held(trigger)
        self.loose -= self.lingering
        self.lingering = 0
        mine = self.owned[bisect_left(self.owned, start) : bisect_left(self.owned, end)]
        joined, added = self._copied(start, end, mine)
        found = max(made, self._held(trigger + joined))
        if mine and (plan.contiguous or plan.widths.compact):
            self.kept = plan.own
            if not plan.widths.compact:
                added = 0
            elif plan.contiguous and plan.reduce_scatter:
                added = max(joined, added)  # the buffer is allocated before gradients are added to it
            largest = max([self.own[i] for i in mine])
            found = max(found, self._held(trigger + max(added, rounded(largest * plan.norm))))
        self.found.append(Reduction(place, trigger, found))
        if not plan.contiguous or self.numels[start] > plan.limit:
            own = sum([self.bytes_of[self.numels[i]] for i in mine])
            self._after_reduction(own, own=True)
            self._after_reduction(sum([self.bytes_of[n] for n in self.numels[start:end]]) - own, own=False)

    def _after_reduction(self, nbytes: int, *, own: bool) -> None:
        """Frees gradients in separate tensors after their reduction, or counts them as lingering or staying."""
        plan = self.plan
        compact = plan.widths.compact
        if own and plan.contiguous and (not compact or not plan.partitioned):
            freed = True  # moved into this rank's buffer, or added to it and cleared
        elif own:
            freed = False
            self.staying += 0 if compact or plan.counted_elsewhere else nbytes
        elif plan.partitioned and plan.overlaps and not plan.contiguous:
            freed = False
            self.lingering += nbytes
        else:
            freed = plan.partitioned
        if freed and plan.counted_elsewhere:
            self.freed += nbytes
        elif freed:
            self.loose -= nbytes

    def _copied(self, start: int, end: int, mine: Sequence[int]) -> tuple[int, int]:
        """(bytes of concatenated gradients and their cast, bytes of the cast and what is added in fp32)."""
        each = [_copied(self.plan.widths, *group) for group in self._collectives(start, end, mine)]
        return max(joined for joined, _ in each), max(added for _, added in each)

    def _collectives(self, start: int, end: int, mine: Sequence[int]) -> Iterable[tuple[int, bool, int]]:
        """Of each collective (elements, whether slices are concatenated, elements of the largest that this rank adds).
        Slices are collected until a collective has more elements than a bucket may have (``allreduce_and_scatter``):
        partitions of a larger parameter are reduced separately, and a single slice is not copied."""
        plan = self.plan
        if not (plan.contiguous and plan.reduce_scatter):
            joined = not plan.contiguous and end - start > 1
            yield sum(self.numels[start:end]), joined, max([self.own[i] for i in mine], default=0)
            return
        elements = number = most = 0
        for n, own in self._slices(start, end):
            elements, number, most = elements + n, number + 1, max(most, n if own else 0)
            if elements > plan.limit:
                yield elements, number > 1, most
                elements = number = most = 0
        if number:
            yield elements, number > 1, most

    def _slices(self, start: int, end: int) -> Iterable[tuple[int, bool]]:
        """(elements, whether this rank's) of each gradient by partition; consecutive slices of one partition are
        merged, unless each is added to this rank's buffer separately."""
        partition, fullest, compact = self.plan.flat.partition, self.plan.flat.fullest, self.plan.widths.compact
        last, elements = -1, 0
        for low, n in zip(self.starts[start:end], self.numels[start:end], strict=True):
            stop = low + n
            while low < stop:
                rank = low // partition
                high = min(stop, (rank + 1) * partition)
                if rank == last and not (compact and rank == fullest):
                    elements += high - low
                else:
                    if elements:
                        yield elements, last == fullest
                    last, elements = rank, high - low
                low = high
        yield elements, last == fullest


def _copied(widths: Widths, elements: int, joined: bool, added: int) -> tuple[int, int]:
    """Bytes as ``Reductions._copied``, for one collective; ``added``: elements of the largest slice added in fp32."""
    cast = rounded(elements * widths.communicated) if widths.communicated != widths.gradient else 0
    whole = rounded(elements * widths.gradient) if joined else 0
    sums = rounded(added * 4) if widths.compact and widths.communicated != 4 else 0
    return whole + cast, (cast or whole) + sums
