"""The page of ``bridge-memory serve`` in a real browser.

Needs the package playwright and a Chromium (``apt-get install chromium``); skipped without. Accessibility needs
axe-core's ``axe.min.js``, named by the variable AXE_CORE.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from in_browser import needs_axe, needs_browser
from with_browser import serious, server, settled, start_server

from bridge_memory import RunSpec, whole_job
from bridge_memory.web.options import options

pytestmark = needs_browser

QWEN = (
    "#model=Qwen/Qwen3-235B-A22B&gpu=H100&num-gpus=256&tp=4&pp=8&ep=8"
    "&account-for-embedding-in-pipeline-split=true&account-for-loss-in-pipeline-split=true"
)
QWEN_8B = RunSpec(model="Qwen/Qwen3-8B").with_fields(world_size=8, tensor_model_parallel_size=2)
LOG = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 2000.0 | reserved: 2100.0\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as at:
        yield at


class Tab:
    """A page, what it complained of and whom it asked."""

    def __init__(self, browser: Any, url: str, address: str = "", **context: Any) -> None:
        self.url = url
        self.context = browser.new_context(**{"viewport": {"width": 1300, "height": 900}, **context})
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url + address)
        self.settled()

    def _said(self, message: Any) -> None:
        # Chromium says of every answer that is no 2xx that it is none; refusals are.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def settled(self, seconds: float = 20.0) -> None:
        settled(self.page, seconds)

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "did not come about"
            self.page.wait_for_timeout(30)

    @property
    def heading(self) -> str:
        return str(self.page.inner_text("#verdict h2"))

    @property
    def fragment(self) -> dict[str, str]:
        words = self.page.evaluate("location.hash").removeprefix("#").split("&")
        return dict(word.split("=", 1) for word in words if "=" in word)

    @property
    def shown(self) -> Any:
        """The answer that is shown."""
        return self.page.evaluate("globalThis.page.shown.answer")

    def type(self, name: str, text: str) -> None:
        self.page.fill(f"#f-{name}", text)
        self.settled()


@pytest.fixture
def tab(browser: Any, url: str) -> Iterator[Callable[..., Tab]]:
    tabs: list[Tab] = []

    def new(address: str = "", **context: Any) -> Tab:
        tabs.append(Tab(browser, url, address, **context))
        return tabs[-1]

    yield new
    complaints = [line for one in tabs for line in one.complaints]
    for one in tabs:
        one.context.close()
    assert not complaints


# ---- what it shows ----


def test_the_first_page_has_an_answer_and_asks_nobody_else(tab: Callable[..., Tab], url: str) -> None:
    one = tab()
    assert one.heading.endswith("8 \u00d7 H100")
    for section in ("#stages", "#notes", "#stage svg", "#whatif table"):
        one.until(lambda section=section: one.page.is_visible(section))  # type: ignore[misc]
    assert {urlsplit(asked).netloc for asked in one.asked} == {urlsplit(url).netloc}


@pytest.mark.parametrize(("width", "scheme"), [(1300, "light"), (375, "dark")])
def test_the_phases_of_the_job_are_a_strip(tab: Callable[..., Tab], width: int, scheme: str) -> None:
    address = "#model=Qwen/Qwen3-8B&gpu=H100&num-gpus=8&tp=2"
    one = tab(address, color_scheme=scheme, viewport={"width": width, "height": 900})
    rows = one.page.locator("#phases .bm-phases [role=img]")
    one.until(lambda: rows.count() == 7)
    assert one.page.inner_text("#phases .line").startswith("Whole job: FITS H100: ")
    found = json.loads(json.dumps(whole_job(QWEN_8B, "H100").as_json()))
    for i, phase in enumerate(found["phases"]):
        said, gib = str(rows.nth(i).get_attribute("aria-label")), phase["driver_bytes"][1] / 2**30
        assert said.startswith(f"{phase['name']}: allocated ") and f"{gib:.1f} GiB; fits, " in said
        # Drawn up to the most, on the scale of its bar.
        bar, last = rows.nth(i).bounding_box(), rows.nth(i).locator(".bm-part").last.bounding_box()
        card = rows.nth(i).locator(".bm-capacity").bounding_box()
        assert bar and last and card
        end, full = last["x"] + last["width"] - bar["x"], card["x"] - bar["x"]
        assert end / full == pytest.approx(phase["driver_bytes"][1] / found["capacity_bytes"], abs=0.02)
    assert one.page.locator("#phases .bm-decides").count() == 1
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width


def test_phases_of_another_question_are_not_shown(tab: Callable[..., Tab]) -> None:
    """A late answer is dropped; a stage that is chosen asks nothing anew; a refusal dims them until it is undone."""
    one = tab("#model=Qwen/Qwen3-8B&gpu=H100&num-gpus=8&tp=2&pp=2")
    line, rows = one.page.locator("#phases .line"), one.page.locator("#phases .bm-phases [role=img]")
    one.until(lambda: rows.count() == 7)
    one.asked.clear()
    one.page.locator("#stages .row").nth(1).click()
    one.settled()
    one.until(lambda: any(asked.endswith("/api/whatif") for asked in one.asked))
    assert not [asked for asked in one.asked if asked.endswith("/api/phases")] and line.is_visible()
    before = line.inner_text()
    one.page.route("**/api/phases", lambda route: (time.sleep(0.5), route.continue_()))
    one.type("num-gpus", "16")
    one.until(lambda: any(asked.endswith("/api/phases") for asked in one.asked))
    assert one.page.get_attribute("#phases", "aria-busy") == "true"
    one.type("seq-length", "65536")
    one.until(lambda: "DOES NOT FIT" in line.inner_text())
    assert line.inner_text() != before and one.page.get_attribute("#phases", "aria-busy") is None
    one.type("tp", "3")
    assert one.page.evaluate("document.getElementById('phases').inert")
    one.page.click("#verdict >> text=Undo")
    one.settled()
    assert not one.page.evaluate("document.getElementById('phases').inert") and "DOES NOT FIT" in line.inner_text()


def test_the_head_is_the_whole_jobs_where_it_is_worse_than_its_step(tab: Callable[..., Tab]) -> None:
    """Also after another stage is chosen, which asks for no phases; the step's again where the step decides."""
    one = tab(
        "#model=meta-llama/Llama-3.1-70B&gpu=H100&num-gpus=64&tp=4&pp=2&global-batch-size=128"
        "&recompute-granularity=full&recompute-method=uniform&recompute-num-layers=1&megatron-core=0.18"
    )
    one.until(lambda: "Does not fit" in one.heading)
    words = one.page.inner_text("#verdict .answer")
    step = words.partition("the step alone: ")[2]
    assert words.startswith("Resume, driver peak") and step.startswith(("FITS H100", "TIGHT on H100"))
    assert "resume over by" in one.page.inner_text("#brief")
    one.page.locator("#stages .row").nth(1).click()
    one.settled()
    assert "Does not fit" in one.heading and one.page.inner_text("#verdict .answer") == words
    one.type("num-gpus", "128")
    one.type("pp", "4")
    one.until(lambda: one.page.get_attribute("#phases", "aria-busy") is None)
    assert "Fits" in one.heading and "Resume" not in one.page.inner_text("#verdict .answer")


