"""What a run has to recompute or offload to fit a GPU in the least time, while its layout stays.

Three settings of megatron-core, each in every value: recomputation (nothing, a set of modules, the first k layers of
every virtual stage, every layer), the modules whose saved tensors go to host memory (``offload_modules``), and how much
of the optimizer is there (``optimizer_offload_fraction``, in tenths). The combinations are finite and all are
evaluated, so that the first row is their optimum. Groups of several layers (uniform with more than one) are not among
them. Nor is full recomputation with offloaded modules: megatron-core pairs what a forward pass sends with the backward
pass that takes it back, and a layer that runs again sends in the middle of backward (Megatron-LM pull request 6429).

How much of the optimizer is offloaded changes neither what passes keep nor how long they take, so that the peaks of
all fractions follow from those of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

from bridge_memory.estimation import StagePeak, peaks
from bridge_memory.inventory.layer import layer_block
from bridge_memory.outside.amount import Range
from bridge_memory.plan.found import CANDIDATES, Found, Limit, Ranked, Refused, Row, Rows
from bridge_memory.plan.megatron.space import AXES, Space, recomputations
from bridge_memory.plan.reserve import Reserve
from bridge_memory.releases import OFFLOADS_BY_MODULE
from bridge_memory.spec import RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.layout import layout
from bridge_memory.spec.parts import MEGATRON_ENGINES, OFFLOAD_MODULES
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import StepTime, step_time
from bridge_memory.tapes.context import context_of

#: What varies, and the "group.field" of each.
VARIED: dict[str, tuple[str, ...]] = {
    "recompute": AXES["recompute"],
    "offload": ("implementation.offload_modules",),
    "optimizer": (
        "optimizer.optimizer_cpu_offload", "optimizer.optimizer_offload_fraction",
        "optimizer.use_precision_aware_optimizer",
    ),
}  # fmt: skip
#: Shares of the optimizer in host memory.
FRACTIONS = tuple([n / 10 for n in range(1, 11)])


def changed_fields(before: RunSpec, after: RunSpec) -> dict[str, Any]:
    """"group.field" -> value in ``after``, of what varies and differs."""
    found = {}
    for name in (name for names in VARIED.values() for name in names):
        group, _, field = name.partition(".")
        value = getattr(getattr(after, group), field)
        if value != getattr(getattr(before, group), field):
            found[name] = value
    return found


class Fitted(Found):
    """What ``fit`` found: rows are choices, and ``ranked`` is exact.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, fit
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2))
        >>> found = fit(run, gpu="H100")
        >>> found.ranked(1).rows[0].run.parallel == run.parallel
        True
        >>> found.lowest.peak <= min(found.rows.peaks())
        True
    """

    __slots__ = ()

    @property
    def lowest(self) -> Row[StepTime]:
        """The choice with the lowest peak of all, whether it fits or not."""
        assert isinstance(self.rows, _Choices)
        return self.rows.lowest()

    def ranked(self, number: int) -> Ranked:
        """The fastest row that keeps the reserve and whose whole job is ``certain`` to fit, of the first
        ``CANDIDATES``, else what ``led`` puts first; and those that take more time for a lower peak. After them those
        that are faster and are not certain, then tight ones; all of these where none keeps the reserve."""
        keeping: list[Row[Any]] = []
        uncertain: list[Row[Any]] = []
        tight: list[Row[Any]] = []
        for row in self.rows:
            if len(keeping) == number:
                break
            lowest = keeping or uncertain
            if lowest and row.peak >= lowest[-1].peak:
                continue
            if self.keeps is not None and not self.keeps(row):
                if not lowest and (not tight or row.peak < tight[-1].peak):
                    tight.append(row)
            elif keeping or self.certain(row):
                keeping.append(row)
            else:
                uncertain.append(row)
                if len(uncertain) == CANDIDATES:
                    keeping, uncertain = self.led(uncertain, uncertain)
        if not keeping and uncertain:
            keeping, uncertain = self.led(uncertain, uncertain)
        return Ranked((*keeping, *uncertain, *tight)[:number], min(len(keeping), number))

    def best(self, number: int | None = None) -> tuple[Row[Any], ...]:
        """As ``ranked``."""
        return self.ranked(len(self.rows) if number is None else number).rows


def fit(
    run: RunSpec, hardware: Hardware, *, capacity: int, outside: Callable[[RunSpec], Range],
    vary: Iterable[str] = tuple(VARIED), progress: Callable[[int, int], None] | None = None,
    share: Callable[[float], None] | None = None,
) -> Fitted:  # fmt: skip
    """Every choice for ``run`` that fits, the fastest first. ``vary``: of ``VARIED``; the others stay. Other arguments
    as for ``search``; KeyboardInterrupt ends it likewise. Raises SpecError for another engine and for what is not in
    ``VARIED``."""
    if (engine := run.data_parallel.engine) not in MEGATRON_ENGINES:
        raise SpecError(
            f"engine ({engine}) has no recomputation of Megatron's; use `bridge-memory whatif`"
            + " or `bridge-memory fit --engine fsdp2`" * (engine == "fsdp2")
        )
    if unknown := set(vary) - VARIED.keys():
        raise SpecError(f"vary ({', '.join(sorted(unknown))}) is none of {', '.join(VARIED)}; name some of these")
    refused, limit = Refused(), Limit(capacity, outside)
    choices = [_evaluated(run, hardware, limit)]
    fitting, stopped = 0, False
    try:
        for each, part in _of_passes(run, vary, refused):
            choices.append(_evaluated(each, hardware, limit))
            fitting += limit.headroom(each, max(stage.peak_bytes for stage in choices[-1].stages)).least >= 0
            if share is not None:
                share(part)
            if progress is not None:
                progress(len(choices), fitting)
    except KeyboardInterrupt:
        stopped = True
    shares = [_share(run, after, hardware, choices) for after in _of_the_optimizer(run, vary, refused)]
    rows = _Choices(choices, shares, limit)
    number = len(choices) * len(shares)
    return Fitted(rows, number, number - len(rows), refused, stopped, tight=rows.tight, keeps=Reserve(limit).kept)


# ---- what varies ----


def _of_passes(run: RunSpec, vary: Iterable[str], refused: Refused) -> Iterator[tuple[RunSpec, float]]:
    """(``run`` with every other recomputation and set of offloaded modules, the part of them that is done)."""
    own = run.implementation.offload_modules
    every = list(dict.fromkeys([run.recompute, *(_recomputations(run) if "recompute" in vary else ())]))
    for number, recompute in enumerate(every, 1):
        for modules in [own, *_sets(run)] if "offload" in vary else [own]:
            if modules and recompute.granularity == "full":
                continue
            try:
                found = run.with_fields(recompute=recompute, offload_modules=modules)
            except SpecError as error:
                refused.add(error)
                continue
            if found != run and (modules == own or not _idle(found)):
                yield found, number / len(every)


def _recomputations(run: RunSpec) -> Iterator[RecomputeSpec]:
    """Those of a search, and the first k layers for every k below the layers of the largest virtual stage."""
    p = run.parallel
    yield from recomputations(Space(run, p.world_size, 1, frozenset(), exhaustive=True), p.pp * p.vpp)
    most = max(shape.num_layers for stage in layout(run.model, p).shapes(run.model) for shape in stage)
    for number in range(max(1, run.model.num_layers // (p.pp * p.vpp)), most):
        yield replace(run.recompute, granularity="full", method="block", num_layers=number)


def _sets(run: RunSpec) -> Iterator[tuple[str, ...]]:
    """Sets of modules to offload."""
    yield ()
    i = run.implementation
    if i.te and not i.cpu_offloading_num_layers and OFFLOADS_BY_MODULE(i):
        for number in range(1, len(OFFLOAD_MODULES) + 1):
            yield from combinations(OFFLOAD_MODULES, number)


def useful_offloads(run: RunSpec) -> tuple[tuple[str, ...], ...]:
    """Each module that sends anything to host memory, alone, and all of these together."""
    if not any(_sets(run)):
        return ()
    plain = run.with_fields(offload_modules=(), **dict.fromkeys(AXES["recompute"][:3]))
    alone = []
    for module in OFFLOAD_MODULES:
        with suppress(SpecError):
            if any(_sent(plain.with_fields(offload_modules=(module,)))):
                alone.append(module)
    return (*((module,) for module in alone), *([tuple(alone)] if len(alone) > 1 else []))


def _idle(run: RunSpec) -> bool:
    """Whether a module can be left out of those offloaded and as many bytes are. A tensor goes to host memory if every
    operation that saves it is in a module that does: fewer modules with as many bytes send the same tensors."""
    i = run.implementation
    if not i.offload_modules or i.overlap_moe_expert_parallel_comm:  # whose buffers depend on the modules too
        return False
    sent = _sent(run)
    for module in i.offload_modules:
        try:
            fewer = run.with_fields(offload_modules=tuple(m for m in i.offload_modules if m != module))
        except SpecError:
            continue
        if _sent(fewer) == sent:
            return True
    return False


def _sent(run: RunSpec) -> list[int]:
    """Bytes that a layer of each kind sends to host memory."""
    ctx, depth = context_of(run), run.model.mtp_layer
    kinds = dict.fromkeys((*run.model.layers, *((depth,) if depth else ())))
    return [layer_block(kind, ctx).cost.offloaded for kind in kinds]


def _of_the_optimizer(run: RunSpec, vary: Iterable[str], refused: Refused) -> Iterator[RunSpec]:
    """``run`` with every share of its optimizer in host memory; itself first. Megatron-LM's arguments ask for a
    precision-aware optimizer, which is Adam's, and no fp8 parameters but with delayed scaling
    (``training/arguments.py: validate_args``)."""
    yield run
    o, s = run.optimizer, run.precision
    if "optimizer" not in vary:
        return
    if o.optimizer_cpu_offload:
        yield run.with_fields(optimizer_cpu_offload=False)
    if s.fp8_param and s.fp8_recipe != "delayed":
        return
    for fraction in FRACTIONS:
        try:
            found = run.with_fields(
                optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, use_precision_aware_optimizer=True
            )
        except SpecError as error:
            refused.add(error)
            return
        if found != run:
            yield found


# ---- what each takes ----


class _Choice(NamedTuple):
    """A recomputation and a set of offloaded modules, with the optimizer as it is given."""

    run: RunSpec
    stages: tuple[StagePeak, ...]
    time: StepTime
    outside: Range


def _evaluated(run: RunSpec, hardware: Hardware, limit: Limit) -> _Choice:
    return _Choice(run, peaks(run), step_time(run, hardware, DEFAULT), limit.outside(run))


class _Share(NamedTuple):
    """What a share of the optimizer in host memory changes."""

    fields: dict[str, Any]
    #: Bytes of every stage; None: not the same for every choice.
    more: tuple[int, ...] | None
    #: Seconds of the optimizer's step.
    seconds: float


def _share(run: RunSpec, after: RunSpec, hardware: Hardware, choices: Sequence[_Choice]) -> _Share:
    """A stage's peak is the higher one of its passes and of the optimizer's step. Where the choice with the lowest
    passes has a peak that changes by as much as the static memory, so do those of all others."""
    fields = changed_fields(run, after)
    if not fields:
        return _Share({}, tuple(0 for _ in choices[0].stages), choices[0].time.optimizer)
    static = [stage.static_bytes for stage in peaks(after)]
    more = tuple([new - old.static_bytes for new, old in zip(static, choices[0].stages, strict=True)])
    lowest = {min(range(len(choices)), key=lambda c: _beyond_static(choices[c], s)) for s in range(len(more))}
    alike = all(
        new.peak_bytes == old.peak_bytes + change
        for number in lowest
        for new, old, change in zip(
            peaks(choices[number].run.with_fields(**fields)), choices[number].stages, more, strict=True
        )
    )
    return _Share(fields, more if alike else None, step_time(after, hardware, DEFAULT).optimizer)


def _beyond_static(choice: _Choice, stage: int) -> int:
    return choice.stages[stage].peak_bytes - choice.stages[stage].static_bytes


class _Entry(NamedTuple):
    """A choice with a share, in numbers; the order is that of rows."""

    seconds: float
    peak: int
    modules: int
    choice: int
    share: int
    stage: int
    headroom: int


class _Choices(Rows[StepTime]):
    """Choices that fit; their runs are made when they are asked for."""

    def __init__(self, choices: Sequence[_Choice], shares: Sequence[_Share], limit: Limit) -> None:
        self._choices, self._shares, self._limit = choices, shares, limit
        #: How many do not fit for sure, and do with the least that may lie outside of torch.
        self.tight = 0
        self._lowest: _Entry | None = None
        self._entries: list[_Entry] = []
        self._made: dict[int, Row[StepTime]] = {}
        for c in range(len(choices)):
            for s in range(len(shares)):
                entry, most = self._entry(c, s)
                if self._lowest is None or entry.peak < self._lowest.peak:
                    self._lowest = entry
                if entry.headroom >= 0:
                    self._entries.append(entry)
                else:
                    self.tight += most >= 0
        self._entries.sort()

    def _entry(self, c: int, s: int) -> tuple[_Entry, int]:
        """(a choice with a share, what it leaves of the GPU at most)."""
        choice, share = self._choices[c], self._shares[s]
        if share.more is None:
            found = [stage.peak_bytes for stage in peaks(choice.run.with_fields(**share.fields))]
        else:
            found = [stage.peak_bytes + more for stage, more in zip(choice.stages, share.more, strict=True)]
        peak = max(found)
        least, most = (self._limit.alone._replace(outside=nbytes).headroom(peak) for nbytes in reversed(choice.outside))
        seconds = choice.time._replace(optimizer=share.seconds).seconds
        modules = len(choice.run.implementation.offload_modules)
        return _Entry(seconds, peak, modules, c, s, found.index(peak), least), most

    def _row(self, entry: _Entry) -> Row[StepTime]:
        choice, share = self._choices[entry.choice], self._shares[entry.share]
        run = choice.run.with_fields(**share.fields) if share.fields else choice.run
        return Row(run, entry.peak, entry.stage, entry.headroom, choice.time._replace(optimizer=share.seconds))

    def lowest(self) -> Row[StepTime]:
        assert self._lowest is not None, "a run has itself as a choice"
        return self._row(self._lowest)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return tuple([self[i] for i in range(*number.indices(len(self)))])
        entry = self._entries[number]
        number %= len(self._entries)
        if number not in self._made:
            self._made[number] = self._row(entry)
        return self._made[number]

    def choice(self, number: int) -> object:
        entry = self._entries[number]
        return entry.choice, entry.share

    def peaks(self) -> Iterable[int]:
        return [entry.peak for entry in self._entries]
