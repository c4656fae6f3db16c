"""``bridge-memory accuracy RUNS.jsonl`` of memory: predict measured runs, and say how far off the estimate is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.components import GIB
from bridge_memory.report.document import Chart
from bridge_memory.report.write import check_target, write_text
from bridge_memory.residual import SIGN_PERCENT, percent
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.accuracy.corpus import RecordLine
    from bridge_memory.accuracy.errors import Errors, GroupAccuracy
    from bridge_memory.accuracy.predictions import Outcome
    from bridge_memory.accuracy.records import Record

SCHEMA = "bridge-memory/accuracy-memory/2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUNS.jsonl", nargs="?", help="measured runs, one JSON record a line")
    add_output_arguments(parser, f"every record and the summary, by the schema {SCHEMA}", beside=True)
    add_tables(parser)


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Declare which tables of records of memory are shown."""
    parser.add_argument("--summary", action="store_true", help="the table by tier (the default)")
    parser.add_argument("--by", choices=("tier", "family", "scale", "gpu", "feature"), help="a table by this")
    parser.add_argument("--worst", type=int, metavar="N", help="the N largest misses, explained")
    parser.add_argument("--folds", type=int, metavar="K",
                        help="of speed: fit the constants K times more, each time without a part of the groups, and "
                             "rank those")


def run(args: argparse.Namespace, rows_of_file: list[RecordLine] | None = None) -> int:
    """Score and print. ``rows_of_file``: where the corpus was read already."""
    from bridge_memory.accuracy.errors import by_group, summary
    from bridge_memory.accuracy.predictions import predict_all
    from bridge_memory.accuracy.records import load_runs, read_record

    if args.worst is not None and args.worst < 1:
        raise SpecError(f"--worst is {args.worst}; give 1 or more")
    if args.folds is not None:
        raise SpecError("--folds is for records of speed: no constant of the memory estimate is fitted; drop it")
    runs, beside = args.runs, args.json if isinstance(args.json, str) and args.json != "-" else None
    if runs is None and beside:  # "--json RUNS.jsonl": the only file that is named holds the runs.
        runs, beside = beside, None
    if runs is None:
        raise SpecError("RUNS.jsonl is missing; name a file of measured runs")
    if beside:
        check_target(beside, force=args.force, flag="--json")
    records = load_runs(runs) if rows_of_file is None else list(map(read_record, rows_of_file))
    outcomes = predict_all(records)
    rows = summary(outcomes)
    if args.json:
        document = {
            "schema": SCHEMA,
            "records": [o.as_json() for o in outcomes],
            "summary": {row.group: row.as_json() for row in rows},
        }
        if args.by:
            document["by"] = {row.group: row.as_json() for row in by_group(outcomes, args.by)}
        text = json.dumps(document, indent=1) + "\n"
        if beside is None:
            sys.stdout.write(text)
            return 0
        write_text(beside, text, force=args.force, flag="--json")
    if args.format == "html":
        from bridge_memory.report.printing import print_blocks

        print_blocks([_scatter(outcomes)])
    if args.summary or not (args.by or args.worst):
        print(table(rows))
        print(_statuses(outcomes))
    if args.by:
        print(table(by_group(outcomes, args.by)))
    if args.worst:
        print(worst(records, outcomes, args.worst))
    return 0


def table(rows: Sequence[GroupAccuracy]) -> str:
    """Median, 90th percentile and worst of the absolute errors, then the signed mean."""
    width = max([18, *(min(len(r.group), 44) for r in rows)])
    head = f"{'':<{width}} {'':>11}  {'allocated, %':^26}  {'max_allocated, %':^26}"
    names = f"{'':<{width}} {'':>11}" + 2 * f"  {'med':>5} {'p90':>6} {'worst':>6} {'bias':>6}"
    lines = [f"{SIGN_PERCENT}; bias: the mean with its sign", head, names]
    for r in rows:
        for title, count, errors in (
            (r.group, f"{r.ok}/{r.records} runs", r.per_record),
            ("", f"{r.families} families", r.per_family),
        ):
            if not title and r.families == 1:
                continue
            lines.append(
                f"{title[:width]:<{width}} {count:>11}"
                + "".join(_cells(errors.get(metric)) for metric in ("allocated", "max_allocated"))
            )
    return "\n".join(line.rstrip() for line in lines)


