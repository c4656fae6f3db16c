"""``bridge-memory record``: a run's journal or log as a row of measured runs, without anything personal."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import bridge_memory
from bridge_memory import ParallelSpec, RunSpec, estimate
from bridge_memory.accuracy.predictions import predict_all
from bridge_memory.accuracy.recorded import recorded
from bridge_memory.accuracy.records import load_runs
from bridge_memory.cards.rows import GPUS
from bridge_memory.cli import main
from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading
from bridge_memory.readers.run_spec import run_to_json
from bridge_memory.spec import BatchSpec
from bridge_memory.spec.ranks import rank_of_stage

GIB = 1 << 30
H100 = GPUS["H100"]
PARALLEL = ParallelSpec(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=PARALLEL, batch=BatchSpec(global_batch_size=8))
#: Words of people and machines: none may be in a row.
SECRETS = (
    "gpu-node17.corp.example.com", "/home/jane.doe/secret-project/ckpt", "jane@corp.example", "10.0.12.7",
    "C:\\Users\\jane", "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "https://wandb.ai/team-x/run7", "team-x",
)  # fmt: skip


def journal_of(path: Path, run: RunSpec = RUN, *, gpu: str = "NVIDIA H100 80GB HBM3", more: int = 0) -> list[Any]:
    """Written by ``MemoryReport`` itself, with readings made up; its lines. ``more``: bytes above the prediction."""
    stages = estimate(run).stages

    def read(rank: int, stage: int) -> Reading:
        s = stages[0]
        peak, reserved = s.peak_bytes + more, s.peak_bytes + 2 * GIB
        return Reading(0, 0, s.static_bytes, peak, reserved, reserved, 80 * GIB, 60 * GIB)

    with MemoryReport(path, run=run, emit=lambda text: None, read=read) as report:
        for _ in range(2):
            report.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["machine"] = {"gpu": gpu, "facts": {}, "notes": ["no notes"]}
    write(path, lines)
    return lines


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["record", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and "Traceback" not in captured.err
    return captured.err


def test_a_journal_becomes_a_row_that_accuracy_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured is what was predicted and 1 GiB, so accuracy finds 1 GiB; the journal is the live module's."""
    path, rows = tmp_path / "journal.jsonl", tmp_path / "rows.jsonl"
    journal_of(path, more=GIB)
    assert main(["record", str(path), "-o", str(rows), "--yes"]) == 0
    captured = capsys.readouterr()
    assert captured.out == rows.read_text() and f"wrote {rows}" in captured.err
    (record,) = load_runs(rows)
    (outcome,) = predict_all([record])
    first = estimate(RUN).stages[0]
    assert outcome.status == "ok" and outcome.predicted_max_allocated_bytes == first.peak_bytes
    assert outcome.measured_max_allocated_bytes == first.peak_bytes + GIB
    assert outcome.allocated_error == 0
    assert record.measured[0].after_step == 0 and record.gpu == "H100" and record.world_size == 4
    assert main(["accuracy", str(rows), "--json"]) == 0


@pytest.mark.parametrize("source", ["journal", "log"])
def test_a_row_has_its_form(tmp_path: Path, source: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(bridge_memory.__file__).parent / "report" / "record.schema.json").read_text())
    path = tmp_path / "file"
    if source == "journal":
        journal_of(path)
    else:
        path.write_text(log())
    (one,) = recorded(str(path), gpu=H100)
    form = {"$ref": "#/$defs/row", "$defs": schema["$defs"]}
    jsonschema.Draft202012Validator(form).validate(json.loads(one.line))
    assert one.line.count("\n") == 1 and one.line.isascii()
    for key in one.row:
        assert not jsonschema.Draft202012Validator(form).is_valid({k: v for k, v in one.row.items() if k != key})


# ---- logs ----


