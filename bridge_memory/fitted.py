"""Every constant of the estimate that was fitted on measured runs instead of read in a source.

Each has a name, a unit, the runs behind it and the values it was chosen from: ``bridge-memory validate --folds K``
chooses again with whole families left out and predicts those. Sizes of libraries are in ``workspaces.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant: its name here, the values it was chosen from (the last one means "no such tensor")."""

    name: str
    candidates: tuple[object, ...]
    runs: str


#: Bytes an element [T_sp, h] that a compiled dropout-add without a bias keeps beside its mask: its input
#: (``releases.COMPILED_DROPOUT_KEEPS_INPUT``); not found in a traced graph (torch 2.13 on a CPU keeps the mask only),
#: so the holder is unknown.
COMPILED_DROPOUT_INPUT_BYTES = 2

FITTED = (
    Fitted(
        "COMPILED_DROPOUT_INPUT_BYTES", (1, 2, 4, 0),
        "Megatron-LM functional tests of MoE GPTs without linear biases and with hidden dropout 0.1, at TP 1, 2 and "
        "4, Transformer Engine and local, before and after 0.16; those without dropout do not change",
    ),
)
