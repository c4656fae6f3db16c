"""What is alive at every moment of a tape, by reference counting, as in PyTorch.

The rules, with their source:

* A tensor made in forward lives until its last use in forward, and as long as an operation saves it.
* Backward runs the operations in reverse (``torch/csrc/autograd/engine.cpp``: highest sequence number first).
  While an operation runs backward, its output gradients, its saved tensors, its scratch and its input gradients
  are alive together; then saved tensors and output gradients are freed.
* A tensor used twice gets two gradients. They are summed in place if the first has no other reference, else into a
  third (``torch/csrc/autograd/input_buffer.cpp: accumulate``).
* Checkpoints, discarding regions and delayed weight gradients as in ``tape``.

Following the tape (``Structure``) and putting in the numbers (``BlockCost``) are two steps. Which tensors are alive at
which moment depends on the tape alone, so a structure counts how many tensors of each size are alive. Few moments can
be the peak, whatever the sizes are; the others are dropped. The counts of a moment are packed into one big integer, a
field of bits for each size, so that adding all counts is one addition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, NamedTuple

from bridge_memory.components import Part, Provenance
from bridge_memory.tapes.symbolic import SymInt
from bridge_memory.tapes.tape import Cut, Discard, Flush, Landmark, Node, Op, Region, Tape, Tensor

#: Bits of one count. The highest bit is for comparisons, so no size may be alive 2^23 times at once.
_FIELD = 24
_ONE_FIELD = (1 << _FIELD) - 1
COUNT_BYTES = _FIELD // 8
#: Moments with which every other is compared. A moment that none of these dominates is kept, at worst needlessly.
_DOMINATORS = 8


class SavedTensor(NamedTuple):
    """All storages of one name that stay alive from forward to backward, in bytes."""

    name: str
    bytes: int
    part: Part = Part.NONE
    provenance: Provenance = Provenance.FORMULA


class Atoms:
    """The distinct sizes of a tape: each has a position, and a field of bits in which it is counted."""

    def __init__(self) -> None:
        #: Unit of each plain number, and of each symbolic size by its register.
        self._of_numbers: dict[Any, int] = {0: 0}
        self._of_registers: dict[int, int] = {}
        #: In order of their positions.
        self.sizes: list[Any] = []
        #: Positions of sizes that count apart.
        self.apart: list[int] = []

    def unit(self, size: Any) -> int:
        """A count of 1 in the field of ``size``; 0 for the size 0."""
        known, key = (self._of_registers, size.register) if type(size) is SymInt else (self._of_numbers, size)
        found = known.get(key)
        if found is None:
            found = known[key] = 1 << (_FIELD * len(self.sizes))
            self.sizes.append(size)
        return found

    def unit_apart(self, size: Any) -> int:
        """As ``unit``, in a field that no other size shares."""
        self.apart.append(len(self.sizes))
        self.sizes.append(size)
        return 1 << (_FIELD * self.apart[-1])

    @property
    def highest_bits(self) -> int:
        """The highest bit of every field."""
        return ((1 << _FIELD * len(self.sizes)) - 1) // _ONE_FIELD << (_FIELD - 1)

    @staticmethod
    def positions(units: int) -> tuple[int, ...]:
        """Positions of the sizes in a sum, each as often as it is counted."""
        out: list[int] = []
        while units:
            position = (units & -units).bit_length() // _FIELD
            at = position * _FIELD
            out += [position] * (units >> at & _ONE_FIELD)
            units = units >> (at + _FIELD) << (at + _FIELD)
        return tuple(out)


class Moment(NamedTuple):
    """What runs (``name``), and the counts of everything alive meanwhile, its scratch included (``units``)."""

    name: str
    units: int


class _PeakCandidates:
    """Moments of a pass of which one is its peak.

    They are evaluated as a walk from one moment to the next, one size at a time. From one moment to the next, freed
    sizes are subtracted before new ones are added, so that no step of the walk is higher than both moments.
    """

    __slots__ = ("_moments", "_names", "_number", "_order")

    def __init__(self, moments: Sequence[Moment], atoms: Atoms) -> None:
        self._moments = moments
        #: Number of sizes.
        self._number = len(atoms.sizes)
        #: The walk, made on first use.
        self._order: list[int] | None = None
        self._names: list[str] = []

    def _walk(self) -> list[int]:
        if self._order is not None:
            return self._order
        number = self._number
        order: list[int] = []
        names: list[str] = []
        before = 0
        for name, units in self._moments:
            come: list[int] = []
            differ = before ^ units
            while differ:
                position = (differ & -differ).bit_length() // _FIELD
                at = position * _FIELD
                was, now = before >> at & _ONE_FIELD, units >> at & _ONE_FIELD
                if was > now:
                    order += [number + position] * (was - now)
                else:
                    come += [position] * (now - was)
                differ = differ >> (at + _FIELD) << (at + _FIELD)
            order += come
            names += [name] * (len(order) - len(names))
            before = units
        self._names = names
        self._order = order
        return order

    def highest(self, signed: Sequence[int]) -> int:
        """The peak in bytes. ``signed``: the bytes of every size, then the same negated."""
        return max(accumulate(map(signed.__getitem__, self._walk())), default=0)

    def named(self, signed: Sequence[int]) -> tuple[int, str]:
        """(bytes, what runs) at the peak, the first of equals."""
        walk = list(accumulate(map(signed.__getitem__, self._walk())))
        if not walk:
            return 0, ""
        highest = max(walk)
        return highest, self._names[walk.index(highest)]

    def __len__(self) -> int:
        return len(self._moments)

    @property
    def steps(self) -> Sequence[int]:
        """The walk: with n sizes, i adds one of the i-th size and n + i removes one."""
        return self._walk()

    def counts(self) -> bytes:
        """Counts of each size, moment after moment: ``COUNT_BYTES`` bytes a size, little-endian."""
        width = COUNT_BYTES * self._number
        return b"".join([units.to_bytes(width, "little") for _, units in self._moments])


class _Peaks:
    """The candidates of a pass before its landmark and after it."""

    __slots__ = ("after", "before")

    def __init__(self, before: Sequence[Moment], after: Sequence[Moment], atoms: Atoms) -> None:
        self.before = _PeakCandidates(_undominated(before, atoms), atoms)
        self.after = _PeakCandidates(_undominated(after, atoms), atoms)

    def highest(self, signed: Sequence[int]) -> int:
        before = self.before.highest(signed)
        return max(before, self.after.highest(signed)) if self.after else before

    def named(self, signed: Sequence[int]) -> tuple[int, str]:
        first, second = self.before.named(signed), self.after.named(signed)
        return first if first[0] >= second[0] else second


def _undominated(moments: Sequence[Moment], atoms: Atoms) -> list[Moment]:
    """Moments without those that another dominates, that is, counts at least as many of every size."""
    top = atoms.highest_bits
    kept: list[Moment] = []
    for moment in moments:
        # Neighbours first: while memory grows, each moment dominates the last.
        if kept and (kept[-1].units + top - moment.units) & top == top:
            continue
        while kept and (moment.units + top - kept[-1].units) & top == top:
            kept.pop()
        kept.append(moment)
    out: list[Moment] = []
    # Moments with the most bits set first: they are the likeliest to dominate another.
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


class _Between(NamedTuple):
    """What one tape keeps between its passes. Storages have their plan's numbers."""

    #: Counts of everything alive but outputs that belong to the caller.
    alive: int
    #: Of saved storages.
    units: dict[int, int]
    #: Those that may go to host memory, with the modules around each operation that saves them.
    inside: dict[int, frozenset[frozenset[str]]]
    #: Without storage between the passes, if they stay on the GPU.
    discarded: frozenset[int]
    #: (number, a ``Structure.tensors``) of what is saved and not discarded by a region.
    tensors: tuple[tuple[int, Any], ...]
    input: int | None


