"""A tape of what one block allocates, and the interpreter that finds what is alive when.

A block (attention, MLP, loss, ...) writes its forward pass as operations on tensors, in the order in which the
real implementation runs them: what each operation makes, what it keeps for its backward, and its scratch space.
From that one list everything else follows by reference counting, as in PyTorch itself:

* what stays alive between forward and backward (each storage counted once, however many operations save it),
* the highest number of bytes alive during the forward pass and during the backward pass,
* the same under recomputation (``checkpoint``) and under output-discarding recomputation (``discard``).

The rules of the interpreter, with their source:

* A tensor made in forward lives until its last use in forward, and as long as an operation saves it.
* Backward runs the operations in reverse (``torch/csrc/autograd/engine.cpp``: highest sequence number first).
  While an operation runs backward, its output gradients, its saved tensors, its scratch and its input gradients
  are alive together; then saved tensors and output gradients go.
* A tensor used twice gets two gradients which are summed in place when the first is nobody else's, else into a
  third (``torch/csrc/autograd/input_buffer.cpp: accumulate``).
* ``checkpoint``: forward saves the region's inputs only; backward runs the region's forward again, then its
  backward (``megatron/core/tensor_parallel/random.py: CheckpointFunction``).
* ``discard``: as a checkpoint, and the region's outputs lose their storage once consumed; when the gradient of the
  consumer arrives they are made again and copied into it, and both copies stay until the consumer, or the region,
  has run backward (``random.py: CheckpointWithoutOutput``).

Units are bytes. Nothing here knows what a layer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

#: Bytes: smaller tensors stay on the GPU (``TransformerConfig.min_offloaded_tensor_size``: 2^20 elements of bf16).
MINIMUM_OFFLOADED_BYTES = 2 * 1024 * 1024


#: The operation of ``Tape.router``.
_ROUTER = "router (marker)"


class T:
    """A tensor: its name, its bytes and whether a gradient of the same size flows to it.

    A view has no bytes of its own: whoever holds it holds ``storage``, the tensor that it is a part of.
    """

    __slots__ = ("bytes", "grad_bytes", "module", "name", "storage")

    def __init__(self, name: str, nbytes: int, grad_bytes: int, module: str = "") -> None:
        self.name = name
        self.module = module
        self.bytes = nbytes
        self.grad_bytes = grad_bytes
        self.storage: T = self

    def __repr__(self) -> str:
        return f"T({self.name}, {self.bytes})"


@dataclass(slots=True, eq=False)
class Op:
    name: str
    inputs: tuple[T, ...]
    outputs: tuple[T, ...]
    saves: tuple[T, ...] = ()
    workspace: int = 0
    backward_workspace: int = 0
    #: Input gradients are the output gradient itself (addition, views that copy nothing backward).
    alias: bool = False
    #: The input gradient is written over the first saved tensor.
    in_place: bool = False
    #: What it saves goes to host memory once the block is done and comes back for its backward.
    offloaded: bool = False
    #: It runs under ``torch.enable_grad``: its graph, and what that saves, is there even in a pass without gradients.
    always_saves: bool = False


@dataclass(slots=True, eq=False)
class Region:
    """A recomputed part of the tape."""

    name: str
    nodes: list[Op | Region | Discard] = field(default_factory=list)
    inputs: tuple[T, ...] = ()
    outputs: tuple[T, ...] = ()
    discards: bool = False
    offloaded: bool = False


@dataclass(slots=True, eq=False)
class Discard:
    """The point of the forward pass at which a discarding region's outputs lose their storage."""

    region: Region


