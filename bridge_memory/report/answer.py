"""The answer in one line: whether a run fits the GPUs asked about, by how much, and which stage decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bridge_memory.decisive import decisive
from bridge_memory.evidence import evidence_of
from bridge_memory.outside.amount import Range
from bridge_memory.report.decided import of_releases
from bridge_memory.report.said import VERDICT_WORDS, names_of
from bridge_memory.report.summary import configuration, host_place
from bridge_memory.report.units import coarser, format_bytes, format_ticks, ticks
from bridge_memory.residual import percent
from bridge_memory.result import OPTIMIZER_STEP, Estimate, StageEstimate
from bridge_memory.verdict import BEST_FIRST, Fit, PeakBand, Verdict, answer, peak_band, within

if TYPE_CHECKING:
    from bridge_memory.job.job import Job

#: Unmodelled features that one line names; the rest are counted.
_FEATURES_NAMED = 2
#: Up to so many GPUs, each is followed by its free or missing memory.
_WITH_BYTES = 3


class Answer(NamedTuple):
    """``verdict``: that of ``verdict.answer``, None without a GPU; ``words``: the line that people read; ``evidence``:
    how accurate predictions of similar measured runs were; ``band``: where 90 % of measured peaks lie where this one is
    predicted, None where too few were measured, and ``band_words``, a sentence of it."""

    verdict: str | None
    words: str
    evidence: str
    band: PeakBand | None
    band_words: str


def answer_of(
    result: Estimate, fits: Sequence[Fit], *, unit: str = "GiB", fix: str = "", jobs: Sequence[Job] = ()
) -> Answer:
    """``unit``: a name of ``units.UNITS``; ``fix``: a change that makes the run fit, in words, appended to the line;
    ``jobs``: the whole job on GPUs of ``fits``, which is the answer where it is worse than that of the step."""
    worse: dict[str, Job] = {}
    if jobs:
        from bridge_memory.job.job import worse_jobs

        worse = {job.gpu.name: job for job in worse_jobs(jobs, fits)}
    verdicts = {fit.gpu: worse[fit.gpu].verdict if fit.gpu in worse else fit.verdict for fit in fits}
    verdict = answer(verdicts.values())
    if len(fits) == 1:
        evidence, band = fits[0].evidence, fits[0].band
    else:
        known = evidence_of(result.run)
        evidence, band = str(known), peak_band(known.band, result.peak_stage.peak_bytes)
    if not fits:
        words = peak_words(result, unit)
    elif len(fits) == 1:
        words = _one_gpu(result, fits[0], unit)
    else:
        by_verdict = []
        for one in BEST_FIRST:
            named = [
                _among_several(result, fit, unit, len(fits) <= _WITH_BYTES, worse.get(fit.gpu))
                for fit in fits if verdicts[fit.gpu] is one
            ]
            if named:
                by_verdict.append(f"{VERDICT_WORDS[one]} {', '.join(named)}")
        words = "; ".join(by_verdict)
    parts = (
        words,
        f"{host_place(result)} {format_bytes(result.host_bytes, unit)} per rank" if result.host_bytes else "",
        f"not modelled: {feature_names(result)}" if result.unmodelled and not _names_features(fits) else "",
    )
    words = "; ".join(filter(None, parts))
    if len(fits) == 1 and worse:
        from bridge_memory.report.phases import worse_than_step

        words = f"{worse_than_step(worse[fits[0].gpu], unit, fix)}; the step alone: {words}"
    elif fix:
        words = f"{words}; {fix}"
    return Answer(verdict, words, evidence, band, _band_words(result, band, unit))


def _band_words(result: Estimate, band: PeakBand | None, unit: str) -> str:
    """"90% band: 45.02 to 46.98 GiB, -2.8 to +1.3% (36 runs, any of Megatron DDP)"."""
    if band is None:
        return "90% band: none, too few runs of its kind were measured"
    modelled = ", of what is modelled" if result.unmodelled else ""
    runs = f"{band.runs} runs{'' if band.of.startswith('of ') else ','} {band.of}"
    return f"90% band: {_span(band, unit)}, {percent(band.low)} to {percent(band.high)}%{modelled} ({runs})"


def _span(band: PeakBand, unit: str) -> str:
    """"45.02 to 46.98 GiB"."""
    least, most = (format_ticks(ticks(nbytes, unit), unit) for nbytes in (band.least_bytes, band.most_bytes))
    return f"{least} to {most} {unit}"


def brief(result: Estimate, fits: Sequence[Fit], answer: Answer, unit: str = "GiB") -> str:
    """The answer with the peak, the precision and the releases that it is for, as one line."""
    about = dict(configuration(result))
    peak = [] if len(fits) == 1 else [peak_words(result, unit)]  # of one GPU the words give it
    band = [] if answer.band is None else [f"90% band {_span(answer.band, unit)}"]
    releases = of_releases(decisive(result), unit)
    return "; ".join((answer.words, *peak, *band, about["precision"], about["releases"], *releases))


def peak_words(result: Estimate, unit: str = "GiB") -> str:
    """"peak 62.59 GiB on stage 0 of 4, in backward"."""
    worst = result.peak_stage
    where = f" on stage {worst.stage} of {len(result.stages)}" if len(result.stages) > 1 else ""
    return f"peak {bounded_peak(result, unit)}{where}, in {phase_words(worst)}"


def phase_words(stage: StageEstimate) -> str:
    """The phase of the stage's peak: "forward", "the optimizer step"."""
    phases = {OPTIMIZER_STEP: "the optimizer step", "overlapped": "overlapped forward and backward"}
    return phases.get(stage.peak_phase, stage.peak_phase)


