"""Configuration files of JSON, YAML or TOML, read within a bound and taken apart safely."""

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
#: Values of a configuration, after what a YAML names and repeats is written out.
MOST_VALUES = 20_000
MOST_DEPTH = 40
#: What is not closed ends with the line, or the text: nothing is looked through twice.
_STRING = r'("(?:[^"\\\n]|\\.)*"?)'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*[\s\S]*?(?:\*/|\Z)")
_COMMA = re.compile(_STRING + r"|,(\s*[}\]])")


def read_table(path: str, give: str) -> Mapping[str, Any]:
    """The table that a file holds. Raises SpecError of one line."""
    return table_of(read_text(path, give, MOST_BYTES), path)


def table_of(text: str, name: str) -> Mapping[str, Any]:
    """The table that a text is: JSON where it begins like it, TOML by the file's name, else YAML. Raises SpecError."""
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
    """JSON of what DeepSpeed reads besides: ``//``, ``#`` and ``/* */`` outside of strings, and a comma before a
    closing bracket (``runtime/config.py: DeepSpeedConfig.__init__`` takes Hjson). Lines stay where they are."""
    text = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
    return _COMMA.sub(lambda found: found[1] or found[2], text)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """DeepSpeed refuses a key that is there twice (``config_utils.py: dict_raise_error_on_duplicate_keys``)."""
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
        said = " ".join(str(error).split())[:80]
        raise SpecError(f"{name}: not valid YAML ({said}); correct it") from None


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
    """A copy with text keys, in which what a YAML repeats by reference is written out, up to a bound."""
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


