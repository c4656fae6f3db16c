"""Out of memory: the rank's predicted breakdown beside the live figures, and what would free the most."""

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
    """(change, bytes freed at the peak of ``stage``), the most first, of the single changes that ``whatif`` tries.
    Where a change moves layers to other stages, its highest stage counts."""
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


def report(prediction: Prediction | None, reading: Reading, wanted: int | None = None) -> str:
    """The text shown for the rank that ran out of memory. ``wanted``: bytes of the allocation that failed."""
    asked = "" if wanted is None else f" asking for {wanted / GIB:.2f} GiB"
    lines = [f"bridge-memory: rank {reading.rank} (pipeline stage {reading.stage}) ran out of GPU memory{asked}"]
    if reading.error:
        lines.append(f"  no live figures ({reading.error})")
    else:
        lines.append(
            f"  torch: allocated {reading.allocated / GIB:.2f}, highest {reading.max_allocated / GIB:.2f}, reserved "
            f"{reading.reserved / GIB:.2f}; outside {reading.outside / GIB:.2f}; card {reading.device_total / GIB:.2f} "
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
        f"{stage.activation / GIB:.2f} + in passing {stage.transient / GIB:.2f}"
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
    """Calls ``tell(wanted)`` once between ``start`` and ``stop`` when an allocation fails for good; the error itself is
    left alone. Any number of them may watch at a time.

    With CUDA through torch's observer, which runs where the allocation fails; elsewhere (and where torch has no
    observer) through ``sys.excepthook``, when an OutOfMemoryError ends the process.
    """

    def __init__(self, tell: Callable[[int | None], None]) -> None:
        self._tell = never_raises(tell)
        self._told = False

    def start(self) -> None:
        with _lock:
            self._told = False
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

    def tell(self, wanted: int | None) -> None:
        if not self._told:
            self._told = True
            self._tell(wanted)


_lock = threading.RLock()
_watching: list[Watch] = []
_observed = False


def _tell_all(wanted: int | None) -> None:
    for watch in list(_watching):
        watch.tell(wanted)


class _Hook:
    """Ours in ``sys.excepthook``, in front of the one that it found there. Where somebody has put another in front of
    it since, it stays there and only passes errors on; the next one is then a new object, so that none calls itself."""

    current: ClassVar[_Hook | None] = None

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if is_out_of_memory(kind):
            _tell_all(None)
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
    """torch's observer cannot be taken off again: there is one a process."""
    global _observed
    torch: Any = sys.modules.get("torch")
    if _observed or torch is None or not torch.cuda.is_available():
        return
    attach = getattr(torch._C, "_cuda_attachOutOfMemoryObserver", None)
    if attach is not None:
        # (device, bytes asked for, bytes allocated on the device, bytes free)
        attach(lambda device, wanted, *rest: _tell_all(int(wanted)))
        _observed = True
