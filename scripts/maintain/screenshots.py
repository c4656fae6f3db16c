"""Make the pictures of the documents: references/report.png and page.png (the one-file report, and the page of
``bridge-memory serve``), and each in the dark and on a phone beside it.

    python scripts/maintain/screenshots.py [--folder references] [--chromium PATH] [--all]

Needs playwright and a Chromium (Debian: ``apt-get install chromium``; or ``playwright install chromium``). Without
``--all`` only what the documents show is written. Look at what was made.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from with_browser import browser, missing  # noqa: E402

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
    parser.add_argument("--chromium", help="which one (default: that on the path)")
    parser.add_argument("--all", action="store_true", help="also those that no document shows")
    args = parser.parse_args(argv)
    if missing() and not args.chromium:
        print(missing(), file=sys.stderr)
        return 2
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder, browser(args.chromium) as one:
        report = Path(folder) / "report.html"
        code = bridge_memory([*COMMAND, "--output", str(report)])
        if code:
            return code
        with Server("127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for picture in PICTURES:
                if picture.shown or args.all:
                    address = server.url + STATE if picture.served else report.as_uri()
                    _take(one, address, picture, args.folder / picture.name, said)
            server.shutdown()
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
