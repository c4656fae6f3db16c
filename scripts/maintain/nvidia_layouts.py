"""Rank the layouts of NVIDIA's performance recipes among those that the search finds.

    python scripts/maintain/nvidia_layouts.py [--only llama3_70b ...] [--precision bf16 ...] [--list] [--fit]
                                     [--published RUNS.jsonl]

Needs Megatron Bridge with ``perf_recipes``; runs on a CPU, as ``scripts/bridge_recipes.py``. Prints, for each
pretraining recipe, whether its layout is predicted to fit its card, and the share of fitting layouts that are predicted
to be faster. All other settings are the recipe's; the space is the grid of ``bridge-memory search``. Recipes with equal
model, GPU, batch, precision and layout are one row.

Not every recipe was measured: some are derived from others (half of the GPUs) and are in no performance table.
``--published`` takes a corpus of throughput with the rows of Bridge's performance tables, and counts recipes whose
layout is in a table separately. ``--fit`` omits the search.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_recipes import ConfigNotAtHand, bridge_on_cpu, build

from bridge_memory import RunSpec, SpecError
from bridge_memory.estimation import peaks
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.hardware import HARDWARE
from bridge_memory.speed.megatron.step_time import not_timed, step_time
from bridge_memory.verdict import headroom

#: Targets: the share of rows that fit; of rows that fit and have a time, the share in the fastest tenth.
FIT, FIRST_TENTH = 0.95, 0.70
NAME = re.compile(r"(?P<model>.+)_pretrain_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_(?P<precision>[a-z0-9]+)_config$")


class Placed(NamedTuple):
    """The rank of one recipe's layout among those found."""

    name: str
    words: str
    #: Peak over capacity less margin.
    filled: float
    #: Of the layouts that fit, how many there are, and how many of them are predicted faster; none: not ranked.
    fitting: int = 0
    faster: int = 0
    #: The layout that is predicted fastest, and how much longer the recipe's takes.
    best: str = ""
    slower: float = 0.0


def recipes_of(package: Any) -> Iterator[tuple[str, str, int]]:
    """(name, GPU, number of GPUs) of each pretraining recipe."""
    import importlib
    import pkgutil

    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        found = importlib.import_module(module.name)
        for name in sorted(vars(found)):
            said = NAME.match(name)
            if said and getattr(found, name).__module__ == found.__name__:
                yield f"{found.__name__}:{name}", said["gpu"].upper(), int(said["gpus"])


def words(run: RunSpec) -> str:
    """A layout in a few words."""
    p, r = run.parallel, run.recompute
    sizes = (("tp", p.tp), ("pp", p.pp), ("vpp", p.vpp), ("cp", p.cp), ("ep", p.ep))
    again = ",".join(r.modules) if r.granularity == "selective" else r.granularity or ""
    parts = [f"{name}{size}" for name, size in sizes if size > 1]
    parts.append(f"mbs{run.batch.micro_batch_size}")
    return " ".join([*parts, f"recompute:{again}"] if again else parts)


#: Precision in the tables -> precision in recipe names.
PRECISIONS = {"BF16": "bf16", "FP8": "fp8cs", "FP8-CS": "fp8cs", "MXFP8": "fp8mx", "FP8-MX": "fp8mx", "NVFP4": "nvfp4"}


def plain(name: str) -> str:
    """The letters and digits of a model's name."""
    return "".join(c for c in name.lower() if c.isalnum())


def published(path: Path) -> set[tuple[str, ...]]:
    """(model, GPUs, GPU, precision, layout in short) of every row of Bridge's performance tables that pretrains."""
    found: set[tuple[str, ...]] = set()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if not str(row.get("framework")).startswith("megatron-bridge") or row.get("task") != "pretrain":
            continue
        sizes = [("tp", "tp"), ("pp", "pp"), ("vpp", "vp"), ("cp", "cp"), ("ep", "ep")]
        layout = [f"{name}{row[key]}" for name, key in sizes if (row.get(key) or 1) > 1] + [f"mbs{row.get('mbs')}"]
        precision = PRECISIONS.get(str(row.get("precision")), "")
        found.add((plain(str(row["model"])), str(row["gpus"]), str(row["gpu"]).lower(), precision, " ".join(layout)))
    return found


def fills(run: RunSpec, gpu: str) -> float:
    """The highest peak with its margin, over the card's capacity."""
    peak, card = max(s.peak_bytes for s in peaks(run)), find_gpu(gpu)
    return 1 - headroom(card, peak, run) / card.capacity_bytes


