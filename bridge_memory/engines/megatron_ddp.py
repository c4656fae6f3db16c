"""Megatron's DistributedDataParallel, with or without the distributed optimizer.

Parameters -> bytes of weights, gradient buffers and optimizer state, as megatron-core lays them out.

Source: megatron-core ``distributed/param_and_grad_buffer.py`` (buckets and padding), ``distributed/
distributed_data_parallel.py`` (buffers by group). Every figure is bytes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from typing import NamedTuple

from bridge_memory.components import MOMENTS, Component, Lifetime, Part, Provenance, Role, State
from bridge_memory.engines.engine import StageState
from bridge_memory.engines.optimizer_states import (
    Over,
    gradient_width,
    keeps_fp32_gradient_copies,
    optimizer_states,
)
from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.parameters import PARAM_ALIGNMENT, Counted, Parameter, pad, rounded_bytes
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import DTYPE_BYTES, PrecisionSpec, RunSpec
from bridge_memory.workspaces.allocator import block_rest

#: Elements: end of every bucket, together with the data-parallel size.
BUCKET_ALIGNMENT = 128
#: Elements: Megatron's smallest bucket when gradients overlap, and its growth a data-parallel rank
#: (``DistributedDataParallel.__init__``).
BUCKET_MINIMUM, BUCKET_PER_RANK = 40_000_000, 1_000_000


class Buffer(NamedTuple):
    """The dense parameters of one chunk, or its experts': they live in buffers of their own."""

    counted: Counted
    #: Elements after Megatron's padding (distributed optimizer), else as they are.
    padded: int
    units: Sequence[Unit]
    experts: bool
    #: Ranks that share the optimizer's state.
    world: int

    def sums(self, of: Callable[[Parameter, int], int], width: int) -> int:
        """``ParameterList.sums`` over the units."""
        return sum(u.count * u.parameters.sums(of, width)[self.experts] for u in self.units)


class _Line(NamedTuple):
    """One line of model state: its role, which copy of the parameters it is, and what people call it."""

    role: Role
    state: State
    name: str
    provenance: Provenance = Provenance.EXACT


class MegatronDDP:
    """See the module docstring."""

    def check(self, run: RunSpec) -> None:
        """Everything is checked with the RunSpec."""

    def stage_state(self, run: RunSpec, chunks: Sequence[Sequence[Unit]], gpu_arch: str) -> StageState:
        return state_of(run, chunks, gpu_arch)


def state_of(run: RunSpec, chunks: Sequence[Sequence[Unit]], gpu_arch: str) -> StageState:
    """Model state of a stage that holds ``chunks``."""
    worlds = run.parallel.shard_worlds
    parameters = 0
    sums: dict[tuple[_Line, bool, bool], int] = {}
    buffers: list[Buffer] = []
    for index, units in enumerate(chunks):
        for buffer in chunk_buffers(run, units, index):
            parameters += buffer.counted.numel
            buffers.append(buffer)
            for line, nbytes in _buffer_state(run, buffer, gpu_arch, frozen=run.peft.freezes):
                key = (line, buffer.experts, False)
                sums[key] = sums.get(key, 0) + nbytes
        adapters = adapter_units(run, units)
        for buffer in chunk_buffers(run, adapters, 0) if adapters else ():
            # Adapters train like any parameter, in the dtype of the activations.
            for line, nbytes in _buffer_state(run, buffer, gpu_arch, frozen=False, adapters=True):
                key = (line, buffer.experts, True)
                sums[key] = sums.get(key, 0) + nbytes
    components = tuple(
        Component(
            _label(line, experts, adapters), nbytes, line.role, line.provenance, _shard(run, line, experts, worlds),
            lifetime=Lifetime.FIRST_STEP if line.state in MOMENTS else Lifetime.MODEL, state=line.state,
            experts=experts, adapters=adapters,
        )
        for (line, experts, adapters), nbytes in sums.items() if nbytes
    )
    rests = unsplit_rest_bytes(run, buffers)
    if rests:
        components += (
            Component(
                "unsplit rests of allocator blocks", rests, Role.BUFFERS, Provenance.FORMULA,
                lifetime=Lifetime.FIRST_PASS, part=Part.ALLOCATOR,
            ),
        )
    return StageState(parameters, components, tuple(_after_step(run, buffers)))


def chunk_buffers(run: RunSpec, units: Sequence[Unit], index: int) -> Iterator[Buffer]:
    """The dense buffer and that of experts of chunk ``index`` of a stage, where there are any."""
    bucket = bucket_elements(run, index)
    for experts, world in zip((False, True), run.parallel.shard_worlds, strict=True):
        counted = Counted()
        for unit in units:
            counted = counted.plus(unit.parameters.counted[experts].times(unit.count))
        if not counted.numel:
            continue
        padded = counted.numel
        if run.data_parallel.use_distributed_optimizer:
            end = lcm(world, BUCKET_ALIGNMENT)
            padded = pad(counted.aligned, end) if bucket is None else _bucketed(units, experts, bucket, end)
        yield Buffer(counted, padded, units, experts, world)


