"""Residuals of a run, applied to the next estimate of the same configuration with their provenance."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge_memory.calibration.records import StageRecord, is_figure, is_time
from bridge_memory.components import Component, Lifetime, Part, Provenance, Role
from bridge_memory.estimation import Estimate
from bridge_memory.files import parse_json, read_text, write_whole
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.canonical import canonical
from bridge_memory.spec.errors import bounded

SCHEMA = "bridge-memory/calibration-1"


@dataclass(frozen=True, slots=True)
class Residual:
    """Measured minus predicted on one stage of one run, in bytes."""

    model: str
    config_digest: str
    stage: int
    #: "static" (allocated between steps) or "peak" (max allocated).
    component: str
    predicted_bytes: int
    measured_bytes: int
    versions: dict[str, str]
    #: Seconds since the epoch.
    time: float = 0.0

    @property
    def residual_bytes(self) -> int:
        return self.measured_bytes - self.predicted_bytes

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Residual:
        """Unknown keys are ignored. Raises TypeError where a key is missing or holds another type."""
        known = {key: record[key] for key in cls.__dataclass_fields__ if key in record}
        for key, value in known.items():
            if not _KINDS[key](value):
                raise TypeError(f"{key} ({show(value)})")
        return cls(**known)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_releases(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, (*value, *value.values())))


#: Type check of each key of a residual.
_KINDS: dict[str, Callable[[object], bool]] = {
    "model": _is_text, "config_digest": _is_text, "stage": is_figure, "component": _is_text,
    "predicted_bytes": is_figure, "measured_bytes": is_figure, "versions": _are_releases, "time": is_time,
}  # fmt: skip


def residuals_of(model: str, digest: str, stages: Sequence[StageRecord]) -> list[Residual]:
    """The residuals of a steady report of the run of this ``config_digest``."""
    out = []
    for s in stages:
        if s.max_allocated is None or s.predicted_peak is None:
            continue
        figures = (("static", s.predicted_static, s.allocated), ("peak", s.predicted_peak, s.max_allocated))
        for component, predicted, measured in figures:
            if predicted is not None and measured is not None:
                out.append(Residual(model, digest, s.stage, component, predicted, measured, versions(), time.time()))
    return out


#: Fields of ImplementationSpec that a process detects and a command line may leave out: releases are recorded with each
#: residual, and the others change a few MiB.
_OF_THE_MACHINE: dict[str, Any] = dict(
    transformer_engine=None, torch=None, expandable_segments=False, cublas_workspace_bytes=None,
    nvte_deterministic=False,
)  # fmt: skip


def config_digest(run: RunSpec) -> str:
    """16 hex digits that change with any field of the run that changes memory.

    Names and notes do not count, so the same run read from a container and from a command line has the same digest.
    Fields that only the process knows (``_OF_THE_MACHINE``) do not count either; the GPU's generation and
    megatron-core's release do.
    """
    plain = canonical(run.with_(implementation=replace(run.implementation, **_OF_THE_MACHINE)))
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Releases of the loaded packages that determine memory."""
    out = {}
    for module in ("torch", "megatron.core", "megatron.bridge", "transformer_engine", "bridge_memory"):
        loaded: Any = sys.modules.get(module)
        version = getattr(loaded, "__version__", None)
        if isinstance(version, str):
            out[module] = version
    return out


def load(path: str | os.PathLike[str]) -> list[Residual]:
    """The residuals of a calibration file. Raises SpecError for another file."""
    text = read_text(path, "give a calibration.json")
    try:
        value = parse_json(text)
        if value["schema"] != SCHEMA:
            raise KeyError("schema")
        return [Residual.from_json(entry) for entry in value["residuals"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        name = bounded(os.fspath(path), 120)
        raise SpecError(f"{name} is not a calibration.json; give one that MemoryReport wrote") from None


def save(path: str | os.PathLike[str], residuals: Sequence[Residual]) -> None:
    """Merge into ``path``: a newer residual of the same config, stage and component replaces the older one. The file is
    replaced in one move, so a kill leaves the old one or the new one."""
    target = Path(path)
    if target.exists() and not target.is_file():  # reading a pipe would block
        raise SpecError(f"{target} is not a regular file; name a calibration.json")
    kept = {(r.config_digest, r.stage, r.component): r for r in (load(target) if target.exists() else [])}
    kept.update({(r.config_digest, r.stage, r.component): r for r in residuals})
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "residuals": [asdict(r) for r in kept.values()]}, indent=1)
    write_whole(target, text + "\n")


def calibrated(estimate: Estimate, residuals: Sequence[Residual]) -> Estimate:
    """``estimate`` with a measured component on each stage that has a residual.

    Only residuals of the same configuration (by its digest) are applied; residuals of the same model under another
    configuration become an assumption and change no number.
    """
    digest = config_digest(estimate.run)
    peaks = {r.stage: r for r in residuals if r.component == "peak" and r.config_digest == digest}
    stages = []
    for stage in estimate.stages:
        known = peaks.get(stage.stage)
        if known is None or known.residual_bytes < 0:
            # A negative residual is reported, not subtracted: the next run may route its tokens differently.
            stages.append(stage)
            continue
        component = Component(
            _provenance(known), known.residual_bytes, Role.TRANSIENT, Provenance.MEASURED, lifetime=Lifetime.TRANSIENT,
            part=Part.CALIBRATION,
        )
        stages.append(replace(stage, components=(*stage.components, component)))
    notes = [f"calibrated with residuals of this configuration on {len(peaks)} stages"] if peaks else []
    notes += [
        f"stage {r.stage} was measured {-r.residual_bytes / 2**30:.2f} GiB below its prediction, not subtracted"
        for r in peaks.values() if r.residual_bytes < 0
    ]
    others = {r.config_digest for r in residuals if r.model == estimate.run.model.name} - {digest}
    if others:
        notes.append(f"residuals of this model under {len(others)} other configurations were not applied")
    return replace(estimate, stages=tuple(stages), assumptions=(*estimate.assumptions, *notes))


def _provenance(r: Residual) -> str:
    words = ", ".join(f"{name} {version}" for name, version in sorted(r.versions.items())) or "versions unknown"
    day = time.strftime("%Y-%m-%d", time.gmtime(r.time))
    return f"residual measured on {day} ({words})"
