"""The teacher of a distillation: its frozen weights, in the parameters' dtype, on every rank of the student."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_memory.components import Component, Lifetime, Part
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.spec import RunSpec
from bridge_memory.spec.dtypes import DTYPE_BYTES
from bridge_memory.spec.layout import StageShape, layout
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import rounded_bytes
from bridge_memory.workspaces.libraries import buffer


def teacher_buffers(run: RunSpec, shapes: StageShape) -> Iterator[Component]:
    """The teacher's weights on the stage that holds ``shapes`` of the student; for a middle stage, the largest share
    that any middle stage has.

    Source: Megatron Bridge ``models/distillation_provider.py: DistillationProvider._convert_hook``, which builds the
    teacher for the same pipeline rank, without DDP; modelopt ``torch/distill/distillation_model.py``, which freezes it.
    """
    teacher = run.teacher_here
    if teacher is None:
        return
    held = stage_weights(teacher)
    first, last = any(s.embedding for s in shapes), any(s.output for s in shapes)
    nbytes = held[0] if first else held[-1] if last else max(held[1:-1])
    yield buffer("the teacher's weights", nbytes, Part.NONE, Lifetime.MODEL)


def stage_weights(run: RunSpec) -> list[int]:
    """Bytes of the weights of every stage, each parameter a separate tensor in the parameters' dtype."""
    ctx, width = context_of(run), DTYPE_BYTES[run.precision.params_dtype]
    column = ((rounded_bytes, width),)
    return [
        sum(
            unit.times * sum(map(sum, unit.parameters.sums(column)))
            for shape in shapes for unit in chunk_units(run.model, shape, ctx)
        )
        for shapes in layout(run.model, run.parallel).shapes(run.model)
    ]
