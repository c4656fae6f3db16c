"""How long the page of ``bridge-memory serve`` takes to show an answer, from a key to the drawn page.

    python scripts/benchmark_page.py [--rounds 3]

Prints the median over eleven changes of the sequence length, for several models, beside the aim of 100 ms. Needs
playwright and a Chromium (Debian: ``apt-get install chromium``).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from typing import Any

AIM = 0.1
RUNS = {
    "Llama-3.1-8B on 8 GPUs": "#model=meta-llama/Llama-3.1-8B&gpu=H100&num-gpus=8&tp=2",
    "Qwen3-235B on 256 GPUs": "#model=Qwen/Qwen3-235B-A22B&gpu=H100&num-gpus=256&tp=4&pp=8&ep=8"
    "&account-for-embedding-in-pipeline-split=true&account-for-loss-in-pipeline-split=true",
    "DeepSeek-V3 on 128 GPUs": "#model=deepseek-ai/DeepSeek-V3&gpu=H200&num-gpus=128&tp=4&pp=4&ep=8"
    "&num-layers-in-last-pipeline-stage=16",
}
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip
#: Seconds of each change, from the key to the page that shows the answer.
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


def settled(page: Any) -> None:
    """Wait for the first answer. The page's policy lets nothing be evaluated inside of it."""
    state: dict[str, str] = {}
    while not state.get("asked") or state["asked"] != state.get("answered"):
        page.wait_for_timeout(20)
        state = page.evaluate("({...document.body.dataset})")


def medians(page: Any, rounds: int) -> list[float]:
    """The median of each round."""
    return [statistics.median(page.evaluate(CHANGES)) for _ in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("error: this needs playwright and a Chromium", file=sys.stderr)
        return 2
    server = subprocess.Popen(
        [sys.executable, "-m", "bridge_memory", "serve", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
            print(f"{'':<28}{'first round':>14}{'best round':>14}{'of the aim':>14}")
            for name, state in RUNS.items():
                page = browser.new_page()
                page.goto(url + state)
                settled(page)
                found = medians(page, args.rounds)
                best = min(found)
                print(f"{name:<28}{found[0] * 1000:>11.0f} ms{best * 1000:>11.0f} ms{best / AIM:>14.2f}")
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
