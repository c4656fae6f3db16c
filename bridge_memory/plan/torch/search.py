"""Which configurations of a run under PyTorch's engines and DeepSpeed fit, and which of them is the fastest.

Each is estimated and timed by itself: there are hundreds, and they share their traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bridge_memory.estimation import peaks, peaks_with
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import TIE, Found, Limit, Listed, OneByOne, Refused, Row
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.reserve import Once, Reserve
from bridge_memory.plan.torch.space import Space, configurations
from bridge_memory.plan.torch.states import States
from bridge_memory.spec import RunSpec
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.torch.step_time import StepTime, step_time


class Configurations(Listed[StepTime]):
    """Configurations that fit. Those of one engine that take the same memory and time are one choice: the other kind of
    checkpoint, or another name for the same kernel."""

    def choice(self, number: int) -> object:
        row = self[number]
        return row.run.data_parallel.engine, row.run.batch.micro_batch_size, row.peak, row.time


class _Succeeded:
    """Why a search does not show a row of FSDP1: one of FSDP2, its successor (``fully_shard``), takes no more memory
    and, within the precision of the prediction, no more time."""

    def __init__(self) -> None:
        #: What is found, and its rows of FSDP2 that keep the reserve.
        self._found: Found | None = None
        self._successors: list[Row[StepTime]] = []

    def __call__(self, row: Row[StepTime], found: Found) -> str | None:
        if row.run.data_parallel.engine != "fsdp1":
            return None
        if self._found is not found:
            self._found = found
            self._successors = [
                one for one in found.rows if one.run.data_parallel.engine == "fsdp2"
                and (found.keeps is None or found.keeps(one))
            ]
        slowest = row.time.seconds * (1 + TIE)
        if any(one.peak <= row.peak and one.time.seconds <= slowest for one in self._successors):
            return f"fsdp1, where its successor fsdp2 takes no more memory and at most {TIE:.0%} more time"
        return None


def search(
    space: Space,
    hardware: Hardware,
    *,
    capacity: int,
    outside: Callable[[RunSpec], Range],
    constants: Constants = DEFAULT,
    slower: float = 1.0,
    progress: Callable[[int, int], None] | None = None,
    share: Callable[[float], None] | None = None,
    jobs: int = 1,
    backend: str | None = None,
) -> Found:
    """Look at every configuration of ``space``; arguments as of ``plan.megatron.search.search``. ``slower``: the
    factor on all times that measured steps give. Raises SpecError."""
    refused = Refused()
    report = progress or (lambda looked_at, fitting: None)
    rows: list[Row[StepTime]] = []
    looked_at = tight = 0
    stopped = False
    work = _Some(hardware, Limit(capacity, outside), constants, slower)
    total = 0

    def evaluated() -> Iterator[Sequence[Row[StepTime] | bool]]:
        nonlocal total
        groups = list(configurations(space, refused))
        total = sum(map(len, groups))
        if jobs == 1 and backend is None:
            yield from ([work.row(run)] for alike in groups for run in alike)
        else:
            yield from spread(jobs, work, groups, backend)

    try:
        for found in evaluated():
            looked_at += len(found)
            rows += [row for row in found if isinstance(row, Row)]
            tight += found.count(True)
            if share is not None:
                share(looked_at / total)
            report(looked_at, len(rows))
    except KeyboardInterrupt:
        stopped = True
    return Found(
        Configurations(rows), looked_at, looked_at - len(rows), refused, stopped, tight=tight,
        one_by_one=OneByOne.TORCH, keeps=Once(Reserve(work.limit).kept), refuses=_Succeeded(),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Some:
    """The rows of some configurations; of those that do not fit for sure, whether they may."""

    hardware: Hardware
    limit: Limit
    constants: Constants
    slower: float
    states: States = field(default_factory=States)

    def __call__(self, some: Sequence[RunSpec]) -> list[Row[StepTime] | bool]:
        return list(map(self.row, some))

    def row(self, run: RunSpec) -> Row[StepTime] | bool:
        engine = self.states.engine(run)
        (stage,) = peaks(run) if engine is None else peaks_with(run, engine)
        left = self.limit.headroom(run, stage.peak_bytes)
        if left.least < 0:
            return left.most >= 0
        time = step_time(run, self.hardware, self.constants).times(self.slower)
        return Row(run, stage.peak_bytes, 0, left.least, time)
