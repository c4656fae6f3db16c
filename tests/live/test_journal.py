"""The JSON-lines file survives a kill at any moment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from bridge_memory.live import journal


def test_lines_that_a_kill_cut_off_are_skipped_and_the_next_line_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    journal.append(path, {"iteration": 1})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole + whole[:cut])
        journal.append(path, {"iteration": 2})
        read = [r["iteration"] for r in journal.read(path)]
        assert read == ([1, 1, 2] if cut >= len(whole) - 1 else [1, 2])


def test_what_was_appended_before_a_kill_is_there(tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    code = (
        "import sys; from bridge_memory.live import journal\n"
        "for i in range(10**6): journal.append(sys.argv[1], {'iteration': i, 'stages': [{'stage': 0}] * 200})"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    end = time.monotonic() + 30
    while not (path.exists() and path.stat().st_size > 50_000) and time.monotonic() < end:
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    read = [r["iteration"] for r in journal.read(path)]
    assert len(read) > 2 and read == list(range(len(read)))


def test_foreign_lines_are_not_records(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text('{"loss": 1.0}\n[1, 2]\n\x00\n')
    assert list(journal.read(path)) == []