class Structure:
    """What is alive when on one tape, whatever its sizes are."""

    __slots__ = (
        "_between", "_offloading", "apart", "backward", "backward_held", "discarded", "forward", "input_discarded",
        "input_retained", "inputs", "no_grad", "no_grad_retained", "nodes", "offloaded", "output_reached", "outputs",
        "retained", "tensors",
    )  # fmt: skip

    def __init__(self, tape: Tape, atoms: Atoms, *, without_gradients: bool = True) -> None:
        """``without_gradients``: also follow a forward pass that saves nothing, the first one under full recomputation.
        """
        plan = _Plan(tape, atoms)
        run = _Run(plan)
        run.forward(save=True)
        inside = run.saved_inside()
        # Outputs that nothing saves belong to the caller.
        unsaved_outputs = sum(plan.units[i] for i in set(plan.output_storages) if run.refs[i] == run.scope[i])
        saved = [i for i in run.order if run.refs[i] > run.scope[i]]
        between = _Between(
            run.alive - unsaved_outputs, {i: plan.units[i] for i in saved}, inside,
            frozenset(plan.discarded_between_passes.intersection(saved) - run.discarded),
            tuple(
                (i, (t.name, t.part, t.provenance, atoms.positions(t.units)[0]))
                for i in saved if i not in run.discarded and (t := plan.tensors[i]).units
            ),
            plan.inputs[0] if plan.inputs else None,
        )  # fmt: skip
        self._between = between if inside else None
        self._offloading: dict[frozenset[str], Structure] = {}
        self._keep(between, set(inside))
        #: Positions of sizes without which costs are asked for too.
        self.apart = tuple(atoms.apart)
        self.inputs = atoms.positions(sum(t.units for t in tape.input_tensors))
        self.outputs = atoms.positions(sum(t.units for t in tape.output_tensors))
        self.output_reached = any(t.has_gradient for t in tape.output_tensors)
        forward, in_turns = (run.moments, run.landmark), _turns_forward(run)
        backward, held = run, run.copy()
        backward.backward(hold=False)
        held.backward(hold=True)
        no_grad = _Run(plan)
        if without_gradients:
            no_grad.forward(save=False)
        self.no_grad_retained = atoms.positions(
            sum(plan.units[i] for i in no_grad.order if no_grad.refs[i] > no_grad.scope[i])
        )
        self.forward = _split(*forward, atoms)
        self.backward = _split(backward.moments, backward.landmark, atoms)
        self.backward_held = _split(held.moments, held.landmark, atoms)
        self.no_grad = _split(no_grad.moments, no_grad.landmark, atoms)
        #: If the tape has the nodes of an overlapped schedule, the candidates of each turn, of two passes, of which
        #: one runs forward and the other backward: those of the first, then those of the second.
        self.nodes: tuple[_PeakCandidates, ...] = ()
        if len(in_turns) == len(TURNS):
            in_turns += _turns_backward(backward)
            self.nodes = tuple(_PeakCandidates(_undominated(moments, atoms), atoms) for moments in in_turns)

    def _keep(self, between: _Between, offloaded: set[int]) -> None:
        """What is kept between the passes. ``offloaded``: storages that go to host memory, which are alive during
        both."""
        units, positions = between.units, Atoms.positions
        discarded = between.discarded - offloaded
        offloaded_units, discarded_units = (sum(units[i] for i in some) for some in (offloaded, discarded))
        self.retained = positions(between.alive - offloaded_units - discarded_units)
        self.offloaded, self.discarded = positions(offloaded_units), positions(discarded_units)
        self.tensors = tuple(t for i, t in between.tensors if i not in offloaded and i not in discarded)
        self.input_retained = between.input in units
        self.input_discarded = between.input in discarded

    def offloading(self, modules: frozenset[str] | None) -> Structure:
        """The same with no modules but these offloaded; None: all. Whatever goes to host memory between the passes is
        alive during both, so that their moments are the same."""
        between = self._between
        if between is None or modules is None:
            return self
        offloaded = {i for i, saves in between.inside.items() if all(modules & around for around in saves)}
        if len(offloaded) == len(between.inside):
            return self
        found = self._offloading.get(modules)
        if found is None:
            found = copy(self)
            found._between, found._offloading = None, {}
            found._keep(between, offloaded)
            self._offloading[modules] = found
        return found

    def sums(self) -> dict[str, Sequence[int]]:
        """Properties of ``BlockCost`` that are sums -> positions of the sizes to add up."""
        return {
            "retained": self.retained, "offloaded": self.offloaded, "discarded": self.discarded,
            "input_bytes": self.inputs, "output_bytes": self.outputs, "no_grad_retained": self.no_grad_retained,
        }  # fmt: skip

    def peak_candidates(self) -> dict[str, tuple[_PeakCandidates, _PeakCandidates]]:
        """Properties of ``BlockCost`` that are peaks -> their candidates before the landmark and after it."""
        passes = {
            "forward_peak": self.forward, "backward_peak": self.backward, "backward_peak_held": self.backward_held,
            "no_grad_peak": self.no_grad,
        }  # fmt: skip
        return {name: (peaks.before, peaks.after) for name, peaks in passes.items()}