def bucket_elements(run: RunSpec, chunk_index: int) -> int | None:
    """Bucket size in elements, None for one bucket (``DistributedDataParallel.__init__``)."""
    d = run.data_parallel
    if not d.overlap_grad_reduce or chunk_index > 0:
        return None
    if d.bucket_size is not None:
        return d.bucket_size
    return max(BUCKET_MINIMUM, BUCKET_PER_RANK * run.parallel.data_parallel_size * run.parallel.cp)


def _bucketed(units: Sequence[Unit], experts: bool, bucket: int, end: int) -> int:
    """Elements of a buffer that is filled last parameter first and cut into buckets, each padded to ``end``."""
    walk = _Walk(bucket, end)
    for unit in reversed(units):
        runs = [
            (tuple(p.numel for p in reversed(parameters)), count)
            for parameters, count in unit.parameters.runs(experts)
        ]
        walk.repeat(tuple(reversed(runs)), unit.count)
    return walk.start + pad(walk.offset, end)


class _Walk:
    """Parameters laid one after the other. What is repeated is followed until it repeats itself."""

    def __init__(self, bucket: int, end: int) -> None:
        self.bucket, self.end = bucket, end
        #: Start of the bucket at hand, and how far it is filled.
        self.start = self.offset = 0

    def repeat(self, items: tuple[object, ...], times: int) -> None:
        """``items``: numbers of elements, or (items, times) again."""
        seen: dict[int, tuple[int, int]] = {}
        i = 0
        while i < times:
            before = seen.get(self.offset)
            if before is not None:
                period = i - before[0]
                cycles = (times - i) // period
                self.start += cycles * (self.start - before[1])
                i += cycles * period
                seen = {}
                if i == times:
                    return
            seen[self.offset] = (i, self.start)
            for item in items:
                if type(item) is int:
                    self._add(item)
                else:
                    self.repeat(*item)  # type: ignore[misc]
            i += 1

    def _add(self, elements: int) -> None:
        self.offset = pad(self.offset, PARAM_ALIGNMENT) + elements
        if self.offset >= self.bucket:
            self.start += pad(self.offset, self.end)
            self.offset = 0


def _buffer_state(
    run: RunSpec, buffer: Buffer, gpu_arch: str, *, frozen: bool, adapters: bool = False
) -> Iterator[tuple[_Line, int]]:
    """(line, bytes) of one buffer."""
    d, precision = run.data_parallel, run.precision
    width = DTYPE_BYTES[precision.params_dtype]
    distributed = d.use_distributed_optimizer
    fp8 = precision.fp8 is not None and run.implementation.te and not adapters

    # Weights: views of one buffer under the distributed optimizer, else tensors of their own.
    # Frozen weights are in no buffer (DistributedDataParallel takes what requires a gradient).
    weights = buffer.padded * width if distributed and not frozen else buffer.sums(rounded_bytes, width)
    if fp8 and precision.fp8_param:
        weights -= buffer.counted.gemm * (width - 1)
    yield _Line(Role.WEIGHTS, State.PARAMETERS, "weights"), weights
    if fp8:
        copies = fp8_copies(precision, buffer.counted, gpu_arch)
        yield _Line(Role.WEIGHTS, State.FP8_COPIES, "fp8 weight copies"), copies
    if frozen:
        return

    # Gradients: one contiguous buffer (main_grad views).
    yield _Line(Role.GRADIENTS, State.GRADIENTS, "gradients"), buffer.padded * gradient_width(run)

    yield from _optimizer(run, buffer)


