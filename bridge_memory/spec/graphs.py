"""Static inputs of CUDA graphs that nothing holds without them: the attention masks of Transformer Engine's graphs."""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.spec.layout import Chunk, layout
from bridge_memory.spec.model import AttentionSpec, CompressedAttentionSpec, GatedDeltaNetSpec, MLASpec
from bridge_memory.spec.run import RunSpec

#: Mixers that stand where a TransformerLayer has its attention; in a hybrid the attentions alone.
_ATTENTIONS = (AttentionSpec, CompressedAttentionSpec, MLASpec)


class Masks(NamedTuple):
    """Bytes of all masks of a rank."""

    #: On the rank that has least of them, and on the one that has most.
    least: int
    most: int


def static_masks(run: RunSpec) -> Masks:
    """[b, 1, s / c, s] in bool for each graphed layer with attention and each microbatch in flight.

    A graph copies the mask that it is called with into its own, or keeps the one of its capture; either way it is there
    for good. Microbatches whose backward pass was captured hand theirs on. Without pipeline stages one microbatch is
    captured. megatron-core's own graphs (``local``, ``full_iteration``) are captured with what the layers are called
    with, and make none. Source: megatron-core ``transformer/transformer_layer.py:
    TransformerLayer.get_layer_static_inputs``, ``transformer/cuda_graphs.py: TECudaGraphHelper._get_sample_arguments``;
    TE ``graph.py: _make_graphed_callables``.
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
    # Sequences that are packed come with their lengths; nobody has looked at graphs of them.
    least = 0 if batch.packed_sequences else min(fewest for fewest, _ in counts)
    return Masks(least * mask, max(most for _, most in counts) * mask)


def _attentions(run: RunSpec, chunk: Chunk) -> int:
    """Layers of the chunk that have a mask, those of MTP depths too."""
    model = run.model
    kinds = _ATTENTIONS if model.hybrid else (*_ATTENTIONS, GatedDeltaNetSpec)
    held = [*(model.layers[i] for i in chunk.layers), *(model.mtp_layer for _ in chunk.mtp)]
    return sum(kind is not None and isinstance(kind.mixer, kinds) for kind in held)


def _in_flight(layers: list[int], rank: int, run: RunSpec) -> tuple[int, int]:
    """Masks of a stage whose chunks have so many ``layers`` with one: (at least, at most).

    Before the first backward pass the interleaved schedule has sent a group of microbatches through every chunk but the
    last, and one through that (``pipeline_parallel/schedules.py: get_pp_rank_microbatches``).
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
