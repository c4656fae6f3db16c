"""Fits the constants of the time model to measured layouts, and predicts groups that were left out of the fit.

What is minimised: the squared spread of log(predicted / measured) inside of a group and three tenths of its squared
bias, of a single layout its squared bias, and a weak pull to ``STARTING_POINT``, so that what the data does not
determine stays put. The search goes constant by constant and needs nothing but Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import log, sqrt
from statistics import fmean, median

from bridge_memory.accuracy.ranking import FEWEST_LAYOUTS, FamilyScore, GroupScore, score_families, score_groups
from bridge_memory.accuracy.throughput import MeasuredRun
from bridge_memory.spec import SpecError
from bridge_memory.speed.constants import FITTED_ON, NOT_FITTED, STARTING_POINT, Constants
from bridge_memory.speed.megatron.step_time import Step

#: Shares of a peak rate, and the most that one can be: products draw more power than a card sustains at its peak rate,
#: and memory refreshes and turns round.
SHARES, MOST = (
    "network", "network_exchange", "efa_exchange", "nvlink", "nvlink_sharp", "memory", "attention",
    "gemm_ampere", "gemm_hopper", "gemm_blackwell", "gemm_blackwell_ultra",
), 0.85  # fmt: skip
#: What the fit moves.
FITTED = tuple([name for name in Constants._fields if name not in NOT_FITTED])
#: Bound of a logarithmic error: a larger one (a faulty node, a misread run) counts as this.
WORST = 0.5
#: Sweeps over all constants after which the loss hardly moves.
ROUNDS = 6


class Fit:
    """The rows to fit, each with its work computed once."""

    def __init__(self, rows: Sequence[MeasuredRun]) -> None:
        self._groups: dict[str, list[tuple[MeasuredRun, Step]]] = {}
        for row in rows:
            if row.seconds is not None:
                step = Step(row.run, row.hardware, kernels=row.kernels)
                self._groups.setdefault(row.group, []).append((row, step))

    def loss(self, constants: Constants) -> float:
        """The minimised loss."""
        total = 0.0
        for members in self._groups.values():
            errors = [log(step.at(constants).seconds / (row.seconds or 1.0)) for row, step in members]
            middle = median(errors)
            spread = fmean(min(abs(e - middle), WORST) ** 2 for e in errors)
            if len(members) > 1:
                total += sqrt(len(members)) * (spread + 0.3 * min(middle * middle, 0.3))
            else:  # nothing but its bias
                total += 0.3 * min(abs(middle), WORST) ** 2
        return total + 0.02 * sum(log(x / y) ** 2 for x, y in zip(constants, STARTING_POINT, strict=True))

    def best(
        self, rounds: int = ROUNDS, log: Callable[[str], None] = lambda text: None,
        start: Constants = STARTING_POINT, names: Sequence[str] = FITTED,
    ) -> Constants:  # fmt: skip
        """The constants with the least loss that the search finds from ``start``, of which ``names`` move. ``log``:
        called with a line per round."""
        found, least = start, self.loss(start)
        steps = dict.fromkeys(names, 1.25)
        for number in range(rounds):
            for name in names:
                value = getattr(found, name)
                for factor in (steps[name], 1 / steps[name]):
                    if name in SHARES and value * factor > MOST:
                        continue
                    tried = found._replace(**{name: value * factor})
                    loss = self.loss(tried)
                    if loss < least:
                        found, least = tried, loss
                        break
                else:
                    steps[name] = sqrt(steps[name])
            log(f"round {number + 1}: {least:.4f}")
        return found


def scores(
    rows: Sequence[MeasuredRun], constants: Constants, groups: Collection[str] | None = None
) -> list[GroupScore]:
    """Every group, or those named, ranked with these constants."""
    chosen = [row for row in rows if groups is None or row.group in groups]
    return score_groups(chosen, _seconds_with(constants))


def family_scores(rows: Sequence[MeasuredRun], constants: Constants) -> list[FamilyScore]:
    """Seconds of every model on every GPU with these constants."""
    return score_families(rows, _seconds_with(constants))


def _seconds_with(constants: Constants) -> Callable[[MeasuredRun], float]:
    return lambda r: Step(r.run, r.hardware, constants, r.kernels).time().seconds


def left_out(
    rows: Sequence[MeasuredRun], folds: int, rounds: int = ROUNDS, log: Callable[[str], None] = lambda text: None
) -> list[GroupScore]:
    """Every group with enough layouts for a ranking, under constants that were fitted without it.

    The groups, sorted by name, are split into ``folds`` parts; for each part the constants are fitted on all other
    groups and on the single layouts that ``FITTED_ON`` names. Raises SpecError for more folds than groups, and for one.
    """
    named = sorted({s.group for s in score_groups(rows, lambda row: 1.0)})
    if len(named) < 2:
        raise SpecError(
            f"--folds needs two groups of {FEWEST_LAYOUTS} layouts or more, and {len(named)} can be ranked; drop it"
        )
    if not 2 <= folds <= len(named):
        raise SpecError(f"--folds is {folds}, and {len(named)} groups can be ranked; give 2 to {len(named)}")
    found: list[GroupScore] = []
    for number in range(folds):
        apart = set(named[number::folds])
        fitted = {*named, *FITTED_ON} - apart
        constants = Fit([row for row in rows if row.group in fitted]).best(rounds)
        found += scores(rows, constants, apart)
        log(f"fold {number + 1} of {folds}: fitted without {', '.join(sorted(apart))}")
    return sorted(found, key=lambda s: -s.layouts)
