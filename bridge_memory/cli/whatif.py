"""``bridge-memory whatif``: what changing one option frees, and what it costs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.phased import HEADING, add_phases_argument, job_cell, job_record, jobs
from bridge_memory.components import GIB
from bridge_memory.emit.fixes import changed_flags, fix_words, flag_words, state_alone
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.speed.torch.step_time import NOT_FITTED, TIMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.job.job import Job
    from bridge_memory.plan.changes import Effect, WhatIf
    from bridge_memory.report.document import Block
    from bridge_memory.result import Estimate



#: Changes that are shown; as text no more, and no more than a screen has room for.
TOP, TOP_OF_TEXT = 20, 12
#: Changes that are shown however little room there is.
_LEAST = 3
_TITLES = ("change", "frees GiB", "peak GiB", "step time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    add_output_arguments(parser, "by the schema bridge-memory/whatif/1")
    group = parser.add_argument_group("what-if")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")
    group.add_argument("--pairs", action="store_true", help="also the best pairs of changes")
    group.add_argument("--target-gib", type=float, metavar="X",
                       help="the cheapest changes with which no stage exceeds X GiB")
    group.add_argument("--top", type=int, metavar="N", help="changes to show (default: 12 as text, else 20)")
    add_phases_argument(group, "every change that is shown")


def run(args: argparse.Namespace) -> int:
    """Try every change and print. Returns 0, or 1 where --target-gib cannot be reached."""
    from bridge_memory.plan.changes import WhatIf
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.hardware import HARDWARE, hardware_of

    gpu = find_gpu(args.gpu)
    if args.top is not None and args.top < 1:
        raise SpecError(f"--top ({args.top}) counts from 1; give a positive number")
    spec = run_on_gpus(args, [gpu])
    hardware = HARDWARE.get(gpu.name)
    whatif = WhatIf(spec, hardware)
    target = None
    if args.target_gib is not None:
        if not 0 < args.target_gib < 1e6:
            raise SpecError(f"--target-gib ({args.target_gib}) is no size; give GiB of more than 0")
        if hardware is None:
            hardware_of(gpu.name)  # the cheapest takes a time: this refuses
        target = whatif.cheapest(int(args.target_gib * GIB))
    pairs = whatif.pairs() if args.pairs else []
    answer = _answer(whatif, spec, gpu, pairs)
    args.answer = "; ".join(answer)
    whole_screen = args.top is None and args.format == "text" and not args.json
    if args.top is None:
        args.top = TOP_OF_TEXT if whole_screen else TOP
    every = {"changes": whatif.singles, "pairs": pairs}
    shown = {name: some[: args.top] for name, some in every.items()}
    of_jobs = {name: jobs((e.run for e in some), gpu) for name, some in shown.items()} if args.phases else {}
    if args.json:
        import json

        reached = {} if args.target_gib is None else {"target": _record(target, spec) if target else None}
        print(json.dumps(
            {
                "schema": "bridge-memory/whatif/1", "peak_bytes": whatif.before, **_unmodelled(spec),
                **{name: [
                    {**_record(e, spec), **({"job": job_record(of_jobs[name][n])} if of_jobs else {})}
                    for n, e in enumerate(some)
                ] for name, some in shown.items()}, **reached,
            }, indent=2,
        ))  # fmt: skip
    else:
        from bridge_memory.report.printing import print_blocks
        from bridge_memory.report.screen import first_that_fits

        tops = range(args.top, _LEAST - 1, -1) if whole_screen else [args.top]
        print_blocks(first_that_fits(_blocks(args, spec, every, top, target, answer, of_jobs) for top in tops))
    return int(args.target_gib is not None and target is None)


def _answer(whatif: WhatIf, run: RunSpec, gpu: Gpu, pairs: Sequence[Effect]) -> tuple[str, ...]:
    """How it fits as it is; where it does not, the change to try first, else the pair, or that none of activations
    helps."""
    from bridge_memory.cli.ranked import of_estimate
    from bridge_memory.estimation import estimate
    from bridge_memory.plan.changes import in_order_to_try, makes_it_fit
    from bridge_memory.verdict import headroom

    result, free = estimate(run), headroom(gpu, whatif.before, run)
    lines = [_peak_words(result, whatif.before), of_estimate(run, gpu).words]
    if free < 0:
        first = next(whatif.to_try(gpu), None)
        lines.append(f"try first: {fix_words(first, run)}" if first is not None else "no single option makes it fit")
        if first is None and pairs:
            two = next((effect for effect in in_order_to_try(pairs) if makes_it_fit(effect, gpu)), None)
            lines.append(f"try first, both: {fix_words(two, run)}" if two else "no two of them make it fit either")
        lines += filter(None, (state_alone(run, gpu),))
    return tuple(lines)


def _unmodelled(run: RunSpec) -> dict[str, Any]:
    """Bounds of the run's peak, and what is not modelled."""
    from bridge_memory.estimation import estimate

    result = estimate(run)
    return {
        "peak_bounds": result.peak_bounds._asdict(), "not_modelled": [str(feature) for feature in result.unmodelled]
    }


