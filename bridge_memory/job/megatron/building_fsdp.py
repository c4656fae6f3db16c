"""Building a Megatron-FSDP job on one rank.

Modules make their parameters whole, for every virtual stage before any is wrapped. Wrapping goes bucket by bucket: the
rank's part of the weights, the whole bucket, the rank's part of main parameters; parameters move into the bucket, which
is freed at its end. Gradients come last (megatron-core ``distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:
ParamAndGradBuffer._init_each_parameter_group_buffers``).
"""

from __future__ import annotations

from bridge_memory.components import Lifetime, Provenance, Role, State, allocated
from bridge_memory.engines.fsdp_buckets import Bucket, Sharding, places_of
from bridge_memory.engines.megatron_ddp import bucket_elements
from bridge_memory.engines.megatron_fsdp import fsdp_states, has_main_buffers
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

_BUCKETS = "param_and_grad_buffer.py: _init_each_parameter_group_buffers"


def why_not(run: RunSpec) -> str | None:
    """Why phases beside the step are not modelled; None where they are."""
    sharding = Sharding(run)
    if run.teacher is not None or sharding.fp8_param or run.peft.freezes or not sharding.shards["optim"]:
        what = "a teacher, adapters, fp8 weights or no_shard"
        return f"engine megatron_fsdp with {what}: load and resume are not modelled"
    return None


def built(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive once model and optimizer are built; None if it is not modelled. Raises SpecError: there is no such
    stage."""
    parts = stage_parts(run, stage)
    if why_not(run) is not None:
        return None
    early = (State.PARAMETERS, State.MAIN_PARAMETERS) if has_main_buffers(run) else (State.PARAMETERS,)
    return tuple(
        exactly(c.name, c.bytes, c.provenance) for c in parts.persistent
        if c.lifetime is Lifetime.MODEL and (c.role is Role.GRADIENTS or c.state in early) and c.bytes
    )  # fmt: skip


def building(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment; None if it is not modelled. Raises SpecError: there is no such stage."""
    highest = built(run, stage)
    if highest is None:
        return None
    sharding = Sharding(run)
    main = 4 * any(s.state is State.MAIN_PARAMETERS for s in fsdp_states(run)) * has_main_buffers(run)
    chunks = _chunks(run, stage, sharding)
    left = sum(_in_modules(bucket, sharding) for chunk in chunks for bucket in chunk)
    weights = mains = gradients = 0
    for chunk in chunks:
        for bucket in chunk:
            share = sharding.weight_bytes(bucket) // sharding.ranks("params", bucket.experts)
            weights += share
            mains += bucket.size // sharding.ranks("optim", bucket.experts) * main
            whole = sharding.weight_bytes(bucket) if sharding.shards["params"] else 0
            now = tuple(exactly(name, n, Provenance.EXACT, _BUCKETS) for name, n in (
                ("parameters of modules", left), ("weights", weights), ("main parameters", mains),
                ("gradients", gradients), ("bucket of whole weights", whole),
            ) if n)  # fmt: skip
            highest = max(highest, now, key=lambda amounts: total(amounts).most)
            left -= _in_modules(bucket, sharding)
        gradients += sum(
            b.size // sharding.ranks("grads", b.experts) * sharding.gradient_width for b in chunk if not b.frozen
        )
    return highest


def buckets_of(run: RunSpec, stage: int) -> list[Bucket]:
    """Those of every virtual stage."""
    return [bucket for chunk in _chunks(run, stage, Sharding(run)) for bucket in chunk]


def _chunks(run: RunSpec, stage: int, sharding: Sharding) -> list[list[Bucket]]:
    """The buckets of every virtual stage."""
    ctx, found = context_of(run), []
    for index, shape in enumerate(layout(run.model, run.parallel).shapes(run.model)[stage]):
        units = chunk_units(run.model, shape, ctx)
        limit = bucket_elements(run) if not index else None
        found.append(sharding.of_chunk(units, places_of(units), limit))
    return found


def _in_modules(bucket: Bucket, sharding: Sharding) -> int:
    return allocated(bucket.numel * sharding.width)
