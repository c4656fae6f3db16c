"""``MemoryReportCallback`` for the Trainer of Hugging Face: predicted and measured memory during training.

    trainer = Trainer(model, args, ..., callbacks=[MemoryReportCallback()])

This module imports transformers; nothing else of the package does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from bridge_memory.live.callback import MemoryReport
from bridge_memory.live.guard import never_raises
from bridge_memory.live.runs import run_of_trainer
from bridge_memory.spec import RunSpec


class MemoryReportCallback(TrainerCallback):  # type: ignore[misc]  # Any to mypy, which does not read transformers
    """``MemoryReport`` driven by the Trainer's events; ``options`` as for ``MemoryReport``.

    ``run``: a RunSpec, where TrainingArguments and the model do not describe the run (a model without a Hugging Face
    config). ``seq_length``: tokens per sequence; None: of the longest batch up to the second step. No method raises.
    """

    def __init__(
        self, path: Any = "memory_report.jsonl", *, run: RunSpec | None = None, seq_length: int | None = None,
        every: int | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._given = run
        self._seq_length = seq_length
        self._args: Any = None
        self._model: Any = None
        self._seen: tuple[int, int] | None = None
        self._unhook: Callable[[], None] | None = None
        self._report = MemoryReport(path, run=self._run, every=every, **options)

    def _run(self) -> RunSpec:
        if self._given is not None:
            return self._given
        batch, length = self._seen or (None, None)
        return run_of_trainer(self._args, self._model, seq_length=self._seq_length or length, micro_batch_size=batch)

    # ---- the Trainer's events ----

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._args, self._model = args, kwargs.get("model")
        if self._report.every is None:
            self._report.every = max(1, int(args.logging_steps)) if getattr(args, "logging_steps", 0) >= 1 else None
        self._watch_batches()
        self._report.start()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report.step()
        if self._report.steps >= 2:
            self._stop_watching()

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop_watching()
        self._report.end()

    # ---- the shape of a batch ----

    def _watch_batches(self) -> None:
        """Register a hook that notes the shape of ``input_ids`` until the second step; none on a compiled model."""
        if self._given is not None or self._model is None or getattr(self._args, "torch_compile", False):
            return
        handle = self._model.register_forward_pre_hook(self._note_shape, with_kwargs=True)
        self._unhook = handle.remove

    def _stop_watching(self) -> None:
        unhook, self._unhook = self._unhook, None
        if unhook is not None:
            unhook()

    @never_raises
    def _note_shape(self, module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids")
        shape: tuple[Any, ...] = getattr(args[0] if ids is None and args else ids, "shape", ())
        if len(shape) == 2 and getattr(module, "training", True):
            seen = (int(shape[0]), int(shape[1]))
            if self._seen is None or seen[0] * seen[1] > self._seen[0] * self._seen[1]:
                self._seen = seen
                self._report.forget()
