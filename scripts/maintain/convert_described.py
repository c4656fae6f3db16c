#!/usr/bin/env python3
"""Convert measured records with a description in prose (``config.kind`` "described") to runs.

    python scripts/maintain/convert_described.py RUNS.jsonl OUT.jsonl

Reads RUNS.jsonl and writes OUT.jsonl, where such a record has a form that ``bridge-memory accuracy`` reads:

* Megatron-LM arguments: a ``megatron_args`` record with the same arguments;
* a Megatron Bridge recipe with its Hugging Face model and its overrides: a ``run_spec`` record with the exact RunSpec;
* one MoE layer run forward and backward on its own: a ``not_a_run`` record, which is not compared.

The record keeps the description as ``config.described`` and the source's figures as ``measured_verbatim``; ``measured``
has them in bytes. A record that was converted before is converted again from its description. Other lines are copied
unchanged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bridge_memory.readers.megatron_args import gpu_architecture  # noqa: E402
from bridge_memory.readers.resolve import resolve_model  # noqa: E402
from bridge_memory.readers.run_spec import run_from_json, run_to_json  # noqa: E402
from bridge_memory.spec import (  # noqa: E402
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

MIB = 1 << 20
#: The release assumed for sources of 2026 that name a commit.
_CORE = (0, 17)


class Description:
    """The description of one record: ``args`` and ``parallel``."""

    def __init__(self, words: Mapping[str, Any], gpu: str, world_size: int) -> None:
        self.args: Mapping[str, Any] = words.get("args") or {}
        self.sizes: Mapping[str, Any] = words.get("parallel") or {}
        self.architecture = gpu_architecture(gpu)
        self.world_size = world_size

    @property
    def is_megatron_args(self) -> bool:
        return bool(self.args) and all(name.startswith("--") for name in self.args)

    @property
    def is_recipe(self) -> bool:
        return "hf_model" in self.args

    @property
    def is_moe_layer(self) -> bool:
        return "token_dispatcher" in self.args and self.args.get("num_layers") == 1

    def number(self, name: str, default: int = 0) -> int:
        value = self.args.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def text(self, name: str, default: str = "") -> str:
        value = self.args.get(name)
        return value if isinstance(value, str) else default

    def flag(self, name: str) -> bool:
        return self.args.get(name) is True

    def words(self, name: str) -> tuple[str, ...]:
        return tuple(self.args.get(name) or ())

    def size(self, name: str) -> int:
        return self.sizes.get(name) or 1

    def parallel(self) -> ParallelSpec:
        return ParallelSpec(
            world_size=self.world_size,
            tensor_model_parallel_size=self.size("TP"),
            pipeline_model_parallel_size=self.size("PP"),
            context_parallel_size=self.size("CP"),
            expert_model_parallel_size=self.size("EP"),
            expert_tensor_parallel_size=self.sizes.get("ETP"),
            sequence_parallel=self.flag("sequence_parallel"),
        )


def recipe_run(d: Description) -> RunSpec:
    """A Megatron-Bridge pretraining recipe: its Hugging Face model with the overrides that the record lists.

    What a recipe leaves alone is Bridge's default: no attention mask from the loader (``GPTDatasetConfig``), no
    RoPE fusion for MLA (``models/mla_provider.py``), Transformer Engine's choice of attention.
    """
    fusion = d.text("cross_entropy_loss_fusion")
    modules = d.words("recompute_modules")
    return RunSpec(
        model=resolve_model(d.text("hf_model").split()[0]),
        parallel=d.parallel(),
        batch=BatchSpec(
            seq_length=d.number("seq_length"),
            micro_batch_size=d.number("micro_batch_size", 1),
            global_batch_size=d.number("global_batch_size"),
        ),
        precision=PrecisionSpec(params_dtype=d.text("params_dtype", "bf16")),
        data_parallel=DataParallelSpec(
            use_distributed_optimizer=d.flag("use_distributed_optimizer"),
            grad_reduce_in_fp32=d.flag("grad_reduce_in_fp32"),
            overlap_grad_reduce=d.flag("overlap_grad_reduce"),
            overlap_param_gather=d.flag("overlap_param_gather"),
        ),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=d.flag("use_precision_aware_optimizer"),
            main_grads_dtype=d.text("main_grads_dtype", "fp32"),
            main_params_dtype=d.text("main_params_dtype", "fp32"),
            fp8_recipe="tensorwise",
            exp_avg_dtype=d.text("exp_avg_dtype", "fp32"),
            exp_avg_sq_dtype=d.text("exp_avg_sq_dtype", "fp32"),
        ),
        recompute=RecomputeSpec(granularity=d.text("recompute_granularity"), modules=modules)
        if modules
        else RecomputeSpec(),
        implementation=ImplementationSpec(
            transformer_impl=d.text("transformer_impl", "transformer_engine"),
            megatron_core=_CORE,
            gpu_arch=d.architecture,
            apply_rope_fusion=False,
            moe_token_dispatcher_type=d.text("moe_token_dispatcher_type", "alltoall"),
            moe_grouped_gemm=d.flag("moe_grouped_gemm"),
            moe_permute_fusion=d.flag("moe_permute_fusion"),
            moe_shared_expert_overlap=d.flag("moe_shared_expert_overlap"),
            cross_entropy_loss_fusion=bool(fusion),
            cross_entropy_fusion_impl=fusion or "native",
        ),
    )


def converted(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The converted record; None where no conversion is needed. Raises SpecError for an unknown description."""
    config = record["config"]
    if config.get("kind") == "described":
        words = config
    elif config.get("kind") in ("run_spec", "not_a_run") and "args" in (config.get("described") or {}):
        words = config["described"]
    else:
        return None
    words = {name: value for name, value in words.items() if name != "kind"}
    new = {name: value for name, value in record.items() if name not in ("measured", "logged_parameters")}
    new["config"] = _config(record, words)
    new["measured"] = list(_measured(record["measured_verbatim"]))
    logged = record["measured_verbatim"].get("log: params in most loaded shard (B)")
    if logged is not None:
        new["logged_parameters"] = logged * 1e9
    return new


