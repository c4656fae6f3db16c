"""Files: read up to a limit of bytes, written atomically."""

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

#: Default limit in bytes of a file that is read: far more than any config, calibration or script has.
MOST = 16 << 20
_CHUNK = 1 << 20


def read_bytes(
    path: str | os.PathLike[str], give: str, most: int = MOST, *, most_after: Callable[[bytes], int] | None = None
) -> bytes:
    """A file or a pipe, read once from its start. ``most``: limit in bytes; ``most_after``: a function that returns the
    limit from the first 16 bytes. Raises SpecError, with ``give`` ("give a log"), if it cannot be read or is larger."""
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
    """``read_bytes`` as UTF-8 text with universal newlines. Raises SpecError."""
    try:
        return text_of(read_bytes(path, give, most), errors)
    except UnicodeDecodeError:
        raise SpecError(f"{bounded(os.fspath(path), 120)} is no text file in UTF-8; {give}") from None


def text_of(data: bytes, errors: str = "strict") -> str:
    """Bytes as UTF-8 text with universal newlines. Raises UnicodeDecodeError."""
    return data.decode("utf-8", errors).replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str | bytes) -> Any:
    """``json.loads``; raises ValueError also for JSON that is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_whole(path: str | os.PathLike[str], text: str | bytes, *, replace: bool = True) -> None:
    """Write ``text`` as UTF-8 atomically: through a temporary file in the same folder, so that readers see, and a kill
    leaves, the old file or the new one. An existing file keeps its mode; without ``replace`` it raises FileExistsError.
    Raises OSError, also if ``path`` is not a regular file."""
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
    """The mode that open() would give a new file, or that of an existing one. Raises OSError for a device."""
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
    if not stat.S_ISREG(mode):  # os.replace would replace the device by a file
        raise OSError(errno.EINVAL, "not a regular file")
    return stat.S_IMODE(mode)


def _place(temporary: str, target: str) -> None:
    """Rename without replacing: a hard link fails if the name is taken; then the temporary name is removed."""
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
