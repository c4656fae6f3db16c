"""The input tensors of microbatches: of one, or of all that a graph of the iteration reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge_memory.components import Component
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.workspaces.libraries import buffer


def batch_bytes(run: RunSpec, shapes: Sequence[ChunkShape]) -> int:
    """Bytes of one microbatch's input while it runs, where that is not in ``input_buffers``."""
    return 0 if reads_static_inputs(run) else _batch(run, shapes)


def input_buffers(run: RunSpec, shapes: Sequence[ChunkShape]) -> Iterator[Component]:
    """The inputs of every microbatch, which a graph of the whole iteration reads; its warm-up steps allocate them, and
    copy the next step's into them (megatron-core ``full_cuda_graph.py: StaticBufferLoader``)."""
    if reads_static_inputs(run) and _has_inputs(shapes):
        nbytes = run.num_microbatches * _batch(run, shapes)
        yield buffer("static inputs of every microbatch (graph of the iteration)", nbytes)


def _has_inputs(shapes: Sequence[ChunkShape]) -> bool:
    return any(shape.embedding or shape.output for shape in shapes)


def reads_static_inputs(run: RunSpec) -> bool:
    return run.implementation.cuda_graph_impl == "full_iteration"


def _batch(run: RunSpec, shapes: Sequence[ChunkShape]) -> int:
    """Bytes of one microbatch's input on the first or last stage of the pipeline; the stages between get none.

    int64 tokens, labels and positions, an fp32 loss mask, and the boolean mask [b, 1, s, s] of the data loader,
    all divided by CP. Source: ``megatron/training/utils.py: get_batch_on_this_tp_rank``,
    ``megatron/core/utils.py: get_batch_on_this_cp_rank``.
    """
    if not _has_inputs(shapes):
        return 0
    b, s, diffusion = run.batch.micro_batch_size, run.batch.seq_length, run.model.diffusion
    if diffusion is not None:
        # Latents and the embedded text in fp32, the loss mask in bf16, whole on every rank (Megatron Bridge
        # ``diffusion/models/wan/wan_step.py: wan_data_step``).
        return b * s * (4 * diffusion.patch_elements + 2) + 4 * diffusion.text_tokens * diffusion.text_dim
    mask = s * s if run.implementation.create_attention_mask else 0
    return b * (s * (8 + 8 + 8 + 4) + mask) // run.parallel.cp
