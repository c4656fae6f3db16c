"""Memory by phase, bytes of one rank: predicted, and allocated by the real engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bridge_memory.engines.engine import Phase
from bridge_memory.estimation import stage_phases
from bridge_memory.residual import REHEARSED, REHEARSED_PERCENT, percent, relative, residual
from bridge_memory.spec import RunSpec


class ComparedPhase(NamedTuple):
    """``predicted``: None where a phase is not modelled; ``found``: None where it does not run without a GPU."""

    phase: Phase
    predicted: int | None
    found: int | None

    @property
    def difference(self) -> int | None:
        """Rehearsed minus predicted."""
        return residual(self.found, self.predicted)

    def as_json(self) -> dict[str, object]:
        return {
            "name": str(self.phase), "predicted": self.predicted, "found": self.found, "difference": self.difference
        }  # fmt: skip


def rows(run: RunSpec, found: Mapping[Phase, int]) -> list[ComparedPhase]:
    """Every phase of the prediction or the rehearsal, of a run with one stage."""
    ours = stage_phases(run, 0)
    known = [phase for phase in Phase if phase in ours or phase in found]
    return [ComparedPhase(phase, ours.get(phase), found.get(phase)) for phase in known]


def lines(table: Sequence[ComparedPhase]) -> list[str]:
    """The rows as lines of text."""
    out = [f"{'':28}{'predicted':>18}{'rehearsed':>18}{REHEARSED:>23}  {REHEARSED_PERCENT}"]
    for row in table:
        numbers = (row.predicted, row.found, row.difference)
        line = f"{row.phase!s:28}" + "".join(
            f"{'-' if n is None else format(n, ','):>{width}}" for n, width in zip(numbers, (18, 18, 23), strict=True)
        )
        share = percent(relative(row.found, row.predicted), 2) if row.difference else ""
        out.append(f"{line}  {share:>{len(REHEARSED_PERCENT)}}".rstrip())
    return out
