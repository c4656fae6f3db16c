"""How well predicted step times rank measured layouts, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from math import ceil
from statistics import fmean, median
from typing import NamedTuple

from bridge_memory.accuracy.throughput import MeasuredRun
from bridge_memory.residual import relative

#: Smallest number of timed layouts for a ranking.
FEWEST_LAYOUTS = 4
#: Measured times that differ by no more are a tie, as in a search (``plan/found.py: TIE``); about the
#: variation between repetitions of a run.
TIED = 0.05


class GroupScore(NamedTuple):
    """One group of layouts of one model, batch and number of GPUs."""

    group: str
    layouts: int
    #: Rank correlation of predicted and measured time.
    spearman: float
    #: Measured time of the layout that is predicted fastest, over the fastest measured, less 1.
    regret: float
    #: (measured - predicted) / measured of the time: the median of the group.
    bias: float
    #: Pairs of layouts whose measured times differ by more than TIED, and how many of them are predicted in order.
    pairs: int
    ordered: int


def score_groups(rows: Iterable[MeasuredRun], predict: Callable[[MeasuredRun], float]) -> list[GroupScore]:
    """Every group with FEWEST_LAYOUTS different layouts or more, the largest first.

    Times are per sequence, since the batch differs inside of some groups. A layout that was measured several times
    counts once, with the mean.
    """
    groups: dict[str, dict[object, tuple[float, list[float]]]] = {}
    for row in rows:
        if row.seconds is None or not row.group:
            continue
        batch = row.run.batch.global_batch_size or 1
        layout = row.run, row.kernels, row.hardware
        _, times = groups.setdefault(row.group, {}).setdefault(layout, (predict(row) / batch, []))
        times.append(row.seconds / batch)
    scores = []
    for group, layouts in groups.items():
        if len(layouts) < FEWEST_LAYOUTS:
            continue
        predicted = [p for p, _ in layouts.values()]
        measured = [fmean(times) for _, times in layouts.values()]
        chosen = measured[min(range(len(predicted)), key=predicted.__getitem__)]
        off = [relative(m, p) or 0.0 for p, m in zip(predicted, measured, strict=True)]
        scores.append(
            GroupScore(
                group, len(layouts), spearman(predicted, measured), chosen / min(measured) - 1, median(off),
                *pairs_in_order(predicted, measured),
            )
        )
    return sorted(scores, key=lambda s: -s.layouts)


class FamilyScore(NamedTuple):
    """How far off the seconds of one model's runs on one GPU are."""

    family: str
    gpu: str
    runs: int
    #: Median and 90th percentile (by nearest rank) of the absolute errors, and median with its sign.
    median: float
    p90: float
    bias: float


def score_families(rows: Iterable[MeasuredRun], predict: Callable[[MeasuredRun], float]) -> list[FamilyScore]:
    """Every model and GPU, by name; errors are (measured - predicted) / measured."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.seconds is not None:
            off = relative(row.seconds, predict(row)) or 0.0
            errors.setdefault((row.family, row.hardware.name), []).append(off)
    scores = []
    for (family, gpu), of_all in sorted(errors.items(), key=lambda item: (item[0][0].lower(), item[0][1])):
        size = sorted(abs(e) for e in of_all)
        tail = size[ceil(0.9 * len(size)) - 1]
        scores.append(FamilyScore(family, gpu, len(of_all), median(size), tail, median(of_all)))
    return scores


class Totals(NamedTuple):
    """Groups taken together."""

    groups: int
    median_spearman: float
    median_regret: float
    #: The 90th percentile, by nearest rank.
    p90_regret: float
    pairs: int
    ordered: int

    def __str__(self) -> str:
        words = (
            f"{self.groups} groups: median Spearman {self.median_spearman:.2f}, median regret "
            f"{self.median_regret:.1%}, 90th percentile {self.p90_regret:.1%}"
        )
        if not self.pairs:
            return words
        return f"{words}; of {self.pairs:,} pairs more than {TIED:.0%} apart {self.ordered / self.pairs:.0%} in order"


def totals(scores: Sequence[GroupScore]) -> Totals | None:
    """None without groups."""
    if not scores:
        return None
    regrets = sorted(s.regret for s in scores)
    return Totals(
        len(scores), median(s.spearman for s in scores), median(regrets), regrets[ceil(0.9 * len(regrets)) - 1],
        sum(s.pairs for s in scores), sum(s.ordered for s in scores),
    )  # fmt: skip


def pairs_in_order(predicted: Sequence[float], measured: Sequence[float]) -> tuple[int, int]:
    """Pairs whose measured times differ by more than TIED, and how many of them are predicted in that order."""
    pairs = ordered = 0
    for (p, fast), (q, slow) in combinations(sorted(zip(predicted, measured, strict=True), key=lambda x: x[1]), 2):
        if slow > fast * (1 + TIED):
            pairs += 1
            ordered += q > p
    return pairs, ordered


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two sequences, equal values sharing the mean of their ranks; 0 where one does not vary."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(x) - 1) / 2
    both = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    spread = sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y)
    return both / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        beyond = at
        while beyond < len(order) and values[order[beyond]] == values[order[at]]:
            beyond += 1
        for i in order[at:beyond]:
            ranks[i] = (at + beyond - 1) / 2
        at = beyond
    return ranks
