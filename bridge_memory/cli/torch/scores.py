"""``bridge-memory accuracy RUNS.jsonl`` of engines outside of megatron-core: figures beside predictions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.output import exit_code_of_unread
from bridge_memory.components import GIB
from bridge_memory.residual import SIGN_PERCENT, percent

if TYPE_CHECKING:
    from bridge_memory.accuracy.corpus import RecordLine
    from bridge_memory.accuracy.torch.records import Outcome
    from bridge_memory.report.document import Chart, Drawn

SCHEMA = "bridge-memory/accuracy-torch/3"


def run(args: argparse.Namespace, rows: list[RecordLine]) -> int:
    """Score and print. Returns 0, or 1 if half of the rows cannot be read."""
    from bridge_memory.accuracy.torch.records import outcomes, totals
    from bridge_memory.report.printing import print_blocks

    found = outcomes(rows)
    if args.json:
        document = {
            "schema": SCHEMA,
            "figures": [_as_json(o) for o in found if o.status != "unread"],
            "unread": [{"id": o.id, "source": o.source, "reason": o.reason} for o in found if o.status == "unread"],
            "grades": [t._asdict() for t in totals(found)], "not_scored": len(rows) - len({o.id for o in found}),
        }  # fmt: skip
        print(json.dumps(document, indent=1))
    else:
        print_blocks(blocks(found, len(rows)))
    unread = sum(o.status == "unread" for o in found)
    return exit_code_of_unread(unread / max(1, len({o.id for o in found})))


def _scatter(found: Sequence[Outcome]) -> Chart:
    """Predicted over measured figures, by grade."""
    from bridge_memory.report.document import Chart

    kinds = {("A", "counted"): "predicted", ("B", "counted"): "warn"}
    series: dict[str, dict[str, Any]] = {}
    for o in found:
        if o.measured_bytes is None or o.predicted_bytes is None or o.error is None:
            continue
        name = f"grade {o.grade}" if o.status == "counted" else "with unmodelled features, not counted"
        one = series.setdefault(name, {"name": name, "tone": kinds.get((o.grade, o.status), "some"), "line": "",
                                       "points": []})  # fmt: skip
        words = ", ".join(filter(None, (o.id, o.model, o.what, o.meaning)))
        one["points"].append([o.measured_bytes / GIB, o.predicted_bytes / GIB, f"{words}: {percent(o.error)}%"])
    x, y = ({"title": title, "unit": "GiB", "log": True} for title in ("measured", "predicted"))
    data = {"x": x, "y": y, "diagonal": True, "series": [series[name] for name in sorted(series)]}
    return Chart("Predicted over measured", "plot", data)


def _as_json(o: Outcome) -> dict[str, Any]:
    return {**o._asdict(), "assumptions": list(o.assumptions), "error": o.error}


def blocks(found: Sequence[Outcome], rows: int) -> list[Drawn]:
    """Rows that are counted, rows with features that are not modelled, errors by grade, and rows that are not read."""
    from bridge_memory.accuracy.torch.records import TARGETS, totals
    from bridge_memory.report.document import Bullets, Column, Grid

    columns = (
        Column("row"), Column("run", words=True), Column("grade", words=True), Column("figure", words=True),
        Column("measured"), Column("predicted"), Column("%"),
    )  # fmt: skip

    def cells(o: Outcome) -> tuple[str, ...]:
        assert o.measured_bytes is not None and o.predicted_bytes is not None and o.error is not None
        return (
            o.id, ", ".join(filter(None, (o.source.rpartition("/")[2], o.model, o.what))), o.grade, o.meaning,
            f"{o.measured_bytes / GIB:.2f}", f"{o.predicted_bytes / GIB:.2f}", percent(o.error),
        )  # fmt: skip

    answer: list[Drawn] = [_scatter(found)]
    shown = (
        (f"Counted, GiB; %: {SIGN_PERCENT}", "counted"),
        (f"Not counted: predicted without what is named below, GiB; %: {SIGN_PERCENT}", "unmodelled"),
    )
    for title, status in shown:
        chosen = [o for o in found if o.status == status]
        if chosen:
            answer.append(Grid(title, columns, tuple(map(cells, chosen))))
    words = []
    for t in totals(found):
        rows_of_grade = len({o.id for o in found if o.grade == t.grade})
        words.append(
            f"grade {t.grade}: {t.within} of {t.figures} figures within {TARGETS[t.grade]:.0%} ({t.rows} of "
            f"{rows_of_grade} rows, {t.groups} of source and model); mean over source and model {t.mean:.1%}, "
            f"worst {t.worst:.1%}"
        )
    words.append(f"{rows - len({o.id for o in found})} rows of other grades are not scored")
    answer.append(Bullets("In all", tuple(words)))
    unmodelled = "Unmodelled features of rows that are not counted"
    for title, status in ((unmodelled, "unmodelled"), ("Rows that are not read", "unread")):
        reasons: dict[str, list[str]] = {}
        for o in found:
            if o.status == status:
                reasons.setdefault(o.reason, []).append(o.id)
        if reasons:
            items = (f"{', '.join(ids)}: {reason}" for reason, ids in reasons.items())
            answer.append(Bullets(title, tuple(items)))
    assumed: dict[str, list[str]] = {}
    for o in found:
        for sentence in o.assumptions if o.status == "counted" else ():
            if o.id not in assumed.setdefault(sentence, []):
                assumed[sentence].append(o.id)
    if assumed:
        answer.append(Bullets("Assumed of what is counted", tuple(f"{', '.join(i)}: {s}" for s, i in assumed.items())))
    return answer
