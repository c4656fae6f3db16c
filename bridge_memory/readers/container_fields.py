"""Data-parallel size and vocabulary of a ConfigContainer, validated or not."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from bridge_memory.spec import SpecError, show


def data_parallel_size(config: Any) -> int:
    """The container's ``data_parallel_size`` if set, else world size / (TP x PP x CP).

    The world size is ``config.world_size``, that of an initialised torch.distributed, or WORLD_SIZE.

    Raises:
        SpecError: No world size is known, or it is not divisible. The size is never silently 1.
    """
    known = getattr(config, "data_parallel_size", None)
    if known is not None:
        if int(known) < 1:
            raise SpecError(f"data_parallel_size ({known}) is below 1; set it to the number of model replicas")
        return int(known)
    world, source = getattr(config, "world_size", None), "world_size"
    torch = sys.modules.get("torch")
    distributed = torch.distributed if torch is not None and torch.distributed.is_available() else None
    if world is None and distributed is not None and distributed.is_initialized():
        world, source = distributed.get_world_size(), "torch.distributed's world size"
    if world is None and os.environ.get("WORLD_SIZE"):
        world, source = os.environ["WORLD_SIZE"], "WORLD_SIZE"
    if world is None:
        raise SpecError(
            "data_parallel_size is not set (the container was not validated) and no world size is known; "
            "give world_size=, set WORLD_SIZE or call config.validate()"
        )
    try:
        world = int(world)
    except (TypeError, ValueError):
        raise SpecError(f"{source} ({show(world)}) is not a number; set it to the number of GPUs") from None
    model = container_part(config, "model")
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = math.prod(positive_size(model, name, 1) for name in names)
    if world < 1 or world % product:
        raise SpecError(
            f"{source} ({world}) is not divisible by tensor_model_parallel_size x pipeline_model_parallel_size x "
            f"context_parallel_size ({product}); use a multiple of {product}"
        )
    return world // product


def vocabulary(config: Any) -> tuple[int, bool]:
    """(vocabulary size, whether it gets padded).

    Without model.vocab_size it is the tokenizer's, padded (``training/setup.py: _validate_and_set_vocab_size``). Before
    the tokenizer is built, only NullTokenizer's size is known. Raises SpecError.
    """
    model, tokenizer = container_part(config, "model"), getattr(config, "tokenizer", None)
    if getattr(model, "vocab_size", None) is None:
        known = getattr(tokenizer, "vocab_size", None)
        if getattr(tokenizer, "tokenizer_type", "") != "NullTokenizer" or known is None:
            raise SpecError("model.vocab_size is not set and the tokenizer is not built; set model.vocab_size")
        return int(known), True
    return positive_size(model, "vocab_size"), bool(getattr(model, "should_pad_vocab", False))


def container_part(config: Any, name: str) -> Any:
    part = getattr(config, name, None)
    if part is None:
        raise SpecError(f"the container has no {name}; give a Megatron Bridge ConfigContainer or its like")
    return part


def positive_size(holder: Any, name: str, default: int | None = None, *, part: str = "model") -> int:
    value = getattr(holder, name, None)
    label = f"{part}.{name}"
    if value is None:
        if default is None:
            raise SpecError(f"{label} is not set; set it")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{label} ({show(value)}) is not a positive whole number; set it to one")
    return value
