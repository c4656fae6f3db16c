"""Test the estimate of engines outside of megatron-core against rehearsals of random options.

    python scripts/differential_torch.py --cases 60 --seed 1 [--engine zero3] [--jsonl found.jsonl]

Needs torch and transformers; peft for LoRA, deepspeed for ZeRO. Prints every phase that is off by more than
``--within``, refused cases with their reason, and counts; writes only ``--jsonl FILE``.

A case is a command line of ``bridge-memory rehearse --engine``: a model cut to a few layers and options of the engine,
drawn at random. It runs in a separate process, forked after torch, transformers and deepspeed are imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from differential import append_line, relative_error  # noqa: E402

from bridge_memory.cli import main as command  # noqa: E402

ENGINES = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
#: Tied and untied embeddings, biases, norms of queries, windows, experts.
MODELS = (
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B", "mistralai/Mistral-7B-v0.3", "Qwen/Qwen3-0.6B",
    "Qwen/Qwen2.5-7B", "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B",
)  # fmt: skip
#: Option -> values to draw; "" omits the option, "+" is a switch.
OF_ALL: dict[str, tuple[str, ...]] = {
    "--num-layers": ("1", "2", "3"), "--seq-length": ("64", "128", "512", "1024"),
    "--micro-batch-size": ("", "2"), "--gradient-checkpointing": ("", "", "+"), "--attention-mask": ("", "padded"),
    "--attn-implementation": ("", "eager"), "--optimizer": ("", "", "", "sgd"),
    "--torch-implementation": ("", "fused", "for-loop"), "--peft": ("", "", "", "lora"),
}  # fmt: skip
OF_FSDP: dict[str, tuple[str, ...]] = {
    "--fsdp-auto-wrap-policy": ("", "", "NO_WRAP"), "--sync-each-batch": ("", "", "+"), "--precision": ("bf16", "fp32"),
    "--fsdp-param-dtype": ("", "bf16", "bf16", "fp32"), "--fsdp-reduce-dtype": ("", "fp32", "bf16"),
    "--fsdp-forward-prefetch": ("", "", "+"),
}  # fmt: skip
OF_ZERO: dict[str, tuple[str, ...]] = {
    "--precision": ("bf16", "bf16", "fp16"), "--reduce-bucket-size": ("", "20000000", "200000000"),
    "--overlap-comm": ("", "+"), "--no-contiguous-gradients": ("", "", "+"), "--no-reduce-scatter": ("", "", "+"),
    "--grad-accum-dtype": ("", "", "fp32"), "--communication-data-type": ("", "", "", "fp32"),
    "--bf16-master-weights-and-grads": ("", "", "", "", "+"),
}  # fmt: skip
OF: dict[str, dict[str, tuple[str, ...]]] = {
    "single": {"--precision": ("bf16", "fp32")},
    "ddp": {
        "--precision": ("bf16", "fp32"), "--gradient-as-bucket-view": ("", "+"), "--ddp-static-graph": ("", "", "+"),
        "--ddp-find-unused-parameters": ("", "", "+"), "--ddp-bucket-cap-mb": ("", "1", "100"),
        "--sync-each-batch": ("", "", "+"),
    },
    "fsdp1": OF_FSDP | {
        "--fsdp-sharding-strategy": ("", "SHARD_GRAD_OP", "NO_SHARD"), "--fsdp-use-orig-params": ("", "+"),
        "--fsdp-backward-prefetch": ("", "BACKWARD_POST", "NO_PREFETCH"), "--no-fsdp-limit-all-gathers": ("", "+"),
    },
    "fsdp2": OF_FSDP | {
        "--no-fsdp-reshard-after-forward": ("", "+"), "--data-parallel-shard-degree": ("", "", "2"),
    },
    "zero1": OF_ZERO | {"--round-robin-gradients": ("", "+")},
    "zero2": OF_ZERO | {"--round-robin-gradients": ("", "+")},
    "zero3": OF_ZERO | {
        "--stage3-prefetch-bucket-size": ("", "0", "10000000"), "--sub-group-size": ("", "30000000"),
        "--stage3-param-persistence-threshold": ("", "0", "2000000"),
        "--stage3-max-live-parameters": ("", "", "100000000"),
        "--stage3-max-reuse-distance": ("", "", "100000000"),
        "--stage3-gather-16bit-weights-on-model-save": ("", "+"),
    },
}  # fmt: skip


def drawn(engine: str, draw: Random) -> list[str]:
    """A random command line after ``rehearse``."""
    argv = [draw.choice(MODELS), "--engine", engine]
    gpus = 1 if engine == "single" else draw.choice((2, 4, 8))
    micro = 0
    for name, values in (OF_ALL | OF[engine]).items():
        value = draw.choice(values)
        if name == "--data-parallel-shard-degree" and gpus == 2:
            continue
        if name == "--micro-batch-size":
            micro = int(value or 1)
        if value:
            argv += [name] if value == "+" else [name, value]
    if "--bf16-master-weights-and-grads" in argv:
        argv[argv.index("--precision") + 1] = "bf16"
    return [*argv, "--num-gpus", str(gpus), "--global-batch-size", str(gpus * micro * draw.choice((1, 1, 2, 3)))]


def rehearsed(argv: list[str]) -> dict[str, Any]:
    """The JSON of one case, run in a forked process, or {"error": reason}."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        out, err = StringIO(), StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = command(["rehearse", *argv, "--json"])
            text = out.getvalue()
            found = json.loads(text[text.index("{\n"):]) if code == 0 else {"error": err.getvalue()[-400:].strip()}
        except BaseException as error:  # crashes are findings
            found = {"error": f"crash: {type(error).__name__}: {error}"[:400]}
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    done: dict[str, Any] = json.loads(text) if text else {"error": "crash: the process died"}
    return done


