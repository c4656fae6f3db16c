"""Sizes that remember how they were worked out, so that one recording serves every run of the same shape.

A block is recorded with the numbers of one run, but its sizes are ``SymInt``s: integers that note each operation made
on them. Whatever the recording decides by a size (is there tensor parallelism, do the heads divide) is a question, and
the questions with their answers lead to what was recorded, as a path in a tree of ``_Branch``es. Another run asks the
same questions; where all answers agree its recording would be the same but for the numbers, and those follow from the
notes (``Traces.find``) without recording anything.

Notes are steps over registers. They hold for arrays as well as for numbers: nothing in them but ``+ - * // % /``,
``max``, ``min``, ``ceil``, ``round`` and named functions of sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import ceil, lcm
from typing import Any, NamedTuple

from bridge_memory.spec.parts import RECOMPUTE_MODULES

#: What a recording may depend on beside its settings: Megatron's sizes and the padded vocabulary, and then, as 0 or 1,
#: what is switched on: sequence parallelism, full recomputation (of MTP depths; of any layer) and every module of
#: selective recomputation.
SIZES = ("seq", "batch", "tp", "cp", "ep", "etp", "padded_vocab")
DIMENSIONS = (*SIZES, "sp", "mtp_recomputed", "recomputes_fully", *RECOMPUTE_MODULES)
#: Answers that are kept of one block, each for other dimensions.
MOST_KEPT = 256

Operation = Callable[[Any, Any], Any]
#: (operation, left, right) -> the operation on these.
Operation3 = Callable[[Any, Any, Any], Any]


#: (operation, left, right): what a register holds is ``operation(left, right)`` of two others, or the constant ``left``
#: where there is no operation.
Step = tuple[Operation | None, Any, int]
#: Steps by column, as they are kept: every register, every operation, every left, every right; empty without steps.
Columns = tuple[tuple[Any, ...], ...]


def ceil_step(value: Any, _: Any) -> Any:
    return ceil(value)


def round_step(value: Any, _: Any) -> Any:
    return round(value)


class SymInt:
    """A whole number (or, on the way to one, a fraction) and the register that holds it.

    Operators note a step, comparisons and truth note a question. A plain 0 stays a plain 0: what is not there has no
    size.
    """

    __slots__ = ("env", "register", "value")

    def __init__(self, env: ShapeEnv, register: int, value: Any) -> None:
        self.env = env
        self.register = register
        self.value = value

    def __add__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else self.env.step(operator.add, self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self if type(other) is int and other == 0 else self.env.step(operator.sub, self, other)

    def __rsub__(self, other: Any) -> Any:
        return self.env.step(operator.sub, other, self)

    def __mul__(self, other: Any) -> Any:
        if type(other) is not SymInt:
            if other == 1:
                return self
            if type(other) is int and other == 0:
                return 0
        return self.env.step(operator.mul, self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is int and other == 1:
            return self
        return self.env.step(operator.floordiv, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.env.step(operator.floordiv, other, self)

    def __truediv__(self, other: Any) -> Any:
        return self.env.step(operator.truediv, self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self.env.step(operator.truediv, other, self)

    def __mod__(self, other: Any) -> Any:
        return self.env.step(operator.mod, self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.env.step(operator.mod, other, self)

    def __pow__(self, power: int) -> Any:
        return self if power == 1 else self * self ** (power - 1)

    def __neg__(self) -> Any:
        return self.env.step(operator.sub, 0, self)

    def __round__(self) -> Any:
        return self.env.step(round_step, self, self)

    def __ceil__(self) -> Any:
        return self.env.step(ceil_step, self, self)

    def __lt__(self, other: Any) -> bool:
        return self.env.guard(operator.lt, self, other)

    def __le__(self, other: Any) -> bool:
        return self.env.guard(operator.le, self, other)

    def __gt__(self, other: Any) -> bool:
        return self.env.guard(operator.gt, self, other)

    def __ge__(self, other: Any) -> bool:
        return self.env.guard(operator.ge, self, other)

    def __eq__(self, other: object) -> bool:
        return self.env.guard(operator.eq, self, other)

    def __ne__(self, other: object) -> bool:
        return self.env.guard(operator.ne, self, other)

    def __bool__(self) -> bool:
        return self.env.guard(operator.ne, self, 0)

    def __index__(self) -> int:
        """The number itself, where code needs it: the recording then serves this number only."""
        self.env.add_guard(self)
        return int(self.value)

    __int__ = __index__

    def is_on(self) -> bool:
        """Whether a switch among DIMENSIONS is on: a question."""
        self.env.add_guard(self)
        return bool(self.value)

    def __hash__(self) -> int:
        return self.register

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"Size({self.value} = {self.env.formula(self)})"

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def largest(first: Any, *others: Any) -> Any:
    """``max`` as a step instead of a question."""
    for other in others:
        first = _noted(max, first, other)
    return first


def smallest(first: Any, *others: Any) -> Any:
    """``min`` as a step instead of a question."""
    for other in others:
        first = _noted(min, first, other)
    return first


def computed(function: Callable[[Any], Any], size: Any) -> Any:
    """``function`` of a size as one step, for mathematics that is not whole-number arithmetic.

    Equal functions (a ``functools.partial`` is equal to itself only) are one step, so keep hold of them.
    """
    if type(size) is not SymInt:
        apply = elementwise.get(type(size))
        return function(size) if apply is None else apply("computed", function, size)
    return size.env.step(_OfOne(function), size, size)


class _OfOne:
    """A function of one size in the form of a step's operation."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any, _: Any) -> Any:
        return self.function(value)


