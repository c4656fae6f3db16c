"""The moments of a schedule as rows of a matrix: bytes at each are the row times what chunks cost.

Of many runs with one schedule the costs are columns, and the highest of all moments is one product of matrices. What
is alive at a moment is counted in ``peak``; what a moment adds up to is said in ``events.highest``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bridge_memory.schedule.peak import kinds_of, peak_moments

#: Columns of a chunk's cost: what it saves, and its peaks forward and backward.
SAVED, FORWARD, BACKWARD = range(3)


@lru_cache(maxsize=1024)
def peak_rows(
    pp: int, ranks: tuple[int, ...], m: int, group: int, costs: tuple[int, ...], keeps_outputs: bool = False
) -> np.ndarray:
    """A row for each moment of any of ``ranks`` that may be the highest; of equal ones one.

    ``costs``: which of the distinct costs each chunk of a rank has. Columns are three a distinct cost, and the last is
    of hidden states that the schedule holds. ``m``: ``few_microbatches``.
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