def test_phases_that_are_refused_say_why_once(tab: Callable[..., Tab]) -> None:
    one = tab("#model=Qwen/Qwen3-8B&gpu=H100&num-gpus=8&tp=2")
    one.until(lambda: one.page.locator("#phases .bm-phases").count() == 1)
    refusal = {"field": None, "fields": [], "message": "it is too much", "fix": "", "changes": []}
    one.page.route("**/api/phases", lambda route: route.fulfill(status=503, json=refusal))
    one.type("num-gpus", "16")
    one.until(lambda: one.page.locator("#phases .error").count() == 1)
    assert one.page.inner_text("body").count("it is too much") == 1
    assert one.page.locator("#phases .bm-phases").count() == 0 and "16" in one.heading


def newcomer(one: Tab, model: str, gpus: str) -> None:
    """Chooses a model and a number of GPUs, lets the page find a layout, takes the first."""
    one.page.select_option("#f-model", model)
    one.type("num-gpus", gpus)
    assert "Does not fit" in one.heading
    one.page.click("text=Find a layout that fits")
    one.page.get_by_role("button", name="Use layout 1", exact=True).click(timeout=60_000)
    one.settled()
    assert one.shown["fit"]["verdict"] in ("fits", "tight")
    assert one.fragment["num-gpus"] == gpus


def test_a_newcomer_finds_a_layout(tab: Callable[..., Tab]) -> None:
    one = tab("#model=meta-llama/Llama-3.2-1B&num-gpus=1&tp=1")
    newcomer(one, "meta-llama/Llama-3.3-70B-Instruct", "32")


@pytest.mark.slow
def test_a_newcomer_answers_for_qwen3_235b_on_256_h100s_within_a_minute(tab: Callable[..., Tab]) -> None:
    one = tab()
    start = time.monotonic()
    newcomer(one, "Qwen/Qwen3-235B-A22B", "256")
    assert time.monotonic() - start < 60


def test_stages_are_chosen_and_drawn(tab: Callable[..., Tab]) -> None:
    one = tab(QWEN)
    assert one.page.get_by_role("radio").count() == 8
    one.page.get_by_role("radio", name="Stage 5").click()
    one.settled()
    one.until(lambda: one.page.locator("#stage h2").first.inner_text().startswith("Stage 5"))
    assert one.fragment["stage"] == "5" and one.shown["drawn"]["stage"] == 5


# ---- fields ----

_SAMPLES: dict[str, Any] = {"integer": "2", "number": "0.5", "text": "E", "release": "0.16", "names": "x"}


