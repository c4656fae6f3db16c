"""The drop-in for ``megatron.bridge.training.utils.theoretical_memory_utils``: same names, numbers and line.

``method="table2"`` (the default) gives Megatron Bridge's own figures, see ``bridge_memory.table2``;
``method="inventory"`` gives this project's in the same shapes. ``estimate_training_memory_by_stage`` gives either
of them for each pipeline stage.

Everywhere ``config`` is a Megatron Bridge ``ConfigContainer``, validated or not, or any object with its
attributes. Memory is in bytes unless a name says otherwise; MB and GB are 2^20 and 2^30 bytes, as in Bridge.
Raises SpecError (a ValueError) where a field is missing or wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.table2 import (
    ACTIVATION,
    DENSE,
    ROUTED,
    Table2,
    Table2Stage,
    assumptions,
    table2_from_container,
)

NUM_BYTES_IN_MEGABYTE: int = 1024 * 1024
NUM_BYTES_IN_GIGABYTE: int = 1024 * 1024 * 1024

METHODS = ("table2", "inventory")


@dataclass(frozen=True, slots=True)
class MemoryComponentEstimate:
    """One named part of one GPU's memory."""

    name: str
    memory_bytes: float
    #: Elements of one GPU's shard; 0 where the part is not made of parameters.
    parameters: float = 0.0

    @property
    def memory_mb(self) -> float:
        return self.memory_bytes / NUM_BYTES_IN_MEGABYTE

    @property
    def memory_gb(self) -> float:
        return self.memory_bytes / NUM_BYTES_IN_GIGABYTE


@dataclass(frozen=True, slots=True)
class TrainingMemoryEstimate:
    """One GPU's memory; totals are sums of the parts shown."""

    model_state_components: tuple[MemoryComponentEstimate, ...]
    #: None where activations were not asked for.
    activation: MemoryComponentEstimate | None
    #: Parameters of the whole model (elements).
    total_parameters: float
    assumptions: tuple[str, ...] = ()

    @property
    def weight_and_optimizer_bytes(self) -> float:
        return sum(c.memory_bytes for c in self.model_state_components)

    @property
    def total_memory_bytes(self) -> float:
        return self.weight_and_optimizer_bytes + (self.activation.memory_bytes if self.activation else 0.0)

    @property
    def total_memory_mb(self) -> float:
        return self.total_memory_bytes / NUM_BYTES_IN_MEGABYTE

    @property
    def total_memory_gb(self) -> float:
        return self.total_memory_bytes / NUM_BYTES_IN_GIGABYTE

    @property
    def memory_mb(self) -> float:
        return self.total_memory_mb

    @property
    def memory_gb(self) -> float:
        return self.total_memory_gb


def estimate_training_memory(
    config: Any,
    num_microbatches: int | None = None,
    *,
    include_activation: bool = True,
    method: str = "table2",
) -> TrainingMemoryEstimate:
    """Memory of the most loaded GPU.

    With "table2": the largest dense part of any stage, the largest routed-expert part of any stage, and the first
    stage's activations, which is how Bridge adds them. With "inventory": the stage with the highest peak.
    """
    _check_method(method)
    if method == "inventory":
        stages = _inventory_by_stage(config, num_microbatches, include_activation)
        return max(stages, key=lambda s: s.total_memory_bytes)
    t = table2_from_container(config)
    dense = max(t.stage_dense_parameters(s) for s in t.stages)
    routed = max(t.stage_routed_parameters(s) for s in t.stages)
    activation = t.activation_bytes(0, num_microbatches) if include_activation else None
    return _table2_estimate(config, t, dense, routed, activation)


def estimate_training_memory_by_stage(
    config: Any,
    num_microbatches: int | None = None,
    *,
    include_activation: bool = True,
    method: str = "inventory",
) -> tuple[TrainingMemoryEstimate, ...]:
    """Memory of one GPU of every pipeline stage, first stage first, by either method."""
    _check_method(method)
    if method == "inventory":
        return _inventory_by_stage(config, num_microbatches, include_activation)
    t = table2_from_container(config)
    return tuple(
        _table2_estimate(
            config,
            t,
            t.stage_dense_parameters(held),
            t.stage_routed_parameters(held),
            t.activation_bytes(stage, num_microbatches) if include_activation else None,
        )
        for stage, held in enumerate(t.stages)
    )


def format_training_memory_estimate(estimate: TrainingMemoryEstimate, *, unit: str = "MB") -> str:
    """Bridge's line. ``unit`` is "MB" or "GB" (2^20 and 2^30 bytes); ValueError for any other."""
    from bridge_memory.report.text import theoretical_footprint_line

    units = {"MB": NUM_BYTES_IN_MEGABYTE, "GB": NUM_BYTES_IN_GIGABYTE}
    if unit not in units:
        raise ValueError(f"Unsupported memory unit: {unit}")
    activation = None if estimate.activation is None else estimate.activation.memory_bytes / units[unit]
    return theoretical_footprint_line(estimate.weight_and_optimizer_bytes / units[unit], activation, unit)


def compute_weight_and_optimizer_memory(config: Any, verbose: bool = False) -> float:
    """Bytes of weights, gradients and optimizer state on the most loaded GPU (table2)."""
    t = table2_from_container(config)
    if verbose:
        _print_parameters(t)
    return estimate_training_memory(config, include_activation=False).weight_and_optimizer_bytes


