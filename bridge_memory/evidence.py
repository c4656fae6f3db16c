"""How far predictions of measured runs of the same kind were off.

The table (``evidence.json``) is written by ``scripts/accuracy_report.py`` from the corpora in ``tests/data``; the kind
of a run is computed here for writing and for reading the table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.cards.generations import AMD, GENERATIONS, generation_of
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.names import NamedGpu
from bridge_memory.files import parse_json, read_text
from bridge_memory.spec import DataParallelSpec, MambaSpec, MoESpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.parts import ENGINES

SCHEMA = "bridge-memory/evidence/4"
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "evidence.json")
#: From so many errors on the 90th percentile is reported; of fewer the largest.
ENOUGH = 10
#: Runs that a 90 % band needs. Between the i-th and the j-th smallest of n errors (j - i) / (n + 1) of all such runs
#: are expected, whatever their distribution; 19 is the least n whose smallest and largest hold 90 % between them.
ENOUGH_FOR_BAND = 19
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
    diffusion = "diffusion", run.model.diffusion is not None
    kinds = diffusion, ("Mamba", any(isinstance(x.mixer, MambaSpec) for x in layers)), (
        "MoE", any(isinstance(x.ffn, MoESpec) for x in layers)
    ), ("modality encoder", bool(run.model.encoders))
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
    def within(self) -> float | None:
        """90 % of the runs were within it, of few runs all; None where no run was measured."""
        if len(self.values) < ENOUGH:
            return max(self.values, default=None)
        return _between(self.values, 0.9 * (len(self.values) - 1))

    def words(self, what: str) -> str:
        """"15 real-size runs, 90% within 1.3%", "3 real-size runs, worst 1.9%"."""
        number, within = len(self.values), max(0.0001, self.within or 0.0)
        share = f"{within:.1%}" if within >= 0.001 else f"{within:.2%}"
        how = "90% within " if number >= ENOUGH else "worst " if number > 1 else "off by "
        return f"{number} {what}{'s' * (number > 1)}, {how}{share}"


@dataclass(frozen=True, slots=True)
class Band:
    """Where measured peaks of real-size runs lie around a prediction: 90 % of them, shares of what was measured.

    ``low`` and ``high``: measured minus predicted (``residual.relative``). ``runs``: so many were scored; ``of``: what
    they have in common with the run, in words ("any of Megatron DDP").
    """

    low: float
    high: float
    runs: int
    of: str

    def around(self, peak: int) -> tuple[int, int]:
        """The least and the most bytes that are measured where ``peak`` is predicted."""
        return round(peak / (1 - self.low)), round(peak / (1 - self.high))

    @property
    def above(self) -> float:
        """By which share of a prediction the upper end lies above it; 0 where it does not."""
        return max(0.0, self.high / (1 - self.high))


def band_of(errors: Sequence[float], of: str) -> Band | None:
    """The band of signed errors: their 5 % and 95 % quantiles, at the places 0.05 (n + 1) and 0.95 (n + 1) of n sorted
    ones, between which 90 % of runs are expected. None of fewer than ``ENOUGH_FOR_BAND``.

    Example:
        >>> band_of([n / 100 for n in range(19)], "all")
        Band(low=0.0, high=0.18, runs=19, of='all')
    """
    if len(errors) < ENOUGH_FOR_BAND:
        return None
    ordered, places = sorted(errors), len(errors) + 1
    low, high = (round(_between(ordered, round(share * places - 1, 9)), 5) for share in (0.05, 0.95))
    return Band(low, high, len(errors), of)


def _between(ordered: Sequence[float], place: float) -> float:
    """The value at a place of sorted ones, counted from 0."""
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


class Figure(str, Enum):
    """What of a run was measured; reserved memory is compared with a replay."""

    PEAK = "peak"
    RESERVED = "reserved"
    STATIC = "static"

    def __str__(self) -> str:
        return self.value


class Measured(NamedTuple):
    """A measured run that is compared like with like, by its highest figure: the signed error, and whether the run is
    of real size (``accuracy.features.SCALES``)."""

    kind: Kind
    error: float
    real: bool
    figure: Figure = Figure.PEAK
    run: RunSpec | None = None
    #: Who measured it, the GPU in their words, the figure in bytes, and the signed error of static memory.
    campaign: str = ""
    gpu: str = ""
    nbytes: int = 0
    static: float | None = None


class Row(NamedTuple):
    """Signed errors of one kind: peaks and reserved memory of real-size runs, either of small test models."""

    runs: tuple[float, ...] = ()
    reserved: tuple[float, ...] = ()
    small: tuple[float, ...] = ()


class Evidence(NamedTuple):
    """Measured runs of one kind: those of real size, and small test models; and the band of the peak, which may be of a
    wider class."""

    kind: Kind
    runs: Errors = Errors()
    small: Errors = Errors()
    band: Band | None = None

    @property
    def above(self) -> float:
        """The share of a prediction by which a measured peak may be higher: the upper end of the band, or how far off
        runs of exactly this kind were, small test models too where there are few others; 0 where nothing is known."""
        enough = len(self.runs.values) >= ENOUGH
        own = [self.runs.within, None if enough else self.small.within]
        return max(0.0 if self.band is None else self.band.above, *(share or 0.0 for share in own))

    def __str__(self) -> str:
        """"accuracy: 9 real-size runs, worst 1.8%; 3 small test models, worst 0.9% (Hopper, TE, MoE, 1F1B)"."""
        if not (self.runs.values or self.small.values):
            return f"accuracy: not measured for {self.kind}"
        real = self.runs.words("real-size run") if self.runs.values else "no real-size run measured"
        small = self.small.words("small test model") if self.small.values else ""
        return f"accuracy: {'; '.join(filter(None, (real, small)))} ({self.kind})"


def evidence_of(run: RunSpec, gpu: Gpu | None = None) -> Evidence:
    """Measured errors of runs of the kind of ``run`` on ``gpu``; None: as ``kind_of``."""
    kind, table = kind_of(run, gpu), _table()
    found = table.get(kind, Row())
    runs, small = (Errors(tuple(sorted(map(abs, errors)))) for errors in ((*found.runs, *found.reserved), found.small))
    # Nobody measured a model whose layers were guessed.
    return Evidence(kind, runs, small, None if run.model.generic else _band(kind, table))


def _band(kind: Kind, table: Mapping[Kind, Row]) -> Band | None:
    """Of the narrowest class with enough runs. Small test models are left out: their errors are megabytes of
    workspaces, which are per cent of them alone."""
    layers = kind._replace(gpu="", schedule="")
    engine = kind.engine or ENGINES[DataParallelSpec().engine]
    classes: tuple[tuple[str, Callable[[Kind], bool]], ...] = (
        ("of its kind", lambda k: k == kind),
        (f"any of {layers}", lambda k: k._replace(gpu="", schedule="") == layers),
        (f"any of {engine}", lambda k: k.engine == kind.engine),
        ("any engine", lambda k: True),
    )
    for of, holds in classes:
        rows = [(other.gpu, row.runs) for other, row in table.items() if row.runs and holds(other)]
        if kind.gpu not in {gpu for gpu, _ in rows}:
            of = f"{of}, none on {kind.gpu}"
        found = band_of([error for _, runs in rows for error in runs], of)
        if found is not None:
            return found
    return None


def evidence_table(measured: Sequence[Measured]) -> str:
    """The text of ``PATH``, of measured runs."""
    kinds: dict[Kind, dict[str, list[float]]] = {}
    for run in measured:
        if run.figure is Figure.STATIC:
            continue  # says nothing of a peak
        which = "small" if not run.real else "reserved" if run.figure is Figure.RESERVED else "runs"
        kinds.setdefault(run.kind, {name: [] for name in Row._fields})[which].append(round(run.error, 5) + 0.0)
    rows = [json.dumps({"kind": kind, **{name: sorted(of) for name, of in errors.items() if of}}, separators=(",", ":"))
            for kind, errors in sorted(kinds.items())]  # fmt: skip
    return f'{{"schema":"{SCHEMA}","kinds":[\n' + ",\n".join(rows) + "\n]}\n"


@lru_cache(maxsize=1)
def _table() -> Mapping[Kind, Row]:
    data: dict[str, Any] = parse_json(read_text(PATH, "reinstall the package"))
    return {
        Kind(*row["kind"]): Row(**{name: tuple(row.get(name, ())) for name in Row._fields}) for row in data["kinds"]
    }
