"""The phases of a job as one rank passes them: torch's peaks in each, and the driver's memory at its end.

torch has one running maximum since the start of the process, which is the user's and is never reset here. A phase that
raises it has that as its peak. Of any other the peak lies in a range: at least what was seen to be allocated, at most
the running maximum, and what was allocated at its start with all that was allocated since (torch counts the bytes that
it ever handed out). A reset of the statistics by others is noticed where the maximum has fallen between two readings.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge_memory.calibration.records import Bounds, PhaseRecord
from bridge_memory.live.cuda import PhaseReading, Reading
from bridge_memory.outside.phase import Phase

_ORDER = {str(phase): i for i, phase in enumerate(Phase)}


class Phases:
    """The phases of this process so far. The first one is building, since the process started."""

    def __init__(self) -> None:
        #: Phases since the last switch; none after the end.
        self.open: tuple[Phase, ...] = (Phase.BUILD,)
        self._ended: dict[tuple[str, ...], PhaseReading] = {}
        #: Reading at the start of the open phase; its own zeros at the start of the process; None: it failed.
        self._start: Reading | None = Reading(0, 0)
        self._last: Reading | None = None
        #: Highest allocated and reserved memory seen since.
        self._seen = 0, 0

    def passed(self, phase: Phase) -> bool:
        """Whether ``phase`` is open, or was."""
        return phase in self.open or any(str(phase) in names for names in self._ended)

    def also(self, phase: Phase) -> None:
        """The open phase is this one too: nothing has separated them."""
        if phase not in self.open:
            self.open = (*self.open, phase)

    def begin(self, phases: tuple[Phase, ...], reading: Reading) -> tuple[Phase, ...]:
        """Others begin, none at the end. Returns those that end."""
        self.now(reading)
        stretch = self._stretch()
        if stretch is not None:
            self._ended[stretch.phases] = _merged(self._ended.get(stretch.phases), stretch)
        before, self.open = self.open, phases
        self._start = None if reading.error else reading
        self._last, self._seen = None, (0, 0)
        return before

    def now(self, reading: Reading) -> tuple[PhaseReading, ...]:
        """All phases, the open one up to this reading."""
        if not reading.error:
            self._last = reading
            self._seen = max(self._seen[0], reading.allocated), max(self._seen[1], reading.reserved)
        stretch, found = self._stretch(), dict(self._ended)
        if stretch is not None:
            found[stretch.phases] = _merged(found.get(stretch.phases), stretch)
        return tuple(found.values())

    def _stretch(self) -> PhaseReading | None:
        """The open phase; None where there are no figures."""
        start, last = self._start, self._last
        if last is None or not self.open:
            return None
        (allocated, reserved), first = self._seen, start or last
        levels = (first.allocated, first.max_allocated, first.allocated_ever)
        held = (first.reserved, first.max_reserved, first.reserved_ever)
        return PhaseReading(
            tuple(sorted(map(str, self.open), key=_ORDER.__getitem__)),
            _peak(*levels, last.max_allocated, last.allocated_ever, allocated, whole=start is not None),
            _peak(*held, last.max_reserved, last.reserved_ever, reserved, whole=start is not None),
            last.device_used, last.outside, last.process,
        )  # fmt: skip


def _peak(level: int, peak: int, ever: int, last_peak: int, last_ever: int, seen: int, *, whole: bool) -> Bounds:
    """A stretch's peak, from the level, the maximum and all that was ever handed out at its start, the latter two at
    its end, and the highest level ``seen`` in it. ``whole``: the start is known."""
    if whole and last_peak > peak:
        return last_peak, last_peak
    least = max(level, seen)
    if last_peak < peak:  # reset by others
        least = max(least, last_peak)
    bounds = [] if last_peak < peak else [last_peak]
    if whole and 0 < ever <= last_ever:
        bounds.append(level + last_ever - ever)
    return least, max(least, min(bounds)) if bounds else None


def _merged(one: PhaseReading | None, other: PhaseReading) -> PhaseReading:
    if one is None:
        return other
    end = max(one, other, key=lambda stretch: stretch.device_used)
    return PhaseReading(
        one.phases, _highest(one.allocated, other.allocated), _highest(one.reserved, other.reserved),
        end.device_used, end.outside, end.process, one.times + other.times,
    )  # fmt: skip


def _highest(one: Bounds, other: Bounds) -> Bounds:
    most = None if one[1] is None or other[1] is None else max(one[1], other[1])
    return max(one[0], other[0]), most


def phase_records(readings: Iterable[Reading]) -> list[PhaseRecord]:
    """A record for each phase and stage, in order of time: of the rank with most at its end."""
    by_place: dict[tuple[tuple[str, ...], int], list[tuple[Reading, PhaseReading]]] = {}
    for reading in readings:
        for held in reading.phases:
            by_place.setdefault((held.phases, reading.stage), []).append((reading, held))
    return [_record(by_place[place]) for place in sorted(by_place, key=_in_time)]


def _in_time(place: tuple[tuple[str, ...], int]) -> tuple[list[int], int]:
    names, stage = place
    return [_ORDER.get(name, len(_ORDER)) for name in names], stage


def _record(ranks: list[tuple[Reading, PhaseReading]]) -> PhaseRecord:
    reading, held = max(ranks, key=lambda one: (one[1].outside + one[1].reserved[0], one[1].allocated[0]))
    return PhaseRecord(
        phases=held.phases, stage=reading.stage, ranks=len(ranks), times=held.times, worst_rank=reading.rank,
        allocated=held.allocated, reserved=held.reserved, driver=held.device_used or None,
        outside=held.outside if held.device_used else None, process=held.process or None,
    )  # fmt: skip
