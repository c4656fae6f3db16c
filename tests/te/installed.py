"""Which Transformer Engine these tests run, whose rules the estimate is to go by."""

from __future__ import annotations

from bridge_memory.rehearsal import te_kernels
from bridge_memory.releases import release_in

HERE = release_in(te_kernels.version())
