"""SpecError, and the few words every refusal is made of. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

#: Characters of the line in which a refusal is shown, and of a SpecError at all.
LONGEST_LINE = 300
LONGEST = 1000


class SpecError(ValueError):
    """What cannot be estimated: a ValueError of one line with the field, its value and what to give instead.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, SpecError
        >>> try:
        ...     RunSpec(
        ...         model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=3, tensor_model_parallel_size=3)
        ...     )
        ... except SpecError as refusal:
        ...     print(str(refusal).partition(";")[0])
        num_attention_heads (32) is not divisible by tensor_model_parallel_size (3)
    """

    def __init__(self, message: str) -> None:
        super().__init__(bounded(message))


class FileError(SpecError):
    """A refusal in the words of the file that is wrong: its fields have no other names there."""


def bounded(text: str, most: int = LONGEST) -> str:
    """``text`` in at most ``most`` characters: how it begins, its fix (behind the last semicolon) or how else it ends,
    and how many are left out between."""
    if len(text) <= most:
        return text
    kept = most - len(f" ... ({len(text)} more characters) ... ")
    fix = len(text) - text.rfind(";")
    tail = fix if fix <= kept * 2 // 3 else kept // 3
    return f"{text[: kept - tail]} ... ({len(text) - kept} more characters) ... {text[-tail:]}"


def listed(items: Sequence[str], most: int = 120) -> str:
    """The first of ``items``, as many as ``most`` characters hold (one at least), and how many more there are."""
    shown = [bounded(items[0], most)] if items else []
    for item in items[1:]:
        if len(", ".join((*shown, item))) > most:
            return f"{', '.join(shown)} and {len(items) - len(shown)} more"
        shown.append(item)
    return ", ".join(shown)


def divide(numerator: int, denominator: int, what: str, by: str, fix: str = "") -> int:
    """Exact division; nothing is ever rounded in silence. Raises SpecError naming both fields."""
    if numerator % denominator:
        hint = f"; {fix}" if fix else ""
        raise SpecError(f"{what} ({numerator}) is not divisible by {by} ({denominator}){hint}")
    return numerator // denominator


def finite(value: object) -> bool:
    """Whether ``value`` is a number that a float can hold; True and False are none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def show(value: object) -> str:
    """A user's value, short and on one line of ASCII, whatever it is."""
    try:
        text = ascii(value).replace("\n", " ")
    except Exception:  # integers of more digits than Python prints; lists nested too deeply; objects that break
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