def misses(found: dict[str, Any], within: float) -> Iterator[str]:
    """Phases whose relative error is beyond ``within``."""
    for row in found.get("rows", ()):
        if row["difference"] is not None:
            error = relative_error(row["predicted"], row["found"])
            if abs(error) > within:
                yield f"{row['name']} {100 * error:+.2f} % ({row['predicted']:,} for {row['found']:,})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20, metavar="N", help="cases to draw (20)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds draw equal cases (1)")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this engine; may be repeated")
    parser.add_argument("--within", type=float, default=0.01, help="accepted relative error of a phase (0.01)")
    parser.add_argument("--lines", metavar="FILE", help="command lines to run instead of drawing them")
    parser.add_argument("--jsonl", metavar="FILE", help="append a JSON line per case")
    args = parser.parse_args()
    engines = args.engine or [e for e in ENGINES if find_spec("deepspeed") or not e.startswith("zero")]
    for package in ("torch", "transformers", "peft", *(["deepspeed"] if "zero1" in engines else [])):
        if find_spec(package):
            import_module(package)
    draw = Random(args.seed)
    cases = [drawn(engines[i % len(engines)], draw) for i in range(args.cases)]
    if args.lines:
        cases = [shlex.split(line) for line in Path(args.lines).read_text().splitlines() if line.strip()]
    counts: Counter[str] = Counter()
    for argv in cases:
        found = rehearsed(argv)
        off = list(misses(found, args.within))
        outcome = "refused" if "error" in found else "missed" if off else "within"
        counts[outcome] += 1
        counts["phases"] += sum(row["difference"] is not None for row in found.get("rows", ()))
        counts["phases missed"] += len(off)
        if outcome != "within":
            print(f"{outcome}: {shlex.join(argv)}", *(off or [found.get("error", "")]), sep="\n    ", flush=True)
        if args.jsonl:
            append_line(args.jsonl, {"argv": argv, **found})
    print(", ".join(f"{name}: {n}" for name, n in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
