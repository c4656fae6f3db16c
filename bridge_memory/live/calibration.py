"""Residuals kept from a run, and given to the next estimate of the same model with their provenance."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bridge_memory.components import Component, Lifetime, Part, Provenance, Role
from bridge_memory.estimate import Estimate
from bridge_memory.live.prediction import Prediction, config_digest, versions
from bridge_memory.report.write import write_whole
from bridge_memory.spec import SpecError

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


def residuals_of(prediction: Prediction, records: Sequence[dict[str, Any]]) -> list[Residual]:
    """The residuals of a steady report's stage records."""
    out = []
    for record in records:
        if record["max_allocated"] is None or record["predicted_peak"] is None:
            continue
        for component, measured in (("static", "allocated"), ("peak", "max_allocated")):
            out.append(
                Residual(
                    model=prediction.model,
                    config_digest=prediction.digest,
                    stage=record["stage"],
                    component=component,
                    predicted_bytes=record[f"predicted_{component}"],
                    measured_bytes=record[measured],
                    versions=versions(),
                    time=time.time(),
                )
            )
    return out


def load(path: str | os.PathLike[str]) -> list[Residual]:
    """Raises SpecError where the file is not a calibration of ours."""
    try:
        value = json.loads(Path(path).read_text())
        if value["schema"] != SCHEMA:
            raise KeyError("schema")
        return [Residual(**entry) for entry in value["residuals"]]
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}); give a calibration.json") from None
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{path} is not a calibration.json; give one that MemoryReport wrote") from None


def save(path: str | os.PathLike[str], residuals: Sequence[Residual]) -> None:
    """Merge into ``path``: a newer residual of the same config, stage and component replaces the older one. The file is
    replaced in one move, so a kill leaves the old one or the new one."""
    target = Path(path)
    kept = {(r.config_digest, r.stage, r.component): r for r in (load(target) if target.exists() else [])}
    kept.update({(r.config_digest, r.stage, r.component): r for r in residuals})
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"schema": SCHEMA, "residuals": [asdict(r) for r in kept.values()]}, indent=1)
    write_whole(target, text + "\n")


def calibrated(estimate: Estimate, residuals: Sequence[Residual]) -> Estimate:
    """``estimate`` with one measured component more on each stage that ``residuals`` know.

    Only residuals of the very same configuration are applied (its digest); those of the same model under another are
    named among the assumptions and change nothing.
    """
    digest = config_digest(estimate.run)
    peaks = {r.stage: r for r in residuals if r.component == "peak" and r.config_digest == digest}
    stages = []
    for stage in estimate.stages:
        known = peaks.get(stage.stage)
        if known is None or known.residual_bytes < 0:
            # Less than predicted is told, not subtracted: the next run may route its tokens otherwise.
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
