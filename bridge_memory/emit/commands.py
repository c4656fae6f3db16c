"""What every format of ``--emit`` is made of: the words of flags, and the ``estimate`` command of a run."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

from bridge_memory.arguments.flags import FLAG_OF, FLAGS, MODEL_FLAGS, PACKAGES, spelling
from bridge_memory.releases import release_words
from bridge_memory.spec import OptimizerSpec, RecomputeSpec, RunSpec


class Emitted(NamedTuple):
    """A run in the words of another tool."""

    text: str
    #: What ``text`` leaves to be said elsewhere; for people.
    note: str = ""
    #: The same for programs: "group.field" -> its value in the run.
    left: Mapping[str, Any] = {}

    @property
    def commented(self) -> str:
        """The text below its note, as comments of shell, Python, YAML and TOML; JSON has none, and stays as it is."""
        if not self.note or self.text.startswith("{"):
            return self.text
        return "\n".join([*textwrap.wrap(self.note, 110, initial_indent="# ", subsequent_indent="# "), self.text])


def flag_words(flag: str, value: Any, separator: str = ",") -> list[str]:
    """A flag with its value as it is typed; ``separator``: between the values of a list."""
    if value is True:
        return [flag]
    if value is False:
        return ["--no-" + flag.removeprefix("--")]
    if isinstance(value, tuple) and value and type(value[0]) is int:
        return [flag, release_words(value)]
    if isinstance(value, tuple):
        return [flag, *value] if separator == " " else [flag, separator.join(value)]
    return [flag, str(value)]


def field_words(fields: Mapping[str, Any]) -> list[str]:
    """"group.field" -> value as flags; None and empty lists are not written."""
    given = {spelling(name): value for name, value in fields.items() if value is not None and value != ()}
    return [word for flag, value in given.items() for word in flag_words(flag, value)]


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """"group.field" -> value, of what the flags give."""
    return {flag.field: getattr(args, flag.field) for flag in FLAGS if hasattr(args, flag.field)}


def left_idle(before: RunSpec, after: RunSpec) -> list[str]:
    """"group.field" of what ``before`` was given and does nothing in ``after``, whose command refuses it
    (``arguments.silent``)."""
    idle = []
    was, now = before.recompute, after.recompute
    if was.granularity == "selective" != now.granularity and was.modules != RecomputeSpec().modules:
        idle.append("recompute.modules")
    offloads = before.optimizer.optimizer_cpu_offload and not after.optimizer.optimizer_cpu_offload
    if offloads and before.optimizer.optimizer_offload_fraction != OptimizerSpec().optimizer_offload_fraction:
        idle.append("optimizer.optimizer_offload_fraction")
    return idle


def names_files(args: argparse.Namespace) -> bool:
    """Whether a config file of a trainer stands beside MODEL."""
    return any(getattr(args, name) is not None for name in FLAG_OF)


def estimate_words(
    run: RunSpec, args: argparse.Namespace, gpu: str, fields: Mapping[str, Any], *, files: bool = True
) -> list[str]:
    """The ``estimate`` command of ``run``: the model of ``args`` on the GPUs of ``run``, then ``fields`` ("group.field"
    -> value). ``files``: with the config files that ``args`` name."""
    source = ["--custom-config", args.custom_config] if args.model is None else [args.model]
    words = ["bridge-memory", "estimate", *source, "--gpu", gpu, "--num-gpus", str(run.parallel.world_size)]
    others = {**MODEL_FLAGS, **(FLAG_OF if files else {})}
    others |= {flag.removeprefix("--").replace("-", "_"): flag for flag in PACKAGES}
    if args.mapping != "builtin":
        others["mapping"] = "--mapping"
    for name, flag in others.items():
        if getattr(args, name) is not None:
            words += flag_words(flag, getattr(args, name))
    return words + field_words({name: value for name, value in fields.items() if name != "parallel.world_size"})
