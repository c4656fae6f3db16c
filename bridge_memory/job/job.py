"""A pipeline stage from the start of a job to its checkpoints: what each phase holds, as torch and the driver count it.

Allocated memory of a phase is the sum of its parts. Reserved memory does not fall by itself: what a phase made the
allocator reserve stays, unless its cache is emptied, as Megatron Bridge does once a checkpoint is loaded
(``training/checkpointing.py: _load_checkpoint_from_path``). Memory outside of torch is what exists by then: the
context, communicators that a collective has opened, and buffers of libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from bridge_memory import reserved
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Part, Provenance
from bridge_memory.engines.engine import Phase as StepPhase
from bridge_memory.estimation import estimate
from bridge_memory.evidence import evidence_of
from bridge_memory.job.host import HostMemory, Moment, host_memory
from bridge_memory.job.megatron import building, evaluation, exporting, loading, saving
from bridge_memory.job.megatron.graphs import graphs
from bridge_memory.job.megatron.loading import How
from bridge_memory.job.megatron.to_try import ToTry, to_try
from bridge_memory.job.overload import Overload, likely_overload, overload
from bridge_memory.job.torch import ENGINES as OF_TORCH
from bridge_memory.outside.amount import Amount, Range, exactly, total
from bridge_memory.outside.context import outside
from bridge_memory.outside.phase import Phase
from bridge_memory.result import Estimate
from bridge_memory.spec import CheckpointSpec, RunSpec
from bridge_memory.spec.canonical import adopts_optim_states
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.unmodelled import Unmodelled, bounds
from bridge_memory.verdict import BEST_FIRST, Fit, MemoryLimit, Verdict, fits, reserved_bytes, within
from bridge_memory.workspaces.caching_allocator import Replay, TooManyCalls

SCHEMA = "bridge-memory/job/1"
#: What says that a resume copies Adam's moments.
COPIED_FLAG = "--no-adopt-optim-states"
T = TypeVar("T")
_FROM_TRAINING = (Phase.TRAINING, Phase.EVALUATION, Phase.SAVE, Phase.RESUME)
_FIRST = (StepPhase.FIRST_FORWARD, StepPhase.FIRST_BACKWARD, StepPhase.STEP)


class PhaseMemory(NamedTuple):
    """One phase on a rank of one stage, bytes.

    ``allocated``: the parts at its peak; ``reserved``: with what earlier phases left in the cache; ``outside``: of
    torch's allocator.

    Example:
        >>> from bridge_memory import RunSpec, whole_job
        >>> job = whole_job(RunSpec(model="meta-llama/Llama-3.2-1B"), "H100")
        >>> saved = next(phase for phase in job.phases if phase.phase == "save")
        >>> saved.driver.least == saved.reserved.least + sum(part.least for part in saved.outside)
        True
    """

    phase: Phase
    stage: int
    allocated: tuple[Amount, ...]
    reserved: Range
    outside: tuple[Amount, ...]
    #: Bytes by which 90 % of measured peaks of such runs are at most above the predicted one (``evidence.Band.above``).
    above: int = 0

    @property
    def driver(self) -> Range:
        """What the driver counts: reserved and outside."""
        beyond = total(self.outside)
        return Range(self.reserved.least + beyond.least, self.reserved.most + beyond.most)

    def verdict(self, capacity_bytes: int) -> Verdict:
        """Tight: it fits at the lower end of its range, and not at the upper, or not in the 90 % band."""
        return within(Range(self.driver.least, self.driver.most + self.above), capacity_bytes)

    def worse_than(self, other: PhaseMemory, capacity_bytes: int) -> bool:
        """Whether this phase decides before ``other``: one that does not fit for sure, else the higher one."""
        return self._order(capacity_bytes) > other._order(capacity_bytes)

    def _order(self, capacity: int) -> tuple[bool, int]:
        return self.driver.least > capacity, self.driver.most + self.above

    def as_json(self, capacity_bytes: int) -> dict[str, Any]:
        """By the schema of ``Job.as_json``."""
        return {
            "name": str(self.phase), "stage": self.stage,
            "allocated_bytes": _range(total(self.allocated)), "reserved_bytes": _range(self.reserved),
            "outside_bytes": _range(total(self.outside)), "driver_bytes": _range(self.driver),
            "above_bytes": self.above, "verdict": str(self.verdict(capacity_bytes)),
            "components": [_amount(a) for a in self.allocated], "outside": [_amount(a) for a in self.outside],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A job on one GPU model: of each phase the stage with the highest driver peak, and every stage.

    ``overload``: None where routing does not matter. ``not_modelled``: phases that are left out, and why.

    Example:
        >>> from bridge_memory import RunSpec, whole_job
        >>> run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(adopt_optim_states=False)
        >>> job = whole_job(run, "H200")
        >>> str(job.verdict), str(job.tightest.phase)
        ('does not fit', 'resume')
    """

    gpu: Gpu
    phases: tuple[PhaseMemory, ...]
    stages: tuple[tuple[PhaseMemory, ...], ...]
    overload: Overload | None
    host: HostMemory
    not_modelled: tuple[str, ...]
    #: Why the reserved memory of training was not replayed, storage by storage; "" where it was.
    not_replayed: str
    #: What ``overload`` is solved for.
    limit: MemoryLimit
    #: Host memory of a node, bytes; None: not known.
    host_bytes: int | None = None
    #: What the estimate does not model of the step, and the whole job neither.
    unmodelled: tuple[Unmodelled, ...] = ()
    #: Where a resume does not fit for sure: the option of checkpoints that lowers it most; and whether the job may fit
    #: with it.
    to_try: ToTry | None = None
    enough: bool = False
    #: Overload factor of the upper end of training's reserved memory, where it differs for that; None: it does not.
    uneven: float | None = None
    #: The lower end of training's reserved memory has the allocator return cached memory and try again, which takes
    #: time.
    retries: bool = False
    #: The resume of a trainer that copies Adam's moments, as Megatron-LM does, where the run leaves open who trains
    #: (``CheckpointSpec.adopt_optim_states``); None: it does not, or there is no difference.
    copied: PhaseMemory | None = None

    @property
    def verdict(self) -> Verdict:
        """That of the phase that decides it; unknown where ``unmodelled`` can change it."""
        worst, capacity = self.tightest, self.gpu.capacity_bytes
        return self._judged(worst.driver, worst.verdict(capacity))

    def _judged(self, driver: Range, found: Verdict) -> Verdict:
        return _modelled(found, driver, self.gpu.capacity_bytes, self.unmodelled)

    @property
    def training(self) -> PhaseMemory:
        """Of the stage that decides it."""
        return _training(self.phases)

    @property
    def verdict_of_training(self) -> Verdict:
        """As ``verdict``, of training alone."""
        return self._judged(self.training.driver, self.training.verdict(self.gpu.capacity_bytes))

    def of_step(self, fit: Fit) -> Fit:
        """``fit`` of the same run and GPU, whose margin and verdict are those of training."""
        training, verdict, capacity = self.training, self.verdict_of_training, self.gpu.capacity_bytes
        driver = training.driver
        margin, beyond = driver.most - fit.peak_bytes, total(training.outside)
        outside = min(beyond.most, margin)
        return replace(
            fit, margin_bytes=margin, headroom_bytes=capacity - driver.most, reserved_bytes=margin - outside,
            outside_bytes=outside, outside_least_bytes=min(beyond.least, outside), least_bytes=driver.least,
            replayed=not self.not_replayed, fits=verdict in (Verdict.FITS, Verdict.TIGHT), verdict=verdict,
        )  # fmt: skip

    def running(self, outside: Mapping[int, Range], capacity_bytes: int) -> Job:
        """From training on, on a card of ``capacity_bytes`` where ``outside`` lies beside torch in training, of each
        stage with a reading, bytes. A resume is another start."""
        stages = []
        for stage, phases in enumerate(self.stages):
            known, found = _training(phases).outside, outside.get(stage)
            here = known if found is None else (Amount("outside of torch", *found, Provenance.MEASURED, "the driver"),)
            stages.append(tuple(
                phase if phase.phase is Phase.RESUME
                else phase._replace(outside=(*here, *(a for a in phase.outside if a not in known)))
                for phase in phases if phase.phase in _FROM_TRAINING
            ))  # fmt: skip
        gpu = replace(self.gpu, capacity_bytes=capacity_bytes)
        limit, before = self.limit, total(self.training.outside).most
        worst = _worst(stages, capacity_bytes)
        beyond = limit.outside - before + total(_training(worst).outside).most
        return replace(
            self, gpu=gpu, phases=worst, stages=tuple(stages),
            limit=limit._replace(capacity=capacity_bytes, outside=beyond),
        )  # fmt: skip

    @property
    def host_verdict(self) -> Verdict | None:
        """Whether a node's host memory is enough; None where it is not known."""
        return None if self.host_bytes is None else within(self.host.node, self.host_bytes)

    @property
    def tightest(self) -> PhaseMemory:
        """The phase that decides the verdict, with the highest driver peak; of several the first, whose reserved memory
        later ones keep."""
        capacity = self.gpu.capacity_bytes
        return _first_worst(self.phases, capacity)

    def as_json(self) -> dict[str, Any]:
        """By the schema ``SCHEMA``; ranges are [least, most]."""
        capacity = self.gpu.capacity_bytes
        found = self.overload
        return {
            "schema": SCHEMA, "gpu": self.gpu.name, "capacity_bytes": capacity, "verdict": str(self.verdict),
            "phases": [phase.as_json(capacity) for phase in self.phases],
            "stages": [[phase.as_json(capacity) for phase in phases] for phases in self.stages],
            "overload": None if found is None else {
                "factor": found.factor, "stage": found.stage, "most": found.most, "stages": list(found.stages),
            },
            "host": {
                "stage": self.host.stage, "rank": [_amount(a) for a in self.host.rank],
                "phase": str(self.host.phase), "node_bytes": _range(self.host.node),
                "ranks_of_node": self.host.ranks,
                "capacity_bytes": self.host_bytes, "verdict": self.host_verdict and str(self.host_verdict),
            },
            "not_modelled": list(self.not_modelled), "reserved_replayed": not self.not_replayed,
            "reserved_not_replayed": self.not_replayed,
            "reserved_uneven": self.uneven, "reserved_retries": self.retries,
            "try_first": self.to_try and {
                "phase": str(Phase.RESUME), "flag": self.to_try.flag, "less_bytes": self.to_try.less,
            },
            "resume_copied": self.copied and {"flag": COPIED_FLAG, "phase": self.copied.as_json(capacity)},
        }  # fmt: skip