#: Nodes of a layer with experts in an overlapped schedule: up to the router, the exchange, the experts, the exchange
#: back. Odd ones exchange. Other layers have one, which runs in the turns of the first.
NODES = 4
#: The order of the nodes of two layers, of which one runs backward: (backward, node) (megatron-core
#: ``models/common/model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``).
TURNS = (
    (True, 3), (False, 0), (True, 2), (False, 1), (True, 1), (False, 2), (False, 3), (True, 0),
)  # fmt: skip


def _turns_forward(run: _Run) -> list[list[Moment]]:
    """What is alive of a layer at each turn, if it runs forward; empty without cuts."""
    if not run.cuts:
        return []
    before, out = run.moments[:1], []
    ends = [at for at, _ in run.cuts] + [len(run.moments)]
    after = [Moment("", alive) for _, alive in run.cuts] + [Moment("", run.alive)]
    for backwards, node in TURNS:
        if not backwards and node < len(ends):
            out.append(run.moments[ends[node - 1] if node else 0 : ends[node]])
            before = [after[node]]
        else:
            out.append(before)
    return out if len(ends) == NODES else []


def _turns_backward(run: _Run) -> list[list[Moment]]:
    """The same of a layer that runs backward."""
    before, out = run.moments[:1], []
    ends = [len(run.moments)] + [at for at, _ in reversed(run.cuts)]
    after = [Moment("", alive) for _, alive in reversed(run.cuts)]
    for backwards, node in TURNS:
        if backwards:
            out.append(run.moments[ends[node + 1] if node + 1 < NODES else 0 : ends[node]])
            before = [after[node - 1]] if node else []
        else:
            out.append(before)
    return out


def _split(moments: Sequence[Moment], landmark: int, atoms: Atoms) -> _Peaks:
    return _Peaks(moments[:landmark], moments[landmark:], atoms)


