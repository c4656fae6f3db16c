"""What of a space is asked for, in one grammar: ``axis``, ``axis=value``, ``axis=value/value`` or ``axis=1..8``, with
commas or spaces between. ``vary`` names the axes that vary, with values the only ones; ``fix`` keeps one value;
``exclude`` leaves values out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from bridge_memory.plan.megatron.settings import SETTINGS, settled, usual_words, value_of, varied_words
from bridge_memory.plan.megatron.space import AXES, SPLITS, Space
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.parts import RECOMPUTE_MODULES

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu

#: Axes of sizes, which take ranges.
RANGED = ("tp", "pp", "vpp", "cp", "ep", "mbs")
_SIZES = (*RANGED, "etp")
#: Words for kinds of recomputation, beside sets of modules.
_KINDS = ("none", "selective", "full", "block", "uniform")
EVERY = (*AXES, *SETTINGS)
#: Those that vary where nobody says what does.
USUAL = (*AXES, "dispatcher")

Words = Mapping[str, tuple[str, ...]]


class Asked(NamedTuple):
    """Axis -> words of its values; () where an axis is named alone. ``vary`` is None where nobody says what varies."""

    vary: Words | None
    fix: Words
    exclude: Words
    #: How messages begin their names.
    dashes: str = "--"


def read(how: str, texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The items of ``--vary``, ``--fix`` or ``--exclude``. Raises SpecError, which names the item."""
    found: dict[str, tuple[str, ...]] = {}
    for item in (item for text in texts for item in text.replace(",", " ").split()):
        axis, given, values = item.partition("=")
        if axis not in EVERY:
            raise SpecError(f"{how} {axis[:40]} is none of {', '.join(EVERY)}; name some of these")
        words = tuple(word for part in values.split("/") for word in _checked(how, axis, part)) if given else ()
        if axis in found:
            raise SpecError(f"{how} names {axis} twice; put its values together, such as {axis}=A/B")
        found[axis] = words
    return found


def _checked(how: str, axis: str, text: str) -> list[str]:
    """The words of one value."""
    low, dots, high = text.partition("..")
    if axis in _SIZES:
        ends = [low or "1", high] if dots else [text]
        if not all(n.isascii() and n.isdecimal() and 0 < len(n) < 7 and int(n) for n in ends):
            raise SpecError(f"{how} {axis}={text[:40]} is no size; write {axis}=8, {axis}=2/4 or {axis}=1..8")
        numbers = list(map(int, ends))
        if numbers[0] > numbers[-1]:
            raise SpecError(f"{how} {axis}={text[:40]} is no range; write the smaller size first")
        return [str(n) for n in range(numbers[0], numbers[-1] + 1)] if dots else [str(numbers[0])]
    if axis == "split":
        if text not in SPLITS:
            raise SpecError(f"{how} split={text[:40]} is unknown; use {', '.join(SPLITS)}")
        return [text]
    if axis == "recompute":
        modules = text.split("+")
        if text in _KINDS:
            return [text]
        for module in modules:
            if module not in RECOMPUTE_MODULES:
                known = ", ".join((*_KINDS, *RECOMPUTE_MODULES))
                raise SpecError(f"{how} recompute={text[:60]} is unknown; use {known}, or modules such as mlp+moe_act")
        return ["+".join(module for module in RECOMPUTE_MODULES if module in modules)]
    return [text]


def asked_space(
    run: RunSpec, card: Gpu, num_gpus: int, domain: int, total: int, *, fixed: frozenset[str],
    ranges: Mapping[str, tuple[int, int]], exhaustive: bool, asked: Asked, given: frozenset[str],
) -> tuple[Space, tuple[str, ...]]:  # fmt: skip
    """The space around ``run`` and what of the settings that are asked for is left out, and why.

    ``fixed`` and ``ranges``: of ``Space``, as flags give them. ``given``: axes of settings that flags give, which keep
    what ``run`` has. Raises SpecError.
    """
    of_settings: dict[str, tuple[str, ...]] = {}
    only: dict[str, frozenset[str]] = {}
    fixed_axes, ends = set(fixed), dict(ranges)
    vary, dashes = asked.vary, asked.dashes
    for how, words in (("vary", vary or {}), ("fix", asked.fix)):
        for axis, values in words.items():
            if axis in given or (axis in fixed and (values or how == "vary")):
                raise SpecError(f"{dashes}{how} {axis} does not go with a flag that fixes it; drop one of them")
            if how == "fix" and len(values) > 1:
                several = "/".join(values)
                raise SpecError(f"{dashes}fix {axis} has several values ({several}); give one, or use {dashes}vary")
    for axis in asked.fix.keys() & (vary or {}).keys():
        raise SpecError(f"{dashes}fix {axis} does not go with {dashes}vary {axis}; drop one of them")
    if vary is not None:
        fixed_axes |= AXES.keys() - vary.keys() - ranges.keys()  # a range varies too
    fixed_axes |= {axis for axis, values in asked.fix.items() if axis in AXES and not values}
    for axis, values in {**(vary or {}), **asked.fix}.items():
        if axis in SETTINGS:
            if values or axis not in asked.fix:
                of_settings[axis] = values or usual_words(axis, run, card)
        elif values:
            fixed_axes.discard(axis)
            only[axis] = frozenset(values)
            if axis in RANGED:
                ends[axis] = (min(map(int, values)), max(map(int, values)))
    if vary is None and not {"dispatcher"} & (given | asked.fix.keys()):
        of_settings["dispatcher"] = usual_words("dispatcher", run, card)[:2]  # the time model takes backends for equals
    for axis, values in asked.exclude.items():
        if not values:
            raise SpecError(
                f"{dashes}exclude {axis} has no values; write {dashes}exclude {axis}=VALUE, or {dashes}fix {axis}"
            )
        if axis in SETTINGS:
            for word in values:
                value_of(axis, word, run)
            if axis in of_settings:
                of_settings[axis] = tuple(word for word in of_settings[axis] if word not in values)
                if not of_settings[axis]:
                    raise SpecError(f"{dashes}exclude {axis} leaves no value of {axis}; leave out fewer")
    without = {axis: frozenset(values) for axis, values in asked.exclude.items() if axis in AXES}
    free = {axis: ends.get(axis, (1, 1 << 20)) for axis in RANGED if axis not in fixed_axes}
    runs = settled(run, {axis: words for axis, words in of_settings.items() if words}, free, card)
    base, *others = runs.runs
    space = Space(
        base, num_gpus, domain, frozenset(fixed_axes), ends, exhaustive, total, tuple(others),
        tuple(varied_words(runs.runs)), only, without,
    )  # fmt: skip
    return space, runs.refused
