"""Whether a run fits a card: the margin that it needs beyond its peak, the headroom that is left, the verdict.

The peak of an ``Estimate`` is what torch's allocator hands out. A card must hold more than that: the driver's
context and NCCL's buffers lie outside the allocator, and the allocator itself reserves more than it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.rows import common_gpus
from bridge_memory.evidence import Band, evidence_of
from bridge_memory.outside.amount import Range
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.result import Estimate, StagePeak
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import find_gpu, lacks
from bridge_memory.spec.unmodelled import Bounds, bounds
from bridge_memory.workspaces.driver import driver_buffers

#: max_reserved over max_allocated, minus one: the 90th percentile of the 80 ranks in 10 runs on B200 (SimuMax's
#: published measurements, tests/data/measurements/runs.jsonl; median 3.8 %, worst 9.3 %).
FRAGMENTATION = 0.073


class Verdict(str, Enum):
    """Whether a run fits a card.

    Unknown where something that is not modelled decides it. Tight where it fits as predicted, and not where measured
    peaks of such runs may lie (``evidence.Evidence.above``), or not with all that may lie outside of torch.

    Example:
        >>> from bridge_memory import RunSpec, Verdict, estimate, fits
        >>> (fit,) = fits(estimate(RunSpec(model="meta-llama/Llama-3.1-70B")), ["H100"])
        >>> fit.verdict is Verdict.DOES_NOT_FIT
        True
    """

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


BEST_FIRST = (Verdict.FITS, Verdict.TIGHT, Verdict.UNKNOWN, Verdict.DOES_NOT_FIT)


@dataclass(frozen=True, slots=True)
class PeakBand:
    """The band of a predicted peak, bytes; ``low`` to ``of``: the ``evidence.Band`` that it is made of."""

    least_bytes: int
    most_bytes: int
    low: float
    high: float
    runs: int
    of: str


def peak_band(band: Band | None, peak_bytes: int) -> PeakBand | None:
    """``band`` around a peak; None where there is none.

    Example:
        >>> from bridge_memory.evidence import Band
        >>> peak_band(Band(-0.25, 0.2, 40, "all"), 100).most_bytes
        125
    """
    return None if band is None else PeakBand(*band.around(peak_bytes), band.low, band.high, band.runs, band.of)


@dataclass(frozen=True, slots=True)
class Fit:
    """How one GPU takes a run: capacity = peak + margin + headroom, exactly. Bytes.

    ``margin_bytes`` is the most that the run is predicted to need beyond its peak: a tight one may have no headroom.
    ``peak_bytes`` is the highest peak, that of ``peak_stage``, with the workspaces, attention kernels and fp8 layouts
    of ``gpu_arch``, the card's own generation. ``fits``: the verdict is that it does, if tightly. What is not
    modelled is in the verdict and not in the headroom.

    Example:
        >>> from bridge_memory import RunSpec, estimate, fits
        >>> (fit,) = fits(estimate(RunSpec(model="meta-llama/Llama-3.2-1B")), ["H100"])
        >>> fit.capacity_bytes == fit.peak_bytes + fit.margin_bytes + fit.headroom_bytes
        True
    """

    gpu: str
    gpu_arch: str
    capacity_bytes: int
    peak_stage: int
    peak_bytes: int
    margin_bytes: int
    headroom_bytes: int
    fits: bool
    #: What the run needs and the card has not, such as "mxfp8"; then it never fits, and its numbers are those of the
    #: estimate's generation.
    lacks: str = ""
    verdict: Verdict = Verdict.UNKNOWN
    #: How far predictions of measured runs like this one, on such GPUs, were off; in words.
    evidence: str = ""
    #: The two parts of ``margin_bytes``: what the allocator reserves beyond the peak, and what lies outside of it.
    reserved_bytes: int = 0
    outside_bytes: int = 0
    #: ``outside_bytes`` is the most that is predicted outside; this the least, by which it does not fit for sure.
    outside_least_bytes: int = 0
    #: Where 90 % of measured peaks lie where this one is predicted; None where too few runs were measured.
    band: PeakBand | None = None
    #: The least that the driver counts while it trains, by which it does not fit for sure: peak, reserved and outside.
    least_bytes: int = 0
    #: Whether ``reserved_bytes`` are those of a replay of torch's allocator (``job.job``), not a measured share.
    replayed: bool = False
    #: Where another phase of the whole job is worse than training: that phase, whose verdict this is (``fits``).
    decided_by: str = ""

    def step_json(self) -> dict[str, Any]:
        """The step alone, as ``estimate.schema.json`` has it."""
        return {**{k: v for k, v in asdict(self).items() if k != "decided_by"}, "verdict": str(self.verdict)}


def within(needed: Range, capacity: int) -> Verdict:
    """Whether ``capacity`` bytes are enough. Tight: they are at the lower end alone."""
    if needed.most <= capacity:
        return Verdict.FITS
    return Verdict.TIGHT if needed.least <= capacity else Verdict.DOES_NOT_FIT


def reserved_bytes(peak_bytes: int, share: float = FRAGMENTATION) -> int:
    """What the allocator reserves beyond a peak, of which that is the ``share``."""
    return int(peak_bytes * share)


def most_outside(run: RunSpec, gpu: Gpu) -> int:
    """Bytes that lie outside of torch's allocator while a run trains, at most (``outside.context``)."""
    return outside_bytes_of(run, gpu).most


