"""Reading files up to a size limit, and writing them atomically."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: Most bytes of a text file: far more than any config, calibration or script has.
MOST = 16 << 20
_CHUNK = 1 << 20


def read_bytes(
    path: str | os.PathLike[str], give: str, most: int = MOST, *, most_after: Callable[[bytes], int] | None = None
) -> bytes:
    """The content of a file or pipe.

    Args:
        path: The file.
        give: The fix of a refusal, such as "give a log".
        most: Most bytes.
        most_after: The limit as a function of the first 16 bytes, which identify the format. Replaces ``most``.

    Raises:
        SpecError: The file cannot be read, or is larger than the limit.
    """
    name = bounded(os.fspath(path), 120)
    parts: list[bytes] = []
    left = most
    try:
        with open(path, "rb") as file:
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


def read_text(
    path: str | os.PathLike[str], give: str, most: int = MOST, *, errors: str = "strict"
) -> str:
    """The text of a UTF-8 file, with line ends converted to ``\\n``. Limits and errors as in ``read_bytes``."""
    try:
        return text_of(read_bytes(path, give, most), errors)
    except UnicodeDecodeError:
        raise SpecError(f"{bounded(os.fspath(path), 120)} is no text file in UTF-8; {give}") from None


def text_of(data: bytes, errors: str = "strict") -> str:
    """UTF-8 bytes as text, with line ends converted to ``\\n``. Raises UnicodeDecodeError."""
    return data.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """``json.loads``, with ValueError instead of RecursionError for input that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_whole(path: str | os.PathLike[str], text: str | bytes, *, replace: bool = True) -> None:
    """Write a file atomically: through a temporary file in the same folder, which then replaces ``path``.

    Readers never see a partial file, and a kill leaves the old file or the new one. An existing file keeps its mode.

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
    mode = _mode(target)
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".bridge-memory-")
        with os.fdopen(handle, "wb") as file:
            file.write(text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        if replace:
            os.replace(temporary, target)
        else:
            _place(temporary, target)
        temporary = None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _mode(target: str) -> int:
    """The mode of the existing file, or the one that open() would give a new file. Raises OSError for a device."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    if not stat.S_ISREG(mode):  # replacing a device would remove it
        raise OSError(errno.EINVAL, "not a regular file")
    return stat.S_IMODE(mode)


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
