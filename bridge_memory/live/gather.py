"""Readings of all ranks, through torch.distributed's own key-value store.

No collective is used, so none can be joined by some ranks only: every rank leaves its reading in the store (one
small message, nobody waits), and one rank collects what is there until a deadline. A rank that fails leaves its
error, a rank that is slow is listed as missing, and training never waits for either beyond the deadline, on the
collecting rank alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Protocol

from bridge_memory.live.cuda import Reading

#: Seconds the collecting rank waits for the others, who have just finished the same step.
DEADLINE = 10.0
#: Seconds between two looks at the store.
PAUSE = 0.02


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
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


def publish(store: Store, moment: str, reading: Reading) -> None:
    """Leave this rank's reading for ``moment`` (a name that every rank gives the same report)."""
    store.set(_key(moment, reading.rank), json.dumps(reading.to_json()))


def collect(
    store: Store, moment: str, ranks: Sequence[int], *, deadline: float = DEADLINE, keep: bool = False
) -> tuple[list[Reading], list[int]]:
    """(readings that arrived, ranks that are missing). Waits ``deadline`` seconds in all; never raises for a
    rank that is late or wrote nonsense. ``keep``: leave the readings where they are."""
    keys = {rank: _key(moment, rank) for rank in ranks}
    arrived = _wait(store, keys, deadline)
    readings, missing = [], []
    for rank, key in keys.items():
        reading = _take(store, key, keep) if rank in arrived else None
        if reading is None:
            missing.append(rank)
        else:
            readings.append(reading)
    return readings, missing


def share(store: Store, name: str, value: dict[str, Any]) -> None:
    """Leave the collected table for the rank that holds the loggers, in place of the one before."""
    store.set(_key(name, "table"), json.dumps(value))


def fetch(store: Store, name: str, iteration: int, *, deadline: float = DEADLINE) -> dict[str, Any] | None:
    """The table that ``share`` left for ``iteration``, None where it does not come in time."""
    key, end = _key(name, "table"), time.monotonic() + deadline
    while True:
        if _there(store, key):
            value = json.loads(store.get(key))
            if isinstance(value, dict) and value.get("iteration") == iteration:
                return value
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


def _take(store: Store, key: str, keep: bool) -> Reading | None:
    """Read a key that exists, and remove it so that a long run leaves nothing behind."""
    try:
        value = json.loads(store.get(key))
        reading = Reading.from_json(value)
    except Exception:
        return None
    if keep:
        return reading
    try:
        store.delete_key(key)
    except Exception:  # a store without deletion keeps it
        return reading
    return reading
