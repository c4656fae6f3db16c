"""What an engine tells an estimate: who keeps parameters, gradients and optimizer state, and what moves meanwhile.

An engine knows parameters and nothing of attention or pipelines. A unit is what it lays out, and may gather, together:
the blocks of one kind in a chunk (``inventory.stack.Unit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from bridge_memory.components import Component
from bridge_memory.inventory.chain import Label
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import LayerSpec, RunSpec

#: Bytes beside a unit while it runs: (forward, backward).
Concurrent = tuple[int, int]


class StageState(NamedTuple):
    """What an engine keeps and moves on one stage."""

    #: Elements of one rank's whole parameters, as computations see them.
    parameters: int
    #: Allocated for good: weights, gradients, optimizer state, the engine's own buffers.
    components: tuple[Component, ...]
    #: Left behind by the optimizer's step until the next zero_grad.
    after_step: tuple[Component, ...] = ()
    #: Whole parameters that are there during every pass, beyond this rank's shard.
    gathered: int = 0
    #: Gathered or reduced beside the units of one kind while they run: (what, kind of layer) -> bytes.
    concurrent: Mapping[tuple[Label, LayerSpec | None], Concurrent] = MappingProxyType({})


class Engine(Protocol):
    """One data-parallel engine."""

    def check(self, run: RunSpec) -> None:
        """Raise SpecError for options of this engine that contradict each other."""

    def stage_state(self, run: RunSpec, chunks: Sequence[Sequence[Unit]], gpu_arch: str) -> StageState:
        """What a stage of ``chunks`` keeps, and what moves beside its units."""


def engine_of(run: RunSpec) -> Engine:
    """The engine that ``run.data_parallel.engine`` names."""
    if run.data_parallel.engine == "megatron_fsdp":
        from bridge_memory.engines.megatron_fsdp import MegatronFSDP

        return MegatronFSDP()
    from bridge_memory.engines.megatron_ddp import MegatronDDP

    return MegatronDDP()
