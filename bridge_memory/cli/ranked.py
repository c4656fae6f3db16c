"""What both searches print of what they found: of megatron-core's layouts, and of other engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.report.document import Chart
    from bridge_memory.report.gpus import Gpu

Found = TypeVar("Found")

#: Rows that a chart shows, at most.
CHARTED = 300


def refused_by_field(refused: Counter[str]) -> list[str]:
    """A note of the fields that refuse most; none where nothing was refused."""
    if not refused:
        return []
    return ["refused, by field: " + ", ".join(f"{name} {number:,}" for name, number in refused.most_common(6))]


def tie_of_rows(tied: int) -> list[str]:
    """A note of how many of the first rows cannot be told apart; none for the first alone."""
    from bridge_memory.plan.found import TIE

    if tied <= 1:
        return []
    return [f"rows 1 to {tied} are a tie: step times that differ by {TIE:.0%} or less cannot be told apart"]


def without_times(names: Sequence[str]) -> list[str]:
    """A note of what the time model leaves out."""
    if not names:
        return []
    return [f"the time model does not know {', '.join(names)}: times are those of the run without"]


def memory_against_time(
    front: Iterable[Found], others: Iterable[Found], words: Callable[[Found], str], gpu: Gpu
) -> Chart:
    """Peak over step time of rows with ``time.seconds`` and ``peak``: the front, and the fastest of the others."""
    from bridge_memory.report.document import Chart

    def points(rows: Iterable[Any]) -> list[list[Any]]:
        return [[row.time.seconds, row.peak / 2**30, words(row)] for row in rows]

    series: list[dict[str, Any]] = [
        {"name": "others that fit", "tone": "some", "line": "", "points": points(others)},
        {"name": "no other is both faster and smaller", "tone": "predicted", "line": "steps", "dots": True,
         "points": points(front)},
    ]  # fmt: skip
    axes = {"x": {"title": "step by the time model", "unit": "s"}, "y": {"title": f"peak on {gpu.name}", "unit": "GiB"}}
    return Chart("Memory against time", "plot", {**axes, "series": series})


def as_csv(records: Sequence[Mapping[str, Any]], headings: Sequence[str]) -> str:
    """``headings``: of a table without rows."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else list(headings), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().rstrip("\n")


def as_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def row_to_emit(found: Sequence[Found], number: int, what: str) -> Found:
    """``--row``, which counts from 1; ``what`` they are. Raises SpecError where there is no such row."""
    if not found:
        raise SpecError("nothing fits; there is no row to emit")
    if number > len(found):
        raise SpecError(f"--row {number} does not exist; {len(found)} {what} fit")
    return found[number - 1]