Node = Op | Region | Discard


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One storage that stays alive from forward to backward."""

    name: str
    bytes: int
    module: str = ""


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What one block costs on one rank, in bytes.

    ``saved`` stays alive between forward and backward and includes the block's input where it is saved.
    ``forward_peak`` and ``backward_peak`` are the most that is alive during either pass, counting the block's
    own input, saved tensors and gradients, and nothing of its neighbours.
    """

    saved: int
    saved_tensors: tuple[SavedTensor, ...]
    input_bytes: int
    output_bytes: int
    input_saved: bool
    forward_peak: int
    forward_peak_op: str
    backward_peak: int
    backward_peak_op: str
    #: Peak of a forward pass that saves nothing (the first pass of a checkpointed layer).
    no_grad_peak: int
    #: Bytes that such a pass keeps as long as its output lives.
    no_grad_saved: int = 0
    #: ``backward_peak`` where the caller holds the gradient of the output until the pass is over.
    backward_peak_held: int = 0
    #: Peaks before the router (in backward, after it): forward, backward, ``backward_peak_held``, ``no_grad_peak``.
    early: tuple[int, int, int, int] = (0, 0, 0, 0)
    #: Bytes that leave for host memory between forward and backward; not part of ``saved``.
    offloaded: int = 0
    #: The largest tensors alive at the backward peak, for explanations.
    backward_peak_tensors: tuple[SavedTensor, ...] = ()
    forward_peak_tensors: tuple[SavedTensor, ...] = ()


