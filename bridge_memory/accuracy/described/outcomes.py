"""Figures of described rows beside their predictions, like with like, and their errors by grade and family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridge_memory.accuracy.corpus import RecordLine
from bridge_memory.accuracy.described.figures import Figure, Meaning, figures_of
from bridge_memory.accuracy.described.run import Reading, read_run
from bridge_memory.accuracy.described.setting import card_of
from bridge_memory.accuracy.described.texts import DOUBTED
from bridge_memory.accuracy.described.whole import BEFORE_CAPTURE, captured, predicted
from bridge_memory.accuracy.predictions import peak_after, static_after
from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB
from bridge_memory.estimation import Estimate, StageEstimate, estimate, stage_parts
from bridge_memory.job.job import job_of
from bridge_memory.job.overload import likely_overload
from bridge_memory.outside.amount import Range
from bridge_memory.reserved import sizes_vary, trace_of, why_not
from bridge_memory.residual import relative
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.ranks import stage_of_rank

#: Grade -> how far off a figure may be: of static memory, of a peak, of reserved memory, of what the driver counts. C
#: is rough and has no target; nor has what is outside torch, a part of it.
TARGETS: dict[str, dict[Meaning, float]] = {
    "A": {Meaning.STATIC: 0.005, Meaning.PEAK: 0.02, Meaning.RUN_MAXIMUM: 0.02, Meaning.RESERVED: 0.05,
          Meaning.DRIVER: 0.08},
    "B": {Meaning.STATIC: 0.02, Meaning.PEAK: 0.05, Meaning.RUN_MAXIMUM: 0.05, Meaning.RESERVED: 0.05,
          Meaning.DRIVER: 0.08},
}  # fmt: skip


class Outcome(NamedTuple):
    """One figure of a row beside its prediction.

    ``status``: "counted"; "unmodelled", predicted without what ``unmodelled`` names; "not compared", for ``reason``;
    "unread", no run or no figure, for ``reason``.
    """

    id: str
    family: str
    grade: str
    status: str
    reason: str = ""
    figure: str = ""
    meaning: Meaning | None = None
    rank: int | None = None
    after_step: int = 0
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    #: Of a prediction that is a range, its ends; ``predicted_bytes`` is its middle.
    range_bytes: Range | None = None
    assumptions: tuple[str, ...] = ()
    unmodelled: tuple[str, ...] = ()
    #: Of ``assumptions``, those of the row's own words: what they leave open.
    left_open: tuple[str, ...] = ()

    @property
    def residual(self) -> float | None:
        """Measured minus predicted, over measured; of a range minus its nearer end, 0 inside."""
        if self.range_bytes is None or self.measured_bytes is None:
            return relative(self.measured_bytes, self.predicted_bytes)
        least, most = self.range_bytes
        return relative(self.measured_bytes, min(max(self.measured_bytes, least), most))

    @property
    def inside(self) -> bool | None:
        """Whether the figure lies in the range that is predicted; None where that is one number."""
        if self.range_bytes is None or self.measured_bytes is None:
            return None
        return self.range_bytes.least <= self.measured_bytes <= self.range_bytes.most

    @property
    def doubted(self) -> bool:
        """Whether the source doubts its own words on what ran."""
        return DOUBTED in self.assumptions

    @property
    def within(self) -> bool | None:
        """Whether it meets its grade's target; None without one."""
        target = TARGETS.get(self.grade, {}).get(self.meaning) if self.meaning else None
        return None if target is None or self.residual is None else abs(self.residual) <= target

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(), "meaning": str(self.meaning) if self.meaning else None, "residual": self.residual,
            "within": self.within, "inside": self.inside,
            "range_bytes": None if self.range_bytes is None else list(self.range_bytes),
            "assumptions": list(self.assumptions), "unmodelled": list(self.unmodelled),
            "left_open": list(self.left_open),
        }  # fmt: skip


class Total(NamedTuple):
    """Residuals of a grade or family, of figures of one kind (static memory, peaks, reserved memory ...)."""

    group: str
    kind: str
    figures: int
    rows: int
    within: int
    targets: int
    mean: float
    worst: float
    bias: float


