"""How every command's answer leaves: ``--format``, ``--json``, ``--output`` and ``--force``.

A command prints to standard output, as JSON where ``args.json`` is set. Where a file is named that is written in its
place, whole or not at all, once the command is done, and stderr says so. Commands that print blocks
(``report.printing.print_blocks``) have them as Markdown, CSV (the first table) and HTML too; those that write such a
format themselves say so in ``own``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bridge_memory.report.document import Chart, Drawn, one_line
from bridge_memory.report.printing import answers, collected
from bridge_memory.report.write import check_target, write_text
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import LONGEST_LINE, bounded

#: Format -> the suffixes of files that ask for it, of which the longest counts. A name without one is text.
FORMATS = {
    "text": (".txt", ".text", ".log"), "json": (".json",), "csv": (".csv",), "md": (".md",), "html": (".html", ".htm"),
    "perfetto": (".perfetto.json",), "snapshot": (".pickle",),
}  # fmt: skip
#: What every command writes, and every command that prints blocks.
PLAIN = ("text", "json")
USUAL = (*PLAIN, "csv", "md", "html")
#: Of them, made of blocks.
_OF_BLOCKS = ("csv", "md", "html")


def add_output_arguments(
    parser: argparse.ArgumentParser, what: str, *, beside: bool = False, formats: Sequence[str] = USUAL,
    own: Sequence[str] = (), rows: bool = False,
) -> Any:  # fmt: skip
    """Declare the four flags in a group of their own, which is returned; ``what``: the JSON, for the help.

    ``rows``: --output (-o) is a file of rows, which the command writes itself, after it has shown them.

    ``formats``: what it writes; ``own``: those of Markdown, CSV and HTML that it writes itself. ``beside``: --json may
    name a file, for the JSON beside what is printed; the command writes it.
    """
    group = parser.add_argument_group("output")
    more = "".join(f", {name}" for name in formats if name not in PLAIN)
    group.add_argument("--format", choices=formats, help=f"text (default){more} or json: {what}")
    parser.set_defaults(formats=tuple(formats), own_formats=tuple(own))
    if beside:
        group.add_argument("--json", nargs="?", const=True, default=False, metavar="FILE",
                           help="the same as --format json; with FILE the JSON goes there, beside the text")
    else:
        group.add_argument("--json", action="store_true", help="the same as --format json")
    parser.set_defaults(own_output=rows)
    if rows:
        group.add_argument("-o", "--output", metavar="ROWS.jsonl", help="write the rows to a new file, once confirmed")
    else:
        group.add_argument("--output", metavar="FILE",
                           help=f"write to FILE, a new one; its suffix ({_suffixes(formats)}) is the format")
    group.add_argument("--force", action="store_true", help="let --output replace a file")
    return group


def exit_code_of_unread(share: float) -> int:
    """1 where half of a file's rows or more cannot be read, which stderr is told; else 0."""
    from bridge_memory.accuracy.corpus import MOST_UNREAD

    if share < MOST_UNREAD:
        return 0
    print(f"bridge-memory accuracy: {share:.0%} of the rows cannot be read", file=sys.stderr)
    return 1


@contextlib.contextmanager
def written(args: argparse.Namespace) -> Iterator[None]:
    """Take what is printed inside to where ``args`` want it; sets ``args.format``, and ``args.json`` unless that is a
    file's name. Raises SpecError, before anything is computed, for a file that cannot be written."""
    if args.format not in (None, "json") and args.json is True:
        raise SpecError(f"--json is --format json; drop --json or --format {args.format}")
    elsewhere = isinstance(args.json, str)
    if args.force and args.output is None and not elsewhere:
        raise SpecError("--force does nothing without --output; name the file or drop --force")
    asked = args.format or ("json" if args.json is True else None)
    args.format = asked or ("text" if args.own_output else _format_of(args.output, args.formats))
    if not isinstance(args.json, str):
        args.json = args.format == "json"
    if args.output is not None:
        check_target(args.output, force=args.force)
    elif args.format == "snapshot":
        raise SpecError("--format snapshot is no text; name a file, --output FILE.pickle")
    if args.own_output:
        yield
        return
    text = io.StringIO()
    to_file = contextlib.redirect_stdout(text) if args.output is not None else contextlib.nullcontext()
    with answers() as first, to_file:
        if args.format in _OF_BLOCKS and args.format not in args.own_formats:
            beside = io.StringIO()
            with collected() as blocks, contextlib.redirect_stdout(beside):
                yield
            print(_rendered(blocks, beside.getvalue(), args), end="")
        else:
            yield
    if args.output is not None and args.format != "snapshot":
        write_text(args.output, text.getvalue(), force=args.force)
    if args.output is not None:
        answer = getattr(args, "answer", "") or "; ".join(first[:2])
        wrote = f"bridge-memory: wrote {one_line(args.output)} ({args.format})"
        print(bounded(f"{wrote}: {one_line(answer)}" if answer else wrote, 2 * LONGEST_LINE), file=sys.stderr)


def _rendered(blocks: list[Drawn], text: str, args: argparse.Namespace) -> str:
    """``text``: what was printed otherwise."""
    if args.format == "html":
        from bridge_memory.report.page.one_file import blocks_page

        titles = [block.title for block in sorted(blocks, key=lambda block: isinstance(block, Chart)) if block.title]
        title = getattr(args, "title", "") or (titles[0] if titles else "bridge-memory")
        return blocks_page(title, blocks, args.command_line, text)
    from bridge_memory.report.markdown import first_table, markdown

    of_text = [block for block in blocks if not isinstance(block, Chart)]
    if args.format == "md":
        return markdown(of_text, text)
    table = first_table(of_text)
    if not table:
        raise SpecError("there is no table here to write as CSV; use --format text, json, md or html")
    return table


#: Flags that say where an answer goes, with their values.
_WHERE = ("--output", "--format", "--json")


def command_line(argv: Sequence[str]) -> str:
    """The command without where its answer goes."""
    words, skip = [], False
    for word in argv:
        if skip:
            skip = False
            continue
        skip = word in _WHERE[:2]
        if not (word in (*_WHERE, "--force") or word.startswith(tuple(f"{flag}=" for flag in _WHERE))):
            words.append(word)
    return shlex.join(["bridge-memory", *words])


def _suffixes(formats: Sequence[str], between: str = ", ") -> str:
    return between.join(FORMATS[name][0] for name in formats)


def _format_of(path: str | None, formats: Sequence[str]) -> str:
    suffix, name = os.path.splitext(path or "")[1].lower(), (path or "").lower()
    asked = [(len(end), fmt) for fmt in formats for end in FORMATS[fmt] if name.endswith(end)]
    if asked:
        return max(asked)[1]
    if suffix[1:].isalpha():
        raise SpecError(
            f"--output {path}: {suffix} files are not written; name one that ends in {_suffixes(formats, ' or ')}, or "
            f"add --format {' or '.join(formats)}"
        )
    return "text"
