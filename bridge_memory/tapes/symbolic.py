"""Symbolic integers, guards and traces: one trace of a block serves every run that passes the same guards.

As in torch.compile with dynamic shapes: a block is traced with the numbers of one run, but its sizes are ``SymInt``s,
integers that record each operation made on them in a ``ShapeEnv``. Where the traced code branches on a size (is there
tensor parallelism, do the heads divide) the ShapeEnv records a guard. ``Traces`` is the cache of one block: a tree
whose inner nodes are guards (``_Branch``), whose edges are their values and whose leaves are traces. For another run
the guards are evaluated from the root; at a leaf the run's numbers are put into the recorded operations
(``Traces.find``) and nothing is traced. Where a guard has a value that was not seen before, the block is traced again
from there.

A ShapeEnv is a list of steps over registers. Steps serve arrays as well as numbers: they are ``+ - * // % /``, ``max``,
``min``, ``ceil``, ``round`` and named functions of one size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from math import ceil, lcm
from typing import Any, NamedTuple

from bridge_memory.spec.parts import RECOMPUTE_MODULES

#: What a trace may depend on in addition to its settings: Megatron's sizes and the padded vocabulary, and then
#: switches, 0 or 1: sequence parallelism, full recomputation (of MTP depths; of any layer) and every module of
#: selective recomputation.
SIZES = ("seq", "batch", "tp", "cp", "ep", "etp", "padded_vocab")
DIMENSIONS = (*SIZES, "sp", "mtp_recomputed", "recomputes_fully", *RECOMPUTE_MODULES)
#: Results that are cached of one block, each for other dimensions.
MOST_KEPT = 256

Operation = Callable[[Any, Any], Any]
#: Applies an operation: (operation, left, right) -> ``operation(left, right)``, of arrays.
Operation3 = Callable[[Any, Any, Any], Any]


#: (operation, left, right): the value of a register is ``operation(left, right)`` of two other registers, or the
#: constant ``left`` where operation is None.
Step = tuple[Operation | None, Any, int]
#: Steps by column: (every register, every operation, every left, every right); empty without steps.
Columns = tuple[tuple[Any, ...], ...]


def ceil_step(value: Any, _: Any) -> Any:
    return ceil(value)


def round_step(value: Any, _: Any) -> Any:
    return round(value)


class SymInt:
    """A whole number (or, as an intermediate result, a fraction) with the register that stands for it.

    Arithmetic records a step; comparisons and ``bool()`` record a guard. A product with a plain 0 is a plain 0: a
    tensor that does not exist has no size.
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
        """The number itself. It becomes a guard: the trace serves this number only."""
        self.env.add_guard(self)
        return int(self.value)

    __int__ = __index__

    def is_on(self) -> bool:
        """Whether a switch among DIMENSIONS is on; records a guard."""
        self.env.add_guard(self)
        return bool(self.value)

    def __hash__(self) -> int:
        return self.register

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return f"SymInt({self.value} = {self.env.formula(self)})"

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def largest(first: Any, *others: Any) -> Any:
    """``max`` as a step instead of a guard (as ``torch.sym_max``)."""
    for other in others:
        first = _stepped(max, first, other)
    return first


def smallest(first: Any, *others: Any) -> Any:
    """``min`` as a step instead of a guard (as ``torch.sym_min``)."""
    for other in others:
        first = _stepped(min, first, other)
    return first


def computed(function: Callable[[Any], Any], size: Any) -> Any:
    """``function`` of a size as one step, for mathematics that is not whole-number arithmetic.

    Steps of equal functions are shared. A ``functools.partial`` is equal only to itself: make it once and reuse it.
    """
    if type(size) is not SymInt:
        apply = elementwise.get(type(size))
        return function(size) if apply is None else apply("computed", function, size)
    return size.env.step(_OfOne(function), size, size)


class _OfOne:
    """A function of one size as an ``Operation``, which has two arguments."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, value: Any, _: Any) -> Any:
        return self.function(value)


def chosen(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` where the condition holds, else ``no``: elementwise for an array; a symbolic size records a guard."""
    if condition is True:
        return yes
    if condition is False:
        return no
    if type(condition) is SymInt:
        return yes if condition.is_on() else no
    where = getattr(condition, "where", None)
    if where is None:
        return yes if condition else no
    return where(yes, no)


def any_nonzero(value: Any) -> bool:
    """Whether a number is not zero; for an array, whether any entry is not."""
    anywhere = getattr(value, "any", None)
    return bool(value) if anywhere is None else bool(anywhere())


def common_multiple(first: Any, other: Any) -> Any:
    """``math.lcm`` of two."""
    return _stepped(lcm, first, other)


#: Array type -> function of (operation name, left, right) that ``largest`` and the others call for such arrays.
elementwise: dict[type, Callable[[str, Any, Any], Any]] = {}


def _stepped(operation: Operation, left: Any, right: Any) -> Any:
    a, b = type(left), type(right)
    if a is int and b is int:
        return operation(left, right)
    if a is SymInt or b is SymInt:
        env = left.env if a is SymInt else right.env
        return env.step(operation, left, right)
    if elementwise:
        apply = elementwise.get(a) or elementwise.get(b)
        if apply is not None:
            return apply(operation.__name__, left, right)
    return operation(left, right)