def log(**changed: str) -> str:
    """Megatron-LM's block of arguments, with people's words in it, and two lines of memory."""
    arguments = {
        "num_layers": "4", "hidden_size": "1024", "ffn_hidden_size": "4096", "num_attention_heads": "16",
        "num_query_groups": "16", "kv_channels": "64", "seq_length": "1024", "max_position_embeddings": "1024",
        "padded_vocab_size": "32000", "micro_batch_size": "1", "global_batch_size": "8", "bf16": "True",
        "tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "2", "world_size": "4",
        "transformer_impl": "transformer_engine", "swiglu": "True", "normalization": "RMSNorm",
        "position_embedding_type": "rope", "add_bias_linear": "False", "use_distributed_optimizer": "True",
        "load": SECRETS[1], "save": SECRETS[4], "wandb_entity": SECRETS[7], "wandb_project": SECRETS[6],
        "master_addr": SECRETS[3], "hostname": SECRETS[0], "hf_token": SECRETS[5], "user_email": SECRETS[2], **changed,
    }  # fmt: skip
    block = "".join(f"  {name} {'.' * (40 - len(name))} {value}\n" for name, value in arguments.items())
    memory = "".join(
        f"{SECRETS[0]}: [Rank {rank}] (after 2 iterations) memory (MB) | allocated: {size}.0 | max allocated: "
        f"{2 * size}.0 | reserved: {3 * size}.0 | max reserved: {3 * size}.0\n"
        for rank, size in ((0, 1000), (2, 1500))
    )
    return f"{'-' * 20} arguments {'-' * 20}\n{block}{'-' * 20} end of arguments {'-' * 20}\n{memory}"


def test_a_log_becomes_a_row_by_rank_without_anybodys_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text(log())
    assert "--gpu" in refused(capsys, str(path))
    assert main(["record", str(path), "--gpu", "H100", "--megatron-core", "0.16"]) == 0
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert not [word for word in SECRETS if word in captured.out or json.dumps(word)[1:-1] in captured.out]
    assert str(tmp_path) not in captured.out and "arguments as typed" in captured.err
    assert row["measured"] == [
        {"rank": 0, "allocated_bytes": 1000 << 20, "max_allocated_bytes": 2000 << 20, "reserved_bytes": 3000 << 20,
         "after_step": 2},
        {"rank": 2, "allocated_bytes": 1500 << 20, "max_allocated_bytes": 3000 << 20, "reserved_bytes": 4500 << 20,
         "after_step": 2},
    ]  # fmt: skip
    assert row["framework"] == {"megatron_core": "0.16"} and row["config"]["run"]["model"]["hidden_size"] == 1024


def test_the_estimate_of_a_row_is_that_of_its_run(tmp_path: Path) -> None:
    """Names and notes are gone, and no byte with them."""
    path, rows = tmp_path / "journal.jsonl", tmp_path / "rows.jsonl"
    for name in ("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B", "openai-community/gpt2"):
        path.unlink(missing_ok=True)
        run = RunSpec(model=name, parallel=PARALLEL, batch=BatchSpec(global_batch_size=8, seq_length=1024))
        run = run.with_(model=replace(run.model, name=SECRETS[1]))
        journal_of(path, run)
        (one,) = recorded(str(path))
        rows.write_text(one.line)
        (outcome,) = predict_all(load_runs(rows))
        assert outcome.predicted_max_allocated_bytes == estimate(run).stages[0].peak_bytes, name
        assert SECRETS[1] not in one.line and "the model's name" in "".join(one.left_out)


def test_what_is_not_modelled_stays_so_by_its_name(tmp_path: Path) -> None:
    path, rows = tmp_path / "journal.jsonl", tmp_path / "rows.jsonl"
    journal_of(path, RUN.with_(not_modelled=(f"--export-kd-cfg {SECRETS[1]}: a teacher", "team-x made a loss")))
    (one,) = recorded(str(path))
    rows.write_text(one.line)
    (outcome,) = predict_all(load_runs(rows))
    assert outcome.status == "not_modelled"
    assert outcome.reason == "export_kd_cfg is not modelled; a feature is not modelled"
    assert SECRETS[1] not in one.line


