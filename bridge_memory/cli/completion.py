"""``bridge-memory completion SHELL``: a script for the shell, made of the commands' own parsers."""

from __future__ import annotations

import argparse
import shlex

from bridge_memory.cli.output import add_output_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "shell", choices=("bash", "zsh", "fish"),
        help="bash: eval \"$(bridge-memory completion bash)\"; zsh: the same; fish: ... | source",
    )  # fmt: skip
    add_output_arguments(parser, "a list of {command, flags}")


def run(args: argparse.Namespace) -> int:
    """Print the script. Returns 0."""
    flags = _flags()
    if args.json:
        import json

        print(json.dumps([{"command": name, "flags": list(of)} for name, of in flags.items()], indent=2))
        return 0
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](flags))
    return 0


#: Flag -> the values that it takes, if they can be listed.
Flags = dict[str, tuple[str, ...]]


def _flags() -> dict[str, Flags]:
    """Of every command; "" is what MODEL takes, "--gpu" the known cards."""
    import importlib

    from bridge_memory.cards.rows import GPUS
    from bridge_memory.cli import COMMANDS
    from bridge_memory.readers import list_presets

    out = {}
    for name, (module, _) in COMMANDS.items():
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(module).add_arguments(parser)
        flags: Flags = {}
        for action in parser._actions:
            values = tuple(map(str, action.choices or ()))
            if not action.option_strings:
                flags[""] = flags.get("", ()) + (values or (tuple(list_presets()) if action.dest == "model" else ()))
            for flag in action.option_strings:
                flags[flag] = tuple(GPUS) if flag == "--gpu" else values
        out[name] = flags
    return out


def _words(words: tuple[str, ...] | list[str]) -> str:
    return shlex.quote(" ".join(words))


def _bash(flags: dict[str, Flags]) -> str:
    cases, values = [], []
    for command, of in flags.items():
        cases.append(f"    {command}) words={_words([*(f for f in of if f), *of.get('', ())])} ;;")
        values += [
            f"    {shlex.quote(f'{command} {flag}')}) words={_words(list(some))} ;;"
            for flag, some in of.items() if flag and some
        ]  # fmt: skip
    return "\n".join(
        [
            "_bridge_memory() {",
            '  local words="" word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"',
            "  if [ \"$COMP_CWORD\" -eq 1 ]; then",
            f"    words={_words([*flags, '--help', '--version'])}",
            "  else",
            '  case "${COMP_WORDS[1]}" in', *cases, "  esac",
            '  case "${COMP_WORDS[1]} $before" in', *values, "  esac",
            "  fi",
            '  COMPREPLY=($(compgen -W "$words" -- "$word"))',
            "}",
            "complete -o default -F _bridge_memory bridge-memory",
        ]
    )  # fmt: skip


def _zsh(flags: dict[str, Flags]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(flags)


def _fish(flags: dict[str, Flags]) -> str:
    none = "__fish_use_subcommand"
    lines = [f"complete -c bridge-memory -f -n {none} -a {shlex.quote(command)}" for command in flags]
    for command, of in flags.items():
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        for flag, some in of.items():
            takes = f" -x -a {_words(list(some))}" if some else ""
            if not flag:
                if some:
                    lines.append(f"complete -c bridge-memory {seen} -a {_words(list(some))}")
                continue
            kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            lines.append(f"complete -c bridge-memory {seen} {kind}{takes}")
    return "\n".join(lines)
