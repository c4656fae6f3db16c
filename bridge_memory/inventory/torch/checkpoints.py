"""A checkpointed layer as a link of the chain."""

from __future__ import annotations

from bridge_memory.components import Part, Provenance
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.chain import Label, Link


def checkpointed(cost: BlockCost, before: int, *, reentrant: bool) -> Link:
    """A layer that saves its input and runs forward again in backward (torch ``utils/checkpoint.py``).

    Reentrant: forward runs without gradients; the recomputed output and its gradient are variables of
    ``CheckpointFunction.backward`` until it returns. Non-reentrant: forward drops the tensors that it would save, and
    the recomputation stops at the last saved tensor (``_StopRecomputationError``), so that nothing holds the output.
    """
    kept, out = cost.input_bytes, cost.output_bytes
    unsaved_input = 0 if cost.input_retained else kept
    if reentrant:
        again, back = cost.forward_peak + out, unsaved_input + cost.backward_peak_held + out
    else:
        again = (cost.before_landmark_forward or cost.forward_peak) + out + before
        back = unsaved_input + cost.backward_peak
    back_name = cost.backward_name if back >= again else _recomputed
    return Link(
        Label.RECOMPUTED, kept, cost.no_grad_peak, max(again, back), max(again, back), cost.forward_name, back_name,
        more=(((Part.RECOMPUTED_INPUT, Provenance.FORMULA), kept),),
    )


def _recomputed() -> str:
    return "recomputed layer"
