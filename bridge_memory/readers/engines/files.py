"""Safe parsing of JSON, YAML and TOML configuration files, with limits on their size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: A configuration is a few kB.
MOST_BYTES = 1 << 20
#: Most values of a configuration, after expanding a YAML's aliases.
MOST_VALUES = 20_000
MOST_DEPTH = 40
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
    if text.lstrip("\ufeff \t\n").startswith(("{", "[")) and not name.endswith(".toml"):
        value = _json(text, name)
    elif name.endswith(".toml"):
        value = _toml(text, name)
    else:
        value = _yaml(text, name)
    if not isinstance(value, Mapping):
        held = "nothing" if value is None else f"a {type(value).__name__}"
        raise SpecError(f"{name}: it holds {held}; it must be a table of names and values")
    plain: Mapping[str, Any] = _plain(value, name)
    return plain


def without_comments(text: str) -> str:
    """Remove what DeepSpeed accepts in addition to JSON (``runtime/config.py: DeepSpeedConfig.__init__`` reads Hjson).

    That is comments (``//``, ``#`` and ``/* */``) outside strings, and trailing commas. Line numbers do not change.
    """
    text = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return _COMMA.sub(lambda found: found[1] or found[2], text)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Raise SpecError for a duplicate key, as DeepSpeed does (``config_utils.py:
    dict_raise_error_on_duplicate_keys``)."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise SpecError(f"{bounded(key, 60)} is there twice; keep one")
        out[key] = value
    return out


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=_once)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
    except json.JSONDecodeError as error:
        raise SpecError(
            f"{name}: not valid JSON: {error.msg} at line {error.lineno} column {error.colno}; correct it there"
        ) from None
    except (ValueError, RecursionError):
        raise SpecError(f"{name}: not valid JSON: nested too deeply or a number too long; simplify it") from None


def _yaml(text: str, name: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise SpecError(f"{name}: YAML needs PyYAML, which is not there; pip install pyyaml, or give JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        what = error.problem or "it cannot be read"
        raise SpecError(f"{name}: not valid YAML: {what}{at}; correct it there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise SpecError(f"{name}: not valid YAML ({reason}); correct it") from None


def _toml(text: str, name: str) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib
        except ImportError:
            raise SpecError(f"{name}: TOML needs Python 3.11 or tomli; pip install tomli") from None
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{name}: not valid TOML: {bounded(str(error), 120)}; correct it there") from None


def _plain(value: Any, name: str) -> Any:
    """A copy with str keys and with a YAML's aliases expanded, up to MOST_VALUES values."""
    count = 0

    def copied(one: Any, depth: int) -> Any:
        nonlocal count
        count += 1
        if count > MOST_VALUES or depth > MOST_DEPTH:
            raise SpecError(f"{name}: it holds more values, or deeper ones, than any configuration; give another file")
        if isinstance(one, Mapping):
            return {str(k): copied(v, depth + 1) for k, v in one.items()}
        if isinstance(one, (list, tuple)):
            return [copied(v, depth + 1) for v in one]
        return one

    return copied(value, 0)


