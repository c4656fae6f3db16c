"""``bridge-memory accuracy RUNS.jsonl``: a corpus of measured memory or of measured speed beside what is predicted.

Which it holds, whether of Megatron or of other engines, and whether with arguments or in words, is seen from the fields
of its records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.megatron import field_runs
from bridge_memory.cli.megatron import scores as validate
from bridge_memory.cli.output import add_output_arguments, exit_code_of_unread
from bridge_memory.cli.torch import scores as torch_scores
from bridge_memory.residual import SIGN, percent
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.accuracy.ranking import FamilyScore, GroupScore
    from bridge_memory.accuracy.throughput import MeasuredRun
    from bridge_memory.report.document import Block, Chart

SCHEMA = "bridge-memory/accuracy/2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("runs", metavar="RUNS.jsonl", nargs="?", help="measured runs, one JSON record per line")
    add_output_arguments(
        parser, f"of speed by the schema {SCHEMA}, of memory by {validate.SCHEMA}, {torch_scores.SCHEMA} or "
        f"{field_runs.SCHEMA}",
        beside=True,
    )
    validate.add_tables(parser)


def run(args: argparse.Namespace) -> int:
    """Score and print. Returns 0; 1 for a file of which half cannot be read."""
    from bridge_memory.accuracy.corpus import is_of_speed, read_corpus
    from bridge_memory.accuracy.described.outcomes import is_described
    from bridge_memory.accuracy.torch.records import is_of_torch

    rows_of_file = None if args.runs is None else read_corpus(args.runs)
    if rows_of_file is not None and is_of_torch(rows_of_file):
        _not_for(args, ("by", "worst", "folds"), "records of Megatron's memory", "of other engines")
        return torch_scores.run(args, rows_of_file)
    if rows_of_file is not None and is_described(rows_of_file):
        _not_for(args, ("by", "worst", "folds"), "records with Megatron's arguments", "described")
        return field_runs.run(args, rows_of_file)
    if rows_of_file is None or not is_of_speed(rows_of_file):
        return validate.run(args, rows_of_file)
    _not_for(args, ("by", "worst"), "records of memory", "of speed")
    from bridge_memory.accuracy.speed_fit import family_scores, left_out, scores
    from bridge_memory.accuracy.throughput import MeasuredRun, Unread, measured
    from bridge_memory.speed.constants import DEFAULT

    read = [measured(row.data) for row in rows_of_file]
    rows = [r for r in read if isinstance(r, MeasuredRun)]
    ranked, families = scores(rows, DEFAULT), family_scores(rows, DEFAULT)
    folds = None if args.folds is None else left_out(rows, args.folds, log=_said)
    fits = _out_of_memory(rows)
    unread: dict[str, int] = {}
    for row in read:
        if isinstance(row, Unread):
            unread[row.reason] = unread.get(row.reason, 0) + 1
    if args.json:
        print(json.dumps(_document(ranked, folds, families, fits, unread), indent=2))
    else:
        if args.format == "html":
            from bridge_memory.report.printing import print_blocks

            print_blocks([_scatter(rows)])
        _print(ranked, folds, families, fits, unread, len(rows))
    return exit_code_of_unread(sum(unread.values()) / max(1, len(read)))


def _not_for(args: argparse.Namespace, names: Collection[str], whose: str, these: str) -> None:
    """Raise SpecError where an option is given that only ``whose`` scores take."""
    for name in names:
        if getattr(args, name) is not None:
            raise SpecError(f"--{name} is for {whose}, and these are {these}; drop it")
    if isinstance(args.json, str):
        raise SpecError(f"--json FILE is for {whose}; use --output FILE")


def _said(text: str) -> None:
    """Progress, on a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def _out_of_memory(rows: list[MeasuredRun]) -> dict[str, dict[str, int]]:
    """Runs that did or did not run out of memory, and whether their peak was predicted above the card: by whose the
    implementation is."""
    from bridge_memory.estimation import peaks
    from bridge_memory.spec.gpus import find_gpu

    names = ("predicted", "predicted and measured", "measured", "rows")
    found = {"Megatron's implementation": dict.fromkeys(names, 0), "others": dict.fromkeys(names, 0)}
    groups = {row.group for row in rows if row.out_of_memory}
    for row in rows:
        if row.group not in groups:
            continue  # whether a group holds those that failed is the source's choice
        counts = found["Megatron's implementation" if row.megatron else "others"]
        predicted = max(s.peak_bytes for s in peaks(row.run)) > find_gpu(row.hardware.name).capacity_bytes
        counts["rows"] += 1
        counts["predicted"] += predicted
        counts["measured"] += row.out_of_memory
        counts["predicted and measured"] += predicted and row.out_of_memory
    return found


#: Points of a chart, at most.
_POINTS = 1500


