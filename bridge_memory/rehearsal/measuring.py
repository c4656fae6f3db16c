"""Measuring on a GPU, for ``gpu.py`` and the scripts: figures after each phase, and one process per configuration, so
that neither peaks nor running out of memory affect the next configuration."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bridge_memory.rehearsal.record import Phase

#: Arguments of a process that measures one configuration: its name, the record's file, and the file of torch's
#: snapshot, if any.
_HIDDEN = ("--one", "--to", "--snapshot")


class Notebook:
    """torch.cuda's and the driver's figures after each phase."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self._last = time.perf_counter()

    def note(self, name: str) -> None:
        """Record them for the phase that ends here, and reset the peak."""
        import torch

        cuda = torch.cuda
        cuda.synchronize()
        now, (free, total) = time.perf_counter(), cuda.mem_get_info()
        self.phases.append(
            Phase(name, cuda.memory_allocated(), cuda.max_memory_allocated(), cuda.memory_reserved(), total - free,
                  now - self._last)
        )  # fmt: skip
        self._last = now
        cuda.reset_peak_memory_stats()


@contextmanager
def snapshot_to(path: str | None) -> Iterator[None]:
    """Write torch's memory snapshot of the block to ``path``, also where the block fails; None: no snapshot."""
    import torch

    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(path)
        torch.cuda.memory._record_memory_history(enabled=None)


def in_its_own_process(
    script: str, name: str, arguments: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """The record that ``script --one NAME --to FILE`` writes, or why there is none, in one line. ``timeout``:
    seconds."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "record.json"
        command = [sys.executable, str(Path(script).resolve()), "--one", name, "--to", str(to), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout, check=False,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"took longer than {timeout:g} s"
        if done.returncode == 0 and to.exists():
            record: dict[str, Any] = json.loads(to.read_text())
            return record
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if "Error" in line or "error" in line]
        return f"exit code {done.returncode}: {(errors or said or ['nothing said'])[-1][:300]}"


def add_measuring_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of scripts that measure a list of configurations."""
    parser.add_argument("--record", metavar="FILE.jsonl", help="append the records to this file")
    parser.add_argument("--tolerance", type=float, default=0.05, help="accepted relative error of a peak (0.05)")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS", help="limit per configuration (300)")
    parser.add_argument("--only", default="", metavar="NAME", help="measure this configuration only")
    parser.add_argument("--snapshots", metavar="FOLDER", help="write torch's memory snapshots to this folder")
    parser.add_argument("--dry-run", action="store_true", help="estimate and build every configuration without a GPU")
    parser.add_argument("--predictions", metavar="FILE.jsonl", help="with --dry-run: write predictions to this file")
    for hidden in _HIDDEN:
        parser.add_argument(hidden, help=argparse.SUPPRESS)


def snapshot_arguments(folder: str | None, number: int) -> list[str]:
    """The arguments for the snapshot of configuration ``number``."""
    if not folder:
        return []
    Path(folder).mkdir(parents=True, exist_ok=True)
    return ["--snapshot", str(Path(folder) / f"{number:02d}.pickle")]


def margins(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Measured memory beyond what is allocated: lines of text, in GiB.

    Outside of torch's allocator: used by the driver's count beyond what is reserved (contexts, libraries, other
    processes on the device). Inside: reserved beyond the peak of what is allocated (rounding, fragmentation).
    """
    outside: list[int] = []
    unused: list[int] = []
    for record in records:
        phases = [p for p in record.get("phases", ()) if p.get("driver_used_bytes") is not None]
        if phases:
            outside.append(max(p["driver_used_bytes"] - p["reserved_bytes"] for p in phases))
            unused.append(phases[-1]["reserved_bytes"] - max(p["max_allocated_bytes"] for p in phases))
    return [
        f"{what}: {min(found) / 2**30:.2f} to {max(found) / 2**30:.2f} GiB, median "
        f"{sorted(found)[len(found) // 2] / 2**30:.2f} ({len(found)} runs)"
        for what, found in (
            ("used outside of torch's allocator", outside), ("reserved beyond the highest allocation", unused)
        ) if found
    ]  # fmt: skip
