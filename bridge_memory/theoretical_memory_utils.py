"""The drop-in for ``megatron.bridge.training.utils.theoretical_memory_utils`` of Megatron Bridge 0.6.2.

The same names, numbers and printed lines, with ``method="table2"``, the default; ``method="inventory"`` gives this
project's figures in the same shapes. Ours on top: ``estimate_training_memory_by_stage`` (either method, every pipeline
stage), ``remarks`` (where Bridge's figures are not this container's memory), ``verdict`` (whether the run fits a card)
and ``theoretical_memory_line``.

Everywhere ``config`` is a Megatron Bridge ``ConfigContainer``, or any object with its attributes. Memory is in bytes
unless a name says otherwise; MB and GB are 2^20 and 2^30 bytes, as in Bridge. What Bridge answers is answered; where it
fails, SpecError (a ValueError) names the field, or what ``validate()`` would set is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge_memory.readers.container_fields import data_parallel_size
from bridge_memory.spec import SpecError
from bridge_memory.table2 import (
    ACTIVATION,
    DENSE,
    ROUTED,
    ModelState,
    activations,
    activations_are_reported,
    is_mimo,
    model_state,
    remarks,
    stages_of,
)

__all__ = [
    "NUM_BYTES_IN_GIGABYTE",
    "NUM_BYTES_IN_MEGABYTE",
    "MemoryComponentEstimate",
    "TrainingMemoryEstimate",
    "compute_activation_memory",
    "compute_weight_and_optimizer_memory",
    "estimate_training_memory",
    "estimate_training_memory_by_stage",
    "format_training_memory_estimate",
    "remarks",
    "report_theoretical_memory",
    "theoretical_memory_line",
    "verdict",
]

NUM_BYTES_IN_MEGABYTE: int = 1024 * 1024
NUM_BYTES_IN_GIGABYTE: int = 1024 * 1024 * 1024

METHODS = ("table2", "inventory")


@dataclass(frozen=True, slots=True)
class MemoryComponentEstimate:
    """One named part of one GPU's memory; counts are 0 where the part is not made of parameters."""

    name: str
    #: Elements in the whole model.
    parameter_count: float = 0.0
    #: Elements of one GPU's shard.
    parameter_count_per_gpu: float = 0.0
    bytes_per_parameter: float = 0.0
    memory_bytes: float = 0.0

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
    assumptions: tuple[str, ...]

    @property
    def weight_and_optimizer_bytes(self) -> float:
        return sum(c.memory_bytes for c in self.model_state_components)

    @property
    def total_memory_bytes(self) -> float:
        return self.weight_and_optimizer_bytes + (0.0 if self.activation is None else self.activation.memory_bytes)

    @property
    def total_memory_mb(self) -> float:
        return self.total_memory_bytes / NUM_BYTES_IN_MEGABYTE

    @property
    def total_memory_gb(self) -> float:
        return self.total_memory_bytes / NUM_BYTES_IN_GIGABYTE


def estimate_training_memory(
    config: Any,
    num_microbatches: int | None = None,
    *,
    include_activation: bool = True,
    method: str = "table2",
) -> TrainingMemoryEstimate:
    """Memory of the most loaded GPU.

    With "table2" Bridge's figures: the largest dense part of any stage, the largest routed-expert part of any stage
    (averages over stages where no stage's layers are stated), and the first stage's activations. With "inventory": the
    stage with the highest peak.
    """
    _check_method(method)
    if method == "inventory":
        stages = _inventory_by_stage(config, num_microbatches, include_activation)
        return max(stages, key=lambda s: s.total_memory_bytes)
    state = model_state(config)
    routed = state.routed_parameters_per_gpu() if state.routed_parameters > 0 else None
    activation = activations(config).first_stage_bytes(num_microbatches) if include_activation else None
    return _table2_estimate(state, state.dense_parameters_per_gpu(), routed, activation)


def estimate_training_memory_by_stage(
    config: Any,
    num_microbatches: int | None = None,
    *,
    include_activation: bool = True,
    method: str = "inventory",
) -> tuple[TrainingMemoryEstimate, ...]:
    """Memory of one GPU of every pipeline stage, first stage first, by either method.

    With "table2" Bridge's closed forms over the layers that the stage holds. Where the container does not say how many
    replicas there are, the world size does.
    """
    _check_method(method)
    if method == "inventory":
        return _inventory_by_stage(config, num_microbatches, include_activation)
    state = model_state(config)
    if state.use_distributed_optimizer:
        state = replace(state, data_parallel_size=data_parallel_size(config))
    kept = replace(activations(config), vocab_size=state.vocab_size) if include_activation else None
    notes = remarks(config, include_activation=False)
    return tuple(
        _table2_estimate(
            state,
            state.stage_dense_parameters(held),
            state.stage_routed_parameters(held) if state.routed_parameters > 0 else None,
            None if kept is None else kept.stage_bytes(stage, held, num_microbatches),
            notes,
        )
        for stage, held in enumerate(stages_of(config.model, state.layers, state.pp, state.vpp))
    )


