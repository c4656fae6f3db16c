"""Fit the constants of the time model to measured throughput, and say how the result ranks groups that it has not seen.

    python scripts/fit_speed.py RUNS.jsonl [--fit GROUP ...] [--rounds N]

RUNS.jsonl holds measured throughput, one JSON object a line (``bridge_memory.accuracy.throughput`` reads it). Fitted is
on the groups that ``speed/constants.py: FITTED_ON`` names, or on those given; ``bridge_memory.accuracy.speed_fit`` says
what is minimised. ``bridge-memory accuracy RUNS.jsonl --folds K`` leaves each group out once.

It prints a table of all groups and the constants as they stand in ``speed/constants.py``; write them there by hand.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_memory.accuracy.speed_fit import Fit, scores
from bridge_memory.accuracy.throughput import MeasuredRun, read_throughput
from bridge_memory.cli.accuracy import groups
from bridge_memory.report.printing import print_blocks
from bridge_memory.speed.constants import DEFAULT, FITTED_ON


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--fit", nargs="+", metavar="GROUP", default=list(FITTED_ON))
    parser.add_argument("--rounds", type=int, default=10, help="0: show how the constants as they are rank")
    args = parser.parse_args()
    rows = [r for r in read_throughput(args.runs) if isinstance(r, MeasuredRun) and r.seconds is not None]
    constants = DEFAULT
    if args.rounds:
        constants = Fit([r for r in rows if r.group in args.fit]).best(args.rounds, partial(print, flush=True))
    print_blocks(groups(scores(rows, constants), args.fit))
    for name, value in constants._asdict().items():
        print(f"    {name}={float(f'{value:.3g}')},")


if __name__ == "__main__":
    main()
