"""A tape of what one block allocates in its forward pass.

A block (attention, MLP, loss, ...) writes its forward pass as operations on tensors, in the order in which the
real implementation runs them: what each operation makes, what it keeps for its backward, and its scratch space.
``alive`` derives from this list what is alive at every moment.

What a tape can hold, with its source:

* An ``op`` makes its outputs, keeps its ``saves`` for its backward and needs ``workspace`` while it runs;
  ``for_backward`` is the part of the workspace that a pass without gradients does not need.
* ``checkpoint``: forward saves the region's inputs only; backward, where a gradient reaches it, runs the region's
  forward again, then its backward (``megatron/core/tensor_parallel/random.py: CheckpointFunction``).
* ``discardable``: as a checkpoint, and the region's outputs lose their storage once consumed; when the gradient of
  the consumer arrives they are recomputed, and stay until the consumer and the region have run backward (``random.py:
  CheckpointWithoutOutput``). Releases that copy the recomputed outputs into the old storage (``refills``) hold both.
* ``discard_between_passes``: tensors that lose their storage when the whole chunk has run forward, and get it back,
  recomputed, when its backward begins (Megatron-LM ``random.py: MHCCheckpointManager``). Within the block they count.
* ``keep_alive``: a Python variable still holds tensors here.
* ``delays``: weight gradients of the operations inside are made only when all of these have run backward; their inputs
  stay until then (Transformer Engine ``module/_common.py: WeightGradStore``).
* ``landmark``: peaks before it and after it are found separately.
* ``cut``: the block runs in nodes, between which another microbatch's may run (``pipeline_parallel/utils.py:
  ScheduleNode``). What is alive within one microbatch does not depend on it.

Units are bytes: numbers, or ``symbolic.SymInt``s. Nothing here knows what a layer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from bridge_memory.components import Part, Provenance

#: Bytes: an int, or a ``SymInt`` while a block is traced.
Bytes = Any


class Tensor:
    """A tensor: its name, its bytes and the bytes of its gradient (0: none flows to it).

    A view has 0 bytes: a reference to it is one to the storage of ``whole``, the tensor that it is a part of.
    """

    __slots__ = ("bytes", "grad_bytes", "item", "name", "part", "provenance", "units", "whole")

    def __init__(
        self, name: str, nbytes: Bytes, grad_bytes: Bytes, part: Part = Part.NONE,
        provenance: Provenance = Provenance.FORMULA, item: int = 2,
    ) -> None:
        self.name = name
        self.part = part
        self.provenance = provenance
        self.bytes = nbytes
        self.grad_bytes = grad_bytes
        #: Bytes of an element.
        self.item = item
        self.whole: Tensor | None = None
        #: ``bytes`` in the units of ``alive``.
        self.units = 0

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient flows to it, of any size."""
        return not (type(self.grad_bytes) is int and self.grad_bytes == 0)

    def __repr__(self) -> str:
        return f"Tensor({self.name}, {self.bytes})"


class Flush:
    """A point of the forward pass. When backward reaches it, the weight gradients are made that operations after it
    delayed."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Cut:
    """Where an overlapped schedule runs something else: operations after it are a node of their own."""

    __slots__ = ()


class Delayed(NamedTuple):
    """What stays alive until a delayed weight gradient is made."""

    #: Saved tensors that it needs.
    inputs: tuple[Tensor, ...] = ()
    #: Whether the gradient of the output stays as it arrived.
    gradient: bool = True
    #: Bytes that backward made for it: gathered inputs, and gradients that were gathered or cast.
    made: Bytes = 0
    #: Bytes of the weight's gradient, where the GEMM does not add it to the main gradient.
    weight: Bytes = 0


class Op:
    """One operation of the forward pass, with what its backward will need."""

    __slots__ = (
        "alias", "always_saves", "apart", "backward_workspace", "delayed", "flush", "in_place", "inputs", "name",
        "no_grad_workspace", "offloaded", "outputs", "saves", "scope", "workspace",
    )

    def __init__(
        self,
        name: str,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        saves: tuple[Tensor, ...] = (),
        workspace: Bytes = 0,
        backward_workspace: Bytes = 0,
        alias: bool = False,
        in_place: int = False,
        offloaded: frozenset[str] = frozenset(),
        always_saves: bool = False,
        scope: bool = False,
        for_backward: Bytes = 0,
        delayed: Delayed | None = None,
        flush: Flush | None = None,
        apart: bool = False,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.saves = saves
        self.workspace = workspace
        #: In a pass without gradients.
        same = type(for_backward) is int and not for_backward
        self.no_grad_workspace = workspace if same else workspace - for_backward
        self.backward_workspace = backward_workspace
        #: Costs are asked for without its ``backward_workspace`` too (``BlockCost.without_apart``).
        self.apart = apart
        #: Input gradients are the output gradient itself (addition, views that copy nothing backward).
        self.alias = alias
        #: How many saved tensors, the first ones, its input gradients overwrite.
        self.in_place = in_place
        #: Its saved tensors go to host memory after the block's forward and return for its backward.
        self.offloaded = offloaded
        #: It runs under ``torch.enable_grad``: it saves for backward even in a pass without gradients.
        self.always_saves = always_saves
        #: It only keeps its inputs alive to this point.
        self.scope = scope
        #: What stays for its delayed weight gradient, and the point at which that is made.
        self.delayed = delayed
        self.flush = flush


class Region:
    """A recomputed part of the tape."""

    __slots__ = ("discards", "inputs", "name", "nodes", "offloaded", "outputs", "refills")

    def __init__(
        self, name: str, inputs: tuple[Tensor, ...] = (), *, discards: bool = False,
        offloaded: frozenset[str] = frozenset(),
        refills: bool = False,
    ) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.inputs = inputs
        self.outputs: tuple[Tensor, ...] = ()
        self.discards = discards
        #: Discarded outputs get their storage back, and the recomputed ones are copied into it.
        self.refills = refills
        self.offloaded = offloaded


class Discard:
    """The point of the forward pass at which a discarding region's outputs lose their storage."""

    __slots__ = ("region",)

    def __init__(self, region: Region) -> None:
        self.region = region