@pytest.mark.slow
def test_every_field_says_what_it_is_set_to_in_the_address_and_shows_it_again(tab: Callable[..., Tab]) -> None:
    one = tab("#model=Qwen/Qwen3-30B-A3B&num-gpus=16&tp=2")
    one.page.evaluate("for (const d of document.querySelectorAll('#form details')) d.open = true;")
    expected = {}
    for name, option in options().items():
        one.page.evaluate(
            "(id) => { for (let e = document.getElementById(id); e; e = e.parentElement) e.hidden = false; }",
            f"f-{name}",
        )
        field = one.page.locator(f"#f-{name}")
        assert field.count() == 1, name
        if option.kind == "switch":
            value = "off" if option.default is True else "on"
            field.select_option(value)
            expected[name] = {"on": "true", "off": "false"}[value]
        elif option.kind == "choice":
            value = next(choice for choice in option.choices if choice != option.default)
            field.select_option(value)
            expected[name] = value
        elif option.kind == "names" and option.choices:
            field.locator("input").first.check()
            first = field.locator("input").first.get_attribute("value")
            assert first in one.fragment[name].split(",")
            expected[name] = one.fragment[name]
        else:
            field.fill(_SAMPLES[option.kind])
            expected[name] = _SAMPLES[option.kind]
        assert one.fragment.get(name) == expected[name], name
    one.settled()
    found = one.fragment
    one.page.reload()
    one.settled()
    assert one.fragment == found
    for name, option in options().items():
        if name not in found:  # another one replaced it
            continue
        field = one.page.locator(f"#f-{name}")
        if option.kind == "names" and option.choices:
            checked = [box.get_attribute("value") for box in field.locator("input").all() if box.is_checked()]
            assert set(checked) == set(found[name].split(",")), name
        elif option.kind == "switch":
            assert field.input_value() == {"true": "on", "false": "off"}[found[name]], name
        else:
            assert field.input_value() == found[name], name


@pytest.mark.parametrize(
    ("name", "text"),
    [("tp", "3"), ("pp", "7"), ("ep", "3"), ("vpp", "5"), ("num-gpus", "200"), ("global-batch-size", "13"), ("tp", "x"),
     ("seq-length", "0"), ("micro-batch-size", "-1"), ("tp", "99999999999999999999")],
)  # fmt: skip
def test_an_illegal_value_is_explained_at_its_field_and_mended_by_a_click(
    tab: Callable[..., Tab], name: str, text: str
) -> None:
    one = tab(QWEN)
    one.type(name, text)
    field = one.page.locator(f"#f-{name}")
    assert field.get_attribute("aria-invalid") == "true"
    said = one.page.locator(f"#{field.get_attribute('aria-describedby')}")
    assert said.is_visible() and said.locator("p").inner_text()
    assert "cannot run" in one.heading
    message = said.locator("p").inner_text()
    assert one.page.inner_text("body").count(message) == 1  # once
    one.page.locator("#verdict button.fix").first.click()
    one.settled()
    assert any(word in one.heading for word in ("Fits", "fit", "Tight"))
    assert field.get_attribute("aria-invalid") is None and not said.is_visible()


def test_undo_takes_back_what_cannot_run(tab: Callable[..., Tab]) -> None:
    one = tab(QWEN)
    before = one.fragment
    one.type("tp", "3")
    one.page.locator("#verdict").get_by_role("button", name="Undo").click()
    one.settled()
    assert one.fragment == before and "Fits" in one.heading


def test_an_error_dims_the_last_answer_and_points_at_its_field(tab: Callable[..., Tab]) -> None:
    one = tab("#model=Qwen/Qwen3-8B&num-gpus=8&tp=2")
    one.until(lambda: one.page.is_visible("#stages .row"))
    one.type("tp", "3")
    assert one.page.is_visible("#stages .row")
    opacity = "getComputedStyle(document.getElementById('stages')).opacity"
    assert float(one.page.evaluate(opacity)) < 1
    one.page.locator("#verdict").get_by_role("button", name="Tensor").click()
    assert one.page.evaluate("document.activeElement.id") == "f-tp"
    one.type("tp", "4")
    assert float(one.page.evaluate(opacity)) == 1


@pytest.mark.parametrize("engine", ("fsdp1", "fsdp2", "ddp", "zero1", "zero2", "zero3", "megatron_fsdp"))
def test_an_engine_shows_its_fields_alone_and_what_carries_over_is_kept(tab: Callable[..., Tab], engine: str) -> None:
    """TP 2 and full recomputation are Megatron's: the first goes, the second is gradient checkpointing elsewhere."""
    one = tab(
        "#model=meta-llama/Llama-3.1-8B&num-gpus=8&tp=2&pp=2&seq-length=2048&recompute-granularity=full"
        "&recompute-method=uniform&recompute-num-layers=1"
    )
    one.page.select_option("#f-engine", engine)
    one.settled()
    assert "cannot run" not in one.heading, one.page.inner_text("#verdict")
    megatron = engine == "megatron_fsdp"
    assert one.fragment["seq-length"] == "2048" and ("tp" in one.fragment) == megatron
    assert one.page.is_visible("#f-tp") == one.page.is_visible("#f-recompute-granularity") == megatron
    assert one.page.is_visible("#f-gradient-checkpointing") != megatron
    assert megatron or one.fragment["gradient-checkpointing"] == "true"
    assert one.page.is_visible("#f-offload-param-device") == (engine == "zero3")
    one.page.select_option("#f-engine", "megatron_ddp")
    one.settled()
    assert "cannot run" not in one.heading and one.page.is_visible("#f-tp")
    assert one.fragment["recompute-granularity"] == "full" and "gradient-checkpointing" not in one.fragment


