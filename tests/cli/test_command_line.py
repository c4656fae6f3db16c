"""The command line's manners: numbers as typed, flags that would do nothing, pipes and disks that end."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_memory.arguments.flags import FLAGS
from bridge_memory.cli import COMMANDS, main
from bridge_memory.cli.help import EXAMPLES, GROUPS
from bridge_memory.cli.suggest import MEANT_VALUES, suggestion

ESTIMATE = ["estimate", "Llama-3.1-8B"]


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a refusal prints."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), (code, out)
    assert err.startswith("bridge-memory: error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("number", ["\uff14", "\u0664", "1_6", "+2", " 2", "2.0", "0x2", ""])
def test_a_number_is_plain_digits(capsys: pytest.CaptureFixture[str], number: str) -> None:
    """Fullwidth and Arabic digits, underscores and signs are read by int(); in a shell they are slips."""
    assert "--tp" in refused(capsys, *ESTIMATE, "--tp", number)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (["--no-store-param-remainders"], "--use-precision-aware-optimizer"),
        (["--distribute-saved-activations"], "--recompute-granularity full"),
        (["--pp", "2", "--microbatch-group-size-per-vp-stage", "4"], "--vpp"),
        (["--num-layers-in-first-pipeline-stage", "32"], "--pp"),
        (["--num-layers-in-last-pipeline-stage", "32"], "--pp"),
        (["--account-for-loss-in-pipeline-split"], "--pp"),
        (["--account-for-embedding-in-pipeline-split"], "--pp"),
        (["--fp8-recipe", "mxfp8"], "--fp8"),
        (["--exp-avg-dtype", "bf16"], "--use-precision-aware-optimizer"),
        (["--ddp-bucket-size", "1000"], "--overlap-grad-reduce"),
        (["--fine-grained-activation-offloading"], "--offload-modules"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], needed: str
) -> None:
    line = refused(capsys, *ESTIMATE, *flags)
    typed = next(word for word in reversed(flags) if word.startswith("--")).replace("--no-", "--")
    assert f" {typed} does nothing without {needed}" in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--use-precision-aware-optimizer", "--no-store-param-remainders"],
        ["--pp", "2", "--vpp", "2", "--microbatch-group-size-per-vp-stage", "2"],
        ["--pp", "2", "--num-layers-in-first-pipeline-stage", "15"],
    ],
)
def test_the_same_flags_are_welcome_where_they_count(capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main([*ESTIMATE, *flags]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("typed", "meant"), MEANT_VALUES.items())
def test_a_value_that_is_said_otherwise_is_answered_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], typed: tuple[str, str], meant: str
) -> None:
    """What is named is a flag with its value, or a choice of the flag."""
    assert main([*ESTIMATE, *typed]) == 2
    err = capsys.readouterr().err
    assert err == f"bridge-memory: error: argument {typed[0]}: invalid choice: {typed[1]!r}; {meant}\n"
    words = meant.removeprefix("use ").removesuffix(" beside it").replace(" (PyTorch's)", "").replace(", or ", ", ")
    values = words.replace(" or ", ", ").split(", ")
    for named in [words] if words.startswith("--") else [f"{typed[0]} {value}" for value in values]:
        main([*ESTIMATE, *named.split()])
        assert "invalid choice" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--qlora", "--load-in-4bit beside --peft lora"), ("--attention", "use --attention-backend"),
        ("--model", "MODEL stands alone"), ("--batch-size", "--micro-batch-size or --global-batch-size"),
        ("--fsdp", "--engine megatron_fsdp"), ("--zero", "--engine zero1"), ("--gpus", "--num-gpus"),
        ("--dp", "--num-gpus"), ("--seq-len", "did you mean --seq-length?"), ("--tp_size", "did you mean --tp?"),
        ("--micro_batch_size", "did you mean --micro-batch-size?"), ("--jsn", "did you mean --json?"),
        ("--tensor-parallel-size", "did you mean --tensor-model-parallel-size?"),
        ("--cross-entropy", "--cross-entropy-loss-fusion or --cross-entropy-fusion-impl"),
        ("--hidden-size", "give --megatron-args"), ("--disable-bias-linear", "give --megatron-args"),
        ("--lr-warmup-iters", "changes no memory; drop it"),
        ("--wrong", "`bridge-memory estimate --help` lists the flags"),
    ],
)
def test_an_unknown_flag_is_answered_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], typed: str, meant: str
) -> None:
    line = refused(capsys, *ESTIMATE, typed, "1")
    assert f"unknown argument {typed!r}; " in line and meant in line.partition("; ")[2]


def test_advice_names_flags_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Not --peft to a command that has none; where a command has all of them, the words come."""
    assert "MODEL" not in refused(capsys, "models", "--model", "x")
    known = ["--peft", "--lora-dim"]
    assert suggestion("--lora", known) == "use --peft lora" and suggestion("--lora-rank", known) == "use --lora-dim"
    assert suggestion("--lora", ["--force"]) == suggestion("--zero", ["--verbose"]) == ""


