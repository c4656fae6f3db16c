"""A layout in the words of those who run it: this command line's, Megatron-LM's, Megatron Bridge's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from bridge_memory.spec import RunSpec

#: Field of a layout -> (flag here, Megatron-LM's argument, where Megatron Bridge has it).
_FIELDS: dict[str, tuple[str, str, str]] = {
    "parallel.tensor_model_parallel_size": ("--tp", "--tensor-model-parallel-size", "model"),
    "parallel.pipeline_model_parallel_size": ("--pp", "--pipeline-model-parallel-size", "model"),
    "parallel.virtual_pipeline_model_parallel_size": ("--vpp", "--num-virtual-stages-per-pipeline-rank", "model"),
    "parallel.context_parallel_size": ("--cp", "--context-parallel-size", "model"),
    "parallel.expert_model_parallel_size": ("--ep", "--expert-model-parallel-size", "model"),
    "parallel.expert_tensor_parallel_size": ("--etp", "--expert-tensor-parallel-size", "model"),
    "parallel.sequence_parallel": ("--sequence-parallel", "--sequence-parallel", "model"),
    "parallel.num_layers_in_first_pipeline_stage": (
        "--num-layers-in-first-pipeline-stage", "--decoder-first-pipeline-num-layers", "model",
    ),
    "parallel.num_layers_in_last_pipeline_stage": (
        "--num-layers-in-last-pipeline-stage", "--decoder-last-pipeline-num-layers", "model",
    ),
    "parallel.account_for_embedding_in_pipeline_split": (
        "--account-for-embedding-in-pipeline-split", "--account-for-embedding-in-pipeline-split", "model",
    ),
    "parallel.account_for_loss_in_pipeline_split": (
        "--account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split", "model",
    ),
    "parallel.pipeline_model_parallel_layout": (
        "--pipeline-model-parallel-layout", "--pipeline-model-parallel-layout", "model",
    ),
    "batch.micro_batch_size": ("--micro-batch-size", "--micro-batch-size", "train"),
    "recompute.granularity": ("--recompute-granularity", "--recompute-granularity", "model.recompute_granularity"),
    "recompute.method": ("--recompute-method", "--recompute-method", "model.recompute_method"),
    "recompute.num_layers": ("--recompute-num-layers", "--recompute-num-layers", "model.recompute_num_layers"),
    "recompute.modules": ("--recompute-modules", "--recompute-modules", "model.recompute_modules"),
}  # fmt: skip


def layout_fields(run: RunSpec) -> dict[str, Any]:
    """The fields of ``run`` that make its layout, as far as they are not Megatron's defaults."""
    p, r = run.parallel, run.recompute
    found: dict[str, Any] = {}
    for name in _FIELDS:
        group, _, field = name.partition(".")
        value = getattr(getattr(run, group), field)
        if name == "parallel.sequence_parallel":
            value = p.sp
        elif name == "recompute.modules" and r.granularity != "selective":
            continue
        elif name == "parallel.virtual_pipeline_model_parallel_size" and p.pipeline_model_parallel_layout:
            continue  # the string says it
        default = p.tp if field == "expert_tensor_parallel_size" else None if field == "micro_batch_size" else 1
        if value is None or value is False or (type(value) is int and value == default):
            continue
        found[name] = value
    return found


def _words(flag: str, value: Any, separator: str) -> list[str]:
    if value is True:
        return [flag]
    if isinstance(value, tuple):
        return [flag, *value] if separator == " " else [flag, separator.join(value)]
    return [flag, str(value)]


def estimate_command(run: RunSpec, model: str, given: Mapping[str, Any], gpu: str) -> str:
    """The ``estimate`` command that shows this layout. ``given``: other flags and their values."""
    fields = layout_fields(run)
    words = ["bridge-memory", "estimate", model, "--gpu", gpu, "--num-gpus", str(run.parallel.world_size)]
    for flag, value in given.items():
        if value is False:
            words.append("--no-" + flag.removeprefix("--"))
        else:
            words += _words(flag, value, ",")
    for name, value in fields.items():
        words += _words(_FIELDS[name][0], value, ",")
    return shlex.join(words)


def megatron_arguments(run: RunSpec) -> str:
    """The layout as Megatron-LM's arguments."""
    words: list[str] = []
    for name, value in layout_fields(run).items():
        words += _words(_FIELDS[name][1], value, " ")
    if run.batch.global_batch_size:
        words += ["--global-batch-size", str(run.batch.global_batch_size)]
    return shlex.join(words)


def bridge_overrides(run: RunSpec) -> str:
    """The layout as assignments to Megatron Bridge's ConfigContainer ``cfg``, one a line."""
    lines = []
    for name, value in layout_fields(run).items():
        owner = _FIELDS[name][2]
        if "." not in owner:
            owner += "." + name.partition(".")[2]
        shown = list(value) if isinstance(value, tuple) else value
        text = json.dumps(shown) if not isinstance(shown, bool) else str(shown)
        lines.append(f"cfg.{owner} = {text}")
    if run.batch.global_batch_size:
        lines.append(f"cfg.train.global_batch_size = {run.batch.global_batch_size}")
    return "\n".join(lines)