def test_a_model_is_found_by_its_organisation_or_a_word(tab: Callable[..., Tab]) -> None:
    one = tab()
    one.page.fill("#f-find", "deepseek")
    names = one.page.locator("#f-model option").all_inner_texts()
    assert any("DeepSeek-V3" in name for name in names) and not any("Qwen3-8B" in name for name in names)
    one.page.fill("#f-find", "qwen 235b")
    one.page.press("#f-find", "Enter")
    one.settled()
    assert one.fragment["model"] == "Qwen/Qwen3-235B-A22B"
    one.page.fill("#f-find", "")
    assert one.page.locator("#f-model option").count() > 50


def test_a_failure_that_is_dropped_says_why(tab: Callable[..., Tab]) -> None:
    one = tab("#model=meta-llama/Llama-3.1-70B&num-gpus=64&tp=8&pp=2")
    one.page.set_input_files("#f-file", str(Path(__file__).parents[2] / "examples" / "out_of_memory.log"))
    one.until(lambda: one.page.is_visible("#measured .why"))
    text = one.page.inner_text("#measured .why")
    assert "too large" in text and "expandable_segments:True" in text and "--" in text


def test_experts_sizes_are_asked_of_models_with_experts_only(tab: Callable[..., Tab]) -> None:
    one = tab("#model=Qwen/Qwen3-30B-A3B&num-gpus=16&tp=2&ep=4")
    assert one.page.is_visible("#f-ep")
    one.page.select_option("#f-model", "meta-llama/Llama-3.1-8B")
    one.settled()
    assert not one.page.is_visible("#f-ep") and "ep" not in one.fragment and "cannot run" not in one.heading


VISION = {
    "model_type": "qwen2_5_vl", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 32000, "vision_config": {
        "depth": 3, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 512,
        "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112,
        "fullatt_block_indexes": [1]},
}  # fmt: skip


def test_what_a_sample_gives_its_encoder_is_asked_of_models_with_one(tab: Callable[..., Tab]) -> None:
    one = tab("#num-gpus=1")
    assert not one.page.is_visible("#f-images-per-sample")
    one.page.select_option("#f-model", "\u0000pasted")
    one.page.fill("#f-config", json.dumps(VISION))
    one.settled()
    assert one.page.is_visible("#f-images-per-sample") and not one.page.is_visible("#f-audio-seconds")
    before = one.shown["fit"]["peak_bytes"]
    one.type("images-per-sample", "2")
    assert one.shown["fit"]["peak_bytes"] > before and one.page.inner_text("#media").startswith("2 images")
    one.type("image-size", "44")
    assert "cannot run" in one.heading and "WIDTHxHEIGHT" in one.page.inner_text("#e-image-size")
    one.page.select_option("#f-model", "meta-llama/Llama-3.2-1B")
    one.settled()
    assert "images-per-sample" not in one.fragment and "cannot run" not in one.heading


def test_recomputation_brings_what_it_needs(tab: Callable[..., Tab]) -> None:
    one = tab()
    peak = one.shown["fit"]["peak_bytes"]
    one.page.select_option("#f-recompute-granularity", "full")
    one.settled()
    assert one.shown["fit"]["peak_bytes"] < peak
    one.page.select_option("#f-recompute-granularity", "selective")
    one.settled()
    one.page.locator("#f-recompute-modules").get_by_label("mlp", exact=True).check()
    one.settled()
    assert "mlp" in one.fragment["recompute-modules"]


# ---- the address ----


def test_back_and_forward_go_through_the_changes(tab: Callable[..., Tab]) -> None:
    one = tab()
    one.page.select_option("#f-gpu", "H200")
    one.settled()
    one.page.select_option("#f-gpu", "B200")
    one.settled()
    one.type("tp", "4")
    for gpu, tp in (("B200", "2"), ("H200", "2"), ("H100", "2")):
        one.page.go_back()
        one.settled()
        assert (one.page.input_value("#f-gpu"), one.page.input_value("#f-tp")) == (gpu, tp)
        assert one.heading.endswith(gpu)
    for _ in range(3):
        one.page.go_forward()
        one.settled()
    assert (one.page.input_value("#f-gpu"), one.page.input_value("#f-tp")) == ("B200", "4")
    assert one.shown["estimate"]["parallelism"]["tensor_model_parallel_size"] == 4


def test_typing_a_number_is_one_step_back(tab: Callable[..., Tab]) -> None:
    one = tab()
    before = one.page.evaluate("history.length")
    one.page.click("#f-seq-length")
    one.page.keyboard.press("ControlOrMeta+a")
    one.page.keyboard.type("16384")
    one.settled()
    assert one.page.evaluate("history.length") == before + 1


def test_a_copied_link_is_the_same_page(tab: Callable[..., Tab], url: str) -> None:
    one = tab(QWEN)
    one.page.select_option("#f-recompute-granularity", "selective")
    one.page.locator("#f-recompute-modules").get_by_label("moe_act").check()
    one.type("seq-length", "8192")
    one.page.click("#share")
    link = one.page.evaluate("navigator.clipboard.readText()")
    assert link.startswith(url)
    other = tab(link.removeprefix(url))
    assert other.fragment == one.fragment and other.heading == one.heading
    assert other.shown["estimate"]["stages"] == one.shown["estimate"]["stages"]


