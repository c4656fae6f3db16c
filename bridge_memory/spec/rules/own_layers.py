"""Layers of Llama as torchtune or torchtitan has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError, listed
from bridge_memory.spec.transformers import OF_TORCHTITAN, OF_TORCHTUNE

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


#: Of trainers that bring layers of their own: families, what they count for attention, options that are transformers'.
_OWN_LAYERS = {
    "torchtune": (
        OF_TORCHTUNE, "flex attention",
        ("liger_kernel", "use_cache", "keeps_outputs", "load_in_4bit", "load_in_8bit", "autocast"),
    ),
    "torchtitan": (
        OF_TORCHTITAN, "sdpa", ("liger_kernel", "use_cache", "keeps_outputs", "load_in_4bit", "load_in_8bit"),
    ),
}  # fmt: skip


def check_own_layers(run: RunSpec) -> None:
    """Layers of Llama as torchtune or torchtitan has them."""
    spec, trainer = run.transformers, run.implementation.transformer_impl
    families, attention, of_transformers = _OWN_LAYERS[trainer]
    if run.model.model_type not in families:
        raise SpecError(
            f"model_type ({run.model.model_type}) is none whose layers in {trainer} are recorded ({listed(families)}); "
            "use transformer_impl transformers"
        )
    if run.implementation.torchtitan and spec.selective_ac_option is not None and spec.gradient_checkpointing:
        raise SpecError(
            f"selective_ac_option ({spec.selective_ac_option}) is for activation_checkpoint.mode selective, and "
            "gradient_checkpointing is its mode full; drop one"
        )
    if spec.attn_implementation != "sdpa":
        raise SpecError(
            f"attn_implementation ({spec.attn_implementation}) is not {trainer}'s; drop it (its {attention} is counted)"
        )
    if run.implementation.torchtune and spec.gradient_checkpointing and spec.reentrant:
        raise SpecError("use_reentrant (True): torchtune's checkpoints are not reentrant; drop it")
    for name in of_transformers:
        if getattr(spec, name):
            raise SpecError(f"{name} is for transformer_impl transformers, not {trainer}; drop it")
    if run.peft.freezes:
        raise SpecError(f"peft.scheme (lora) is not counted with transformer_impl {trainer}; set it to none")
