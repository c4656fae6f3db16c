"""Megatron-FSDP: what it shards over data-parallel ranks, and what it gathers and reduces while layers run.

Parameters are laid out in buckets: one of dense and one of expert parameters for every unit (a transformer layer), and
buckets for all parameters outside of units. Three things are gathered or reduced:

- Weights of a unit are gathered before its forward pass and again before its backward pass, together with those of the
  next units until a budget is reached, and freed after the pass. Weights outside of units stay gathered.
- A gradient is written into an unsharded bucket. When the bucket is full it is reduced; it is freed when the buckets
  that wait after it exceed a capacity, at the latest at the end of the chunk's backward pass.
- After a step the first bucket is gathered for the next step.

``fsdp_buckets`` lays out buckets, ``fsdp_flow`` follows gathering and reducing; this module counts what persists.

Source: megatron-core ``distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: ParamAndGradBuffer``; before 0.14
``distributed/custom_fsdp``. ``tests/engines`` compares with it on meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line, PerChunk, StageState
from bridge_memory.engines.fsdp_buckets import Bucket, Sharding, places_of
from bridge_memory.engines.fsdp_flow import Flow
from bridge_memory.engines.megatron_ddp import bucket_elements, fp8_copies
from bridge_memory.engines.optimizer_states import (
    OptimizerState,
    copies_in_step,
    gradient_width,
    optimizer_states,
)
from bridge_memory.inventory.stack import Unit
from bridge_memory.releases import FSDP_CASTS_GRADIENTS, FSDP_KNOWS_PRECISION_AWARE, FSDP_MAIN_DTYPES
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.chain import EngineBytes
from bridge_memory.tapes.parameters import Column, gemm_elements, rounded_bytes
from bridge_memory.workspaces.allocator import block_remainder


class ChunkState(NamedTuple):
    """What one chunk keeps, gathers and reduces."""

    parameters: int
    #: In the order of the engine's lines.
    amounts: tuple[int, ...]
    #: Bytes of gathered weights: during all passes, and between steps.
    gathered: int
    gathered_between_steps: int
    gradient_copies: int
    #: Persistent buffers of units, which all chunks share.
    pools: int
    #: Unsplit remainders of allocator blocks.
    remainders: int
    concurrent: EngineBytes


class MegatronFSDP:
    """The lines of model state of one run, and what is gathered and reduced. See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        """``rank`` changes nothing: all ranks of a stage keep the same amount."""
        self.run = run
        self.sharding = Sharding(run)
        self.fp8 = run.precision.quantizes and run.implementation.te
        self.states = fsdp_states(run)
        has_main = any(s.state is State.MAIN_PARAMETERS for s in self.states)
        self.copied_gradients = copied_gradient_width(run) if has_main else 0
        self.lines = tuple(
            line for adapters in (False, True) for experts in (False, True) for line in self._lines(experts, adapters)
        )
        self._chunks: PerChunk[ChunkState] = PerChunk()

    def _lines(self, experts: bool, adapters: bool) -> Iterator[Line]:
        whole = "etp x ep" if experts else "tp"
        divided = f"{whole} x {'edp' if experts else 'dp x cp'}" if self.sharding.worlds[experts] > 1 else whole
        groups = {what: divided if sharded else whole for what, sharded in self.sharding.shards.items()}
        exact = Provenance.EXACT
        yield Line(Role.WEIGHTS, State.PARAMETERS, "weights", experts, exact, adapters, groups["params"])
        if self.fp8 and not adapters:
            yield Line(Role.WEIGHTS, State.FP8_COPIES, "fp8 weight copies", experts, exact, adapters, whole)
        yield Line(Role.GRADIENTS, State.GRADIENTS, "gradients", experts, exact, adapters, groups["grads"])
        for state in self.states:
            yield Line(Role.OPTIMIZER, state.state, state.name, experts, state.provenance, adapters, groups["optim"])

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What a stage of ``chunks`` keeps, gathers and reduces."""
        found = [self._chunks.get(units, index == 0, self.chunk) for index, units in enumerate(chunks)]
        amounts = [sum(chunk.amounts[i] for chunk in found) for i in range(len(self.lines))]
        kept = tuple((line, n) for line, n in zip(self.lines, amounts, strict=True) if n)
        return StageState(
            parameters=sum(chunk.parameters for chunk in found),
            amounts=kept,
            in_step=copies_in_step(self.run, self.states, kept),
            remainders=sum(chunk.remainders for chunk in found),
            gradient_copies=sum(chunk.gradient_copies for chunk in found),
            gradient_copies_name="main gradients in " + ("16 bits" if self.copied_gradients == 2 else "fp32"),
            pools=max((chunk.pools for chunk in found), default=0),
            gathered=sum(chunk.gathered for chunk in found),
            gathered_between_steps=sum(chunk.gathered_between_steps for chunk in found),
            concurrent=tuple(chunk.concurrent for chunk in found),
        )

    def chunk(self, units: Sequence[Unit], in_buckets: bool = True) -> ChunkState:
        """What one chunk keeps, gathers and reduces. ``in_buckets``: parameters outside of units may have several
        buckets."""
        sharding = self.sharding
        places = places_of(units)
        limit = bucket_elements(self.run) if in_buckets else None
        buckets = sharding.of_chunk(units, places, limit)
        adapters = sharding.of_adapters(units) if self.run.peft.freezes else []
        amounts = [
            *self._amounts(buckets, units, adapters=False), *self._amounts(adapters, units, adapters=True),
        ]
        copies = 0
        if self.copied_gradients:
            copies = self.copied_gradients * sum(sharding.share(b) for b in (*buckets, *adapters) if not b.frozen)
        flow = Flow(sharding, buckets, units, places, limit)
        return ChunkState(
            sum(b.numel for b in buckets), tuple(amounts), flow.root_bytes, flow.between_steps(), copies,
            flow.pools, self._remainders([*buckets, *adapters]), flow.engine_bytes(),
        )

    def _amounts(self, buckets: Sequence[Bucket], units: Sequence[Unit], adapters: bool) -> Iterator[int]:
        """Bytes of every line, dense ones first."""
        sharding, width = self.sharding, self.sharding.width
        for experts in (False, True):
            own = [b for b in buckets if b.experts is experts]
            trained = [b for b in own if not b.frozen]
            size = sum(b.size for b in trained)
            if sharding.shards["optim"]:
                yield sum(map(sharding.weight_bytes, own)) // sharding.ranks("params", experts)
            elif adapters:
                yield sum(b.numel for b in own) * width
            else:  # the modules' original tensors
                yield _sum(units, experts, (rounded_bytes, width)) - sum(b.fp8 for b in own) * (width - 1)
            if self.fp8 and not adapters:
                yield self._fp8_copies(own, units, experts)
            yield size // sharding.ranks("grads", experts) * sharding.gradient_width
            for state in self.states:
                if state.state is State.MAIN_PARAMETERS:
                    elements = size // sharding.ranks("optim", experts)
                else:
                    elements = sum(map(sharding.share, trained))
                nbytes = elements * state.width
                yield nbytes if state.on_gpu == 1.0 else round(nbytes * state.on_gpu)

    def _remainders(self, buckets: Sequence[Bucket]) -> int:
        """Unsplit remainders of buffers' allocator blocks: a bucket's weights and main parameters are separate tensors,
        the gradients of all buckets are one (``_init_each_parameter_group_buffers``: ``buffer_all_in_one``). Optimizer
        states, which are shards of parameters, are not counted."""
        sharding = self.sharding
        if self.run.implementation.expandable_segments or not sharding.shards["optim"]:
            return 0
        main = sum(s.width for s in self.states if s.state is State.MAIN_PARAMETERS)
        total = gradients = 0
        for b in buckets:
            total += block_remainder(sharding.weight_bytes(b) // sharding.ranks("params", b.experts))
            if not b.frozen:
                total += block_remainder(b.size // sharding.ranks("optim", b.experts) * main)
                gradients += b.size // sharding.ranks("grads", b.experts) * sharding.gradient_width
        return total + block_remainder(gradients)

    def _fp8_copies(self, buckets: Sequence[Bucket], units: Sequence[Unit], experts: bool) -> int:
        """Bytes of persistent fp8 data in addition to the weights: Transformer Engine's cached copies of bf16 weights,
        and the column-wise half of mxfp8 weights, which has a separate buffer. For other fp8 weights it is made for the
        running unit and freed (``mixed_precision.py: fp8_discard_transpose_cache``)."""
        sharding, precision, arch = self.sharding, self.run.precision, self.run.implementation.gpu_arch
        if not sharding.fp8_param:
            return fp8_copies(precision, _sum(units, experts, (gemm_elements, 0)), arch)
        if precision.recipe == "mxfp8":
            copies = fp8_copies(precision, sum(b.fp8 for b in buckets), arch)
            return copies // sharding.ranks("params", experts)
        stay = (b for b in buckets if not sharding.shards["params"] or not b.unit)
        return fp8_copies(precision, sum(b.fp8 for b in stay), arch)


def _sum(units: Sequence[Unit], experts: bool, column: Column) -> int:
    """The sum of a column over the dense parameters of ``units``, or over those of experts."""
    return sum(unit.times * unit.parameters.sums((column,))[experts][0] for unit in units)


# ---- optimizer ----


def has_main_buffers(run: RunSpec) -> bool:
    """Whether Megatron-FSDP has fp32 main parameters. Before ``FSDP_MAIN_DTYPES`` not beside a precision-aware
    optimizer, which has its own (Megatron-LM ``training.py: get_model``: ``preserve_fp32_weights``)."""
    return not run.optimizer.fused_main_parameters or FSDP_MAIN_DTYPES(run.implementation)


def fsdp_states(run: RunSpec) -> tuple[OptimizerState, ...]:
    """The optimizer's states under Megatron-FSDP, which has fp32 main parameters for parameters of any dtype.

    Source: ``ParamAndGradBuffer._init_each_parameter_group_buffers`` (``main_weight_buffer``). While buffers do not
    know of a precision-aware optimizer, FusedAdam has a second copy of main parameters, of which no remainders will do.
    """
    states, o = optimizer_states(run), run.optimizer
    if not has_main_buffers(run):
        return states
    twice = o.fused_main_parameters and not o.optimizer_cpu_offload and _casts_gradients(run)
    second = OptimizerState(State.SECOND_MAIN_PARAMETERS, DTYPE_BYTES[o.main_params_dtype])
    return (
        OptimizerState(State.MAIN_PARAMETERS, 4), *([second] if twice else []),
        *(s for s in states if s.state is not State.MAIN_PARAMETERS),
    )


def copied_gradient_width(run: RunSpec) -> int:
    """Bytes of an element of the copies of main gradients in the dtype of the optimizer's parameters, which stay until
    the next step's zero_grad (``ParamAndGradBuffer.update_main_grads``); 0: the optimizer takes the buffers'."""
    width = 4 if has_main_buffers(run) else DTYPE_BYTES[run.precision.params_dtype]
    takes = run.optimizer.use_precision_aware_optimizer and not _casts_gradients(run)
    return 0 if takes or gradient_width(run) == width else width


def _casts_gradients(run: RunSpec) -> bool:
    """Whether the buffers do not know that an optimizer is precision-aware."""
    return FSDP_CASTS_GRADIENTS(run.implementation) and not FSDP_KNOWS_PRECISION_AWARE(run.implementation)


ENGINE = MegatronFSDP