def _scatter(rows: Sequence[MeasuredRun]) -> Chart:
    """Predicted over measured step times; of many rows some, evenly."""
    from bridge_memory.report.document import Chart
    from bridge_memory.speed.constants import FITTED_ON
    from bridge_memory.speed.megatron.step_time import step_time

    ran = [row for row in rows if row.seconds is not None]
    every = -(-len(ran) // _POINTS) or 1
    kinds = ((False, "of groups that nothing was fitted on", "predicted"), (True, "of groups that were fitted", "some"))
    series: dict[bool, dict[str, Any]] = {
        fitted: {"name": name, "tone": tone, "line": "", "points": []} for fitted, name, tone in kinds
    }
    for row in ran[::every]:
        assert row.seconds is not None
        predicted = step_time(row.run, row.hardware, kernels=row.kernels).seconds
        words = f"{row.group}, row {row.number}: {predicted / row.seconds - 1:+.0%}"
        series[row.group in FITTED_ON]["points"].append([row.seconds, predicted, words])
    x, y = ({"title": title, "unit": "s", "log": True} for title in ("measured", "predicted"))
    data = {"x": x, "y": y, "diagonal": True, "series": list(series.values())}
    return Chart("Predicted over measured step times", "plot", data)


def _document(
    scores: list[GroupScore], folds: list[GroupScore] | None, families: list[FamilyScore],
    fits: dict[str, dict[str, int]], unread: dict[str, int],
) -> dict[str, Any]:
    from bridge_memory.accuracy.ranking import totals
    from bridge_memory.speed.constants import FITTED_ON

    unseen = totals([s for s in scores if s.group not in FITTED_ON])
    apart = totals(folds or [])
    own, others = ({name.replace(" ", "_"): n for name, n in counts.items()} for counts in fits.values())
    both = {name: sum(counts[name] for counts in fits.values()) for name in next(iter(fits.values()))}
    again = {"groups": [s._asdict() for s in folds], "totals": apart._asdict() if apart else None} if folds else None
    return {
        "schema": SCHEMA,
        "groups": [{**s._asdict(), "fitted": s.group in FITTED_ON} for s in scores],
        "families": [f._asdict() for f in families],
        "not_fitted": unseen._asdict() if unseen else None,
        "left_out": again, "out_of_memory": {name.replace(" ", "_"): n for name, n in both.items()},
        "out_of_memory_by_implementation": {"megatron": own, "others": others}, "unread": unread,
    }  # fmt: skip


def groups(scores: Sequence[GroupScore], fitted: Collection[str]) -> list[Block]:
    """The groups in a table, and those not ``fitted`` taken together."""
    from bridge_memory.accuracy.ranking import totals
    from bridge_memory.report.document import Bullets, Column, Grid

    columns = (
        Column("group", words=True), Column("layouts"), Column("Spearman"), Column("regret"), Column("bias"),
        Column("fitted", words=True),
    )  # fmt: skip
    cells = tuple(
        (s.group, str(s.layouts), f"{s.spearman:.2f}", f"{s.regret:.1%}", f"{percent(s.bias, 0)}%",
         "yes" if s.group in fitted else "")
        for s in scores
    )  # fmt: skip
    table = Grid(f"Measured layouts and the order they are predicted in; bias: {SIGN}", columns, cells)
    unseen = totals([s for s in scores if s.group not in fitted])
    return [table, *([Bullets("Not fitted", (str(unseen),))] if unseen else [])]


def families_table(families: Sequence[FamilyScore]) -> list[Block]:
    """Seconds by model and GPU, and how many are within the targets."""
    from bridge_memory.report.document import Bullets, Column, Grid

    columns = (
        Column("model", words=True), Column("GPU", words=True), Column("runs"), Column("median"), Column("p90"),
        Column("bias"),
    )  # fmt: skip
    cells = tuple(
        (f.family, f.gpu, str(f.runs), f"{f.median:.0%}", f"{f.p90:.0%}", f"{percent(f.bias, 0)}%") for f in families
    )
    within = sum(f.median <= _MEDIAN and f.p90 <= _P90 for f in families)
    words = f"{within} of {len(families)} within {_MEDIAN:.0%} (median) and {_P90:.0%} (90th percentile)"
    table = Grid(f"Absolute errors of seconds, by model and GPU; bias: {SIGN}", columns, cells)
    return [table, Bullets("Seconds", (words,))]


#: Targets of a model's seconds on a GPU.
_MEDIAN, _P90 = 0.15, 0.40


def left_out_groups(folds: Sequence[GroupScore]) -> list[Block]:
    """Groups in a table, each under constants fitted without it."""
    from bridge_memory.accuracy.ranking import totals
    from bridge_memory.report.document import Bullets, Column, Grid

    columns = Column("group", words=True), Column("layouts"), Column("Spearman"), Column("regret"), Column("bias")
    cells = tuple(
        (s.group, str(s.layouts), f"{s.spearman:.2f}", f"{s.regret:.1%}", f"{percent(s.bias, 0)}%") for s in folds
    )  # fmt: skip
    table = Grid(f"Each group under constants that were fitted without it; bias: {SIGN}", columns, cells)
    return [table, Bullets("Left out", (str(totals(folds)),))]


def _print(
    scores: list[GroupScore], folds: list[GroupScore] | None, families: list[FamilyScore],
    fits: dict[str, dict[str, int]], unread: dict[str, int], rows: int,
) -> None:
    from bridge_memory.report.document import Bullets
    from bridge_memory.report.printing import print_blocks
    from bridge_memory.speed.constants import FITTED_ON

    words = [f"{rows:,} rows are runs; {sum(unread.values()):,} are not read"]
    for whose, counts in fits.items():
        if counts["measured"]:
            both = counts["predicted and measured"]
            precision = f"precision {both / counts['predicted']:.2f}, " if counts["predicted"] else ""
            words.append(
                f"out of memory, {whose}, {counts['measured']:,} of {counts['rows']:,} rows: {precision}"
                f"recall {both / counts['measured']:.2f}"
            )
    most = sorted(unread.items(), key=lambda item: -item[1])[:5]
    blocks = [*groups(scores, FITTED_ON), *(left_out_groups(folds) if folds else []), *families_table(families)]
    blocks.append(Bullets("In all", tuple(words)))
    if most:
        blocks.append(Bullets("Most rows that are not read", tuple(f"{n:,}: {reason}" for reason, n in most)))
    print_blocks(blocks)