def is_described(rows: Sequence[RecordLine]) -> bool:
    """Whether most of the records are field runs: described in words, with figures as their source gives them."""
    found = sum(_is_described(row.data) for row in rows)
    return bool(rows) and 2 * found >= len(rows)


def _is_described(data: Mapping[str, Any]) -> bool:
    config = data.get("config")
    described = isinstance(config, Mapping) and config.get("kind") == "described"
    return (described or "measured_meaning" in data) and "measured_verbatim" in data and "grade" in data


def outcomes(rows: Sequence[RecordLine]) -> list[Outcome]:
    """Every figure of every row; one outcome for a row that is not read."""
    return [outcome for row in rows for outcome in outcomes_of(row)]


def outcomes_of(row: RecordLine) -> list[Outcome]:
    data = row.data
    name = data.get("id")
    head = Outcome(
        str(name if name is not None else row.where), str(data.get("family") or name or row.where),
        str(data.get("grade") or "not graded"), "unread",
    )  # fmt: skip
    try:
        figures = figures_of(data)
        reading = read_run(data)
        answer = estimate(reading.run)
        card = card_of(data.get("gpu"))
        return [_outcome(head, figure, reading, answer, card) for figure in figures]
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, IndexError) as error:
        known = isinstance(error, SpecError)
        return [head._replace(reason=str(error) if known else f"malformed ({type(error).__name__})")]


def _outcome(head: Outcome, figure: Figure, reading: Reading, answer: Estimate, card: Gpu | None) -> Outcome:
    run = reading.run
    listed = tuple(str(feature) for feature in answer.unmodelled if not feature.outside)
    here = head._replace(
        status="not compared", figure=figure.name, meaning=figure.meaning, rank=figure.rank, after_step=figure.after,
        measured_bytes=figure.nbytes, assumptions=tuple(answer.assumptions), unmodelled=listed,
        left_open=tuple(run.assumptions),
    )  # fmt: skip
    if figure.meaning is None or figure.nbytes is None:
        return here._replace(reason=figure.not_compared)
    stage = _stage(figure, reading, answer)
    of_reserved = figure.meaning is Meaning.RESERVED
    if figure.meaning in _OF_JOB or (of_reserved and captured(run, figure.after)):
        return _of_job(here, figure, stage.stage if of_reserved else _said(figure, reading), answer, card)
    if of_reserved:
        if run.implementation.cuda_graph_impl != "none":  # not captured by then
            run = run.with_fields(cuda_graph_impl="none")
            here = _with_open(here, BEFORE_CAPTURE)
        why = why_not(run)
        if why is not None:
            return here._replace(reason=f"{why}; {_peak(stage, run, figure) / GIB:.2f} GiB are allocated of it")
        first, expandable = figure.after == 1, run.implementation.expandable_segments
        nbytes = trace_of(run, stage.stage, steps=1 if first else None).held(expandable=expandable)
        factor = likely_overload(run)
        if not first and factor > 1 and sizes_vary(run):
            uneven = trace_of(run, stage.stage, factor).held(expandable=expandable)
            here = here._replace(range_bytes=Range(nbytes, max(nbytes, uneven)))
            nbytes = (nbytes + max(nbytes, uneven)) // 2
    elif figure.meaning is Meaning.STATIC:
        nbytes = static_after(stage, run, figure.after) - _freed_by_the_step(stage, run)
    else:
        nbytes = _peak(stage, run, figure)
    return here._replace(status="unmodelled" if listed else "counted", predicted_bytes=nbytes)


#: Figures of a whole job.
_OF_JOB = (Meaning.DRIVER, Meaning.OUTSIDE, Meaning.LOAD)
_NOT_SAID = "which memory it is is not said: between what is allocated and what the driver counts, likely of the load"


