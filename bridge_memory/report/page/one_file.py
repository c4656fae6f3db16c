"""A page in one HTML file: no network, opens from a mail, at most ``MOST_BYTES``.

The verdict and the tables are there without JavaScript; the charts are drawn by ``charts.js`` from the JSON inside. A
content security policy lets nothing but these very scripts run and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from string import Template
from typing import Any

from bridge_memory.estimate import Estimate
from bridge_memory.files import read_text
from bridge_memory.report.document import Block, Bullets, Pairs, Words
from bridge_memory.report.gpus import Fit
from bridge_memory.report.page.data import page_data
from bridge_memory.report.table import alike
from bridge_memory.report.units import format_bytes, format_count

FOLDER = os.path.dirname(os.path.abspath(__file__))
#: Of the whole file.
MOST_BYTES = 300_000
_IMPORT = "import { formatBytes, html, peakTreemap, stageBars, stepTimeline } from \"./charts.js\";\n"


def asset(name: str) -> str:
    """The text of a file of this folder, such as "charts.js"."""
    return read_text(os.path.join(FOLDER, name), "reinstall the package")


def estimate_page(
    result: Estimate, fits: Sequence[Fit] = (), *, flags: str = "", fix: str = "", unit: str = "GiB",
    stage: int | None = None,
) -> str:  # fmt: skip
    """``result`` as one HTML file. ``stage``: drawn first (default: that of the highest peak). Where the file would
    grow beyond ``MOST_BYTES``, timelines and treemaps of the stages with the lowest peaks are left out."""
    first = result.peak_stage.stage if stage is None else stage
    shown = next(group[0].stage for group in alike(result.stages) if first in [s.stage for s in group])
    data = page_data(result, fits, flags=flags, fix=fix, unit=unit)
    data["shown"] = shown
    lowest_first = sorted(data["stages"], key=lambda s: (s["stage"] == shown, s["peak_bytes"]))
    page = _estimate_html(data)
    for left_out in lowest_first[:-1]:
        if len(page.encode()) <= MOST_BYTES:
            break
        del data["timelines"][str(left_out["stage"])], data["treemaps"][str(left_out["stage"])]
        page = _estimate_html(data)
    return page


def blocks_page(title: str, blocks: Iterable[Block], flags: str = "", text: str = "") -> str:
    """A printed report, block by block, as one HTML file without charts; ``text`` after them, as it is."""
    parts = [f"<header><div><h1>{escape(title)}</h1></div>{_THEME}</header>", "<main>"]
    parts += [_block(block) for block in blocks]
    if text:
        parts.append(f"<pre>{escape(text)}</pre>")
    if flags:
        parts.append(f"<section><h2>Reproduce</h2><pre id=\"flags\">{escape(flags)}</pre></section>")
    return _document(title, "\n".join([*parts, "</main>"]), asset("theme.js"))


def _document(title: str, body: str, script: str, data: dict[str, Any] | None = None) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )
    held = ""
    if data is not None:
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")
        held = f'<script type="application/json" id="data">{text}</script>\n'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{asset('style.css')}{asset('report.css')}</style>\n</head>\n<body>\n"
        f'{body}\n{held}<script type="module">{script}</script>\n</body>\n</html>\n'
    )


_THEME = '<button type="button" class="bm-tool" id="theme">light / dark</button>'


def _estimate_html(data: dict[str, Any]) -> str:
    charts = asset("charts.js")
    main = asset("report.js")
    assert _IMPORT in main, "report.js imports what it uses of charts.js in one line"
    script = charts + main.replace(_IMPORT, "") + asset("theme.js")
    verdict, title = data["verdict"], data["title"]
    kind = (verdict["answer"] or "none").replace(" ", "-")
    evidence = f'<p class="evidence">{escape(_capital(verdict["evidence"]))}</p>'
    body = Template(asset("report.html")).substitute(
        title=escape(title), peak=escape(data["peak"]["words"]), theme=_THEME, kind=escape(kind),
        words=escape(_capital(verdict["words"])), evidence=evidence, stages=_stage_table(data),
        components=_component_rows(data), known=_KNOWN, gpus=_gpu_table(data),
        configuration=_pairs(data["configuration"]),
        assumptions=_list(data["assumptions"], "nothing beyond the configuration"),
        gaps=_list(
            [f"{gap['what']} ({gap['moves']})" for gap in data["not_modelled"]],
            "no option in use is known to be left out",
        ),
        flags=_flags(data["flags"]),
    )
    return _document(f"{title}: GPU memory", body, script, data)


_KNOWN = (
    '<span class="known known-exact">exact</span> follows from the parameters, '
    '<span class="known known-formula">formula</span> from the source of the packages, '
    '<span class="known known-measured">measured</span> was measured in runs, '
    '<span class="known known-assumed">assumed</span> depends on what the assumptions say.'
)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _pairs(pairs: Iterable[Sequence[str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in pairs)


def _list(items: Sequence[str], nothing: str) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items or [nothing]) + "</ul>"


def _flags(flags: str) -> str:
    if not flags:
        return ""
    return (
        '<section aria-labelledby="h-flags"><h2 id="h-flags">Reproduce</h2>'
        f'<pre id="flags">{escape(flags)}</pre><button type="button" class="bm-tool" id="copy">copy</button></section>'
    )


_NUMBER, _WORST = ' class="number"', ' class="worst"'


def _table(caption: str, heads: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str]], worst: int = -1) -> str:
    """``heads``: title, and whether it is of numbers."""

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
    """Of the stage that is shown first; the script writes them anew."""
    stage = next(s for s in data["stages"] if s["stage"] == data["shown"])
    return "".join(
        f"<tr><td>{escape(c['name'])}</td><td class=\"number\">{format_bytes(c['bytes'])}</td><td class=\"number\">"
        f"{100 * c['bytes'] / stage['peak_bytes']:.1f} %</td><td>{escape(c['provenance'])}</td>"
        f"<td>{escape(c['shard'])}</td></tr>"
        for c in stage["components"] if c["bytes"]
    )


def _gpu_table(data: dict[str, Any]) -> str:
    heads = [("GPU", False), ("usable", True), ("peak", True), ("margin", True), ("left", True), ("verdict", False)]
    rows = [
        (g["gpu"], format_bytes(g["capacity_bytes"]), format_bytes(g["peak_bytes"]), format_bytes(g["margin_bytes"]),
         format_bytes(g["headroom_bytes"]), g["verdict"] + (f": no {g['lacks']}" if g["lacks"] else ""))
        for g in data["gpus"]
    ]
    return _table("margin: CUDA context, NCCL's buffers and fragmentation", heads, rows)


def _block(block: Block) -> str:
    title = f"<h2>{escape(block.title)}</h2>" if block.title else ""
    if isinstance(block, Pairs):
        return f"<section>{title}<dl>{_pairs(block.pairs)}</dl></section>"
    if isinstance(block, Bullets):
        return f"<section>{title}{_list(block.items, '')}</section>"
    if isinstance(block, Words):
        return f"<section>{title}{''.join(f'<p>{escape(line)}</p>' for line in block.lines)}</section>"
    heads = [(column.title, not column.words) for column in block.columns]
    worst = -1 if block.emphasis is None else block.emphasis
    notes = "".join(f'<p class="sub">{escape(note)}</p>' for note in block.notes)
    return f'<section>{title}<div class="scroll">{_table("", heads, block.rows, worst)}</div>{notes}</section>'