# ---- writing ----


def test_nothing_is_written_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal and without --yes the row is shown, and the exit code says that there is no file."""
    path, rows = tmp_path / "journal.jsonl", tmp_path / "rows.jsonl"
    journal_of(path)
    assert main(["record", str(path), "-o", str(rows)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["gpu"] == "H100" and "--yes" in captured.err and not rows.exists()
    assert main(["record", str(path)]) == 0 and "-o ROWS.jsonl" in capsys.readouterr().err
    assert main(["record", str(path), "-o", str(rows), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == str(rows)
    assert "exists" in refused(capsys, str(path), "-o", str(rows), "--yes")
    assert main(["record", str(path), "-o", str(rows), "--yes", "--force"]) == 0
    capsys.readouterr()
    assert "--yes does nothing" in refused(capsys, str(path), "--yes")
    assert "describes no run" in refused(capsys, str(path), "--tp", "2")
    assert "does not exist" in refused(capsys, str(path), "-o", str(tmp_path / "no" / "rows.jsonl"), "--yes")


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("n\n", 1), ("", 1)], ids=["yes", "no", "closed"])
def test_a_person_is_asked_after_the_row_was_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            assert "contributed/" in capsys.readouterr().out
            return said

    path, rows = tmp_path / "journal.jsonl", tmp_path / "rows.jsonl"
    journal_of(path)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert main(["record", str(path), "-o", str(rows)]) == code
    assert rows.exists() is (code == 0)


def test_each_start_of_a_job_is_a_row(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = journal_of(path)
    other = journal_of(tmp_path / "other.jsonl", RUN.with_fields(micro_batch_size=2))
    write(path, [*lines, *other, *lines, lines[0]])  # the first again, and a start that never reported
    assert [len(one.row["measured"]) for one in recorded(str(path))] == [1, 1]


# ---- hostile files ----


def strings(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of every string, and of every table and list, that a text can be put at."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, member in members for place in strings(member, (*at, key)))]


def put(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[at[0]] = put(value[at[0]], at[1:], new)
    return copied


@pytest.mark.slow
def test_no_place_of_a_journal_brings_a_persons_word_into_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each value of the run and of what surrounds it in turn: a row without the word, or one clear line."""
    path, draw = tmp_path / "journal.jsonl", Random("words")
    lines = journal_of(path)
    lines[0]["run"]["model"]["encoders"] = [{"name": "vision encoder", "parameters": 1000}]
    lines[0] |= {"hostname": "x", "versions": {"torch": "2.9.0", "megatron.core": "0.16.1"}}
    del lines[0]["predicted"][0]["components"][3:], lines[0]["predicted"][1:]
    kept = 0
    for at in strings(lines):
        for secret in draw.sample(SECRETS, 3):
            write(path, put(lines, at, secret) if isinstance(put(lines, at, secret), list) else [secret])
            code = main(["record", str(path)])
            captured = capsys.readouterr()
            assert code in (0, 2), (at, secret, captured.err)
            assert secret not in captured.out and json.dumps(secret)[1:-1] not in captured.out, at
            kept += code == 0
            if code:
                assert captured.out == "" and captured.err.count("\n") == 1 and len(captured.err) < 2000, at
    assert kept > 20


@pytest.mark.parametrize("place", ["activation", "normalization", "position_embedding_type"])
def test_a_word_that_is_no_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    path = tmp_path / "journal.jsonl"
    lines = journal_of(path)
    model = lines[0]["run"]["model"]
    (model["layer_kinds"][0]["ffn"] if place == "activation" else model)[place] = SECRETS[0]
    write(path, lines)
    assert place in refused(capsys, str(path))


