"""The ways to ask for the numbers of one estimate, each as stages: what it says a stage holds, in bytes."""

from __future__ import annotations

import csv
import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bridge_memory import Estimate, explain, peaks
from bridge_memory.components import Role
from bridge_memory.evidence import evidence_of
from bridge_memory.report.answer import answer_of, brief
from bridge_memory.report.document import Grid
from bridge_memory.report.json import estimate_to_json
from bridge_memory.report.page.data import treemap_data
from bridge_memory.report.page.one_file import estimate_page
from bridge_memory.report.short import short_blocks
from bridge_memory.report.snapshot import snapshot
from bridge_memory.report.table import components_csv, estimate_blocks
from bridge_memory.report.trace import perfetto
from bridge_memory.result import StageEstimate
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.verdict import Fit


class Stage(NamedTuple):
    """What a way says of one stage. None: it does not say."""

    peak: int | None = None
    static: int | None = None
    roles: Mapping[str, int] | None = None
    #: Bytes by the component's name, summed over components of one name.
    components: Mapping[str, int] | None = None


def summed(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Bytes by name, without what has none."""
    out: Counter[str] = Counter()
    for name, nbytes in pairs:
        out[name] += nbytes
    return {name: nbytes for name, nbytes in out.items() if nbytes}


def of_estimate(stage: StageEstimate) -> Stage:
    return Stage(
        stage.peak_bytes, stage.static_bytes, summed([(str(c.role), c.bytes) for c in stage.components]),
        summed([(c.name, c.bytes) for c in stage.components]),
    )  # fmt: skip


Stages = dict[int, Stage]


def by_explain(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    return {s.stage: of_estimate(explain(answer.run, s.stage)) for s in answer.stages}


def by_peaks(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    return {s.stage: Stage(s.peak_bytes, s.static_bytes) for s in peaks(answer.run)}


def of_json(stages: Sequence[Mapping[str, Any]]) -> Stages:
    """The totals that JSON has by role, and its components."""
    named = {"activation": "activation_bytes", "transient": "transient_bytes"}
    out = {}
    for s in stages:
        roles = {str(role): s[named.get(str(role), f"{role}_bytes")] for role in Role}
        listed = s.get("components")
        if listed is not None:
            assert summed([(c["role"], c["bytes"]) for c in listed]) == {k: v for k, v in roles.items() if v}
        parts = None if listed is None else summed([(c["name"], c["bytes"]) for c in listed])
        out[s["stage"]] = Stage(s["peak_bytes"], s["static_bytes"], {k: v for k, v in roles.items() if v}, parts)
    return out


def by_json(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    document = json.loads(json.dumps(estimate_to_json(answer, fits)))
    found = of_json(document["stages"])
    assert document["peak"]["bytes"] == found[document["peak"]["stage"]].peak
    return found


def by_csv(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    return of_csv(components_csv(answer))


def of_csv(text: str) -> Stages:
    rows = list(csv.DictReader(io.StringIO(text)))
    out = {}
    for number in dict.fromkeys(int(row["stage"]) for row in rows):
        here = [(row, int(row["bytes"])) for row in rows if int(row["stage"]) == number]
        out[number] = Stage(
            sum(n for _, n in here), None, summed([(row["role"], n) for row, n in here]),
            summed([(row["component"], n) for row, n in here]),
        )  # fmt: skip
    return out


#: Headings of the table of roles.
HEADS = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "buffers": "buffers",
         "activations": "activation", "temporaries": "transient"}  # fmt: skip


def numbers(text: str) -> list[int]:
    """ "0-2, 5 *" -> 0, 1, 2, 5."""
    out: list[int] = []
    for part in text.replace("*", "").split(","):
        first, _, last = part.strip().partition("-")
        out += range(int(first), int(last or first) + 1)
    return out


def grid(blocks: Sequence[object], title: str) -> Grid:
    return next(b for b in blocks if isinstance(b, Grid) and b.title.startswith(title))


def by_text(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    """The tables of ``estimate -v``, in bytes."""
    blocks = estimate_blocks(answer, fits, unit="bytes")
    static = {n: int(row[4].replace(",", "")) for row in grid(blocks, "Pipeline stages").rows for n in numbers(row[0])}
    memory = grid(blocks, "Memory of one rank at the peak")
    heads = [HEADS.get(column.title) for column in memory.columns]
    out = {}
    for row in memory.rows:
        cells = [int(cell.replace(",", "")) for cell in row[1:]]
        roles = {head: n for head, n in zip(heads[1:], cells, strict=True) if head and n}
        for number in numbers(row[0]):
            out[number] = Stage(cells[-1], static[number], roles)
    why = grid(blocks, "Why ")
    assert int(why.rows[-1][0].replace(",", "")) == sum(int(r[0].replace(",", "")) for r in why.rows[:-1])
    worst = answer.peak_stage.stage
    assert int(why.rows[-1][0].replace(",", "")) == out[worst].peak
    return out


def by_short_text(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    """The first screen, in bytes: stages of the highest peaks."""
    rows = grid(short_blocks(answer, fits, unit="bytes"), "Memory of one rank").rows
    return {
        number: Stage(int(row[4].replace(",", "")), int(row[2].replace(",", "")))
        for row in rows for number in numbers(row[0])
    }  # fmt: skip


def by_html(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    """The JSON in the HTML report's own text: stages, and the peaks that its charts of a step mark."""
    text = estimate_page(answer, fits, flags="")
    page, _ = json.JSONDecoder().raw_decode(text[text.index('{"schema"'):])
    out = {}
    for s in page["stages"]:
        parts = {role: n for role, n in s["parts"].items() if n}
        named = summed([(c["name"], c["bytes"]) for c in s["components"]])
        for number in numbers(s["label"]):
            out[number] = Stage(s["peak_bytes"], s["static_bytes"], parts, named)
    for number, chart in page["timelines"].items():
        assert chart["peak"]["bytes"] == out[int(number)].peak, f"chart of stage {number}"
    assert page["peak"]["bytes"] == out[page["peak"]["stage"]].peak
    return out


def drawn_stages(answer: Estimate) -> list[int]:
    """First, fullest and last."""
    return sorted({0, answer.peak_stage.stage, len(answer.stages) - 1})


def by_treemap(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    out = {}
    for n in drawn_stages(answer):
        tree = treemap_data(answer, n)
        check_sums(tree)
        out[n] = Stage(tree["bytes"], None, summed([(c["role"], c["bytes"]) for c in tree["children"]]),
                       summed([(c["name"], c["bytes"]) for c in tree["children"]]))  # fmt: skip
    return out


def check_sums(node: Mapping[str, Any]) -> None:
    if node.get("children"):
        assert sum(child["bytes"] for child in node["children"]) == node["bytes"], node["name"]
        for child in node["children"]:
            check_sums(child)


def by_perfetto(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    """The highest point of the counter, whose parts add up to it; the first is between steps."""
    out = {}
    for n in drawn_stages(answer):
        events = json.loads(perfetto(answer, n))["traceEvents"]
        totals = [e["args"]["total"] for e in events if e["name"] == "allocated, bytes" and e["pid"] == n]
        parts = [sum(e["args"].values()) for e in events if e["name"] == "memory, bytes" and e["pid"] == n]
        assert totals == parts
        out[n] = Stage(max(totals[1:]))
    return out


def by_replay(answer: Estimate, fits: Sequence[Fit]) -> Stages:
    """The most bytes alive in the memory snapshot's trace of allocations, and those alive at its end."""
    out = {}
    for n in drawn_stages(answer):
        data = pickle.loads(snapshot(answer, n))
        alive = highest = 0
        for event in data["device_traces"][0]:
            alive += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
            highest = max(highest, alive)
        out[n] = Stage(highest)
    return out


WAYS: dict[str, Callable[[Estimate, Sequence[Fit]], Stages]] = {
    "explain": by_explain, "peaks": by_peaks, "json": by_json, "csv": by_csv, "text": by_text,
    "first screen": by_short_text, "html": by_html, "treemap": by_treemap, "perfetto": by_perfetto,
    "snapshot": by_replay,
}  # fmt: skip


class SaidBand(NamedTuple):
    """The band of the peak as a way says it, bytes."""

    least: int
    most: int


_BAND = re.compile(r"90% band:? ([\d,]+) to ([\d,]+) bytes")


def band_in_text(text: str) -> SaidBand | None:
    """Of text in bytes, perhaps wrapped."""
    found = _BAND.search(" ".join(text.split()))
    return None if found is None else SaidBand(*(int(n.replace(",", "")) for n in found.groups()))


def band_in_json(band: Mapping[str, Any] | None) -> SaidBand | None:
    return None if band is None else SaidBand(band["least_bytes"], band["most_bytes"])


def expected_band(answer: Estimate, gpu: str) -> SaidBand | None:
    """Of what the measured runs of the kind say around the peak on ``gpu``, which is of the estimate's generation."""
    known = evidence_of(answer.run, find_gpu(gpu)).band
    peak = answer.peak_stage.peak_bytes
    return None if known is None else SaidBand(round(peak / (1 - known.low)), round(peak / (1 - known.high)))


def bands(answer: Estimate, fits: Sequence[Fit]) -> dict[str, SaidBand | None]:
    """The band by every way that shows an answer."""
    document = estimate_to_json(answer, fits)
    page, _ = json.JSONDecoder().raw_decode((text := estimate_page(answer, fits))[text.index('{"schema"'):])
    said = answer_of(answer, fits, unit="bytes")
    titles = {"text": estimate_blocks, "first screen": short_blocks}
    shown = {name: band_in_text("\n".join(make(answer, fits, unit="bytes")[0].lines)) for name, make in titles.items()}
    return {
        **shown, "brief": band_in_text(brief(answer, fits, said, "bytes")),
        "json": band_in_json(document["verdict"]["band"]), "json's GPU": band_in_json(document["fits"][0]["band"]),
        "html": band_in_json(page["verdict"]["band"]), "html's GPU": band_in_json(page["gpus"][0]["band"]),
    }  # fmt: skip


def differences(found: Stages, answer: Estimate) -> list[str]:
    """Where a way says something else than the estimate."""
    out = []
    for number, said in found.items():
        expected = of_estimate(answer.stages[number])
        for name, mine, theirs in zip(Stage._fields, said, expected, strict=True):
            if mine is not None and mine != theirs:
                out.append(f"stage {number}, {name}: {mine} is not {theirs}")
    return out


__all__ = [
    "WAYS", "Stage", "Stages", "band_in_json", "band_in_text", "bands", "differences", "expected_band", "of_csv",
    "of_estimate", "of_json",
]  # fmt: skip
