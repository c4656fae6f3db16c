"""Adapters: divisibility of LoRA's rank and of features, and targets that exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.adapters import ROW_PARALLEL, divide_features, idle_targets, linears_of, split_rank
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits
from bridge_memory.spec.model import ModelSpec
from bridge_memory.spec.parts import ParallelSpec, PeftSpec

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_adapters(peft: PeftSpec, parallel: ParallelSpec, model: ModelSpec, limits: Limits) -> None:
    """Raise SpecError if LoRA's rank, or the features of a target, are not divisible by the tensor-parallel size.

    Full names and names with ``*`` are resolved, and checked, when the layers are laid out.
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


def check_frozen(run: RunSpec) -> None:
    """Raise SpecError where a frozen language model leaves nothing that trains, or is not counted."""
    if run.peft.scheme != "frozen":
        return
    if run.peft.dim:
        raise SpecError(f"peft.dim ({run.peft.dim}) is the rank of adapters, and peft.scheme frozen has none; drop it")
    engine = run.data_parallel.engine
    if run.implementation.torch_layers or engine != "megatron_ddp":
        raise SpecError(
            f"peft.scheme (frozen) is counted with Megatron's layers and engine megatron_ddp alone, not with engine "
            f"{engine}; drop it"
        )
    if not any(encoder.trains for encoder in run.model.encoders):
        raise SpecError(
            "peft.scheme (frozen): nothing would train, since the model has no encoder that trains; set none or lora"
        )


def check_targets(peft: PeftSpec, model: ModelSpec, limits: Limits) -> None:
    """Raise SpecError if no target is a linear of megatron-core's layers: nothing would train."""
    if peft.scheme != "lora" or not peft.dim:
        return
    targets = peft.target_modules
    if len(list(idle_targets(peft, model, limits, torch_layers=False))) == len(targets):
        names = dict.fromkeys(linear.name for linear in linears_of(model, limits))
        raise SpecError(
            f"peft.target_modules ({', '.join(targets)}) names no linear of this model: nothing would train; use some "
            f"of {', '.join(names)}"
        )
