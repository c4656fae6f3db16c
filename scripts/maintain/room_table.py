"""Rewrite the imports in the room table of references/generated/rooms.md from the package's imports.

    python scripts/maintain/room_table.py

Needs pytest, which the test of the table imports. Order and descriptions of the page stay as far as possible: a room
moves behind the rooms that it imports, and a new room gets an empty description, which its author writes.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import rooms  # type: ignore[import-not-found]  # noqa: E402
import test_architecture as held  # type: ignore[import-not-found]  # noqa: E402

_ROW = re.compile(r"\| `(\w+)` \| (.*?) \| (?:`.*)?\s*\|$")


def main() -> int:
    """Rewrite the table. Returns 0."""
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    lines = held.PAGE.read_text().split("\n")
    rows = {m[1]: (number, m[2]) for number, line in enumerate(lines) if (m := _ROW.match(line)) and "/" not in m[1]}
    below: dict[str, set[str]] = {rooms.room_of(module): set() for module in held.SOURCES}
    for found in held.imports():
        here, there = rooms.room_of(found.module), rooms.room_of(found.imported)
        if here != there:
            below[here].add(there)
    wanted = [*(room for room in rows if room in below), *(room for room in below if room not in rows)]
    order: list[str] = []
    while len(order) < len(wanted):
        order.append(next(room for room in wanted if room not in order and below[room] <= set(order)))
    table = [
        f"| `{room}` | {rows[room][1] if room in rows else ''} | {', '.join(f'`{r}`' for r in sorted(below[room]))} |"
        for room in order
    ]
    numbers = [number for number, _ in rows.values()]
    lines[min(numbers) : max(numbers) + 1] = table
    held.PAGE.write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