class MemoryLimit(NamedTuple):
    """What a run has to fit, bytes."""

    capacity: int
    #: Of ``capacity``, what lies outside of torch's allocator.
    outside: int = 0
    #: Of a peak, what the allocator reserves beyond it.
    fragmentation: float = FRAGMENTATION

    def headroom(self, peak: int) -> int:
        """What is left beside a peak and its margin; never more of a higher one."""
        return self.capacity - self.outside - peak - reserved_bytes(peak, self.fragmentation)

    def holds(self, peak: int) -> bool:
        """Whether ``peak`` fits with its margin."""
        return self.headroom(peak) >= 0


def headroom(gpu: Gpu, peak_bytes: int, run: RunSpec) -> int:
    """Bytes of ``gpu`` that are left beside a peak of ``run`` and its margin; below zero what is missing."""
    return MemoryLimit(gpu.capacity_bytes, most_outside(run, gpu)).headroom(peak_bytes)


def largest_peak(gpu: Gpu, run: RunSpec) -> int:
    """Bytes: the highest peak of ``run`` that ``gpu`` holds with its margin, within a byte."""
    card = MemoryLimit(gpu.capacity_bytes, most_outside(run, gpu))
    peak = int((card.capacity - card.outside) / (1 + FRAGMENTATION))
    while not card.holds(peak):
        peak -= 1
    return peak


def margin_words(run: RunSpec, fits: Iterable[Fit], shown: Callable[[int], str]) -> tuple[str, ...]:
    """How the margin is made, for people, a line for each part; ``shown``: bytes as they read them."""
    fits = list(fits)
    more = "".join(f", {shown(found.nbytes)} {found.of} included" for found in driver_buffers(run))
    outside = "; ".join(f"{fit.gpu} {shown(fit.outside_least_bytes)} to {shown(fit.outside_bytes)}" for fit in fits)
    share = (
        f"margin, reserved: {FRAGMENTATION:.1%} of the peak for fragmentation (measured: 90th percentile of reserved "
        "over allocated, 80 ranks on B200)"
    )
    replayed = ", ".join(f"{fit.gpu} {shown(fit.reserved_bytes)}" for fit in fits if fit.replayed)
    others = f"; of other GPUs {share.removeprefix('margin, reserved: ')}" * any(not fit.replayed for fit in fits)
    return (
        "allocated: the 90% band of the peak",
        f"margin, reserved: training's allocations replayed, the most: {replayed}{others}" if replayed else share,
        f"margin, outside of torch, the most: CUDA context, NCCL, buffers of libraries: {outside}{more}",
        "tight: fits as predicted, not at the upper end of the band, of what is reserved, or of what lies outside",
    )


