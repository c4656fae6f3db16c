"""Which layouts fit, and which of them is the fastest.

Every layout is estimated (all stages, to the byte what ``estimate`` says); what fits the card less its margin is given
a step time (``speed``) and ranked by it. Layouts are evaluated together, as arrays (``many``), where numpy is installed
and arrays can say all of their memory, else one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.estimation import model_state, peaks
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.space import AXES, Refused, Space, layouts, parallel_sizes
from bridge_memory.spec import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError, show
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import StepTime, step_time
from bridge_memory.verdict import Card
from bridge_memory.workspaces.driver import driver_bytes

if TYPE_CHECKING:
    from bridge_memory.plan.megatron.many import Fitting, Sheet

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


class Rows(Sequence[Row]):
    """Layouts that fit, the fastest first."""

    def choice(self, number: int) -> object:
        """Sizes, micro batch and recomputation of one, whatever its split."""
        row = self[number]
        p = row.run.parallel
        return p.tp, p.pp, p.cp, p.ep, p.etp, row.run.batch.micro_batch_size, row.run.recompute

    def peaks(self) -> Iterable[int]:
        """The highest of each."""
        return [row.peak for row in self]


class _Listed(Rows):
    """Rows that were made one by one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        return self._rows[number]


class Found(NamedTuple):
    """What a search found."""

    #: The fastest first.
    rows: Rows
    looked_at: int
    #: Of those looked at; and of them those whose model state alone is.
    too_large: int
    without_activations: int
    #: Field -> layouts that it refused.
    refused: Refused
    #: Whether the search was ended before it was through.
    stopped: bool = False
    #: Whether layouts were evaluated together, and not one by one.
    together: bool = False

    def best(self, number: int) -> tuple[Row, ...]:
        """The fastest, one for every choice of sizes, micro batch and recomputation: of several splits the best. Where
        nothing else varied, splits are shown."""
        out: dict[object, int] = {}
        for i in range(len(self.rows)):
            out.setdefault(self.rows.choice(i), i)
            if len(out) == number:
                break
        shown = range(min(number, len(self.rows))) if len(out) == 1 else out.values()
        return tuple([self.rows[i] for i in shown])

    def front(self, most: int | None = None) -> tuple[Row, ...]:
        """Layouts than which no other is both faster and smaller, the fastest first, and no more than ``most``."""
        out: list[int] = []
        least = None
        for i, peak in enumerate(self.rows.peaks()):
            if least is None or peak < least:
                out.append(i)
                least = peak
                if len(out) == most:
                    break
        return tuple([self.rows[i] for i in out])


def search(
    space: Space,
    hardware: Hardware,
    *,
    capacity: int,
    margin: Callable[[int], int],
    constants: Constants = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
    together: bool | None = None,
    jobs: int = 1,
    backend: str | None = None,
    cache: str | None = None,
) -> Found:
    """Look at every layout of ``space``. Raises SpecError where the space is empty or no time is known.

    ``capacity``: bytes of the card; ``margin``: of a peak, what the card must hold beyond it, never less of a higher
    one; ``progress`` is told how many were looked at and how many fit; ``together``: whether layouts are evaluated as
    arrays (None: where they can be); ``jobs``: processes, of this machine or of ``backend``, a name that joblib knows
    (-1: all there are); ``cache``: a folder that keeps what blocks cost for later searches. KeyboardInterrupt ends the
    search with what was found so far.
    """
    i = space.base.implementation
    if i.torch_layers:
        raise SpecError(
            f"transformer_impl ({i.transformer_impl}) has no layouts of megatron-core; search it under an engine of "
            "its own, `bridge-memory search --engine any`, or use transformer_engine"
        )
    if not any(True for _ in parallel_sizes(space)):
        raise SpecError(f"world_size ({space.num_gpus}) is divided by no layout of the space{_bounds(space)}")
    card = Card(capacity, margin)
    tell = progress or (lambda looked_at, fitting: None)
    if together or (together is None and _can_be_together(space)):
        try:
            return _together(space, hardware, card, constants, tell, jobs, backend, cache)
        except (AttributeError, TypeError):
            if together:
                raise
            # Some rule or formula does not take arrays; it takes numbers.
    return _one_by_one(space, hardware, card, constants, tell, jobs, backend)


def _bounds(space: Space) -> str:
    """Of a space without layouts, what narrows it: "; change tensor_model_parallel_size (16) or ..."."""
    p = space.base.parallel
    given = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep}
    fields = {axis: AXES[axis][0].partition(".")[2] for axis in given}
    bounds = [f"{fields[axis]} ({size})" for axis, size in given.items() if axis in space.fixed and size > 1]
    bounds += [f"{fields[axis]} ({low} to {high})" for axis, (low, high) in space.ranges.items() if axis in given]
    return f"; change {' or '.join(bounds)}" if bounds else ""


def _can_be_together(space: Space) -> bool:
    try:
        from bridge_memory.plan.megatron.many import expressible
    except ImportError:  # numpy is not installed
        return False
    return expressible(space.base)


@dataclass(frozen=True, eq=False)
class _Alone:
    """Layouts that differ in micro batch and recomputation alone, one by one: what each row has beside its run, None of
    what does not fit; None where model state alone is too large."""

    base: RunSpec
    hardware: Hardware
    card: Card
    constants: Constants

    def __call__(self, task: Sequence[tuple[ParallelSpec, BatchSpec, RecomputeSpec]]) -> list[Any] | None:
        runs = [self.base.with_(parallel=p, batch=b, recompute=r) for p, b, r in task]
        if not self.card.holds(max(model_state(runs[0]))):
            return None
        found = (_row(run, self.hardware, self.card, self.constants) for run in runs)
        return [None if row is None else row[1:] for row in found]


