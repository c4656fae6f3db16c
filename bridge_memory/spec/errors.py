"""SpecError, and the few words every refusal is made of. Imports nothing."""

from __future__ import annotations


class SpecError(ValueError):
    """A user's input that cannot be estimated. One line: the field, the value, the fix."""


def divide(numerator: int, denominator: int, what: str, by: str, fix: str = "") -> int:
    """Exact division; nothing is ever rounded in silence. Raises SpecError naming both fields."""
    if numerator % denominator:
        hint = f"; {fix}" if fix else ""
        raise SpecError(f"{what} ({numerator}) is not divisible by {by} ({denominator}){hint}")
    return numerator // denominator


def show(value: object) -> str:
    """A user's value, short and on one line, whatever it is."""
    try:
        text = repr(value).replace("\n", " ")
    except Exception:  # integers of more digits than Python prints; objects that break
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
