"""A page in one HTML file of at most ``MOST_BYTES``; it needs no network and opens from a mail.

Verdict and tables need no JavaScript; ``charts.js`` draws the charts from the JSON inside. A content security policy
allows only these scripts and no fetches.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import Any, NamedTuple

from bridge_memory.estimation import Estimate
from bridge_memory.files import read_text
from bridge_memory.job.job import Job
from bridge_memory.report.answer import fit_ticks
from bridge_memory.report.decided import TITLE
from bridge_memory.report.document import Bullets, Chart, Drawn, Grid, Pairs, Words
from bridge_memory.report.page.data import page_data
from bridge_memory.report.phases import job_line, job_table
from bridge_memory.report.table import ALL_MODELLED, alike
from bridge_memory.report.units import format_bytes, format_count, format_ticks
from bridge_memory.verdict import Fit

FOLDER = os.path.dirname(os.path.abspath(__file__))
#: Of the whole file.
MOST_BYTES = 300_000


def asset(name: str) -> str:
    """The text of a file of this folder, such as "charts.js"."""
    return read_text(os.path.join(FOLDER, name), "reinstall the package")


def _script(*names: str) -> str:
    """Modules of this folder joined into one, in the order of ``names``; their import lines are dropped."""
    lines = (line for name in names for line in asset(name).splitlines(keepends=True))
    return "".join(line for line in lines if not line.startswith("import "))


class Measured(NamedTuple):
    """Measured figures of a run, drawn over its estimate."""

    #: The comparison in words.
    words: Words
    #: Stage -> peak and memory between steps, bytes; None where not measured.
    stages: Mapping[int, tuple[int | None, int | None]]
    #: Further tables and charts.
    blocks: Sequence[Drawn] = ()


def estimate_page(
    result: Estimate, fits: Sequence[Fit] = (), *, flags: str = "", fix: str = "", unit: str = "GiB",
    stage: int | None = None, measured: Measured | None = None, jobs: Sequence[Job] = (),
) -> str:  # fmt: skip
    """``result`` as one HTML file.

    ``stage``: drawn first (default: the stage with the highest peak); ``measured``: drawn over it; ``jobs``: on GPUs of
    ``fits``, that on a single one drawn above the stages. Where the file would exceed ``MOST_BYTES``, timelines and
    treemaps of the stages with the lowest peaks are left out.
    """
    first = result.peak_stage.stage if stage is None else stage
    shown = next(group[0].stage for group in alike(result.stages) if first in [s.stage for s in group])
    data = page_data(result, fits, flags=flags, fix=fix, unit=unit, jobs=jobs)
    data["shown"] = shown
    if measured is not None:
        data["measured"] = {
            str(group[0].stage): found for group in alike(result.stages)
            if (found := _highest([measured.stages.get(s.stage, (None, None)) for s in group]))
        }  # fmt: skip
    lowest_first = sorted(data["stages"], key=lambda s: (s["stage"] == shown, s["peak_bytes"]))
    phases = _phases(jobs[0], unit) if len(fits) == 1 and jobs else ""
    page = _estimate_html(data, measured, phases)
    for left_out in lowest_first[:-1]:
        if len(page.encode()) <= MOST_BYTES:
            break
        del data["timelines"][str(left_out["stage"])], data["treemaps"][str(left_out["stage"])]
        page = _estimate_html(data, measured, phases)
    return page


def _highest(found: Sequence[tuple[int | None, int | None]]) -> dict[str, int]:
    """The largest figures of a group of equal stages."""
    names = ("peak_bytes", "static_bytes")
    columns = ([value for value in column if value is not None] for column in zip(*found, strict=True))
    return {name: max(column) for name, column in zip(names, columns, strict=True) if column}


def blocks_page(
    title: str, blocks: Iterable[Drawn], flags: str = "", text: str = "", *, under: str = "", refresh: int = 0
) -> str:
    """A printed report as one HTML file, ``text`` unchanged after its blocks. ``under``: a line under the title;
    ``refresh``: seconds after which a browser reloads the file."""
    shown = list(blocks)
    beneath = f'<p class="sub">{escape(under)}</p>' if under else ""
    parts = [f"<header><div><h1>{escape(title)}</h1>{beneath}</div>{_THEME}</header>", "<main>"]
    parts += [_block(block) for block in shown]
    if text:
        parts.append(f"<pre>{escape(text)}</pre>")
    if flags:
        parts.append(f"<section><h2>Reproduce</h2><pre id=\"flags\">{escape(flags)}</pre></section>")
    charts = [block for block in shown if isinstance(block, Chart)]
    if charts:
        parts.append("<noscript><p>The charts need JavaScript; the tables work without.</p></noscript>")
    names = (*_CHARTS, "blocks.js") if charts else ()
    return _document(
        title, "\n".join([*parts, "</main>"]), _script(*names, "theme.js"), _held_charts(charts), refresh=refresh
    )


#: Modules that draw.
_CHARTS = ("charts.js", "rollout.js", "plots.js")


def _held_charts(charts: Iterable[Chart]) -> dict[str, Any]:
    drawn = [{"kind": chart.kind, "data": chart.data} for chart in charts]
    return {"charts": drawn} if drawn else {}


def _document(title: str, body: str, script: str, data: Mapping[str, Any], *, refresh: int = 0) -> str:
    """``data``: what the script reads, by the id of the element that holds it."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    held = ""
    for name, value in data.items():
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
        held += f'<script type="application/json" id="{name}">{text}</script>\n'
    again = f'<meta http-equiv="refresh" content="{refresh}">\n' if refresh else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{again}'
        f"<title>{escape(title)}</title>\n<style>\n{asset('style.css')}{asset('report.css')}</style>\n</head>\n<body>\n"
        f'{body}\n{held}<script type="module">{script}</script>\n</body>\n</html>\n'
    )


