"""``bridge-memory fit --engine fsdp2``: which operations of a layer to keep, and which to run again."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.ranked import headroom_bytes, of_estimate
from bridge_memory.components import GIB
from bridge_memory.spec import SpecError
from bridge_memory.speed.step_time import tokens_per_second_per_gpu
from bridge_memory.speed.torch.step_time import StepTime, step_time

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.plan.torch.fit import Policy
    from bridge_memory.report.document import Drawn
    from bridge_memory.spec import RunSpec

_MIB = 1 << 20


def run(args: argparse.Namespace, own: RunSpec, gpu: Gpu, schema: str) -> int:
    """Choose and print. Returns 0, or 1 where no policy fits."""
    from bridge_memory.emit.policy import policy_source
    from bridge_memory.estimation import peaks
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.torch.fit import fit
    from bridge_memory.report.printing import print_blocks
    from bridge_memory.speed.hardware import hardware_of

    if args.emit not in (None, "policy"):
        raise SpecError(f"--emit {args.emit} is for megatron-core's engines; use --emit policy")
    if args.format in ("csv", "md"):
        raise SpecError(f"--format {args.format} is for megatron-core's engines; use json")
    hardware = hardware_of(gpu.name)
    capacity = gpu.capacity_bytes - headroom_bytes(args)
    found = fit(own, hardware, capacity=capacity, outside=partial(outside_bytes_of, gpu=gpu))
    given, (stage,) = step_time(own, hardware), peaks(own)
    if args.emit:
        if found is None:
            raise SpecError("no policy fits; there is none to emit")
        print(policy_source(found), end="")
    elif args.format == "json":
        of_policy = _record(found) if found is not None else None
        before = {"peak_bytes": stage.peak_bytes, "step_seconds": given.seconds}
        print(json.dumps({"schema": schema, "given": before, "policy": of_policy}, indent=2))
    else:
        yours = f"yours: peak {stage.peak_bytes / GIB:.2f} GiB, step {given.seconds:.2f} s"
        print_blocks(_blocks(found, own, gpu, given, yours, args))
    return 0 if found is not None else 1


def _record(policy: Policy) -> dict[str, Any]:
    return {
        "kept": [
            {"operation": k.operation.name, "product": k.operation.product, "layers": list(k.layers),
             "bytes_per_layer": int(k.operation.nbytes), "seconds_per_layer": k.operation.seconds}
            for k in policy.kept
        ],
        "least_peak_bytes": policy.least, "peak_bytes": policy.peak, "headroom_bytes": policy.headroom,
        "step_seconds": policy.time.seconds, "recomputation_seconds": policy.time.recomputation,
        "whole_layers_step_seconds": policy.slowest.seconds,
    }  # fmt: skip


def _blocks(
    policy: Policy | None, own: RunSpec, gpu: Gpu, given: StepTime, yours: str, args: argparse.Namespace
) -> list[Drawn]:  # fmt: skip
    from bridge_memory.plan.reserve import reserve_words
    from bridge_memory.report.document import Bullets, Column, Grid, Words

    reserve = reserve_words(experts=False)
    if policy is None:
        return [Bullets("Nothing fits", (
            f"with every layer recomputed whole, the run does not leave {reserve}", yours,
            "`bridge-memory whatif` looks at every other option, `search` at other configurations",
        ))]  # fmt: skip
    time = policy.time.seconds
    kept = f"keep {len(policy.kept)} operations of them" if policy.kept else "keep nothing of them"
    answer = Words("", (
        f"Checkpoint every layer and {kept}: {_percent(time / given.seconds - 1)} than yours, "
        f"{_percent(time / policy.slowest.seconds - 1)} than whole layers run again; {time:#.3g} s per step, "
        f"{tokens_per_second_per_gpu(own, time):,.0f} tokens/s/GPU",
        of_estimate(policy.run, gpu).words, f"Keeps {reserve}",
    ), "good")  # fmt: skip
    rows = tuple([
        (k.operation.name, f"{k.number} of {len(k.operation.layers)}", f"{k.operation.nbytes / _MIB:.0f}",
         f"{1e3 * k.operation.seconds:.2f}")
        for k in policy.kept
    ])  # fmt: skip
    columns = (
        Column("operation", words=True), Column("kept in layers"), Column("MiB a layer"), Column("ms a layer")
    )  # fmt: skip
    notes = (
        "kept in layers: the last ones; MiB, ms: of one microbatch, the output and what running it again takes",
        f"the most time saved within the memory that is left beside {policy.least / GIB:.2f} GiB, the peak of whole "
        "layers recomputed; candidates are matrix products and attention",
        "the peak is an upper bound: outputs of the layer that runs backward are counted twice", yours,
        "--emit policy prints it as Python",
    )
    return [answer, Grid(f"Operations of {own.model.name} to keep", columns, rows, None, notes)]


def _percent(by: float) -> str:
    return f"{abs(by):.1%} {'slower' if by > 0 else 'faster'}"
