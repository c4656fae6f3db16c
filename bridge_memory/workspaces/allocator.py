"""Overhead of torch's caching allocator."""

from __future__ import annotations

from bridge_memory.tapes.parameters import ALLOCATION_UNIT, pad
from bridge_memory.tapes.symbolic import chosen, largest

MIB = 1 << 20


def block_remainder(nbytes: int) -> int:
    """The unsplit remainder of the allocator's block: bytes that it counts on top of a tensor of ``nbytes`` in a new
    segment.

    A block is split only if more than 1 MiB remains. Tensors of 10 MiB and above get a separate segment in multiples of
    2 MiB. From 1 to 10 MiB they share segments of 20 MiB, in which the last tensor gets the remainder (averaged over
    all here). Smaller ones are split exactly. Source: ``c10/cuda/CUDACachingAllocator.cpp: get_allocation_size,
    should_split``.
    """
    nbytes = pad(nbytes, ALLOCATION_UNIT)
    own = nbytes >= 10 * MIB
    tensors = chosen(own, 1, 20 * MIB // largest(1, nbytes))
    remainder = chosen(own, -nbytes % (2 * MIB), 20 * MIB - tensors * nbytes)
    each: int = chosen((nbytes > MIB) & (remainder <= MIB), remainder // largest(1, tensors), 0)
    return each
