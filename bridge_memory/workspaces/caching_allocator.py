"""torch's caching allocator, block by block: what it reserves for a given sequence of allocations and frees.

Every stream has two pools, one for blocks of up to 1 MiB and one for larger ones; blocks never change pools. A request
gets the smallest free block of its pool that is large enough; the remainder is split off. If there is none, the
allocator requests a segment from the device: a whole one, or with expandable segments enough pages at the end of the
stream's address range. Nothing is returned before the device is full.

Source: ``c10/cuda/CUDACachingAllocator.cpp: DeviceCachingAllocator`` of torch 2.5 to 2.13 (``malloc``,
``get_free_block``, ``alloc_found_block``, ``should_split``, ``find_expandable_block``, ``map_block``, ``free_block``,
``try_merge_blocks``, ``release_cached_blocks``, ``unmap_block``). Not modelled: ``max_split_size_mb``
and ``roundup_power2_divisions``, which are off by default, and private pools of CUDA graphs.
``garbage_collection_threshold`` frees nothing unless a script calls ``set_per_process_memory_fraction`` (``malloc``:
set_fraction). When a stream has come far enough is for the caller to say (``free_later``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from typing import NamedTuple

MIB = 1 << 20
#: ``kMinBlockSize``, ``kSmallSize``, ``kSmallBuffer``, ``kMinLargeAlloc``, ``kLargeBuffer``, ``kRoundLarge``.
BLOCK = 512
SMALL = MIB
SMALL_SEGMENT = 2 * MIB
OWN_SEGMENT = 10 * MIB
LARGE_SEGMENT = 20 * MIB
SEGMENT_UNIT = 2 * MIB


class Event(NamedTuple):
    """An allocation (``nbytes`` not None) or a free, on ``stream``. ``tensor``: an id, unique among live tensors."""

    tensor: int
    nbytes: int | None
    stream: Hashable = 0


class DeviceFull(Exception):
    """An allocation that does not fit into the device's capacity."""


#: (tensor, bytes, stream) of an allocation; (tensor, minus its bytes, stream) of one that is freed at once; else
#: (tensor, what is called, a stream that does not matter).
Call = tuple[int, int, Hashable]
_FREE, _FREE_LATER, _REUSE = 0, -(1 << 62), -(1 << 63)


class TooManyCalls(Exception):
    """A job asks its allocator for more than is replayed."""


#: Calls of one stage from its start to the end of its first steps: half a second's.
MOST_CALLS = 200_000


class Calls:
    """Calls of an allocator, to be made of others (``CachingAllocator.follow``); up to ``most`` at a time. ``stream``:
    of what ``report`` and ``play`` allocate."""

    def __init__(self, most: int = MOST_CALLS, stream: Hashable = 0) -> None:
        self.stream = stream
        self._calls: list[Call] = []
        self._most = most
        #: Calls that stand for two.
        self._double = 0

    def taken(self) -> list[Call]:
        """The calls since the last time."""
        calls, self._calls, self._double = self._calls, [], 0
        return calls

    def again(self, calls: Iterable[Call], shift: int = 0) -> None:
        """``calls`` that were taken, of tensors with numbers higher by ``shift``."""
        more = [(tensor + shift, nbytes, stream) for tensor, nbytes, stream in calls] if shift else list(calls)
        self._calls += more
        self._double += sum([_FREE_LATER < nbytes < 0 for _, nbytes, _ in more])
        self.check(0)

    def report(self, tensor: int, nbytes: int | None) -> None:
        """An allocation of more than 0 bytes; or a free (None)."""
        if nbytes is None:
            self.free(tensor)
        else:
            self.allocate(tensor, nbytes, self.stream)

    def play(self, events: Sequence[tuple[int, int]], base: int) -> None:
        """(tensor, bytes of an allocation, or 0 of a free, or minus those of both at once), of tensors with numbers
        higher by ``base``."""
        stream = self.stream
        self._calls += [(base + tensor, what, stream) for tensor, what in events]
        self._double += sum([what < 0 for _, what in events])
        self.check(0)

    def allocate(self, tensor: int, nbytes: int, stream: Hashable = 0) -> None:
        """``nbytes``: more than 0."""
        if len(self._calls) + self._double >= self._most:
            self.check(1)
        self._calls.append((tensor, nbytes, stream))

    def check(self, more: int) -> None:
        """Raise TooManyCalls where ``more`` calls are too many."""
        if len(self._calls) + self._double + more > self._most:
            raise TooManyCalls(f"training asks the allocator for more than {self._most:,} blocks")

    def free(self, tensor: int) -> None:
        self._calls.append((tensor, _FREE, ""))

    def free_later(self, tensor: int) -> None:
        self._calls.append((tensor, _FREE_LATER, ""))

    def reuse(self, tensor: int) -> None:
        self._calls.append((tensor, _REUSE, ""))


