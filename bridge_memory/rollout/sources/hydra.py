"""Hydra's and OmegaConf's way of writing a configuration: dotted overrides and interpolations, read without either.

Source: hydra 1.3 ``core/override_parser`` (``key=value``, ``+key=value``, ``++key=value``, ``~key``), omegaconf 2.3
``resolvers/oc`` (``oc.select``), and the interpolations that verl and NeMo-RL write.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from bridge_memory.files import Unparsed, parse_yaml
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded, show

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.\-/@]*)(?:=(.*))?", re.DOTALL)
#: Letters of a command with its variables put in, and of the line that sets one.
_LONGEST_COMMAND, _LONGEST_VALUE = 100_000, 4_000
_ARRAY = re.compile(r"[ \t]*(\w{1,60})\+?=\(")
_ASSIGNED = re.compile(r"[ \t]*(?:export[ \t]+)?(\w{1,60})=(.*)")
#: Interpolations inside of one another.
_DEEPEST = 12
#: Names of a table inside of one another.
_DEEPEST_TABLE = 24


def flat(table: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Dotted names with their values; an empty table is a value. Raises SpecError."""
    if depth > _DEEPEST_TABLE:
        raise SpecError("the configuration is nested too deeply; give the one that the trainer reads")
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, name, depth + 1)
        else:
            yield name, value


def overrides(words: Iterable[str]) -> list[tuple[str, Any, str]]:
    """(dotted name, value, mark) of each override; ``mark``: "", "+", "++" or "~". Raises SpecError."""
    found = []
    for word in words:
        match = _OVERRIDE.fullmatch(word.strip())
        if match is None or (match[3] is None and match[1] != "~"):
            raise SpecError(f"{show(word)} is no override; give KEY=VALUE, as on the trainer's command line")
        found.append((match[2], None if match[3] is None else scalar(match[3], match[2]), match[1]))
    return found


def scalar(text: str, name: str) -> Any:
    """A value as Hydra reads it: YAML, and what is no YAML as the text itself."""
    text = text.strip()
    if text.startswith("${"):
        return text
    try:
        value = parse_yaml(text)
    except Unparsed:
        return text.strip("'\"")
    except ImportError:
        raise SpecError(f"{name}: YAML needs PyYAML; pip install pyyaml") from None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value


def words_of_script(text: str, entry: str) -> list[str]:
    """The overrides of a launch script, as ``command_of_script`` finds them."""
    return [word for word in command_of_script(text, entry) if "=" in word or word.startswith("~")]


def command_of_script(text: str, entry: str) -> list[str]:
    """The words of a launch script after ``entry`` (a module or script), up to the command's end, with variables and
    arrays that the script sets put in. Raises SpecError where there is none."""
    joined = re.sub(r"\\[ \t]*\n", " ", re.sub(r"(?m)^[ \t]*#.*$", "", text.replace("\r\n", "\n")))
    variables: dict[str, str] = {}
    arrays: dict[str, str] = {}
    filled: str | None = None  # the array whose lines these are
    for line in joined.split("\n"):
        if filled is None and (match := _ARRAY.match(line)):
            filled, line = match[1], line[match.end() :]
            arrays.setdefault(filled, "")
        if filled is not None:
            # A command in the array has a bracket of its own.
            body, closed, _ = re.sub(r"\$\([^()]{0,200}\)", "", line).partition(")")
            arrays[filled] = _short(f"{arrays[filled]} {body.partition(' #')[0]}")
            filled = None if closed else filled
            continue
        if len(line) <= _LONGEST_VALUE and (match := _ASSIGNED.match(line)):
            value = re.split(r"\s#|;\s*$", match[2].strip())[0].strip()
            variables[match[1]] = _short(_plain(_shell(value, variables)))
        if entry in line:
            command = _short(line[line.index(entry) + len(entry) :])
            command = re.sub(r"\"?\$\{(\w{1,60})\[@\]\}\"?", lambda m: arrays.get(m[1], ""), command)
            command = re.split(r"\s(?:\||>|2>|&&|;)", command)[0]
            try:
                return shlex.split(_short(_shell(command, variables)), comments=True)
            except ValueError as error:
                raise SpecError(f"the script's call of {entry} is not a command: {error}; give KEY=VALUE") from None
    raise SpecError(f"the script does not call {entry}; give the script that starts the trainer, or KEY=VALUE")


def _short(text: str) -> str:
    """``text``, unless variables made it longer than a command is."""
    if len(text) > _LONGEST_COMMAND:
        raise SpecError("the script's command is longer than any trainer's; give KEY=VALUE")
    return text


