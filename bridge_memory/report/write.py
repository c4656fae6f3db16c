"""Writes a report to a file: whole or not at all, and over an existing file only with ``force``."""

from __future__ import annotations

import os
import stat

from bridge_memory.files import write_whole
from bridge_memory.spec import SpecError


def check_target(path: str, *, force: bool = False, flag: str = "--output") -> None:
    """Raise SpecError, naming ``flag``, if ``path`` cannot be written; called before any work is done."""
    if not path:
        raise SpecError(f"{flag} is empty; name a file")
    if path == "-":
        raise SpecError(f"{flag} - is no file; drop {flag} to print instead")
    try:
        folder = os.path.dirname(os.path.realpath(path))
        found = os.stat(path)
    except FileNotFoundError:
        if not os.path.isdir(folder):
            raise SpecError(f"{flag} {path}: the folder {folder} does not exist; make it first") from None
        return
    except (OSError, ValueError) as error:
        raise SpecError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}; name another file") from None
    if not stat.S_ISREG(found.st_mode):
        raise SpecError(f"{flag} {path} is not a regular file; name a file")
    if not force:
        raise SpecError(f"{flag} {path} exists; name another file or add --force")
    if found.st_nlink > 1:
        raise SpecError(
            f"{flag} {path} has {found.st_nlink} names (hard links), and one of them would be replaced; remove it, or "
            "name another file"
        )


def write_text(path: str, text: str | bytes, *, force: bool = False, flag: str = "--output") -> None:
    """Write ``text`` as UTF-8 to ``path``. Raises SpecError.

    Without ``force`` an existing file is kept, even one created meanwhile.
    """
    check_target(path, force=force, flag=flag)
    try:
        write_whole(path, text, replace=force)
    except FileExistsError:
        raise SpecError(f"{flag} {path} exists; name another file or add --force") from None
    except OSError as error:
        raise SpecError(f"{flag} {path}: {error.strerror}; name a file that can be written") from None
