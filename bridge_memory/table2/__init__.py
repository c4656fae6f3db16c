"""The Megatron paper's closed forms, as Megatron Bridge 0.6.2 states them: the method "table2".

Estimates of another kind than the inventory's (see ``bridge_memory.estimation``); they exist because people compare
against them. ``closed_forms`` knows numbers, ``container`` reads them, ``stages`` and ``remarks`` are ours on top;
``theoretical_memory_utils`` is their face.
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
