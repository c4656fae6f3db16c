"""The command line: ``bridge-memory COMMAND ...``. One module a command, imported only when asked for.

A command module has ``add_arguments(parser)``, which declares ``output.add_output_arguments`` among others, and
``run(args) -> int``, which prints. Wrong input is one line on stderr and exit code 2; nothing ends in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bridge_memory.cli.help import EXAMPLES as EXAMPLES_OF
from bridge_memory.cli.help import HelpAll, commands_help, help_lines
from bridge_memory.cli.output import command_line, written
from bridge_memory.report.document import one_line
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import LONGEST_LINE, FileError, bounded

#: Command -> (module, what it does). A new command is one line here and its module.
COMMANDS = {
    "estimate": ("bridge_memory.cli.estimate", "peak memory of every pipeline stage, and whether it fits a GPU"),
    "quick": ("bridge_memory.cli.quick", "an estimate from the number of parameters alone"),
    "calculate": ("bridge_memory.cli.calculate", "an estimate from the JSON of a GPU memory calculator"),
    "validate": ("bridge_memory.cli.validate", "all errors of a configuration file, with a fix for each"),
    "search": ("bridge_memory.cli.search", "layouts that fit a GPU, the fastest first"),
    "sweep": ("bridge_memory.cli.sweep", "the best layout of many models, cards and sizes, in one table"),
    "fit": ("bridge_memory.cli.fit", "what to recompute or offload so that a layout fits a GPU, in the least time"),
    "whatif": ("bridge_memory.cli.whatif", "what each single change of an option frees, and its cost in step time"),
    "balance": ("bridge_memory.cli.balance", "the split of layers over pipeline stages with the lowest peak"),
    "diff": ("bridge_memory.cli.diff", "what differs between configurations, and which bytes follow"),
    "models": ("bridge_memory.cli.models", "the embedded models and their parameters"),
    "accuracy": ("bridge_memory.cli.accuracy", "predicted memory or speed compared with measured runs"),
    "compare": ("bridge_memory.cli.compare", "a run's logs or memory snapshots compared with its estimate"),
    "why": ("bridge_memory.cli.why", "why a job ran out of memory, from its error, log or snapshot, and what to do"),
    "record": ("bridge_memory.cli.record", "a run's journal or log as a row of measured runs, nothing personal in it"),
    "rehearse": ("bridge_memory.cli.rehearse", "the real megatron-core, run for one rank with or without a GPU"),
    "rollout": ("bridge_memory.cli.rollout", "trainer and rollout on the same GPUs, phase by phase: RL post-training"),
    "gpus": ("bridge_memory.cli.gpus", "the known GPUs and their usable memory"),
    "serve": ("bridge_memory.cli.serve", "a web page for all of this, served on this machine"),
    "mcp": ("bridge_memory.cli.mcp", "a Model Context Protocol server, for coding assistants"),
    "completion": ("bridge_memory.cli.completion", "a completion script for bash, zsh or fish"),
}

#: Commands that take the flags of a run (``run_flags.add_run_arguments``).
_WITH_A_RUN = ("estimate", "search", "fit", "whatif", "balance", "compare", "why", "record", "rehearse")
#: Set it to see the traceback of what should not have happened.
TRACEBACK_VARIABLE = "BRIDGE_MEMORY_TRACEBACK"
EXIT_USAGE = 2
EXIT_BUG = 70  # EX_SOFTWARE of sysexits.h
EXIT_IO = 74  # EX_IOERR


#: What is printed where nothing was asked for.
EXAMPLES = """\
bridge-memory says how much GPU memory a training run takes, before it is launched. Try:

  does it fit?      bridge-memory estimate Qwen/Qwen3-8B --num-gpus 8 --tp 2 --gpu H100
  what would fit?   bridge-memory search Qwen/Qwen3-30B-A3B --num-gpus 64 --global-batch-size 512 --gpu H100
  show it to me     bridge-memory estimate Qwen/Qwen3-8B --num-gpus 8 --tp 2 --gpu H100 --output report.html

