"""Time of a warm estimate of DeepSeek-V3 on 1024 GPUs (tp 2, pp 16 x 4, ep 64), as in one step of a search.

Blocks are cached by the sizes that they depend on: the first run of a process is slow, the next are fast. Timed for
``peaks``, which a search calls, and ``estimate`` (every component of every stage): the same run again; another layout
and batch each time, with the same kinds of layers; a RunSpec built and validated before it is estimated; a cold cache.
Goal: ``peaks`` below 500 us warm. For layouts whose sizes are all new see new_layouts.py.

    python benchmarks/warm_estimate.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, estimate, peaks, resolve_model
from bridge_memory.estimation import clear_caches

GOAL_US = 500
#: NVIDIA's recipe: the embedding and four layers, then four layers per chunk, the last with the MTP depth and the loss.
LAYOUT = "Etttt|(tttt|)*14tmL"


def parallel(layout: str | None = LAYOUT, **changes: int) -> ParallelSpec:
    sizes = dict(
        world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
        expert_model_parallel_size=64, expert_tensor_parallel_size=1,
    )
    return ParallelSpec(**{**sizes, **changes}, pipeline_model_parallel_layout=layout)  # type: ignore[arg-type]


def microseconds(work: Callable[[], object], rounds: int, before: Callable[[], None] | None = None) -> list[float]:
    taken = []
    for _ in range(rounds):
        if before:
            before()
        start = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - start) / 1000)
    return taken


def timed(
    ask: Callable[[RunSpec], object], same: RunSpec, varied: list[RunSpec], rounds: int
) -> dict[str, list[float]]:
    """Microseconds of each round, by case."""
    layouts = iter(varied)
    ask(same)
    return {
        "the same run, warm": microseconds(lambda: ask(same), rounds),
        "another run each time, warm": microseconds(lambda: ask(next(layouts)), rounds),
        "built, validated, estimated": microseconds(
            lambda: ask(RunSpec(model=same.model, parallel=parallel(world_size=2048))), rounds
        ),
        "cold": microseconds(lambda: ask(same), max(3, rounds // 20), clear_caches),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=200, help="estimates per case (200)")
    rounds = parser.parse_args().rounds
    model = resolve_model("deepseek-ai/DeepSeek-V3")
    same = RunSpec(model=model, parallel=parallel())
    # Each estimate has another global batch and distribution of layers: no schedule is seen twice.
    varied = [
        RunSpec(
            model=model,
            parallel=parallel("E" + "t" * first + "|" + "tttt|" * 14 + "t" * (61 - 56 - first) + "mL"),
            batch=BatchSpec(global_batch_size=32 * (n + 1)),
        )
        for n in range(rounds)
        for first in (n % 5,)
    ]
    print(f"{'DeepSeek-V3, 16 stages':<38}  {'median us':>10}  {'min us':>10}  {'/ goal':>7}")
    for ask in (peaks, estimate):
        for name, values in timed(ask, same, varied, rounds).items():
            median = statistics.median(values)
            label = f"{ask.__name__}: {name}"
            print(f"{label:<38}  {median:>10.0f}  {min(values):>10.0f}  {median / GOAL_US:>7.2f}")
    print(f"goal: peaks below {GOAL_US} us warm")


if __name__ == "__main__":
    main()
