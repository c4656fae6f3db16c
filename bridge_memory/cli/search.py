"""``bridge-memory search``: layouts that fit a GPU, the fastest first."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.template import template
from bridge_memory.cli.measured import measured_steps
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.ranked import (
    CHARTED,
    as_csv,
    as_markdown,
    memory_against_time,
    refused_by_field,
    row_to_emit,
    tie_of_rows,
    without_times,
)
from bridge_memory.cli.torch import search as engine_search
from bridge_memory.plan.megatron.space import AXES, Space
from bridge_memory.plan.megatron.splits import split_fields
from bridge_memory.plan.torch.space import SEVERAL
from bridge_memory.spec import SpecError
from bridge_memory.spec.parts import ENGINE_OF_FRAMEWORK, ENGINES

if TYPE_CHECKING:
    from bridge_memory.plan.found import Found, Row
    from bridge_memory.report.document import Chart, Drawn
    from bridge_memory.report.gpus import Gpu
    from bridge_memory.speed.hardware import Hardware

#: Seconds between two lines of progress.
PROGRESS_EVERY = 0.5
#: Axis -> the flag of its size, which also takes a range.
RANGED = {axis: AXES[axis][0] for axis in ("tp", "pp", "vpp", "cp", "ep", "mbs")}
MOST_JOBS = 256
EMITTED = ("estimate", "megatron-args", "bridge", *engine_search.EMITTED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    for action in parser._actions:
        if action.dest in RANGED.values():
            action.type, action.metavar = _size, "N|A..B"
        elif action.dest == "data_parallel.engine" and action.nargs != 0:
            action.type, action.choices, action.metavar = _engines, None, f"{action.metavar}|any|A,B"
            action.help = f"{action.help}; some of those outside of megatron-core are searched together"
    add_output_arguments(parser, "by the schema bridge-memory/search/1", own=("csv", "md"))
    group = parser.add_argument_group("search")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")
    group.add_argument("--vary", metavar="A,B",
                       help="vary only these of tp, pp, vpp, cp, ep, etp, mbs, split, recompute; under engines outside "
                            "of megatron-core of engine, mbs, checkpointing, reshard, shard, accumulation, overlap, "
                            "and of offload, attention and liger, which else stay (all: of all)")
    group.add_argument("--mixed-precision", choices=("bf16", "fp16"),
                       help="dtypes of every engine outside of megatron-core as accelerate's mixed_precision sets them")
    group.add_argument("--headroom", type=float, default=0.0, metavar="GIB",
                       help="GiB that must be left on the card beside the margin (default: 0)")
    group.add_argument("--exhaustive", action="store_true", help="every layout that divides, not the usual grid")
    group.add_argument("--jobs", type=int, metavar="N", help="processes (default: 1; with --backend all it has)")
    group.add_argument("--backend", metavar="NAME",
                       help="of joblib: loky, dask, dask=ADDRESS or ray, which --jobs processes are of")
    group.add_argument("--cache", metavar="DIR",
                       help="folder that keeps what blocks cost, for later searches of the same sizes")
    group.add_argument("--measured-step-time", action="append", default=[], metavar="LAYOUT=SECONDS",
                       help="a measured step, such as tp2,pp8,mbs1=58.2, sets the time model right; may be repeated")
    group.add_argument("--top", type=int, default=20, metavar="N", help="layouts to show (default: 20)")
    group.add_argument("--emit", choices=EMITTED, help="print the flags of one row in this form instead")
    group.add_argument("--row", type=int, default=1, metavar="N", help="the row that --emit prints (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Search and print. Returns 0, or 1 where nothing fits."""
    from bridge_memory.plan.megatron.search import search
    from bridge_memory.report.gpus import find_gpu, margin_bytes
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.speed.measured import calibrated

    if args.top < 1 or args.row < 1:
        raise SpecError("--top and --row count from 1; give a positive number")
    if args.jobs is not None and not 1 <= args.jobs <= MOST_JOBS:
        raise SpecError(f"--jobs ({args.jobs}) is not a number of processes; give 1 to {MOST_JOBS}")
    if args.headroom < 0 or args.headroom != args.headroom:
        raise SpecError(f"--headroom ({args.headroom}) is not a size; give GiB of 0 or more")
    engines = engine_search.asked_engines(args)
    if engines is not None:
        return engine_search.run(args, engines, _progress())
    if args.emit in engine_search.EMITTED or args.mixed_precision is not None:
        flag = "--mixed-precision" if args.mixed_precision is not None else f"--emit {args.emit}"
        raise SpecError(f"{flag} is for engines outside of megatron-core; add --engine, such as --engine fsdp2")
    gpu = find_gpu(args.gpu)
    hardware = hardware_of(gpu.name)
    space = _space(args, gpu, hardware, _ranges(args))
    steps = calibrated(measured_steps(args.measured_step_time, space), hardware) if args.measured_step_time else None
    with _few_collections():
        found = search(
            space, hardware, capacity=gpu.capacity_bytes - int(args.headroom * 2**30),
            margin=partial(margin_bytes, world_size=space.num_gpus), progress=_progress(),
            constants=steps.constants if steps else DEFAULT, backend=args.backend, cache=args.cache,
            jobs=args.jobs or (1 if args.backend is None else -1),
        )  # fmt: skip
        calibration = steps.words if steps else ""
        if args.emit:
            print(_emitted(found, args, gpu))
        elif args.format in ("text", "html"):
            from bridge_memory.report.printing import print_blocks

            print_blocks(_blocks(found, args, space, gpu, calibration))
        else:
            print(_written(found, args, space, calibration))
    return 0 if found.rows else 1


