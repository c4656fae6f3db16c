"""``bridge-memory why FILE``: why a job ran out of memory, and what to do first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.cli.compare import given_run
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.components import GIB
from bridge_memory.failure.why import SCHEMA
from bridge_memory.report.document import Block, Bullets, Column, Grid, Words
from bridge_memory.report.printing import print_blocks

if TYPE_CHECKING:
    from bridge_memory.failure.why import Why

#: What a snapshot holds at its peak, and predicted phases, of which so many rows are shown.
_GROUPS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "failure", metavar="FILE",
        help="the error's text, a log around it, MemoryReport's journal or a memory snapshot; -: standard input",
    )
    add_run_arguments(parser)
    add_output_arguments(parser, f"by the schema {SCHEMA}")
    group = parser.add_argument_group("failure")
    group.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on (default: by the text)")


def run(args: argparse.Namespace) -> int:
    """Read, explain and print. 0: the failure is explained, 2: there is none."""
    from bridge_memory.failure.why import why_file
    from bridge_memory.spec.gpus import find_gpu

    gpu = None if args.gpu is None else find_gpu(args.gpu)
    name = args.failure
    found = why_file(name, given_run(args), gpu, world_size=getattr(args, "parallel.world_size", None))
    args.answer = f"{found.cause}: {found.findings[0].words}"
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_blocks(list(why_blocks(found, "standard input" if name == "-" else name)))
    return 0


def why_blocks(found: Why, name: str) -> Iterator[Block]:
    """The answer, its evidence, what to do, and measured beside predicted."""
    first = found.findings[0]
    sure = "" if first.sure else ", likely"
    yield Words("", (f"{str(first.cause).upper()}{sure}: {first.words}", _where(found, name)), "bad")
    if len(found.findings) > 1:
        lines = tuple(f"{x.cause}{'' if x.sure else ' (likely)'}: {x.words}" for x in found.findings[1:])
        yield Bullets("Also", lines)
    if found.remedies:
        fits = {True: "; the step then fits", False: "; not enough alone", None: ""}
        lines = tuple(f"{r.do}: frees {r.frees}, costs {r.costs}{fits[r.fits]}" for r in found.remedies)
        yield Bullets(f"Do first, in the words of {found.trainer}", lines)
    table = _table(found)
    if table is not None:
        yield table
    if found.attribution is not None:
        yield _groups(found)
    if found.notes:
        yield Bullets("Notes", found.notes)


def _where(found: Why, name: str) -> str:
    """"rank 5, backward, after step 12: torch's allocator; line 7 of train.log; 8 ranks failed"."""
    e = found.event
    rank = f"rank {e.rank}" if e.rank is not None else ""
    step = f"after step {e.step}" if e.step is not None else ""
    place = ", ".join(filter(None, (rank, e.place, step)))
    line = f"line {e.number} of {name}" if e.number else name
    more = [f"{len(found.ranks)} ranks failed"] if len(found.ranks) > 1 else []
    if found.retries:
        more.append(f"torch emptied its cache {found.retries} times to go on")
    return "; ".join([f"{place}: {e.kind}" if place else str(e.kind), line, *more])


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"


def _span(least: int, most: int) -> str:
    low, high = f"{least / GIB:.1f}", f"{most / GIB:.1f}"
    return low if low == high else f"{low}-{high}"


def _table(found: Why) -> Grid | None:
    """What was measured beside what is predicted, by phase."""
    from bridge_memory.failure.why import measured_driver
    from bridge_memory.outside.amount import total

    f, driver = found.event.figures, measured_driver(found.event)
    measured = (_gib(f.allocated), _gib(f.needed), _gib(f.reserved), _gib(f.outside), _gib(driver))
    columns = (
        Column("", words=True), Column("allocated"), Column("needed"), Column("reserved"), Column("outside"),
        Column("driver"),
    )  # fmt: skip
    if found.job is None or found.gpu is None:
        if f.allocated is None:
            return None
        whole = "" if f.total is None else f", of {_gib(f.total)}"
        return Grid(f"What the text says, GiB{whole}", columns, (("measured", *measured),))
    rows: list[tuple[str, ...]] = []
    emphasis = None
    for phase in found.job.stages[found.stage]:
        if phase is found.phase:
            emphasis = len(rows)
        rows.append((
            str(phase.phase), _span(*total(phase.allocated)), "", _span(*phase.reserved),
            _span(*total(phase.outside)), _span(*phase.driver),
        ))  # fmt: skip
    if any(one != "-" for one in measured):
        at = len(rows) if emphasis is None else emphasis + 1
        rows.insert(at, ("  measured", *measured))
    of = f", stage {found.stage}" if len(found.job.stages) > 1 else ""
    assert found.run is not None
    whole = _gib(found.gpu.capacity_bytes)
    title = f"{found.run.model.name}{of} on {found.gpu.name}, by {found.source}, GiB of {whole}"
    notes = ("needed: allocated and what it asked for, the least that the run takes; phases are predicted",)
    return Grid(title, columns, tuple(rows), emphasis, notes)


def _groups(found: Why) -> Grid:
    assert found.attribution is not None
    groups = found.attribution.groups[:_GROUPS]
    predicted = found.run is not None
    rows = tuple(
        (str(g.group), _gib(g.measured), _gib(g.predicted) if predicted else "-", str(g.blocks)) for g in groups
    )
    columns = (Column("alive at the peak", words=True), Column("measured"), Column("predicted"), Column("blocks"))
    return Grid("By component, GiB", columns, rows)
