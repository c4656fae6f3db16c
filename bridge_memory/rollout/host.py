"""Host memory of a node while trainer and engine take turns.

Source: verl 0.9.1 ``utils/megatron_utils.py: offload_megatron_model_to_cpu`` (one pinned buffer a DDP buffer, allocated
once; before 0.8 a second one while the first was there), ``offload_megatron_optimizer``, ``utils/fsdp_utils.py:
offload_fsdp_model_to_cpu``; slime ``actor.py``: pinned copies of actor and reference; torch rounds pinned memory up to
powers of two (``CachingHostAllocator``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bridge_memory.job.host import PROCESS
from bridge_memory.outside.amount import Amount, Range, total
from bridge_memory.rollout import trainer as of_trainer
from bridge_memory.rollout.inference import InferenceMemory
from bridge_memory.rollout.setup import PostTraining, Reference

#: The pinned allocator's rounding.
_ROUNDED = 2
#: The newest verl that makes a new pinned copy while the old one is there (#6193).
_TWICE = (0, 7)


class RolloutHost(NamedTuple):
    """Of the rank that needs most, and of a node of such ranks."""

    rank: tuple[Amount, ...]
    node: Range
    ranks: int

    def as_json(self) -> dict[str, Any]:
        """By the schema of ``rollout.schema.json``."""
        return {
            "rank": [
                {"name": a.name, "bytes": [a.least, a.most], "provenance": str(a.provenance), "source": a.source}
                for a in self.rank
            ],
            "node_bytes": list(self.node), "ranks_of_node": self.ranks,
        }  # fmt: skip


def host_of(setup: PostTraining, engine: InferenceMemory) -> RolloutHost:
    """The processes of a rank's trainer and engine, and what both keep on the host. Raises SpecError."""
    ranks = min(setup.gpus_per_node, setup.trainer.parallel.world_size)
    most = max((tuple(_of_stage(setup, stage, engine)) for stage in of_trainer.stages_of(setup)),
               key=lambda amounts: total(amounts).most)  # fmt: skip
    found = total(most)
    return RolloutHost(most, Range(ranks * found.least, ranks * found.most), ranks)


def _of_stage(setup: PostTraining, stage: int, engine: InferenceMemory) -> list[Amount]:
    states = of_trainer.states(setup.update_run(), stage)
    parameters, optimizer = total(states.parameters).most, total(states.optimizer).most
    twice = setup.framework == "verl" and setup.release <= _TWICE and setup.of_megatron
    found = [PROCESS._replace(name="trainer: Python, torch, CUDA libraries")]
    if setup.param_offload:
        most = (2 if twice else 1) * _ROUNDED * parameters
        found.append(Amount("parameters, pinned", parameters, most, PROCESS.provenance, "offloaded for rollouts"))
    if setup.optimizer_offload:
        found.append(Amount("optimizer states", optimizer, optimizer, PROCESS.provenance, "offloaded for rollouts"))
    if setup.framework == "slime":
        copies = 1 + (setup.reference is not Reference.NONE)
        found.append(Amount("weights of actor and reference, pinned", copies * parameters,
                            copies * _ROUNDED * parameters, PROCESS.provenance, "tensor_backper.py"))  # fmt: skip
    elif setup.reference in (Reference.LOADED, Reference.STREAMED, Reference.SWAPPED):
        found.append(Amount("reference, pinned", parameters, _ROUNDED * parameters, PROCESS.provenance,
                            "the reference's weights"))  # fmt: skip
    found += [Amount(f"optimizer on the host: {name}", nbytes, _ROUNDED * nbytes, PROCESS.provenance, "the estimate")
              for name, nbytes in of_trainer.host(setup.update_run(), stage)]  # fmt: skip
    if not setup.in_process:
        found.append(PROCESS._replace(name="engine: Python, torch, CUDA libraries"))
    if setup.sleep_level:
        found += engine.asleep(setup.sleep_level).host
    return [a for a in found if a.most]
