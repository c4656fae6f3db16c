"""Do two checkouts predict the same? Random runs of every engine, measured runs, step times and searches, to the byte.

    python scripts/maintain/freeze.py draw cases.jsonl --cases 300 --seed 1
    PYTHONPATH=OLD python scripts/maintain/freeze.py take cases.jsonl old.jsonl
    PYTHONPATH=NEW python scripts/maintain/freeze.py take cases.jsonl new.jsonl
    python scripts/maintain/freeze.py diff old.jsonl new.jsonl

``draw`` writes runs as fields, of which most can be estimated. ``take`` writes, for each, the bytes of every stage: its
peak, its phases and its components without their names, and apart from these a digest of everything that is text.
``diff`` compares the numbers, counts the texts that changed, and exits with 1 where a number did. What it imports
exists in every checkout that is worth comparing: the public names, the fields of a RunSpec and the command line.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

MODELS = (
    "meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b",
    "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai-community/gpt2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "zai-org/GLM-4.5-Air", "bigscience/bloom", "Qwen/Qwen2.5-7B",
    "mistralai/Mixtral-8x7B-v0.1", "microsoft/Phi-4-mini-instruct", "nvidia/Nemotron-H-56B-Base-8K",
)  # fmt: skip
ENGINES = (
    "megatron_ddp", "megatron_fsdp", "megatron_deepspeed", "single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3",
)  # fmt: skip
#: Groups of a RunSpec from which fields are drawn, beside the sizes.
GROUPS = ("batch", "precision", "optimizer", "data_parallel", "peft", "recompute", "implementation")
OF_ENGINE = {
    "ddp": ("ddp", "transformers"), "fsdp1": ("fsdp", "transformers"), "fsdp2": ("fsdp", "transformers"),
    "zero1": ("deepspeed", "transformers"), "zero2": ("deepspeed", "transformers"),
    "zero3": ("deepspeed", "transformers"), "megatron_deepspeed": ("deepspeed",), "single": ("transformers",),
}  # fmt: skip
NUMBERS: dict[str, tuple[Any, ...]] = {
    "seq_length": (128, 1024, 4096, 8192), "micro_batch_size": (1, 2, 3), "global_batch_size": (None, 64, 96, 512),
    "dim": (8, 32), "num_layers": (1, 2), "moe_imbalance": (1.0, 1.5), "moe_expert_capacity_factor": (None, 1.0, 2.0),
    "megatron_core": ((0, 13), (0, 15), (0, 16), (0, 18), (0, 19)), "transformer_engine": (None, (2, 11), (2, 20)),
    "torch": (None, (2, 6), (2, 12)), "cpu_offloading_num_layers": (0, 1), "bucket_cap_mb": (1, 25, 100),
}  # fmt: skip
SEARCHES = (
    "search meta-llama/Llama-3.1-70B --num-gpus 64 --gpu H100 --global-batch-size 128 --seq-length 8192 --json",
    "search Qwen/Qwen3-30B-A3B --num-gpus 32 --gpu H100 --global-batch-size 128 --seq-length 4096 --json",
    "search deepseek-ai/DeepSeek-V3 --num-gpus 512 --gpu H200 --global-batch-size 2048 --seq-length 4096 --json",
    "search meta-llama/Llama-3.1-8B --num-gpus 8 --gpu A100-80GB --engine any --global-batch-size 64 --json",
    "search Qwen/Qwen2.5-7B --num-gpus 8 --gpu RTX-4090 --engine fsdp2 --global-batch-size 64 --json",
    "whatif meta-llama/Llama-3.1-70B --num-gpus 64 --tp 8 --pp 4 --gpu H100 --global-batch-size 128 --json",
    "whatif Qwen/Qwen2.5-7B --engine fsdp2 --num-gpus 8 --gpu RTX-4090 --json",
    "balance meta-llama/Llama-3.1-70B --num-gpus 64 --tp 4 --pp 8 --gpu H100 --global-batch-size 128 --json",
)  # fmt: skip


def drawn(engine: str, draw: Random) -> dict[str, Any]:
    """One run: its model and its fields by group."""
    from bridge_memory.spec.run import GROUPS as CLASSES

    groups: dict[str, dict[str, Any]] = {"data_parallel": {"engine": engine}}
    names = [*GROUPS, *OF_ENGINE.get(engine, ())]
    for _ in range(draw.choice((0, 1, 2, 3, 5, 8))):
        group = draw.choice(names)
        field = draw.choice(fields(CLASSES[group]))
        rule = field.metadata.get("rule")
        if rule is None or (field.name in ("engine", "transformer_impl") and draw.random() < 0.8):
            continue
        value: Any = None
        if field.name in NUMBERS:
            value = draw.choice(NUMBERS[field.name])
        elif rule.types == {tuple} and rule.names:
            value = tuple(draw.sample(rule.names, draw.choice((1, 2)) if len(rule.names) > 1 else 1))
        elif rule.names:
            value = draw.choice(rule.names)
        elif bool in rule.types:
            value = draw.random() < 0.5
        elif rule.fraction_below_one is not None:
            value = draw.choice((0.0, 0.5))
        else:
            continue
        groups.setdefault(group, {})[field.name] = value
    gpus = 1 if engine == "single" else draw.choice((1, 2, 4, 8, 16, 64))
    parallel: dict[str, Any] = {"world_size": gpus}
    if engine.startswith("megatron"):
        pick = partial(draw.choice, (1, 1, 2, 4, 8))
        tp, pp, cp, dp, ep = pick(), pick(), draw.choice((1, 1, 1, 2)), draw.choice((1, 2, 8)), pick()
        parallel = {
            "world_size": tp * pp * cp * dp * ep, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "context_parallel_size": cp, "expert_model_parallel_size": ep if draw.random() < 0.6 else 1,
        }  # fmt: skip
        if pp > 1 and draw.random() < 0.3:
            parallel["virtual_pipeline_model_parallel_size"] = 2
        if draw.random() < 0.2:
            parallel["expert_tensor_parallel_size"] = draw.choice((1, 2))
    return {"model": draw.choice(MODELS), "groups": {"parallel": parallel, **groups}}


def built(case: dict[str, Any]) -> Any:
    """The RunSpec of a case. Raises SpecError."""
    from bridge_memory import RunSpec, resolve_model
    from bridge_memory.spec.run import GROUPS as CLASSES

    groups = {}
    for name, given in case["groups"].items():
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
        groups[name] = CLASSES[name](**values)
    return RunSpec(model=resolve_model(case["model"]), **groups)


def draw_cases(path: str, cases: int, seed: int) -> None:
    from bridge_memory import SpecError

    draw, rows = Random(seed), []
    for engine in ENGINES:
        kept = 0
        while kept < cases:
            case = drawn(engine, draw)
            try:
                built(case)
                refused = False
            except SpecError:
                refused = True
            if refused and draw.random() > 0.05:
                continue
            kept += not refused
            rows.append(case)
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} cases", file=sys.stderr)


def digest(value: object) -> str:
    return hashlib.sha1(json.dumps(value, default=str).encode()).hexdigest()[:12]


def taken(case: dict[str, Any]) -> dict[str, Any]:
    """The numbers and the digest of the texts of one run."""
    from bridge_memory import SpecError, estimate, peaks

    try:
        run = built(case)
        answer = estimate(run)
    except SpecError as error:
        return {"refused": True, "text": digest(str(error))}
    stages = [
        {
            "peak": s.peak_bytes, "static": s.static_bytes, "parameters": s.parameters, "in_flight": s.in_flight,
            "phases": [nbytes for _, nbytes in s.phases], "host": [nbytes for _, nbytes in s.host],
            "components": [(str(c.role), c.bytes) for c in s.components],
            "leftovers": [(str(c.role), c.bytes) for c in getattr(s, "carried_over", getattr(s, "leftovers", ()))],
        }
        for s in answer.stages
    ]  # fmt: skip
    texts = [[c._asdict() for s in answer.stages for c in s.components], answer.assumptions, answer.not_modelled]
    return {
        "parameters": answer.parameters, "stages": stages, "peaks": [list(p) for p in peaks(run)], "text": digest(texts)
    }


def numbers_of(value: Any) -> Any:
    """Numbers alone of nested JSON, in their order, whatever the keys."""
    if isinstance(value, dict):
        return [found for v in value.values() if (found := numbers_of(v)) not in ([], None)]
    if isinstance(value, list):
        return [found for v in value if (found := numbers_of(v)) not in ([], None)]
    return value if isinstance(value, (int, float)) else None


def corpus_rows(root: Path) -> list[dict[str, Any]]:
    """Predictions of the measured runs."""
    from bridge_memory.accuracy.predictions import predict
    from bridge_memory.accuracy.records import load_runs

    out = []
    for path in sorted((root / "tests" / "data" / "measurements").glob("*.jsonl")):
        for record in load_runs(path):
            for outcome in predict(record):
                row = outcome.as_json()
                text = digest(row.pop("reason"))
                out.append({"run": str(row["id"]), "rank": row["rank"], **row, "text": text})
    return out


def command_rows() -> list[dict[str, Any]]:
    """What the commands answer, numbers alone."""
    main = import_module("bridge_memory.cli").main
    rows = []
    for line in SEARCHES:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(line.split())
        text = out.getvalue()
        found = json.loads(text) if text.lstrip().startswith("{") else text
        for key in ("seconds", "elapsed_seconds", "version"):
            if isinstance(found, dict):
                found.pop(key, None)
        rows.append({"command": line, "code": code, "numbers": numbers_of(found), "text": digest(text)})
    return rows


def take(cases: str, out: str, root: str | None) -> None:
    started = time.perf_counter()
    rows = [taken(json.loads(line)) for line in Path(cases).read_text().splitlines()]
    package = Path(import_module("bridge_memory").__file__ or "").parent.parent
    rows += corpus_rows(Path(root) if root else package)
    rows += command_rows()
    Path(out).write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    print(f"{len(rows)} rows of {package} in {time.perf_counter() - started:.0f} s", file=sys.stderr)


def diff(old: str, new: str, cases: str | None, shown: int) -> int:
    left, right = (Path(path).read_text().splitlines() for path in (old, new))
    described = Path(cases).read_text().splitlines() if cases else []
    counts: Counter[str] = Counter()
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        one, two = json.loads(a), json.loads(b)
        texts = one.pop("text"), two.pop("text")
        kind = (
            "refused" if "refused" in one else "command" if "command" in one else "measured" if "run" in one else "run"
        )
        counts[kind] += 1
        counts["texts differ"] += texts[0] != texts[1]
        if one != two:
            counts[f"{kind}s with other numbers"] += 1
            if counts["shown"] < shown:
                counts["shown"] += 1
                what = described[number] if number < len(described) else one.get("command", one.get("run"))
                print(f"row {number}: {what}")
                for key in one.keys() | two.keys():
                    if one.get(key) != two.get(key):
                        print(f"    {key}: {str(one.get(key))[:400]}\n    {' ' * len(key)}  {str(two.get(key))[:400]}")
    counts.pop("shown", None)
    print(", ".join(f"{name}: {n}" for name, n in counts.items()))
    return int(any(name.endswith("other numbers") for name in counts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("draw")
    command.add_argument("cases")
    command.add_argument("--cases", dest="number", type=int, default=300, help="of every engine")
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("take")
    command.add_argument("cases")
    command.add_argument("out")
    command.add_argument("--data", help="the checkout whose measured runs are predicted (default: the package's own)")
    command = commands.add_parser("diff")
    command.add_argument("old")
    command.add_argument("new")
    command.add_argument("--cases", help="to print the runs that differ")
    command.add_argument("--shown", type=int, default=10)
    args = parser.parse_args()
    if args.command == "draw":
        draw_cases(args.cases, args.number, args.seed)
    elif args.command == "take":
        take(args.cases, args.out, args.data)
    else:
        return diff(args.old, args.new, args.cases, args.shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
