"""The answer in one line: whether a run fits the GPUs asked about, by how much, and which stage decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.report.gpus import Fit, Verdict, answer
from bridge_memory.report.units import format_bytes
from bridge_memory.result import Estimate, StageEstimate

#: Names of what is not modelled that one line has room for.
_GAPS_NAMED = 2


class Answer(NamedTuple):
    """``verdict``: as ``gpus.answer`` has it, None without a GPU; ``words``: the line that people read."""

    verdict: str | None
    words: str


def answer_of(result: Estimate, fits: Sequence[Fit], *, unit: str = "GiB", fix: str = "") -> Answer:
    """``fix``: what would make it fit, in words, where somebody has looked for it."""
    verdict = answer(fits)
    if not fits:
        return Answer(None, peak_words(result, unit))
    if len(fits) == 1:
        return Answer(verdict, _of_one(result, fits[0], unit) + (f"; {fix}" if fix else ""))
    words = []
    for one, said in _SAID.items():
        named = [_beside(fit, unit) for fit in fits if fit.verdict is one]
        if named:
            words.append(f"{said} {', '.join(named)}")
    if verdict == str(Verdict.UNKNOWN):
        words.append(f"not modelled: {_gaps(result)}")
    return Answer(verdict, "; ".join(words) + (f"; {fix}" if fix else ""))


#: How a verdict on several GPUs begins, the best first.
_SAID = {Verdict.FITS: "fits", Verdict.UNKNOWN: "unknown on", Verdict.DOES_NOT_FIT: "does not fit"}


def peak_words(result: Estimate, unit: str = "GiB") -> str:
    """"peak 62.59 GiB on stage 0 of 4, in backward"."""
    worst = result.peak_stage
    return f"peak {bounded_peak(result, unit)}{_where(result, worst, ' on stage ', f' of {len(result.stages)}')}"


def bounded_peak(result: Estimate, unit: str) -> str:
    """"12.34 GiB", or between what it lies."""
    peak, bounds = result.peak_stage.peak_bytes, result.peak_bounds
    if bounds.least is not None and bounds.most is not None:
        low, high = format_bytes(bounds.least, unit), format_bytes(bounds.most, unit)
        return low if low == high else f"{low} to {high}"
    if bounds.least is not None:
        return f"at least {format_bytes(bounds.least, unit)}"
    if bounds.most is not None:
        return f"at most {format_bytes(bounds.most, unit)}"
    return f"{format_bytes(peak, unit)}, higher or lower"


def _where(result: Estimate, stage: StageEstimate, before: str, after: str = "") -> str:
    phase = stage.peak_phase if stage.peak_phase in ("forward", "backward") else f"the {stage.peak_phase}"
    if stage.peak_phase == "overlapped":
        phase = "overlapped forward and backward"
    return (f"{before}{stage.stage}{after}" if len(result.stages) > 1 else "") + f", in {phase}"


def _of_one(result: Estimate, fit: Fit, unit: str) -> str:
    stage = result.stages[fit.peak_stage]
    card = f"{fit.gpu} ({format_bytes(fit.capacity_bytes, unit)})"
    if fit.lacks:
        return f"does not fit {fit.gpu}: it has no {fit.lacks}"
    if fit.verdict is Verdict.UNKNOWN:
        return f"unknown whether it fits {card}: not modelled are {_gaps(result)}"
    if fit.verdict is Verdict.DOES_NOT_FIT:
        what = f"stage {stage.stage}" if len(result.stages) > 1 else "it"
        return f"does not fit {card}: {what} needs {format_bytes(-fit.headroom_bytes, unit)} more"
    tightest = f"; tightest is{_where(result, stage, ' stage ')}" if len(result.stages) > 1 else ""
    return f"fits {card} with {format_bytes(fit.headroom_bytes, unit)} to spare{tightest}"


def _beside(fit: Fit, unit: str) -> str:
    """A card among several, with what is left or missing."""
    if fit.lacks:
        return f"{fit.gpu} (no {fit.lacks})"
    if fit.verdict is Verdict.UNKNOWN:
        return fit.gpu
    left = format_bytes(abs(fit.headroom_bytes), unit)
    return f"{fit.gpu} ({left} {'left' if fit.headroom_bytes >= 0 else 'missing'})"


def _gaps(result: Estimate) -> str:
    """What is not modelled by the names that its sentences begin with."""
    names = list(dict.fromkeys(str(gap).partition(":")[0] for gap in result.gaps))
    more = len(names) - _GAPS_NAMED
    return ", ".join(names[:_GAPS_NAMED]) + (f" and {more} more" if more > 0 else "")
