"""``bridge-memory fit``: what to recompute so that a run fits a GPU as it is laid out, in the least time."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.megatron.search import STYLE as OF_SEARCH
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.ranked import Shown, how_words, print_found
from bridge_memory.components import GIB
from bridge_memory.emit.formats import emitted, formats_of
from bridge_memory.emit.megatron import recompute_words
from bridge_memory.spec import SpecError
from bridge_memory.speed.megatron.step_time import StepTime, not_timed, step_time

if TYPE_CHECKING:
    from bridge_memory.plan.found import Row

SCHEMA = "bridge-memory/fit/1"
#: Headings of ``search`` that say something of one layout, and what is beside them.
_OWN = ("recompute", "peak GiB", "free GiB", "step s", "recompute time")
_SLOWER = "beside yours"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    add_output_arguments(parser, f"by the schema {SCHEMA}", own=("csv", "md"))
    group = parser.add_argument_group("fit")
    group.add_argument("--gpu", required=True, metavar="NAME", help="the GPU (`bridge-memory gpus` lists them)")
    group.add_argument("--headroom", type=float, default=0.0, metavar="GIB",
                       help="GiB to keep free in addition to the margin (default: 0)")
    group.add_argument("--top", type=int, default=8, metavar="N", help="choices to show (default: 8)")
    group.add_argument("--emit", choices=formats_of("megatron"), help="print one row in this form, ready to run")
    group.add_argument("--row", type=int, default=1, metavar="N", help="the row that --emit prints (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Look at every choice and print. Returns 0, or 1 where none fits."""
    from bridge_memory.estimation import model_state, peaks
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.fit import fit, lowest
    from bridge_memory.plan.reserve import reserve_words
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of

    if args.top < 1 or args.row < 1:
        raise SpecError("--top and --row count from 1; give a positive number")
    if not 0 <= args.headroom < float("inf"):
        raise SpecError(f"--headroom ({args.headroom}) is not a size; give GiB of 0 or more")
    gpu = find_gpu(args.gpu)
    own = run_on_gpus(args, [gpu])
    if own.data_parallel.engine not in ("megatron_ddp", "megatron_fsdp"):
        raise SpecError(
            f"engine ({own.data_parallel.engine}) has no recomputation of Megatron's; use `bridge-memory search "
            f"--engine {own.data_parallel.engine} --vary checkpointing`"
        )
    hardware = hardware_of(gpu.name)
    capacity = gpu.capacity_bytes - int(args.headroom * GIB)
    space, found = fit(own, hardware, capacity=capacity, outside=partial(outside_bytes_of, gpu=gpu))
    given = step_time(own, hardware, DEFAULT)
    peak, state = max(stage.peak_bytes for stage in peaks(own)), max(model_state(own))
    yours = (
        f"yours: recompute {recompute_words(own.recompute)}, peak {peak / GIB:.2f} GiB, step {given.seconds:.2f} s",
        "sizes, batch and split stay; recompute none, every set of modules, or whole layers, all of them evaluated",
        *how_words(found),
    )
    document = {
        "schema": SCHEMA, "looked_at": found.looked_at, "fit": len(found.rows), "too_large": found.too_large,
        "tight": found.tight, "refused": dict(found.refused),
        "given": {
            "recompute": recompute_words(own.recompute), "peak_bytes": peak, "model_state_bytes": state,
            "step_seconds": given.seconds,
        },
    }  # fmt: skip
    headings = (*_OWN[:4], _SLOWER, *_OWN[4:])

    def slower(row: Row[StepTime]) -> float:
        return row.time.seconds / given.seconds - 1

    def cells(row: Row[StepTime]) -> tuple[str, ...]:
        known = {**dict(zip(OF_SEARCH.headings, OF_SEARCH.cells(row), strict=True)), _SLOWER: f"{slower(row):+.1%}"}
        return tuple(known[heading] for heading in headings)

    def words(row: Row[StepTime]) -> str:
        if row.run.recompute == own.recompute:
            return "yours as it is"
        by = slower(row)
        cost = f"{abs(by):.1%} {'slower' if by > 0 else 'faster'} than yours"
        return f"keep your layout, recompute {recompute_words(row.run.recompute)}, {cost}"

    def record(row: Row[StepTime]) -> dict[str, Any]:
        return {**OF_SEARCH.record(row), "slower": slower(row)}

    otherwise: list[str] = []
    if not found.rows and not found.stopped:
        least, run = lowest(space)
        otherwise.append(f"the lowest peak of them is {least / GIB:.1f} GiB, with {recompute_words(run.recompute)}")
    alone = f"weights, gradients and optimizer states alone are {state / GIB:.1f} GiB"
    if state > gpu.capacity_bytes:
        alone += f" of {gpu.capacity_bytes / GIB:.1f}: no change of activations can make it fit"
    otherwise += [alone, "`bridge-memory whatif` looks at every other option, `search` at other layouts"]
    style = OF_SEARCH._replace(
        noun="choice", headings=headings, of_words=frozenset({"recompute"}), always=frozenset(headings), cells=cells,
        words=words, record=record,
    )  # fmt: skip
    return print_found(
        Shown(
            style, found, own, gpu, space.num_gpus, space=yours, otherwise=otherwise,
            times=("step s is predicted, for ranking: work over rates fitted on measured runs",),
            not_timed=lambda rows: not_timed(rows[0].run), document=document,
            emit=lambda row: emitted(args.emit, "megatron", row.run, args, gpu.name, {}),
            reserve=reserve_words(own.model.has_experts),
        ),
        args,
    )  # fmt: skip
