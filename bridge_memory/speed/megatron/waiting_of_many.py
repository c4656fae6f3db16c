"""``waiting`` of many runs at once: the same schedule, followed level by level for all stages and runs together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from bridge_memory.schedule.events import num_warmup
from bridge_memory.speed.megatron.waiting import Times, led, waited
from bridge_memory.tapes.batched import batched

#: Bytes of what is known at once, the ends of all passes of some runs: of few runs, and of many.
_SLAB, _LARGE_SLAB = 1 << 20, 1 << 23
#: How many runs these are at least, and in how many turns all run if they are few.
_FEWEST, _TURNS = 8, 4


def waiting_of_many(times: Times, microbatches: Any, group: int, asked: np.ndarray) -> Any:
    """As ``waiting``, of the runs of a grid that are ``asked`` for; of others 0."""
    pp, v = len(times), len(times[0])
    if pp == 1 or v == 1:
        return 0.0
    cells = np.nonzero(asked)

    def of_cells(values: Any) -> np.ndarray:
        values = np.asarray(values)
        index = tuple(at if size > 1 else 0 * at for at, size in zip(cells, values.shape, strict=False))
        return values[index] if index else np.broadcast_to(values, cells[0].shape)

    kinds = {id(chunk): chunk for stage in times for chunk in stage}
    numbers = {key: number for number, key in enumerate(kinds)}
    #: Of every chunk of every stage which kind it is.
    which = np.array([[numbers[id(chunk)] for chunk in stage] for stage in times])
    table = np.stack([of_cells(one) for chunk in kinds.values() for one in chunk])
    order = np.lexsort(table)
    table = table[:, order]
    new = np.append(True, (table[:, 1:] != table[:, :-1]).any(axis=0))[: len(order)]
    #: Seconds of every kind forward and then backward, in every run that differs; and which of these each run is.
    seconds, back = table[:, new], np.empty(len(order), np.int64)
    back[order] = np.cumsum(new) - 1
    number_of_runs = seconds.shape[1]

    def some(runs: np.ndarray) -> Times:
        chunks = [(batched(seconds[2 * k, runs]), batched(seconds[2 * k + 1, runs])) for k in range(len(kinds))]
        return [[chunks[k] for k in stage] for stage in which.tolist()]

    waits = ~np.broadcast_to(np.asarray(led(some(np.arange(number_of_runs)))), number_of_runs)
    if not waits.any():
        return 0.0
    ends = np.zeros((2, number_of_runs))
    ends[:, waits] = _ends(pp, v, group, which, seconds[:, waits])
    here = waits[back]
    runs = back[here]
    number = None if microbatches is None else batched(of_cells(microbatches)[here])
    found = np.zeros(asked.shape)
    found[tuple(at[here] for at in cells)] = waited(some(runs), [batched(one) for one in ends[:, runs]], number, group)
    return batched(found)


def _ends(pp: int, v: int, group: int, which: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Until the last pass of two groups of microbatches has ended, and of three. ``which``: of the stages' chunks the
    kind; ``seconds``: [2 x kinds, runs]."""
    order = _order(pp, v, group)
    slot = 2 * which.ravel()[order.chunk] + order.backward
    runs = seconds.shape[1]
    out = np.zeros((2, runs))
    few = max(_FEWEST, _SLAB // (8 * len(slot)), min(runs // _TURNS, _LARGE_SLAB // (8 * len(slot))))
    for first in range(0, runs, few):
        # In the place of what a pass takes comes when it has ended; before all of them stands the beginning.
        ends = np.zeros((1 + len(slot), min(few, runs - first)))
        seconds[:, first : first + few].take(slot, axis=0, out=ends[1:], mode="clip")
        for begin, end, before in order.levels:
            free, there = ends.take(before, axis=0)
            passes = ends[begin:end]
            passes += np.maximum(free, there, out=free)
        out[:, first : first + few] = ends[order.last].max(axis=1)
    return out


class _Order(NamedTuple):
    """The passes of two groups and of three, each after those that it waits for: of a level none waits for another."""

    #: Of each pass its stage's chunk: stage x chunks + chunk.
    chunk: np.ndarray
    backward: np.ndarray
    #: (its first pass, the next level's; [2, passes]: the one before on its stage, and the one whose result it takes),
    #: counted from 1.
    levels: Sequence[tuple[int, int, np.ndarray]]
    #: [2, stages]: the last pass of each.
    last: np.ndarray


@lru_cache(maxsize=2)
def _order(pp: int, v: int, group: int) -> _Order:
    both = [_passes(pp, v, group, number * group) for number in (2, 3)]
    shift = np.repeat([0, both[0].shape[1]], [of.shape[1] for of in both])
    level, chunk, backward, *before = np.concatenate(both, axis=1)
    order = np.argsort(level, kind="stable")
    #: Of a pass its place; of none (-1, at the end) the beginning.
    place = np.zeros(len(order) + 1, np.int64)
    place[order] = np.arange(1, len(order) + 1)
    waits_for = place[np.where(np.array(before) < 0, -1, np.array(before) + shift)][:, order]
    counts = np.bincount(level)
    edges = np.cumsum([0, *counts[counts > 0]]).tolist()
    levels = [(a + 1, b + 1, np.ascontiguousarray(waits_for[:, a:b])) for a, b in pairwise(edges)]
    ends = np.cumsum([of.shape[1] // pp for of in both for _ in range(pp)]) - 1
    return _Order(chunk[order], backward[order], levels, place[ends.reshape(2, pp)])


def _passes(pp: int, v: int, group: int, number: int) -> np.ndarray:
    """[5, stages x 2 x passes]: of each stage's passes forward, then backward: a level, the chunk, whether it is
    backward, the pass before it on its stage, the pass whose result it takes (-1: none).

    Levels: a stage runs one pass in each while the schedule is full, and each stage is two behind the one before it.
    """
    n = number * v
    k = np.arange(n)
    round_ = k // group % v
    out = np.full((pp, 2, 5, n), -1)
    base = 2 * n * np.arange(pp)
    for rank in range(pp):
        warm = num_warmup(pp, rank, number, v, group)
        there, back = out[rank]
        there[0], back[0] = 2 * (rank + k), 2 * (pp - 1 - rank + pp - 1 + (v - 1) * group + k) + 1
        there[1], back[1] = rank * v + round_, rank * v + v - 1 - round_
        there[2], back[2] = 0, 1
        forward, backward = base[rank] + k, base[rank] + n + k
        there[3, 1 : warm + 1] = forward[:warm]
        there[3, warm + 1 :] = backward[: n - warm - 1]
        back[3, : n - warm] = forward[warm:]
        back[3, n - warm :] = backward[n - warm - 1 : -1]
        if rank:
            there[4] = base[rank - 1] + k
        else:
            there[4] = np.where(round_ > 0, base[-1] + k - group, -1)
        if rank < pp - 1:
            back[4] = base[rank + 1] + n + k
        else:
            back[4] = np.where(round_ > 0, base[0] + n + k - group, base[rank] + k + (v - 1) * group)
    found: np.ndarray = out.transpose(2, 0, 1, 3).reshape(5, -1)
    return found
