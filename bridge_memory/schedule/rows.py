"""The moments of a schedule as rows of a matrix: bytes at each are the row times what chunks cost.

Of many runs with one schedule the costs are columns, and the highest of all moments is one product of matrices. What
is alive at a moment is counted in ``peak``; what a moment adds up to is said in ``events.highest``.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from bridge_memory.schedule.peak import peak_moments

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
    of_ranks = [_arrays(pp, rank, m, len(costs), group, keeps_outputs) for rank in ranks]
    alive, chunk, backward, hidden = map(np.concatenate, zip(*of_ranks, strict=True))
    number, of = max(costs) + 1, np.array(costs)
    table = np.zeros((len(hidden), 3 * number + 1))
    table[:, SAVED : 3 * number : 3] = alive @ (of[:, None] == np.arange(number))
    at, which = np.arange(len(hidden)), 3 * of[chunk]
    table[at, which + SAVED] -= 1
    table[at, which + np.where(backward, BACKWARD, FORWARD)] += 1
    table[:, -1] = hidden
    return np.array(list(dict.fromkeys(map(tuple, table.tolist()))))


@lru_cache(maxsize=4096)
def _arrays(
    pp: int, rank: int, m: int, v: int, group: int, keeps_outputs: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    moments = peak_moments(pp, rank, m, v, group, keeps_outputs=keeps_outputs)
    return (
        np.array([n.alive for n in moments]).reshape(-1, v), np.array([n.chunk for n in moments]),
        np.array([n.phase == "backward" for n in moments]), np.array([n.hidden for n in moments]),
    )  # fmt: skip
