"""Files and texts from elsewhere, read within limits; files written atomically.

``parse_json``, ``parse_yaml`` and ``parse_toml`` are the only parsers of text that this package did not write. Each
bounds size, nesting and values (a YAML's aliases expanded), which also bounds time, and raises ``Unparsed`` alone.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: Most bytes of a text file: far more than any config, calibration or script has.
MOST = 16 << 20
_CHUNK = 1 << 20
#: Most characters of YAML and TOML, which Python code parses, and most values, with aliases expanded: some 2 s.
MOST_CHARACTERS, MOST_VALUES = 1 << 20, 20_000
#: Most values of JSON, as far as its commas and brackets tell; and most levels of any format.
MOST_JSON_VALUES, MOST_DEPTH = 1_000_000, 40
#: Characters of a number of YAML. It knows numbers to the base 60, which take quadratic time.
LONGEST_NUMBER = 100
#: A TOML key of more parts than ``MOST_DEPTH``; tomllib takes quadratic time for one.
_DOTTED = re.compile(
    r"""(?<![\w\\-])(?:(?:[A-Za-z0-9_-]{1,200}|"(?:[^"\\\n]|\\.){0,200}"|'[^'\n]{0,200}')"""
    rf"[ \t]{{0,200}}\.[ \t]{{0,200}}){{{MOST_DEPTH + 1}}}"
)


class Unparsed(ValueError):
    """A text that is not of its format, or beyond the limits; says why, and where if that is known."""


def read_bytes(
    path: str | os.PathLike[str], give: str, most: int = MOST, *, most_after: Callable[[bytes], int] | None = None,
    pipes: bool = True,
) -> bytes:  # fmt: skip
    """The content of a file or pipe.

    Args:
        path: The file.
        give: The fix of a refusal, such as "give a log".
        most: Most bytes.
        most_after: The limit as a function of the first 16 bytes, which identify the format. Replaces ``most``.
        pipes: Whether a pipe or a device is read, which can keep the reader waiting.

    Raises:
        SpecError: The file cannot be read, or is larger than the limit.
    """
    name = bounded(os.fspath(path), 120)
    parts: list[bytes] = []
    left = most
    try:
        with open(path, "rb", opener=None if pipes else _open_at_once) as file:
            if not pipes and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if most_after is not None:
                parts.append(file.read(16))
                left = most = most_after(parts[0])
                left -= len(parts[0])
            while left >= 0 and (part := file.read(min(_CHUNK, left + 1))):
                parts.append(part)
                left -= len(part)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        raise SpecError(f"{name} cannot be read ({getattr(error, 'strerror', None) or error}); {give}") from None
    if left < 0:
        raise SpecError(f"{name} is larger than {most >> 20} MiB; {give}")
    return b"".join(parts)


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_text(
    path: str | os.PathLike[str], give: str, most: int = MOST, *, errors: str = "strict"
) -> str:
    """The text of a UTF-8 file, with line ends converted to ``\\n``. Limits and errors as in ``read_bytes``."""
    try:
        return text_of(read_bytes(path, give, most), errors)
    except UnicodeDecodeError:
        raise SpecError(f"{bounded(os.fspath(path), 120)} is no text file in UTF-8; {give}") from None