def chosen(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``: of arrays entry by entry, of a size a question."""
    if type(condition) is SymInt:
        return yes if condition.is_on() else no
    where = getattr(condition, "where", None)
    if where is None:
        return yes if condition else no
    return where(yes, no)


def somewhere(value: Any) -> bool:
    """Whether it is not zero, of an array anywhere."""
    anywhere = getattr(value, "any", None)
    return bool(value) if anywhere is None else bool(anywhere())


def common_multiple(first: Any, other: Any) -> Any:
    """``math.lcm`` of two."""
    return _noted(lcm, first, other)


#: Type of arrays -> its (name of an operation, left, right): what ``largest`` and the others do with arrays.
elementwise: dict[type, Callable[[str, Any, Any], Any]] = {}


def _noted(operation: Operation, left: Any, right: Any) -> Any:
    a, b = type(left), type(right)
    if a is SymInt or b is SymInt:
        env = left.env if a is SymInt else right.env
        return env.step(operation, left, right)
    if elementwise:
        apply = elementwise.get(a) or elementwise.get(b)
        if apply is not None:
            return apply(operation.__name__, left, right)
    return operation(left, right)


class ShapeEnv:
    """What one recording notes: the steps of its sizes, and its questions in order, each once."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        self.steps: list[Step | None] = [None] * len(DIMENSIONS)
        self.sizes = [SymInt(self, i, value) for i, value in enumerate(dimensions)]
        self._known: dict[tuple[Any, Any, Any], SymInt] = {}
        self._constants: dict[Any, int] = {}
        #: (register of the question, the answer), in the order in which they were asked.
        self.guards: dict[int, Any] = {}

    def step(self, operation: Operation, left: Any, right: Any) -> SymInt:
        a, x = (left.register, left.value) if type(left) is SymInt else (self._constant(left), left)
        b, y = (right.register, right.value) if type(right) is SymInt else (self._constant(right), right)
        step = operation, a, b
        found = self._known.get(step)
        if found is None:
            found = self._known[step] = SymInt(self, len(self.steps), operation(x, y))
            self.sizes.append(found)
            self.steps.append(step)
        return found

    def let_go(self) -> None:
        """Free the sizes: each knows these notes, so that otherwise both wait for the garbage collector."""
        self.sizes.clear()
        self._known.clear()

    def constant(self, value: Any) -> SymInt:
        """A plain number as a size."""
        return self.sizes[self._constant(value)]

    def _constant(self, value: Any) -> int:
        key = value if type(value) is int else (type(value), value)  # 1.0 and True are equal to 1
        register = self._constants.get(key)
        if register is None:
            register = self._constants[key] = len(self.steps)
            self.steps.append((None, value, 0))
            self.sizes.append(SymInt(self, register, value))
        return register

    def guard(self, operation: Operation, left: SymInt, right: Any) -> bool:
        answer = self.step(operation, left, right)
        self.add_guard(answer)
        return bool(answer.value)

    def add_guard(self, size: SymInt) -> None:
        if size.register not in self.guards:
            self.guards[size.register] = size.value

    def needed(self, registers: Sequence[int], computed: set[int]) -> Columns:
        """Steps in order that fill ``registers``, without those that are ``computed``, to which they are added; so are
        the dimensions that they start from."""
        todo, wanted = list(registers), set()
        while todo:
            register = todo.pop()
            if register in computed or register in wanted:
                continue
            step = self.steps[register]
            if step is None:
                computed.add(register)
                continue
            wanted.add(register)
            if step[0] is not None:
                todo += step[1:]
        if not wanted:
            return ()
        computed |= wanted
        order = tuple(sorted(wanted))
        return (order, *zip(*map(self.steps.__getitem__, order), strict=True))

    def variables(self, sizes: Sequence[Any]) -> tuple[int, ...]:
        """Positions in DIMENSIONS of what these sizes depend on."""
        seen: set[int] = set()
        todo = [s.register for s in sizes if type(s) is SymInt]
        while todo:
            register = todo.pop()
            if register in seen:
                continue
            seen.add(register)
            step = self.steps[register]
            if step is not None and step[0] is not None:
                todo += step[1:]
        return tuple(i for i in range(len(DIMENSIONS)) if i in seen)

    def formula(self, size: Any) -> str:
        """How a size is worked out, in words a person can check."""
        if type(size) is not SymInt:
            return str(size)
        if size.register < len(DIMENSIONS):
            return DIMENSIONS[size.register]
        step = self.steps[size.register]
        assert step is not None
        operation, first, second = step
        if operation is None:
            return str(first)
        left, right = (self.formula(self.sizes[r]) for r in (first, second))
        sign = _SIGNS.get(operation)
        if sign:
            return f"({left} {sign} {right})"
        name = getattr(operation, "__name__", "function").removesuffix("_step")
        return f"{name}({left})" if first == second else f"{name}({left}, {right})"


_SIGNS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.truediv: "/",
    operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}  # fmt: skip


