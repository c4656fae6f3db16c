"""Refusals in the words of the command line.

A RunSpec's refusals name its fields, as Megatron calls them. Whoever typed ``--tp 3`` is told about ``--tp``: a field
becomes the spelling of its flag that was typed, or the flag's first one where it was not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from bridge_memory.arguments.flags import FLAGS, MODEL_FLAGS, PACKAGES, SPECS, VALUES
from bridge_memory.spec.fields import called, rules_of

#: What is no field of a group: its name in Python -> the flag.
OTHERS = {"gpu_arch": "--gpu", "gpu": "--gpu", "unit": "--unit"}
#: Spellings of a size, and of the size that is the same unless it is given.
_TP, _ETP = (
    frozenset(next(flag for flag in FLAGS if flag.field == field).names.split())
    for field in ("parallel.tensor_model_parallel_size", "parallel.expert_tensor_parallel_size")
)
_SPELLING = re.compile(r"--[a-z][a-z0-9-]*")


def as_typed(message: str, argv: Sequence[str]) -> str:
    """``message`` with fields as flags of the command line ``argv``.

    Inside of --megatron-args only what stands there is known, so fields that do not stay as they are.
    """
    typed = set(_SPELLING.findall(" ".join(argv)))
    ours = "--megatron-args" not in typed
    for name, spellings, switch, choices in _fields():
        used = [s for s in spellings if s in typed]
        if name == "stage" and not used and "--stage" in typed:  # of the pipeline; --zero-stage is the field's flag
            used = ["--stage"]
        if used or (ours and name not in MODEL_FLAGS):
            flag = used[0] if used else spellings[0]
            message = _named(message, name, flag, choices)
            if switch:
                message = _switched(message, flag, typed=bool(used))
    if typed & _TP and not typed & _ETP:
        message = re.sub(r"--etp \((\d+)\)", r"--etp (\1, that of --tp)", message, count=1)
    return message


@cache
def _fields() -> list[tuple[str, tuple[str, ...], bool, tuple[str, ...]]]:
    """(Megatron's name, spellings, whether it is a switch, the names that it takes) of every flag's field."""
    rows = []
    for flag in FLAGS:
        group, _, field = flag.field.partition(".")
        rule = rules_of(SPECS[group])[field]
        switch = bool in rule.types
        others = tuple(name for name, (of, _) in VALUES.items() if of == flag.field)
        rows.append((called(SPECS[group], field), (*flag.names.split(), *others), switch, rule.names))
    rows += [(name, (flag,), False, ()) for name, flag in MODEL_FLAGS.items()]
    rows += [(flag.removeprefix("--").replace("-", "_"), (flag,), False, ()) for flag in PACKAGES]
    rows += [(name, (flag,), False, ()) for name, flag in OTHERS.items()]
    return sorted(rows, key=lambda row: -len(row[0]))


def _named(message: str, name: str, flag: str, choices: Sequence[str]) -> str:
    """One field. A name that is a word of its own ("optimizer", "fp8") means the field only beside a value of it, or
    where something is to be done with it."""
    whole = rf"{re.escape(name)}(?![\w-])"
    if flag in PACKAGES:
        whole += r"(?= \(| does nothing)"
    elif "_" not in name:
        value = "|".join([r"\(", *(rf"{re.escape(choice)}\b" for choice in choices)])
        whole = rf"(?:{whole}(?= (?:{value}))|(?<=set ){whole}(?= to )|(?<=drop ){whole}|(?<=needs ){whole}|^{whole})"
    return re.sub(rf"(?<![\w.-]){whole}", flag, message)


def _switched(message: str, flag: str, *, typed: bool) -> str:
    """A switch has no value: "--x (True)", "set --x to False"."""
    off = flag.replace("--", "--no-", 1)
    if flag in VALUES:  # One that says False.
        return message.replace(f"{flag} (False)", flag).replace(f"set {flag} to True", f"drop {flag}")
    if message.startswith(f"{flag} (True)"):
        message = message.replace("set it to False", f"add {off}")
    if message.startswith(f"{flag} (False)"):
        message = message.replace("set it to True", f"drop {off}")
    for said, instead in (
        (f"set {flag} to True", f"add {flag}"), (f"set {flag} to False", f"add {off}"),
        (f"{flag}; set that to True", f"{flag}; add it"), (f"{flag} (False)", off),
        (f"{flag} (True)", flag if typed else f"{flag} (the default)"),
    ):  # fmt: skip
        message = message.replace(said, instead)
    return message
