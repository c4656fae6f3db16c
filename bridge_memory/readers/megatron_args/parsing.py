"""Parsing Megatron-LM's arguments from a command line, a launch script, the YAML of a functional test, a dict, or the
parsed arguments (``megatron.training.get_args()``).

The result is ``RawArguments``: names with underscores instead of dashes (``num_layers``), values as written. A flag
without a value is ``True``; an unset argument is absent. ``arguments`` interprets them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

from bridge_memory.spec import SpecError, show

#: Most characters of a command line, script or YAML: Linux's MAX_ARG_STRLEN. shlex copies a word for each of its
#: characters, so that longer texts would take very long.
MOST_TEXT = 128 << 10
#: Most characters to which all of a script's variables may expand together.
MOST_EXPANDED = 4 << 20
#: No argument has an integer beyond this.
_MOST = 1 << 64

Value = bool | int | float | str | list[Any]

#: Options of torchrun and srun, which appear next to Megatron's in a launch script.
_LAUNCHER = {
    "nproc_per_node", "nproc-per-node", "nnodes", "node_rank", "node-rank", "master_addr", "master-addr",
    "master_port", "master-port", "rdzv_id", "rdzv-id", "rdzv_backend", "rdzv-backend", "rdzv_endpoint",
    "rdzv-endpoint", "max_restarts", "max-restarts", "log_dir", "log-dir", "tee", "redirects", "standalone",
    "nodes", "ntasks", "ntasks-per-node", "gpus", "gpus-per-node", "gpus-per-task", "gres", "cpus-per-task", "mpi",
    "container-image", "container-mounts", "container-workdir", "container-name", "no-container-mount-home",
    "partition", "account", "job-name", "exclusive",
    "time", "mem", "output", "error", "label", "kill-on-bad-exit", "cpu-bind",
}


@dataclass(frozen=True, slots=True)
class RawArguments:
    """Arguments as written, with the environment and the number of ranks if the source states them."""

    values: dict[str, Value]
    env: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    #: Whether ``values`` has all of argparse's destinations (``get_args()``); else it has options as written.
    parsed: bool = False


def argument_name(option: str) -> str:
    """``--num-layers`` -> ``num_layers``, as argparse derives a destination."""
    return option.lstrip("-").replace("-", "_")


def read_arguments(source: object) -> RawArguments:
    """Arguments from a dict, a token list, a command line, a launch script, a functional-test YAML or a namespace.

    A string is a YAML if a line starts with ``MODEL_ARGS:``, a script if it assigns a shell array, else a
    command line. Raises SpecError for any other source.
    """
    if isinstance(source, str):
        if len(source) > MOST_TEXT:
            raise SpecError(f"the arguments are {len(source)} characters; give the options alone, {MOST_TEXT} at most")
        if re.search(r"^MODEL_ARGS:", source, re.MULTILINE):
            return _from_yaml(source)
        if re.search(r"^[ \t]*(export[ \t]+)?\w+\+?=\(", source, re.MULTILINE):
            return _from_script(source)
        try:
            return _without_launcher(_from_tokens(shlex.split(source, comments=True)), text=source)
        except ValueError as error:
            raise SpecError(f"the arguments cannot be split into words ({error}); check the quotes") from None
    if isinstance(source, Mapping):
        return RawArguments(_from_mapping(source))
    if isinstance(source, Sequence):
        return RawArguments(_from_tokens([str(word) for word in source]))
    if not hasattr(source, "__dict__"):
        raise SpecError(f"the arguments are {show(source)}; give a text, a list of words, a dict or get_args()")
    return RawArguments(_from_namespace(vars(source)), parsed=True)


def is_namespace(source: object) -> bool:
    """Whether ``source`` is Megatron-LM's parsed arguments rather than a ConfigContainer of Megatron Bridge."""
    return not hasattr(source, "model") and hasattr(source, "hidden_size")


def _from_namespace(source: Mapping[str, object]) -> dict[str, Value]:
    """The values of a namespace after ``validate_args``: dtypes and enums by name, without those that are None."""
    values: dict[str, Value] = {}
    for name, value in source.items():
        if value is not None and not name.startswith("_"):
            values[name] = [_plain(v) for v in value] if isinstance(value, list | tuple) else _plain(value)
    return values


