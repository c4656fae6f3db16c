"""Transformer Engine without a GPU: its own Python over kernels that allocate their outputs and compute nothing.

Transformer Engine's Python decides which tensors are allocated, saved and freed (autograd functions of
``pytorch/module``, ``pytorch/attention``, ``pytorch/permutation.py``); its compiled half, ``transformer_engine_torch``,
computes. Here functions that allocate what the kernels return replace the compiled half. Triton kernels get their
outputs from Python and are not launched.

The pure Python wheel is enough (``INSTALL``). megatron-core looks for Transformer Engine once, when it is imported:
call ``load`` or ``leave`` before that.

Outputs follow ``transformer_engine/pytorch/csrc/extensions`` of Transformer Engine 2.11; the tests pass with 2.11 to
2.20. Temporaries inside a kernel are not seen, except the fp32 sums of attention's backward.
"""

from bridge_memory.rehearsal.te_kernels.loading import leave, load, loaded, why_not
from bridge_memory.rehearsal.te_kernels.package import INSTALL, PACKAGE, version
from bridge_memory.rehearsal.te_kernels.running import running

__all__ = ["INSTALL", "PACKAGE", "leave", "load", "loaded", "running", "version", "why_not"]
