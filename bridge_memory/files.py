"""Files that are whole or not there. Imports nothing."""

from __future__ import annotations

import os
import stat
import tempfile


def write_whole(path: str | os.PathLike[str], text: str, *, replace: bool = True) -> None:
    """Write ``text`` as UTF-8 through a temporary file beside ``path``, so that nobody ever reads half of it and a kill
    leaves the old file or the new one. An existing file keeps its mode; FileExistsError for one without ``replace``.
    Raises OSError."""
    target = os.path.realpath(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".bridge-memory-")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(target))
        if replace:
            os.replace(temporary, target)
        else:
            _place(temporary, target)
        temporary = None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _mode(target: str) -> int:
    """The mode that open() would give the file; an existing one keeps its own."""
    try:
        return stat.S_IMODE(os.stat(target).st_mode)
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def _place(temporary: str, target: str) -> None:
    """Rename without replacing: a link fails where the name is taken; then the temporary name goes."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # A file system without links (some network mounts).
        if os.path.exists(target):
            raise FileExistsError from None
        os.rename(temporary, target)
        return
    os.unlink(temporary)
