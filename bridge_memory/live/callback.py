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
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import RunSpec, SpecError, show


class MemoryReport:
    """Prints predicted and measured memory of all pipeline stages from inside a training job.

    It is a callback of Megatron Bridge, and a context of any other loop.
    One table is printed when the model is built and after the first and second optimizer step, and then a line every
    ``every`` steps. Rank 0 prints it. Nothing in it raises into training, takes part in a collective, or synchronises
    the GPU.
    The journal also has each phase of the job with torch's peaks in it, which are never reset, and the driver's memory
    at its end: that of the whole GPU, other processes included. Bridge's loop and the Trainer have events for
    evaluation; saves are those that their configs announce. Elsewhere name phases with ``phase``.

    Loggers have, of each stage N, ``memory/stage_N/`` with ``predicted_static_gib``, ``predicted_peak_gib``,
    ``allocated_gib``, ``max_allocated_gib``, ``reserved_gib``, ``outside_gib``, ``headroom_gib`` (the least free memory
    of any rank: alert on it), ``residual_gib``, ``residual_percent``, ``spread_gib`` (between the stage's ranks) and
    ``alloc_retries``. Prometheus has, in bytes and with the label ``stage``, ``bridge_memory_`` with
    ``predicted_static_bytes``, ``predicted_peak_bytes``, ``allocated_bytes``, ``max_allocated_bytes``,
    ``reserved_bytes``, ``outside_bytes``, ``free_bytes``, ``device_bytes``, ``alloc_retries`` and ``ooms``; with the
    label ``phase`` too ``phase_allocated_bytes`` and ``phase_device_bytes``; and ``iteration``,
    ``report_time_seconds`` and ``missing_ranks``.

    Args:
        path: The journal, a file of JSON lines that ``compare`` reads. None: no file is written.
        run: What is trained, a RunSpec or a function that gives one at the first report. For ``start``, ``step`` and
            ``end``; Bridge's events bring their own container. A function that raises costs the prediction alone.
        every: Optimizer steps from report to report. None: the container's ``logger.log_interval``, or 100.
        calibration: A file that keeps residuals for ``bridge-memory estimate --calibration``. None: no file.
        html: A page of all reports, written anew at each; a browser that shows it reads it again by itself. None: no
            page.
        prometheus: A file ``*.prom`` in Prometheus's text format for node exporter's textfile collector, written anew
            at each report. None: no file.
        tables: Print a table at every report. False: one line at each after the table of the second step.
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
        prometheus: str | os.PathLike[str] | None = None,
        tables: bool = False,
        threshold: float = THRESHOLD,
        deadline: float = gather.DEADLINE,
        emit: Callable[[str], None] | None = None,
        read: Callable[[int, int], Reading] = read_cuda,
    ) -> None:
        self._reporter = Reporter(
            path, calibration_path=calibration, html=html, prometheus=prometheus, tables=tables, threshold=threshold,
            deadline=deadline, emit=emit, read=read,
        )  # fmt: skip
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
        self._ended = False
        self._before_evaluation: tuple[Phase, ...] = ()

    # ---- Bridge's events ----

    @never_raises
    def on_train_start(self, context: Any) -> None:
        self._config = context.state.cfg
        self._optimizer_steps = 0
        self._ended = False
        self._watch.start()
        self._reporter.built(*how_started(self._config, _iteration(context.state)))
        self._reporter.report(
            self._config, BUILT, _iteration(context.state), state=context.state, then=Phase.FIRST_STEP
        )

    @never_raises
    def on_train_step_start(self, context: Any) -> None:
        self._train()

    @never_raises
    def on_train_step_end(self, context: Any) -> None:
        # The counter of steps moves after this event (training/train.py), hence the 1.
        iteration = _iteration(context.state) + 1
        if not getattr(context, "skipped_iter", False):
            self._optimizer_steps += 1
        moment = self._due(context, iteration)
        # Bridge saves, if it does, before the next step begins.
        then = Phase.SAVE if _saves(self._config, iteration) else None
        if moment is not None:
            if then is None and self._optimizer_steps == 1:
                then = Phase.TRAINING
            self._reporter.report(self._config, moment, iteration, state=context.state, then=then)
        elif then is not None:
            self._reporter.begin_phase(self._config, then)

    @never_raises
    def on_train_end(self, context: Any) -> None:
        self.end()

    @never_raises
    def on_eval_start(self, context: Any) -> None:
        self._before_evaluation = self._reporter.begin_phase(self._config, Phase.EVALUATION) or ()

    @never_raises
    def on_eval_end(self, context: Any) -> None:
        self._back(self._before_evaluation)

    @never_raises
    def on_test_start(self, context: Any) -> None:
        self.on_eval_start(context)

    @never_raises
    def on_test_end(self, context: Any) -> None:
        self.on_eval_end(context)

    # ---- any other loop ----

    @never_raises
    def start(self) -> None:
        """Call once the model and the optimizer are built, before the first step."""
        self._config = self._run_given()
        self._optimizer_steps = 0
        self._ended = False
        self._watch.start()
        self._reporter.report(self._config, BUILT, 0, then=Phase.FIRST_STEP)

    @never_raises
    def step(self) -> None:
        """Call after every optimizer step, on every rank, from one thread: reports of others at the same time are left
        out."""
        self._optimizer_steps = steps = self._optimizer_steps + 1
        moment = _moment(steps, self.every or 100)
        if Phase.BUILD in self._reporter.phases.open:
            self._reporter.phases.also(Phase.FIRST_STEP)
        if moment is not None:
            if self._config is None:
                self._config = self._run_given()
            self._reporter.report(self._config, moment, steps, then=Phase.TRAINING if steps == 1 else None)
        else:
            self._train()

    @never_raises
    def end(self) -> None:
        """Training is over."""
        self._watch.stop()
        self._ended = True
        self._reporter.finish(self._config)

    def phase(self, name: str) -> Within:
        """A phase of the job begins: "build", "load", "first step", "training", "evaluation", "save" or "resume".

        It lasts until the next one begins, or as a context until that ends. On every rank, from one thread. Building
        begins by itself, and so does training after the first step; ``step`` ends any other phase. An unknown name is a
        warning and no error.

        Example:
            >>> from bridge_memory import MemoryReport
            >>> report = MemoryReport()
            >>> with report.phase("load"):
            ...     pass  # load_checkpoint(...)
        """
        return Within(self._reporter.begin_named(self._config, name), self._back)

    def built(self, *, resumed: bool, loaded: bool) -> None:
        """What was loaded while building, with nothing between the two."""
        self._reporter.built(resumed, loaded)

    @never_raises
    def _back(self, before: tuple[Phase, ...]) -> None:
        """The phases before begin again."""
        if self._ended:
            self._reporter.finish(self._config)
        else:
            self._reporter.return_to(self._config, before)

    @never_raises
    def _train(self) -> None:
        """A step begins or has ended, and so has what was between steps."""
        phase = Phase.TRAINING if self._optimizer_steps else Phase.FIRST_STEP
        if self._reporter.phases.open != (phase,):
            self._reporter.begin_phase(self._config, phase)

    def write_to(
        self, path: str | os.PathLike[str] | None, *, html: str | os.PathLike[str] | None = None,
        prometheus: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        """From the next report on, write these files: the journal, the page and Prometheus's. None: no file."""
        self._reporter.write_to(path, html, prometheus)

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
        phase = " and ".join(self._reporter.phases.open)
        self._reporter.emit(oom.report(prediction, self._reporter.reading(where), wanted, phase))


