"""Readings and a prediction -> one record by stage, and its table in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.live.cuda import Reading
from bridge_memory.live.prediction import Prediction, StagePrediction, likely_component

GIB = 1 << 30

#: Residual, as a share of what was measured, beyond which a stage gets a line of explanation.
THRESHOLD = 0.10


def stage_records(
    prediction: Prediction | None, readings: Sequence[Reading], moment: str
) -> list[dict[str, Any]]:
    """One record a stage, bytes. Figures are those of the stage's worst rank (highest max_allocated); ``spread``
    is the range of that figure over the stage. Predicted fields are None without a prediction, measured ones
    without a reading."""
    predicted = {s.stage: s for s in prediction.stages} if prediction is not None else {}
    stages = sorted(set(predicted) | {r.stage for r in readings})
    return [_record(stage, predicted.get(stage), [r for r in readings if r.stage == stage], moment) for stage in stages]


def _record(
    stage: int, predicted: StagePrediction | None, readings: list[Reading], moment: str
) -> dict[str, Any]:
    good = [r for r in readings if not r.error]
    record: dict[str, Any] = {"stage": stage, "ranks": len(good)}
    record["failed"] = {str(r.rank): r.error for r in readings if r.error}
    for key in ("static", "activation", "transient", "peak"):
        record[f"predicted_{key}"] = None if predicted is None else getattr(predicted, key)
    measured = ("allocated", "max_allocated", "reserved", "outside", "headroom", "retries", "ooms", "device_total")
    if not good:
        return {**record, **{key: None for key in measured}, "worst_rank": None, "spread": None,
                "compared": None, "expected": None, "measured": None, "residual": None}  # fmt: skip
    worst = max(good, key=lambda r: (r.max_allocated, r.allocated))
    for key in measured:
        record[key] = getattr(worst, key)
    record["headroom"] = min(r.headroom for r in good)
    record["retries"] = max(r.retries for r in good)
    record["worst_rank"] = worst.rank
    record["spread"] = worst.max_allocated - min(r.max_allocated for r in good)
    for key in ("compared", "expected", "measured", "residual", "static_residual"):
        record[key] = None
    if predicted is not None:
        figure, expected = predicted.expected(moment)
        record["compared"], record["expected"] = figure, expected
        record["measured"] = getattr(worst, figure)
        record["residual"] = record["measured"] - expected
        record["static_residual"] = worst.allocated - predicted.static
    return record


def notes(
    prediction: Prediction | None, records: Sequence[dict[str, Any]], threshold: float = THRESHOLD
) -> list[str]:
    """A line for each stage that is beyond ``threshold``, and for each rank whose reading failed."""
    out = []
    for record in records:
        for rank, error in record["failed"].items():
            out.append(f"stage {record['stage']}: rank {rank} has no reading ({error})")
        residual, measured = record["residual"], record["measured"]
        if prediction is None or not measured or residual is None or abs(residual) <= threshold * measured:
            continue
        stage = next(s for s in prediction.stages if s.stage == record["stage"])
        why = likely_component(stage, residual, record["static_residual"], record["spread"])
        out.append(
            f"stage {record['stage']}: {_signed(residual)} GiB ({_percent(residual, measured)}) against the "
            f"prediction, probably {why}"
        )
    return out


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def _signed(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:+.2f}"


def _percent(residual: int | None, measured: int | None) -> str:
    """Of what was measured, as everywhere in this project."""
    return "-" if residual is None or not measured else f"{100 * residual / measured:+.1f} %"


_HEAD = (
    ("", "stage"), ("predicted", "static"), ("", "activ."), ("", "trans."), ("", "peak"), ("torch", "alloc"),
    ("", "max"), ("", "reserved"), ("", "outside"), ("residual", "GiB"), ("", "%"), ("left on", "card"),
    ("worst", "rank"), ("", "spread"), ("", "retries"),
)  # fmt: skip


def text_table(records: Sequence[dict[str, Any]], title: str) -> str:
    """The table; every figure in GiB."""
    rows = [
        (
            str(r["stage"]), _gib(r["predicted_static"]), _gib(r["predicted_activation"]),
            _gib(r["predicted_transient"]), _gib(r["predicted_peak"]), _gib(r["allocated"]), _gib(r["max_allocated"]),
            _gib(r["reserved"]), _gib(r["outside"]), _signed(r["residual"]), _percent(r["residual"], r["measured"]),
            _gib(r["headroom"]), "-" if r["worst_rank"] is None else str(r["worst_rank"]), _gib(r["spread"]),
            "-" if r["retries"] is None else str(r["retries"]),
        )
        for r in records
    ]  # fmt: skip
    grid = [tuple(h[0] for h in _HEAD), tuple(h[1] for h in _HEAD), *rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    return "\n".join([title, *lines])
