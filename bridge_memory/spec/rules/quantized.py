"""bitsandbytes' linears, which are frozen and in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError, listed

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


#: Engines that leave frozen weights as they are.
_KEEP_QUANTIZED = ("single", "ddp")
#: What else than load_in_4bit gives a field its effect.
_OR_8BIT = {"bnb_4bit_use_double_quant": "", "prepare_model_for_kbit_training": " or load_in_8bit"}


def check_quantized(run: RunSpec) -> None:
    """bitsandbytes' linears are frozen, and in one piece."""
    spec = run.transformers
    name = "load_in_8bit" if spec.load_in_8bit else "load_in_4bit"
    if not spec.quantized:
        for field in ("bnb_4bit_use_double_quant", "prepare_model_for_kbit_training"):
            if getattr(spec, field):
                needs = f"load_in_4bit{_OR_8BIT[field]}"
                raise SpecError(f"{field} (True) does nothing without {needs}; set it, or drop {field}")
        return
    if spec.load_in_4bit and spec.load_in_8bit:
        raise SpecError("load_in_4bit and load_in_8bit: a model is in one of them; drop load_in_8bit")
    if spec.load_in_8bit and spec.bnb_4bit_use_double_quant:
        raise SpecError("bnb_4bit_use_double_quant (True) is for load_in_4bit, not load_in_8bit; drop it")
    if not run.peft.freezes:
        raise SpecError(
            f"{name} (True): quantised weights have no gradient, so that nothing would train; set peft.scheme to lora, "
            f"or drop {name}"
        )
    engine = run.data_parallel.engine
    if engine not in _KEEP_QUANTIZED:
        raise SpecError(
            f"{name} (True) is not supported with engine {engine}, which divides or flattens weights in one dtype; use "
            f"{listed(_KEEP_QUANTIZED)}"
        )
