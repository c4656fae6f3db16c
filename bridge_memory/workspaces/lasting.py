"""Buffers that outlive the step: scratch of the blocks, workspaces of libraries."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.components import Component, Lifetime, Part, Provenance, Role
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.stack import chunk_lasting
from bridge_memory.spec import MLASpec, RunSpec
from bridge_memory.spec.layout import Chunk
from bridge_memory.workspaces.libraries import lasting_workspaces

_STAND_IN = "dummy weight gradient"


def lasting_buffers(
    run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext
) -> tuple[list[Component], list[Component]]:
    """What is allocated after a step besides model state: for good, and only until the next step."""
    shared: dict[str, int] = {}
    for chunk in chunks:
        for name, nbytes in chunk_lasting(run.model, chunk, ctx):
            shared[name] = max(nbytes, shared.get(name, 0))
    stand_ins = 0
    out = []
    for name, nbytes in shared.items():
        if name.startswith(_STAND_IN):
            stand_ins += nbytes
        else:
            out.append(_buffer(name, nbytes))
    if stand_ins:
        out.append(_buffer("stand-in weight gradients, one a weight shape", stand_ins))
    tables = rotary_tables(run, chunks)
    if tables:
        out.append(_buffer("rotary embedding tables", tables, Part.ROTARY))
    leftovers: list[Component] = []
    for w in lasting_workspaces(run, chunks, ctx):
        made = _buffer(w.name, w.bytes, w.part, Lifetime.BETWEEN_STEPS if w.between_steps else Lifetime.FIRST_PASS)
        (leftovers if w.between_steps else out).append(made)
    return out, leftovers


def _buffer(
    name: str, nbytes: int, part: Part = Part.WORKSPACE, lifetime: Lifetime = Lifetime.FIRST_PASS
) -> Component:
    return Component(name, nbytes, Role.BUFFERS, Provenance.FORMULA, lifetime=lifetime, part=part)


def rotary_tables(run: RunSpec, chunks: Sequence[Chunk]) -> int:
    """Bytes of the cached angles, fp32 [s / c, 1, 1, d_rope]: one a model chunk, and one a layer for MLA.

    Source: megatron-core ``models/common/embeddings/rotary_pos_embedding.py: RotaryEmbedding.forward`` (an
    ``lru_cache``); ``multi_latent_attention.py`` builds an embedding of its own in every layer.
    """
    model = run.model
    if not model.rotary_dim:
        return 0
    layers = [model.layers[i] for chunk in chunks for i in chunk.layers]
    layers += [model.mtp_layer for chunk in chunks for _ in chunk.mtp if model.mtp_layer is not None]
    latent = sum(isinstance(layer.mixer, MLASpec) for layer in layers)
    table = 4 * model.rotary_dim * run.batch.seq_length // run.parallel.cp
    return table * (latent or len(chunks))
