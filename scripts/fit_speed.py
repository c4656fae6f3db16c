"""Fit the constants of the time model to measured throughput, and say how the result ranks groups that it has not seen.

    python scripts/fit_speed.py RUNS.jsonl [--fit GROUP ...] [--rounds N]

RUNS.jsonl holds measured throughput, one JSON object a line (``bridge_memory.accuracy.throughput`` reads it). Fitted is
on the groups that ``speed/constants.py: FITTED_ON`` names, or on those given. What is minimised: the squared spread of
log(predicted / measured) inside of a group, a tenth of its squared bias, and a weak pull to where the search starts, so
that what the data does not determine stays put. The search goes constant by constant and needs nothing but Python.

It prints a table of all groups and the constants as they stand in ``speed/constants.py``; write them there by hand.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from bridge_memory.accuracy.ranking import score_groups
from bridge_memory.accuracy.throughput import Measured, read_throughput
from bridge_memory.cli.accuracy import groups
from bridge_memory.report.printing import print_blocks
from bridge_memory.speed.constants import DEFAULT, FITTED_ON, STARTING_POINT, Constants
from bridge_memory.speed.step_time import Step

#: Shares of a peak rate that nothing may exceed.
SHARES = ("network", "nvlink", "memory", "attention")
WORST = 0.5


class Fit:
    """Rows of the groups to fit, each with its work counted once."""

    def __init__(self, rows: Sequence[Measured]) -> None:
        self.groups: dict[str, list[tuple[Measured, Step]]] = {}
        for row in rows:
            step = Step(row.run, row.hardware, kernels=row.kernels)
            self.groups.setdefault(row.group, []).append((row, step))

    def loss(self, constants: Constants) -> float:
        total = 0.0
        for members in self.groups.values():
            errors = [math.log(step.at(constants).seconds / (row.seconds or 1.0)) for row, step in members]
            middle = median(errors)
            spread = fmean(min(abs(e - middle), WORST) ** 2 for e in errors)
            weight = math.sqrt(len(members)) if len(members) > 1 else 0.3
            total += weight * (spread + 0.1 * min(middle * middle, 0.3))
        return total + 0.02 * sum(
            math.log(x / y) ** 2 for x, y in zip(constants, STARTING_POINT, strict=True) if y
        )

    def best(self, rounds: int) -> Constants:
        found, least = STARTING_POINT, self.loss(STARTING_POINT)
        steps = dict.fromkeys(Constants._fields, 1.25)
        for number in range(rounds):
            for name in Constants._fields:
                value = getattr(found, name)
                for factor in (steps[name], 1 / steps[name]):
                    if not value or (name in SHARES and value * factor > 0.95):
                        continue
                    tried = found._replace(**{name: value * factor})
                    loss = self.loss(tried)
                    if loss < least:
                        found, least = tried, loss
                        break
                else:
                    steps[name] = math.sqrt(steps[name])
            print(f"round {number + 1}: {least:.4f}", flush=True)
        return found


def show(rows: Sequence[Measured], constants: Constants, fitted: Sequence[str]) -> None:
    scores = score_groups(rows, lambda r: Step(r.run, r.hardware, constants, r.kernels).time().seconds)
    print_blocks(groups(scores, fitted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--fit", nargs="+", metavar="GROUP", default=list(FITTED_ON))
    parser.add_argument("--rounds", type=int, default=10, help="0: show how the constants as they are rank")
    args = parser.parse_args()
    rows = [r for r in read_throughput(args.runs) if isinstance(r, Measured) and r.seconds is not None]
    constants = DEFAULT
    if args.rounds:
        constants = Fit([r for r in rows if r.group in args.fit]).best(args.rounds)
    show(rows, constants, args.fit)
    for name, value in constants._asdict().items():
        print(f"    {name}: float = {float(f'{value:.3g}')}")


if __name__ == "__main__":
    main()