@contextmanager
def _few_collections() -> Iterator[None]:
    """Python looks for cycles seldom meanwhile: a search makes a hundred thousand small objects and few cycles."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _space(
    args: argparse.Namespace, gpu: Gpu, hardware: Hardware, ranges: dict[str, tuple[int, int]]
) -> Space:
    """The layouts that the flags leave open."""
    given, run = template(args, gpu, ("parallel.world_size", "batch.global_batch_size"))
    if "parallel.world_size" not in given:
        raise SpecError("--num-gpus is missing; say on how many GPUs the layout has to run")
    if given["parallel.world_size"] < 1:
        raise SpecError(f"--num-gpus ({given['parallel.world_size']}) is no number of GPUs; give 1 or more")
    if "batch.global_batch_size" not in given:
        raise SpecError("--global-batch-size is missing; layouts are compared at one number of sequences a step")
    fixed = {axis for axis, fields in AXES.items() if vars(args).keys() & set(fields)}
    if args.vary is not None:
        asked = [name for name in args.vary.replace(",", " ").split() if name]
        for name in asked:
            if name not in AXES:
                raise SpecError(f"--vary {name} is none of {', '.join(AXES)}; name some of these")
            if name in fixed:
                raise SpecError(f"--vary {name} does not go with a flag that fixes it; drop one of them")
        fixed |= AXES.keys() - set(asked) - ranges.keys()  # a range varies too
    return Space(
        run, given["parallel.world_size"], hardware.domain, frozenset(fixed), ranges, args.exhaustive,
        given["batch.global_batch_size"],
    )  # fmt: skip


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


def _ranges(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Axis -> its range, taken off the flags, which then fix nothing."""
    ranges = {}
    for axis, field in RANGED.items():
        value = getattr(args, field, None)
        if isinstance(value, tuple):
            ranges[axis] = value
            delattr(args, field)
    return ranges


