"""torch's caching allocator, block by block: numbers worked out by hand from ``c10/cuda/CUDACachingAllocator.cpp``."""

from __future__ import annotations

import random
from collections.abc import Hashable
from itertools import pairwise

import pytest

from bridge_memory.workspaces.caching_allocator import CachingAllocator, Calls, DeviceFull, Event, Replay, Trace

KIB, MIB = 1 << 10, 1 << 20


def reserved(*sizes: int, **options: bool) -> int:
    """Of tensors that come one after the other and stay."""
    allocator = CachingAllocator(**options)  # type: ignore[arg-type]
    for i, nbytes in enumerate(sizes):
        allocator.allocate(i, nbytes)
    return allocator.reserved


@pytest.mark.parametrize(
    ("sizes", "segments", "expandable"),
    [
        ((1,), 2 * MIB, 2 * MIB),
        ((MIB, MIB), 2 * MIB, 2 * MIB),
        ((MIB, MIB, 1), 4 * MIB, 4 * MIB),
        ((0,), 0, 0),
        # Above 1 MiB segments of 20 MiB, of which a request takes the rest where 1 MiB or less would remain.
        ((MIB + 1,), 20 * MIB, 20 * MIB),
        ((9 * MIB, 9 * MIB, 2 * MIB), 20 * MIB, 20 * MIB),
        ((9 * MIB, 10 * MIB - 512, 2 * MIB), 40 * MIB, 40 * MIB),
        # From 10 MiB on a segment of its own in units of 2 MiB; expandable ones grow by pages of 20 MiB.
        ((10 * MIB,), 10 * MIB, 20 * MIB),
        ((11 * MIB,), 12 * MIB, 20 * MIB),
        ((11 * MIB, 11 * MIB, 11 * MIB), 36 * MIB, 40 * MIB),
    ],
)
def test_what_is_asked_of_the_device(sizes: tuple[int, ...], segments: int, expandable: int) -> None:
    assert reserved(*sizes) == segments
    assert reserved(*sizes, expandable_segments=True) == expandable


def test_bytes_come_in_blocks_of_512() -> None:
    allocator = CachingAllocator()
    allocator.replay([Event(0, 1), Event(1, 513)])
    assert allocator.allocated == 512 + 1024
    allocator.replay([Event(0, None), Event(1, None)])
    assert allocator.allocated == 0 and allocator.reserved == 2 * MIB and allocator.peak_allocated == 1536


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    """Free: 40, 30 and 20 MiB. 25 MiB go into the 30; then 35 into the 40; the next 20 into the 20: nothing new."""
    allocator = CachingAllocator()
    for i, size in enumerate((40, 30, 20)):
        allocator.allocate(i, size * MIB)
    for i in range(3):
        allocator.free(i)
    for i, size in enumerate((25, 35, 20), start=3):
        allocator.allocate(i, size * MIB)
    assert allocator.reserved == 90 * MIB
    allocator.allocate(9, 11 * MIB)  # 5 MiB are left of two blocks each
    assert allocator.reserved == 102 * MIB


def test_a_block_that_is_split_leaves_no_room_for_what_was_there() -> None:
    """What fragmentation is: 64 MiB go, 12 come into their place, and 64 come again."""
    events = [Event(0, 64 * MIB), Event(0, None), Event(1, 12 * MIB), Event(2, 64 * MIB)]
    plain, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    plain.replay(events)
    assert plain.reserved == 128 * MIB  # 52 MiB of the first segment are free
    expandable.replay(events)
    # 80 MiB are mapped, and the range goes on where they end: 76 MiB in whole pages.
    assert expandable.reserved == 80 * MIB


