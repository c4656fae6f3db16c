"""Layers -> (pipeline stage, virtual chunk)."""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.spec import ModelSpec, ParallelSpec


@dataclass(frozen=True, slots=True)
class Chunk:
    """One virtual stage: which decoder layers (0-based) and which ends of the model it holds."""

    layers: tuple[int, ...]
    #: Holds the input embedding (``pre_process``).
    embedding: bool = False
    #: Holds the final norm, the output layer and the loss (``post_process``).
    output: bool = False
    #: MTP depths (0-based) on this chunk.
    mtp: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """``stages[pipeline rank][virtual stage]`` -> Chunk."""

    stages: tuple[tuple[Chunk, ...], ...]


def layout(model: ModelSpec, parallel: ParallelSpec) -> Layout:
    """Lay the model's layers out over pipeline stages and virtual chunks. Raises SpecError."""
    raise NotImplementedError