class Tape:
    """Records one block's forward pass. See the module docstring for the rules."""

    def __init__(self) -> None:
        self._root = Region("root")
        self._stack: list[Region] = [self._root]
        self.input_tensors: list[T] = []
        self.output_tensors: list[T] = []
        self._offloading = False
        #: Label of everything recorded from here on: the module a user would look for.
        self.module = ""

    # ---- recording ----

    def input(self, name: str, nbytes: int, *, requires_grad: bool = True) -> T:
        """A tensor handed in by the caller; its storage is counted here."""
        t = T(name, nbytes, nbytes if requires_grad else 0, self.module)
        self.input_tensors.append(t)
        return t

    def tensor(self, name: str, nbytes: int, *, grad: bool = True, grad_bytes: int | None = None) -> T:
        """A storage to be made by an ``op``; ``grad=False`` for masks, indices and statistics."""
        return T(name, nbytes, (nbytes if grad else 0) if grad_bytes is None else grad_bytes, self.module)

    def op(
        self,
        name: str,
        inputs: Sequence[T] | T,
        outputs: Sequence[T] | T = (),
        *,
        saves: Iterable[T] = (),
        workspace: int = 0,
        backward_workspace: int = 0,
        alias: bool = False,
        in_place: bool = False,
        always_saves: bool = False,
    ) -> None:
        ins = (inputs,) if isinstance(inputs, T) else tuple(inputs)
        outs = (outputs,) if isinstance(outputs, T) else tuple(outputs)
        self._stack[-1].nodes.append(
            Op(
                name, ins, outs, tuple(saves), workspace, backward_workspace, alias, in_place, self._offloading,
                always_saves,
            )
        )

    def make(
        self,
        name: str,
        inputs: Sequence[T] | T,
        nbytes: int,
        *,
        saves: Iterable[T] = (),
        save_output: bool = False,
        grad: bool = True,
        workspace: int = 0,
        backward_workspace: int = 0,
        alias: bool = False,
        in_place: bool = False,
        also: Sequence[T] = (),
        label: str | None = None,
    ) -> T:
        """``op`` with one main output, which is returned, called ``label`` (default: as the operation).

        ``also`` are further outputs (statistics, masks).
        """
        out = self.tensor(label or name, nbytes, grad=grad)
        kept = (*saves, out) if save_output else tuple(saves)
        self.op(
            name, inputs, (out, *also), saves=kept, workspace=workspace,
            backward_workspace=backward_workspace, alias=alias, in_place=in_place,
        )
        return out

    def views(self, name: str, whole: T, *parts: tuple[str, int]) -> tuple[T, ...]:
        """Parts of ``whole`` as views, (name, gradient bytes) each; backward joins their gradients in a new tensor."""
        out = []
        for label, nbytes in parts:
            part = T(label, 0, nbytes, self.module)
            part.storage = whole.storage
            out.append(part)
        self.op(name, whole, out)
        return tuple(out)

    def touch(self, *tensors: T) -> None:
        """Keep tensors alive to this point of the forward pass (a Python variable still holds them)."""
        self._stack[-1].nodes.append(Op("scope", tensors, (), alias=True))

    def router(self) -> None:
        """Where a router runs: what its dispatcher held since the last backward goes, see ``BlockCost.early``."""
        self._stack[-1].nodes.append(Op(_ROUTER, (), ()))

    def output(self, *tensors: T) -> None:
        """What the block returns to its caller."""
        self.output_tensors.extend(tensors)

    @contextmanager
    def offload(self, enabled: bool) -> Iterator[None]:
        """What is saved inside goes to host memory between the block's forward and backward, unless an operation
        outside saves it too or it is small (``fine_grained_activation_offload.py``)."""
        before, self._offloading = self._offloading, self._offloading or enabled
        try:
            yield
        finally:
            self._offloading = before

    @contextmanager
    def checkpoint(self, name: str, inputs: Sequence[T], *, enabled: bool = True) -> Iterator[None]:
        """Recompute everything recorded inside during backward; only ``inputs`` are saved."""
        if not enabled:
            yield
            return
        region = Region(name, inputs=tuple(inputs), offloaded=self._offloading)
        self._stack.append(region)
        try:
            yield
        finally:
            self._stack.pop()
            self._stack[-1].nodes.append(region)

    @contextmanager
    def discardable(self, name: str, inputs: Sequence[T], *, enabled: bool = True) -> Iterator[Region]:
        """As ``checkpoint``; call ``discard(region)`` where the real code discards the outputs."""
        region = Region(name, inputs=tuple(inputs), discards=True, offloaded=self._offloading)
        if not enabled:
            yield region
            return
        self._stack.append(region)
        try:
            yield region
        finally:
            self._stack.pop()
            self._stack[-1].nodes.append(region)

    def discard(self, region: Region, *outputs: T) -> None:
        """The outputs of a discardable region lose their storage here. No-op if it was not enabled."""
        if not region.nodes:
            return
        region.outputs = outputs
        self._stack[-1].nodes.append(Discard(region))

    # ---- results ----

    def cost(self) -> BlockCost:
        """Interpret the tape: forward, then backward."""
        run = _Interpreter(self)
        run.forward()
        away = run.offloaded_tensors()
        saved = run.alive_bytes - sum(t.bytes for t in self._held_outputs(run)) - sum(t.bytes for t in away)
        sums: dict[tuple[str, str], int] = {}
        for t, n in run.refs.items():
            if n > run.scope_refs(t) and t.bytes and not run.emptied(t) and t not in away:
                # One entry for all experts.
                sums[t.name, t.module] = sums.get((t.name, t.module), 0) + t.bytes
        tensors = tuple(SavedTensor(name, nbytes, module) for (name, module), nbytes in sums.items())
        input_saved = bool(self.input_tensors) and self.input_tensors[0] in {
            t for t, n in run.refs.items() if n > run.scope_refs(t)
        }
        forward_peak, forward_op, forward_tensors = run.peak, run.peak_op, run.peak_tensors()
        forward_early = run.early
        run.drop_outputs()
        run.backward()
        held = _Interpreter(self)
        held.forward()
        held.drop_outputs(hold=True)
        held.backward()
        dry = _Interpreter(self)
        dry.forward(save=False)
        return BlockCost(
            saved=saved,
            saved_tensors=tensors,
            input_bytes=sum(t.bytes for t in self.input_tensors),
            output_bytes=sum(t.bytes for t in self.output_tensors),
            input_saved=input_saved,
            forward_peak=forward_peak,
            forward_peak_op=forward_op,
            backward_peak=run.peak,
            backward_peak_op=run.peak_op,
            no_grad_peak=dry.peak,
            no_grad_saved=sum(t.bytes for t, n in dry.refs.items() if n > dry.scope_refs(t)),
            backward_peak_held=held.peak,
            early=(forward_early, run.early, held.early, dry.early),
            offloaded=sum(t.bytes for t in away),
            backward_peak_tensors=run.peak_tensors(),
            forward_peak_tensors=forward_tensors,
        )

    def _held_outputs(self, run: _Interpreter) -> list[T]:
        """Outputs alive only because the caller will receive them (not saved as well)."""
        outputs = {t.storage for t in self.output_tensors}
        return [t for t in outputs if run.refs.get(t, 0) == run.scope_refs(t)]

    @property
    def nodes(self) -> list[Node]:
        return self._root.nodes