class Landmark:
    """A point of the forward pass. Peaks of forward up to it, and of backward from it on, are found separately."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


Node = Op | Region | Discard | Landmark | Flush | Cut


class Tape:
    """Records one block's forward pass. The module docstring explains the terms."""

    def __init__(
        self, *, refills: bool = False, frozen: bool = False, item: int = 2, least_offloaded: int = 1 << 20
    ) -> None:
        """``frozen``: weights have no gradients, except those of operations with ``trains``. ``item``: default bytes of
        an element. ``least_offloaded``: elements; smaller tensors stay on the GPU
        (``TransformerConfig.min_offloaded_tensor_size``)."""
        self.item = item
        self.least_offloaded = least_offloaded
        self._root = Region("root")
        self._refills = refills
        self._frozen = frozen
        self._stack: list[Region] = [self._root]
        self.input_tensors: list[Tensor] = []
        self.output_tensors: list[Tensor] = []
        #: Tensors without storage between the chunk's passes.
        self.discarded_between_passes: list[Tensor] = []
        #: Outputs of operations that a selective checkpoint around the block keeps (torchtitan's).
        self.kept_by_checkpoint: list[Tensor] = []
        #: Modules around what is recorded whose saved tensors go to host memory.
        self._offloading: frozenset[str] = frozenset()
        #: Points at which the weight gradients that are delayed here are made, the innermost last.
        self._flushes: list[Flush] = []
        #: Part of the model, and provenance of the sizes, of everything recorded from here on.
        self.part = Part.NONE
        self.provenance = Provenance.FORMULA

    def input(self, name: str, nbytes: Bytes, *, requires_grad: bool = True) -> Tensor:
        """A tensor handed in by the caller; its storage is counted here."""
        t = Tensor(name, nbytes, nbytes if requires_grad else 0, self.part, self.provenance, self.item)
        self.input_tensors.append(t)
        return t

    def tensor(
        self, name: str, nbytes: Bytes, *, grad: bool = True, grad_bytes: Bytes | None = None,
        provenance: Provenance | None = None, item: int | None = None,
    ) -> Tensor:
        """A storage to be made by an ``op``; ``grad=False`` for masks, indices and statistics. ``item``: bytes of an
        element, where that is not the tape's default."""
        gradient = (nbytes if grad else 0) if grad_bytes is None else grad_bytes
        return Tensor(name, nbytes, gradient, self.part, provenance or self.provenance, item or self.item)

    def op(
        self,
        name: str,
        inputs: Sequence[Tensor] | Tensor,
        outputs: Sequence[Tensor] | Tensor = (),
        *,
        saves: Iterable[Tensor] = (),
        workspace: Bytes = 0,
        backward_workspace: Bytes = 0,
        alias: bool = False,
        in_place: int = False,
        always_saves: bool = False,
        for_backward: Bytes = 0,
        trains: bool = False,
        delayed: Delayed | None = None,
        apart: bool = False,
    ) -> None:
        """One operation. ``trains``: its weight has a gradient though the others are frozen. ``delayed``: what stays
        for its weight gradient inside of ``delays``. ``apart`` as in ``Op``."""
        ins = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if self._frozen and not trains and not any(t.has_gradient for t in ins):
            saves = ()
            for t in outs:
                t.grad_bytes = 0
        self._stack[-1].nodes.append(
            Op(
                name, ins, outs, tuple(saves), workspace, backward_workspace, alias, in_place, self._offloading,
                always_saves, for_backward=for_backward, delayed=delayed if self._flushes else None,
                flush=self._flushes[-1] if self._flushes else None, apart=apart,
            )
        )

    def make(
        self,
        name: str,
        inputs: Sequence[Tensor] | Tensor,
        nbytes: Bytes,
        *,
        saves: Iterable[Tensor] = (),
        save_output: bool = False,
        grad: bool = True,
        workspace: Bytes = 0,
        backward_workspace: Bytes = 0,
        alias: bool = False,
        in_place: int = False,
        also: Sequence[Tensor] = (),
        label: str | None = None,
        for_backward: Bytes = 0,
        trains: bool = False,
        delayed: Delayed | None = None,
        apart: bool = False,
    ) -> Tensor:
        """``op`` with one main output, which is returned, named ``label`` (default: the operation's name).

        ``also`` are further outputs (statistics, masks).
        """
        out = self.tensor(label or name, nbytes, grad=grad)
        kept = (*saves, out) if save_output else tuple(saves)
        self.op(
            name, inputs, (out, *also), saves=kept, workspace=workspace,
            backward_workspace=backward_workspace, alias=alias, in_place=in_place, for_backward=for_backward,
            trains=trains, delayed=delayed, apart=apart,
        )
        return out

    def views(self, name: str, whole: Tensor, *parts: tuple[str, Bytes]) -> tuple[Tensor, ...]:
        """Parts of ``whole`` as views, (name, gradient bytes) each; backward joins their gradients in a new tensor."""
        out = []
        for label, nbytes in parts:
            view = Tensor(label, 0, nbytes, self.part, self.provenance)
            view.whole = whole.whole or whole
            out.append(view)
        self.op(name, whole, out)
        return tuple(out)

    @contextmanager
    def freezing(self, frozen: bool) -> Iterator[None]:
        """Weights inside have no gradients (True), or have them, whatever the others of the block have."""
        before, self._frozen = self._frozen, frozen
        yield
        self._frozen = before

    def keep_alive(self, *tensors: Tensor) -> None:
        """Keep tensors alive to this point of the forward pass (a Python variable still holds them)."""
        self._stack[-1].nodes.append(Op("scope", tensors, (), alias=True, scope=True))

    def discard_between_passes(self, *tensors: Tensor) -> None:
        """These tensors have no storage from the end of the chunk's forward to the beginning of its backward."""
        self.discarded_between_passes.extend(tensors)

    def landmark(self, name: str) -> None:
        """Peaks of the forward pass up to here, and of the backward pass from here on, are found separately
        (``BlockCost.before_landmark``)."""
        self._stack[-1].nodes.append(Landmark(name))

    def cut(self) -> None:
        """Operations from here on are another node of an overlapped schedule."""
        self._stack[-1].nodes.append(Cut())

    def output(self, *tensors: Tensor) -> None:
        """What the block returns to its caller."""
        self.output_tensors.extend(tensors)

    @property
    def delaying(self) -> bool:
        """Whether weight gradients are delayed here."""
        return bool(self._flushes)

    def delay(self, name: str) -> None:
        """Weight gradients from here to ``delay_ends`` are made when everything between has run backward."""
        self._flushes.append(Flush(name))
        self._stack[-1].nodes.append(self._flushes[-1])

    def delay_ends(self) -> None:
        self._flushes.pop()

    @contextmanager
    def delays(self, name: str, *, enabled: bool = True) -> Iterator[None]:
        """Weight gradients of operations inside are made when all of these have run backward."""
        if not enabled:
            yield
            return
        self.delay(name)
        try:
            yield
        finally:
            self.delay_ends()

    @contextmanager
    def offload(self, enabled: bool, module: str = "") -> Iterator[None]:
        """Tensors saved inside go to host memory between the block's forward and backward, unless an operation outside
        saves them too or they are small (``fine_grained_activation_offload.py``)."""
        before = self._offloading
        if enabled:
            self._offloading = before | {module}
        try:
            yield
        finally:
            self._offloading = before

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Tensors made inside belong to ``part``."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    @contextmanager
    def assumed(self, enabled: bool = True) -> Iterator[None]:
        """Sizes of tensors made inside depend on an assumption: balanced routing."""
        before = self.provenance
        if enabled:
            self.provenance = Provenance.ASSUMED
        try:
            yield
        finally:
            self.provenance = before

    @contextmanager
    def checkpoint(self, name: str, inputs: Sequence[Tensor], *, enabled: bool = True) -> Iterator[None]:
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
    def discardable(self, name: str, inputs: Sequence[Tensor], *, enabled: bool = True) -> Iterator[Region]:
        """As ``checkpoint``; call ``discard(region)`` where the real code discards the outputs."""
        region = Region(name, inputs=tuple(inputs), discards=True, offloaded=self._offloading, refills=self._refills)
        if not enabled:
            yield region
            return
        self._stack.append(region)
        try:
            yield region
        finally:
            self._stack.pop()
            self._stack[-1].nodes.append(region)

    def discard(self, region: Region, *outputs: Tensor) -> None:
        """The outputs of a discardable region lose their storage here. No-op if it was not enabled."""
        if not region.nodes:
            return
        region.outputs = outputs
        self._stack[-1].nodes.append(Discard(region))

    @property
    def nodes(self) -> list[Node]:
        return self._root.nodes
