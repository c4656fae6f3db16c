"""X"""

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
    """All that is needed to construct a rank's modules on the meta device, or on another without CUDA."""
    with ExitStack() as stack:
        for helper in (
            no_gpu(device), norms_without_apex(), state_space_libraries(), permissive_core_attention(),
            apex_kernels()
        ):  # fmt: skip
            stack.enter_context(helper)
        yield


@contextmanager
def running(topk: int = 1, experts: int = 1, device: str = META, *, multiple: int = 0) -> Iterator[None]:
    """All that is needed to run a rank's forward and backward without CUDA, on the meta device as a rule."""
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
