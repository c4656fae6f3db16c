"""Megatron-FSDP: what of the model state is divided over data-parallel ranks, and what is gathered while units run.

Source: megatron-core ``distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: _register_fsdp_hooks``,
``param_and_grad_buffer.py: AllGatherPipeline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.components import Component, Role, State
from bridge_memory.engines.engine import StageState
from bridge_memory.engines.megatron_ddp import state_of
from bridge_memory.inventory.chain import Label
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import DTYPE_BYTES, RunSpec


class MegatronFSDP:
    """See the module docstring."""

    def check(self, run: RunSpec) -> None:
        """Everything is checked with the RunSpec."""

    def stage_state(self, run: RunSpec, chunks: Sequence[Sequence[Unit]], gpu_arch: str) -> StageState:
        """Model state as DDP's, divided where the strategy says so."""
        whole = state_of(run, chunks, gpu_arch)
        components = tuple(_divided(run, c) for c in whole.components)
        return whole._replace(components=components, gathered=_gathered(run, chunks))


def _divided(run: RunSpec, component: Component) -> Component:
    d = run.data_parallel
    divides = {Role.WEIGHTS: d.shards("params"), Role.GRADIENTS: d.shards("grads")}.get(component.role, False)
    if not divides or component.state is State.FP8_COPIES:
        return component
    return replace(component, bytes=-(-component.bytes // run.parallel.shard_worlds[component.experts]))


def _gathered(run: RunSpec, chunks: Sequence[Sequence[Unit]]) -> int:
    """Whole parameters that are held while a layer runs, beyond this rank's shard, in bytes.

    What lies outside the layers (embedding, final norm, output layer) is gathered for the whole pass; of the
    layers there are two at a time, the running one and the next, which is gathered ahead.
    Checked on dense GPT runs: 31.2 MiB measured against 31.9.
    """
    if not run.data_parallel.shards("params"):
        return 0
    outside = 0
    layers: list[int] = []
    for units in chunks:
        for unit in units:
            numel = sum(counted.numel for counted in unit.parameters.counted)
            if unit.label in (Label.LAYER, Label.MTP):
                layers += [numel] * min(2, unit.count)
            else:
                outside += numel
    return (outside + sum(sorted(layers)[-2:])) * DTYPE_BYTES[run.precision.params_dtype]
