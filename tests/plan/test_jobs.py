"""Work spread over forked processes: by several threads at once, and when the process that spreads it dies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from operator import mul
from pathlib import Path

import pytest
from processes import gone, heeds_signals, is_there

from bridge_memory import search
from bridge_memory.plan.jobs import can_fork, spread

pytestmark = pytest.mark.skipif(not can_fork(), reason="this system does not fork")
ROOT = Path(__file__).resolve().parents[2]


class Times:
    """A product of its own for each thread that spreads one."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        time.sleep(0.01)
        return mul(self.factor, number)


def test_threads_that_spread_work_at_once_get_their_own() -> None:
    """They once shared the name under which forks find their work."""
    found: dict[int, list[int]] = {}
    started = threading.Barrier(3)

    def run(factor: int) -> None:
        begun: Iterator[int] = spread(2, Times(factor), range(20))
        started.wait()
        found[factor] = list(begun)

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {factor: [factor * n for n in range(20)] for factor in (3, 5, 7)}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda how: how.name)
def test_no_fork_outlives_the_process_that_started_it(how: signal.Signals) -> None:
    program = (
        "import os, time\n"
        "from bridge_memory.plan.jobs import spread\n"
        "def work(n):\n"
        "    if n > 1: time.sleep(600)\n"
        "    time.sleep(0.5)\n"
        "    return os.getpid()\n"
        "for pid in spread(2, work, range(8)): print(pid, flush=True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, preexec_fn=heeds_signals,
    )  # fmt: skip
    assert parent.stdout is not None
    with parent.stdout:
        forks = [int(parent.stdout.readline()) for _ in range(2)]
        assert len(set(forks)) == 2 and all(map(is_there, forks))
        parent.send_signal(how)
        parent.wait()
        assert gone(forks)


@pytest.mark.parametrize("engine", [None, "fsdp2"])
def test_what_a_search_found_can_be_sent(engine: str | None) -> None:
    more = {"engine": engine} if engine else {"vary": ["tp", "pp"]}
    found = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=2, global_batch_size=8, **more)  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(found))
    assert list(again.rows) == list(found.rows) and again.best(3) == found.best(3) and again[1:8] == found[1:8]
    assert again.ranked(3) == found.ranked(3)
