"""``bridge-memory accuracy RUNS.jsonl`` of runs described in words: a line a figure, residuals by grade and family."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.output import exit_code_of_unread
from bridge_memory.components import GIB

if TYPE_CHECKING:
    from bridge_memory.accuracy.corpus import RecordLine
    from bridge_memory.accuracy.described.outcomes import Outcome, Total
    from bridge_memory.report.document import Chart, Drawn

SCHEMA = "bridge-memory/accuracy-described/1"
_STATUSES = ("counted", "unmodelled", "not compared", "unread")


def run(args: argparse.Namespace, rows: list[RecordLine]) -> int:
    """Score and print. Returns 0, or 1 if half of the rows cannot be read."""
    from bridge_memory.accuracy.described.outcomes import outcomes, share_unread, totals
    from bridge_memory.report.printing import print_blocks

    found = outcomes(rows)
    if args.json:
        document = {
            "schema": SCHEMA, "figures": [o.as_json() for o in found if o.status != "unread"],
            "unread": [{"id": o.id, "grade": o.grade, "reason": o.reason} for o in found if o.status == "unread"],
            "grades": [t._asdict() for t in totals(found)],
            "grades_with_unmodelled": [t._asdict() for t in totals(found, all_predicted=True)],
            "families": [t._asdict() for t in totals(found, "family", all_predicted=True)],
            "share_unread": share_unread(found),
        }  # fmt: skip
        print(json.dumps(document, indent=1))
    else:
        print_blocks(blocks(found, summary=args.summary))
    return exit_code_of_unread(share_unread(found))


def blocks(found: Sequence[Outcome], *, summary: bool = False) -> list[Drawn]:
    """Figures beside predictions, residuals by grade and family, and what each row leaves open."""
    from bridge_memory.accuracy.described.outcomes import totals
    from bridge_memory.report.document import Bullets, Column, Grid

    columns = (
        Column("row", words=True), Column("grade", words=True), Column("figure", words=True), Column("measured"),
        Column("predicted"), Column("residual %"), Column("range", words=True), Column("target", words=True),
        Column("open", words=True),
    )  # fmt: skip
    answer: list[Drawn] = [_scatter(found)]
    predicted = [o for o in found if o.residual is not None]
    if predicted:
        title = "Figures beside predictions, GiB; open: assumptions + unmodelled features"
        answer.append(Grid(title, columns, tuple(map(_cells, predicted))))
    for title, by, every in (
        ("Residuals by grade, figures without unmodelled features", "grade", False),
        ("Residuals by grade, all that are predicted", "grade", True),
        ("Residuals by family, all that are predicted", "family", True),
    ):
        rows = totals(found, by, all_predicted=every)
        if rows:
            answer.append(_totals(title, rows))
    misses = tuple(_misses(found))
    if misses:
        answer.append(Bullets("Outside of their targets, and what their rows leave open or no rule models", misses))
    answer.append(Bullets("In all", tuple(_counts(found))))
    for title, status in (("Not compared", "not compared"), ("Rows that are not read", "unread")):
        items = _by_reason([(o, o.reason) for o in found if o.status == status])
        if items:
            answer.append(Bullets(title, items))
    if not summary:
        assumed = _by_reason([(o, s) for o in found for s in o.assumptions])
        unmodelled = _by_reason([(o, s) for o in found for s in o.unmodelled])
        for title, items in (("Assumed, where rows are silent", assumed), ("Unmodelled features", unmodelled)):
            if items:
                answer.append(Bullets(title, items))
    return answer


def _cells(o: Outcome) -> tuple[str, ...]:
    assert o.measured_bytes is not None and o.predicted_bytes is not None and o.residual is not None
    where = [] if o.rank is None else ["last" if o.rank < 0 else f"rank {o.rank}"]
    if o.after_step:
        where.append(f"step {o.after_step}")
    judged = {True: "within", False: "outside", None: "none"}[o.within]
    return (
        "/".join(o.id.split("/")[-2:]), o.grade, ", ".join((str(o.meaning), *where)), f"{o.measured_bytes / GIB:.2f}",
        f"{o.predicted_bytes / GIB:.2f}", f"{o.residual * 100:+.2f}", _range(o), judged,
        f"{len(o.assumptions)} + {len(o.unmodelled)}",
    )  # fmt: skip


def _range(o: Outcome) -> str:
    """Of a prediction that is no exact number but the middle of a range."""
    if o.range_bytes is None:
        return ""
    least, most = (n / GIB for n in o.range_bytes)
    return f"{'in' if o.inside else 'not in'} {least:.2f} to {most:.2f}"


def _totals(title: str, rows: Sequence[Total]) -> Drawn:
    from bridge_memory.report.document import Column, Grid

    columns = (
        Column("group", words=True), Column("memory", words=True), Column("figures"), Column("rows"), Column("within"),
        Column("mean %"), Column("worst %"), Column("bias %"),
    )  # fmt: skip
    cells = tuple(
        (t.group, t.kind, str(t.figures), str(t.rows), f"{t.within}/{t.targets}" if t.targets else "",
         f"{t.mean * 100:.2f}", f"{t.worst * 100:+.2f}", f"{t.bias * 100:+.2f}")
        for t in rows
    )  # fmt: skip
    return Grid(title, columns, cells)


def _counts(found: Sequence[Outcome]) -> list[str]:
    """Rows and figures by status."""
    rows = len({o.id for o in found})
    unread = len({o.id for o in found if o.status == "unread"})
    words = [f"{rows - unread} of {rows} rows are read"]
    names = {
        "counted": "figures are compared", "unmodelled": "figures are compared, with unmodelled features listed",
        "not compared": "figures are not compared",
    }  # fmt: skip
    for status in _STATUSES[:3]:
        words.append(f"{sum(o.status == status for o in found)} {names[status]}")
    ranges = [o for o in found if o.range_bytes is not None]
    inside = sum(o.inside is True for o in ranges)
    words.append(f"{len(ranges)} predictions are ranges, residuals from the nearer end; {inside} figures lie inside")
    return words


def _misses(found: Sequence[Outcome]) -> Iterator[str]:
    """A line a row: its figures that miss their targets, and the causes that its words allow."""
    for name in dict.fromkeys(o.id for o in found if o.within is False):
        rows = [o for o in found if o.id == name and o.within is False and o.residual is not None]
        off = ", ".join(f"{o.meaning} {o.residual * 100:+.2f} %" for o in rows if o.residual is not None)
        causes = dict.fromkeys(cause for o in rows for cause in (*o.unmodelled, *o.left_open))
        yield f"{name}, {off}: {'; '.join(causes) or 'nothing is left open: a wrong rule'}"


def _by_reason(pairs: Sequence[tuple[Outcome, str]]) -> tuple[str, ...]:
    """A line a reason, with the rows that it is of."""
    rows: dict[str, list[str]] = {}
    for o, reason in pairs:
        if o.id not in rows.setdefault(reason, []):
            rows[reason].append(o.id)
    return tuple(f"{_listed(ids)}: {reason}" for reason, ids in rows.items())


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else f"{', '.join(ids[:3])} and {len(ids) - 3} more"


def _scatter(found: Sequence[Outcome]) -> Chart:
    """Predicted over measured figures, by grade."""
    from bridge_memory.report.document import Chart

    tones = {"A": "predicted", "B": "warn"}
    series: dict[str, dict[str, Any]] = {}
    for o in found:
        if o.measured_bytes is None or o.predicted_bytes is None or o.residual is None:
            continue
        name = f"grade {o.grade}" + (", with unmodelled features" if o.status == "unmodelled" else "")
        tone = tones.get(o.grade, "some") if o.status == "counted" else "some"
        one = series.setdefault(name, {"name": name, "tone": tone, "line": "", "points": []})
        words = f"{o.id}, {o.meaning}: {o.residual:+.1%}"
        one["points"].append([o.measured_bytes / GIB, o.predicted_bytes / GIB, words])
    x, y = ({"title": title, "unit": "GiB", "log": True} for title in ("measured", "predicted"))
    data = {"x": x, "y": y, "diagonal": True, "series": [series[name] for name in sorted(series)]}
    return Chart("Predicted over measured", "plot", data)