def text_of(data: bytes, errors: str = "strict") -> str:
    """UTF-8 bytes, or UTF-16 with its mark, as text, with line ends converted to ``\\n``. Raises UnicodeDecodeError."""
    encoding = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8"
    return data.decode(encoding, errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes, *, once: bool = False) -> Any:
    """The value of a JSON text. ``once``: a key that is there twice is an error. Raises Unparsed."""
    try:
        if isinstance(text, bytes):
            text = text.decode(json.detect_encoding(text), "surrogatepass")
        if sum(map(text.count, ",[{")) > MOST_JSON_VALUES:
            raise Unparsed(f"it has more than {MOST_JSON_VALUES:,} values")
        value = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_once if once else None)
    except json.JSONDecodeError as error:
        raise Unparsed(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except UnicodeDecodeError:
        raise Unparsed("it is no text in UTF-8") from None
    except RecursionError:
        raise Unparsed("it is nested too deeply") from None
    except Unparsed:
        raise
    except ValueError:  # more digits than Python converts
        raise Unparsed("it has a number that is too long") from None
    _check_depth(value)
    return value


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON. Raises Unparsed for a duplicate key, as DeepSpeed does (``config_utils.py:
    dict_raise_error_on_duplicate_keys``)."""
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise Unparsed(f"{bounded(key, 60)} is there twice")
        out[key] = value
    return out


def parse_yaml(text: str) -> Any:
    """The value of a YAML text of plain data. Raises Unparsed, and ImportError without PyYAML."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """Counts nodes as they are composed, before any value is made; an alias counts as what it stands for."""

        #: Nodes so far, the level of the current one, and levels below it.
        values = depth = below = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event, before, outside = self.peek_event(), self.values, self.below
            self.depth, self.below = self.depth + 1, 0
            if not isinstance(event, yaml.AliasEvent):
                self.values += 1
            elif event.anchor in sizes:
                values, self.below = sizes[event.anchor]
                self.values += values
            elif event.anchor in self.anchors:
                raise Unparsed("it has an alias that stands for itself")
            if self.values > MOST_VALUES:
                raise Unparsed(f"it has more than {MOST_VALUES:,} values")
            if self.depth + self.below > MOST_DEPTH:
                raise Unparsed("it is nested too deeply")
            node = super().compose_node(parent, index)
            if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
                raise Unparsed("it has a number that is too long")
            sizes[event.anchor] = self.values - before, self.below
            self.depth, self.below = self.depth - 1, max(outside, self.below + 1)
            return node

    #: Anchor -> nodes of what it stands for, and levels below it.
    sizes: dict[str | None, tuple[int, int]] = {}
    if len(text) > MOST_CHARACTERS:
        raise Unparsed(f"it is larger than {MOST_CHARACTERS >> 20} MiB")
    try:
        return yaml.load(text, Loader)
    except Unparsed:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f" at line {mark.line + 1} column {mark.column + 1}" if mark else ""
        raise Unparsed(f"{error.problem or 'it cannot be read'}{at}") from None
    except yaml.YAMLError as error:
        raise Unparsed(" ".join(str(error).split())) from None
    except Exception as error:  # PyYAML's constructors, of a tag whose value it cannot be
        raise Unparsed(f"a value is not what its tag says ({type(error).__name__})") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text. Raises Unparsed, and ImportError on Python 3.10 without tomli."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        import tomli as tomllib

    if len(text) > MOST_CHARACTERS:
        raise Unparsed(f"it is larger than {MOST_CHARACTERS >> 20} MiB")
    if sum(map(text.count, ",[{=")) > MOST_VALUES:
        raise Unparsed(f"it has more than {MOST_VALUES:,} values")
    if _DOTTED.search(text):
        raise Unparsed("it is nested too deeply")
    try:
        value: dict[str, Any] = tomllib.loads(text)
    except RecursionError:
        raise Unparsed("it is nested too deeply") from None
    except ValueError as error:
        raise Unparsed(str(error)) from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    """Raise Unparsed for more levels than ``MOST_DEPTH``. ``value`` is a tree."""
    level: list[Any] = [value]
    for _ in range(MOST_DEPTH):
        tables: Iterable[Any] = (one.values() if isinstance(one, dict) else one
                                 for one in level if isinstance(one, (dict, list)))  # fmt: skip
        level = [below for table in tables for below in table]
        if not level:
            return
    raise Unparsed("it is nested too deeply")


def write_whole(path: str | os.PathLike[str], text: str | bytes, *, replace: bool = True) -> None:
    """Write a file atomically: through a temporary file in the same folder, which then replaces ``path``.

    Readers never see a partial file, and a kill leaves the old file or the new one. An existing file keeps its mode,
    and its owner and group where this process may give them; other hard links keep the old content.

    Args:
        path: The file; a link is followed.
        text: Its content; str is encoded as UTF-8.
        replace: Whether an existing file may be replaced.

    Raises:
        FileExistsError: The file exists and ``replace`` is False.
        OSError: It cannot be written, or is not a regular file.
    """
    target = os.path.realpath(path)
    temporary = None
    existing = _existing(target)
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".bridge-memory-")
        with os.fdopen(handle, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        if existing is None:
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
        else:
            _give(temporary, existing)
        if replace:
            os.replace(temporary, target)
        else:
            _place(temporary, target)
        temporary = None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _existing(target: str) -> os.stat_result | None:
    """What the system says of the file that is there. Raises OSError for a device."""
    try:
        found = os.stat(target)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):  # replacing a device would remove it
        raise OSError(errno.EINVAL, "not a regular file")
    return found


def _give(path: str, existing: os.stat_result) -> None:
    """Owner, group and mode of ``existing``. A group that cannot be given loses its rights."""
    mode = stat.S_IMODE(existing.st_mode)
    if hasattr(os, "chown"):
        with suppress(OSError):
            os.chown(path, existing.st_uid, -1)
        try:
            os.chown(path, -1, existing.st_gid)
        except OSError:
            mode &= ~0o2070
    os.chmod(path, mode)


def _place(temporary: str, target: str) -> None:
    """Rename without replacing: create a hard link, which fails if the name exists, then unlink the temporary name."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links (some network mounts)
        if os.path.exists(target):
            raise FileExistsError from None
        os.rename(temporary, target)
        return
    os.unlink(temporary)
