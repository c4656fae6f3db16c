"""The training-time report: what torch.cuda says next to what was predicted, by pipeline stage.

``MemoryReport`` is a Megatron Bridge callback; ``install()`` makes the report of an existing script ours. Nothing here
raises into training, takes part in a collective, or touches the GPU beyond reading its statistics.
"""

from __future__ import annotations

from bridge_memory.live.callback import MemoryReport
from bridge_memory.live.patch import install, uninstall

__all__ = ["MemoryReport", "install", "uninstall"]
