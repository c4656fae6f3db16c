"""Files and arguments that nobody wrote for us: every one is refused in one line, at once, or read.

The time bounds are for a busy machine; what each of these cost before is in its docstring or beside it.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import calibration, files
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord, RunRecord, StageRecord
from bridge_memory.cli import main
from bridge_memory.comparison.logs import arguments_in, latest_of_each_rank
from bridge_memory.comparison.snapshot import at_peak, attribute, read_snapshot
from bridge_memory.readers import model_from_hf_config
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import LONGEST, bounded, listed

HUGE = "9" * 5000
DEEP = "[" * 100_000
MODEL = "Llama-3.1-8B"
MEGATRON = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128, "micro_batch_size": 1,
    "max_position_embeddings": 128, "bf16": True,
}  # fmt: skip
SECONDS = 20.0


@pytest.fixture(autouse=True)
def in_time() -> Any:
    """Of this process's CPU: other work on the machine does not count."""
    started = time.process_time()
    yield
    assert time.process_time() - started < SECONDS


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of at most 300 characters that a refusal prints."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out[:500], err[:500])
    assert err.startswith("bridge-memory: error: ") and err.count("\n") == 1 and len(err) <= 301
    return err


# ---- lines ----


def test_a_line_is_bounded_and_keeps_the_fix() -> None:
    message = str(SpecError(f"num_layers ({'9' * 4000}) is too large; give a number below 2**40"))
    assert len(message) <= LONGEST and "more characters" in message
    assert message.startswith("num_layers (999") and message.endswith("give a number below 2**40")
    assert bounded("short") == "short"
    for most in (60, 120, 300):
        for text in ("x" * 10**6, "; ".join(["words"] * 10**5), "x" * 10**4 + "; fix", "x; " + "y" * 10**4):
            assert most - 10 < len(bounded(text, most)) <= most
    assert bounded("x" * 10**4 + "; give " + "y" * 100, 300).endswith("; give " + "y" * 100)


def test_a_list_says_how_many_more_there_are() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"key{n}" for n in range(10**6)]).endswith(" and 999982 more")  # 18: 10 x 6 + 8 x 7 - 2 characters
    assert listed([]) == ""


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def test_any_value_can_be_shown() -> None:
    deep: Any = []
    for _ in range(10_000):
        deep = [deep]
    for value in (deep, 10**5000, Broken(), "x" * 10**6, float("nan"), {"a": deep}, b"\xff\n"):
        assert len(show(value)) <= 60 and show(value).isprintable()


def test_unknown_keys_are_counted() -> None:
    """A million of them once made a line of 30 MB."""
    config = {"model_type": "llama", **{f"expert_{n}": 1 for n in range(100_000)}}
    with pytest.raises(SpecError) as error:
        model_from_hf_config(config, "a config")
    assert len(str(error.value)) <= LONGEST


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "attention_dropout", "tie_word_embeddings"])
@pytest.mark.parametrize("negative", [True, False])
def test_a_number_of_thousands_of_digits_is_refused(field: str, negative: bool) -> None:
    config = json.loads(Path(_preset()).read_text()) | {field: -(10**5000) if negative else 10**5000}
    with pytest.raises(SpecError, match="bits") as error:
        model_from_hf_config(config, "a config")
    assert len(str(error.value)) <= LONGEST


def _preset() -> str:
    from bridge_memory.readers.presets import preset_path

    return str(preset_path("meta-llama/Llama-3.1-8B"))


# ---- the command line ----


@pytest.mark.parametrize("columns", [HUGE, "999999999", "-5", "\u0664", "0"])
def test_any_width_is_a_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["estimate", MODEL]) == 0
    assert len(capsys.readouterr().out) < 100_000


@pytest.mark.parametrize(
    "argv",
    [
        ["estimate", "x" * 100_000],
        ["estimate", MODEL, "--" + "x" * 100_000],
        ["estimate", MODEL, "--tp", HUGE],
        ["estimate", MODEL, "--gpu", "x" * 100_000],
        ["compare", "x" * 100_000],
        ["compare", "x", "--device", HUGE],
        ["x" * 100_000],
    ],
)
def test_long_words_make_no_long_lines(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    refused(capsys, *argv)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_fault_of_the_program(closed: str) -> None:
    command = f'exec "$0" -m bridge_memory estimate {MODEL} --tp 0 {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    command = f'exec "$0" -m bridge_memory estimate {MODEL} >&-'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "bridge-memory: error: standard output is closed; leave it open, or send it to a file\n"
    )  # fmt: skip


