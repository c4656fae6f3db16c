"""``bridge-memory fit``: what to recompute or offload so that a run fits a GPU as it is laid out, in the least time."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments, spelling
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.megatron.search import layout_style
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.progress import Progress
from bridge_memory.cli.ranked import Shown, headroom_bytes, print_found
from bridge_memory.components import GIB
from bridge_memory.emit.commands import field_words, left_idle
from bridge_memory.emit.fixes import state_alone
from bridge_memory.emit.formats import emitted, formats_of
from bridge_memory.emit.megatron import recompute_words
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.speed.megatron.step_time import StepTime, not_timed, step_time

if TYPE_CHECKING:
    from bridge_memory.plan.found import Row

SCHEMA = "bridge-memory/fit/2"
OF_SEARCH = layout_style(frozenset(), experts=True)
_SLOWER, _OFFLOAD, _OPTIMIZER, _MOVED = "beside yours", "offload", "optimizer", "offload time"
#: Some are those of ``search`` that say something of one layout.
_HEADINGS = (
    "recompute", _OFFLOAD, _OPTIMIZER, "peak GiB", "free GiB", "step s", _SLOWER, "recompute time", _MOVED,
)  # fmt: skip

#: What the time of each rests on.
_TIMES = {
    "offload": "offloaded activations: what a layer's copies over the link to host memory take longer than its passes, "
               "at least 5% of them; no run with it was measured",
    "optimizer": "offloaded optimizer: gradients to the host, a step there at the rate of its memory, parameters back, "
                 "one after the other; no run with it was measured",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    add_output_arguments(parser, f"by the schema {SCHEMA}", own=("csv", "md"))
    group = parser.add_argument_group("fit")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")
    group.add_argument("--vary", default="recompute,offload,optimizer", metavar="WHAT",
                       help="what varies, of recompute, offload (of modules' activations) and optimizer (its offload); "
                            "default: all")
    group.add_argument("--headroom", type=float, default=0.0, metavar="GIB",
                       help="GiB to keep free in addition to the margin (default: 0)")
    group.add_argument("--top", type=int, default=8, metavar="N", help="choices to show (default: 8)")
    group.add_argument("-v", "--verbose", action="store_true",
                       help="the whole Pareto front and every note, also where that is more than a screen")
    group.add_argument("--emit", choices=("flags", "policy", *formats_of("megatron")),
                       help="print one row in this form, ready to run; flags: what to add to the command; policy: of "
                            "fsdp2, Python for selective checkpoints")
    group.add_argument("--row", type=int, default=1, metavar="N", help="the row that --emit prints (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Look at every choice and print. Returns 0, 1 where none fits, or 130 where Ctrl-C ended it."""
    from bridge_memory.emit.commands import Emitted
    from bridge_memory.estimation import model_state, peaks
    from bridge_memory.job.host import host_memory
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.fit import changed_fields, fit
    from bridge_memory.plan.reserve import reserve_words
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of

    if args.top < 1 or args.row < 1:
        raise SpecError("--top and --row count from 1; give a positive number")
    spared = headroom_bytes(args)
    gpu = find_gpu(args.gpu)
    own = run_on_gpus(args, [gpu])
    if own.implementation.torch_layers:
        from bridge_memory.cli.torch.fit import run as of_torch

        return of_torch(args, own, gpu, SCHEMA)
    if args.emit == "policy":
        raise SpecError("--emit policy is for --engine fsdp2; use flags")
    hardware = hardware_of(gpu.name)
    capacity = gpu.capacity_bytes - spared
    vary = args.vary.replace(",", " ").split()
    with Progress("choice") as progress:
        found = fit(
            own, hardware, capacity=capacity, outside=partial(outside_bytes_of, gpu=gpu), vary=vary,
            progress=progress, share=progress.done,
        ).on(gpu)  # fmt: skip
    given = step_time(own, hardware, DEFAULT)
    peak, state = max(stage.peak_bytes for stage in peaks(own)), max(model_state(own))
    yours = (
        f"yours: {_words(own)}; peak {peak / GIB:.2f} GiB, step {given.seconds:.2f} s",
        f"sizes, batch and split stay; {', '.join(vary)} {'varies' if len(vary) == 1 else 'vary'}, in every valid "
        "combination",
    )
    document = {
        "schema": SCHEMA, "looked_at": found.looked_at, "fit": len(found.rows), "too_large": found.too_large,
        "tight": found.tight, "refused": dict(found.refused),
        "given": {**_settings(own), "peak_bytes": peak, "model_state_bytes": state, "step_seconds": given.seconds},
    }  # fmt: skip

    def slower(row: Row[StepTime]) -> float:
        return row.time.seconds / given.seconds - 1

    def cells(row: Row[StepTime]) -> tuple[str, ...]:
        known = {
            **dict(zip(OF_SEARCH.headings, OF_SEARCH.cells(row), strict=True)), _SLOWER: f"{slower(row):+.1%}",
            _OFFLOAD: ",".join(row.run.implementation.offload_modules) or "none", _OPTIMIZER: f"{_share(row.run):.0%}",
            _MOVED: f"{row.time.passes.offload / row.time.seconds:.1%}",
        }  # fmt: skip
        return tuple(known[heading] for heading in _HEADINGS)

    def words(row: Row[StepTime]) -> str:
        if row.run == own:
            return "yours as it is"
        by = slower(row)
        cost = f"{abs(by):.1%} {'slower' if by > 0 else 'faster'} than yours"
        return f"keep your layout, {_words(row.run)}, {cost}"

    def record(row: Row[StepTime]) -> dict[str, Any]:
        more = {"slower": slower(row), "host_bytes": host_memory(row.run).node.least}
        return {**OF_SEARCH.record(row), **_settings(row.run), **more, "changed": changed_fields(own, row.run)}

    def emit(row: Row[StepTime]) -> Emitted:
        changed = changed_fields(own, row.run)
        if args.emit == "flags":
            return Emitted(_flags(changed, left_idle(own, row.run)))
        return emitted(args.emit, "megatron", row.run, _with(args, changed), gpu.name, {})

    least = found.lowest
    alone = max(model_state(least.run))
    states = state_alone(least.run, gpu) or (
        f"its weights, gradients and optimizer states alone are {alone / GIB:.1f} GiB"
    )
    otherwise = (
        f"the lowest peak of them is {least.peak / GIB:.1f} GiB, with {_words(least.run)}", states,
        "`bridge-memory whatif` looks at every other option, `search` at other layouts",
    )  # fmt: skip
    style = OF_SEARCH._replace(
        noun="choice", headings=_HEADINGS, of_words=frozenset({"recompute", _OFFLOAD}),
        always=frozenset(_HEADINGS) - {_OFFLOAD, _OPTIMIZER, _MOVED}, idle=frozenset({"none", "0%", "0.0%"}),
        cells=cells, words=words, record=record, settings=frozenset(), spare=("recompute time", _MOVED, "free GiB"),
    )  # fmt: skip
    moved = [_TIMES[name] for name in vary if name in _TIMES]
    change = []
    for row in found.ranked(1).rows:
        host = host_memory(row.run)
        away = f"; host memory: {host.node.least / GIB:.0f} GiB on a node of {host.ranks} GPUs"
        flags = _flags(changed_fields(own, row.run), left_idle(own, row.run))
        change.append(f"change: {flags or 'nothing'}{away}")
    return print_found(
        Shown(
            style, found, own, gpu, own.parallel.world_size, space=yours, otherwise=otherwise, change=change,
            times=("step s is predicted, for ranking: work over rates fitted on measured runs", *moved),
            not_timed=lambda rows: not_timed(rows[0].run), document=document, emit=emit,
            reserve=reserve_words(own.model.has_experts),
        ),
        args,
    )  # fmt: skip


