"""A block's allocation trace: each storage that it allocates and frees, one by one, in order.

``alive`` counts bytes while it follows a tape; here each storage has a number, under which it passes from one block to
the next, and each allocation and free is reported. That is what a caching allocator sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from bridge_memory.tapes.alive import Atoms, _Grad, _Node, _Plan, _Run, _Step
from bridge_memory.tapes.blocks import PlainTraces
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Cut, Flush, Tape


class Storages:
    """References to storages, by number.

    ``report`` is called with (number, bytes) of each storage that is allocated and (number, None) when it is freed;
    zero-size storages are skipped. ``events``, if given, is called in its place with many at once, as a ``_Script`` has
    them, and how much higher their numbers are.
    """

    def __init__(
        self, report: Callable[[int, int | None], None],
        events: Callable[[Sequence[tuple[int, int]], int], None] | None = None,
    ) -> None:  # fmt: skip
        self._report = report
        self._events = events or self._one_by_one
        self._refs: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._discarded: dict[int, int] = {}
        self._next = 0

    @property
    def made(self) -> int:
        """How many storages were made."""
        return self._next

    def make(self, nbytes: int) -> int:
        """The number of a new storage, with one reference."""
        number = self._next
        self._next += 1
        self._refs[number] = 1
        if nbytes > 0:
            self._sizes[number] = nbytes
            self._report(number, nbytes)
        return number

    def skip(self, number: int) -> None:
        """Leave out so many numbers."""
        self._next += number

    def hold(self, number: int) -> int:
        self._refs[number] += 1
        return number

    def drop(self, number: int) -> None:
        self._refs[number] -= 1
        if not self._refs[number]:
            del self._refs[number]
            self._discarded.pop(number, None)
            if self._sizes.pop(number, 0):
                self._report(number, None)

    def discard(self, number: int) -> None:
        """Free a storage, to which references stay."""
        if nbytes := self._sizes.pop(number, 0):
            self._discarded[number] = nbytes
            self._report(number, None)

    def refill(self, number: int) -> None:
        """Allocate it again."""
        if nbytes := self._discarded.pop(number, 0):
            self._sizes[number] = nbytes
            self._report(number, nbytes)

    def size(self, number: int) -> int:
        """Bytes of a storage; 0 once it is freed."""
        return self._sizes.get(number, 0)

    def drop_all(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.drop(number)

    def play(self, script: _Script, numbers: Callable[[int], int]) -> int:
        """Do what ``script`` says; the number of its first storage. ``numbers``: of storages that were there before."""
        base, report = self._next, self._events
        for events, hold, outside in script.parts:
            if events:
                report(events, base)
            if outside is not None:
                (self.hold if hold else self.drop)(numbers(outside))
        for number, references, nbytes in script.left:
            self._refs[base + number] = references
            if nbytes > 0:
                self._sizes[base + number] = nbytes
        self._next = base + script.made
        return base

    def _one_by_one(self, events: Sequence[tuple[int, int]], base: int) -> None:
        for number, what in events:
            if what:
                self._report(base + number, abs(what))
            if what <= 0:
                self._report(base + number, None)


#: Beside the bytes of a storage: what is asked for.
_HOLD, _DROP = -1, -2
#: Numbers, in scripts, of a pass's input and of the gradient of its output.
_INPUT, _GRADIENT = -1, -2


#: A storage's number from that of the first storage of a pass; its bytes where it is allocated, 0 where it is freed, or
#: minus its bytes where it is freed at once.
_Event = tuple[int, int]


class _Script(NamedTuple):
    """What a pass does with storages, whatever their numbers. ``parts``: events up to a reference to a storage that was
    there before the pass, which is held (True) or dropped, and the number of that storage; None: there is none.
    ``left``: (number, references, bytes) of storages that outlive the pass."""

    parts: list[tuple[list[_Event], bool, int | None]]
    left: list[tuple[int, int, int]]
    made: int


class _Noted(Storages):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__(lambda number, nbytes: None)
        self._asked: list[tuple[int, int]] = []
        self._since = 0

    def make(self, nbytes: int) -> int:
        self._asked.append((self._next, nbytes))
        self._next += 1
        return self._next - 1

    def hold(self, number: int) -> int:
        self._asked.append((number, _HOLD))
        return number

    def drop(self, number: int) -> None:
        self._asked.append((number, _DROP))

    def taken(self) -> _Script:
        """What was asked for since the last time."""
        since, parts, events = self._since, list[tuple[list[_Event], bool, int | None]](), list[_Event]()
        references, sizes = dict[int, int](), dict[int, int]()
        for number, what in self._asked:
            if number < since:
                parts.append((events, what == _HOLD, number))
                events = []
            elif what >= 0:
                references[number], sizes[number] = 1, what
                if what:
                    events.append((number - since, what))
            elif what == _HOLD:
                references[number] += 1
            else:
                references[number] -= 1
                if not references[number]:
                    del references[number]
                    if sizes[number]:
                        self._freed(events, number - since)
        left = [(number - since, count, sizes[number]) for number, count in references.items()]
        self._asked, self._since = [], self._next
        return _Script([*parts, (events, False, None)], left, self._next - since)

    @staticmethod
    def _freed(events: list[_Event], number: int) -> None:
        if events and events[-1][0] == number:
            events[-1] = number, -events[-1][1]
        else:
            events.append((number, 0))


def tape_of(ctx: BlockContext, block: Callable[[BlockContext], Any]) -> Tape:
    """The tape of a block of one run. ``block`` gets the block from a context (as ``layer_block(kind, ctx)``)."""
    found = block(plain_context(ctx))
    assert isinstance(found, Recorder)
    return found.tape


def plain_context(ctx: BlockContext) -> BlockContext:
    """The same run, whose blocks are recorders with its own sizes."""
    own = BlockContext(ctx.cache, ctx.dimensions, ctx.recompute)
    own.many = PlainTraces(own)  # type: ignore[assignment]
    return own


class _Gradient(_Grad):
    """A gradient with the number of its storage."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.number = number


