"""``measured_verbatim`` and ``measured_meaning`` -> figures: which memory, of which rank, after how many steps, bytes.

Log lines of Megatron-LM ("memory (MB) | max allocated: ...", MB of 2^20) and of Megatron Bridge ("mem-max-allocated-
gigabytes", GB of 10^9), and names that people give ("max_reserved_GB_run_last_rank": 84.47).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import finite

#: No GPU has more, bytes: a figure above it is in another unit than it says.
_MOST = 1 << 44
_LONGEST = 4000


class Meaning(Enum):
    """Which memory a figure is."""

    STATIC = "static"
    PEAK = "peak"
    RUN_MAXIMUM = "run maximum"
    RESERVED = "reserved"
    DRIVER = "driver"
    #: Of what the driver counts, what is not torch's.
    OUTSIDE = "outside torch"
    #: While a checkpoint is loaded; whether allocated, reserved or the driver's is not said.
    LOAD = "load"

    def __str__(self) -> str:
        return self.value


class Figure(NamedTuple):
    """One measured number. ``rank``: None where it is not said; -1: the last. ``after``: steps, 0 where not said.
    ``name``: what its source calls it. ``not_compared``: why it stands for no prediction; "" if one does. ``load``: of
    the driver's, whether it includes the load of a checkpoint; None where it is not said."""

    name: str
    meaning: Meaning | None
    nbytes: int | None
    rank: int | None = None
    after: int = 0
    not_compared: str = ""
    load: bool | None = None


_ONES = {"one": 1, "first": 1, "two": 2, "second": 2, "three": 3, "third": 3, "four": 4, "five": 5, "ten": 10}
_COUNT = "|".join(_ONES)
_STEPS = "(?:it|iters?|iterations?|steps?)"
_AFTER = re.compile(
    rf"\b(?:after|at|as of)?[ _]*(?:the )?(?:(?P<word>{_COUNT})[ _](?:training[ _])?{_STEPS}"
    rf"|{_STEPS}[ _]?(?P<n>\d{{1,6}})|(?P<m>[1-9]\d{{0,5}})[ _](?:training[ _])?{_STEPS})\b"
)
_RANK = re.compile(r"\brank[ _:]?(?P<n>\d{1,6})\b")
_LAST = re.compile(r"\blast(?: global)?[ _]rank\b|\blast[ _]stage\b")
_SCALES = {
    "bytes": 1, "b": 1, "gib": 1 << 30, "mib": 1 << 20, "kib": 1 << 10, "gb": 10**9, "gigabytes": 10**9,
    "megabytes": 10**6, "mb": 1 << 20, "tib": 1 << 40,
}  # fmt: skip
_UNIT = re.compile(r"(?<![a-z])(bytes|gib|mib|kib|tib|gigabytes|megabytes|gb|mb)(?![a-z])")
_DRIVER = re.compile(r"driver|nvidia[- _]?smi|nvml|\bprocess\b|rocm[- _]?smi|device memory")
_OPEN = re.compile(r"(?:meaning|kind) (?:unstated|not stated|unknown|unclear)|unstated")
_BEYOND = re.compile(r"\boutside (?:of )?(?:py)?torch\b")
#: "80.4 GiB allocated by PyTorch and ~7 GiB held outside it".
_HELD_OUTSIDE = re.compile(
    r"torch\b[^.;]{0,40}?(?<![\d.])(\d+(?:\.\d+)?)\s*(gib|gb|mib|mb)\s+(?:is |are )?(?:held )?outside (?:of )?it\b"
)
_LOAD = r"[^.;]{0,60}?\bcheckpoint[- ]load"
_WITH_LOAD, _WITHOUT_LOAD = re.compile(rf"\binclud(?:es|ing|ed)\b{_LOAD}"), re.compile(
    rf"\b(?:exclud(?:es|ing|ed)|without|after|not includ(?:es|ing|ed))\b{_LOAD}"
)
#: Whoever says so takes the figure for that of the load.
_IS_LOAD = re.compile(r"\b(?:is|likely|of|during|while|at) (?:the )?checkpoint[- ]load")
_REFUSED = re.compile(r"do not (?:score|compare)|not to be (?:scored|compared)")
#: Counters of torch's allocator, and what torch calls active and inactive: no memory that is compared.
_COUNTERS = re.compile(
    r"\b(?:retries|retires|count|counts|ooms?|inactive|active|segments|alloc calls|num|tokens|tflops)\b"
)
#: Outside of training steps, and sizes that are no memory in use.
_OUTSIDE = re.compile(r"\b(?:load|loading|loaded|init|initialisation|initialization|checkpoint|save|saving)\b")
_NO_USE = re.compile(r"\b(?:free|capacity|total|budget|limit|headroom|delta|difference|saves?|saved|gap)\b")
#: Of another run than the row: its repetition, or with one option changed.
_OTHERS = re.compile(r"\b(?:without|repeat|repeated|off|before|baseline|predicted|theoretical|other)\b")
_VALUE = r"(\d+(?:\.\d+)?)"


