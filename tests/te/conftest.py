"""Transformer Engine's real Python, over kernels that only make their outputs.

megatron-core takes Transformer Engine when it is imported or not at all, so these tests have a process of their
own: ``python -m pytest tests/te`` where Transformer Engine's Python is installed. Elsewhere they are skipped.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from installed_core import unset_is_installed

__all__ = ["unset_is_installed"]

HERE = False
installed = all(find_spec(name) is not None for name in ("torch", "transformer_engine"))
if installed and "megatron.core" not in sys.modules:
    from bridge_memory.rehearsal import te_kernels
    from bridge_memory.rehearsal.world import quiet

    if not te_kernels.why_not():
        HERE = True
        with quiet():
            te_kernels.load()
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rehearsal"))

collect_ignore_glob = [] if HERE else ["test_*.py"]
