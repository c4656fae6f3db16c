"""``bridge-memory diff A B``: what differs between configurations, recipes or releases, and which bytes follow."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments, integer
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.components import GIB
from bridge_memory.difference import SCHEMA
from bridge_memory.spec import RunSpec, SpecError

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.difference import Difference
    from bridge_memory.report.document import Block

EXIT_BEYOND = 1
#: Kind of a file (``cli/validate.py: KINDS``) -> the flag that reads it.
_FLAGS = {
    "deepspeed": "--deepspeed", "accelerate": "--accelerate", "training_args": "--training-args",
    "torchtitan": "--torchtitan", "bridge": "--container", "megatron": "--megatron-args", "model": "",
    "peft": "--peft-config",
}  # fmt: skip
#: Bytes below which the change of a component is not listed by itself.
_SMALL = GIB // 200
_MOST_ROWS = 12
_MOST = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "configurations", nargs="+", metavar="CONFIG",
        help="two or more: a file (Megatron-LM's arguments, Bridge's run_config.yaml, torchtitan's TOML, verl's YAML, "
             "a DeepSpeed or accelerate config), recipe:NAME, or a MODEL with its flags in quotes",
    )  # fmt: skip
    add_output_arguments(parser, f"by the schema {SCHEMA}")
    group = parser.add_argument_group("comparison")
    group.add_argument("--gpu", metavar="NAME", help="the GPU (default: any Hopper, without a verdict)")
    group.add_argument("--num-gpus", type=integer, metavar="N", help="GPUs of every job, where its file does not say")
    group.add_argument("--with", dest="also", default="", metavar="FLAGS",
                       help="MODEL or flags that all of them have too, in quotes")
    group.add_argument("-v", "--verbose", action="store_true", help="every field and component of every comparison")
    group.add_argument("--tolerance", type=float, metavar="PERCENT",
                       help="exit code 1 if a peak is more than this percentage above the first one")


def run(args: argparse.Namespace) -> int:
    """Compare and print. 0, or 1 where --tolerance is exceeded."""
    from bridge_memory.difference import difference
    from bridge_memory.spec.gpus import find_gpu

    if not 2 <= len(args.configurations) <= _MOST:
        raise SpecError(f"configurations ({len(args.configurations)}) are too few or too many; give 2 to {_MOST}")
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise SpecError(f"--tolerance is {args.tolerance:g}; give a percentage of 0 or more")
    gpu = None if args.gpu is None else find_gpu(args.gpu)
    named = [(_name(source), run_of(source, args.also, args.num_gpus, gpu)) for source in args.configurations]
    found = difference(named, None if gpu is None else gpu.name)
    args.answer = _answer(found)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        from bridge_memory.report.printing import print_blocks
        from bridge_memory.report.screen import first_that_fits

        whole = args.verbose or args.format != "text"
        shown = (_MOST_ROWS,) if whole else range(_MOST_ROWS, -1, -1)
        print_blocks(first_that_fits(list(diff_blocks(found, most, cut=not whole)) for most in shown))
    first = found.configurations[0].peak
    beyond = [i for i in range(1, len(named)) if found.more(i) > (args.tolerance or 0) / 100 * first]
    return EXIT_BEYOND if args.tolerance is not None and beyond else 0


def _name(source: str) -> str:
    return os.path.basename(source) if os.path.isfile(source) else source


def run_of(source: str, also: str = "", num_gpus: int | None = None, gpu: Gpu | None = None) -> RunSpec:
    """The run of a file, a recipe, or flags. Raises SpecError, which names the source."""
    try:
        return _run_of(source, also, num_gpus, gpu)
    except SpecError as error:
        raise SpecError(f"{_name(source)}: {error}") from None


def _run_of(source: str, also: str, num_gpus: int | None, gpu: Gpu | None) -> RunSpec:
    more = _split(also)
    if num_gpus is not None:
        more += ["--num-gpus", str(num_gpus)]
    if source.startswith("recipe:"):
        words = ["--bridge-recipe", source.removeprefix("recipe:"), *more]
    elif os.path.isfile(source):
        found = _of_text(source, num_gpus)
        if found is not None:
            return found
        words = [*_words_of(source), *more]
    else:
        words = [*_split(source), *more]
    parser = _Flags(add_help=False, allow_abbrev=False)
    add_run_arguments(parser)
    return run_on_gpus(parser.parse_args(words), [] if gpu is None else [gpu])


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(f"{message}; `bridge-memory estimate --help-all` lists the flags")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{text!r} is not quoted as a shell's words ({error}); close its quotes") from None


def _of_text(path: str, num_gpus: int | None) -> RunSpec | None:
    """The run that a log printed, or of verl's YAML; None for another file."""
    from bridge_memory.failure.runs import printed_in
    from bridge_memory.files import read_text
    from bridge_memory.readers.engines.files import table_of

    text = read_text(path, "give a configuration", errors="replace")
    if "actor_rollout_ref" in text and path.endswith((".yaml", ".yml", ".json")):
        from bridge_memory.rollout.sources.verl import update_of_verl

        return update_of_verl(table_of(text, path))
    if path.endswith((".log", ".out", ".txt")):
        printed = printed_in(text, num_gpus)
        if printed.why_not:
            raise SpecError(f"{printed.source}: {printed.why_not}")
        return printed.run
    return None


def _words_of(path: str) -> list[str]:
    from bridge_memory.cli.validate import kind_of
    from bridge_memory.files import read_text

    kind = kind_of(read_text(path, "give a configuration"), path)
    if kind not in _FLAGS:
        raise SpecError(f"it is {kind}, which diff does not read; give {', '.join(_FLAGS)}")
    return [_FLAGS[kind], path] if _FLAGS[kind] else [path]