@pytest.mark.parametrize("address", ["#", "#x", "#=&&=", "#tp=%E0%A4%A", "#model=<img src=x onerror=alert(1)>",
                                     "#config=!!!", "#tp=1&tp=2&tp=4", "#vs=%23model%3Dx", "#stage=99",
                                     "#__proto__=1&constructor=2"])  # fmt: skip
def test_a_damaged_link_leaves_a_page_that_works(tab: Callable[..., Tab], address: str) -> None:
    one = tab(address)
    one.page.select_option("#f-model", "meta-llama/Llama-3.2-1B")
    one.type("tp", "1")
    one.type("num-gpus", "8")
    assert "8 \u00d7 H100" in one.heading
    assert one.page.locator("img").count() == 1  # the page's own


# ---- without a mouse, in the dark, on a phone ----


def test_everything_is_reached_by_keyboard(tab: Callable[..., Tab]) -> None:
    one = tab(QWEN)
    keys = one.page.keyboard

    def focused() -> str:
        return str(one.page.evaluate("document.activeElement.id || document.activeElement.dataset.focus || ''"))

    def to(name: str) -> None:
        for _ in range(300):
            keys.press("Tab")
            if focused() == name:
                return
        raise AssertionError(f"{name} is not reached")

    one.page.evaluate("document.activeElement.blur()")
    keys.press("Tab")
    assert focused() == "skip" and one.page.is_visible("#skip")
    to("f-seq-length")
    keys.press("ArrowUp")
    one.settled()
    assert one.fragment["seq-length"] == "8192"
    to("find")
    to("stage-0")
    keys.press("ArrowDown")
    one.settled()
    assert one.fragment["stage"] == "1" and focused() == "stage-1"
    one.until(lambda: one.page.is_visible("#whatif table"))
    to("what-0")
    keys.press("Enter")
    one.settled()
    assert "recompute-granularity" in one.fragment  # what frees most of it
    one.page.evaluate("document.querySelector('#export summary').focus()")
    keys.press("Enter")
    assert one.page.is_visible("#export-items")
    keys.press("Escape")
    assert not one.page.is_visible("#export-items")
    # What has the focus is seen to have it.
    one.page.focus("#f-tp")
    assert one.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def _light(one: Tab) -> float:
    """How bright the page is, 0 to 1."""
    text = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    numbers = [float(n) for n in text[text.index("(") + 1 : -1].split(",")[:3]]
    return sum(numbers) / 765


def test_dark_colours_follow_the_system_and_the_button(tab: Callable[..., Tab]) -> None:
    dark, light = tab(color_scheme="dark"), tab(color_scheme="light")
    assert _light(dark) < 0.2 and _light(light) > 0.8
    light.page.click("#theme")
    assert _light(light) < 0.2
    light.page.reload()
    light.settled()
    assert _light(light) < 0.2 and light.page.get_attribute("#theme", "aria-pressed") == "true"


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_has_everything_and_nothing_beside_it(tab: Callable[..., Tab], width: int) -> None:
    one = tab(QWEN, viewport={"width": width, "height": 800})
    one.until(lambda: one.page.is_visible("#whatif table"))
    assert one.page.evaluate("document.documentElement.scrollWidth") <= width
    assert one.page.is_visible("#brief") and "256" in one.page.inner_text("#brief")
    one.page.click("#brief")
    one.page.wait_for_timeout(200)
    assert one.page.evaluate("document.getElementById('verdict').getBoundingClientRect().top") < 200
    one.page.get_by_role("button", name="Apply:").first.scroll_into_view_if_needed()
    box = one.page.get_by_role("button", name="Apply:").first.bounding_box()
    assert box is not None and box["x"] + box["width"] <= width


# ---- speed, and a server that goes away ----


def test_of_a_thousand_rapid_changes_the_last_is_shown(tab: Callable[..., Tab]) -> None:
    one = tab()
    one.asked.clear()
    one.page.evaluate(
        """async () => {
            const field = document.getElementById("f-seq-length");
            for (let i = 1; i <= 1000; i++) {
                field.value = String(1024 + 8 * i);
                field.dispatchEvent(new Event("input", { bubbles: true }));
                if (i % 20 === 0) await new Promise((resolve) => setTimeout(resolve, 1));
            }
        }"""
    )
    one.settled()
    assert one.shown["estimate"]["training"]["seq_length"] == 1024 + 8000
    assert one.fragment["seq-length"] == "9024" and one.page.input_value("#f-seq-length") == "9024"
    assert sum(asked.endswith("/api/estimate") for asked in one.asked) < 500


