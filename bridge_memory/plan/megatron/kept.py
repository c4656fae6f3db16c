"""What blocks cost, kept in a folder between searches.

A file holds one grid of sizes, micro batches and sets of recomputation of one model, under a name that follows from
them, from the settings and from every line of this package: another release finds nothing of the last. What is not
there, cannot be read or is not what its name says is worked out anew. The folder may be deleted at any time.
"""

from __future__ import annotations

import io
import json
import os
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

import bridge_memory
from bridge_memory.files import parse_json, read_bytes, write_whole
from bridge_memory.spec import SpecError, show
from bridge_memory.tapes.many import RunGrid
from bridge_memory.tapes.packed import name, pack, unpack

#: Bytes of a file that is read, and of its arrays.
MOST, MOST_UNPACKED = 256 << 20, 2 << 30
#: The one array of a file that is text: JSON in UTF-8.
_ABOUT = "about"


class KeptCosts:
    """A folder with costs of blocks."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises SpecError where nothing can be written there."""
        if not os.fspath(folder):
            raise SpecError("--cache is empty; give a folder")
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--cache ({show(str(folder))}) is no folder ({error.strerror}); give one") from None
        if not os.access(self.folder, os.W_OK):
            raise SpecError(f"--cache ({show(str(folder))}) cannot be written to; give another folder")
        #: How many blocks of a grid are in its file, by the grid's name.
        self._there: dict[str, int] = {}

    def take_up(self, grid: RunGrid) -> None:
        """What is kept of ``grid``."""
        known = name(grid)
        try:
            data = np.load(io.BytesIO(read_bytes(self._path(known), "", MOST, pipes=False)), allow_pickle=False)
            if sum(file.file_size for file in data.zip.infolist()) > MOST_UNPACKED:
                return
            about = parse_json(data[_ABOUT].tobytes())
            if about["name"] != known or about["code"] != code():
                return
            unpack(grid, {key: data[key] for key in data.files}, about)
        except (SpecError, BadZipFile, OSError, EOFError, KeyError, TypeError, ValueError, AttributeError,
                MemoryError):
            return
        self._there[known] = len(about["blocks"])

    def keep(self, grid: RunGrid) -> None:
        """Write what ``grid`` has worked out since. A disk that is full keeps nothing."""
        known = name(grid)
        arrays, about = pack(grid)
        if len(about["blocks"]) <= self._there.get(known, 0):
            return
        text = json.dumps({**about, "name": known, "code": code()}).encode()
        file = io.BytesIO()
        np.savez_compressed(file, **{_ABOUT: np.frombuffer(text, np.uint8)}, **arrays)  # type: ignore[arg-type]
        try:
            write_whole(self._path(known), file.getvalue())
        except OSError:
            return
        self._there[known] = len(about["blocks"])

    def _path(self, known: str) -> Path:
        return self.folder / f"{sha256((code() + known).encode()).hexdigest()[:40]}.npz"


@lru_cache(maxsize=1)
def code() -> str:
    """A digest of this package's code, and of what works it out."""
    digest = sha256(np.__version__.encode())
    root = Path(bridge_memory.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
