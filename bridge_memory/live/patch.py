"""``install()``: an unchanged training script prints our table next to its own reports.

Patched in every module that imported them: ``report_theoretical_memory`` and ``report_memory`` of Megatron Bridge
(``training/utils/theoretical_memory_utils.py``, ``train_utils.py``) and of Megatron-LM
(``megatron/training/theoretical_memory_usage.py``, ``utils.py``). The originals are still called, so
their output, results and errors stay the same. The first names the run of a report, the second triggers it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from bridge_memory.live import gather, oom
from bridge_memory.live.callback import Within, how_started
from bridge_memory.live.cuda import Reading, read_cuda
from bridge_memory.live.guard import never_raises
from bridge_memory.live.reporter import Reporter, first_logged
from bridge_memory.outside.phase import Phase
from bridge_memory.readers.megatron_args import container

#: The first release of Megatron Bridge whose closed forms ``theoretical_memory_utils.remarks`` speaks of has this.
_BRIDGE_0_6 = "estimate_training_memory"

#: module -> function that it defines.
_SOURCES = (
    ("megatron.bridge.training.utils.theoretical_memory_utils", "report_theoretical_memory"),
    ("megatron.bridge.training.utils.train_utils", "report_memory"),
    ("megatron.training.theoretical_memory_usage", "report_theoretical_memory"),
    ("megatron.training.utils", "report_memory"),
)

_installed: Installed | None = None
_lock = threading.RLock()


class Installed:
    """The active patches; ``uninstall()`` or the end of a ``with`` removes them."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        #: Each replaced function with ours, and the patched names.
        self._replaced: list[tuple[Any, Any]] = []
        self._patched: list[str] = []
        self._active = False
        #: The argument of Megatron's report (a container, or Megatron-LM's parsed arguments), and its container.
        self._given: Any = None
        self._config: Any = None
        self._due = False
        self._remarks = False
        self._watch = oom.Watch(self._report_out_of_memory)

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc: object) -> None:
        uninstall()

    @property
    def patched(self) -> list[str]:
        """ "module.function" of every patched place."""
        return list(self._patched)

    @never_raises
    def apply(self, modules: Sequence[Any]) -> None:
        """``modules``: those of ``_SOURCES``; None for a missing one."""
        makers = {"report_theoretical_memory": self._theoretical, "report_memory": self._memory}
        self._active = True
        for (_, name), module in zip(_SOURCES, modules, strict=True):
            original = _names(module).get(name)
            if not callable(original) or getattr(original, "__bridge_memory__", False):
                continue
            ours = makers[name](original, _BRIDGE_0_6 in _names(module))
            ours.__bridge_memory__ = True  # type: ignore[attr-defined]
            self._replaced.append((original, ours))
            self._patched += _replace(original, ours)
        self._watch.start()

    @never_raises
    def undo(self) -> None:
        """Restore the originals, in modules that imported ours since too; other copies of ours only call the
        original."""
        self._active = False
        self._watch.stop()
        if self._config is not None:
            self._reporter.finish(self._config)
        for original, ours in reversed(self._replaced):
            _replace(ours, original)
        self._replaced.clear()
        self._patched.clear()

    # ---- the two functions ----

    def _theoretical(self, original: Callable[..., Any], bridge: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def report_theoretical_memory(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._announce(args[0] if args else kwargs.get("config", kwargs.get("args")), bridge)
            return result

        return report_theoretical_memory

    @never_raises
    def _announce(self, given: Any, bridge: bool) -> None:
        """A run is reported once, although Megatron reports again in the second iteration."""
        if not self._active or given is None or given is self._given:
            return
        self._given, self._remarks, self._config, self._due = given, bridge, given, True
        self._config = container(given)

    def _memory(self, original: Callable[..., Any], _: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def report_memory(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._report()
            return result

        return report_memory

    @never_raises
    def _report(self) -> None:
        """Every rank publishes its reading; rank 0 prints the table. Ranks may call this a different number of times
        (the logging rank does): a reading replaces the previous one."""
        if not self._active:
            return
        where = self._reporter.place(self._config)
        if self._due:
            self._name_phases()
        reading = self._reporter.reading_of_phases(where)
        store = gather.default_store() if where.world_size > 1 else None
        key = f"{self._reporter.name}/latest"
        if where.rank:
            self._reporter.publish(store, key, reading)
        elif self._due:
            self._due = False
            readings, missing = self._reporter.collect(store, key, reading, where)
            self._reporter.show_patched(self._config, readings, missing, where.world_size, remark=self._remarks)
        if Phase.BUILD in self._reporter.phases.open:
            self._reporter.phases.begin((Phase.TRAINING,), reading)

    @never_raises
    def _name_phases(self) -> None:
        """Megatron first reports after some steps, and nothing comes before it."""
        phases = self._reporter.phases
        self._reporter.built(*how_started(self._given, int(getattr(self._given, "iteration", 0) or 0)))
        if Phase.BUILD in phases.open:
            phases.also(Phase.FIRST_STEP)
            if first_logged(self._config) > 1:
                phases.also(Phase.TRAINING)

    def phase(self, name: str) -> Within:
        """As ``MemoryReport.phase``."""
        return Within(self._reporter.begin_named(self._config, name), self._back)

    @never_raises
    def _back(self, before: tuple[Phase, ...]) -> None:
        self._reporter.return_to(self._config, before)
        if self._active and Phase.BUILD not in before:
            self._reporter.gather_phases(self._reporter.place(self._config), f"{self._reporter.name}/latest", 0.0)

    def _report_out_of_memory(self, wanted: int | None) -> None:
        where = self._reporter.place(self._config)
        prediction = self._reporter.prediction(self._config) if self._config is not None else None
        phase = " and ".join(self._reporter.phases.open)
        self._reporter.emit(oom.report(prediction, self._reporter.reading(where), wanted, phase))


def install(
    path: str | os.PathLike[str] | None = None,
    *,
    html: str | os.PathLike[str] | None = None,
    prometheus: str | os.PathLike[str] | None = None,
    deadline: float = gather.DEADLINE,
    emit: Callable[[str], None] | None = None,
    read: Callable[[int, int], Reading] = read_cuda,
) -> Installed:
    """Print the table of ``MemoryReport`` beside the memory reports of an unchanged Megatron script.

    ``report_theoretical_memory`` and ``report_memory`` of Megatron Bridge and of Megatron-LM are patched wherever they
    were imported to. What they print and return stays as it is. Every rank must call this, as every rank reports.
    Installing twice changes nothing. What cannot be patched is left as it is, with a warning.

    Args:
        path: The journal, a file of JSON lines that ``compare`` reads. None: no file is written.
        html: A page of all reports, written anew at each. None: no page.
        prometheus: A file ``*.prom`` for node exporter's textfile collector, as of ``MemoryReport``. None: no file.
        deadline: Seconds that rank 0 waits for the readings of the others.
        emit: Called with the text of every report. None: it is printed.
        read: Called with (rank, stage); returns the Reading of this process.

    Returns:
        The patches in place. ``uninstall()``, or the end of a ``with``, takes them out; ``patched`` lists them.

    Raises:
        SpecError: An argument is not what it has to be.

    Example:
        >>> from bridge_memory import install
        >>> with install() as installed:
        ...     places = installed.patched  # pretrain(...) here; without Megatron there is nothing to patch
    """
    global _installed
    # Not under the lock: a module that is being imported may itself install.
    modules = [_import(source) for source, _ in _SOURCES]
    with _lock:
        if _installed is None:
            _installed = Installed(
                Reporter(path, html=html, prometheus=prometheus, deadline=deadline, emit=emit, read=read)
            )
            _installed.apply(modules)
        return _installed


def uninstall() -> None:
    """Put back the functions that ``install`` replaced; nothing happens where none was.

    Example:
        >>> from bridge_memory import uninstall
        >>> uninstall()
    """
    global _installed
    with _lock:
        if _installed is not None:
            _installed.undo()
            _installed = None


def _import(name: str) -> Any:
    """The module, imported if needed; None where its package is not installed or does not import."""
    if name in sys.modules:
        return sys.modules[name]
    try:
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.import_module(name)
    except Exception:
        return None


def _names(module: object) -> dict[str, Any]:
    """The namespace of an entry of ``sys.modules``, which may be any object. No code of the module runs: lazy modules
    stay unloaded, and ``__getattr__`` is not called."""
    try:
        names = object.__getattribute__(module, "__dict__")
    except Exception:
        return {}
    return names if isinstance(names, dict) else {}


def _replace(old: Any, new: Any) -> list[str]:
    """Replace ``old`` by ``new`` in every module, under any name. Returns the places as "module.name"."""
    places = []
    for module_name, module in list(sys.modules.items()):
        names = _names(module)
        for name in [name for name, value in names.copy().items() if value is old]:
            names[name] = new
            places.append(f"{module_name}.{name}")
    return places