def test_a_slow_answer_does_not_replace_a_later_one(tab: Callable[..., Tab]) -> None:
    one = tab()
    slow = iter([1.0])

    def late(route: Any) -> None:
        time.sleep(next(slow, 0.0))
        route.continue_()

    one.page.route("**/api/estimate", late)
    one.page.evaluate(
        """() => { for (const [name, value] of [["tp", "4"], ["tp", "1"], ["tp", "8"]]) {
            const field = document.getElementById(`f-${name}`);
            field.value = value;
            field.dispatchEvent(new Event("input", { bubbles: true }));
        } }"""
    )
    one.settled()
    one.page.wait_for_timeout(300)
    assert one.shown["estimate"]["parallelism"]["tensor_model_parallel_size"] == 8


def test_a_server_that_is_killed_and_started_again_is_waited_for(browser: Any) -> None:
    process, at = start_server()
    one = Tab(browser, at)
    try:
        process.kill()
        process.wait()
        one.page.fill("#f-tp", "4")
        one.until(lambda: one.page.is_visible("#offline"))
        one.page.fill("#f-tp", "8")
        process, _ = start_server(urlsplit(at).port or 0)
        one.until(lambda: not one.page.is_visible("#offline"))
        one.settled()
        assert one.shown["estimate"]["parallelism"]["tensor_model_parallel_size"] == 8
    finally:
        process.kill()
        process.wait()
        one.context.close()


# ---- what is hostile ----


@pytest.mark.parametrize(
    "config",
    ["{", "[]", "null", '{"model_type": "<img src=x onerror=alert(1)>"}', "<script>alert(1)</script>", "[" * 50_000,
     '{"model_type": "llama", "hidden_size": -1}', '{"__proto__": {"polluted": 1}, "model_type": "llama"}'],
)  # fmt: skip
def test_a_hostile_config_is_refused_at_its_field(tab: Callable[..., Tab], config: str) -> None:
    one = tab()
    one.page.select_option("#f-model", label="Paste a configuration")
    one.page.fill("#f-config", config)
    one.settled()
    assert one.page.inner_text("#e-config") and one.page.get_attribute("#f-config", "aria-invalid") == "true"
    assert one.page.locator("img").count() == 1 and one.page.locator("main script").count() == 0
    assert one.page.evaluate("({}).polluted") is None


def test_a_pasted_config_is_answered_and_its_name_is_text(tab: Callable[..., Tab]) -> None:
    from bridge_memory.readers.presets import preset_path

    one = tab()
    one.page.select_option("#f-model", label="Paste a configuration")
    one.page.fill("#f-config", Path(preset_path("meta-llama/Llama-3.2-1B")).read_text())
    one.page.fill("#f-name", "<b>mine</b>")
    one.settled()
    assert one.shown["estimate"]["model"]["name"] == "<b>mine</b>" and "8 \u00d7 H100" in one.heading
    link = one.page.evaluate("location.hash")
    other = tab(link)
    assert other.shown["estimate"] == one.shown["estimate"]
    assert other.page.input_value("#f-name") == "<b>mine</b>"


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (390, "dark")])
def test_a_pasted_job_of_verl_is_a_timeline_of_phases(
    tab: Callable[..., Tab], tmp_path: Path, width: int, scheme: str
) -> None:
    """Chosen as a file, or pasted; the numbers are the command's, on the page and in the file it writes."""
    from bridge_memory import post_training
    from bridge_memory.cli import main

    file = Path(__file__).parents[2] / "examples/verl_qwen3_30b_a3b.yaml"
    job = post_training("verl", file, "H100")
    one = tab("", color_scheme=scheme, viewport={"width": width, "height": 900})
    if width > 1000:
        one.page.set_input_files("#f-file", str(file))
    else:
        one.page.select_option("#f-model", label="Paste a configuration")
        one.page.fill("#f-config", file.read_text())
    columns = one.page.locator("#rollout .bm-rl-column")
    one.until(lambda: columns.count() == len(job.phases))
    share = job.limits().share.safe
    assert f"Highest safe gpu_memory_utilization: {share:g} (" in one.page.inner_text("#verdict .answer")
    written = tmp_path / "job.html"
    assert main(["rollout", "--verl", str(file), "--gpu", "H100", "--output", str(written)]) == 0
    alone = one.context.new_page()
    alone.goto(written.as_uri())
    for page, place in ((one.page, "#rollout .bm-svg"), (alone, ".bm-here .bm-svg")):
        page.locator(place).focus()
        for phase in job.phases:
            page.keyboard.press("Home" if phase is job.phases[0] else "ArrowRight")
            said = str(page.get_attribute(place, "aria-valuetext"))
            assert said.startswith(f"{phase.phase}: trainer ")
            assert f"driver {phase.driver.least / 2**30:.1f}-{phase.driver.most / 2**30:.1f} GiB" in said
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not one.page.is_visible("#phases")


# ---- searches, files, two configurations, exports ----


def test_a_search_shows_how_far_it_is_and_stops(tab: Callable[..., Tab]) -> None:
    one = tab("#model=deepseek-ai/DeepSeek-V3&gpu=H100&num-gpus=2048&global-batch-size=16384")
    one.page.locator("[data-focus=find]").click()
    one.until(lambda: "evaluated" in one.page.inner_text("#search"))
    one.until(lambda: not one.page.inner_text("#search .progress").startswith("0 "), 60)
    one.page.click("text=Stop and show the layouts found")
    one.until(lambda: "topped" in one.page.inner_text("#search"))


