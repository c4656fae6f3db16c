"""Schedule events -> what is alive when -> the peak, and in which phase.

The timeline knows pipeline schedules and nothing of layers: a chunk (virtual stage) is three numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """One virtual chunk of one stage, for one microbatch, in bytes.

    ``saved`` lives from its forward to its backward. ``forward_peak`` and ``backward_peak`` are the most alive
    during either pass of this chunk and microbatch, its own saved tensors included.
    """

    saved: int
    forward_peak: int
    backward_peak: int
