"""Records of a run: one at its start, one per report, and its phases. Sizes are ints of bytes; None: not known.

``to_json`` returns plain JSON values, ``from_json`` reads them. Unknown keys are ignored, missing or invalid values
count as not known, and nothing is refused, so older and newer journals can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TypedDict, TypeGuard

from bridge_memory.residual import relative
from bridge_memory.spec import show

Json = Mapping[str, object]
#: Bytes: a least, and a most, which may be unknown.
Bounds = tuple[int, int | None]
#: Moments of a report, in order.
BUILT, FIRST_STEP, STEADY = "model built", "after step 1", "steady"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """One pipeline stage in one report. Measured figures are those of its worst rank (highest ``max_allocated``)."""

    stage: int
    #: Number of ranks with a reading, and the errors of the others, by rank.
    ranks: int = 0
    failed: Mapping[str, str] = field(default_factory=dict)
    predicted_static: int | None = None
    predicted_activation: int | None = None
    predicted_transient: int | None = None
    predicted_peak: int | None = None
    allocated: int | None = None
    max_allocated: int | None = None
    reserved: int | None = None
    outside: int | None = None
    #: Least free memory, and most allocation retries, of any rank.
    headroom: int | None = None
    retries: int | None = None
    ooms: int | None = None
    device_total: int | None = None
    worst_rank: int | None = None
    #: Range of ``max_allocated`` over the stage's ranks.
    spread: int | None = None
    #: torch's figure compared with the prediction at this moment: "allocated" or "max_allocated".
    compared: str | None = None
    expected: int | None = None
    measured: int | None = None
    #: Measured minus expected, and allocated minus predicted static.
    residual: int | None = None
    static_residual: int | None = None

    @property
    def error(self) -> float | None:
        """``residual`` as a share of ``measured``."""
        return relative(self.measured, self.expected)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Json) -> StageRecord | None:
        """None where the stage is missing."""
        stage = _integer(record.get("stage"))
        if stage is None:
            return None
        compared = record.get("compared")
        return cls(
            stage=stage,
            ranks=_integer(record.get("ranks")) or 0,
            failed={str(rank): _words(why) for rank, why in _mapping(record.get("failed")).items()},
            compared=compared if isinstance(compared, str) else None,
            **{name: _integer(record.get(name)) for name in _FIGURES},
        )


_FIGURES = tuple(f.name for f in fields(StageRecord) if f.name not in ("stage", "ranks", "failed", "compared"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRecord:
    """One report: every stage at one moment."""

    #: Seconds since the epoch.
    time: float = 0.0
    iteration: int = 0
    moment: str = ""
    world_size: int = 1
    missing_ranks: Sequence[int] = ()
    stages: Sequence[StageRecord] = ()
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "event": "report",
            "time": self.time,
            "iteration": self.iteration,
            "moment": self.moment,
            "world_size": self.world_size,
            "missing_ranks": list(self.missing_ranks),
            "stages": [stage.to_json() for stage in self.stages],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, record: Json) -> ReportRecord:
        stages = (StageRecord.from_json(stage) for stage in _mappings(record.get("stages")))
        ranks = (_integer(rank) for rank in _listed(record.get("missing_ranks")))
        return cls(
            time=_seconds(record.get("time")),
            iteration=_integer(record.get("iteration")) or 0,
            moment=_text(record.get("moment")),
            world_size=_integer(record.get("world_size")) or 1,
            missing_ranks=tuple(rank for rank in ranks if rank is not None),
            stages=tuple(stage for stage in stages if stage is not None),
            notes=tuple(map(_words, _listed(record.get("notes")))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """What a pipeline stage held in a stretch of a job, on its worst rank (highest driver memory). Ranges: [least,
    most]; ``most`` is None where others reset torch's statistics meanwhile."""

    #: Names of phases in order of time; several where nothing separated them.
    phases: Sequence[str]
    stage: int
    ranks: int = 0
    #: Stretches of it on the worst rank.
    times: int = 0
    worst_rank: int | None = None
    #: torch's peaks.
    allocated: Bounds | None = None
    reserved: Bounds | None = None
    #: At its end, of several the one with most: the GPU's used memory, that of all its processes; that without torch's
    #: reserved memory; and what NVML counts for this process.
    driver: int | None = None
    outside: int | None = None
    process: int | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: Json) -> PhaseRecord | None:
        """None where the stage or the names are missing."""
        stage = _natural(record.get("stage"))
        names = tuple(filter(None, map(_text, _listed(record.get("phases")))))
        if stage is None or not names:
            return None
        return cls(
            phases=names,
            stage=stage,
            ranks=_natural(record.get("ranks")) or 0,
            times=_natural(record.get("times")) or 0,
            worst_rank=_natural(record.get("worst_rank")),
            allocated=bounds_of(record.get("allocated")),
            reserved=bounds_of(record.get("reserved")),
            driver=_natural(record.get("driver")),
            outside=_natural(record.get("outside")),
            process=_natural(record.get("process")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesRecord:
    """All phases of the run so far; the last one of a run counts."""

    #: Seconds since the epoch.
    time: float = 0.0
    world_size: int = 1
    phases: Sequence[PhaseRecord] = ()

    def to_json(self) -> dict[str, object]:
        return {
            "event": "phases", "time": self.time, "world_size": self.world_size,
            "phases": [phase.to_json() for phase in self.phases],
        }  # fmt: skip

    @classmethod
    def from_json(cls, record: Json) -> PhasesRecord:
        phases = (PhaseRecord.from_json(phase) for phase in _mappings(record.get("phases")))
        return cls(
            time=_seconds(record.get("time")),
            world_size=_integer(record.get("world_size")) or 1,
            phases=tuple(phase for phase in phases if phase is not None),
        )


class ComponentRecord(TypedDict, total=False):
    """A ``components.Component`` with its enums as text."""

    name: str
    bytes: int
    role: str
    provenance: str
    shard: str
    lifetime: str
    part: str
    state: str
    routed: bool
    experts: bool
    adapters: bool


class PredictedStage(TypedDict):
    """The prediction for one rank of a stage, bytes."""

    stage: int
    static: int
    activation: int
    transient: int
    peak: int
    components: list[ComponentRecord]


class FactRecord(TypedDict):
    """A fact about the process, in words, and its source."""

    value: str
    source: str


class MachineRecord(TypedDict):
    """The machine of a process (``live.machine.Machine``); ``facts`` by field of ImplementationSpec."""

    gpu: str
    facts: dict[str, FactRecord]
    notes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The start of a run; ``model`` and the fields after it are empty where there is no prediction."""

    #: Seconds since the epoch.
    time: float = 0.0
    #: Loaded package -> release.
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: MachineRecord | None = None
    model: str = ""
    config_digest: str = ""
    assumptions: Sequence[str] = ()
    not_modelled: Sequence[str] = ()
    predicted: Sequence[PredictedStage] = ()
    #: What ran (``readers.run_spec``).
    run: Json = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        record: dict[str, object] = {"event": "run", "time": self.time, "versions": dict(self.versions)}
        if self.machine is not None:
            record["machine"] = self.machine
        if self.predicted:
            record |= {
                "model": self.model,
                "config_digest": self.config_digest,
                "assumptions": list(self.assumptions),
                "not_modelled": list(self.not_modelled),
                "predicted": list(self.predicted),
            }
        if self.run:
            record["run"] = dict(self.run)
        return record

    @classmethod
    def from_json(cls, record: Json) -> RunRecord:
        machine = _mapping(record.get("machine"))
        return cls(
            time=_seconds(record.get("time")),
            versions={str(name): _words(version) for name, version in _mapping(record.get("versions")).items()},
            machine=_machine(machine) if machine else None,
            model=_text(record.get("model")),
            config_digest=_text(record.get("config_digest")),
            assumptions=tuple(map(_words, _listed(record.get("assumptions")))),
            not_modelled=tuple(map(_words, _listed(record.get("not_modelled")))),
            predicted=tuple(map(_predicted, _mappings(record.get("predicted")))),
            run=_mapping(record.get("run")),
        )


def record_of(record: Json) -> RunRecord | ReportRecord | PhasesRecord | None:
    """The record of a line of a journal; None for an unknown event."""
    kinds: dict[object, type[RunRecord] | type[ReportRecord] | type[PhasesRecord]] = {
        "run": RunRecord, "report": ReportRecord, "phases": PhasesRecord,
    }  # fmt: skip
    kind = kinds.get(_text(record.get("event")))
    return None if kind is None else kind.from_json(record)


def _machine(record: Json) -> MachineRecord:
    facts = {
        str(name): FactRecord(value=_text(fact.get("value")), source=_text(fact.get("source")))
        for name, fact in _mapping(record.get("facts")).items()
        if isinstance(fact, Mapping)
    }
    notes = list(map(_words, _listed(record.get("notes"))))
    return MachineRecord(gpu=_text(record.get("gpu")), facts=facts, notes=notes)


def _predicted(record: Json) -> PredictedStage:
    stage, static, activation, transient, peak = (
        _integer(record.get(name)) or 0 for name in ("stage", "static", "activation", "transient", "peak")
    )
    components = [_component(c) for c in _mappings(record.get("components"))]
    return PredictedStage(
        stage=stage, static=static, activation=activation, transient=transient, peak=peak, components=components
    )


def _component(record: Json) -> ComponentRecord:
    return ComponentRecord(
        name=_text(record.get("name")),
        bytes=_integer(record.get("bytes")) or 0,
        role=_text(record.get("role")),
        provenance=_text(record.get("provenance")),
        shard=_text(record.get("shard")),
        lifetime=_text(record.get("lifetime")),
        part=_text(record.get("part")),
        state=_text(record.get("state")),
        routed=record.get("routed") is True,
        experts=record.get("experts") is True,
        adapters=record.get("adapters") is True,
    )


# ---- untrusted values ----


#: Larger values are invalid: bytes, ranks and steps are far below.
_MOST = 1 << 60
#: The end of the year 9999, the last date that datetime can hold.
_LAST_SECOND = 253_402_300_799


def is_figure(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer in the range of measurements."""
    return isinstance(value, int) and not isinstance(value, bool) and -_MOST < value < _MOST


def is_time(value: object) -> TypeGuard[int | float]:
    """Whether ``value`` is a valid number of seconds since the epoch."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LAST_SECOND


def bounds_of(value: object) -> Bounds | None:
    """A range of bytes; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    least, most = value
    if not is_figure(least) or least < 0 or not (most is None or (is_figure(most) and least <= most)):
        return None
    return least, most


def _integer(value: object) -> int | None:
    return value if is_figure(value) else None


def _natural(value: object) -> int | None:
    return value if is_figure(value) and value >= 0 else None


def _seconds(value: object) -> float:
    return float(value) if is_time(value) else 0.0


def _words(value: object) -> str:
    """Text unchanged; anything else as an error message would quote it."""
    return value if isinstance(value, str) else show(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else ()


def _mappings(value: object) -> Iterator[Json]:
    return (item for item in _listed(value) if isinstance(item, Mapping))
