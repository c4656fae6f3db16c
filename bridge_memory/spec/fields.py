"""Declarations of spec fields: the default together with the type, the allowed names or the range.

    seq_length: int = positive(4096, below=2**28)
    method: str | None = choice(None, "uniform", "block")

A group of fields (``Checked``) validates itself on construction. The rules of a class are collected once; validating
correct values builds no string.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

from bridge_memory.spec.errors import SpecError, show

#: Larger than any size of a run: such a value is a typing error or comes from a broken config.
MOST = 2**40
MOST_GPUS = 2**24
_NONE = type(None)


class Rule(NamedTuple):
    """The values that a field may hold: types, the range [lowest, below) of numbers, the known names."""

    types: frozenset[type]
    give: str
    lowest: int = 0
    below: int = MOST
    names: tuple[str, ...] = ()
    #: Of a fraction: whether 1 is excluded. None: not a fraction.
    fraction_below_one: bool | None = None
    #: Whether a tuple is a release (two numbers) rather than names.
    release: bool = False


def _declared(default: Any, types: tuple[type, ...], give: str, **limits: Any) -> Any:
    if default is None:
        types, give = (*types, _NONE), f"{give} or None"
    return field(default=default, metadata={"rule": Rule(frozenset(types), give, **limits)})


def positive(default: int | None, *, below: int = MOST) -> Any:
    """An integer of 1 or more, or None if that is the default."""
    return _declared(default, (int,), "a positive integer", lowest=1, below=below)


def count(default: int | None = 0, *, give: str = "a number of bytes") -> Any:
    """An integer of 0 or more, or None if that is the default; ``give``: what it is then."""
    return _declared(default, (int,), "an integer of 0 or more" if default is not None else give)


def flag(default: bool | None) -> Any:
    """True or False, or None ("as Megatron decides") if that is the default."""
    if default is None:
        return field(default=None, metadata={"rule": Rule(frozenset((bool, _NONE)), "True, False or None")})
    return _declared(default, (bool,), "True or False")


def number(default: float | None) -> Any:
    """A number of 0 or more."""
    return _declared(default, (int, float), "a number of 0 or more" + ("," if default is None else ""))


def fraction(default: float, *, below_one: bool = False) -> Any:
    """A number in [0, 1], or [0, 1)."""
    return _declared(default, (int, float), "a number of 0 or more", fraction_below_one=below_one)


def choice(default: str | None, *names: str) -> Any:
    """One of ``names`` (none given: any string), or None if that is the default."""
    return _declared(default, (str,), "a name", names=names)


def choices(default: tuple[str, ...], *names: str) -> Any:
    """A tuple of ``names`` (none given: any strings)."""
    return _declared(default, (tuple,), "a tuple of names", names=names)


def text(default: str | None, give: str) -> Any:
    """Free text, described by ``give``."""
    return field(default=default, metadata={"rule": Rule(frozenset((str, _NONE)), give)})


def release(default: tuple[int, int] | None) -> Any:
    """A release as (major, minor), or None ("unknown") if that is the default."""
    return _declared(default, (tuple,), "a release as (major, minor)", release=True)


#: The functions that declare a field, for the error about a field declared without one.
_DECLARATIONS = "flag(...), count(...), positive(...), number(...), fraction(...), choice(...), choices(...), text(...)"


class _Group(NamedTuple):
    """Fields of a class with the same types, which are checked together in a few comparisons."""

    names: tuple[str, ...]
    get: Callable[[object], tuple[Any, ...]]
    rules: tuple[Rule, ...]
    types: frozenset[type]


class Checked:
    """Base of the groups: ``__post_init__`` raises SpecError for a field that breaks its rule."""

    __slots__ = ()
    #: Prefix of a field's name in messages, where Megatron's name has one; ``_unprefixed`` lists exceptions.
    _prefix: ClassVar[str] = ""
    _unprefixed: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_fields(self)


def rules_of(cls: type) -> dict[str, Rule]:
    """Field -> its rule. Raises TypeError naming a field that was declared without one."""
    for f in fields(cls):
        if "rule" not in f.metadata:
            raise TypeError(
                f"{cls.__name__}.{f.name} is declared without a rule; give its default by one of {_DECLARATIONS} or "
                f"release(...) of {rules_of.__module__}"
            )
    return {f.name: f.metadata["rule"] for f in fields(cls)}


def _groups_of(cls: type) -> tuple[_Group, ...]:
    by_types: dict[frozenset[type], list[tuple[str, Rule]]] = {}
    for name, rule in rules_of(cls).items():
        by_types.setdefault(rule.types, []).append((name, rule))
    out = []
    for types, members in by_types.items():
        names = tuple(name for name, _ in members)
        # One extra name, so that attrgetter returns a tuple even for a single field.
        out.append(_Group(names, attrgetter(*names, "__class__"), tuple(rule for _, rule in members), types))
    return tuple(out)


def check_fields(spec: Checked) -> None:
    """Raise SpecError for a field of the wrong type, an unknown name or a number out of its range."""
    cls = type(spec)
    groups = cls.__dict__.get("_groups")
    if groups is None:
        groups = _groups_of(cls)
        cls._groups = groups  # type: ignore[attr-defined]
    for names, get, rules, types in groups:
        values = get(spec)[:-1]
        if not types.issuperset(map(type, values)):
            at = next(i for i, value in enumerate(values) if type(value) not in types)
            give = rules[at].give
            raise SpecError(f"{called(type(spec), names[at])} ({show(values[at])}) is not {give}; give {give}")
        if bool in types:
            continue
        for name, value, rule in zip(names, values, rules, strict=True):
            if value is None:
                continue
            if type(value) is tuple:
                _check_tuple(spec, name, value, rule)
            elif type(value) is str:
                if rule.names and value not in rule.names:
                    raise _unknown(spec, name, value, rule)
            elif rule.fraction_below_one is not None:
                check_fraction(called(type(spec), name), value, below_one=rule.fraction_below_one)
            elif not rule.lowest <= value < rule.below:
                raise out_of_range(called(type(spec), name), value, rule.lowest, rule.below)


def _check_tuple(spec: Checked, name: str, value: tuple[Any, ...], rule: Rule) -> None:
    if rule.release:
        if len(value) != 2 or any(type(n) is not int or n < 0 for n in value):
            raise SpecError(f"{called(type(spec), name)} ({show(value)}) is not a release; give one such as (0, 16)")
        return
    for one in value:
        if type(one) is not str or (rule.names and one not in rule.names):
            raise _unknown(spec, name, one, rule)


def _unknown(spec: Checked, name: str, value: object, rule: Rule) -> SpecError:
    known = f"; use one of {', '.join(rule.names)}" if rule.names else "; give names"
    return SpecError(f"{called(type(spec), name)} ({show(value)}) is unknown{known}")


def called(cls: type, name: str) -> str:
    """Megatron's name of a field: ``method`` of RecomputeSpec is ``recompute_method``."""
    prefix, unprefixed = getattr(cls, "_prefix", ""), getattr(cls, "_unprefixed", ())
    return name if name in unprefixed else prefix + name


def check_ints(owner: object, *names: str) -> None:
    """Raise SpecError unless every named field is an int of 1 or more; True is not an int."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int:
            raise SpecError(f"{name} ({show(value)}) is not an integer; give a positive integer")
        if not 1 <= value < MOST:
            raise out_of_range(name, value, 1)


def check_fraction(name: str, value: object, *, below_one: bool) -> None:
    """Raise SpecError unless ``value`` is a number in [0, 1], or [0, 1)."""
    if not (type(value) in (int, float) and 0 <= value <= 1 and not (below_one and value == 1)):  # type: ignore[operator]
        raise SpecError(f"{name} ({show(value)}) is not in [0, 1{')' if below_one else ']'}; give a fraction")


def out_of_range(name: str, value: float, lowest: int, most: int = MOST) -> SpecError:
    if value >= most:
        shown = f"{value:.3e}" if value < 1e300 else show(value)  # the largest integers have no such form
        return SpecError(f"{name} ({shown}) is absurdly large; give a number below 2**{most.bit_length() - 1}")
    return SpecError(f"{name} ({show(value)}) is below {lowest}; give {lowest} or more")
