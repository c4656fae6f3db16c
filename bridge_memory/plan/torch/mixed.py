"""accelerate's ``mixed_precision`` in the fields of each engine."""

from __future__ import annotations

from typing import Any

DTYPES = ("bf16", "fp16")


def mixed_precision_fields(engine: str, dtype: str) -> dict[str, Any]:
    """"group.field" -> value, as accelerate sets ``engine`` up with ``mixed_precision=dtype`` (``accelerator.py:
    prepare_model``, ``_prepare_fsdp2``, ``_prepare_deepspeed``; ``utils/fsdp_utils.py: fsdp2_prepare_model``)."""
    if engine.startswith("zero"):
        return {"precision.params_dtype": dtype}
    fields: dict[str, Any] = {"precision.params_dtype": "fp32"}
    if engine in ("single", "ddp"):
        return {**fields, "transformers.autocast": dtype}
    own = {"fsdp.auto_wrap_policy": "torchtitan"} if engine == "fsdp2" else {"fsdp.use_orig_params": True}
    return {**fields, **own, "fsdp.param_dtype": dtype, "fsdp.reduce_dtype": dtype}
