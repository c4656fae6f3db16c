"""How far predictions of measured runs of the same kind were off.

The table (``evidence.json``) is written by ``scripts/accuracy_report.py`` from the corpora in ``tests/data``; the kind
of a run is computed here for writing and for reading the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.cards.generations import AMD, GENERATIONS, generation_of
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.names import NamedGpu
from bridge_memory.files import parse_json, read_text
from bridge_memory.spec import DataParallelSpec, MambaSpec, MoESpec, RunSpec
from bridge_memory.spec.layout import layout

SCHEMA = "bridge-memory/evidence/3"
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "evidence.json")
#: From so many errors on the 90th percentile is reported; of fewer the largest.
ENOUGH = 10
_IMPLEMENTATIONS = {"transformer_engine": "TE", "local": "megatron-core's local layers"}


class Kind(NamedTuple):
    """What runs have in common whose predictions are about equally accurate, in words."""

    gpu: str
    implementation: str
    model: str
    schedule: str
    precision: str = ""
    engine: str = ""
    adapters: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


def kind_of(run: RunSpec, gpu: Gpu | NamedGpu | None = None) -> Kind:
    """The kind of ``run`` on ``gpu``; None: on the first GPUs of the generation that its workspaces are of."""
    p, d, i = run.parallel, run.data_parallel, run.implementation
    layers, virtual = run.model.layers, layout(run.model, p).virtual_pipeline_model_parallel_size
    kinds = ("Mamba", any(isinstance(x.mixer, MambaSpec) for x in layers)), (
        "MoE", any(isinstance(x.ffn, MoESpec) for x in layers)
    )
    model = " and ".join(word for word, there in kinds if there) or "dense"
    return Kind(
        i.gpu_arch.capitalize() if gpu is None else _generation(gpu),
        _IMPLEMENTATIONS.get(i.transformer_impl, i.transformer_impl),
        f"a model_type without a reader of its own ({run.model.model_type})" if run.model.generic else model,
        "no pipeline" if p.pp == 1 else "1F1B" if virtual == 1 else "interleaved 1F1B",
        "fp8" if run.precision.fp8 is not None else "fp4" if run.precision.quantizes else "",
        "" if d.engine == DataParallelSpec().engine else d.engine_title,
        run.peft.scheme or "" if run.peft.freezes else "",
    )


def _generation(gpu: Gpu | NamedGpu) -> str:
    """"Hopper"; GPUs of another compute capability than their generation's first have evidence of their own."""
    name = generation_of(gpu.capability, gpu.vendor)
    if gpu.vendor == AMD and name is not None:
        return f"AMD {name.upper()}"
    if name is not None and GENERATIONS.get(name) == gpu.capability:
        return name.capitalize()
    return f"{(name or gpu.vendor).capitalize()} of compute capability {'{}.{}'.format(*gpu.capability)}"


class Errors(NamedTuple):
    """Absolute relative errors of measured runs, smallest first."""

    values: tuple[float, ...] = ()

    @property
    def band(self) -> float | None:
        """90 % of the runs were within it, of few runs all; None where no run was measured."""
        if len(self.values) < ENOUGH:
            return max(self.values, default=None)
        place = 0.9 * (len(self.values) - 1)
        low = int(place)
        return self.values[low] + (self.values[low + 1] - self.values[low]) * (place - low)

    def words(self, what: str) -> str:
        """"15 real-size runs, 90% within 1.3%", "3 real-size runs, worst 1.9%"."""
        number, band = len(self.values), max(0.0001, self.band or 0.0)
        share = f"{band:.1%}" if band >= 0.001 else f"{band:.2%}"
        how = "90% within " if number >= ENOUGH else "worst " if number > 1 else "off by "
        return f"{number} {what}{'s' * (number > 1)}, {how}{share}"


class Evidence(NamedTuple):
    """Measured runs of one kind: those of real size (``accuracy.features.SCALES``), and small test models."""

    kind: Kind
    runs: Errors = Errors()
    small: Errors = Errors()

    @property
    def band(self) -> float | None:
        """The share of a peak by which a prediction may be off: of ``runs``, of small test models too where there are
        few; None where nothing was measured."""
        if len(self.runs.values) >= ENOUGH:
            return self.runs.band
        return max((band for errors in (self.runs, self.small) if (band := errors.band) is not None), default=None)

    def __str__(self) -> str:
        """"accuracy: 9 real-size runs, worst 1.8%; 3 small test models, worst 0.9% (Hopper, TE, MoE, 1F1B)"."""
        if self.band is None:
            return f"accuracy: not measured for {self.kind}"
        real = self.runs.words("real-size run") if self.runs.values else "no real-size run measured"
        small = self.small.words("small test model") if self.small.values else ""
        return f"accuracy: {'; '.join(filter(None, (real, small)))} ({self.kind})"


def evidence_of(run: RunSpec, gpu: Gpu | None = None) -> Evidence:
    """Measured errors of runs of the kind of ``run`` on ``gpu``; None: as ``kind_of``."""
    kind = kind_of(run, gpu)
    return Evidence(kind, *_table().get(kind, ()))


def evidence_table(measured: Sequence[tuple[Kind, float, bool]]) -> str:
    """The text of ``PATH``, of measured runs: kind, absolute error as a share, whether of real size."""
    kinds: dict[Kind, tuple[list[float], list[float]]] = {}
    for kind, error, real in measured:
        kinds.setdefault(kind, ([], []))[not real].append(round(error, 5))
    rows = [json.dumps({"kind": kind, "runs": sorted(runs), "small": sorted(small)}, separators=(",", ":"))
            for kind, (runs, small) in sorted(kinds.items())]  # fmt: skip
    return f'{{"schema":"{SCHEMA}","kinds":[\n' + ",\n".join(rows) + "\n]}\n"


@lru_cache(maxsize=1)
def _table() -> Mapping[Kind, tuple[Errors, Errors]]:
    data: dict[str, Any] = parse_json(read_text(PATH, "reinstall the package"))
    return {Kind(*row["kind"]): (Errors(tuple(row["runs"])), Errors(tuple(row["small"]))) for row in data["kinds"]}