def test_configurations_of_an_engine_are_searched_and_used(tab: Callable[..., Tab]) -> None:
    one = tab("#model=meta-llama/Llama-3.2-1B&gpu=H100&num-gpus=8&engine=zero3")
    one.page.locator("[data-focus=find]").click()
    one.page.wait_for_selector("#search tbody tr")
    assert "Sharded" in one.page.inner_text("#search thead") and "TP" not in one.page.inner_text("#search thead")
    free = one.page.inner_text("#search tbody tr:first-child td:nth-last-child(4)")
    one.page.locator("#search tbody tr:first-child button").click()
    one.settled()
    assert f"{one.shown['fit']['peak_bytes'] / 2**30:.1f}" == free and "global-batch-size" in one.fragment


def test_a_log_is_set_beside_the_prediction_chosen_or_dropped(tab: Callable[..., Tab], tmp_path: Path) -> None:
    one = tab("#model=meta-llama/Llama-3.2-1B&num-gpus=2&tp=2")
    log = tmp_path / "train.log"
    log.write_text(LOG)
    one.page.set_input_files("#f-file", str(log))
    one.until(lambda: one.page.is_visible("#measured table"))
    assert "1.95" in one.page.inner_text("#measured table")  # 2000 MB of 2**20
    one.until(lambda: one.page.locator("#stage .bm-measured").count() == 2)
    assert "measured peak 1.95 GiB" in one.page.locator("#stage .bm-measured-text").first.text_content()
    one.type("seq-length", "2048")  # another configuration than the one it was compared with
    one.until(lambda: one.page.locator("#stage .bm-measured").count() == 0)
    one.page.reload()
    one.settled()
    one.page.evaluate(
        """(text) => {
            const data = new DataTransfer();
            data.items.add(new File([text], "dropped.log"));
            const of = { bubbles: true, cancelable: true, dataTransfer: data };
            for (const kind of ["dragenter", "dragover", "drop"]) {
                document.body.dispatchEvent(new DragEvent(kind, of));
            }
        }""",
        LOG,
    )
    one.until(lambda: "dropped.log" in one.page.inner_text("#measured") and one.page.is_visible("#measured table"))
    one.page.set_input_files("#f-file", files=[{"name": "x.log", "mimeType": "text/plain", "buffer": b"nothing"}])
    one.until(lambda: "holds no memory figures" in one.page.inner_text("#measured"))


def test_two_configurations_stand_side_by_side(tab: Callable[..., Tab]) -> None:
    one = tab()
    one.page.click("text=Compare with another")
    one.settled()
    one.type("tp", "4")
    one.until(lambda: "--tp" in one.page.inner_text("#versus"))
    row = one.page.locator("#versus tr", has_text="--tp").locator("td").all_inner_texts()
    assert row == ["2", "4"]
    link = one.page.evaluate("location.hash")
    assert tab(link).page.locator("#versus tr", has_text="--tp").locator("td").all_inner_texts() == row
    one.page.click("text=Swap")
    one.settled()
    one.until(lambda: one.page.input_value("#f-tp") == "2")
    one.page.click("text=Unpin A")
    one.settled()
    one.until(lambda: not one.page.is_visible("#versus"))


def test_several_configurations_are_a_table_and_a_link(tab: Callable[..., Tab]) -> None:
    one = tab("#model=Qwen/Qwen3-8B&num-gpus=8&tp=1")
    for size in ("2", "4"):
        one.page.click("text=Compare with another")
        one.settled()
        one.type("tp", size)
    sizes = "#versus tr:has-text('--tp') td"
    one.until(lambda: one.page.locator(sizes).all_inner_texts() == ["1", "2", "4"])
    assert one.page.locator("#versus h2").inner_text().startswith("3 configurations")
    link = one.page.evaluate("location.hash")
    assert tab(link).page.locator(sizes).all_inner_texts() == ["1", "2", "4"]
    one.page.click("text=Copy as Markdown")
    text = one.page.evaluate("navigator.clipboard.readText()")
    assert "| --tp | 1 | 2 | 4 |" in text
    assert one.page.locator("#versus tbody tr").nth(1).locator("td").nth(0).inner_text() in text
    one.page.click("text=Swap with A")
    one.until(lambda: one.page.locator(sizes).all_inner_texts() == ["4", "2", "1"])
    one.page.click("text=Unpin B")
    one.until(lambda: one.page.locator(sizes).all_inner_texts() == ["4", "1"])


def test_one_click_makes_a_layout_fit(tab: Callable[..., Tab]) -> None:
    """By recomputation and offloading alone: its sizes stay."""
    one = tab("#model=Qwen/Qwen3-32B&gpu=H100&num-gpus=8&tp=8&seq-length=16384")
    assert "not fit" in one.heading
    one.page.click("text=Make this layout fit")
    one.until(lambda: "recompute-granularity" in one.fragment or "optimizer-cpu-offload" in one.fragment, 60)
    one.settled()
    assert "not fit" not in one.heading and "cannot" not in one.heading and one.fragment["tp"] == "8"
    assert "Changed:" in one.page.inner_text("#verdict")


