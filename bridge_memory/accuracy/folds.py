"""Cross-validation: choose the fitted constants again with whole families left out, and predict those.

Only what ``fitted.py`` lists is fitted; everything else is read in a source and is the same in every
fold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from bridge_memory import fitted
from bridge_memory.accuracy.predictions import Outcome, predict_all
from bridge_memory.accuracy.records import Record
from bridge_memory.accuracy.runs import NotARun, NotComparable, run_of
from bridge_memory.spec import SpecError


def refit(records: Sequence[Record], outcomes: Sequence[Outcome], folds: int) -> list[Outcome]:
    """Outcomes of every record under constants that its family had no part in choosing.

    ``outcomes``: the predictions of ``records`` under the constants as they are. The families, sorted by name, are
    dealt to ``folds`` groups; for each group the candidates with the least mean absolute error of the peak over all
    other families are taken. Only records that a constant can move are predicted again. Raises SpecError for more
    folds than families.
    """
    families = sorted({r.family for r in records})
    if folds > len(families):
        raise SpecError(f"--folds is {folds}, the runs have {len(families)} families; give at most that")
    movable = [r for r in records if can_move(r)]
    ids = {r.id for r in movable}
    fixed = [o for o in outcomes if o.id not in ids]
    names = [f.name for f in fitted.FITTED]
    by_choice: dict[tuple[object, ...], Sequence[Outcome]] = {tuple(getattr(fitted, n) for n in names): outcomes}
    for choice in product(*(f.candidates for f in fitted.FITTED)):
        if choice not in by_choice:
            with fitted.replaced(dict(zip(names, choice, strict=True))):
                by_choice[choice] = [*fixed, *predict_all(movable)]
    out = []
    for k in range(folds):
        held_out = set(families[k::folds])
        choice = min(by_choice, key=lambda c: _mean_error(o for o in by_choice[c] if o.family not in held_out))
        out += [o for o in by_choice[choice] if o.family in held_out]
    return out


def can_move(record: Record) -> bool:
    """Whether the prediction of a record can depend on a fitted constant."""
    try:
        run = run_of(record)
    except (SpecError, NotComparable, NotARun):
        return False
    return any(f.moves(run) for f in fitted.FITTED)


def _mean_error(outcomes: Iterable[Outcome]) -> float:
    errors = [abs(e) for o in outcomes if o.status == "ok" and (e := o.max_allocated_error) is not None]
    return sum(errors) / len(errors) if errors else 0.0
