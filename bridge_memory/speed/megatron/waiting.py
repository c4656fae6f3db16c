"""How long stages wait for each other in Megatron's interleaved schedule, beside its bubble.

The slowest stage and the bubble are all of a schedule in which one stage is the slowest in every virtual stage. Others
wait in addition: a stage of 1, 2 and 4 layers beside others of 2, 2 and 2 is the slower one during one chunk, and the
faster one during another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, product
from typing import Any

from bridge_memory.tapes.symbolic import largest

#: Seconds of a chunk's passes forward and backward: numbers, or arrays with one entry per run.
ChunkTimes = tuple[Any, Any]
#: Of every stage's chunks.
Times = Sequence[Sequence[ChunkTimes]]
#: What is less of a chunk's time is rounding.
_ROUNDING = 1e-9


def waiting(times: Sequence[Sequence[tuple[float, float]]], microbatches: int | None, group: int) -> float:
    """Seconds of a step in which the slowest stage waits for others, filling and draining aside; messages take none.
    ``microbatches``: None for the seconds that each adds in a long step.

    ``group``: microbatches that pass a chunk before the next one runs (``microbatch_group_size_per_vp_stage``). Groups
    add as much each, from the second on, so that the schedule is followed for two and for three.
    """
    pp, v = len(times), len(times[0])
    if pp == 1 or v == 1 or led(times):
        return 0.0
    found: float = waited(times, _ends(tuple(map(tuple, times)), group), microbatches, group)
    return found


@lru_cache(maxsize=8)
def _ends(times: tuple[tuple[tuple[float, float], ...], ...], group: int) -> tuple[float, float]:
    return schedule_seconds(times, 2 * group, group), schedule_seconds(times, 3 * group, group)


def waited(times: Times, ends: Sequence[Any], microbatches: Any, group: int) -> Any:
    """``waiting`` where no stage leads. ``ends``: seconds of two groups, and of three."""
    pp, v = len(times), len(times[0])
    totals = [added_up(stage) for stage in times]
    slowest = largest(*totals)
    others = added_up([(total, -slowest) for total in totals]) + (pp - 1) * slowest
    two, three = (end - n * group * slowest - others / v for n, end in zip((2, 3), ends, strict=True))
    each = (three - two) / group
    found = each if microbatches is None else two + each * (microbatches - 2 * group)
    return largest(0.0, found)


def added_up(chunks: Sequence[ChunkTimes]) -> Any:
    """Seconds of a stage's chunks."""
    total: Any = 0.0
    for forward, backward in chunks:
        total = total + (forward + backward)
    return total


def led(times: Times) -> Any:
    """Whether in every stretch of time one and the same stage is the slowest: then it waits for no other."""
    last = len(times) - 1
    kinds = {(rank == last, *map(id, stage)): (stage, rank == last) for rank, stage in enumerate(times)}
    of = {id(chunk): chunk for stage, _ in kinds.values() for chunk in stage}
    slots = [_slots(list(map(id, stage)), is_last) for stage, is_last in kinds.values()]
    #: Of slots that are compared: whether the first takes no less than the second.
    known: dict[tuple[tuple[int, int], tuple[int, int]], Any] = {}

    def as_long(a: tuple[int, int], b: tuple[int, int]) -> Any:
        if (a, b) not in known:
            one, other = (of[forward][0] + of[backward][1] for forward, backward in (a, b))
            known[a, b] = one >= other * (1 - _ROUNDING)
        return known[a, b]

    any_leads: Any = False
    for leader in slots:
        pairs = {
            (a, b) for mine, theirs in set(chain.from_iterable(zip(leader, other, strict=True) for other in slots))
            for a in mine for b in theirs if a != b
        }  # fmt: skip
        leads: Any = True
        for a, b in pairs:
            leads = leads & as_long(a, b)
        any_leads = any_leads | leads
    return any_leads


def _slots(stage: Sequence[int], last: bool) -> list[frozenset[tuple[int, int]]]:
    """While the schedule is full a stage runs a chunk forward and then one backward, the same two for as long as a
    group takes. For each of these stretches of time, which chunks these are: of the last stage two; of others, which
    begin with the next chunk earlier and end later, any two of these four."""
    v = len(stage)
    if last:
        return [frozenset(((stage[q - 1], stage[v - 1 - q]),)) for q in range(v)]
    return [frozenset(product((stage[q - 1], stage[q]), (stage[v - 1 - q], stage[(v - q) % v]))) for q in range(v)]


def schedule_seconds(times: Sequence[Sequence[tuple[float, float]]], number: int, group: int | None = None) -> float:
    """Until the last pass has ended: each begins when its stage is free and its input is there. ``group``: None for as
    many microbatches as stages; ``number``: of whole groups.

    While the schedule is full a stage runs forward, backward, forward, ...; here each is two passes behind the one
    before it, so that at every turn what a pass waits for has run.
    """
    pp, v = len(times), len(times[0])
    group = group or pp
    passes, later = number * v, (v - 1) * group
    last = pp - 1
    free = [0.0] * pp
    #: When each pass that a stage ran has ended.
    there: list[list[float]] = [[] for _ in times]
    back: list[list[float]] = [[] for _ in times]
    for turn in range(passes + 2 * last + later):
        for rank in range(max(0, turn - passes + 1), min(pp, turn + 1)):
            k = turn - rank
            chunk = k // group % v
            begins = free[rank]
            if rank or chunk:
                begins = max(begins, there[rank - 1][k] if rank else there[last][k - group])
            free[rank] = end = begins + times[rank][chunk][0]
            there[rank].append(end)
        first = turn - 2 * last - later
        for rank in range(min(last, passes - 1 - first), max(0, -first) - 1, -1):
            k = first + rank
            chunk = v - 1 - k // group % v
            if rank < last:
                before = back[rank + 1][k]
            else:
                before = there[last][k + later] if chunk == v - 1 else back[0][k - group]
            free[rank] = end = max(free[rank], before) + times[rank][chunk][1]
            back[rank].append(end)
    return max(free)
