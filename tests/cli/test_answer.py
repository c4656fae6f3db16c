"""The answer first: in the second line, alone, as an exit code; the rest on one screen; no words, three examples."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from bridge_memory.cli import EXAMPLES, main

LARGE = [
    "estimate", "deepseek-ai/DeepSeek-V3", "--tp", "4", "--pp", "4", "--ep", "8", "--num-gpus", "128",
    "--num-layers-in-last-pipeline-stage", "16",
]
HUGE = ["estimate", "Mixtral-8x7B-v0.1", "--engine", "zero2", "--num-gpus", "8"]
SMALL = ["estimate", "Llama-3.1-8B", "--num-gpus", "8", "--tp", "4"]
OPEN = [
    "estimate", "--megatron-args", "--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --vocab-size 32000 --bf16 --use-kitchen "
    "--transformer-impl transformer_engine", "--num-gpus", "8", "--gpu", "H200",
]
DEEP = [
    "estimate", "deepseek-ai/DeepSeek-V3", "--num-gpus", "1024", "--tp", "2", "--ep", "64", "--etp", "1", "--pp", "16",
    "--pipeline-model-parallel-layout", "Etttt|(tttt|)*14tmL", "--gpu", "H100",
]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert err == ""
    return code, out


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ([*SMALL, "--gpu", "H100"], r"FITS H100: peak [\d.]+ \+ margin [\d.]+ of 79\.1 GiB, [\d.]+ free;"),
        ([*SMALL, "--pp", "2", "--gpu", "H100"],
         r"FITS H100: peak [\d.]+ \(stage \d, (forward|backward)\) \+ margin [\d.]+ of 79\.1 GiB, [\d.]+ free"),
        ([*LARGE, "--gpu", "H200"], r"TIGHT on H200: peak [\d.]+ \(stage 1, forward\) \+ margin"),
        ([*LARGE, "--gpu", "H200", "--megatron-core", "0.18"],
         r"DOES NOT FIT H200: resume, driver peak [\d.]+-[\d.]+ \(stage 3\) of 139\.7 GiB, over by [\d.]+ to [\d.]+; "
         r"try first: .*; the step alone: TIGHT on H200: peak [\d.]+ \(stage 1, forward\) \+ margin"),
        ([*LARGE, "--gpu", "T4"], r"DOES NOT FIT T4: .* no single option makes it fit"),
        ([*HUGE, "--gpu", "T4"],
         r"DOES NOT FIT T4: .* no single option makes it fit \(model state alone is .*`bridge-memory whatif --pairs`"),
        ([*SMALL, "--gpu", "T4", "--fp8", "e4m3"], ""),
        ([*SMALL, "--gpu", "H100,L4"], r"FITS H100 \([\d.]+ GiB free\); DOES NOT FIT L4 \(over by [\d.]+ GiB\)"),
        ([*SMALL], r"FITS A100-40GB, .*B300"),
        (OPEN, r"UNKNOWN for H200: modelled peak .*; not modelled: --use-kitchen;"),
    ],
)  # fmt: skip
def test_the_second_line_is_the_answer(capsys: pytest.CaptureFixture[str], command: list[str], answer: str) -> None:
    if not answer:
        assert main(command) == 2  # refused: a T4 has no fp8
        return
    code, out = run(capsys, *command, "--brief")
    assert code == 0 and out.count("\n") == 1
    assert re.match(answer, out), out
    lines = run(capsys, *command)[1].splitlines()
    assert lines[0].startswith("Estimate of ") and out.startswith(lines[1])
    text = " ".join(" ".join(lines).split())
    peak = float(lines[0].rpartition("peak ")[2].split()[0])
    assert any(abs(float(shown) - peak) <= 0.06 for shown in re.findall(r"peak ([\d.]+)", out)), out
    about = out.rstrip().split("; ")[-2:]  # precision and releases, as in the block "The run"
    assert about[0].startswith("weights ") and f"precision {about[0]}" in text and f"releases {about[1]}" in text


@pytest.mark.parametrize("command", [SMALL, LARGE, DEEP, [*SMALL, "--pp", "2", "--gpu", "H100"]])
def test_it_fits_one_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = run(capsys, *command, "--no-phases")[1].splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    whole = run(capsys, *command)[1].splitlines()  # of one GPU with the phases
    assert len(whole) <= 48 and max(map(len, whole)) <= 100
    full = run(capsys, *command, "-v")[1].splitlines()
    assert len(full) > len(lines) and "Assumed" in full


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "fsdp2"], r"optimizer +\w+, PyTorch FSDP2"),
        (["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim"], r"optimizer +.*Megatron-FSDP"),
        (["--peft", "lora"], r"optimizer +.*PEFT lora"),
        (["--fp8", "hybrid"], r"precision +.*fp8 hybrid \(delayed\)"),
    ],
)
def test_what_is_not_the_default_is_said_without_v(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    plain = run(capsys, "estimate", "Qwen/Qwen3-8B", "--num-gpus", "8")[1]
    assert not re.search(words, plain)
    assert re.search(words, run(capsys, "estimate", "Qwen/Qwen3-8B", "--num-gpus", "8", *flags)[1])


def test_an_exit_code_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, *SMALL, "--gpu", "H100", "--require-fit")[0] == 0
    assert run(capsys, *LARGE, "--gpu", "H100", "--require-fit", "--brief")[0] == 3
    assert run(capsys, *SMALL, "--gpu", "H100,L4", "--require-fit")[0] == 3
    assert run(capsys, *OPEN, "--require-fit")[0] == 3
    assert main([*SMALL, "--require-fit"]) == 2
    assert "--gpu" in capsys.readouterr().err


def test_a_gpu_named_twice_is_one_and_the_line_is_of_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    once, twice = (run(capsys, *SMALL, "--gpu", gpu, "--brief")[1] for gpu in ("H100", "H100,h100"))
    assert once == twice
    assert main([*SMALL, "--gpu", "H100", "--brief", "--stage", "0"]) == 2
    assert "--stage" in capsys.readouterr().err



def test_the_fix_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags that it names make it fit."""
    large = [*LARGE, "--gpu", "H200", "--megatron-core", "0.18"]
    out = run(capsys, *large, "--brief")[1]
    fix = re.search(r"try first: (--.*?) \([^()]*\);", out)
    assert fix, out
    assert run(capsys, *large, "--require-fit", *shlex.split(fix[1]))[0] == 0


def test_without_a_command_there_are_three_examples_that_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out == EXAMPLES + "\n"
    examples = re.findall(r"bridge-memory (estimate .*)$", EXAMPLES, re.MULTILINE)
    assert EXAMPLES.count("   bridge-memory ") == 3
    assert run(capsys, *shlex.split(examples[0]))[0] == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("bridge-memory est", ["estimate"]),
        ("bridge-memory estimate --recompute-g", ["--recompute-granularity"]),
        ("bridge-memory estimate --gpu GB", ["GB200", "GB300"]),
        ("bridge-memory estimate openai-community/", ["openai-community/gpt2"]),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], typed: str, found: list[str]) -> None:
    script = run(capsys, "completion", "bash")[1]
    words = typed.split()
    program = (
        f"{script}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _bridge_memory; "
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash"], input=program, capture_output=True, text=True, check=True)
    assert done.stdout.split() == found