def test_neighbours_are_joined_when_both_are_free() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 60 * MIB)
    allocator.free(0)
    for i, size in enumerate((20, 20, 20), start=1):
        allocator.allocate(i, size * MIB)
    assert allocator.reserved == 60 * MIB
    for i in (1, 3, 2):
        allocator.free(i)
    allocator.allocate(4, 60 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_hole_inside_of_a_range_does_not_take_what_is_larger() -> None:
    """Expandable segments end fragmentation at the end of the range alone."""
    allocator = CachingAllocator(expandable_segments=True)
    allocator.replay([Event(0, 100 * MIB), Event(1, 20 * MIB), Event(0, None), Event(2, 120 * MIB)])
    assert allocator.reserved == 240 * MIB


def test_a_block_at_the_end_of_the_range_counts_with_what_it_can_grow_to() -> None:
    """Free: 40 MiB at the end and 60 MiB inside. 30 MiB go into the 60, though 40 would be the better fit."""
    allocator = CachingAllocator(expandable_segments=True)
    allocator.replay([Event(0, 60 * MIB), Event(1, 20 * MIB), Event(2, 40 * MIB), Event(0, None), Event(2, None)])
    allocator.allocate(3, 30 * MIB)
    allocator.allocate(4, 60 * MIB)  # grows from the 40 at the end
    assert allocator.reserved == 140 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_streams_share_nothing(expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable)
    allocator.replay([Event(0, 20 * MIB, "compute"), Event(0, None), Event(1, 20 * MIB, "all-gather")])
    assert allocator.reserved == 40 * MIB and allocator.allocated == 20 * MIB
    assert allocator.by_stream() == {"compute": 20 * MIB, "all-gather": 20 * MIB}


def test_a_full_device_gets_back_what_is_free() -> None:
    """Whole segments, or with expandable ones whole pages."""
    plain = CachingAllocator(capacity=100 * MIB)
    plain.replay([Event(0, 60 * MIB, 1), Event(0, None), Event(1, 80 * MIB, 2)])
    assert plain.reserved == 80 * MIB and plain.peak_reserved == 80 * MIB and plain.retries == 1
    expandable = CachingAllocator(capacity=100 * MIB, expandable_segments=True)
    expandable.replay([Event(0, 60 * MIB, 1), Event(0, None), Event(1, 10 * MIB, 1), Event(2, 70 * MIB, 2)])
    # Of 60 MiB the first 10 are in use: the page of 20 that holds them stays.
    assert expandable.reserved == 100 * MIB and expandable.retries == 1
    expandable.replay([Event(3, 10 * MIB, 1)])
    assert expandable.reserved == 100 * MIB
    with pytest.raises(DeviceFull, match="do not fit"):
        expandable.allocate(4, 20 * MIB, 1)


def test_a_split_segment_is_not_given_back() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.replay([Event(0, 60 * MIB), Event(0, None), Event(1, 12 * MIB)])
    with pytest.raises(DeviceFull):
        allocator.allocate(2, 50 * MIB)


def test_what_was_never_there_cannot_go() -> None:
    allocator = CachingAllocator()
    with pytest.raises(KeyError):
        allocator.free(1)
    allocator.allocate(1, 5)
    with pytest.raises(ValueError, match="already"):
        allocator.allocate(1, 5)


class _Shelf:
    """The same rules as a plain list of segments, each a list of [size, tensor or None]: for segments without
    pages."""

    def __init__(self) -> None:
        self.segments: list[tuple[object, bool, list[list[int]]]] = []

    def allocate(self, tensor: int, nbytes: int, stream: object) -> None:
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        best: tuple[int, int, int] | None = None
        for at, (of, is_small, blocks) in enumerate(self.segments):
            if of != stream or is_small != small:
                continue
            for i, (length, owner) in enumerate(blocks):
                if owner < 0 and length >= size and (best is None or length < best[0]):
                    best = length, at, i
        if best is None:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append((stream, small, [[length, -1]]))
            best = length, len(self.segments) - 1, 0
        length, at, i = best
        blocks = self.segments[at][2]
        if length - size >= 512 if small else length - size > MIB:
            blocks[i : i + 1] = [[size, tensor], [length - size, -1]]
        else:
            blocks[i][1] = tensor

    def free(self, tensor: int) -> None:
        for _, _, blocks in self.segments:
            for block in blocks:
                if block[1] == tensor:
                    block[1] = -1
            i = 0
            while i + 1 < len(blocks):
                if blocks[i][1] < 0 and blocks[i + 1][1] < 0:
                    blocks[i : i + 2] = [[blocks[i][0] + blocks[i + 1][0], -1]]
                else:
                    i += 1

    @property
    def reserved(self) -> int:
        return sum(length for _, _, blocks in self.segments for length, _ in blocks)


def _random_events(seed: int, number: int) -> list[Event]:
    draw = random.Random(seed)
    events, alive = [], []
    for i in range(number):
        if alive and draw.random() < 0.48:
            events.append(Event(alive.pop(draw.randrange(len(alive))), None))
        else:
            top = draw.choice((4 * KIB, MIB, 9 * MIB, 80 * MIB))
            events.append(Event(i, draw.randint(1, top), draw.choice("ab")))
            alive.append(i)
    return events


@pytest.mark.parametrize("seed", range(4))
def test_segments_are_those_of_a_plain_list(seed: int) -> None:
    """Sizes are drawn so that no two free blocks are of one size but by chance."""
    allocator, shelf = CachingAllocator(), _Shelf()
    for event in _random_events(seed, 600):
        if event.nbytes is None:
            allocator.free(event.tensor)
            shelf.free(event.tensor)
        else:
            allocator.allocate(event.tensor, event.nbytes, event.stream)
            shelf.allocate(event.tensor, event.nbytes, event.stream)
        assert allocator.reserved == shelf.reserved, event


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_no_two_tensors_overlap_and_nothing_is_lost(seed: int, expandable: bool) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, capacity=3000 * MIB)
    for event in _random_events(seed, 500):
        allocator.replay([event])
        used = sorted((start, end) for start, end, _ in allocator._blocks.values())
        assert all(end <= start for (_, end), (start, _) in pairwise(used))
        free = sum(end - start for pool in allocator._pools for start, end in pool.ends.items())
        assert free + allocator.allocated == allocator.reserved


