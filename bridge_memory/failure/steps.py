"""Memory by step: the figures that a log prints again and again, and whether they grow.

Sources of the lines: ``comparison/logs.py`` (Megatron); torchtitan ``components/metrics.py: MetricsProcessor.log``
(reserved memory, its peak reset at every line); verl ``trainer/ppo/metric_utils.py`` (peaks that are never reset);
DeepSpeed ``runtime/utils.py: see_memory_usage``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.comparison.logs import MeasuredRank, memory_line
from bridge_memory.failure.texts import bare

_GIB, _GB = 1 << 30, 10**9
_TITAN = re.compile(r"step:\s*(\d{1,9})\s.*?memory:\s*(\d+(?:\.\d+)?)GiB")
_VERL_STEP = re.compile(r"\bstep:(\d{1,9}) - ")
_VERL = re.compile(r"perf/(max_memory_allocated_gb|max_memory_reserved_gb|cpu_memory_used_gb):(\d+(?:\.\d+)?)")
_DEEPSPEED = re.compile(
    r"MA (\d+(?:\.\d+)?) GB\s+Max_MA (\d+(?:\.\d+)?) GB\s+CA (\d+(?:\.\d+)?) GB\s+Max_CA (\d+(?:\.\d+)?) GB"
)
#: Texts of which a line with figures has one.
_MARKS = ("memory (", "memory: ", "perf/", " Max_MA ")
#: Names of figures here: that of memory which is the same after every step, of peaks, and of the host's.
ALLOCATED, PEAK, RESERVED, HOST = "allocated", "max allocated", "reserved", "host memory"


class Series(NamedTuple):
    """One figure of one rank by step, bytes. ``digit``: what the last digit printed is worth."""

    figure: str
    rank: int
    points: tuple[tuple[int, int], ...]
    digit: int


class Growth(NamedTuple):
    """A figure that grows step by step."""

    series: Series
    #: Bytes a step, by least squares; over the whole stretch; and steps of it.
    slope: float
    total: int
    steps: int

    def step_at(self, level: int) -> int | None:
        """The step at which it reaches ``level`` bytes as it grows."""
        step, last = self.series.points[-1]
        return None if level < last else step + int((level - last) / self.slope)


def series_of(lines: Iterable[str]) -> list[Series]:
    """Every figure by step of a log or a journal."""
    points: dict[tuple[str, int], dict[int, int]] = {}
    digits: dict[tuple[str, int], int] = {}

    def add(figure: str, rank: int, step: int, nbytes: int | None, digit: int) -> None:
        if nbytes is not None:
            points.setdefault((figure, rank), {})[step] = nbytes
            digits[figure, rank] = max(digit, digits.get((figure, rank), 0))

    number = 0
    reports: list[str] = []
    for raw in lines:
        if journal.SCHEMA in raw:
            reports.append(raw)
            continue
        if not any(mark in raw for mark in _MARKS):
            continue
        line = bare(raw)
        found = memory_line(line)
        if found is not None and found.iteration is not None:
            _add_megatron(add, found)
        elif (titan := _TITAN.search(line)) is not None:
            add(RESERVED, 0, int(titan[1]), round(float(titan[2]) * _GIB), _GIB // 100)
        elif (step := _VERL_STEP.search(line)) is not None:
            for name, value in _VERL.findall(line):
                figure = {"max_memory_allocated_gb": PEAK, "max_memory_reserved_gb": RESERVED}.get(name, HOST)
                add(figure, 0, int(step[1]), round(float(value) * _GIB), _GIB // 1000)
        elif (speed := _DEEPSPEED.search(line)) is not None:
            # Printed at several places of a step: each is a series of its own, by its words.
            number += 1
            add(ALLOCATED, 0, number, round(float(speed[1]) * _GIB), _GIB // 100)
    for record in journal.records(reports):
        if isinstance(record, ReportRecord):
            for stage in record.stages:
                add(ALLOCATED, stage.stage, record.iteration, stage.allocated, 1)
                add(PEAK, stage.stage, record.iteration, stage.max_allocated, 1)
    return [
        Series(figure, rank, tuple(sorted(found.items())), digits[figure, rank])
        for (figure, rank), found in points.items()
    ]


def _add_megatron(add: object, found: MeasuredRank) -> None:
    assert callable(add) and found.iteration is not None
    for figure, nbytes in ((ALLOCATED, found.allocated), (PEAK, found.max_allocated), (RESERVED, found.reserved)):
        add(figure, found.rank, found.iteration, nbytes, max(1, 2 * found.resolution))


#: Points that a growth is told by, without those of the first two steps, in which optimizer states are made.
_LEAST_POINTS = 5
_FIRST_STEPS = 2
#: Of the differences between points, the share that must be above zero; and of the growth, the share of the second
#: half: what reaches a level, as caches and peaks do, grows in the first.
_RISING, _SECOND_HALF = 0.75, 0.25
#: Digits and share of the last value that a growth must exceed, to be told from rounding.
_DIGITS, _SHARE = 4, 0.005


def growth(series: Series) -> Growth | None:
    """How a figure grows; None where it does not, or reaches a level."""
    points = [(step, nbytes) for step, nbytes in series.points if step > _FIRST_STEPS]
    if len(points) < _LEAST_POINTS or points[-1][0] == points[0][0]:
        return None
    total = points[-1][1] - points[0][1]
    if total <= max(_DIGITS * series.digit, _SHARE * points[-1][1]):
        return None
    rises = sum(b[1] > a[1] for a, b in pairwise(points))
    middle = points[len(points) // 2][1]
    if rises < _RISING * (len(points) - 1) or points[-1][1] - middle < _SECOND_HALF * total:
        return None
    return Growth(series, _slope(points), total, points[-1][0] - points[0][0])


def _slope(points: Sequence[tuple[int, int]]) -> float:
    """Bytes a step, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def fastest(every: Sequence[Series]) -> Growth | None:
    """The figure that grows most: of memory that should be the same after every step, before peaks, which longer
    sequences raise too."""
    found = [one for one in map(growth, every) if one is not None]
    return max(found, key=lambda one: (one.series.figure == ALLOCATED, one.total), default=None)