def bounded_peak(result: Estimate, unit: str) -> str:
    """"12.34 GiB", or its bounds where unmodelled features move it."""
    peak, bounds = result.peak_stage.peak_bytes, result.peak_bounds
    if bounds.least is not None and bounds.most is not None:
        low, high = format_bytes(bounds.least, unit), format_bytes(bounds.most, unit)
        return low if low == high else f"{low} to {high}"
    if bounds.least is not None:
        return f"at least {format_bytes(bounds.least, unit)}"
    if bounds.most is not None:
        return f"at most {format_bytes(bounds.most, unit)}"
    return f"{format_bytes(peak, unit)}, higher or lower"


class FitTicks(NamedTuple):
    """A fit in ticks of a unit (``units.ticks``): ``usable`` = ``peak`` + ``margin`` + ``free``, exactly. ``free`` is
    negative where memory is missing."""

    usable: int
    peak: int
    margin: int
    free: int


def fit_ticks(capacity: int, peak: int, free: int, unit: str, decimals: int | None = None) -> FitTicks:
    """Of bytes. Usable memory, peak and free memory are rounded to nearest; the margin, an allowance, takes the
    difference."""
    usable, highest, left = (ticks(nbytes, unit, decimals) for nbytes in (capacity, peak, free))
    return FitTicks(usable, highest, usable - highest - left, left)


def room_words(capacity: int, peak: int, free: int, where: str = "", unit: str = "GiB") -> tuple[str, str]:
    """("peak 15.0 (stage 1) + margin 3.1 of 79.1 GiB", "61.0 free" or "over by 3.9"), of bytes; they add up as shown.
    ``where``: of the peak."""
    decimals = coarser(unit, free)
    found = fit_ticks(capacity, peak, free, unit, decimals)
    usable, highest, margin, left = (format_ticks(value, unit, decimals) for value in found)
    place = f" ({where})" if where else ""
    room = f"{left} free" if free >= 0 else f"over by {format_ticks(-found.free, unit, decimals)}"
    return f"peak {highest}{place} + margin {margin} of {usable} {unit}", room


def _one_gpu(result: Estimate, fit: Fit, unit: str) -> str:
    """"FITS H100: peak 15.0 + margin 3.1 of 79.1 GiB, 61.0 free"."""
    if fit.lacks:
        return f"DOES NOT FIT {fit.gpu}: it has no {fit.lacks}"
    start = f"{VERDICT_WORDS[fit.verdict]} {fit.gpu}"
    stage = result.stages[fit.peak_stage]
    where = f"stage {stage.stage}, {phase_words(stage)}" if len(result.stages) > 1 else ""
    counted, room = room_words(fit.capacity_bytes, fit.peak_bytes, fit.headroom_bytes, where, unit)
    if fit.verdict is Verdict.UNKNOWN:
        return f"{start}: modelled {counted}; not modelled: {feature_names(result)}"
    if fit.headroom_bytes >= 0 and fit.verdict is Verdict.DOES_NOT_FIT:
        least = format_bytes(result.peak_bounds.least or fit.peak_bytes, unit)
        return f"{start}: modelled {counted}; with what is not modelled the peak is at least {least}"
    if fit.headroom_bytes < 0 and fit.verdict is Verdict.TIGHT:
        best = fit.capacity_bytes - fit.least_bytes
        decimals = coarser(unit, fit.headroom_bytes)
        room += f", at best {format_ticks(ticks(best, unit, decimals), unit, decimals)} free"
    if fit.verdict is Verdict.DOES_NOT_FIT and fit.capacity_bytes < fit.least_bytes < fit.peak_bytes + fit.margin_bytes:
        decimals = coarser(unit, fit.headroom_bytes)
        least = format_ticks(ticks(fit.least_bytes - fit.capacity_bytes, unit, decimals), unit, decimals)
        room = room.replace("over by ", f"over by {least} to ")
    return f"{start}: {counted}, {room}"


def _names_features(fits: Sequence[Fit]) -> bool:
    """Whether ``_one_gpu`` lists the unmodelled features itself."""
    return len(fits) == 1 and fits[0].verdict is Verdict.UNKNOWN and not fits[0].lacks


def _among_several(result: Estimate, fit: Fit, unit: str, with_bytes: bool, worse: Job | None) -> str:
    """A GPU with its free or missing memory, and with its own peak where its generation changes the verdict; with the
    phase that decides where the job is ``worse``."""
    if fit.lacks:
        return f"{fit.gpu} (no {fit.lacks})"
    if worse is not None:
        return f"{fit.gpu} ({worse.tightest.phase})"
    more = fit.peak_bytes - result.peak_stage.peak_bytes  # than on the generation of the estimate
    own = within(Range(fit.least_bytes - more, fit.peak_bytes + fit.margin_bytes - more), fit.capacity_bytes)
    changed = more and (own is Verdict.DOES_NOT_FIT) is not (fit.verdict is Verdict.DOES_NOT_FIT)
    peak = f"peak {format_bytes(fit.peak_bytes, unit)} on this GPU" if changed else ""
    room = ""
    if with_bytes and fit.verdict is not Verdict.UNKNOWN:
        decimals = coarser(unit, fit.headroom_bytes)
        size = f"{format_ticks(ticks(abs(fit.headroom_bytes), unit, decimals), unit, decimals)} {unit}"
        room = f"{size} free" if fit.headroom_bytes >= 0 else f"over by {size}"
    about = ", ".join(filter(None, (peak, room)))
    return f"{fit.gpu} ({about})" if about else fit.gpu


def feature_names(result: Estimate) -> str:
    """Unmodelled features by the field names that their sentences begin with."""
    names = names_of(result.unmodelled)
    more = len(names) - _FEATURES_NAMED
    return ", ".join(names[:_FEATURES_NAMED]) + (f" and {more} more" if more > 0 else "")
