"""One small model as it is recorded and as transformers runs it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import transformers
from hf_oracle import DTYPES, Measured, build, measure
from mixers_on_meta import mixers_on_meta

from bridge_memory import BatchSpec, ImplementationSpec, RunSpec
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.spec import PeftSpec, PrecisionSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.tapes.chain import ChunkInventory
from bridge_memory.tapes.context import context_of

INSTALLED = tuple(map(int, transformers.__version__.split(".")[:2]))


def recorded(
    config: dict[str, Any], batch: int, seq: int, dtype: str, spec: TransformersSpec,
    targets: tuple[str, ...] = (), dora: bool = False,
) -> ChunkInventory:
    run = RunSpec(
        model=model_from_hf_config(dict(config), "a small model"),
        batch=BatchSpec(seq_length=seq, micro_batch_size=batch),
        precision=PrecisionSpec(params_dtype=dtype),
        implementation=ImplementationSpec(transformer_impl="transformers"),
        transformers=spec,
        peft=PeftSpec(scheme="lora", dim=16, target_modules=targets, use_dora=dora) if targets else PeftSpec(),
    )
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    return chunk_inventory(run.model, shape, context_of(run))


def both(
    config: dict[str, Any], *, batch: int = 2, seq: int = 128, dtype: str = "bf16",
    targets: tuple[str, ...] = (), dora: bool = False, **fields: Any
) -> tuple[ChunkInventory, Measured]:
    """``fields``: those of a TransformersSpec."""
    spec = TransformersSpec(transformers_version=INSTALLED, **fields)
    with mixers_on_meta(config["model_type"]) if spec.mixer_kernels else nullcontext():
        model = build(config, attention=spec.attn_implementation, dtype=DTYPES[dtype])
        real = measure(model, batch, seq, spec, targets, dora=dora)
    return recorded(config, batch, seq, dtype, spec, targets, dora), real


def errors(config: dict[str, Any], **options: Any) -> tuple[float, float, float]:
    """Of what is retained, and of the peaks forward and backward: recorded over measured, less one."""
    ours, real = both(config, **options)
    return (
        ours.retained / real.retained - 1, ours.forward_peak / real.forward - 1, ours.backward_peak / real.backward - 1,
    )