def placed(name: str, run: RunSpec, gpu: str) -> Placed:
    """The rank of ``run``'s layout in its space."""
    card, hardware = find_gpu(gpu), HARDWARE[gpu]
    world = run.parallel.world_size
    assert world is not None
    filled = fills(run, gpu)
    missing = set(not_timed(run)) - {"cuda_graph_impl", "overlap_moe_expert_parallel_comm"}
    if filled > 1 or missing:
        return Placed(name, words(run), filled, best=f"no time for {', '.join(missing)}" if missing else "")
    # What overlaps with the experts' exchange is the same in all layouts, and searched one by one where it is on.
    plain = run.with_fields(overlap_moe_expert_parallel_comm=False, delay_wgrad_compute=False)
    space = Space(plain, world, hardware.domain, global_batch_size=run.batch.global_batch_size)
    found = search(
        space, hardware, capacity=card.capacity_bytes, outside=partial(outside_bytes_of, gpu=card),
    )  # fmt: skip
    if not found.rows:
        return Placed(name, words(run), filled)
    seconds = step_time(plain, hardware).seconds
    low, high = 0, len(found.rows)
    while low < high:  # rows are sorted by time, and made when they are asked for
        middle = (low + high) // 2
        if found.rows[middle].time.seconds < seconds * (1 - 1e-9):
            low = middle + 1
        else:
            high = middle
    first = found.rows[0]
    return Placed(name, words(run), filled, len(found.rows), low, words(first.run), seconds / first.time.seconds - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="recipes whose name starts with one of these")
    parser.add_argument("--precision", nargs="*", help="recipes whose name ends with one of these: bf16, fp8cs, fp8mx")
    parser.add_argument("--list", action="store_true", help="only list the recipes")
    parser.add_argument("--fit", action="store_true", help="only whether each fits, without ranks")
    parser.add_argument("--published", type=Path, metavar="RUNS.jsonl", help="rows of Bridge's performance tables")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    tables = published(args.published) if args.published else set()
    measured: list[bool] = []  # of the rows that a table lists, whether each is predicted to fit
    rows: list[Placed] = []
    refused: Counter[str] = Counter()
    with bridge_on_cpu():
        import importlib

        package = importlib.import_module("megatron.bridge.perf_recipes")
        seen: set[Any] = set()
        for path, gpu, world in recipes_of(package):
            module, _, name = path.partition(":")
            short = name.removesuffix("_config")
            if args.only and not short.startswith(tuple(args.only)):
                continue
            if args.precision and not short.endswith(tuple(args.precision)):
                continue
            if args.list:
                print(short)
                continue
            if gpu not in HARDWARE:
                refused[f"no figures of the GPU {gpu}"] += 1
                continue
            try:
                config = build(getattr(importlib.import_module(module), name))
                config.world_size = world
                arch = "hopper" if gpu.startswith("H") else "blackwell"
                run = run_from_config_container(config, world_size=world, gpu_arch=arch)
                key = run, gpu
                if key in seen:
                    continue
                seen.add(key)
                started = perf_counter()
                row = Placed(short, words(run), fills(run, gpu)) if args.fit else placed(short, run, gpu)
            except (SpecError, ConfigNotAtHand, AttributeError, NotImplementedError, OSError) as error:
                refused[str(error).splitlines()[0][:90]] += 1
                continue
            rows.append(row)
            said = NAME.match(name)
            assert said is not None
            layout = row.words.partition(" recompute")[0]
            if (plain(said["model"]), said["gpus"], said["gpu"], said["precision"], layout) in tables:
                measured.append(row.filled <= 1)
            text = f"{short}: {row.words}; fills {row.filled:.0%}"
            if not args.fit:
                rank = "-" if not row.fitting else f"{row.faster:,} of {row.fitting:,} ({row.faster / row.fitting:.1%})"
                text += f"; faster {rank}; {row.slower:+.1%} of {row.best} [{perf_counter() - started:.0f} s]"
            print(text, flush=True)
    if args.list:
        return 0
    fit = [row for row in rows if row.filled <= 1]
    ranked = [row.faster / row.fitting for row in fit if row.fitting]
    print(f"\n{len(rows)} layouts: {len(fit)} fit ({len(fit) / max(1, len(rows)):.0%}, target {FIT:.0%})")
    if measured:
        print(f"{len(measured)} of them with the layout of a table: {sum(measured)} fit "
              f"({sum(measured) / len(measured):.0%}, target {FIT:.0%})")  # fmt: skip
    if ranked:
        tenth = sum(share <= 0.1 for share in ranked)
        slower = median(row.slower for row in fit if row.fitting)
        print(
            f"{len(ranked)} ranked: {tenth} in the first tenth ({tenth / len(ranked):.0%}, target {FIRST_TENTH:.0%}); "
            f"median share of faster layouts {median(ranked):.1%}, median {slower:+.1%} of the fastest predicted"
        )
    for reason, number in refused.most_common():
        print(f"not compared, {number}: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
