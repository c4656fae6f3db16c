"""What a layout should leave of a GPU before anybody queues it: room for what a prediction may be off, and for routing
that is not even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bridge_memory.estimation import peaks, stage_graphs
from bridge_memory.evidence import evidence_of
from bridge_memory.job.overload import most_overload
from bridge_memory.plan.found import Limit, Row
from bridge_memory.spec import SpecError

#: Tokens of the fullest rank over the balanced number, for which dropless experts should have room.
OVERLOAD = 1.3


class Once:
    """A question about a row that is answered once for each. Equal to another of the same question; sent without what
    it knows."""

    def __init__(self, ask: Callable[[Row[Any]], Any]) -> None:
        self.ask = ask
        self._known: dict[Row[Any], Any] = {}

    def __call__(self, row: Row[Any]) -> Any:
        if row not in self._known:
            self._known[row] = self.ask(row)
        return self._known[row]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Once) and self.ask == other.ask

    def __hash__(self) -> int:
        return hash(self.ask)

    def __reduce__(self) -> tuple[type[Once], tuple[Callable[[Row[Any]], Any]]]:
        return Once, (self.ask,)


class Reserve(NamedTuple):
    """What a row has to leave free."""

    limit: Limit

    def kept(self, row: Row[Any]) -> bool:
        """Whether the upper end of the band of the row's peak fits, and the peak under an overload of ``OVERLOAD``,
        beside the pools of CUDA graphs."""
        run, peak = row.run, row.peak
        if run.implementation.cuda_graph_impl != "none":
            graphs = stage_graphs(run, row.stage)
            assert graphs is not None
            peak += graphs.total.most
        above = int(peak * evidence_of(run).above)
        if row.headroom < peak + above - row.peak or self.limit.headroom(run, peak + above).least < 0:
            return False
        factor = min(OVERLOAD, most_overload(run))
        if run.implementation.moe_imbalance >= factor:
            return True
        try:
            uneven = run.with_fields(moe_imbalance=factor)
        except SpecError:  # an option without it
            return True
        most = max(stage.peak_bytes for stage in peaks(uneven)) + peak - row.peak
        return self.limit.headroom(uneven, most).least >= 0


def reserve_words(experts: bool) -> str:
    """What rows in front keep, for people."""
    uneven = f", and of the peak with {OVERLOAD:g} times the balanced tokens on one rank" if experts else ""
    return f"room for the upper end of the peak's 90% band{uneven}"
