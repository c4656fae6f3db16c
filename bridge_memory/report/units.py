"""Units of bytes, and rounding that keeps a shown total equal to the sum of the shown parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """``size`` bytes, shown with ``decimals``. Values are counted in ticks of the last decimal shown."""

    name: str
    size: int
    decimals: int

    @property
    def scale(self) -> int:
        return 10**self.decimals

    def ticks(self, nbytes: int) -> int:
        """``nbytes`` in ticks, half rounded up."""
        return (2 * nbytes * self.scale + self.size) // (2 * self.size)

    def apportion(self, parts: Sequence[int]) -> list[int]:
        """Ticks of each part, each within one tick of its value, that add up to the ticks of the sum."""
        whole = [n * self.scale // self.size for n in parts]
        missing = self.ticks(sum(parts)) - sum(whole)
        by_remainder = sorted(range(len(parts)), key=lambda i: -(parts[i] * self.scale % self.size))
        for i in by_remainder[:missing]:
            whole[i] += 1
        return whole

    def show(self, ticks: int) -> str:
        """Ticks as text: "12.34", "1,234,567" for bytes."""
        if not self.decimals:
            return f"{ticks:,}"
        sign, ticks = ("-", -ticks) if ticks < 0 else ("", ticks)
        return f"{sign}{ticks // self.scale}.{ticks % self.scale:0{self.decimals}d}"

    def format(self, nbytes: int) -> str:
        """Bytes as text, without the unit's name."""
        return self.show(self.ticks(nbytes))


UNITS = {
    unit.name: unit
    for unit in (
        Unit("GiB", 1 << 30, 2),
        Unit("MiB", 1 << 20, 1),
        Unit("GB", 10**9, 2),
        Unit("MB", 10**6, 1),
        Unit("bytes", 1, 0),
    )
}
GIB_UNIT = UNITS["GiB"]


def count(number: int) -> str:
    """A number of parameters, short: "671.03 B", "124.44 M", "768"."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return str(number)


def ranges(numbers: Sequence[int]) -> str:
    """Sorted runs of consecutive numbers: "0-3, 16-19"; "-" for none."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"
