"""Which ways to run a model under engines outside of megatron-core fit, and which of them is the fastest.

Each is estimated and timed by itself: there are hundreds, and they share their recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bridge_memory.estimation import peaks
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.space import Refused
from bridge_memory.plan.torch.space import Configuration, EngineSpace, Fields, configurations
from bridge_memory.spec import RunSpec
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.torch.step_time import EngineTime, engine_time
from bridge_memory.verdict import Card


class EngineRow(NamedTuple):
    """One way that fits."""

    run: RunSpec
    #: As ``Configuration.fields``.
    fields: Fields
    #: Bytes.
    peak: int
    #: Bytes of the card that are left, its margin taken off.
    headroom: int
    time: EngineTime


class EnginesFound(NamedTuple):
    """What a search found."""

    #: The fastest first.
    rows: tuple[EngineRow, ...]
    looked_at: int
    #: Of those looked at.
    too_large: int
    #: Field -> ways that it refused.
    refused: Refused
    #: Whether the search was ended before it was through.
    stopped: bool = False

    @property
    def different(self) -> tuple[EngineRow, ...]:
        """The rows without those that take the same memory and time as one before them under the same engine: the other
        kind of checkpoint, or another name for the same kernel."""
        found: dict[object, EngineRow] = {}
        for row in self.rows:
            same = row.run.data_parallel.engine, row.run.batch.micro_batch_size, row.peak, row.time
            found.setdefault(same, row)
        return tuple(found.values())

    def front(self) -> tuple[EngineRow, ...]:
        """Ways than which no other is both faster and smaller, the fastest first."""
        out: list[EngineRow] = []
        for row in self.rows:
            if not out or row.peak < out[-1].peak:
                out.append(row)
        return tuple(out)



def search_engines(
    space: EngineSpace,
    hardware: Hardware,
    *,
    capacity: int,
    margin: Callable[[int], int],
    constants: Constants = DEFAULT,
    slower: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
    jobs: int = 1,
    backend: str | None = None,
) -> EnginesFound:
    """Look at every way of ``space``; arguments as of ``search.search``. ``slower``: what a measured step says of all
    times. Raises SpecError."""
    refused = Refused()
    tell = progress or (lambda looked_at, fitting: None)
    rows: list[EngineRow] = []
    looked_at = 0
    stopped = False
    work = _Some(hardware, Card(capacity, margin), constants, slower)

    def evaluated() -> Iterator[Sequence[EngineRow | None]]:
        if jobs == 1 and backend is None:
            yield from (
                [work.row(configuration)] for alike in configurations(space, refused) for configuration in alike
            )
        else:
            yield from spread(jobs, work, list(configurations(space, refused)), backend)

    try:
        for found in evaluated():
            looked_at += len(found)
            rows += [row for row in found if row is not None]
            tell(looked_at, len(rows))
    except KeyboardInterrupt:
        stopped = True
    rows.sort(key=lambda row: (row.time.seconds, row.peak))
    return EnginesFound(tuple(rows), looked_at, looked_at - len(rows), refused, stopped)


@dataclass(frozen=True, eq=False)
class _Some:
    """The rows of some ways, None of those that do not fit."""

    hardware: Hardware
    card: Card
    constants: Constants
    slower: float

    def __call__(self, some: Sequence[Configuration]) -> list[EngineRow | None]:
        return list(map(self.row, some))

    def row(self, configuration: Configuration) -> EngineRow | None:
        (stage,) = peaks(configuration.run)
        headroom = self.card.headroom(stage.peak_bytes)
        if headroom < 0:
            return None
        time = engine_time(configuration.run, self.hardware, self.constants).times(self.slower)
        return EngineRow(configuration.run, configuration.fields, stage.peak_bytes, headroom, time)
