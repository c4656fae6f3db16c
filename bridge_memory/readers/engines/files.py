"""Configuration files in JSON, YAML or TOML as tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge_memory.files import Unparsed, parse_json, parse_toml, parse_yaml, read_text
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: A configuration is a few kB.
MOST_BYTES = 1 << 20
#: An unclosed string or comment ends with the line, or with the text, so that matching takes linear time.
_STRING = r'("(?:[^"\\\n]|\\.)*"?)'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*[\s\S]*?(?:\*/|\Z)")
_COMMA = re.compile(_STRING + r"|,(\s*[}\]])")


def read_table(path: str, give: str) -> Mapping[str, Any]:
    """The top-level table of a file. Raises SpecError."""
    return table_of(read_text(path, give, MOST_BYTES), path)


def table_of(text: str, name: str) -> Mapping[str, Any]:
    """The top-level table of a text: JSON if it begins with a bracket, TOML by the file's name, else YAML. Raises
    SpecError."""
    name = bounded(name, 120)
    kind = "YAML"
    if name.endswith(".toml"):
        kind = "TOML"
    elif text.lstrip("\ufeff \t\n").startswith(("{", "[")):
        kind = "JSON"
    try:
        value = _parsed(text, kind)
    except Unparsed as error:
        raise SpecError(f"{name}: not valid {kind}: {bounded(str(error), 160)}; correct it there") from None
    except ImportError as error:
        fix = "pip install pyyaml, or give JSON" if kind == "YAML" else "pip install tomli, or use Python 3.11"
        raise SpecError(f"{name}: {kind} needs {error.name}, which is not installed; {fix}") from None
    if not isinstance(value, Mapping):
        held = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError(f"{name}: it holds {held}; it must be a table of names and values")
    return {str(key): _plain(one) for key, one in value.items()}


def _parsed(text: str, kind: str) -> Any:
    if kind == "JSON":
        return parse_json(text, once=True)
    return parse_toml(text) if kind == "TOML" else parse_yaml(text)


def _plain(value: Any) -> Any:
    """A copy with str keys, in which no two tables are the same object."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def without_comments(text: str) -> str:
    """Remove what DeepSpeed accepts in addition to JSON (``runtime/config.py: DeepSpeedConfig.__init__`` reads Hjson).

    That is comments (``//``, ``#`` and ``/* */``) outside strings, and trailing commas. Line numbers do not change.
    """
    text = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return _COMMA.sub(lambda found: found[1] or found[2], text)