class _Branch:
    """One question of a tree of recordings, with what follows from each answer."""

    __slots__ = ("answers", "register", "steps")

    def __init__(self, register: int, steps: Columns) -> None:
        self.register = register
        self.steps = steps
        self.answers: dict[Any, Any] = {}


class _Leaf(NamedTuple):
    trace: Any
    steps: Columns
    registers: tuple[int, ...]


class Traces:
    """What was recorded with the same settings, found again by the answers to the recordings' own questions."""

    __slots__ = ("_kept", "_length", "_top", "count")

    def __init__(self) -> None:
        self._top: dict[None, Any] = {}
        self._length = len(DIMENSIONS)
        #: Positions of the dimensions that any recording depends on, and answers by what these are.
        self._kept: tuple[tuple[int, ...], dict[tuple[int, ...], Any]] = ((), {})
        self.count = 0

    def kept(self, dimensions: Sequence[int]) -> Any:
        """What ``keep`` was given for dimensions that differ in nothing that a recording depends on, or None."""
        positions, answers = self._kept
        return answers.get(tuple([dimensions[i] for i in positions]))

    def keep(self, dimensions: Sequence[int], answer: Any) -> None:
        """Keep what somebody made of ``find(dimensions)``."""
        positions, answers = self._kept
        if len(answers) >= MOST_KEPT:
            self._kept = positions, answers = positions, {}
        answers[tuple([dimensions[i] for i in positions])] = answer

    def find(self, dimensions: Sequence[int]) -> tuple[Any, list[Any]] | None:
        """(the recording that serves ``dimensions``, its sizes), or None.

        The sizes are those named to ``add``, in that order. Beside an ``add`` in another thread None may also mean
        not yet: ask again when nothing is added.
        """
        node = self._top.get(None)
        registers: list[Any] = [None] * self._length
        registers[: len(DIMENSIONS)] = dimensions
        try:
            while node is not None:
                for register, operation, left, right in zip(*node.steps, strict=True):
                    registers[register] = left if operation is None else operation(registers[left], registers[right])
                if type(node) is _Leaf:
                    return node.trace, list(map(registers.__getitem__, node.registers))
                node = node.answers.get(registers[node.register])
        except IndexError:  # A longer recording came since its registers were counted.
            pass
        return None

    def find_many(
        self, dimensions: Sequence[Any], of: Any, step: Operation3, missing: Callable[[Any], bool]
    ) -> Iterator[tuple[Any, Any, list[Any]]]:
        """As ``find`` of many runs: (those it is about, their recording, its sizes).

        ``dimensions``: arrays over a grid of runs; ``of``: those of the grid that are asked about (``fields.Part``);
        ``step``: an operation on arrays. ``missing`` is told of runs for the first of which there is no recording, and
        adds it; where it says that nobody needs these runs they are left out.
        """
        registers: list[Any] = [None] * self._length
        registers[: len(DIMENSIONS)] = [of.take(values) for values in dimensions]
        #: (answers of a question, the one to follow, runs that gave it, their registers)
        todo: list[tuple[dict[Any, Any], Any, Any, list[Any]]] = [(self._top, None, of, registers)]
        while todo:
            answers, answer, part, registers = todo.pop()
            node = answers.get(answer)
            if node is None:
                if not missing(part):
                    continue
                node = answers[answer]
                registers += [None] * (self._length - len(registers))
            for register, operation, left, right in zip(*node.steps, strict=True):
                registers[register] = (
                    left if operation is None else step(operation, registers[left], registers[right])
                )
            if type(node) is _Leaf:
                yield part, node.trace, list(map(registers.__getitem__, node.registers))
                continue
            for few, answer, positions in part.answers(registers[node.register]):
                theirs = registers if positions is None else [
                    value if value is None else positions.take(value) for value in registers
                ]
                todo.append((node.answers, answer, few, theirs))

    def add(self, env: ShapeEnv, trace: Any, sizes: Sequence[SymInt]) -> None:
        """Put a recording, and the sizes that it is asked for, where its answers lead."""
        held: dict[Any, Any] = self._top
        key: Any = None
        computed: set[int] = set()
        for register, answer in env.guards.items():
            steps = env.needed((register,), computed)
            branch = held.get(key)
            if branch is None:
                branch = held[key] = _Branch(register, steps)
            assert branch.register == register, "a recording asked its questions in another order"
            held, key = branch.answers, answer
        wanted = tuple([size.register for size in sizes])
        leaf = _Leaf(trace, env.needed(wanted, computed), wanted)
        positions = tuple(sorted({*self._kept[0], *[i for i in computed if i < len(DIMENSIONS)]}))
        if positions != self._kept[0]:
            self._kept = positions, {}  # before the recording can be found, whose answers depend on them
        held[key] = leaf
        self._length = max(self._length, len(env.steps))
        self.count += 1
