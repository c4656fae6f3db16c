"""Time of an answer of ``bridge-memory serve`` after a change on the page, compared with ``estimate`` alone.

Qwen3-235B on 256 H100s under Megatron, and Llama-3.1-8B on 8 of them under FSDP2. Each request changes the sequence
length, so that none is cached; the first, which fills the trace cache, is not counted. In turn in one process: a
request over HTTP (the estimate, the whole job with its replayed allocator, JSON) and ``estimate`` of the same run.
Goals: a median below 100 ms, which a person does not notice, and 99 of 100 within 150 ms on an idle machine.
``page_drawing.py`` includes the browser.

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

from bridge_memory import BatchSpec, DataParallelSpec, ParallelSpec, RunSpec, estimate
from bridge_memory.garbage import collections_when_idle
from bridge_memory.web.server import Server

GOAL_MS, LATE_MS = 100, 150
PARALLEL = ParallelSpec(
    world_size=256, tensor_model_parallel_size=4, pipeline_model_parallel_size=8, expert_model_parallel_size=8,
    account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True,
)  # fmt: skip
#: Engine -> the run, and the options that the page sends for it.
RUNS: dict[str, tuple[RunSpec, dict[str, Any]]] = {
    "megatron_ddp": (RunSpec(model="Qwen/Qwen3-235B-A22B", parallel=PARALLEL), {
        "num-gpus": 256, "tp": 4, "pp": 8, "ep": 8, "account-for-embedding-in-pipeline-split": True,
        "account-for-loss-in-pipeline-split": True,
    }),
    "fsdp2": (
        RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8),
                data_parallel=DataParallelSpec(engine="fsdp2")), {"num-gpus": 8, "engine": "fsdp2"},
    ),
}  # fmt: skip


def ask(port: int, model: str, options: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": model, "gpu": "H100", "options": options})
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
    for engine, (run, options) in RUNS.items():
        print(f"{run.model.name} under {engine}")
        measure(run, options, rounds)


def measure(run: RunSpec, options: dict[str, Any], rounds: int) -> None:
    answers, alone = [], []
    with Server("127.0.0.1", 0) as server, collections_when_idle(lambda: server.answered):  # as ``serve`` does
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for i in range(rounds + 1):
            seq_length = 1024 + 64 * i
            start = time.perf_counter()
            ask(server.server_address[1], run.model.name, {**options, "seq-length": seq_length})
            answers.append(1e3 * (time.perf_counter() - start))
            start = time.perf_counter()
            estimate(run.with_(batch=BatchSpec(seq_length=seq_length + 32)))
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