def _record(effect: Effect, run: RunSpec) -> dict[str, Any]:
    fields = {name: value for change in effect.changes for name, value in change.fields}
    add, drop = changed_flags(effect, run)
    return {
        "fields": fields, "flags": add, "without": drop, "freed_bytes": effect.freed, "peak_bytes": effect.peak,
        "step_time_factor": effect.slowdown,
    }  # fmt: skip


def _blocks(
    args: argparse.Namespace, run: RunSpec, every: dict[str, list[Effect]], top: int, target: Effect | None,
    answer: Sequence[str], of_jobs: dict[str, list[Job]],
) -> list[Block]:  # fmt: skip
    """The answer, and ``top`` of the changes and of the pairs."""
    from bridge_memory.report.document import Bullets, Column, Grid, Words

    titles = (*_TITLES, *((HEADING,) if of_jobs else ()))
    columns = tuple(Column(title, words=title in ("change", HEADING)) for title in titles)
    blocks: list[Block] = [Words("", tuple(answer))]
    for title, name in (("One change", "changes"), ("Two changes", "pairs")):
        if some := every[name][:top]:
            beside: list[tuple[str, ...]] = [(job_cell(job),) for job in of_jobs.get(name, ())]
            rows = tuple(
                (_words(effect, args, run), *_numbers(effect), *more)
                for effect, more in zip(some, beside or [()] * len(some), strict=False)
            )
            more = len(every[name]) - len(some)
            cut = f" (the {len(some)} that free most; --top N shows more of the other {more})" if more else ""
            blocks.append(Grid(f"{title} to {run.model.name}{cut}", columns, rows))
    if not every["changes"]:
        blocks.append(Bullets("Nothing frees memory", ("no single change lowers the highest peak of all stages",)))
    if args.target_gib is not None:
        if target is None:
            words = "no three changes reach it"
        else:
            frees, peak, time = _numbers(target)
            words = f"{_words(target, args, run)}: peak {peak} GiB, frees {frees} GiB, step time {time}"
        blocks.append(Bullets(f"At most {args.target_gib:g} GiB on every stage", (words,)))
    notes = [
        "frees GiB: how much lower the highest peak of all stages becomes",
        "step time: change of the predicted time per sequence (references/search.md); ?: the time model does not know "
        "the option",
    ]
    if of_jobs:
        notes.append("job GiB: the highest driver peak of the whole job with the change, at most, and its phase")
    if run.data_parallel.engine in TIMED:
        notes.append(NOT_FITTED)
    return [*blocks, Bullets("How to read it", tuple(notes))]


def _peak_words(result: Estimate, before: int) -> str:
    """The peak, "at least" where what is not modelled raises it."""
    from bridge_memory.report.answer import bounded_peak, feature_names

    start = f"{result.run.model.name}: the highest peak is"
    if result.peak_bounds == (before, before):
        return f"{start} {before / GIB:.2f} GiB"
    return f"{start} {bounded_peak(result, 'GiB')}; not modelled: {feature_names(result)}"


def _words(effect: Effect, args: argparse.Namespace, run: RunSpec) -> str:
    """In flags; in fields where the run is a ConfigContainer's, beside which none stand."""
    if args.container is not None or args.bridge_recipe is not None:
        return effect.words
    return flag_words(effect, run, megatrons=args.megatron_args is not None)


def _numbers(effect: Effect) -> tuple[str, ...]:
    time = "?" if effect.slowdown is None else f"{effect.slowdown - 1:+.1%}"
    return f"{effect.freed / GIB:.2f}", f"{effect.peak / GIB:.2f}", time
