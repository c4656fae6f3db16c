"""What CUDA graphs of layers need: static attention masks, and experts whose sizes the host need not know."""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.spec.layout import Chunk, layout
from bridge_memory.spec.model import AttentionSpec, CompressedAttentionSpec, GatedDeltaNetSpec, MLASpec
from bridge_memory.spec.run import RunSpec

#: Attention mixers. In a GPTModel a TransformerLayer may also hold a GatedDeltaNetSpec in their place.
_ATTENTIONS = (AttentionSpec, CompressedAttentionSpec, MLASpec)


#: Modules of a layer with experts that graphs can cover without their capacity.
BEFORE_EXPERTS = "attn", "moe_router", "moe_preprocess"


def waits_for_experts(run: RunSpec) -> bool:
    """Whether graphs cover whole layers whose dropless experts make the host wait for the numbers of their tokens, so
    that a capture fails (``token_dispatcher.py: _maybe_dtoh_and_synchronize``)."""
    impl = run.implementation
    whole = impl.cuda_graph_impl in ("local", "transformer_engine") and not impl.cuda_graph_modules
    return whole and counts_tokens(run)


def counts_tokens(run: RunSpec) -> bool:
    """Whether the host has to know how many tokens each expert has."""
    impl = run.implementation
    static = impl.moe_pad_expert_input_to_capacity or impl.moe_expert_rank_capacity_factor is not None
    return run.model.has_experts and not static and not impl.torch_layers


class Masks(NamedTuple):
    """Bytes of all masks on a rank."""

    #: On the rank with the fewest masks, and on the one with the most.
    least: int
    most: int


def static_masks(run: RunSpec) -> Masks:
    """[b, 1, s / c, s] in bool for each graphed layer with attention and each microbatch in flight.

    A graph holds a static mask from its capture on. A microbatch reuses the mask of one whose backward pass is already
    captured. Without pipeline stages one microbatch is captured. megatron-core's graphs (``local``,
    ``full_iteration``) are captured with the layers' actual inputs and allocate no masks.

    Source: megatron-core ``transformer/transformer_layer.py: TransformerLayer.get_layer_static_inputs``,
    ``transformer/cuda_graphs.py: TECudaGraphHelper._get_sample_arguments``; TE ``graph.py: _make_graphed_callables``.
    """
    impl, batch = run.implementation, run.batch
    modules = impl.cuda_graph_modules
    if impl.cuda_graph_impl != "transformer_engine" or (modules and "attn" not in modules):
        return Masks(0, 0)
    mask = batch.micro_batch_size * (batch.seq_length // run.parallel.cp) * batch.seq_length
    counts = [
        _in_flight([_attentions(run, chunk) for chunk in chunks], rank, run)
        for rank, chunks in enumerate(layout(run.model, run.parallel).stages)
    ]
    # Packed sequences come with their lengths; their graphs were not examined, so there may be no masks.
    least = 0 if batch.packed_sequences else min(fewest for fewest, _ in counts)
    return Masks(least * mask, max(most for _, most in counts) * mask)


def _attentions(run: RunSpec, chunk: Chunk) -> int:
    """Layers of the chunk that have a mask, MTP depths included."""
    model = run.model
    kinds = _ATTENTIONS if model.hybrid else (*_ATTENTIONS, GatedDeltaNetSpec)
    held = [*(model.layers[i] for i in chunk.layers), *(model.mtp_layer for _ in chunk.mtp)]
    return sum(kind is not None and isinstance(kind.mixer, kinds) for kind in held)


def _in_flight(layers: list[int], rank: int, run: RunSpec) -> tuple[int, int]:
    """(fewest, most) masks of a stage. ``layers``: layers with a mask in each of its chunks.

    Before the first backward pass the interleaved schedule has run a group of microbatches through every chunk except
    the last, and one microbatch through that (``pipeline_parallel/schedules.py: get_pp_rank_microbatches``).
    """
    pp, chunks, m = run.parallel.pp, len(layers), run.num_microbatches
    if pp == 1:
        return sum(layers), sum(layers) * (2 if run.implementation.overlap_moe_expert_parallel_comm else 1)
    if chunks == 1:
        n = min(m, pp - rank) * layers[0]
        return n, n
    group = run.parallel.microbatch_group_size_per_vp_stage or pp
    least = min(group, m) * sum(layers[:-1]) + layers[-1]
    forward = min(m * chunks, (pp - rank - 1) * 2 + (chunks - 1) * group + 2)
    return least, max(least, forward * max(layers))
