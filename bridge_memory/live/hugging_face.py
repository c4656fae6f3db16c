"""``MemoryReportCallback`` for the Trainer of Hugging Face: predicted and measured memory during training.

    trainer = Trainer(model, args, ..., callbacks=[MemoryReportCallback()])

This module imports transformers; nothing else of the package does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    TrainerCallback = None

from bridge_memory.live.callback import MemoryReport
from bridge_memory.live.guard import never_raises
from bridge_memory.live.prometheus import check_prometheus
from bridge_memory.live.reporter import check_file
from bridge_memory.live.runs import run_of_trainer
from bridge_memory.spec import RunSpec, SpecError, show

#: The journal where nobody says another place: beside the checkpoints of the run.
JOURNAL = "{output_dir}/memory_report.jsonl"


class MemoryReportCallback(TrainerCallback or object):  # type: ignore[misc]  # Any to mypy: transformers is not read
    """Prints predicted and measured memory from inside the Trainer of Hugging Face.

    It reports when training begins, after the first and second optimizer step, and then every ``logging_steps``.
    The run is read from TrainingArguments, the model and its batches. Nothing in it raises into training.

    Args:
        path: The journal, a file of JSON lines. ``{output_dir}`` is the Trainer's ``output_dir``. None: no journal.
        run: What is trained, where TrainingArguments and the model do not say it, as of a model without a Hugging Face
            config.
        seq_length: Tokens of a sequence. None: those of the longest batch up to the second step.
        every: Optimizer steps from report to report. None: ``logging_steps``.
        html: A page of all reports, written anew at each; ``{output_dir}`` as in ``path``. None: no page.
        prometheus: A file ``*.prom`` for node exporter, as of ``MemoryReport``; ``{output_dir}`` as in ``path``. None:
            no file.
        tables: Print a table at every report. False: one line at each after the table of the second step.
        options: Further arguments of ``MemoryReport``.

    Raises:
        SpecError: An argument is not what it has to be.
        ImportError: transformers is not installed.

    Example:
        >>> from bridge_memory import MemoryReportCallback
        >>> callback = MemoryReportCallback()  # Trainer(model, args, ..., callbacks=[callback])
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = JOURNAL, *, run: RunSpec | None = None,
        seq_length: int | None = None, every: int | None = None, html: str | os.PathLike[str] | None = None,
        prometheus: str | os.PathLike[str] | None = None, tables: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        if TrainerCallback is None:
            raise ImportError(
                "MemoryReportCallback is for the Trainer of transformers, which is not installed; install it: "
                "pip install transformers",
                name="transformers",
            )
        for name, file in (("path", path), ("html", html), ("prometheus", prometheus)):
            check_file(name, file)
        check_prometheus(prometheus)
        if run is not None and not isinstance(run, RunSpec):
            raise SpecError(f"run ({show(run)}) is not a RunSpec; give one, or leave it out")
        if seq_length is not None and (type(seq_length) is not int or seq_length < 1):
            raise SpecError(f"seq_length ({show(seq_length)}) is not a number of tokens; give 1 or more")
        self._given = run
        self._seq_length = seq_length
        self._args: Any = None
        self._model: Any = None
        self._seen: tuple[int, int] | None = None
        self._unhook: Callable[[], None] | None = None
        self._evaluating = False
        self._files = path, html, prometheus
        self._report = MemoryReport(None, run=self._run, every=every, tables=tables, **options)

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
        path, html, prometheus = (_placed(file, args) for file in self._files)
        self._report.write_to(path, html=html, prometheus=prometheus)
        self._watch_batches()
        self._report.built(
            resumed=bool(getattr(state, "global_step", 0)), loaded=bool(getattr(self._model, "name_or_path", ""))
        )
        self._report.start()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report.step()
        if self._report.steps >= 2:
            self._stop_watching()
        self._announced(control)

    @never_raises
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._announced(control)

    @never_raises
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._evaluating:
            self._report.phase("save" if control.should_save else "training")
        self._evaluating = False

    @never_raises
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report.phase("training")

    def _announced(self, control: Any) -> None:
        """The Trainer evaluates and then saves at the end of a step, as its own callback has decided before ours."""
        if control.should_evaluate:
            self._evaluating = True
            self._report.phase("evaluation")
        elif control.should_save:
            self._report.phase("save")

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


def _placed(file: str | os.PathLike[str] | None, args: Any) -> str | None:
    """The file, in the Trainer's folder where its name says so; None where the Trainer has none."""
    if file is None:
        return None
    name, folder = os.fspath(file), getattr(args, "output_dir", None)
    if "{output_dir}" in name and not folder:
        return None
    return name.replace("{output_dir}", str(folder))
