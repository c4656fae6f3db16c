"""The GPU and library versions by which Transformer Engine chooses code paths."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bridge_memory.cards.generations import GENERATIONS
from bridge_memory.cards.rows import GPUS, MULTIPROCESSORS
from bridge_memory.rehearsal.patches.replace import replaced

#: Generation -> compute capability (major, minor).
COMPUTE_CAPABILITY = GENERATIONS
CUDNN_VERSION = 92100
CUBLAS_VERSION = 130000
CUDA_VERSION = "13.0"
#: Streams of grouped GEMMs (``common/util/multi_stream.cpp``).
CUBLAS_STREAMS = 4


class _Device:
    """``torch.cuda.get_device_properties`` of the assumed GPU."""

    total_memory = GPUS["H200"].capacity_bytes
    name = "rehearsal"

    def __init__(self, arch: str) -> None:
        self.major, self.minor = COMPUTE_CAPABILITY[arch]
        self.multi_processor_count = MULTIPROCESSORS[arch]


@contextmanager
def gpu_properties(arch: str) -> Iterator[None]:
    device = _Device(arch)
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", lambda *a: device),
            ("get_device_capability", lambda *a: (device.major, device.minor)),
        ):
            stack.enter_context(replaced(torch.cuda, name, value))
        yield