class Within:
    """The rest of a phase that has begun; see ``MemoryReport.phase``."""

    def __init__(self, before: tuple[Phase, ...] | None, back: Callable[[tuple[Phase, ...]], object]) -> None:
        self._before, self._go_back = before, back

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            self._go_back(self._before)


def how_started(config: Any, iteration: int) -> tuple[bool, bool]:
    """(resumed, loaded) by a container of Megatron Bridge, or by arguments of Megatron-LM."""
    how = getattr(config, "checkpoint", config)
    tuned = getattr(how, "load", None) and getattr(how, "finetune", False)
    # AutoBridge's import of weights from Hugging Face (models/conversion/auto_bridge.py).
    imports = getattr(getattr(config, "model", None), "_pre_wrap_hooks", None)
    return iteration > 0, bool(tuned or imports or getattr(how, "pretrained_checkpoint", None))


@never_raises
def _saves(config: Any, iteration: int) -> bool:
    """Whether Bridge saves after this iteration (``training/train.py: checkpoint_and_decide_exit``, and its end)."""
    how = getattr(config, "checkpoint", None)
    if not getattr(how, "save", None):
        return False
    interval = getattr(how, "save_interval", None)
    last = iteration == getattr(getattr(config, "train", None), "train_iters", None) and interval != 0
    return last or bool(interval and iteration % interval == 0)


def _moment(steps: int, every: int) -> str | None:
    if steps in (1, 2):
        return FIRST_STEP if steps == 1 else STEADY
    return STEADY if steps % every == 0 else None


def _iteration(state: Any) -> int:
    return int(getattr(state.train_state, "step", 0))
