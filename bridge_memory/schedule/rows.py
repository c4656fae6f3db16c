"""The moments of a schedule as rows of a matrix: the bytes at a moment are its row times the costs of the chunks.

For many runs with the same schedule the costs are the columns of a second matrix, and one matrix product gives all
moments. ``peak`` counts what is alive at a moment, ``events.highest`` defines its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from bridge_memory.schedule.events import ChunkCost, Moment, overlapped
from bridge_memory.schedule.peak import few_microbatches, kinds_of, peak_moments

#: Columns of a chunk's cost: saved bytes, forward peak, backward peak and, where any chunk carries over, that.
SAVED, FORWARD, BACKWARD, CARRIED = range(4)


def columns_of(carries: bool) -> int:
    """How many columns a cost has. ``carries``: chunks carry over."""
    return CARRIED + carries


@lru_cache(maxsize=1024)
def peak_rows(
    pp: int, ranks: tuple[int, ...], m: int, group: int, costs: tuple[int, ...], keeps_outputs: bool = False,
    carries: bool = False,
) -> np.ndarray:  # fmt: skip
    """One row for each distinct moment of any of ``ranks`` that may be the peak.

    ``costs``: which of the distinct costs each chunk of a rank has. There are ``columns_of(carries)`` columns for each
    distinct cost, and a last one for the hidden states that the schedule holds. ``m``: from ``few_microbatches``.
    """
    kinds, which = kinds_of(costs)
    width = columns_of(carries)
    end = width * (max(costs) + 1)
    rows: dict[tuple[int, ...], None] = {}
    for rank in ranks:
        for moment in peak_moments(pp, rank, m, len(costs), group, False, True, keeps_outputs, which, carries):
            row = [0] * (end + 1)
            for kind, alive in zip(kinds, moment.alive, strict=True):
                row[width * kind + SAVED] += alive
            for kind, number in zip(kinds, moment.carrying, strict=False):
                row[width * kind + CARRIED] += number
            kind = width * kinds[moment.chunk]
            row[kind + SAVED] -= 1
            row[kind + (BACKWARD if moment.phase == "backward" else FORWARD)] += 1
            row[end] = moment.hidden
            rows[tuple(row)] = None
    return np.array(list(rows), float)


def peak_of_many(
    pp: int, ranks: Sequence[int], num_microbatches: np.ndarray | int, group: int, costs: tuple[int, ...],
    distinct: Sequence[ChunkCost], hidden_bytes: Any, *, overlap_moe_expert_parallel_comm: bool = False,
    keeps_outputs: bool = False,
) -> Any:  # fmt: skip
    """The most bytes at any moment of any of ``ranks``, for many runs. ``costs``: which of the ``distinct`` costs,
    which have arrays, each chunk of a rank has."""
    kinds, which = kinds_of(costs)
    carries = any([cost.carried_over for cost in distinct])
    few, overlaps = [distinct[kind] for kind in kinds], overlap_moe_expert_parallel_comm
    v, numbers = len(costs), np.asarray(num_microbatches)
    of_schedules: dict[int, Any] = {}
    for m in dict.fromkeys(numbers.ravel().tolist()):
        if m > 0:
            of_schedules.setdefault(few_microbatches(pp, m, v, group, overlaps), []).append(m)
    out: Any = 0
    pairs: dict[tuple[int, int], Any] = {}
    for m, alike in of_schedules.items():
        most: Any = 0
        for rank in ranks:
            for moment in peak_moments(pp, rank, m, v, group, overlaps, True, keeps_outputs, which, carries):
                most = np.maximum(most, _bytes_at(moment, few, hidden_bytes, pairs))
        here = np.isin(numbers, alike)
        out = most if len(of_schedules) == 1 else np.where(here, most, out)
    return out


def _bytes_at(
    moment: Moment, chunks: Sequence[ChunkCost], hidden_bytes: Any, pairs: dict[tuple[int, int], Any]
) -> Any:
    """As ``events.highest`` counts them. ``pairs``: what is known of two chunks that overlap, by their numbers."""
    here = moment.hidden * hidden_bytes
    for chunk, alive in zip(chunks, moment.alive, strict=True):
        here = here + alive * chunk.saved if alive else here
    for chunk, number in zip(chunks, moment.carrying, strict=False):
        here = here + number * chunk.carried_over if number else here
    one, other = chunks[moment.chunk], chunks[moment.forward_chunk]
    if moment.phase == "overlapped":
        pair = moment.forward_chunk, moment.chunk
        if pair not in pairs:
            pairs[pair] = overlapped(other, one, np.maximum, np.minimum)
        return here + pairs[pair] - other.saved - one.saved
    return here + (one.backward_peak if moment.phase == "backward" else one.forward_peak) - one.saved