def fits(result: Estimate, gpus: Sequence[Gpu | str] = ()) -> list[Fit]:
    """Whether the peak of a run fits some GPUs, with a margin that is a measured share of it; ``job.job`` judges by the
    replayed allocator and the whole job.

    A GPU of another generation than that of ``result`` is judged by the peaks of the same run on its own. One that
    cannot compute the run fits nothing, whatever its memory. Raises SpecError.
    """
    if isinstance(gpus, (str, Gpu)):
        raise SpecError(f"gpus ({show(gpus)}) is one GPU; give a list of them")
    if not isinstance(gpus, Sequence):
        raise SpecError(f"gpus ({show(gpus)}) is no list of GPUs; give one")
    by_arch: dict[str, StagePeak | None] = {result.run.implementation.gpu_arch: _worst(result)}
    out = []
    for gpu in [gpu if isinstance(gpu, Gpu) else find_gpu(gpu) for gpu in gpus] or common_gpus():
        missing, arch = lacks(gpu, result.run.precision), gpu.arch or result.run.implementation.gpu_arch
        if not missing and arch not in by_arch:
            by_arch[arch] = _worst_on(arch, result)
        worst = _worst(result) if missing else by_arch[arch]
        if worst is None:
            missing, worst = "attention kernel", _worst(result)
        assert worst is not None
        outside, more = outside_bytes_of(result.run, gpu), reserved_bytes(worst.peak_bytes)
        capacity, margin = gpu.capacity_bytes, outside.most + more
        of_peak = bounds(worst.peak_bytes, result.not_modelled)
        verdict, evidence = Verdict.DOES_NOT_FIT, evidence_of(result.run, gpu)
        if not missing:
            verdict = verdict_of(of_peak, capacity, outside, evidence.above)
        out.append(
            Fit(
                gpu.name, result.run.implementation.gpu_arch if missing else arch, capacity, worst.stage,
                worst.peak_bytes, margin, capacity - worst.peak_bytes - margin,
                verdict in (Verdict.FITS, Verdict.TIGHT), missing, verdict, str(evidence),
                more, outside.most, outside.least,
                peak_band(evidence.band, worst.peak_bytes), worst.peak_bytes + more + outside.least,
            )
        )  # fmt: skip
    return out


def _worst(result: Estimate) -> StagePeak:
    stage = result.peak_stage
    return StagePeak(stage.stage, stage.static_bytes, stage.peak_bytes)


def _worst_on(arch: str, result: Estimate) -> StagePeak | None:
    """The highest peak of the run on another generation; None where its attention has no kernel there."""
    from bridge_memory.estimation import peaks

    implementation = result.run.implementation
    try:
        run = result.run.with_(implementation=replace(implementation, gpu_arch=arch))
    except SpecError:
        return None
    return max(peaks(run), key=lambda stage: stage.peak_bytes)


def verdict_of(peak: Bounds, capacity_bytes: int, outside: Range, band: float = 0.0) -> Verdict:
    """Whether a card takes a peak that lies within ``peak``, with the margin. ``outside``: bytes outside of torch's
    allocator; ``band``: the share of a prediction by which a measured peak may be higher (``Evidence.above``)."""
    sure, lucky = (MemoryLimit(capacity_bytes, nbytes) for nbytes in (outside.most, outside.least))
    if peak.most is not None and lucky.holds(peak.most):
        return Verdict.FITS if sure.holds(peak.most + int(peak.most * band)) else Verdict.TIGHT
    if peak.least is not None and not lucky.holds(peak.least):
        return Verdict.DOES_NOT_FIT
    return Verdict.UNKNOWN


def answer(of_cards: Iterable[Verdict]) -> str | None:
    """One word for some cards: their verdict where they share it, "unknown" where it is that of any, "tight" where it
    is tight on some and fits the others, else "fits on some"; None for no card."""
    verdicts = set(of_cards)
    if Verdict.UNKNOWN in verdicts:
        return str(Verdict.UNKNOWN)
    if verdicts == {Verdict.FITS, Verdict.TIGHT}:
        return str(Verdict.TIGHT)
    return str(*verdicts) if len(verdicts) == 1 else "fits on some" if verdicts else None
