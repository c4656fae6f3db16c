"""What of a tape is alive when: by reference counting, as in PyTorch itself.

The rules, with their source:

* A tensor made in forward lives until its last use in forward, and as long as an operation saves it.
* Backward runs the operations in reverse (``torch/csrc/autograd/engine.cpp``: highest sequence number first).
  While an operation runs backward, its output gradients, its saved tensors, its scratch and its input gradients
  are alive together; then saved tensors and output gradients go.
* A tensor used twice gets two gradients which are summed in place when the first is nobody else's, else into a
  third (``torch/csrc/autograd/input_buffer.cpp: accumulate``).
* Checkpoints and discarding regions as in ``tape``.

Following the tape (``Structure``) and putting in the numbers (``BlockCost``) are two steps. Which tensors are alive at
which moment depends on the tape alone, so a structure counts how often each size is there; the moments that can be the
highest, whatever the sizes are, are few. Counts are kept in one big integer, a lane of bits a size, which makes a sum
of any sizes one addition.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.sizes import Size
from bridge_memory.inventory.tape import Discard, Landmark, Node, Op, Region, Tape, Tensor

#: Bytes: smaller tensors stay on the GPU (``TransformerConfig.min_offloaded_tensor_size``: 2^20 elements of bf16).
MINIMUM_OFFLOADED_BYTES = 2 * 1024 * 1024

#: Bits of one count; no size is there 2^31 times at once.
_LANE = 32
_ONE_LANE = (1 << _LANE) - 1
#: Moments that every other is held against; what they do not dominate is kept, needlessly at worst.
_DOMINATORS = 8


class SavedTensor(NamedTuple):
    """Storages of one name that stay alive from forward to backward, in bytes."""

    name: str
    bytes: int
    part: Part = Part.NONE
    provenance: Provenance = Provenance.FORMULA


class Atoms:
    """The sizes of a tape, each once: a position, and the lane in which it is counted."""

    def __init__(self) -> None:
        self._position: dict[Any, int] = {}
        #: In order of their positions.
        self.sizes: list[Any] = []

    def unit(self, size: Any) -> int:
        """One of ``size`` in its lane; 0 of what has no size."""
        if type(size) is Size:
            key: Any = ("register", size.register)
        elif size:
            key = size
        else:
            return 0
        position = self._position.get(key)
        if position is None:
            position = self._position[key] = len(self.sizes)
            self.sizes.append(size)
        return 1 << (_LANE * position)

    def counts(self, units: int) -> Sequence[int]:
        """How often each size is there, by its position."""
        number = len(self.sizes)
        return memoryview(units.to_bytes(number * _LANE // 8, sys.byteorder)).cast("I")

    def positions(self, units: int) -> tuple[int, ...]:
        """Positions, as often as they count."""
        return tuple(p for p, times in enumerate(self.counts(units)) for _ in range(times))


class Moment(NamedTuple):
    """Something that runs, and all that is alive beside it and in it."""

    name: str
    units: int


class _Passage:
    """Moments of a pass of which one is the highest, as a walk from one to the next over sizes that come and go.

    Before a moment first leaves what is no longer there and then comes what is new, so that no step of the walk is
    higher than the moments at its ends.
    """

    __slots__ = ("_names", "_order")

    def __init__(self, moments: Sequence[Moment], atoms: Atoms) -> None:
        number = len(atoms.sizes)
        order: list[int] = []
        names: list[str] = []
        before = 0
        for name, units in moments:
            come: list[int] = []
            differ = before ^ units
            while differ:
                position = (differ & -differ).bit_length() // _LANE
                at = position * _LANE
                was, now = before >> at & _ONE_LANE, units >> at & _ONE_LANE
                if was > now:
                    order += [number + position] * (was - now)
                else:
                    come += [position] * (now - was)
                differ = differ >> (at + _LANE) << (at + _LANE)
            order += come
            names += [name] * (len(order) - len(names))
            before = units
        self._order = order
        self._names = names

    def highest(self, signed: Sequence[int]) -> int:
        """Bytes; ``signed``: every atom's size, then every atom's size less than zero."""
        return max(accumulate(map(signed.__getitem__, self._order)), default=0)

    def named(self, signed: Sequence[int]) -> tuple[int, str]:
        """(bytes, what runs) at the highest moment, the first of equals."""
        walk = list(accumulate(map(signed.__getitem__, self._order)))
        if not walk:
            return 0, ""
        highest = max(walk)
        return highest, self._names[walk.index(highest)]

    def __len__(self) -> int:
        return len(self._order)


class _Peaks:
    """The moments of a pass before its landmark and after it."""

    __slots__ = ("after", "before")

    def __init__(self, before: Sequence[Moment], after: Sequence[Moment], atoms: Atoms) -> None:
        self.before = _Passage(_undominated(before, atoms), atoms)
        self.after = _Passage(_undominated(after, atoms), atoms)

    def highest(self, signed: Sequence[int]) -> int:
        before = self.before.highest(signed)
        return max(before, self.after.highest(signed)) if self.after else before

    def named(self, signed: Sequence[int]) -> tuple[int, str]:
        first, second = self.before.named(signed), self.after.named(signed)
        return first if first[0] >= second[0] else second


def _undominated(moments: Sequence[Moment], atoms: Atoms) -> list[Moment]:
    """Without those at which another has at least as much of everything."""
    top = sum(1 << (_LANE * i + _LANE - 1) for i in range(len(atoms.sizes)))
    kept: list[Moment] = []
    for moment in moments:
        # Neighbours first: while a pass grows, each moment has all of the last.
        if kept and (kept[-1].units + top - moment.units) & top == top:
            continue
        while kept and (moment.units + top - kept[-1].units) & top == top:
            kept.pop()
        kept.append(moment)
    out: list[Moment] = []
    # Those with most in them first: they are the likeliest to have all of another.
    largest = sorted({m.units for m in kept}, key=int.bit_count, reverse=True)[:_DOMINATORS]
    highest = [units + top for units in largest]
    seen: set[int] = set()
    for moment in kept:
        units = moment.units
        if units in seen:
            continue
        seen.add(units)
        for other, raised in zip(largest, highest, strict=True):
            if other != units and (raised - units) & top == top:
                break
        else:
            out.append(moment)
    return out


class Structure:
    """What is alive when on one tape, whatever its sizes are."""

    __slots__ = (
        "_saved_input", "backward", "backward_held", "forward", "inputs", "no_grad", "no_grad_retained", "offloaded",
        "outputs", "retained", "tensors",
    )

    def __init__(self, tape: Tape, atoms: Atoms, *, without_gradients: bool = True) -> None:
        """``without_gradients``: also of a forward pass that saves nothing, which full recomputation runs first."""
        for t in (*tape.input_tensors, *tape.output_tensors, *_every_tensor(tape.nodes)):
            t.units, t.grad_units = atoms.unit(t.bytes), atoms.unit(t.grad_bytes)
            t.storage.units = atoms.unit(t.storage.bytes)
        run = _Run(tape, atoms)
        run.forward()
        away = run.offloaded_tensors()
        away_units = sum(t.units for t in away)
        received = {t.storage for t in tape.output_tensors}
        handed_on = sum(t.units for t in received if run.refs.get(t, 0) == run.scope_refs(t))
        self.retained = atoms.positions(run.alive - handed_on - away_units)
        self.offloaded = atoms.positions(away_units)
        saved = [t for t, n in run.refs.items() if n > run.scope_refs(t)]
        self.tensors = tuple(
            (t.name, t.part, t.provenance, atoms.positions(t.units)[0])
            for t in saved if t.units and t not in run.emptied and t not in away
        )
        self._saved_input = bool(tape.input_tensors) and tape.input_tensors[0] in saved
        self.inputs = atoms.positions(sum(t.units for t in tape.input_tensors))
        self.outputs = atoms.positions(sum(t.units for t in tape.output_tensors))
        forward = run.moments, run.landmark
        backward, held = run, run.copy()
        backward.backward(hold=False)
        held.backward(hold=True)
        dry = _Run(tape, atoms)
        if without_gradients:
            dry.forward(save=False)
        self.no_grad_retained = atoms.positions(
            sum(t.units for t, n in dry.refs.items() if n > dry.scope_refs(t))
        )
        self.forward = _split(*forward, atoms)
        self.backward = _split(backward.moments, backward.landmark, atoms)
        self.backward_held = _split(held.moments, held.landmark, atoms)
        self.no_grad = _split(dry.moments, dry.landmark, atoms)

    @property
    def input_retained(self) -> bool:
        return self._saved_input


def _split(moments: Sequence[Moment], landmark: int, atoms: Atoms) -> _Peaks:
    return _Peaks(moments[:landmark], moments[landmark:], atoms)


class BlockCost:
    """What one block costs on one rank, in bytes.

    ``retained`` stays alive between forward and backward and includes the block's input where it is saved.
    Peaks are the most that is alive during a pass, counting the block's own input, saved tensors and gradients, and
    nothing of its neighbours.
    """

    __slots__ = ("_backward", "_forward", "_held", "_retained", "_signed", "_structure")

    def __init__(self, structure: Structure, sizes: Sequence[int]) -> None:
        self._structure = structure
        self._signed = [*sizes, *(-size for size in sizes)]
        self._retained = self._forward = self._backward = self._held = -1

    def _sum(self, positions: Sequence[int]) -> int:
        return sum(map(self._signed.__getitem__, positions))

    @property
    def retained(self) -> int:
        if self._retained < 0:
            self._retained = self._sum(self._structure.retained)
        return self._retained

    @property
    def offloaded(self) -> int:
        """Bytes that leave for host memory between forward and backward; not part of ``retained``."""
        return self._sum(self._structure.offloaded)

    @property
    def input_bytes(self) -> int:
        return self._sum(self._structure.inputs)

    @property
    def output_bytes(self) -> int:
        return self._sum(self._structure.outputs)

    @property
    def input_retained(self) -> bool:
        return self._structure.input_retained

    @property
    def forward_peak(self) -> int:
        if self._forward < 0:
            self._forward = self._structure.forward.highest(self._signed)
        return self._forward

    def forward_name(self) -> str:
        """What runs at ``forward_peak``."""
        return self._structure.forward.named(self._signed)[1]

    @property
    def backward_peak(self) -> int:
        if self._backward < 0:
            self._backward = self._structure.backward.highest(self._signed)
        return self._backward

    def backward_name(self) -> str:
        """What runs at ``backward_peak``."""
        return self._structure.backward.named(self._signed)[1]

    @property
    def backward_peak_held(self) -> int:
        """``backward_peak`` where the caller holds the gradient of the output until the pass is over."""
        if self._held < 0:
            self._held = self._structure.backward_held.highest(self._signed)
        return self._held

    @property
    def no_grad_peak(self) -> int:
        """Peak of a forward pass that saves nothing (the first pass of a checkpointed layer)."""
        return self._structure.no_grad.highest(self._signed)

    @property
    def no_grad_retained(self) -> int:
        """Bytes that such a pass keeps as long as its output lives."""
        return self._sum(self._structure.no_grad_retained)

    @property
    def before_landmark_forward(self) -> int:
        """``forward_peak`` before the landmark; 0 where there is none."""
        return self._structure.forward.before.highest(self._signed)

    @property
    def before_landmark(self) -> tuple[int, int, int, int]:
        """Peaks before the landmark (in backward, from it on): forward, backward, ``backward_peak_held``,
        ``no_grad_peak``; of all 0 where there is none."""
        s, signed = self._structure, self._signed
        return (
            s.forward.before.highest(signed), s.backward.after.highest(signed), s.backward_held.after.highest(signed),
            s.no_grad.before.highest(signed),
        )

    @property
    def tensors(self) -> tuple[SavedTensor, ...]:
        """What ``retained`` is made of, storages of one name together."""
        sums: dict[tuple[str, Part, Provenance], int] = {}
        for name, part, provenance, position in self._structure.tensors:
            key = name, part, provenance
            sums[key] = sums.get(key, 0) + self._signed[position]
        return tuple(SavedTensor(n, nbytes, part, how) for (n, part, how), nbytes in sums.items() if nbytes)

    def by_part(self) -> dict[tuple[Part, Provenance], int]:
        """``retained`` by part of the model and how it is known."""
        sums: dict[tuple[Part, Provenance], int] = {}
        for _, part, provenance, position in self._structure.tensors:
            sums[part, provenance] = sums.get((part, provenance), 0) + self._signed[position]
        return {key: nbytes for key, nbytes in sums.items() if nbytes}


def cost_of(tape: Tape) -> BlockCost:
    """The cost of a tape that was recorded with plain numbers."""
    atoms = Atoms()
    return BlockCost(Structure(tape, atoms), atoms.sizes)


# ---------------------------------------------------------------------------------------------------------------
# Following a tape
# ---------------------------------------------------------------------------------------------------------------


class _Grad:
    """One gradient storage, shared by every tensor whose gradient it is."""

    __slots__ = ("refs", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self.refs = 1


def _used(node: Node) -> Sequence[Tensor]:
    """The storages that a node reads."""
    if type(node) is Op:
        return node.storages
    if type(node) is Region:
        return [t for inner in node.nodes for t in _used(inner)]
    return ()


def _made(node: Node) -> Iterator[Tensor]:
    if isinstance(node, Op):
        yield from node.outputs
    elif isinstance(node, Region):
        for inner in node.nodes:
            yield from _made(inner)


def _every_tensor(nodes: Iterable[Node]) -> Iterator[Tensor]:
    for node in nodes:
        if isinstance(node, Op):
            yield from (*node.inputs, *node.outputs, *node.saves)
        elif isinstance(node, Region):
            yield from (*node.inputs, *node.outputs)
            yield from _every_tensor(node.nodes)


class _Run:
    """One forward pass over a tape and, after it, one backward pass."""

    def __init__(self, tape: Tape, atoms: Atoms) -> None:
        self.tape = tape
        self.atoms = atoms
        self.refs: dict[Tensor, int] = {}
        self.alive = 0
        #: What was alive when, in order; and how many of them are before the landmark.
        self.moments: list[Moment] = []
        self.landmark = 0
        self.emptied: set[Tensor] = set()  # discarded storages: referenced, but without bytes
        self._offloaded: dict[Tensor, int] = {}  # saves by offloading operations
        self._scope: dict[Tensor, int] = {}  # forward-scope references (0 or 1 a tensor)
        self._grads: dict[Tensor, _Grad] = {}
        self._grad_units = 0
        #: Outputs made anew by discarding regions, and by the one that is running forward again.
        self._anew: dict[int, list[Tensor]] = {}
        self._making: list[Tensor] | None = None

    def copy(self) -> _Run:
        """The same moment between the passes."""
        other = _Run.__new__(_Run)
        other.tape, other.atoms, other.alive = self.tape, self.atoms, self.alive
        other.refs, other.emptied = dict(self.refs), set(self.emptied)
        other._offloaded, other._scope = dict(self._offloaded), dict(self._scope)
        other._grads, other._grad_units, other._anew, other._making = {}, 0, {}, None
        other.moments, other.landmark = [], 0
        return other

    # ---- reference counting ----

    def scope_refs(self, t: Tensor) -> int:
        return self._scope.get(t, 0)

    def _acquire(self, t: Tensor) -> None:
        t = t.storage
        n = self.refs.get(t, 0)
        if n == 0:
            self.alive += t.units
        self.refs[t] = n + 1

    def _release(self, t: Tensor) -> None:
        t = t.storage
        n = self.refs[t] - 1
        if n:
            self.refs[t] = n
        else:
            del self.refs[t]
            if t in self.emptied:
                self.emptied.discard(t)
            else:
                self.alive -= t.units

    def _empty(self, t: Tensor) -> None:
        t = t.storage
        if t in self.refs and t not in self.emptied:
            self.emptied.add(t)
            self.alive -= t.units

    def _refill(self, t: Tensor) -> None:
        t = t.storage
        if t in self.emptied:
            self.emptied.discard(t)
            self.alive += t.units

    def offloaded_tensors(self) -> set[Tensor]:
        """Storages that only offloading operations keep, large enough to be worth the copy."""
        return {
            t for t, n in self._offloaded.items()
            if n == self.refs.get(t, 0) - self.scope_refs(t)
            and t.bytes >= MINIMUM_OFFLOADED_BYTES and t not in self.emptied
        }

    def _enter_scope(self, t: Tensor) -> None:
        t = t.storage
        if self._making is not None and t in self.emptied:
            again = Tensor(f"{t.name} (recomputed)", t.bytes, 0)
            again.units = t.units
            self._acquire(again)
            self._making.append(again)
        if not self._scope.get(t):
            self._scope[t] = 1
            self._acquire(t)

    def _leave_scope(self, t: Tensor) -> None:
        t = t.storage
        if self._scope.pop(t, 0):
            self._release(t)

    def _mark(self, name: str, extra: Any = 0) -> None:
        self.moments.append(Moment(name, self.alive + self._grad_units + self.atoms.unit(extra)))

    # ---- forward ----

    def forward(self, *, save: bool = True) -> None:
        for t in self.tape.input_tensors:
            self._enter_scope(t)
        self._mark("input")
        self._run(self.tape.nodes, save, keep=set(self.tape.output_tensors))

    def _run(
        self, nodes: Sequence[Node], save: bool, keep: set[Tensor], own: set[Tensor] | None = None
    ) -> None:
        """Run nodes forward. ``keep``: never leaves scope here; ``own``: all that may (None: everything)."""
        keep = {t.storage for t in keep}
        last: dict[Tensor, int] = {}
        for i, node in enumerate(nodes):
            for t in _used(node):
                last[t] = i
        for i, node in enumerate(nodes):
            if isinstance(node, Op):
                for t in node.outputs:
                    self._enter_scope(t)
                self._mark(node.name, node.workspace)
                if save or node.always_saves:
                    self._save(node.saves, node.offloaded)
                gone: Iterable[Tensor] = (*node.storages, *[t.storage for t in node.outputs])
            elif isinstance(node, Region):
                if save:
                    self._save(node.inputs, node.offloaded)
                made = {t for t in _made(node) if t.storage is t}
                later = {t for t in made if last.get(t, -1) > i} | (keep & made)
                # The first pass of a region saves nothing inside.
                self._run(node.nodes, False, keep | later, own=made)
                gone = (*_used(node), *made)
            elif isinstance(node, Discard):
                if save:
                    for t in node.region.outputs:
                        self._empty(t)
                continue
            else:
                self.landmark = len(self.moments)
                continue
            for t in gone:
                if t in keep or last.get(t, -1) > i or (own is not None and t not in own):
                    continue
                self._leave_scope(t)

    def _save(self, tensors: Iterable[Tensor], offloaded: bool) -> None:
        for t in tensors:
            self._acquire(t)
            if offloaded:
                self._offloaded[t.storage] = self._offloaded.get(t.storage, 0) + 1

    # ---- backward ----

    def backward(self, *, hold: bool) -> None:
        """The caller has consumed the outputs: only saved references remain. Gradients of outputs arrive.

        ``hold``: a variable of the caller keeps them to the end, so that nothing is added into them either.
        """
        for t in list(self._scope):
            self._leave_scope(t)
        for t in self.tape.output_tensors:
            if t.grad_units:
                self._new_grad(t)
                self._grads[t].refs += hold
        self.moments = []
        self._mark("grad of output")
        self.landmark = 1
        passed = self._back(self.tape.nodes)
        self.landmark = passed if passed is not None else len(self.moments)

    def _new_grad(self, t: Tensor) -> None:
        self._grads[t] = _Grad(t.grad_units)
        self._grad_units += t.grad_units

    def _drop_grad(self, t: Tensor) -> None:
        g = self._grads.pop(t, None)
        if g is not None:
            self._let_go(g)

    def _let_go(self, g: _Grad) -> None:
        g.refs -= 1
        if g.refs == 0:
            self._grad_units -= g.units

    def _add_grad(self, t: Tensor, g: _Grad, op: str) -> None:
        """Accumulate ``g`` (whose reference is handed over) into the gradient of ``t``."""
        have = self._grads.get(t)
        if have is None:
            self._grads[t] = g
            return
        if have.refs > 1 and g.refs > 1:  # neither is ours to add into: a third storage
            self._grad_units += t.grad_units
            self._mark(op + " (gradient sum)")
            self._drop_grad(t)
            self._grads[t] = _Grad(t.grad_units)
            self._let_go(g)
            return
        keep, gone = (have, g) if have.refs == 1 else (g, have)
        self._let_go(gone)
        self._grads[t] = keep

    def _back(self, nodes: Sequence[Node]) -> int | None:
        """Run nodes backward; the number of moments before the landmark, if it is among them."""
        passed = None
        for node in reversed(nodes):
            if isinstance(node, Op):
                self._back_op(node)
            elif isinstance(node, Region):
                inner = self._back_region(node)
                passed = passed if inner is None else inner
            elif isinstance(node, Discard):
                self._refill_region(node.region)
            else:
                passed = len(self.moments)
                self._mark(node.name)
        return passed

    def _back_op(self, op: Op) -> None:
        if op.scope:
            return
        grads = [t for t in op.outputs if t in self._grads]
        saves = op.saves
        if op.in_place and grads:
            self._release(saves[0])
            saves = saves[1:]
        if not grads:
            for t in op.saves:
                self._release(t)
            return
        targets = [t for t in dict.fromkeys(op.inputs) if t.grad_units]
        if op.alias:
            self._mark(op.name, op.backward_workspace)
            for t in targets:
                g = self._grads[grads[0]]
                g.refs += 1
                self._add_grad(t, g, op.name)
        else:
            fresh = []
            for t in targets:
                self._grad_units += t.grad_units
                fresh.append(_Grad(t.grad_units))
            self._mark(op.name, op.backward_workspace)
            for t, g in zip(targets, fresh, strict=True):
                self._add_grad(t, g, op.name)
        for t in saves:
            self._release(t)
        for t in grads:
            self._drop_grad(t)

    def _refill_region(self, region: Region) -> None:
        """Recompute a discarded region when its consumer's gradient arrives."""
        outs = {t for t in _made(region) if t in self.refs}
        self._making = self._anew[id(region)] = []
        self._replay_from(region, outs)
        self._making = None
        for t in region.outputs:
            self._refill(t)
        self._mark(region.name + " (recomputed)")
        for t in outs:
            self._leave_scope(t)

    def _replay_from(self, region: Region, outs: set[Tensor]) -> None:
        """Run a region's forward again, now saving; ``outs`` stay in scope."""
        for t in region.inputs:
            self._enter_scope(t)
        self._run(region.nodes, True, keep=outs | set(region.inputs))
        for t in region.inputs:
            self._leave_scope(t)

    def _back_region(self, region: Region) -> int | None:
        outs: set[Tensor] = set()
        grads: dict[Tensor, _Grad] = {}
        if not region.discards:
            outs = {t for t in _made(region) if t in self._grads}
            self._replay_from(region, outs)
            grads = {t: self._grads[t] for t in outs}
            for g in grads.values():
                g.refs += 1
        passed = self._back(region.nodes)
        # Variables of ``CheckpointFunction.backward`` hold the recomputed outputs and their gradients to its end.
        for t in outs:
            self._leave_scope(t)
        for g in grads.values():
            self._let_go(g)
        for t in (*self._anew.pop(id(region), ()), *region.inputs):
            self._release(t)
        return passed


__all__ = ["BlockCost", "Landmark", "SavedTensor", "Structure", "cost_of"]
