"""How far a prediction is off: measured minus predicted, as a share of what was measured.

Every table, JSON document and script takes its sign from here: positive where more was measured than predicted.
"""

from __future__ import annotations

#: The sign, in the words of a table's note.
SIGN = "measured - predicted"
#: Of the column in per cent.
SIGN_PERCENT = f"{SIGN}, in % of measured"
#: Heads of the columns that compare with a rehearsal.
REHEARSED, REHEARSED_PERCENT = "rehearsed - predicted", "% of rehearsed"


def residual(measured: int | None, predicted: int | None) -> int | None:
    """Measured minus predicted; None where one of them is.

    Example:
        >>> residual(100, 96)
        4
    """
    return None if measured is None or predicted is None else measured - predicted


def relative(measured: float | None, predicted: float | None) -> float | None:
    """(measured - predicted) / measured; None where one of them is None, or nothing was measured.

    Example:
        >>> relative(100, 96)
        0.04
    """
    return None if not measured or predicted is None else (measured - predicted) / measured


def percent(share: float | None, digits: int = 1) -> str:
    """"+4.0" of 0.04, "-" of None; a share that rounds to nothing has no minus.

    Example:
        >>> percent(-0.0001)
        '+0.0'
    """
    return "-" if share is None else f"{round(100 * share, digits) + 0.0:+.{digits}f}"
