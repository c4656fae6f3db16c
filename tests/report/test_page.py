"""What a page draws: numbers that are those of the estimate, drawn by JavaScript as Python counts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import NAMES, result

from bridge_memory import RunSpec, find_gpu, whole_job
from bridge_memory.job.job import Job, job_of
from bridge_memory.report.page.data import page_data
from bridge_memory.report.page.one_file import FOLDER, MOST_BYTES, estimate_page
from bridge_memory.report.phases import job_words
from bridge_memory.timeline import step_timeline
from bridge_memory.verdict import fits


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up(name: str) -> None:
    """Stages to their peaks, every node of a treemap to its parent, the highest point of a step to the peak."""
    answer = result(name)
    data = page_data(answer, fits(answer, ["H100"]))
    assert sum(stage["number"] for stage in data["stages"]) == len(answer.stages)
    for stage in data["stages"]:
        assert sum(stage["parts"].values()) == stage["peak_bytes"] == answer.stages[stage["stage"]].peak_bytes
        tree = data["treemaps"][str(stage["stage"])]
        assert tree["bytes"] == stage["peak_bytes"]
        nodes = [tree]
        while nodes:
            node = nodes.pop()
            if "children" in node:
                assert sum(child["bytes"] for child in node["children"]) == node["bytes"]
                nodes += node["children"]
        assert data["timelines"][str(stage["stage"])]["peak"]["bytes"] == stage["peak_bytes"]


def test_activations_are_told_tensor_by_tensor() -> None:
    """Every component of activations of these runs has its kinds of layers and their tensors."""
    for name in NAMES:
        for tree in page_data(result(name))["treemaps"].values():
            kept = [node for node in tree["children"] if node["role"] == "activation"]
            assert all(node["children"][0]["children"] for node in kept)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_javascript_makes_the_points_of_the_timeline(name: str, tmp_path: Path) -> None:
    answer = result(name)
    stage = answer.peak_stage.stage
    (tmp_path / "charts.mjs").write_text((Path(FOLDER) / "charts.js").read_text())
    timeline = page_data(answer, drawn=[stage])["timelines"][str(stage)]
    (tmp_path / "data.json").write_text(json.dumps(timeline))
    (tmp_path / "main.mjs").write_text(
        'import { expand } from "./charts.mjs"; import { readFileSync } from "node:fs";\n'
        'const all = expand(JSON.parse(readFileSync("data.json")));\n'
        "console.log(JSON.stringify(all.points.map((p) => [p.pass, p.step, p.activations, p.pipeline, p.gradients, "
        "p.passing, p.carried_over, p.total])));\n"
    )
    done = subprocess.run(["node", "main.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [list(point) for point in step_timeline(answer.run, stage).points()]


@pytest.mark.parametrize("name", NAMES)
def test_the_schema_knows_what_is_drawn(name: str) -> None:
    schema = json.loads((Path(FOLDER).parent / "page.schema.json").read_text())
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    answer = result(name)
    validator.validate(json.loads(json.dumps(page_data(answer, fits(answer, ["H100", "T4"]), flags="x"))))


@cache
def job_on(gpu: str, engine: str, stages: int) -> Job:
    sizes = {"world_size": 1 if engine == "single" else 8, "pipeline_model_parallel_size": stages}
    return whole_job(RunSpec(model="Qwen/Qwen3-8B").with_fields(engine=engine, **sizes), gpu)


@pytest.mark.parametrize("gpu", ["H100", "A100-40GB", "L40S"])
@pytest.mark.parametrize(("engine", "stages"), [("megatron_ddp", 1), ("megatron_ddp", 4), ("single", 1), ("zero3", 1)])
def test_the_schema_knows_the_phases_that_are_drawn(gpu: str, engine: str, stages: int) -> None:
    schema = json.loads((Path(FOLDER).parent / "page.schema.json").read_text())
    validator = pytest.importorskip("jsonschema").Draft202012Validator(schema)
    answer, job = result("one GPU"), job_on(gpu, engine, stages)
    data = json.loads(json.dumps(page_data(answer, fits(answer, [gpu]), jobs=[job])))
    validator.validate(data)
    found, said = data["job"], json.loads(json.dumps(job.as_json()))
    assert (found["verdict"], found["capacity_bytes"]) == (said["verdict"], said["capacity_bytes"])
    highest = max(phase["driver_bytes"][1] for phase in said["phases"])
    assert said["phases"][found["decides"]]["driver_bytes"][1] == highest
    for drawn, phase in zip(found["phases"], said["phases"], strict=True):
        keys = ("name", "stage", "allocated_bytes", "reserved_bytes", "outside_bytes", "driver_bytes", "verdict")
        assert [drawn[key] for key in keys] == [phase[key] for key in keys]
        assert len(drawn["cells"]) == len(found["columns"]) and drawn["room"] in drawn["cells"][-1]


@pytest.mark.parametrize("name", NAMES)
def test_one_file_with_phases_has_them_as_text_and_stays_small(name: str) -> None:
    """Without JavaScript too: the line, a row for each phase, and why others are missing."""
    answer, gpu = result(name), find_gpu("H200")
    job = job_of(answer, gpu)
    page = estimate_page(answer, fits(answer, ["H200"]), jobs=[job])
    assert len(page.encode()) <= MOST_BYTES
    assert job_words(job) in unescape(page)
    table = page[page.index('id="static-phases"') :].partition("</details>")[0]
    assert table.count("<tr") == 1 + len(job.phases)
    assert 'id="phases"' not in estimate_page(answer, fits(answer, ["H200"]))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.mark.parametrize("name", NAMES)
def test_one_file_is_small_and_fetches_nothing(name: str) -> None:
    answer = result(name)
    page = estimate_page(answer, fits(answer, ["H100", "B200"]), flags="bridge-memory estimate ...")
    assert len(page.encode()) <= MOST_BYTES
    parsed = _Page()
    parsed.feed(page)
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object"), tag
        assert not attributes.keys() & {"src", "srcset"}
        assert (attributes.get("href") or "#").startswith("#")
    assert "default-src 'none'" in page


def test_every_series_of_the_step_has_a_colour() -> None:
    """A series without a rule in the style sheet would be drawn black, with an empty swatch in the legend."""
    names = re.search(r"^const SERIES = (\[.*?\]);", (Path(FOLDER) / "charts.js").read_text(), re.MULTILINE)
    assert names is not None
    style = (Path(FOLDER) / "style.css").read_text()
    for name in json.loads(names[1]):
        assert f".bm-{name} {{ background: var(--bm-{name});" in style and f"--bm-{name}: #" in style, name


def test_hostile_names_stay_text() -> None:
    """A model's name is whatever a config.json says."""
    bad = '</script><script>alert(1)</script><img src=x onerror=alert(2)>"\'&\u2028'
    answer = result("one GPU")
    run = answer.run.with_(model=replace(answer.run.model, name=bad))
    answer = replace(answer, run=run, assumptions=(bad,), not_modelled=(bad,))
    page = estimate_page(answer, fits(answer, ["H100"]), flags=bad)
    parsed = _Page()
    parsed.feed(page)
    tags = [tag for tag, _ in parsed.tags]
    assert tags.count("script") == 2 and "img" not in tags
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held and json.loads(held[1])["title"] == bad
