"""What every search prints of what it found: the answer, the rows and the notes, in every format."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.components import GIB
from bridge_memory.emit.commands import field_words
from bridge_memory.plan.found import CANDIDATES, SIMPLER, TIE, Found, Ranked, Row, front_with, ties
from bridge_memory.plan.nearest import Nearest
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.verdict import FRAGMENTATION

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.emit.commands import Emitted
    from bridge_memory.report.answer import Answer
    from bridge_memory.report.document import Chart, Drawn, Grid, Words

#: Rows that a chart shows, at most; rows of a brief answer.
CHARTED, BRIEF = 300, 5
#: Rows of the Pareto front, as many as a screen has room for; without ``-v``.
FRONT = (8, 5, 3, 2, 0)
#: Rows from which on a column is taken out of the table if its cells are equal but for this share of them.
SHARED_FROM, SHARED_BUT = 3, 0.1


def try_words(near: Nearest, words: str) -> str:
    """A line of what to change where nothing fits. ``words``: what then does."""
    flags = shlex.join(field_words(near.fields)) or f"--num-gpus {near.num_gpus}"
    return f"try: {flags}; {words} then fits, with a peak of {near.row.peak / GIB:.1f} GiB"


def headroom_bytes(args: argparse.Namespace) -> int:
    """Bytes of ``--headroom``. Raises SpecError."""
    nbytes = args.headroom * GIB
    if not 0 <= nbytes < float("inf"):
        raise SpecError(f"--headroom ({args.headroom:g}) is not a size; give GiB of 0 or more")
    return int(nbytes)


class Style(NamedTuple):
    """How one kind of row is printed."""

    #: What a row is: "layout".
    noun: str
    headings: tuple[str, ...]
    #: Headings of columns of words; the others are of numbers.
    of_words: frozenset[str]
    #: Headings of columns that are always shown; others are shown where a cell is not in ``idle``.
    always: frozenset[str]
    idle: frozenset[str]
    #: The cells of a row, one a heading.
    cells: Callable[[Row[Any]], Sequence[str]]
    #: A row in words.
    words: Callable[[Row[Any]], str]
    #: A row for programs.
    record: Callable[[Row[Any]], dict[str, Any]]
    #: Headings of columns that text leaves out.
    hidden: frozenset[str] = frozenset()
    #: Headings of settings, which a line above the table says where they hardly vary.
    settings: frozenset[str] = frozenset()
    #: Headings of columns that text leaves out where the table is wider than a line, the first one first.
    spare: tuple[str, ...] = ()


class Shown(NamedTuple):
    """One search, as it is printed."""

    style: Style
    found: Found
    #: Any run of the space: its model, GPUs and sequences are those of every row.
    base: RunSpec
    gpu: Gpu
    num_gpus: int
    #: Sentences: which space was searched; what else could be tried where nothing fits; what step times rest on.
    space: Sequence[str]
    otherwise: Sequence[str]
    times: Sequence[str]
    #: Features of the rows that the time model does not know.
    not_timed: Callable[[Sequence[Row[Any]]], Sequence[str]]
    #: What JSON says beside the rows.
    document: Mapping[str, Any]
    #: The row in the format of ``--emit``.
    emit: Callable[[Row[Any]], Emitted]
    last: Sequence[str] = ()
    #: What to do to have the first row, as lines of the answer.
    change: Sequence[str] = ()
    #: Whether text is the answer and the first rows alone.
    brief: bool = False
    #: What rows leave that keep the reserve, in words.
    reserve: str = ""


def print_found(shown: Shown, args: argparse.Namespace) -> int:
    """Print in the format of ``args``. Returns 0, 1 where nothing fits, or 130 where Ctrl-C ended the search."""
    found, style = shown.found, shown.style
    if args.output is not None:
        first = found.ranked(1)
        lines = [_answer(row, shown, args, first.keeping > 0).lines for row in first.rows]
        args.answer = "; ".join(lines[0]) if lines else "nothing fits"
    if args.emit:
        emitted = shown.emit(_asked_row(shown, args))
        print(emitted.text)
        if emitted.note:
            print(emitted.note, file=sys.stderr)
    elif args.format in ("text", "html"):
        from bridge_memory.report.printing import print_blocks

        print_blocks(_blocks(shown, args))
    elif args.format == "json":
        from bridge_memory.report.summary import runs_with

        ranked = found.ranked(args.top)
        best, front = _records(shown, ranked), [style.record(row) for row in front_with(found, ranked.rows)]
        run = runs_with(ranked.rows[0].run if ranked.rows else shown.base)
        known = {**shown.document, **_first_verdict(shown, ranked)}
        known["passed_over"] = dict(ranked.refused)
        print(json.dumps({**known, "run": run, "best": best, "front": front}, indent=2))
    elif args.format == "csv":
        print(_csv(_records(shown, found.ranked(args.top)), style.headings))
    else:
        print(_markdown(style.headings, map(style.cells, found.ranked(args.top).rows)))
    if found.stopped:
        return 130
    return 0 if found.rows else 1


def _first_verdict(shown: Shown, ranked: Ranked) -> dict[str, Any]:
    """The verdict on the first row (None where nothing fits), and what of it is not modelled."""
    if not ranked.rows:
        return {"verdict": None, "not_modelled": []}
    from bridge_memory.estimation import estimate

    run = ranked.rows[0].run
    return {
        "verdict": of_estimate(run, shown.gpu).verdict,
        "not_modelled": [str(feature) for feature in estimate(run).unmodelled],
    }


def how_words(found: Found) -> tuple[str, ...]:
    """Why configurations were evaluated one by one, if they were."""
    return (found.one_by_one.words,) if found.one_by_one else ()


def _asked_row(shown: Shown, args: argparse.Namespace) -> Row[Any]:
    """``--row``, which counts from 1. Raises SpecError where there is no such row."""
    best = shown.found.ranked(max(args.top, args.row)).rows
    if not best:
        raise SpecError("nothing fits; there is no row to emit")
    if args.row > len(best):
        raise SpecError(f"--row {args.row} does not exist; {len(best)} different {shown.style.noun}s fit")
    row: Row[Any] = best[args.row - 1]
    return row


# ---- text and pages ----


def _blocks(shown: Shown, args: argparse.Namespace) -> list[Drawn]:
    """The answer, the fastest rows, and those that need less memory; on a page a chart of them first."""
    from bridge_memory.caveats.unmodelled import unmodelled_features
    from bridge_memory.report.document import Bullets
    from bridge_memory.report.summary import runs_with

    found, style, gpu = shown.found, shown.style, shown.gpu
    counts = (f"{name} {number:,}" for name, number in found.refused.most_common(6))
    refusals = [f"refused, by field: {', '.join(counts)}"] if found.refused else []
    if not found.rows:
        title = "Nothing that fits was found before the search was stopped" if found.stopped else "Nothing fits"
        return [Bullets(title, (_looked_at(found, style, gpu), *refusals, *shown.space, *shown.otherwise))]
    ranked = found.ranked(min(args.top, BRIEF) if shown.brief else args.top)
    best, keeping, refused = ranked
    title = f"Fastest {style.noun}s of {shown.base.model.name} on {shown.num_gpus} x {gpu.name}"
    answer = _answer(best[0], shown, args, keeping > 0)
    if shown.brief:
        stopped = (f"stopped early: {found.looked_at:,} {style.noun}s evaluated",) * found.stopped
        return [answer, *_table(title, best, style, args, stopped, keeping)]
    front = front_with(found, ranked.rows)[: args.top]
    notes: list[tuple[str, bool]] = []

    def note(*words: str, detail: bool = False) -> None:
        notes.extend((sentence, detail) for sentence in words)

    note(f"the fastest: {runs_with(best[0].run)}", _looked_at(found, style, gpu))
    note(*refusals, *shown.space, detail=True)
    if keeping < len(best):
        rows = f"row {keeping + 1}" if keeping + 1 == len(best) else f"rows {keeping + 1} to {len(best)}"
        note(f"{rows}: tight, without that room or by the whole job, and after the others however fast")
    if found.improves is not None and any(row.run.parallel.pp > 1 for row in best[:CANDIDATES]):
        note(f"layers of the {CANDIDATES} fastest are balanced over their stages", detail=True)
    note(*(f"passed over, however fast: {number:,} with {reason}" for reason, number in refused.items()), detail=True)
    if keeping > 1 and best[1].time.seconds < best[0].time.seconds:
        note(f"row 1 is within {TIE:.0%} of the fastest, row 2, and simpler: a mechanism has to save {SIMPLER:.0%}")
    if (tied := ties(best[:keeping] or best)) > 1:
        note(f"rows 1 to {tied} are a tie: step times within {TIE:.0%}, the precision of the prediction")
    graphs = ", and nothing for the pools of CUDA graphs" * (best[0].run.implementation.cuda_graph_impl != "none")
    note(f"free GiB of a row sets {FRAGMENTATION:.1%} of its peak aside for fragmentation{graphs}; the answer is that "
         "of estimate, with row 1's allocator replayed and its whole job")
    note(*shown.times)
    if names := shown.not_timed(best):
        note(f"the time model does not know {', '.join(names)}: times are those of the run without")
    note(*(f"not modelled: {feature}" for feature in unmodelled_features(best[0].run)), *shown.last)

    def version(of_front: int | None, details: bool) -> list[Drawn]:
        kept = [words for words, detail in notes if details or not detail]
        cut = [f"{len(notes) - len(kept)} more notes"] if len(kept) < len(notes) else []
        rows = front[:of_front]
        if len(rows) < len(front) > 1:
            cut.append(f"the Pareto front of {len(front)} {style.noun}s")
        if cut:
            kept.append(f"-v also shows {' and '.join(cut)}")
        drawn = [answer, *_table(title, best, style, args, kept, keeping)]
        if len(rows) > 1 and front != list(best):
            heading = f"Memory against step time (Pareto front): no other {style.noun} is both faster and smaller"
            faster = rows[0].time.seconds < best[0].time.seconds
            without = f"{style.noun}s faster than row 1 of the table above lack the room it keeps, or were passed over"
            drawn += _table(heading, rows, style, args, (without,) * faster)
        return drawn

    if args.format == "html":
        return [_chart(found, ranked, style, gpu), *version(None, True)]
    if args.verbose:
        return version(None, True)
    from bridge_memory.report.screen import first_that_fits

    every = [(number, details) for details in (True, False) for number in FRONT if number or not details]
    return first_that_fits(version(number, details) for number, details in [(None, True), *every])


def _table(
    title: str, rows: Sequence[Row[Any]], style: Style, args: argparse.Namespace, notes: Sequence[str] = (),
    keeping: int | None = None,
) -> list[Drawn]:  # fmt: skip
    """The rows, below what nearly all of them share; as text in columns that fit a line. ``keeping``: after so many
    rows come tight ones."""
    from bridge_memory.report.document import Words

    kept, shared = _kept(style, rows), []
    cells = [style.cells(row) for row in rows]
    if len(rows) >= SHARED_FROM:
        for i in [i for i in kept if style.headings[i] in style.settings]:
            usual = Counter(row[i] for row in cells).most_common(1)[0][0]
            others = [(n, row[i]) for n, row in enumerate(cells, 1) if row[i] != usual]
            if len(others) <= SHARED_BUT * len(rows):
                kept.remove(i)
                but = "; ".join(f"row {n}: {value}" for n, value in others)
                shared.append(f"{style.headings[i]} {usual}" + (f" ({but})" if but else ""))
    if not shared:
        return [_fitting(title, rows, style, kept, args, notes, keeping)]
    above = Words(title, (f"All rows: {', '.join(shared)}",))
    return [above, _fitting("", rows, style, kept, args, notes, keeping)]


def _fitting(
    title: str, rows: Sequence[Row[Any]], style: Style, kept: Sequence[int], args: argparse.Namespace,
    notes: Sequence[str], keeping: int | None,
) -> Grid:  # fmt: skip
    """The rows; as text without spare columns that make the table wider than a line or break its rows, which a note
    says."""
    from bridge_memory.report.plain import lay_out
    from bridge_memory.report.printing import line_width

    def without(left_out: Sequence[str]) -> Grid:
        words = f"no room for {', '.join(left_out)}: a wider terminal shows more, --format csv all"
        rest = [i for i in kept if style.headings[i] not in left_out]
        return _grid(title, rows, style, rest, ((words,) if left_out else ()) + tuple(notes), keeping)

    if args.format != "text":
        return without(())
    there = [heading for heading in style.spare if heading in {style.headings[i] for i in kept}]
    grids = [without(there[:n]) for n in range(len(there) + 1)]
    laid = [lay_out(grid, line_width(sys.stdout)) for grid in grids]
    one_line = (grid for grid, parts in zip(grids, laid, strict=True) if len(parts) == 1 and parts[0].unbroken)
    one_table = (grid for grid, parts in zip(grids, laid, strict=True) if len(parts) == 1)
    return next(one_line, None) or next(one_table, grids[-1])


def _answer(row: Row[Any], shown: Shown, args: argparse.Namespace, keeps: bool) -> Words:
    """The first row, its time, how it fits, and the reserve that it ``keeps``."""
    from bridge_memory.report.document import Words

    style = shown.style
    judged = of_estimate(row.run, shown.gpu)
    time = f"{row.time.seconds:#.3g} s per step, {row.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"
    return Words("", (
        f"Fastest {style.noun}: {style.words(row)}; {time}",
        judged.words,
        *((f"{'Keeps' if keeps else 'Tight: does not keep'} {shown.reserve}",) if shown.found.keeps else ()),
        *shown.change,
    ), "good" if keeps and judged.verdict == "fits" else "open")  # fmt: skip


def of_estimate(run: RunSpec, gpu: Gpu) -> Answer:
    """The answer of ``estimate`` on a row, by the whole job."""
    from bridge_memory.job.job import whole_on
    from bridge_memory.report.answer import answer_of

    result, steps, jobs = whole_on(run, gpu)
    return answer_of(result, steps, jobs=jobs)


def _looked_at(found: Found, style: Style, gpu: Gpu) -> str:
    tight = f"; {found.tight:,} of them are tight: they fit with the least that may lie outside of torch"
    states = f" ({found.without_activations:,} of them by weights, gradients and optimizer states alone)"
    return (
        f"{found.looked_at:,} {style.noun}s evaluated: {len(found.rows):,} fit {gpu.name}, {found.too_large:,} do not"
        + states * (found.without_activations > 0) + tight * (found.tight > 0) + "; stopped early" * found.stopped
    )  # fmt: skip


def _kept(style: Style, rows: Sequence[Row[Any]]) -> list[int]:
    """The columns that say something of these rows."""
    cells = [style.cells(row) for row in rows]
    return [
        i for i, title in enumerate(style.headings)
        if title not in style.hidden and (title in style.always or {row[i] for row in cells} - style.idle)
    ]  # fmt: skip


def _grid(
    title: str, rows: Sequence[Row[Any]], style: Style, kept: Sequence[int], notes: tuple[str, ...] = (),
    keeping: int | None = None,
) -> Grid:  # fmt: skip
    from bridge_memory.report.document import Column, Grid

    titles = [style.headings[i] for i in kept]
    columns = (Column("#"), *(Column(title, words=title in style.of_words) for title in titles))
    cells = map(style.cells, rows)
    tight = [keeping is not None and n >= keeping for n in range(len(rows))]
    numbered = tuple(
        (f"{n} tight" if tight[n - 1] else str(n), *(row[i] for i in kept)) for n, row in enumerate(cells, 1)
    )
    return Grid(title, columns, numbered, None, notes)


def _chart(found: Found, ranked: Ranked, style: Style, gpu: Gpu) -> Chart:
    """Peak over step time: the rows than which none is both faster and smaller, and the fastest of the others."""
    from bridge_memory.report.document import Chart

    def points(rows: Sequence[Row[Any]]) -> list[list[Any]]:
        return [[row.time.seconds, row.peak / GIB, style.words(row)] for row in rows]

    front = front_with(found, ranked.rows)
    others = [row for row in found.best(CHARTED) if row not in front]
    series: list[dict[str, Any]] = [
        {"name": "others that fit", "tone": "some", "line": "", "points": points(others)},
        {"name": "Pareto front", "tone": "predicted", "line": "steps", "dots": True,
         "points": points(front)},
    ]  # fmt: skip
    axes = {"x": {"title": "step by the time model", "unit": "s"}, "y": {"title": f"peak on {gpu.name}", "unit": "GiB"}}
    return Chart("Memory against time", "plot", {**axes, "series": series})


# ---- tables for programs ----


def _records(shown: Shown, ranked: Ranked) -> list[dict[str, Any]]:
    records = [shown.style.record(row) for row in ranked.rows]
    if shown.found.keeps is not None:
        for number, record in enumerate(records):
            record["tight"] = number >= ranked.keeping
    return records


def _csv(records: Sequence[Mapping[str, Any]], headings: Sequence[str]) -> str:
    """``headings``: of a table without rows."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else list(headings), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)
