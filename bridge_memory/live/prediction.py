"""Predicted memory of each stage at the moments of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge_memory.calibration import config_digest
from bridge_memory.calibration.records import BUILT, FIRST_STEP, STEADY
from bridge_memory.components import STATIC_ROLES, Component, Lifetime, Role
from bridge_memory.estimation import Estimate, StageEstimate, estimate
from bridge_memory.job.job import Job
from bridge_memory.spec import RunSpec


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """Bytes on one rank of one stage."""

    stage: int
    static: int
    activation: int
    transient: int
    peak: int
    #: Allocated before the first step: without optimizer moments, workspaces and carried-over tensors.
    built: int
    components: tuple[Component, ...]

    def expected(self, moment: str) -> tuple[str, int]:
        """(torch's figure, predicted bytes) that a report at ``moment`` compares."""
        if moment == BUILT:
            return "allocated", self.built
        if moment == FIRST_STEP:
            return "allocated", self.static
        return "max_allocated", self.peak


@dataclass(frozen=True, slots=True)
class Prediction:
    stages: tuple[StagePrediction, ...]
    model: str
    digest: str
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    run: RunSpec | None = None
    #: The whole job on this GPU, with its allocator replayed; None where the GPU is not known.
    job: Job | None = None


def predict(run: RunSpec) -> Prediction:
    """Raises SpecError where the run cannot be estimated."""
    return prediction_of(estimate(run))


def prediction_of(answer: Estimate) -> Prediction:
    return Prediction(
        stages=tuple(_stage(s) for s in answer.stages),
        model=answer.run.model.name,
        digest=config_digest(answer.run),
        assumptions=answer.assumptions,
        not_modelled=answer.not_modelled,
        run=answer.run,
    )


def _stage(s: StageEstimate) -> StagePrediction:
    built = sum(
        c.bytes
        for c in s.components
        if c.lifetime is Lifetime.MODEL and c.role in STATIC_ROLES
    )
    return StagePrediction(
        stage=s.stage,
        static=s.static_bytes,
        activation=s.activation_bytes,
        transient=s.transient_bytes,
        peak=s.peak_bytes,
        built=built,
        components=s.components,
    )


def likely_component(stage: StagePrediction, residual: int, static_residual: int, spread: int) -> str:
    """A likely cause of ``residual`` (measured minus predicted, bytes) in one sentence; a hint, not a proof.

    ``static_residual``: the same for memory between steps; ``spread``: the range over the stage's ranks.
    """
    routed: Sequence[Component] = [c for c in stage.components if c.routed and c.role is Role.ACTIVATION]
    if routed and spread > abs(residual) / 2:
        return f"routing is uneven: ranks of the stage differ by {spread / 2**30:.2f} GiB ({routed[0].name})"
    roles: tuple[Role, ...]
    if abs(static_residual) * 2 >= abs(residual):
        roles, where, size = STATIC_ROLES, "model state or persistent buffers", abs(static_residual)
    else:
        roles, where = (Role.ACTIVATION, Role.TRANSIENT), "activations or temporaries"
        size = abs(residual - static_residual)
    # A component counted twice, or not at all, is off by its own size.
    candidates = [c for c in stage.components if c.role in roles and size <= 2 * c.bytes <= 4 * size]
    if not candidates:
        return f"in {where}; no component has that size"
    nearest = min(candidates, key=lambda c: abs(c.bytes - size))
    return f"in {where}; closest in size: {nearest.name} ({nearest.bytes / 2**30:.2f} GiB)"


__all__ = [
    "BUILT", "FIRST_STEP", "STEADY", "Prediction", "StagePrediction", "likely_component", "predict", "prediction_of",
]  # fmt: skip