# ---- files ----


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs /dev/zero")
@pytest.mark.parametrize(
    "argv", [
        *([command, "/dev/zero"] for command in ("compare", "validate", "accuracy", "calculate")),
        *(["estimate", MODEL, flag, "/dev/zero"] for flag in ("--calibration", "--deepspeed", "--accelerate")),
    ],
)
def test_a_file_without_end_is_read_to_a_bound(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """Each once read until memory was full."""
    assert "larger than" in refused(capsys, *argv)


@pytest.mark.parametrize("name", ["none", ".", "a\0b", "x" * 5000])
def test_what_cannot_be_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    for argv in (["compare"], ["validate"], ["accuracy"], ["calculate"], ["estimate", MODEL, "--calibration"]):
        assert "cannot be read" in refused(capsys, *argv, str(tmp_path / name))


def test_files_are_read_within_their_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 9, 10):
        path.write_bytes(b"x" * size)
        assert len(files.read_bytes(path, "give another", 10)) == size
        assert len(files.read_bytes(path, "give another", most_after=lambda head: 10)) == size
    path.write_bytes(b"x" * 11)
    with pytest.raises(SpecError, match="larger than"):
        files.read_bytes(path, "give another", 10)
    with pytest.raises(SpecError, match="larger than"):
        files.read_bytes(path, "give another", most_after=lambda head: 10)


@pytest.mark.parametrize("failing", ["fsync", "replace", "chmod"])
def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Full disks and folders that forbid it: the old file stays, and there is no other."""
    path = tmp_path / "calibration.json"
    calibration.save(path, [])
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        calibration.save(path, [])
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"] and path.read_bytes() == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_is_no_regular_file_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A device of that name would be gone."""
    pipe, runs = tmp_path / "pipe", tmp_path / "runs.jsonl"
    os.mkfifo(pipe)
    runs.write_text("")
    assert "not a regular file" in refused(capsys, "accuracy", str(runs), "--json", str(pipe), "--force")
    with pytest.raises(SpecError, match="not a regular file"):
        calibration.save(pipe, [])
    assert pipe.is_fifo() and len(list(tmp_path.iterdir())) == 2


RESIDUAL: dict[str, Any] = {
    "model": "m", "config_digest": "00", "stage": 0, "component": "peak", "predicted_bytes": 1, "measured_bytes": 2,
    "versions": {}, "time": 0.0,
}  # fmt: skip


