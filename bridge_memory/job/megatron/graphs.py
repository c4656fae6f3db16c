"""CUDA graphs: what capture adds to reserved memory, part by part (``workspaces.graphs``)."""

from __future__ import annotations

from bridge_memory.estimation import stage_graphs
from bridge_memory.outside.amount import Amount
from bridge_memory.spec import RunSpec

#: Names of the amounts.
POOL, MASKS, MOVED = "memory pool of the graphs", "static attention masks", "activations in the pool instead"


def graphs(run: RunSpec, stage: int, *, left: int | None = None) -> tuple[Amount, ...] | None:
    """What CUDA graphs add to the reserved memory of a stage; None: the run has none.

    The sum is what is reserved beyond the peak of the same run without graphs. ``MOVED`` is below zero: what eager
    passes no longer need.

    Args:
        run: The run.
        stage: The pipeline stage.
        left: As for ``workspaces.graphs.graph_memory``.

    Raises:
        SpecError: There is no such stage, or the layers do not go onto the stages.

    Example:
        >>> from bridge_memory import RunSpec
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> graphs(run, 0) is None
        True
        >>> captured = run.with_fields(cuda_graph_impl="local")
        >>> [amount.name for amount in graphs(captured, 0)]
        ['memory pool of the graphs', 'activations in the pool instead']
    """
    found = stage_graphs(run, stage, left=left)
    if found is None:
        return None
    amounts = [Amount(POOL, *found.pool, found.provenance, found.source)]
    if found.masks.most:
        amounts.append(Amount(MASKS, *found.masks, found.provenance, "transformer_layer.py: get_layer_static_inputs"))
    if found.moved is not None:
        amounts.append(Amount(MOVED, *found.moved, found.provenance, found.source))
    return tuple(amounts)
