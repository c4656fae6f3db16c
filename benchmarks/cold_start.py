"""Time of a cold ``bridge-memory estimate`` compared with ``python -c "import torch"``, and its resident memory.

Both start the same interpreter in turn, so that other work on the machine affects both. Needs torch. Goals: the
estimate of a run that does not fit its GPU, with the change to try first (the README's first command), takes less than
a seventh of the import, and stays below 60 MiB resident.

    python benchmarks/cold_start.py [--rounds 7] [MODEL [FLAGS ...]]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = [
    "deepseek-ai/DeepSeek-V3", "--tp", "4", "--pp", "4", "--ep", "8", "--num-gpus", "128",
    "--num-layers-in-last-pipeline-stage", "16", "--gpu", "H200",
]  # fmt: skip
RATIO_GOAL = 1 / 7
RESIDENT_GOAL_MIB = 60
#: ru_maxrss is in KiB on Linux, in bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


def measure(command: list[str]) -> tuple[float, float]:
    """(wall seconds, peak resident MiB) of one process, which must succeed."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    # Writing byte code belongs to installation, not to a start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read()
    complaint = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {complaint.strip()}")
    return seconds, usage.ru_maxrss * RSS_UNIT / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each, after one warm-up (7)")
    parser.add_argument("estimate", nargs=argparse.REMAINDER, help="what to estimate (default: the README's first)")
    args = parser.parse_args()
    commands = {
        "estimate": [sys.executable, "-m", "bridge_memory", "estimate", *(args.estimate or MODEL)],
        "import torch": [sys.executable, "-c", "import torch"],
        "python itself": [sys.executable, "-c", "pass"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    resident: dict[str, float] = {}
    for turn in range(args.rounds + 1):
        for name, command in commands.items():
            took, peak = measure(command)
            resident[name] = max(peak, resident.get(name, 0.0))
            if turn:
                seconds[name].append(took)
    print(f"{'':<14}  {'median s':>8}  {'min s':>8}  {'MiB resident':>12}")
    for name, values in seconds.items():
        print(f"{name:<14}  {statistics.median(values):>8.3f}  {min(values):>8.3f}  {resident[name]:>12.1f}")
    ratio = statistics.median(seconds["estimate"]) / statistics.median(seconds["import torch"])
    print(f"estimate / import torch = 1/{1 / ratio:.1f} (goal: below 1/{1 / RATIO_GOAL:.0f})")
    print(f"resident = {resident['estimate']:.1f} MiB (goal: below {RESIDENT_GOAL_MIB})")


if __name__ == "__main__":
    main()
