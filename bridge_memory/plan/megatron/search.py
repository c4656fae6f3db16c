"""Which layouts fit, and which of them is the fastest.

Every layout is estimated (all stages, to the byte what ``estimate`` says); what fits the GPU less its margin is given a
step time (``speed``) and ranked by it. Layouts are evaluated in batches, as arrays (``many``), whatever their options
(``tests/plan/test_options_as_arrays.py``); without numpy one by one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridge_memory.estimation import model_state, peaks
from bridge_memory.garbage import existing_objects_frozen
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import SIMPLER, Found, Limit, Listed, OneByOne, Refused, Row, Rows
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.expert import PassedOver, exchanges_in_doubt, mechanisms, recomputation_apart
from bridge_memory.plan.megatron.settings import words_of
from bridge_memory.plan.megatron.space import (
    AXES,
    Space,
    layouts,
    parallel_sizes,
    split_choices,
)
from bridge_memory.plan.reserve import Once, Reserve
from bridge_memory.spec import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError, show
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import StepTime, step_time
from bridge_memory.tapes.context import TRACE_CACHE, settings_of
from bridge_memory.verdict import FRAGMENTATION

if TYPE_CHECKING:
    from bridge_memory.plan.megatron.many import Fitting, Sheet


#: Of its step time what a row may give up for fewer virtual stages: every one is two more messages a microbatch.
FEWER_STAGES = 0.005


class Layouts(Rows[StepTime]):
    """Layouts that fit. Those that differ in their split alone are one choice."""

    def choice(self, number: int) -> object:
        row = self[number]
        p = row.run.parallel
        sizes = p.tp, p.pp, p.cp, p.ep, p.etp, row.run.batch.micro_batch_size
        return sizes, row.run.recompute, words_of(row.run)

    def candidates(self) -> Iterator[tuple[object, int]]:
        """Where nothing but the split varied, every split is a choice."""
        one = next((False for number in range(1, len(self)) if self.choice(number) != self.choice(0)), True)
        yield from ((i, i) for i in range(len(self))) if one else super().candidates()

    def best(self, number: int | None = None) -> tuple[Row[StepTime], ...]:
        """The fastest layout of each choice; where nothing but the split varied, every split."""
        found = super().best(number)
        return found if len(found) > 1 else tuple(self[:number])


class _Listed(Layouts, Listed[StepTime]):
    """Layouts that were evaluated one by one."""


def search(
    space: Space,
    hardware: Hardware,
    *,
    capacity: int,
    outside: Callable[[RunSpec], Range],
    constants: Constants = DEFAULT,
    progress: Callable[[int, int], None] | None = None,
    share: Callable[[float], None] | None = None,
    batched: bool | None = None,
    jobs: int = 1,
    backend: str | None = None,
    cache: str | None = None,
) -> Found:
    """Look at every layout of ``space``. Raises SpecError where the space is empty or no time is known.

    ``capacity``: bytes of the GPU; ``outside``: of a run, what lies outside of torch's allocator; ``progress`` is
    called with how many were evaluated and how many fit, after ``share`` was with the part of the space that was, as
    far as it is known; ``batched``: whether layouts are evaluated as arrays (None:
    where numpy is installed); ``jobs``: processes, of this machine or of ``backend``, a name that joblib knows (-1: all
    there are); ``cache``: a folder that keeps what blocks cost for later searches.
    KeyboardInterrupt ends the search with what was found so far.
    """
    i = space.base.implementation
    if i.torch_layers:
        raise SpecError(
            f"transformer_impl ({i.transformer_impl}) has no layouts of megatron-core; search it under an engine of "
            "its own, `bridge-memory search --engine any`, or use transformer_engine"
        )
    if not any(map(_any_layout, space.each())):
        raise SpecError(f"world_size ({space.num_gpus}) is divided by no layout of the space{_bounds(space)}")
    limit = Limit(capacity, outside)
    report = progress or (lambda looked_at, fitting: None)
    reason = OneByOne.ASKED if batched is False else None if find_spec("numpy") else OneByOne.NUMPY
    if reason is None:
        from bridge_memory.tapes.many import TooLarge

        try:
            with existing_objects_frozen():
                found = _in_batches(space, hardware, limit, constants, report, share, jobs, backend, cache)
            return _as_an_expert(found, space, hardware, limit, constants)
        except TooLarge:
            reason = OneByOne.LARGE
    found = _one_by_one(space, hardware, limit, constants, report, jobs, backend)
    return _as_an_expert(found._replace(one_by_one=reason), space, hardware, limit, constants)


@dataclass(frozen=True)
class _InDomain:
    """A function of a row and the GPUs of an NVLink domain; equal to another of the same."""

    function: Callable[..., Any]
    domain: int

    def __call__(self, row: Row[Any]) -> Any:
        return self.function(row, domain=self.domain)


def _as_an_expert(found: Found, space: Space, hardware: Hardware, limit: Limit, constants: Constants) -> Found:
    """With what stands first as an expert has it: rows that keep the reserve, that no rule refuses, and whose layers
    are split as well as they can be."""
    keeps = Once(Reserve(limit).kept)
    free = "vpp" not in {*space.fixed, *space.ranges, *space.only, *space.without}
    improves = Once(
        partial(_balanced, hardware=hardware, limit=limit, constants=constants, keeps=keeps, interleaves=free)
    )
    return found._replace(
        keeps=keeps, refuses=PassedOver(), improves=None if "split" in space.fixed else improves,
        mechanisms=_InDomain(mechanisms, hardware.domain), alike=recomputation_apart,
        doubt=_InDomain(exchanges_in_doubt, hardware.domain),
    )  # fmt: skip


def _balanced(
    row: Row[StepTime], hardware: Hardware, limit: Limit, constants: Constants,
    keeps: Callable[[Row[StepTime]], bool], interleaves: bool,
) -> Row[StepTime]:  # fmt: skip
    """The row with its layers balanced over its stages, where that is faster and the reserve stays, or as NVIDIA splits
    them; in place of a split that Megatron makes by itself where it saves ``SIMPLER``. With no more virtual stages than
    its time needs and such a split has, where their number is free (``interleaves``)."""
    from bridge_memory.plan.megatron.balance import any_split, balance, default_split, described, with_sizes
    from bridge_memory.plan.megatron.published import PUBLISHED

    p = row.run.parallel
    if p.pp == 1:
        return row

    kept, best = keeps(row), row
    as_it_was = least = row.time.seconds
    free = int(row.headroom / (1 + FRAGMENTATION))
    within = max(described(row.run, hardware).seconds)

    def tried(run: RunSpec, seconds: float) -> bool:
        """Whether it takes less than ``seconds``; then it is the best."""
        nonlocal best, least
        found = _row(run, hardware, limit, constants)
        if not isinstance(found, Row) or found.time.seconds >= seconds or not (keeps(found) or not kept):
            return False
        best, least = found, found.time.seconds
        return True

    def balanced(run: RunSpec, seconds: float, within: float = within) -> bool:
        for capacity in (row.peak + free, row.peak):
            with suppress(SpecError):
                if tried(balance(run, hardware, capacity=capacity, within=within).run, seconds):
                    return True
        return False

    def plain() -> Row[StepTime]:
        """The best, or what is without virtual stages and takes ``SIMPLER`` of its time more at most."""
        if p.vpp > 1 and interleaves:
            enough = least * (1 + SIMPLER)
            with suppress(SpecError):
                run = any_split(row.run, replace(p, virtual_pipeline_model_parallel_size=None))
                usual = default_split(run)
                even = usual is not None and tried(usual, enough)
                balanced(run, least * (1 - SIMPLER) if even else enough, float("inf"))
        return best

    by_hand = p.pipeline_model_parallel_layout is not None
    few = _few_virtual_stages(row) if interleaves else p.vpp
    if few < p.vpp:
        with suppress(SpecError):
            enough = as_it_was * (1 + FEWER_STAGES)
            runs = [
                any_split(row.run, replace(p, virtual_pipeline_model_parallel_size=v)) for v in range(few, p.vpp)
            ]
            even = any(usual is not None and tried(usual, enough) for usual in map(default_split, runs))
            if balanced(runs[0], enough if by_hand and not even else least * (1 - SIMPLER)) or even:
                return plain()
    balanced(row.run, as_it_was * (1 if by_hand else 1 - SIMPLER))
    theirs = PUBLISHED.get(row.run.model.name, {}).get(p.pp * p.vpp)
    if theirs is not None:
        with suppress(SpecError):
            tried(with_sizes(row.run, theirs), least * (1 if by_hand or best is not row else 1 - SIMPLER))
    return plain()


def _few_virtual_stages(row: Row[StepTime]) -> int:
    """The fewest virtual stages, two at least, with which the bubble takes no more than ``FEWER_STAGES`` of the step
    longer: it is shorter by as much as there are virtual stages."""
    v = row.run.parallel.vpp
    longer = row.time.bubble * v
    return next((n for n in range(2, v) if longer / n - row.time.bubble <= FEWER_STAGES * row.time.seconds), v)


def _any_layout(space: Space) -> bool:
    pipelines = dict.fromkeys(sizes.pp for sizes in parallel_sizes(space))
    return any(True for pp in pipelines for _ in split_choices(space, pp))


def _bounds(space: Space) -> str:
    """Of a space without layouts, what narrows it: "; change tensor_model_parallel_size (16) or ..."."""
    p = space.base.parallel
    given = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "ep": p.ep}
    fields = {axis: AXES[axis][0].partition(".")[2] for axis in (*given, "vpp")}
    bounds = [f"{fields[axis]} ({size})" for axis, size in given.items() if axis in space.fixed and size > 1]
    bounds += [
        f"{fields[axis]} ({low if low == high else f'{low} to {high}'})"
        for axis, (low, high) in space.ranges.items() if axis in fields
    ]  # fmt: skip
    return f"; change {' or '.join(bounds)}" if bounds else ""


@dataclass(frozen=True, eq=False)
class _Alone:
    """Layouts that differ in micro batch and recomputation alone, one by one: what each row has beside its run, of what
    does not fit whether it is tight; None where model state alone is too large."""

    base: RunSpec
    hardware: Hardware
    limit: Limit
    constants: Constants

    def __call__(self, task: Sequence[tuple[ParallelSpec, BatchSpec, RecomputeSpec]]) -> list[Any] | None:
        runs = [self.base.with_(parallel=p, batch=b, recompute=r) for p, b, r in task]
        if not self.limit.alone.holds(max(model_state(runs[0]))):
            return None
        found = (_row(run, self.hardware, self.limit, self.constants) for run in runs)
        return [(row.peak, row.stage, row.headroom, row.time) if isinstance(row, Row) else row for row in found]


def _one_by_one(
    space: Space, hardware: Hardware, limit: Limit, constants: Constants, progress: Callable[[int, int], None],
    jobs: int, backend: str | None,
) -> Found:  # fmt: skip
    refused = Refused()
    rows: list[Row[StepTime]] = []
    looked_at = too_large = without_activations = tight = 0
    stopped = False

    def evaluated() -> Iterator[tuple[Sequence[RunSpec], Sequence[Row[StepTime] | bool] | None]]:
        """Some runs, and their rows (of what does not fit, whether it is tight); None: model state alone is more."""
        if jobs == 1 and backend is None:
            for alike in layouts(space, refused):
                if not limit.alone.holds(max(model_state(alike[0]))):
                    yield alike, None
                else:
                    yield from (([run], [_row(run, hardware, limit, constants)]) for run in alike)
            return
        for one in space.each():
            groups = list(layouts(one, refused))
            # Runs are not sent to other processes: their model would be each time.
            tasks = [[(run.parallel, run.batch, run.recompute) for run in alike] for alike in groups]
            work = _Alone(one.base, hardware, limit, constants)
            for alike, found in zip(groups, spread(jobs, work, tasks, backend), strict=True):
                yield alike, found and [
                    values if isinstance(values, bool) else Row(run, *values)
                    for run, values in zip(alike, found, strict=True)
                ]

    try:
        for alike, found in evaluated():
            if found is None:
                without_activations += len(alike)
                continue
            looked_at += len(alike)
            fit = [row for row in found if isinstance(row, Row)]
            tight += found.count(True)
            too_large += len(alike) - len(fit)
            rows += fit
            progress(looked_at + without_activations, len(rows))
    except KeyboardInterrupt:
        stopped = True
    number = looked_at + without_activations
    return Found(_Listed(rows), number, too_large + without_activations, refused, stopped, without_activations, tight)


def _row(run: RunSpec, hardware: Hardware, limit: Limit, constants: Constants) -> Row[StepTime] | bool:
    """One layout; where it does not fit for sure, whether it may."""
    stages = peaks(run)
    stage = max(range(len(stages)), key=lambda i: stages[i].peak_bytes)
    peak = stages[stage].peak_bytes
    left = limit.headroom(run, peak)
    if left.least < 0:
        return left.most >= 0
    return Row(run, peak, stage, left.least, step_time(run, hardware, constants))


# ---- batched ----


def _in_batches(
    space: Space, hardware: Hardware, limit: Limit, constants: Constants, progress: Callable[[int, int], None],
    share: Callable[[float], None] | None, jobs: int, backend: str | None, cache: str | None,
) -> Found:  # fmt: skip
    from bridge_memory.plan.megatron.many import Sheet, fitting

    refused = Refused()
    costs = None
    if cache is not None:
        from bridge_memory.plan.megatron.kept import KeptCosts

        costs = KeptCosts(cache)
    sheets = [Sheet(one) for one in space.each()]
    found: list[tuple[Sheet, Fitting]] = []
    looked_at = without_activations = fit = tight = 0
    stopped = False
    try:
        for through, sheet in enumerate(sheets):
            for done, few in enumerate(fitting(sheet, hardware, constants, limit, refused, jobs, backend, costs), 1):
                found.append((sheet, few))
                looked_at += few.looked_at
                without_activations += few.without_activations
                fit += len(few.peaks)
                tight += few.tight
                if share is not None:
                    share((through + done / len(sheet.pipelines)) / len(sheets))
                progress(looked_at, fit)
            if len(sheets) > 1:
                TRACE_CACHE.forget(settings_of(sheet.base))
                gc.collect()  # what a sheet has worked out holds itself
    except KeyboardInterrupt:
        stopped = True
    make = partial(_row, hardware=hardware, limit=limit, constants=constants)
    rows = _Batched(found, make, cache)
    return Found(rows, looked_at, looked_at - fit, refused, stopped, without_activations, tight)


class _Batched(Layouts):
    """Rows that are made when they are asked for: of a hundred thousand a few are shown."""

    def __init__(
        self, found: Sequence[tuple[Sheet, Fitting]], make: Callable[[RunSpec], Row[StepTime] | bool],
        cache: str | None,
    ) -> None:  # fmt: skip
        """``cache``: the folder that what blocks cost may be from."""
        from bridge_memory.plan.megatron.many import Sorted

        self._cache = cache
        self._sorted, self._make = Sorted(found), make
        self._made: dict[int, Row[StepTime]] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple([self[i] for i in range(*number.indices(len(self)))])
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(number)
        row = self._made.get(number)
        if row is None:
            sheet, few, at = self._sorted.place(number)
            made = self._make(sheet.run(few.pipeline, *map(int, few.places(at))))
            same = isinstance(made, Row) and made.peak == few.peaks[at]
            if not same and self._cache is not None:
                raise SpecError(f"--cache ({show(self._cache)}) has costs that are not those of this model; delete it")
            assert isinstance(made, Row) and same, "an array of peaks is not that of its runs"
            row = self._made[number] = made
        return row

    def choice(self, number: int) -> object:
        sheet, few, at = self._sorted.place(number)
        pipeline, (sizes, batch, recompute) = few.pipeline, map(int, few.places(at))
        return pipeline.pp, sheet.sizes[pipeline.at[sizes]], batch, pipeline.recomputes[recompute], id(sheet)

    def peaks(self) -> Iterable[int]:
        return self._sorted.peaks()

    def seconds(self, number: int) -> float:
        """The step time by which row ``number`` stands where it does."""
        _, few, at = self._sorted.place(number)
        return float(few.seconds[at])
