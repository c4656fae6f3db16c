"""Units of memory for people. Inside the package memory is an int of bytes; reports choose the unit."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.spec import SpecError

#: Name -> bytes.
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6, "bytes": 1}
#: Digits after the point. One unit of the last digit is a tick.
DECIMALS = {"GiB": 2, "MiB": 1, "GB": 2, "MB": 1, "bytes": 0}
#: What single tensors are shown in: a thousandth of the unit of the totals.
FINER = {"GiB": "MiB", "GB": "MB"}


def check_unit(unit: str) -> str:
    """``unit`` spelled as in UNITS; its case does not matter. Raises SpecError for an unknown unit."""
    known = {name.casefold(): name for name in UNITS}
    if not isinstance(unit, str) or unit.casefold() not in known:
        raise SpecError(f"unit ({unit!r}) is unknown; use one of {', '.join(UNITS)}")
    return known[unit.casefold()]


def ticks(nbytes: int, unit: str, decimals: int | None = None) -> int:
    """``nbytes`` in units of the last digit shown, rounded half up (ints: sums of ticks are exact). ``decimals``:
    digits after the point (None: those of ``unit``)."""
    size, scale = UNITS[unit], int(10 ** (DECIMALS[unit] if decimals is None else decimals))
    return (2 * nbytes * scale + size) // (2 * size)


def coarser(unit: str, nbytes: int) -> int:
    """Digits after the point for a sentence: one fewer than in tables, unless ``nbytes`` is below one ``unit``, where
    the last digit matters."""
    return DECIMALS[unit] if abs(nbytes) < UNITS[unit] else max(0, DECIMALS[unit] - 1)


def format_ticks(value: int, unit: str, decimals: int | None = None) -> str:
    """The number alone, "1,234.56"; ``decimals`` as for ``ticks``."""
    decimals = DECIMALS[unit] if decimals is None else decimals
    if not decimals:
        return f"{value:,}"
    whole, rest = divmod(abs(value), 10**decimals)
    return f"{'-' if value < 0 else ''}{whole:,}.{rest:0{decimals}d}"


def format_bytes(nbytes: int, unit: str = "GiB") -> str:
    """"12.34 GiB": the number with its unit. Raises SpecError for an unknown unit."""
    unit = check_unit(unit)
    return f"{format_ticks(ticks(nbytes, unit), unit)} {unit}"


def share(parts: Sequence[int], unit: str, total: int | None = None) -> list[int]:
    """Ticks of ``parts`` (bytes) that add up to ``total`` ticks (default: those of their sum), exactly.

    Each part is rounded up or down, the largest remainders up: no part is off by a whole tick, and zero stays zero.
    ``total`` must be the sum of the parts rounded up or down. Readers add up the numbers of a table, so exact sums
    matter more than a last digit rounded to nearest.
    """
    size, scale = UNITS[unit], 10 ** DECIMALS[unit]
    rounded = [part * scale // size for part in parts]
    missing = (ticks(sum(parts), unit) if total is None else total) - sum(rounded)
    by_remainder = sorted(range(len(parts)), key=lambda i: -(parts[i] * scale % size))
    for i in by_remainder[:missing]:
        rounded[i] += 1
    return rounded


def format_count(elements: int) -> str:
    """A number of parameters: "671.03 B", "494.03 M", "1,234"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if elements >= size:
            return f"{elements / size:.2f} {letter}"
    return f"{elements:,}"


def ranges(numbers: Sequence[int]) -> str:
    """"0-3, 16-19" of sorted numbers, "" of none."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
