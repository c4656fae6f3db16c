"""What torch's caching allocator adds to a tensor."""

from __future__ import annotations

from bridge_memory.tapes.parameters import ALLOCATION_UNIT, pad
from bridge_memory.tapes.symbolic import chosen, largest

MIB = 1 << 20


def block_rest(nbytes: int) -> int:
    """Bytes that torch's allocator counts on top of a tensor of ``nbytes`` in a fresh segment.

    A block is split only if more than 1 MiB remains. Tensors of 10 MiB and above get a segment of their own in
    multiples of 2 MiB; from 1 to 10 MiB they share segments of 20 MiB, of which the last one in takes the rest
    (spread evenly here); smaller ones split exactly.
    Source: ``c10/cuda/CUDACachingAllocator.cpp: get_allocation_size, should_split``.
    """
    nbytes = pad(nbytes, ALLOCATION_UNIT)
    own = nbytes >= 10 * MIB
    tensors = chosen(own, 1, 20 * MIB // largest(1, nbytes))
    rest = chosen(own, -nbytes % (2 * MIB), 20 * MIB - tensors * nbytes)
    each: int = chosen((nbytes > MIB) & (rest <= MIB), rest // largest(1, tensors), 0)
    return each
