"""How Hugging Face transformers runs a model: fields of ``TransformersSpec``, and the families whose classes are known.

A family is a ``model_type`` of transformers; what its class does unlike Llama's is said here, with the function, and
recorded in ``inventory/transformers``. A family that is not listed is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from bridge_memory.spec.fields import Checked, choice, choices, flag, release
from bridge_memory.spec.model import ModelSpec

#: Where nobody says which transformers runs.
DEFAULT_TRANSFORMERS = (4, 57)
#: Releases whose sources were read.
KNOWN_TRANSFORMERS = ((4, 51), (5, 12))
#: ``liger_kernel.transformers.monkey_patch: apply_liger_kernel_to_*``.
LIGER_KERNELS = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(Checked):
    """How transformers runs a model; of ``transformer_impl`` transformers alone."""

    #: Release of transformers, as (major, minor).
    transformers_version: tuple[int, int] = release(DEFAULT_TRANSFORMERS)
    #: ``from_pretrained(attn_implementation=)``.
    attn_implementation: str = choice("sdpa", "eager", "sdpa", "flash_attention_2")
    #: The kernel that torch's scaled_dot_product_attention takes; None: flash where no mask is handed over, else the
    #: memory-efficient one.
    sdpa_kernel: str | None = choice(None, "flash", "efficient", "math")
    #: ``model.gradient_checkpointing_enable()``: decoder layers run again in backward, each by itself.
    gradient_checkpointing: bool = flag(False)
    #: ``torch.utils.checkpoint(use_reentrant=)``; None: as the release does unless told.
    use_reentrant: bool | None = flag(None)
    #: Compute dtype of torch.autocast around the forward pass; None: without. Parameters are in ``params_dtype``.
    autocast: str | None = choice(None, "bf16", "fp16")
    #: What the batch says of padding: a mask of ones, one with padding, or no mask.
    attention_mask: str = choice("ones", "ones", "padded", "none")
    #: ``use_cache``: keys and values are copied into a DynamicCache in training too.
    use_cache: bool = flag(False)
    #: The loop holds the model's output, logits among it, until backward is done.
    keeps_outputs: bool = flag(False)
    #: Kernels of liger-kernel that replace those of the class.
    liger_kernel: tuple[str, ...] = choices((), *LIGER_KERNELS)
    #: ``torch.compile``: not modelled.
    torch_compile: bool = flag(False)
    #: How experts are multiplied, from transformers 5 on ("eager": the loop); None: as the release does.
    experts_implementation: str | None = choice(None, "eager", "batched_mm", "grouped_mm")

    @property
    def reentrant(self) -> bool:
        """``modeling_utils.py: PreTrainedModel.gradient_checkpointing_enable``."""
        return self.transformers_version < (5, 0) if self.use_reentrant is None else self.use_reentrant


class Family(NamedTuple):
    """What the class of a ``model_type`` does; the defaults are Llama's."""

    #: "llama": weight times the norm in the input's dtype; "gemma": (1 + weight) times it in fp32; "olmo2": weight
    #: times it in fp32; "layernorm": ``nn.LayerNorm``.
    norm: str = "llama"


#: ``model_type`` -> its family.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
}


#: What a run has that transformers does not run.
DEFAULT_TRANSFORMERS_SPEC = TransformersSpec()


def as_transformers_has_it(model: ModelSpec) -> ModelSpec:
    """The vocabulary as it is, and without MTP depths, which transformers' classes do not build."""
    if not (model.make_vocab_size_divisible_by or model.mtp_num_layers):
        return model
    notes = model.assumptions
    if model.mtp_num_layers:
        notes += (f"mtp_num_layers ({model.mtp_num_layers}): transformers' {model.model_type} builds no MTP depths",)
    return replace(
        model, make_vocab_size_divisible_by=0, mtp_num_layers=0, mtp_layer=None, mtp_use_repeated_layer=False,
        assumptions=notes,
    )
