"""``--phases`` of search and whatif: the same numbers as the whole job of each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge_memory
from bridge_memory import RunSpec, estimate, find_gpu
from bridge_memory.cli import main
from bridge_memory.job.job import job_of

SCHEMAS = Path(bridge_memory.__file__).parent / "report"
H100 = find_gpu("H100")


def answer(capsys: pytest.CaptureFixture[str], schema: str, *argv: str) -> Any:
    assert main([*argv, "--gpu", "H100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    pytest.importorskip("jsonschema").validate(found, json.loads((SCHEMAS / f"{schema}.schema.json").read_text()))
    return found


def test_whatif_has_the_job_of_every_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Of Llama-3.1-8B on 8 GPUs a resume needs most; the precision-aware optimizer frees memory of the step and holds
    states twice, in fp32, while it resumes."""
    flags = ("meta-llama/Llama-3.1-8B", "--num-gpus", "8")
    found = answer(capsys, "whatif", "whatif", *flags, "--phases", "--top", "4")
    run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(world_size=8)
    for change in found["changes"]:
        job = job_of(estimate(run.with_fields(**change["fields"])), H100)
        assert change["job"]["driver_bytes"] == list(job.tightest.driver)
        assert (change["job"]["phase"], change["job"]["verdict"]) == (str(job.tightest.phase), str(job.verdict))
    assert "job" not in answer(capsys, "whatif", "whatif", *flags)["changes"][0]
    assert main(["whatif", *flags, "--gpu", "H100", "--phases", "--top", "2"]) == 0
    assert "job GiB" in capsys.readouterr().out


@pytest.mark.parametrize(("schema", "engine"), [("search", ()), ("torch_search", ("--engine", "fsdp2"))])
def test_search_has_the_job_of_its_first_rows(
    capsys: pytest.CaptureFixture[str], schema: str, engine: tuple[str, ...]
) -> None:
    flags = ("search", "meta-llama/Llama-3.2-1B", "--num-gpus", "2", "--global-batch-size", "8", *engine)
    found = answer(capsys, schema, *flags, "--phases", "--top", "2")
    assert [job["row"] for job in found["jobs"]] == [1, 2]
    assert all(job["driver_bytes"][0] <= job["driver_bytes"][1] for job in found["jobs"])
    assert "jobs" not in answer(capsys, schema, *flags)
    assert main([*flags, "--gpu", "H100", "--phases", "--top", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "row 1: Whole job" in text and "row 3: Whole job" not in text


@pytest.mark.parametrize("flag", ["--brief", "--emit=estimate"])
def test_phases_that_nothing_would_show_are_refused(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    argv = ["search", "meta-llama/Llama-3.2-1B", "--num-gpus", "1", "--global-batch-size", "2", "--gpu", "H100"]
    assert main([*argv, "--phases", flag]) == 2
    assert "--phases" in capsys.readouterr().err
