"""What a run asks for and no formula covers: a sentence with how it can move the peak. Never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Effect(str, Enum):
    """Where something that is not modelled can move the peak."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"
    #: Nobody here knows.
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Unmodelled(str):
    """A sentence that names what is not modelled, and how it can move the peak.

    Lists of what is not modelled are lists of sentences; a sentence that is none of these may move the peak anywhere.

    ``order``: how large it is, in words: its formula, or what is about as large. ``least``, ``most``: bytes, on every
    rank, between which it moves the peak; None where no bound is known. What can only add moves it by 0 at least, what
    can only save by 0 at most. ``outside``: it is not in what torch reports of training steps: memory outside its
    allocator, or of a checkpoint that is saved.
    """

    effect: Effect
    order: str
    least: int | None
    most: int | None
    outside: bool

    def __new__(
        cls,
        sentence: str,
        effect: Effect,
        *,
        order: str,
        least: int | None = None,
        most: int | None = None,
        outside: bool = False,
    ) -> Unmodelled:
        feature = super().__new__(cls, sentence)
        feature.effect = effect
        feature.order = order
        feature.least = 0 if least is None and effect is Effect.UP else least
        feature.most = 0 if most is None and effect is Effect.DOWN else most
        feature.outside = outside
        return feature

    def __getnewargs_ex__(self) -> tuple[tuple[str, Effect], dict[str, str | int | bool | None]]:
        """What a copy is made of."""
        names = ("order", "least", "most", "outside")
        return (str(self), self.effect), {name: getattr(self, name) for name in names}


#: The order of what nobody here knows, or of what is of the user's own making; of what several lists name.
UNKNOWN_SIZE = "nobody here knows how large"
ENCODER = "some 18 bytes for each of its parameters that train, 2 for the others, and its activations"
ADAPTERS = "some 18 bytes for each weight of the adapters, and their inputs"


def as_feature(sentence: str) -> Unmodelled:
    """``sentence`` itself where it says how it moves the peak; else a gap of unknown effect."""
    return sentence if isinstance(sentence, Unmodelled) else Unmodelled(sentence, Effect.UNKNOWN, order=UNKNOWN_SIZE)


class Bounds(NamedTuple):
    """Bytes between which a number lies; None where no bound is known."""

    least: int | None
    most: int | None


def bounds(nbytes: int, not_modelled: Iterable[str]) -> Bounds:
    """Between what ``nbytes`` lie once everything that is ``not_modelled`` has moved them; each counts once."""
    least: int | None = nbytes
    most: int | None = nbytes
    for feature in map(as_feature, dict.fromkeys(not_modelled)):
        least = None if least is None or feature.least is None else least + feature.least
        most = None if most is None or feature.most is None else most + feature.most
    return Bounds(None if least is None else max(0, least), most)

