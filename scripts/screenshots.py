"""Make the pictures of the documents: references/report.png and page.png (the one-file report, and the page of
``bridge-memory serve``), and each in the dark and on a phone beside it.

    python scripts/screenshots.py [--folder references] [--chromium PATH] [--all]

Needs playwright and a Chromium (Debian: ``apt-get install chromium``; or ``playwright install chromium``). Without
``--all`` only what the documents show is written. Look at what was made.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bridge_memory.cli import main as bridge_memory  # noqa: E402
from bridge_memory.web.server import Server  # noqa: E402

COMMAND = (
    "estimate", "Qwen/Qwen3-235B-A22B", "--num-gpus", "256", "--tp", "4", "--pp", "8", "--ep", "8",
    "--num-layers-in-first-pipeline-stage", "11", "--num-layers-in-last-pipeline-stage", "11",
    "--global-batch-size", "256", "--gpu", "H100",
)  # fmt: skip
#: The same on the page.
STATE = (
    "#model=Qwen/Qwen3-235B-A22B&gpu=H100&num-gpus=256&tp=4&pp=8&ep=8&num-layers-in-first-pipeline-stage=11"
    "&num-layers-in-last-pipeline-stage=11&global-batch-size=256"
)
#: Chromium reaches for nothing.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Picture(NamedTuple):
    name: str
    width: int
    height: int
    scheme: str = "light"
    #: In the documents.
    shown: bool = False
    #: Of the page of ``serve``, not of the report.
    served: bool = False


PICTURES = (
    Picture("report.png", 1000, 1240, shown=True), Picture("report_dark.png", 1000, 1240, "dark"),
    Picture("report_phone.png", 390, 1900), Picture("report_phone_dark.png", 390, 1900, "dark"),
    Picture("page.png", 1280, 1250, shown=True, served=True), Picture("page_dark.png", 1280, 1250, "dark", served=True),
    Picture("page_phone.png", 390, 1900, served=True),
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pictures. Returns 1 where a page said something in its console."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "references")
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--all", action="store_true", help="also those that no document shows")
    args = parser.parse_args(argv)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("playwright is missing: pip install playwright", file=sys.stderr)
        return 2
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        code = bridge_memory([*COMMAND, "--output", str(report)])
        if code:
            return code
        browser = playwright.chromium.launch(executable_path=args.chromium, args=list(FLAGS))
        with Server("127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for picture in PICTURES:
                if picture.shown or args.all:
                    address = server.url + STATE if picture.served else report.as_uri()
                    _take(browser, address, picture, args.folder / picture.name, said)
            server.shutdown()
        browser.close()
    for words in said:
        print(words, file=sys.stderr)
    return 1 if said else 0


def _take(browser: Any, address: str, picture: Picture, target: Path, said: list[str]) -> None:
    page = browser.new_page(
        viewport={"width": picture.width, "height": picture.height}, color_scheme=picture.scheme,
        reduced_motion="reduce",
    )  # fmt: skip
    page.on("console", lambda message: said.append(f"{picture.name}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"{picture.name}: {error}"))
    page.goto(address)
    if picture.served:  # the last part that it draws
        page.wait_for_selector("#whatif table")
        page.wait_for_timeout(300)
    wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if wide > 0:
        said.append(f"{picture.name}: {wide} pixels wider than the window")
    page.screenshot(path=str(target))
    page.close()
    print(f"wrote {target}")


if __name__ == "__main__":
    sys.exit(main())
