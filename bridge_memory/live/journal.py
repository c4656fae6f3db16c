"""The JSON-lines file: one whole line a report, on disk before the next step; readable after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = "bridge-memory/live-1"


def append(path: str | os.PathLike[str], record: dict[str, Any]) -> None:
    """Append one line. A line that a killed predecessor left unfinished is closed first, so this one is whole."""
    line = json.dumps({"schema": SCHEMA, **record}, separators=(",", ":"), ensure_ascii=True) + "\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab") as file:
        if file.tell() and not _ends_with_newline(target):
            line = "\n" + line
        # One write call: O_APPEND keeps lines of several writers apart.
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a journal; lines that a kill cut off are skipped. Raises OSError."""
    with open(path, "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and record.get("schema") == SCHEMA:
                yield record


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
