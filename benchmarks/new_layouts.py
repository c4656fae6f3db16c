"""Time of ``estimate`` and ``peaks`` for new layouts from a cold cache, compared with commit 654b15f.

    python benchmarks/new_layouts.py [--models 70B Qwen V3] [--base PATH | --no-base] [--memory-count 0] [--no-growth]

Random distinct layouts of three models, all accepted by ``RunSpec``, in a new process for each tree and function:

* Vary: GPUs, tp, pp, vpp, cp, ep, etp (1 or tp), micro batch (1, 2, 4), sequence (2048 to 32768), recomputation (none,
  full uniform 1, full block k, a few selective subsets with an effect on the model), and the split: even where the
  layers divide, else embedding and loss counted as layers, another size of the first and the last stage, or a layout
  string.
* Fixed: the model, the global batch (so that the number of microbatches varies), and all other defaults of ``RunSpec``:
  bf16, Adam, distributed optimizer, Transformer Engine, megatron-core's release.

Times exclude imports, reading the model and building the ``RunSpec`` objects, which is timed separately. Caches start
empty and fill as in a search. Goals are means over --count layouts in CPU time, which other work on the machine affects
least: ``estimate`` 1 ms for Llama-3.1-70B and Qwen3-235B, 3 ms for DeepSeek-V3; ``peaks`` half of that; 80 MiB resident
after --memory-count other layouts in a separate process. The old commit is slow and estimates only the first
--base-count layouts. Needs git: the commit is checked out next to the clone during the run, unless --base names a
folder that has it. Prints tables and writes nothing else.

Then growth: the time of one run as one size grows, with all caches emptied before, minimum CPU time of seven. Fixed:
a Llama-3.1-70B of 128 equal layers (80 to 640 where layers grow), tp 8, pp 8, vpp 4 (1 where layers or pp grow), 1024
microbatches of 4096 tokens, no recomputation; where experts grow Qwen3-235B, 8 experts per token, ep 8, pp 2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BASE = "654b15f"
RESIDENT_GOAL_MIB = 80
#: A layout: the preset, changes to it, and the fields of the groups of a RunSpec that it sets.
Layout = dict[str, Any]


class Plan(NamedTuple):
    """One model and the sizes its layouts are drawn from."""

    preset: str
    goal_ms: float
    global_batch: int
    gpus: tuple[int, ...]
    tp: tuple[int, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    ep: tuple[int, ...]
    #: Modules of selective recomputation that the model has.
    selective: tuple[str, ...]


PLANS = {
    "70B": Plan(
        "meta-llama/Llama-3.1-70B", 1.0, 1024, (64, 128, 160, 256), (1, 2, 4, 8), (1, 2, 4, 5, 8, 10, 16),
        (1, 1, 2, 3, 4, 5), (1,), ("core_attn", "mlp", "core_attn mlp"),
    ),
    "Qwen": Plan(
        "Qwen/Qwen3-235B-A22B", 1.0, 4096, (256, 512, 768, 1024), (1, 2, 4), (1, 2, 4, 6, 8, 12, 16),
        (1, 1, 2, 3, 4, 6), (4, 8, 16, 32, 64, 128),
        ("core_attn", "moe_act", "layernorm", "moe", "core_attn moe_act", "layernorm moe_act"),
    ),
    "V3": Plan(
        "deepseek-ai/DeepSeek-V3", 3.0, 15360, (1024, 2048), (1, 2, 4, 8), (2, 4, 8, 16),
        (1, 1, 2, 3, 4), (8, 16, 32, 64, 128, 256),
        ("core_attn", "moe_act", "mla_up_proj", "mla_up_proj mlp", "layernorm moe_act", "mla_up_proj moe_act layernorm",
         "shared_experts mla_up_proj", "moe mla_up_proj layernorm"),
    ),
}  # fmt: skip


def layouts(plan: Plan, count: int, seed: int) -> list[Layout]:
    """``count`` distinct layouts that RunSpec accepts, the same for the same seed."""
    from bridge_memory import SpecError, resolve_model

    model, rng = resolve_model(plan.preset), random.Random(f"{seed} {plan.preset}")
    found: dict[str, Layout] = {}
    while len(found) < count:
        layout = draw(plan, model.num_layers, model.mtp_num_layers, rng)
        if layout is not None and (key := json.dumps(layout)) not in found:
            try:
                build(layout, model)
            except SpecError:
                continue
            found[key] = layout
    return list(found.values())


def draw(plan: Plan, layers: int, mtp: int, rng: random.Random) -> Layout | None:
    """One layout; None where its sizes do not go together."""
    world, tp, pp = rng.choice(plan.gpus), rng.choice(plan.tp), rng.choice(plan.pp)
    vpp = rng.choice(plan.vpp) if pp > 1 else 1
    cp, ep, etp = rng.choice((1, 1, 2, 4, 8)), rng.choice(plan.ep), rng.choice((1, tp))
    mbs, seq = rng.choice((1, 2, 4)), rng.choice((2048, 4096, 8192, 16384, 32768))
    if world % (tp * pp * cp) or world % (ep * etp * pp) or plan.global_batch % (mbs * (world // (tp * pp * cp))):
        return None
    parallel = dict(
        world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, context_parallel_size=cp,
        **({"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}),
        **({"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp} if len(plan.ep) > 1 else {}),
        **(split(layers, mtp, pp, vpp, rng) if pp > 1 else {}),
    )  # fmt: skip
    batch = dict(seq_length=seq, micro_batch_size=mbs, global_batch_size=plan.global_batch)
    recompute: dict[str, Any] = {}
    method = rng.choice(("none", "uniform", "block", "selective", "selective"))
    if method == "selective":
        recompute = dict(granularity="selective", modules=rng.choice(plan.selective).split())
    elif method != "none":
        number = rng.randint(1, max(1, layers // (pp * vpp))) if method == "block" else 1
        recompute = dict(granularity="full", method=method, num_layers=number)
    return dict(preset=plan.preset, parallel=parallel, batch=batch, recompute=recompute)


def split(layers: int, mtp: int, pp: int, vpp: int, rng: random.Random) -> dict[str, Any]:
    """Fields that distribute the layers over stages, drawn among the valid ones; often none where layers divide."""
    chunks = pp * vpp
    if layers % chunks == 0 and rng.random() < 0.7:
        return {}
    names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    splits = [dict(zip(names, on, strict=True)) for on in ((True, True), (False, True), (True, False))
            if (layers + sum(on)) % chunks == 0]  # fmt: skip
    middle = layers // chunks * vpp
    for first in range(vpp, middle + 2 * vpp, vpp):
        for last in range(vpp, middle + 2 * vpp, vpp):
            rest = layers - first - last
            if pp > 2 and rest > 0 and rest % ((pp - 2) * vpp) == 0 and rest // (pp - 2) <= middle + vpp:
                splits.append(dict(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last))
    if not splits or rng.random() < 0.5:
        sizes = [layers // chunks] * chunks
        for chunk in rng.sample(range(chunks), layers % chunks):
            sizes[chunk] += 1
        if sizes[-1] > 1:  # the loss is expensive: one layer less in its chunk
            sizes[-1] -= 1
            sizes[rng.randrange(chunks - 1)] += 1
        return dict(pipeline_model_parallel_layout="E" + "|".join("t" * n for n in sizes) + "m" * mtp + "L")
    return rng.choice(splits)


def build(layout: Layout, model: Any) -> Any:
    from bridge_memory import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec

    recompute = {name: tuple(x) if name == "modules" else x for name, x in layout["recompute"].items()}
    parallel, batch = ParallelSpec(**layout["parallel"]), BatchSpec(**layout["batch"])
    return RunSpec(model=model, parallel=parallel, batch=batch, recompute=RecomputeSpec(**recompute))


def changed(layout: Layout) -> Any:
    """The layout's model, with its number of layers or experts."""
    from bridge_memory import resolve_model

    model = resolve_model(layout["preset"])
    if layers := layout.get("layers"):
        return replace(model, layers=model.layers[:1] * layers)
    if experts := layout.get("experts"):
        return replace(model, layers=tuple(replace(x, ffn=replace(x.ffn, num_experts=experts)) for x in model.layers))
    return model


