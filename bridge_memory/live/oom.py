"""Out of memory: the rank's live figures, its predicted breakdown, and the changes that free the most."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from bridge_memory.components import GIB
from bridge_memory.estimation import peaks
from bridge_memory.live.cuda import Reading
from bridge_memory.live.guard import never_raises
from bridge_memory.live.prediction import Prediction, StagePrediction
from bridge_memory.plan.changes import changes
from bridge_memory.spec import RunSpec, SpecError


def best_options(run: RunSpec, stage: int, most: int = 3) -> list[tuple[str, int]]:
    """(change, bytes freed at the peak of ``stage``) of the single changes that ``whatif`` tries, largest first. Where
    a change moves layers between stages, the highest stage counts."""
    before = peaks(run)[stage].peak_bytes
    found: dict[str, int] = {}
    for change in changes(run):
        try:
            stages = [s.peak_bytes for s in peaks(run.with_fields(**dict(change.fields)))]
        except SpecError:
            continue
        after = max(stages) if change.moves_layers else stages[stage]
        if after < before:
            found[change.words] = before - after
    return sorted(found.items(), key=lambda item: -item[1])[:most]


def report(prediction: Prediction | None, reading: Reading, wanted: int | None = None, phase: str = "") -> str:
    """The text for the rank that ran out of memory. ``wanted``: bytes of the failed allocation; ``phase``: of the
    job."""
    asked = "" if wanted is None else f" asking for {wanted / GIB:.2f} GiB"
    asked += f" in the phase {phase}" if phase else ""
    lines = [f"bridge-memory: rank {reading.rank} (pipeline stage {reading.stage}) ran out of GPU memory{asked}"]
    if reading.error:
        lines.append(f"  no live figures ({reading.error})")
    else:
        lines.append(
            f"  torch: allocated {reading.allocated / GIB:.2f}, highest {reading.max_allocated / GIB:.2f}, reserved "
            f"{reading.reserved / GIB:.2f}; outside {reading.outside / GIB:.2f}; GPU {reading.device_total / GIB:.2f} "
            f"GiB; retries {reading.retries}"
        )
    if prediction is None or reading.stage >= len(prediction.stages):
        lines.append("  there is no prediction for this run")
        return "\n".join(lines)
    lines += _breakdown(prediction.stages[reading.stage])
    if prediction.run is not None:
        best = best_options(prediction.run, reading.stage)
        lines.append("  would free the most on this stage:" if best else "  no single change frees memory here")
        lines += [f"    {freed / GIB:8.2f} GiB  {name}" for name, freed in best]
    return "\n".join(lines)


def _breakdown(stage: StagePrediction) -> list[str]:
    static = stage.peak - stage.activation - stage.transient
    lines = [
        f"  predicted: peak {stage.peak / GIB:.2f} GiB = static {static / GIB:.2f} + activations "
        f"{stage.activation / GIB:.2f} + temporaries {stage.transient / GIB:.2f}"
    ]
    for component in sorted(stage.components, key=lambda c: -c.bytes):
        if component.bytes >= stage.peak * 0.005:
            lines.append(f"    {component.bytes / GIB:8.2f} GiB  {component.name} ({component.provenance})")
    return lines


def is_out_of_memory(error: BaseException | type[BaseException] | None) -> bool:
    """torch.OutOfMemoryError (torch.cuda.OutOfMemoryError before 2.5), without importing torch."""
    kind = error if isinstance(error, type) else type(error)
    return any(base.__name__ == "OutOfMemoryError" for base in kind.__mro__)


class Watch:
    """Calls ``report(wanted)`` once between ``start`` and ``stop`` when an allocation finally fails. The error itself
    passes unchanged. Several can be active at a time.

    With CUDA it uses torch's observer, called where the allocation fails; otherwise ``sys.excepthook``, when an
    OutOfMemoryError ends the process.
    """

    def __init__(self, report: Callable[[int | None], None]) -> None:
        self._report = never_raises(report)
        self._reported = False

    def start(self) -> None:
        with _lock:
            self._reported = False
            if self not in _watching:
                _watching.append(self)
            _observe()
            _Hook.put()

    def stop(self) -> None:
        with _lock:
            if self in _watching:
                _watching.remove(self)
            if not _watching:
                _Hook.remove()

    def report(self, wanted: int | None) -> None:
        if not self._reported:
            self._reported = True
            self._report(wanted)


_lock = threading.RLock()
_watching: list[Watch] = []
_observed = False


def _report_all(wanted: int | None) -> None:
    for watch in list(_watching):
        watch.report(wanted)


class _Hook:
    """Our ``sys.excepthook``; it calls the previous hook. If another hook was installed over it, it stays in place and
    only passes errors on; ``put`` then installs a new object, so that no hook calls itself."""

    current: ClassVar[_Hook | None] = None

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if is_out_of_memory(kind):
            _report_all(None)
        self._previous(kind, error, trace)

    @classmethod
    def put(cls) -> None:
        found = getattr(sys, "excepthook", sys.__excepthook__)
        if cls.current is None or found is not cls.current:
            cls.current = sys.excepthook = cls(found)

    @classmethod
    def remove(cls) -> None:
        ours, cls.current = cls.current, None
        found: Any = getattr(sys, "excepthook", None)
        if ours is not None and found is ours:
            sys.excepthook = ours._previous


@never_raises
def _observe() -> None:
    """Attach torch's observer. It cannot be detached, so there is one per process."""
    global _observed
    torch: Any = sys.modules.get("torch")
    if _observed or torch is None or not torch.cuda.is_available():
        return
    attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        # (device, bytes asked for, bytes allocated on the device, bytes free)
        attach(lambda device, wanted, *rest: _report_all(int(wanted)))
        _observed = True