def figures_of(row: Mapping[str, Any]) -> list[Figure]:
    """Every figure of a row. Raises SpecError where nothing is measured or ``measured_verbatim`` is no mapping."""
    verbatim, meaning = row.get("measured_verbatim"), row.get("measured_meaning")
    if not isinstance(verbatim, Mapping) or not verbatim:
        raise SpecError(f"measured_verbatim ({show(verbatim)}) is not a mapping of names to figures; give one")
    context = _Context(str(meaning or "")[:_LONGEST].lower(), str(row.get("kind") or ""))
    found = [f for name, value in verbatim.items() for f in _figures(str(name)[:200], value, context)]
    if not found:
        raise SpecError("measured_verbatim has no figure of memory; give one")
    return found


class _Context(NamedTuple):
    """What is said of all figures of a row."""

    meaning: str
    kind: str


def _figures(name: str, value: object, context: _Context) -> Iterator[Figure]:
    if isinstance(value, (list, tuple)):
        for one in value[:64]:
            yield from _figures(name, one, context)
    elif isinstance(value, Mapping):
        for inner, one in list(value.items())[:64]:
            yield from _figures(f"{name} {inner}", one, context)
    elif value is None:
        return
    elif isinstance(value, str) and "|" in value and ":" in value:
        yield from _line(value[:_LONGEST], context)
    else:
        yield from _named(name, value, context)


# --------------------------------------------------------------------------------------------------
# Log lines
# --------------------------------------------------------------------------------------------------


def _line(text: str, context: _Context) -> Iterator[Figure]:
    """``[Rank 0] (after 1 iterations) memory (MB) | allocated: ... | max allocated: ...``"""
    small = text.lower()
    head = small.split("|", 1)[0]
    unit = next(iter(_UNIT.findall(head)), None)
    for name, value in re.findall(r"(?:\||\])\s*([a-z][a-z _-]*):\s*(-?[\d.]+(?:e[+-]?\d+)?)", small):
        one = _words(name)
        if _COUNTERS.search(one):
            continue
        label = name.strip()
        scale = _scale(one) or (_SCALES[unit] if unit else _scale(context.meaning) or 1 << 20)
        try:
            number = float(value)
        except ValueError:
            yield Figure(label, None, None, not_compared=f"{label} ({value[:20]}) is not a number")
            continue
        yield from _figure(label, one, number, scale, f"{_words(head)} {one}", context)


# --------------------------------------------------------------------------------------------------
# Named figures
# --------------------------------------------------------------------------------------------------


def _words(name: str) -> str:
    return re.sub(r"[_\-/]+", " ", name.lower())


def _named(name: str, value: object, context: _Context) -> Iterator[Figure]:
    words = _words(name)
    if isinstance(value, str) and (held := _HELD_OUTSIDE.search(value[:_LONGEST].lower())) is not None:
        nbytes = round(float(held[1]) * _SCALES[held[2]])
        yield Figure(f"{name}, outside", Meaning.OUTSIDE, nbytes, _rank(words, context.meaning))
    if re.fullmatch(r"(?:oom|out of memory)\b.*", words) or (isinstance(value, str) and "oom" in value.lower().split()):
        yield Figure(name, None, None, not_compared="the run ran out of memory: no figure of a training step")
        return
    if (other := re.search(r"\((?:e|run|job|row)-?\d+\w*\)", name.lower())) is not None:
        yield Figure(name, None, None, not_compared=f"of another run {other.group()}")
        return
    if _OTHERS.search(words):
        yield Figure(name, None, None, not_compared="of another run than the row's")
        return
    if _OUTSIDE.search(words):
        yield Figure(name, None, None, not_compared="outside of training steps: a checkpoint, or building the model")
        return
    if _NO_USE.search(words):
        yield Figure(name, None, None, not_compared="no memory in use: a difference, or what a card has")
        return
    if _COUNTERS.search(words) and not re.search(r"alloc|reserved|memory|mem\b", words.replace("alloc retries", "")):
        return
    if re.search(r"\b(?:inactive|active|count|retries|retires)\b", words):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        yield Figure(name, None, None, not_compared=f"{name} ({show(value)}) is not a number")
        return
    if isinstance(value, str):
        yield from _of_text(name, words, value[:_LONGEST].lower(), context)
    else:
        yield from _figure(name, words, value, _scale(words) or _scale(context.meaning), words, context)


