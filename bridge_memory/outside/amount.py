"""A part of what a phase of a job holds, with the range that its source leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bridge_memory.components import Provenance


class Amount(NamedTuple):
    """Bytes of one part on one rank: between ``least`` and ``most``, which are equal where the source leaves no range.

    ``source``: file and function, in the words of the release that it was read in, or what an assumption rests on.
    """

    name: str
    least: int
    most: int
    provenance: Provenance
    source: str = ""


def exactly(name: str, nbytes: int, provenance: Provenance = Provenance.FORMULA, source: str = "") -> Amount:
    """An amount without a range."""
    return Amount(name, nbytes, nbytes, provenance, source)


class Range(NamedTuple):
    """Bytes: the sum of some amounts."""

    least: int
    most: int


def total(amounts: Iterable[Amount | Range]) -> Range:
    """All ``amounts`` together."""
    found = list(amounts)
    return Range(sum(a.least for a in found), sum(a.most for a in found))