def _scatter(outcomes: Sequence[Outcome]) -> Chart:
    """Predicted over measured peaks, the worst rank of each record."""
    furthest: dict[str, Outcome] = {}
    for o in outcomes:
        if o.status == "ok" and o.max_allocated_error is not None:
            other = furthest.setdefault(o.id, o)
            if abs(o.max_allocated_error) > abs(other.max_allocated_error or 0.0):
                furthest[o.id] = o
    tiers = sorted({o.tier for o in furthest.values()})
    tones = ("predicted", "warn", "other", "good", "some")
    series = [
        {"name": f"tier {tier}", "tone": tones[min(i, len(tones) - 1)], "line": "", "points": [
            [(o.measured_max_allocated_bytes or 0) / GIB, (o.predicted_max_allocated_bytes or 0) / GIB,
             f"{o.id}, rank {o.rank}: {percent(o.max_allocated_error)}%"]
            for o in furthest.values() if o.tier == tier
        ]}
        for i, tier in enumerate(tiers)
    ]  # fmt: skip
    x, y = ({"title": title, "unit": "GiB", "log": True} for title in ("measured", "predicted"))
    return Chart("Predicted over measured peaks", "plot", {"x": x, "y": y, "diagonal": True, "series": series})


def _cells(e: Errors | None) -> str:
    if e is None:
        return f"  {'-':>5} {'-':>6} {'-':>6} {'-':>6}"
    return f"  {e.median:5.2%} {e.p90:6.2%} {e.worst:6.1%} {percent(e.bias, 2):>6}".replace("%", "")


def _statuses(outcomes: Sequence[Outcome]) -> str:
    lines, seen = [], set()
    for o in outcomes:
        if o.status != "ok" and o.id not in seen:
            seen.add(o.id)
            lines.append(f"{o.status}: {o.id}: {o.reason}")
    return "\n".join(lines) or "every record was predicted"


def worst(records: Sequence[Record], outcomes: Sequence[Outcome], count: int) -> str:
    """The largest misses of both numbers with the stage's components and what is unusual about the run."""
    from bridge_memory.accuracy.errors import METRICS
    from bridge_memory.accuracy.features import non_default_options
    from bridge_memory.accuracy.runs import run_of

    by_id = {r.id: r for r in records}
    blocks = []
    for metric, error in METRICS.items():
        ranked = sorted(
            (o for o in outcomes if o.status == "ok" and error(o) is not None),
            key=lambda o: -abs(error(o) or 0.0),
        )
        blocks.append(f"Largest misses of {metric}, {SIGN_PERCENT}")
        for o in _first_of_each_record(ranked)[:count]:
            predicted = getattr(o, f"predicted_{metric}_bytes")
            measured = getattr(o, f"measured_{metric}_bytes")
            assert predicted is not None and measured is not None and o.stage is not None
            blocks.append(
                f"  {percent(error(o))}%  {o.id}  rank {o.rank}, stage {o.stage.stage}: predicted "
                f"{predicted / GIB:.3f} GiB, measured {measured / GIB:.3f} GiB "
                f"({(measured - predicted) / 2**20:+.1f} MiB unexplained); peak in {o.stage.peak_phase}"
            )
            parts = sorted(o.stage.components, key=lambda c: -c.bytes)[:12]
            blocks.extend(f"      {c.bytes / 2**20:12.2f} MiB  {c.role!s:<10} {c.name}" for c in parts)
            blocks.append("      options: " + " ".join(non_default_options(run_of(by_id[o.id]))))
    return "\n".join(blocks)


def _first_of_each_record(ranked: Sequence[Outcome]) -> list[Outcome]:
    first: dict[str, Outcome] = {}
    for o in ranked:
        first.setdefault(o.id, o)
    return list(first.values())