FILES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "binary": lambda whole: bytes(range(256)) * 100,
    "compressed": gzip.compress,
    "pickle": lambda whole: b"\x80\x04}q\x00.",
    "another JSON": lambda whole: b'{"loss": 1.0}\n[1, 2]\n',
    "a row": lambda whole: b'{"id": "a", "world_size": 8, "config": {"kind": "run_spec", "run": {}}}\n',
    "another schema": lambda whole: whole.replace(b"live-1", b"live-9"),
    "UTF-16 of nothing": lambda whole: b"\xff\xfe" + b"\x00" * 99,
    "deep": lambda whole: whole.split(b"\n")[0] + b"\n" + b"[" * 100_000 + b"\n",
    "only a start": lambda whole: whole.split(b"\n")[0] + b"\n",
    "NaN figures": lambda whole: whole.replace(b'"max_allocated": ', b'"max_allocated": NaN, "x": '),
    "an endless number": lambda whole: whole.replace(b'"world_size": 4', b'"world_size": ' + b"9" * 10_000),
    "negative ranks": lambda whole: whole.replace(b'"worst_rank": 0', b'"worst_rank": -1'),
    "a rank of another run": lambda whole: whole.replace(b'"worst_rank": 0', b'"worst_rank": 4000'),
    "a rank of another stage": lambda whole: whole.replace(b'"worst_rank": 0', b'"worst_rank": 2'),
    "more static than peak": lambda whole: whole.replace(b'"allocated": ', b'"allocated": 9999999999999, "x": '),
    "a run of another release": lambda whole: whole.replace(b'"hidden_size"', b'"hidden_size_of_tomorrow"'),
    "a run that is none": lambda whole: whole.replace(b'"run": {', b'"run": {"model": 7, "x": {'[:-1] + b'{}, "y": {'),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_another_file_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    path = tmp_path / "journal.jsonl"
    journal_of(path)
    path.write_bytes(FILES[kind](path.read_bytes()))
    refused(capsys, str(path))


def test_a_line_of_ten_megabytes_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.jsonl"
    journal_of(path)
    whole = path.read_text()
    path.write_text(f'{whole}{"x" * 10_000_000}\n{{"schema": "bridge-memory/live-1", "event": "{"y" * 10_000_000}"}}\n')
    assert main(["record", str(path)]) == 0
    assert len(capsys.readouterr().out) < 10_000
    path.write_text(log() + "[Rank 1] memory (MB) | " + "a" * 10_000_000 + "\n")
    assert main(["record", str(path), "--gpu", "H100"]) == 0
    assert len(capsys.readouterr().out) < 10_000


@pytest.mark.slow
def test_journals_of_random_damage_never_end_in_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, draw = tmp_path / "journal.jsonl", Random("damage")
    lines = journal_of(path)
    values: list[Any] = [None, True, -1, 0, 1 << 80, 1.5, float("nan"), float("inf"), "", "x", [], {}, [[]], {"a": {}}]
    places = strings(lines)
    for _ in range(400):
        damaged: Any = lines
        for _ in range(draw.choice((1, 1, 2))):
            at = draw.choice(places)
            try:
                damaged = put(damaged, at, draw.choice(values))
            except (KeyError, TypeError, IndexError):
                continue
        write(path, damaged if isinstance(damaged, list) else [damaged])
        code = main(["record", str(path)])
        captured = capsys.readouterr()
        assert code in (0, 2) and "internal error" not in captured.err, captured.err
        if code == 0:
            row = json.loads(captured.out.splitlines()[0])
            assert "NaN" not in captured.out and rank_of_stage(RUN.parallel, 0) in [m["rank"] for m in row["measured"]]


def test_the_journal_says_what_ran(tmp_path: Path) -> None:
    lines = journal_of(tmp_path / "journal.jsonl")
    assert lines[0]["event"] == "run" and lines[0]["run"] == json.loads(json.dumps(run_to_json(RUN)))
