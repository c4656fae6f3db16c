"""The option of checkpoints that lowers a resume most, and with which the save that it needs takes no more."""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.job.megatron.loading import How, loading
from bridge_memory.job.megatron.saving import saving
from bridge_memory.outside.amount import total
from bridge_memory.spec import RunSpec


class ToTry(NamedTuple):
    """An option that lowers the peak of a phase: as a flag, the run with it, and bytes less, at the upper end."""

    flag: str
    run: RunSpec
    less: int


#: Fields of ``CheckpointSpec`` with the values that can need less. Without the optimizer a resume starts another
#: training: never proposed.
_TO_TRY: tuple[dict[str, bool], ...] = (
    {"dist_ckpt_optim_fully_reshardable": True},
    {"dist_ckpt_optim_fully_reshardable": True, "distrib_optim_fully_reshardable_mem_efficient": True},
    {"ckpt_fully_parallel_load": False},
    {"stream_ckpt_dequant": True},
)


def to_try(run: RunSpec, stage: int, how: How = How.RESUME) -> ToTry | None:
    """The option with which the higher one of loading and saving is lowest, of those that lower loading; None if none
    lowers it without raising a save above what either takes now, or it is not modelled.

    How states are divided is the checkpoint's, which has to be saved so before. Raises SpecError: there is no such
    stage.
    """
    now = loading(run, stage, how)
    if now is None:
        return None
    found = []
    for wanted in _TO_TRY:
        fields = {name: value for name, value in wanted.items() if getattr(run.checkpoint, name) is not value}
        if not fields:
            continue
        other = run.with_fields(**fields)
        then, saved = loading(other, stage, how), saving(other, stage)
        if then is not None and total(then).most < total(now).most:
            worst = max(total(then).most, total(saved or ()).most)
            if worst <= max(total(now).most, total(saving(run, stage) or ()).most):
                found.append((worst, ToTry(_flags(fields), other, total(now).most - total(then).most)))
    return min(found, key=lambda option: option[0], default=(0, None))[1]


def _flags(fields: dict[str, bool]) -> str:
    return " ".join(f"--{'' if value else 'no-'}{name.replace('_', '-')}" for name, value in fields.items())
