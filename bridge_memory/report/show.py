"""Where a document goes: rich on a terminal of 80 columns and more, plain text everywhere else."""

from __future__ import annotations

import os
from typing import TextIO

from bridge_memory.report import plain
from bridge_memory.report.document import Document


def print_document(document: Document, stream: TextIO) -> None:
    """Write ``document`` to ``stream``. rich is imported only for a terminal, and is not required even there."""
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        try:
            from bridge_memory.report import terminal

            terminal.print_document(document, stream)
            return
        except ImportError:
            pass
    stream.write(plain.render(document))