def _share(run: RunSpec) -> float:
    """Of the optimizer, what is in host memory."""
    o = run.optimizer
    return o.optimizer_offload_fraction if o.optimizer_cpu_offload else 0.0


def _settings(run: RunSpec) -> dict[str, Any]:
    """What varies, for programs."""
    return {
        "recompute": recompute_words(run.recompute), "offload": list(run.implementation.offload_modules),
        "optimizer_offload_fraction": _share(run),
    }  # fmt: skip


def _words(run: RunSpec) -> str:
    """"recompute moe_act, offload core_attn,expert_fc1 and 30% of the optimizer"."""
    share = f"{_share(run):.0%} of the optimizer" if _share(run) else ""
    away = " and ".join(filter(None, (",".join(run.implementation.offload_modules), share)))
    return f"recompute {recompute_words(run.recompute)}" + (f", offload {away}" if away else "")


def _flags(changed: Mapping[str, Any], idle: Sequence[str]) -> str:
    """Changes as flags; what has no value any more, or is ``idle``, is one to drop."""
    dropped = [spelling(name) for name, value in changed.items() if value is None or value == () or name in idle]
    dropped += [spelling(name) for name in idle if name not in changed]
    words = shlex.join(field_words({name: value for name, value in changed.items() if name not in idle}))
    return "; ".join(filter(None, (words, f"drop {', '.join(dropped)}" if dropped else "")))


def _with(args: argparse.Namespace, changed: Mapping[str, Any]) -> argparse.Namespace:
    """The flags with what a row changes."""
    flags = copy.copy(args)
    for name, value in changed.items():
        if value is None or value == ():
            vars(flags).pop(name, None)
        else:
            setattr(flags, name, value)
    return flags