class _Walk(_Run):
    """One forward pass, and possibly one backward pass, that reports every storage. ``given``: numbers of storages that
    exist already, by their number in the plan."""

    def __init__(self, plan: _Plan, atoms: Atoms, storages: Storages, given: dict[int, int]) -> None:
        super().__init__(plan)
        self._atoms, self._storages, self._given = atoms, storages, given
        self.numbers: dict[int, int] = {}
        #: Storages, by number in the plan, that a selective checkpoint keeps; those that it holds so far.
        self.kept: Sequence[int] = ()
        self.held: dict[int, int] = {}
        #: Storages that a checkpoint holds until the recomputation reaches them.
        self.until: dict[int, int] = {}
        #: Second storages of discarded ones, by number in the plan.
        self._seconds: dict[int, int] = {}
        #: What delayed weight gradients made, by the point at which they are made.
        self._for_weights: dict[int, list[int]] = {}

    # ---- storages ----

    def _came(self, i: int) -> None:
        given = self._given.get(i)
        if given is None:
            self.numbers[i] = self._storages.make(self.plan.tensors[i].bytes)
        else:
            self.numbers[i] = self._storages.hold(given)
            if i in self.until:
                self._storages.drop(self.until.pop(i))
        if i in self.kept and i not in self.held:
            self.held[i] = self._storages.hold(self.numbers[i])

    def _acquire(self, i: int) -> None:
        if not self.refs[i]:
            self._came(i)
        super()._acquire(i)

    def _release(self, i: int) -> None:
        super()._release(i)
        if not self.refs[i] and i in self.numbers:
            self._storages.drop(self.numbers.pop(i))

    def _discard(self, i: int) -> None:
        super()._discard(i)
        self._storages.drop(self.numbers.pop(i))

    def _come_again(self, i: int) -> None:
        super()._come_again(i)
        self._seconds[i] = self._storages.make(self.plan.tensors[i].bytes)

    def _refilled(self, i: int, *, copied: bool) -> None:
        super()._refilled(i, copied=copied)
        self.numbers[i] = self._storages.make(self.plan.tensors[i].bytes) if copied else self._seconds.pop(i)

    def _second_gone(self, i: int) -> None:
        super()._second_gone(i)
        self._storages.drop(self._seconds.pop(i))

    def _enter_scope(self, storages: Iterable[int]) -> None:
        for i in dict.fromkeys(storages):
            if not self.scope[i] and not self.refs[i]:
                self._came(i)
            super()._enter_scope((i,))

    def leave(self) -> None:
        """Release the references of variables."""
        for i, inside in enumerate(self.scope):
            if inside:
                self._leave_scope(i)

    def _mark(self, name: str, extra: int = 0) -> None:
        """Allocate and free the scratch of one operation."""
        sizes = self._atoms.sizes
        self._storages.drop_all([self._storages.make(sizes[at]) for at in self._atoms.positions(extra)])

    # ---- gradients ----

    def back(self, gradient: int | None) -> dict[int, int]:
        """Run backward; returns the storages of the inputs' gradients, by the position of the input.

        ``gradient``: the storage of the output's gradient; the caller's reference passes to this.
        """
        self._arrives(gradient)
        self._back(self.plan.steps)
        return self._left()

    def _arrives(self, gradient: int | None) -> None:
        self.leave()
        for i in self.plan.outputs:
            if self.plan.tensors[i].has_gradient:
                self._grads[i] = self._gradient(i) if gradient is None else _Gradient(gradient)

    def _left(self) -> dict[int, int]:
        """The gradients of inputs, as ``back`` returns them; others are released."""
        found = {}
        for place, i in enumerate(self.plan.inputs):
            left = self._grads.pop(i, None)
            if left is not None:
                assert isinstance(left, _Gradient)
                found[place] = left.number
        for left in self._grads.values():
            self._release_grad(left)
        self._grads = {}
        return found

    def _gradient(self, i: int) -> _Gradient:
        return _Gradient(self._storages.make(self.plan.tensors[i].grad_bytes))

    def gradients(self) -> dict[int, int]:
        """The storage of every gradient that is there, by tensor."""
        return {i: g.number for i, g in self._grads.items() if isinstance(g, _Gradient)}

    def _end_node(self) -> None:
        """Whoever runs nodes one by one does this (``Nodes.backward``)."""

    def copy_shared_gradients(self, before: dict[int, int]) -> None:
        """New gradients become storages of their own where they are one storage, or one of ``before``."""
        known = set(before.values())
        for i, g in list(self._grads.items()):
            assert isinstance(g, _Gradient)
            if before.get(i) != g.number and (g.refs > 1 or g.number in known):
                self._grads[i] = self._gradient(i)
                self._release_grad(g)

    def _release_grad(self, g: _Grad) -> None:
        g.refs -= 1
        if not g.refs:
            assert isinstance(g, _Gradient)
            self._storages.drop(g.number)

    def _add_grad(self, i: int, g: _Grad, op: str) -> None:
        have = self._grads.get(i)
        if have is None:
            self._grads[i] = g
        elif have.refs > 1 and g.refs > 1:
            self._grads[i] = self._gradient(i)
            self._release_grad(have)
            self._release_grad(g)
        else:
            keep, drop = (have, g) if have.refs == 1 else (g, have)
            self._release_grad(drop)
            self._grads[i] = keep

    def _delay(self, step: _Step, grads: Sequence[int]) -> None:
        super()._delay(step, grads)
        assert step.delayed is not None
        made = [self._storages.make(self._atoms.sizes[at]) for at in self._atoms.positions(step.delayed.made)]
        self._for_weights.setdefault(id(step.delayed.flush), []).extend(made)

    def _flush(self, point: Flush) -> None:
        super()._flush(point)
        self._storages.drop_all(self._for_weights.pop(id(point), ()))

    def _back_step(self, step: _Step) -> None:
        found = self._grads
        grads = [i for i in step.outputs if i in found]
        saves = step.saves
        for i in saves[: step.in_place] if grads else ():
            self._release(i)
        saves = saves[step.in_place :] if grads else saves
        if grads and step.alias:
            self._mark(step.name, step.backward_workspace)
            for i in step.inputs:
                g = found[grads[0]]
                g.refs += 1
                self._add_grad(i, g, step.name)
        elif grads:
            made = [(i, self._gradient(i)) for i in step.inputs]
            self._mark(step.name, step.backward_workspace)
            for i, g in made:
                self._add_grad(i, g, step.name)
        if grads and step.delayed is not None:
            self._delay(step, grads)
        for i in saves:
            self._release(i)
        for i in grads:
            self._release_grad(found.pop(i))


