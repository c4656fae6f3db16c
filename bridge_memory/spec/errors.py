"""SpecError, and the helpers that word refusals. Imports nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

#: Most characters of the line that shows a refusal, and of any SpecError.
LONGEST_LINE = 300
LONGEST = 1000


class SpecError(ValueError):
    """A run that cannot be estimated: a ValueError of one line with the field, its value and what to give instead.

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
    """A refusal of a configuration file. It names fields as the file does, not as a RunSpec does."""


def bounded(text: str, most: int = LONGEST) -> str:
    """``text`` in at most ``most`` characters: its beginning, the number of characters left out, and its end.

    The end is the fix (the part after the last semicolon) if that is short enough.
    """
    if len(text) <= most:
        return text
    kept = most - len(f" ... ({len(text)} more characters) ... ")
    fix = len(text) - text.rfind(";")
    tail = fix if fix <= kept * 2 // 3 else kept // 3
    return f"{text[: kept - tail]} ... ({len(text) - kept} more characters) ... {text[-tail:]}"


def listed(items: Sequence[str], most: int = 120) -> str:
    """As many of ``items`` as fit into ``most`` characters (at least one), and the number of the others."""
    shown = [bounded(items[0], most)] if items else []
    for item in items[1:]:
        if len(", ".join((*shown, item))) > most:
            return f"{', '.join(shown)} and {len(items) - len(shown)} more"
        shown.append(item)
    return ", ".join(shown)


def divide(numerator: int, denominator: int, what: str, by: str, fix: str = "") -> int:
    """Exact division: raises SpecError, naming both fields, rather than round."""
    if numerator % denominator:
        hint = f"; {fix}" if fix else ""
        raise SpecError(f"{what} ({numerator}) is not divisible by {by} ({denominator}){hint}")
    return numerator // denominator


def finite(value: object) -> bool:
    """Whether ``value`` is a number that a float can hold; bools are not."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:
        return False


def show(value: object) -> str:
    """Any user's value as a short line of ASCII."""
    text = ""
    try:
        for piece in _pieces(value):
            text += piece
            if len(text) > _SHOWN:
                break
    except Exception:  # integers of more digits than Python prints; objects that break
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


#: Most characters of a value in a message.
_SHOWN = 60


def _pieces(value: Any) -> Iterator[str]:
    """``ascii(value)`` piece by piece, so that nobody expands more of a value than is shown: lists that share what they
    hold can stand for more than any memory."""
    if type(value) in (list, tuple) and value:
        yield "[" if type(value) is list else "("
        for i, one in enumerate(value):
            yield ", " if i else ""
            yield from _pieces(one)
        yield "]" if type(value) is list else ",)" if len(value) == 1 else ")"
    elif type(value) is dict:
        yield "{"
        for i, (key, one) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _pieces(key)
            yield ": "
            yield from _pieces(one)
        yield "}"
    else:
        yield ascii(value[: 2 * _SHOWN] if type(value) in (str, bytes) else value).replace("\n", " ")
