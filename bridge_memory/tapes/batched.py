"""Many runs at once: numbers that are arrays with one entry per run, and how runs are divided at a branch.

The formulas of this project are written for numbers, and most of them serve arrays unchanged. Where one branches ("is
there tensor parallelism?") all runs of an array must take the same branch; else ``Differs`` is raised, and the caller
divides the runs by their values and evaluates each part again (``parts``). So no run ever takes a branch that it would
not take alone. Formulas that need the larger of two numbers, or one of two, use ``symbolic.largest`` and
``symbolic.chosen``, which do not branch.

Runs form a grid of three axes: parallel sizes, micro batches, and recomputation settings. Along each axis an array has
one entry or as many as the axis (numpy broadcasting), so that what depends only on parallel sizes is computed once for
all others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import Any

import numpy as np

from bridge_memory.tapes.symbolic import ceil_step, elementwise, round_step

AXES = 3


class Differs(Exception):
    """Runs take different branches. ``values``: of what they branch on, an array over the grid's axes."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Batched(np.ndarray):
    """A number of many runs, one entry per run."""

    def _one(self) -> Any:
        """The number as a plain one. Raises Differs unless it is the same in all runs."""
        plain = self.view(np.ndarray)
        first = plain.flat[0]
        if plain.size > 1 and not (plain == first).all():
            raise Differs(plain)
        return first.item()

    def __bool__(self) -> bool:
        plain = self.view(np.ndarray)
        if plain.dtype != np.bool_:
            plain = plain != 0
        if plain.all():
            return True
        if plain.any():
            raise Differs(plain)
        return False

    def __index__(self) -> int:
        return int(self._one())

    __int__ = __index__

    def __float__(self) -> float:
        return float(self._one())

    def __hash__(self) -> int:  # type: ignore[override]
        return 0  # so that dicts compare with ==, which may raise Differs

    def __round__(self, digits: None = None) -> Batched:
        return batched(_rounded(self))

    def __ceil__(self) -> Batched:
        return batched(_ceiled(self))

    def __format__(self, spec: str) -> str:
        return format(self.view(np.ndarray).flat[0].item(), spec)  # messages show the first run's number

    def __str__(self) -> str:
        return format(self, "")

    def __rmul__(self, other: Any) -> Any:
        if isinstance(other, (str, list, tuple)):  # as often as a flag or a number says
            return other * int(self)
        return np.ndarray.__rmul__(self, other)

    # ``a += b`` must make a new array, as it makes a new number: others may refer to the old one.
    __iadd__ = np.ndarray.__add__  # type: ignore[assignment]
    __isub__ = np.ndarray.__sub__  # type: ignore[assignment]
    __imul__ = np.ndarray.__mul__  # type: ignore[assignment]
    __ifloordiv__ = np.ndarray.__floordiv__  # type: ignore[assignment]
    __itruediv__ = np.ndarray.__truediv__  # type: ignore[assignment]
    __imod__ = np.ndarray.__mod__  # type: ignore[assignment]

    def where(self, yes: Any, no: Any) -> Batched:
        """``yes`` where this holds, else ``no``."""
        return batched(np.where(self, yes, no))


def batched(values: Any) -> Batched:
    return np.asarray(values).view(Batched)


def along(axis: int, values: Sequence[Any]) -> Batched:
    """``values`` along one axis of the grid."""
    shape = [1] * AXES
    shape[axis] = len(values)
    return batched(np.array(values).reshape(shape))


