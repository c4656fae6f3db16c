"""Number formats: this package's names for them, their widths, and what torch calls them."""

from __future__ import annotations

from bridge_memory.spec.errors import SpecError, show

#: Bytes of one element.
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
#: torch's names, that of the tensors first. Optimizer moments in fp8 are bytes to Transformer Engine's FusedAdam
#: (Megatron-LM ``training/arguments.py: validate_args`` maps "fp8" to uint8).
TORCH_NAMES = {
    "fp32": ("float32", "float"),
    "fp16": ("float16", "half"),
    "bf16": ("bfloat16",),
    "fp8": ("uint8", "float8_e4m3fn", "float8_e5m2"),
}
_KNOWN = {word: name for name, words in TORCH_NAMES.items() for word in (name, *words)}


def dtype_name(value: object, field: str) -> str:
    """Our name of a torch dtype, of its name ("torch.bfloat16", "half") or of our own. Raises SpecError naming
    ``field``."""
    word = str(value).rsplit(".", 1)[-1]
    if word not in _KNOWN:
        raise SpecError(f"{field} ({show(value)}) is not a dtype that is known here; use {', '.join(TORCH_NAMES)}")
    return _KNOWN[word]
