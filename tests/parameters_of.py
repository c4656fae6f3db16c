"""Parameters of a run by name, as the inventory lists them."""

from __future__ import annotations

from bridge_memory.inventory.stack import chunk_units, named_parameters
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import Parameter


def stage_parameters(run: RunSpec, stage: int) -> list[list[Parameter]]:
    """Parameters of every chunk of pipeline stage ``stage``, chunk by chunk."""
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
    return [list(named_parameters(chunk_units(run.model, shape, ctx))) for shape in shapes]
