"""How every command's answer leaves: ``--format``, ``--json``, ``--output`` and ``--force``.

A command prints to standard output, as JSON where ``args.json`` is set. Where a file is named that is written in its
place, whole or not at all, once the command is done.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

from bridge_memory.report.write import check_target, write_text
from bridge_memory.spec import SpecError

#: Format -> the suffixes of files that ask for it. A name without one is text.
FORMATS = {"text": (".txt", ".text", ".log"), "json": (".json",), "csv": (".csv",), "md": (".md",)}
#: What every command writes.
USUAL = ("text", "json")


def add_output_arguments(
    parser: argparse.ArgumentParser, what: str, *, beside: bool = False, formats: Sequence[str] = USUAL
) -> Any:
    """Declare the four flags in a group of their own, which is returned; ``what``: the JSON, for the help.

    ``beside``: --json may name a file, for the JSON beside what is printed; the command writes it.
    """
    group = parser.add_argument_group("output")
    more = "".join(f", {name}" for name in formats if name not in USUAL)
    group.add_argument("--format", choices=formats, help=f"text (default){more} or json: {what}")
    parser.set_defaults(formats=tuple(formats))
    if beside:
        group.add_argument("--json", nargs="?", const=True, default=False, metavar="FILE",
                           help="the same as --format json; with FILE the JSON goes there, beside the text")
    else:
        group.add_argument("--json", action="store_true", help="the same as --format json")
    group.add_argument("--output", metavar="FILE",
                       help=f"write to FILE, which must not exist; its suffix ({_suffixes(formats)}) is the format")
    group.add_argument("--force", action="store_true", help="let --output replace a file")
    return group


@contextlib.contextmanager
def written(args: argparse.Namespace) -> Iterator[None]:
    """Take what is printed inside to where ``args`` want it; sets ``args.format``, and ``args.json`` unless that is a
    file's name. Raises SpecError, before anything is computed, for a file that cannot be written."""
    if args.format not in (None, "json") and args.json is True:
        raise SpecError(f"--json is --format json; drop --json or --format {args.format}")
    beside = isinstance(args.json, str) or getattr(args, "evidence", None) is not None
    if args.force and args.output is None and not beside:
        raise SpecError("--force does nothing without --output; name the file or drop --force")
    args.format = args.format or ("json" if args.json is True else None) or _format_of(args.output, args.formats)
    if not isinstance(args.json, str):
        args.json = args.format == "json"
    if args.output is None:
        yield
        return
    check_target(args.output, force=args.force)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        yield
    write_text(args.output, text.getvalue(), force=args.force)


def _suffixes(formats: Sequence[str], between: str = ", ") -> str:
    return between.join(FORMATS[name][0] for name in formats)


def _format_of(path: str | None, formats: Sequence[str]) -> str:
    suffix = os.path.splitext(path or "")[1].lower()
    for name in formats:
        if suffix in FORMATS[name]:
            return name
    if suffix[1:].isalpha():
        raise SpecError(
            f"--output {path}: {suffix} files are not written; name one that ends in {_suffixes(formats, ' or ')}, or "
            f"add --format {' or '.join(formats)}"
        )
    return "text"