@pytest.mark.parametrize("expandable", (False, True))
def test_a_full_device_waits_for_blocks_that_another_stream_uses(expandable: bool) -> None:
    """Of 100 MiB, 60 wait for another stream. 80 MiB more do not fit beside them: the allocator waits for all streams
    (``release_cached_blocks``: ``synchronize_and_free_events``), returns the 60, and asks again. That the stream has
    come so far is old news then."""
    allocator = CachingAllocator(expandable_segments=expandable, capacity=100 * MIB)
    allocator.allocate(0, 60 * MIB, "exchange")
    allocator.free_later(0)
    allocator.allocate(1, 80 * MIB, "compute")
    assert (allocator.retries, allocator.reserved, allocator.allocated) == (1, 80 * MIB, 80 * MIB)
    allocator.reuse(0)
    with pytest.raises(KeyError):
        allocator.reuse(0)
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_replay_without_a_limit_says_what_one_with_it_does(seed: int, expandable: bool) -> None:
    """Whether a trace fits a device is found from states on the way of a replay that has none."""
    first, step = _calls(seed, 150, 0), [*_calls(seed + 10, 100, 1000), *_calls(seed + 20, 100, 1300)]
    trace = Trace(first, step, 10_000, 2)
    replay = Replay(trace, expandable=expandable)
    assert replay.reserved == trace.held(expandable=expandable)
    fitting = []
    for share in (0.2, 0.5, 0.8, 0.9, 0.95, 1.0):
        capacity = int(share * replay.reserved)
        allocator = CachingAllocator(expandable_segments=expandable, capacity=capacity)
        try:
            trace.follow(allocator)
        except DeviceFull:
            fitting.append(False)
        else:
            fitting.append(True)
        assert replay.fits(capacity) is fitting[-1], share
    assert not fitting[0] and fitting[-1]


def _calls(seed: int, number: int, base: int) -> list[tuple[int, int, Hashable]]:
    """Random calls that free most of what they allocate, some of it at once."""
    calls = Calls()
    alive = []
    for event in _random_events(seed, number):
        if event.nbytes is None:
            alive.remove(event.tensor)
            calls.free(base + event.tensor)
        else:
            alive.append(event.tensor)
            calls.stream = event.stream
            calls.play([(event.tensor, event.nbytes), (number + event.tensor, -event.nbytes)], base)
    for tensor in alive[len(alive) // 2 if not base else 0 :]:
        calls.free(base + tensor)
    return calls.taken()


def test_what_is_freed_at_once_is_as_an_allocation_and_a_free() -> None:
    """The second of two tensors of 15 MiB needs a segment of 16 MiB while the first is there, and none after it."""
    for freed, reserved_bytes in ((False, 32 * MIB), (True, 16 * MIB)):
        calls = Calls()
        calls.play([(0, 15 * MIB), *([(0, 0)] if freed else []), (1, -15 * MIB), (2, -1)], 5)
        allocator = CachingAllocator()
        allocator.follow(calls.taken())
        assert allocator.reserved == reserved_bytes + 2 * MIB and allocator.holds(5) is not freed
        assert allocator.allocated == (0 if freed else 16 * MIB)
        assert allocator.peak_allocated == reserved_bytes