class Trace(NamedTuple):
    """Calls of a training job: those of its start with some first steps, and those of ``each`` step after them, whose
    tensors have numbers that are ``shift`` higher than in the step before."""

    first: list[Call]
    each: list[Call]
    shift: int
    #: That follow the first calls.
    steps: int

    def follow(self, allocator: CachingAllocator) -> None:
        """Raises DeviceFull."""
        allocator.follow(self.first)
        for step in range(self.steps):
            allocator.follow(self.each, self.shift * step)

    def held(self, *, expandable: bool) -> int:
        """The most that an allocator reserves, bytes."""
        one = CachingAllocator(expandable_segments=expandable)
        self.follow(one)
        return one.peak_reserved

    def both(self) -> Reserved:
        """What allocators without and with expandable segments reserve."""
        plain, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
        for one in (plain, expandable):
            self.follow(one)
        return reserved_by(plain, expandable)


class Replay:
    """A trace that an allocator followed without a limit; ``reserved``: the most that it reserved, bytes."""

    def __init__(self, trace: Trace, *, expandable: bool) -> None:
        self._trace, self._expandable = trace, expandable
        one = CachingAllocator(expandable_segments=expandable)
        #: On the way, wherever more was reserved than before: (parts that are done, the allocator).
        self._states: list[tuple[int, CachingAllocator]] = []
        for number, (calls, shift) in enumerate(parts := self._parts()):
            before = one.reserved
            one.follow(calls, shift)
            if one.reserved > before and number + 1 < len(parts):
                self._states.append((number + 1, one.copy()))
        self.reserved = one.peak_reserved

    def _parts(self) -> list[tuple[list[Call], int]]:
        """(calls, how much higher the numbers of their tensors are), in order."""
        first, each, shift, steps = self._trace
        size = max(1, -(-len(each) // _PARTS))
        pieces = [each[at : at + size] for at in range(0, len(each), size)]
        return [(first, 0), *((piece, shift * step) for step in range(steps) for piece in pieces)]

    def fits(self, capacity: int) -> bool:
        """Whether the allocations succeed where ``capacity`` bytes can be reserved: an allocator whose device is full
        returns what is free and tries again (``malloc``, ``release_cached_blocks``), which takes time."""
        if self.reserved <= capacity and not self._expandable:
            return True
        done, one = 0, CachingAllocator(expandable_segments=self._expandable, capacity=capacity)
        # Up to a full device, an allocator does the same with a limit and without; but for its address ranges.
        for parts, state in () if self._expandable else self._states:
            if state.reserved <= capacity:
                done, one = parts, state
        one = one.copy()
        one.capacity = capacity
        try:
            for calls, shift in self._parts()[done:]:
                one.follow(calls, shift)
        except DeviceFull:
            return False
        return True


#: Of a step, after which a state is kept.
_PARTS = 4


#: Addresses are below 2 ** _BITS; what is free is sorted by ``size << _BITS | address``.
_BITS = 60
_ADDRESS = (1 << _BITS) - 1
#: An address range without a capacity, bytes: practically unlimited.
_UNLIMITED = 1 << 50


class _Unmapped(NamedTuple):
    """Unmapped blocks of a pool's address ranges, lowest first, the end of each by its address, and its address by its
    end. Neighbours are one block. ``page``: bytes that are mapped at once."""

    page: int
    blocks: list[int]
    ends: dict[int, int]
    starts: dict[int, int]

    def give(self, start: int, end: int) -> None:
        """A block, one with its neighbours."""
        start, end = _with_neighbours(self, start, end)
        self.ends[start], self.starts[end] = end, start
        insort(self.blocks, start)

    def drop(self, start: int, end: int) -> None:
        del self.ends[start], self.starts[end]
        del self.blocks[bisect_left(self.blocks, start)]

    def copy(self) -> _Unmapped:
        return _Unmapped(self.page, self.blocks.copy(), self.ends.copy(), self.starts.copy())


class _Pool(NamedTuple):
    """Of one stream and size class: free blocks, smallest and lowest first, the end of each by its address, and its
    address by its end. Neighbours are one block."""

    free: list[int]
    ends: dict[int, int]
    starts: dict[int, int]
    #: The largest remainder that is not split off.
    most_left: int
    unmapped: _Unmapped

    def add(self, start: int, end: int) -> None:
        """A free block, which has no free neighbour."""
        self.ends[start], self.starts[end] = end, start
        insort(self.free, end - start << _BITS | start)

    def drop(self, start: int, end: int) -> None:
        del self.ends[start], self.starts[end]
        del self.free[bisect_left(self.free, end - start << _BITS | start)]

    def give(self, start: int, end: int) -> None:
        """A block, free with its free neighbours."""
        start, end = _with_neighbours(self, start, end)
        self.add(start, end)

    def least_room(self, at: int) -> int:
        """The place of the free block for a request; one at the end of an address range counts with the size to which
        it can grow. ``at``: the place of the smallest that is large enough."""
        room, last = self._room(at), len(self.free) - 1
        while at < last and (more := self._room(at + 1)) < room:
            at, room = at + 1, more
        return at

    def _room(self, at: int) -> int:
        """Bytes to which the free block at this place can grow (``expandable_size``)."""
        size, start = self.free[at] >> _BITS, self.free[at] & _ADDRESS
        return self.unmapped.ends.get(start + size, start + size) - start

    def copy(self) -> _Pool:
        return _Pool(
            self.free.copy(), self.ends.copy(), self.starts.copy(), self.most_left, self.unmapped.copy(),
        )  # fmt: skip


def _with_neighbours(blocks: _Pool | _Unmapped, start: int, end: int) -> tuple[int, int]:
    """The block with those that it touches, which are dropped."""
    if (low := blocks.starts.get(start)) is not None:
        blocks.drop(low, start)
        start = low
    if (high := blocks.ends.get(end)) is not None:
        blocks.drop(end, high)
        end = high
    return start, end


class CachingAllocator:
    """``capacity``: bytes that it can reserve of the device; None: unlimited.

    ``expandable_segments`` as in ``PYTORCH_CUDA_ALLOC_CONF``.
    """

    def __init__(self, *, expandable_segments: bool = False, capacity: int | None = None) -> None:
        self.expandable = expandable_segments
        self.capacity = capacity
        self.reserved = self.allocated = 0
        self.peak_reserved = self.peak_allocated = 0
        #: How often all free memory was returned to the device because it was full.
        self.retries = 0
        #: Of every stream two pools, of small blocks and of large ones.
        self._pools: list[_Pool] = []
        self._of: dict[Hashable, int] = {}
        #: (address, end, number of the pool) by tensor.
        self._blocks: dict[int, tuple[int, int, int]] = {}
        #: Segments, by address; address ranges are none.
        self._segments: dict[int, int] = {}
        #: Tensors of ``free_later`` whose blocks wait; and those whose blocks a full device made it wait for.
        self._waiting: set[int] = set()
        self._waited_for: set[int] = set()
        self._next_address = 0

    def copy(self) -> CachingAllocator:
        """Another allocator in the same state."""
        other = copy(self)
        other._pools = [pool.copy() for pool in self._pools]
        other._of, other._blocks, other._segments = self._of.copy(), self._blocks.copy(), self._segments.copy()
        other._waiting, other._waited_for = self._waiting.copy(), self._waited_for.copy()
        return other

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events in order. Raises DeviceFull, and KeyError for a free of a tensor that is not allocated."""
        for event in events:
            if event.nbytes is None:
                self.free(event.tensor)
            else:
                self.allocate(event.tensor, event.nbytes, event.stream)

    def follow(self, calls: Iterable[Call], shift: int = 0) -> None:
        """Make ``calls``, of tensors with numbers higher by ``shift``. Raises DeviceFull, and KeyError for a free of a
        tensor that is not allocated."""
        # One loop over plain integers: a run makes tens of thousands of calls.
        blocks, pools, expandable = self._blocks, self._pools, self.expandable
        now, peak = self.allocated, self.peak_allocated
        of, small = object(), 0  # the last stream, and its pool of small blocks
        for tensor, nbytes, stream in calls:
            if nbytes > 0:
                if stream != of:
                    of, small = stream, self._pool(stream)
                size = (nbytes + BLOCK - 1) & -BLOCK
                number = small if size <= SMALL else small + 1
                free, ends, starts, most_left, _ = pools[number]
                at = bisect_left(free, size << _BITS)
                if at < len(free):
                    if expandable:
                        at = pools[number].least_room(at)
                    start = free.pop(at) & _ADDRESS
                    end = ends.pop(start)
                    del starts[end]
                else:
                    self.allocated, self.peak_allocated = now, peak
                    start, end = self._fresh(pools[number], size)
                    now = self.allocated
                left = end - start - size
                if left > most_left:  # as ``_Pool.add``
                    rest = end
                    end -= left
                    ends[end], starts[rest] = rest, end
                    insort(free, left << _BITS | end)
                blocks[tensor + shift] = start, end, number
                now += end - start
                if now > peak:
                    peak = now
            elif not nbytes:
                start, end, number = blocks.pop(tensor + shift)
                now -= end - start
                free, ends, starts, _, _ = pools[number]
                if start in starts:  # as ``_Pool.give``
                    low = starts.pop(start)
                    del free[bisect_left(free, start - low << _BITS | low)]
                    start = low
                if end in ends:
                    high = ends.pop(end)
                    del free[bisect_left(free, high - end << _BITS | end)]
                    end = high
                ends[start], starts[end] = end, start
                insort(free, end - start << _BITS | start)
            elif nbytes > _FREE_LATER:  # all is as before, where a free block is large enough
                if stream != of:
                    of, small = stream, self._pool(stream)
                size = (BLOCK - 1 - nbytes) & -BLOCK
                free, _, _, most_left, _ = pools[small if size <= SMALL else small + 1]
                at = bisect_left(free, size << _BITS)
                if at < len(free):
                    left = (free[at] >> _BITS) - size
                    peak = max(peak, now + size + (0 if left > most_left else left))
                else:
                    self.allocated, self.peak_allocated = now, peak
                    self.follow(((tensor, -nbytes, stream), (tensor, _FREE, "")), shift)
                    peak = self.peak_allocated
            else:
                self.allocated = now
                (self.free_later if nbytes == _FREE_LATER else self.reuse)(tensor + shift)
                now = self.allocated
        self.allocated, self.peak_allocated = now, peak

    def by_stream(self) -> dict[Hashable, int]:
        """Bytes reserved now for each stream."""
        found: dict[Hashable, int] = {}
        held = [(number, end - start) for start, end, number in self._blocks.values()]
        held += [(number, free >> _BITS) for number, pool in enumerate(self._pools) for free in pool.free]
        streams = list(self._of)
        for number, size in held:
            stream = streams[number // 2]
            found[stream] = found.get(stream, 0) + size
        return found

    # ---- tensors ----

    def allocate(self, tensor: int, nbytes: int, stream: Hashable = 0) -> None:
        """Allocate a tensor; one of 0 bytes gets no block. Raises DeviceFull, and ValueError if it is allocated
        already.
        """
        if tensor in self._blocks:
            raise ValueError(f"tensor {tensor} is there already")
        if nbytes > 0:
            self.follow(((tensor, nbytes, stream),))

    def free(self, tensor: int) -> None:
        """Free a tensor. Raises KeyError if it is not allocated; a tensor of 0 bytes never is."""
        self.follow(((tensor, _FREE, ""),))

    def free_later(self, tensor: int) -> None:
        """Free a tensor that another stream still uses (``record_stream``): its block waits for ``reuse``, when that
        stream has come so far (``insert_events``, ``process_events``), or for a full device. Raises KeyError."""
        start, end, _ = self._blocks[tensor]
        self.allocated -= end - start
        self._waiting.add(tensor)

    def reuse(self, tensor: int) -> None:
        """The block of a tensor of ``free_later`` is free. Raises KeyError."""
        if tensor in self._waited_for:
            self._waited_for.remove(tensor)
            return
        self._waiting.remove(tensor)
        self._return(tensor)

    def _return(self, tensor: int) -> None:
        start, end, number = self._blocks.pop(tensor)
        self._pools[number].give(start, end)

    def holds(self, tensor: int) -> bool:
        return tensor in self._blocks

    # ---- the device ----

    def _pool(self, stream: Hashable) -> int:
        """The number of a stream's pool of small blocks."""
        number = self._of.get(stream)
        if number is None:
            number = self._of[stream] = len(self._pools)
            for most_left, page in ((0, SMALL_SEGMENT), (0 if self.expandable else SMALL, LARGE_SEGMENT)):
                self._pools.append(_Pool([], {}, {}, most_left, _Unmapped(page, [], {}, {})))
        return number

    def _take(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _fresh(self, pool: _Pool, size: int) -> tuple[int, int]:
        """A block from the device, which is in no pool. A full device is asked again once all is returned."""
        block = self._asked(pool, size)
        if block is None:
            self.retries += 1
            self._give_back()
            block = self._asked(pool, size)
        if block is None:
            raise DeviceFull(f"{size} bytes more than {self.reserved} do not fit {self.capacity}")
        return block

    def _asked(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """A block of a new segment from the device; None if the device is full."""
        if self.expandable:
            return self._grown(pool, size)
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
        if not self._take(segment):
            return None
        start = self._addresses(segment)
        self._segments[start] = start + segment
        return start, start + segment

    def _addresses(self, nbytes: int) -> int:
        # Blocks of different segments are never merged: a gap lies between them. All begin at a page.
        address = self._next_address
        self._next_address += (nbytes // LARGE_SEGMENT + 1) * LARGE_SEGMENT
        return address

    def _grown(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Map pages at the lowest place of an address range with enough room."""
        start = self._place(pool, size)
        end = pool.ends.get(start, start)
        while end - start < size:
            # The page may be of free bytes before the block: what is mapped is one with them.
            if not self._map(pool, end, size - (end - start)):
                return None
            end = pool.ends[start]
        pool.drop(start, end)
        return start, end

    def _place(self, pool: _Pool, size: int) -> int:
        """The address of such a place, at which free or unmapped bytes begin."""
        ends, unmapped = pool.ends, pool.unmapped.ends
        for block in pool.unmapped.blocks:
            first = at = pool.starts.get(block, block)
            while at - first < size and (after := ends.get(at, unmapped.get(at))) is not None:
                at = after
            if at - first >= size:
                return first
        # Address space of 1 1/8 of the device's capacity.
        length = max((self.capacity or _UNLIMITED) * 9 // 8, size)
        length = -(-length // pool.unmapped.page) * pool.unmapped.page
        start = self._addresses(length)
        pool.unmapped.give(start, start + length)
        return start

    def _map(self, pool: _Pool, start: int, nbytes: int) -> bool:
        """Map whole pages at the beginning of an unmapped block, up to ``nbytes`` or all of it."""
        unmapped = pool.unmapped
        end = unmapped.ends[start]
        nbytes = min(-(-nbytes // unmapped.page) * unmapped.page, end - start)
        if not self._take(nbytes):
            return False
        unmapped.drop(start, end)
        if start + nbytes < end:
            unmapped.give(start + nbytes, end)
        pool.give(start, start + nbytes)
        return True

    def _give_back(self) -> None:
        """Return unused segments to the device, or with expandable segments all whole pages of free blocks. Blocks that
        wait for another stream are waited for first (``release_cached_blocks``: ``synchronize_and_free_events``)."""
        for tensor in sorted(self._waiting):
            self._return(tensor)
        self._waited_for |= self._waiting
        self._waiting.clear()
        for pool in self._pools:
            for start, end in list(pool.ends.items()):
                if self.expandable:
                    self._unmap(pool, start, end)
                elif self._segments.get(start) == end:
                    pool.drop(start, end)
                    del self._segments[start]
                    self.reserved -= end - start

    def _unmap(self, pool: _Pool, start: int, end: int) -> None:
        page = pool.unmapped.page
        first, last = -(-start // page) * page, end // page * page
        if last <= first:
            return
        pool.drop(start, end)
        if first > start:
            pool.add(start, first)
        if end > last:
            pool.add(last, end)
        self.reserved -= last - first
        pool.unmapped.give(first, last)


class Reserved(NamedTuple):
    """Bytes that the allocator reserves at most, as it is and with ``expandable_segments:True``; and of either what
    each stream has at the end: (its name, bytes), the most first."""

    segments: int
    expandable: int
    segments_of: tuple[tuple[str, int], ...]
    expandable_of: tuple[tuple[str, int], ...]
    #: The most that is allocated in the same replay.
    allocated: int

    def held(self, *, expandable: bool) -> int:
        """The most that is reserved, with ``expandable_segments:True`` or without."""
        return self.expandable if expandable else self.segments

    def as_json(self) -> dict[str, object]:
        return {
            "segments": self.segments, "expandable_segments": self.expandable, "streams": dict(self.segments_of),
            "streams_expandable_segments": dict(self.expandable_of), "allocated": self.allocated,
        }  # fmt: skip


def reserved_by(
    plain: CachingAllocator, expandable: CachingAllocator, name: Callable[[Hashable], str] = str
) -> Reserved:
    """What two allocators that replayed the same reserved; ``name``: of a stream."""

    def of(allocator: CachingAllocator) -> tuple[tuple[str, int], ...]:
        sums: dict[str, int] = {}
        for stream, nbytes in allocator.by_stream().items():
            sums[name(stream)] = sums.get(name(stream), 0) + nbytes
        return tuple(sorted(sums.items(), key=lambda item: -item[1]))

    return Reserved(plain.peak_reserved, expandable.peak_reserved, of(plain), of(expandable), plain.peak_allocated)
