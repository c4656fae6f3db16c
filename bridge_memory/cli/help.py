"""Help: the list of commands by question, and of a command the flags that people use; ``--help-all`` has the rest."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Mapping, Sequence

from bridge_memory.report.screen import LINES, WIDTH

#: Question -> the commands that answer it.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "before a run": ("estimate", "rollout", "quick", "calculate", "validate"),
    "plan: what fits, what to change": ("search", "sweep", "fit", "whatif", "balance", "diff"),
    "after it, or when it failed": ("why", "compare", "record"),
    "is it right?": ("accuracy", "rehearse"),
    "lists, the page, other programs": ("models", "gpus", "serve", "mcp", "completion"),
}
#: Command -> three sets of arguments, the typical question first, which its usage shows too.
EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "estimate": (
        "Qwen/Qwen3-8B --num-gpus 8 --tp 2 --gpu H100",
        "--megatron-args launch.sh --num-gpus 64 --gpu H200 --output report.html",
        "Llama-3.1-8B --engine single --peft lora --num-gpus 1 --gpu A100-80GB",
    ),
    "rollout": (
        "--verl config.yaml --gpu H100",
        "--slime launch.sh --gpu H200 --search",
        "Qwen3-8B --num-gpus 8 --tp 2 --rollout-tp 2 --optimizer-offload --gpu H100",
    ),
    "search": (
        "Qwen/Qwen3-8B --num-gpus 8 --global-batch-size 64 --gpu H100",
        "Qwen3-30B-A3B --num-gpus 64 --tp 1..4 --global-batch-size 512 --gpu H100",
        "Llama-3.1-8B --engine any --num-gpus 8 --global-batch-size 64 --gpu H100",
    ),
    "fit": (
        "Qwen/Qwen3-32B --num-gpus 8 --tp 8 --seq-length 16384 --gpu H100",
        "Qwen/Qwen3-32B --num-gpus 8 --tp 8 --seq-length 16384 --gpu H100 --emit flags",
        "Llama-3.1-70B --engine fsdp2 --num-gpus 64 --gradient-checkpointing --gpu H100",
    ),
    "whatif": (
        "Qwen/Qwen3-32B --num-gpus 8 --tp 8 --gpu H100",
        "Qwen/Qwen3-32B --num-gpus 8 --tp 8 --gpu H100 --target-gib 60",
        "--megatron-args launch.sh --num-gpus 64 --gpu H100 --pairs",
    ),
    "balance": (
        "Qwen/Qwen3-32B --num-gpus 16 --tp 4 --pp 4 --gpu H100",
        "DeepSeek-V3 --num-gpus 256 --pp 16 --ep 16 --gpu H200",
        "--megatron-args launch.sh --num-gpus 64 --gpu H100",
    ),
    "compare": (
        "train.log Qwen/Qwen3-8B --num-gpus 8 --tp 2",
        "memory_report.jsonl --output memory.html",
        "snapshot.pickle Qwen/Qwen3-8B --num-gpus 8 --tp 2 --snapshot-stage 0",
    ),
    "why": (
        "train.log",
        "- --megatron-args launch.sh --num-gpus 64 --gpu H100 < error.txt",
        "snapshot.pickle Qwen/Qwen3-8B --num-gpus 8 --tp 2 --gpu H100",
    ),
    "diff": (
        "before.yaml after.yaml --gpu H100",
        "'Qwen3-8B --num-gpus 8 --tp 2' 'Qwen3-8B --num-gpus 8 --tp 4' --gpu H100",
        "'Qwen3-8B --megatron-core 0.16' 'Qwen3-8B --megatron-core 0.19' --num-gpus 8",
    ),
    "record": (
        "memory_report.jsonl -o rows.jsonl",
        "train.log Qwen/Qwen3-8B --num-gpus 8 --tp 2 --gpu H100 -o rows.jsonl",
    ),
    "rehearse": (
        "Qwen/Qwen3-8B --num-gpus 8 --tp 2 --pp 2 --stage 0",
        "Qwen/Qwen3-8B --num-gpus 8 --tp 2 --layer 0",
    ),
}  # fmt: skip

#: Flags of a run that people use, whatever the command; with a command's own they are what its help shows.
_OF_A_RUN = frozenset({
    "--num-gpus", "--tp", "--pp", "--cp", "--ep", "--vpp", "--engine", "--seq-length", "--micro-batch-size",
    "--global-batch-size", "--recompute-granularity", "--gradient-checkpointing", "--fp8", "--peft", "--megatron-args",
    "--container", "--deepspeed",
})  # fmt: skip
#: Command -> its own flags that people use; those of a command that is not here are shown if they are few.
_OWN: Mapping[str, frozenset[str]] = {
    "estimate": frozenset({
        "--images-per-sample", "--gpu", "-v", "--brief", "--phases", "--stage", "--json", "--output", "--require-fit",
    }),
    "rollout": frozenset({
        "--gpu", "--json", "--output", "--verl", "--nemo-rl", "--slime", "--rollout", "--rollout-tp",
        "--gpu-memory-utilization", "--max-tokens-per-gpu", "--optimizer-offload", "--search", "--emit", "--log",
    }),
    "search": frozenset({"--gpu", "--vary", "--top", "-v", "--emit", "--row", "--json", "--output"}),
    "fit": frozenset({"--gpu", "--vary", "--headroom", "--top", "-v", "--emit", "--row", "--json", "--output"}),
    "whatif": frozenset({"--gpu", "--pairs", "--target-gib", "--top", "--json", "--output"}),
    "balance": frozenset({"--gpu", "--json", "--output"}),
    "compare": frozenset({"--gpu", "--tolerance", "--snapshot-stage", "--snapshot-device", "--json", "--output"}),
    "why": frozenset({"--gpu", "--json", "--output"}),
    "record": frozenset({"--gpu", "--json", "-o", "--format"}),
    "rehearse": frozenset({"--stage", "--layer", "--gpu", "--json", "--output"}),
}
#: Command -> flags of a run that its help leaves out.
_NOT_OF: Mapping[str, frozenset[str]] = {
    "rollout": frozenset({"--container", "--deepspeed", "--fp8", "--vpp", "--peft", "--gradient-checkpointing"}),
}
#: Characters of a flag with its value, in a help of one line a flag.
_FLAG = 34


def commands_help(commands: Mapping[str, tuple[str, str]]) -> str:
    """The list of commands, by question. ``commands``: name -> (module, what it does)."""
    width = max(map(len, commands))
    lines = [
        "usage: bridge-memory COMMAND ...",
        "",
        "How much GPU memory a training run takes, on which pipeline stage, because of which tensors:",
        "Megatron, PyTorch DDP and FSDP, DeepSpeed ZeRO.",
    ]
    for question, names in GROUPS.items():
        lines += ["", question, *(f"  {name:<{width}}  {commands[name][1]}" for name in names if name in commands)]
    return "\n".join([*lines, "", "`bridge-memory COMMAND --help` explains a command."])


class HelpAll(argparse.Action):
    """``--help-all``: every flag."""

    def __init__(self, option_strings: list[str], dest: str, **_: object) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="every flag of this command")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.every_flag = True  # type: ignore[attr-defined]
        parser.print_help()
        parser.exit()


def help_lines(parser: argparse.ArgumentParser, command: str, first: Sequence[str]) -> list[str]:
    """``first`` and the flags: all of them in full or, where that is more than a screen, each in a line or two, those
    that people use where a run's are among them."""
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        formatter.start_section(group.title)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    full = [*first, *formatter.format_help().splitlines()]
    if getattr(parser, "every_flag", False) or (len(full) <= LINES and max(map(len, full)) <= WIDTH):
        return full
    wanted = (_OF_A_RUN - _NOT_OF.get(command, frozenset())) | _OWN[command] if command in _OWN else None
    actions = [action for action in parser._actions if not isinstance(action, (argparse._HelpAction, HelpAll))]
    used = [
        action for action in actions
        if not action.option_strings or action.required or wanted is None or wanted & set(action.option_strings)
    ]
    last = f"`{parser.prog} --help-all` has all {len(actions)} flags, with every name and value."
    lines = list(first)
    for most in (2, 1):
        lines = [*first, "flags:", *(line for action in used for line in _lines(action, most)), "", last]
        if len(lines) <= LINES:
            break
    return lines


