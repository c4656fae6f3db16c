"""Unmodelled features: options of a run that change memory and that no formula covers. Each is always reported."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple


class Effect(str, Enum):
    """The direction in which an unmodelled feature can move the peak."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Unmodelled(str):
    """A sentence that names an unmodelled feature, with its effect on the peak.

    ``not_modelled`` of a model, run or estimate is a tuple of sentences. A plain ``str`` among them has an unknown
    effect (``as_feature``).

    Attributes:
        effect: The direction in which it moves the peak.
        order: Its order of magnitude, in words: a formula, or a quantity of about the same size.
        least: Lower bound, in bytes on every rank, of the change of the peak. None: unknown. 0 by default for UP.
        most: Upper bound, likewise. 0 by default for DOWN.
        outside: Whether ``torch.cuda.max_memory_allocated`` of training steps leaves it out: memory outside torch's
            allocator, or used while a checkpoint is saved.
        of_job: Whether a whole job counts it (``job.Job``), within these bounds.
    """

    effect: Effect
    order: str
    least: int | None
    most: int | None
    outside: bool
    of_job: bool

    def __new__(
        cls,
        sentence: str,
        effect: Effect,
        *,
        order: str,
        least: int | None = None,
        most: int | None = None,
        outside: bool = False,
        of_job: bool = False,
    ) -> Unmodelled:
        feature = super().__new__(cls, sentence)
        feature.effect = effect
        feature.order = order
        feature.least = 0 if least is None and effect is Effect.UP else least
        feature.most = 0 if most is None and effect is Effect.DOWN else most
        feature.outside, feature.of_job = outside, of_job
        return feature

    def __getnewargs_ex__(self) -> tuple[tuple[str, Effect], dict[str, str | int | bool | None]]:
        """The arguments from which pickle and copy rebuild it."""
        names = ("order", "least", "most", "outside", "of_job")
        return (str(self), self.effect), {name: getattr(self, name) for name in names}


class NoEffect(str):
    """A sentence, among the assumptions, about an option of the user's that does nothing."""

    __slots__ = ()


#: Orders that several readers use. UNKNOWN_SIZE is also that of a user's own code.
UNKNOWN_SIZE = "size unknown"
ENCODER = "some 18 bytes for each of its parameters that train, 2 for the others, and its activations"
ADAPTERS = "some 18 bytes for each weight of the adapters, and their inputs"


def as_feature(sentence: str) -> Unmodelled:
    """``sentence`` as an Unmodelled: itself if it is one, else with unknown effect and size."""
    return sentence if isinstance(sentence, Unmodelled) else Unmodelled(sentence, Effect.UNKNOWN, order=UNKNOWN_SIZE)


class Bounds(NamedTuple):
    """Bounds of a number of bytes; None: no bound is known."""

    least: int | None
    most: int | None


def bounds(nbytes: int, not_modelled: Iterable[str]) -> Bounds:
    """Bounds of ``nbytes`` after the effects of all ``not_modelled``; repeated sentences count once."""
    least: int | None = nbytes
    most: int | None = nbytes
    for feature in map(as_feature, dict.fromkeys(not_modelled)):
        least = None if least is None or feature.least is None else least + feature.least
        most = None if most is None or feature.most is None else most + feature.most
    return Bounds(None if least is None else max(0, least), most)

