"""The teacher of a distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_teacher(run: RunSpec) -> None:
    """Megatron Bridge ``models/distillation_provider.py: DistillationProvider.__post_init__, provide``."""
    teacher = run.teacher
    if teacher is None:
        return
    if teacher.teacher is not None:
        raise SpecError("teacher has a teacher of its own; drop that")
    if run.implementation.torch_layers or teacher.implementation.torch_layers:
        raise SpecError("teacher: distillation is estimated with megatron-core's layers alone; drop it")
    vpp, tp = run.parallel.vpp, run.parallel.tp
    if vpp > 1:
        raise SpecError(f"virtual_pipeline_model_parallel_size ({vpp}) does not go with a teacher; drop it")
    ours, theirs = run.model.padded_vocab_size(tp), teacher.model.padded_vocab_size(tp)
    if run.implementation.distillation != "none" and ours != theirs:
        raise SpecError(f"teacher has {theirs} logits where the student has {ours}; distil from one of its vocabulary")
    try:
        run.teacher_here  # noqa: B018
    except SpecError as error:
        raise SpecError(f"teacher: {error}") from None
