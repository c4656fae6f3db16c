"""What Megatron-FSDP gathers and reduces while the links of a chunk run: gathered weights, and gradients that wait to
be reduced or freed.

Budgets are numbers of elements. By default megatron-core gathers half a billion ahead and lets a billion wait, so that
a small model is fully gathered.

Source: megatron-core ``distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: MegatronFSDP`` (hooks, budgets),
``param_and_grad_buffer.py: AllGatherPipeline, GradReducePipeline``; before 0.14 ``distributed/custom_fsdp``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from bridge_memory.engines.fsdp_buckets import Bucket, Places, Sharding
from bridge_memory.inventory.stack import Unit
from bridge_memory.releases import (
    FSDP_KEEPS_ROOT,
    FSDP_PREFETCH_FITS_UNITS,
    FSDP_PREFETCHES_AHEAD,
    FSDP_REDUCES_EACH_PARAMETER,
    FSDP_ROOT_ALONE,
)
from bridge_memory.tapes.chain import Concurrent, EngineBytes
from bridge_memory.workspaces.allocator import block_remainder

#: Default number of elements that wait to be reduced; half of it is gathered ahead.
COMMUNICATION_UNIT = 1_000_000_000


class Flow:
    """Gathered weights and waiting gradients of one chunk, place by place."""

    def __init__(
        self, sharding: Sharding, buckets: Sequence[Bucket], units: Sequence[Unit], places: Places, limit: int | None
    ) -> None:
        self.sharding, self.buckets, self.places = sharding, buckets, places
        impl = sharding.run.implementation
        self.ahead = FSDP_PREFETCHES_AHEAD(impl)
        self.keeps_root = FSDP_KEEPS_ROOT(impl)
        self.impl = impl
        root = [sharding.whole_weights(b) for b in buckets if not b.unit]
        #: Gathered weights outside of units, with the remainders of the allocator's blocks.
        self.root_bytes = sum(root) + (0 if impl.expandable_segments else sum(map(block_remainder, root)))
        #: Prefix sums over buckets: elements, and bytes that units gather in forward and in backward.
        self.sizes = [0, *accumulate(b.size for b in buckets)]
        self.bytes = [
            [0, *accumulate(sharding.whole_weights(b, backward) if b.unit else 0 for b in buckets)]
            for backward in (False, True)
        ]
        self.of_place: dict[int, tuple[int, int]] = {}
        for i, b in enumerate(buckets):
            if b.unit:
                low, _ = self.of_place.get(b.first, (i, i))
                self.of_place[b.first] = low, i + 1
        self.budget, self.capacity = self._budget(units, limit)
        self.pools = 0
        #: Buckets with a persistent buffer.
        self.pooled: frozenset[int] = frozenset()
        self.double = sharding.run.data_parallel.fsdp_double_buffer and bool(self.of_place)
        if self.double:
            self._in_pools()

    def _budget(self, units: Sequence[Unit], limit: int | None) -> tuple[int | None, int | None]:
        """(elements gathered ahead, elements that wait to be reduced); before ``FSDP_PREFETCHES_AHEAD`` the first is
        everything gathered together. ``limit``: elements of a bucket outside of units.
        """
        asked = self.sharding.run.data_parallel.suggested_communication_unit_size
        running = [unit for unit in units if self.sharding.is_unit(unit)]
        number = sum(unit.times for unit in running)
        two = 2 * (sum(unit.times * unit.parameters.numel for unit in running) // number) if number else None
        if not self.ahead:
            size = asked or two or (2 * limit if limit else None)
            return size, size
        size = asked or COMMUNICATION_UNIT
        if not asked and FSDP_PREFETCH_FITS_UNITS(self.impl):
            size = max(size, two or limit or 0)
        return size // 2, size

    def _in_pools(self) -> None:
        """Double buffers for each bucket of a unit: for weights, for additional fp8 data in backward, and for
        gradients. ``FixedPoolAllocator`` serves the most frequent kind of unit; ``MaxPoolAllocator`` serves all, with
        buffers as large as the largest. With persistent buffers on allocation failure, all other buckets have separate
        ones."""
        options, sharding = self.sharding.run.data_parallel, self.sharding
        kinds: dict[tuple[int, ...], list[int]] = {}
        for place, (low, high) in self.of_place.items():
            kinds.setdefault(tuple(b.numel for b in self.buckets[low:high]), []).append(place)

        def sizes(place: int) -> list[int]:
            low, high = self.of_place[place]
            return [
                sharding.whole_weights(b, backward=True) + sharding.whole_gradients(b) for b in self.buckets[low:high]
            ]

        if options.megatron_fsdp_max_pool_double_buffer:
            places = list(self.of_place)
            ordered = [sorted(sizes(place), reverse=True) for place in places]
            most = max(map(len, ordered))
            self.pools = 2 * sum(max(one[i] for one in ordered if i < len(one)) for i in range(most))
        else:
            places = max(kinds.values(), key=len)
            self.pools = 2 * sum(sizes(places[0]))
        pooled = {i for place in places for i in range(*self.of_place[place])}
        if options.fsdp_db_use_persist_buf_on_alloc_fail:
            for i, b in enumerate(self.buckets):
                if i not in pooled:
                    # Gathered weights outside of units stay in any case.
                    self.pools += sharding.whole_gradients(b)
                    self.pools += sharding.whole_weights(b, backward=True) if b.unit else 0
            pooled = set(range(len(self.buckets)))
        self.pooled = frozenset(pooled)
        for backward in (False, True):
            self.bytes[backward] = [
                0,
                *accumulate(
                    sharding.whole_weights(b, backward) if b.unit and i not in self.pooled else 0
                    for i, b in enumerate(self.buckets)
                ),
            ]

    def _two_units(self, low: int, high: int, backward: bool) -> tuple[int, int]:
        """At most one unit in addition to the running one; for modules outside of units none, or two
        (``AllGatherPipeline``)."""
        if not self.buckets[low].unit:
            places: set[int | None] = set()
            while not FSDP_ROOT_ALONE(self.impl) and high < len(self.buckets):
                b = self.buckets[high]
                places.add(b.first if b.unit else None)
                if len(places) > 2:
                    break
                high += 1
            return low, high
        ranges = [self.of_place[place] for place in sorted(self.of_place)]
        at = next(i for i, (first, _) in enumerate(ranges) if first == low)
        if backward:
            return (ranges[at - 1][0] if at else low), high
        return low, (ranges[at + 1][1] if at + 1 < len(ranges) else high)

    def engine_bytes(self) -> EngineBytes:
        """Bytes during each link of the chunk."""
        forward, backward = self.gathered(backward=False), self.gathered(backward=True)
        by_place = [
            Concurrent(f, b + made.backward, b + made.backward_at_end, made.least_backward and b + made.least_backward)
            for f, b, made in zip(forward, backward, self.gradients(), strict=True)
        ]
        return self.places.engine_bytes(by_place)

    # ---- weights ----

    def _window(self, low: int, high: int, backward: bool) -> tuple[int, int]:
        """The range of buckets that are gathered while ``low`` to ``high`` are needed: these, and those gathered ahead.
        """
        first, last = self._ahead(low, high, backward)
        if self.double:
            least, most = self._two_units(low, high, backward)
            return max(first, least), min(last, most)
        return first, last

    def _ahead(self, low: int, high: int, backward: bool) -> tuple[int, int]:
        budget = self.budget
        if budget is None:
            return (max(0, low - 1), high) if backward else (low, min(len(self.buckets), high + 1))
        if not self.ahead:
            budget -= self.sizes[high] - self.sizes[low]
            if budget <= 0:
                return low, high
        if backward:
            return max(0, bisect_right(self.sizes, self.sizes[low] - budget) - 1), high
        return low, min(len(self.buckets), bisect_left(self.sizes, self.sizes[high] + budget))

    def gathered(self, *, backward: bool) -> list[int]:
        """Bytes of units' gathered weights at every place of a pass."""
        found = [0] * (self.places.loss + 1)
        sums = self.bytes[backward]
        for place, own in self.of_place.items():
            low, high = self._window(*own, backward=backward)
            found[place] = sums[high] - sums[low]
        for place in (self.places.norm, self.places.loss, *(() if backward else (0,))):
            found[place] = self._ahead_of_root(backward)
        return found

    def _ahead_of_root(self, backward: bool) -> int:
        """Bytes of units' gathered weights while modules outside of units run. Hooks of these modules gather the next
        units too, except in releases in which the first backward pass disables that. The oldest releases free all
        weights when backward begins."""
        root = [i for i, b in enumerate(self.buckets) if not b.unit]
        if not root or self.keeps_root or (backward and not self.ahead):
            return 0
        end = max(self._window(i, i + 1, backward=False)[1] for i in root)
        return self.bytes[False][end] - self.bytes[False][root[0]]

    def between_steps(self) -> int:
        """Bytes of gathered weights after a step: those gathered for the next step, unless the norm of all parameters
        is logged, which frees all (Megatron-LM ``calc_params_l2_norm: stop_communication``)."""
        if not self.buckets or not self.sharding.shards["params"]:
            return 0
        first = self.buckets[0]
        if not self.ahead:
            return self.root_bytes if not first.unit else self.sharding.whole_weights(first)
        kept = self.root_bytes if self.keeps_root else 0
        if self.sharding.run.optimizer.log_params_norm:
            return kept
        _, high = self._window(0, 1, backward=False)
        root = self.root_bytes if not first.unit else kept
        return root + self.bytes[False][high]

    # ---- gradients ----

    def gradients(self) -> list[Concurrent]:
        """Bytes of unsharded gradients at every place of the backward pass: those being made, and those reduced but not
        yet freed. At a place buckets follow each other, those of experts first."""
        sharding = self.sharding
        each = FSDP_REDUCES_EACH_PARAMETER(self.impl)
        at_place: list[list[Bucket]] = [[] for _ in range(self.places.loss + 1)]
        for i, b in reversed(list(enumerate(self.buckets))):
            if not b.frozen and i not in self.pooled:
                for place in {b.first, b.last}:
                    at_place[place].append(b)
        found: list[Concurrent] = []
        queue = _Queue(sharding, self.capacity)
        made = 0
        for place in reversed(range(len(at_place))):
            if not each and at_place[place] and at_place[place][0].unit:
                found.append(self._unit_at_once(at_place[place], made + queue.bytes))
                for b in at_place[place]:
                    queue.push(b)
                continue
            experts = least = 0
            most_made = made + queue.bytes
            for b in at_place[place]:
                if b.last == place:
                    made += sharding.whole_gradients(b)
                most_made = max(most_made, made + queue.bytes)
                if b.experts:
                    experts = most_made
                if place == self.places.loss:  # made when the tensors of the logits are freed
                    least = max(least, made + queue.bytes + sharding.output_gradient(b))
                if b.first == place:
                    least = max(least, made + queue.bytes + sharding.reduced_apart(b))
                    made -= sharding.whole_gradients(b)
                    queue.push(b)
            if place == self.places.loss:
                found.append(Concurrent(least_backward=least))
            else:
                found.append(Concurrent(0, experts or most_made, most_made, least))
        return found[::-1]

    def _unit_at_once(self, buckets: Sequence[Bucket], waiting: int) -> Concurrent:
        """A unit whose gradients are copied into their buckets when its backward is done and its weights are freed."""
        sharding = self.sharding
        own = [b.numel * sharding.width for b in buckets]
        most_made, copied = sum(own), 0
        for b in reversed(buckets):
            copied += sharding.whole_gradients(b)
            most_made = max(most_made, copied + sum(own))
            own.pop()
        freed = sum(sharding.whole_weights(b, backward=True) for b in buckets)
        first = waiting + buckets[0].tail * sharding.width
        last = waiting + sum(b.numel for b in buckets) * sharding.width if buckets[0].experts else first
        return Concurrent(0, first, last, waiting + most_made - freed)


class _Queue:
    """Buckets that were reduced but not yet freed."""

    def __init__(self, sharding: Sharding, capacity: int | None) -> None:
        self.sharding, self.capacity = sharding, capacity
        self.bytes = self.elements = 0
        self._buckets: deque[Bucket] = deque()

    def push(self, b: Bucket) -> None:
        """Frees the oldest buckets until the others fit the capacity (without a capacity: until one is left), then adds
        ``b``."""
        held = self._buckets
        while held and (len(held) > 1 if self.capacity is None else self.elements > self.capacity):
            oldest = held.popleft()
            self.elements -= oldest.size
            self.bytes -= self.sharding.whole_gradients(oldest)
        held.append(b)
        self.elements += b.size
        self.bytes += self.sharding.whole_gradients(b)
