"""A corpus of measured runs, of memory or of speed: one JSON object per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bridge_memory.files import parse_json, read_text
from bridge_memory.spec import SpecError

#: Fields of records of speed that records of memory do not have.
_OF_SPEED = frozenset({"layout_group", "tokens_per_s_per_gpu", "step_time_s", "mbs", "gbs"})


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
    """Whether the first record is one of speed."""
    return bool(rows) and "config" not in rows[0].data and len(_OF_SPEED & rows[0].data.keys()) > 1