def _lines(action: argparse.Action, most: int) -> list[str]:
    """"  --tp N      tensor parallel size": the flag by its first name, and what it does in at most ``most`` lines; of
    choices that are long, the choices."""
    text = " ".join((action.help or "").replace("%%", "%").split())
    name, value = (action.option_strings or [""])[0], "" if action.nargs == 0 else str(action.metavar or "")
    if isinstance(action, argparse.BooleanOptionalAction):
        value = ""
    elif action.choices is not None and not action.metavar:
        value = "|".join(map(str, action.choices))
    width, least = WIDTH - _FLAG - 2, 1
    if "|" in value and len(f"{name} {value}") > _FLAG - 2:
        choices, value = value.replace("|", ", "), "NAME"
        text, least = f"{choices}: {text}", len(_wrapped(choices, width))
    flag = f"  {name} {value}".rstrip() if name else f"  {value or action.dest}"
    first, *rest = _shortened(text, width, max(most, least)) or [""]
    return [f"{flag:<{_FLAG}}  {first}".rstrip(), *(" " * (_FLAG + 2) + line for line in rest)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)


def _shortened(text: str, width: int, most: int) -> list[str]:
    """``text`` in at most ``most`` lines: as many of its clauses as they hold."""
    ends = [
        match.start() for match in re.finditer(r"[;,:] | \([^()]*\)(?=[;,:]|$)", text)
        if text.count("(", 0, match.start()) == text.count(")", 0, match.start())
    ]  # fmt: skip
    for end in (len(text), *reversed(ends)):
        lines = _wrapped(text[:end], width)
        if len(lines) <= most:
            return lines
    return textwrap.wrap(text, width, max_lines=most, placeholder=" ...", break_on_hyphens=False)
