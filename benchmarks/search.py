"""Time of a search, compared with the same layouts one by one.

    python benchmarks/search.py [CASE ...]

Needs numpy. Prints CPU seconds, which other work on the machine affects least, with wall time in brackets. Each case
runs in separate processes: ``whole`` is a command from start to end (imports, the model, the search and ``estimate`` of
the best 20), cold and with a folder of block costs (``--cache``); ``batched`` the search alone, the second in its
process; ``one_by_one`` ``peaks`` and ``step_time`` of layouts drawn from the same space. Peaks and times of every drawn
layout must be bitwise equal in both.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


class Case(NamedTuple):
    """A model on ``gpus`` GPUs, and the axes that are not searched."""

    model: str
    gpus: int
    global_batch: int
    length: int
    gpu: str = "H100"
    fixed: tuple[str, ...] = ()
    #: Axis -> smallest and largest size.
    ranges: Mapping[str, tuple[int, int]] = {}
    #: Goals in CPU seconds of a whole search: cold, and with cached block costs.
    goals: tuple[float, float] | None = None


CASES = {
    "70B": Case("meta-llama/Llama-3.1-70B", 64, 512, 8192, goals=(0.5, 0.5)),
    "V3-200k": Case(
        "deepseek-ai/DeepSeek-V3", 2048, 8192, 4096, ranges={"cp": (1, 2), "mbs": (1, 4)}, goals=(5.0, 2.0)
    ),
    "V3": Case("deepseek-ai/DeepSeek-V3", 2048, 8192, 4096),
    "235B": Case("Qwen/Qwen3-235B-A22B", 256, 1024, 4096),
    "Nemotron-H": Case("nvidia/Nemotron-H-56B-Base-8K", 64, 512, 8192),
}
#: Layouts evaluated one by one.
ONE_BY_ONE = 300


def batched(case: Case) -> dict[str, Any]:
    """The search over batched layouts, and its peaks and times of some of them."""
    from bridge_memory.outside.amount import Range
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.found import Limit, Refused
    from bridge_memory.plan.megatron.many import Sheet, fitting
    from bridge_memory.plan.megatron.search import search
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of

    space, hardware = _space(case), hardware_of(case.gpu)
    gpu = find_gpu(case.gpu)
    capacity, outside = gpu.capacity_bytes, partial(outside_bytes_of, gpu=gpu)

    def looked() -> tuple[float, Any]:
        start = time.process_time()
        found = search(space, hardware, capacity=capacity, outside=outside, batched=True)
        return time.process_time() - start, found

    looked()
    warm, found = looked()
    sheet, chance = Sheet(space), random.Random(1)
    drawn = []
    everything = Limit(1 << 60, lambda run: Range(0, 0))
    groups = [few for few in fitting(sheet, hardware, DEFAULT, everything, Refused()) if len(few.peaks)]
    for _ in range(ONE_BY_ONE):
        few = chance.choice(groups)
        i = chance.randrange(len(few.peaks))
        run = sheet.run(few.pipeline, *few.places(i))
        fields = {g: _changed(getattr(run, g), getattr(space.base, g)) for g in ("parallel", "batch", "recompute")}
        drawn.append((fields, int(few.peaks[i]), float(few.seconds[i])))
    return {"warm": warm, "looked_at": found.looked_at, "fit": len(found.rows), "drawn": drawn}


def whole(case: Case, cache: str | None) -> dict[str, Any]:
    """CPU and wall seconds of this process, imports included, to search and to estimate the best 20 rows."""
    start = time.perf_counter() - time.process_time()
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.search import search
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.hardware import hardware_of

    gpu = find_gpu(case.gpu)
    found = search(
        _space(case), hardware_of(case.gpu), capacity=gpu.capacity_bytes, outside=partial(outside_bytes_of, gpu=gpu),
        cache=cache,
    )  # fmt: skip
    for row in found.best(20):
        _estimated(row)
    found.front()
    return {
        "cpu": time.process_time(), "wall": time.perf_counter() - start,
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip


def _estimated(row: Any) -> None:
    from bridge_memory import estimate

    assert estimate(row.run).peak_stage.peak_bytes == row.peak


def one_by_one(case: Case, drawn: list[Any]) -> dict[str, Any]:
    """The same peaks and times by single runs."""
    from bridge_memory import peaks
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.speed.megatron.step_time import step_time

    base, hardware = _space(case).base, hardware_of(case.gpu)
    start, unequal = time.process_time(), 0
    for fields, peak, seconds in drawn:
        run = base.with_fields(**{
            f"{group}.{name}": tuple(value) if isinstance(value, list) else value
            for group, values in fields.items() for name, value in values.items()
        })  # fmt: skip
        found = max(stage.peak_bytes for stage in peaks(run)), step_time(run, hardware).seconds
        unequal += found != (peak, seconds)
    return {"seconds": time.process_time() - start, "unequal": unequal}


def _space(case: Case) -> Any:
    from bridge_memory import BatchSpec, RunSpec
    from bridge_memory.plan.megatron.space import Space
    from bridge_memory.speed.hardware import hardware_of

    batch = BatchSpec(seq_length=case.length, global_batch_size=case.global_batch)
    base = RunSpec(model=case.model, batch=batch)
    return Space(base, case.gpus, hardware_of(case.gpu).domain, frozenset(case.fixed), case.ranges)


def _changed(spec: Any, base: Any) -> dict[str, Any]:
    from dataclasses import fields

    return {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != getattr(base, f.name)}


def _in_a_process(what: str, case: str, given: Any = None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", what, case]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--work", choices=("whole", "batched", "one_by_one"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    if args.work:
        case, given = CASES[args.cases[0]], json.load(sys.stdin)
        if args.work == "batched":
            print(json.dumps(batched(case)))
        else:
            print(json.dumps(whole(case, given) if args.work == "whole" else one_by_one(case, given)))
        return
    columns = (
        "layouts", "fit", "cold s", "cached s", "warm s", "us/layout", "MiB", "one by one us", "ratio", "unequal",
    )  # fmt: skip
    print(f"{'case':<12}" + "".join(f"{c:>14}" for c in columns))
    for name in args.cases or CASES:
        cold = _in_a_process("whole", name)
        with tempfile.TemporaryDirectory() as folder:
            _in_a_process("whole", name, folder)
            kept = _in_a_process("whole", name, folder)
        ours = _in_a_process("batched", name)
        theirs = _in_a_process("one_by_one", name, ours["drawn"])
        each, single = cold["cpu"] / ours["looked_at"] * 1e6, theirs["seconds"] / ONE_BY_ONE * 1e6
        cells = (
            f"{ours['looked_at']:,}", f"{ours['fit']:,}", f"{cold['cpu']:.2f} ({cold['wall']:.1f})",
            f"{kept['cpu']:.2f} ({kept['wall']:.1f})", f"{ours['warm']:.2f}", f"{each:.1f}", f"{cold['mib']:.0f}",
            f"{single:.0f}", f"{single / each:.0f}", str(theirs["unequal"]),
        )  # fmt: skip
        said = "".join(
            f"   goal {what} {goal:g} s: {'met' if of['cpu'] <= goal else 'not met'}"
            for what, goal, of in zip(("cold", "cached"), CASES[name].goals or (), (cold, kept), strict=False)
        )
        print(f"{name:<12}" + "".join(f"{c:>14}" for c in cells) + said, flush=True)


if __name__ == "__main__":
    main()
