"""Files that scripts generate: written, or compared with what is there."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def parser_of(script: str, doc: str | None) -> argparse.ArgumentParser:
    """The parser of a script that generates files, with its ``--check``. ``doc``: the script's docstring."""
    parser = argparse.ArgumentParser(
        prog=script, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is out of date")
    return parser


def write_or_check(script: str, files: Mapping[Path, str], *, check: bool) -> int:
    """Write the files that differ from what is there. ``check``: name them and return 1 instead."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} is out of date; run python scripts/{script}", file=sys.stderr)
        else:
            path.write_text(files[path], encoding="utf-8")
            print(f"wrote {name}")
    return int(check and bool(stale))


def generate(script: str, doc: str | None, files: Callable[[], Mapping[Path, str]], argv: Sequence[str] | None) -> int:
    """``main`` of a script that generates the same files whatever its arguments."""
    args = parser_of(script, doc).parse_args(argv)
    return write_or_check(script, files(), check=args.check)
