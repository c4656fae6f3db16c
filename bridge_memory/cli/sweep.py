"""``bridge-memory sweep``: the best layout of every cell of a fleet's question, in a table to go on with."""

from __future__ import annotations

import argparse
import json
import os
import sys

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.progress import Progress
from bridge_memory.cli.threads import multiply_in_one_thread
from bridge_memory.spec import SpecError, show

SCHEMA = "bridge-memory/sweep/1"
MOST_JOBS = 256
_FITTING = ("fits", "tight")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", metavar="FILE", help="YAML (models, gpus, num_gpus, seq_lengths, engines, precisions, "
                        "each a list; global_batch_size, tokens) or CSV with a line a cell")
    parser.add_argument("--table", metavar="TABLE", help="the table, .csv or .parquet: gone on with where it exists "
                        "(default: FILE's name with .answers.csv)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="worker processes (default: 1)")
    parser.add_argument("--backend", metavar="NAME", help="joblib backend that runs cells: loky, dask, dask=ADDRESS "
                        "or ray")
    add_output_arguments(parser, f"by the schema {SCHEMA}", own=())


def run(args: argparse.Namespace) -> int:
    """Answer what is not in the table yet, and print it. Returns 0, or 130 where Ctrl-C ended it."""
    from bridge_memory.report.document import Column, Grid
    from bridge_memory.report.printing import print_blocks
    from bridge_memory.sweep import answered, cells_of, key_of, left_to_do, sweep, write_parquet

    if not 1 <= args.jobs <= MOST_JOBS:
        raise SpecError(f"--jobs ({args.jobs}) is not a number of processes; give 1 to {MOST_JOBS}")
    target = args.table or f"{os.path.splitext(args.file)[0]}.answers.csv"
    if not target.lower().endswith((".csv", ".parquet")):
        raise SpecError(f"--table ({show(target)}) is neither .csv nor .parquet; give one of these")
    columnar = target.lower().endswith(".parquet")
    if columnar and os.path.exists(target) and not os.path.exists(f"{target}.csv"):
        raise SpecError(f"--table ({show(target)}) exists without its {show(f'{target}.csv')}; give another")
    table = f"{target}.csv" if columnar else target
    cells = cells_of(args.file)
    known = answered(table)
    todo = left_to_do(cells, known)
    asked = {tuple(map(str, cell)) for cell in cells}
    rows = [row for row in known if key_of(row) in asked]
    stopped = False
    backend_jobs = args.jobs if args.backend is None or args.jobs > 1 else -1
    multiply_in_one_thread()
    with Progress("cell") as progress:
        try:
            for row in sweep(todo, table, jobs=backend_jobs, backend=args.backend):
                rows.append(row)
                progress(len(rows), sum(each["verdict"] in _FITTING for each in rows))
        except KeyboardInterrupt:
            stopped = True
    if columnar:
        write_parquet(rows, target)
    if args.json:
        print(json.dumps({"schema": SCHEMA, "cells": len(cells), "stopped": stopped, "rows": rows}, indent=2))
        return 130 if stopped else 0
    shown = ("model", "gpu", "num_gpus", "seq_length", "layout", "free_gib", "tokens_per_second_per_gpu", "gpu_hours")
    titles = ("model", "gpu", "GPUs", "seq", "best layout", "free GiB", "tok/s/GPU", "GPU hours")
    columns = tuple(Column(title, words=title in ("model", "gpu", "best layout")) for title in titles)
    lines = tuple(tuple(_shown(row, name) for name in shown) for row in rows)
    notes = [f"{len(rows):,} of {len(cells):,} cells answered, {len(known):,} of them before; table: {target}"]
    notes += [f"refused: {reason}" for reason in dict.fromkeys(r["reason"] for r in rows if r["verdict"] == "refused")]
    print_blocks([Grid("The best layout of each cell", columns, lines, None, tuple(notes))])
    if stopped:
        print("bridge-memory: stopped; the same command goes on", file=sys.stderr)
    return 130 if stopped else 0


def _shown(row: dict[str, str], name: str) -> str:
    if name == "model":
        return row[name].rpartition("/")[2]
    if name == "layout" and row["verdict"] != "fits":
        why = f" ({row['reason']})" if row["reason"] and row["verdict"] != "refused" else ""
        of = row["layout"] or (row["engine"] if row["engine"] != "megatron_ddp" else "")  # as ``layout_words``
        return f"{row['verdict']}{why}{': ' if of else ''}{of}"
    if name in ("free_gib", "tokens_per_second_per_gpu", "gpu_hours") and row[name]:
        return f"{float(row[name]):,.{1 if name == 'free_gib' else 0}f}"
    return row[name]
