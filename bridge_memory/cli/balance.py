"""``bridge-memory balance``: the split of the layers over pipeline stages with the lowest peak, or the fastest."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.arguments.template import template
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.ranked import of_estimate
from bridge_memory.components import GIB
from bridge_memory.emit.megatron import split_words
from bridge_memory.plan.megatron.space import AXES
from bridge_memory.plan.megatron.splits import NO_SPLIT
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.layout import layout

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.plan.megatron.balance import Balanced
    from bridge_memory.report.document import Words

_SIZES = (
    "parallel.world_size", "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size",
    "batch.global_batch_size",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    add_output_arguments(parser, "by the schema bridge-memory/balance/1")
    group = parser.add_argument_group("balance")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")


def run(args: argparse.Namespace) -> int:
    """Balance and print. Returns 0."""
    from bridge_memory.plan.megatron.balance import (
        best_split,
        check_balanced,
        default_split,
        described,
        with_sizes,
    )
    from bridge_memory.plan.megatron.published import PUBLISHED
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.hardware import HARDWARE
    from bridge_memory.verdict import largest_peak

    gpu = find_gpu(args.gpu)
    hardware = HARDWARE.get(gpu.name)
    base, own = _runs(args, gpu)
    check_balanced(base)
    found: dict[str, Balanced] = {}
    if own is not None:
        found["as given"] = described(own, hardware)
    usual = default_split(base)
    if usual is not None:
        found["Megatron's own"] = described(usual, hardware)
    sizes = PUBLISHED.get(base.model.name, {}).get(base.parallel.pp * base.parallel.vpp)
    if sizes is not None and sum(sizes) == base.model.num_layers:
        found["NVIDIA's recipe"] = described(with_sizes(base, sizes), hardware)
    found["lowest peak"] = best_split(base, own, hardware)
    if hardware is not None:
        try:
            largest = largest_peak(gpu, base)
            found[f"fastest on {gpu.name}"] = best_split(base, own, hardware, capacity=largest)
        except SpecError:
            pass  # none fits; the lowest peak says by how much
    args.answer = "; ".join(_answer(found, base, gpu).lines[:2])
    if args.json:
        import json

        splits = {title: _record(b, gpu) for title, b in found.items()}
        print(json.dumps({"schema": "bridge-memory/balance/1", "splits": splits}, indent=2))
    else:
        _print(found, base, gpu)
    return 0


def _runs(args: argparse.Namespace, gpu: Gpu) -> tuple[RunSpec, RunSpec | None]:
    """(the run with some split that it can have, the run with the split that was given)."""
    from bridge_memory.plan.megatron.balance import any_split

    whole = args.container or args.bridge_recipe or args.megatron_args is not None
    try:
        own = run_on_gpus(args, [gpu])
    except SpecError:
        if whole:
            raise
        return _without_split(*template(args, gpu, (*_SIZES, *AXES["split"])))
    v = layout(own.model, own.parallel).virtual_pipeline_model_parallel_size
    parallel = replace(own.parallel, virtual_pipeline_model_parallel_size=v if v > 1 else None)
    return any_split(own, parallel), own if whole or any(hasattr(args, name) for name in AXES["split"]) else None


def _without_split(given: dict[str, Any], base: RunSpec) -> tuple[RunSpec, RunSpec | None]:
    """The same of a run whose number of stages does not divide its layers."""
    from bridge_memory.plan.megatron.balance import any_split

    pp = given.get("parallel.pipeline_model_parallel_size", 1)
    sizes = {
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": given.get("parallel.virtual_pipeline_model_parallel_size"),
    }
    p = base.parallel
    world = given.get("parallel.world_size", p.world_size * pp)
    split = {name.partition(".")[2]: given[name] for name in AXES["split"] if name in given}
    batch = replace(base.batch, global_batch_size=given.get("batch.global_batch_size"))
    own = base.with_(parallel=replace(p, world_size=world, **sizes, **split), batch=batch) if split else None
    if own is not None:  # its string may say how many virtual stages there are
        v = layout(own.model, own.parallel).virtual_pipeline_model_parallel_size
        sizes["virtual_pipeline_model_parallel_size"] = v if v > 1 else None
    return any_split(base, replace(p, world_size=world, **sizes), batch), own


def _record(b: Balanced, gpu: Gpu) -> dict[str, Any]:
    from bridge_memory.estimation import estimate

    p = b.run.parallel
    return {
        "layers": list(b.layers), **{name: getattr(p, name) for name in NO_SPLIT},
        "peak_bytes": list(b.peaks), "microbatch_seconds": list(b.seconds),
        "waiting_seconds": b.waiting,
        "verdict": of_estimate(b.run, gpu).verdict,
        "not_modelled": [str(feature) for feature in estimate(b.run).unmodelled],
    }  # fmt: skip


def _answer(found: dict[str, Balanced], base: RunSpec, gpu: Gpu) -> Words:
    """The fastest split and how it fits; where no time is known or none fits, that with the lowest peak."""
    from bridge_memory.report.document import Words

    def fit(b: Balanced) -> tuple[str, bool]:
        answer = of_estimate(b.run, gpu)
        return answer.words, answer.verdict == "fits"

    def how(b: Balanced) -> str:
        given = found.get("as given")
        return f"as given, {_how(b)}" if given is not None and b.run == given.run else _how(b)

    lowest, fastest = found["lowest peak"], found.get(f"fastest on {gpu.name}")
    words, fits = fit(lowest)
    lines = [f"Lowest peak: {how(lowest)}", words]
    if fastest is not None:
        words, fits = fit(fastest)
        time = f"{max(fastest.seconds):.3f} s per microbatch on its slowest stage"
        time += f", which waits {fastest.waiting:.3f} s for others" if fastest.waiting >= 0.0005 else ""
        lines = [f"Fastest split: {how(fastest)}; {time}", words, *lines]
    return Words("", tuple(lines), "good" if fits else "bad")


def _print(found: dict[str, Balanced], base: RunSpec, gpu: Gpu) -> None:
    from bridge_memory.report.document import Bullets, Column, Grid
    from bridge_memory.report.printing import print_blocks

    rows = []
    uneven = base.parallel.vpp > 1
    for title, b in found.items():
        time = f"{max(b.seconds):.3f}" if b.seconds else "?"
        waits = (f"{b.waiting:.3f}" if b.seconds else "?",) * uneven
        peaks = f"{b.peak / GIB:.2f}", str(b.peaks.index(b.peak)), f"{min(b.peaks) / GIB:.2f}"
        rows.append((title, *peaks, time, *waits, _how(b)))
    columns = (
        Column("split", words=True), Column("peak GiB"), Column("stage"), Column("least GiB"), Column("slowest s"),
        *(Column("waits s"),) * uneven, Column("split as", words=True),
    )  # fmt: skip
    p = base.parallel
    title = f"{base.model.num_layers} layers of {base.model.name} over {p.pp} stages"
    title += f" of {p.vpp} virtual stages" if p.vpp > 1 else ""
    notes = (
        "peak GiB, stage: the highest peak and its stage; least GiB: the lowest peak of a stage; slowest s: predicted "
        "time of forward and backward of one microbatch on the slowest stage"
        + "; waits s: for how long that stage waits for others, for chunks that take unequal times" * uneven,
    )
    blocks: list[Any] = [_answer(found, base, gpu), Grid(title, columns, tuple(rows), None, notes)]
    layers = {title: ", ".join(map(str, b.layers)) for title, b in found.items()}
    heading = "Layers of each virtual stage" if p.vpp > 1 else "Layers of each stage"
    blocks.append(Bullets(heading, tuple(f"{title}: {text}" for title, text in layers.items())))
    print_blocks(blocks)


def _how(b: Balanced) -> str:
    return split_words(b.run.parallel)