def test_a_calibration_is_what_its_fields_say(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    def write(entries: object) -> None:
        path.write_text(json.dumps({"schema": "bridge-memory/calibration-1", "residuals": entries}))

    write([RESIDUAL])
    assert main(["estimate", MODEL, "--calibration", str(path)]) == 0
    capsys.readouterr()
    wrong: dict[str, list[Any]] = {
        "config_digest": [[], {}, 3, None], "model": [[1]], "stage": ["0", 10**4000, float("inf"), True],
        "predicted_bytes": [float("inf"), float("nan"), 10**4000, "1"], "measured_bytes": [10**30],
        "versions": [[], {"a": []}], "time": [float("inf"), -1, 10**4000, "0", 1e18], "component": [{}],
    }  # fmt: skip
    for field, values in wrong.items():
        for value in values:
            write([RESIDUAL | {field: value}])
            assert "is not a calibration.json" in refused(capsys, "estimate", MODEL, "--calibration", str(path))
    for entries in ({}, 3, [3], [[]], None):
        write(entries)
        if entries != {}:
            refused(capsys, "estimate", MODEL, "--calibration", str(path))
    nested = '{"schema": "bridge-memory/calibration-1", "residuals": [{"model": ' + "[" * 900 + "]" * 900 + "}]}"
    for text in (nested, DEEP, "{\"a\":" * 100_000, HUGE, "\x00", "\udcff"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        refused(capsys, "estimate", MODEL, "--calibration", str(path))


# ---- logs and journals ----

LINE = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 100.0 | max allocated: 200.0\n"


@pytest.mark.parametrize(
    "line",
    [
        "[Rank 0] " * 200_000,  # more than 25 s
        "[Rank 0] " * 200_000 + "memory (MB) ",
        "[Rank 0] memory (MB)" * 100_000,
        "[Rank 0] memory (MB)" + " " * 1_000_000,
        "[Rank 0] memory (MB) |" + " " * 1_000_000,
        "[Rank 0] memory (MB) |" + "a " * 500_000,
        "[Rank 0] memory (MB) " + "| allocated" * 100_000,
        "[Rank 0] memory (MB) | allocated:" + " " * 1_000_000,
        "[Rank 0] (" + "after 1" * 200_000 + " memory (MB) | allocated: 1.0",
        "[Rank 0] memory (MB) | allocated: 1e999",
        "[Rank 0] memory (MB) | allocated: 1e300 | max allocated: 1e-5000",
        "[Rank 0] memory (GB) | mem-allocated-gigabytes: 1e999",
        "[Rank 0] memory (GB) | mem-allocated-gigabytes: -1",
        f"[Rank {HUGE}] memory (MB) | allocated: 1.0",
        f"[Rank 0] (after {HUGE} iterations) memory (MB) | allocated: 1.0",
        f"[Rank 0] memory (MB) | allocated: {HUGE}",
    ],
    ids=lambda line: f"{line[:40]}... {len(line)}",
)
def test_no_line_of_a_log_takes_long(line: str) -> None:
    """The line after it is read as ever."""
    found = [one for text in (line, LINE) for one in latest_of_each_rank([text])]
    assert (found[-1].rank, found[-1].allocated, found[-1].max_allocated) == (0, 100 << 20, 200 << 20)
    for rank in found:
        assert all(f is None or 0 <= f < 1 << 60 for f in (rank.allocated, rank.max_allocated))


def test_a_launchers_prefix_and_a_rank_before_it_are_read_as_before() -> None:
    (found,) = latest_of_each_rank(["0: 12:00 [default0]:[Rank 3] (after 7 iterations) memory (MB) | allocated: 1.5"])
    assert (found.rank, found.iteration, found.allocated) == (3, 7, 3 << 19)
    assert latest_of_each_rank(["memory (MB) | allocated: 1.5 [Rank 3]"]) == []


@pytest.mark.parametrize(
    "value",
    [" " * 200_000 + "x", "x" + " " * 200_000, "{[]: 1}", "1e999", HUGE, "(" * 5000, "-" * 5000 + "1",
     "[" * 150 + "]" * 150, "{1: 2}", "b'x'", "...", "9" * 4000, "1_000j"],
    ids=lambda value: f"{value[:10]}... {len(value)}",
)  # fmt: skip
@pytest.mark.parametrize("name", ["hidden_size", "rotary_percent", "window_size", "moe_layer_freq", "optimizer", "fp8"])
def test_no_argument_in_a_log_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, value: str
) -> None:
    """200,000 blanks once took more than 25 s."""
    lines = ["------------------------ arguments ------------------------"]
    block = {**MEGATRON, "vocab_size": 1000, "padded_vocab_size": 1024, "world_size": 1, "num_layers": 2, name: value}
    lines += [f"  {key} {'.' * 10} {told}" for key, told in block.items()]
    lines += ["-------------------- end of arguments ---------------------", LINE]
    assert arguments_in(lines) is not None
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    code = main(["compare", str(path)])
    err = capsys.readouterr().err
    assert code in (0, 2) and err.count("\n") == (code == 2) and len(err) <= 301


def stage(**changed: Any) -> dict[str, Any]:
    measured = dict(predicted_static=1 << 30, predicted_peak=2 << 30, allocated=1 << 30, max_allocated=2 << 30,
                    reserved=2 << 30, worst_rank=0)  # fmt: skip
    return {**StageRecord(stage=0).to_json(), **measured, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"allocated": 10**4000}, {"predicted_peak": 10**400}, {"predicted_static": float("inf")}, {"stage": 10**4000},
        {"worst_rank": -(10**4000)}, {"max_allocated": float("nan")}, {"failed": {"0": [[[]]]}}, {"stage": True},
    ],
)  # fmt: skip
def test_no_figure_of_a_journal_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, Any]
) -> None:
    record = {"schema": journal.SCHEMA, "event": "report", "time": float("inf"), "iteration": 10**4000,
              "stages": [stage(**changed), stage(stage=1)]}  # fmt: skip
    path = tmp_path / "report.jsonl"
    path.write_text(json.dumps(record) + "\n")
    code = main(["compare", str(path)])
    err = capsys.readouterr().err
    assert code in (0, 2) and err.count("\n") == (code == 2) and len(err) <= 301


