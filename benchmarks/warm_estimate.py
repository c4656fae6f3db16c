"""A warm estimate of DeepSeek-V3 on 1024 GPUs (tp 2, pp 16 x 4, ep 64): what one step of a search costs.

Layers' costs are cached by what they depend on, so a first estimate in a process is dear and the next ones are
cheap. Side by side: the same run again; another layout and batch each time (what a search does: the layer kinds
stay); a RunSpec built and checked before it is estimated; everything from nothing, all caches emptied. Goal: below
500 us warm.

    python benchmarks/warm_estimate.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, estimate, resolve_model

GOAL_US = 500
#: NVIDIA's recipe: embedding and four layers, then four layers a chunk, the last with the MTP depth and the loss.
LAYOUT = "Etttt|(tttt|)*14tmL"


def parallel(layout: str | None = LAYOUT, **changes: int) -> ParallelSpec:
    sizes = dict(
        world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
        expert_model_parallel_size=64, expert_tensor_parallel_size=1,
    )
    return ParallelSpec(**{**sizes, **changes}, pipeline_model_parallel_layout=layout)  # type: ignore[arg-type]


def empty_caches() -> None:
    """Empty every functools cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("bridge_memory"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def microseconds(work: Callable[[], object], rounds: int, before: Callable[[], None] | None = None) -> list[float]:
    taken = []
    for _ in range(rounds):
        if before:
            before()
        start = time.perf_counter_ns()
        work()
        taken.append((time.perf_counter_ns() - start) / 1000)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    model = resolve_model("deepseek-ai/DeepSeek-V3")
    same = RunSpec(model=model, parallel=parallel())
    # Every estimate another global batch and another placing of the layers: nothing of the pipeline is seen twice.
    varied = iter(
        RunSpec(
            model=model,
            parallel=parallel("E" + "t" * first + "|" + "tttt|" * 14 + "t" * (61 - 56 - first) + "mL"),
            batch=BatchSpec(global_batch_size=32 * (n + 1)),
        )
        for n in range(rounds)
        for first in (n % 5,)
    )
    estimate(same)
    cases = {
        "the same run, warm": microseconds(lambda: estimate(same), rounds),
        "another run each time, warm": microseconds(lambda: estimate(next(varied)), rounds),
        "built, checked, estimated": microseconds(
            lambda: estimate(RunSpec(model=model, parallel=parallel(world_size=2048))), rounds
        ),
        "from nothing": microseconds(lambda: estimate(same), max(3, rounds // 20), empty_caches),
    }
    gc.collect()
    print(f"{'DeepSeek-V3, 16 stages':<28}  {'median us':>10}  {'least us':>10}  {'/ goal':>7}")
    for name, values in cases.items():
        median = statistics.median(values)
        print(f"{name:<28}  {median:>10.0f}  {min(values):>10.0f}  {median / GOAL_US:>7.2f}")
    print(f"goal: below {GOAL_US} us warm")


if __name__ == "__main__":
    main()