def _modelled(found: Verdict, driver: Range, capacity: int, unmodelled: Sequence[Unmodelled]) -> Verdict:
    """``found`` of a phase, but unknown where ``unmodelled`` can change it."""
    least, most = bounds(driver.least, unmodelled).least, bounds(driver.most, unmodelled).most
    if found is Verdict.DOES_NOT_FIT:
        certain = least is not None and least > capacity
    else:
        certain = most is not None and most <= max(capacity, driver.most)
    return found if certain else Verdict.UNKNOWN


class Traces:
    """What training of one run asks its allocator for, by stage: one GPU's for all of its generation. A stage that
    asks for too much is not replayed (``workspaces.caching_allocator.TooManyCalls``)."""

    def __init__(self, run: RunSpec) -> None:
        # Pages that a capture empties are returned: what runs beside graphs reserves what it needs (``graphs``).
        self.run = run.with_fields(cuda_graph_impl="none") if run.implementation.expandable_segments else run
        self.why_not = reserved.why_not(self.run) or ""
        self._found: dict[tuple[int, float], Replay] = {}

    def of(self, stage: int, uneven: float = 1.0) -> Replay:
        """Raises TooManyCalls."""
        if (stage, uneven) not in self._found:
            trace = reserved.trace_of(self.run, stage, uneven)
            self._found[stage, uneven] = Replay(trace, expandable=self.run.implementation.expandable_segments)
        return self._found[stage, uneven]


