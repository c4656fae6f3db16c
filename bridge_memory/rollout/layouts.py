"""Trainer layouts of the same GPUs, by what they leave for the engine's KV cache.

Tensor, pipeline, context and expert parallel sizes of a Megatron trainer are varied, and what is offloaded; the engine
and the micro batches' tokens a GPU stay. Layouts that the spec refuses are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.outside.amount import Range
from bridge_memory.rollout.answer import Rollout, Share, answer, largest_share
from bridge_memory.rollout.phases import Phase
from bridge_memory.rollout.setup import PostTraining
from bridge_memory.spec import ParallelSpec, SpecError

_SIZES = (1, 2, 4, 8)
#: Layouts that are answered in full.
_MOST = 48
#: Rows that are returned.
SHOWN = 8


class Layout(NamedTuple):
    """A layout, and the largest share of the card for the engine beside it."""

    parallel: ParallelSpec
    param_offload: bool
    optimizer_offload: bool
    share: Share
    #: The driver's peak of the update.
    update: Range

    @property
    def kv_tokens(self) -> int:
        """Tokens of a replica's cache that are sure."""
        return 0 if self.share.kv_tokens is None else self.share.kv_tokens.least

    def as_json(self) -> dict[str, Any]:
        """By ``$defs/layout`` of the schema."""
        p = self.parallel
        return {
            "tensor": p.tp, "pipeline": p.pp, "context": p.cp, "expert": p.ep, "expert_tensor": p.etp,
            "param_offload": self.param_offload, "optimizer_offload": self.optimizer_offload,
            "safe": self.share.safe, "binds": str(self.share.binds), "kv_tokens": self.kv_tokens,
            "update_bytes": list(self.update),
        }  # fmt: skip


def search(found: Rollout) -> list[Layout]:
    """Layouts in which every phase fits for sure, those with the largest cache first; of equal ones the one that
    offloads least, then that with fewest tensor and pipeline ranks. Raises SpecError: the trainer has no layout."""
    setup = found.setup
    if not setup.of_megatron:
        raise SpecError(f"--search varies Megatron's layouts; {setup.trainer.data_parallel.engine} has none; drop it")
    rows = []
    for other in list(_layouts(setup))[:_MOST]:
        try:
            at = answer(other, found.gpu)
            share = largest_share(at)
        except SpecError:
            continue
        if share.safe is None:
            continue
        update = at.phase(Phase.UPDATE)
        assert update is not None
        rows.append(Layout(
            other.trainer.parallel, other.param_offload, other.optimizer_offload, share, update.driver
        ))  # fmt: skip
    rows.sort(key=lambda row: (
        -row.kv_tokens, row.param_offload + row.optimizer_offload,
        row.parallel.tp * row.parallel.pp * row.parallel.cp, row.parallel.pp,
    ))  # fmt: skip
    return rows[:SHOWN]


def _layouts(setup: PostTraining) -> Iterator[PostTraining]:
    """The fewest model-parallel ranks first, the setup's own offloading first."""
    run = setup.trainer
    world, moe = run.parallel.world_size, run.model.has_experts
    mine = (setup.param_offload, setup.optimizer_offload)
    offloads = [mine] if setup.framework in ("slime", "nemo-rl") else dict.fromkeys([mine, (True, True)])
    sizes = [
        (tp, pp, cp, ep) for tp in _SIZES for pp in _SIZES for cp in _SIZES[:3]
        for ep in (_SIZES if moe else (1,))
        if world % (tp * pp * cp) == 0 and world % (ep * pp) == 0 and (tp * cp == 1 or tp * cp <= 8)
    ]  # fmt: skip
    sizes.sort(key=lambda size: (size[0] * size[1] * size[2], -size[3]))
    for parameters, optimizer in offloads:
        for tp, pp, cp, ep in sizes:
            try:
                parallel = replace(
                    run.parallel, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                    context_parallel_size=cp, expert_model_parallel_size=ep, sequence_parallel=tp > 1,
                    expert_tensor_parallel_size=1 if moe else None, virtual_pipeline_model_parallel_size=None,
                    num_layers_in_first_pipeline_stage=None, num_layers_in_last_pipeline_stage=None,
                    pipeline_model_parallel_layout=None,
                )  # fmt: skip
                other = setup.with_trainer(run.with_(parallel=parallel))
                yield other.with_(param_offload=parameters, optimizer_offload=optimizer)
            except SpecError:
                continue