def resident_mib() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:  # not Linux: the peak
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def empty_caches() -> None:
    """Clear caches by the package's function where it has one, else every functools cache of its modules."""
    import bridge_memory

    def all_of_functools() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("bridge_memory"):
                for value in vars(module).values():
                    getattr(value, "cache_clear", lambda: None)()

    getattr(bridge_memory, "clear_caches", all_of_functools)()


def work(function: str, cold: bool) -> dict[str, Any]:
    """Build layouts from stdin, a thousand at a time, and call a function of the tree on PYTHONPATH for each. ``cold``:
    with all caches emptied before each."""
    import bridge_memory

    answer = getattr(bridge_memory, function, None)
    if answer is None:
        return {"absent": True}
    model = changed(first := json.loads(next(sys.stdin)))
    # Lazy imports of the package are not part of the layouts' time.
    answer(bridge_memory.RunSpec(model=bridge_memory.resolve_model("meta-llama/Llama-3.2-1B")))
    empty_caches()
    before = resident_mib()
    built, wall, cpu = [], [], []
    batch = [first, *map(json.loads, islice(sys.stdin, 999))]
    while batch:
        start = time.perf_counter_ns()
        runs = [build(layout, model) for layout in batch]
        built.append((time.perf_counter_ns() - start) / 1e3 / len(runs))
        for run in runs:
            if cold:
                empty_caches()
            start, used = time.perf_counter_ns(), time.process_time_ns()
            answer(run)
            cpu.append((time.process_time_ns() - used) / 1e6)
            wall.append((time.perf_counter_ns() - start) / 1e6)
        runs.clear()
        batch = [json.loads(line) for line in islice(sys.stdin, 1000)]
    mib = resident_mib()
    return dict(tree=bridge_memory.__file__, build_us=built[0], wall=wall, cpu=cpu, before_mib=before, mib=mib)


