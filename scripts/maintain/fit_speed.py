"""Fit the constants of the step-time model to measured throughput.

    python scripts/maintain/fit_speed.py RUNS.jsonl [--fit GROUP ...] [--only CONSTANT ...] [--rounds N]

Needs RUNS.jsonl: measured throughput, one JSON object per line (``bridge_memory.accuracy.throughput``).
Prints a table of all groups and the constants in the form of ``speed/constants.py``; copy them there by hand.

The fit uses the groups of ``speed/constants.py: FITTED_ON``, or those of ``--fit``;
``bridge_memory.accuracy.speed_fit`` defines the objective. ``--only``: where one mechanism has changed, its constants,
from today's; all others stay.
``bridge-memory accuracy RUNS.jsonl --folds K`` cross-validates by group.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge_memory.accuracy.speed_fit import FITTED, Fit, scores
from bridge_memory.accuracy.throughput import MeasuredRun, read_throughput
from bridge_memory.cli.accuracy import groups
from bridge_memory.report.printing import print_blocks
from bridge_memory.speed.constants import DEFAULT, FITTED_ON, STARTING_POINT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUNS.jsonl", help="measured throughput")
    parser.add_argument("--fit", nargs="+", metavar="GROUP", default=list(FITTED_ON), help="fit to these groups")
    parser.add_argument("--only", nargs="+", metavar="CONSTANT", choices=FITTED, help="constants that move")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the fit (10); 0: rank with today's constants")
    args = parser.parse_args()
    rows = [r for r in read_throughput(args.runs) if isinstance(r, MeasuredRun) and r.seconds is not None]
    constants = DEFAULT
    if args.rounds:
        fit = Fit([r for r in rows if r.group in args.fit])
        start = DEFAULT if args.only else STARTING_POINT
        names = args.only or FITTED
        constants = fit.best(args.rounds, partial(print, flush=True), start, names)
        print(f"loss {fit.loss(constants):.4f}, of today's constants {fit.loss(DEFAULT):.4f}")
    print_blocks(groups(scores(rows, constants), args.fit))
    for name, value in constants._asdict().items():
        print(f"    {name}={float(f'{value:.3g}')},")


if __name__ == "__main__":
    main()
