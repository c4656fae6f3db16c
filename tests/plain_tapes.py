"""Tapes that a test records with plain numbers."""

from __future__ import annotations

from bridge_memory.tapes.alive import Atoms, BlockCost, Structure
from bridge_memory.tapes.tape import Tape


def cost_of(tape: Tape) -> BlockCost:
    """The cost of a tape that was recorded with plain numbers."""
    atoms = Atoms()
    return BlockCost(Structure(tape, atoms), atoms.sizes)
