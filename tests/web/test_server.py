"""``bridge-memory serve``: its API, and who and what it refuses."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import heeds_signals

from bridge_memory import whole_job
from bridge_memory.cli import main
from bridge_memory.job.job import job_of
from bridge_memory.spec.parts import ENGINES
from bridge_memory.web.api import Api
from bridge_memory.web.openapi import document
from bridge_memory.web.options import asked as parsed
from bridge_memory.web.options import options
from bridge_memory.web.server import MOST_JSON, Server, is_loopback

LLAMA: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "gpu": "H100", "options": {"num-gpus": 2, "tp": 2}}
QWEN: dict[str, Any] = {
    "model": "Qwen/Qwen3-235B-A22B", "gpu": "H100",
    "options": {"num-gpus": 256, "tp": 4, "pp": 8, "ep": 8, "account-for-embedding-in-pipeline-split": True,
                "account-for-loss-in-pipeline-split": True},
}  # fmt: skip
#: Experts, TP, EP and an even split over stages, at a third of its cost.
SMALLER: dict[str, Any] = {
    "model": "Qwen/Qwen3-30B-A3B", "gpu": "H100", "options": {**QWEN["options"], "num-gpus": 64, "pp": 2},
}  # fmt: skip
LOG = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 2000.0 | reserved: 2100.0\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("127.0.0.1", 0) as one:
        threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield one
        one.shutdown()


class Client:
    """One connection to the server, with whatever headers a test wants."""

    def __init__(self, server: Server) -> None:
        self.port = server.server_address[1]

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            answer = connection.getresponse()
            data = answer.read()
            is_json = answer.headers["Content-Type"] == "application/json" and data
            return answer.status, json.loads(data) if is_json else data, dict(answer.headers)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.ask("GET", path, headers=headers)[:2]

    def post(self, path: str, document: Any, **headers: str) -> tuple[int, Any]:
        more = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self.ask("POST", path, json.dumps(document).encode(), more)[:2]

    def file(self, data: bytes, question: Any = LLAMA, **more: Any) -> tuple[int, Any]:
        head = json.dumps({"question": question, "name": "train.log", **more}).encode()
        kind = {"Content-Type": "application/octet-stream"}
        return self.ask("POST", "/api/compare", head + b"\n" + data, kind)[:2]


@pytest.fixture
def client(server: Server) -> Client:
    return Client(server)


def valid(name: str, answer: Any) -> None:
    """``answer`` is what the OpenAPI document says."""
    jsonschema = pytest.importorskip("jsonschema")
    schemas = document()["components"]
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": schemas}).validate(answer)


def refused(status: int, answer: Any, *words: str) -> dict[str, Any]:
    """A refusal that the schema knows, and that says ``words``."""
    assert status >= 400
    valid("Refusal", answer)
    for word in words:
        assert word in answer["message"]
    return dict(answer)


# ---- answers ----


def test_an_estimate_is_what_the_command_prints(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = client.post("/api/estimate", LLAMA)
    assert status == 200
    valid("Answer", answer)
    assert main(["estimate", "Llama-3.2-1B", "--num-gpus", "2", "--tp", "2", "--gpu", "H100", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for key in ("model", "parallelism", "training", "stages", "peak", "assumptions", "not_modelled"):
        assert answer["estimate"][key] == printed[key]
    assert answer["fit"] == printed["fits"][0]


def test_the_exported_command_gives_the_same_numbers(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    chosen = {**QWEN["options"], "recompute-granularity": "selective", "recompute-modules": ["moe_act", "layernorm"],
              "seq-length": 8192, "grad-reduce-in-fp32": False, "global-batch-size": 1024}  # fmt: skip
    _, answer = client.post("/api/estimate", {**QWEN, "options": chosen})
    program, *words = shlex.split(answer["exports"]["command"])
    assert program == "bridge-memory" and main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stages"] == answer["estimate"]["stages"]


@pytest.mark.parametrize("question", [LLAMA, QWEN], ids=["one stage", "eight stages"])
def test_phases_are_those_of_the_whole_job(client: Client, question: dict[str, Any]) -> None:
    status, found = client.post("/api/phases", {**question, "stage": 0})
    assert status == 200
    valid("Page/$defs/job", found)
    job = whole_job(parsed(question).run, "H100").as_json()
    for drawn, phase in zip(found["phases"], job["phases"], strict=True):
        for key in ("name", "stage", "allocated_bytes", "reserved_bytes", "outside_bytes", "driver_bytes", "verdict"):
            assert drawn[key] == (list(phase[key]) if isinstance(phase[key], list) else phase[key])
    assert found["verdict"] == job["verdict"] and f"{job['gpu']}:" in found["words"]


def test_the_whole_job_answers_where_it_is_worse_than_its_step(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `estimate --phases` does, but for the fix, which the page asks for apart."""
    options = {"num-gpus": 64, "tp": 4, "pp": 2, "global-batch-size": 128, "recompute-granularity": "full",
               "recompute-method": "uniform", "recompute-num-layers": 1, "seq-length": 3072,
               "megatron-core": "0.18"}  # fmt: skip
    question = {"model": "meta-llama/Llama-3.1-70B", "gpu": "H100", "options": options}
    answer, found = client.post("/api/estimate", question)[1], client.post("/api/phases", question)[1]
    assert answer["fit"]["verdict"] == "fits" and found["verdict"] == "does not fit"
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["estimate", question["model"], *flags, "--gpu", "H100", "--phases", "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["verdict"]["words"]
    words = re.sub(r"; try first: [^;]*", "", words)
    assert words == f"{answer['whole']['words']}; the step alone: {answer['answer']}"
    assert answer["whole"]["verdict"] == found["verdict"]
    assert client.post("/api/estimate", LLAMA)[1]["whole"] is None


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_the_phases_of_every_engine_are_answered(client: Client, engine: str) -> None:
    options = {"engine": engine, "num-gpus": 1 if engine == "single" else 8}
    if engine == "megatron_fsdp":
        options["data-parallel-sharding-strategy"] = "optim_grads_params"
    status, found = client.post("/api/phases", {"model": "Qwen/Qwen3-8B", "gpu": "H100", "options": options})
    assert status == 200, found
    valid("Page/$defs/job", found)
    missing = any(note.startswith("not modelled") for note in found["notes"])
    assert missing == (len(found["phases"]) < 7)


def test_phases_are_refused_as_the_estimate_is(client: Client) -> None:
    for wrong in ({**LLAMA, "options": {"tp": 3}}, {**LLAMA, "gpu": "nonsense"}, [], {"model": "nonsense"}):
        estimate, phases = client.post("/api/estimate", wrong), client.post("/api/phases", wrong)
        refused(*phases)
        assert phases == estimate


def test_an_estimate_does_not_wait_for_all_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of a job an estimate has its turn."""
    api, answered = Api(), threading.Event()

    def ask() -> None:
        api.estimate(LLAMA)
        answered.set()

    def steps(result: Any, gpu: Any) -> Any:
        threading.Thread(target=ask, daemon=True).start()
        while not answered.is_set():
            yield
        return job_of(result, gpu)

    monkeypatch.setattr("bridge_memory.web.api.job_steps", steps)
    assert len(api.phases(LLAMA)["phases"]) == 7 and answered.is_set()


def test_every_option_of_the_command_line_is_offered(client: Client) -> None:
    from bridge_memory.arguments.flags import FLAGS, MODEL_FLAGS, PACKAGES

    status, answer = client.get("/api/options")
    assert status == 200
    valid("Options", answer)
    names = {option["name"] for option in answer["options"]}
    assert names == {
        *(flag.names.split()[0][2:] for flag in FLAGS), *(f[2:] for f in MODEL_FLAGS.values()),
        *(package[2:] for package in PACKAGES),
    }  # fmt: skip


def test_every_option_is_taken_and_refused_by_name(client: Client) -> None:
    """A value of the wrong kind for each of them: a refusal that names it, and no fault of the program."""
    for name, option in options().items():
        wrong = {"integer": "x", "number": "x", "switch": "x", "release": 3}.get(option.kind, [[]])
        status, answer = client.post("/api/estimate", {**LLAMA, "options": {**LLAMA["options"], name: wrong}})
        assert (status, answer["field"]) == (422, name), (name, answer)


def test_models_are_the_presets(client: Client) -> None:
    status, answer = client.get("/api/models")
    assert status == 200
    valid("Models", answer)
    assert {"Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.1-8B"} <= {model["name"] for model in answer}


def test_a_pasted_config_is_the_preset_of_it(client: Client) -> None:
    from bridge_memory.readers.presets import preset_path

    text = Path(preset_path("meta-llama/Llama-3.2-1B")).read_text()
    question = {"config": text, "name": "mine", "options": LLAMA["options"]}
    status, answer = client.post("/api/estimate", question)
    assert status == 200 and answer["estimate"]["model"]["name"] == "mine"
    assert answer["estimate"]["stages"] == client.post("/api/estimate", LLAMA)[1]["estimate"]["stages"]


def test_megatrons_arguments_are_read(client: Client) -> None:
    words = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
        "--micro-batch-size 1 --global-batch-size 8 --bf16 --vocab-size 1024 --tensor-model-parallel-size 2"
    )
    status, answer = client.post("/api/estimate", {"megatron_args": words, "options": {"num-gpus": 4}})
    assert status == 200 and answer["estimate"]["parallelism"]["tensor_model_parallel_size"] == 2


@pytest.mark.slow
def test_a_change_of_the_what_if_frees_what_it_says(client: Client) -> None:
    status, found = client.post("/api/whatif", QWEN)
    assert status == 200
    valid("WhatIf", found)
    assert found["changes"]
    for change in found["changes"]:
        asked = {n: v for n, v in {**QWEN["options"], **change["options"]}.items() if v is not None}
        status, answer = client.post("/api/estimate", {**QWEN, "options": asked})
        assert status == 200, answer
        assert answer["fit"]["peak_bytes"] == change["peak_bytes"] == found["peak_bytes"] - change["freed_bytes"]
        assert answer["fit"]["fits"] == change["fits"]


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"megatron_ddp", "megatron_fsdp"}))
def test_the_what_if_of_every_engine_is_answered(client: Client, engine: str) -> None:
    asked = {"engine": engine, "num-gpus": 1 if engine == "single" else 8}
    question: dict[str, Any] = {"model": "Qwen/Qwen3-8B", "gpu": "H100"}
    status, found = client.post("/api/whatif", {**question, "options": asked})
    assert status == 200 and found["changes"]
    for change in found["changes"]:
        assert change["words"]
        options = {**asked, **change["options"]}
        status, changed = client.post("/api/estimate", {**question, "options": options})
        assert status == 200 and changed["estimate"]["peak"]["bytes"] == change["peak_bytes"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tp": 3}, "tp"), ({"ep": 3}, "ep"), ({"pp": 3}, "pp"), ({"num-gpus": 200}, "num-gpus"),
        ({"recompute-granularity": "full"}, "recompute-granularity"), ({"engine": "megatron_fsdp"}, "engine"),
        ({"sequence-parallel": False}, "sequence-parallel"), ({"fp8-recipe": "mxfp8"}, "fp8-recipe"),
        ({"global-batch-size": 13}, "global-batch-size"), ({"precision": "int4"}, "precision"), ({"vpp": 4}, "vpp"),
        ({"account-for-loss-in-pipeline-split": None}, "account-for-embedding-in-pipeline-split"),
    ],
)  # fmt: skip
def test_a_refusal_names_its_field_and_every_change_that_it_offers_is_answered(
    client: Client, change: dict[str, Any], field: str
) -> None:
    given = {n: v for n, v in {**SMALLER["options"], **change}.items() if v is not None}
    answer = refused(*client.post("/api/estimate", {**SMALLER, "options": given}))
    assert field in answer["fields"] and answer["fix"] and answer["changes"]
    for offered in answer["changes"]:
        fixed = {n: v for n, v in {**given, **offered["options"]}.items() if v is not None}
        assert client.post("/api/estimate", {**SMALLER, "options": fixed})[0] == 200, offered


# ---- searches ----


def _ended(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    until = time.monotonic() + 120
    while job["state"] == "running" and time.monotonic() < until:
        time.sleep(0.1)
        status, job = client.get(f"/api/search/{job['id']}")
        assert status == 200
        valid("Job", job)
    return job


def test_a_report_as_markdown_is_that_of_the_command(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    status, answer = client.post("/api/report", LLAMA)
    assert status == 200
    assert main(["estimate", LLAMA["model"], "--gpu", "H100", "--num-gpus", "2", "--tp", "2", "--format", "md"]) == 0
    assert answer["markdown"] == capsys.readouterr().out


def test_a_search_finds_layouts_that_fit(client: Client) -> None:
    status, job = client.post("/api/search", {"question": LLAMA, "vary": ["tp", "mbs"], "top": 3})
    assert status == 202
    job = _ended(client, job)
    assert job["state"] == "done" and 0 < len(job["result"]["rows"]) <= 3
    for row in job["result"]["rows"]:
        chosen = {n: v for n, v in {**LLAMA["options"], **row["options"]}.items() if v is not None}
        status, answer = client.post("/api/estimate", {**LLAMA, "options": chosen})
        assert status == 200 and answer["fit"]["fits"] and answer["fit"]["peak_bytes"] == row["peak_bytes"]
        assert answer["step"]["seconds"] == pytest.approx(row["step_seconds"])


def test_a_search_under_an_engine_finds_what_the_estimate_says(client: Client) -> None:
    """FSDP2 is asked of, and every other engine that has times; options of one that another lacks are dropped."""
    question = {"model": "Qwen/Qwen3-8B", "options": {
        "num-gpus": 8, "engine": "fsdp2", "gradient-checkpointing": True, "fsdp-param-dtype": "bf16",
    }}  # fmt: skip
    vary = ["engine", "mbs", "checkpointing"]
    job = _ended(client, client.post("/api/search", {"question": question, "vary": vary, "top": 4})[1])
    assert job["state"] == "done" and len({row["engine"] for row in job["result"]["rows"]}) > 1
    for row in job["result"]["rows"]:
        chosen = {n: v for n, v in {**question["options"], **row["options"]}.items() if v is not None}
        status, answer = client.post("/api/estimate", {**question, "options": chosen})
        assert status == 200 and answer["fit"]["fits"] and answer["fit"]["peak_bytes"] == row["peak_bytes"]


@pytest.mark.parametrize(
    ("model", "options", "flags"),
    [
        ("meta-llama/Llama-3.2-1B", {"num-gpus": 4, "global-batch-size": 64}, "--num-gpus 4 --global-batch-size 64"),
        pytest.param(
            "openai/gpt-oss-20b", {"num-gpus": 8, "global-batch-size": 64}, "--num-gpus 8 --global-batch-size 64",
            marks=pytest.mark.slow,
        ),
        ("meta-llama/Llama-3.2-1B", {"num-gpus": 8, "global-batch-size": 64, "engine": "fsdp2"},
         "--num-gpus 8 --global-batch-size 64 --engine fsdp2"),
    ],
)  # fmt: skip
def test_a_search_is_that_of_the_command(
    client: Client, capsys: pytest.CaptureFixture[str], model: str, options: dict[str, Any], flags: str
) -> None:
    """The same question, with the axes that each varies by itself: the same rows."""
    question = {"model": model, "gpu": "H100", "options": options}
    found = _ended(client, client.post("/api/search", {"question": question, "top": 3})[1])["result"]
    assert main(["search", model, "--gpu", "H100", *flags.split(), "--top", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (found["looked_at"], found["fit"]) == (said["looked_at"], said["fit"])
    for here, there in zip(found["rows"], said["best"], strict=True):
        same = here.keys() & there.keys() - {"options"}
        assert {"peak_bytes", "step_seconds", "mbs"} <= same
        assert {name: here[name] for name in same} == {name: there[name] for name in same}


@pytest.mark.slow
def test_a_search_can_be_cancelled(client: Client) -> None:
    large = {"model": "deepseek-ai/DeepSeek-V3", "options": {"num-gpus": 2048, "global-batch-size": 16384}}
    status, job = client.post("/api/search", {"question": large})
    assert status == 202 and job["state"] == "running"
    until = time.monotonic() + 60
    while not job["progress"] and time.monotonic() < until:
        time.sleep(0.1)
        job = client.get(f"/api/search/{job['id']}")[1]
    assert job["progress"]["looked_at"] > 0
    status, job = client.post(f"/api/search/{job['id']}/cancel", {})
    assert status == 200
    job = _ended(client, job)
    assert job["state"] == "cancelled" and job["result"]["stopped"]


def test_wrong_searches_are_refused(client: Client) -> None:
    for asked, word in (
        ({}, "question"), ({"question": LLAMA, "vary": ["xx"]}, "vary"), ({"question": LLAMA, "top": 0}, "top"),
        ({"question": LLAMA, "vary": []}, "vary"), ([], "question"),
    ):  # fmt: skip
        refused(*client.post("/api/search", asked), word)
    job = _ended(client, client.post("/api/search", {"question": {**LLAMA, "gpu": "nonsense"}})[1])
    assert job["state"] == "refused" and "nonsense" in job["refused"]["message"]
    refused(*client.get("/api/search/nonsense"), "no such search")


# ---- files ----


def test_a_log_is_set_beside_the_prediction(client: Client) -> None:
    status, answer = client.file(LOG.encode())
    assert status == 200
    valid("Compared", answer)
    assert answer["measured"] == "train.log"
    stage = answer["stages"][0]
    assert stage["max_allocated_bytes"] == 2000 * 2**20
    predicted = client.post("/api/estimate", LLAMA)[1]["estimate"]["stages"][0]["peak_bytes"]
    assert stage["predicted_peak_bytes"] == predicted


def test_a_snapshot_is_read_and_code_in_it_is_not_run(client: Client, tmp_path: Path) -> None:
    block = {"address": 0, "size": 1 << 20, "requested_size": 1 << 20, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 0, "total_size": 1 << 20, "blocks": [block]}
    status, answer = client.file(pickle.dumps({"segments": [segment], "device_traces": []}, protocol=4))
    assert status == 200 and answer["snapshot"]["peak_bytes"] == 1 << 20

    witness = tmp_path / "witness"

    class Bad:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {witness}",)

    refused(*client.file(pickle.dumps(Bad(), protocol=4)))
    assert not witness.exists()


@pytest.mark.parametrize("data", [b"", b"\0" * 1000, b"no memory here", b"\x80\x04.", os.urandom(4096)])
def test_files_of_something_else_are_refused(client: Client, data: bytes) -> None:
    answer = refused(*client.file(data))
    assert "/tmp" not in answer["message"] and "bridge-memory-" not in answer["message"]


# ---- what is hostile ----


@pytest.mark.parametrize(
    "model",
    ["/etc/passwd", "../../etc/passwd", "file:///etc/passwd", "~/config.json", ".", "a/b", "a\0b/c", "x" * 100000,
     "https://example.com/x", "tests/data"],
)  # fmt: skip
def test_no_file_and_no_network_for_a_models_name(client: Client, model: str) -> None:
    answer = refused(*client.post("/api/estimate", {"model": model}))
    assert answer["field"] == "model" and len(answer["message"]) < 2000


def test_a_files_name_is_no_megatron_argument(client: Client, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128")
    refused(*client.post("/api/estimate", {"megatron_args": str(script), "options": {"num-gpus": 4}}))


@pytest.mark.parametrize(
    "config",
    ["", "{", "[]", "null", "1e999", "{}", '{"model_type": "nonsense"}', '{"model_type": ["llama"]}', "[" * 100000,
     '{"model_type": "llama", "hidden_size": -1}', '{"model_type": "llama", "hidden_size": 1e400}',
     '{"model_type": "llama", "num_hidden_layers": 999999999999}', '{"a": ' * 5000, '{"model_type": "<img src=x>"}',
     '{"__proto__": {"x": 1}, "model_type": "llama"}', "\ud800", "1" * 100000],
)  # fmt: skip
def test_hostile_configs_are_refused_in_one_line(client: Client, config: str) -> None:
    answer = refused(*client.post("/api/estimate", {"config": config, "options": {}}))
    assert "\n" not in answer["message"] and len(answer["message"]) < 2000


@pytest.mark.parametrize(
    "question",
    [None, 3, [], "x", {"model": 3}, {"model": ["x"]}, {"model": "Llama-3.1-8B", "options": []},
     {"model": "Llama-3.1-8B", "options": {"tp": 2**200}}, {"model": "Llama-3.1-8B", "options": {"tp": {"a": 1}}},
     {"model": "Llama-3.1-8B", "options": {"tp": 1e308}}, {"model": "Llama-3.1-8B", "options": {"nonsense": 1}},
     {"model": "Llama-3.1-8B", "gpu": 7}, {"model": "Llama-3.1-8B", "gpu": "../x"}, {"model": "Llama-3.1-8B", "x": 1},
     {"model": "Llama-3.1-8B", "config": "{}"}, {"model": "Llama-3.1-8B", "options": {"num-gpus": 2**24}},
     {"model": "Llama-3.1-8B", "options": {"seq-length": 2**28}}, {"model": "Llama-3.1-8B", "options": {"tp": True}},
     {"model": "Llama-3.1-8B", "options": {"recompute-modules": [[1]]}},
     {"model": "Llama-3.1-8B", "options": {"pipeline-model-parallel-layout": "|" * 10000}}],
)  # fmt: skip
def test_hostile_questions_are_refused(client: Client, question: Any) -> None:
    for path in ("/api/estimate", "/api/whatif"):
        answer = refused(*client.post(path, question))
        assert "fault of bridge-memory" not in answer["message"]


def test_another_name_for_this_machine_is_refused(client: Client) -> None:
    """DNS rebinding: a site's own name that points at 127.0.0.1."""
    others = ("evil.example", f"evil.example:{client.port}", "", "127.0.0.1.evil.example", "localhost.evil.example",
              "[::1")  # fmt: skip
    for host in others:
        for path in ("/", "/api/models", "/app.js"):
            refused(*client.get(path, Host=host), "Host")
        refused(*client.post("/api/estimate", LLAMA, Host=host), "Host")
    for host in (f"127.0.0.1:{client.port}", f"localhost:{client.port}", "localhost:9", "[::1]:8000", "LOCALHOST"):
        assert client.get("/api/health", Host=host)[0] == 200


def test_another_site_is_refused(client: Client) -> None:
    here = f"127.0.0.1:{client.port}"
    others = ("https://evil.example", "null", f"http://{here}.evil.example", "http://localhost:1", f"http://x@{here}:1")
    for origin in others:
        refused(*client.post("/api/estimate", LLAMA, Origin=origin), "Origin")
    assert client.post("/api/estimate", LLAMA, Origin=f"http://{here}")[0] == 200
    refused(*client.post("/api/estimate", LLAMA, Sec_Fetch_Site="cross-site"), "another site")
    # What a page may send without asking first (a form, a beacon) is no JSON.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        refused(*client.post("/api/estimate", LLAMA, Content_Type=kind), "application/json")
    _, _, headers = client.ask("OPTIONS", "/api/estimate")
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_every_answer_says_what_a_browser_may_do_with_it(client: Client) -> None:
    for path in ("/", "/app.js", "/style.css", "/api/options", "/nothing"):
        _, _, headers = client.ask("GET", path)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_bodies_have_a_limit(client: Client) -> None:
    refused(*client.post("/api/estimate", {"config": "x" * MOST_JSON}), "MiB")
    for length in ("-1", "1e3", "99999999999999999999", "0x10", "+3"):
        status, answer, _ = client.ask(
            "POST", "/api/estimate", headers={"Content-Length": length, "Content-Type": "application/json"}
        )
        refused(status, answer)


def _raw(port: int, data: bytes, seconds: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)  # nothing follows: no answer waits for more
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except (TimeoutError, ConnectionError):
            pass
        return found


@pytest.mark.parametrize(
    "data",
    [b"nonsense\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n",
     b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n",
     b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X-A: 1\r\n" * 200 + b"\r\n",
     b"POST /api/estimate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
     b"POST /api/estimate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
     b"DELETE / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_is_refused(client: Client, data: bytes) -> None:
    found = _raw(client.port, data)
    status = int(found.split(b" ", 2)[1]) if found.startswith(b"HTTP/") else 400
    assert status >= 400 and b"Traceback" not in found
    assert client.get("/api/health")[0] == 200


@pytest.mark.parametrize(
    "path", ["/../server.py", "/..%2fserver.py", "//etc/passwd", "/page/../__init__.py", "/%00", "/app.js/"]
)
def test_nothing_but_the_page_is_served(client: Client, path: str) -> None:
    assert client.get(path)[0] == 404


def test_a_connection_that_says_nothing_keeps_nobody_waiting(client: Client) -> None:
    silent = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(20)]
    try:
        start = time.monotonic()
        assert client.get("/api/health")[0] == 200
        assert time.monotonic() - start < 2
    finally:
        for one in silent:
            one.close()


@pytest.mark.slow
def test_many_at_once_are_each_answered_their_own_question(client: Client) -> None:
    lengths = [1024 + 128 * n for n in range(40)]

    def ask(length: int) -> int:
        question = {**LLAMA, "options": {**LLAMA["options"], "seq-length": length}}
        return int(client.post("/api/estimate", question)[1]["estimate"]["training"]["seq_length"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, lengths)) == lengths


# ---- the command ----


def started(*flags: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bridge_memory", "serve", "--port", "0", "--json", *flags], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=heeds_signals,
    )  # fmt: skip
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["url"]


def test_the_command_says_where_it_is_and_ends_at_ctrl_c() -> None:
    process, url = started()
    assert url.startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_another_host_is_warned_of() -> None:
    process, _ = started("--host", "0.0.0.0")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "warning: --host 0.0.0.0" in err
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0")


def test_a_port_that_is_taken_is_one_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for port in (str(server.server_address[1]), "70000", "-1"):
        assert main(["serve", "--port", port]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["serve", "--port", "0", "--host", "no.such.host.invalid"]) == 2


def test_it_runs_beside_nothing_of_the_hub(server: Server, client: Client) -> None:
    """Without --hub a Hub id is refused by name, and the page does not offer one."""
    assert client.get("/api/options")[1]["hub"] is False
    refused(*client.post("/api/estimate", {"model": "someone/something"}), "--hub")


def test_with_the_hub_a_models_id_is_fetched_and_never_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bridge_memory.readers import hub
    from bridge_memory.readers.presets import preset_path
    from bridge_memory.web.api import Api, Refused

    fetched: list[str] = []

    def fetch(repo: str, suggestions: str = "") -> str:
        fetched.append(repo)
        return preset_path("meta-llama/Llama-3.2-1B")

    monkeypatch.setattr(hub, "fetch_config", fetch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone").mkdir()
    (tmp_path / "someone" / "model").write_text("{}")
    answer = Api(hub=True).estimate({"model": "someone/model", "options": LLAMA["options"]})
    assert fetched == ["someone/model"] and answer["estimate"]["model"]["name"] == "someone/model"
    assert answer["exports"]["command"].startswith("bridge-memory estimate someone/model ")
    for path in ("/etc/passwd", "../x/y", "./x"):
        with pytest.raises(Refused):
            Api(hub=True).estimate({"model": path})
    assert fetched == ["someone/model"]


VERL = """actor_rollout_ref:
  actor:
    strategy: fsdp2
    ppo_micro_batch_size_per_gpu: 2
    fsdp_config: {model_dtype: fp32, dtype: bfloat16, fsdp_size: -1}
  model: {path: Qwen/Qwen3-8B, enable_gradient_checkpointing: true}
  rollout: {name: vllm, log_prob_micro_batch_size_per_gpu: 2}
data: {max_prompt_length: 1024, max_response_length: 3072}
trainer: {n_gpus_per_node: 8, nnodes: 1}
"""


def test_a_configuration_of_verl_is_pasted_and_changed_by_options() -> None:
    """The same number as the reader's run has; an option beside it takes the place of its value."""
    from bridge_memory import peaks
    from bridge_memory.readers.engines.files import table_of
    from bridge_memory.rollout.sources.verl import update_of_verl
    from bridge_memory.web.api import Api

    pytest.importorskip("yaml")
    run = update_of_verl(table_of(VERL, "verl.yaml"))
    for given, other in (({}, run), ({"micro-batch-size": 1}, run.with_fields(micro_batch_size=1))):
        found = Api().estimate({"config": VERL, "gpu": "H100", "options": given})
        assert found["fit"]["peak_bytes"] == max(stage.peak_bytes for stage in peaks(other))
    assert found["exports"]["command"] == ""


JOBS = {
    "verl": (Path(__file__).parents[2] / "examples/verl_qwen3_30b_a3b.yaml").read_text(),
    "slime": "--colocate --hf-checkpoint /m/Qwen/Qwen3-4B --actor-num-gpus-per-node 8 --rollout-max-response-len 4096 "
    "\\\n --rollout-batch-size 32 --tensor-model-parallel-size 2",
    "trl": '{"model_name_or_path": "Qwen/Qwen3-0.6B", "use_vllm": true, "per_device_train_batch_size": 2}',
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_pasted_post_training_job_is_that_of_python(client: Client, kind: str, tmp_path: Path) -> None:
    """Its document, and the words of the command; an option of the trainer beside it changes the trainer alone."""
    from bridge_memory import post_training
    from bridge_memory.report.rollout import answer_words, phase_table

    file = tmp_path / f"job.{'json' if kind == 'trl' else 'yaml'}"
    file.write_text(JOBS[kind])
    source, world = JOBS[kind] if kind == "slime" else file, 4 if kind == "trl" else None
    job = post_training(kind, source, "A100-80GB", world_size=world)
    question = {"config": JOBS[kind], "gpu": "A100-80GB", "options": {"num-gpus": 4} if kind == "trl" else {}}
    status, found = client.post("/api/rollout", question)
    assert status == 200
    valid("Rollout", found)
    ours = json.loads(json.dumps(job.as_json(job.limits())))
    assert {**found["rollout"], "assumptions": 0} == {**ours, "assumptions": 0}
    assert found["words"] == answer_words(job, job.limits())
    for drawn, row, phase in zip(found["chart"]["phases"], phase_table(job).rows, ours["phases"], strict=True):
        assert drawn["name"] == row[0] == phase["name"] and drawn["driver"] == row[-2]
        assert sum(drawn["parts"].values()) == drawn["driver_bytes"][0] == phase["driver_bytes"][0]
    update = client.post("/api/estimate", question)[1]
    assert update["rollout"] and update["estimate"]["peak"]["bytes"] == next(
        phase["trainer_allocated_bytes"][0] for phase in ours["phases"] if phase["name"] == "update"
    )


def test_no_file_is_read_for_a_pasted_job(client: Client, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for text in (JOBS["verl"].replace("Qwen/Qwen3-30B-A3B", str(tmp_path)),
                 JOBS["trl"].replace("Qwen/Qwen3-0.6B", str(tmp_path)),
                 JOBS["trl"].replace("{", f'{{"deepspeed": "{tmp_path}/config.json", ', 1)):  # fmt: skip
        refused(*client.post("/api/rollout", {"config": text}), str(tmp_path)[:20])
    refused(*client.post("/api/rollout", {"model": "Qwen/Qwen3-8B"}), "paste one")
    refused(*client.post("/api/rollout", {"config": JOBS["verl"], "options": {"num-gpus": 16}}), "change it there")


def test_a_log_of_a_pasted_job_is_set_beside_its_phases(client: Client) -> None:
    line = "After resume kv_cache, memory allocated (GB): 2.00, memory reserved (GB): 2.25, "
    line += "device memory used/total (GB): 60.00/79.11"
    status, found = client.file(line.encode(), {"config": JOBS["verl"], "gpu": "H100", "options": {}})
    assert status == 200
    valid("Compared", found)
    (one,) = found["log"]["lines"]
    phases = client.post("/api/rollout", {"config": JOBS["verl"], "gpu": "H100"})[1]["rollout"]["phases"]
    rollout = next(phase for phase in phases if phase["name"] == "rollout")
    assert one["measured"]["driver"] == 60 << 30 and one["predicted"]["driver"] == rollout["driver_bytes"]
    assert found["log"]["rows"][0][0] == "After resume kv_cache"