def _progress() -> Callable[[int, int], None] | None:
    """Says on a terminal how far a search is that takes more than a second."""
    if not sys.stderr.isatty():
        return None
    said = time.monotonic() + PROGRESS_EVERY

    def tell(looked_at: int, fitting: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= PROGRESS_EVERY:
            said = now
            print(f"\r{looked_at:,} layouts, {fitting:,} fit (Ctrl-C shows what was found)", end="", file=sys.stderr)

    return tell


# ---- what is printed ----

_HEADINGS = (
    "tp", "pp", "vpp", "cp", "ep", "etp", "mbs", "split", "recompute", "peak GiB", "left GiB", "step s", "compute",
    "sent", "bubble", "again",
)  # fmt: skip


def _row(row: Row) -> tuple[str, ...]:
    p, r, t = row.run.parallel, row.run.recompute, row.time
    parts = t.passes
    sent = parts.tensor_parallel + parts.expert_parallel + parts.context_parallel + t.data_parallel + t.pipeline
    compute = t.seconds - sent - t.bubble - t.recomputation
    return (
        str(p.tp), str(p.pp), str(p.vpp), str(p.cp), str(p.ep), str(p.etp), str(row.run.batch.micro_batch_size),
        _split(p), _recompute(r), f"{row.peak / 2**30:.2f}", f"{row.headroom / 2**30:.2f}", f"{t.seconds:.2f}",
        *(f"{part / t.seconds:.0%}" for part in (compute, sent, t.bubble, t.recomputation)),
    )  # fmt: skip


def _split(p: Any) -> str:
    fields = split_fields(p)
    if "pipeline_model_parallel_layout" in fields:
        return str(fields["pipeline_model_parallel_layout"])
    ends = [name for name in ("embedding", "loss") if f"account_for_{name}_in_pipeline_split" in fields]
    counts = [
        f"{name} {fields[field]}" for name in ("first", "last")
        if (field := f"num_layers_in_{name}_pipeline_stage") in fields
    ]
    return f"{' and '.join(ends)} as layers" if ends else ", ".join(counts) or "even"


def _recompute(r: Any) -> str:
    if r.granularity == "selective":
        return ",".join(r.modules)
    return f"full {r.method} {r.num_layers}" if r.granularity == "full" else "none"


def _blocks(found: Found, args: argparse.Namespace, space: Space, gpu: Gpu, calibration: str) -> list[Drawn]:
    from bridge_memory.caveats.unmodelled import unmodelled_features
    from bridge_memory.plan.found import ties
    from bridge_memory.report.document import Bullets, Column, Grid
    from bridge_memory.speed.megatron.step_time import not_timed

    base, num_gpus, words = space.base, space.num_gpus, {"split", "recompute"}
    best, front = found.best(args.top), found.front(args.top)
    # What says nothing here is left out: sizes of experts where there are none, columns of ones and of even splits.
    idle = set() if base.model.has_experts else {"ep", "etp"}
    rows = [_row(row) for row in (*best, *front)]
    kept = [
        i for i, title in enumerate(_HEADINGS)
        if title not in idle and (title == "tp" or {row[i] for row in rows} - {"1", "even", "0%"})
    ]
    columns = (Column("#"), *(Column(_HEADINGS[i], words=_HEADINGS[i] in words) for i in kept))

    def grid(title: str, shown: tuple[Row, ...], notes: tuple[str, ...] = ()) -> Grid:
        cells = (_row(row) for row in shown)
        numbered = tuple((str(n), *(row[i] for i in kept)) for n, row in enumerate(cells, 1))
        return Grid(title, columns, numbered, None, notes)

    notes = [
        f"{found.looked_at:,} layouts looked at, {len(found.rows):,} fit {gpu.name}, {found.too_large:,} do not "
        f"({found.without_activations:,} of them by their model state alone)"
        + ("; stopped before the end" if found.stopped else ""),
    ]
    notes += refused_by_field(found.refused)
    notes.append(f"the grid: {space.rule()}" + ("" if space.exhaustive else " (--exhaustive: all that divides)"))
    if not found.rows:
        return [Bullets("Nothing fits", tuple(notes))]
    notes += tie_of_rows(ties(best))
    notes.append(
        "step s is a model's, for ranking: work over rates fitted on measured runs; compute, sent (all communication "
        "that nothing hides), bubble and again (recomputation) are its parts"
    )
    if calibration:
        notes.append(calibration)
    notes += without_times(not_timed(best[0].run))
    notes += [f"not modelled: {feature}" for feature in unmodelled_features(best[0].run)]
    if base.model.has_experts:
        notes.append("no measured group varies EP: how layouts with different EP compare rests on the model alone")
    grids: list[Drawn] = [] if args.format != "html" else [_chart(found, gpu)]
    grids += [
        grid(f"Fastest layouts of {base.model.name} on {num_gpus} x {gpu.name}", best, tuple(notes))
    ]
    if len(front) > 1:
        grids.append(grid("Less memory for time: no other layout is both faster and smaller", front))
    return grids


def _chart(found: Found, gpu: Gpu) -> Chart:
    front = found.front()
    others = [row for row in found.best(CHARTED) if row not in front]
    return memory_against_time(front, others, _layout_words, gpu)


def _layout_words(row: Row) -> str:
    """"TP 2, PP 4, EP 8, micro batch 1, recompute mlp"."""
    p = row.run.parallel
    sizes = (("TP", p.tp), ("PP", p.pp), ("VPP", p.vpp), ("CP", p.cp), ("EP", p.ep), ("ETP", p.etp))
    words = [f"{name} {size}" for name, size in sizes if size > 1]
    words += [f"micro batch {row.run.batch.micro_batch_size}", f"split {_split(p)}"]
    return ", ".join([*words, f"recompute {_recompute(row.run.recompute)}"])


def _record(row: Row) -> dict[str, Any]:
    t, p = row.time, row.run.parallel
    return {
        "tp": p.tp, "pp": p.pp, "vpp": p.vpp, "cp": p.cp, "ep": p.ep, "etp": p.etp,
        "mbs": row.run.batch.micro_batch_size, "split": _split(p), "recompute": _recompute(row.run.recompute),
        "peak_bytes": row.peak, "stage": row.stage, "headroom_bytes": row.headroom, "step_seconds": t.seconds,
        **{f"{name}_seconds": value for name, value in t.passes._asdict().items()},
        "recomputation_seconds": t.recomputation, "bubble_seconds": t.bubble, "pipeline_seconds": t.pipeline,
        "data_parallel_seconds": t.data_parallel, "optimizer_seconds": t.optimizer,
    }  # fmt: skip


def _written(found: Found, args: argparse.Namespace, space: Space, calibration: str) -> str:
    records = [_record(row) for row in found.best(args.top)]
    if args.format == "json":
        import json

        return json.dumps(
            {
                "schema": "bridge-memory/search/1", "looked_at": found.looked_at, "fit": len(found.rows),
                "too_large": found.too_large, "refused": dict(found.refused), "stopped": found.stopped,
                "without_activations": found.without_activations, "grid": space.rule(),
                **({"calibration": calibration} if calibration else {}),
                "best": records, "front": [_record(row) for row in found.front()],
            },
            indent=2,
        )  # fmt: skip
    if args.format == "csv":
        return as_csv(records, _HEADINGS)
    return as_markdown(_HEADINGS, map(_row, found.best(args.top)))


def _emitted(found: Found, args: argparse.Namespace, gpu: Gpu) -> str:
    from bridge_memory.emit.megatron import bridge_overrides, estimate_command, megatron_arguments

    best = found.best(max(args.top, args.row))
    run = row_to_emit(best, args.row, "layouts").run
    if args.emit == "megatron-args":
        return megatron_arguments(run)
    return bridge_overrides(run) if args.emit == "bridge" else estimate_command(run, args, gpu.name)
