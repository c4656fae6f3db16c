"""``bridge-memory compare``: what a user has, predicted against measured, with an exit code for CI."""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.cli import compare, main
from bridge_memory.estimation import estimate
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.readers import resolve_model
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.report.page.one_file import MOST_BYTES
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec, SpecError

sys.path.insert(0, str(Path(__file__).parent))

from small_jobs import megatron_lm_args, small_container
from test_logs import megatron_lm_line
from test_snapshot import snapshot

GIB = 1 << 30
ARGS = """--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu
    --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --seq-length 4096
    --max-position-embeddings 4096 --vocab-size 32000 --bf16 --micro-batch-size 1 --global-batch-size 16
    --untie-embeddings-and-output-weights --pipeline-model-parallel-size 2 --use-distributed-optimizer"""


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return compare.run(parser.parse_args(argv))


def megatron_log(path: Path, excess: float) -> list[int]:
    """A log of 4 ranks on 2 stages whose peaks are ``excess`` (a share) over the prediction."""
    stages = estimate(run_from_megatron_args(ARGS, world_size=4)).stages
    lines = ["starting", *(
        megatron_lm_line(rank, 2, stages[rank // 2].static_bytes, int(stages[rank // 2].peak_bytes * (1 + excess)), 0)
        for rank in (0, 2)
    )]  # fmt: skip
    path.write_text("\n".join(lines))
    return [s.peak_bytes for s in stages]


def test_a_log_against_the_arguments_that_made_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    peaks = megatron_log(log, excess=0.04)
    given = (str(log), "--megatron-args", ARGS, "--num-gpus", "4")
    assert run(*given) == 0
    out = capsys.readouterr().out
    assert f"{peaks[0] / GIB:.2f}" in out
    assert "+3.8" in out  # of what was measured: 4/104
    assert run(*given, "--tolerance", "5") == 0
    assert run(*given, "--tolerance", "3") == 1
    capsys.readouterr()
    assert run(*given, "--tolerance", "3", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "bridge-memory/compare/2"
    assert document["beyond"] == [0, 1]
    assert [s["residual_bytes"] for s in document["stages"]] == [int(p * 1.04) - p for p in peaks]
    assert [s["worst_rank"] for s in document["stages"]] == [0, 2]
    assert [s["static_residual_bytes"] for s in document["stages"]] == [0, 0]


def test_a_model_and_flags_describe_a_bridge_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("[Rank 0] (after 10 iterations) memory (GB) | mem-allocated-gigabytes: 60.0 | "
                   "mem-max-allocated-gigabytes: 70.123")  # fmt: skip
    assert run(str(log), "meta-llama/Meta-Llama-3-8B", "--tp", "2", "--num-gpus", "2", "--json") == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    expected = estimate(
        RunSpec(
            model=resolve_model("meta-llama/Meta-Llama-3-8B"),
            parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2),
            batch=BatchSpec(seq_length=4096),
        )
    ).stages[0]
    assert stage["max_allocated_bytes"] == 70_123_000_000
    assert stage["predicted_peak_bytes"] == expected.peak_bytes


def test_our_json_lines_carry_their_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.jsonl"
    report = MemoryReport(
        path, emit=lambda text: None, read=lambda rank, stage: Reading(rank, stage, 10 * GIB, 20 * GIB)
    )
    state = SimpleNamespace(cfg=small_container(), train_state=SimpleNamespace(step=0))
    report.on_train_start(SimpleNamespace(state=state))
    for step in range(2):
        state.train_state.step = step
        report.on_train_step_end(SimpleNamespace(state=state, skipped_iter=False))
    report.on_train_end(SimpleNamespace(state=state))
    assert run(str(path), "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [s["max_allocated_bytes"] for s in stages] == [20 * GIB, None, None, None]
    assert all(s["predicted_peak_bytes"] > 0 for s in stages)
    assert run(str(path)) == 0
    assert "no figures of stages 1, 2, 3" in capsys.readouterr().out


def test_a_snapshot_by_component(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    assert run(str(path)) == 0
    out = capsys.readouterr().out
    assert "95.0 % of the peak" in out and "my_layer.py:10 mystery" in out
    assert run(str(path), "--megatron-args", ARGS, "--num-gpus", "4", "--json", "--tolerance", "1") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["snapshot"]["peak_bytes"] == 400 << 20
    assert document["beyond"] == [0]


@pytest.mark.parametrize(
    ("text", "argv", "message"),
    [
        ("nothing here", (), "holds no memory figures"),
        ("[Rank 0] memory (MB) | allocated: 1.0", (), "does not say what ran"),
        ("[Rank 0] memory (MB) | allocated: 1.0", ("--tolerance", "-1"), "tolerance is -1"),
        ('{"schema": "bridge-memory/live-1", "event": "run"}', (), "holds no report"),
        ('{"schema": "bridge-memory/live-1", "event": "report", "stages": [{}]}', (), "damaged report"),
        ("[Rank 9] memory (MB) | allocated: 1.0", ("--megatron-args", ARGS, "--num-gpus", "4"), r"rank \(9\)"),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(
    tmp_path: Path, text: str, argv: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "some.log"
    path.write_text(text)
    with pytest.raises(SpecError, match=message) as error:
        run(str(path), *argv)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        run(str(tmp_path / "none.log"))


def test_a_megatron_lm_log_says_itself_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The block of arguments in the log is enough; it is what ``get_args()`` has in a job."""
    args: dict[str, Any] = vars(megatron_lm_args())
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {k} {'.' * (48 - len(k))} {v}" for k, v in sorted(args.items())]
    lines += ["-------------------- end of arguments ---------------------"]
    lines.append(megatron_lm_line(0, 2, 10 * GIB, 20 * GIB, 0))
    path = tmp_path / "train.log"
    path.write_text("\n".join(lines))
    assert run(str(path), "--json") == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert stages[0]["max_allocated_bytes"] == 20 * GIB and stages[0]["predicted_peak_bytes"] > 0


# ---- as a page ----


def page_of(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """What the scripts of a page hold, by the ids of the elements."""
    target = tmp_path / "page.html"
    assert main(["compare", *argv, "--output", str(target), "--force"]) == 0
    text = target.read_text()
    assert len(text.encode()) <= MOST_BYTES
    held = re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', text, re.DOTALL)
    return {"text": text, **{name: json.loads(value) for name, value in held}}


def test_a_log_lies_over_the_stages_and_the_step(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    peaks = megatron_log(log, excess=0.04)
    page = page_of(tmp_path, str(log), "--megatron-args", ARGS, "--num-gpus", "4")
    assert {n: m["peak_bytes"] for n, m in page["data"]["measured"].items()} == {
        str(n): int(peak * 1.04) for n, peak in enumerate(peaks)
    }  # fmt: skip
    assert page["data"]["timelines"].keys() == page["data"]["measured"].keys()
    assert "3.8% too low" in page["text"] and "Predicted and measured, GiB" in page["text"]


def test_a_journal_alone_is_drawn_over_its_steps(tmp_path: Path) -> None:
    journal = tmp_path / "r.jsonl"
    report = MemoryReport(journal, run=RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1)),
                          every=1, emit=lambda text: None,
                          read=lambda *of: Reading(*of, GIB, 2 * GIB, 3 * GIB, 3 * GIB, 80 * GIB, 0))  # fmt: skip
    report.start()
    report.step()
    report.step()
    bars, steps = page_of(tmp_path, str(journal))["charts"]
    assert (bars["kind"], steps["kind"]) == ("stages", "plot")
    assert [point[:2] for point in steps["data"]["series"][0]["points"]] == [[0, 2.0], [1, 2.0], [2, 2.0]]
    whole = page_of(tmp_path, str(journal), "meta-llama/Llama-3.2-1B", "--num-gpus", "1")
    assert whole["data"]["measured"]["0"] == {"peak_bytes": 2 * GIB, "static_bytes": GIB}
    assert [chart["kind"] for chart in whole["charts"]] == ["plot"]


def test_a_snapshot_is_drawn_over_its_trace(tmp_path: Path) -> None:
    """400 MiB at the peak, 300 at the end: the hand count of ``test_snapshot.snapshot``."""
    file = tmp_path / "s.pickle"
    file.write_bytes(pickle.dumps(snapshot()))
    curve, parts = page_of(tmp_path, str(file))["charts"]
    points = [point[1] * 1024 for point in curve["data"]["series"][0]["points"]]
    assert max(points) == pytest.approx(400, abs=1e-3) and points[-1] == 300
    assert points[:2] == [pytest.approx(300), pytest.approx(330, abs=1e-3)]
    assert sum(row["measured"] for row in parts["data"]["rows"]) == pytest.approx(400 * 2**20, abs=1000)
    page = page_of(tmp_path, str(file), "meta-llama/Llama-3.2-1B", "--num-gpus", "1")
    assert page["data"]["measured"]["0"]["peak_bytes"] == pytest.approx(400 * 2**20, abs=1000)
    assert {s["name"] for s in page["charts"][0]["data"]["series"]} == {
        "measured", "predicted peak", "predicted between steps"
    }  # fmt: skip
    assert all(row["predicted"] is not None for row in page["charts"][1]["data"]["rows"])
