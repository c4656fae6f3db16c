"""``bridge-memory mcp`` as a client of the Model Context Protocol sees it: the package's own client, over stdio."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import ParallelSpec, RunSpec, peaks
from bridge_memory.cli import main
from bridge_memory.mcp_server.commands import MOST_SECONDS
from bridge_memory.processes import ENDS_WITH_STDIN

pytest.importorskip("mcp.server.mcpserver", reason="mcp 2 is not installed")
import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client, StdioServerParameters, stdio_client

Call = Callable[..., Any]
LLAMA = {"model": "meta-llama/Llama-3.1-8B", "num_gpus": 8, "tp": 2}


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as started:
        yield started


@pytest.fixture(scope="module")
def client(portal: BlockingPortal) -> Iterator[Client]:
    """A client whose server is a process of its own."""
    command = StdioServerParameters(command=sys.executable, args=["-m", "bridge_memory", "mcp"])
    with portal.wrap_async_context_manager(Client(stdio_client(command))) as connected:
        yield connected


@pytest.fixture
def called(portal: BlockingPortal, client: Client) -> Callable[..., Any]:
    """(tool, its arguments) -> its structured content, or the text of its error."""

    def call(tool: str, **arguments: Any) -> Any:
        result = portal.call(client.call_tool, tool, arguments)
        return result.content[0].text if result.is_error else result.structured_content

    return call


def test_five_tools_with_typed_arguments(portal: BlockingPortal, client: Client) -> None:
    tools = {tool.name: tool for tool in portal.call(client.list_tools).tools}
    assert set(tools) == {"estimate", "explain", "whatif", "search", "compare"}
    for tool in tools.values():
        assert tool.description and tool.output_schema is not None
    run = tools["estimate"].input_schema["$defs"]["Run"]["properties"]
    assert run["tp"]["anyOf"][0]["type"] == "integer"
    assert "fsdp2" in run["engine"]["anyOf"][0]["enum"]


def test_an_estimate_has_the_peaks_of_the_package(called: Call) -> None:
    found = called("estimate", run=LLAMA, gpu="H100")
    run = RunSpec(model=LLAMA["model"], parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2))
    assert [stage["peak_bytes"] for stage in found["stages"]] == [stage.peak_bytes for stage in peaks(run)]
    assert sum(c["bytes"] for c in found["largest_components"]) == found["peak"]["bytes"]
    assert found["verdict"]["answer"] == "fits"


def test_the_components_of_a_stage_add_up_to_its_peak(called: Call) -> None:
    found = called("explain", run={**LLAMA, "pp": 2}, stage=1)
    assert found["stage"]["stage"] == 1
    assert sum(c["bytes"] for c in found["stage"]["components"]) == found["stage"]["peak_bytes"]


def test_saved_tensors_are_named(called: Call) -> None:
    found = called("explain", run={**LLAMA, "num_layers": 1}, tensors=True)
    assert any("linear_fc1" in tensor["name"] for tensor in found["stage"]["tensors"])


def test_a_change_is_said_in_flags(called: Call) -> None:
    found = called("whatif", run=LLAMA, gpu="H100")
    assert ["--tp", "4"] in [change["flags"] for change in found["changes"]]


def test_a_search_keeps_the_sizes_that_are_given(called: Call) -> None:
    found = called("search", run={**LLAMA, "global_batch_size": 64}, gpu="H100", top=3)
    assert 0 < len(found["best"]) <= 3
    assert {row["tp"] for row in found["best"]} == {2}


LOG = """\
[Rank 0] (after 2 iterations) memory (MB) | allocated: 30000.0 | max allocated: 45000.0 | reserved: 47000.0 | max reserved: 47000.0
[Rank 1] (after 2 iterations) memory (MB) | allocated: 30000.0 | max allocated: 45000.0 | reserved: 47000.0 | max reserved: 47000.0
"""  # noqa: E501


@pytest.mark.parametrize("as_file", [False, True])
def test_a_log_is_compared_as_text_and_as_a_file(called: Call, tmp_path: Path, as_file: bool) -> None:
    path = tmp_path / "train.log"
    path.write_text(LOG)
    found = called("compare", measured=str(path) if as_file else LOG, run=LLAMA)
    assert found["stages"][0]["max_allocated_bytes"] == 45000 * 2**20


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("estimate", {"run": {**LLAMA, "tp": 3}}, "num_attention_heads"),
        ("estimate", {"run": {"model": "no-such-model-anywhere"}}, "no-such-model-anywhere"),
        ("estimate", {"run": LLAMA, "gpu": "H1000"}, "H1000"),
        ("search", {"run": {**LLAMA, "global_batch_size": 64}, "gpu": "H100", "vary": ["tpx"]}, "tpx"),
        ("explain", {"run": LLAMA, "stage": 7}, "stage"),
        ("compare", {"measured": "no such log"}, "no file"),
        ("compare", {"measured": "a log\nof something else\n", "run": LLAMA}, "measured"),
    ],
)  # fmt: skip
def test_a_refusal_is_the_commands_own(called: Call, tool: str, arguments: dict[str, Any], words: str) -> None:
    said = called(tool, **arguments)
    assert isinstance(said, str)
    assert words in said and "Traceback" not in said and "\n" not in said.strip()


def test_a_refusal_is_the_same_as_on_the_command_line(called: Call, capsys: pytest.CaptureFixture[str]) -> None:
    said = called("estimate", run={**LLAMA, "pp": 3})
    assert main(["estimate", LLAMA["model"], "--num-gpus", "8", "--tp", "2", "--pp", "3"]) == 2
    assert capsys.readouterr().err == f"bridge-memory: error: {said}\n"


@pytest.mark.parametrize("flag", ["--output=x.json", "--force", "--cache=.", "-vv", "-hv", "--format"])
def test_no_flag_writes_a_file(called: Call, flag: str) -> None:
    assert called("estimate", run={**LLAMA, "flags": [flag]}).startswith("flags (")


def test_a_model_is_no_flag(called: Call, tmp_path: Path) -> None:
    run = {"model": f"--output={tmp_path / 'x.json'}", "megatron_args": "--num-layers 2"}
    assert called("estimate", run=run).startswith("model ('--output=")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["a\0b", "x" * (1 << 18)])
def test_what_no_process_can_be_passed_is_refused(called: Call, model: str) -> None:
    said = called("estimate", run={"model": model})
    assert "cannot be passed to a process" in said and len(said) < 300


def test_a_command_ends_with_its_server() -> None:
    """However the server dies, the system closes the pipe that it held."""
    words = ["search", "deepseek-ai/DeepSeek-V3", "--num-gpus=2048", "--global-batch-size=8192", "--gpu=H200",
             "--exhaustive", "--json"]  # fmt: skip
    command, environ = [sys.executable, "-m", "bridge_memory", *words], {**os.environ, ENDS_WITH_STDIN: "1"}
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as child:  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=1)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=20) == -signal.SIGKILL


def test_an_unknown_or_mistyped_argument_is_refused_by_name(called: Call) -> None:
    assert "tensor_parallel" in called("estimate", run={**LLAMA, "tensor_parallel": 2})
    assert "tp" in called("estimate", run={**LLAMA, "tp": "two"})


def test_time_is_bounded(called: Call) -> None:
    run = {"model": "deepseek-ai/DeepSeek-V3", "num_gpus": 2048, "global_batch_size": 8192, "flags": ["--exhaustive"]}
    assert called("search", run=run, gpu="H100", timeout_seconds=1.0).startswith("timeout_seconds (1)")
    assert "timeout_seconds" in called("estimate", run=LLAMA, timeout_seconds=MOST_SECONDS + 1)


def test_two_are_answered_at_once(portal: BlockingPortal, client: Client) -> None:
    async def both() -> list[Any]:
        found: list[Any] = []

        async def one(tp: int) -> None:
            result = await client.call_tool("estimate", {"run": {**LLAMA, "tp": tp}})
            found.append(result.structured_content["parallelism"]["tensor_model_parallel_size"])

        async with anyio.create_task_group() as tasks:
            for tp in (1, 4):
                tasks.start_soon(one, tp)
        return sorted(found)

    assert portal.call(both) == [1, 4]


def test_the_command_names_its_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mcp", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["tools"]) == 5
