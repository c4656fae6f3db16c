"""Cross-validation: refit the fitted constants with whole families left out; predict those."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.compare.runs import Outcome, Record, predict_all


def refit(records: Sequence[Record], folds: int) -> list[Outcome]:
    """Outcomes of every record under constants that its family had no part in. No constant is fitted yet."""
    return predict_all(records)
