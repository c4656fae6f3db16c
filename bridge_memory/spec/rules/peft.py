"""Adapters: ranks that divide, and targets that exist."""

from __future__ import annotations

from bridge_memory.spec.adapters import ROW_PARALLEL, divide_features, idle_targets, linears_of, split_rank
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits
from bridge_memory.spec.model import ModelSpec
from bridge_memory.spec.parts import ParallelSpec, PeftSpec


def check_adapters(peft: PeftSpec, parallel: ParallelSpec, model: ModelSpec, limits: Limits) -> None:
    """Raise SpecError for a rank, or features, that an adapter cannot divide over its ranks.

    What a full name or one with ``*`` means is known once layers are laid out, and refused there.
    """
    if peft.scheme != "lora" or not peft.dim:
        return
    for linear in linears_of(model, limits):
        ranks = parallel.etp if linear.experts else parallel.tp
        if linear.name in peft.target_modules:
            if linear.name not in ROW_PARALLEL:
                split_rank(peft.dim, ranks, experts=linear.experts)
            if linear.features:
                divide_features(*linear.features, ranks, experts=linear.experts)


def check_targets(peft: PeftSpec, model: ModelSpec, limits: Limits) -> None:
    """Raise SpecError where no target is a linear of megatron-core's layers: nothing would train."""
    if peft.scheme != "lora" or not peft.dim:
        return
    targets = peft.target_modules
    if len(list(idle_targets(peft, model, limits, torch_layers=False))) == len(targets):
        names = dict.fromkeys(linear.name for linear in linears_of(model, limits))
        raise SpecError(
            f"peft.target_modules ({', '.join(targets)}) names no linear of this model: nothing would train; use some "
            f"of {', '.join(names)}"
        )
