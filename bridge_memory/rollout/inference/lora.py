"""LoRA adapters that an engine holds at once: vLLM's ``lora/layers``, SGLang's ``lora/mem_pool.py``."""

from __future__ import annotations

from bridge_memory.components import Provenance
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.rollout.inference.spec import InferenceSpec
from bridge_memory.rollout.inference.weights import Format, weights


def lora_amount(spec: InferenceSpec, stage: int) -> Amount:
    """max_loras adapters of max_lora_rank on every linear of a rank: A of rank x columns, B of rows x rank.

    Least: on linears alone. Most: on each part of a fused linear separately, and on experts.
    """
    if not spec.max_loras:
        return exactly("LoRA adapters", 0)
    least = most = 0
    for one in weights(spec, stage):
        if one.format is Format.LINEAR:
            least += one.rows + one.columns
            most += one.rows + 3 * one.columns
        elif one.format is Format.EXPERT:
            most += one.copies * (one.rows + 2 * one.columns)
    each = spec.max_loras * spec.max_lora_rank * spec.element_bytes
    source = "lora/layers: lora_a_stacked, lora_b_stacked"
    return Amount("LoRA adapters", each * least, each * most, Provenance.ASSUMED, source)