@pytest.mark.parametrize("command", [["estimate", "Llama-3.1-8B"], ["models", "llama"], ["gpus"]])
def test_every_command_writes_text_and_json_alike(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--format, --json, and a file's suffix say the same; a file holds what is printed otherwise."""
    printed = {}
    for name in ("text", "json"):
        assert main([*command, "--format", name]) == 0
        printed[name] = capsys.readouterr().out
    assert main([*command]) == 0 and capsys.readouterr().out == printed["text"]
    assert main([*command, "--json"]) == 0 and capsys.readouterr().out == printed["json"]
    assert json.loads(printed["json"]) and printed["text"] != printed["json"]
    for file, flags, name in (
        ("a.json", [], "json"), ("a.txt", [], "text"), ("llama-3.1-8B", [], "text"), ("b.txt", ["--json"], "json"),
        ("c.html", ["--format", "text"], "text"),
    ):
        assert main([*command, "--output", str(tmp_path / file), *flags]) == 0
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith(f"bridge-memory: wrote {tmp_path / file} ({name})")
        assert (tmp_path / file).read_text() == printed[name]
    assert "--force" in refused(capsys, *command, "--output", str(tmp_path / "a.json"))
    assert main([*command, "--output", str(tmp_path / "a.json"), "--force"]) == 0
    capsys.readouterr()
    for suffix in ("docx", "xlsx", "tex", "png"):
        with monkeypatch.context() as inside:
            inside.chdir(tmp_path)
            line = refused(capsys, *command, "--output", f"x.{suffix}")
        assert "files are not written" in line and all(x in line for x in (".txt", ".json", ".csv", ".md", ".html"))
    assert not list(tmp_path.glob("x.*"))
    for suffix, begin in (("html", "<!DOCTYPE html>"), ("csv", ""), ("md", "")):
        assert main([*command, "--output", str(tmp_path / f"y.{suffix}")]) == 0
        text = (tmp_path / f"y.{suffix}").read_text()
        assert text.startswith(begin) and len(text) > 200 and capsys.readouterr().out == ""
        assert ("lama" in text) == (command[0] != "gpus" and (command[0], suffix) != ("estimate", "csv"))
    assert "--json is --format json" in refused(capsys, *command, "--json", "--format", "text")
    assert "--force does nothing" in refused(capsys, *command, "--force")


def test_validate_takes_its_json_as_every_command_and_as_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = Path(__file__).parents[1] / "data" / "measurements" / "runs.jsonl"
    runs, out = tmp_path / "runs.jsonl", tmp_path / "out.json"
    runs.write_text(corpus.read_text().splitlines()[100] + "\n")
    answers = []
    for flags in (["--json"], ["--format", "json"], ["--json", "-"]):
        assert main(["accuracy", str(runs), *flags]) == 0
        answers.append(capsys.readouterr().out)
    assert main(["accuracy", "--json", str(runs)]) == 0
    answers.append(capsys.readouterr().out)
    assert main(["accuracy", str(runs), "--output", str(out)]) == 0
    answers.append(out.read_text())
    assert main(["accuracy", "--json", str(out), "--force", str(runs)]) == 0
    assert "max_allocated" in capsys.readouterr().out
    answers.append(out.read_text())
    assert len(set(answers)) == 1 and json.loads(answers[0])["schema"] == "bridge-memory/accuracy-memory/2"
    refused(capsys, "accuracy", "--json")


def test_an_output_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--output" in refused(capsys, *ESTIMATE, "--output", "")
    assert "regular file" in refused(capsys, *ESTIMATE, "--output", str(tmp_path), "--force")
    assert "regular file" in refused(capsys, *ESTIMATE, "--output", "/dev/null", "--force")


def test_names_of_strange_characters_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "bad\nname\x1b[31m \u202e\udcff/x")
    assert line.rstrip("\n").isprintable()


def test_unknown_commands_and_flags_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimat")
    assert all(command in line for command in COMMANDS) and "did you mean estimate" in line
    assert all(command in refused(capsys, "wrong") for command in COMMANDS)
    assert "--tp" in refused(capsys, *ESTIMATE, "--tpp", "2")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"bridge-memory {command}" in out and err == ""
    what, usage, *groups = out.split("\n\n")
    assert " ".join(what.split()).lower() == f"{COMMANDS[command][1]}.".lower()
    assert usage.startswith("usage: ") and usage.count("\n") < 5 and "None" not in usage
    assert any(group.startswith(("options:", "flags:")) for group in groups) and "--help-all" in out
    assert out.count("\n") <= 40 and max(map(len, out.splitlines())) <= 100


def test_every_command_stands_under_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{question}\n" in out for question in GROUPS) and all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("command", ("estimate", "search", "whatif", "balance"))
def test_the_first_example_runs_and_help_all_has_every_flag(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The short help has the flags that people use, 25 or so."""
    assert main(shlex.split(f"{command} {EXAMPLES[command][0]}")) == 0
    capsys.readouterr()
    assert main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert 20 <= len(re.findall(r"(?m)^  -", short)) <= 30 and len(EXAMPLES[command]) == 3
    assert main([command, "--help-all"]) == 0
    listed = set(capsys.readouterr().out.replace(",", " ").split())
    assert all(spelling in listed for flag in FLAGS for spelling in flag.names.split())


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_example_names_flags_that_there_are(command: str) -> None:
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[command][0]).add_arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    words = [word for example in EXAMPLES[command] for word in shlex.split(example)]
    assert {word for word in words if word.startswith("--")} <= known


def test_a_reader_that_leaves_ends_it_quietly() -> None:
    """`bridge-memory ... | head -1`: no traceback, the exit code of SIGPIPE."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "bridge_memory", *ESTIMATE, "--pp", "16", "--verbose"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_no_fault_of_the_program(unbuffered: str) -> None:
    """What Python holds back is written at its end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bridge_memory", *ESTIMATE], stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert done.returncode == 74
    assert done.stderr.startswith("bridge-memory: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("spelled", ["megatron", "megatron-ddp", "megatron_ddp"])
def test_megatron_is_the_engine_that_is_there_by_default(capsys: pytest.CaptureFixture[str], spelled: str) -> None:
    command = ["estimate", "Qwen/Qwen3-0.6B", "--num-gpus", "8", "--json"]
    assert main(command) == 0
    alone = capsys.readouterr().out
    assert main([*command, "--engine", spelled]) == 0
    assert capsys.readouterr().out == alone
