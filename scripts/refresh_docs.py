#!/usr/bin/env python3
"""Rewrite the outputs in the documents by running the commands next to them.

    python scripts/refresh_docs.py [--check]

Three kinds of places in README.md and below references/ are rewritten:

* a ```console block of one ``$ bridge-memory ...`` or ``$ python scripts/...`` line: everything after that line is its
  output, of ``... | head -n N`` its first N lines, of ``tail`` its last (a block that begins otherwise is an error:
  nobody would notice when it is out of date);
* a ```python block directly followed by a ```text block: that is what it prints;
* a table after ``<!-- estimate ARGS -->``: each row's first cell holds further flags in backticks (or a dash), and the
  cells after it become static GiB and peak GiB of the first and of the last stage, the peak stage and its GiB.

``--check`` writes nothing and fails when something is out of date (the test suite runs it).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generated_files import generate  # noqa: E402

from bridge_memory.cli import main as bridge_memory  # noqa: E402

GIB = 2**30
_CONSOLE = re.compile(r"(```console\n)(.*?)(```)", re.S)
#: A command may go on in the next line after a backslash.
_COMMAND = re.compile(r"\$ (bridge-memory|python scripts/[\w/]+\.py)((?:[^\n\\]|\\\n|\\.)*)\n")
_PYTHON = re.compile(r"(```python\n([^`]*)```\n\n```text\n)(.*?)(```)", re.S)
_TABLE = re.compile(r"(<!-- estimate (.*?) -->\n\|[^\n]*\n\|[-|: ]*\n)((?:\|[^\n]*\n)+)", re.S)


def run(arguments: list[str]) -> str:
    """Standard output of one command; a refusal (exit code 2) raises. 1 is an answer, such as unread rows."""
    out, err = io.StringIO(), io.StringIO()
    os.chdir(ROOT)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bridge_memory(arguments)
    if code > 1:
        raise SystemExit(f"bridge-memory {shlex.join(arguments)}: {err.getvalue().strip()}")
    return out.getvalue()


def console(block: str) -> str:
    """A console block, its output made anew."""
    command = _COMMAND.match(block)
    if command is None:
        said = f"a console block begins with {block[:60]!r}"
        raise SystemExit(f"{said}; begin it with `$ bridge-memory` or `$ python scripts/`")
    arguments = shlex.split(command[2].replace("\\\n", " "))
    shown = slice(None)
    if arguments[-4:-3] == ["|"] and arguments[-3] in ("head", "tail") and arguments[-2] == "-n":
        *arguments, _, which, _, number = arguments
        shown = slice(int(number)) if which == "head" else slice(-int(number), None)
    if command[1] == "bridge-memory":
        return command[0] + "".join(run(arguments).splitlines(keepends=True)[shown])
    done = subprocess.run(
        [sys.executable, command[1].partition(" ")[2], *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return command[0] + done.stdout


def printed(program: str) -> str:
    """What a program prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "a document", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def _row(common: list[str], row: str) -> str:
    import json

    first = row.split("|")[1].strip()
    flags = shlex.split(first.strip("`")) if first.startswith("`") else []
    result = json.loads(run(["estimate", *common, *flags, "--json"]))
    ends = [result["stages"][0], result["stages"][-1]]
    cells = [f"{s['static_bytes'] / GIB:.1f}" for s in ends] + [f"{s['peak_bytes'] / GIB:.1f}" for s in ends]
    cells += [str(result["peak"]["stage"]), f"**{result['peak']['bytes'] / GIB:.1f}**"]
    return f"| {first} | {' | '.join(cells)} |\n"


def refreshed(text: str) -> str:
    """``text`` with every output made anew."""
    text = _CONSOLE.sub(lambda m: m[1] + console(m[2]) + m[3], text)
    text = _PYTHON.sub(lambda m: m[1] + printed(m[2]) + m[4], text)

    def table(match: re.Match[str]) -> str:
        common = shlex.split(match[2])
        return match[1] + "".join(_row(common, row) for row in match[3].splitlines())

    return _TABLE.sub(table, text)


def documents() -> dict[Path, str]:
    """Every document, refreshed."""
    paths = (ROOT / "README.md", *sorted((ROOT / "references").rglob("*.md")))
    return {path: refreshed(path.read_text(encoding="utf-8")) for path in paths}


def main(argv: Sequence[str] | None = None) -> int:
    """Refresh or check all documents."""
    return generate("refresh_docs.py", __doc__, documents, argv)


if __name__ == "__main__":
    sys.exit(main())
