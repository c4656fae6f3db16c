"""The answer in one line: whether a run fits the GPUs asked about, by how much, and which stage decides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.evidence import evidence_of
from bridge_memory.report.units import format_bytes
from bridge_memory.result import OPTIMIZER_STEP, Estimate, StageEstimate
from bridge_memory.verdict import Fit, Verdict, answer, verdict_of
from bridge_memory.workspaces.driver import driver_bytes

#: Names of what is not modelled that one line has room for.
_GAPS_NAMED = 2
#: GPUs up to which each has its bytes beside it.
_WITH_BYTES = 3


class Answer(NamedTuple):
    """``verdict``: as ``gpus.answer`` has it, None without a GPU; ``words``: the line that people read; ``evidence``:
    what stands behind it."""

    verdict: str | None
    words: str
    evidence: str


def answer_of(result: Estimate, fits: Sequence[Fit], *, unit: str = "GiB", fix: str = "") -> Answer:
    """``fix``: what would make it fit, in words, where somebody has looked for it."""
    verdict = answer(fits)
    evidence = evidence_of(result.run, fits[0].gpu_arch if len(fits) == 1 else None)
    if not fits:
        return Answer(None, _sentence(peak_words(result, unit), result), str(evidence))
    if len(fits) == 1:
        words = _of_one(result, fits[0], unit)
    else:
        said = []
        for one, start in _SAID.items():
            named = [_beside(result, fit, unit, len(fits) <= _WITH_BYTES) for fit in fits if fit.verdict is one]
            if named:
                said.append(f"{start} {', '.join(named)}")
        words = _sentence("; ".join(said), result)
    return Answer(verdict, words + (f"; {fix}" if fix else ""), str(evidence))


#: How a verdict on several GPUs begins, the best first.
_SAID = {
    Verdict.FITS: "fits", Verdict.TIGHT: "tight on", Verdict.UNKNOWN: "unknown on",
    Verdict.DOES_NOT_FIT: "does not fit",
}  # fmt: skip


def peak_words(result: Estimate, unit: str = "GiB") -> str:
    """"peak 62.59 GiB on stage 0 of 4, in backward"."""
    worst = result.peak_stage
    where = f" on stage {worst.stage} of {len(result.stages)}" if len(result.stages) > 1 else ""
    return f"peak {bounded_peak(result, unit)}{where}, in {phase_words(worst)}"


def phase_words(stage: StageEstimate) -> str:
    """In what its peak is."""
    phases = {OPTIMIZER_STEP: "the optimizer step", "overlapped": "overlapped forward and backward"}
    return phases.get(stage.peak_phase, stage.peak_phase)


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


def _of_one(result: Estimate, fit: Fit, unit: str) -> str:
    stage = result.stages[fit.peak_stage]
    several = len(result.stages) > 1
    card = f"{fit.gpu} ({format_bytes(fit.capacity_bytes, unit)})"
    if fit.lacks:
        return f"does not fit {fit.gpu}: it has no {fit.lacks}"
    if fit.verdict is Verdict.UNKNOWN:
        return f"unknown whether it fits {card}: not modelled: {gap_names(result)}"
    if fit.verdict is Verdict.DOES_NOT_FIT:
        # What is not modelled may be what does not fit.
        missing = max(-fit.headroom_bytes, 0)
        need = f"{f'stage {stage.stage}' if several else 'it'} needs {format_bytes(missing, unit)} more"
        # Without the margin the peak, and what is said to be missing, puzzle beside the card's bytes.
        less = f"{card[:-1]}, less {format_bytes(fit.margin_bytes, unit)} margin)"
        return _sentence(f"does not fit {less}: {need}" if missing else f"does not fit {card}", result)
    tightest = f"; tightest is stage {stage.stage}, in {phase_words(stage)}" if several else ""
    spare = f"{format_bytes(fit.headroom_bytes, unit)} to spare{tightest}"
    if fit.verdict is Verdict.TIGHT:
        return _sentence(f"tight on {card}: {spare}", result)
    return _sentence(f"fits {card} with {spare}", result)


def _sentence(words: str, result: Estimate) -> str:
    return f"{words}; not modelled: {gap_names(result)}" if result.unmodelled else words


def _beside(result: Estimate, fit: Fit, unit: str, with_bytes: bool) -> str:
    """A card among several, with what is left or missing; with the peak on its own generation where that decides."""
    if fit.lacks:
        return f"{fit.gpu} (no {fit.lacks})"
    own = verdict_of(
        result.peak_bounds, fit.capacity_bytes, result.run.parallel.world_size, driver=driver_bytes(result.run)
    )
    there = f"peak {format_bytes(fit.peak_bytes, unit)} there" if (own is not Verdict.DOES_NOT_FIT) != (
        fit.verdict is not Verdict.DOES_NOT_FIT
    ) else ""
    left = ""
    if with_bytes and fit.verdict is not Verdict.UNKNOWN:
        spare = "to spare" if fit.headroom_bytes >= 0 else "missing"
        left = f"{format_bytes(abs(fit.headroom_bytes), unit)} {spare}"
    more = ", ".join(filter(None, (there, left)))
    return f"{fit.gpu} ({more})" if more else fit.gpu


def gap_names(result: Estimate) -> str:
    """What is not modelled, by the names that its sentences begin with."""
    names = list(dict.fromkeys(str(feature).partition(":")[0] for feature in result.unmodelled))
    more = len(names) - _GAPS_NAMED
    return ", ".join(names[:_GAPS_NAMED]) + (f" and {more} more" if more > 0 else "")
