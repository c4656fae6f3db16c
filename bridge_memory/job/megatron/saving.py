"""Saving a torch_dist checkpoint from one Megatron rank, after a training step: on the GPU, and in host memory.

Tensors are sent to the host one after the other and stay there until they are written (megatron-core
``dist_checkpointing/strategies/filesystem_async.py: preload_tensors``); an asynchronous save hands references to a
separate process, which does the same, and training goes on once all are staged (``async_utils.py:
PersistentAsyncCaller``). So torch's allocator sees no difference between them. Megatron-FSDP saves its shards as they
are, halves of a gated MLP as views (``transformer/fsdp_dtensor_checkpoint.py: handle_swiglu_in_state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance, Role
from bridge_memory.engines.megatron_ddp import bucket_elements, experts_apart
from bridge_memory.engines.optimizer_states import gradient_width
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron import loading_fsdp
from bridge_memory.job.megatron.building import built, stage_parameters
from bridge_memory.job.megatron.exporting import exported
from bridge_memory.job.megatron.loading import HeldBy, is_fused, optimizers, why_not_resumed
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.outside.context import context
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import DTYPE_BYTES, RunSpec

_UNSCALED = "distrib_optimizer.py: get_parameter_state_dp_reshardable"
_GATHERED = "distrib_optimizer.py: get_parameter_state_dp_zero"
_STAGED = "filesystem_async.py: preload_tensors"
_WRITTEN = "filesystem_async.py: prepare_write_data"


def saving(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive on the GPU at the highest moment of a save; None if it is not modelled.

    Raises SpecError: there is no such stage.
    """
    parts, fsdp = stage_parts(run, stage), run.data_parallel.engine == "megatron_fsdp"
    if run.teacher is not None or (not fsdp and (built(run, stage) is None or _why_not(run) is not None)):
        return None
    kept = [exactly(c.name, c.bytes, c.provenance) for c in (*parts.persistent, *parts.between_steps)]
    states = _states(run, stage) if run.checkpoint.save_optim and not fsdp else []
    made = (*states, *(() if fsdp else _dequantized(run, stage)))
    after = exported(run) if exports(run) else ()
    return tuple(a for a in (*kept, *max(made, after, key=lambda amounts: total(amounts).most)) if a.most)


def exports(run: RunSpec) -> bool:
    """Whether weights are written as Hugging Face has them too; of adapters only they are, which are small."""
    return run.checkpoint.also_save_hf_checkpoint and not run.peft.trains_adapters


def _why_not(run: RunSpec) -> str | None:
    """As ``why_not_resumed``, of what is saved: an optimizer that is saved and not loaded is."""
    return why_not_resumed(run.with_(checkpoint=replace(run.checkpoint, load_optim=True)))


def _gathers(run: RunSpec) -> bool:
    """Whether states are gathered from data-parallel ranks."""
    return run.data_parallel.use_distributed_optimizer and run.checkpoint.dist_ckpt_optim_fully_reshardable


def _states(run: RunSpec, stage: int) -> list[Amount]:
    """What is made of optimizer states: first fp32 copies of all that one optimizer holds in fewer bits, for a state
    dict without them, then what is saved."""
    offloaded = run.optimizer.optimizer_cpu_offload
    if offloaded and not _gathers(run):  # states are saved as they are
        return []
    held = optimizers(run, stage)
    copies = 0 if offloaded else max((sum(s.unscaled for s in one.states) for one in held), default=0)
    first = exactly("fp32 copies of states", copies, Provenance.FORMULA, "TE fused_adam.py: FusedAdam.state_dict")
    if not run.data_parallel.use_distributed_optimizer:
        then = exactly("fp32 states in the state dict", 0)
    elif not _gathers(run):
        unscaled = sum(one.unscaled_in_dict for one in held)
        then = exactly("fp32 states in the state dict", unscaled, Provenance.FORMULA, _UNSCALED)
    else:
        gathered = max((_gathered(run, stage, experts=experts) for experts in (False, True)), default=0)
        if run.checkpoint.distrib_optim_fully_reshardable_mem_efficient:
            gathered = 0  # in host memory
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
    elements = _of_bucket(run, elements, max(parameters, default=0))
    return 4 * elements + 4 * elements // run.parallel.shard_worlds[experts]


def _of_bucket(run: RunSpec, elements: int, largest: int) -> int:
    """Of ``elements`` those in one bucket, which the parameter closes that fills it."""
    bucket = bucket_elements(run)
    return elements if bucket is None else min(elements, bucket + largest)


