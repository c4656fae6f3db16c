"""Parameters of the whole model: what Hugging Face counts, tied weights once, no padding, MTP apart."""

from __future__ import annotations

from functools import lru_cache

from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.layer import (
    embedding_inventory,
    final_norm_inventory,
    layer_inventory,
    mtp_inventory,
    output_inventory,
)
from bridge_memory.inventory.recorder import BlockInventory
from bridge_memory.inventory.tail import final_norm_name
from bridge_memory.spec import BatchSpec, ModelSpec, MoESpec, ParallelSpec, RunSpec


def _numel(inventory: BlockInventory) -> int:
    return sum(p.numel for p in inventory.parameters)


def _whole(model: ModelSpec) -> BlockContext:
    """A context that shards nothing and pads no vocabulary."""
    from dataclasses import replace

    plain = replace(model, make_vocab_size_divisible_by=0)
    return context_of(RunSpec(model=plain, parallel=ParallelSpec(), batch=BatchSpec(seq_length=128)))


@lru_cache(maxsize=256)
def model_parameters(model: ModelSpec) -> int:
    """Elements of the unsharded model: embedding, decoder layers, final norm, output layer unless tied.

    Where the published count has the router's expert bias in it, so has this one (in Megatron it is a buffer).
    """
    ctx = _whole(model)
    total = _numel(embedding_inventory(model, ctx))
    total += sum(_numel(layer_inventory(layer, ctx)) for layer in model.layers)
    total += _numel(final_norm_inventory(final_norm_name(model), ctx))
    untied = not model.share_embeddings_and_output_weights
    return total + _numel(output_inventory(model.output_bias, untied, ctx)) + _published_expert_bias(model)


def _published_expert_bias(model: ModelSpec) -> int:
    blocks = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoESpec)]
    return sum(b.num_experts for b in blocks if b.router_enable_expert_bias and b.expert_bias_in_published_count)


@lru_cache(maxsize=256)
def mtp_parameters(model: ModelSpec) -> int:
    """Elements of all MTP depths, without the embedding and output layer that they share."""
    if model.mtp_layer is None or not model.mtp_num_layers:
        return 0
    depths = 1 if model.mtp_use_repeated_layer else model.mtp_num_layers
    return depths * _numel(mtp_inventory(model.mtp_layer, _whole(model)))
