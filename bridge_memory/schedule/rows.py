"""The moments of a schedule as rows of a matrix: the bytes at a moment are its row times the costs of the chunks.

For many runs with the same schedule the costs are the columns of a second matrix, and one matrix product gives all
moments. ``peak`` counts what is alive at a moment, ``events.highest`` defines its bytes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bridge_memory.schedule.peak import kinds_of, peak_moments

#: Columns of a chunk's cost: saved bytes, forward peak, backward peak.
SAVED, FORWARD, BACKWARD = range(3)


@lru_cache(maxsize=1024)
def peak_rows(
    pp: int, ranks: tuple[int, ...], m: int, group: int, costs: tuple[int, ...], keeps_outputs: bool = False
) -> np.ndarray:
    """One row for each distinct moment of any of ``ranks`` that may be the peak.

    ``costs``: which of the distinct costs each chunk of a rank has. There are three columns for each distinct cost, and
    a last one for the hidden states that the schedule holds. ``m``: from ``few_microbatches``.
    """
    number = max(costs) + 1
    kinds, which = kinds_of(costs)
    end = 3 * number
    rows: dict[tuple[int, ...], None] = {}
    for rank in ranks:
        for moment in peak_moments(pp, rank, m, len(costs), group, False, True, keeps_outputs, which):
            row = [0] * (end + 1)
            for kind, alive in zip(kinds, moment.alive, strict=True):
                row[3 * kind + SAVED] += alive
            kind = 3 * kinds[moment.chunk]
            row[kind + SAVED] -= 1
            row[kind + (BACKWARD if moment.phase == "backward" else FORWARD)] += 1
            row[end] = moment.hidden
            rows[tuple(row)] = None
    return np.array(list(rows), float)