class _Grad:
    """One gradient storage, shared by every tensor whose gradient it is."""

    __slots__ = ("bytes", "refs")

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        self.refs = 1


def _touches(node: Node) -> Iterator[T]:
    """The storages that a node reads."""
    if isinstance(node, Op):
        yield from (t.storage for t in node.inputs)
    elif isinstance(node, Region):
        for inner in node.nodes:
            yield from _touches(inner)


class _Interpreter:
    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.refs: dict[T, int] = {}
        self.alive_bytes = 0
        self.peak = 0
        self.peak_op = ""
        self._peak_state: dict[str, int] = {}
        self._emptied: set[T] = set()  # discarded storages: referenced, but zero bytes
        self._offloaded: dict[T, int] = {}  # saves by offloading operations
        self._scope: dict[T, int] = {}  # forward-scope references (0 or 1 a tensor)
        #: The peak as far as the router; in backward, from the router on (None before it).
        self.early = 0
        self._late: int | None = None
        self._grads: dict[T, _Grad] = {}
        self._grad_bytes = 0
        #: Outputs made anew by discarding regions, and by the one that is running forward again.
        self._anew: dict[int, list[T]] = {}
        self._making: list[T] | None = None

    # ---- reference counting ----

    def scope_refs(self, t: T) -> int:
        return self._scope.get(t, 0)

    def emptied(self, t: T) -> bool:
        return t in self._emptied

    def _acquire(self, t: T) -> None:
        t = t.storage
        n = self.refs.get(t, 0)
        if n == 0:
            self.alive_bytes += t.bytes
        self.refs[t] = n + 1

    def _release(self, t: T) -> None:
        t = t.storage
        n = self.refs[t] - 1
        if n:
            self.refs[t] = n
        else:
            del self.refs[t]
            if t in self._emptied:
                self._emptied.discard(t)
            else:
                self.alive_bytes -= t.bytes

    def _empty(self, t: T) -> None:
        t = t.storage
        if t in self.refs and t not in self._emptied:
            self._emptied.add(t)
            self.alive_bytes -= t.bytes

    def _refill(self, t: T) -> None:
        t = t.storage
        if t in self._emptied:
            self._emptied.discard(t)
            self.alive_bytes += t.bytes

    def offloaded_tensors(self) -> set[T]:
        """Storages that only offloading operations keep, large enough to be worth the copy."""
        return {
            t for t, n in self._offloaded.items()
            if n == self.refs.get(t, 0) - self.scope_refs(t)
            and t.bytes >= MINIMUM_OFFLOADED_BYTES and t not in self._emptied
        }

    def _enter_scope(self, t: T) -> None:
        t = t.storage
        if self._making is not None and t in self._emptied:
            again = T(f"{t.name} (recomputed)", t.bytes, 0)
            self._acquire(again)
            self._making.append(again)
        if not self._scope.get(t):
            self._scope[t] = 1
            self._acquire(t)

    def _leave_scope(self, t: T) -> None:
        t = t.storage
        if self._scope.pop(t, 0):
            self._release(t)

    def _mark(self, op: str, extra: int = 0) -> None:
        total = self.alive_bytes + self._grad_bytes + extra
        if self._late is not None:
            self._late = self.early = max(self._late, total)
        if total > self.peak:
            self.peak = total
            self.peak_op = op
            state = {t.name: t.bytes for t in self.refs if t not in self._emptied}
            for t, g in self._grads.items():
                state["grad " + t.name] = g.bytes
            if extra:
                state["workspace of " + op] = extra
            self._peak_state = state

    def peak_tensors(self, most: int = 12) -> tuple[SavedTensor, ...]:
        top = sorted(self._peak_state.items(), key=lambda kv: -kv[1])[:most]
        return tuple(SavedTensor(n, b) for n, b in top if b)

    # ---- forward ----

    def forward(self, *, save: bool = True) -> None:
        for t in self.tape.input_tensors:
            self._enter_scope(t)
        self._mark("input")
        self._run(self.tape.nodes, save, keep=set(self.tape.output_tensors))

    def _run(self, nodes: Sequence[Node], save: bool, keep: set[T], own: set[T] | None = None) -> None:
        """Run nodes forward. ``keep``: never leaves scope here; ``own``: all that may (None: everything)."""
        keep = {t.storage for t in keep}
        last: dict[T, int] = {}
        for i, node in enumerate(nodes):
            for t in _touches(node):
                last[t] = i
        for i, node in enumerate(nodes):
            made: tuple[T, ...] = ()
            used: tuple[T, ...] = ()
            if isinstance(node, Op):
                if node.name == _ROUTER:
                    self.early = max(self.early, self.peak)
                    continue
                for t in node.outputs:
                    self._enter_scope(t)
                self._mark(node.name, node.workspace)
                if save or node.always_saves:
                    self._save(node.saves, node.offloaded)
                made = tuple(t.storage for t in node.outputs)
                used = tuple(_touches(node))
            elif isinstance(node, Region):
                if save:
                    self._save(node.inputs, node.offloaded)
                inner_made = {t for n in node.nodes for t in _made(n) if t.storage is t}
                later = {t for t in inner_made if last_use_after(nodes, i, t)} | (keep & inner_made)
                # The first pass of a region saves nothing inside.
                self._run(node.nodes, False, keep | later, own=inner_made)
                made = tuple(inner_made)
                used = tuple(t for n in node.nodes for t in _touches(n))
            else:
                if save:
                    for t in node.region.outputs:
                        self._empty(t)
                continue
            for t in (*used, *made):
                if t in keep or last.get(t, -1) > i:
                    continue
                if own is not None and t not in own:
                    continue
                self._leave_scope(t)

    def _save(self, tensors: Iterable[T], offloaded: bool) -> None:
        for t in tensors:
            self._acquire(t)
            if offloaded:
                self._offloaded[t.storage] = self._offloaded.get(t.storage, 0) + 1

    # ---- backward ----

    def drop_outputs(self, *, hold: bool = False) -> None:
        """The caller has consumed the outputs: only saved references remain. Gradients of outputs arrive.

        ``hold``: a variable of the caller keeps them to the end, so that nothing is added into them either.
        """
        for t in list(self._scope):
            self._leave_scope(t)
        for t in self.tape.output_tensors:
            if t.grad_bytes:
                self._new_grad(t)
                self._grads[t].refs += hold
        self.peak = self.early = 0
        self._mark("grad of output")

    def backward(self) -> None:
        self._back(self.tape.nodes)

    def _new_grad(self, t: T) -> None:
        self._grads[t] = _Grad(t.grad_bytes)
        self._grad_bytes += t.grad_bytes

    def _drop_grad(self, t: T) -> None:
        g = self._grads.pop(t, None)
        if g is not None:
            g.refs -= 1
            if g.refs == 0:
                self._grad_bytes -= g.bytes

    def _add_grad(self, t: T, g: _Grad, op: str) -> None:
        """Accumulate ``g`` (whose reference is handed over) into the gradient of ``t``."""
        have = self._grads.get(t)
        if have is None:
            self._grads[t] = g
            return
        if have.refs > 1 and g.refs > 1:  # neither is ours to add into: a third storage
            self._grad_bytes += t.grad_bytes
            self._mark(op + " (gradient sum)")
            self._drop_grad(t)
            self._grads[t] = _Grad(t.grad_bytes)
            g.refs -= 1
            if g.refs == 0:
                self._grad_bytes -= g.bytes
            return
        keep, gone = (have, g) if have.refs == 1 else (g, have)
        gone.refs -= 1
        if gone.refs == 0:
            self._grad_bytes -= gone.bytes
        self._grads[t] = keep

    def _back(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            if isinstance(node, Op):
                self._back_op(node)
            elif isinstance(node, Region):
                self._back_region(node)
            else:
                self._refill_region(node.region)

    def _back_op(self, op: Op) -> None:
        grads = [t for t in op.outputs if t in self._grads]
        targets = [t for t in dict.fromkeys(op.inputs) if t.grad_bytes]
        if op.name == _ROUTER:
            self._late = 0
            self._mark(op.name)
        if op.name in ("scope", _ROUTER):
            return
        saves = op.saves
        if op.in_place and grads:
            self._release(saves[0])
            saves = saves[1:]
        if not grads:
            for t in op.saves:
                self._release(t)
            return
        if op.alias:
            self._mark(op.name, op.backward_workspace)
            for t in targets:
                g = self._grads[grads[0]]
                g.refs += 1
                self._add_grad(t, g, op.name)
        else:
            fresh = []
            for t in targets:
                self._grad_bytes += t.grad_bytes
                fresh.append(_Grad(t.grad_bytes))
            self._mark(op.name, op.backward_workspace)
            for t, g in zip(targets, fresh, strict=True):
                self._add_grad(t, g, op.name)
        for t in saves:
            self._release(t)
        for t in grads:
            self._drop_grad(t)

    def _refill_region(self, region: Region) -> None:
        """Recompute a discarded region when its consumer's gradient arrives."""
        outs = {t for t in _region_made(region) if t in self.refs}
        self._making = self._anew[id(region)] = []
        self._replay_from(region, outs)
        self._making = None
        for t in region.outputs:
            self._refill(t)
        self._mark(region.name + " (recomputed)")
        for t in outs:
            self._leave_scope(t)

    def _replay_from(self, region: Region, outs: set[T]) -> None:
        """Run a region's forward again, now saving; ``outs`` stay in scope."""
        for t in region.inputs:
            self._enter_scope(t)
        self._run(region.nodes, True, keep=outs | set(region.inputs))
        for t in region.inputs:
            self._leave_scope(t)

    def _back_region(self, region: Region) -> None:
        outs: set[T] = set()
        grads: dict[T, _Grad] = {}
        if not region.discards:
            outs = {t for t in _region_made(region) if t in self._grads}
            self._replay_from(region, outs)
            grads = {t: self._grads[t] for t in outs}
            for g in grads.values():
                g.refs += 1
        self._back(region.nodes)
        # Variables of ``CheckpointFunction.backward`` hold the recomputed outputs and their gradients to its end.
        for t in outs:
            self._leave_scope(t)
        for g in grads.values():
            g.refs -= 1
            if g.refs == 0:
                self._grad_bytes -= g.bytes
        for t in (*self._anew.pop(id(region), ()), *region.inputs):
            self._release(t)


def _made(node: Node) -> Iterator[T]:
    if isinstance(node, Op):
        yield from node.outputs
    elif isinstance(node, Region):
        yield from _region_made(node)


def _region_made(region: Region) -> Iterator[T]:
    for n in region.nodes:
        yield from _made(n)


def last_use_after(nodes: Sequence[Node], index: int, tensor: T) -> bool:
    """Whether ``tensor`` is used by a node after ``index``."""
    return any(tensor in set(_touches(n)) for n in nodes[index + 1 :])
