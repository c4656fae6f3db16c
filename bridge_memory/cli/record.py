"""``bridge-memory record JOURNAL|LOG -o ROWS.jsonl``: measured runs as rows of a corpus, without anything personal.

The rows are printed; a file is written after they were shown, where a person at a terminal says yes, or with --yes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import releases_given
from bridge_memory.cli.compare import given_run
from bridge_memory.cli.output import PLAIN, add_output_arguments
from bridge_memory.report.document import one_line
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.accuracy.recorded import Recorded

#: Rows were to be written, and nobody said yes.
EXIT_NOT_WRITTEN = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("measured", metavar="JOURNAL|LOG",
                        help="MemoryReport's journal, or a log of Megatron-LM or Megatron Bridge with memory lines")
    add_run_arguments(parser)
    group = add_output_arguments(parser, "{schema, rows, left_out, written}", formats=PLAIN, rows=True)
    group.add_argument("--yes", action="store_true", help="write without asking, as there is nobody to ask in a script")
    recording = parser.add_argument_group("recording")
    recording.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on; a log does not say it")
    recording.add_argument("--use-tp-pp-dp-mapping", action="store_true",
                           help="ranks are ordered TP, PP, DP (Megatron-LM's flag of this name)")


def run(args: argparse.Namespace) -> int:
    """Print the rows, and write them. 0; 1 where they were to be written and nobody said yes."""
    from bridge_memory.accuracy.recorded import SCHEMA, recorded
    from bridge_memory.report.write import write_text
    from bridge_memory.spec.gpus import find_gpu

    if args.yes and args.output is None:
        raise SpecError("--yes does nothing without -o; name the file or drop --yes")
    gpu = None if args.gpu is None else find_gpu(args.gpu)
    given = given_run(args)
    described = [key.replace("_", "-").partition(".")[2] for key in vars(args) if "." in key]
    if given is None and described:
        raise SpecError(f"--{described[0]} describes no run without MODEL; name it, or leave the run to the file")
    rows = recorded(args.measured, given, gpu, releases=releases_given(args), pp_before_dp=args.use_tp_pp_dp_mapping)
    if not args.json:
        print("".join(row.line for row in rows), end="", flush=True)
    _say(f"not in the {_rows(rows)}: {'; '.join(_left_out(rows))}")
    agreed = args.output is not None and (args.yes or _asked(f"write the {_rows(rows)} to {args.output}?"))
    if agreed:
        write_text(args.output, "".join(row.line for row in rows), force=args.force)
        _say(f"wrote {args.output}; `bridge-memory accuracy` scores it, CONTRIBUTING.md says how to send it")
    elif args.output is None:
        _say("write them with -o ROWS.jsonl")
    else:
        _say("nothing is written; add --yes to write it")
    if args.json:
        document = {
            "schema": SCHEMA, "rows": [row.row for row in rows], "left_out": _left_out(rows),
            "written": args.output if agreed else None,
        }  # fmt: skip
        print(json.dumps(document, indent=2, allow_nan=False))
    return EXIT_NOT_WRITTEN if args.output is not None and not agreed else 0


def _left_out(rows: Sequence[Recorded]) -> list[str]:
    return list(dict.fromkeys(words for row in rows for words in row.left_out))


def _rows(rows: Sequence[Recorded]) -> str:
    return "row" if len(rows) == 1 else f"{len(rows)} rows"


def _say(words: str) -> None:
    if sys.stderr is not None:
        print(f"bridge-memory: {one_line(words)}", file=sys.stderr)


def _asked(question: str) -> bool:
    """The answer of a person at a terminal; False where there is none."""
    if sys.stdin is None or sys.stderr is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print(f"{one_line(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
