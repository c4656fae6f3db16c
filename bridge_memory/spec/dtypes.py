"""Dtypes: this package's names for them, their sizes, and torch's names."""

from __future__ import annotations

from bridge_memory.spec.errors import SpecError, show

#: Bytes of one element.
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
#: torch's names, the dtype of the tensors first. Transformer Engine's FusedAdam keeps optimizer moments in fp8 as uint8
#: (Megatron-LM ``training/arguments.py: validate_args`` maps "fp8" to it).
TORCH_NAMES = {
    "fp32": ("float32", "float"),
    "fp16": ("float16", "half"),
    "bf16": ("bfloat16",),
    "fp8": ("uint8", "float8_e4m3fn", "float8_e5m2"),
}
_KNOWN = {word: name for name, words in TORCH_NAMES.items() for word in (name, *words)}


def dtype_name(value: object, field: str) -> str:
    """This package's name of a dtype, given as a torch.dtype, a torch name ("torch.bfloat16", "half") or that name
    itself. Raises SpecError naming ``field``."""
    word = str(value).rsplit(".", 1)[-1]
    if word not in _KNOWN:
        raise SpecError(f"{field} ({show(value)}) is not a dtype that is known here; use {', '.join(TORCH_NAMES)}")
    return _KNOWN[word]
