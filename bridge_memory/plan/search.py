"""Which layouts fit, and which of them is the fastest.

Every layout is estimated (``estimate.peaks``: all stages, to the byte what ``estimate`` says); what fits the card less
its margin is given a step time (``speed``) and ranked by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bridge_memory.estimate import model_state, peaks
from bridge_memory.plan.space import Refused, Space, layouts
from bridge_memory.spec import RunSpec
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.step_time import StepTime, step_time

#: Step times that differ by less are a tie: the spread of measured over predicted time inside of a group of layouts
#: (``references/search.md``).
TIE = 0.05


class Row(NamedTuple):
    """One layout that fits."""

    run: RunSpec
    #: Of the stage with the highest peak, bytes.
    peak: int
    stage: int
    #: Bytes of the card that are left, its margin taken off.
    headroom: int
    time: StepTime


class Found(NamedTuple):
    """What a search found."""

    #: The fastest first.
    rows: tuple[Row, ...]
    looked_at: int
    #: Of those looked at; and of them those whose model state alone is.
    too_large: int
    without_activations: int
    #: Field -> layouts that it refused.
    refused: Refused
    #: Whether the search was ended before it was through.
    stopped: bool = False

    def best(self, number: int) -> tuple[Row, ...]:
        """The fastest, one for every choice of sizes, micro batch and recomputation: of several splits the best."""
        out: dict[object, Row] = {}
        for row in self.rows:
            p = row.run.parallel
            out.setdefault((p.tp, p.pp, p.cp, p.ep, p.etp, row.run.batch.micro_batch_size, row.run.recompute), row)
            if len(out) == number:
                break
        return tuple(out.values())

    def front(self) -> tuple[Row, ...]:
        """Layouts than which no other is both faster and smaller, the fastest first."""
        out: list[Row] = []
        for row in self.rows:
            if not out or row.peak < out[-1].peak:
                out.append(row)
        return tuple(out)


def search(
    space: Space,
    hardware: Hardware,
    *,
    capacity: int,
    margin: Callable[[int], int],
    constants: Constants = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Look at every layout of ``space``. Raises SpecError where the space is empty.

    ``capacity``: bytes of the card; ``margin``: of a peak, what the card must hold beyond it; ``progress`` is told how
    many were looked at and how many fit. KeyboardInterrupt ends the search with what was found so far.
    """
    refused = Refused()
    rows: list[Row] = []
    looked_at = too_large = without_activations = 0
    stopped = False
    try:
        for alike in layouts(space, refused):
            state = max(model_state(alike[0]))
            if state + margin(state) > capacity:
                without_activations += len(alike)
                continue
            for run in alike:
                stages = peaks(run)
                looked_at += 1
                stage = max(range(len(stages)), key=lambda i: stages[i].peak_bytes)
                peak = stages[stage].peak_bytes
                headroom = capacity - peak - margin(peak)
                if headroom < 0:
                    too_large += 1
                else:
                    rows.append(Row(run, peak, stage, headroom, step_time(run, hardware, constants)))
                if progress is not None:
                    progress(looked_at + without_activations, len(rows))
    except KeyboardInterrupt:
        stopped = True
    rows.sort(key=lambda row: (row.time.seconds, row.peak))
    number = looked_at + without_activations
    return Found(tuple(rows), number, too_large + without_activations, without_activations, refused, stopped)


def ties(rows: Sequence[Row]) -> int:
    """How many of the first rows are as fast as the first, as far as the time model can tell."""
    return sum(row.time.seconds <= rows[0].time.seconds * (1 + TIE) for row in rows) if rows else 0
