"""Write the settings of Megatron Bridge's performance recipes that its tables measured, for the reader of throughput.

    python scripts/maintain/performance_recipes.py RUNS.jsonl

Needs Megatron Bridge with ``perf_recipes``; runs on a CPU, as ``scripts/bridge_recipes.py``. A recipe is kept if a row
of RUNS.jsonl names it or has its sizes. Replaces the block of this Bridge in ``bridge_memory/accuracy/recipes.json``;
the other blocks are transcribed by hand from the performance scripts of releases that were never packaged.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bridge_recipes import ConfigNotAtHand, bridge_on_cpu, build

from bridge_memory import RunSpec, SpecError
from bridge_memory.accuracy.settings import same_layout
from bridge_memory.readers import resolve_model
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.presets.common_names import preset_called

RECIPES = Path(__file__).resolve().parents[2] / "bridge_memory" / "accuracy" / "recipes.json"
#: Tables that the packaged recipes are of, with the revision of pages, and tables whose own are not at hand. Of tables
#: of 2025 the reader takes dense models' alone, since the dispatchers were others.
RELEASES, NEAR = ["26.06.01", "26.06", "067f987df"], ["26.04.01", "26.04", "26.02.01", "26.02", "25.11", "25.09"]
NAME = re.compile(
    r"(?P<model>.+?)_(?P<task>pretrain|sft|peft)_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_"
    r"(?P<precision>bf16|fp8cs|fp8mx|nvfp4)_config$"
)
GROUPS = ("precision", "data_parallel", "optimizer", "recompute", "implementation", "peft")
#: Fields that do not belong to a recipe: releases, and what follows from the GPU.
NOT_KEPT = {"gpu_arch", "megatron_core", "transformer_engine", "torch"}


def settings(run: RunSpec, preset: str) -> dict[str, Any]:
    """The fields in which a recipe's run differs from a RunSpec's defaults, by their full names."""
    found: dict[str, Any] = {}
    for group in GROUPS:
        spec = getattr(run, group)
        plain = type(spec)()
        for f in fields(spec):
            value = getattr(spec, f.name)
            if f.init and f.name not in NOT_KEPT and value != getattr(plain, f.name):
                found[f"{group}.{f.name}"] = list(value) if isinstance(value, tuple) else value
    published = resolve_model(preset)
    for name in ("mtp_num_layers", "mtp_use_repeated_layer"):
        if getattr(run.model, name) != getattr(published, name):
            found[f"model.{name}"] = getattr(run.model, name)
    p = run.parallel
    for name in (
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    ):  # fmt: skip
        if getattr(p, name):
            found[f"parallel.{name}"] = getattr(p, name)
    return found


def recipes() -> Iterator[dict[str, Any]]:
    """Every performance recipe that is estimated, with its sizes."""
    import importlib
    import pkgutil

    with bridge_on_cpu():
        package = importlib.import_module("megatron.bridge.perf_recipes")
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            found = importlib.import_module(module.name)
            for name in sorted(vars(found)):
                said = NAME.match(name)
                preset = preset_called(said["model"]) if said else None
                if not said or preset is None or getattr(found, name).__module__ != found.__name__:
                    continue
                try:
                    config = build(getattr(found, name))
                    config.world_size = int(said["gpus"])
                    arch = "hopper" if said["gpu"].startswith("h") else "blackwell"
                    run = run_from_config_container(config, world_size=config.world_size, gpu_arch=arch)
                except (SpecError, ConfigNotAtHand, OSError) as error:
                    print(f"{name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
                    continue
                p, b = run.parallel, run.batch
                yield {
                    "name": name, "model": preset, "task": "lora" if said["task"] == "peft" else said["task"],
                    "gpu": said["gpu"].upper(), "gpus": int(said["gpus"]), "precision": said["precision"],
                    "tp": p.tp, "pp": p.pp, "vp": p.vpp, "cp": p.cp, "ep": p.ep, "mbs": b.micro_batch_size,
                    "gbs": b.global_batch_size, "seq": b.seq_length, "settings": settings(run, preset),
                }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path, metavar="RUNS.jsonl", help="measured throughput")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    rows = [json.loads(line) for line in args.runs.read_text().splitlines()]
    measured = {same_layout(row) for row in rows}
    named = {row.get("recipe") for row in rows}
    kept = [r for r in recipes() if r["name"] in named or same_layout(r) in measured]
    from importlib.metadata import version

    source = f"megatron-bridge {version('megatron-bridge')}, perf_recipes"
    core = [int(x) for x in version("megatron-core").split(".")[:2]]
    block = {"source": source, "megatron_core": core, "releases": RELEASES, "near": NEAR, "recipes": kept}
    others = [b for b in json.loads(RECIPES.read_text()) if not b["source"].startswith("megatron-bridge ")]
    text = ",\n".join(_written(b) for b in [block, *others])
    RECIPES.write_text(f"[\n{text}\n]\n")
    print(f"{len(kept)} recipes of {source}")
    return 0


def _written(block: dict[str, Any]) -> str:
    """A block with one line a recipe."""
    names = "source", "megatron_core", "releases", "near"
    head = ", ".join(f"{json.dumps(name)}: {json.dumps(block[name])}" for name in names)
    lines = ",\n".join(json.dumps(r) for r in block["recipes"])
    return f'{{{head}, "recipes": [\n{lines}\n]}}'


if __name__ == "__main__":
    sys.exit(main())
