"""``sweep``: the cells of a question, and a table that is gone on with after whatever ended it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge_memory import BatchSpec, RunSpec, estimate, fits, search
from bridge_memory.cli import main
from bridge_memory.sweep import COLUMNS, Cell, cells_of, layout_words, left_to_do

SMALL = """models: [meta-llama/Llama-3.2-1B, meta-llama/Llama-3.1-70B]
gpus: [H100, L4]
num_gpus: [1, 2]
seq_lengths: 4096
global_batch_size: 16
tokens: 2e9
"""


@pytest.fixture
def question(tmp_path: Path) -> Path:
    path = tmp_path / "fleet.yaml"
    path.write_text(SMALL)
    return path


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_every_cell_has_the_first_row_of_its_search(question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(question), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cells"] == len(found["rows"]) == 8 and found["rows"] == _rows(question.with_suffix(".answers.csv"))
    for row in found["rows"]:
        run = RunSpec(model=row["model"], batch=BatchSpec(seq_length=4096))
        own = search(run, gpu=row["gpu"], num_gpus=int(row["num_gpus"]), global_batch_size=16)
        assert (row["verdict"] in ("fits", "tight")) == bool(own.rows)
        if own.rows:
            best = own.ranked(1).rows[0]
            assert float(row["peak_gib"]) == pytest.approx(best.peak / 2**30, abs=1e-3)
            assert row["verdict"] == str(fits(estimate(best.run), [row["gpu"]])[0].verdict)
            speed = 16 * 4096 / best.time.seconds / int(row["num_gpus"])
            assert float(row["gpu_hours"]) == pytest.approx(2e9 / speed / 3600, rel=0.01, abs=0.06)
    assert {"fits", "does not fit"} <= {row["verdict"] for row in found["rows"]}


def test_a_cell_says_all_that_its_layout_sets() -> None:
    """Split, dispatcher, offload and recomputation of Megatron's; what engines of PyTorch checkpoint and shard."""
    run = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
        world_size=16, pipeline_model_parallel_size=2, expert_model_parallel_size=8,
        num_layers_in_last_pipeline_stage=22, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep",
        recompute_granularity="selective", recompute_modules=("layernorm", "moe_act"),
        offload_modules=("attn_norm", "core_attn"),
    )  # fmt: skip
    assert layout_words(run) == (
        "pp2 ep8 mbs1 split=last_22 dispatcher=HybridEP offload=attn_norm+core_attn recompute=layernorm+moe_act"
    )
    sharded = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(
        engine="fsdp2", world_size=8, gradient_checkpointing=True, fsdp_offload_params=True
    )
    assert layout_words(sharded) == "mbs1 fsdp2 checkpointing=full+reentrant sharded=all offload=all"


def test_csv_asks_the_same_as_yaml(question: Path, tmp_path: Path) -> None:
    lines = ["model,gpu,num_gpus,seq_length,global_batch_size,tokens"]
    lines += [
        f"{model},{gpu},{n},4096,16,2000000000"
        for model in ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-70B") for gpu in ("H100", "L4") for n in (1, 2)
    ]  # fmt: skip
    other = tmp_path / "fleet.csv"
    other.write_text("\n".join([*lines, lines[-1]]) + "\n")
    assert cells_of(str(other)) == cells_of(str(question))


def test_a_killed_sweep_goes_on(question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL after the first answers, and half a line at the end, as a full disk leaves it."""
    table = question.with_suffix(".answers.csv")
    words = [sys.executable, "-m", "bridge_memory", "sweep", str(question)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if table.exists() and table.read_text().count("\n") > 1:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _rows(table)
    with table.open("a") as out:
        out.write("meta-llama/Llama-3.1-70B,L4")
    assert main(["sweep", str(question)]) == 0
    said = capsys.readouterr().out
    after = _rows(table)
    assert after[: len(before)] == before and len(after) == 8 and f"{len(before)} of them before" in said
    assert len({tuple(row[name] for name in Cell._fields) for row in after}) == 8
    assert not left_to_do(cells_of(str(question)), after)


def test_processes_answer_the_same(question: Path, tmp_path: Path) -> None:
    tables = [tmp_path / f"{jobs}.csv" for jobs in (1, 2)]
    for jobs, table in enumerate(tables, 1):
        assert main(["sweep", str(question), "--table", str(table), "--jobs", str(jobs)]) == 0
    assert tables[0].read_text() == tables[1].read_text()


def test_a_cell_that_is_refused_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("model,gpu,num_gpus,seq_length,global_batch_size,precision\n"
                    "Llama-9B,H100,8,4096,64,\nmeta-llama/Llama-3.2-1B,A100,2,4096,16,mxfp8\n"
                    "meta-llama/Llama-3.2-1B,H100,2,4096,16,\n")  # fmt: skip
    assert main(["sweep", str(path)]) == 0
    rows = _rows(path.with_suffix(".answers.csv"))
    assert [row["verdict"] for row in rows] == ["refused", "refused", "fits"]
    assert "Llama-9B" in rows[0]["reason"] and list(rows[0]) == list(COLUMNS)
    assert "refused: " in capsys.readouterr().out


def test_a_cell_without_a_layout_names_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text("model,gpu,num_gpus,seq_length,global_batch_size,engine\n"
                    "meta-llama/Llama-3.1-70B,L4,1,4096,16,ddp\nmeta-llama/Llama-3.1-70B,L4,1,4096,16,\n")
    assert main(["sweep", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("does not fit") == 2 and out.count(": ddp") == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "models: [a]\nbogus: 1\n", "'bogus'"),
        ("a.yaml", "models: [a]\n", "gpus is missing"),
        ("a.yaml", "- 1\n", "no mapping"),
        ("a.yaml", "models: [\n", "no YAML"),
        ("a.yaml", SMALL.replace("[1, 2]", "[2, x]"), "num_gpus ('x')"),
        ("a.yaml", SMALL.replace("tokens: 2e9", "tokens: -1"), "tokens (-1)"),
        ("a.yaml", SMALL.replace("global_batch_size: 16", ""), "global_batch_size is missing"),
        ("a.yaml", SMALL + "precisions: [fp7]\n", "precision ('fp7')"),
        ("a.csv", "model,card\nx,y\n", "column 'card'"),
        ("a.csv", "model,gpu,num_gpus,seq_length,global_batch_size\nx,H100,1.5,1,1\n", "line 2"),
        ("a.csv", "model,gpu,num_gpus,seq_length,global_batch_size\nx,H100,1,1,1,9\n", "line 2"),
        ("a.csv", "", "asks for nothing"),
    ],
)
def test_a_bad_question_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main(["sweep", str(path)]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == [name]


def test_a_table_of_something_else_stays(question: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = question.with_name("other.csv")
    for text in ("a,b\n1,2\n", "no table"):
        table.write_text(text)
        assert main(["sweep", str(question), "--table", str(table)]) == 2
        assert table.read_text() == text and "--table" in capsys.readouterr().err
