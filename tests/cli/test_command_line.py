"""The command line's manners: numbers as typed, flags that would do nothing, pipes and disks that end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge_memory.cli import COMMANDS, main

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
    ("flags", "field", "needed"),
    [
        (["--no-store-param-remainders"], "store_param_remainders", "--use-precision-aware-optimizer"),
        (["--distribute-saved-activations"], "distribute_saved_activations", "--recompute-granularity full"),
        (["--pp", "2", "--microbatch-group-size-per-vp-stage", "4"], "microbatch_group_size_per_vp_stage", "--vpp"),
        (["--num-layers-in-first-pipeline-stage", "32"], "num_layers_in_first_pipeline_stage", "--pp"),
        (["--num-layers-in-last-pipeline-stage", "32"], "num_layers_in_last_pipeline_stage", "--pp"),
        (["--account-for-loss-in-pipeline-split"], "account_for_loss_in_pipeline_split", "--pp"),
        (["--account-for-embedding-in-pipeline-split"], "account_for_embedding_in_pipeline_split", "--pp"),
        (["--fp8-recipe", "mxfp8"], "fp8_recipe", "--fp8"),
        (["--exp-avg-dtype", "bf16"], "exp_avg_dtype", "--use-precision-aware-optimizer"),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], field: str, needed: str
) -> None:
    line = refused(capsys, *ESTIMATE, *flags)
    assert field in line and needed in line


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


def test_an_output_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--output" in refused(capsys, *ESTIMATE, "--output", "")
    assert "regular file" in refused(capsys, *ESTIMATE, "--output", str(tmp_path), "--force")
    assert "regular file" in refused(capsys, *ESTIMATE, "--output", "/dev/null", "--force")


def test_names_of_strange_characters_stay_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "bad\nname\x1b[31m \u202e\udcff/x")
    assert line.rstrip("\n").isprintable()


def test_unknown_commands_and_flags_name_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimat")
    assert all(command in line for command in COMMANDS)
    assert "--tp" in refused(capsys, *ESTIMATE, "--tpp", "2")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert f"bridge-memory {command}" in out and err == ""


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
def test_a_full_disk_is_no_fault_of_the_program() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "bridge_memory", *ESTIMATE], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 74
    assert done.stderr.startswith("bridge-memory: error: ") and done.stderr.count("\n") == 1