def _plain(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _shell(text: str, variables: Mapping[str, str]) -> str:
    """Variables and integer arithmetic of a shell, put in."""
    text = re.sub(r"\$\{(\w{1,60}):-([^}]{0,400})\}", lambda m: variables.get(m[1]) or _shell(m[2], variables), text)
    text = re.sub(r"\$\{(\w{1,60})\}|\$(\w{1,60})", lambda m: variables.get(m[1] or m[2], m[0]), text)
    return re.sub(r"\$\(\(([\d\s+*/()-]{1,80})\)\)", lambda m: str(_arithmetic(m[1])), text)


def _arithmetic(text: str) -> int | str:
    """Sums and products of whole numbers; the text where it is none."""
    tokens = re.findall(r"\d+|[-+*/()]", text)
    at = 0

    def atom() -> int:
        nonlocal at
        token = tokens[at]
        at += 1
        if token == "(":
            value = total()
            at += 1
            return value
        return -atom() if token == "-" else int(token)

    def product() -> int:
        nonlocal at
        value = atom()
        while at < len(tokens) and tokens[at] in "*/":
            at += 1
            value = value * atom() if tokens[at - 1] == "*" else value // atom()
        return value

    def total() -> int:
        nonlocal at
        value = product()
        while at < len(tokens) and tokens[at] in "+-":
            sign = 1 if tokens[at] == "+" else -1
            at += 1
            value += sign * product()
        return value

    try:
        return total()
    except (IndexError, ValueError, ZeroDivisionError):
        return f"$(({text}))"


class Options:
    """Options of a trainer by dotted name, with interpolations resolved when they are read, and a list of which were.

    ``defaults``: every option that the release has.
    """

    def __init__(self, defaults: Mapping[str, Any], name: str, sections: Collection[str] = ()) -> None:
        """``sections``: further ones, of which no option is listed."""
        self._values = dict(defaults)
        self._defaults = dict(defaults)
        self._name, self._sections = name, sections
        self._read: set[str] = set()
        self.given: dict[str, Any] = {}

    def update(self, values: Iterable[tuple[str, Any]]) -> None:
        """Put values over what is there: a table in place of an option's parts leaves those that it does not name."""
        for name, value in values:
            self._values[name] = value
            self.given[name] = value

    def override(self, words: Iterable[str]) -> None:
        """Overrides of a command line. Raises SpecError for an option that the release does not have."""
        for name, value, mark in overrides(words):
            if mark == "~":
                self._values.pop(name, None)
                continue
            if isinstance(value, Mapping):
                self.update(flat(value, name))
                continue
            if not mark and not self._known(name):
                near = get_close_matches(name, self._defaults, n=1, cutoff=0.8)
                meant = f"did you mean {near[0]}?" if near else "write +KEY=VALUE for one that you add"
                raise SpecError(f"{bounded(name, 80)} is no option of {self._name}; {meant}")
            self.update([(name, value)])

    def _known(self, name: str) -> bool:
        if name in self._defaults or name in self._values:
            return True
        parents = name.split(".")
        tables = [".".join(parents[:n]) for n in range(1, len(parents))]
        # A table that is empty by default takes any name.
        return any(self._defaults.get(t, None) == {} for t in tables) or parents[0] in self._sections

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an option."""
        self._read.add(name)
        return self._resolved(name, self._values.get(name, default), 0)

    def table(self, prefix: str) -> dict[str, Any]:
        """All values under a name."""
        found = {}
        for name in list(self._values):
            if name.startswith(f"{prefix}."):
                found[name.removeprefix(f"{prefix}.")] = self.get(name)
        self._read.add(prefix)
        return found

    def unread(self) -> list[str]:
        """Options with another value than the release's, which nothing asked for."""
        return [
            name
            for name, value in self.given.items()
            if name not in self._read
            and value != self._defaults.get(name, ...)
            and not (value is None and name not in self._defaults)
        ]

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number, or None. Raises SpecError."""
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise SpecError(f"{name} ({show(value)}) is no whole number of {least} or more; give one")
        return value

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number, or None. Raises SpecError."""
        value = self.get(name, default)
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, bool) else float("nan")
        except (TypeError, ValueError):
            number = float("nan")
        if number != number:
            raise SpecError(f"{name} ({show(value)}) is no number; give one")
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch. Raises SpecError."""
        value = self.get(name, default)
        if value is None:
            return default
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if type(value) is not bool:
            raise SpecError(f"{name} ({show(value)}) is neither True nor False; give one")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A word. Raises SpecError."""
        value = self.get(name, default)
        if value is None:
            return default
        if not isinstance(value, str | int | float):
            raise SpecError(f"{name} ({show(value)}) is no word; give one")
        return str(value)

    def _resolved(self, name: str, value: Any, depth: int) -> Any:
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > _DEEPEST:
            raise SpecError(f"{name} refers to itself; correct its interpolation")
        text = value.strip()
        whole = _whole(text)
        if whole is None:
            return text  # Part of a text: a path or a name, which moves no memory.
        return self._interpolated(name, whole, depth)

    def _interpolated(self, name: str, inside: str, depth: int) -> Any:
        if inside.startswith("oc.select:"):
            key, _, default = _split(inside.removeprefix("oc.select:"))
            found = self._at(_absolute(key.strip(), name), depth)
            if found is not None:
                return found
            return self._resolved(name, scalar(default, name) if default.strip() else None, depth + 1)
        if inside.startswith(("mul:", "div:", "add:")):
            operation, _, rest = inside.partition(":")
            first, _, second = _split(rest)
            numbers = [self._resolved(name, scalar(part, name), depth + 1) for part in (first, second)]
            if any(type(n) not in (int, float) for n in numbers):
                raise SpecError(f"{name} ({show(inside)}) multiplies what is no number; correct it")
            if operation == "div":
                return numbers[0] // numbers[1] if numbers[1] else None
            return numbers[0] * numbers[1] if operation == "mul" else numbers[0] + numbers[1]
        if ":" in inside:
            return None  # a resolver of the environment
        return self._at(_absolute(inside.strip(), name), depth)

    def _at(self, name: str, depth: int) -> Any:
        return self._resolved(name, self._values.get(name), depth + 1)


def _whole(text: str) -> str | None:
    """What is inside of an interpolation that is all of a text."""
    if not (text.startswith("${") and text.endswith("}")):
        return None
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth and letter == "}" and at < len(text) - 1:
            return None
    return text[2:-1]


def _split(text: str) -> tuple[str, str, str]:
    """At the first comma that is in no interpolation."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            return text[:at], ",", text[at + 1 :]
    return text, "", ""


def _absolute(key: str, name: str) -> str:
    """A name that starts with dots is relative to the table of ``name``."""
    up = len(key) - len(key.lstrip("."))
    if not up:
        return key
    parts = name.split(".")
    return ".".join([*parts[: max(0, len(parts) - up)], key.lstrip(".")])
