"""Time from a key press to the drawn answer on the page of ``bridge-memory serve``, in a browser.

    python benchmarks/page_drawing.py [--rounds 3]

Needs playwright and a Chromium (Debian: ``apt-get install chromium``). Prints, for several models, the median over
eleven changes of the sequence length against the goal of 100 ms, and the processor time of server and page per change,
with the requests that follow the answer; other work on the machine affects it less; and frames drawn in a second while
the sequence length changes at every frame, as under a slider (goal: 60). ``page_answers.py`` times the server alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from with_browser import browser, missing, settled, start_server

GOAL = 0.1
RUNS = {
    "Llama-3.1-8B on 8 GPUs": "#model=meta-llama/Llama-3.1-8B&gpu=H100&num-gpus=8&tp=2",
    "Qwen3-235B on 256 GPUs": "#model=Qwen/Qwen3-235B-A22B&gpu=H100&num-gpus=256&tp=4&pp=8&ep=8"
    "&account-for-embedding-in-pipeline-split=true&account-for-loss-in-pipeline-split=true",
    "DeepSeek-V3 on 128 GPUs": "#model=deepseek-ai/DeepSeek-V3&gpu=H200&num-gpus=128&tp=4&pp=4&ep=8"
    "&num-layers-in-last-pipeline-stage=16",
}
#: Changes per round.
CHANGED = 11
#: Returns the seconds of each change, from the key press to the page that shows the answer.
CHANGES = """async () => {
    const field = document.getElementById("f-seq-length"), took = [];
    for (let length = 2048; length < 2048 + 11 * 256; length += 256) {
        const start = performance.now();
        field.value = String(length);
        field.dispatchEvent(new Event("input", { bubbles: true }));
        while (document.body.dataset.asked !== document.body.dataset.answered) {
            await new Promise((resolve) => setTimeout(resolve, 2));
        }
        took.push((performance.now() - start) / 1000);
    }
    return took;
}"""


#: Returns frames in a second, and the longest time between two, milliseconds, while the field changes at every frame.
FRAMES = """async () => {
    const field = document.getElementById("f-seq-length"), start = performance.now();
    let last = start, longest = 0, number = 0;
    await new Promise((done) => requestAnimationFrame(function frame() {
        const now = performance.now();
        longest = number++ ? Math.max(longest, now - last) : 0;
        last = now;
        field.value = String(2048 + 128 * (number % 64));
        field.dispatchEvent(new Event("input", { bubbles: true }));
        if (now - start < 3000) requestAnimationFrame(frame); else done();
    }));
    return [1000 * number / (last - start), longest];
}"""


def cpu_seconds(pid: int) -> float | None:
    """Processor time of the server in seconds (Linux); None elsewhere."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            words = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def page_seconds(system: Any) -> float:
    """Processor time of the renderer processes in seconds: scripts, layout, drawing."""
    processes = system.send("SystemInfo.getProcessInfo")["processInfo"]
    return float(sum(one["cpuTime"] for one in processes if one["type"] == "renderer"))


def medians(page: Any, rounds: int) -> list[float]:
    """The median of each round."""
    return [statistics.median(page.evaluate(CHANGES)) for _ in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of eleven changes (3)")
    args = parser.parse_args()
    if missing():
        print(f"error: {missing()}", file=sys.stderr)
        return 2
    process, url = start_server()
    try:
        with browser() as one:
            system = one.new_browser_cdp_session()
            print(f"{'':<28}{'first round':>14}{'best round':>14}{'/ goal':>14}{'CPU per change':>16}{'frames/s':>10}")
            for name, state in RUNS.items():
                page = one.new_page()
                page.goto(url + state)
                settled(page)
                before, drawn = cpu_seconds(process.pid), page_seconds(system)
                found = medians(page, args.rounds)
                page.wait_for_timeout(500)  # requests that follow the last answer
                busy = None if before is None else (cpu_seconds(process.pid) or before) - before
                each = CHANGED * args.rounds / 1000
                spent = "?" if busy is None else f"{busy / each:.0f}"
                shown = f"{spent} + {(page_seconds(system) - drawn) / each:.0f} ms"
                best = min(found)
                frames, longest = page.evaluate(FRAMES)
                print(f"{name:<28}{found[0] * 1000:>11.0f} ms{best * 1000:>11.0f} ms{best / GOAL:>14.2f}{shown:>16}"
                      f"{frames:>10.0f}, longest {longest:.0f} ms")  # fmt: skip
                page.close()
    finally:
        process.terminate()
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