_THEME = '<button type="button" class="bm-tool" id="theme">light / dark</button>'


def _estimate_html(data: dict[str, Any], measured: Measured | None, phases: str) -> str:
    script = _script(*_CHARTS, "report.js", "theme.js")
    verdict, title = data["verdict"], data["title"]
    kind = (verdict["answer"] or "none").replace(" ", "-")
    evidence = "".join(
        f'<p class="evidence">{escape(_capital(verdict[name]))}</p>' for name in ("evidence", "band_words")
    )
    body = Template(asset("report.html")).substitute(
        title=escape(title), peak=escape(data["peak"]["words"]), theme=_THEME, kind=escape(kind),
        words=escape(_capital(verdict["words"])), evidence=evidence, stages=_stage_table(data),
        components=_component_rows(data), known=_KNOWN, gpus=_gpu_section(data),
        configuration=_pairs(data["configuration"]),
        decisive=_decisive(data["decisive"]),
        assumptions=_list(data["assumptions"], "nothing beyond the configuration"),
        unmodelled=_list(
            [f"{feature['what']} ({feature['moves']})" for feature in data["not_modelled"]],
            ALL_MODELLED,
        ),
        flags=_flags(data["flags"]), phases=phases,
        measured="" if measured is None else "\n".join(map(_block, (measured.words, *measured.blocks))),
    )
    held = _held_charts(block for block in (measured.blocks if measured else ()) if isinstance(block, Chart))
    return _document(f"{title}: GPU memory", body, script, {"data": data, **held})


_KNOWN = (
    'Basis: <span class="known known-exact">exact</span>: counted from the parameters; '
    '<span class="known known-formula">formula</span>: from the source code of the packages; '
    '<span class="known known-measured">measured</span>: in runs; '
    '<span class="known known-assumed">assumed</span>: depends on the assumptions below.'
)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pairs(pairs: Iterable[Sequence[str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in pairs)


def _list(items: Sequence[str], nothing: str) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items or [nothing]) + "</ul>"


def _decisive(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    title = f'<section aria-labelledby="h-decides"><h2 id="h-decides">{TITLE}</h2>'
    return f"{title}\n{_list(lines, '')}</section>"


def _flags(flags: str) -> str:
    if not flags:
        return ""
    return (
        '<section aria-labelledby="h-flags"><h2 id="h-flags">Reproduce</h2>'
        f'<pre id="flags">{escape(flags)}</pre><button type="button" class="bm-tool" id="copy">copy</button></section>'
    )


_NUMBER, _WORST = ' class="number"', ' class="worst"'


def _table(caption: str, heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]], worst: int = -1) -> str:
    """``heads``: title, and whether the column holds numbers."""

    def cells(tag: str, row: Sequence[str], scope: str = "") -> str:
        return "".join(
            f"<{tag}{scope}{_NUMBER if number else ''}>{escape(cell)}</{tag}>"
            for cell, (_, number) in zip(row, heads, strict=True)
        )

    head = cells("th", [title for title, _ in heads], ' scope="col"')
    body = "".join(
        f"<tr{_WORST if i == worst else ''}>{cells('td', row)}</tr>" for i, row in enumerate(rows)
    )
    shown = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{shown}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _phases(job: Job, unit: str) -> str:
    """The line of the whole job, a place for its strip, and its table."""
    table = job_table(job, unit)
    return (
        f'<section aria-labelledby="h-phases"><h2 id="h-phases">{escape(table.title)}</h2>{_block(job_line(job, unit))}'
        '<div id="phases"></div><details id="static-phases" open><summary>as a table</summary>'
        f"{_grid(table)}</details>{_small(table.notes)}</section>"
    )


