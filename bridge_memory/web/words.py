"""Titles of what-if changes in plain words, for people who do not know the flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bridge_memory.plan.changes import Change

_SIZES = {"TP": "Tensor parallel", "PP": "Pipeline parallel", "CP": "Context parallel", "EP": "Expert parallel",
          "ETP": "Expert tensor parallel"}  # fmt: skip


def _size(fields: dict[str, Any]) -> str:
    return str(next(iter(fields.values())))


def _full(fields: dict[str, Any]) -> str:
    if fields.get("recompute_method") == "block":
        return f"Recompute {fields['recompute_num_layers']} layers of each stage"
    return "Recompute every layer"


def _split(fields: dict[str, Any]) -> str:
    virtual = fields.get("virtual_pipeline_model_parallel_size")
    return f"Another layer split, {virtual} virtual stages" if virtual else "Another layer split"


def _moments(fields: dict[str, Any]) -> str:
    if "optimizer_cpu_offload" in fields:
        return "Optimizer states in host memory"
    dtype = fields.get("exp_avg_dtype")
    return f"Optimizer moments in {dtype}" if dtype else f"Optimizer: {_size(fields)}"


def _offload(fields: dict[str, Any]) -> str:
    return "Optimizer states in host memory" if "offload_optimizer_device" in fields else "Parameters in host memory"


#: Kind of a change -> its title.
_TITLES: dict[str, Callable[[dict[str, Any]], str]] = {
    **{kind: lambda fields, name=name: f"{name} {_size(fields)}" for kind, name in _SIZES.items()},  # type: ignore[misc]
    "full recompute": _full,
    "split": _split,
    "micro batch": lambda fields: f"Micro batch {_size(fields)}",
    "sequence parallel": lambda _: "Sequence parallel",
    "distributed optimizer": lambda _: "Shard the optimizer over data-parallel ranks",
    "optimizer dtypes": _moments,
    "optimizer kernels": lambda _: "Fused optimizer step",
    "gradient checkpointing": lambda _: "Gradient checkpointing",
    "attention": lambda fields: f"Attention: {_size(fields)}",
    "Liger kernels": lambda fields: f"Liger kernel: {fields['liger_kernel'][-1]}",
    "engine": lambda fields: f"Engine: {_size(fields)}",
    "offload": _offload,
    "gradient dtype": lambda _: "Gradient buffers in bf16",
    "loss fusion": lambda _: "Fused cross entropy",
    "dispatcher": lambda fields: f"Token dispatcher: {_size(fields)}",
    "permute fusion": lambda _: "Fused token permutation",
    "activation offload": lambda fields: f"Activations of {fields['offload_modules'][0]} in host memory",
    "fp8": lambda fields: f"Linears{' and parameters' * ('precision.fp8_param' in fields)} in fp8",
}


def title(change: Change) -> str:
    """The title of a change; a recomputed module is named."""
    fields = dict(change.fields)
    named = _TITLES.get(change.kind)
    if named is not None:
        return named(fields)
    if "recompute_modules" in fields:
        return f"Recompute {', '.join(fields['recompute_modules'])}"
    return f"{change.kind[:1].upper()}{change.kind[1:]}"