def _dequantized(run: RunSpec, stage: int) -> list[Amount]:
    if not (run.precision.quantized_param and run.implementation.te):
        return []
    width = DTYPE_BYTES[run.precision.params_dtype]
    whole = sum(width * p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.is_gemm)
    least = whole // max(run.parallel.shard_worlds) if run.checkpoint.ckpt_fully_parallel_save else 0
    return [Amount("dequantized weights", least, whole, Provenance.FORMULA, "filesystem_async.py: prepare_write_data")]


def host_of_saving(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """Bytes in the host memory of one rank while it saves; None if it is not modelled.

    Staged tensors are pinned, in blocks of powers of two that the process keeps (torch ``CachingHostAllocator``): the
    upper end. Raises SpecError: there is no such stage.
    """
    if run.data_parallel.fsdp:
        return loading_fsdp.host_of_saving(run, stage)
    if built(run, stage) is None or _why_not(run) is not None:
        stage_parts(run, stage)
        return None
    parameters = [p for chunk in stage_parameters(run, stage) for p in chunk]
    width, apart = DTYPE_BYTES[run.precision.params_dtype], experts_apart(run)
    distributed, fully_parallel = run.data_parallel.use_distributed_optimizer, run.checkpoint.ckpt_fully_parallel_save
    weights = [0, 0]
    for experts in (False, True):
        ranks = run.parallel.shard_worlds[experts and apart] if fully_parallel else 1
        for i, n in enumerate(_pinned(width * p.numel for p in parameters if p.expert is experts)):
            weights[i] += n // ranks
    found = [Amount("weights", weights[0], weights[1], Provenance.FORMULA, _STAGED)]
    for held in optimizers(run, stage) if run.checkpoint.save_optim else []:
        own = [p for p in parameters if not apart or p.expert is held.experts]
        states = held.unscaled_in_dict + held.own_in_dict
        if not is_fused(run) and width == 2:
            states += 4 * max(s.elements for s in held.states)
        least, most = _pinned(4 * p.numel for p in own)
        name = "optimizer states (routed experts)" if held.experts else "optimizer states"
        if _gathers(run):
            found += _gathered_on_host(run, name, [p.numel for p in own], states, held)
            continue
        if not distributed and fully_parallel:
            states //= run.parallel.shard_worlds[held.experts and apart]
        found.append(Amount(name, states, states * most // least if least else states, Provenance.FORMULA, _STAGED))
    return tuple(a for a in found if a.most)


def _gathered_on_host(run: RunSpec, name: str, sizes: list[int], states: int, held: HeldBy) -> list[Amount]:
    """Every rank gathers the whole buffer, and clones what it saves of it; nothing of it is pinned. Bucket by bucket
    its own shards, and what it has received of one state and put together, come before the clones."""
    whole = 3 * 4 * sum(sizes)
    bucket = 4 * _of_bucket(run, sum(sizes), max(sizes, default=0))
    own = 3 * bucket // run.parallel.shard_worlds[held.experts]
    if not run.checkpoint.distrib_optim_fully_reshardable_mem_efficient:
        return [
            exactly(f"{name}, gathered", whole, Provenance.FORMULA, _GATHERED),
            exactly(name, max(states, own + 2 * bucket), Provenance.FORMULA, _WRITTEN),
        ]
    # Over gloo the first data-parallel rank receives, and saves, all of it; others send their shards.
    return [
        Amount(f"{name}, gathered", 0, whole, Provenance.FORMULA, _GATHERED),
        Amount(name, own, max(whole, own + 2 * bucket), Provenance.FORMULA, _WRITTEN),
    ]


def worker(run: RunSpec, gpu: Gpu, phase: Phase) -> tuple[Amount, ...]:
    """The CUDA context of the process that writes checkpoints (``async_utils.py: PersistentAsyncCaller.async_loop``),
    on the same GPU. Some trainers start it before the first save."""
    if not run.checkpoint.async_save:
        return ()
    bare, *_ = context(gpu)
    certain = phase in (Phase.TRAINING, Phase.EVALUATION, Phase.SAVE)
    name = "CUDA context of the process that writes checkpoints"
    return (Amount(name, bare.least if certain else 0, bare.most, bare.provenance, bare.source),)


def _pinned(sizes: Iterable[int]) -> tuple[int, int]:
    """(bytes, bytes of the blocks of pinned memory that hold them)."""
    least = most = 0
    for nbytes in sizes:
        least += nbytes
        most += 1 << (nbytes - 1).bit_length() if nbytes else 0
    return least, most
