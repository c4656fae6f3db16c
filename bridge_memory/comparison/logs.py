"""Memory figures of a training log: our JSON lines, and ``report_memory`` lines of Megatron-LM and Megatron Bridge.

Megatron-LM (``megatron/training/utils.py: report_memory``) prints mebibytes under the name MB::

    [Rank 0] (after 2 iterations) memory (MB) | allocated: 17312.5 | max allocated: 20144.0 | reserved: ...

Megatron Bridge (``training/utils/train_utils.py: training_log``) prints decimal gigabytes, five digits::

    [Rank 0] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 18.153 | mem-max-allocated-gigabytes: 21.1
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
GB = 10**9

#: Each pattern runs in linear time: a log can hold anything.
_FIGURES = re.compile(r"memory \((MB|GB)\)\s*(\|.*)")
_RANK = re.compile(r"\[Rank (\d{1,9})\]")
_AFTER = re.compile(r"after (\d{1,18}) iterations")
_FIGURE = re.compile(r"\|\s*([A-Za-z][A-Za-z -]*?):\s*([0-9.eE+-]+)")

#: Name in a log -> figure.
_NAMES = {
    "allocated": "allocated", "max allocated": "max_allocated", "reserved": "reserved", "max reserved": "max_reserved",
    "mem-allocated-gigabytes": "allocated", "mem-max-allocated-gigabytes": "max_allocated",
    "mem-reserved-gigabytes": "reserved", "mem-max-reserved-gigabytes": "max_reserved",
}  # fmt: skip

#: Megatron-LM's block of parsed arguments: "  hidden_size ..................... 4096".
_ARGUMENT = re.compile(r"^\s*(?:\S*\s)?\s{2}([A-Za-z]\w*) \.{2,} (.*)$")
#: Arguments of a block, of which Megatron-LM has some 700.
_MOST_ARGUMENTS = 10_000
#: Characters of an argument's value that are read as one of Python's.
_LONGEST_VALUE = 10_000
#: Bytes, more than any machine has.
_MOST = 1 << 60


@dataclass(frozen=True, slots=True)
class MeasuredRank:
    """Bytes that torch reported on one rank; None where the log does not say."""

    rank: int
    #: Steps done; None where the log does not say.
    iteration: int | None
    allocated: int | None = None
    max_allocated: int | None = None
    reserved: int | None = None
    max_reserved: int | None = None
    #: The figures may be off by this much, from the digits printed.
    resolution: int = 0
    #: Pipeline stage where the source says it (our own records do).
    stage: int | None = None


def latest_of_each_rank(lines: Sequence[str]) -> list[MeasuredRank]:
    """The latest figures of every rank of a log; ``max_allocated`` never falls, so the last one is the peak."""
    latest: dict[int, MeasuredRank] = {}
    for line in reversed(lines):
        found = memory_line(line, latest)
        if found is not None:
            latest[found.rank] = found
    return [latest[rank] for rank in sorted(latest)]


def memory_line(line: str, but_of: Container[int] = ()) -> MeasuredRank | None:
    """What a line of ``report_memory`` says, None for any other line and those of the ranks ``but_of``."""
    match = _FIGURES.search(line)
    rank = None if match is None else _RANK.search(line, 0, match.start())
    if match is None or rank is None or int(rank.group(1)) in but_of:
        return None
    unit, figures = match.groups()
    after = _AFTER.search(line, rank.end(), match.start())
    values: dict[str, Any] = {}
    resolution = 0
    for name, number in _FIGURE.findall(figures):
        key = _NAMES.get(name.strip())
        if key is None:
            continue
        try:
            figure = float(number) * (MIB if unit == "MB" else GB)
        except ValueError:
            continue
        if not 0 <= figure < _MOST:
            continue
        values[key] = round(figure)
        resolution = max(resolution, _resolution(number, unit))
    if not values:
        return None
    iteration = int(after.group(1)) if after else None
    return MeasuredRank(int(rank.group(1)), iteration, resolution=resolution, **values)


def _resolution(number: str, unit: str) -> int:
    """Half a unit of the last digit: Megatron-LM prints full floats, Bridge five significant digits."""
    if unit == "MB":
        return 0
    value = abs(float(number))
    if value == 0:
        return 0
    return math.ceil(GB * 10.0 ** (math.floor(math.log10(value)) - 4) / 2)


def arguments_in(lines: Iterable[str]) -> SimpleNamespace | None:
    """The arguments that Megatron-LM printed at its start, None where the log has no such block."""
    values: dict[str, Any] = {}
    inside = False
    for line in lines:
        if "arguments ------" in line:
            inside = "end of arguments" not in line
            if not inside:
                break
            continue
        match = _ARGUMENT.match(line) if inside and len(values) < _MOST_ARGUMENTS else None
        if match is not None:
            values[match.group(1)] = _value(match.group(2).rstrip())
    return SimpleNamespace(**values) if "hidden_size" in values else None


def _value(text: str) -> Any:
    """None, numbers, booleans and lists as Python prints them; anything else stays text."""
    try:
        return ast.literal_eval(text) if len(text) <= _LONGEST_VALUE else text
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
