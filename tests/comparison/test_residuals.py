"""Residuals: the worst rank of each stage against its prediction."""

from __future__ import annotations

import pytest

from bridge_memory.comparison.logs import MeasuredRank
from bridge_memory.comparison.residuals import Predicted, residuals
from bridge_memory.spec import SpecError

GIB = 1 << 30


def test_the_worst_rank_of_each_stage_is_compared() -> None:
    """Two stages of two ranks: 3 GiB and 2 GiB over, and spreads of 1 GiB and none."""
    predicted = [Predicted(0, 10 * GIB, 40 * GIB), Predicted(1, 8 * GIB, 30 * GIB)]
    peaks = {0: 42, 1: 43, 2: 32, 3: 32}
    measured = [MeasuredRank(r, 2, 11 * GIB, p * GIB) for r, p in peaks.items()]
    first, last = residuals(predicted, measured, lambda rank: rank // 2)
    assert (first.worst_rank, first.residual, first.spread, first.ranks) == (1, 3 * GIB, GIB, 2)
    assert (last.residual, last.static_residual, last.spread) == (2 * GIB, 3 * GIB, 0)
    assert first.error == pytest.approx(3 / 43)
    assert first.beyond(0.05) and not first.beyond(0.08)


def test_printed_digits_are_no_disagreement() -> None:
    rough = MeasuredRank(0, 2, None, 1000, resolution=60)
    (row,) = residuals([Predicted(0, 0, 1050)], [rough], lambda rank: 0)
    assert not row.beyond(0.0)
    assert row.static_residual is None


def test_a_stage_without_figures_is_never_beyond() -> None:
    (row,) = residuals([Predicted(0, 1, 2)], [], lambda rank: 0)
    assert row.residual is None and row.error is None and not row.beyond(0.0)


def test_a_rank_outside_the_prediction_is_refused() -> None:
    with pytest.raises(SpecError, match="rank 9 is on pipeline stage 3"):
        residuals([Predicted(0, 1, 2)], [MeasuredRank(9, 1, 1, 1)], lambda rank: 3)
