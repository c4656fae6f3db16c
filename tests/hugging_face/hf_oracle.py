"""A model of Hugging Face transformers itself, run on tensors without data, and what it keeps and peaks at.

CUDA's attention kernels do not run there: functions that keep and make what they do on a GPU take their place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from bridge_memory.rehearsal.torch.modules import (
    DTYPES,
    META,
    AutocastOnMeta,
    Routed,
    as_on_cuda,
    build,
    layer_in_autocast,
)
from bridge_memory.rehearsal.tracker import SavedRecord, Tracker
from bridge_memory.spec.transformers import TransformersSpec

__all__ = [
    "DTYPES", "META", "AutocastOnMeta", "Measured", "Routed", "as_on_cuda", "build", "layer_in_autocast", "measure",
    "passes",
]  # fmt: skip


class Measured(NamedTuple):
    """Bytes beside parameters and their gradients; the batch is not counted."""

    retained: int
    forward: int
    backward: int
    saved: list[SavedRecord]
    peaks: tuple[Any, Any]


class Graph(Tracker):
    """What an operation keeps of its output does not hold the operation: else a graph that nothing leads to, such as
    that of a last state, would stay."""

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        packed, module = super()._pack(tensor)
        return packed.detach(), module


def measure(
    model: Any, batch: int, seq: int, spec: TransformersSpec, targets: tuple[str, ...] = (), *, dora: bool = False
) -> Measured:
    """One step's forward and backward pass, gradients of parameters being there before."""
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": spec.reentrant})
    if targets:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(r=16, target_modules=list(targets), lora_dropout=spec.lora_dropout, use_dora=dora),
            autocast_adapter_dtype=spec.autocast_adapter_dtype,
        )
    if spec.autocast:
        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or ()):
                layer_in_autocast(module, DTYPES[spec.autocast])
    ids = torch.zeros(batch, seq, dtype=torch.long, device=META)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.clone()}
    if spec.attention_mask != "none":
        inputs["attention_mask"] = torch.ones(batch, seq, dtype=torch.long, device=META)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    static = [*inputs.values(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tracker = Graph(static=static)
    experts = getattr(model.config, "num_local_experts", None) or getattr(model.config, "num_experts", None)
    experts = experts or getattr(model.config, "n_routed_experts", None)
    experts = experts + (getattr(model.config, "zero_expert_num", None) or 0) if experts else None
    topk = getattr(model.config, "num_experts_per_tok", None) or getattr(model.config, "moe_topk", None)
    routed = Routed(experts, batch * seq * topk // experts) if experts else None
    held: list[Any] = []

    def loss() -> Any:
        with AutocastOnMeta(DTYPES[spec.autocast]) if spec.autocast else nullcontext():
            outputs = model(**inputs, use_cache=spec.use_cache)
        if spec.keeps_outputs:
            held.append(outputs)
        return outputs.loss

    with as_on_cuda(routed, padded=spec.attention_mask == "padded"), tracker.watching(model):
        return passes(tracker, loss)


def passes(tracker: Tracker, loss_of: Callable[[], Any]) -> Measured:
    """A forward pass, which gives the loss, and its backward pass."""
    tracker.reset_peak()
    loss = loss_of()
    forward = tracker.peak(40)
    saved, retained = tracker.saved(), tracker.live_bytes
    tracker.in_backward = True
    tracker.reset_peak()
    loss.backward()
    backward = tracker.peak(40)
    return Measured(retained, forward.bytes, backward.bytes, saved, (forward, backward))