def test_deep_lines_of_a_journal_are_skipped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "report.jsonl"
    journal.append(path, RunRecord())
    for text in (DEEP, f'{{"schema":"{journal.SCHEMA}","event":"report","notes":{DEEP}', HUGE):
        with open(path, "a") as file:
            file.write(text + "\n")
    # Nested as deep as Python's parser allows.
    deep = '{"schema":"%s","event":"report","notes":[%s%s],"stages":%s}\n'
    with open(path, "a") as file:
        file.write(deep % (journal.SCHEMA, "[" * 900, "]" * 900, json.dumps([stage()])))
    journal.append(path, ReportRecord(iteration=3, stages=[]))
    assert [type(r) for r in journal.read(path)] == [RunRecord, ReportRecord]
    refused(capsys, "compare", str(path))


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="needs /dev/fd")
def test_a_pipe_is_read_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`compare <(cat report.jsonl)`: asking for the kind of file once took the first bytes away."""
    path = tmp_path / "report.jsonl"
    report = ReportRecord(iteration=2, stages=[s for s in [StageRecord.from_json(stage())] if s is not None])
    journal.append(path, report)
    assert main(["compare", str(path)]) == 0
    expected = capsys.readouterr().out
    snapshot = tmp_path / "snapshot.pickle"
    snapshot.write_bytes(pickle.dumps(snapshot_of([block()])))
    for source, shown in ((path, expected), (snapshot, "")):
        read, write = os.pipe()
        os.write(write, source.read_bytes())
        os.close(write)
        assert main(["compare", f"/dev/fd/{read}"]) == 0
        os.close(read)
        assert shown in capsys.readouterr().out


# ---- corpora ----


@pytest.mark.parametrize(
    "changed",
    [
        {"world_size": float("inf")}, {"tier": float("inf")}, {"logged_parameters": 10**400}, {"world_size": HUGE},
        {"measured": [{"rank": float("inf")}]}, {"measured": [{"rank": 0, "allocated_bytes": float("inf")}]},
        {"measured": [3]}, {"measured": 3}, {"config": 3}, {"framework": 3}, {"world_size": None},
        {"measured": [{"rank": 0, "max_allocated_bytes": float("nan")}]},
    ],
)  # fmt: skip
def test_no_field_of_a_corpus_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = tmp_path / "runs.jsonl"
    record = {"id": "a", "world_size": 1, "config": {"kind": "megatron_args", "args": MEGATRON}, "measured": []}
    path.write_text(json.dumps(record | changed) + "\n")
    refused(capsys, "accuracy", str(path))


@pytest.mark.parametrize("line", [DEEP, HUGE, '{"id":' * 100_000, "\x00", "[]", "3"], ids=lambda line: line[:5])
def test_no_line_of_a_corpus_is_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(line + "\n")
    refused(capsys, "accuracy", str(path))


# ---- snapshots ----


def block(**changed: Any) -> dict[str, Any]:
    return {"size": 512, "state": "active_allocated", "address": 0, "frames": [frame()], **changed}


def frame(**changed: Any) -> dict[str, Any]:
    return {"filename": "megatron/core/transformer/mlp.py", "name": "forward", "line": 3, **changed}


def snapshot_of(blocks: list[Any], trace: list[Any] | None = None) -> dict[str, Any]:
    return {"segments": [{"device": 0, "address": 0, "blocks": blocks}], "device_traces": [trace or []]}


@pytest.mark.parametrize("changed", [
    {"size": float("inf")}, {"size": 10**5000}, {"size": -1}, {"size": "512"}, {"address": float("nan")},
    {"address": 1 << 70}, {"frames": [frame(filename=3)]}, {"frames": [frame(name=[])]}, {"frames": [3]}, {"frames": 3},
    {"history": [3], "frames": None},
])  # fmt: skip
def test_no_block_of_a_snapshot_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, Any]
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of([block(**changed)])))
    assert "malformed" in refused(capsys, "compare", str(path))


@pytest.mark.parametrize("event", [
    {"action": "alloc", "addr": [], "size": 1}, {"action": "alloc", "addr": float("inf"), "size": 1},
    {"action": "free_requested", "addr": 5, "size": float("inf")}, {"action": "free_requested", "addr": 5}, 3, {},
])  # fmt: skip
def test_no_event_of_a_snapshot_is_a_fault(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, event: Any
) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot_of([block()], [event])))
    assert "malformed" in refused(capsys, "compare", str(path))


def test_names_of_megabytes_are_cut() -> None:
    """A file name of 2.2 MB once took more than 25 s."""
    for name in ("datasets/" * 250_000 + "x.py", "mla" * 700_000, "/adam" * 400_000 + ".py", "ssm/" * 500_000):
        for function in ("forward" * 300_000, "get_" * 500_000):
            blocks = [block(frames=[frame(filename=name, name=function)])]
            assert attribute(at_peak(snapshot_of(blocks))).alive.peak_bytes == 512


def test_blocks_that_share_their_frames_are_read_once() -> None:
    """100,000 blocks with one list of a thousand frames, which is a pickle of 2 MB: 100 million frames."""
    shared = [frame(filename=f"unknown_{n}.py") for n in range(1000)]
    blocks = [block(address=512 * n, frames=shared) for n in range(100_000)]
    result = attribute(at_peak(snapshot_of(blocks)))
    assert result.alive.peak_bytes == 512 * 100_000 and len(result.unattributed) == 1


def test_segments_that_share_their_blocks_are_no_snapshot() -> None:
    """10,000 x 10,000 blocks in a pickle of 50 KB."""
    blocks = [block(address=512 * n) for n in range(10_000)]
    shared = {"segments": [{"device": 0, "address": 0, "blocks": blocks}] * 10_000, "device_traces": []}
    with pytest.raises(SpecError, match="more than"):
        at_peak(shared)


# ---- Megatron's arguments ----


@pytest.mark.parametrize("value", ["0", "-1", "1e999", "nan", HUGE, "-" + HUGE, "1e300", "x", "", "0.5", " " * 1000])
@pytest.mark.parametrize(
    "name",
    ["tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "num_attention_heads",
     "expert_model_parallel_size", "hidden_size", "num_layers", "seq_length", "micro_batch_size",
     "make_vocab_size_divisible_by", "num_layers_per_virtual_pipeline_stage", "num_query_groups", "kv_channels",
     "global_batch_size", "rotary_percent", "num_experts", "window_size", "moe_layer_freq", "mtp_num_layers"],
)  # fmt: skip
def test_no_number_among_megatrons_arguments_is_a_fault(name: str, value: str) -> None:
    try:
        run_from_megatron_args({**MEGATRON, "group_query_attention": True, name: value}, world_size=8)
    except SpecError as error:
        assert len(str(error)) <= LONGEST


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "num_attention_heads", "micro_batch_size"])
def test_a_size_of_zero_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(SpecError, match=f"--{name.replace('_', '-')} is '0'; give a positive whole number"):
        run_from_megatron_args({**MEGATRON, name: "0"}, world_size=8)


SIZES = "--num-layers 2 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1"


@pytest.mark.parametrize("name", ["--hidden-size", "--tensor-model-parallel-size", "--rotary-percent"])
def test_an_option_without_its_number_is_refused(name: str) -> None:
    """Not taken for 1, whether the text ends there or another option follows."""
    hidden = "" if name == "--hidden-size" else "--hidden-size 64 "
    for text in (f"{SIZES} {hidden}{name}", f"{name} {hidden}{SIZES}"):
        with pytest.raises(SpecError, match=f"^{name} has no value"):
            run_from_megatron_args(text, world_size=8)


def test_two_activations_are_refused() -> None:
    with pytest.raises(SpecError, match="--squared-relu does not go with --swiglu"):
        run_from_megatron_args(f"{SIZES} --hidden-size 64 --swiglu --squared-relu", world_size=8)


ARRAY = "ARGS=(--num-layers 2 --hidden-size %s --num-attention-heads 4)\n"


@pytest.mark.parametrize(
    "text",
    [
        "--x " + "a" * 1_000_000,  # more than a minute
        '--x "' + " " * 200_000 + '"',
        "\n" * 200_000,  # more than a minute
        "A=x'y\n" + ARRAY % 64,
        'A="x\n' + ARRAY % 64,
        ARRAY % "$((9999999999**9))",
        ARRAY % "$((*))",
        ARRAY % f"$(({HUGE}))",
        ARRAY % f"$(({'9*' * 9000}9))",
        "A=xx\n" + "A=$A$A\n" * 60 + ARRAY % "$A",  # 2**61 characters
        "A=" + "x" * 60_000 + "\n" + "B=$A\n" * 5000 + ARRAY % "$B",
        "A=" + "x" * 60_000 + "\nB=(" + "$A " * 10_000 + ")\n" + ARRAY % 64,
        ARRAY % ("${A:-" * 20_000),
        ARRAY % ("$" * 100_000),
        "B=(" * 40_000,
        "B=()\n" * 20_000,
        "MODEL_ARGS:\n" + " a: '" * 20_000,
    ],
    ids=lambda text: f"{text[:30]!r}... {len(text)}",
)
def test_no_text_of_arguments_takes_long(text: str) -> None:
    with pytest.raises(SpecError) as error:
        run_from_megatron_args(text, world_size=8)
    assert len(str(error.value)) <= LONGEST


@pytest.mark.parametrize("value", [10**5000, -(10**5000), [], (), [[]], object, float("inf"), b"x"], ids=show)
@pytest.mark.parametrize(
    "name",
    ["hidden_size", "moe_layer_freq", "window_size", "cp_comm_type", "seed", "main_grads_dtype", "bf16", "unheard_of",
     "eval_micro_batch_size"],
)  # fmt: skip
def test_no_value_of_parsed_arguments_is_a_fault(name: str, value: object) -> None:
    """``get_args()`` of a script that sets anything, and a dict of it."""
    known = {**MEGATRON, "vocab_size": 1000, "padded_vocab_size": 1024, "world_size": 1, name: value}
    for source in (SimpleNamespace(**known), known):
        try:
            run_from_megatron_args(source, world_size=1)
        except SpecError as error:
            assert len(str(error)) <= LONGEST


def test_products_in_a_script_are_worked_out() -> None:
    text = "H=8\n" + (ARRAY % "$(( $H * 8 ))").replace("$(( $H * 8 ))", '"$(( $H * 8 ))"')
    text = text.replace("4)", "4 --seq-length 128 --micro-batch-size 1 --max-position-embeddings 128)")
    assert run_from_megatron_args(text, world_size=8).model.hidden_size == 64


# ---- one reader for each format ----

#: 9^9 values in 400 characters.
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
#: Format -> texts that once took minutes, gigabytes or ended in a traceback, and words of their refusal.
HOSTILE = {
    "yaml": {
        "laughs": (LAUGHS, "20,000"), "laughs merged": (LAUGHS.replace("i: &i", "i: &i\n  <<:"), "20,000"),
        "itself": ("a: &a [*a]", "stands for itself"), "itself in a table": ("&a {b: *a}", "stands for itself"),
        "many lines": ("a: 1\n" * 3_000_000, "larger than"), "many values": ("[" + "b," * 500_000 + "]", "20,000"),
        "deep": ("[" * 1000, "too deeply"), "deep by aliases": (
            "a0: &a0 []\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60)), "too deeply"),
        "to the base 60": ("a: 1" + ":1" * 300_000, "too long"), "no float": ("a: 1" + ":1" * 3000 + ".5", "too long"),
        "hexadecimal": ("a: 0x" + "f" * 300_000, "too long"), "digits": (f"a: {HUGE}", "too long"),
        "an int that is none": ('a: !!int ""', "IndexError"), "a bool that is none": ("a: !!bool x", "KeyError"),
        "a date that is none": ("a: 2001-99-99", "ValueError"), "a character": ('a: "\\UFFFFFFFF"', "its tag"),
        "code": ("a: !!python/name:os.system x", "tag"), "a zero byte": ("a: \0", "special characters"),
    },
    "json": {
        "deep": ("[" * 100_000, "too deeply"), "as deep as Python takes": ("[" * 900 + "]" * 900, "too deeply"),
        "many values": ("[" + "[]," * 1_000_001 + "1]", "1,000,000 values"), "digits": (f"[{HUGE}]", "too long"),
    },
    "toml": {
        "dots": ("a." * 100_000 + "a=1", "too deeply"), "dots of a header": (f"[{'a.' * 100_000}a]", "too deeply"),
        "quoted dots": ("'a' . " * 1000 + "a=1", "deeply"), "long dots": (("a" * 300 + ".") * 2000 + "a=1", "deeply"),
        "deep": ("a=" + "[" * 1000, "too deeply"), "many values": ("a=1\n" * 100_000, "20,000 values"),
        "larger": ("#" * (2 << 20), "larger than"), "digits": (f"a={HUGE}", "limit"),
    },
}  # fmt: skip
PARSERS = {"yaml": files.parse_yaml, "json": files.parse_json, "toml": files.parse_toml}
_CASES = [(kind, name) for kind, texts in HOSTILE.items() for name in texts]


@pytest.mark.parametrize(("kind", "name"), _CASES, ids=[f"{kind}-{name}" for kind, name in _CASES])
def test_no_text_is_more_than_its_bound(kind: str, name: str) -> None:
    text, words = HOSTILE[kind][name]
    with pytest.raises(files.Unparsed, match=words):
        PARSERS[kind](text)


def test_what_people_write_is_read_as_the_formats_own_parsers_do() -> None:
    yaml = pytest.importorskip("yaml")
    text = "a: &a {b: [1, 2.5, yes, 1:30, ~], c: 'x'}\nd: {<<: *a, c: 2020-01-01}\n1: [*a, *a]\nbig: 12345678901\n"
    assert files.parse_yaml(text) == yaml.safe_load(text)
    fewest = f"[{'1,' * (files.MOST_VALUES - 2)}1]"
    assert len(files.parse_yaml(fewest)) == len(files.parse_json(fewest)) == files.MOST_VALUES - 1
    deepest = "[" * files.MOST_DEPTH + "]" * files.MOST_DEPTH
    assert files.parse_yaml(deepest) == files.parse_json(deepest)
    assert files.parse_json(b'\xef\xbb\xbf{"a": "\\u00e9"}') == {"a": "é"}


#: Flags that take a file, with what their commands need beside it.
_OF_FILES = {
    "--accelerate": (MODEL,), "--deepspeed": (MODEL,), "--training-args": (MODEL,), "--torchtitan": (MODEL,),
    "--peft-config": (MODEL,), "--container": (), "--calibration": (MODEL,),
}  # fmt: skip


@pytest.mark.parametrize("flag", _OF_FILES)
@pytest.mark.parametrize("suffix", ["yaml", "json", "toml"])
def test_every_flag_that_takes_a_file_reads_it_within_the_bounds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str, suffix: str
) -> None:
    path = tmp_path / f"file.{suffix}"
    container = f"model: {{_target_: x.Y}}\n{LAUGHS}"
    for text in (LAUGHS, container, DEEP, "a." * 100_000 + "a=1", "a: 1\n" * 300_000, "\0"):
        path.write_text(text)
        refused(capsys, "estimate", *_OF_FILES[flag], flag, str(path))
        assert main(["validate", str(path)]) == 2
        assert len(capsys.readouterr().err) <= 301


def test_every_parser_of_texts_is_in_one_place() -> None:
    """A parser called elsewhere has no bound. What the package itself wrote for its own processes needs none."""
    parsers = ("json.load", "yaml.load", "yaml.safe_load", "tomllib.load", "pickle.load", "marshal.load")
    own = {"web/jobs.py", "web/worker.py", "web/openapi.py", "mcp_server/commands.py", "rehearsal/measuring.py",
           "rehearsal/te_shapes.py", "files.py"}  # fmt: skip
    root = Path(files.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py")
        if any(f"{parser}" in path.read_text(encoding="utf-8") for parser in parsers)
    }  # fmt: skip
    assert found <= own, found - own


# ---- values and snapshots that share what they hold ----


def shared(kind: Any, leaf: Any, levels: int = 30) -> Any:
    """10^levels leaves in some bytes."""
    for _ in range(levels):
        leaf = kind((leaf,) * 10)
    return leaf


def test_no_more_of_a_value_is_made_than_is_shown() -> None:
    assert show(shared(list, "x")).startswith("[" * 30 + "'x', 'x'") and len(show(shared(tuple, {1: "x"}))) == 60
    plain: list[Any] = [[1, (2,), ()], {"a": [None, b"x"], 3: {}}, "it's", (), [], {1, 2}, 1.5, "\n"]
    for value in plain:
        assert show(value) == ascii(value)


@pytest.mark.parametrize(
    "name", ["filename", "name", "frames", "action", "addr", "size", "state", "key", "a frozen key"]
)
def test_a_snapshot_that_shares_what_it_holds_is_refused_or_read(tmp_path: Path, name: str) -> None:
    """Of 10^30 names in a snapshot of 1 KB each was once made; so was the hash of a key."""
    lists, given = shared(list, "x"), snapshot_of([block()], [{"action": "alloc", "addr": 1, "size": 1, "frames": []}])
    if name in ("filename", "name"):
        given["segments"][0]["blocks"][0]["frames"] = [frame(**{name: lists})]
    elif name in ("frames", "state"):
        given["segments"][0]["blocks"][0][name] = lists
    elif name in ("action", "addr", "size"):
        given["device_traces"][0][0][name] = lists
    data = pickle.dumps(given)
    if "key" in name:  # made without hashing it here
        make = b"\x87\x94" if name == "key" else b"\x85\x94\x91\x94"
        data = b"\x80\x04}(\x8c\x01x\x94" + b"".join(b"h%ch%ch%c" % ((n,) * 3) + make for n in range(60)) + b"Nu."
    try:
        attribute(at_peak(read_snapshot(data, tmp_path)))
    except SpecError as error:
        assert "malformed" in str(error) and len(str(error)) < 300
    else:
        assert name in ("action", "size", "state")


def test_a_snapshot_of_nine_bytes_takes_no_memory(tmp_path: Path) -> None:
    """Its one opcode makes room for 2^32 objects."""
    with pytest.raises(SpecError, match="malformed"):
        read_snapshot(b"\x80\x03}r\xff\xff\xff\xff.", tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_snapshots_hold_is_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    """Numbers of every width and sign, texts of every length, and pools' ids, which are tuples."""
    given = snapshot_of([block(address=1 << n, segment_pool_id=(n, 1 << n % 30)) for n in range(60)], [
        {"action": "x" * n, "size": -(1 << n % 100), "time_us": 1 << n % 100, "frames": [frame(name="é" * n)],
         "f": n / 7, "known": (n > 3, None)[n % 2]} for n in (*range(300), 70_000)
    ])  # fmt: skip
    assert read_snapshot(pickle.dumps(given, protocol), tmp_path) == given


