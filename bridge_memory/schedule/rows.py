"""The moments of a schedule as rows of a matrix: bytes at each are the row times what chunks cost.

Of many runs with one schedule the costs are columns, and the highest of all moments is one product of matrices. What
is alive at a moment is counted in ``peak``; what a moment adds up to is said in ``events.highest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from bridge_memory.schedule.peak import peak_moments

#: Columns of a chunk's cost: what it saves, and its peaks forward and backward.
SAVED, FORWARD, BACKWARD = range(3)


def peak_rows(
    pp: int, ranks: Sequence[int], m: int, group: int, costs: Sequence[int], keeps_outputs: bool = False
) -> np.ndarray:
    """A row for each moment of any of ``ranks`` that may be the highest; of equal ones one.

    ``costs``: which of the distinct costs each chunk of a rank has. Columns are three a distinct cost, and the last is
    of hidden states that the schedule holds. ``m``: ``few_microbatches``.
    """
    number = max(costs) + 1
    of = np.array(costs)
    rows = []
    for rank in ranks:
        alive, chunk, backward, hidden = _arrays(pp, rank, m, len(costs), group, keeps_outputs)
        out = np.zeros((len(hidden), 3 * number + 1))
        for cost in range(number):
            out[:, 3 * cost + SAVED] = alive[:, of == cost].sum(axis=1)
        at, which = np.arange(len(hidden)), 3 * of[chunk]
        out[at, which + SAVED] -= 1
        out[at, which + np.where(backward, BACKWARD, FORWARD)] += 1
        out[:, -1] = hidden
        rows.append(out)
    table = np.concatenate(rows)
    distinct = {row.tobytes(): i for i, row in enumerate(table)}
    return table[list(distinct.values())]


@lru_cache(maxsize=4096)
def _arrays(
    pp: int, rank: int, m: int, v: int, group: int, keeps_outputs: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    moments = peak_moments(pp, rank, m, v, group, keeps_outputs=keeps_outputs)
    return (
        np.array([n.alive for n in moments]).reshape(-1, v), np.array([n.chunk for n in moments]),
        np.array([n.phase == "backward" for n in moments]), np.array([n.hidden for n in moments]),
    )  # fmt: skip
