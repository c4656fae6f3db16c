"""What decides the peak, in sentences and as plain values, for every output alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.decisive import Decisive, Kind
from bridge_memory.report.units import format_bytes

#: The title above the sentences.
TITLE = "What decides the peak"
#: Sentences on the first screen; those that move the peak most.
MOST = 3


def sentence(one: Decisive, unit: str = "GiB") -> str:
    """"with megatron-core 0.17: 136.0 GiB (it ignores full recomputation in hybrid models)"."""
    if one.peak_bytes is None:
        return one.words
    return f"{one.words}: {format_bytes(one.peak_bytes, unit)}{f' ({one.why})' if one.why else ''}"


def sentences(found: Sequence[Decisive], unit: str = "GiB") -> tuple[str, ...]:
    """One for each of ``found``."""
    return tuple(sentence(one, unit) for one in found)


def of_releases(found: Sequence[Decisive], unit: str = "GiB") -> tuple[str, ...]:
    """Those of releases alone."""
    return sentences([one for one in found if one.kind is Kind.RELEASE], unit)


def as_json(found: Sequence[Decisive]) -> list[dict[str, Any]]:
    """As plain values, with the sentence as ``text``."""
    return [
        {"kind": str(one.kind), "text": sentence(one), "words": one.words, "peak_bytes": one.peak_bytes, "why": one.why}
        for one in found
    ]