def format_training_memory_estimate(estimate: TrainingMemoryEstimate, *, unit: str = "MB") -> str:
    """Every component and the total in one line. ``unit`` is "MB" or "GB" (2^20 and 2^30 bytes) in any case;
    ValueError for any other."""
    sizes = {"MB": NUM_BYTES_IN_MEGABYTE, "GB": NUM_BYTES_IN_GIGABYTE}
    unit = unit.upper()
    if unit not in sizes:
        raise ValueError(f"Unsupported memory unit: {unit}")
    parts = [(c.name, c.memory_bytes) for c in estimate.model_state_components]
    if estimate.activation is not None:
        parts.append((estimate.activation.name, estimate.activation.memory_bytes))
    parts.append(("total", estimate.total_memory_bytes))
    return "Theoretical memory footprints: " + ", ".join(f"{n}={size / sizes[unit]:.2f} {unit}" for n, size in parts)


def compute_weight_and_optimizer_memory(config: Any, verbose: bool = False) -> float:
    """Bytes of weights, gradients and optimizer state on the most loaded GPU (table2)."""
    estimate = estimate_training_memory(config, include_activation=False)
    if verbose:
        _print_parameters(estimate)
    return estimate.weight_and_optimizer_bytes


def compute_activation_memory(config: Any, num_microbatches: int | None, verbose: bool = False) -> float:
    """Bytes of activations on a GPU of the first stage (table2)."""
    kept = activations(config)
    if verbose:
        per_layer = kept.layer_bytes / NUM_BYTES_IN_MEGABYTE / kept.tp / kept.cp
        print(f"Activation memory footprint per transformer layer: {per_layer:.1f} MB")
        penalty = kept.interleaved_schedule_memory_penalty
        if penalty is not None:
            print(f"Memory penalty from interleaved schedule: {penalty:.2f}")
        if penalty is not None or kept.pp > 1:
            print(f"Number of in-flight microbatches: {kept.in_flight_microbatches(num_microbatches)}")
    return kept.first_stage_bytes(num_microbatches)


def report_theoretical_memory(config: Any, num_microbatches: int | None = None, verbose: bool = False) -> None:
    """Print Bridge's line, and parameters above it with ``verbose``; activations only where its formula applies
    (sequence parallel, selective). Nothing at all for a MegatronMIMOProvider."""
    if is_mimo(config):
        return
    applies = activations_are_reported(config)
    estimate = estimate_training_memory(config, num_microbatches, include_activation=applies)
    if verbose:
        _print_parameters(estimate)
    # Bridge ends the longer line with an empty one.
    print(_line(estimate) + ("\n" if applies else ""))


def theoretical_memory_line(config: Any, num_microbatches: int | None = None) -> str:
    """The line that ``report_theoretical_memory`` prints, "" where it prints none."""
    if is_mimo(config):
        return ""
    applies = activations_are_reported(config)
    return _line(estimate_training_memory(config, num_microbatches, include_activation=applies))


def verdict(config: Any, num_microbatches: int | None = None, *, gpus: Sequence[str] = ()) -> str:
    """Whether the run fits ``gpus`` (names; none: the common ones) by the inventory, in one line.

    UNKNOWN where unmodelled features, which are named, can decide; "" for a MegatronMIMOProvider. Raises SpecError for
    a run that cannot be estimated and for an unknown GPU.
    """
    from bridge_memory.estimation import estimate
    from bridge_memory.job.job import jobs_of, judged
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.report.answer import answer_of, peak_words
    from bridge_memory.verdict import fits

    if is_mimo(config):
        return ""
    result = estimate(run_from_config_container(config, num_microbatches=num_microbatches))
    on_gpus = fits(result, gpus)
    jobs = jobs_of(result, on_gpus)
    words = answer_of(result, judged(on_gpus, jobs), jobs=jobs).words
    return f"verdict: {words}" if len(on_gpus) == 1 else f"verdict: {peak_words(result)}; {words}"


def _line(estimate: TrainingMemoryEstimate) -> str:
    from bridge_memory.report.text import theoretical_footprint_line

    return theoretical_footprint_line(
        estimate.weight_and_optimizer_bytes / NUM_BYTES_IN_MEGABYTE,
        None if estimate.activation is None else estimate.activation.memory_mb,
    )