def _of_job(here: Outcome, figure: Figure, stage: int | None, answer: Estimate, card: Gpu | None) -> Outcome:
    """A figure beside the range that is predicted of it. What graphs need is modelled here."""
    run = answer.run
    if card is None:
        return here._replace(reason=f"{figure.meaning} memory of a whole job: the GPU is not named")
    try:
        job = job_of(answer, card)
        found = predicted(job, figure, stage)
    except SpecError as error:
        return here._replace(reason=str(error))
    listed = [str(feature) for feature in job.unmodelled if not feature.outside]
    if figure.meaning is Meaning.RESERVED:
        listed += filter(None, [why_not(run.with_fields(cuda_graph_impl="none"))])
    elif figure.meaning is Meaning.DRIVER:
        listed += job.not_modelled
    elif figure.meaning is Meaning.LOAD:
        here = _with_open(here, _NOT_SAID)
    return here._replace(
        status="unmodelled" if listed else "counted", unmodelled=tuple(listed), range_bytes=found,
        predicted_bytes=(found.least + found.most) // 2,
    )  # fmt: skip


def _with_open(here: Outcome, sentence: str) -> Outcome:
    return here._replace(assumptions=(*here.assumptions, sentence), left_open=(*here.left_open, sentence))


def _said(figure: Figure, reading: Reading) -> int | None:
    """The stage that a row or its figure names."""
    if reading.stage is not None or figure.rank is None:
        return reading.stage
    parallel = reading.run.parallel
    return stage_of_rank(parallel, parallel.world_size - 1 if figure.rank < 0 else figure.rank)


def _freed_by_the_step(stage: StageEstimate, run: RunSpec) -> int:
    """Bytes of gradients that DeepSpeed's step frees (``runtime/zero/stage_1_and_2.py: step``); those of other engines
    stay until their trainer clears them."""
    if not run.data_parallel.of_deepspeed:
        return 0
    return stage_parts(run, stage.stage).freed_between_steps


def _peak(stage: StageEstimate, run: RunSpec, figure: Figure) -> int:
    return peak_after(stage, run, 0 if figure.meaning is Meaning.RUN_MAXIMUM else figure.after)


def _stage(figure: Figure, reading: Reading, answer: Estimate) -> StageEstimate:
    """The stage of the figure's rank; of one without a rank that with the highest peak."""
    said = _said(figure, reading)
    return max(answer.stages, key=lambda stage: stage.peak_bytes) if said is None else answer.stages[said]


def like_with_like(found: Sequence[Outcome]) -> Outcome | None:
    """Of one row's figures the highest peak, else reserved, else static memory, that says how far a prediction is off:
    the grade has a target, all is modelled, the prediction is one number, and nobody doubts what ran. None where there
    is none."""
    exact = [o for o in found if o.range_bytes is None and not o.doubted]
    scored = [o for o in exact if o.status == "counted" and o.within is not None]
    for meanings in (_KINDS["peak"], _KINDS["reserved"], _KINDS["static"]):
        some = [o for o in scored if o.meaning in meanings]
        if some:
            return max(some, key=lambda o: o.measured_bytes or 0)
    return None


_KINDS = {
    "static": (Meaning.STATIC,), "peak": (Meaning.PEAK, Meaning.RUN_MAXIMUM), "reserved": (Meaning.RESERVED,),
    **{str(meaning): (meaning,) for meaning in _OF_JOB},
}  # fmt: skip


def totals(found: Sequence[Outcome], by: str = "grade", *, all_predicted: bool = False) -> list[Total]:
    """Errors by ``grade`` or ``family``: of counted figures, or of all that are predicted."""
    answer = []
    chosen = [o for o in found if o.residual is not None and (all_predicted or o.status == "counted")]
    for group in sorted({getattr(o, by) for o in chosen}):
        for kind, meanings in _KINDS.items():
            some = [o for o in chosen if getattr(o, by) == group and o.meaning in meanings]
            errors = [o.residual for o in some if o.residual is not None]
            if errors:
                judged = [o.within for o in some if o.within is not None]
                answer.append(
                    Total(group, kind, len(some), len({o.id for o in some}), sum(judged), len(judged),
                          sum(map(abs, errors)) / len(errors), max(errors, key=abs), sum(errors) / len(errors))
                )  # fmt: skip
    return answer


def share_unread(found: Sequence[Outcome]) -> float:
    """Of all rows."""
    rows = {o.id for o in found}
    return len({o.id for o in found if o.status == "unread"}) / len(rows) if rows else 0.0