def compute_activation_memory(config: Any, num_microbatches: int | None, verbose: bool = False) -> float:
    """Bytes of activations on a GPU of the first stage (table2)."""
    t = table2_from_container(config)
    if verbose:
        _print_activations(t, num_microbatches)
    return t.activation_bytes(0, num_microbatches)


def report_theoretical_memory(config: Any, num_microbatches: int | None = None, verbose: bool = False) -> None:
    """Print Bridge's line; activations only where its formula applies (sequence parallel, selective)."""
    if verbose:
        compute_weight_and_optimizer_memory(config, verbose=True)
        if _activation_applies(config):
            compute_activation_memory(config, num_microbatches, verbose=True)
    # Bridge ends the longer line with an empty one.
    print(theoretical_memory_line(config, num_microbatches) + ("\n" if _activation_applies(config) else ""))


def theoretical_memory_line(config: Any, num_microbatches: int | None = None) -> str:
    """The line that ``report_theoretical_memory`` prints."""
    applies = _activation_applies(config)
    return format_training_memory_estimate(
        estimate_training_memory(config, num_microbatches, include_activation=applies)
    )


def _activation_applies(config: Any) -> bool:
    model = config.model
    return bool(getattr(model, "sequence_parallel", False)) and (
        getattr(model, "recompute_granularity", None) == "selective"
    )


# ---------------------------------------------------------------------------------------------------------------


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise SpecError(f"method ({method!r}) is unknown; use {' or '.join(map(repr, METHODS))}")


def _table2_estimate(
    config: Any, t: Table2, dense: float, routed: float, activation: float | None
) -> TrainingMemoryEstimate:
    states = [MemoryComponentEstimate(DENSE, dense * t.dense_bytes_per_parameter, dense)]
    if t.num_experts:
        states.append(MemoryComponentEstimate(ROUTED, routed * t.routed_bytes_per_parameter, routed))
    return TrainingMemoryEstimate(
        model_state_components=tuple(states),
        activation=None if activation is None else MemoryComponentEstimate(ACTIVATION, activation),
        total_parameters=t.total_parameters,
        assumptions=assumptions(config, t, activation=activation is not None),
    )


def _inventory_by_stage(
    config: Any, num_microbatches: int | None, include_activation: bool
) -> tuple[TrainingMemoryEstimate, ...]:
    from bridge_memory.components import STATIC_ROLES, Role
    from bridge_memory.estimate import estimate
    from bridge_memory.readers.config_container import run_from_config_container

    run = run_from_config_container(config, num_microbatches=num_microbatches)
    answer = estimate(run)
    notes = (*answer.assumptions, *(f"not modelled: {name}" for name in answer.not_modelled))
    stages = []
    for stage in answer.stages:
        states = tuple(
            MemoryComponentEstimate(c.name, float(c.bytes), float(stage.parameters) if c.role is Role.WEIGHTS else 0.0)
            for c in stage.components
            if c.role in STATIC_ROLES
        )
        # At the peak: what lives only between steps (``StageEstimate.leftovers``) is not part of it.
        moving = float(stage.peak_bytes - stage.bytes_of(*STATIC_ROLES))
        stages.append(
            TrainingMemoryEstimate(
                model_state_components=states,
                activation=MemoryComponentEstimate(ACTIVATION, moving) if include_activation else None,
                total_parameters=float(answer.parameters + answer.mtp_parameters),
                assumptions=notes,
            )
        )
    return tuple(stages)


def _print_parameters(t: Table2) -> None:
    """Bridge's verbose lines, letter for letter."""
    billions = 10**9
    print(f"Number of parameters in transformer layers in billions: {t.transformer_parameters / billions: .2f}")
    print(f"Number of parameters in embedding layers in billions: {t.total_embedding_parameters / billions:.2f}")
    print(f"Total number of parameters in billions: {t.total_parameters / billions:.2f}")

    def on_gpu(stage: Table2Stage) -> float:
        return t.stage_dense_parameters(stage) + t.stage_routed_parameters(stage)

    most = max(map(on_gpu, t.stages))
    print(f"Number of parameters in most loaded shard in billions: {most / billions:.4f}")
    if t.pp > 1:
        # "Other shards" are the layers of a middle stage, without an embedding.
        middle = t.stages[1 if t.pp > 2 else 0]
        other = t.stage_transformer_parameters(middle) / t.tp + t.stage_routed_parameters(middle)
        print(f"Number of parameters in other shards in billions: {other / billions:.4f}")


def _print_activations(t: Table2, num_microbatches: int | None) -> None:
    """Bridge's verbose lines, letter for letter."""
    per_layer = t.layer_activation_bytes / NUM_BYTES_IN_MEGABYTE / (t.tp * t.cp)
    print(f"Activation memory footprint per transformer layer: {per_layer:.1f} MB")
    penalty = t.interleaved_schedule_memory_penalty
    if penalty is not None:
        print(f"Memory penalty from interleaved schedule: {penalty:.2f}")
        print(f"Number of in-flight microbatches: {math.ceil(penalty * t.pp)}")
    elif t.pp > 1:
        print(f"Number of in-flight microbatches: {int(t.in_flight_microbatches(0, num_microbatches))}")