# ---------------------------------------------------------------------------------------------------------------


def _check_method(method: str) -> None:
    if method not in METHODS:
        raise SpecError(f"method ({method!r}) is unknown; use {' or '.join(map(repr, METHODS))}")


def _table2_estimate(
    state: ModelState, dense: float, routed: float | None, activation: float | None, notes: tuple[str, ...] = ()
) -> TrainingMemoryEstimate:
    """``dense``, ``routed`` (None: no experts): elements of one GPU's shard."""

    def component(name: str, whole: float, held: float, per_parameter: float) -> MemoryComponentEstimate:
        return MemoryComponentEstimate(name, whole, held, per_parameter, held * per_parameter)

    whole = state.dense_parameters + state.embedding_parameters
    states = [component(DENSE, whole, dense, state.dense_bytes_per_parameter)]
    if routed is not None:
        states.append(component(ROUTED, state.routed_parameters, routed, state.routed_bytes_per_parameter))
    return TrainingMemoryEstimate(
        model_state_components=tuple(states),
        activation=None if activation is None else MemoryComponentEstimate(ACTIVATION, memory_bytes=activation),
        total_parameters=state.total_parameters,
        assumptions=(*_assumptions(state, routed is not None, activation is not None), *notes),
    )


def _assumptions(state: ModelState, routed: bool, activation: bool) -> tuple[str, ...]:
    """Bridge's sentences, letter for letter."""
    said = [
        "Reports the most-loaded GPU shard; runtime allocator, kernel workspace, and CUDA graph buffers are excluded.",
        "Weight/optimizer bytes use the Megatron Bridge Adam estimate: 18 B/parameter without distributed "
        "optimizer, otherwise 6 B plus 12 B sharded over the relevant optimizer group.",
        "Embedding parameters are assigned to first/last pipeline stages; untied embeddings double-count only "
        "when PP=1.",
    ]
    if routed:
        said.append(
            "Routed MoE expert parameters are sharded by expert_model_parallel_size and "
            "expert_tensor_parallel_size; routed expert optimizer state uses the expert data-parallel shard size."
        )
    if state.cp > 1:
        said.append("Dense optimizer state and activations are divided across context parallel ranks.")
    if activation:
        said.append(
            "Activation estimates assume sequence parallelism and selective activation recomputation; full "
            "recompute, CPU offload, token imbalance, and dispatcher workspace are not modeled."
        )
    return tuple(said)


def _inventory_by_stage(
    config: Any, num_microbatches: int | None, include_activation: bool
) -> tuple[TrainingMemoryEstimate, ...]:
    from bridge_memory.components import STATIC_ROLES, Role
    from bridge_memory.estimation import estimate
    from bridge_memory.readers.config_container import run_from_config_container

    run = run_from_config_container(config, num_microbatches=num_microbatches)
    answer = estimate(run)
    total = float(answer.parameters + answer.mtp_parameters)
    features = [f"not modelled: {name}" for name in answer.not_modelled]
    first = ("Totals are those of what is modelled: the peak is unknown.",) if answer.peak_bounds.most is None else ()
    notes = (*first, *answer.assumptions, *features)
    stages = []
    for stage in answer.stages:
        states = tuple(
            MemoryComponentEstimate(
                c.name,
                parameter_count=total if c.role is Role.WEIGHTS else 0.0,
                parameter_count_per_gpu=float(stage.parameters) if c.role is Role.WEIGHTS else 0.0,
                memory_bytes=float(c.bytes),
            )
            for c in stage.components
            if c.role in STATIC_ROLES
        )
        # At the peak: what lives only between steps (``StageEstimate.carried_over``) is not part of it.
        moving = float(stage.peak_bytes - stage.bytes_of(*STATIC_ROLES))
        stages.append(
            TrainingMemoryEstimate(
                model_state_components=states,
                activation=MemoryComponentEstimate(ACTIVATION, memory_bytes=moving) if include_activation else None,
                total_parameters=total,
                assumptions=notes,
            )
        )
    return tuple(stages)


def _print_parameters(estimate: TrainingMemoryEstimate) -> None:
    """Bridge's verbose lines, letter for letter."""
    billions = 10**9
    kinds = list(zip(("dense and embedding", "routed expert"), estimate.model_state_components, strict=False))
    for kind, component in kinds:
        print(f"Number of {kind} parameters in billions: {component.parameter_count / billions:.2f}")
    print(f"Total number of parameters in billions: {estimate.total_parameters / billions:.2f}")
    for kind, component in kinds:
        held = component.parameter_count_per_gpu / billions
        print(f"Number of {kind} parameters in most loaded shard in billions: {held:.4f}")