def _optimizer(run: RunSpec, buffer: Buffer) -> Iterator[tuple[_Line, int]]:
    numel, padded, matrices = buffer.counted.numel, buffer.padded, buffer.counted.matrices
    layer_wise = run.optimizer.use_layer_wise_distributed_optimizer
    if layer_wise:
        numel, matrices = (
            (numel, matrices) if run.data_parallel.use_distributed_optimizer else fullest_share(buffer)
        )
        padded = numel
    sharded = run.data_parallel.use_distributed_optimizer or run.data_parallel.shards("optim")
    elements_of = {Over.ALL: numel, Over.MATRICES: matrices, Over.REST: numel - matrices}
    for state in optimizer_states(run):
        elements = elements_of[state.over]
        if elements == numel and not sharded:
            nbytes = elements * state.width if layer_wise else buffer.sums(rounded_bytes, state.width)
        else:
            whole = padded if elements == numel else elements
            nbytes = -(-whole // (buffer.world if sharded else 1)) * state.width
        if state.on_gpu != 1.0:
            nbytes = round(nbytes * state.on_gpu)
        yield _Line(Role.OPTIMIZER, state.state, state.name, state.provenance), nbytes


def fullest_share(buffer: Buffer) -> tuple[int, int]:
    """(elements, of these in matrices) of the rank that gets most optimizer state of whole parameters, dealt smallest
    first, to and fro.

    Source: ``layer_wise_optimizer.py: LayerWiseDistributedOptimizer.shard_params``. A GEMM's weight has a main
    copy and a momentum (8 bytes an element), any other Adam's three (12).
    """
    parameters: list[Parameter] = []
    for unit in buffer.units:
        for _ in range(unit.count):
            for run, count in unit.parameters.runs(buffer.experts):
                parameters += run * count
    world = buffer.world
    shares = [[0, 0] for _ in range(world)]
    for i, p in enumerate(sorted(parameters, key=lambda p: p.numel)):
        turn = i % (2 * world)
        share = shares[turn if turn < world else 2 * world - 1 - turn]
        share[0] += p.numel
        share[1] += p.numel if p.is_matrix else 0
    total, matrices = max(shares, key=lambda s: 12 * s[0] - 4 * s[1])
    return total, matrices


def fp8_copies(precision: PrecisionSpec, counted: Counted, gpu_arch: str) -> int:
    """fp8 data beside the weights: the row-wise copy (unless it is the parameter itself), the column-wise one
    that backward needs, and block scales. Blackwell multiplies per-tensor fp8 in any layout and keeps no
    column-wise copy (``utils.py: is_non_tn_fp8_gemm_supported``).
    Source: TE ``tensor/{float8,float8_blockwise,mxfp8}_tensor.py``."""
    transposed = not (gpu_arch == "blackwell" and precision.fp8_recipe in ("delayed", "tensorwise"))
    copies = transposed + (not precision.fp8_param)
    # Weights have one fp32 scale a block of 128 x 128 (``common/recipe: Float8BlockScaling.w_block_scaling_dim``).
    scales = {"mxfp8": 2 / 32, "blockwise": 2 * 4 / 128**2}.get(precision.fp8_recipe, 0.0)
    return round(counted.gemm * (copies + scales))


def _after_step(run: RunSpec, buffers: Sequence[Buffer]) -> Iterator[Component]:
    """fp32 copies of the gradients that this rank's optimizer updates, one tensor a parameter."""
    if not keeps_fp32_gradient_copies(run):
        return
    sharded = run.data_parallel.use_distributed_optimizer
    nbytes = 0
    for buffer in buffers:
        rest = 0 if run.implementation.expandable_segments else buffer.sums(_rest, 4)
        nbytes += -(-(4 * buffer.counted.numel + rest) // (buffer.world if sharded else 1))
    if nbytes:
        yield Component(
            "main gradients in fp32", nbytes, Role.BUFFERS, Provenance.FORMULA, lifetime=Lifetime.BETWEEN_STEPS,
            part=Part.DATA_PARALLEL,
        )


def unsplit_rest_bytes(run: RunSpec, buffers: Sequence[Buffer]) -> int:
    """``block_rest`` of everything that stays: parameters, gradient buffers, optimizer states; 0 with expandable
    segments, which split exactly. Megatron-FSDP's own buffers are left out."""
    d, o = run.data_parallel, run.optimizer
    if run.implementation.expandable_segments or d.fsdp or run.peft.freezes:
        return 0
    width, gradient = DTYPE_BYTES[run.precision.params_dtype], gradient_width(run)
    distributed = d.use_distributed_optimizer
    states = [] if o.optimizer_cpu_offload or o.use_layer_wise_distributed_optimizer else optimizer_states(run)
    total = 0
    for buffer in buffers:
        numel = buffer.counted.numel
        total += block_rest(numel * gradient)
        total += block_rest(numel * width) if distributed else buffer.sums(_rest, width)
        for state in states:
            total += buffer.sums(_RESTS[state.over], state.width) // (buffer.world if distributed else 1)
    return total


def _rest(parameter: Parameter, width: int) -> int:
    return block_rest(parameter.numel * width)


def _rest_of_matrix(parameter: Parameter, width: int) -> int:
    return _rest(parameter, width) if parameter.is_matrix else 0


def _rest_of_others(parameter: Parameter, width: int) -> int:
    return 0 if parameter.is_matrix else _rest(parameter, width)


_RESTS = {Over.ALL: _rest, Over.MATRICES: _rest_of_matrix, Over.REST: _rest_of_others}


def _label(line: _Line, experts: bool, adapters: bool) -> str:
    name = f"LoRA {line.name}" if adapters else line.name
    return f"{name} (routed experts)" if experts else name


def _shard(run: RunSpec, line: _Line, experts: bool, worlds: tuple[int, int]) -> str:
    base = "etp x ep" if experts else "tp"
    if run.data_parallel.use_distributed_optimizer and worlds[experts] > 1 and line.role is Role.OPTIMIZER:
        return f"{base} x {'edp' if experts else 'dp x cp'}"
    return base
