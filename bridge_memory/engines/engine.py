"""What an engine tells an estimate: who keeps parameters, gradients and optimizer state, and what moves meanwhile.

An engine knows parameters and nothing of attention or pipelines. A unit is what it lays out, and may gather, together:
the blocks of one kind in a chunk (``inventory.stack.Unit``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from bridge_memory.components import MOMENTS, Component, Lifetime, Part, Provenance, Role, State
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import ParallelSpec
from bridge_memory.tapes.chain import EngineBytes
from bridge_memory.tapes.symbolic import any_nonzero


class Phase(str, Enum):
    """A part of training with a peak of its own, in the order in which they come."""

    #: The engine is made around a model that is on the GPU in its own dtype.
    BUILDING = "making the engine"
    FIRST_FORWARD = "first forward"
    FIRST_BACKWARD = "first backward"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    #: A full checkpoint of the weights is gathered, tensor by tensor, and sent to host memory.
    SAVING = "saving a full checkpoint"

    def __str__(self) -> str:
        return self.value


class Line(NamedTuple):
    """One line of model state: its role, which copy of the parameters it is, and of which parameters."""

    role: Role
    state: State
    name: str
    experts: bool
    provenance: Provenance = Provenance.EXACT
    adapters: bool = False
    #: Groups that divide it, as in "tp x dp x cp".
    shard: str = ""
    #: Every step makes it anew in its backward pass, and frees it once the optimizer has stepped.
    fresh: bool = False
    #: ``zero_grad`` frees it after every step, also where several microbatches add to it.
    zeroed: bool = False

    @property
    def lifetime(self) -> Lifetime:
        if self.fresh:
            return Lifetime.BACKWARD
        return Lifetime.FIRST_STEP if self.state in MOMENTS else Lifetime.MODEL

    def component(self, nbytes: int, ranks: Mapping[str, int]) -> Component:
        """``ranks``: in each group of Megatron's; one of a single rank divides nothing."""
        name = f"LoRA {self.name}" if self.adapters else self.name
        shard = " x ".join([group for group in self.shard.split(" x ") if group and ranks.get(group) != 1])
        return Component(
            f"{name} (routed experts)" if self.experts else name, nbytes, self.role, self.provenance, shard,
            self.lifetime, Part.NONE, self.state, experts=self.experts, adapters=self.adapters,
        )


class StageState(NamedTuple):
    """What an engine keeps and moves on one stage, in bytes."""

    #: Elements of one rank's whole parameters, as computations see them.
    parameters: int
    #: Allocated for good: weights, gradients, optimizer state.
    amounts: tuple[tuple[Line, int], ...]
    #: What the allocator adds to them.
    remainders: int = 0
    #: fp32 copies of gradients that the optimizer's step leaves behind until the next zero_grad.
    gradient_copies: int = 0
    #: Whole parameters that are there during every pass, beyond this rank's shard.
    gathered: int = 0
    #: Of these parameters, what is there between two steps.
    gathered_between_steps: int = 0
    #: Made for the optimizer's step and freed with it.
    in_step: int = 0
    #: Gathered, reduced or made beside the links of each chunk while they run; empty where nothing is.
    concurrent: tuple[EngineBytes, ...] = ()
    #: Whole gradients of earlier microbatches that wait for the last one, during every pass.
    accumulated: int = 0
    #: What ``in_step`` is.
    step_name: str = "narrow optimizer states in fp32"
    #: In host memory, beside the GPU's: (name, bytes).
    host: tuple[tuple[str, int], ...] = ()
    #: The most while the engine is made around a model on the GPU; None: not modelled.
    building: int | None = None
    #: Beside what is there between steps while a full checkpoint is gathered; None: not modelled.
    saving: int | None = None
    #: Buffers in which units are gathered and reduced one after the other, from the first pass on.
    pools: int = 0

    @property
    def in_passes(self) -> int:
        """There during forward and backward passes, and not in the optimizer's step."""
        return self.gathered + self.accumulated

    @property
    def fresh(self) -> int:
        """Of ``amounts``, what is not there before the backward pass has made it."""
        return sum([nbytes for line, nbytes in self.amounts if line.fresh])

    @property
    def freed_between_steps(self) -> int:
        """Of ``amounts``, what is not there between two steps."""
        return sum([nbytes for line, nbytes in self.amounts if line.fresh or line.zeroed])

    def components(self, parallel: ParallelSpec) -> list[Component]:
        """The lines of model state."""
        ranks = {
            "tp": parallel.tp, "cp": parallel.cp, "dp": parallel.data_parallel_size, "ep": parallel.ep,
            "etp": parallel.etp, "edp": parallel.expert_data_parallel_size,
        }  # fmt: skip
        return [line.component(nbytes, ranks) for line, nbytes in self.amounts]

    def buffers(self) -> list[Component]:
        """What is allocated beside it."""
        out = []
        if any_nonzero(self.remainders):
            out.append(
                Component(
                    "unsplit rests of allocator blocks", self.remainders, Role.BUFFERS, Provenance.FORMULA,
                    lifetime=Lifetime.FIRST_PASS, part=Part.ALLOCATOR,
                )
            )
        if any_nonzero(self.pools):
            out.append(
                Component(
                    "double buffers of units", self.pools, Role.BUFFERS, Provenance.FORMULA,
                    lifetime=Lifetime.FIRST_PASS, part=Part.DATA_PARALLEL,
                )
            )
        if any_nonzero(self.gradient_copies):
            out.append(
                Component(
                    "main gradients in fp32", self.gradient_copies, Role.BUFFERS, Provenance.FORMULA,
                    lifetime=Lifetime.BETWEEN_STEPS, part=Part.DATA_PARALLEL,
                )
            )
        if any_nonzero(self.gathered_between_steps):
            out.append(
                Component(
                    "parameters gathered between steps", self.gathered_between_steps, Role.BUFFERS,
                    Provenance.FORMULA, lifetime=Lifetime.BETWEEN_STEPS, part=Part.DATA_PARALLEL,
                )
            )
        return out


T = TypeVar("T")


class PerChunk(Generic[T]):
    """What one engine worked out of chunks, once for each list of units and whether its buffers are cut into buckets.

    A list is kept beside its answer: the id by which it is known would else be given to another once it is gone.
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[tuple[int, bool], tuple[Sequence[Unit], T]] = {}

    def get(self, units: Sequence[Unit], in_buckets: bool, work: Callable[[Sequence[Unit], bool], T]) -> T:
        """``work(units, in_buckets)``."""
        key = id(units), in_buckets
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = units, work(units, in_buckets)
        return found[1]


class Engine(Protocol):
    """One data-parallel engine, for one run."""

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What a stage of ``chunks`` keeps, and what moves beside its units."""


@runtime_checkable
class HasFirstStep(Protocol):
    """An engine whose first step gathers otherwise than later ones."""

    def first_step(self) -> Engine:
        """The engine as it is in the passes of the first step."""
