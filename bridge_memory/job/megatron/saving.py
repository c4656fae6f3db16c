"""Saving a torch_dist checkpoint from one Megatron rank, after a training step: on the GPU, and in host memory.

Tensors are sent to the host one after the other and stay there until they are written (megatron-core
``dist_checkpointing/strategies/filesystem_async.py: preload_tensors``); an asynchronous save hands references to a
separate process, which does the same, and training goes on once all are staged (``async_utils.py:
PersistentAsyncCaller``). So torch's allocator sees no difference between them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bridge_memory.components import Provenance, Role
from bridge_memory.engines.megatron_ddp import bucket_elements, experts_apart
from bridge_memory.engines.optimizer_states import gradient_width
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron.building import built, stage_parameters
from bridge_memory.job.megatron.loading import HeldBy, Sharding, optimizers, why_not_resumed
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.spec import DTYPE_BYTES, RunSpec

_UNSCALED = "distrib_optimizer.py: get_parameter_state_dp_reshardable"
_GATHERED = "distrib_optimizer.py: get_parameter_state_dp_zero"
_STAGED = "filesystem_async.py: preload_tensors"


def saving(
    run: RunSpec, stage: int, *, sharding: Sharding = Sharding.DP_RESHARDABLE, fully_parallel: bool = True
) -> tuple[Amount, ...] | None:
    """What is alive on the GPU at the highest moment of a save; None if it is not modelled.

    ``fully_parallel``: data-parallel ranks divide the weights among them, else their first rank saves all. Raises
    SpecError: there is no such stage.
    """
    parts = stage_parts(run, stage)
    if built(run, stage) is None or why_not_resumed(run) is not None:
        return None
    kept = [exactly(c.name, c.bytes, c.provenance) for c in (*parts.persistent, *parts.between_steps)]
    made = (*_states(run, stage, sharding), *_dequantized(run, stage, fully_parallel))
    return tuple(a for a in (*kept, *made) if a.most)


def _states(run: RunSpec, stage: int, sharding: Sharding) -> list[Amount]:
    """What is made of optimizer states: first fp32 copies of all that one optimizer holds in fewer bits, for a state
    dict without them, then what is saved."""
    held = optimizers(run, stage)
    copies = max((sum(s.unscaled for s in one.states) for one in held), default=0)
    first = exactly("fp32 copies of states", copies, Provenance.FORMULA, "TE fused_adam.py: FusedAdam.state_dict")
    if not run.data_parallel.use_distributed_optimizer:
        then = exactly("fp32 states in the state dict", 0)
    elif sharding is Sharding.DP_RESHARDABLE:
        unscaled = sum(one.unscaled_in_dict for one in held)
        then = exactly("fp32 states in the state dict", unscaled, Provenance.FORMULA, _UNSCALED)
    else:
        gathered = max((_gathered(run, stage, experts=experts) for experts in (False, True)), default=0)
        # Beside them are fp32 copies of the states of the bucket's last parameter, which depends on the rank.
        beside = max((_of_one_parameter(run, stage, one) for one in held if one.fused), default=0)
        then = Amount("gathered states", gathered, gathered + beside, Provenance.FORMULA, _GATHERED)
    return [max(then, first, key=lambda amount: amount.most)]


def _of_one_parameter(run: RunSpec, stage: int, held: HeldBy) -> int:
    """Bytes of the largest fp32 copies of one parameter's states."""
    apart = experts_apart(run)
    largest = max(
        (p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.expert is held.experts or not apart),
        default=0,
    )
    return sum(4 * min(largest, s.elements) for s in held.states if s.unscaled)


def _gathered(run: RunSpec, stage: int, *, experts: bool) -> int:
    """Bytes of one state of one bucket from all ranks in fp32, and of this rank's part that it sends."""
    apart = experts_apart(run)
    if experts and not apart:
        return 0
    lines = [c for c in stage_parts(run, stage).persistent if c.role is Role.GRADIENTS]
    elements = sum(c.bytes for c in lines if c.experts is experts or not apart) // gradient_width(run)
    parameters = [p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.expert is experts or not apart]
    bucket = bucket_elements(run)
    if bucket is not None:
        # A bucket is closed by the parameter that fills it.
        elements = min(elements, bucket + max(parameters, default=0))
    return 4 * elements + 4 * elements // run.parallel.shard_worlds[experts]


def _dequantized(run: RunSpec, stage: int, fully_parallel: bool) -> list[Amount]:
    if not (run.precision.quantized_param and run.implementation.te):
        return []
    width = DTYPE_BYTES[run.precision.params_dtype]
    whole = sum(width * p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.is_gemm)
    least = whole // max(run.parallel.shard_worlds) if fully_parallel else 0
    return [Amount("dequantized weights", least, whole, Provenance.FORMULA, "filesystem_async.py: prepare_write_data")]


def host_of_saving(
    run: RunSpec, stage: int, *, sharding: Sharding = Sharding.DP_RESHARDABLE, fully_parallel: bool = True
) -> tuple[Amount, ...] | None:
    """Bytes in the host memory of one rank while it saves; None if it is not modelled.

    Staged tensors are pinned, in blocks of powers of two that the process keeps (torch ``CachingHostAllocator``): the
    upper end. Raises SpecError: there is no such stage.
    """
    if built(run, stage) is None or why_not_resumed(run) is not None:
        stage_parts(run, stage)
        return None
    parameters = [p for chunk in stage_parameters(run, stage) for p in chunk]
    width, apart = DTYPE_BYTES[run.precision.params_dtype], experts_apart(run)
    distributed = run.data_parallel.use_distributed_optimizer
    weights = [0, 0]
    for experts in (False, True):
        ranks = run.parallel.shard_worlds[experts and apart] if fully_parallel else 1
        for i, n in enumerate(_pinned(width * p.numel for p in parameters if p.expert is experts)):
            weights[i] += n // ranks
    found = [Amount("weights", weights[0], weights[1], Provenance.FORMULA, _STAGED)]
    for held in optimizers(run, stage):
        own = [p for p in parameters if not apart or p.expert is held.experts]
        states = held.unscaled_in_dict + held.own_in_dict
        if not run.optimizer.fused_main_parameters and width == 2:
            states += 4 * max(s.elements for s in held.states)
        least, most = _pinned(4 * p.numel for p in own)
        name = "optimizer states (routed experts)" if held.experts else "optimizer states"
        if distributed and sharding is Sharding.FULLY_RESHARDABLE:
            # Every rank gathers the whole buffer, and clones what it saves of it; nothing of it is pinned.
            whole = 3 * 4 * sum(p.numel for p in own)
            found += [
                exactly(f"{name}, gathered", whole, Provenance.FORMULA, _GATHERED),
                exactly(name, states, Provenance.FORMULA, "filesystem_async.py: prepare_write_data"),
            ]
            continue
        if not distributed and fully_parallel:
            states //= run.parallel.shard_worlds[held.experts and apart]
        found.append(Amount(name, states, states * most // least if least else states, Provenance.FORMULA, _STAGED))
    return tuple(a for a in found if a.most)


def _pinned(sizes: Iterable[int]) -> tuple[int, int]:
    """(bytes, bytes of the blocks of pinned memory that hold them)."""
    least = most = 0
    for nbytes in sizes:
        least += nbytes
        most += 1 << (nbytes - 1).bit_length() if nbytes else 0
    return least, most