def _config(record: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    d = Description(words, record["gpu"], record["world_size"])
    if d.is_megatron_args:
        return {"kind": "megatron_args", **words}
    if d.is_recipe:
        run = recipe_run(d)
        data = run_to_json(run)
        assert run_from_json(json.loads(json.dumps(data))) == run
        return {"kind": "run_spec", "run": data, "described": words}
    if d.is_moe_layer:
        reason = "one MoE layer forward and backward: no attention, no loss, no optimizer, no DDP"
        return {"kind": "not_a_run", "reason": reason, "described": words}
    raise SpecError(f"{record['id']}: described in words that are not known here; add them to this script")


def _measured(verbatim: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    """The figures of a source in bytes, per rank."""
    for name, value in verbatim.items():
        if name.startswith("per_rank_MB"):
            # Megatron's report_memory prints MB of 2^20 bytes.
            steps = {"after_step": 1} if "after 1 iterations" in name else {}
            for rank, m in value.items():
                sizes = {f"{n}_bytes": round(m[n] * MIB) for n in ("allocated", "max_allocated")}
                yield {"rank": int(rank), **steps, **sizes}
        elif name == "peak_allocated_GB_after_iteration_2":
            # Megatron Bridge's report_memory divides by 1e9.
            yield {"rank": 0, "after_step": 2, "max_allocated_bytes": round(value * 1e9)}
        elif name == "max_allocated_bytes_mean_over_20_iters":
            yield {"rank": 0, "max_allocated_bytes": round(value)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUNS.jsonl")
    parser.add_argument("out", metavar="OUT.jsonl", help="may be the same file")
    args = parser.parse_args(argv)
    lines, count = [], 0
    try:
        for line in Path(args.runs).read_text(encoding="utf-8").splitlines():
            new = converted(json.loads(line)) if line.strip() else None
            lines.append(line if new is None else json.dumps(new))
            count += new is not None
        Path(args.out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except (SpecError, OSError, ValueError) as error:
        print(f"convert_described.py: {error}", file=sys.stderr)
        return 2
    print(f"{count} of {len(lines)} records converted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
