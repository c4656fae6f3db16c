"""One report: every rank publishes its reading, rank 0 makes the table, the last rank writes to the loggers."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from bridge_memory import calibration
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import (
    ComponentRecord,
    PhaseRecord,
    PhasesRecord,
    PredictedStage,
    ReportRecord,
    RunRecord,
)
from bridge_memory.calibration.residuals import versions
from bridge_memory.cards.names import gpu_called
from bridge_memory.files import write_whole
from bridge_memory.job.job import Job, whole_on
from bridge_memory.live import gather, loggers
from bridge_memory.live.cuda import Reading, read_cuda
from bridge_memory.live.guard import Alone, Attempts, error_words, never_raises, pass_on, warn_once
from bridge_memory.live.machine import Machine
from bridge_memory.live.phases import Phases, phase_records
from bridge_memory.live.place import Place, place
from bridge_memory.live.prediction import FIRST_STEP, STEADY, Prediction, predict
from bridge_memory.live.prometheus import check_prometheus
from bridge_memory.live.prometheus import write as write_prometheus
from bridge_memory.live.table import (
    THRESHOLD,
    notes,
    overload_line,
    phase_lines,
    report_line,
    runs_with,
    stage_records,
    text_table,
    verdict,
)
from bridge_memory.outside.phase import Phase
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.run_spec import run_to_json
from bridge_memory.report.history import History
from bridge_memory.report.units import ranges
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.errors import finite
from bridge_memory.spec.unmodelled import as_feature
from bridge_memory.theoretical_memory_utils import remarks, theoretical_memory_line

_serial = itertools.count()
#: Seconds after which a browser reloads the page of ``html``.
REFRESH = 20


class Reporter:
    """The report of ``MemoryReport`` and ``install()``. Public methods never raise."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        calibration_path: str | os.PathLike[str] | None = None,
        html: str | os.PathLike[str] | None = None,
        prometheus: str | os.PathLike[str] | None = None,
        tables: bool = False,
        threshold: float = THRESHOLD,
        deadline: float = gather.DEADLINE,
        emit: Callable[[str], None] | None = None,
        read: Callable[[int, int], Reading] = read_cuda,
    ) -> None:
        """Raises SpecError for an argument that is none."""
        for name, file in (
            ("path", path), ("calibration", calibration_path), ("html", html), ("prometheus", prometheus)
        ):  # fmt: skip
            check_file(name, file)
        check_prometheus(prometheus)
        for name, number in (("threshold", threshold), ("deadline", deadline)):
            if not finite(number) or number < 0:
                raise SpecError(f"{name} ({show(number)}) is not a number of 0 or more; give one")
        if not callable(read) or not (emit is None or callable(emit)):
            name, wrong = ("emit", emit) if callable(read) else ("read", read)
            raise SpecError(f"{name} ({show(wrong)}) is not a function; give one, or leave it out")
        self.calibration_path = calibration_path
        #: Whether every report is a table; else one line, once the table of a steady step was printed.
        self.tables = tables
        self._steady = False
        self._routing = Attempts("the overload factor")
        self._overload: str | None = None
        self.history = History()
        self.threshold = threshold
        self.deadline = deadline
        self.emit = emit or (lambda text: print(text, flush=True))
        self.read = read
        self._alone = Alone()
        #: Every rank creates reporters in the same order, so this name is the same on all of them.
        self.name = f"reporter{next(_serial)}"
        self.loggers = loggers.Loggers()
        self._publisher = gather.Publisher()
        self._collector = gather.Collector()
        self._fetcher = gather.Fetcher()
        #: Steps of a report; each may fail without affecting the others.
        self._reading = Attempts("reading the GPU's memory")
        self._publishing = Attempts("publishing a reading")
        self._sharing = Attempts("sharing the report")
        self.write_to(path, html, prometheus)
        self._calibrating = Attempts(f"writing {calibration_path}")
        self._showing = Attempts("printing the report")
        self._machine: Machine | None = None
        self._prediction: Prediction | None = None
        self._predicted = False
        self._started = False
        self._line_printed = False
        #: Phases of this rank; on rank 0 the last known ones of all ranks, and what is in the journal of them.
        self.phases = Phases()
        self._passed: dict[int, Reading] = {}
        self._written: list[PhaseRecord] = []
        self._gathered = 0

    def write_to(
        self, path: str | os.PathLike[str] | None, html: str | os.PathLike[str] | None,
        prometheus: str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        """The journal, the page and Prometheus's file, from the next report on."""
        self.path, self.html, self.prometheus = path, html, prometheus
        self._writing = Attempts(f"writing {path}")
        self._drawing = Attempts(f"writing {html}")
        self._exporting = Attempts(f"writing {prometheus}")

    # ---- prediction ----

    def machine(self, config: Any) -> Machine:
        """Read once, at the first report, when the model is on its device."""
        if self._machine is None:
            self._machine = Machine.of_process(config)
        return self._machine

    def prediction(self, config: Any) -> Prediction | None:
        """Made once, at the first report; None where the run cannot be estimated."""
        if not self._predicted:
            self._predicted = True
            try:
                if config is None:
                    raise SpecError("the run is not known; give MemoryReport a run")
                machine = self.machine(config)
                made = predict(
                    _on_machine(config, machine) if isinstance(config, RunSpec)
                    else run_from_config_container(config, implementation=machine.overrides())
                )
                assumptions = (*made.assumptions, *machine.notes)
                self._prediction = replace(made, assumptions=assumptions, job=_whole_job(made, machine))
            except Exception as error:
                pass_on(error)
                warn_once("the prediction", error)
        return self._prediction

    def forget(self) -> None:
        """Predict again at the next report, with a table as at first."""
        self._predicted, self._prediction, self._steady = False, None, False

    def place(self, config: Any) -> Place:
        parallel = config.parallel if isinstance(config, RunSpec) else getattr(config, "model", None)
        stages = getattr(parallel, "pipeline_model_parallel_size", 1) or 1
        return place(stages)

    def reading(self, where: Place) -> Reading:
        """This rank's reading; an exception becomes its ``error``."""
        found: Reading | None = self._reading(self._read, where)
        return found or Reading(where.rank, where.stage, error="left out, as it takes long")

    def _read(self, where: Place) -> Reading:
        try:
            return self.read(where.rank, where.stage).checked()
        except Exception as error:
            pass_on(error)
            return Reading(where.rank, where.stage, error=error_words(error))

    # ---- the report ----

    @never_raises
    def report(
        self, config: Any, moment: str, iteration: int, *, state: Any = None, num_microbatches: int | None = None,
        then: Phase | None = None,
    ) -> None:
        """Every rank calls this at the same steps; only rank 0 (and the logging rank) wait for anything. Does nothing
        while another thread's report goes on, or the one that a signal's handler interrupts. ``then``: the phase that
        begins after the reading."""
        if self._alone.taken():
            try:
                self._report(config, moment, iteration, state, num_microbatches, then)
            finally:
                self._alone.release()

    def _report(
        self, config: Any, moment: str, iteration: int, state: Any, num_microbatches: int | None, then: Phase | None
    ) -> None:
        where = self.place(config)
        reading = self.reading_of_phases(where)
        if then is not None:
            self.phases.begin((then,), reading)
        store = gather.default_store() if where.world_size > 1 else None
        key = f"{self.name}/{iteration}/{moment}"
        table: ReportRecord | None = None
        if where.rank:
            self.publish(store, key, reading)
        else:
            try:
                readings, missing = self.collect(store, key, reading, where)
                table = self.table(config, readings, missing, moment, iteration, where.world_size)
            finally:
                # Also where an interrupt ends this: the logging rank waits for it.
                if store is not None and state is not None:
                    self._sharing(gather.share, store, self.name, iteration, table)
            self._show(config, table, num_microbatches)
        if state is not None and where.rank == where.world_size - 1:
            if table is None and store is not None and _has_logger(state):
                table = self._fetcher.fetch(store, self.name, iteration, deadline=1.5 * self.deadline)
            if table is not None:
                self.loggers.log(state, loggers.metrics(table.stages), iteration)

    def publish(self, store: gather.Store | None, key: str, reading: Reading) -> None:
        """Leave this rank's reading for rank 0."""
        if store is not None:
            self._publishing(self._publisher.publish, store, key, reading)

    def collect(
        self, store: gather.Store | None, key: str, reading: Reading, where: Place, deadline: float | None = None
    ) -> tuple[list[Reading], list[int]]:
        """On rank 0: its own reading and those of the others, and the ranks that are missing. ``deadline``: a shorter
        one."""
        more: list[Reading] = []
        missing: list[int] = []
        if store is not None:
            wait = self.deadline if deadline is None else min(deadline, self.deadline)
            more, missing = self._collector.collect(store, key, range(1, where.world_size), deadline=wait)
        readings = [reading, *more]
        self._passed.update((one.rank, one) for one in readings if one.phases)
        return readings, missing

    def table(
        self,
        config: Any,
        readings: list[Reading],
        missing: list[int],
        moment: str,
        iteration: int,
        world_size: int,
    ) -> ReportRecord:
        prediction = self.prediction(config)
        stages = stage_records(prediction, readings, moment)
        if moment == STEADY and self._overload is None:
            # Once: it is evaluated, which takes some tenths of a second on rank 0.
            self._overload = self._routing(overload_line, prediction, stages, moment) or ""
        return ReportRecord(
            time=time.time(), iteration=iteration, moment=moment, world_size=world_size, missing_ranks=missing,
            stages=stages, notes=[
                *verdict(prediction, stages, moment), *filter(None, (self._overload,)), *runs_with(prediction),
                *notes(prediction, stages, self.threshold),
            ],
        )  # fmt: skip

    def show_patched(
        self, config: Any, readings: list[Reading], missing: list[int], world_size: int, *, remark: bool
    ) -> None:
        """The table of a patched ``report_memory``, which prints Megatron's line itself, once for each run.
        ``remark``: the line is Bridge's, so remarks on it follow. Raises."""
        self._line_printed, self._steady = True, False
        iteration = first_logged(config)
        moment = STEADY if iteration >= 2 else FIRST_STEP
        self._show(config, self.table(config, readings, missing, moment, iteration, world_size), None, remark=remark)

    def _show(
        self, config: Any, table: ReportRecord, num_microbatches: int | None, *, remark: bool = False
    ) -> None:
        """Write files first, then print: the printed text may have no reader."""
        first, self._started = not self._started, True
        if first:
            self._write(self._run_record(config))
        self._write(table)
        self._write_phases(table.world_size)
        self._keep_residuals(config, table)
        if first and not self._line_printed:
            remark = self._print_line(config, num_microbatches)
        if remark:
            self._remark(config)
        if self.prometheus is not None:
            self._exporting(write_prometheus, self.prometheus, table, phase_records(self._passed.values()))
        again, self._steady = self._steady, self._steady or table.moment == STEADY
        if again and not self.tables:
            self._showing(self.emit, report_line(table))
            return
        title = f"GPU memory by pipeline stage, GiB ({table.moment}, iteration {table.iteration})"
        title += f"\n  {self.machine(config).line()}"
        lines = [text_table(table.stages, title), *(f"  {note}" for note in table.notes)]
        lines += [f"  {line}" for line in phase_lines(phase_records(self._passed.values()))]
        if table.missing_ranks:
            alone = "" if self._collector.answered else "; MemoryReport belongs on every rank"
            lines.append(f"  no reading in time from ranks {ranges(table.missing_ranks)}{alone}")
        self._showing(self.emit, "\n".join(lines))

    def _run_record(self, config: Any) -> RunRecord:
        record = RunRecord(time=time.time(), versions=versions(), machine=self.machine(config).to_json())
        prediction = self.prediction(config)
        if prediction is None:
            return record
        return replace(
            record, model=prediction.model, config_digest=prediction.digest, assumptions=prediction.assumptions,
            not_modelled=prediction.not_modelled, predicted=_predicted(prediction), run=_run(prediction),
        )  # fmt: skip

    def _print_line(self, config: Any, num_microbatches: int | None) -> bool:
        """Print Bridge's own line, for log parsers; True if there is one. Other loops have none."""
        if config is None or isinstance(config, RunSpec):
            return False
        try:
            line = theoretical_memory_line(config, num_microbatches)
        except Exception as error:
            pass_on(error)
            warn_once("Bridge's line", error)
            return False
        if line:
            self._showing(self.emit, line)
        return bool(line)

    def _remark(self, config: Any) -> None:
        """Print where Bridge's line differs from this run's memory."""
        try:
            found = remarks(config)
        except Exception as error:
            pass_on(error)
            warn_once("the remarks on Bridge's line", error)
            return
        if found:
            self._showing(self.emit, f"On Megatron Bridge's line: {'; '.join(found)}")

    def _keep_residuals(self, config: Any, table: ReportRecord) -> None:
        prediction = self.prediction(config)
        if self.calibration_path is not None and table.moment == STEADY and prediction is not None:
            residuals = calibration.residuals_of(prediction.model, prediction.digest, table.stages)
            self._calibrating(calibration.save, self.calibration_path, residuals)

    def _write(self, record: RunRecord | ReportRecord) -> None:
        if self.path is not None:
            self._writing(journal.append, self.path, record)
        if self.html is not None:
            self.history.add(record)
            if isinstance(record, ReportRecord):
                self._drawing(draw, self.html, self.history, refresh=REFRESH)

    @never_raises
    def finish(self, config: Any) -> None:
        """Training is over, and once more after every later phase: write the page without reloading, and the phases of
        all ranks, for which rank 0 waits shortly."""
        if self.html is not None and self.history.reports:
            self._drawing(draw, self.html, self.history)
        self.begin_phase(config)
        where = self.place(config)
        self.gather_phases(where, f"{self.name}/end{self._gathered}", gather.GRACE)
        self._gathered += 1

    # ---- phases ----

    def reading_of_phases(self, where: Place) -> Reading:
        """This rank's reading, with its phases up to now."""
        reading = self.reading(where)
        return replace(reading, phases=self.phases.now(reading))

    @never_raises
    def begin_phase(self, config: Any, *phases: Phase) -> tuple[Phase, ...]:
        """Others begin, none at the end. Returns those before. What rank 0 knows is written."""
        where = self.place(config)
        reading = self.reading_of_phases(where)
        before = self.phases.begin(phases, reading)
        if where.rank == 0 and reading.phases:
            self._passed[0] = reading
            self._write_phases(where.world_size)
        return before

    @never_raises
    def begin_named(self, config: Any, name: str) -> tuple[Phase, ...] | None:
        """As ``begin_phase``; None where ``name`` is no phase."""
        if name not in tuple(Phase):
            raise SpecError(f"phase ({show(name)}) is not a phase; name {', '.join(Phase)}")
        return self.begin_phase(config, Phase(name))

    @never_raises
    def return_to(self, config: Any, before: tuple[Phase, ...]) -> None:
        """A phase of the loop's own is over. What follows loading until training counts to it: building is before."""
        if Phase.BUILD not in before or self.phases.open not in ((Phase.LOAD,), (Phase.RESUME,)):
            self.begin_phase(config, *before)

    @never_raises
    def built(self, resumed: bool, loaded: bool) -> None:
        """The phase that ends is building and what was loaded in it, unless that was named."""
        named = self.phases.passed(Phase.LOAD) or self.phases.passed(Phase.RESUME)
        if Phase.BUILD in self.phases.open and not named and (resumed or loaded):
            self.phases.also(Phase.RESUME if resumed else Phase.LOAD)

    def gather_phases(self, where: Place, key: str, deadline: float) -> None:
        """Leave this rank's phases for rank 0, which collects and writes them. Raises."""
        reading = self.reading_of_phases(where)
        store = gather.default_store() if where.world_size > 1 and reading.phases else None
        if where.rank:
            self.publish(store, key, reading)
        elif self.path is not None:
            self.collect(store, key, reading, where, deadline)
            self._write_phases(where.world_size, last=True)

    def _write_phases(self, world_size: int, *, last: bool = False) -> None:
        """Not before the run's own line, and not twice the same; how often a phase passed alone is news at the end."""
        found = phase_records(self._passed.values())
        same = found == self._written if last else _figures(found) == _figures(self._written)
        if self.path is not None and self._started and found and not same:
            self._written = found
            record = PhasesRecord(time=time.time(), world_size=world_size, phases=found)
            self._writing(journal.append, self.path, record)


def _figures(found: Sequence[PhaseRecord]) -> list[PhaseRecord]:
    return [replace(one, times=0) for one in found]


def first_logged(config: Any) -> int:
    """The step at which Megatron first logs memory."""
    return getattr(getattr(config, "logger", None), "log_interval", None) or 1


def check_file(name: str, file: object) -> None:
    """Raise SpecError where the argument ``name`` is neither None nor a path."""
    if file is not None and not (isinstance(file, (str, os.PathLike)) and os.fspath(file)):
        raise SpecError(f"{name} ({show(file)}) is not a path; give a file, or leave it out")


def draw(path: str | os.PathLike[str], history: History, *, refresh: int = 0) -> None:
    """Write the page of a journal, whole or not at all. ``refresh``: seconds after which a browser reloads it; 0:
    never. Raises OSError."""
    from bridge_memory.report.page.one_file import blocks_page

    under = history.under() + (f"; reloads every {refresh} s" if refresh else "; training is over")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, blocks_page(history.title, history.blocks(), under=under, refresh=refresh))