def worker(tree: Path, function: str, layouts: list[Layout], *more: str) -> dict[str, Any] | None:
    """The result of ``work`` in a new process that imports ``tree``; None where the tree lacks the function."""
    process = subprocess.run(
        [sys.executable, __file__, "--work", function, *more], input="\n".join(map(json.dumps, layouts)), text=True,
        capture_output=True, cwd=tree, env=dict(os.environ, PYTHONPATH=str(tree)),
    )  # fmt: skip
    if process.returncode:
        sys.exit(f"{function} in {tree}: {process.stderr.strip()}")
    result = json.loads(process.stdout)
    if "tree" in result and Path(result["tree"]).resolve().parent.parent != tree.resolve():
        sys.exit(f"{tree} was not imported but {result['tree']}")
    return None if "absent" in result else result


def verdict(what: str, value: float, goal: float, unit: str) -> None:
    print(f"  {what}: {value:.2f} {unit}; goal {goal:g} or less: {'met' if value <= goal else 'NOT met'}")


def new_layouts(plan: Plan, base: Path | None, args: argparse.Namespace) -> None:
    chosen = layouts(plan, args.count, args.seed)
    few = min(args.base_count, len(chosen))
    print(f"\n{plan.preset}, seed {args.seed}")
    columns = ("layouts", "CPU mean", "mean ms", "median", "p90", "max", "build us", "MiB after")
    print(f"  {'':<20}" + "".join(f" {c:>9}" for c in columns))
    means: dict[tuple[str, bool], float] = {}
    for function, tree in (("estimate", base), ("estimate", ROOT), ("peaks", ROOT)):
        result = worker(tree, function, chosen[:few] if tree is base else chosen) if tree else None
        if result is None:
            continue
        for n in dict.fromkeys((few, len(result["wall"]))):
            wall = sorted(result["wall"][:n])
            mean = statistics.fmean(result["cpu"][:n])
            means[function if tree is ROOT else BASE, n == few] = mean
            numbers = (mean, statistics.fmean(wall), wall[n // 2], wall[n * 9 // 10], wall[-1], result["build_us"])
            resident = f"{result['mib']:.1f}" if n == len(result["wall"]) else ""
            print(f"  {function + (f', {BASE}' if tree is base else ''):<20} {n:>9}"
                  + "".join(f" {x:>9.2f}" for x in numbers) + f" {resident:>9}")  # fmt: skip
    for function, share in (("estimate", 1.0), ("peaks", 0.5)):
        mine = means.get((function, len(chosen) == few))
        if mine is None:
            print(f"  {function}: not in this tree")
            continue
        if (BASE, True) in means:
            ratio = means[BASE, True] / means[function, True]
            print(f"  {function}: {ratio:.1f} times as fast as estimate of {BASE}, the same {few} layouts")
        verdict(f"{function} of a new layout, on average", mine, share * plan.goal_ms, "ms")
    if args.memory_count:
        result = worker(ROOT, "estimate", layouts(plan, args.memory_count, args.seed + 1))
        assert result is not None
        print(f"  {args.memory_count} layouts: {statistics.fmean(result['cpu']):.2f} ms on average, "
              f"{result['before_mib']:.1f} MiB resident before them")  # fmt: skip
        verdict(f"resident after {args.memory_count} layouts", result["mib"], RESIDENT_GOAL_MIB, "MiB")


def growth_cases() -> dict[str, list[tuple[int, Layout]]]:
    """Growing size -> [(size, run)]."""

    def llama(layers: int = 128, pp: int = 8, vpp: int = 4, group: int = 8, microbatches: int = 1024) -> Layout:
        parallel = dict(world_size=8 * pp, tensor_model_parallel_size=8, pipeline_model_parallel_size=pp)
        if vpp > 1:
            parallel.update(virtual_pipeline_model_parallel_size=vpp, microbatch_group_size_per_vp_stage=group)
        batch = dict(seq_length=4096, global_batch_size=microbatches)
        return dict(preset=PLANS["70B"].preset, layers=layers, parallel=parallel, batch=batch, recompute={})

    def qwen(experts: int) -> Layout:
        parallel = dict(world_size=16, pipeline_model_parallel_size=2, expert_model_parallel_size=8)
        batch = dict(seq_length=4096, global_batch_size=8192)
        return dict(preset=PLANS["Qwen"].preset, experts=experts, parallel=parallel, batch=batch, recompute={})

    return {
        "microbatches": [(n, llama(microbatches=n)) for n in (8, 64, 512, 4096, 32768)],
        "layers": [(n, llama(layers=n, vpp=1)) for n in (80, 160, 320, 640)],
        "experts": [(n, qwen(n)) for n in (64, 128, 256, 512)],
        "vpp": [(n, llama(vpp=n)) for n in (1, 2, 4, 8, 16)],
        "microbatch_group_size": [(n, llama(group=n)) for n in (8, 16, 32, 64, 128, 256)],
        "pp": [(n, llama(pp=n, vpp=1)) for n in (1, 2, 4, 8, 16, 32)],
    }


def growth(base: Path | None) -> None:
    columns = [(f"estimate, {BASE}", base, "estimate"), ("estimate", ROOT, "estimate"), ("peaks", ROOT, "peaks")]
    for what, cases in growth_cases().items():
        taken: dict[str, list[float]] = {}
        for _, layout in cases:
            for title, tree, function in columns:
                if tree and (result := worker(tree, function, [layout] * 7, "--cold")):
                    taken.setdefault(title, []).append(min(result["cpu"]))
        print(f"\n{what:>22} {'size':>7}" + "".join(f"  {title + ', ms':>21} {'cost':>7}" for title in taken))
        for i, (size, _) in enumerate(cases):
            print(f"{size:>22} {f'x {size / cases[0][0]:g}':>7}" + "".join(
                f"  {times[i]:>21.2f} {f'x {times[i] / times[0]:.2f}':>7}" for times in taken.values()
            ))  # fmt: skip


@contextmanager
def base_tree(args: argparse.Namespace) -> Iterator[Path | None]:
    """The folder to compare with: the named one, or a temporary worktree."""
    if args.base or args.no_base:
        yield args.base.resolve() if args.base else None
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / BASE
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), BASE], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--models", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--count", type=int, default=1000, help="layouts per model (1000)")
    parser.add_argument("--base-count", type=int, default=150, help=f"layouts that {BASE} estimates too (150)")
    parser.add_argument("--memory-count", type=int, default=10000, help="layouts before memory is read; 0: skip")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--base", type=Path, metavar="PATH", help=f"a folder with commit {BASE} checked out")
    parser.add_argument("--no-base", action="store_true", help="only this tree")
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--work", choices=("estimate", "peaks"), help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(args.work, args.cold)))
        return
    sys.path.insert(0, str(ROOT))
    with base_tree(args) as base:
        for name in args.models:
            new_layouts(PLANS[name], base, args)
        if not args.no_growth:
            growth(base)


if __name__ == "__main__":
    main()