class BlockCost:
    """What one block costs on one rank, in bytes.

    ``retained`` stays alive between forward and backward and includes the block's input where that is saved. A peak is
    the most that is alive during a pass: the block's input, saved tensors, gradients and temporaries, without those of
    other blocks.
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
        """Bytes in host memory between forward and backward; not part of ``retained``."""
        return self._sum(self._structure.offloaded)

    @property
    def discarded(self) -> int:
        """Bytes of saved tensors without storage between the chunk's passes; not part of ``retained``."""
        return self._sum(self._structure.discarded)

    @property
    def input_discarded(self) -> bool:
        """Whether the input is one of these."""
        return self._structure.input_discarded

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
    def output_reached(self) -> bool:
        """Whether a gradient arrives at its output."""
        return self._structure.output_reached

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
        """``backward_peak`` if the caller keeps the gradient of the output until the pass is over."""
        if self._held < 0:
            self._held = self._structure.backward_held.highest(self._signed)
        return self._held

    @property
    def without_apart(self) -> BlockCost:
        """The same without scratch of backward that counts apart (``tape.Op.apart``)."""
        apart = self._structure.apart
        sizes = self._signed[: len(self._signed) // 2]
        return BlockCost(self._structure, [0 if i in apart else size for i, size in enumerate(sizes)])

    @property
    def no_grad_peak(self) -> int:
        """Peak of a forward pass that saves nothing (the first pass of a checkpointed layer)."""
        return self._structure.no_grad.highest(self._signed)

    @property
    def no_grad_retained(self) -> int:
        """Bytes that such a pass keeps until its output is freed."""
        return self._sum(self._structure.no_grad_retained)

    @property
    def before_landmark_forward(self) -> int:
        """``forward_peak`` before the landmark; 0 without a landmark."""
        return self._structure.forward.before.highest(self._signed)

    @property
    def before_landmark(self) -> tuple[int, int, int, int]:
        """Peaks of forward up to the landmark and of backward from it on: (``forward_peak``, ``backward_peak``,
        ``backward_peak_held``, ``no_grad_peak``); zeros without a landmark."""
        s, signed = self._structure, self._signed
        return (
            s.forward.before.highest(signed), s.backward.after.highest(signed), s.backward_held.after.highest(signed),
            s.no_grad.before.highest(signed),
        )

    @property
    def turns(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The most alive at each of ``TURNS`` if the block runs forward, and if it runs backward; None if it has no
        nodes."""
        found = tuple([candidates.highest(self._signed) for candidates in self._structure.nodes])
        return (found[: len(TURNS)], found[len(TURNS) :]) if found else None

    @property
    def tensors(self) -> tuple[SavedTensor, ...]:
        """The saved tensors whose sum is ``retained``, those of one name together."""
        sums: dict[tuple[str, Part, Provenance], int] = {}
        for name, part, provenance, position in self._structure.tensors:
            key = name, part, provenance
            sums[key] = sums.get(key, 0) + self._signed[position]
        return tuple(SavedTensor(n, nbytes, part, how) for (n, part, how), nbytes in sums.items() if nbytes)

    def by_part(self) -> dict[tuple[Part, Provenance], int]:
        """``retained`` by part of the model and provenance."""
        sums: dict[tuple[Part, Provenance], int] = {}
        for _, part, provenance, position in self._structure.tensors:
            sums[part, provenance] = sums.get((part, provenance), 0) + self._signed[position]
        return {key: nbytes for key, nbytes in sums.items() if nbytes}


# ---------------------------------------------------------------------------------------------------------------
# Following a tape
# ---------------------------------------------------------------------------------------------------------------


class _Grad:
    """One gradient storage; several tensors may share it."""

    __slots__ = ("refs", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        self.refs = 1


class _Step:
    """An ``Op`` with tensors by number, and the storages for which it is the last use in its region."""

    __slots__ = (
        "alias", "always_saves", "backward_workspace", "delayed", "in_place", "inputs", "last_uses", "name",
        "no_grad_workspace", "offloaded", "outputs", "saves", "storages", "workspace",
    )

    name: str
    #: Storages that forward makes, saves, and uses for the last time.
    storages: list[int]
    saves: list[int]
    last_uses: list[int]
    #: Tensors whose gradients backward consumes, and those to which it adds one.
    outputs: list[int]
    inputs: list[int]
    workspace: int
    no_grad_workspace: int
    backward_workspace: int
    alias: bool
    in_place: int
    offloaded: frozenset[str]
    always_saves: bool
    #: What stays for its delayed weight gradient.
    delayed: _Delayed | None


class _Delayed(NamedTuple):
    """``tape.Delayed`` with tensors by number and sizes as units."""

    flush: Flush
    #: Storages.
    inputs: list[int]
    gradient: bool
    made: int
    weight: int


class _Part:
    """A ``Region`` with tensors by number."""

    __slots__ = (
        "discards", "inputs", "last_uses", "later", "made", "made_tensors", "name", "offloaded", "outputs", "refills",
        "steps",
    )

    name: str
    steps: list[_Node]
    inputs: list[int]
    #: Storages, and tensors, that it makes; which of these storages are used after it.
    made: set[int]
    made_tensors: list[int]
    later: set[int]
    last_uses: list[int]
    outputs: list[int]
    discards: bool
    refills: bool
    offloaded: frozenset[str]


class _Scope:
    """A point at which variables still hold storages, and those for which that is the last use."""

    __slots__ = ("last_uses",)

    def __init__(self) -> None:
        self.last_uses: list[int] = []


class _DiscardPoint(NamedTuple):
    """Where a discarding region's outputs lose their storage."""

    part: _Part


_Node = _Step | _Part | _Scope | _DiscardPoint | Landmark | Flush | Cut


class _Plan:
    """A tape with tensors by number, and everything that can be worked out before a pass runs."""

    def __init__(self, tape: Tape, atoms: Atoms) -> None:
        self.tensors: list[Tensor] = []
        self.least_offloaded = tape.least_offloaded
        self._number: dict[Tensor, int] = {}
        self._atoms = atoms
        #: By the number of a tensor: the unit of its bytes, that of its gradient's, and its storage.
        self.units: list[int] = []
        self.grad_units: list[int] = []
        self.storage: list[int] = []
        self._parts: dict[int, _Part] = {}
        self._number_tensors(tape.input_tensors)
        self._number_tensors(tape.output_tensors)
        self._number_all(tape.nodes)
        self.inputs = list(map(self._number.__getitem__, tape.input_tensors))
        self.outputs = list(map(self._number.__getitem__, tape.output_tensors))
        self.steps, _ = self._steps(tape.nodes)
        self.output_storages = [self.storage[i] for i in self.outputs]
        between = [self._number[t] for t in tape.discarded_between_passes]
        self.discarded_between_passes = {self.storage[i] for i in between}

    def _number_all(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if type(node) is Op:
                self._number_tensors(node.inputs)
                self._number_tensors(node.outputs)
                self._number_tensors(node.saves)
            elif type(node) is Region:
                self._number_tensors(node.inputs)
                self._number_all(node.nodes)

    def _number_tensors(self, tensors: Iterable[Tensor]) -> None:
        known, unit = self._number, self._atoms.unit
        for t in tensors:
            if t in known:
                continue
            if t.whole is not None:
                self._number_tensors((t.whole,))
            number = known[t] = len(self.tensors)
            self.tensors.append(t)
            t.units = unit(t.bytes)
            self.units.append(t.units)
            self.grad_units.append(unit(t.grad_bytes))
            self.storage.append(number if t.whole is None else self.storage[known[t.whole]])

    def _steps(self, nodes: Sequence[Node]) -> tuple[list[_Node], list[int]]:
        """(``nodes`` as steps, every storage that they read)."""
        out: list[_Node] = []
        reads: list[list[int]] = []
        makes: list[Sequence[int]] = []
        last: dict[int, int] = {}
        storage, number = self.storage, self._number.__getitem__
        for at, node in enumerate(nodes):
            read: list[int] = []
            made: Sequence[int] = ()
            if type(node) is Op:
                read = [storage[i] for i in map(number, node.inputs)]
                if node.scope:
                    out.append(_Scope())
                else:
                    step = self._step(node)
                    made = step.storages
                    out.append(step)
            elif type(node) is Region:
                part, read = self._part(node)
                made = list(part.made)
                out.append(part)
            elif type(node) is Discard:
                part = self._parts[id(node.region)]
                part.outputs = [storage[i] for i in map(number, node.region.outputs)]
                out.append(_DiscardPoint(part))
            elif isinstance(node, (Landmark, Flush, Cut)):
                out.append(node)
            for i in read:
                last[i] = at
            reads.append(read)
            makes.append(made)
        # A storage made and never used is freed at once: that is its last use.
        for at, (made_node, read, made) in enumerate(zip(out, reads, makes, strict=True)):
            if type(made_node) in (_Step, _Part, _Scope):
                last_uses = [i for i in dict.fromkeys([*read, *made]) if last.get(i, -1) <= at]
                made_node.last_uses = last_uses  # type: ignore[union-attr]
            if type(made_node) is _Part:
                made_node.later = {i for i in made_node.made if last.get(i, -1) > at}
        return out, [i for read in reads for i in read]

    def _step(self, op: Op) -> _Step:
        number, storage, unit = self._number.__getitem__, self.storage, self._atoms.unit
        step = _Step()
        step.name = op.name
        step.outputs = list(map(number, op.outputs))
        step.storages = [storage[i] for i in step.outputs]
        step.saves = [storage[i] for i in map(number, op.saves)]
        step.inputs = [i for i in dict.fromkeys(map(number, op.inputs)) if self.grad_units[i]]
        step.workspace = unit(op.workspace)
        step.backward_workspace = (self._atoms.unit_apart if op.apart else unit)(op.backward_workspace)
        same = op.no_grad_workspace is op.workspace
        step.no_grad_workspace = step.workspace if same else unit(op.no_grad_workspace)
        step.alias, step.in_place = op.alias, op.in_place
        step.offloaded, step.always_saves = op.offloaded, op.always_saves
        step.delayed = None
        if op.delayed is not None and op.flush is not None:
            delayed = op.delayed
            step.delayed = _Delayed(
                op.flush, [storage[i] for i in map(number, delayed.inputs)], delayed.gradient, unit(delayed.made),
                unit(delayed.weight),
            )
        return step

    def _part(self, region: Region) -> tuple[_Part, list[int]]:
        """(the region with tensors by number, every storage that it reads)."""
        part = self._parts[id(region)] = _Part()
        part.name, part.offloaded = region.name, region.offloaded
        part.discards, part.refills = region.discards, region.refills
        number = self._number.__getitem__
        part.inputs = [self.storage[i] for i in map(number, region.inputs)]
        part.steps, read = self._steps(region.nodes)
        part.made_tensors = list(map(number, _made(region)))
        part.made = {i for i in part.made_tensors if self.storage[i] == i}
        part.outputs = []
        return part, read


def _made(node: Node) -> Iterator[Tensor]:
    if isinstance(node, Op):
        yield from node.outputs
    elif isinstance(node, Region):
        for inner in node.nodes:
            yield from _made(inner)


class _Run:
    """One forward pass over a tape and, after it, one backward pass. Tensors are those of the plan, by number."""

    def __init__(self, plan: _Plan) -> None:
        number = len(plan.tensors)
        self.plan = plan
        self.refs = [0] * number
        #: References of the forward function's variables (0 or 1 a storage).
        self.scope = [0] * number
        self.alive = 0
        #: Storages in the order in which they were made.
        self.order: dict[int, None] = {}
        #: All moments in order, and how many of them are before the landmark.
        self.moments: list[Moment] = []
        self.landmark = 0
        #: At each cut of the pass: how many moments are before it, and the counts of everything alive.
        self.cuts: list[tuple[int, int]] = []
        #: The gradients that a node took, to which whoever runs it backward refers until it has run.
        self._taken: dict[int, _Grad] = {}
        #: Discarded storages: referenced, but without bytes.
        self.discarded: set[int] = set()
        #: Of every storage that operations in offloaded modules save, the modules around each of these.
        self._offloaded: dict[int, list[frozenset[str]]] = {}
        self._grads: dict[int, _Grad] = {}
        self._grad_units = 0
        #: Outputs that discarding regions have recomputed, by region, and the region that is being recomputed.
        self._recomputed: dict[int, list[int]] = {}
        self._recomputing = -1
        #: Those of them that nothing saved, by region.
        self._unsaved: dict[int, list[int]] = {}
        #: By the point at which they are made, delayed weight gradients: the operation, and the gradients it holds.
        self._delayed: dict[int, list[tuple[_Step, list[_Grad]]]] = {}

    def copy(self) -> _Run:
        """A copy, made between the passes."""
        other = _Run.__new__(_Run)
        other.plan, other.alive = self.plan, self.alive
        other.refs, other.scope, other.discarded = self.refs.copy(), self.scope.copy(), self.discarded.copy()
        other.order, other._offloaded = self.order, self._offloaded
        other._grads, other._grad_units, other._recomputed, other._recomputing = {}, 0, {}, -1
        other._delayed, other._unsaved = {}, {}
        other.moments, other.landmark, other.cuts, other._taken = [], 0, [], {}
        return other

    # ---- reference counting ----

    def _acquire(self, i: int) -> None:
        refs = self.refs
        if not refs[i]:
            self.alive += self.plan.units[i]
        refs[i] += 1

    def _release(self, i: int) -> None:
        refs = self.refs
        refs[i] -= 1
        if not refs[i]:
            if i in self.discarded:
                self.discarded.discard(i)
            else:
                self.alive -= self.plan.units[i]

    # Discarded storages: without bytes, a second storage while it is recomputed, then with bytes again, which are the
    # second's or (``copied``) its own, until the second is gone.

    def _discard(self, i: int) -> None:
        self.discarded.add(i)
        self.alive -= self.plan.units[i]

    def _come_again(self, i: int) -> None:
        self.alive += self.plan.units[i]

    def _refilled(self, i: int, *, copied: bool) -> None:
        if copied:
            self.alive += self.plan.units[i]

    def _second_gone(self, i: int) -> None:
        self.alive -= self.plan.units[i]

    def saved_inside(self) -> dict[int, frozenset[frozenset[str]]]:
        """Storages that only operations in offloaded modules save, if they have enough elements to be offloaded
        (``fine_grained_activation_offload.py: ChunkOffloadHandler.tensor_need_offloading_checker``), with the modules
        around these operations."""
        return {
            i: frozenset(saves) for i, saves in self._offloaded.items()
            if len(saves) == self.refs[i] - self.scope[i] and i not in self.discarded
            and (t := self.plan.tensors[i]).bytes >= self.plan.least_offloaded * t.item
        }

    def _enter_scope(self, storages: Iterable[int]) -> None:
        refs, scope, units = self.refs, self.scope, self.plan.units
        for i in storages:
            if self._recomputing >= 0 and i in self.discarded:
                # A second storage: the discarded one is still referenced, without bytes.
                self._come_again(i)
                self._recomputed[self._recomputing].append(i)
            if not scope[i]:
                scope[i] = 1
                if not refs[i]:
                    self.alive += units[i]
                    self.order[i] = None
                refs[i] += 1

    def _leave_scope(self, i: int) -> None:
        if self.scope[i]:
            self.scope[i] = 0
            self._release(i)

    def _mark(self, name: str, extra: int = 0) -> None:
        self.moments.append(Moment(name, self.alive + self._grad_units + extra))

    def _cut(self) -> None:
        self.cuts.append((len(self.moments), self.alive + self._grad_units))

    # Nodes run backward one by one, each a graph of its own: what it takes from others are leaves, whose gradients
    # autograd copies where something else refers to them (``accumulate_grad.h: accumulateGrad``).

    def _begin_node(self) -> None:
        self._taken = dict(self._grads)
        for g in self._taken.values():
            g.refs += 1

    def _end_node(self) -> None:
        units, known = self.plan.grad_units, {id(g) for g in self._taken.values()}
        shared = {
            i: g for i, g in self._grads.items()
            if self._taken.get(i) is not g and (g.refs > 1 or id(g) in known)
        }  # fmt: skip
        for i, g in shared.items():
            self._grads[i] = _Grad(units[i])
            self._grad_units += units[i]
            self._release_grad(g)
        if shared:
            self._mark("gradients of a node's inputs")
        for g in self._taken.values():
            self._release_grad(g)
        self._cut()
        self._begin_node()

    # ---- forward ----

    def forward(self, *, save: bool) -> None:
        self._enter_scope([self.plan.storage[i] for i in self.plan.inputs])
        self._mark("input")
        self._run(self.plan.steps, save, set(self.plan.output_storages), None)

    def _run(self, steps: Sequence[_Node], save: bool, keep: set[int], own: set[int] | None) -> None:
        """Run steps forward. ``keep``: storages that must not leave scope here. ``own``: the only ones that may (None:
        all)."""
        scope = self.scope
        for step in steps:
            kind = type(step)
            if kind is _Step:
                assert isinstance(step, _Step)
                self._enter_scope(step.storages)
                self._mark(step.name, step.workspace if save else step.no_grad_workspace)
                if save or step.always_saves:
                    self._save(step.saves, step.offloaded)
                last_uses = step.last_uses
            elif kind is _Scope:
                assert isinstance(step, _Scope)
                last_uses = step.last_uses
            elif kind is _Part:
                assert isinstance(step, _Part)
                if save:
                    self._save(step.inputs, step.offloaded)
                # The first pass of a region saves nothing inside.
                self._run(step.steps, False, keep | step.later, step.made)
                last_uses = step.last_uses
            elif kind is _DiscardPoint:
                assert isinstance(step, _DiscardPoint)
                if save:
                    for i in step.part.outputs:
                        if self.refs[i] and i not in self.discarded:
                            self._discard(i)
                continue
            elif kind is Cut:
                self._cut()
                continue
            elif kind is Flush:
                continue
            else:
                self.landmark = len(self.moments)
                continue
            for i in last_uses:
                if scope[i] and i not in keep and (own is None or i in own):
                    scope[i] = 0
                    self._release(i)

    def _save(self, storages: Sequence[int], offloaded: frozenset[str]) -> None:
        for i in storages:
            self._acquire(i)
            if offloaded:
                self._offloaded.setdefault(i, []).append(offloaded)

    # ---- backward ----

    def backward(self, *, hold: bool) -> None:
        """The caller has consumed the outputs, so that only saved references remain. Gradients of outputs arrive.

        ``hold``: a variable of the caller keeps these gradients to the end, so that nothing is added into them either.
        """
        for i, inside in enumerate(self.scope):
            if inside:
                self._leave_scope(i)
        for i in self.plan.outputs:
            if self.plan.grad_units[i]:
                self._grads[i] = _Grad(self.plan.grad_units[i])
                self._grad_units += self.plan.grad_units[i]
                self._grads[i].refs += hold
        self.moments, self.cuts = [], []
        self._mark("grad of output")
        if any(type(step) is Cut for step in self.plan.steps):
            self._begin_node()
        passed = self._back(self.plan.steps)
        self.landmark = passed if passed is not None else len(self.moments)

    def _release_grad(self, g: _Grad) -> None:
        g.refs -= 1
        if g.refs == 0:
            self._grad_units -= g.units

    def _add_grad(self, i: int, g: _Grad, op: str) -> None:
        """Accumulate ``g`` into the gradient of tensor ``i``; the caller's reference to ``g`` passes to it."""
        have = self._grads.get(i)
        if have is None:
            self._grads[i] = g
            return
        if have.refs > 1 and g.refs > 1:  # others refer to both, so the sum is a third storage
            units = self.plan.grad_units[i]
            self._grad_units += units
            self._mark(op + " (gradient sum)")
            self._release_grad(have)
            self._grads[i] = _Grad(units)
            self._release_grad(g)
            return
        keep, drop = (have, g) if have.refs == 1 else (g, have)
        self._release_grad(drop)
        self._grads[i] = keep

    def _back(self, steps: Sequence[_Node]) -> int | None:
        """Run steps backward; the number of moments before the landmark, if it is among them."""
        passed = None
        for step in reversed(steps):
            kind = type(step)
            if kind is _Step:
                self._back_step(step)  # type: ignore[arg-type]
            elif kind is Cut:
                self._end_node()
            elif kind is _Scope:
                pass
            elif kind is _Part:
                inner = self._back_part(step)  # type: ignore[arg-type]
                passed = passed if inner is None else inner
            elif kind is _DiscardPoint:
                self._refill(step.part)  # type: ignore[union-attr]
            elif kind is Flush:
                self._flush(step)  # type: ignore[arg-type]
            else:
                passed = len(self.moments)
                self._mark(step.name)  # type: ignore[union-attr]
        return passed

    def _back_step(self, step: _Step) -> None:
        found = self._grads
        grads = [i for i in step.outputs if i in found]
        saves = step.saves
        if not grads:
            for i in saves:
                self._release(i)
            return
        for i in saves[: step.in_place]:
            self._release(i)
        saves = saves[step.in_place :]
        if step.alias:
            self._mark(step.name, step.backward_workspace)
            for i in step.inputs:
                g = found[grads[0]]
                g.refs += 1
                self._add_grad(i, g, step.name)
        else:
            units = self.plan.grad_units
            for i in step.inputs:
                self._grad_units += units[i]
            self._mark(step.name, step.backward_workspace)
            for i in step.inputs:
                self._add_grad(i, _Grad(units[i]), step.name)
        if step.delayed is not None:
            self._delay(step, grads)
        for i in saves:
            self._release(i)
        for i in grads:
            self._release_grad(found.pop(i))

    def _delay(self, step: _Step, grads: Sequence[int]) -> None:
        """Its weight gradient is not made yet: hold what that needs."""
        delayed = step.delayed
        assert delayed is not None
        for i in delayed.inputs:
            self._acquire(i)
        held = [self._grads[i] for i in grads] if delayed.gradient else []
        for g in held:
            g.refs += 1
        self._grad_units += delayed.made
        self._delayed.setdefault(id(delayed.flush), []).append((step, held))

    def _flush(self, point: Flush) -> None:
        """Make the weight gradients that were delayed to this point, in the order of their operations' backward."""
        for step, held in self._delayed.pop(id(point), ()):
            delayed = step.delayed
            assert delayed is not None
            self._mark(f"{step.name} ({point.name})", delayed.weight)
            for i in delayed.inputs:
                self._release(i)
            for g in held:
                self._release_grad(g)
            self._grad_units -= delayed.made

    def _refill(self, part: _Part) -> None:
        """Recompute a discarded region when its consumer's gradient arrives."""
        # Of frozen linears nobody saved them; ``CheckpointWithoutOutput`` refers to what it recomputed until backward.
        unsaved = [i for i in part.outputs if not self.refs[i]]
        outs = {i for i in part.made_tensors if self.refs[i]}.union(unsaved)
        self._recomputing = id(part)
        recomputed = self._recomputed[self._recomputing] = []
        self._replay(part, outs)
        self._recomputing = -1
        self._unsaved[id(part)] = unsaved
        for i in unsaved:
            self.refs[i] += 1
        for i in part.outputs:
            if i in self.discarded:
                self.discarded.discard(i)
                self._refilled(i, copied=part.refills)
        if not part.refills:
            for i in recomputed:
                self.refs[i] += 1
        self._mark(part.name + " (recomputed)")
        for i in outs:
            self._leave_scope(i)

    def _replay(self, part: _Part, outs: set[int]) -> None:
        """Run a region's forward again, this time saving; storages of ``outs`` stay in scope."""
        self._enter_scope(part.inputs)
        self._run(part.steps, True, {self.plan.storage[i] for i in outs} | set(part.inputs), None)
        for i in part.inputs:
            self._leave_scope(i)

    def _back_part(self, part: _Part) -> int | None:
        outs: set[int] = set()
        grads: list[_Grad] = []
        if not part.discards:
            outs = {i for i in part.made_tensors if i in self._grads}
            if not outs:
                for i in part.inputs:
                    self._release(i)
                return None
            self._replay(part, outs)
            grads = [self._grads[i] for i in outs]
            for g in grads:
                g.refs += 1
        passed = self._back(part.steps)
        # Variables of ``CheckpointFunction.backward`` hold recomputed outputs and their gradients until it returns.
        for i in outs:
            self._leave_scope(self.plan.storage[i])
        for g in grads:
            self._release_grad(g)
        for i in self._recomputed.pop(id(part), ()):
            if part.refills:
                self._second_gone(i)
            else:
                self._release(i)
        for i in self._unsaved.pop(id(part), ()):
            self._release(i)
        for i in part.inputs:
            self._release(i)
        return passed
