"""Fitted constants, chosen again with whole families left out."""

from __future__ import annotations

import pytest

from bridge_memory import fitted
from bridge_memory.accuracy.folds import refit
from bridge_memory.accuracy.predictions import predict
from bridge_memory.spec import SpecError


def test_left_out_families_are_predicted_as_well_as_the_rest(records, outcomes) -> None:
    """Choosing the fitted constants without a family changes none of its predictions by more than 1 %."""
    again = {(o.id, o.rank): o for o in refit(records, outcomes, 5)}
    assert again.keys() == {(o.id, o.rank) for o in outcomes}
    for o in outcomes:
        if o.predicted_max_allocated_bytes:
            left_out = again[o.id, o.rank].predicted_max_allocated_bytes
            assert left_out == pytest.approx(o.predicted_max_allocated_bytes, rel=0.01)


def test_deterministic_unpermutation_is_what_measured_runs_keep(records) -> None:
    """12 layers x [4096 / 2 x 1, 512] rows and more; the runs that a fitted constant of dropout was chosen for."""
    run = next(r for r in records if "tp2_pp1_te_8experts2parallel_ddp_average_in_collective/dev_dgx_h100" in r.id)
    (found,) = predict(run)
    assert found.max_allocated_error == pytest.approx(0, abs=0.002)


def test_an_unknown_constant_is_a_programming_error() -> None:
    with pytest.raises(KeyError, match="DROPOUT"), fitted.replaced({"DROPOUT": 1}):
        pass


def test_more_folds_than_families_is_refused(records, outcomes) -> None:
    with pytest.raises(SpecError, match="folds"):
        refit(records[:1], outcomes[:1], 2)
