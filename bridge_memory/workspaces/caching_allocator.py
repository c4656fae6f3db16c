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
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
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


#: (tensor, bytes, stream) of an allocation; else (tensor, what is called, "").
Call = tuple[int, int, Hashable]
_FREE, _FREE_LATER, _REUSE = 0, -1, -2


class TooManyCalls(Exception):
    """A job asks its allocator for more than is replayed."""


#: Calls of one stage from its start to the end of its first steps: half a second's.
MOST_CALLS = 200_000


class Calls:
    """Calls of an allocator, to be made of others (``CachingAllocator.follow``); up to ``most`` at a time."""

    def __init__(self, most: int = MOST_CALLS) -> None:
        self._calls: list[Call] = []
        self._most = most

    def taken(self) -> list[Call]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def again(self, calls: Iterable[Call], shift: int = 0) -> None:
        """``calls`` that were taken, of tensors with numbers higher by ``shift``."""
        self._calls += [(tensor + shift, nbytes, stream) for tensor, nbytes, stream in calls]
        self.check(0)

    def allocate(self, tensor: int, nbytes: int, stream: Hashable = 0) -> None:
        """``nbytes``: more than 0."""
        if len(self._calls) >= self._most:
            self.check(1)
        self._calls.append((tensor, nbytes, stream))

    def check(self, more: int) -> None:
        """Raise TooManyCalls where ``more`` calls are too many."""
        if len(self._calls) + more > self._most:
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

    def fits(self, capacity: int, *, expandable: bool) -> bool:
        """Whether the allocations succeed where ``capacity`` bytes can be reserved: an allocator whose device is full
        returns what is free and tries again (``malloc``, ``release_cached_blocks``), which takes time."""
        one = CachingAllocator(expandable_segments=expandable, capacity=capacity)
        try:
            self.follow(one)
        except DeviceFull:
            return False
        return True