`bridge-memory --help` lists the commands, `bridge-memory models` the models that it knows."""


#: Lines of a usage that lists every flag; where it takes more, it lists none.
_USAGE_LINES = 3


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors. Abbreviations are off: a flag means what it says."""

    #: Whether the help has every flag.
    every_flag = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument("--help-all", action=HelpAll)

    def format_usage(self) -> str:
        full = super().format_usage()
        if full.count("\n") <= _USAGE_LINES:
            return full
        named = [
            f"[{a.metavar or a.dest} ...]" if a.nargs == "*" else f"[{a.metavar or a.dest}]" if not a.required
            else str(a.metavar or a.dest)
            for a in self._actions if not a.option_strings
        ]
        needed = [f"{a.option_strings[0]} {a.metavar}" for a in self._actions if a.option_strings and a.required]
        words = " ".join([self.prog, *named, *needed, "[flags]"])
        return f"usage: {words}\n" + "".join(f"e.g.:  {self.prog} {typical}\n" for typical in self._examples[:1])

    @property
    def _examples(self) -> tuple[str, ...]:
        return EXAMPLES_OF.get(self.prog.split()[-1], ())

    def format_help(self) -> str:
        """What the command does, its usage, examples, and the flags that people use; or all."""
        usage = self.format_usage().splitlines()
        if len(self._examples) > 1:
            usage = [usage[0], "", "examples:", *(f"  {self.prog} {example}" for example in self._examples)]
        return "\n".join(help_lines(self, self.prog.split()[-1], [str(self.description), "", *usage, ""])) + "\n"

    def error(self, message: str) -> NoReturn:
        raise SpecError(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        from bridge_memory.cli.suggest import MEANT_VALUES

        known = action.choices is None or value in action.choices
        for flag in () if known else action.option_strings:
            if meant := MEANT_VALUES.get((flag, value)):
                self.error(f"argument {flag}: invalid choice: {value!r}; {meant}")
        super()._check_value(action, value)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}{self._suggestion(unknown[0])}")
        return args

    def _suggestion(self, flag: str) -> str:
        from bridge_memory.cli.suggest import suggestion

        positional = [a.metavar for a in self._actions if not a.option_strings and isinstance(a.metavar, str)]
        found = suggestion(flag.split("=")[0], list(self._option_string_actions), positional)
        return f"; {found or f'`{self.prog} --help` lists the flags'}"


def _version() -> str:
    """This release's, and of what an answer is for where nobody says which releases run."""
    from bridge_memory import __version__
    from bridge_memory.releases import (
        DEFAULT_MEGATRON_CORE,
        DEFAULT_TORCH,
        DEFAULT_TRANSFORMER_ENGINE,
        release_words,
    )

    core, te, torch = map(release_words, (DEFAULT_MEGATRON_CORE, DEFAULT_TRANSFORMER_ENGINE, DEFAULT_TORCH))
    return (
        f"bridge-memory {__version__}\n"
        f"by default for megatron-core {core}, Transformer Engine {te}, torch {torch}"
    )  # fmt: skip


def _in_flags(error: SpecError, argv: Sequence[str]) -> str:
    """A refusal of a command that takes the flags of a run, in those flags; of a file, in the file's words."""
    message = str(error)
    if not argv or argv[0] not in _WITH_A_RUN or isinstance(error, FileError):
        return message
    from bridge_memory.arguments.as_typed import as_typed

    return as_typed(message, argv[1:])


def _complain(kind: str, message: str) -> None:
    if sys.stderr is not None:  # closed (2>&-)
        print(bounded(f"bridge-memory: {kind}: {one_line(message)}", LONGEST_LINE), file=sys.stderr)


class _Closed(io.TextIOBase):
    """In place of a stdout that is closed (>&-): whoever writes no report there has no need of it."""

    def write(self, text: str) -> int:
        raise SpecError("standard output is closed; leave it open, or send it to a file")


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        print(EXAMPLES)
        return EXIT_USAGE
    if argv[0] in ("-h", "--help", "help"):
        print(commands_help(COMMANDS))
        return 0
    if argv[0] == "--version":
        print(_version())
        return 0
    if argv[0] not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(argv[0], COMMANDS, n=1)
        meant = f"did you mean {near[0]}, of {', '.join(COMMANDS)}?" if near else f"there are {', '.join(COMMANDS)}"
        raise SpecError(f"unknown command {argv[0]!r}; {meant}")
    module_name, what = COMMANDS[argv[0]]
    module = importlib.import_module(module_name)
    parser = _Parser(prog=f"bridge-memory {argv[0]}", description=f"{what[0].upper()}{what[1:]}.", allow_abbrev=False)
    module.add_arguments(parser)
    args = parser.parse(argv[1:])
    args.command_line = command_line(argv)
    with written(args):
        code: int = module.run(args)
    return code


def _let_go_of_stdout() -> None:
    """Where what is still to be written cannot be: keep the interpreter's last flush from failing, which would change
    the exit code to 120."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for wrong input, 74 for a device that fails, 70 for our fault."""
    if sys.stdout is None:
        sys.stdout = _Closed()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A model's name may hold what the locale cannot show; that must not end the report.
            stream.reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(given)
        sys.stdout.flush()
        return code
    except SpecError as error:
        _complain("error", _in_flags(error, given))
        return EXIT_USAGE
    except SystemExit as exit_:  # argparse's --help
        return exit_.code if isinstance(exit_.code, int) else 0
    except BrokenPipeError:  # The reader went away (`| head`).
        _let_go_of_stdout()
        return 141  # 128 + SIGPIPE, as a shell reports it
    except OSError as error:  # A full disk behind stdout, say: nobody's wrong input, and no fault of the program.
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _complain("error", str(error))
        _let_go_of_stdout()
        return EXIT_IO
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _complain(
            "internal error",
            f"{type(error).__name__}: {error} (a fault of bridge-memory; {TRACEBACK_VARIABLE}=1 shows where)",
        )
        return EXIT_BUG
