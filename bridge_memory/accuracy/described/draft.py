"""What a row has said so far, and the phrases that its texts are read with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bridge_memory.releases import parse_release
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import finite
from bridge_memory.spec.fields import Rule, called, rules_of
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.unmodelled import Effect, Unmodelled

#: A text that is longer is prose, not a value.
_LONGEST = 1000


class UnknownWord(SpecError):
    """A word of a row that is not in the vocabulary: the row is not read."""

    def __init__(self, where: str, word: object) -> None:
        super().__init__(f"{where}: the word {show(word)} is not known; add it to accuracy/described")


def word_of(key: object) -> str:
    """A key in one spelling: small, with underscores."""
    return re.sub(r"[^a-z0-9]+", "_", str(key).strip().lower()).strip("_")


@dataclass
class Draft:
    """Fields by their full names ("parallel.world_size"), as the row states them, and facts without one."""

    stated: dict[str, Any] = field(default_factory=dict)
    #: Fields of the model that the row changes.
    model: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    unmodelled: list[Unmodelled] = field(default_factory=list)
    #: Facts without a field: "layers", "heads", "data parallel size", "stage" ...
    facts: dict[str, Any] = field(default_factory=dict)
    #: Whether experts, which hold most weights of their model, stay in bf16 under a precision of less.
    experts_in_bf16: bool = False

    def state(self, name: str, value: Any) -> None:
        """Raises SpecError where the row has said something else."""
        self._put(self.stated, name, value)

    def fact(self, name: str, value: Any) -> None:
        self._put(self.facts, name, value)

    def change_model(self, name: str, value: Any) -> None:
        self._put(self.model, name, value)

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def leave_out(self, sentence: str, effect: Effect, order: str, **bounds: Any) -> None:
        """An unmodelled feature, by name."""
        if sentence not in self.unmodelled:
            self.unmodelled.append(Unmodelled(sentence, effect, order=order, **bounds))

    @staticmethod
    def _put(into: dict[str, Any], name: str, value: Any) -> None:
        before = into.setdefault(name, value)
        if before != value:
            raise SpecError(f"{name.rpartition('.')[2]} is stated as {show(before)} and as {show(value)}; correct one")


# --------------------------------------------------------------------------------------------------
# Phrases
# --------------------------------------------------------------------------------------------------

Action = Callable[[Draft, "re.Match[str]"], None]


class Phrase(NamedTuple):
    """A general rule: words, and what they say of a run."""

    pattern: re.Pattern[str]
    action: Action


def phrase(pattern: str, action: Action | None = None, /, **fields: Any) -> Phrase:
    """Words and what they state: ``action``, or fields of a RunSpec ("group__field"); neither: nothing for memory."""

    def states(draft: Draft, match: re.Match[str]) -> None:
        for name, value in fields.items():
            draft.state(name.replace("__", "."), value)

    return Phrase(re.compile(rf"(?:{pattern})(?![a-z0-9_])"), action or states)


#: What stands between phrases, and words that only join them.
_BETWEEN = re.compile(
    r"(?:[\s,;:+/()\[\]{}'\"|&=]+|\.(?!\d)|-(?=\s)|(?:and|with|of|the|a|an|in|on|at|by|for|all|only|each|per|to|is|are|"
    r"as|default|defaults|launcher|stock|own|ones?|every|used?|using|enabled|no extra|etc)(?![a-z0-9_]))"
)
_WORD = re.compile(r"[a-z0-9_.%-]+|.", re.DOTALL)


def read_phrases(text: object, phrases: Sequence[Phrase], draft: Draft, where: str) -> None:
    """Every word of ``text``, the longest phrase first. Raises UnknownWord for one that no phrase has."""
    for word in unread_words(text, phrases, draft, where):
        raise UnknownWord(where, word)


def unread_words(text: object, phrases: Sequence[Phrase], draft: Draft, where: str) -> list[str]:
    """Read what is known of ``text``; the words that no phrase has, in their order."""
    if not isinstance(text, str):
        raise SpecError(f"{where} ({show(text)}) is not text; give words")
    if len(text) > _LONGEST:
        raise SpecError(f"{where} has {len(text)} characters; give at most {_LONGEST}")
    text, at = text.lower(), 0
    unread = []
    while at < len(text):
        between = _BETWEEN.match(text, at)
        found = [(m, p) for p in phrases if (m := p.pattern.match(text, at)) and m.end() > at]
        if found:
            match, best = max(found, key=lambda pair: pair[0].end())
            best.action(draft, match)
            at = match.end()
        elif between:
            at = between.end()
        else:
            word = _WORD.match(text, at)
            assert word is not None
            unread.append(word.group())
            at = word.end()
    return unread


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------

_YES, _NO = ("true", "on", "yes", "1", "enabled"), ("false", "off", "no", "0", "none", "null", "disabled")
_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+|\d{1,15}")


def as_flag(value: object, where: str) -> bool:
    words = str(value).strip().lower()
    if isinstance(value, (bool, int, float, str)) and words in (*_YES, "1.0"):
        return True
    if isinstance(value, (bool, int, float, str)) and words in (*_NO, "0.0"):
        return False
    raise UnknownWord(where, value)


def as_integer(value: object, where: str) -> int:
    """An integer, also as text ("8,192", "32k" of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    words = value.strip().lower() if isinstance(value, str) else ""
    if _NUMBER.fullmatch(words):
        return int(words.replace(",", ""))
    if words.endswith("k") and _NUMBER.fullmatch(words[:-1]):
        return int(words[:-1]) * 1024
    raise SpecError(f"{where} ({show(value)}) is not an integer; give one")


def as_number(value: object, where: str) -> float:
    if not finite(value):
        raise SpecError(f"{where} ({show(value)}) is not a number; give one")
    assert isinstance(value, (int, float))
    return float(value)


def as_names(value: object, where: str) -> tuple[str, ...]:
    """Names, as a list or as text ("[moe, mlp]")."""
    items = re.split(r"[\s,;/+]+", value.strip(" []()")) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
        raise SpecError(f"{where} ({show(value)}) is not a list of names; give one")
    return tuple(i.strip().lower() for i in items if i.strip())


def _fields() -> dict[str, tuple[str, Rule]]:
    """Name of an option -> (full name of the field, its rule); of a name in two groups that of the first."""
    found: dict[str, tuple[str, Rule]] = {}
    for group, cls in GROUPS.items():
        for name, rule in rules_of(cls).items():
            found.setdefault(called(cls, name), (f"{group}.{name}", rule))
    return found


FIELDS = _fields()


def state_field(draft: Draft, name: str, value: object) -> None:
    """An option by Megatron's own name. Raises SpecError for a value that is not of its type."""
    full, rule = FIELDS[name]
    if bool in rule.types:
        draft.state(full, as_flag(value, name))
    elif rule.release:
        draft.state(full, parse_release(str(value), name))
    elif tuple in rule.types:
        draft.state(full, as_names(value, name))
    elif str in rule.types:
        if not isinstance(value, str):
            raise SpecError(f"{name} ({show(value)}) is not a name; give one")
        words = value.strip()
        known = {n.lower(): n for n in rule.names}
        draft.state(full, known.get(words.lower(), words))
    elif float in rule.types:
        draft.state(full, as_number(value, name))
    else:
        draft.state(full, as_integer(value, name))
