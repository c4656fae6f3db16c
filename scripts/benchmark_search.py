"""How long a search takes, beside the same layouts one by one: ``python scripts/benchmark_search.py [CASE ...]``.

Each case runs in processes of its own, from cold caches: the whole search as arrays (``together``), and ``peaks`` with
``step_time`` of layouts that are drawn from the same space, one after the other. CPU seconds, which other work on the
machine moves least; imports and reading the model are not in them. Every drawn layout is also looked up in what the
arrays gave: both must be equal to the byte and to the last bit.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A model on so many GPUs, and what stays."""

    model: str
    gpus: int
    global_batch: int
    length: int
    gpu: str = "H100"
    fixed: tuple[str, ...] = ()
    #: Axis -> smallest and largest size.
    ranges: Mapping[str, tuple[int, int]] = {}
    #: Seconds that it may take.
    goal: float | None = None


CASES = {
    "70B": Case("meta-llama/Llama-3.1-70B", 64, 512, 8192, goal=0.5),
    "V3-200k": Case("deepseek-ai/DeepSeek-V3", 2048, 8192, 4096, ranges={"cp": (1, 2), "mbs": (1, 4)}, goal=5.0),
    "V3": Case("deepseek-ai/DeepSeek-V3", 2048, 8192, 4096),
    "235B": Case("Qwen/Qwen3-235B-A22B", 256, 1024, 4096),
    "Nemotron-H": Case("nvidia/Nemotron-H-56B-Base-8K", 64, 512, 8192),
}
#: Layouts that are evaluated one by one.
ONE_BY_ONE = 300


def together(case: Case) -> dict[str, Any]:
    """The search as arrays, and what it gave for some layouts."""
    from bridge_memory.plan.many import Sheet, fitting
    from bridge_memory.plan.search import search
    from bridge_memory.plan.space import Refused
    from bridge_memory.report.gpus import find_gpu, margin_bytes
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of

    space, hardware = _space(case), hardware_of(case.gpu)
    card = find_gpu(case.gpu).capacity_bytes

    def looked() -> tuple[float, Any]:
        start = time.process_time()
        found = search(space, hardware, capacity=card, margin=lambda peak: margin_bytes(peak, case.gpus), together=True)
        return time.process_time() - start, found

    cold, found = looked()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start = time.process_time()
    found.best(20)
    explained = time.process_time() - start
    warm, _ = looked()
    sheet, chance = Sheet(space), random.Random(1)
    drawn = []
    groups = [few for few in fitting(sheet, hardware, DEFAULT, lambda peak: True, Refused()) if len(few.peaks)]
    for _ in range(ONE_BY_ONE):
        few = chance.choice(groups)
        i = chance.randrange(len(few.peaks))
        run = sheet.run(few.pipeline, few.sizes[i], few.batch[i], few.recompute[i])
        fields = {g: _changed(getattr(run, g), getattr(space.base, g)) for g in ("parallel", "batch", "recompute")}
        drawn.append((fields, int(few.peaks[i]), float(few.seconds[i])))
    return {
        "cold": cold, "warm": warm, "explained": explained, "looked_at": found.looked_at, "fit": len(found.rows),
        "mib": resident, "drawn": drawn,
    }  # fmt: skip


def one_by_one(case: Case, drawn: list[Any]) -> dict[str, Any]:
    """The same numbers of single runs."""
    from bridge_memory import peaks
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.speed.step_time import step_time

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
    from bridge_memory.plan.space import Space
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
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--work", choices=("together", "one_by_one"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]} is none of {', '.join(CASES)}")
    if args.work:
        case, given = CASES[args.cases[0]], json.load(sys.stdin)
        print(json.dumps(together(case) if args.work == "together" else one_by_one(case, given)))
        return
    columns = (
        "layouts", "fit", "cold s", "warm s", "us/layout", "best 20 s", "MiB", "one by one us", "ratio", "unequal",
    )  # fmt: skip
    print(f"{'case':<12}" + "".join(f"{c:>14}" for c in columns))
    for name in args.cases or CASES:
        ours = _in_a_process("together", name)
        theirs = _in_a_process("one_by_one", name, ours["drawn"])
        each, single = ours["cold"] / ours["looked_at"] * 1e6, theirs["seconds"] / ONE_BY_ONE * 1e6
        cells = (
            f"{ours['looked_at']:,}", f"{ours['fit']:,}", f"{ours['cold']:.2f}", f"{ours['warm']:.2f}", f"{each:.1f}",
            f"{ours['explained']:.2f}", f"{ours['mib']:.0f}", f"{single:.0f}", f"{single / each:.0f}",
            str(theirs["unequal"]),
        )  # fmt: skip
        goal = CASES[name].goal
        said = "" if goal is None else f"   goal {goal:g} s: {'met' if ours['cold'] <= goal else 'not met'}"
        print(f"{name:<12}" + "".join(f"{c:>14}" for c in cells) + said, flush=True)


if __name__ == "__main__":
    main()
