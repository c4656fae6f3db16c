"""The journal: a JSON-lines file with a whole line per report, on disk before the next step; readable after a kill."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from bridge_memory.calibration.records import PhasesRecord, ReportRecord, RunRecord, record_of
from bridge_memory.files import parse_json
from bridge_memory.spec import SpecError

SCHEMA = "bridge-memory/live-1"
_ANY_SCHEMA = re.compile(r'"schema": ?"(bridge-memory/live-\d{1,9})"')


def append(path: str | os.PathLike[str], record: RunRecord | ReportRecord | PhasesRecord) -> None:
    """Append one line. An unfinished line of a killed process is ended first. Raises OSError."""
    line = json.dumps({"schema": SCHEMA, **record.to_json()}, separators=(",", ":"), ensure_ascii=True) + "\n"
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # O_NONBLOCK: opening a pipe without a reader must not block training.
    with open(target, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666)) as file:
        if file.tell() and not _ends_with_newline(target):
            line = "\n" + line
        # One write call: O_APPEND keeps lines of several writers apart.
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: str | os.PathLike[str]) -> Iterator[RunRecord | ReportRecord]:
    """Runs and reports of a journal, without cut-off lines and unknown events. Raises OSError."""
    with open(path, "rb") as file:
        yield from records(file)


def records(lines: Iterable[str | bytes]) -> Iterator[RunRecord | ReportRecord]:
    """The same, from the lines of a journal."""
    return (record for record in _every(lines) if not isinstance(record, PhasesRecord))


def phases(lines: Iterable[str | bytes]) -> tuple[RunRecord | None, PhasesRecord | None]:
    """The last run of a journal, and its phases."""
    run: RunRecord | None = None
    found: PhasesRecord | None = None
    for record in _every(lines):
        if isinstance(record, RunRecord):
            run, found = record, None
        elif isinstance(record, PhasesRecord):
            found = record
    return run, found


def _every(lines: Iterable[str | bytes]) -> Iterator[RunRecord | ReportRecord | PhasesRecord]:
    for line in lines:
        try:
            value = parse_json(line)
        except ValueError:
            continue
        record = record_of(value) if isinstance(value, dict) and value.get("schema") == SCHEMA else None
        if record is not None:
            yield record


def check_schema(line: str) -> None:
    """Raise SpecError for the line of a journal that another release wrote."""
    found = _ANY_SCHEMA.search(line)
    if found is not None and found[1] != SCHEMA:
        raise SpecError(f"the journal has the schema {found[1]}, and this release reads {SCHEMA}; update bridge-memory")


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
