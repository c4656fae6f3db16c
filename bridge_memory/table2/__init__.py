"""The Megatron paper's closed forms, as Megatron Bridge states them: the method "table2".

Estimates of another kind than the inventory's (see ``bridge_memory.estimate``); they exist because people compare
against them. ``closed_forms`` knows numbers, ``container`` reads them; ``theoretical_memory_utils`` is their face.
"""

from bridge_memory.table2.closed_forms import ACTIVATION, DENSE, ROUTED, Table2, Table2Stage
from bridge_memory.table2.container import assumptions, table2_from_container

__all__ = ["ACTIVATION", "DENSE", "ROUTED", "Table2", "Table2Stage", "assumptions", "table2_from_container"]
