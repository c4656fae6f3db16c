"""Out of memory: the breakdown is shown, the error goes on unchanged, the advice is true."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.live import oom
from bridge_memory.live.cuda import Reading
from bridge_memory.live.prediction import predict
from bridge_memory.plan.changes import changes
from bridge_memory.readers.config_container import run_from_config_container

GIB = 1 << 30


def test_each_option_frees_what_it_says(container: SimpleNamespace) -> None:
    """Applying the change and estimating again gives the same bytes, and no listed change beats the three."""
    run = run_from_config_container(container)
    before = estimate(run).stages[0].peak_bytes
    best = oom.best_options(run, 0)
    assert len(best) == 3 and best[0][1] >= best[1][1] >= best[2][1] > 0
    changed = {change.words: change for change in changes(run)}
    for name, freed in best:
        stages = estimate(run.with_fields(**dict(changed[name].fields))).stages
        after = stages[0] if len(stages) == 4 else max(stages, key=lambda s: s.peak_bytes)
        assert before - after.peak_bytes == freed
    every = dict(oom.best_options(run, 0, most=1000))
    assert list(every.items())[:3] == best
    assert any("recompute_granularity=full" in name for name in every) and len(every) > 5


def test_the_report_shows_prediction_and_live_figures_of_the_rank(container: SimpleNamespace) -> None:
    prediction = predict(run_from_config_container(container))
    reading = Reading(7, 3, allocated=70 * GIB, max_allocated=78 * GIB, reserved=79 * GIB, device_total=80 * GIB,
                      device_used=80 * GIB, retries=2)  # fmt: skip
    text = oom.report(prediction, reading, wanted=4 * GIB)
    assert "rank 7 (pipeline stage 3)" in text and "asking for 4.00 GiB" in text
    assert "highest 78.00" in text and "retries 2" in text
    assert f"peak {prediction.stages[3].peak / GIB:.2f} GiB" in text
    assert "would free the most on this stage" in text
    assert "no prediction" in oom.report(None, reading)


def test_an_out_of_memory_error_goes_on_unchanged() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys, torch; from pathlib import Path; from types import SimpleNamespace\n"
        "from conftest import small_container; from bridge_memory.live import MemoryReport\n"
        "report = MemoryReport(None)\n"
        "state = SimpleNamespace(cfg=small_container(), train_state=SimpleNamespace(step=0))\n"
        "report.on_train_start(SimpleNamespace(state=state))\n"
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')\n"
    )
    path = str(__file__).rsplit("/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r})\n" + code], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "ran out of GPU memory" in done.stdout and "would free the most" in done.stdout


class OutOfMemoryError(RuntimeError):
    """torch's goes by its name."""


def end_with(error: BaseException) -> None:
    """What the interpreter does with an error that nobody caught."""
    sys.excepthook(type(error), error, None)


@pytest.fixture
def of_the_user(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors that a hook of the script's own was called with. Nobody watches yet."""
    monkeypatch.setattr(oom, "_watching", [])
    monkeypatch.setattr(oom._Hook, "current", None)
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    return seen


def test_the_watch_tells_once_and_leaves_other_errors_alone(of_the_user: list[BaseException]) -> None:
    told: list[int | None] = []
    watch = oom.Watch(told.append)
    hook = sys.excepthook
    watch.start()
    end_with(ValueError("x"))
    assert told == []
    end_with(OutOfMemoryError())
    watch.report(6)
    watch.stop()
    watch.report(7)
    assert told == [None] and len(of_the_user) == 2
    assert sys.excepthook is hook


def test_a_second_training_is_watched_too(of_the_user: list[BaseException]) -> None:
    told: list[int | None] = []
    watch = oom.Watch(told.append)
    for trainings in (1, 2):
        watch.start()
        end_with(OutOfMemoryError())
        watch.stop()
        assert len(told) == trainings


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_watches_leave_the_scripts_own_hook_as_it_was(
    of_the_user: list[BaseException], first_to_end: int
) -> None:
    hook = sys.excepthook
    watches = [oom.Watch(lambda wanted: None), oom.Watch(lambda wanted: None)]
    for watch in watches:
        watch.start()
    watches[first_to_end].stop()
    end_with(OutOfMemoryError())
    watches[1 - first_to_end].stop()
    assert sys.excepthook is hook
    end_with(ValueError())
    assert len(of_the_user) == 2


def test_a_hook_that_was_set_in_front_of_ours_stays(of_the_user: list[BaseException]) -> None:
    """And starting again does not make the two call each other in turn."""
    told: list[int | None] = []
    watch = oom.Watch(told.append)
    watch.start()
    ours = sys.excepthook
    front: list[BaseException] = []

    def theirs(kind: type[BaseException], error: BaseException, trace: object) -> None:
        front.append(error)
        ours(kind, error, trace)

    sys.excepthook = theirs
    watch.stop()
    assert sys.excepthook is theirs
    watch.start()
    end_with(OutOfMemoryError())
    assert (len(told), len(front), len(of_the_user)) == (1, 1, 1)
    watch.stop()
    assert sys.excepthook is theirs
