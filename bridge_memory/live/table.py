"""Readings and a prediction as one record per stage, and as a plain-text table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.calibration.records import STEADY, PhaseRecord, ReportRecord, StageRecord
from bridge_memory.components import GIB
from bridge_memory.job.job import Job
from bridge_memory.live.cuda import Reading
from bridge_memory.live.prediction import Prediction, StagePrediction, likely_component
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.phase import Phase
from bridge_memory.report import summary
from bridge_memory.report.answer import room_words
from bridge_memory.report.phases import tightest_words
from bridge_memory.residual import SIGN, SIGN_PERCENT, percent, residual
from bridge_memory.spec.unmodelled import bounds
from bridge_memory.verdict import BEST_FIRST, MemoryLimit, Verdict, verdict_of

#: Residual, as a share of what was measured, beyond which a stage gets a line of explanation.
THRESHOLD = 0.10
#: After a verdict that is unknown.
UNDECIDED = "; features that are not modelled decide"


def stage_records(
    prediction: Prediction | None, readings: Sequence[Reading], moment: str
) -> list[StageRecord]:
    """One record per stage. Predicted fields are None without a prediction, measured ones without a reading."""
    predicted = {s.stage: s for s in prediction.stages} if prediction is not None else {}
    stages = sorted(set(predicted) | {r.stage for r in readings})
    return [_record(stage, predicted.get(stage), [r for r in readings if r.stage == stage], moment) for stage in stages]


def _record(stage: int, predicted: StagePrediction | None, readings: list[Reading], moment: str) -> StageRecord:
    good = [r for r in readings if not r.error]
    record = StageRecord(stage=stage, ranks=len(good), failed={str(r.rank): r.error for r in readings if r.error})
    if predicted is not None:
        record = replace(
            record, predicted_static=predicted.static, predicted_activation=predicted.activation,
            predicted_transient=predicted.transient, predicted_peak=predicted.peak,
        )  # fmt: skip
    if not good:
        return record
    worst = max(good, key=lambda r: (r.max_allocated, r.allocated))
    record = replace(
        record, allocated=worst.allocated, max_allocated=worst.max_allocated, reserved=worst.reserved,
        outside=worst.outside, headroom=min(r.headroom for r in good), retries=max(r.retries for r in good),
        ooms=worst.ooms, device_total=worst.device_total, worst_rank=worst.rank,
        spread=worst.max_allocated - min(r.max_allocated for r in good),
    )  # fmt: skip
    if predicted is None:
        return record
    figure, expected = predicted.expected(moment)
    measured = worst.max_allocated if figure == "max_allocated" else worst.allocated
    return replace(
        record, compared=figure, expected=expected, measured=measured,
        residual=residual(measured, expected), static_residual=residual(worst.allocated, predicted.static),
    )  # fmt: skip


def notes(
    prediction: Prediction | None, records: Sequence[StageRecord], threshold: float = THRESHOLD
) -> list[str]:
    """A line for each stage whose residual exceeds ``threshold``, and for each rank whose reading failed."""
    out = []
    for record in records:
        for rank, error in record.failed.items():
            out.append(f"stage {record.stage}: rank {rank} has no reading ({error})")
        if prediction is None or record.residual is None or abs(record.error or 0.0) <= threshold:
            continue
        stage = next(s for s in prediction.stages if s.stage == record.stage)
        why = likely_component(stage, record.residual, record.static_residual or 0, record.spread or 0)
        out.append(
            f"stage {record.stage}: {SIGN} {_signed(record.residual)} GiB "
            f"({percent(record.error)} %), probably {why}"
        )
    return out


def runs_with(prediction: Prediction | None) -> list[str]:
    """One line: the precision and the releases that the prediction is for."""
    run = prediction.run if prediction is not None else None
    return [f"predicted for {summary.runs_with(run)}"] if run is not None else []


def verdict(prediction: Prediction | None, records: Sequence[StageRecord], moment: str) -> list[str]:
    """One line: whether the rest of the job fits the GPUs it runs on, as ``estimate`` judges it; where the GPU is not
    known, whether every predicted peak does. Empty without a prediction or a reading of a GPU."""
    job = _running(prediction, records, moment)
    if prediction is None or job is None:
        return _by_share(prediction, records)
    training, word, card = job.training, job.verdict_of_training, job.gpu.capacity_bytes
    peak = next(s.peak for s in prediction.stages if s.stage == training.stage)
    counted, room = room_words(card, peak, card - training.driver.most, f"stage {training.stage}")
    if word is Verdict.TIGHT and training.driver.most > card:
        room += f", at best {_gib(card - training.driver.least)} free"
    why = UNDECIDED if word is Verdict.UNKNOWN else ""
    words = f"{word}: predicted {counted}, {room}{why}"
    if BEST_FIRST.index(job.verdict) > BEST_FIRST.index(word):
        words = f"{job.verdict}: {tightest_words(job)}; training {words}"
    return [f"verdict: {words}"]


def _running(prediction: Prediction | None, records: Sequence[StageRecord], moment: str) -> Job | None:
    """The rest of the job on these GPUs. Beside torch lies what was read; before steps are steady at least what is
    predicted, as communicators open when they are first used. None where nothing is known."""
    card = min((r.device_total for r in records if r.device_total), default=None)
    job = prediction.job if prediction is not None else None
    if job is None or card is None or any(r.stage >= len(job.stages) for r in records):
        return None
    outside = {r.stage: Range(r.outside, r.outside) for r in records if r.outside is not None}
    if moment != STEADY:
        of_training = [total(phase.outside) for of in job.stages for phase in of if phase.phase is Phase.TRAINING]
        outside = {
            stage: Range(max(found.least, of_training[stage].least), max(found.most, of_training[stage].most))
            for stage, found in outside.items()
        }
    return job.running(outside, card)


def _by_share(prediction: Prediction | None, records: Sequence[StageRecord]) -> list[str]:
    """Of the stage with the least free memory, with a share of its peak for what the allocator reserves beyond it."""
    judged = []
    for record in records:
        peak, card = record.predicted_peak, record.device_total
        if prediction is not None and peak is not None and card:
            outside = record.outside or 0
            left = MemoryLimit(card, outside).headroom(peak)
            word = verdict_of(bounds(peak, prediction.not_modelled), card, Range(outside, outside))
            judged.append((left, record.stage, peak, card, word))
    if not judged:
        return []
    words = {word for *_, word in judged}
    order = (Verdict.DOES_NOT_FIT, Verdict.UNKNOWN, Verdict.FITS)
    answer = next(word for word in order if word in words)
    left, stage, peak, card, _ = min(one for one in judged if one[-1] is answer)
    counted, room = room_words(card, peak, left, f"stage {stage}")
    return [f"verdict: {answer}: predicted {counted}, {room}{UNDECIDED if answer is Verdict.UNKNOWN else ''}"]


def overload_line(prediction: Prediction | None, records: Sequence[StageRecord], moment: str) -> str:
    """Up to which overload factor of routing every stage fits its GPU, beside what lies outside of torch there; ""
    where routing does not matter, or nothing is known. Raises SpecError."""
    from bridge_memory.job.overload import overload

    run = prediction.run if prediction is not None else None
    card = min((r.device_total for r in records if r.device_total), default=None)
    if run is None or card is None:
        return ""
    job = _running(prediction, records, moment)
    found = overload(run, MemoryLimit(card, max(r.outside or 0 for r in records)) if job is None else job.limit)
    if found is None:
        return ""
    if found.any:
        return "routing: fits however tokens are routed"
    if found.factor is None:
        return "routing: does not fit even if it is balanced"
    return f"routing: fits up to an overload factor of {found.factor:.2f} (stage {found.stage})"


def phase_lines(phases: Sequence[PhaseRecord]) -> list[str]:
    """One line: of each phase of the job up to now the most that torch allocated and the driver counted, GiB."""
    most: dict[str, list[int]] = {}
    for phase in phases:
        figures = most.setdefault(" + ".join(phase.phases), [0, 0])
        figures[0] = max(figures[0], phase.allocated[0] if phase.allocated else 0)
        figures[1] = max(figures[1], phase.driver or 0)
    words = [f"{name} {_gib(allocated)} ({_gib(driver)})" for name, (allocated, driver) in most.items() if allocated]
    return [f"phases, GiB allocated (of the driver): {', '.join(words)}"] if words else []


def report_line(report: ReportRecord) -> str:
    """A report in one line, of the stage with the least free memory."""
    known = [r for r in report.stages if r.max_allocated is not None]
    if not known:
        return f"GPU memory at iteration {report.iteration}: no reading"
    tightest = min(known, key=lambda r: (r.headroom if r.headroom is not None else 0, -(r.max_allocated or 0)))
    of = f" of {_gib(tightest.device_total)}" if tightest.device_total else ""
    stage = f"stage {tightest.stage}: " if len(report.stages) > 1 else ""
    words = f"GPU memory at iteration {report.iteration}: {stage}max {_gib(tightest.max_allocated)}{of} GiB"
    if tightest.predicted_peak is not None:
        words += f", predicted {_gib(tightest.predicted_peak)}"
    words += f", {_gib(tightest.headroom)} free"
    if any(r.retries for r in known):
        words += f", {max(r.retries or 0 for r in known)} allocator retries"
    if report.missing_ranks:
        words += f", {len(report.missing_ranks)} ranks without a reading"
    return words


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def _signed(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:+.2f}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


_HEAD = (
    ("", "stage"), ("predicted", "static"), ("", "activ."), ("", "trans."), ("", "peak"), ("torch", "alloc"),
    ("", "max"), ("", "reserved"), ("", "outside"), ("residual", "GiB"), ("", "%"), ("", "free"),
    ("worst", "rank"), ("", "spread"), ("", "retries"),
)  # fmt: skip


def text_table(records: Sequence[StageRecord], title: str) -> str:
    """The table; every figure in GiB."""
    rows = [
        (
            str(r.stage), _gib(r.predicted_static), _gib(r.predicted_activation), _gib(r.predicted_transient),
            _gib(r.predicted_peak), _gib(r.allocated), _gib(r.max_allocated), _gib(r.reserved), _gib(r.outside),
            _signed(r.residual), percent(r.error), _gib(r.headroom), _count(r.worst_rank),
            _gib(r.spread), _count(r.retries),
        )
        for r in records
    ]  # fmt: skip
    grid = [tuple(h[0] for h in _HEAD), tuple(h[1] for h in _HEAD), *rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return "\n".join([f"{title}; residual: {SIGN_PERCENT}", *lines])