def _one_by_one(
    space: Space, hardware: Hardware, card: Card, constants: Constants, progress: Callable[[int, int], None],
    jobs: int, backend: str | None,
) -> Found:  # fmt: skip
    refused = Refused()
    rows: list[Row] = []
    looked_at = too_large = without_activations = 0
    stopped = False

    def evaluated() -> Iterator[tuple[Sequence[RunSpec], Sequence[Any] | None]]:
        """Some runs, and their rows (None for what does not fit), or None where model state alone is too large."""
        if jobs == 1 and backend is None:
            for alike in layouts(space, refused):
                if not card.holds(max(model_state(alike[0]))):
                    yield alike, None
                else:
                    yield from (([run], [_row(run, hardware, card, constants)]) for run in alike)
            return
        groups = list(layouts(space, refused))
        # Runs are not sent to other processes: their model would be each time.
        tasks = [[(run.parallel, run.batch, run.recompute) for run in alike] for alike in groups]
        work = _Alone(space.base, hardware, card, constants)
        for alike, found in zip(groups, spread(jobs, work, tasks, backend), strict=True):
            yield alike, found and [values and Row(run, *values) for run, values in zip(alike, found, strict=True)]

    try:
        for alike, found in evaluated():
            if found is None:
                without_activations += len(alike)
                continue
            looked_at += len(alike)
            fit = [row for row in found if row is not None]
            too_large += len(alike) - len(fit)
            rows += fit
            progress(looked_at + without_activations, len(rows))
    except KeyboardInterrupt:
        stopped = True
    rows.sort(key=lambda row: (row.time.seconds, row.peak))
    number = looked_at + without_activations
    return Found(_Listed(rows), number, too_large + without_activations, without_activations, refused, stopped)


def _row(run: RunSpec, hardware: Hardware, card: Card, constants: Constants) -> Row | None:
    """One layout, or None where it does not fit."""
    stages = peaks(run)
    stage = max(range(len(stages)), key=lambda i: stages[i].peak_bytes)
    peak = stages[stage].peak_bytes
    headroom = card.headroom(peak, driver_bytes(run))
    return None if headroom < 0 else Row(run, peak, stage, headroom, step_time(run, hardware, constants))


# ---- together ----


def _together(
    space: Space, hardware: Hardware, card: Card, constants: Constants, progress: Callable[[int, int], None],
    jobs: int, backend: str | None, cache: str | None,
) -> Found:  # fmt: skip
    from bridge_memory.plan.megatron.many import Sheet, fitting

    refused = Refused()
    costs = None
    if cache is not None:
        from bridge_memory.plan.megatron.kept import KeptCosts

        costs = KeptCosts(cache)
    sheet = Sheet(space)
    found: list[Fitting] = []
    looked_at = without_activations = fit = 0
    stopped = False
    try:
        for few in fitting(sheet, hardware, constants, card.holds, refused, jobs, backend, costs):
            found.append(few)
            looked_at += few.looked_at
            without_activations += few.without_activations
            fit += len(few.peaks)
            progress(looked_at, fit)
    except KeyboardInterrupt:
        stopped = True
    rows = _Together(sheet, found, lambda run: _row(run, hardware, card, constants), cache)
    return Found(rows, looked_at, looked_at - fit, without_activations, refused, stopped, True)


class _Together(Rows):
    """Rows that are made when they are asked for: of a hundred thousand a few are shown."""

    def __init__(
        self, sheet: Sheet, found: Sequence[Fitting], make: Callable[[RunSpec], Row | None], cache: str | None
    ) -> None:
        """``cache``: the folder that what blocks cost may be from."""
        from bridge_memory.plan.megatron.many import sorted_together

        self._cache = cache

        self._sheet, self._found, self._make = sheet, found, make
        #: In order: in which of ``found`` a row is, where in it, and its peak.
        self._of, self._at, self._peaks = sorted_together(sheet, found)
        self._made: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple([self[i] for i in range(*number.indices(len(self)))])
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        row = self._made.get(number)
        if row is None:
            made = self._make(self._sheet.run(*self._place(number)))
            same = made is not None and made.peak == self._peaks[number]
            if not same and self._cache is not None:
                raise SpecError(f"--cache ({show(self._cache)}) has costs that are not those of this model; delete it")
            assert made is not None and same, "an array of peaks is not that of its runs"
            row = self._made[number] = made
        return row

    def _place(self, number: int) -> tuple[Any, int, int, int]:
        few, at = self._found[self._of[number]], self._at[number]
        return few.pipeline, int(few.sizes[at]), int(few.batch[at]), int(few.recompute[at])

    def choice(self, number: int) -> object:
        pipeline, sizes, batch, recompute = self._place(number)
        return pipeline.pp, self._sheet.sizes[pipeline.at[sizes]], batch, pipeline.recomputes[recompute]

    def peaks(self) -> Iterable[int]:
        peaks: list[int] = self._peaks.tolist()
        return peaks


def ties(rows: Sequence[Row]) -> int:
    """How many of the first rows are as fast as the first, as far as the time model can tell."""
    return sum(row.time.seconds <= rows[0].time.seconds * (1 + TIE) for row in rows) if rows else 0