def _rounded(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.kind in "iu" else np.rint(value).astype(np.int64)


def _ceiled(value: np.ndarray) -> np.ndarray:
    return value if value.dtype.kind in "iu" else np.ceil(value).astype(np.int64)


def distinct(values: np.ndarray) -> np.ndarray:
    """Every number once, the smallest first. As ``np.unique``, which would import numpy's masked arrays."""
    ordered = np.sort(values, axis=None)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if ordered.size else ordered


def numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(every number once, the smallest first; the position of each value among these)."""
    few = distinct(values)
    return few, np.searchsorted(few, values)


def numbered_rows(rows: np.ndarray) -> tuple[list[tuple[Any, ...]], np.ndarray]:
    """(every row once, in order; the position of each row among these)."""
    known: dict[bytes, int] = {}
    kinds: list[tuple[Any, ...]] = []
    back = []
    for row in rows:
        number = known.setdefault(row.tobytes(), len(kinds))
        if number == len(kinds):
            kinds.append(tuple(row.tolist()))
        back.append(number)
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    places = np.empty(len(kinds), np.int64)
    places[order] = np.arange(len(kinds))
    return [kinds[i] for i in order], places[back]


def one_by_one(function: Callable[[Any], Any], values: np.ndarray) -> np.ndarray:
    """``function`` of every entry; called once for each distinct number."""
    numbers, back = numbered(values)
    found: np.ndarray = np.array([function(value) for value in numbers.tolist()])[back]
    return found


def _apply(name: str, left: Any, right: Any) -> Any:
    if name == "computed":
        return batched(one_by_one(left, np.asarray(right)))
    return batched(_BY_NAME[name](left, right))


_BY_NAME: dict[str, Callable[[Any, Any], Any]] = {"max": np.maximum, "min": np.minimum, "lcm": np.lcm}
elementwise[Batched] = _apply


def collapsed(values: np.ndarray) -> np.ndarray:
    """The same array with length 1 along each axis on which the numbers do not depend."""
    for axis in range(values.ndim):
        if values.shape[axis] > 1:
            first = values.take([0], axis)
            if (values == first).all():
                values = first
    return values


class Subgrid:
    """Some runs of a grid: positions along each axis."""

    __slots__ = ("_index", "positions")

    def __init__(self, positions: tuple[np.ndarray, ...]) -> None:
        self.positions = positions
        self._index: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.positions))

    def take(self, values: Any) -> Any:
        """The entries of these runs in an array over the whole grid; a plain number is returned as it is."""
        if not isinstance(values, np.ndarray) or values.ndim != AXES:
            return values
        for axis, at in enumerate(self.positions):
            if values.shape[axis] > 1 and values.shape[axis] != len(at):
                values = values.take(at, axis)
        return values

    def by_value(self, values: Any) -> Iterator[tuple[Subgrid, Any, Subgrid | None]]:
        """Divide by values: yields (a part with one value, the value, its positions inside this part or None if it is
        all of this part)."""
        if not isinstance(values, np.ndarray):
            yield self, values, None
            return
        first = values.flat[0]
        if values.size == 1 or (values == first).all():
            yield self, first.item(), None
            return
        for inside in whole(self.shape).divided(values):
            some = Subgrid(tuple(at[few] for at, few in zip(self.positions, inside.positions, strict=True)))
            for part, value, deeper in some.by_value(inside.take(values)):
                if deeper is not None:
                    inside_of = zip(inside.positions, deeper.positions, strict=True)
                    yield part, value, Subgrid(tuple(at[few] for at, few in inside_of))
                else:
                    yield part, value, inside

    @property
    def index(self) -> Any:
        """The index of these runs in an array over the whole grid."""
        if self._index is None:
            if all([len(at) and at[-1] - at[0] == len(at) - 1 for at in self.positions]):
                self._index = tuple([slice(at[0], at[-1] + 1) for at in self.positions])
            else:
                self._index = np.ix_(*self.positions)
        return self._index

    def divided(self, values: np.ndarray) -> list[Subgrid]:
        """Parts along one axis: that with the fewest (but more than one) distinct rows of ``values``."""
        best: tuple[int, int, np.ndarray] | None = None
        for axis in range(AXES):
            if values.shape[axis] > 1:
                rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
                kinds, back = numbered_rows(rows)
                if len(kinds) > 1 and (best is None or len(kinds) < best[0]):
                    best = len(kinds), axis, back
        assert best is not None, "values that do not differ"
        number, axis, back = best
        out = []
        for kind in range(number):
            positions = list(self.positions)
            positions[axis] = positions[axis][back == kind]
            out.append(Subgrid(tuple(positions)))
        return out


def whole(shape: Sequence[int]) -> Subgrid:
    return Subgrid(tuple(np.arange(n) for n in shape))


def parts(of: Subgrid, evaluate: Callable[[Subgrid], Any]) -> Iterator[tuple[Subgrid, Any]]:
    """(part, ``evaluate(part)``) for ``of``, divided wherever ``evaluate`` raises Differs."""
    todo = [of]
    while todo:
        part = todo.pop()
        try:
            result = evaluate(part)
        except Differs as differs:
            todo += part.divided(differs.values)[::-1]
            continue
        yield part, result


# ---- steps of traces, on plain arrays ----

_STEPS: dict[Any, Callable[[Any, Any], Any]] = {max: np.maximum, min: np.minimum, lcm: np.lcm}


def step(operation: Any, left: Any, right: Any) -> Any:
    """One step of a ShapeEnv, on arrays."""
    if operation in _OPERATORS:
        return operation(left, right)
    known = _STEPS.get(operation)
    if known is not None:
        return known(left, right)
    if operation is round_step:
        return _rounded(np.asarray(left))
    if operation is ceil_step:
        return _ceiled(np.asarray(left))
    return one_by_one(lambda value: operation(value, value), np.asarray(left))


_OPERATORS = frozenset((
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.lt,
    operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
))  # fmt: skip
