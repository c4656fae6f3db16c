"""Options that a rehearsal does not run. They are refused unless default: neither column would include them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.spec import RunSpec
from bridge_memory.spec.fields import called

#: Fields of a RunSpec without effect in the loop on a GPU and in the passes on meta tensors.
NOT_REHEARSED: dict[str, tuple[str, ...]] = {
    "batch": (),
    "precision": (),
    "optimizer": ("use_layer_wise_distributed_optimizer",),
    "data_parallel": ("engine",),
    "peft": (),
    "implementation": (
        "defer_embedding_wgrad_compute", "delay_wgrad_compute", "use_legacy_models", "cuda_graph_impl",
        "cuda_graph_modules",
        "use_transformer_engine_op_fuser", "use_fused_weighted_squared_relu", "overlap_moe_expert_parallel_comm",
        "cpu_offloading_num_layers", "offload_modules", "moe_imbalance",
    ),
}  # fmt: skip


def refuse_what_is_ignored(run: RunSpec, also: Iterable[str] = (), but: Iterable[str] = ()) -> None:
    """Raise RehearsalUnavailable, in one line, for the first field that is not rehearsed and not default.

    ``also``: further fields that are not rehearsed; ``but``: fields that this rehearsal runs.
    """
    more, supported = tuple(also), tuple(but)
    for group, names in NOT_REHEARSED.items():
        held = getattr(run, group)
        for f in fields(held):
            value = getattr(held, f.name)
            if f.name in (*names, *more) and f.name not in supported and value != f.default:
                name = called(type(held), f.name)
                raise RehearsalUnavailable(f"{name} ({value}) is not rehearsed; leave it at {f.default}")
