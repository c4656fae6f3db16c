"""What a release of vLLM or SGLang does with memory. Imports nothing of the room.

Read in vLLM 0.33.0 and SGLang 0.5.23 (wheels). As in ``releases.py``, a rule is named after what a release does and
cites the function that does it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import show

Release = tuple[int, int, int]
FRAMEWORKS = ("vllm", "sglang")
#: If unset: the newest on the package index.
DEFAULT_RELEASES: dict[str, Release] = {"vllm": (0, 33, 0), "sglang": (0, 5, 23)}
#: First and last release whose sources were read.
READ: dict[str, tuple[Release, Release]] = {"vllm": ((0, 8, 5), (0, 33, 0)), "sglang": ((0, 5, 23), (0, 5, 23))}
_RELEASE = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.\-_+]?[a-z0-9.]*)*", re.ASCII | re.IGNORECASE)


def parse_release(text: str) -> Release:
    """"0.11" or "v0.5.23.post1" -> three numbers. Raises SpecError."""
    match = _RELEASE.fullmatch(text.strip()) if len(text) <= 40 else None
    if match is None:
        raise SpecError(f"release ({show(text)}) is not a release such as 0.33.0; give one, or leave it out")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def words(release: Release) -> str:
    return ".".join(map(str, release))


class Rule(NamedTuple):
    """True from this release of a framework on."""

    first: Release

    def __call__(self, release: Release) -> bool:
        return release >= self.first


#: First release of a framework -> the torch that its wheel requires (their metadata), newest first.
TORCH: dict[str, dict[Release, tuple[int, int]]] = {
    "vllm": {
        (0, 33, 0): (2, 14), (0, 28, 0): (2, 13), (0, 20, 0): (2, 11), (0, 18, 0): (2, 10), (0, 14, 0): (2, 9),
        (0, 10, 2): (2, 8), (0, 9, 0): (2, 7), (0, 8, 0): (2, 6), (0, 0, 0): (2, 5),
    },
    "sglang": {(0, 0, 0): (2, 14)},
}  # fmt: skip


def torch_of(framework: str, release: Release) -> tuple[int, int]:
    """The torch that a release comes with."""
    return next(torch for first, torch in TORCH[framework].items() if release >= first)


# ---- vLLM ----

#: Only what the engine took since its start counts; before, all that is on the card did, of other processes, too
#: (``v1/worker/gpu_worker.py: determine_available_memory`` of 0.9.2 and 0.8.5).
OTHERS_BESIDE_BUDGET = Rule((0, 9, 0))

#: The estimate of CUDA graphs is taken out of the budget (``v1/worker/gpu_worker.py: determine_available_memory``,
#: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS of 0.20.0 and 0.19.0); before, they came on top.
GRAPHS_INSIDE_BUDGET = Rule((0, 20, 0))
#: gpu_memory_utilization is 0.92 by default, before 0.9 (``config/cache.py`` of 0.20.0 and 0.19.0).
UTILIZATION_92 = Rule((0, 20, 0))
#: The snapshot of free memory is taken after NCCL's start, whose memory then comes on top of the budget
#: (``v1/worker/gpu_worker.py: init_device`` of 0.11.0 and 0.10.2).
NCCL_BESIDE_BUDGET = Rule((0, 11, 0))
#: Cards of 160 GiB and more take 16,384 tokens a step as servers, too (``engine/arg_utils.py`` of 0.28.0 and 0.24.0).
LARGEST_BATCHES_BY_160_GIB = Rule((0, 28, 0))
#: Graphs of up to 1024 tokens on Blackwell (``config/vllm.py: _set_cudagraph_sizes`` of 0.28.0 and 0.24.0).
GRAPHS_OF_1024 = Rule((0, 28, 0))
#: A Triton kernel selects top-k and top-p, not a sort (``v1/sample/ops/topk_topp_sampler.py`` of 0.18.0 and 0.14.0).
SORTS_NO_LOGITS = Rule((0, 18, 0))
#: The second model runner for all models (``config/vllm.py: use_v2_model_runner`` of 0.30.0; 0.28.0: for some).
SECOND_RUNNER = Rule((0, 30, 0))
#: Tensors that are neither weights nor KV cache sleep too (``device_allocator/sleep_mode_backend.py`` of 0.33.0).
RUNTIME_SLEEPS = Rule((0, 33, 0))