# ---- text ----


def _gib(nbytes: int, sign: str = "") -> str:
    return f"{round(nbytes / GIB, 2) + 0.0:{sign}.2f}"


def _answer(found: Difference) -> str:
    """"+12.31 GiB (+36.1%): peak 34.12 to 46.43 GiB"."""
    first = found.configurations[0].peak
    parts = []
    for i, other in enumerate(found.configurations[1:], 1):
        more = found.more(i)
        name = f"{chr(65 + i)}: " if len(found.configurations) > 2 else ""
        change = f"{_gib(more, '+')} GiB ({100 * more / first:+.1f}%)" if more else "the same peak"
        parts.append(f"{name}{change}: peak {_gib(first)} to {_gib(other.peak)} GiB")
    return "; ".join(parts)


def diff_blocks(found: Difference, most: int, *, cut: bool) -> Iterator[Block]:
    """The answer, the configurations, and for each beside the first its fields, of which ``cut`` leaves ``most``, and
    its ``most`` components that change most."""
    from bridge_memory.report.document import Column, Grid, Words

    worse = any(found.more(i) > 0 for i in range(1, len(found.configurations)))
    yield Words("", tuple(_answer(found).split("; ")), "open" if worse else "good")
    several = len(found.configurations) > 2
    judged = found.configurations[0].fit is not None
    columns = (
        Column("", words=True), Column("configuration", words=True), Column("peak"), Column("stage"), Column("static"),
        *((Column("more than A"),) if several else ()),
        *((Column(f"on {found.configurations[0].fit.gpu}", words=True),) if found.configurations[0].fit else ()),
    )  # fmt: skip
    rows = []
    for i, c in enumerate(found.configurations):
        stage = c.result.peak_stage
        where = f" ({c.fit.decided_by}), the step" if c.fit and c.fit.decided_by else ","
        fit = () if c.fit is None else (f"{c.fit.verdict}{where} {_room(c.fit.headroom_bytes)}",)
        rows.append((
            chr(65 + i), c.name, _gib(c.peak), str(stage.stage), _gib(stage.static_bytes),
            *((_gib(found.more(i), "+") if i else "",) if several else ()), *(fit if judged else ()),
        ))  # fmt: skip
    yield Grid("Configurations, GiB", columns, tuple(rows), None, _margins(found))
    if not most:
        yield Words("", ("-v shows what differs from A, one by one, and which bytes follow",))
        return
    for i in range(1, len(found.configurations)):
        yield from _pair(found, i, several, most, cut)


def _margins(found: Difference) -> tuple[str, ...]:
    """Each margin, where they are not of the same kind: then free GiB do not follow the peaks."""
    fits = [(chr(65 + i), c.fit) for i, c in enumerate(found.configurations) if c.fit is not None]
    if len({fit.replayed for _, fit in fits}) < 2:
        return ()
    how = {True: "allocations replayed", False: "fragmentation as measured elsewhere, not replayed"}
    return ("margin: " + "; ".join(f"{name} {_gib(fit.margin_bytes)} ({how[fit.replayed]})" for name, fit in fits),)


def _room(free: int) -> str:
    return f"{_gib(free)} free" if free >= 0 else f"over by {_gib(-free)}"


def _pair(found: Difference, i: int, several: bool, most: int, cut: bool) -> Iterator[Block]:
    from bridge_memory.report.document import Column, Grid, Words
    from bridge_memory.report.screen import shortened

    letter = chr(65 + i)
    of = f" between A and {letter}" if several else ""
    fields = found.fields(i)
    if not fields:
        yield Words("", (f"Nothing that has an effect differs{of}",))
        return
    columns = (Column("field", words=True), Column("A", words=True), Column(letter, words=True), Column("alone"))
    rows = tuple(
        (f.name, *(_shown(value, f.name) for value in f[1:3]), "-" if f.alone is None else _gib(f.alone, "+"))
        for f in fields
    )
    note = "alone, GiB: what the peak of A changes by with this field alone; -: A cannot have it alone"
    fields_of = Grid(f"What differs{of}", columns, rows, None, (note,) if i == 1 else ())
    yield shortened(fields_of, most, "-v") if cut else fields_of
    parts = found.components(i)
    shown = [part for part in parts if abs(part.more) >= _SMALL][:most]
    rest = [part for part in parts if part not in shown]
    cells = [(part.name, _gib(part.before), _gib(part.after), _gib(part.more, "+")) for part in shown]
    sums = [sum(getattr(part, name) for part in rest) for name in ("before", "after", "more")]
    hidden = " (-v)" if cut and any(abs(part.more) >= _SMALL for part in rest) else ""
    cells.append((f"{len(rest)} others{hidden}", _gib(sums[0]), _gib(sums[1]), _gib(sums[2], "+")))
    first, other = found.configurations[0], found.configurations[i]
    cells.append(("peak", _gib(first.peak), _gib(other.peak), _gib(found.more(i), "+")))
    columns = (Column("component", words=True), Column("A"), Column(letter), Column("change"))
    stages = {c.result.peak_stage.stage for c in (first, other)}
    where = f", stages {first.result.peak_stage.stage} and {other.result.peak_stage.stage}" if len(stages) > 1 else ""
    yield Grid(f"Which bytes follow{of}, GiB{where}", columns, tuple(cells))


def _shown(value: Any, name: str = "") -> str:
    """``name``: of the field, or of several with a tuple of values. A tuple of numbers is a release."""
    if value is None:
        return "unset"
    if isinstance(value, Sequence) and not isinstance(value, str):
        release = ", " not in name and all(type(one) is int for one in value)
        return (".".join if release else ", ".join)(map(_shown, value)) or "none"
    return str(value)