def job_of(result: Estimate, gpu: Gpu, host_bytes: int | None = None, traces: Traces | None = None) -> Job:
    """The job of an estimate, which is of the generation of ``gpu``. ``host_bytes``: of a node; ``traces``: of the same
    run. Raises SpecError."""
    return _through(job_steps(result, gpu, host_bytes, traces))


def _through(steps: Generator[None, None, T]) -> T:
    """What ``steps`` return at their end."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            found: T = done.value
            return found


def jobs_of(
    result: Estimate, fits: Sequence[Fit], host_bytes: int | None = None, cards: Iterable[Gpu] = ()
) -> list[Job]:
    """As ``job_of``, on each GPU of ``fits`` that can compute the run, as its generation does. ``cards``: GPUs that
    ``find_gpu`` may not know by their name."""
    by_arch = {result.run.implementation.gpu_arch: (result, Traces(result.run))}
    given, found = {card.name: card for card in cards}, []
    for fit in fits:
        if fit.lacks:
            continue
        if fit.gpu_arch not in by_arch:
            implementation = replace(result.run.implementation, gpu_arch=fit.gpu_arch)
            changed = estimate(result.run.with_(implementation=implementation))
            by_arch[fit.gpu_arch] = changed, Traces(changed.run)
        of_arch, traces = by_arch[fit.gpu_arch]
        found.append(job_of(of_arch, given.get(fit.gpu) or find_gpu(fit.gpu), host_bytes, traces))
    return found


@lru_cache(maxsize=16)
def whole_on(run: RunSpec, gpu: Gpu) -> tuple[Estimate, list[Fit], list[Job]]:
    """(a run's estimate, its step on a GPU as its job judges it, its job). Raises SpecError."""
    result = estimate(run)
    fitting = fits(result, [gpu])
    jobs = jobs_of(result, fitting, cards=[gpu])
    return result, judged(fitting, jobs), jobs


def whole_fit(run: RunSpec, gpu: Gpu) -> Fit:
    """As ``fits_of_jobs``, of a run on one GPU. Raises SpecError."""
    _, (step,), jobs = whole_on(run, gpu)
    return _with_job(step, jobs)


def judged(fits: Sequence[Fit], jobs: Iterable[Job]) -> list[Fit]:
    """``fits``, those with a job by ``Job.of_step``."""
    by_gpu = {job.gpu.name: job for job in jobs}
    return [by_gpu[fit.gpu].of_step(fit) if fit.gpu in by_gpu else fit for fit in fits]


def worse_jobs(jobs: Iterable[Job], fits: Iterable[Fit]) -> list[Job]:
    """The jobs that are worse than their step, which ``fits`` judges, on the same GPU."""
    step = {fit.gpu: BEST_FIRST.index(fit.verdict) for fit in fits}
    return [job for job in jobs if BEST_FIRST.index(job.verdict) > step[job.gpu.name]]


def fits_of_jobs(result: Estimate, gpus: Sequence[Gpu | str] = ()) -> list[Fit]:
    """The step on each GPU as its job has it, with the verdict of the whole job. None given: the common GPUs. Raises
    SpecError."""
    fitting = fits(result, gpus)
    jobs = jobs_of(result, fitting, cards=[gpu for gpu in gpus if isinstance(gpu, Gpu)])
    return [_with_job(step, [job for job in jobs if job.gpu.name == step.gpu]) for step in judged(fitting, jobs)]


def _with_job(step: Fit, jobs: Iterable[Job]) -> Fit:
    """``step``, which its job has judged, by all phases."""
    worse = worse_jobs(jobs, [step])
    if not worse:
        return step
    (job,) = worse
    decides = str(job.tightest.phase)
    return replace(step, verdict=job.verdict, fits=job.verdict in (Verdict.FITS, Verdict.TIGHT), decided_by=decides)


def job_steps(
    result: Estimate, gpu: Gpu, host_bytes: int | None = None, traces: Traces | None = None
) -> Generator[None, None, Job]:
    """As ``job_of``, in steps: a stage each, and the replay. Other work may be done between two of them."""
    run, capacity = result.run, gpu.capacity_bytes
    stages, every, replayed, not_replayed = yield from _judged_stages(result, gpu, traces)
    training = _training(worst := _worst(every, capacity))
    reasons = () if _of_torch(run) else (
        building.why_not(run) or loading.why_not_resumed(run) or loading.refusal(run), evaluation.why_not(run)
    )  # fmt: skip
    # Of a replayed stage the share that is reserved beyond its peak is known; routing is taken not to change it.
    beyond = total(training.outside).most + stages[training.stage].graphs.most
    peak = total(training.allocated).most
    how = replayed.get(training.stage)
    option = _to_try(run, gpu, worst)
    more = reserved_bytes(peak) if how is None else training.reserved.least - stages[training.stage].graphs.least - peak
    card = MemoryLimit(capacity, beyond, max(0, more) / peak)
    return Job(
        gpu, worst, tuple(every), overload(run, card),
        host_memory(run, node_of(gpu), moments=_host_moments(run, training.stage, result.parameters)),
        tuple(filter(None, reasons)), not_replayed, card, host_bytes,
        tuple(feature for feature in result.unmodelled if not feature.of_job),
        option, option is not None and may_fit(estimate(option.run), gpu),
        None if how is None else how.uneven, how is not None and how.retries, _copied(run, gpu, stages),
    )


def _copied(run: RunSpec, gpu: Gpu, stages: Sequence[_Stage]) -> PhaseMemory | None:
    """``Job.copied``."""
    if _of_torch(run) or run.checkpoint.adopt_optim_states is not None or not adopts_optim_states(run):
        return None
    other, found = run.with_fields(adopt_optim_states=False), list[PhaseMemory]()
    for stage in stages:
        resumed = loading.loading(other, stage.number, How.RESUME)
        if resumed is None or Phase.RESUME not in stage.parts:
            return None
        parts = {Phase.BUILD: stage.parts[Phase.BUILD], Phase.RESUME: resumed}
        found += [phase for phase in _phases(other, gpu, stage._replace(parts=parts)) if phase.phase is Phase.RESUME]
    return _first_worst(found, gpu.capacity_bytes)


def verdict_on(result: Estimate, gpu: Gpu) -> Verdict:
    """``job_of(result, gpu).verdict``, without the rest of the job."""
    _, every, _, _ = _through(_judged_stages(result, gpu, None))
    capacity = gpu.capacity_bytes
    decides = _first_worst(_worst(every, capacity), capacity)
    unmodelled = [feature for feature in result.unmodelled if not feature.of_job]
    return _modelled(decides.verdict(capacity), decides.driver, capacity, unmodelled)


class _Judged(NamedTuple):
    """The stages of a job and their phases; of those replayed, what was found, and why others were not."""

    stages: list[_Stage]
    phases: list[tuple[PhaseMemory, ...]]
    replayed: dict[int, _Replayed]
    not_replayed: str


def _judged_stages(result: Estimate, gpu: Gpu, traces: Traces | None) -> Generator[None, None, _Judged]:
    run, every, stages, capacity = result.run, list[tuple[PhaseMemory, ...]](), list[_Stage](), gpu.capacity_bytes
    share = evidence_of(run, gpu).above
    for each in result.stages:
        stages.append(_stage(result, each.stage, share))
        every.append(tuple(_phases(run, gpu, stages[-1])))
        yield
    traces = Traces(run) if traces is None else traces
    not_replayed, replayed = traces.why_not, dict[int, _Replayed]()
    # A replay lowers the upper end of a stage, below which another may be that is not replayed yet.
    while (training := _training(_worst(every, capacity))).stage not in replayed and not not_replayed:
        calibrated = sum(c.bytes for c in result.stages[training.stage].components if c.part is Part.CALIBRATION)
        room = capacity - total(training.outside).most - stages[training.stage].graphs.most - calibrated
        try:
            found = yield from _replayed(traces, training.stage, room)
        except TooManyCalls as error:
            not_replayed = f"{error}{f' of stage {training.stage}' if len(stages) > 1 else ''}"
            break
        held = total(training.allocated).least
        exact = Range(*(max(held, nbytes + calibrated) for nbytes in found.reserved))
        every[training.stage] = tuple(_phases(run, gpu, stages[training.stage], exact))
        replayed[training.stage] = found
    return _Judged(stages, every, replayed, not_replayed)


def _host_moments(run: RunSpec, stage: int, parameters: int) -> tuple[Moment, ...]:
    """Megatron's loads need no more host memory than its saves, but for one tensor at a time."""
    if _of_torch(run):
        from bridge_memory.job.torch.host import host_moments

        return host_moments(run)
    saved = saving.host_of_saving(run, stage)
    if saved is None:
        return ()
    every, first = exporting.host_of_exporting(run, parameters) if saving.exports(run) else ((), ())
    return (Moment(Phase.SAVE, (*saved, *every), first),)


class _Replayed(NamedTuple):
    """Reserved memory of training on a stage, and how its ends differ, as in ``Job``."""

    reserved: Range
    uneven: float | None = None
    retries: bool = False


def _replayed(traces: Traces, stage: int, room: int) -> Generator[None, None, _Replayed]:
    """At most: with routing as uneven as was seen from scratch, where sizes vary. At least: ``room``, if training
    goes on in it with retries of the allocator."""
    run = traces.run
    replay = traces.of(stage)
    most = least = replay.reserved
    yield
    factor = likely_overload(run)
    if factor > 1 and reserved.sizes_vary(run):
        most = max(most, traces.of(stage, factor).reserved)
    retries = least > room > 0 and replay.fits(room)
    return _Replayed(Range(room if retries else least, most), None if most == least else factor, retries)


@lru_cache(maxsize=256)
def reserved_in_training(run: RunSpec, stage: int) -> Range | None:
    """What training of a stage reserves, with its CUDA graphs, where nothing makes the allocator try again; None where
    it cannot be replayed. Raises SpecError."""
    traces = Traces(run)
    if traces.why_not:
        return None
    more = total(graphs(run, stage) or ())
    try:
        found = _through(_replayed(traces, stage, room=0)).reserved
    except TooManyCalls:
        return None
    return Range(found.least + more.least, found.most + more.most)


def may_fit(result: Estimate, gpu: Gpu, first: int = 0) -> bool:
    """Whether no phase of any stage is certain not to fit, or to fail, as the verdict of ``job_of`` says where
    everything is modelled; stage ``first`` is asked first."""
    run = result.run
    if not _of_torch(run) and loading.refusal(run) is not None:
        return False
    return all(
        phase.driver.least <= gpu.capacity_bytes
        for stage in sorted(range(len(result.stages)), key=lambda stage: stage != first)
        for phase in _phases(run, gpu, _stage(result, stage))
    )


def _to_try(run: RunSpec, gpu: Gpu, phases: Sequence[PhaseMemory]) -> ToTry | None:
    resume = next((phase for phase in phases if phase.phase is Phase.RESUME), None)
    if resume is None or resume.verdict(gpu.capacity_bytes) is Verdict.FITS or _of_torch(run):
        return None
    return to_try(run, resume.stage)


def _worst(stages: Sequence[tuple[PhaseMemory, ...]], capacity: int) -> tuple[PhaseMemory, ...]:
    """Of each phase the stage that decides."""
    return tuple(_first_worst(of, capacity) for of in zip(*stages, strict=True))


def _first_worst(phases: Iterable[PhaseMemory], capacity: int) -> PhaseMemory:
    """The one that does not fit for sure, else the highest; of several the first."""
    found = None
    for phase in phases:
        if found is None or phase.worse_than(found, capacity):
            found = phase
    assert found is not None
    return found


def _training(phases: Sequence[PhaseMemory]) -> PhaseMemory:
    return next(phase for phase in phases if phase.phase is Phase.TRAINING)


def node_of(gpu: Gpu) -> int:
    """GPUs of a node: 4 where a domain of NVLink spans nodes (GB200, GB300), else 8."""
    return 4 if gpu.rates is not None and gpu.rates.domain > 16 else 8


class _Stage(NamedTuple):
    """What one stage holds in every phase that is modelled, in the order of the phases; and what CUDA graphs reserve
    beyond the peak of training."""

    number: int
    parts: dict[Phase, tuple[Amount, ...]]
    graphs: Range
    #: As in ``PhaseMemory``, of training.
    above: int


def _of_torch(run: RunSpec) -> bool:
    return run.data_parallel.engine in OF_TORCH


_Amounts = tuple[Amount, ...] | None


class _Phases(NamedTuple):
    """What the phases beside the step hold on a rank of a stage; None where that is not modelled."""

    build: Callable[[RunSpec, int], _Amounts]
    load: Callable[[RunSpec, int, How], _Amounts]
    evaluate: Callable[[RunSpec, int], _Amounts]
    save: Callable[[RunSpec, int], _Amounts]


_OF_MEGATRON = _Phases(building.building, loading.loading, evaluation.evaluation, saving.saving)


def _phases_of(run: RunSpec) -> _Phases:
    if not _of_torch(run):
        return _OF_MEGATRON
    from bridge_memory.job.torch import building, evaluation, loading, saving

    return _Phases(building.building, loading.loading, evaluation.evaluation, saving.saving)


def _stage(result: Estimate, stage: int, above: float = 0.0) -> _Stage:
    """``above``: the share of a peak that a measured one may be above it."""
    run, of = result.run, result.stages[stage]
    peaks = dict(of.phases)
    first = max(peaks[str(phase)] for phase in _FIRST)
    beside, of_graphs = _beside_steps(run, stage)
    found = {
        **beside, Phase.FIRST_STEP: (exactly("model, activations and temporaries of the first step", first),),
        Phase.TRAINING: tuple(exactly(c.name, c.bytes, c.provenance) for c in of.components),
    }  # fmt: skip
    parts = {phase: amounts for phase in Phase if (amounts := found.get(phase)) is not None}
    return _Stage(stage, parts, of_graphs, int(of.peak_bytes * above))


@lru_cache(maxsize=64)
def _beside_steps(run: RunSpec, stage: int) -> tuple[dict[Phase, _Amounts], Range]:
    """Phases without a step, and what CUDA graphs reserve."""
    usual = CheckpointSpec()
    alike = run if run.checkpoint == usual else run.with_(checkpoint=usual)
    found, of_graphs = _without_checkpoints(alike, stage)
    phases = _phases_of(run)
    more = {Phase.SAVE: phases.save(run, stage), Phase.RESUME: phases.load(run, stage, How.RESUME)}
    return {**found, **more}, of_graphs


@lru_cache(maxsize=64)
def _without_checkpoints(run: RunSpec, stage: int) -> tuple[dict[Phase, _Amounts], Range]:
    """Of ``_beside_steps`` what no option of checkpoints changes."""
    phases = _phases_of(run)
    found = {
        Phase.BUILD: phases.build(run, stage),
        Phase.LOAD: phases.load(run, stage, How.HUGGING_FACE),
        Phase.EVALUATION: phases.evaluate(run, stage),
    }
    return found, total(graphs(run, stage) or ())


def _phases(run: RunSpec, gpu: Gpu, stage: _Stage, replayed: Range | None = None) -> Iterator[PhaseMemory]:
    """``replayed``: reserved bytes of training, where they are known."""
    built = kept = Range(0, 0)  # reserved, by what ran before
    above = 0
    for phase, parts in stage.parts.items():
        least, most = total(parts)
        most += reserved_bytes(most)
        if phase is Phase.FIRST_STEP and replayed is not None:
            most = min(most, max(total(parts).most, replayed.most))  # the first step is replayed too
        if phase is Phase.TRAINING:
            least, most = (least, most) if replayed is None else replayed
            least, most = least + stage.graphs.least, most + stage.graphs.most
            above = stage.above
        before = built if phase is Phase.RESUME else kept  # another start of the job
        above = 0 if phase is Phase.RESUME else above
        found = Range(max(least, before.least), max(most, before.most))
        beyond = (*outside(run, gpu, stage.number, phase), *saving.worker(run, gpu, phase))
        yield PhaseMemory(phase, stage.number, parts, found, beyond, above)
        if phase is Phase.BUILD:
            built = found
        kept = Range(kept.least, found.most) if phase is Phase.LOAD else found


def _range(found: Range) -> list[int]:
    return [found.least, found.most]


def _amount(found: Amount) -> dict[str, Any]:
    return {
        "name": found.name, "bytes": [found.least, found.most], "provenance": str(found.provenance),
        "source": found.source,
    }  # fmt: skip
