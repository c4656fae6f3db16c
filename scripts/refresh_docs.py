#!/usr/bin/env python3
"""Rewrite the outputs in the documents from the commands that stand beside them.

Three kinds of places are known in README.md and below references/:

* a ```console block of one ``$ bridge-memory ...`` or ``$ python scripts/...`` line: everything after that line is its
  output (a block that begins otherwise is an error: nobody would notice when it is out of date);
* a ```python block directly followed by a ```text block: that is what it prints;
* a table after ``<!-- estimate ARGS -->``: each row's first cell holds further flags in backticks (or a dash), and the
  cells after it become static GiB and peak GiB of the first and of the last stage, the peak stage and its GiB.

``--check`` writes nothing and fails when something is out of date (the test suite runs it).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bridge_memory.cli import main as bridge_memory  # noqa: E402

GIB = 2**30
_CONSOLE = re.compile(r"(```console\n)(.*?)(```)", re.S)
#: A command may go on in the next line after a backslash.
_COMMAND = re.compile(r"\$ (bridge-memory|python scripts/\w+\.py)((?:[^\n\\]|\\\n|\\.)*)\n")
_PYTHON = re.compile(r"(```python\n([^`]*)```\n\n```text\n)(.*?)(```)", re.S)
_TABLE = re.compile(r"(<!-- estimate (.*?) -->\n\|[^\n]*\n\|[-|: ]*\n)((?:\|[^\n]*\n)+)", re.S)


def run(arguments: list[str]) -> str:
    """Standard output of one command; a refusal raises."""
    out, err = io.StringIO(), io.StringIO()
    os.chdir(ROOT)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = bridge_memory(arguments)
    if code:
        raise SystemExit(f"bridge-memory {shlex.join(arguments)}: {err.getvalue().strip()}")
    return out.getvalue()


def console(block: str) -> str:
    """A console block, its output made anew."""
    command = _COMMAND.match(block)
    if command is None:
        said = f"a console block begins with {block[:60]!r}"
        raise SystemExit(f"{said}; begin it with `$ bridge-memory` or `$ python scripts/`")
    arguments = shlex.split(command[2].replace("\\\n", " "))
    if command[1] == "bridge-memory":
        return command[0] + run(arguments)
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


def main(argv: list[str] | None = None) -> int:
    """Refresh or check all documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a document is out of date")
    args = parser.parse_args(argv)
    stale = []
    for path in (ROOT / "README.md", *sorted((ROOT / "references").rglob("*.md"))):
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = refreshed(before)
        if after != before:
            stale.append(path.relative_to(ROOT))
            if not args.check:
                path.write_text(after, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'out of date' if args.check else 'rewritten'}")
    return 1 if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