def _stage_table(data: dict[str, Any]) -> str:
    roles = list(data["stages"][0]["parts"])
    heads = [
        ("stage", False), ("layers", False), ("parameters", True), *((role, True) for role in roles), ("peak", True),
        ("peak in", False),
    ]
    rows = [
        (s["label"], f"{s['num_layers']}: {s['layers']}" if s["layers"] else "0", format_count(s["parameters"]),
         *(format_bytes(s["parts"][role]) for role in roles), format_bytes(s["peak_bytes"]),
         f"{s['peak_phase']}: {s['peak_operation']}")
        for s in data["stages"]
    ]
    worst = max(range(len(rows)), key=lambda i: data["stages"][i]["peak_bytes"])
    return _table("", heads, rows, worst if len(rows) > 1 else -1)


def _component_rows(data: dict[str, Any]) -> str:
    """Components of the stage shown first; the script replaces them when another is chosen."""
    stage = next(s for s in data["stages"] if s["stage"] == data["shown"])
    return "".join(
        f"<tr><td>{escape(c['name'])}</td><td class=\"number\">{format_bytes(c['bytes'])}</td><td class=\"number\">"
        f"{100 * c['bytes'] / stage['peak_bytes']:.1f} %</td><td>{escape(c['provenance'])}</td>"
        f"<td>{escape(c['shard'])}</td></tr>"
        for c in stage["components"] if c["bytes"]
    )


def _gpu_section(data: dict[str, Any]) -> str:
    if not data["gpus"]:
        return ""
    head = '<section aria-labelledby="h-gpus"><h2 id="h-gpus">GPUs</h2>'
    return f"{head}{_scrolled('GPUs', _gpu_table(data))}</section>"


def _gpu_table(data: dict[str, Any]) -> str:
    heads = [("GPU", False), ("usable", True), ("peak", True), ("margin", True), ("free", True), ("verdict", False)]
    rows = []
    for g in data["gpus"]:
        of_card = fit_ticks(g["capacity_bytes"], g["peak_bytes"], g["headroom_bytes"], "GiB")
        numbers = [f"{format_ticks(n, 'GiB')} GiB" for n in of_card]
        rows.append((g["gpu"], *numbers, g["verdict"] + (f": no {g['lacks']}" if g["lacks"] else "")))
    return _table("margin: CUDA context, NCCL buffers and fragmentation; usable = peak + margin + free", heads, rows)


#: Tone of words -> the kind of a verdict.
_TONES = {"good": "fits", "bad": "does-not-fit", "open": "tight"}


def _block(block: Drawn) -> str:
    title = f"<h2>{escape(block.title)}</h2>" if block.title else ""
    if isinstance(block, Chart):
        return f'<section>{title}<div class="bm-here"></div></section>'
    if isinstance(block, Pairs):
        return f"<section>{title}<dl>{_pairs(block.pairs)}</dl></section>"
    if isinstance(block, Bullets):
        return f"<section>{title}{_list(block.items, '')}</section>"
    if isinstance(block, Words):
        if block.tone:
            words = "".join(f"<p>{escape(line)}</p>" for line in block.lines)
            return f'<section class="verdict {_TONES[block.tone]}">{words}</section>'
        return f"<section>{title}{''.join(f'<p>{escape(line)}</p>' for line in block.lines)}</section>"
    return f"<section>{title}{_grid(block)}{_small(block.notes)}</section>"


def _grid(block: Grid) -> str:
    heads = [(column.title, not column.words) for column in block.columns]
    worst = -1 if block.emphasis is None else block.emphasis
    return _scrolled(block.title or "table", _table("", heads, block.rows, worst))


def _scrolled(name: str, table: str) -> str:
    """A table that may be wider than the page; keys scroll it."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{table}</div>'


def _small(notes: Iterable[str]) -> str:
    return "".join(f'<p class="sub">{escape(note)}</p>' for note in notes)
