"""Accuracy: relative errors of predicted peaks of measured runs, by kind of run.

The table (``evidence.json``) is written by ``bridge-memory accuracy RUNS.jsonl --evidence FILE``; the kind of a run is
computed here for writing and for reading the table.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.files import parse_json, read_text
from bridge_memory.spec import DataParallelSpec, MambaSpec, MoESpec, RunSpec
from bridge_memory.spec.layout import layout

SCHEMA = "bridge-memory/evidence/2"
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "evidence.json")
#: From so many errors on the 90th percentile is reported; of fewer the largest.
ENOUGH = 10
_IMPLEMENTATIONS = {"transformer_engine": "TE", "local": "megatron-core's local layers"}


class Kind(NamedTuple):
    """What runs have in common whose predictions are about equally accurate, in words."""

    generation: str
    implementation: str
    model: str
    schedule: str
    precision: str = ""
    engine: str = ""
    adapters: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


def kind_of(run: RunSpec, gpu_arch: str | None = None) -> Kind:
    """The kind of ``run``, on GPUs of ``gpu_arch`` (default: its own)."""
    p, d, i = run.parallel, run.data_parallel, run.implementation
    layers, virtual = run.model.layers, layout(run.model, p).virtual_pipeline_model_parallel_size
    kinds = ("Mamba", any(isinstance(x.mixer, MambaSpec) for x in layers)), (
        "MoE", any(isinstance(x.ffn, MoESpec) for x in layers)
    )
    return Kind(
        (gpu_arch or i.gpu_arch).capitalize(),
        _IMPLEMENTATIONS.get(i.transformer_impl, i.transformer_impl),
        " and ".join(word for word, there in kinds if there) or "dense",
        "no pipeline" if p.pp == 1 else "1F1B" if virtual == 1 else "interleaved 1F1B",
        "fp8" if run.precision.quantizes else "",
        "" if d.engine == DataParallelSpec().engine else d.engine_title,
        run.peft.scheme or "" if run.peft.freezes else "",
    )


class Evidence(NamedTuple):
    """Measured runs of one kind. ``errors``: absolute relative errors of their peaks, smallest first; ``small_models``:
    how many of them are small test models, the size of a functional test's."""

    kind: Kind
    errors: tuple[float, ...]
    small_models: int = 0

    @property
    def band(self) -> float | None:
        """The share of a peak by which a prediction may be off: 90 % of the runs were within it, of few runs all; None
        where no run was measured."""
        if not self.errors:
            return None
        if len(self.errors) < ENOUGH:
            return self.errors[-1]
        place = 0.9 * (len(self.errors) - 1)
        low = int(place)
        return self.errors[low] + (self.errors[low + 1] - self.errors[low]) * (place - low)

    def __str__(self) -> str:
        """"accuracy: within 1.8% on all 9 measured runs (Hopper, TE, MoE, 1F1B; all small test models)"."""
        if self.band is None:
            return f"accuracy: not measured for {self.kind}"
        number = len(self.errors)
        which = "90% of " if number >= ENOUGH else "all " if number > 1 else ""
        small = self.small_models
        if number == 1:
            about = "; a small test model" if small else ""
        elif small == number:
            about = "; all small test models"
        else:
            about = f"; {small} small test model{'s' * (small > 1)}" if small else ""
        return (
            f"accuracy: within {max(0.001, self.band):.1%} on {which}{number} measured run{'s' * (number > 1)} "
            f"({self.kind}{about})"
        )


def evidence_of(run: RunSpec, gpu_arch: str | None = None) -> Evidence:
    """Measured errors of runs of the kind of ``run``. Small test models count only where there are fewer than
    ``ENOUGH`` others."""
    kind = kind_of(run, gpu_arch)
    row = _table().get(kind)
    if row is None:
        return Evidence(kind, ())
    runs, small_models = row
    if len(runs) >= ENOUGH or not small_models:
        return Evidence(kind, runs)
    return Evidence(kind, tuple(sorted((*runs, *small_models))), len(small_models))


@lru_cache(maxsize=1)
def _table() -> Mapping[Kind, tuple[tuple[float, ...], tuple[float, ...]]]:
    data: dict[str, Any] = parse_json(read_text(PATH, "reinstall the package"))
    return {Kind(*row["kind"]): (tuple(row["errors"]), tuple(row["small_models"])) for row in data["kinds"]}
