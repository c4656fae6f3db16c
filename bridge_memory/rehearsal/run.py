"""Rehearse one rank without a GPU: its real model chunks run forward and backward on the meta device.

``rehearse(run, stage)`` gives what the rank owns (parameters, DDP's buffers, optimizer state), what each chunk saves
for backward, and the peaks of its forward and backward pass. ``rehearse_layer`` gives the passes of one layer, which a
block of the inventory predicts.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.components import allocated
from bridge_memory.rehearsal.adapters import adapt
from bridge_memory.rehearsal.model import build_chunks, parameter_shapes
from bridge_memory.rehearsal.model_state import (
    _outside_buffers,
    buffer_layouts,
    distributed,
    fp8_copies,
    optimizer_state,
)
from bridge_memory.rehearsal.passes import run_chunk, run_layer
from bridge_memory.rehearsal.rank import on_rank, rank_in_stage
from bridge_memory.rehearsal.results import ChunkRehearsal, PassRecord, Rehearsal
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.ranks import stage_of_rank


def rehearse(
    run: RunSpec, stage: int | None = None, *, rank: int | None = None, architecture: Any = None
) -> Rehearsal:
    """Rehearse a rank of ``stage`` (``rank_in_stage``), or ``rank``. Raises SpecError, RehearsalUnavailable.

    ``architecture``: a TransformerConfig whose architecture fields are used, see
    ``megatron_config.transformer_config``.
    """
    if rank is None:
        rank = rank_in_stage(run, stage or 0)
    with on_rank(run, rank):
        chunks = build_chunks(run, architecture=architecture)
        parameters = parameter_shapes(chunks)
        adapt(run, chunks)
        wrapped = [distributed(run, chunk, i) for i, chunk in enumerate(chunks)]
        done = tuple(
            ChunkRehearsal(i, parameters[i], run_chunk(run, chunk, ddp))
            for i, (chunk, ddp) in enumerate(zip(chunks, wrapped, strict=True))
        )
        buffers = tuple(b for ddp in wrapped for b in buffer_layouts(ddp))
        copies = sum(map(fp8_copies, chunks)) + _outside_buffers(wrapped)
        frozen = sum(allocated(p.nbytes) for c in chunks for p in c.parameters() if not p.requires_grad)
        state = optimizer_state(run, wrapped)
    return Rehearsal(run, rank, stage_of_rank(run.parallel, rank), done, buffers, state, copies, frozen)


#: Options that a pass of one layer includes and a pass of one chunk does not: overlapping expert communication changes
#: no allocation inside of a layer.
_OPTIONS_OF_ONE_LAYER = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def rehearse_layer(run: RunSpec, layer: int, architecture: Any = None) -> PassRecord:
    """Rehearse one decoder layer (0-based, of the whole model), with selective recomputation as configured.

    ``architecture`` as for ``rehearse``.

    The layer's input is created inside the graph and its output is freed before backward, as between other layers.
    """
    from bridge_memory.spec.layout import layout

    where = [
        (stage, i)
        for stage, chunks in enumerate(layout(run.model, run.parallel).stages)
        for i, chunk in enumerate(chunks)
        if layer in chunk.layers
    ]
    if not where:
        raise SpecError(f"layer ({layer}) is not one of the {run.model.num_layers} decoder layers")
    stage, index = where[0]
    with on_rank(run, rank_in_stage(run, stage), _OPTIONS_OF_ONE_LAYER):
        chunks = build_chunks(run, architecture=architecture)
        adapt(run, chunks)
        ddp = distributed(run, chunks[index], index)
        chunk: Any = chunks[index]
        local = layout(run.model, run.parallel).stages[stage][index].layers.index(layer)
        module = chunk.decoder.layers[local]
        return run_layer(run, chunk, module, ddp)
