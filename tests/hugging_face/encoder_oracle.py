"""Encoders of the installed transformers with real tensors on the CPU, in bf16: what they save and peak at.

CUDA's attention kernels do not run there: functions that keep and make what they do on a GPU take their place. Modules
are cast as Megatron's Float16Module casts them, buffers included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hf_oracle import Graph, as_on_cuda
from torch import nn

from bridge_memory import BatchSpec, EncoderSpec, EncoderStructure, RunSpec, TransformersSpec, resolve_model
from bridge_memory.inventory.encoders.chain import blocks_of_encoder, sizes_of_encoder
from bridge_memory.spec.encoders import Item
from bridge_memory.tapes.chain import ChunkInventory, Label, compose, plain_link
from bridge_memory.tapes.context import EncoderRun, context_of

#: Rows and columns of an image's patches.
Grids = Sequence[tuple[int, int]]


class Measured(NamedTuple):
    """Bytes. ``saved``: storages that backward needs, each once, and features kept for the language model; the
    parameters' gradients were there before."""

    saved: int
    forward: int
    backward: int


def measured(module: nn.Module, call: Callable[[Any], Any], frozen: Sequence[str] = ()) -> Measured:
    """``call``: gives the features (and others that are kept beside them). ``frozen``: beginnings of names."""
    module = module.to(torch.bfloat16).train()
    for name, p in module.named_parameters():
        if any(name.startswith(start) for start in frozen):
            p.requires_grad = False
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    tracker = Graph(static=[p.grad for p in module.parameters() if p.grad is not None], device="cpu")
    with as_on_cuda(), tracker.watching(module):
        tracker.reset_peak()
        found, *beside = call(module)
        forward = tracker.peak().bytes
        own = found.untyped_storage().nbytes()
        kept = sum(record.bytes for record in tracker.saved())
        kept += sum(x.untyped_storage().nbytes() for x in beside if isinstance(x, torch.Tensor))
        tracker.in_backward = True
        tracker.reset_peak()
        if found.requires_grad:
            found.backward(torch.zeros_like(found))
        # The caller holds the features and their gradient.
        return Measured(kept, forward, tracker.peak().bytes - 2 * own)


def run_beside(structure: EncoderStructure, frozen: Sequence[str] = (), spec: Any = None, **batch: Any) -> RunSpec:
    """A language model with this encoder."""
    encoder = EncoderSpec("visual", 1, structure=structure, frozen=tuple(frozen))
    model = resolve_model("meta-llama/Llama-3.2-1B")
    names = ("name", "model_type", "hidden_size", "vocab_size", "layers")
    return RunSpec(
        model=type(model)(**{name: getattr(model, name) for name in names}, encoders=(encoder,)),
        batch=BatchSpec(seq_length=2**20, **batch), transformers=spec or TransformersSpec(),
    )


def recorded(
    structure: EncoderStructure, items: Sequence[Item], frozen: Sequence[str] = (), *, release: tuple[int, int],
    attention: str = "sdpa",
) -> ChunkInventory:  # fmt: skip
    """The same as it is recorded: without the step that joins features and token embeddings."""
    spec = TransformersSpec(transformers_version=release, attn_implementation=attention)
    run = run_beside(structure, frozen, spec)
    ctx = context_of(run)
    (one,) = ctx.encoders
    one = EncoderRun(one.spec, one.structure, tuple(items), one.layers, one.seq_length)
    sizes = sizes_of_encoder(one, ctx)
    links = []
    for name, block, count in blocks_of_encoder(ctx, one, 0):
        link = plain_link(block, Label.ENCODER)
        held = sizes.pixels + (sizes.held if name != "stem" else 0)
        links.append((link._replace(forward_peak=link.forward_peak + held), count))
    return compose(links)
