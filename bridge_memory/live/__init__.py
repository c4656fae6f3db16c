"""The training-time report: measured (``torch.cuda``) and predicted memory by pipeline stage.

``MemoryReport`` is a Megatron Bridge callback; ``install()`` adds the report to an existing script. Nothing here raises
into training, uses a collective, or uses the GPU except to read its statistics.
"""

from __future__ import annotations

from bridge_memory.live.callback import MemoryReport
from bridge_memory.live.patch import install, uninstall

__all__ = ["MemoryReport", "install", "uninstall"]
