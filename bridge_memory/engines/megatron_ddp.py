"""Megatron's DistributedDataParallel, with or without the distributed optimizer.

Bytes on one rank of weights, gradient buffers and optimizer state, in megatron-core's layout.

Source: megatron-core ``distributed/param_and_grad_buffer.py`` (buckets and padding), ``distributed/
distributed_data_parallel.py`` (buffers by group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line, PerChunk, StageState
from bridge_memory.engines.optimizer_states import (
    OptimizerState,
    Over,
    copies_in_step,
    gradient_width,
    keeps_fp32_gradient_copies,
    optimizer_states,
)
from bridge_memory.engines.peft import adapter_units, with_parameters
from bridge_memory.inventory.stack import Unit
from bridge_memory.releases import EXPERTS_APART_WITH_ETP, MTP_BUILT_IN_FP8, OTHERS_MAPPED_BESIDE_MXFP8
from bridge_memory.spec import DTYPE_BYTES, PrecisionSpec, RunSpec
from bridge_memory.spec.ranks import place_in_data_parallel
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import mtp_without_gradients
from bridge_memory.tapes.parameters import (
    PARAM_ALIGNMENT,
    Alike,
    Column,
    Parameter,
    ParameterList,
    Use,
    add_alike,
    aligned_elements,
    aligned_gemm_elements,
    elements,
    gemm_elements,
    gemm_tensors,
    in_each_run,
    matrix_elements,
    no_scales,
    pad,
    rounded_bytes,
    rounded_bytes_of_others,
    scales_of_rows,
    square_scales,
)
from bridge_memory.tapes.symbolic import any_nonzero, common_multiple, largest
from bridge_memory.workspaces.allocator import block_remainder

#: Elements: end of every bucket, together with the data-parallel size.
BUCKET_ALIGNMENT = 128
#: Elements: Megatron's default bucket when gradient reduction overlaps: at least the first, or the second per
#: data-parallel rank (``DistributedDataParallel.__init__``).
BUCKET_MINIMUM, BUCKET_PER_RANK = 40_000_000, 1_000_000


class _Apart(NamedTuple):
    """Parameters that are frozen where others train: elements, and bytes as separate tensors."""

    elements: int
    nbytes: int


class MegatronDDP:
    """The lines of model state of one run, and their bytes for any chunk. See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None, adapters: bool = False) -> None:
        precision, d = run.precision, run.data_parallel
        self.run = run
        #: Position among the ranks with the same dense parameters, and with the same experts; None: the rank with most.
        self.place = None if rank is None else place_in_data_parallel(run.parallel, rank)
        #: Routed experts have separate buffers, sharded over the ranks with the same experts.
        self.own_expert_buffers = experts_apart(run)
        dense_world, expert_world = run.parallel.shard_worlds
        self.worlds = (dense_world, expert_world if self.own_expert_buffers else dense_world)
        self.width = DTYPE_BYTES[precision.params_dtype]
        self.gradient_width = gradient_width(run)
        self.distributed = d.use_distributed_optimizer
        self.sharded = self.distributed
        self.layer_wise = run.optimizer.use_layer_wise_distributed_optimizer
        # Adapters train like any other parameter, in the dtype of activations.
        self.frozen = run.peft.freezes and not adapters
        self.fp8 = precision.quantizes and run.implementation.te and not adapters
        #: Weights are fp8 tensors, which have separate buffers (``_allocate_buffers_for_parameters``: by dtype).
        self.fp8_parameters = self.fp8 and precision.quantized_param
        #: Units whose weights are not fp8 tensors even so, but are quantized for each microbatch.
        late = self.fp8_parameters and not MTP_BUILT_IN_FP8(run.implementation)
        self.late = frozenset((Label.MTP,)) if late else frozenset()
        #: Whether other parameters exist both in and outside of their buffer.
        self.twice = not OTHERS_MAPPED_BESIDE_MXFP8(run.implementation)
        #: MTP depths have no backward.
        self.forward_depths = self.fp8 and mtp_without_gradients(run)
        self.states = () if self.frozen else optimizer_states(run)
        self.expandable = run.implementation.expandable_segments
        remainders = not (self.expandable or run.peft.freezes)
        offloaded = run.optimizer.optimizer_cpu_offload or self.layer_wise
        #: States that are separate tensors on the GPU, whose allocator blocks have remainders.
        self.remainder_states = self.states if remainders and not offloaded else ()
        self.remainders = remainders
        self.copies_gradients = keeps_fp32_gradient_copies(run)
        divided = tuple([self.distributed and any_nonzero(world > 1) for world in self.worlds])
        self.lines = (
            *_lines(False, adapters, self.fp8, self.frozen, divided[False], "dp x cp", self.states),
            *_lines(True, adapters, self.fp8, self.frozen, divided[True],
                    "edp" if self.own_expert_buffers else "dp x cp", self.states),
        )  # fmt: skip
        self.columns, at = _columns(
            precision.recipe, self.width, self.distributed, self.frozen, self.fp8_parameters and self.distributed,
            self.states, self.remainder_states, self.remainders, self.copies_gradients and not self.expandable,
        )  # fmt: skip
        self._weights_at = at.get((rounded_bytes, self.width), 0)
        self._unmapped_at = at.get((rounded_bytes_of_others, self.width), 0)
        self._weight_remainders_at = at.get((_remainder, self.width), 0)
        self._copies_at = at.get((_remainder, 4), 0)
        #: For each state: (parameters that have it, bytes per element, fraction on the GPU, column of its rounded
        #: bytes).
        self._of_states = [
            (s.over, s.width, s.on_gpu, at.get((rounded_bytes, s.width), 0)) for s in self.states
        ]
        self._remainders_at = [at[_REMAINDERS[s.over], s.width] for s in self.remainder_states]
        self._chunks: PerChunk[ChunkState] = PerChunk()
        #: First chunks with an encoder that is partly frozen, by their id.
        self._split: dict[int, tuple[Sequence[Unit], list[Unit], _Apart]] = {}
        self.adapters = MegatronDDP(run, adapters=True) if self.frozen else None

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What a stage of ``chunks`` keeps."""
        given = chunks
        chunks, apart = self._apart(chunks)
        amounts = [0] * len(self.lines)
        parameters = remainders = copies = 0
        # On later stages and chunks a buffer is one bucket (``DistributedDataParallel.__init__``: disable_bucketing).
        starts = bool(chunks) and _starts_the_model(chunks[0], self.run)
        for found, times in self._counted(chunks, starts):
            parameters += times * found.parameters
            remainders += times * found.remainders
            copies += times * found.gradient_copies
            amounts = [n + times * more for n, more in zip(amounts, found.amounts, strict=True)]
        # Parameters that are frozen where others train are separate tensors beside the buffers.
        parameters += apart.elements
        amounts = [amounts[0] + apart.nbytes, *amounts[1:]]
        lines, whole = self.lines, amounts
        if self.adapters is not None:
            of_adapters = [0] * len(self.adapters.lines)
            for index, units in enumerate(given):
                of_chunk = adapter_units(self.run, units)
                if of_chunk:
                    found = self.adapters.chunk(of_chunk, in_buckets=starts and index == 0)
                    of_adapters = list(map(add, of_adapters, found.amounts))
            lines, whole = (*lines, *self.adapters.lines), [*amounts, *of_adapters]
        kept = tuple((line, n) for line, n in zip(lines, whole, strict=True) if any_nonzero(n))
        return StageState(parameters, kept, remainders, copies, in_step=copies_in_step(self.run, self.states, kept))

    def _apart(self, chunks: Sequence[Sequence[Unit]]) -> tuple[Sequence[Sequence[Unit]], _Apart]:
        """(the chunks with the parameters that train or are frozen as the run's weights are, what is frozen beside what
        trains). Only the first chunk has an encoder."""
        exceptions = (False, True) if self.frozen else (False,)
        first = chunks[0] if chunks else ()
        if not self.run.model.encoders or not any(
            p.trains in exceptions for unit in first for few, _ in unit.parameters.rows for p in few
        ):
            return chunks, _Apart(0, 0)
        key = id(first)
        known = self._split.get(key)
        if known is None:
            frozen = with_parameters(first, lambda p: p.trains is False)
            elements_, nbytes = 0, 0
            for unit in frozen:
                for few, times in unit.parameters.rows:
                    for p in few:
                        elements_ += unit.times * times * p.numel
                        nbytes += unit.times * times * rounded_bytes(p, self.width)
            kept = with_parameters(first, lambda p: p.trains is None)
            # ``first`` is kept too, so that its id stays its own.
            known = self._split[key] = (first, kept, _Apart(elements_, nbytes))
        return (known[1], *chunks[1:]), known[2]

    def _counted(self, chunks: Sequence[Sequence[Unit]], starts: bool) -> Iterator[tuple[ChunkState, int]]:
        """(what a chunk keeps, number of equal chunks of the stage)."""
        times: dict[int, int] = {}
        first = id(chunks[0]) if starts else None
        if starts:
            yield self._chunks.get(chunks[0], True, self.chunk), 1
        for units in chunks:
            times[id(units)] = times.get(id(units), 0) + 1
        for units in {id(units): units for units in chunks}.values():
            number = times[id(units)] - (id(units) == first)
            if number:
                yield self._chunks.get(units, False, self.chunk), number

    def chunk(self, units: Sequence[Unit], in_buckets: bool) -> ChunkState:
        """What one chunk keeps; ``in_buckets``: its buffers may have more than one bucket."""
        dense, experts = [0] * len(self.columns), [0] * len(self.columns)
        for _, _, parameters, times, _ in units:
            a, b = parameters.sums(self.columns)
            dense = [x + times * y for x, y in zip(dense, a, strict=True)]
            if b[0]:
                experts = [x + times * y for x, y in zip(experts, b, strict=True)]
        late = self._late(units)
        buffers: list[tuple[tuple[bool, ...], list[int]]] = [((False,), dense), ((True,), experts)]
        if not self.own_expert_buffers:
            buffers = [((False, True), list(map(add, dense, experts)))]
        lines = len(self.lines) // 2
        of_kind = {False: [0] * lines, True: [0] * lines}
        remainders = copies = 0
        for kinds, sums in buffers:
            if not sums[0]:
                continue
            world = self.worlds[kinds[0]]
            others = 0
            if self.fp8_parameters and self.distributed:
                padded, others = self._padded_by_dtype(units, kinds, sums, late, world, in_buckets)
            else:
                padded = self._padded(units, kinds, sums, world, in_buckets) if self.distributed else sums[0]
            dealt = {kind: (of[0], of[3]) for kind, of in ((False, dense), (True, experts))}
            of_rank = self._of_rank(units, kinds, dealt, world, in_buckets) if self.distributed else {}
            if self.layer_wise and not self.distributed:
                dealt = dealt_share(units, kinds, world, None if self.place is None else self.place[kinds[0]])
            numel, matrices = (sum(dealt[kind][i] for kind in kinds) for i in (0, 1))
            held = sum(of_rank.values()) if of_rank else None
            quantized_late = [sum(of) for of in zip(*(late[kind] for kind in kinds), strict=True)]
            whole = list(self._amounts(sums, padded, world, numel, matrices, held, others, quantized_late))
            if len(kinds) > 1 and experts[0]:
                # In a shared buffer everything that does not belong to experts is dense, padding included.
                of_kind[True] = list(
                    self._amounts(experts, experts[1], world, *dealt[True], of_rank.get(True), late=late[True])
                )
                whole = [n - m for n, m in zip(whole, of_kind[True], strict=True)]
            of_kind[kinds[0]] = whole
            if self.remainders:
                remainders += self._remainders(sums, world)
            if self.copies_gradients:
                remainder = 0 if self.expandable else sums[self._copies_at]
                copies += -(-(4 * sums[0] + remainder) // (world if self.distributed else 1))
        if self.forward_depths:
            self._without_layouts_of_depths(units, of_kind)
        return ChunkState(dense[0] + experts[0], of_kind[False] + of_kind[True], remainders, copies)

    def _late(self, units: Sequence[Unit]) -> dict[bool, list[int]]:
        """For dense weights (False) and experts' (True) of ``late`` units: elements, tensors, bytes of blocks' scales,
        elements aligned as in a buffer."""
        found = {False: [0, 0, 0, 0], True: [0, 0, 0, 0]}
        for unit in units:
            if unit.label in self.late:
                for kind, sums in zip((False, True), unit.parameters.sums(self.columns), strict=True):
                    found[kind] = [n + unit.times * sums[i] for n, i in zip(found[kind], (2, 4, 5, 6), strict=True)]
        return found

    def _without_layouts_of_depths(self, units: Sequence[Unit], of_kind: dict[bool, list[int]]) -> None:
        """Weights of MTP depths without a backward are quantized row-wise only (``linear.py: _Linear.forward``:
        ``columnwise_usage``)."""
        precision, arch = self.run.precision, self.run.implementation.gpu_arch
        for unit in units:
            if unit.label is not Label.MTP or precision.fp8_param:
                continue
            for kind, sums in zip((False, True), unit.parameters.sums(self.columns), strict=True):
                both = fp8_copies(precision, sums[2], arch, scales=sums[5]) * unit.times
                if _has_column_wise_copies(precision, arch):
                    of_kind[kind][1] -= both // 2

    def _padded(
        self, units: Sequence[Unit], kinds: tuple[bool, ...], sums: Sequence[int], world: int, in_buckets: bool
    ) -> int:
        """Elements of a distributed optimizer's buffer of these ``kinds``, padded."""
        end = common_multiple(world, BUCKET_ALIGNMENT)
        bucket = bucket_elements(self.run) if in_buckets else None
        shared = _shared_embedding(units, self.run) if False in kinds else None
        if bucket is not None:
            filled: int = self._filled(units, kinds, bucket, end)[0]
            return filled
        if shared is None or shared.numel == sums[0]:
            return pad(sums[1], end)
        # It is at one end of the buffer, so that it does not change the buckets of the others.
        return pad(sums[1] - aligned_elements(shared, PARAM_ALIGNMENT), end) + pad(shared.numel, end)

    def _filled(self, units: Sequence[Unit], kinds: tuple[bool, ...], bucket: int, end: int) -> tuple[Any, ...]:
        """Elements of the buffer; where weights are fp8 tensors of the one with other parameters, and of theirs."""
        def filled(lists: Sequence[ParameterList], numbers: Sequence[int]) -> tuple[int, ...]:
            of_run = [unit._replace(parameters=one) for unit, one in zip(units, lists, strict=True)]
            shared = _shared_embedding(of_run, self.run) if False in kinds else None
            out = []
            for gemm in (False, True) if self.fp8_parameters else (None,):
                def chosen(unit: Unit, p: Parameter, *, gemm: bool | None = gemm) -> bool:
                    mine = gemm is None or (p.is_gemm and unit.label not in self.late) is gemm
                    return p is not shared and mine

                out.append(_bucketed(of_run, kinds, numbers[0], numbers[1], chosen))
            if shared is not None:  # at one end of its buffer, in a bucket of its own
                out[0] += pad(shared.numel, numbers[1])
            return tuple(out)

        return in_each_run(filled, [unit.parameters for unit in units], (bucket, end))

    def _of_rank(
        self, units: Sequence[Unit], kinds: tuple[bool, ...], dealt: Mapping[bool, tuple[int, int]], world: int,
        in_buckets: bool,
    ) -> dict[bool, int]:  # fmt: skip
        """Elements of each kind whose states the rank has: its shards without padding. Empty if no rank is given: the
        rank with most may have no padding.

        Source: ``distrib_optimizer.py: DistributedOptimizer._build_model_gbuf_param_range_map``.
        """
        if world == 1:
            return {kind: dealt[kind][0] for kind in kinds}
        if self.place is None:
            return {}
        found = dict.fromkeys(kinds, 0)
        place = self.place[kinds[0]] % world
        for gemm in (False, True) if self.fp8_parameters else (None,):
            for parameters, start, end in self._buckets(units, kinds, world, in_buckets, gemm=gemm):
                shard = (end - start) // world
                low = start + place * shard
                for at, p in parameters:
                    found[p.expert] += max(0, min(at + p.numel, low + shard) - max(at, low))
        return found

    def _padded_by_dtype(
        self, units: Sequence[Unit], kinds: tuple[bool, ...], sums: Sequence[int], late: Mapping[bool, Sequence[int]],
        world: int, in_buckets: bool,
    ) -> tuple[int, int]:  # fmt: skip
        """If weights are fp8 tensors: (elements of both padded buffers, elements of the one with other parameters)."""
        end = common_multiple(world, BUCKET_ALIGNMENT)
        bucket = bucket_elements(self.run) if in_buckets else None
        if bucket is not None:
            others, of_gemms = self._filled(units, kinds, bucket, end)
            return others + of_gemms, others
        of_gemms = sums[6] - sum([late[kind][3] for kind in kinds])
        others = sums[1] - of_gemms
        shared = _shared_embedding(units, self.run) if False in kinds else None
        if shared is None:
            others = pad(others, end)
        else:  # at one end of its buffer, in a bucket of its own
            others = pad(others - aligned_elements(shared, PARAM_ALIGNMENT), end) + pad(shared.numel, end)
        return others + pad(of_gemms, end), others

    def _buckets(
        self, units: Sequence[Unit], kinds: tuple[bool, ...], world: int, in_buckets: bool, *, gemm: bool | None
    ) -> Iterator[Bucket]:
        bucket = bucket_elements(self.run) if in_buckets else None
        shared = _shared_embedding(units, self.run) if False in kinds else None
        end = common_multiple(world, BUCKET_ALIGNMENT)
        yield from _buckets(units, kinds, bucket, end, shared, gemm=gemm, late=self.late)

    def _amounts(
        self, sums: Sequence[int], padded: int, world: int, numel: int, matrices: int, held: int | None = None,
        others: int = 0, late: Sequence[int] = (0, 0, 0, 0),
    ) -> Iterator[int]:  # fmt: skip
        """Bytes of one buffer's lines, in their order. ``numel``, and ``matrices`` of these: elements whose states are
        sharded, or with whole parameters per rank, elements of one rank. ``held``: elements of the rank's shards, if
        known. ``others``: elements of ``padded`` that are not fp8 tensors. ``late``: from ``_late``."""
        _, _, gemm, _, tensors, scales, *_ = sums
        later, later_tensors, later_scales, _ = late
        # Weights: views of one buffer under the distributed optimizer, else separate tensors.
        # Frozen weights are in no buffer (DistributedDataParallel only includes what requires a gradient).
        in_buffer = self.distributed and not self.frozen
        weights = padded * self.width if in_buffer else sums[self._weights_at]
        precision = self.run.precision
        if not self.fp8_parameters:
            yield weights
        elif not in_buffer:
            yield weights - (gemm - later) * self.width + _data(precision, gemm - later)
        elif precision.recipe == "mxfp8":
            # mxfp8 tensors cannot be views of a buffer: they are separate, and gathered in the buffer of gradients
            # (``param_and_grad_buffer.py: _ParamAndGradBuffer.__init__``: reuse_grad_buf_for_mxfp8_param_ag).
            unmapped = sums[self._unmapped_at] + later * self.width
            yield gemm - later + others * self.width + unmapped * self.twice
        else:
            yield _data(precision, padded - others) + others * self.width
        if self.fp8:
            arch = self.run.implementation.gpu_arch
            copies = fp8_copies(precision, gemm - later, arch, tensors - later_tensors, scales - later_scales)
            if later:
                both = replace(precision, fp8_param=False)
                copies += fp8_copies(both, later, arch, later_tensors, later_scales)
            yield copies
        if self.frozen:
            return
        # Gradients: one contiguous buffer (main_grad views).
        yield padded * self.gradient_width
        if self.layer_wise:
            padded = numel
        for over, width, on_gpu, rounded_at in self._of_states:
            n = numel if over is Over.ALL else matrices if over is Over.MATRICES else numel - matrices
            if n == numel and not self.sharded:
                nbytes = n * width if self.layer_wise else sums[rounded_at]
            elif n == numel and held is not None:
                nbytes = held * width
            else:
                nbytes = -(-(padded if n == numel else n) // (world if self.sharded else 1)) * width
            yield nbytes if on_gpu == 1.0 else round(nbytes * on_gpu)

    def _remainders(self, sums: Sequence[int], world: int) -> int:
        """``block_remainder`` of all persistent tensors: parameters, gradient buffers, optimizer states. Not called
        with expandable segments, whose blocks split exactly."""
        numel = sums[0]
        total = block_remainder(numel * self.gradient_width)
        total += block_remainder(numel * self.width) if self.distributed else sums[self._weight_remainders_at]
        shards = world if self.distributed else 1
        return total + sum([sums[at] // shards for at in self._remainders_at])


@lru_cache(maxsize=256)
def _lines(
    experts: bool, adapters: bool, fp8: bool, frozen: bool, divided: bool, group: str,
    states: tuple[OptimizerState, ...],
) -> tuple[Line, ...]:  # fmt: skip
    """Lines of model state; ``divided``: states are sharded over ``group``."""
    exact, base = Provenance.EXACT, "etp x ep" if experts else "tp"
    out = [Line(Role.WEIGHTS, State.PARAMETERS, "weights", experts, exact, adapters, base)]
    if fp8:
        out.append(Line(Role.WEIGHTS, State.FP8_COPIES, "fp8 weight copies", experts, exact, adapters, base))
    if not frozen:
        out.append(Line(Role.GRADIENTS, State.GRADIENTS, "gradients", experts, exact, adapters, base))
    if divided:
        base = f"{base} x {group}"
    out += [Line(Role.OPTIMIZER, s.state, s.name, experts, s.provenance, adapters, base) for s in states]
    return tuple(out)


@lru_cache(maxsize=256)
def _columns(
    recipe: str, width: int, distributed: bool, frozen: bool, others: bool, states: tuple[OptimizerState, ...],
    remainder_states: tuple[OptimizerState, ...], remainders: bool, copies: bool,
) -> tuple[tuple[Column, ...], dict[Column, int]]:  # fmt: skip
    """(columns of sums over parameters, position of each column).

    ``width``: bytes per element of parameters. ``others``: parameters that are not fp8 tensors have a separate buffer.
    ``remainders``: count remainders of allocator blocks, for states those of ``remainder_states``. ``copies``:
    gradients have copies in fp32.
    """
    columns: list[Column] = [
        (elements, 0), (aligned_elements, PARAM_ALIGNMENT), (gemm_elements, 0), (matrix_elements, 0),
        (gemm_tensors, 0), _SCALES.get(recipe, (no_scales, 0)), (aligned_gemm_elements, PARAM_ALIGNMENT),
    ]
    if not distributed or frozen:
        columns.append((rounded_bytes, width))
    if others:
        columns.append((rounded_bytes_of_others, width))
    if not distributed:
        columns += [(rounded_bytes, state.width) for state in states]
    if remainders and not distributed:
        columns.append((_remainder, width))
    columns += [(_REMAINDERS[state.over], state.width) for state in remainder_states]
    if copies:
        columns.append((_remainder, 4))
    distinct = tuple(dict.fromkeys(columns))
    return distinct, {column: i for i, column in enumerate(distinct)}


class ChunkState(NamedTuple):
    """What one chunk keeps: elements of its parameters, and bytes."""

    parameters: int
    #: In the order of the engine's lines.
    amounts: list[int]
    #: Unsplit remainders of allocator blocks.
    remainders: int
    #: fp32 copies of the gradients of this rank's optimizer, one tensor per parameter.
    gradient_copies: int


def bucket_elements(run: RunSpec) -> int | None:
    """Bucket size in elements, None for one bucket (``DistributedDataParallel.__init__``)."""
    d = run.data_parallel
    if not d.overlap_grad_reduce:
        return None
    if d.bucket_size is not None:
        return d.bucket_size
    elements: int = largest(BUCKET_MINIMUM, BUCKET_PER_RANK * run.parallel.data_parallel_size * run.parallel.cp)
    return elements


def experts_apart(run: RunSpec) -> bool:
    """Whether routed experts' parameters are marked ``allreduce=False``, so that they have separate buffers over the
    ranks with the same experts. Else they are in the buffers of dense parameters and sharded over DP x CP, for any ETP
    (``extensions/transformer_engine.py: TELinear, TEGroupedLinear``, ``tensor_parallel/layers.py``)."""
    p = run.parallel
    return p.ep > 1 or (EXPERTS_APART_WITH_ETP(run.implementation) and p.etp != p.tp)


def _starts_the_model(units: Sequence[Unit], run: RunSpec) -> bool:
    """Whether these units are the first of the model; with MTP other stages have an embedding too."""
    labels = [unit.label for unit in units]
    return run.parallel.pp == 1 or (Label.EMBEDDING in labels and Label.MTP not in labels)


def _shared_embedding(units: Sequence[Unit], run: RunSpec) -> Parameter | None:
    """The weight that stages share, which has a separate bucket (``language_module.py:
    setup_embeddings_and_output_layer``, ``param_and_grad_buffer.py: _does_param_require_new_bucket``): the token
    embedding, also on MTP's stage, or a tied output layer."""
    model = run.model
    tied = model.share_embeddings_and_output_weights
    if run.parallel.pp == 1 or not (tied or model.mtp_num_layers):
        return None
    first = {unit.label: unit.parameters.rows[0].parameters[0] for unit in units if unit.parameters.rows}
    embedding, output = first.get(Label.EMBEDDING), first.get(Label.LOSS)
    if embedding is not None and embedding.use is Use.EMBEDDING:
        return embedding
    return output if tied and output is not None and output.use is Use.OUTPUT else None


def _bucketed(
    units: Sequence[Unit], kinds: tuple[bool, ...], bucket: int, end: int,
    chosen: Callable[[Unit, Parameter], bool] = lambda unit, p: True,
) -> int:  # fmt: skip
    """Elements of a buffer that is filled with the ``chosen`` parameters, from the last to the first, and cut into
    buckets, each padded to multiples of ``end``."""
    walk = _Walk(bucket, end)
    for unit in reversed(units):
        runs = [
            (tuple(p.numel for p in reversed(parameters) if chosen(unit, p)), times)
            for parameters, times in unit.parameters.runs(*kinds)
        ]
        walk.repeat(tuple(reversed(runs)), unit.times)
    return walk.start + pad(walk.offset, end)


class Bucket(NamedTuple):
    """A bucket of a buffer: its parameters with their positions in the buffer, its start and its end, in elements."""

    parameters: list[tuple[int, Parameter]]
    start: int
    end: int


def _buckets(
    units: Sequence[Unit], kinds: tuple[bool, ...], bucket: int | None, end: int, shared: Parameter | None, *,
    gemm: bool | None = None, late: frozenset[Label] = frozenset(),
) -> Iterator[Bucket]:  # fmt: skip
    """Every bucket of a buffer; ``gemm``: of the buffer of fp8 weights (True) or of other parameters, those of ``late``
    units included (False); None: of the only buffer.

    Source: ``param_and_grad_buffer.py: _ParamAndGradBuffer.__init__``.
    """
    held: list[tuple[int, Parameter]] = []
    start = at = 0
    for unit in reversed(units):
        quantized = unit.label not in late
        for _ in range(unit.times):
            for few, times in reversed(list(unit.parameters.runs(*kinds))):
                for p in tuple(p for p in reversed(few) if gemm in (None, p.is_gemm and quantized)) * times:
                    at = pad(at, PARAM_ALIGNMENT)
                    if p is shared and held:
                        at = pad(at, end)
                        yield Bucket(held, start, at)
                        held, start = [], at
                    held.append((at, p))
                    at += p.numel
                    if p is shared or (bucket is not None and at - start >= bucket):
                        at = pad(at, end)
                        yield Bucket(held, start, at)
                        held, start = [], at
    if held:
        yield Bucket(held, start, pad(at, end))


class _Walk:
    """Lays out parameters one after the other. Repetitions are followed only until the layout itself becomes periodic.
    """

    def __init__(self, bucket: int, end: int) -> None:
        self.bucket, self.end = bucket, end
        #: Start of the current bucket, and elements in it.
        self.start = self.offset = 0

    def repeat(self, items: tuple[object, ...], times: int) -> None:
        """``items``: numbers of elements, or nested (items, times)."""
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


def dealt_share(
    units: Sequence[Unit], kinds: tuple[bool, ...], world: int, place: int | None = None
) -> dict[bool, tuple[int, int]]:
    """For each of ``kinds`` (elements, elements in matrices) that one rank gets when whole parameters, sorted by size,
    are assigned to ``world`` ranks in alternating order (0 .. n-1, n-1 .. 0, ...). ``place``: which rank; None: the
    rank with most optimizer state.

    Source: ``layer_wise_optimizer.py: LayerWiseDistributedOptimizer.shard_params``. A GEMM's weight has a main copy and
    a momentum (8 bytes per element), any other Adam's three states (12).
    """
    def dealt(lists: Sequence[ParameterList], numbers: Sequence[int]) -> tuple[int, ...]:
        of_run = [unit._replace(parameters=one) for unit, one in zip(units, lists, strict=True)]
        return _dealt(of_run, kinds, numbers[0], place)

    found = in_each_run(dealt, [unit.parameters for unit in units], (world,))
    return dict(zip(kinds, zip(found[::2], found[1::2], strict=True), strict=True))


def _dealt(units: Sequence[Unit], kinds: tuple[bool, ...], world: int, place: int | None) -> tuple[int, ...]:
    """``dealt_share`` one after the other."""
    of_size: dict[int, list[Alike]] = {}
    for unit in units:
        for numel, alike in unit.parameters.by_size(*kinds):
            add_alike(of_size.setdefault(numel, []), alike, unit.times)
    rows = tuple([(numel, *row) for numel in sorted(of_size) for row in of_size[numel]])
    return _dealt_rows(rows, kinds, world, place)


@lru_cache(maxsize=4096)
def _dealt_rows(
    rows: Sequence[tuple[int, bool, bool, int]], kinds: tuple[bool, ...], world: int, place: int | None
) -> tuple[int, ...]:
    """``rows``: of the sorted list elements of a parameter, whether it is a matrix and an expert's, and how many such
    follow each other."""
    world = min(world, sum([times for *_, times in rows]))  # further ranks get nothing
    if place is not None and place >= world:
        return (0, 0) * len(kinds)
    ends, at = [0], 0
    for *_, times in rows:
        at += times
        ends.append(at)
    # Ranks between two of these are dealt the same.
    candidates = {0, *(end % (2 * world) for end in ends), *(-end % (2 * world) for end in ends)}
    ranks = sorted(rank for rank in candidates if rank < world) if place is None else [place]
    most, best = -1, (0, 0) * len(kinds)
    for rank in ranks:
        # Of as many parameters as each end says, those of this rank.
        dealt = [
            2 * (end // (2 * world)) + (end % (2 * world) > rank) + (end % (2 * world) > 2 * world - 1 - rank)
            for end in ends
        ]  # fmt: skip
        share, nbytes = [0, 0] * len(kinds), 0
        for (numel, is_matrix, expert, _), before, after in zip(rows, dealt, dealt[1:], strict=False):
            if after > before:
                own, kind = numel * (after - before), 2 * kinds.index(expert)
                share[kind] += own
                share[kind + 1] += own * is_matrix
                nbytes += own * (8 if is_matrix else 12)
        if nbytes > most:
            most, best = nbytes, tuple(share)
    return best


def fp8_copies(
    precision: PrecisionSpec, gemm: int, gpu_arch: str, tensors: int = 0, scales: int | None = None
) -> int:
    """Bytes of fp8 data for weights of ``gemm`` elements in ``tensors`` tensors: the row-wise copy (unless that is the
    parameter itself), the column-wise copy that backward needs, and scales per block or per tensor. Blackwell
    multiplies per-tensor fp8 in any layout and has no column-wise copy (``utils.py: is_non_tn_fp8_gemm_supported``).
    ``scales``: bytes of blocks' scales if shapes are known; else they are counted without padding. Source: TE
    ``tensor/{float8,float8_blockwise,mxfp8,nvfp4}_tensor.py``."""
    copies = _has_column_wise_copies(precision, gpu_arch) + (not precision.quantized_param)
    if precision.fp4 is not None:
        # Half a byte per element, one byte per block of 16 for its scale, and the maximum of the tensor.
        return _data(precision, gemm * copies) + (gemm * 2 // 16 if scales is None else scales) + 2 * 4 * tensors
    # Weights have one fp32 scale per block of 128 x 128 (``common/recipe: Float8BlockScaling.w_block_scaling_dim``).
    each = {"mxfp8": 2 / 32, "blockwise": 2 * 4 / 128**2}.get(precision.fp8_recipe)
    if each is None:
        return gemm * copies + 4 * tensors
    return round(gemm * (copies + each)) if scales is None else gemm * copies + scales


#: Recipe -> (function that gives the bytes of blocks' scales, length of a block).
_SCALES: dict[str, Column] = {
    "mxfp8": (scales_of_rows, 32), "nvfp4": (scales_of_rows, 16), "blockwise": (square_scales, 128),
}


def _data(precision: PrecisionSpec, elements: int) -> int:
    """Bytes of ``elements`` quantized elements, without scales."""
    return elements if precision.fp4 is None else -(-elements // 2)


def _has_column_wise_copies(precision: PrecisionSpec, gpu_arch: str) -> bool:
    return not (gpu_arch == "blackwell" and precision.recipe in ("delayed", "tensorwise"))


def _remainder(parameter: Parameter, width: int) -> int:
    return block_remainder(parameter.numel * width)


def _remainder_of_matrix(parameter: Parameter, width: int) -> int:
    return _remainder(parameter, width) if parameter.is_matrix else 0


def _remainder_of_others(parameter: Parameter, width: int) -> int:
    return 0 if parameter.is_matrix else _remainder(parameter, width)


_REMAINDERS = {Over.ALL: _remainder, Over.MATRICES: _remainder_of_matrix, Over.REST: _remainder_of_others}


ENGINE = MegatronDDP