class Nodes:
    """The passes of one microbatch through a block that an overlapped schedule runs node by node.

    Each node is a graph of its own: what it takes from others are leaves, whose gradients autograd copies where
    something else refers to them (``accumulate_grad.h: accumulateGrad``). Whoever runs a node backward refers to the
    gradients that it takes until it has run.
    """

    def __init__(self, walk: _Walk, parts: Sequence[Sequence[_Node]], storages: Storages) -> None:
        self._walk, self._parts, self._storages = walk, parts, storages

    def __len__(self) -> int:
        return len(self._parts)

    def forward(self, number: int) -> int | None:
        """Run a node; the storage of the output after the last, of which the caller gets a reference."""
        walk, plan = self._walk, self._walk.plan
        if not number:
            walk._enter_scope([plan.storage[i] for i in plan.inputs])
        walk._run(self._parts[number], True, set(plan.output_storages), None)
        if number + 1 < len(self._parts):
            return None
        out = self._storages.hold(walk.numbers[plan.output_storages[0]])
        walk.leave()
        return out

    def taken(self, number: int) -> list[int]:
        """Storages that a node is about to take from those before it."""
        plan = self._walk.plan
        read = [plan.storage[i] for step in self._parts[number] if isinstance(step, _Step) for i in step.inputs]
        return [self._walk.numbers[i] for i in dict.fromkeys(read) if i in self._walk.numbers]

    def backward(self, number: int, gradient: int | None, done: Callable[[int], None]) -> dict[int, int]:
        """Run a node; the gradients of the block's inputs after the first, as ``_Walk.back`` returns them.

        ``gradient``: of the output, for the last node; the caller's reference passes to this. ``done``: called with a
        reference to each gradient that the node took.
        """
        walk, last = self._walk, number + 1 == len(self._parts)
        if last:
            walk._arrives(gradient)
        before = walk.gradients()
        for each in before.values():
            self._storages.hold(each)
        walk._back(self._parts[number])
        if number:
            walk.copy_shared_gradients(before)
        after = walk.gradients()
        found = {} if number else walk._left()
        for i, each in before.items():
            (self._storages.drop if after.get(i) == each else done)(each)
        return found


