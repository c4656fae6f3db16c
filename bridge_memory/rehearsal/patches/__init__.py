"""Replacements in torch and megatron-core that let a rank run without its GPUs and peers.

Tensors live on torch's meta device: they have shapes, dtypes, storages and an autograd graph, and no data. Every helper
is a context manager that restores what it replaced. A name that a release does not have is skipped; a feature that a
release lacks is refused in one line that names the release which has it (``megatron_config.py``).

Tested with torch 2.13.0 (for CPU, and its CUDA build without a GPU) and megatron-core 0.13.1, 0.14.0, 0.15.3, 0.16.0,
0.16.1, 0.17.1, 0.18.0 and 0.19.2 (``tests/rehearsal/test_releases.py``): dense models, experts, multi-latent attention,
Mamba, MTP, virtual stages, layout strings and recomputation, with local modules and with Transformer Engine's Python.
Newer features need a newer release: softmax sinks and windows in some of the layers 0.15; gates on attention's output,
the gated delta net and hybrid models with experts 0.16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bridge_memory.rehearsal.patches.collectives import collectives_move_nothing
from bridge_memory.rehearsal.patches.device import no_gpu, value_checks_skipped
from bridge_memory.rehearsal.patches.fusion import compiled_functions_are_kernels
from bridge_memory.rehearsal.patches.kernels import apex_kernels, cuda_kernels, dummy_weight_gradients
from bridge_memory.rehearsal.patches.modules import norms_without_apex, permissive_core_attention, state_space_libraries
from bridge_memory.rehearsal.patches.process_state import (
    experimental_features_enabled,
    fresh_caches,
    loss_scales_restored,
)
from bridge_memory.rehearsal.patches.recomputation import (
    gradients_of_checkpoints,
    recomputation_without_te,
    storage_shared_without_extension,
)
from bridge_memory.rehearsal.patches.replace import META
from bridge_memory.rehearsal.patches.routing import balanced_routing


@contextmanager
def building(device: str = META) -> Iterator[None]:
    """All replacements for constructing the modules of a rank on ``device``, the meta device or the CPU."""
    with ExitStack() as stack:
        for helper in (
            no_gpu(device), norms_without_apex(), state_space_libraries(), permissive_core_attention(),
            apex_kernels()
        ):  # fmt: skip
            stack.enter_context(helper)
        yield


@contextmanager
def running(topk: int = 1, experts: int = 1, device: str = META, *, multiple: int = 0) -> Iterator[None]:
    """All replacements for forward and backward passes of a rank without CUDA, by default on the meta device.

    ``topk`` of ``experts`` get each token; ``multiple``: rows to which quantized experts are padded, 0 for none.
    """
    with ExitStack() as stack:
        for helper in (
            building(device), collectives_move_nothing(), cuda_kernels(), compiled_functions_are_kernels(),
            recomputation_without_te(), gradients_of_checkpoints(), fresh_caches(), loss_scales_restored(),
            balanced_routing(topk, experts, multiple),
            experimental_features_enabled(), value_checks_skipped(), storage_shared_without_extension(device),
            dummy_weight_gradients(device),
        ):  # fmt: skip
            stack.enter_context(helper)
        yield
