"""Typed access to a table of a configuration file, with diagnostics.

A reader gets every key that it supports. An invalid value is recorded as a ``Problem`` and replaced by the default, so
that one pass over a file finds all problems. Unmodelled features and assumptions are recorded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple

from bridge_memory.spec import show
from bridge_memory.spec.errors import FileError, bounded, finite
from bridge_memory.spec.fields import MOST
from bridge_memory.spec.unmodelled import Effect, Unmodelled

#: A value in DeepSpeed configs that accelerate or the HF Trainer replaces.
AUTO = "auto"


class Problem(NamedTuple):
    """A problem of a configuration: the field by the file's name, what is wrong, how to fix it."""

    field: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field} {self.what}; {self.fix}"


@dataclass(slots=True)
class Diagnostics:
    """The problems, refusals, assumptions and unmodelled features found while reading a configuration."""

    #: The file's name in messages.
    name: str
    problems: list[Problem] = field(default_factory=list)
    #: Options that are valid for the tool whose file it is, but cannot be estimated.
    refusals: list[Problem] = field(default_factory=list)
    #: Keys that the tool silently ignores, which may be typing errors.
    ignored: list[Problem] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    not_modelled: list[Unmodelled] = field(default_factory=list)

    def problem(self, where: str, what: str, fix: str) -> None:
        found = Problem(_name(where), what, fix)
        if found not in self.problems:
            self.problems.append(found)

    def refuse(self, where: str, what: str, fix: str) -> None:
        """Record a valid option that cannot be estimated."""
        found = Problem(_name(where), what, fix)
        if found not in self.refusals:
            self.refusals.append(found)

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def feature(self, sentence: str, effect: Effect, *, order: str, outside: bool = False) -> None:
        if sentence not in self.not_modelled:
            self.not_modelled.append(Unmodelled(sentence, effect, order=order, outside=outside))

    def check(self) -> None:
        """Raise FileError (a SpecError) for the first problem or refusal, with the number of the others.

        If there is none, keys that the tool ignores become assumptions.
        """
        found = [*self.problems, *self.refusals]
        if found:
            rest = f" ({len(found) - 1} more: bridge-memory validate lists them)" if len(found) > 1 else ""
            raise FileError(f"{bounded(self.name, 120)}: {found[0].field} {found[0].what}{rest}; {found[0].fix}")
        for one in self.ignored:
            self.assume(f"{one.field} {one.what} ({one.fix})")


class Section:
    """Typed getters over a table of a file. ``null`` counts as absent."""

    def __init__(self, data: Mapping[str, Any], where: str, diagnostics: Diagnostics) -> None:
        self.data = data
        self.where = where
        self.diagnostics = diagnostics
        self._read: set[str] = set()

    def named(self, key: str) -> str:
        """The key prefixed by its tables: "zero_optimization.stage"."""
        return f"{self.where}.{key}" if self.where else key

    def problem(self, key: str, what: str, fix: str) -> None:
        self.diagnostics.problem(self.named(key), what, fix)

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def raw(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self.data.get(key)
        return default if value is None else value

    def _wrong(self, key: str, value: object, must: str) -> None:
        self.problem(key, f"is {show(value)}", f"it must be {must}")

    def integer(
        self, key: str, default: Any = None, *, least: int = 0, below: int = MOST, digits: bool = False
    ) -> Any:
        """An int of ``least`` or more. Whole floats such as 5e8 are accepted, as by DeepSpeed; with ``digits`` also
        "2"."""
        value = self.raw(key)
        if digits and isinstance(value, str) and value.isdecimal() and len(value) < 20:
            value = int(value)
        if value is None:
            return default
        if isinstance(value, float) and finite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, value, "an integer")
            return default
        if not least <= value < below:
            must = f"an integer of {least} or more" if value < least else f"below {below:.0e}"
            self._wrong(key, value, f"an integer from {least} to {below - 1}" if below <= 1000 else must)
            return default
        return value

    def number(self, key: str, default: Any = None, *, least: float = 0.0, most: float = float("inf")) -> Any:
        value = self.raw(key)
        if value is None:
            return default
        if not finite(value):
            self._wrong(key, value, "a number")
            return default
        if not least <= value <= most:
            self._wrong(key, value, f"a number of {least:g} or more" if most == float("inf") else
                        f"a number in [{least:g}, {most:g}]")
            return default
        return value

    def flag(self, key: str, default: Any = False, *, words: bool = False) -> Any:
        """True or False; with ``words`` also "true" and "false", as launchers write them."""
        value = self.raw(key)
        if value is None:
            return default
        if words and isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            self._wrong(key, value, "true or false")
            return default
        return value

    def text(self, key: str, default: Any = None) -> Any:
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(key, value, "a string")
            return default
        return value

    def choice(self, key: str, names: Iterable[str], default: Any = None) -> Any:
        """One of ``names``, in any case. Any other value is a problem that suggests the most similar name."""
        known = tuple(names)
        value = self.raw(key)
        if value is None:
            return default
        found = next((name for name in known if isinstance(value, str) and name.lower() == value.lower()), None)
        if found is None:
            lower = {name.lower(): name for name in known}
            near = get_close_matches(value.lower(), lower, n=1) if isinstance(value, str) else []
            fix = "quote it: 'no'" if value is False and "no" in lower else _use([lower[name] for name in near], known)
            self.problem(key, f"is {show(value)}, which is unknown", fix)
            return default
        return found

    def table(self, key: str) -> Section:
        """The nested table ``key``, empty if absent."""
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            self._wrong(key, value, "a table")
            value = None
        return Section(value or {}, self.named(key), self.diagnostics)

    def ignore(self, *keys: str) -> None:
        """Mark keys as read: they do not change the memory of a training step."""
        self._read.update(keys)

    def unmodelled(
        self, key: str, default: object, effect: Effect, what: str, *, order: str, outside: bool = False
    ) -> None:
        """Record an unmodelled feature if ``key`` is set and differs from its default."""
        value = self.raw(key)
        if value not in (None, default, AUTO, "", [], {}):
            shown = show(value if isinstance(value, (str, int, float)) else "set")
            self.diagnostics.feature(f"{self.named(key)} ({shown}): {what}", effect, order=order, outside=outside)

    def unread(self) -> list[str]:
        """Keys that were not read."""
        return [str(key) for key in self.data if key not in self._read]

    def refuse_unread(self, known: Sequence[str], refused: str, fix: str = "remove it") -> None:
        """Record every unread key as a problem. ``refused``: who refuses it, such as "DeepSpeed refuses it"."""
        for key in self.unread():
            near = get_close_matches(key, known, n=1, cutoff=0.75)
            self.problem(key, f"is unknown, and {refused}", f"did you mean {near[0]}?" if near else fix)

    def ignored(self, key: str, known: Sequence[str], reason: str) -> None:
        """Record an unknown key that the tool ignores. ``reason``: such as "DeepSpeed ignores it"."""
        self._read.add(key)
        near = get_close_matches(key, known, n=1, cutoff=0.75)
        fix = f"did you mean {near[0]}?" if near else "remove it if it does nothing"
        self.diagnostics.ignored.append(Problem(_name(self.named(key)), f"is unknown: {reason}", fix))


def _name(key: str) -> str:
    """A user's key, shortened and printable on one line."""
    return bounded(key if key.isprintable() else ascii(key)[1:-1], 80)


def _use(near: Sequence[str], known: Sequence[str]) -> str:
    listed = ", ".join(known)
    return f"did you mean {near[0]}?" if near else f"use one of {listed}"