class Passes:
    """Forward and backward passes of one block, any number of them, each independent of the others.

    ``recompute``: the block is checkpointed: it keeps its input (and, with ``keeps``, ``Tape.kept_by_checkpoint``) and
    runs forward once more before it runs backward.
    """

    def __init__(self, tape: Tape, storages: Storages, *, recompute: bool = False, keeps: bool = False) -> None:
        self._storages, self._recompute = storages, recompute
        self._atoms = Atoms()
        self._plan = _Plan(tape, self._atoms)
        known = {id(t): i for i, t in enumerate(self._plan.tensors)}
        kept = tape.kept_by_checkpoint if recompute and keeps else ()
        self._kept = [self._plan.storage[known[id(t)]] for t in kept if id(t) in known]
        #: By whether there is an input and, of backward, whether a gradient arrives: the passes are all alike.
        self._forwards: dict[bool, tuple[_Script, int]] = {}
        #: Numbers, as in the script of forward, of what loses its storage between the chunk's passes.
        self._discards: dict[bool, tuple[int, ...]] = {}
        self._backwards: dict[tuple[bool, bool], tuple[_Script, dict[int, int]]] = {}

    def _walk(self, given: dict[int, int], storages: Storages | None = None) -> _Walk:
        return _Walk(self._plan, self._atoms, storages or self._storages, given)

    def _given(self, x: int | None) -> dict[int, int]:
        first = self._plan.inputs[0] if self._plan.inputs else None
        return {first: x} if first is not None and x is not None else {}

    def forward_alone(self, x: int | None) -> int:
        """Run forward without saving; the output's storage, as ``forward`` gives it."""
        walk = self._walk(self._given(x))
        walk.forward(save=False)
        out = self._storages.hold(walk.numbers[self._plan.output_storages[0]])
        walk.leave()
        return out

    @property
    def discards(self) -> bool:
        """Whether anything loses its storage between the chunk's passes."""
        return bool(self._plan.discarded_between_passes)

    @property
    def number_of_nodes(self) -> int:
        return 1 + sum(isinstance(step, Cut) for step in self._plan.steps)

    def nodes(self, x: int | None) -> Nodes:
        """Passes node by node. ``x``: as for ``forward``."""
        parts: list[list[_Node]] = [[]]
        for step in self._plan.steps:
            if isinstance(step, Cut):
                parts.append([])
            else:
                parts[-1].append(step)
        return Nodes(self._walk(self._given(x)), parts, self._storages)

    def forward(
        self, x: int | None, discards: list[int] | None = None
    ) -> tuple[int, Callable[[int | None], dict[int, int]]]:
        """Run forward; returns (storage of the output, backward pass).

        ``x``: the storage of the input; the caller keeps its reference, and gets one to the output. The backward pass
        is to be called once; arguments and result as ``_Walk.back``. ``discards`` gets the storages that are to be
        discarded once the chunk has run forward, and refilled before it runs backward.
        """
        has_input = x is not None
        if has_input not in self._forwards:
            self._note(has_input, None)
        script, out = self._forwards[has_input]
        base = self._storages.play(script, lambda _: -1 if x is None else x)
        if discards is not None:
            of_input = [] if x is None else [x]
            for n in self._discards[has_input]:
                discards += [base + n] if n >= 0 else of_input
        return base + out, partial(self._back, x, base)

    def forward_of(self, inputs: Sequence[int]) -> tuple[int, Callable[[int | None], dict[int, int]]]:
        """As ``forward``, of a block of several inputs; the backward pass gives their gradients by their places."""
        walk = self._walk(dict(zip(self._plan.inputs, inputs, strict=True)))
        walk.forward(save=True)
        out = self._storages.hold(walk.numbers[self._plan.output_storages[0]])
        walk.leave()
        return out, walk.back

    def calls(self, has_input: bool, has_gradient: bool) -> int:
        """How often a forward and a backward pass allocate and free, but for what they are given."""
        if (has_input, has_gradient) not in self._backwards:
            self._note(has_input, has_gradient)
        scripts = self._forwards[has_input][0], self._backwards[has_input, has_gradient][0]
        return sum(2 if what < 0 else 1 for script in scripts for part in script.parts for _, what in part[0])

    def _back(self, x: int | None, base: int, gradient: int | None) -> dict[int, int]:
        which = x is not None, gradient is not None
        if which not in self._backwards:
            self._note(*which)
        script, found = self._backwards[which]

        def number(of: int) -> int:
            outside = x if of == _INPUT else gradient if of == _GRADIENT else base + of
            assert outside is not None
            return outside

        own = self._storages.play(script, number)
        of_forward = self._forwards[which[0]][0].made
        return {place: own + of - of_forward if of >= of_forward else number(of) for place, of in found.items()}

    def _note(self, has_input: bool, has_gradient: bool | None) -> None:
        """Walk the tape once, and note its passes; ``has_gradient`` is None where only forward is asked for."""
        noted = _Noted()
        discards: list[int] = []
        out, back = self._walked(_INPUT if has_input else None, noted, discards)
        self._forwards[has_input] = noted.taken(), out
        self._discards[has_input] = tuple(discards)
        if has_gradient is not None:
            found = back(_GRADIENT if has_gradient else None)
            self._backwards[has_input, has_gradient] = noted.taken(), found

    def _walked(
        self, x: int | None, storages: Storages, discards: list[int]
    ) -> tuple[int, Callable[[int | None], dict[int, int]]]:
        """As ``forward``, operation by operation."""
        walk = self._walk(self._given(x), storages)
        walk.kept = self._kept
        walk.forward(save=not self._recompute)
        out = storages.hold(walk.numbers[self._plan.output_storages[0]])
        walk.leave()
        if not self._recompute:
            discards += [walk.numbers[i] for i in sorted(self._plan.discarded_between_passes) if i in walk.numbers]
            return out, walk.back
        if x is not None:
            storages.hold(x)

        def back(gradient: int | None) -> dict[int, int]:
            second = self._walk({**self._given(x), **walk.held}, storages)
            second.until = dict(walk.held)
            second.forward(save=True)
            # ``random.py: CheckpointFunction.backward`` refers to what it recomputed, and to its gradient.
            held = [storages.hold(second.numbers[self._plan.output_storages[0]])]
            held += [] if gradient is None else [storages.hold(gradient)]
            found = second.back(gradient)
            storages.drop_all(held)
            if x is not None:
                storages.drop(x)
            return found

        return out, back
