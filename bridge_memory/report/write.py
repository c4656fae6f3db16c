"""Writing a report to a file: whole or not at all, and never over another without being told to."""

from __future__ import annotations

import os
import stat
import tempfile

from bridge_memory.spec import SpecError


def check_target(path: str, *, force: bool = False) -> None:
    """Raise SpecError if ``path`` cannot be written to, before any work is done."""
    if not path:
        raise SpecError("--output is empty; name a file")
    try:
        folder = os.path.dirname(os.path.realpath(path))
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise SpecError(f"--output {path}: the folder {folder} does not exist; make it first") from None
        return
    except (OSError, ValueError) as error:
        raise SpecError(f"--output {path}: {getattr(error, 'strerror', None) or error}; name another file") from None
    if not stat.S_ISREG(mode):
        raise SpecError(f"--output {path} is not a regular file; name a file")
    if not force:
        raise SpecError(f"--output {path} exists; name another file or add --force")


def write_text(path: str, text: str, *, force: bool = False) -> None:
    """Write ``text`` as UTF-8 to ``path``. Raises SpecError.

    Without ``force`` an existing file stays as it is, even one that appeared in between.
    """
    check_target(path, force=force)
    try:
        write_whole(path, text, replace=force)
    except FileExistsError:
        raise SpecError(f"--output {path} exists; name another file or add --force") from None
    except OSError as error:
        raise SpecError(f"--output {path}: {error.strerror}; name a file that can be written") from None


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
