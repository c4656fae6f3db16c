"""Errors of predictions: per record and per family, by tier or another grouping.

A record's error is the mean over its ranks of the absolute relative error; a family's is the mean of its records. Bias
is the mean of (measured - predicted) / measured: positive where the estimate is too low. Records that are not training
runs are excluded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bridge_memory.accuracy.predictions import Outcome

#: The two compared figures -> the signed relative error of an outcome.
METRICS: dict[str, Callable[[Outcome], float | None]] = {
    "allocated": lambda o: o.allocated_error,
    "max_allocated": lambda o: o.max_allocated_error,
}


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors over ``count`` records or families, and the signed mean."""

    count: int
    median: float
    p90: float
    worst: float
    bias: float

    def as_json(self) -> dict[str, float | int]:
        return {n: getattr(self, n) for n in ("count", "median", "p90", "worst", "bias")}


@dataclass(frozen=True, slots=True)
class GroupAccuracy:
    """One row of the table. ``per_record`` and ``per_family``: metric -> Errors (absent without data)."""

    group: str
    records: int
    families: int
    ok: int
    per_record: dict[str, Errors]
    per_family: dict[str, Errors]

    def as_json(self) -> dict[str, object]:
        return {
            "group": self.group,
            "records": self.records,
            "families": self.families,
            "ok": self.ok,
            "per_record": {k: v.as_json() for k, v in self.per_record.items()},
            "per_family": {k: v.as_json() for k, v in self.per_family.items()},
        }


def percentile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics; ``values`` need not be sorted."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors:
    """``pairs``: (mean absolute error, mean signed error) of every record or family."""
    absolute = [a for a, _ in pairs]
    return Errors(
        count=len(pairs),
        median=percentile(absolute, 0.5),
        p90=percentile(absolute, 0.9),
        worst=max(absolute),
        bias=sum(s for _, s in pairs) / len(pairs),
    )


def accuracy(group: str, outcomes: Iterable[Outcome]) -> GroupAccuracy:
    """One row over the outcomes with status "ok"; the others are only counted."""
    outcomes = [o for o in outcomes if o.status != "not_a_run"]
    by_record: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_record[o.id].append(o)
    good = {i: rows for i, rows in by_record.items() if all(o.status == "ok" for o in rows)}
    per_record, per_family = {}, {}
    for metric, error in METRICS.items():
        records: dict[str, tuple[float, float]] = {}
        families: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for i, rows in good.items():
            signed = [e for o in rows if (e := error(o)) is not None]
            if signed:
                pair = sum(abs(e) for e in signed) / len(signed), sum(signed) / len(signed)
                records[i] = pair
                families[rows[0].family].append(pair)
        if records:
            per_record[metric] = errors_of(list(records.values()))
            per_family[metric] = errors_of(
                [(sum(a for a, _ in f) / len(f), sum(s for _, s in f) / len(f)) for f in families.values()]
            )
    return GroupAccuracy(
        group, len(by_record), len({o.family for o in outcomes}), len(good), per_record, per_family
    )


def by_group(outcomes: Sequence[Outcome], grouping: str) -> list[GroupAccuracy]:
    """Rows by "tier", "family", "scale", "gpu" or "feature" (a run counts under each of its features)."""
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        if o.status != "not_a_run":
            for name in _names(o, grouping):
                groups[name].append(o)
    return [accuracy(name, groups[name]) for name in sorted(groups)]


def _names(o: Outcome, grouping: str) -> tuple[str, ...]:
    if grouping == "feature":
        return o.features
    if grouping == "scale":
        return (o.scale or "not read",)
    if grouping == "gpu":
        return (o.gpu.split()[0] if o.gpu else "unknown",)
    return (f"tier {o.tier}",) if grouping == "tier" else (o.family,)


def summary(outcomes: Sequence[Outcome]) -> list[GroupAccuracy]:
    """A row per tier and one overall."""
    return [*by_group(outcomes, "tier"), accuracy("all", outcomes)]
