"""Writes the figures of a report as ``memory/...`` to the loggers of a Megatron Bridge state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bridge_memory.calibration.records import StageRecord
from bridge_memory.components import GIB
from bridge_memory.live.guard import Attempts

_FIGURES = (
    "predicted_static", "predicted_peak", "allocated", "max_allocated", "reserved", "outside", "headroom", "residual",
    "spread",
)  # fmt: skip
#: Those in one chart.
_TOGETHER = ("predicted_static", "predicted_peak", "allocated", "max_allocated", "reserved")


def metrics(stages: Sequence[StageRecord]) -> dict[str, float]:
    """``memory/stage_0/max_allocated_gib`` and the like; GiB as floats, retries as counts."""
    out: dict[str, float] = {}
    for stage in stages:
        prefix = f"memory/stage_{stage.stage}"
        for figure in _FIGURES:
            value: int | None = getattr(stage, figure)
            if value is not None:
                out[f"{prefix}/{figure}_gib"] = value / GIB
        if stage.residual is not None and stage.measured:
            out[f"{prefix}/residual_percent"] = 100.0 * stage.residual / stage.measured
        if stage.retries is not None:
            out[f"{prefix}/alloc_retries"] = float(stage.retries)
    return out


class Loggers:
    """The loggers of a state. A failing one does not affect the others and is skipped in the end (``Attempts``)."""

    def __init__(self) -> None:
        self._attempts = {name: Attempts(name) for name in _SENDERS}
        self._laying_out = Attempts("the charts of TensorBoard")
        self._laid_out = False

    def log(self, state: Any, values: dict[str, float], iteration: int) -> None:
        """Send ``values`` to each logger that ``state`` has.

        TensorBoard, W&B and MLflow are attributes of Bridge's GlobalState (``training/state.py``), which sets them on
        the last rank alone; Comet's is in newer releases.
        """
        for name, attempt in self._attempts.items():
            attempt(_send, name, state, values, iteration)
        writer = getattr(state, "tensorboard_logger", None)
        lay_out = getattr(writer, "add_custom_scalars", None)
        if not self._laid_out and lay_out is not None:
            self._laid_out = True
            self._laying_out(lay_out, charts(values))


def charts(values: dict[str, float]) -> dict[str, dict[str, list[Any]]]:
    """TensorBoard's layout of its tab "custom scalars" (``SummaryWriter.add_custom_scalars``): one chart per stage,
    with predicted and measured figures."""
    stages: dict[str, list[Any]] = {}
    for name in values:
        _, stage, figure = name.split("/")
        if figure.removesuffix("_gib") in _TOGETHER:
            stages.setdefault(stage.replace("_", " "), ["Multiline", []])[1].append(f"^{name}$")
    return {"GPU memory, predicted and measured": stages}


def _send(name: str, state: Any, values: dict[str, float], iteration: int) -> None:
    logger = getattr(state, name, None)
    if logger is not None:
        _SENDERS[name](logger, values, iteration)


def _tensorboard(logger: Any, values: dict[str, float], iteration: int) -> None:
    for name, value in values.items():
        logger.add_scalar(name, value, iteration)


def _wandb(logger: Any, values: dict[str, float], iteration: int) -> None:
    logger.log(values, iteration)


def _step(logger: Any, values: dict[str, float], iteration: int) -> None:
    logger.log_metrics(values, step=iteration)


_SENDERS: dict[str, Callable[[Any, dict[str, float], int], None]] = {
    "tensorboard_logger": _tensorboard,
    "wandb_logger": _wandb,
    "mlflow_logger": _step,
    "comet_logger": _step,
}