@dataclass(slots=True, eq=False)
class _Block:
    pool: _Pool
    address: int
    size: int
    mapped: bool = True
    allocated: bool = False
    prev: _Block | None = None
    next: _Block | None = None

    @property
    def room(self) -> int:
        """Bytes to which it can grow (``expandable_size``)."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one stream and size class, smallest and lowest first; and unmapped blocks, lowest first."""

    page: int
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    unmapped: list[tuple[int, _Block]] = field(default_factory=list)

    def add(self, block: _Block) -> None:
        # Addresses are unique, so that blocks themselves are never compared.
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def drop(self, block: _Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


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
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._blocks: dict[int, _Block] = {}
        #: Tensors of ``free_later`` whose blocks wait; and those whose blocks a full device made it wait for.
        self._waiting: set[int] = set()
        self._waited_for: set[int] = set()
        self._next_address = 0

    def replay(self, events: Iterable[Event]) -> None:
        """Apply events in order. Raises DeviceFull, and KeyError for a free of a tensor that is not allocated."""
        for event in events:
            if event.nbytes is None:
                self.free(event.tensor)
            else:
                self.allocate(event.tensor, event.nbytes, event.stream)

    def follow(self, calls: Iterable[Call], shift: int = 0) -> None:
        """Make ``calls``, of tensors with numbers higher by ``shift``. Raises DeviceFull."""
        allocate, free = self.allocate, self.free
        for tensor, nbytes, stream in calls:
            if nbytes > 0:
                allocate(tensor + shift, nbytes, stream)
            elif nbytes == _FREE:
                free(tensor + shift)
            elif nbytes == _FREE_LATER:
                self.free_later(tensor + shift)
            else:
                self.reuse(tensor + shift)

    def by_stream(self) -> dict[Hashable, int]:
        """Bytes reserved now for each stream."""
        found: dict[Hashable, int] = {}
        held = [(b.pool, b.size) for b in self._blocks.values()]
        held += [(pool, size) for pool in self._pools.values() for size, _, _ in pool.free]
        streams = {id(pool): stream for (stream, _), pool in self._pools.items()}
        for pool, size in held:
            found[streams[id(pool)]] = found.get(streams[id(pool)], 0) + size
        return found

    # ---- tensors ----

    def allocate(self, tensor: int, nbytes: int, stream: Hashable = 0) -> None:
        """Allocate a tensor; one of 0 bytes gets no block. Raises DeviceFull, and ValueError if it is allocated
        already.
        """
        if tensor in self._blocks:
            raise ValueError(f"tensor {tensor} is there already")
        if nbytes <= 0:
            return
        size = -(-nbytes // BLOCK) * BLOCK
        small = size <= SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(SMALL_SEGMENT if small else LARGE_SEGMENT)
        block = self._best(pool, size) or self._fresh(pool, size)
        if block is None:
            self.retries += 1
            self._give_back()
            block = self._fresh(pool, size)
        if block is None:
            raise DeviceFull(f"{size} bytes more than {self.reserved} do not fit {self.capacity}")
        remainder = block.size - size
        if remainder and (remainder >= BLOCK if small or self.expandable else remainder > SMALL):
            block = self._split(block, size)
        block.allocated = True
        self._blocks[tensor] = block
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated

    def free(self, tensor: int) -> None:
        """Free a tensor. Raises KeyError if it is not allocated; a tensor of 0 bytes never is."""
        block = self._blocks.pop(tensor)
        self.allocated -= block.size
        self._give(block)

    def free_later(self, tensor: int) -> None:
        """Free a tensor that another stream still uses (``record_stream``): its block waits for ``reuse``, when that
        stream has come so far (``insert_events``, ``process_events``), or for a full device. Raises KeyError."""
        self.allocated -= self._blocks[tensor].size
        self._waiting.add(tensor)

    def reuse(self, tensor: int) -> None:
        """The block of a tensor of ``free_later`` is free. Raises KeyError."""
        if tensor in self._waited_for:
            self._waited_for.remove(tensor)
            return
        self._waiting.remove(tensor)
        self._return(tensor)

    def _return(self, tensor: int) -> None:
        self._give(self._blocks.pop(tensor))

    def _give(self, block: _Block) -> None:
        """To its pool, one with free neighbours."""
        block.allocated = False
        self._merge(block)
        insort(block.pool.free, (block.size, block.address, block))

    def holds(self, tensor: int) -> bool:
        return tensor in self._blocks

    # ---- blocks ----

    def _best(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block; one at the end of an address range counts with the size to which it can grow."""
        free = pool.free
        at = bisect_left(free, (size,))
        if at == len(free):
            return None
        if self.expandable:
            room, last = free[at][2].room, len(free) - 1
            while at < last and (more := free[at + 1][2].room) < room:
                at, room = at + 1, more
        return free.pop(at)[2]

    def _split(self, block: _Block, size: int) -> _Block:
        """The first ``size`` bytes of a block; the remainder goes to its pool."""
        before, address, pool = block.prev, block.address, block.pool
        first = _Block(pool, address, size, True, False, before, block)
        if before is not None:
            before.next = first
        block.prev, block.address, block.size = first, address + size, block.size - size
        insort(pool.free, (block.size, block.address, block))
        return first

    def _merge(self, block: _Block) -> None:
        """Merge with free neighbours that are mapped, or unmapped, like the block."""
        before, after = block.prev, block.next
        if before is not None and not before.allocated and before.mapped is block.mapped:
            block.pool.drop(before)
            block.address, block.prev = before.address, before.prev
            if block.prev is not None:
                block.prev.next = block
            block.size += before.size
        if after is not None and not after.allocated and after.mapped is block.mapped:
            block.pool.drop(after)
            block.next = after.next
            if block.next is not None:
                block.next.prev = block
            block.size += after.size

    # ---- the device ----

    def _take(self, nbytes: int) -> bool:
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _fresh(self, pool: _Pool, size: int) -> _Block | None:
        """A block of a new segment from the device; None if the device is full."""
        if self.expandable:
            return self._grown(pool, size)
        if size <= SMALL:
            segment = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            segment = LARGE_SEGMENT
        else:
            segment = -(-size // SEGMENT_UNIT) * SEGMENT_UNIT
        return _Block(pool, self._addresses(segment), segment) if self._take(segment) else None

    def _addresses(self, nbytes: int) -> int:
        # Blocks of different segments are never merged: neighbours are linked within a segment.
        address = self._next_address
        self._next_address += nbytes
        return address

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest place of an address range with enough room."""
        block = self._place(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        pool.drop(block)
        return block

    def _place(self, pool: _Pool, size: int) -> _Block:
        for _, block in pool.unmapped:
            first = block.prev if block.prev is not None and not block.prev.allocated else block
            room = 0
            at: _Block | None = first
            while room < size and at is not None and not at.allocated:
                room += at.size
                at = at.next
            if room >= size:
                return first
        # Address space of 1 1/8 of the device's capacity; practically unlimited without one.
        length = max((self.capacity or 1 << 60) * 9 // 8, size)
        length = -(-length // pool.page) * pool.page
        block = _Block(pool, self._addresses(length), length, False)
        pool.add(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> bool:
        """Map whole pages at the beginning of an unmapped block."""
        pool = block.pool
        nbytes = min(-(-nbytes // pool.page) * pool.page, block.size)
        if not self._take(nbytes):
            return False
        pool.drop(block)
        if nbytes < block.size:
            remainder = _Block(pool, block.address + nbytes, block.size - nbytes, False, prev=block, next=block.next)
            if remainder.next is not None:
                remainder.next.prev = remainder
            block.next, block.size = remainder, nbytes
            pool.add(remainder)
        block.mapped = True
        self._merge(block)
        pool.add(block)
        return True

    def _give_back(self) -> None:
        """Return unused segments to the device, or with expandable segments all whole pages of free blocks. Blocks that
        wait for another stream are waited for first (``release_cached_blocks``: ``synchronize_and_free_events``)."""
        for tensor in sorted(self._waiting):
            self._return(tensor)
        self._waited_for |= self._waiting
        self._waiting.clear()
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.drop(block)
                    self.reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        pool = block.pool
        first = -(-block.address // pool.page) * pool.page
        last = (block.address + block.size) // pool.page * pool.page
        if last <= first:
            return
        pool.drop(block)
        if first > block.address:
            before = _Block(pool, block.address, first - block.address, prev=block.prev, next=block)
            if before.prev is not None:
                before.prev.next = before
            block.prev = before
            pool.add(before)
        if block.address + block.size > last:
            after = _Block(pool, last, block.address + block.size - last, prev=block, next=block.next)
            if after.next is not None:
                after.next.prev = after
            block.next = after
            pool.add(after)
        block.address, block.size, block.mapped = first, last - first, False
        self.reserved -= block.size
        self._merge(block)
        pool.add(block)


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
