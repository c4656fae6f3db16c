"""Residuals by stage: measured minus predicted memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_memory.comparison.logs import MeasuredRank
from bridge_memory.estimation import Estimate
from bridge_memory.residual import relative, residual
from bridge_memory.spec import SpecError


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction for one rank of one stage, bytes."""

    stage: int
    static: int
    peak: int


@dataclass(frozen=True, slots=True)
class StageResidual:
    """One stage's worst measured rank and its prediction. Bytes; None where nothing was measured.

    Example:
        >>> from bridge_memory import StageResidual
        >>> stage = StageResidual(0, predicted_static=40, predicted_peak=96, ranks=1, max_allocated=100)
        >>> stage.residual, stage.error, stage.beyond(0.05)
        (4, 0.04, False)
    """

    stage: int
    predicted_static: int
    predicted_peak: int
    ranks: int = 0
    worst_rank: int | None = None
    allocated: int | None = None
    max_allocated: int | None = None
    #: Range of the measured peak over the stage's ranks.
    spread: int = 0
    #: Resolution of the measured figures.
    resolution: int = 0

    @property
    def residual(self) -> int | None:
        """Measured peak minus predicted peak."""
        return residual(self.max_allocated, self.predicted_peak)

    @property
    def static_residual(self) -> int | None:
        return residual(self.allocated, self.predicted_static)

    @property
    def error(self) -> float | None:
        """``residual`` as a share of the measured peak."""
        return relative(self.max_allocated, self.predicted_peak)

    def beyond(self, tolerance: float) -> bool:
        """Whether the peak's error exceeds ``tolerance`` (a share of the measured peak) plus the resolution."""
        if self.residual is None or self.max_allocated is None:
            return False
        return abs(self.residual) - self.resolution > tolerance * self.max_allocated

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "predicted_static_bytes": self.predicted_static,
            "predicted_peak_bytes": self.predicted_peak,
            "ranks": self.ranks,
            "worst_rank": self.worst_rank,
            "allocated_bytes": self.allocated,
            "max_allocated_bytes": self.max_allocated,
            "spread_bytes": self.spread,
            "resolution_bytes": self.resolution,
            "residual_bytes": self.residual,
            "static_residual_bytes": self.static_residual,
            "error": self.error,
        }


def predicted_of(estimate: Estimate) -> list[Predicted]:
    return [Predicted(s.stage, s.static_bytes, s.peak_bytes) for s in estimate.stages]


def residuals(
    predicted: Sequence[Predicted], measured: Sequence[MeasuredRank], stage_of: Callable[[int], int]
) -> list[StageResidual]:
    """One entry for each predicted stage. ``stage_of``: pipeline stage of a rank where the record does not say.

    Raises SpecError where a rank lies on a stage that the prediction does not have.
    """
    by_stage: dict[int, list[MeasuredRank]] = {p.stage: [] for p in predicted}
    for m in measured:
        stage = m.stage if m.stage is not None else stage_of(m.rank)
        if stage not in by_stage:
            raise SpecError(
                f"rank {m.rank} is on pipeline stage {stage} and the prediction has {len(by_stage)} stages; "
                "give the configuration of this run"
            )
        by_stage[stage].append(m)
    return [_stage(p, by_stage[p.stage]) for p in predicted]


def _stage(p: Predicted, ranks: list[MeasuredRank]) -> StageResidual:
    if not ranks:
        return StageResidual(p.stage, p.static, p.peak)
    worst = max(ranks, key=lambda m: (m.max_allocated or 0, m.allocated or 0))
    peaks = [m.max_allocated for m in ranks if m.max_allocated is not None]
    return StageResidual(
        p.stage,
        p.static,
        p.peak,
        ranks=len(ranks),
        worst_rank=worst.rank,
        allocated=worst.allocated,
        max_allocated=worst.max_allocated,
        spread=max(peaks) - min(peaks) if peaks else 0,
        resolution=worst.resolution,
    )
