"""A tape of what one block allocates in its forward pass.

A block (attention, MLP, loss, ...) writes its forward pass as operations on tensors, in the order in which the
real implementation runs them: what each operation makes, what it keeps for its backward, and its scratch space.
``alive`` works out from that one list what is alive when.

The words of the recording, with their source:

* An ``op`` makes its outputs, keeps its ``saves`` for its backward and needs ``workspace`` while it runs, of which
  ``for_backward`` only where it keeps anything.
* ``checkpoint``: forward saves the region's inputs only; backward, where a gradient reaches it, runs the region's
  forward again, then its backward (``megatron/core/tensor_parallel/random.py: CheckpointFunction``).
* ``discardable``: as a checkpoint, and the region's outputs lose their storage once consumed; when the gradient of
  the consumer arrives they are made again, and stay until the consumer and the region have run backward (``random.py:
  CheckpointWithoutOutput``). Releases that copy what is made again into the old storage (``refills``) have both.
* ``keep_alive``: a Python variable still holds tensors here.
* ``landmark``: peaks before it and after it are found apart.

Units are bytes: numbers, or ``sizes.Size``s, which are numbers that remember how they were worked out. Nothing here
knows what a layer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bridge_memory.components import Part, Provenance

if TYPE_CHECKING:
    from bridge_memory.inventory.alive import BlockCost

#: Bytes, or what stands for them while sizes are noted.
Bytes = Any


class Tensor:
    """A tensor: its name, its bytes and the bytes of its gradient (0: none flows to it).

    A view has no bytes of its own: whoever holds it holds ``whole``, the tensor that it is a part of.
    """

    __slots__ = ("bytes", "grad_bytes", "name", "part", "provenance", "units", "whole")

    def __init__(
        self, name: str, nbytes: Bytes, grad_bytes: Bytes, part: Part = Part.NONE,
        provenance: Provenance = Provenance.FORMULA,
    ) -> None:
        self.name = name
        self.part = part
        self.provenance = provenance
        self.bytes = nbytes
        self.grad_bytes = grad_bytes
        self.whole: Tensor | None = None
        #: ``bytes`` in the units of ``alive``.
        self.units = 0

    @property
    def has_gradient(self) -> bool:
        """Whether one flows to it, of any size."""
        return not (type(self.grad_bytes) is int and self.grad_bytes == 0)

    def __repr__(self) -> str:
        return f"Tensor({self.name}, {self.bytes})"


class Op:
    """One operation of the forward pass, with what its backward will need."""

    __slots__ = (
        "alias", "always_saves", "backward_workspace", "dry_workspace", "in_place", "inputs", "name", "offloaded",
        "outputs", "saves", "scope", "workspace",
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
        offloaded: bool = False,
        always_saves: bool = False,
        scope: bool = False,
        for_backward: Bytes = 0,
    ) -> None:
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.saves = saves
        self.workspace = workspace
        #: In a pass without gradients.
        self.dry_workspace = workspace if type(for_backward) is int and not for_backward else workspace - for_backward
        self.backward_workspace = backward_workspace
        #: Input gradients are the output gradient itself (addition, views that copy nothing backward).
        self.alias = alias
        #: Input gradients are written over so many of the first saved tensors.
        self.in_place = in_place
        #: What it saves goes to host memory once the block is done and comes back for its backward.
        self.offloaded = offloaded
        #: It runs under ``torch.enable_grad``: its graph, and what that saves, is there even in a pass without
        #: gradients.
        self.always_saves = always_saves
        #: It only keeps its inputs alive to this point.
        self.scope = scope


class Region:
    """A recomputed part of the tape."""

    __slots__ = ("discards", "inputs", "name", "nodes", "offloaded", "outputs", "refills")

    def __init__(
        self, name: str, inputs: tuple[Tensor, ...] = (), *, discards: bool = False, offloaded: bool = False,
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
    """A point of the forward pass up to which, and backward from which, peaks are found apart."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


Node = Op | Region | Discard | Landmark


class Tape:
    """Records one block's forward pass. See the module docstring for the words."""

    def __init__(self, *, refills: bool = False, frozen: bool = False) -> None:
        """``frozen``: weights have no gradients, but for those of operations that say that they train."""
        self._root = Region("root")
        self._refills = refills
        self._frozen = frozen
        self._stack: list[Region] = [self._root]
        self.input_tensors: list[Tensor] = []
        self.output_tensors: list[Tensor] = []
        #: What a checkpoint around the block keeps of it where it keeps some of what operations make (torchtitan's).
        self.kept_by_checkpoint: list[Tensor] = []
        self._offloading = False
        #: Where in the model everything recorded from here on belongs, and how its sizes are known.
        self.part = Part.NONE
        self.provenance = Provenance.FORMULA

    def input(self, name: str, nbytes: Bytes, *, requires_grad: bool = True) -> Tensor:
        """A tensor handed in by the caller; its storage is counted here."""
        t = Tensor(name, nbytes, nbytes if requires_grad else 0, self.part, self.provenance)
        self.input_tensors.append(t)
        return t

    def tensor(
        self, name: str, nbytes: Bytes, *, grad: bool = True, grad_bytes: Bytes | None = None,
        provenance: Provenance | None = None,
    ) -> Tensor:
        """A storage to be made by an ``op``; ``grad=False`` for masks, indices and statistics."""
        gradient = (nbytes if grad else 0) if grad_bytes is None else grad_bytes
        return Tensor(name, nbytes, gradient, self.part, provenance or self.provenance)

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
    ) -> None:
        """``trains``: it has a weight with a gradient though the others are frozen."""
        ins = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        outs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        if self._frozen and not trains and not any(t.has_gradient for t in ins):
            saves = ()
            for t in outs:
                t.grad_bytes = 0
        self._stack[-1].nodes.append(
            Op(
                name, ins, outs, tuple(saves), workspace, backward_workspace, alias, in_place, self._offloading,
                always_saves, for_backward=for_backward,
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
    ) -> Tensor:
        """``op`` with one main output, which is returned, called ``label`` (default: as the operation).

        ``also`` are further outputs (statistics, masks).
        """
        out = self.tensor(label or name, nbytes, grad=grad)
        kept = (*saves, out) if save_output else tuple(saves)
        self.op(
            name, inputs, (out, *also), saves=kept, workspace=workspace,
            backward_workspace=backward_workspace, alias=alias, in_place=in_place, for_backward=for_backward,
            trains=trains,
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

    def keep_alive(self, *tensors: Tensor) -> None:
        """Keep tensors alive to this point of the forward pass (a Python variable still holds them)."""
        self._stack[-1].nodes.append(Op("scope", tensors, (), alias=True, scope=True))

    def landmark(self, name: str) -> None:
        """Peaks of the forward pass up to here, and of the backward pass from here on, are found apart
        (``BlockCost.before_landmark``)."""
        self._stack[-1].nodes.append(Landmark(name))

    def output(self, *tensors: Tensor) -> None:
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
    def assumed(self, enabled: bool = True) -> Iterator[None]:
        """Sizes of what is made inside rest on an assumption: balanced routing."""
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

    def cost(self) -> BlockCost:
        """What is alive when, of a tape recorded with plain numbers."""
        from bridge_memory.inventory.alive import cost_of

        return cost_of(self)