def _run(prediction: Prediction) -> dict[str, Any]:
    """What ran, as ``bridge-memory record`` reads it; features outside of torch's figures are no part of them."""
    try:
        run = prediction.run
        if run is None:
            return {}
        inside, own = ([s for s in features if not as_feature(s).outside]
                       for features in (run.not_modelled, run.model.not_modelled))  # fmt: skip
        return run_to_json(run.with_(not_modelled=tuple(inside), model=replace(run.model, not_modelled=tuple(own))))
    except Exception as error:
        pass_on(error)
        warn_once("the run in the journal", error)
        return {}


def _whole_job(prediction: Prediction, machine: Machine) -> Job | None:
    """On the GPU in use; None where it is not known."""
    try:
        gpu = gpu_called(machine.gpu)
        if gpu is None or prediction.run is None:
            return None
        _, _, jobs = whole_on(prediction.run, gpu)
        return jobs[0] if jobs else None
    except Exception as error:
        pass_on(error)
        warn_once("the prediction of the whole job", error)
        return None


def _predicted(prediction: Prediction) -> list[PredictedStage]:
    return [
        PredictedStage(
            stage=s.stage, static=s.static, activation=s.activation, transient=s.transient, peak=s.peak,
            components=[cast(ComponentRecord, c._asdict()) for c in s.components],
        )
        for s in prediction.stages
    ]  # fmt: skip


def _on_machine(run: RunSpec, machine: Machine) -> RunSpec:
    """``run`` with this process's torch release, GPU generation and allocator settings."""
    names = ("gpu_arch", "torch", "expandable_segments", "cublas_workspace_bytes")
    found = {name: fact.value for name, fact in machine.facts.items() if name in names}
    return run.with_(implementation=replace(run.implementation, **found))


def _has_logger(state: Any) -> bool:
    names = ("tensorboard_logger", "wandb_logger", "mlflow_logger", "comet_logger")
    return any(getattr(state, name, None) is not None for name in names)
