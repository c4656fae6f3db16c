"""Fitted constants, chosen again with whole families left out."""

from __future__ import annotations

import pytest

from bridge_memory import fitted
from bridge_memory.accuracy.folds import can_move, refit
from bridge_memory.accuracy.predictions import predict, predict_all
from bridge_memory.spec import SpecError


def test_left_out_families_are_predicted_as_well_as_the_rest(records, outcomes) -> None:
    """Choosing the fitted constants without a family changes none of its predictions by more than 1 %."""
    again = {(o.id, o.rank): o for o in refit(records, outcomes, 5)}
    assert again.keys() == {(o.id, o.rank) for o in outcomes}
    for o in outcomes:
        if o.predicted_max_allocated_bytes:
            left_out = again[o.id, o.rank].predicted_max_allocated_bytes
            assert left_out == pytest.approx(o.predicted_max_allocated_bytes, rel=0.01)


def test_records_that_are_not_predicted_again_cannot_move(records, outcomes) -> None:
    """One record of every family, of those that a fit leaves alone, under the largest and the smallest values."""
    still = {r.family: r for r in records if not can_move(r)}
    assert len(still) > 30
    expected = {(o.id, o.rank): o for o in outcomes}
    for pick in (max, min):
        with fitted.replaced({f.name: pick(f.candidates) for f in fitted.FITTED}):
            for o in predict_all(still.values()):
                assert o == expected[o.id, o.rank]


def test_a_fitted_constant_changes_the_estimate_and_comes_back(records) -> None:
    dropout = next(r for r in records if "tp2_pp1_te_8experts2parallel_ddp_average_in_collective/dev_dgx_h100" in r.id)
    assert can_move(dropout)
    (with_input,) = predict(dropout)
    with fitted.replaced({"COMPILED_DROPOUT_INPUT_BYTES": 0}):
        (without,) = predict(dropout)
    (after,) = predict(dropout)
    # 12 layers x 2 dropout-adds x [2048, 512] x 2 bytes.
    assert with_input.predicted_max_allocated_bytes - without.predicted_max_allocated_bytes == 48 << 20
    assert after == with_input


def test_a_constant_comes_back_after_an_error() -> None:
    before = fitted.COMPILED_DROPOUT_INPUT_BYTES
    with pytest.raises(ZeroDivisionError), fitted.replaced({"COMPILED_DROPOUT_INPUT_BYTES": before + 1}):
        assert before + 1 == fitted.COMPILED_DROPOUT_INPUT_BYTES
        raise ZeroDivisionError
    assert before == fitted.COMPILED_DROPOUT_INPUT_BYTES


def test_an_unknown_constant_is_a_programming_error() -> None:
    with pytest.raises(KeyError, match="DROPOUT"), fitted.replaced({"DROPOUT": 1}):
        pass


def test_more_folds_than_families_is_refused(records, outcomes) -> None:
    with pytest.raises(SpecError, match="folds"):
        refit(records[:1], outcomes[:1], 2)
