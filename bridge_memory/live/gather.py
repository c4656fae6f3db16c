"""Readings of all ranks, through torch.distributed's own key-value store.

No collective is used, so none can be joined by some ranks only: every rank leaves its reading in the store (one
small message, nobody waits), and one rank collects what is there until a deadline. A rank that fails leaves its
error, a rank that is slow is listed as missing, and training never waits for either beyond the deadline, on the
collecting rank alone.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from bridge_memory.calibration.records import ReportRecord
from bridge_memory.live.cuda import Reading

#: Seconds the collecting rank waits for the others, who have just finished the same step.
DEADLINE = 10.0
#: Seconds between two looks at the store.
PAUSE = 0.02


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

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
    """Leaves this rank's readings in the store, and clears its own older ones away."""

    def __init__(self) -> None:
        self._left: deque[str] = deque()

    def publish(self, store: Store, moment: str, reading: Reading) -> None:
        """``moment``: a name that every rank gives the same report."""
        key = _key(moment, reading.rank)
        store.set(key, json.dumps(reading.to_json()))
        if key not in self._left:
            self._left.append(key)
        # The collecting rank takes part in every training step, so it is done with the report before the last one.
        while len(self._left) > 2:
            store.delete_key(self._left.popleft())


def collect(
    store: Store, moment: str, ranks: Sequence[int], *, deadline: float = DEADLINE
) -> tuple[list[Reading], list[int]]:
    """(readings that arrived, ranks that are missing). Waits ``deadline`` seconds in all; never raises for a
    rank that is late or wrote nonsense."""
    keys = {rank: _key(moment, rank) for rank in ranks}
    arrived = sorted(_wait(store, keys, deadline))
    texts = _get_all(store, [keys[rank] for rank in arrived])
    readings, missing = [], sorted(set(ranks) - set(arrived))
    for rank, text in zip(arrived, texts, strict=True):
        try:
            readings.append(Reading.from_json(json.loads(text)))
        except Exception:
            missing.append(rank)
    return readings, sorted(missing)


def _get_all(store: Store, keys: list[str]) -> list[bytes]:
    """One round trip where the store can, for jobs of thousands of ranks."""
    try:
        return list(store.multi_get(keys)) if keys else []
    except Exception:
        return [_get(store, key) for key in keys]


def _get(store: Store, key: str) -> bytes:
    try:
        return store.get(key)
    except Exception:
        return b""


def share(store: Store, name: str, report: ReportRecord) -> None:
    """Leave the collected report for the rank that holds the loggers, in place of the one before."""
    store.set(_key(name, "table"), json.dumps(report.to_json()))


def fetch(store: Store, name: str, iteration: int, *, deadline: float = DEADLINE) -> ReportRecord | None:
    """The report that ``share`` left for ``iteration``, None where it does not come in time."""
    key, end = _key(name, "table"), time.monotonic() + deadline
    while True:
        if _there(store, key):
            value = json.loads(store.get(key))
            if isinstance(value, dict) and value.get("iteration") == iteration:
                return ReportRecord.from_json(value)
        if time.monotonic() >= end:
            return None
        time.sleep(PAUSE)


def _key(moment: str, rank: int | str) -> str:
    return f"bridge_memory/{moment}/{rank}"


def _wait(store: Store, keys: dict[int, str], deadline: float) -> set[int]:
    """Ranks whose key exists when all have come or time is over. Asks rather than blocks inside the store, whose
    client is shared with NCCL's threads."""
    end = time.monotonic() + deadline
    while not _there(store, *keys.values()):
        if time.monotonic() >= end:
            return {rank for rank, key in keys.items() if _there(store, key)}
        time.sleep(PAUSE)
    return set(keys)


def _there(store: Store, *keys: str) -> bool:
    try:
        return store.check(list(keys))
    except Exception:
        return False
