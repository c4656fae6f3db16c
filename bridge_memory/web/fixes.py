"""A refusal with its field and with changes to click: one or two options, each tried before it is offered."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from bridge_memory.arguments.as_typed import as_typed
from bridge_memory.plan.megatron.splits import NO_SPLIT
from bridge_memory.spec import SpecError
from bridge_memory.web.options import Option, by_called, options

#: Limits: changes offered in all, of one option, tried, and seconds of trying.
MOST, OF_ONE, TRIED, SECONDS = 4, 2, 24, 1.0
_FLAG = re.compile(r"--(?:no-)?([a-z][a-z0-9-]*)")
_TO = re.compile(r"(\w+) to ('[^']*'|[\w.]+)")
_NEEDS = re.compile(r"needs (\w+)")
_NUMBER = re.compile(r"\d{1,12}")
_OURS = {"gpu": "gpu", "model": "model", "megatron_args": "megatron_args", "config": "config"}

Question = Mapping[str, Any]
#: A question -> its refusal; None where it is answered.
Refuses = Callable[[Question], "SpecError | None"]


def untried(_: Question) -> SpecError:
    """For refusals without suggested changes."""
    return SpecError("not tried")


def refusal(error: SpecError, question: Question, refuses: Refuses) -> dict[str, Any]:
    """{field, fields, message, fix, changes} of a refused question; ``refuses`` tries changed ones."""
    raw = str(error)
    given = question.get("options")
    typed = [f"--{name}" for name in given] if isinstance(given, Mapping) else []
    if isinstance(question.get("megatron_args"), str):
        typed.append("--megatron-args")
    message = as_typed(raw, typed)
    fields = _fields(message, question)
    _, semicolon, fix = message.rpartition("; ")
    offered = list(_changes(raw, fields, question, refuses)) if isinstance(given, Mapping) else []
    return {
        "field": fields[0] if fields else None, "fields": fields, "message": message, "fix": fix if semicolon else "",
        "changes": offered,
    }  # fmt: skip


def _fields(message: str, question: Question) -> list[str]:
    """Options, and parts of the question, that a refusal names, in its order."""
    found = [name for name in _FLAG.findall(message) if name in options() or name in _OURS]
    for name in re.findall(r"[a-z][a-z_0-9]*", message):
        if name in by_called() and "_" in name:
            found.append(by_called()[name])
    if not found:
        word = re.match(r"\w+", message)
        if word and word[0] in _OURS:
            found.append(word[0])
        elif question.get("config") or "preset" in message:
            found.append("config" if question.get("config") else "model")
    return list(dict.fromkeys(found))


def _changes(raw: str, fields: list[str], question: Question, refuses: Refuses) -> Iterator[dict[str, Any]]:
    given = question["options"]
    tried: list[dict[str, Any]] = []
    offered: list[dict[str, Any]] = []
    of_one: Counter[str] = Counter()
    until = time.monotonic() + SECONDS
    for change in _candidates(raw, fields, given):
        # The refusal of a change may name what else is needed.
        for _ in range(3):
            whole = {**question, "options": changed(given, change)}
            if change in tried or whole["options"] == given:
                break
            tried.append(change)
            if of_one["+".join(change)] == OF_ONE:
                break
            error = refuses(whole)
            if error is None:
                same = {name: options()[name].default if value is None else value for name, value in change.items()}
                if same in offered:
                    break
                offered.append(same)
                of_one["+".join(change)] += 1
                yield {"label": label(change), "options": change}
                break
            more = _asked_for(str(error))
            if not more:
                break
            change = {**change, **more[0]}
        if of_one.total() == MOST or len(tried) >= TRIED or time.monotonic() > until:
            return


def changed(given: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with ``change`` applied; None removes an option."""
    return {name: value for name, value in {**given, **change}.items() if value is not None}


def label(change: Mapping[str, Any]) -> str:
    """A change in words. Layer splits that another one replaces are not mentioned."""
    split = {by_called()[name] for name in NO_SPLIT}
    if any(change.get(name) is not None for name in split):
        change = {name: value for name, value in change.items() if name not in split or value is not None}
    return ", ".join(_flag_words(options()[name], value) for name, value in change.items())


def _flag_words(option: Option, value: Any) -> str:
    flag = f"--{option.name}"
    if value is None:
        return f"drop {flag}"
    if value is True or value is False:
        return f"add {flag}" if value else f"--no-{option.name}"
    return f"{flag} {','.join(map(str, value)) if isinstance(value, list) else value}"


def _candidates(raw: str, fields: list[str], given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Changes that the refusal asks for, then other values of the fields that it names: nearest first, fields in
    turn."""
    yield from _asked_for(raw)
    numbers = [int(n) for n in _NUMBER.findall(raw)]
    known = [options()[name] for name in fields if name in options() and options()[name].group != "model"]
    for together in zip_longest(*(_values(option, given.get(option.name), numbers) for option in known)):
        for option, change in zip(known, together, strict=True):
            if change is not None:
                yield {option.name: change[0]}


def _values(option: Option, value: Any, numbers: list[int]) -> Iterator[tuple[Any]]:
    """Other values of one option, each in a tuple."""
    if option.kind == "integer":
        yield from ((n,) for n in _integers(value if type(value) is int else option.default, numbers))
    elif option.kind == "switch":
        yield (not (option.default if value is None else value),)
    elif option.kind == "choice":
        yield from ((choice,) for choice in option.choices if choice != value)
    if value is not None:
        yield (None,)


def _asked_for(raw: str) -> list[dict[str, Any]]:
    """Options that a refusal says should be set: all together, then one by one."""
    before, _, fix = raw.rpartition(";")
    needed = _NEEDS.search(before)
    found: dict[str, Any] = {}
    for name, value in _TO.findall(fix):
        if name in ("it", "that") and needed:
            name = needed[1]
        option = options().get(by_called().get(name, ""))
        if option is not None:
            found[option.name] = _read(option, value.strip("'"))
    split = {by_called()[name] for name in NO_SPLIT}
    if found.keys() & split:  # One layer split replaces another.
        found = {**dict.fromkeys(sorted(split - found.keys())), **found}
        return [found]
    return [found, *({name: value} for name, value in found.items())] if len(found) > 1 else [found] if found else []


def _read(option: Option, text: str) -> Any:
    if option.kind == "integer" and text.isdecimal():
        return int(text)
    return {"True": True, "False": False, "None": None}.get(text, text)


def _integers(value: Any, numbers: list[int]) -> list[int]:
    """Numbers near ``value``: powers of two, its neighbours, those of the refusal, and multiples of these."""
    near = value if type(value) is int and 0 < value < 1 << 24 else 1
    numbers = [n for n in numbers if n < 1 << 24]
    found = {1 << n for n in range(14)} | {n for n in numbers if 0 < n <= 1 << 24} | {near - 1, near + 1, 3, 6, 12}
    for n in numbers:
        if 1 < n <= near:
            found |= {near // n * n, -(-near // n) * n, n * 2}
    found -= {near, 0}
    nearest = sorted((n for n in found if n > 0), key=lambda n: (max(n, near) / min(n, near), -n))
    below, above = [n for n in nearest if n < near], [n for n in nearest if n > near]
    # Alternates below and above, so that both are offered.
    return [n for pair in zip_longest(below[:12], above[:12]) for n in pair if n is not None]
