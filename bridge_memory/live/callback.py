"""``MemoryReport``: a callback of Megatron Bridge's training loop, usable in any other loop.

    pretrain(config, forward_step, callbacks=[MemoryReport()])

    with MemoryReport(run=run) as report:       # plain PyTorch, accelerate, DeepSpeed, torchtitan: see live/runs.py
        for batch in loader:
            ...
            optimizer.step()
            report.step()

For the Trainer of Hugging Face use ``live/hugging_face.py``. Bridge finds callbacks by method name
(``training/callbacks.py: CallbackManager.add``), so nothing of Bridge is imported here. An exception would stop
training, so every method is guarded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bridge_memory.live import gather, oom
from bridge_memory.live.cuda import Reading, read_cuda
from bridge_memory.live.guard import never_raises, pass_on, warn_once
from bridge_memory.live.prediction import BUILT, FIRST_STEP, STEADY
from bridge_memory.live.reporter import Reporter
from bridge_memory.live.table import THRESHOLD
from bridge_memory.spec import RunSpec, SpecError, show


class MemoryReport:
    """Prints predicted and measured memory of all pipeline stages from inside a training job.

    It is a callback of Megatron Bridge, and a context of any other loop.
    One table is printed when the model is built, after the first and second optimizer step, and then every ``every``
    steps. Rank 0 prints it. Nothing in it raises into training, takes part in a collective, or synchronises the GPU.

    Args:
        path: The journal, a file of JSON lines that ``compare`` reads. None: no file is written.
        run: What is trained, a RunSpec or a function that gives one at the first report. For ``start``, ``step`` and
            ``end``; Bridge's events bring their own container. A function that raises costs the prediction alone.
        every: Optimizer steps from report to report. None: the container's ``logger.log_interval``, or 100.
        calibration: A file that keeps residuals for ``bridge-memory estimate --calibration``. None: no file.
        html: A page of all reports, written anew at each; a browser that shows it reads it again by itself. None: no
            page.
        threshold: The share of a measured figure beyond which a stage gets a line of explanation.
        deadline: Seconds that rank 0 waits for the readings of the others, until two reports in a row were without
            some of them.
        emit: Called with the text of every report. None: it is printed.
        read: Called with (rank, stage); returns the Reading of this process.

    Raises:
        SpecError: An argument is not what it has to be.

    Example:
        >>> from bridge_memory import MemoryReport, ParallelSpec, RunSpec
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))
        >>> texts = []
        >>> with MemoryReport(run=run, emit=texts.append) as report:
        ...     for batch in range(2):
        ...         report.step()  # after optimizer.step()
        >>> len(texts)  # when built, after step 1, after step 2
        3
        >>> bridge = MemoryReport("runs/7/memory_report.jsonl")  # pretrain(cfg, forward_step, callbacks=[bridge])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        run: RunSpec | Callable[[], RunSpec] | None = None,
        every: int | None = None,
        calibration: str | os.PathLike[str] | None = None,
        html: str | os.PathLike[str] | None = None,
        threshold: float = THRESHOLD,
        deadline: float = gather.DEADLINE,
        emit: Callable[[str], None] | None = None,
        read: Callable[[int, int], Reading] = read_cuda,
    ) -> None:
        self._reporter = Reporter(
            path, calibration_path=calibration, html=html, threshold=threshold, deadline=deadline, emit=emit, read=read
        )
        if every is not None and (type(every) is not int or every < 1):
            raise SpecError(f"every ({show(every)}) is not a number of steps; give 1 or more, or leave it out")
        if run is not None and not isinstance(run, RunSpec) and not callable(run):
            raise SpecError(f"run ({show(run)}) is neither a RunSpec nor a function that gives one; give one of them")
        #: Steps between reports; None: the container's interval, or 100.
        self.every = every
        self._run = run
        self._optimizer_steps = 0
        self._config: Any = None
        self._watch = oom.Watch(self._report_out_of_memory)

    # ---- Bridge's events ----

    @never_raises
    def on_train_start(self, context: Any) -> None:
        self._config = context.state.cfg
        self._optimizer_steps = 0
        self._watch.start()
        self._reporter.report(self._config, BUILT, _iteration(context.state), state=context.state)

    @never_raises
    def on_train_step_end(self, context: Any) -> None:
        # The counter of steps moves after this event (training/train.py), hence the 1.
        iteration = _iteration(context.state) + 1
        if not getattr(context, "skipped_iter", False):
            self._optimizer_steps += 1
        moment = self._due(context, iteration)
        if moment is not None:
            self._reporter.report(self._config, moment, iteration, state=context.state)

    @never_raises
    def on_train_end(self, context: Any) -> None:
        self._watch.stop()
        self._reporter.finish()

    # ---- any other loop ----

    @never_raises
    def start(self) -> None:
        """Call once the model and the optimizer are built, before the first step."""
        self._config = self._run_given()
        self._optimizer_steps = 0
        self._watch.start()
        self._reporter.report(self._config, BUILT, 0)

    @never_raises
    def step(self) -> None:
        """Call after every optimizer step, on every rank, from one thread: reports of others at the same time are left
        out."""
        self._optimizer_steps = steps = self._optimizer_steps + 1
        moment = _moment(steps, self.every or 100)
        if moment is not None:
            if self._config is None:
                self._config = self._run_given()
            self._reporter.report(self._config, moment, steps)

    @never_raises
    def end(self) -> None:
        """Training is over."""
        self._watch.stop()
        self._reporter.finish()

    def write_to(self, path: str | os.PathLike[str] | None, *, html: str | os.PathLike[str] | None = None) -> None:
        """From the next report on, write these files: the journal and the page. None: no file."""
        self._reporter.write_to(path, html)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._optimizer_steps

    def forget(self) -> None:
        """The run has changed, or is known better: the next report reads ``run`` and predicts again."""
        self._config = None
        self._reporter.forget()

    def __enter__(self) -> MemoryReport:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # an error that ends training is reported where it ends the process
            self.end()

    def _run_given(self) -> Any:
        try:
            return self._run() if callable(self._run) else self._run
        except Exception as error:
            pass_on(error)
            warn_once("reading the run", error)
            return None

    # ---- due reports ----

    def _due(self, context: Any, iteration: int) -> str | None:
        """The due moment; the same on every rank, since it depends only on counters and the container."""
        skipped = bool(getattr(context, "skipped_iter", False))
        if self._config is None:
            self._config = context.state.cfg
        if self._optimizer_steps == 1 and not skipped:
            return FIRST_STEP
        if self._optimizer_steps == 2 and not skipped:
            return STEADY
        every = self.every or getattr(getattr(self._config, "logger", None), "log_interval", None) or 100
        return STEADY if self._optimizer_steps > 2 and iteration % every == 0 else None

    def _report_out_of_memory(self, wanted: int | None) -> None:
        where = self._reporter.place(self._config)
        prediction = self._reporter.prediction(self._config)
        self._reporter.emit(oom.report(prediction, self._reporter.reading(where), wanted))


def _moment(steps: int, every: int) -> str | None:
    if steps in (1, 2):
        return FIRST_STEP if steps == 1 else STEADY
    return STEADY if steps % every == 0 else None


def _iteration(state: Any) -> int:
    return int(getattr(state.train_state, "step", 0))
