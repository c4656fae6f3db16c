"""``bridge-memory search``: what fits a GPU, the fastest first, of megatron-core's layouts or under other engines."""

from __future__ import annotations

import argparse

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.cli.megatron import search as megatron
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.phased import FIRST, add_phases_argument
from bridge_memory.cli.ranked import headroom_bytes
from bridge_memory.cli.threads import multiply_in_one_thread
from bridge_memory.cli.torch import search as torch
from bridge_memory.emit.formats import FORMATS
from bridge_memory.plan.torch.mixed import DTYPES
from bridge_memory.plan.torch.space import SEVERAL
from bridge_memory.spec import SpecError
from bridge_memory.spec.parts import ENGINE_OF_FRAMEWORK, ENGINES

MOST_JOBS = 256
#: Rows that are shown: as text no more than, with those of the Pareto front, fit a screen.
TOP, TOP_OF_TEXT = 20, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    for action in parser._actions:
        if action.dest in megatron.RANGED.values():
            action.type, action.metavar = _size, "N|A..B"
        elif action.dest == "data_parallel.engine" and action.nargs != 0:
            action.type, action.choices, action.metavar = _engines, None, f"{action.metavar}|any|A,B"
            action.help = f"{action.help}; any: every one outside of megatron-core"
    add_output_arguments(parser, f"by the schema {megatron.SCHEMA} or {torch.SCHEMA}", own=("csv", "md"))
    group = parser.add_argument_group("search")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")
    group.add_argument("--vary", metavar="AXIS[=A/B],...",
                       help="vary only these axes, with = only these values (tp=2/4, ep=1..64, precision=bf16/mxfp8): "
                            "tp, pp, vpp, cp, ep, etp, mbs, split, recompute, dispatcher, and where they are named "
                            "precision, offload, optimizer_offload, graphs, dp_overlap, ep_overlap, cp_comm, packing; "
                            "of other engines engine, mbs, checkpointing, reshard, shard, accumulation, overlap and, "
                            "only if named, offload, attention, liger (all: every axis)")
    group.add_argument("--fix", metavar="AXIS[=A],...", action="append", default=[],
                       help="keep these axes at one value (recompute=none); without = as flags give them")
    group.add_argument("--exclude", metavar="AXIS=A/B,...", action="append", default=[],
                       help="leave these values out (ep=1, recompute=full, split=uneven)")
    group.add_argument("--mixed-precision", choices=DTYPES,
                       help="dtypes as accelerate's mixed_precision sets them (engines outside of megatron-core)")
    group.add_argument("--headroom", type=float, default=0.0, metavar="GIB",
                       help="GiB to keep free in addition to the margin (default: 0)")
    group.add_argument("--exhaustive", action="store_true", help="every layout that divides, not only the usual ones")
    group.add_argument("--jobs", type=int, metavar="N", help="worker processes (default: 1, with --backend all)")
    group.add_argument("--backend", metavar="NAME",
                       help="joblib backend that runs --jobs: loky, dask, dask=ADDRESS or ray")
    group.add_argument("--cache", metavar="DIR",
                       help="cache folder, for later searches of the same model")
    group.add_argument("--measured-step-time", action="append", default=[], metavar="LAYOUT=SECONDS",
                       help="calibrate the time model with a measured step, such as tp2,pp8,mbs1=58.2; may be "
                            "repeated")
    group.add_argument("--top", type=int, metavar="N", help="layouts to show (default: 8 as text, else 20)")
    add_phases_argument(group, f"the first {FIRST} rows")
    group.add_argument("-v", "--verbose", action="store_true",
                       help="the whole Pareto front and every note, also where that is more than a screen")
    group.add_argument("--brief", action="store_true", help="print the answer and its first rows alone, as text")
    group.add_argument("--emit", choices=tuple(FORMATS), help="print one row in this form, ready to run")
    group.add_argument("--row", type=int, default=1, metavar="N", help="the row that --emit prints (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Search and print. Returns 0, 1 where nothing fits, or 130 where Ctrl-C ended it."""
    if args.top is None:
        args.top = TOP_OF_TEXT if args.format == "text" else TOP
    if args.top < 1 or args.row < 1:
        raise SpecError("--top and --row count from 1; give a positive number")
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise SpecError(f"--jobs ({args.jobs}) is not a number of processes; give 1 to {MOST_JOBS}")
    headroom_bytes(args)
    if args.phases and (args.brief or args.emit or args.format == "csv"):
        raise SpecError("--phases is shown in text, md and JSON; drop it, or --brief, --emit and csv")
    multiply_in_one_thread()
    engines = torch.asked_engines(args)
    if engines is not None and (args.fix or args.exclude):
        flag = "--fix" if args.fix else "--exclude"
        raise SpecError(f"{flag} is for layouts of megatron-core; give the flag of what stays, or name axes in --vary")
    return megatron.run(args) if engines is None else torch.run(args, engines)


def _size(text: str) -> int | tuple[int, int]:
    """One size, or the smallest and the largest: "8", "1..8", "..8"."""
    low, dots, high = text.partition("..")
    numbers = [low or "1", high] if dots else [low]
    if not all(n.isascii() and n.isdecimal() and len(n) < 7 for n in numbers) or int(numbers[0]) > int(numbers[-1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither a size nor a range; write it like 8 or 1..8")
    return (int(numbers[0]), int(numbers[1])) if dots else int(low)


def _engines(text: str) -> str | tuple[str, ...]:
    """One engine of all that there are, or words that mean some outside of megatron-core."""
    typed = (word.lower().replace("-", "_") for word in text.replace(",", " ").split())
    words = tuple(ENGINE_OF_FRAMEWORK.get(word, word) for word in typed)
    for word in words or ("",):
        if word not in ENGINES and word not in SEVERAL:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is unknown; use some of {', '.join((*ENGINES, *SEVERAL))}")
    return words[0] if len(words) == 1 and words[0] in ENGINES else words
