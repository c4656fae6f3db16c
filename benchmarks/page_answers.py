"""Time of an answer of ``bridge-memory serve`` after a change on the page, compared with ``estimate`` alone.

Qwen3-235B on 256 H100s. Each request changes the sequence length, so that none is cached; the first, which fills the
trace cache, is not counted. In turn in one process: a request over HTTP (the estimate, suggestions that free memory,
JSON) and ``estimate`` of the same run. Goals: a median below 100 ms, which a person does not notice, and 99 of 100
within 150 ms on an idle machine. ``page_drawing.py``
includes the browser.

    python benchmarks/page_answers.py [--rounds 200]
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, estimate, resolve_model
from bridge_memory.cli.garbage import collections_when_idle
from bridge_memory.web.server import Server

GOAL_MS, LATE_MS = 100, 150
MODEL = "Qwen/Qwen3-235B-A22B"
OPTIONS: dict[str, Any] = {
    "num-gpus": 256, "tp": 4, "pp": 8, "ep": 8, "account-for-embedding-in-pipeline-split": True,
    "account-for-loss-in-pipeline-split": True,
}  # fmt: skip
PARALLEL = ParallelSpec(
    world_size=256, tensor_model_parallel_size=4, pipeline_model_parallel_size=8, expert_model_parallel_size=8,
    account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True,
)  # fmt: skip


def ask(port: int, seq_length: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": MODEL, "gpu": "H100", "options": {**OPTIONS, "seq-length": seq_length}})
    connection.request("POST", "/api/estimate", body=body, headers={"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        sys.exit(f"the server answered {answer.status}: {text[:300]!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="requests (200)")
    rounds = parser.parse_args().rounds
    model = resolve_model(MODEL)
    answers, alone = [], []
    with Server("127.0.0.1", 0) as server, collections_when_idle(lambda: server.answered):  # as ``serve`` does
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for i in range(rounds + 1):
            seq_length = 1024 + 64 * i
            start = time.perf_counter()
            ask(server.server_address[1], seq_length)
            answers.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
            estimate(RunSpec(model=model, parallel=PARALLEL, batch=BatchSpec(seq_length=seq_length + 32)))
            alone.append(1e3 * (time.perf_counter() - start))
        server.shutdown()
    page, own = statistics.median(answers[1:]), statistics.median(alone[1:])
    late = sorted(answers[1:])[int(0.99 * rounds)]
    print(f"an answer to the page: median {page:.0f} ms, min {min(answers[1:]):.0f}, 99 of 100 {late:.0f} ms")
    print(f"estimate alone:        median {own:.1f} ms; the answer costs {page / own:.0f} times that")
    print(f"goal: a median below {GOAL_MS} ms: {'met' if page < GOAL_MS else 'NOT met'}")
    print(f"goal: 99 of 100 within {LATE_MS} ms: {'met' if late <= LATE_MS else 'NOT met'}")


if __name__ == "__main__":
    main()
