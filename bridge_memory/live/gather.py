"""Readings of all ranks, through the key-value store of torch.distributed.

No collective is used, so the callback may run on some ranks only. Every rank puts its reading into the store (one small
message, without waiting); one rank collects until a deadline. A failing rank leaves its error, a slow rank is listed as
missing. Only the collecting rank ever waits, up to the deadline. Ranks missing from two reports in a row are no longer
waited for (``Collector``, ``Fetcher``).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from bridge_memory.calibration.records import ReportRecord
from bridge_memory.files import parse_json
from bridge_memory.live.cuda import Reading
from bridge_memory.live.guard import TRIES, pass_on

#: Seconds that the collecting rank waits for the others, which have just finished the same step.
DEADLINE = 10.0
#: Seconds between two polls of the store.
PAUSE = 0.02
#: Seconds that it waits after ``TRIES`` consecutive incomplete reports.
GRACE = 0.5
#: Ranks no longer waited for that one report polls again, with one request to the store each.
LOOKED_FOR = 64


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


def default_store() -> Store | None:
    """The store of the default process group, None without one."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed import distributed_c10d

    store: Store | None = distributed_c10d._get_default_store()
    return store


class Publisher:
    """Puts this rank's readings into the store and deletes its older ones."""

    def __init__(self) -> None:
        self._left: deque[str] = deque()

    def publish(self, store: Store, moment: str, reading: Reading) -> None:
        """``moment``: a name that every rank gives the same report."""
        key = _key(moment, reading.rank)
        store.set(key, json.dumps(reading.to_json()))
        if key not in self._left:
            self._left.append(key)
        # The collecting rank takes part in every step, so it has finished the report before the last one.
        while len(self._left) > 2:
            store.delete_key(self._left.popleft())


def collect(
    store: Store, moment: str, ranks: Sequence[int], *, deadline: float = DEADLINE
) -> tuple[list[Reading], list[int]]:
    """(readings that arrived, missing ranks). Waits ``deadline`` seconds in all; never raises for a late rank or an
    invalid reading."""
    keys = {rank: _key(moment, rank) for rank in ranks}
    arrived = sorted(_wait(store, keys, deadline))
    texts = _get_all(store, [keys[rank] for rank in arrived])
    readings, missing = [], sorted(set(ranks) - set(arrived))
    for rank, text in zip(arrived, texts, strict=True):
        try:
            reading = Reading.from_json(parse_json(text))
        except Exception as error:
            pass_on(error)
            missing.append(rank)
        else:
            readings.append(replace(reading, rank=rank))
    return readings, sorted(missing)


class Collector:
    """``collect`` at every report of a run, with limited patience.

    A report is incomplete where a rank that it waits for is missing. After ``TRIES`` consecutive incomplete reports the
    missing ranks are polled but not waited for, until they are back. Where no other rank has ever answered, the first
    report alone waits for long: the callback may run on this rank only.
    """

    def __init__(self) -> None:
        self._failures = 0
        #: Whether any other rank has answered yet.
        self.answered = False
        self._missing: set[int] = set()
        self._given_up: deque[int] = deque()

    def collect(
        self, store: Store, moment: str, ranks: Sequence[int], *, deadline: float = DEADLINE
    ) -> tuple[list[Reading], list[int]]:
        """As ``collect``."""
        gone = set(self._given_up)
        waited_for = [rank for rank in ranks if rank not in gone]
        wait = deadline if self._failures < (TRIES if self.answered else 1) else min(deadline, GRACE)
        readings, missing = collect(store, moment, waited_for, deadline=wait)
        if missing:
            self._failures += 1
            self._missing.update(missing)
        else:
            self._failures = 0
            self._missing.clear()
        back, _ = collect(store, moment, self._next_given_up(), deadline=0.0)
        self.answered = self.answered or bool(readings or back)
        gone.difference_update(reading.rank for reading in back)
        if back:
            self._given_up = deque(rank for rank in self._given_up if rank in gone)
        if self._failures >= TRIES:
            self._given_up.extend(sorted(self._missing))
            self._missing.clear()
        return readings + back, sorted({*missing, *gone})

    def _next_given_up(self) -> list[int]:
        """Some of the ranks no longer waited for, in rotation."""
        some = [self._given_up[i] for i in range(min(LOOKED_FOR, len(self._given_up)))]
        self._given_up.rotate(-len(some))
        return some


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    """One round trip where the store can, for jobs of thousands of ranks."""
    try:
        return list(store.multi_get(keys)) if keys else []
    except Exception as error:
        pass_on(error)
        return [_get(store, key) for key in keys]


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except Exception as error:
        pass_on(error)
        return b""


def share(store: Store, name: str, iteration: int, report: ReportRecord | None) -> None:
    """Put the collected report into the store for the rank with the loggers, replacing the last one. None: there is
    none for this iteration, so that rank need not wait."""
    store.set(_key(name, "table"), json.dumps({"iteration": iteration} if report is None else report.to_json()))


def fetch(store: Store, name: str, iteration: int, *, deadline: float = DEADLINE) -> ReportRecord | None:
    """The report that ``share`` left for ``iteration``, None where there is none or it does not come in time."""
    return Fetcher().fetch(store, name, iteration, deadline=deadline)


class Fetcher:
    """``fetch`` at every report of a run. After ``TRIES`` consecutive misses it polls without waiting, until a report
    arrives again."""

    def __init__(self) -> None:
        self._failures = 0
        self._last: object = None

    def fetch(self, store: Store, name: str, iteration: int, *, deadline: float = DEADLINE) -> ReportRecord | None:
        """As ``fetch``."""
        patient = self._failures < TRIES
        key, end = _key(name, "table"), time.monotonic() + (deadline if patient else 0.0)
        while True:
            value = _shared(store, key)
            if value is not None and value.get("iteration") == iteration:
                self._failures = 0
                return ReportRecord.from_json(value) if "event" in value else None
            if time.monotonic() >= end:
                break
            time.sleep(PAUSE)
        # A new report: the collecting rank is active again, so the next one is waited for.
        last = None if value is None else value.get("iteration")
        again = not patient and last is not None and last != self._last
        self._failures = TRIES - 1 if again else self._failures + 1
        self._last = last
        return None


def _shared(store: Store, key: str) -> dict[str, object] | None:
    try:
        value = parse_json(store.get(key)) if _there(store, key) else None
    except Exception as error:
        pass_on(error)
        return None
    return value if isinstance(value, dict) else None


def _key(moment: str, rank: int | str) -> str:
    return f"bridge_memory/{moment}/{rank}"


def _wait(store: Store, keys: dict[int, str], deadline: float) -> set[int]:
    """Ranks whose key exists when all have come or time is over. Asks rather than blocks inside the store, whose
    client is shared with NCCL's threads."""
    end = time.monotonic() + deadline
    while keys and not _there(store, *keys.values()):
        if time.monotonic() >= end:
            return {rank for rank, key in keys.items() if _there(store, key)}
        time.sleep(PAUSE)
    return set(keys)


def _there(store: Store, *keys: str) -> bool:
    try:
        return store.check(list(keys))
    except Exception as error:
        pass_on(error)
        return False
