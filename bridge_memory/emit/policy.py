"""A policy of selective checkpointing as Python for torch: which operations of which layers are kept."""

from __future__ import annotations

from collections.abc import Iterable

from bridge_memory.plan.torch.fit import ATTENTION, Policy

_SOURCE = '''\
"""Selective checkpointing of {model}: layers keep the outputs of some operations and run the others again.

    checkpoint_layers(model)  # before fully_shard, in place of gradient_checkpointing_enable()
"""

from functools import partial

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: Matrix products by their numbers in a layer's forward pass, and the layers that keep their outputs.
PRODUCTS = {{
{products}
}}
#: Layers that keep what attention makes.
ATTENTION = {attention}

_aten = torch.ops.aten
_PRODUCTS = {{_aten.mm.default, _aten.addmm.default}}
_ATTENTION = {{
    getattr(_aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_aten, name)
}}


def contexts_of(layer):
    """What a checkpoint of this layer takes as context_fn, for one forward pass."""
    called = {{False: 0, True: 0}}

    def policy(ctx, operation, *args, **kwargs):
        keep = operation in _ATTENTION and layer in ATTENTION
        if operation in _PRODUCTS:
            keep = layer in PRODUCTS.get(called[ctx.is_recompute], ())
            called[ctx.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def checkpoint_layers(model):
    layers = model.get_decoder().layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer, context_fn=partial(contexts_of, number))
'''


def policy_source(policy: Policy) -> str:
    """A module with ``checkpoint_layers(model)`` for a model of transformers."""
    products: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    attention: list[int] = []
    for kept in policy.kept:
        number = kept.operation.product
        if number is None:
            assert kept.operation.name == ATTENTION
            attention += kept.layers
        else:
            products.setdefault(number, []).extend(kept.layers)
            names[number] = kept.operation.name
    lines = [f"    {number}: {_layers(layers)},  # {names[number]}" for number, layers in sorted(products.items())]
    return _SOURCE.format(model=policy.run.model.name, products="\n".join(lines), attention=_layers(attention))


def _layers(numbers: Iterable[int]) -> str:
    """"range(19, 32)", or each by its number."""
    found = sorted(numbers)
    if found and found == list(range(found[0], found[-1] + 1)):
        return f"range({found[0]}, {found[-1] + 1})"
    return f"({', '.join(map(str, found))}{',' if len(found) == 1 else ''})"
