"""Memory lines of a post-training log beside the phases: verl's, NeMo-RL's and slime's.

Their "GB" is 2^30 bytes. Up to verl 0.7 vLLM runs in the worker: torch counts its pool as allocated even while it
sleeps, unmapped; it is what the driver lost at the sleep without what torch's cache lost.

Source: verl ``utils/profiler/performance.py: log_gpu_memory_usage, GPUMemoryLogger`` and ``perf/max_memory_*``; NeMo-RL
``megatron_policy_worker.py`` ("GPU Memory ..."); slime ``utils/memory_utils.py: print_memory, report_peak_memory``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bridge_memory.files import read_text
from bridge_memory.outside.amount import Range
from bridge_memory.rollout.answer import Rollout
from bridge_memory.rollout.moments import binary, moment_of, peak, predicted
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: Bytes of a log that are read.
_MOST_BYTES = 64 << 20
#: Different lines that are kept.
_MOST_LINES = 200
_NUMBER = r"(\d+(?:\.\d+)?)"
_VERL = re.compile(
    rf"((?:Before|After)[^,\n]{{1,120}}), memory allocated \(GB\): {_NUMBER}, memory reserved \(GB\): {_NUMBER}, "
    rf"device memory used/total \(GB\): {_NUMBER}/{_NUMBER}"
)
_VERL_PEAK = re.compile(rf"(perf/max_memory_(?:allocated|reserved)_gb)['\"]?\s*[:=]\s*(?:np\.float64\()?{_NUMBER}")
_NEMO = re.compile(rf"GPU Memory ((?:before|after) [a-z ]{{1,60}}): {_NUMBER}GB allocated, {_NUMBER}GB reserved")
_SLIME = re.compile(r"\[Rank \d+\] Memory-Usage ([^:\n]{1,120}): (\{[^}\n]{1,600}\})")
_SLIME_PEAK = re.compile(
    rf"\[Rank \d+\] Peak-Memory ([^:\n]{{1,120}}): max_allocated_GB={_NUMBER}, max_reserved_GB={_NUMBER}"
)
_PAIR = re.compile(rf"'(total|used|allocated|reserved)_GB': {_NUMBER}")


class Reading(NamedTuple):
    """One line, the highest of its kind; bytes."""

    head: str
    allocated: int | None
    reserved: int | None
    used: int | None
    total: int | None
    #: It is a peak, not a moment.
    peak: bool = False


class Compared(NamedTuple):
    """A line beside what is predicted of its moment; None: nothing is."""

    reading: Reading
    moment: str
    allocated: Range | None
    driver: Range | None

    def as_json(self) -> dict[str, Any]:
        """By the schema of ``rollout.schema.json``."""
        r = self.reading
        return {
            "line": r.head, "moment": self.moment, "peak": r.peak,
            "measured": {"allocated": r.allocated, "reserved": r.reserved, "driver": r.used},
            "predicted": {
                "allocated": self.allocated and list(self.allocated), "driver": self.driver and list(self.driver),
            },
        }  # fmt: skip


def readings(path: str) -> list[Reading]:
    """The memory lines of a log. Raises SpecError: it has none, or cannot be read."""
    text = read_text(path, "give a training log of verl, NeMo-RL or slime", _MOST_BYTES, errors="replace")
    found = list(readings_of(text))
    if not found:
        raise SpecError(
            f"{bounded(path, 80)} has no memory line of verl, NeMo-RL or slime; verl writes them with "
            "VERL_LOGGING_LEVEL=DEBUG"
        )
    return found


def readings_of(text: str) -> Iterable[Reading]:
    """The memory lines of a text, one for each kind: that with most on the driver, or allocated."""
    best: dict[tuple[str, bool], Reading] = {}

    def keep(reading: Reading) -> None:
        key = reading.head, reading.peak
        old = best.get(key)
        if old is None and len(best) >= _MOST_LINES:
            return
        if old is None or (reading.used or 0, reading.allocated or 0) > (old.used or 0, old.allocated or 0):
            best[key] = reading

    peaks: dict[str, int] = {}
    for match in _VERL.finditer(text):
        allocated, reserved, used, whole = (binary(match[n]) for n in (2, 3, 4, 5))
        keep(Reading(match[1].strip(), allocated, reserved, used, whole))
    for match in _NEMO.finditer(text):
        keep(Reading(f"GPU Memory {match[1]}", binary(match[2]), binary(match[3]), None, None))
    for match in _SLIME.finditer(text):
        values = {name: binary(number) for name, number in _PAIR.findall(match[2])}
        head = match[1].removesuffix(" (cleared before print)").strip()
        keep(Reading(head, values.get("allocated"), values.get("reserved"), values.get("used"),
                     values.get("total")))  # fmt: skip
    for match in _SLIME_PEAK.finditer(text):
        keep(Reading(match[1].strip(), binary(match[2]), binary(match[3]), None, None, True))
    for match in _VERL_PEAK.finditer(text):
        peaks[match[1]] = max(peaks.get(match[1], 0), binary(match[2]))
    if peaks:
        keep(Reading("perf/max_memory", peaks.get("perf/max_memory_allocated_gb"),
                     peaks.get("perf/max_memory_reserved_gb"), None, None, True))  # fmt: skip
    return best.values()


def compare(found: Rollout, lines: Iterable[Reading]) -> tuple[list[Compared], int]:
    """Each line beside its moment, on the fullest stage, and the bytes of vLLM's pool that were taken out."""
    lines = list(lines)
    pool = _pool(lines) if found.setup.in_process else 0
    out = []
    for reading in lines:
        own = reading
        if pool and own.allocated is not None:
            own = own._replace(allocated=max(0, own.allocated - pool))
        moment = None if reading.peak else moment_of(found, reading.head)
        if reading.peak:
            out.append(Compared(own, "peak of a step", peak(found), None))
        elif moment is None:
            out.append(Compared(own, "not known", None, None))
        else:
            out.append(Compared(own, str(moment), *predicted(found, moment)))
    return out, pool


def _pool(lines: Iterable[Reading]) -> int:
    """Bytes of vLLM's pool: what the driver lost at the sleep, without what torch's cache lost."""
    by_head = {r.head.lower(): r for r in lines}
    before, after = by_head.get("before rollout offload"), by_head.get("after rollout offload")
    if before is None or after is None or None in (before.used, after.used, before.reserved, after.reserved):
        return 0
    assert before.used is not None and after.used is not None
    assert before.reserved is not None and after.reserved is not None
    return max(0, (before.used - after.used) - (before.reserved - after.reserved))
