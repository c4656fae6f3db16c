"""``bridge-memory search`` of megatron-core's layouts: those that fit a GPU, the fastest first."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.template import template
from bridge_memory.cli.measured import measured_steps
from bridge_memory.cli.phased import job_notes
from bridge_memory.cli.progress import Progress
from bridge_memory.cli.ranked import Shown, Style, headroom_bytes, how_words, print_found, try_words
from bridge_memory.components import GIB
from bridge_memory.emit.formats import emitted, formats_of
from bridge_memory.emit.megatron import recompute_words, split_words
from bridge_memory.garbage import few_collections
from bridge_memory.plan.found import Found, OneByOne, Row
from bridge_memory.plan.megatron.asked import Asked, asked_space, read
from bridge_memory.plan.megatron.expert import held_by_the_host
from bridge_memory.plan.megatron.nearest import nearest
from bridge_memory.plan.megatron.settings import FIELDS, SETTINGS, setting_words, shown_word, varied_settings
from bridge_memory.plan.megatron.space import AXES, Space
from bridge_memory.plan.nearest import TIMES
from bridge_memory.plan.reserve import reserve_words
from bridge_memory.spec import SpecError
from bridge_memory.spec.graphs import BEFORE_EXPERTS, counts_tokens, waits_for_experts
from bridge_memory.speed.megatron.step_time import StepTime, not_timed

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.spec import RunSpec
    from bridge_memory.speed.constants import Constants
    from bridge_memory.speed.hardware import Hardware

_MORE = " (--exhaustive: every layout that divides)"
SCHEMA = "bridge-memory/search/1"
WITHOUT_NUMPY = f"bridge-memory: {OneByOne.NUMPY.words}"
#: Axis -> the flag of its size, which also takes a range.
RANGED = {axis: AXES[axis][0] for axis in ("tp", "pp", "vpp", "cp", "ep", "mbs")}


def run(args: argparse.Namespace) -> int:
    """Search and print. Returns 0, 1 where nothing fits, or 130 where Ctrl-C ended it."""
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.search import search
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.speed.measured import calibrated

    if (args.emit is not None and args.emit not in formats_of("megatron")) or args.mixed_precision is not None:
        flag = "--mixed-precision" if args.mixed_precision is not None else f"--emit {args.emit}"
        raise SpecError(f"{flag} is for engines outside of megatron-core; add --engine, such as --engine fsdp2")
    gpu = find_gpu(args.gpu)
    hardware = hardware_of(gpu.name)
    space, refusal, left_out = _space(args, gpu, hardware)
    varied = varied_settings(space)
    steps = calibrated(measured_steps(args.measured_step_time, space), hardware) if args.measured_step_time else None
    constants = steps.constants if steps else DEFAULT
    if find_spec("numpy") is None and sys.stderr is not None:
        print(WITHOUT_NUMPY, file=sys.stderr)
    with few_collections():
        with Progress("layout") as progress:
            searched = partial(
                search, hardware=hardware, capacity=gpu.capacity_bytes - headroom_bytes(args),
                outside=partial(outside_bytes_of, gpu=gpu), constants=constants,
                backend=args.backend, cache=args.cache, jobs=args.jobs or (1 if args.backend is None else -1),
            )  # fmt: skip
            found = searched(space, progress=progress, share=progress.done).on(gpu)
        nothing = found.looked_at and not found.rows and not found.stopped and args.format in ("text", "html")
        if not found.looked_at and refusal is not None and not found.stopped:
            raise refusal
        calibration = {"calibration": steps.words} if steps else {}
        document: dict[str, Any] = {
            "schema": SCHEMA, "looked_at": found.looked_at, "fit": len(found.rows), "too_large": found.too_large,
            "tight": found.tight,
            "refused": dict(found.refused), "stopped": found.stopped,
            "without_activations": found.without_activations, "grid": space.rule(),
            "one_by_one": found.one_by_one and found.one_by_one.value, "axes": _axes(space),
            "left_out": list(left_out), **calibration,
        }  # fmt: skip
        ranked = found.ranked(args.top).rows if args.phases else ()
        of_jobs = list(job_notes((row.run for row in ranked), gpu, args.top))
        document |= {"jobs": [record for _, record in of_jobs]} if args.phases else {}
        base, experts = space.base, space.base.model.has_experts
        times = (
            "step s is predicted, for ranking: work over rates fitted on measured runs; its parts are compute, exposed "
            "comm (communication not overlapped), bubble and recompute time", *calibration.values(),
        )
        last = [*_host_words(found, hardware, constants)]
        if any(map(waits_for_experts, (base, *space.others))):
            last.append(
                "graphs of whole layers cannot capture dropless experts, whose tokens the host counts: give "
                f"--cuda-graph-modules {','.join(BEFORE_EXPERTS)}"
            )
        if experts:
            last.append("how layouts of different EP compare is hardly tested: measured runs that vary it vary PP too")
        return print_found(
            Shown(
                layout_style(varied, experts=experts), found, base, gpu, space.num_gpus,
                space=[
                    f"searched: {space.rule()}" + _MORE * (not space.exhaustive), *how_words(found),
                    *(f"left out: {words}" for words in left_out),
                ],
                otherwise=_otherwise(space, lambda other: searched(other).on(gpu)) if nothing else (), times=times,
                not_timed=lambda rows: not_timed(rows[0].run), document=document,
                emit=lambda row: emitted(args.emit, "megatron", row.run, args, gpu.name, {}),
                last=(*(words for words, _ in of_jobs), *last),
                reserve=reserve_words(experts), brief=args.brief,
            ),
            args,
        )  # fmt: skip


def _host_words(found: Found, hardware: Hardware, constants: Constants) -> Iterator[str]:
    """That launching kernels holds a layout up that is else the fastest."""
    for row in found.ranked(1).rows:
        other = held_by_the_host(row, hardware, constants)
        if other is not None:
            run, time = other
            modules = f" transformer_engine --cuda-graph-modules {','.join(BEFORE_EXPERTS)}"
            yield (
                f"launching kernels takes {time.passes.host:.2f} of {time.seconds:.2f} s with row 1's sizes, micro "
                f"batch {run.batch.micro_batch_size}, recompute {recompute_words(run.recompute)}; with CUDA graphs "
                f"(--cuda-graph-impl{modules if counts_tokens(run) else ''}) other rows may be the fastest"
            )


def _otherwise(space: Space, searched: Callable[[Space], Found]) -> list[str]:
    """What to change where nothing fits, with the layout that then does."""
    lines = []
    for near in nearest(space, searched):
        lines.append(try_words(near, _layout_words(near.row)))
    return lines or [
        f"try: other sizes, or a GPU with more memory: on {TIMES[-1]} times as many, and with bf16 moments or the "
        "optimizer in host memory, nothing fits either"
    ]


def _space(
    args: argparse.Namespace, gpu: Gpu, hardware: Hardware
) -> tuple[Space, SpecError | None, tuple[str, ...]]:
    """(the layouts that the flags leave open; what refused the flags as they stand, where other layouts may pass;
    settings that are left out, and why)."""
    asked = Asked(
        None if args.vary is None else read("--vary", [args.vary]), read("--fix", args.fix),
        read("--exclude", args.exclude),
    )  # fmt: skip
    given = {axis for axis, fields in AXES.items() if vars(args).keys() & set(fields)}
    ranges, sizes = _ranges(args)
    total, run, refusal = _base(args, gpu, ranges, sizes)
    if "parallel.world_size" not in total:
        raise SpecError("--num-gpus is missing; say on how many GPUs the layout has to run")
    if total["parallel.world_size"] < 1:
        raise SpecError(f"--num-gpus ({total['parallel.world_size']}) is no number of GPUs; give 1 or more")
    if "batch.global_batch_size" not in total:
        raise SpecError(
            "--global-batch-size is missing; layouts are compared at the same sequences per step: give your run's, "
            "for example --global-batch-size 128"
        )
    fixed = given - ranges.keys()
    if args.num_layers_per_virtual_pipeline_stage is not None:
        fixed |= {"vpp"}
    for how, words in (("vary", asked.vary or {}), ("fix", asked.fix)):
        for axis in words.keys() & sizes.keys():
            raise SpecError(f"--{how} {axis} does not go with a flag that fixes it; drop one of them")
    by_flags = {axis for axis, fields in FIELDS.items() if vars(args).keys() & set(fields)}
    space, left_out = asked_space(
        run, gpu, total["parallel.world_size"], hardware.domain, total["batch.global_batch_size"],
        fixed=frozenset(fixed), ranges=ranges, exhaustive=args.exhaustive, asked=asked, given=frozenset(by_flags),
    )  # fmt: skip
    return space, refusal, left_out


def _ranges(args: argparse.Namespace) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """(axis -> its range, of which one size is a range too; axis -> its one size), taken off the flags, which then fix
    nothing. Where flags say how many layers a stage has, its sizes stay."""
    stages = args.num_layers_per_virtual_pipeline_stage is not None or any(hasattr(args, f) for f in AXES["split"])
    ranges, sizes = {}, {}
    for axis, field in RANGED.items():
        value = getattr(args, field, None)
        if isinstance(value, tuple):
            ranges[axis] = value
        elif value is not None and not (stages and axis in ("pp", "vpp")):
            ranges[axis], sizes[axis] = (value, value), value
        else:
            continue
        delattr(args, field)
    return ranges, sizes


def _base(
    args: argparse.Namespace, gpu: Gpu, ranges: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]
) -> tuple[dict[str, Any], RunSpec, SpecError | None]:
    """The template with the sizes of the flags; where these refuse it, with some that it goes with, and what refused
    it: a space has a run around which its layouts vary, which need not be one of them. Raises SpecError."""
    refusal: SpecError | None = None
    for some in _placeholders(ranges, sizes):
        flags = copy.copy(args)
        for axis, size in some.items():
            setattr(flags, RANGED[axis], size)
        try:
            return *template(flags, gpu, ("parallel.world_size", "batch.global_batch_size")), refusal
        except SpecError as error:
            refusal = refusal or error
            if not _of_sizes(str(refusal)):
                break
    assert refusal is not None
    raise refusal


def _placeholders(ranges: Mapping[str, tuple[int, int]], sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes to try a template with, the most likely first."""
    lowest = {axis: low for axis, (low, _) in ranges.items()}
    yield dict(sizes)
    beside: tuple[dict[str, int], ...] = (
        {}, {"ep": 2}, {"ep": 3}, {"ep": 5}, {"ep": 2, "pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}, {"cp": 2},
    )  # fmt: skip
    for given in (lowest, {}):
        for more in beside:
            yield {**more, **given}


def _of_sizes(refusal: str) -> bool:
    """Whether another layout may pass what refused one."""
    names = [flag for axis in RANGED for flag in (f"--{axis} ", RANGED[axis].partition(".")[2])]
    return any(name in f"{refusal} " for name in names)


# ---- what is printed ----

#: Axis of settings -> the title of its column.
_TITLES = {axis: axis.replace("_", " ") for axis in SETTINGS}
_SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")
_OTHERS = ("mbs", "split", "recompute")
_FIGURES = ("peak GiB", "free GiB", "step s", "compute", "exposed comm", "bubble", "recompute time")


def layout_style(varied: frozenset[str], *, experts: bool) -> Style:
    """``varied``: the axes of settings with a column, beside the dispatcher."""
    axes = tuple(axis for axis in SETTINGS if axis in varied or axis == "dispatcher")
    settings = (*_SIZES, *(_TITLES[axis] for axis in axes), *_OTHERS)
    return Style(
        "layout", (*settings, *_FIGURES), of_words=frozenset({*_TITLES.values(), "split", "recompute"}),
        always=frozenset({"tp", "pp", "mbs"}), idle=frozenset({"1", "even", "none", "0%", "off", "0"}),
        cells=partial(_cells, axes=axes), words=_layout_words, record=_record, settings=frozenset(settings),
        spare=("compute", "bubble", "recompute time", "split", "exposed comm", "free GiB"),
        hidden=frozenset({"dispatcher"} if "dispatcher" not in varied else ()) | (set() if experts else {"ep", "etp"}),
    )  # fmt: skip


def _axes(space: Space) -> dict[str, list[str]]:
    """Every axis of settings with the values that are searched."""
    runs = (space.base, *space.others)
    return {axis: list(dict.fromkeys(shown_word(axis, run) for run in runs)) for axis in SETTINGS}


def _cells(row: Row[StepTime], axes: Sequence[str]) -> tuple[str, ...]:
    p, r, t = row.run.parallel, row.run.recompute, row.time
    compute = t.seconds - t.exposed_communication - t.idle - t.recomputation
    return (
        str(p.tp), str(p.pp), str(p.vpp), str(p.cp), str(p.ep), str(p.etp),
        *(shown_word(axis, row.run) for axis in axes),
        str(row.run.batch.micro_batch_size), split_words(p), recompute_words(r), f"{row.peak / GIB:.2f}",
        f"{row.headroom / GIB:.2f}", f"{t.seconds:.2f}",
        *(f"{part / t.seconds:.0%}" for part in (compute, t.exposed_communication, t.idle, t.recomputation)),
    )  # fmt: skip


def _layout_words(row: Row[StepTime]) -> str:
    """"TP 2, PP 4, EP 8, DP 2, micro batch 1, recompute mlp"."""
    p, split = row.run.parallel, split_words(row.run.parallel)
    sizes = {"TP": p.tp, "PP": p.pp, "VPP": p.vpp, "CP": p.cp, "EP": p.ep}
    sizes |= {"ETP": p.etp} if row.run.model.has_experts else {}
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("TP", "PP")]
    words += setting_words(row.run)
    words += [f"DP {p.data_parallel_size}", f"micro batch {row.run.batch.micro_batch_size}"]
    words += [f"split {split}"] * (split != "even")
    return ", ".join([*words, f"recompute {recompute_words(row.run.recompute)}"])


def _record(row: Row[StepTime]) -> dict[str, Any]:
    t, p = row.time, row.run.parallel
    return {
        "tp": p.tp, "pp": p.pp, "vpp": p.vpp, "cp": p.cp, "ep": p.ep, "etp": p.etp,
        **{axis: shown_word(axis, row.run) for axis in SETTINGS},
        "mbs": row.run.batch.micro_batch_size, "split": split_words(p), "recompute": recompute_words(row.run.recompute),
        "peak_bytes": row.peak, "stage": row.stage, "headroom_bytes": row.headroom, "step_seconds": t.seconds,
        **{f"{name}_seconds": value for name, value in t.passes._asdict().items()},
        "recomputation_seconds": t.recomputation, "bubble_seconds": t.bubble,
        "waiting_seconds": t.waiting, "pipeline_seconds": t.pipeline,
        "data_parallel_seconds": t.data_parallel, "optimizer_seconds": t.optimizer,
    }  # fmt: skip
