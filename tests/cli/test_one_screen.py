"""What a command prints without being asked for more is one screen: 40 lines of 100 characters."""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from functools import cache

import pytest

from bridge_memory.cli import main

#: Those that have most to say: experts, pipeline stages, MTP, searches, pairs of changes.
COMMANDS = (
    "estimate DeepSeek-V3 --tp 4 --pp 4 --ep 8 --num-gpus 128 --num-layers-in-last-pipeline-stage 16 --gpu H200",
    "estimate gpt-oss-120b --num-gpus 64 --ep 8 --pp 4 --gpu H100 --phases",
    "estimate Llama-3.1-70B --num-gpus 64 --tp 4 --cp 2 --pp 4 --seq-length 32768 --gpu H100 --reserved",
    "estimate DeepSeek-V3 --tp 2 --etp 1 --pp 16 --ep 64 --num-gpus 2048 --num-layers-in-first-pipeline-stage 3 "
    "--num-layers-in-last-pipeline-stage 2 --gpu H100",
    "estimate Llama-3.1-405B --tp 8 --pp 7 --num-gpus 504 --gpu H100",
    "search Qwen3-30B-A3B --num-gpus 64 --tp 1 --pp 4 --ep 8 --micro-batch-size 1 --global-batch-size 512 --gpu H100",
    "search Llama-3.1-8B --engine any --num-gpus 8 --global-batch-size 64 --gpu H100",
    "whatif Qwen3-32B --num-gpus 8 --tp 8 --gpu H100 --pairs --target-gib 60",
    "rollout Qwen3-8B --num-gpus 8 --tp 2 --rollout-tp 2 --gpu H100 --search",
    "diff 'Qwen3-8B --tp 2' 'Qwen3-8B --tp 4' 'Qwen3-8B --pp 2' --num-gpus 8 --gpu H100",
    "quick 8", "models",
)


@cache
def printed(command: str) -> str:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as terminal, redirect_stdout(out):
        terminal.setenv("COLUMNS", "100")
        main(shlex.split(command))
    return out.getvalue()


def test_what_a_command_prints_fits_a_screen() -> None:
    for command in COMMANDS:
        lines = printed(command).splitlines()
        assert 10 < len(lines) <= 40 and max(map(len, lines)) <= 100, (command, len(lines))


def test_stages_and_components_are_always_seen() -> None:
    """All stages up to eight, else the first, the highest and the last; five components of the highest and the rest."""
    for command in (one for one in COMMANDS if one.startswith("estimate")):
        text = printed(command)
        table, components = (text.split(f"\n\n{title}")[1].split("\n\n")[0] for title in ("Memory of", "Largest"))
        stages = [int(n) for n in re.findall(r"^(\d+)(?: \*)? +\d", table, re.MULTILINE)]
        (highest,) = re.findall(r"^(\d+) \*", table, re.MULTILINE)
        last = int(re.findall(r"--pp (\d+)", command)[0]) - 1
        ends = sorted({0, int(highest), last})
        assert stages == (list(range(last + 1)) if last < 8 else ends), command
        assert len(re.findall(r"^ *\d+\.\d+ ", components, re.MULTILINE)) >= 6, command


def test_what_was_left_out_is_counted_and_shown_on_demand() -> None:
    whatif = "whatif Qwen3-32B --num-gpus 8 --tp 8 --gpu H100 --pairs"
    for command, names, more in (
        (COMMANDS[0], "more that decide", "-v"), (COMMANDS[3], "more stage", "-v"),
        (COMMANDS[6], "-v also shows", "-v"), (whatif, "--top N", "--top 20"),
    ):  # fmt: skip
        short = printed(command)
        assert names in short and len(printed(f"{command} {more}")) > len(short)
