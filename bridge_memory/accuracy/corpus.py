"""A corpus of measured runs, of memory or of speed: one JSON object per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridge_memory.files import parse_json, read_text
from bridge_memory.spec import SpecError

#: Fields of records of speed that records of memory do not have, and of those what these do not have.
_OF_SPEED = frozenset({"layout_group", "tokens_per_s_per_gpu", "step_time_s", "mbs", "gbs"})
_OF_MEMORY = frozenset({"measured", "measured_verbatim"})
#: Share of a file's rows that may be unread; with as many the command's exit code is 1.
MOST_UNREAD = 0.5


class RecordLine(NamedTuple):
    """One line of the corpus. ``where``: its name in refusals."""

    where: str
    data: Mapping[str, Any]


def read_corpus(path: str | Path) -> list[RecordLine]:
    """Every non-empty line. Raises SpecError, naming the line, for one that is not a JSON object."""
    rows = []
    for number, line in enumerate(read_text(path, "give a file with one JSON record a line").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            data = parse_json(line)
        except ValueError:
            raise SpecError(f"{where} is not JSON; give one record a line") from None
        if not isinstance(data, dict):
            raise SpecError(f"{where} is not a JSON object; give one record a line")
        rows.append(RecordLine(where, data))
    return rows


def is_of_speed(rows: Sequence[RecordLine]) -> bool:
    """Whether most of the records are of speed."""
    found = sum(len(_OF_SPEED & row.data.keys()) > 1 and not _OF_MEMORY & row.data.keys() for row in rows)
    return bool(rows) and 2 * found >= len(rows)
