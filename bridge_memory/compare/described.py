"""Records of kind ``described``: what a source says in its own words, read where it says enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.compare.runs import Record


def described_run(record: Record) -> RunSpec:
    """The run of a described record. Raises NotComparable where the description does not make one."""
    from bridge_memory.compare.runs import NotComparable

    raise NotComparable("described in words that this reader does not know")