def _plain(value: object) -> Any:
    """A value as it would be written on a command line; impossible values as messages quote them."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int) and not -_MOST < value < _MOST:
        return show(value)
    try:
        return value if isinstance(value, bool | int | float | str) else str(value)
    except Exception:
        return show(value)


def _from_mapping(source: Mapping[str, object]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for option, value in source.items():
        if value is None:
            continue
        if value in ("true", "", "false"):
            value = value != "false"
        if isinstance(value, (list, tuple)):
            value = [_plain(v) for v in value]
        elif not isinstance(value, (bool, int, float, str)):
            raise SpecError(f"--{argument_name(option)} has a value of type {type(value).__name__}; use text")
        values[argument_name(option)] = value if isinstance(value, list) else _plain(value)
    return values


def _from_tokens(tokens: Sequence[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    option: str | None = None
    words: list[str] = []

    def flush() -> None:
        if option is not None:
            value: Value = list(words) if len(words) > 1 else words[0] if words else True
            values[argument_name(option)] = value

    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            flush()
            option, _, inline = token.partition("=")
            words = [inline] if inline else []
        elif option is None:
            # Words before the first option: the program's name, or a launcher's.
            continue
        else:
            words.append(token)
    flush()
    return values


# ---- the YAML of Megatron-LM's functional tests: two levels of `key: value` ----


def _from_yaml(text: str) -> RawArguments:
    sections: dict[str, dict[str, str]] = {}
    section: dict[str, str] | None = None
    for line in text.splitlines():
        body = _without_comment(line)
        if not body.strip():
            continue
        key, colon, value = body.strip().partition(":")
        if not colon:
            continue
        if not line[0].isspace():
            section = sections.setdefault(key, {}) if not value.strip() else None
        elif section is not None:
            section[key.strip("'\" ")] = value.strip()
    if "MODEL_ARGS" not in sections:
        raise SpecError("the YAML has no MODEL_ARGS section; give a functional test's model_config.yaml")
    values = _from_mapping({k: _yaml_scalar(v) for k, v in sections["MODEL_ARGS"].items()})
    return RawArguments(values, {k: str(_yaml_scalar(v)) for k, v in sections.get("ENV_VARS", {}).items()})


def _without_comment(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _yaml_scalar(text: str) -> object:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return {"true": True, "false": False, "null": None, "~": None, "": None}.get(text.lower(), text)


# ---- launch scripts: assignments of words and arrays, then a command that expands them ----


class _Variables(dict[str, str]):
    """Shell variables with a limit on their total expansion: a variable that doubles itself would exhaust memory."""

    left = MOST_EXPANDED

    def used(self, name: str, otherwise: str) -> str:
        """The value of ``name``. Raises SpecError if the total expansion exceeds MOST_EXPANDED."""
        value = self.get(name, otherwise)
        self.left -= len(value)
        if self.left < 0:
            raise SpecError(f"the script's variables (such as {show(name)}) expand to too much; give the options alone")
        return value


def _from_script(text: str) -> RawArguments:
    joined = re.sub(r"\\\n", " ", text)
    variables = _Variables()
    arrays: dict[str, list[str]] = {}
    env: dict[str, str] = {}
    position = 0
    assignment = re.compile(r"^[ \t]*(export[ \t]+)?(\w+)(\+?)=", re.MULTILINE)
    while match := assignment.search(joined, position):
        exported, name, plus = match.group(1), match.group(2), match.group(3)
        start = match.end()
        if joined[start : start + 1] == "(":
            end = _closing_bracket(joined, start)
            words = _shell_words(joined[start + 1 : end], variables)
            arrays[name] = (arrays.get(name, []) if plus else []) + words
        else:
            line_end = joined.find("\n", start)
            end = len(joined) if line_end < 0 else line_end
            raw = joined[start:end]
            if raw.startswith(('"', "'")):  # a quoted value may span lines
                close = joined.find(raw[0], start + 1)
                end = close + 1 if close > 0 else end
                value = _expand(joined[start + 1 : end - 1], variables)
            else:
                value = (_shell_words(raw, variables) or [""])[0]
            variables[name] = (variables.get(name, "") + value) if plus else value
            if exported:
                env[name] = variables[name]
        position = end
    tokens = list(_script_tokens(joined, arrays, variables))
    values = _from_tokens(tokens)
    found = _without_launcher(values, env, joined, variables)
    if not found.values:
        raise SpecError("the script holds no Megatron arguments; give the arrays with the --options in them")
    return found


def _without_launcher(
    values: dict[str, Value], env: Mapping[str, str] | None = None, text: str = "", variables: _Variables | None = None
) -> RawArguments:
    """``RawArguments`` without the options of torchrun and srun, which give the number of ranks."""
    own = {argument_name(name) for name in _LAUNCHER}
    rest = {name: value for name, value in values.items() if name not in own}
    return RawArguments(rest, dict(env or {}), _launched_ranks(values, text, variables or _Variables()))


def _script_tokens(text: str, arrays: dict[str, list[str]], variables: _Variables) -> Iterator[str]:
    """Words of every array that a command expands, in order; of all arrays if no command expands one."""
    used = list(dict.fromkeys(re.findall(r"\$\{(\w+)\[@\]\}", text)))
    for name in [n for n in used if n in arrays] or list(arrays):
        yield from arrays[name]
    # Older scripts keep options in one long string, expanded unquoted.
    for name in dict.fromkeys(re.findall(r"\$\{?(\w+)\}?", text)):
        value = variables.get(name, "")
        if "--" in value and name not in arrays:
            yield from _shell_words(value, variables)


def _closing_bracket(text: str, start: int) -> int:
    depth, quote = 0, ""
    for i in range(start, len(text)):
        char = text[i]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return i
    raise SpecError("the script has a shell array without its closing bracket; give the whole script")


def _shell_words(text: str, variables: _Variables) -> list[str]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise SpecError(f"the script cannot be split into words ({error}); check the quotes") from None
    return [_expand(word, variables) for word in words]


def _expand(text: str, variables: _Variables) -> str:
    """Replace ``$NAME``, ``${NAME}`` and ``${NAME:-default}``; unknown variables are left as written."""

    def with_default(match: re.Match[str]) -> str:
        return variables.used(match.group(1), "") or _expand(match.group(2), variables)

    text = re.sub(r"\$\{(\w+):?-([^{}]*)\}", with_default, text)
    text = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda m: variables.used(m.group(1) or m.group(2), m.group(0)), text)
    product = _PRODUCT.fullmatch(text)
    return str(prod(map(int, product.group(1).split("*")))) if product else text


#: A product of at most eight numbers of at most 18 digits; other arithmetic is left as written.
_PRODUCT = re.compile(r"\$\(\(((?:[ \t]*[0-9]{1,18}[ \t]*\*){0,7}[ \t]*[0-9]{1,18}[ \t]*)\)\)")


#: Quantity -> its options in ``#SBATCH`` lines and srun.
_SLURM = {
    "nodes": r"-N|--nodes", "tasks": r"-n|--ntasks", "tasks_per_node": r"--ntasks-per-node",
    "gpus_per_node": r"--gpus-per-node|--gres", "gpus": r"-G|--gpus",
}
#: Slurm's variables inside a job -> the quantity.
_SLURM_VARIABLES = {
    "SLURM_NNODES": "nodes", "SLURM_JOB_NUM_NODES": "nodes", "SLURM_NTASKS": "tasks", "SLURM_NPROCS": "tasks",
    "SLURM_NTASKS_PER_NODE": "tasks_per_node", "SLURM_GPUS_PER_NODE": "gpus_per_node",
    "SLURM_GPUS_ON_NODE": "gpus_per_node",
}


def _launched_ranks(values: Mapping[str, Value], text: str, variables: _Variables) -> int | None:
    """Number of ranks: torchrun's processes per node times nodes, else srun's tasks; None if neither is given."""
    slurm = _slurm(text, variables)
    for name, fact in _SLURM_VARIABLES.items():
        if fact in slurm:
            variables.setdefault(name, str(slurm[fact]))
    per_node = _launcher_option(values, "nproc_per_node", text, variables)
    if per_node is not None:
        nodes = _launcher_option(values, "nnodes", text, variables)
        ranks = slurm.get("gpus_per_node") if per_node in ("gpu", "auto") else _count(per_node)
        all_nodes = 1 if nodes is None else _count(nodes)
        return None if ranks is None or all_nodes is None else ranks * all_nodes
    if "tasks" in slurm:
        return slurm["tasks"]
    if "tasks_per_node" in slurm:
        return slurm["tasks_per_node"] * slurm["nodes"] if "nodes" in slurm else None
    return None


def _launcher_option(values: Mapping[str, Value], name: str, text: str, variables: _Variables) -> str | None:
    """The value of a torchrun option, from the parsed arrays or from the command's text."""
    found: str | None = None
    if name in values:
        words = words_of(values[name])  # the last option is followed by the program
        found = words[0] if words else None
    else:
        spelled = name.replace("_", "[_-]")
        match = re.search(rf"(?:^|[ \t])--{spelled}[= \t]+[\"']?([^\s\"']{{1,200}})", text, re.MULTILINE)
        found = match.group(1) if match else None
    return None if found is None else _expand(found, variables)


def _slurm(text: str, variables: _Variables) -> dict[str, int]:
    """Quantities of a batch script's ``#SBATCH`` lines, overridden by those of its last srun."""
    found: dict[str, int] = {}
    lines = [line.strip() for line in text.splitlines()]
    batch = [line[len("#SBATCH"):] for line in lines if line.startswith("#SBATCH")]
    runs = [" " + line.partition("srun")[2] for line in lines if re.match(r"(\w+=\S* )*srun\s", line)]
    for line in (*batch, *runs[-1:]):
        for fact, names in _SLURM.items():
            for match in re.finditer(rf"(?:^|\s)(?:{names})[= \t]+[\"']?(\S{{1,200}})", line):
                word = _expand(match.group(1).strip("\"'"), variables)
                number = _count(word.rpartition(":")[2])  # gpu:h100:8
                if number is not None:
                    found[fact] = number
    return found


def _count(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdecimal() and 0 < len(word) < 9 else None


def words_of(value: Value) -> list[str]:
    """The words of ``[a b]``, ``a,b``, ``a b`` or a list, as tests and command lines write lists."""
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return [w for w in re.split(r"[\s,]+", str(value).strip("[]() ").replace("'", "").replace('"', "")) if w]