class ShapeEnv:
    """What tracing one block records: the steps of its sizes, and its guards in order, each once."""

    def __init__(self, dimensions: Sequence[int]) -> None:
        self.steps: list[Step | None] = [None] * len(DIMENSIONS)
        self.sizes = [SymInt(self, i, value) for i, value in enumerate(dimensions)]
        self._known: dict[tuple[Any, Any, Any], SymInt] = {}
        self._constants: dict[Any, int] = {}
        #: Register of a guard -> its value, in the order in which they were evaluated.
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

    def free(self) -> None:
        """Free the sizes. Each refers to this ShapeEnv: without this the cycle waits for the garbage collector."""
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
        found = self.step(operation, left, right)
        self.add_guard(found)
        return bool(found.value)

    def add_guard(self, size: SymInt) -> None:
        if size.register not in self.guards:
            self.guards[size.register] = size.value

    def needed(self, registers: Sequence[int], computed: set[int]) -> Columns:
        """The steps, in order, that compute ``registers``, except those already ``computed``.

        ``computed`` is extended by these registers and by the dimensions that they depend on.
        """
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
        """Positions in DIMENSIONS of the dimensions that these sizes depend on."""
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
        """How a size is computed, as a formula that a person can check."""
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
    """One guard in the tree of traces, with the subtree of each of its values."""

    __slots__ = ("register", "steps", "subtrees")

    def __init__(self, register: int, steps: Columns) -> None:
        self.register = register
        self.steps = steps
        self.subtrees: dict[Any, Any] = {}


class _Leaf(NamedTuple):
    trace: Any
    steps: Columns
    registers: tuple[int, ...]


class Traces:
    """The traces of one block under one combination of settings, found by evaluating their guards."""

    __slots__ = ("_kept", "_length", "_top", "count")

    def __init__(self) -> None:
        self._top: dict[None, Any] = {}
        self._length = len(DIMENSIONS)
        #: Positions of the dimensions that any trace depends on, and results by the values of these dimensions.
        self._kept: tuple[tuple[int, ...], dict[tuple[int, ...], Any]] = ((), {})
        self.count = 0

    def kept(self, dimensions: Sequence[int]) -> Any:
        """What ``keep`` was given for dimensions that are equal in all that any trace depends on, or None."""
        positions, results = self._kept
        return results.get(tuple([dimensions[i] for i in positions]))

    def keep(self, dimensions: Sequence[int], result: Any) -> None:
        """Cache ``result``, which a caller derived from ``find(dimensions)``."""
        positions, results = self._kept
        if len(results) >= MOST_KEPT:
            self._kept = positions, results = positions, {}
        results[tuple([dimensions[i] for i in positions])] = result

    def find(self, dimensions: Sequence[int]) -> tuple[Any, list[Any]] | None:
        """(the trace that serves ``dimensions``, its sizes), or None where none does.

        The sizes are those passed to ``add``, in that order. While another thread is inside ``add``, None may also mean
        "not yet": call again under the lock.
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
                node = node.subtrees.get(registers[node.register])
        except IndexError:  # another thread added a longer trace since ``_length`` was read
            pass
        return None

    def find_many(
        self, dimensions: Sequence[Any], of: Any, step: Operation3, missing: Callable[[Any], bool]
    ) -> Iterator[tuple[Any, Any, list[Any]]]:
        """As ``find``, for many runs: yields (some of the runs, the trace that serves them, its sizes).

        ``dimensions``: arrays over a grid of runs. ``of``: its runs to find traces for (``batched.Subgrid``).
        ``step``: applies an operation to arrays. ``missing`` is called with runs for the first of which there is no
        trace: it adds the trace and returns True, or returns False if these runs are not needed, which skips them.
        """
        registers: list[Any] = [None] * self._length
        registers[: len(DIMENSIONS)] = [of.take(values) for values in dimensions]
        #: (values of a guard with their subtrees, the value to follow, the runs that have it, their registers)
        todo: list[tuple[dict[Any, Any], Any, Any, list[Any]]] = [(self._top, None, of, registers)]
        while todo:
            subtrees, value, part, registers = todo.pop()
            node = subtrees.get(value)
            if node is None:
                if not missing(part):
                    continue
                node = subtrees[value]
            # A trace that was added since these registers were made, by ``missing`` or another thread, may need more.
            registers += [None] * (self._length - len(registers))
            for register, operation, left, right in zip(*node.steps, strict=True):
                registers[register] = (
                    left if operation is None else step(operation, registers[left], registers[right])
                )
            if type(node) is _Leaf:
                yield part, node.trace, list(map(registers.__getitem__, node.registers))
                continue
            for few, value, positions in part.by_value(registers[node.register]):
                theirs = registers if positions is None else [
                    held if held is None else positions.take(held) for held in registers
                ]
                todo.append((node.subtrees, value, few, theirs))

    def add(self, env: ShapeEnv, trace: Any, sizes: Sequence[SymInt]) -> None:
        """Put a trace, with the registers of ``sizes``, at the leaf where the values of its guards lead."""
        self._length = max(self._length, len(env.steps))  # before another thread can find any of its steps
        held: dict[Any, Any] = self._top
        key: Any = None
        computed: set[int] = set()
        for register, value in env.guards.items():
            steps = env.needed((register,), computed)
            branch = held.get(key)
            if branch is None:
                branch = held[key] = _Branch(register, steps)
            assert branch.register == register, "a trace evaluated its guards in another order"
            held, key = branch.subtrees, value
        wanted = tuple([size.register for size in sizes])
        leaf = _Leaf(trace, env.needed(wanted, computed), wanted)
        positions = tuple(sorted({*self._kept[0], *[i for i in computed if i < len(DIMENSIONS)]}))
        if positions != self._kept[0]:
            self._kept = positions, {}  # before the trace can be found: its results depend on these dimensions
        held[key] = leaf
        self.count += 1