# ---- files that are replaced, and files that are none ----


@pytest.mark.skipif(not hasattr(os, "getgroups"), reason="this system has no groups")
def test_a_file_that_is_replaced_keeps_mode_and_group(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    path.chmod(0o664)
    before = path.stat()
    other = next((group for group in (*os.getgroups(), 4242) if group != before.st_gid), None)
    if other is None or not _may_give(path, other):
        pytest.skip("this user has one group")
    files.write_whole(path, "new")
    after = path.stat()
    assert path.read_text() == "new" and (after.st_gid, after.st_mode & 0o7777) == (other, 0o664)


def _may_give(path: Path, group: int) -> bool:
    try:
        os.chown(path, -1, group)
    except OSError:
        return False
    return True


def test_a_group_that_cannot_be_given_has_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError

    path = tmp_path / "report.html"
    path.write_text("old")
    path.chmod(0o664)
    monkeypatch.setattr(os, "chown", refuse)
    files.write_whole(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o7777 == 0o604


def test_force_parts_no_hard_links(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("old")
    os.link(one, two)
    assert "2 names (hard links)" in refused(capsys, "gpus", "--output", str(one), "--force")
    assert one.read_text() == two.read_text() == "old" and one.stat().st_ino == two.stat().st_ino
    two.unlink()
    assert main(["gpus", "--output", str(one), "--force"]) == 0
    assert "H100" in one.read_text()


@pytest.mark.parametrize("schema", ["bridge-memory/live-2", "bridge-memory/live-17"])
def test_a_journal_of_another_release_is_called_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, schema: str
) -> None:
    path = tmp_path / "report.jsonl"
    journal.append(path, ReportRecord(iteration=3, stages=[StageRecord(stage=0)]))
    path.write_text(path.read_text().replace(journal.SCHEMA, schema))
    line = refused(capsys, "compare", str(path))
    assert f"the schema {schema}, and this release reads {journal.SCHEMA}" in line


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_in_place_of_kept_costs_is_not_waited_for(tmp_path: Path) -> None:
    """A search once waited for whoever would write to it."""
    kept = pytest.importorskip("bridge_memory.plan.megatron.kept")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="not a regular file"):
        files.read_bytes(tmp_path / "pipe", "", pipes=False)
    costs = kept.KeptCosts(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "name", lambda grid: "grid")
        os.mkfifo(costs._path("grid"))
        costs.take_up(SimpleNamespace())
    assert costs._there == {}


@pytest.mark.parametrize("command", ["fit", "search"])
@pytest.mark.parametrize("size", ["inf", "nan", "1e308", "-1"])
def test_a_headroom_that_is_no_number_of_bytes_is_refused(
    command: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """1e308 is a finite number of GiB, and no finite number of bytes."""
    said = refused(capsys, command, MODEL, "--num-gpus", "8", "--gpu", "H100", "--headroom", size)
    assert "--headroom (" in said and "give GiB of 0 or more" in said