def test_exports_say_what_the_page_says(tab: Callable[..., Tab]) -> None:
    one = tab(QWEN)
    one.page.click("#export summary")
    with one.page.expect_download() as download:
        one.page.click("text=Download JSON")
    assert json.loads(Path(download.value.path()).read_text()) == one.shown["estimate"]
    one.page.click("#export summary")
    with one.page.expect_download() as download:
        one.page.click("text=Download HTML report")
    text = Path(download.value.path()).read_text()
    assert text.lower().startswith("<!doctype html>") and "Qwen3-235B-A22B" in text
    for label, word in (
        ("Copy Markdown", "[This configuration](http://"), ("Copy the command", "bridge-memory estimate"),
        ("Copy Megatron-LM", "--tensor-model-parallel-size 4"),
        ("Copy Megatron Bridge", "cfg.model.tensor_model_parallel_size = 4"),
    ):  # fmt: skip
        one.page.click("#export summary")
        one.page.click(f"text={label}")
        one.until(lambda word=word: word in one.page.evaluate("navigator.clipboard.readText()"))  # type: ignore[misc]


def test_a_change_is_applied_by_one_click(tab: Callable[..., Tab]) -> None:
    one = tab(QWEN)
    one.until(lambda: one.page.is_visible("#whatif table"))
    promised = one.page.locator("#whatif tbody tr").first.locator("td").nth(1).inner_text()
    one.page.get_by_role("button", name="Apply:").first.click()
    one.settled()
    assert f"{one.shown['fit']['peak_bytes'] / 2**30:.1f}" == promised
    assert one.page.locator("#verdict .changed").inner_text().startswith("Changed: ")


def test_the_peak_the_margin_and_what_is_usable_add_up(tab: Callable[..., Tab]) -> None:
    """As printed, to the last digit."""
    one = tab("#model=meta-llama/Llama-3.1-70B&num-gpus=8&tp=8")
    facts = dict(zip(one.page.locator(".facts dt").all_inner_texts(), one.page.locator(".facts b").all_inner_texts(),
                     strict=True))  # fmt: skip
    gib = {name: Decimal(words.split()[0]) for name, words in facts.items() if words.endswith("GiB")}
    assert gib["Over by"] == gib["Peak"] + gib["Margin"] - gib["Usable"] > 0
    assert "one layout of many (TP 8" in one.page.inner_text("#verdict")


def test_a_layout_of_the_chart_is_used_by_a_click_and_undone(tab: Callable[..., Tab]) -> None:
    one = tab("#model=meta-llama/Llama-3.1-8B&gpu=H100&num-gpus=8&tp=1")
    address = one.page.evaluate("location.hash")
    one.page.evaluate("globalThis.page.searching.vary = ['tp', 'recompute']; globalThis.page.search()")
    one.until(lambda: one.page.is_visible("#search .chart svg"), 60)
    chart = one.page.locator("#search .chart svg")
    chart.focus()
    one.page.keyboard.press("End")  # the slowest, which is the smallest of the front
    least = float(str(chart.get_attribute("aria-valuetext")).split(" GiB")[0].split()[-1])
    one.page.keyboard.press("Enter")
    one.settled()
    assert one.shown["fit"]["peak_bytes"] / 2**30 == pytest.approx(least, abs=0.01)
    changed = one.page.locator("#verdict .changed")
    assert "\u2192" in changed.inner_text()
    changed.get_by_role("button", name="Undo").click()
    one.settled()
    assert one.page.evaluate("location.hash") == address and changed.count() == 0


# ---- accessibility ----


@needs_axe
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1300])
def test_axe_finds_nothing_serious(tab: Callable[..., Tab], scheme: str, width: int) -> None:
    one = tab(QWEN, color_scheme=scheme, viewport={"width": width, "height": 900})
    one.until(lambda: one.page.is_visible("#whatif table"))
    one.until(lambda: one.page.is_visible("#phases .bm-phases"))
    one.page.evaluate("for (const d of document.querySelectorAll('details:not(.menu)')) d.open = true;")
    _axe(one)
    one.page.evaluate("globalThis.page.pin()")
    one.type("tp", "3")
    _axe(one)
    one.page.locator("#verdict button.fix").first.click()
    one.settled()
    one.page.evaluate("globalThis.page.searching.vary = ['tp']; globalThis.page.search()")
    one.until(lambda: one.page.is_visible("#search table") or "No layout" in one.page.inner_text("#search"), 60)
    _axe(one)


@needs_axe
def test_axe_finds_nothing_serious_while_answers_are_computed(tab: Callable[..., Tab]) -> None:
    """The answers of the question before stay on the page, marked as busy."""
    one = tab(QWEN)
    one.until(lambda: one.page.is_visible("#phases .bm-phases"))
    one.page.evaluate("for (const part of document.querySelectorAll('#results, #phases')) part.ariaBusy = 'true'")
    assert "computing" in one.page.evaluate("getComputedStyle(document.querySelector('#phases h2'), '::after').content")
    _axe(one)


def _axe(one: Tab) -> None:
    one.page.wait_for_timeout(300)
    assert serious(one.page) == []
