"""The one-file report in a real browser: it draws, it obeys keys, it fetches nothing, it runs no name.

Needs the package playwright and a Chromium (``apt-get install chromium``); skipped without. Accessibility needs
axe-core's ``axe.min.js``, named by the variable AXE_CORE.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import NAMES, result

from bridge_memory.report.document import Bullets, Column, Grid
from bridge_memory.report.gpus import fits
from bridge_memory.report.page.one_file import blocks_page, estimate_page
from bridge_memory.report.table import alike

sync_api = pytest.importorskip("playwright.sync_api", reason="the browser's tests need `pip install playwright`")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
AXE = os.environ.get("AXE_CORE", "")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium; apt-get install chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update"]  # fmt: skip
BAD = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&${1}`'


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield one
        one.close()


class Tab:
    """A file in a page, and what it complained of and asked for."""

    def __init__(self, browser: Any, file: Path, text: str, **context: Any) -> None:
        file.write_text(text, encoding="utf-8")
        self.page = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **context}).new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def done(self) -> None:
        assert self.complaints == [] and len(self.asked) == 1
        assert self.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        self.page.context.close()


def page_of(name: str, **more: Any) -> str:
    return estimate_page(result(name), fits(result(name), ["H100"]), flags="bridge-memory estimate ...", **more)


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [*((name, 1100, "light") for name in NAMES), ("uneven", 1100, "dark"), ("one microbatch", 360, "dark")],
)
def test_it_draws(browser: Any, tmp_path: Path, name: str, width: int, scheme: str) -> None:
    context = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    tab = Tab(browser, tmp_path / "a.html", page_of(name), **context)
    answer = result(name)
    assert tab.page.locator("#stages button").count() == len(alike(answer.stages))
    assert tab.page.locator("#timeline svg polygon").count() >= 3
    assert tab.page.locator("#treemap svg g.bm-depth-0").count() >= 3
    peak = f"{answer.peak_stage.peak_bytes / 2**30:,.2f} GiB"
    assert f"peak {peak}" in tab.page.locator("#timeline svg .bm-peak-text").text_content()
    tab.done()


@pytest.mark.skipif(not AXE, reason="AXE_CORE names no axe.min.js")
@pytest.mark.parametrize(("name", "scheme"), [("one microbatch", "light"), ("uneven", "dark")])
def test_it_is_accessible(browser: Any, tmp_path: Path, name: str, scheme: str) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of(name), color_scheme=scheme)
    tab.page.evaluate(Path(AXE).read_text())
    found = tab.page.evaluate("axe.run().then((r) => r.violations.map((v) => [v.id, v.impact, v.nodes[0].html]))")
    assert [v for v in found if v[1] in ("serious", "critical")] == []
    tab.done()


def test_keys_move_and_zoom(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("virtual stages"))
    chart = tab.page.locator("#timeline svg")
    chart.focus()

    def said() -> str:
        return str(tab.page.locator("#timeline svg").get_attribute("aria-valuetext"))

    at_peak = said()
    tab.page.keyboard.press("ArrowRight")
    assert said() != at_peak
    tab.page.keyboard.press("p")
    assert said() == at_peak and "GiB: " in at_peak
    tab.page.keyboard.press("Home")
    assert "start of the step" in said()
    tab.page.keyboard.press("End")
    assert "optimizer step" in said()
    for _ in range(6):
        tab.page.keyboard.press("+")
    tab.page.keyboard.press("ArrowLeft")
    assert tab.page.evaluate("document.activeElement.tagName.toLowerCase()") == "svg"
    cell = tab.page.locator("#treemap g[role=button]").first
    cell.focus()
    tab.page.keyboard.press("Enter")
    assert tab.page.locator("#treemap nav button").count() == 1
    tab.page.keyboard.press("Escape")
    assert tab.page.locator("#treemap nav button").count() == 0
    tab.done()


def test_another_stage_is_shown_by_a_click(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("sixteen stages"))
    tab.page.locator("#stages button").nth(3).click()
    assert tab.page.locator("h2 .of-stage").first.text_content() == "stage 3"
    assert tab.page.locator("#stages button[aria-pressed=true]").count() == 1
    peak = f"{result('sixteen stages').stages[3].peak_bytes / 2**30:.2f} GiB"
    assert peak in tab.page.locator("#timeline").text_content()
    tab.done()


def test_a_search_finds_components_and_tensors(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("uneven"))
    rows = tab.page.locator("#components tr")
    before = rows.count()
    tab.page.fill("#search", "router assumed")
    assert 0 < rows.count() < before
    tab.page.fill("#search", "linear_fc1.weight")
    assert rows.count() > 0
    tab.page.fill("#search", "<b>nothing")
    assert rows.count() == 0 and "0 of " in tab.page.locator("#found").text_content()
    tab.page.fill("#search", "")
    assert rows.count() == before
    tab.done()


def test_names_are_text(browser: Any, tmp_path: Path) -> None:
    answer = result("four stages")
    answer = replace(
        answer, run=answer.run.with_(model=replace(answer.run.model, name=BAD)), assumptions=(BAD,), not_modelled=(BAD,)
    )
    tab = Tab(browser, tmp_path / "a.html", estimate_page(answer, fits(answer, ["H100"]), flags=BAD, fix=BAD))
    assert tab.page.locator("h1").text_content() == BAD and tab.page.title().startswith(BAD)
    assert tab.page.locator("img").count() == 0
    tab.done()
    blocks = [Grid(BAD, (Column(BAD, words=True),), ((BAD,),), notes=(BAD,)), Bullets(BAD, (BAD,))]
    tab = Tab(browser, tmp_path / "b.html", blocks_page(BAD, blocks, BAD, BAD))
    assert tab.page.locator("td").text_content() == BAD and tab.page.locator("img").count() == 0
    tab.page.click("#theme")
    assert tab.page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab.done()


def test_without_javascript_the_numbers_are_there(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("uneven"), java_script_enabled=False)
    assert tab.page.locator("#static-stages tbody tr").count() == len(result("uneven").stages)
    assert tab.page.locator("#components tr").count() > 10
    assert tab.page.locator("details").first.get_attribute("open") is not None


def test_it_prints(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("four stages"))
    assert len(tab.page.pdf()) > 20_000
    tab.done()