def _of_text(name: str, words: str, text: str, context: _Context) -> Iterator[Figure]:
    """A number in words: "68.57GiB", "106-130", "39.92GiB-47.32GiB" (the higher counts), or one a memory that the name
    lists ("76.06 / 94.61" of "alloc / reserved")."""
    said = _scale(text) or _scale(words) or _scale(context.meaning)
    several = re.fullmatch(rf"\s*~?{_VALUE}\s*/\s*{_VALUE}(?:[\s,;].*)?", text)
    kinds = [w for w in re.findall(r"alloc|reserved", words)]
    if several and len(kinds) == 2:
        for kind, number in zip(kinds, several.groups(), strict=True):
            one = re.sub(r"alloc\w*|reserved", "", words) + (" max allocated" if kind == "alloc" else " max reserved")
            yield from _figure(f"{name} ({kind})", one, float(number), said, one, context)
        return
    numbers = re.findall(rf"{_VALUE}\s*(?:gib|gb|mib|mb)?(?![\w.])", text)
    ranged = re.search(rf"{_VALUE}\s*(?:gib|gb|mib|mb)?\s*(?:-|to)\s*{_VALUE}", text)
    if ranged:
        yield from _figure(f"{name}, the highest", words, max(map(float, ranged.groups())), said, words, context)
    elif len(numbers) == 1:
        yield from _figure(name, words, float(numbers[0]), said, words, context)
    else:
        yield Figure(name, None, None, not_compared=f"{name} ({show(text)}) is not one number")


def _scale(words: str) -> int | None:
    """The unit that words say, "gb=2^30" and "mb=1e6" included."""
    stated = re.search(r"\b(gb|mb)\s*=\s*(2\^?\d\d|1e\d|10\^?\d)", words)
    if stated:
        power = {"gb": (1 << 30, 10**9), "mb": (1 << 20, 10**6)}[stated[1]]
        return power[0] if stated[2].startswith("2") else power[1]
    unit = _UNIT.search(re.sub(r"\d", " ", words))
    return _SCALES[unit[1]] if unit else None


def _figure(
    name: str, words: str, number: float, scale: int | None, place: str, context: _Context
) -> Iterator[Figure]:
    if not finite(number) or not number > 0:
        if number != 0:
            yield Figure(name, None, None, not_compared=f"{name} ({show(number)}) is no amount of memory")
        return
    if scale is None:
        yield Figure(name, None, None, not_compared=f"{name}: the unit is not stated")
        return
    # "GB" of a name is 1e9 unless what is said of all figures says otherwise.
    unit = _UNIT.search(re.sub(r"\d", " ", words))
    if unit and unit[1] in ("gb", "mb") and (stated := re.search(rf"\b{unit[1]}\s*=", context.meaning)):
        scale = _scale(context.meaning[stated.start():]) or scale
    nbytes = number * scale
    if nbytes > _MOST:
        yield Figure(name, None, None, not_compared=f"{name} ({show(number)}) is more than any GPU has")
        return
    rank, after = _rank(place, context.meaning), _after(place, context.meaning)
    meaning, why = _meaning(words, context)
    yield Figure(name, meaning, round(nbytes), rank, after, why, _load(context) if meaning is Meaning.DRIVER else None)


def _load(context: _Context) -> bool | None:
    if _WITHOUT_LOAD.search(context.meaning):
        return False
    return True if _WITH_LOAD.search(context.meaning) else None


def _meaning(words: str, context: _Context) -> tuple[Meaning | None, str]:
    """(the memory that a figure is, why it is not compared)."""
    text = context.meaning
    if _REFUSED.search(text):
        if _IS_LOAD.search(text) and not re.search(r"alloc|reserved", words):
            return Meaning.LOAD, ""
        return None, "its source does not say what it is, and says not to compare it"
    if _BEYOND.search(words):
        return Meaning.OUTSIDE, ""
    if _DRIVER.search(words):
        return Meaning.DRIVER, ""
    most = re.search(r"\b(?:max|maximum|peak|highest)\b", words)
    of_run = re.search(r"\brun\b", words)
    if "reserved" in words:
        return Meaning.RESERVED, ""
    if re.search(r"\balloc(?:ated|ation)?\b", words):
        return (Meaning.RUN_MAXIMUM if most and of_run else Meaning.PEAK if most else Meaning.STATIC), ""
    # The name says no memory; what is said of the row's figures does.
    if _OPEN.search(text):
        return None, "which memory it is is not stated"
    if _DRIVER.search(text) and not re.search(r"alloc|reserved", text):
        return Meaning.DRIVER, ""
    if "static" in words or (context.kind == "static" and not most):
        return Meaning.STATIC, ""
    if "reserved" in text and not re.search(r"allocat", text):
        return Meaning.RESERVED, ""
    if re.search(r"allocat", text) and "reserved" not in text:
        peak = most or re.search(r"\b(?:max|maximum|peak|highest)\b", text)
        return (Meaning.PEAK if peak else Meaning.STATIC), ""
    return None, "which memory it is is not stated"


def _rank(place: str, meaning: str) -> int | None:
    """Where the name is silent, what is said of all figures, unless that names several ranks."""
    for text in (place, meaning):
        ranks = {int(m["n"]) for m in _RANK.finditer(_words(text))}
        last = _LAST.search(_words(text)) is not None
        if len(ranks) + (last and not ranks) == 1:
            return ranks.pop() if ranks else -1
    return None


def _after(place: str, meaning: str) -> int:
    for text in (_words(place), _words(meaning)):
        if re.search(r"\brun\b", text) and text is not _words(meaning) and not _AFTER.search(text):
            return 0
        found = _AFTER.search(text)
        if found:
            return _ONES[found["word"]] if found["word"] else int(found["n"] or found["m"])
    return 0
