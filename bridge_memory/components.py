"""Component: one named part of a rank's memory. The common coin of model state, buffers and estimate."""

from __future__ import annotations

from dataclasses import dataclass

#: How a component's bytes came about (design: "Two methods, never mixed up").
PROVENANCES = ("exact", "formula", "measured", "assumed")
#: What a component is; static = the first four.
KINDS = ("weights", "gradients", "optimizer", "buffers", "activation", "transient")
STATIC_KINDS = ("weights", "gradients", "optimizer", "buffers")


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a stage's memory at its peak.

    ``bytes`` on one rank; ``kind`` one of KINDS; ``provenance`` one of PROVENANCES; ``shard`` names the
    groups that divide it, as in "tp x dp x cp" ("" where every rank holds it whole).
    """

    name: str
    bytes: int
    kind: str
    provenance: str
    shard: str = ""
