"""What an engine reports to an estimate: model state on one rank, and what is gathered and reduced during passes.

An engine depends on parameters only, not on attention or pipelines. A unit is what it lays out, and may gather,
together: equal blocks of a chunk (``inventory.stack.Unit``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from bridge_memory.components import MADE_BY_FIRST_STEP, Component, Lifetime, Part, Provenance, Role, State
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import ParallelSpec
from bridge_memory.tapes.chain import EngineBytes
from bridge_memory.tapes.symbolic import any_nonzero


class Phase(str, Enum):
    """Parts of training whose peaks are reported separately, in order of time."""

    #: The engine is constructed around a model that is on the GPU.
    BUILDING = "engine initialization"
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
    #: Groups of ranks over which it is sharded, as in "tp x dp x cp".
    shard: str = ""
    #: Every step allocates it in its backward pass, and frees it after the optimizer's step.
    fresh: bool = False
    #: ``zero_grad`` frees it after every step, even if several microbatches accumulate into it.
    zeroed: bool = False

    @property
    def lifetime(self) -> Lifetime:
        if self.fresh:
            return Lifetime.BACKWARD
        return Lifetime.FIRST_STEP if self.state in MADE_BY_FIRST_STEP else Lifetime.MODEL

    def component(self, nbytes: int, ranks: Mapping[str, int]) -> Component:
        """``ranks``: size of each of Megatron's groups; groups of one rank are not listed."""
        name = f"LoRA {self.name}" if self.adapters else self.name
        shard = " x ".join([group for group in self.shard.split(" x ") if group and ranks.get(group) != 1])
        return Component(
            f"{name} (routed experts)" if self.experts else name, nbytes, self.role, self.provenance, shard,
            self.lifetime, Part.NONE, self.state, experts=self.experts, adapters=self.adapters,
        )


class StageState(NamedTuple):
    """What an engine keeps, gathers and reduces on one stage, in bytes."""

    #: Elements of one rank's parameters, not divided by data parallelism.
    parameters: int
    #: Model state: weights, gradients, optimizer state.
    amounts: tuple[tuple[Line, int], ...]
    #: Unsplit remainders of the allocator's blocks that hold it.
    remainders: int = 0
    #: Copies of gradients, mostly in fp32, that stay from the optimizer's step until the next zero_grad.
    gradient_copies: int = 0
    #: Gathered parameters that are alive during every pass, in addition to this rank's shard.
    gathered: int = 0
    #: The part of these parameters that stays between two steps.
    gathered_between_steps: int = 0
    gradient_copies_name: str = "main gradients in fp32"
    #: Allocated for the optimizer's step and freed after it.
    in_step: int = 0
    #: For each chunk, what is gathered, reduced or made while its links run; empty if nothing is.
    concurrent: tuple[EngineBytes, ...] = ()
    #: Unsharded gradients of earlier microbatches that wait for the last one, during every pass.
    accumulated: int = 0
    #: Name of what ``in_step`` counts.
    step_name: str = "fp32 copies of optimizer states"
    #: In host memory: (name, bytes).
    host: tuple[tuple[str, int], ...] = ()
    #: Peak while the engine is constructed around a model on the GPU; None: not modelled.
    building: int | None = None
    #: While a full checkpoint is gathered, in addition to what is alive between steps; None: not modelled.
    saving: int | None = None
    #: Buffers in which units are gathered and reduced in turn, from the first pass on.
    pools: int = 0

    @property
    def in_passes(self) -> int:
        """Bytes that are alive during all forward and backward passes, but not in the optimizer's step."""
        return self.gathered + self.accumulated

    @property
    def fresh(self) -> int:
        """The part of ``amounts`` that every backward pass allocates."""
        return sum([nbytes for line, nbytes in self.amounts if line.fresh])

    @property
    def freed_between_steps(self) -> int:
        """The part of ``amounts`` that is freed between two steps."""
        return sum([nbytes for line, nbytes in self.amounts if line.fresh or line.zeroed])

    def components(self, parallel: ParallelSpec) -> list[Component]:
        """The lines of model state."""
        ranks = {
            "tp": parallel.tp, "cp": parallel.cp, "dp": parallel.data_parallel_size, "ep": parallel.ep,
            "etp": parallel.etp, "edp": parallel.expert_data_parallel_size,
        }  # fmt: skip
        return [line.component(nbytes, ranks) for line, nbytes in self.amounts]

    def buffers(self) -> list[Component]:
        """Buffers that are allocated in addition to model state."""
        out = []
        if any_nonzero(self.remainders):
            out.append(
                Component(
                    "remainder of allocator blocks", self.remainders, Role.BUFFERS, Provenance.FORMULA,
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
                    self.gradient_copies_name, self.gradient_copies, Role.BUFFERS, Provenance.FORMULA,
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
    """Cache of one engine's results per chunk, by the list of units and whether its buffers are cut into buckets.

    Keys are ids of the lists. Each entry refers to its list, so that the id is not reused while the entry exists.
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
        """What a stage of ``chunks`` keeps, gathers and reduces."""


@runtime_checkable
class HasFirstStep(Protocol):
    """An engine whose first step gathers differently from later ones."""

    def first_step(self) -> Engine:
        """The engine for the passes of the first step."""
