"""The one-file report in a real browser: it draws, it obeys keys, it fetches nothing, it runs no name.

Needs the package playwright and a Chromium (``apt-get install chromium``); skipped without. Accessibility needs
axe-core's ``axe.min.js``, named by the variable AXE_CORE.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_browser import AXE, needs_axe, needs_browser
from report_runs import NAMES, result
from with_browser import serious

from bridge_memory import find_gpu
from bridge_memory.job.job import job_of
from bridge_memory.report.document import Bullets, Chart, Column, Grid, Words
from bridge_memory.report.page.one_file import Measured, blocks_page, estimate_page
from bridge_memory.report.phases import job_words
from bridge_memory.report.table import alike
from bridge_memory.verdict import fits

pytestmark = needs_browser
BAD = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>"\'&${1}`'


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


@needs_axe
@pytest.mark.parametrize(("name", "scheme"), [("one microbatch", "light"), ("uneven", "dark")])
def test_it_is_accessible(browser: Any, tmp_path: Path, name: str, scheme: str) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of(name), color_scheme=scheme)
    assert serious(tab.page) == []
    tab.done()


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
@pytest.mark.parametrize("gpu", ["H200", "T4"])
def test_phases_are_drawn(browser: Any, tmp_path: Path, width: int, scheme: str, gpu: str) -> None:
    answer = result("four stages")
    job = job_of(answer, find_gpu(gpu))
    context = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    page = estimate_page(answer, fits(answer, [gpu]), jobs=[job])
    tab = Tab(browser, tmp_path / "a.html", page, **context)
    assert tab.page.locator("#phases .bm-phases [role=img]").count() == len(job.phases) == 7
    assert job_words(job) in tab.page.inner_text("main")
    label = tab.page.locator("#phases .bm-card").bounding_box()
    assert label and label["x"] >= 0 and label["x"] + label["width"] <= width
    if Path(AXE).is_file():
        assert serious(tab.page) == []
    assert len(tab.page.pdf()) > 20_000
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


PLOT = {
    "x": {"title": "step", "unit": "s"}, "y": {"title": "peak", "unit": "GiB"},
    "series": [
        {"name": "some", "tone": "some", "line": "", "points": [[2.0, 70.0, BAD], [3.0, 60.0, "b"]]},
        {"name": "front", "tone": "predicted", "line": "steps", "dots": True,
         "points": [[1.0, 65.0, "c"], [4.0, 40.0]]},
    ],
}  # fmt: skip
LOGS = {**PLOT, "diagonal": True, "x": {"title": "measured", "log": True}, "y": {"title": "predicted", "log": True}}
NOTHING = {**PLOT, "series": [{"name": "none", "tone": "some", "line": "", "points": []}]}
ROWS = {"rows": [{"name": BAD, "predicted": 2**30, "measured": 2**31}, {"name": "b", "predicted": 0, "measured": None}]}


@pytest.mark.parametrize(("width", "scheme"), [(1100, "light"), (360, "dark")])
def test_charts_of_blocks(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    stages = {
        "stages": [{"stage": 0, "label": "0", "number": 1, "peak_bytes": 2**31, "peak_phase": "",
                    "parts": {"weights": 2**31}}],
        "measured": {"0": {"peak_bytes": 3 * 2**30}},
    }  # fmt: skip
    blocks = [Chart("a", "plot", PLOT), Chart("b", "plot", LOGS), Chart("c", "pairs", ROWS),
              Chart("d", "stages", stages), Chart("e", "plot", NOTHING)]  # fmt: skip
    context = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
    tab = Tab(browser, tmp_path / "a.html", blocks_page("charts", blocks), **context)
    drawn = tab.page.locator(".bm-here")
    assert drawn.nth(0).locator("circle.bm-dot").count() == 4 and drawn.nth(1).locator("circle.bm-dot").count() == 4
    assert drawn.nth(1).locator(".bm-limit").count() == 1
    assert drawn.nth(2).locator(".bm-pair-bar").all_inner_texts() == ["1.00 GiB", "2.00 GiB", "0.00 GiB"]
    assert drawn.nth(3).locator(".bm-found").count() == 1 and "measured 3.00 GiB" in str(
        drawn.nth(3).locator("[aria-label]").first.get_attribute("aria-label")
    )
    assert "nothing to draw" in drawn.nth(4).inner_text()
    chart = drawn.nth(0).locator("svg")
    chart.focus()
    tab.page.keyboard.press("Home")
    assert chart.get_attribute("aria-valuetext") == "front: peak 65 GiB, step 1 s; c"
    tab.page.keyboard.press("ArrowRight")
    assert BAD in str(chart.get_attribute("aria-valuetext")) and BAD in drawn.nth(0).locator(".bm-tip").inner_text()
    dot = drawn.nth(0).locator("g.bm-tone-predicted circle").nth(1).bounding_box()
    tab.page.mouse.move(dot["x"] + 3, dot["y"] + 3)
    assert "peak 40 GiB" in drawn.nth(0).locator(".bm-tip").inner_text()
    tab.done()


@needs_axe
def test_charts_of_blocks_are_accessible(browser: Any, tmp_path: Path) -> None:
    blocks = [Chart("a", "plot", PLOT), Chart("c", "pairs", ROWS)]
    tab = Tab(browser, tmp_path / "a.html", blocks_page("charts", blocks))
    assert serious(tab.page) == []
    tab.done()


def test_measured_lies_over_predicted(browser: Any, tmp_path: Path) -> None:
    answer = result("four stages")
    stages = {s.stage: (s.peak_bytes + 2**30, s.static_bytes) for s in answer.stages}
    measured = Measured(Words("", (BAD,), "good"), stages, [Chart("over time", "plot", PLOT)])
    tab = Tab(browser, tmp_path / "a.html", estimate_page(answer, measured=measured))
    assert tab.page.locator("#stages .bm-found").count() == len(alike(answer.stages))
    first = answer.peak_stage
    said = tab.page.locator("#timeline .bm-measured-text").all_text_contents()
    assert said == [
        f"measured peak {(first.peak_bytes + 2**30) / 2**30:.2f} GiB",
        f"measured between steps {first.static_bytes / 2**30:.2f} GiB",
    ]
    assert tab.page.locator(".bm-here circle.bm-dot").count() == 4
    assert BAD in tab.page.locator(".verdict.fits").inner_text()
    tab.done()


def test_a_page_is_read_again_by_itself(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", blocks_page("first", [Bullets("", ("x",))], refresh=1))
    (tmp_path / "a.html").write_text(blocks_page("second", [Bullets("", ("x",))]), encoding="utf-8")
    for _ in range(200):
        if tab.page.title() == "second":
            break
        tab.page.wait_for_timeout(50)
    assert tab.page.title() == "second"
    assert tab.complaints == [] and len(tab.asked) == 2
    tab.page.context.close()


def test_without_javascript_the_numbers_are_there(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("uneven"), java_script_enabled=False)
    assert tab.page.locator("#static-stages tbody tr").count() == len(result("uneven").stages)
    assert tab.page.locator("#components tr").count() > 10
    assert tab.page.locator("details").first.get_attribute("open") is not None


def test_it_prints(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, tmp_path / "a.html", page_of("four stages"))
    assert len(tab.page.pdf()) > 20_000
    tab.done()
