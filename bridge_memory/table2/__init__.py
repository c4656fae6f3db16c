"""The Megatron paper's closed forms, as Megatron Bridge 0.6.2 states them: the method "table2".

Not the inventory's estimate (see ``bridge_memory.estimation``): people compare with these. ``closed_forms`` computes,
``container`` reads a ConfigContainer, ``stages`` and ``remarks`` are additions; ``theoretical_memory_utils`` is the
public module.
"""

from bridge_memory.table2.closed_forms import ACTIVATION, DENSE, ROUTED, Activations, HeldLayers, Layers, ModelState
from bridge_memory.table2.container import activations, activations_are_reported, is_mimo, model_state
from bridge_memory.table2.remarks import remarks
from bridge_memory.table2.stages import stages_of

__all__ = [
    "ACTIVATION",
    "DENSE",
    "ROUTED",
    "Activations",
    "HeldLayers",
    "Layers",
    "ModelState",
    "activations",
    "activations_are_reported",
    "is_mimo",
    "model_state",
    "remarks",
    "stages_of",
]
