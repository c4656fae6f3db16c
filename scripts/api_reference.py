#!/usr/bin/env python3
"""Write references/api.md from the docstrings of the names that ``bridge_memory`` exports.

``--check`` writes nothing and fails when the page is out of date (the test suite runs it).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bridge_memory  # noqa: E402

PAGE = ROOT / "references" / "api.md"

HEAD = f"""\
# The Python interface

Everything here is imported from `bridge_memory`. `scripts/api_reference.py` makes this page from the docstrings, and
the test suite runs every example. [In Python](python.md) is the short introduction.

- Sizes are bytes, as integers; people are shown GiB (2^30 bytes).
- What cannot be estimated raises `SpecError`, a `ValueError` of one line: the field, its value, what to give instead.
- Importing `bridge_memory` needs neither torch nor megatron. What needs more is imported when it is asked for.
- Letters of shapes: s sequence, b micro batch, h hidden size, a heads, g query groups, d head dimension,
  f feed-forward width, E experts, k experts a token, V padded vocabulary.

This is release {bridge_memory.__version__}.
"""

#: Question -> the names that answer it, in the order of the page.
SECTIONS: dict[str, tuple[str, ...]] = {
    "Before a run: how much memory, and does it fit": (
        "estimate", "peaks", "explain", "fits", "find_gpu", "list_presets", "clear_caches", "Estimate", "StageEstimate",
        "StagePeak", "Component", "Fit", "Verdict", "Gpu",
    ),
    "Planning a run: what fits, and what to change": (
        "search", "Found", "Row", "whatif", "WhatIf", "Effect", "Change", "balance", "Balanced",
    ),
    "During a run: predicted and measured, side by side": (
        "MemoryReport", "MemoryReportCallback", "install", "uninstall", "run_of_trainer", "run_of_accelerator",
        "run_of_deepspeed", "run_of_torchtitan",
    ),
    "After a run: was the prediction right": (
        "compare", "Comparison", "StageResidual", "rehearse", "RehearsalResult", "RehearsalRow",
    ),
    "Where a model and a run come from": (
        "resolve_model", "model_from_hf_config", "model_from_transformer_config", "run_from_megatron_args",
        "run_from_config_container", "run_from_files",
    ),
    "Specs: what is trained, and how": (
        "RunSpec", "ParallelSpec", "BatchSpec", "PrecisionSpec", "OptimizerSpec", "DataParallelSpec", "PeftSpec",
        "RecomputeSpec", "ImplementationSpec",
    ),
    "Options of PyTorch's and DeepSpeed's engines": (
        "DDPOptions", "FSDPOptions", "DeepSpeedOptions", "TransformersSpec",
    ),
    "The architecture of a model": (
        "ModelSpec", "LayerSpec", "AttentionSpec", "MLASpec", "IndexerSpec", "SparseSpec", "CompressedAttentionSpec",
        "MambaSpec", "GatedDeltaNetSpec", "SideBySideSpec", "MLPSpec", "MoESpec", "EncoderSpec",
    ),
    "Errors": ("SpecError", "RehearsalUnavailable"),
}  # fmt: skip

#: Headings of a docstring's parts, and what the page calls them.
_PARTS = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises", "Example": "Example"}
#: What stands before a parameter that takes any number of arguments.
_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def page() -> str:
    """The whole page."""
    out = [HEAD, "\n"]
    for title, names in SECTIONS.items():
        out.append(f"- [{title}](#{_anchor(title)}): {', '.join(f'`{name}`' for name in names)}\n")
    for title, names in SECTIONS.items():
        out.append(f"\n## {title}\n")
        for name in names:
            out.append("\n" + "".join(_entry(name, getattr(bridge_memory, name))))
    return "".join(out)


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _entry(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}\n\n"
    parts = _parts(thing)
    signature = _signature(name, thing)
    if signature:
        yield f"```python\n{signature}\n```\n\n"
    yield _prose(parts[""]) + "\n"
    fields = list(_fields(thing)) if inspect.isclass(thing) else []
    if fields:
        yield "\n| field | type | default | |\n|---|---|---|---|\n"
        for field, type_, default, comment in fields:
            yield f"| `{field}` | {_code(type_)} | {_code(default)} | {_cell(comment)} |\n"
    for part in ("Args", "Returns", "Raises"):
        if part in parts:
            yield f"\n**{_PARTS[part]}**\n\n"
            yield _prose(parts[part]) + "\n" if part == "Returns" else _listed(parts[part])
    members = list(_members(thing)) if inspect.isclass(thing) else []
    if members:
        yield "\n**Has**\n\n"
        yield from (f"- `{member}`: {text}\n" for member, text in members)
    if "Example" in parts:
        yield f"\n```pycon\n{textwrap.dedent(parts['Example']).strip()}\n```\n"


# ---- docstrings ----


def _parts(thing: Any) -> dict[str, str]:
    """A docstring by its headings; what is before the first is ""."""
    text = inspect.cleandoc(thing.__doc__ or "")
    parts: dict[str, list[str]] = {"": []}
    at = ""
    for line in text.splitlines():
        if line.endswith(":") and line[:-1] in _PARTS:
            at = line[:-1]
            parts[at] = []
        else:
            parts[at].append(line)
    return {name: "\n".join(lines).strip("\n") for name, lines in parts.items()}


def _prose(text: str) -> str:
    """Paragraphs, each on one line."""
    paragraphs = re.split(r"\n\s*\n", textwrap.dedent(text).strip())
    return "\n\n".join(_marked(" ".join(paragraph.split())) for paragraph in paragraphs)


def _marked(text: str) -> str:
    """``code`` of docstrings as `code` of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _listed(text: str) -> str:
    """"name: words", on several lines, as a list."""
    items: list[str] = []
    for line in textwrap.dedent(text).strip("\n").splitlines():
        if line and not line.startswith(" "):
            items.append(line)
        elif items:
            items[-1] += " " + line.strip()
    out = []
    for item in items:
        name, _, words = item.partition(":")
        out.append(f"- `{name}`: {_marked(words.strip())}\n")
    return "".join(out)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`" if text else ""


def _cell(text: str) -> str:
    return _marked(text).replace("|", "\\|")


# ---- signatures and fields ----


def _signature(name: str, thing: Any) -> str:
    """As it is written; none for a class that is described by its fields."""
    if inspect.isclass(thing):
        own = thing.__dict__.get("__init__")
        if own is None or dataclasses.is_dataclass(thing) or issubclass(thing, (tuple, Exception)):
            return ""
        function = own
    else:
        function = thing
    given = inspect.signature(function)
    lines, star = [], False
    for parameter in given.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            star = True
            lines.append("*,")
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        text = _STARS.get(parameter.kind, "") + parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {_value(parameter.default)}"
        lines.append(text + ",")
    given_back = given.empty if inspect.isclass(thing) else given.return_annotation
    result = "" if given_back is given.empty else f" -> {given_back}"
    short = f"{name}({' '.join(lines).removesuffix(',')}){result}"
    if len(short) <= 100:
        return short
    return "\n".join([f"{name}(", *(f"    {line}" for line in lines), f"){result}"])


def _value(value: Any) -> str:
    """A default, as one would type it."""
    if isinstance(value, Enum):
        return repr(value.value)
    if inspect.isfunction(value) or inspect.isclass(value):
        return str(value.__name__)
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}()"
    return repr(value)


def _fields(cls: type) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, comment) of a dataclass's or a named tuple's fields, or the values of an enum."""
    defaults = _defaults(cls)
    if not defaults:
        return
    source = textwrap.dedent(inspect.getsource(cls))
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    lines = source.splitlines()
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name = statement.target.id
        if name not in defaults:
            continue
        default, names = defaults[name]
        comment = _comment(lines, statement.lineno - 1)
        if names:
            which = "Any of" if default.startswith("(") else "One of"
            comment = f"{comment} {which} {', '.join(f'``{word}``' for word in names)}.".strip()
        yield name, ast.get_source_segment(source, statement.annotation) or "", default, comment


def _defaults(cls: Any) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """Field -> its default ("" where there is none), and the names that it may hold."""
    if dataclasses.is_dataclass(cls):
        found = {}
        for field in dataclasses.fields(cls):
            if field.init:
                rule = field.metadata.get("rule")
                found[field.name] = (_default(field), rule.names if rule else ())
        return found
    if issubclass(cls, tuple):
        return {
            name: (_value(cls._field_defaults[name]) if name in cls._field_defaults else "", ()) for name in cls._fields
        }
    return {}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"{getattr(field.default_factory, '__name__', '')}()"
    return "" if field.default is dataclasses.MISSING else _value(field.default)


def _comment(lines: list[str], at: int) -> str:
    """The ``#:`` comment above a line."""
    found: list[str] = []
    while at and lines[at - 1].strip().startswith("#:"):
        at -= 1
        found.insert(0, lines[at].strip().removeprefix("#:").strip())
    return " ".join(found)


def _members(cls: type) -> Iterator[tuple[str, str]]:
    """(how it is called, what it does) of public methods and properties that say it; of an enum its values."""
    if issubclass(cls, Enum):
        for member in cls:
            yield f"{cls.__name__}.{member.name}", f'"{member.value}"'
        return
    for name, member in vars(cls).items():
        function = getattr(member, "func", member.fget if isinstance(member, property) else member)
        if name.startswith("_") or not callable(function) or not getattr(function, "__doc__", None):
            continue
        is_value = isinstance(member, property) or hasattr(member, "func")
        words = _prose(_parts(function)[""].split("\n\n")[0])
        yield (name if is_value else f"{name}{_arguments(function)}"), words


def _arguments(function: Any) -> str:
    return _signature("", function).partition(" -> ")[0].replace("\n    ", " ").replace("\n", "")


def main(argv: list[str] | None = None) -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    args = parser.parse_args(argv)
    text = page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if args.check:
        print(f"{PAGE.relative_to(ROOT)}: out of date; run scripts/api_reference.py")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
