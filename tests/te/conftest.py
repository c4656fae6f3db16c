"""Transformer Engine's real Python, over kernels that only make their outputs.

megatron-core takes Transformer Engine when it is imported or not at all, so these tests have a process of their
own: ``python -m pytest tests/te`` where Transformer Engine's Python is installed. Elsewhere they are skipped.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("torch") is None or find_spec("transformer_engine") is None:
    WHY_NOT = "Transformer Engine's Python is not installed"
elif "megatron.core" in sys.modules:
    WHY_NOT = "megatron-core is imported already; run tests/te on its own"
else:
    WHY_NOT = ""
    from bridge_memory.rehearse import te_kernels
    from bridge_memory.rehearse.world import quiet

    with quiet():
        te_kernels.load()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rehearse"))

collect_ignore_glob = ["test_*.py"] if WHY_NOT else []
