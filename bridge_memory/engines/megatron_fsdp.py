"""Megatron-FSDP: what it divides over data-parallel ranks, and what it gathers and reduces while layers run.

Parameters are laid out in buckets: one of dense and one of expert parameters for every unit (a transformer layer), and
buckets for all parameters outside of units. Three things move:

- Weights of a unit are gathered before its forward pass and again before its backward pass, together with those of the
  next units until a budget is reached, and freed after the pass. Weights outside of units stay gathered.
- A gradient is written into a whole bucket. When the bucket is full it is reduced, and freed once the buckets that
  wait behind it exceed a capacity, at the latest at the end of the chunk's backward pass.
- After a step the first bucket is gathered for the next one.

Budget and capacity are counted in elements; the default of megatron-core is half a billion ahead and a billion
waiting, so that all of a small model is whole at once.

Source: megatron-core ``distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: MegatronFSDP`` (units, hooks, budgets),
``param_and_grad_buffer.py: _get_parameter_groups, build_data_parallel_buffer_index`` (buckets), ``AllGatherPipeline,
GradReducePipeline``; before 0.14 ``distributed/custom_fsdp``. Held to it on meta tensors by ``tests/engines``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import lcm, prod
from typing import NamedTuple

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line, OfChunks, StageState
from bridge_memory.engines.megatron_ddp import bucket_elements, fp8_copies
from bridge_memory.engines.optimizer_states import OptimizerState, gradient_width, optimizer_states
from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.chain import NOTHING, Concurrent, EngineBytes, Label, most
from bridge_memory.inventory.parameters import PARAM_ALIGNMENT, Parameter, Use, pad, rounded_bytes
from bridge_memory.inventory.stack import Unit
from bridge_memory.releases import (
    FSDP_ALIGNS_ROWS,
    FSDP_KEEPS_ROOT,
    FSDP_MAIN_DTYPES,
    FSDP_PREFETCH_FITS_UNITS,
    FSDP_PREFETCHES_AHEAD,
    FSDP_REDUCES_EACH_PARAMETER,
    MAMBA_LAYERS_ARE_UNITS,
)
from bridge_memory.spec import DTYPE_BYTES, LayerSpec, MambaSpec, RunSpec
from bridge_memory.workspaces.allocator import block_rest

#: Elements that wait to be reduced, twice the elements gathered ahead, where nobody says otherwise.
COMMUNICATION_UNIT = 1_000_000_000
#: Elements: end of every bucket before ``FSDP_ALIGNS_ROWS``, together with the data-parallel size.
BUCKET_ALIGNMENT = 2 * PARAM_ALIGNMENT


class Bucket(NamedTuple):
    """Parameters that are gathered and reduced together, in elements on one rank."""

    #: With padding.
    size: int
    numel: int
    #: Of weights whose fp8 copy is the parameter itself.
    fp8: int
    experts: bool
    #: Positions in the chunk of the modules between whose forward passes it is needed.
    first: int
    last: int
    #: A unit's, gathered and freed with it.
    unit: bool
    frozen: bool = False
    #: Of the output layer's weight.
    output: int = 0
    #: Of the parameters whose gradients are made first.
    tail: int = 0


class ChunkState(NamedTuple):
    """What one chunk keeps and moves."""

    parameters: int
    #: In the order of the engine's lines.
    amounts: tuple[int, ...]
    #: Bytes: gathered for good, and between steps.
    gathered: int
    gathered_between_steps: int
    gradient_copies: int
    #: What the allocator adds to buffers.
    rests: int
    concurrent: EngineBytes


class MegatronFSDP:
    """The lines of model state of one run, and what moves, for any chunk. See the module docstring."""

    def __init__(self, run: RunSpec) -> None:
        precision, d = run.precision, run.data_parallel
        self.run = run
        self.worlds = run.parallel.shard_worlds
        self.shards = {what: d.shards(what) for what in ("optim", "grads", "params")}
        self.width = DTYPE_BYTES[precision.params_dtype]
        self.gradient_width = gradient_width(run)
        self.reduced_width = DTYPE_BYTES[d.grad_comm_dtype] if d.grad_comm_dtype else self.gradient_width
        self.fp8 = precision.fp8 is not None and run.implementation.te
        self.fp8_param = self.fp8 and precision.fp8_param
        self.states = fsdp_states(run)
        self.copies_gradients = any(s.state is State.MAIN_PARAMETERS for s in self.states) and _copies_gradients(run)
        self.lines = tuple(
            line for adapters in (False, True) for experts in (False, True) for line in self._lines(experts, adapters)
        )
        self._chunks: OfChunks[ChunkState] = OfChunks()

    def _lines(self, experts: bool, adapters: bool) -> Iterator[Line]:
        whole = "etp x ep" if experts else "tp"
        divided = f"{whole} x {'edp' if experts else 'dp x cp'}" if self.worlds[experts] > 1 else whole
        groups = {what: divided if sharded else whole for what, sharded in self.shards.items()}
        exact = Provenance.EXACT
        yield Line(Role.WEIGHTS, State.PARAMETERS, "weights", experts, exact, adapters, groups["params"])
        if self.fp8 and not adapters:
            yield Line(Role.WEIGHTS, State.FP8_COPIES, "fp8 weight copies", experts, exact, adapters, whole)
        yield Line(Role.GRADIENTS, State.GRADIENTS, "gradients", experts, exact, adapters, groups["grads"])
        for state in self.states:
            yield Line(Role.OPTIMIZER, state.state, state.name, experts, state.provenance, adapters, groups["optim"])

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What a stage of ``chunks`` keeps and moves."""
        found = [self._chunks.get(units, index, self.chunk) for index, units in enumerate(chunks)]
        amounts = [sum(chunk.amounts[i] for chunk in found) for i in range(len(self.lines))]
        return StageState(
            parameters=sum(chunk.parameters for chunk in found),
            amounts=tuple((line, n) for line, n in zip(self.lines, amounts, strict=True) if n),
            rests=sum(chunk.rests for chunk in found),
            gradient_copies=sum(chunk.gradient_copies for chunk in found),
            gathered=sum(chunk.gathered for chunk in found),
            gathered_between_steps=sum(chunk.gathered_between_steps for chunk in found),
            concurrent=tuple(chunk.concurrent for chunk in found),
        )

    # ---- layout ----

    def chunk(self, units: Sequence[Unit], index: int = 0) -> ChunkState:
        """What chunk ``index`` of a stage keeps and moves."""
        places = places_of(units)
        limit = bucket_elements(self.run, index)
        buckets = self.buckets(units, places, limit)
        adapters = self._adapter_buckets(units) if self.run.peft.freezes else []
        amounts = [
            *self._amounts(buckets, units, adapters=False), *self._amounts(adapters, units, adapters=True),
        ]
        copies = 0
        if self.copies_gradients:
            copies = 4 * sum(self._share(b) for b in (*buckets, *adapters) if not b.frozen)
        flow = _Flow(self, buckets, units, places, limit)
        return ChunkState(
            sum(b.numel for b in buckets), tuple(amounts), flow.root_bytes, flow.between_steps(), copies,
            self._rests([*buckets, *adapters]), flow.engine_bytes(),
        )

    def buckets(self, units: Sequence[Unit], places: Places, limit: int | None) -> list[Bucket]:
        """The buckets of a chunk in megatron-core's order; ``limit``: elements at which one outside of units ends."""
        frozen = self.run.peft.freezes
        #: Units' buckets, and in the place of the first parameter outside of units, all of those.
        order: list[Bucket | bool] = []
        outside: dict[bool, list[tuple[Parameter, int, int]]] = {}
        for unit, first in zip(units, places.first, strict=True):
            kinds = [experts for experts in (False, True) if any(True for _ in unit.parameters.runs(experts))]
            if self.is_unit(unit):
                made = [self._bucket(_shapes(unit, experts), experts, 0, 0, True, frozen) for experts in kinds]
                for position in range(first, first + unit.times):
                    order += [b._replace(first=position, last=position) for b in made]
                continue
            for experts in kinds:
                if experts not in outside:
                    outside[experts] = []
                    order.append(experts)
                outside[experts] += [
                    (p, times, position)
                    for position in range(first, first + unit.times)
                    for parameters, times in unit.parameters.runs(experts) for p in parameters
                ]  # fmt: skip
        out: list[Bucket] = []
        for item in order:
            if isinstance(item, Bucket):
                out.append(item)
            else:
                out += self._cut(outside[item], item, limit, frozen)
        return out

    def is_unit(self, unit: Unit) -> bool:
        """``mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__``. An MTP depth counts as one, though its norms
        and projection lie outside of its transformer layer."""
        if not self.shards["params"] or unit.label not in (Label.LAYER, Label.MTP):
            return False
        return not _is_mamba(unit.layer) or MAMBA_LAYERS_ARE_UNITS(self.run.implementation)

    def _cut(
        self, parameters: Sequence[tuple[Parameter, int, int]], experts: bool, limit: int | None, frozen: bool
    ) -> Iterator[Bucket]:
        """Buckets outside of units, each closed by the parameter that fills it."""
        held: list[tuple[Parameter, int]] = []
        filled = first = last = 0
        for parameter, times, position in parameters:
            while times:
                taken = times
                if limit:
                    taken = min(times, max(1, -(-(limit - filled) // parameter.numel)))
                if not held:
                    first = position
                held.append((parameter, taken))
                filled, last, times = filled + taken * parameter.numel, position, times - taken
                if limit and filled >= limit:
                    yield self._bucket(held, experts, first, last, False, frozen)
                    held, filled = [], 0
        if held:
            yield self._bucket(held, experts, first, last, False, frozen)

    def _bucket(
        self, parameters: Sequence[tuple[Parameter, int]], experts: bool, first: int, last: int, unit: bool,
        frozen: bool,
    ) -> Bucket:  # fmt: skip
        numel = sum(p.numel * times for p, times in parameters)
        fp8 = sum(p.numel * times for p, times in parameters if p.is_gemm) if self.fp8_param else 0
        world = self.worlds[experts] if self.shards["optim"] else 0
        if FSDP_ALIGNS_ROWS(self.run.implementation):
            size = aligned_to_rows([(p.shape, times) for p, times in parameters], world)
        else:
            size = pad(numel, lcm(world, BUCKET_ALIGNMENT)) if world else numel
        output = sum(p.numel * times for p, times in parameters if p.use is Use.OUTPUT)
        end, times = parameters[-1]
        return Bucket(size, numel, fp8, experts, first, last, unit, frozen, output, end.numel * times)

    def _adapter_buckets(self, units: Sequence[Unit]) -> list[Bucket]:
        """Adapters train beside frozen weights, in buckets of their own."""
        return [
            self._bucket(_shapes(unit, experts), experts, 0, 0, True, False)
            for unit in adapter_units(self.run, units)
            for experts in (False, True) if any(True for _ in unit.parameters.runs(experts))
        ]  # fmt: skip

    # ---- what persists ----

    def _share(self, b: Bucket) -> int:
        """Elements of the optimizer's state on the fullest rank; padding has none."""
        return min(b.numel, b.size // self.worlds[b.experts]) if self.shards["optim"] else b.numel

    def _amounts(self, buckets: Sequence[Bucket], units: Sequence[Unit], adapters: bool) -> Iterator[int]:
        """Bytes of every line, dense ones first."""
        precision, arch = self.run.precision, self.run.implementation.gpu_arch
        for experts in (False, True):
            own = [b for b in buckets if b.experts is experts]
            trained = [b for b in own if not b.frozen]
            world = self.worlds[experts]
            fp8 = sum(b.fp8 for b in own)
            if self.shards["optim"]:
                yield sum(map(self.weight_bytes, own)) // (world if self.shards["params"] else 1)
            elif adapters:
                yield sum(b.numel for b in own) * self.width
            else:  # The modules' own tensors.
                yield _own_tensors(units, experts, self.width) - fp8 * (self.width - 1)
            if self.fp8 and not adapters:
                yield self._fp8_copies(own, units, experts, precision.fp8_recipe, arch)
            yield sum(b.size for b in trained) // (world if self.shards["grads"] else 1) * self.gradient_width
            for state in self.states:
                elements = sum(self._share(b) for b in trained)
                if state.state is State.MAIN_PARAMETERS:
                    elements = sum(b.size for b in trained) // (world if self.shards["optim"] else 1)
                nbytes = elements * state.width
                yield nbytes if state.on_gpu == 1.0 else round(nbytes * state.on_gpu)

    def _rests(self, buckets: Sequence[Bucket]) -> int:
        """What the allocator adds to buffers: a bucket's weights and main parameters are tensors of their own, the
        gradients of all one (``_init_each_parameter_group_buffers``: ``buffer_all_in_one``). Optimizer states,
        which are pieces of parameters, are left out."""
        if self.run.implementation.expandable_segments or not self.shards["optim"]:
            return 0
        main = sum(s.width for s in self.states if s.state is State.MAIN_PARAMETERS)
        total = gradients = 0
        for b in buckets:
            world = self.worlds[b.experts]
            total += block_rest(self.weight_bytes(b) // (world if self.shards["params"] else 1))
            if not b.frozen:
                total += block_rest(b.size // world * main)
                gradients += b.size // (world if self.shards["grads"] else 1) * self.gradient_width
        return total + block_rest(gradients)

    def _fp8_copies(
        self, buckets: Sequence[Bucket], units: Sequence[Unit], experts: bool, recipe: str, arch: str
    ) -> int:
        """fp8 data beside the weights that stays: what Transformer Engine caches of weights in bf16, and the
        column-wise half of weights in mxfp8, which has a buffer of its own. Of other fp8 weights it is made for a
        unit that runs and thrown away (``mixed_precision.py: fp8_discard_transpose_cache``)."""
        precision = self.run.precision
        if not self.fp8_param:
            gemm = sum(
                unit.times * times * p.numel
                for unit in units for parameters, times in unit.parameters.runs(experts)
                for p in parameters if p.is_gemm
            )  # fmt: skip
            return fp8_copies(precision, gemm, arch)
        gemm = sum(b.fp8 for b in buckets if not self.shards["params"] or not b.unit or recipe == "mxfp8")
        world = self.worlds[experts] if self.shards["params"] and recipe == "mxfp8" else 1
        return fp8_copies(precision, gemm, arch) // world

    def weight_bytes(self, b: Bucket) -> int:
        """Bytes of a bucket's weights on all ranks."""
        return b.size * self.width - b.fp8 * (self.width - 1)

    def whole_weights(self, b: Bucket, backward: bool = False) -> int:
        """Bytes of a bucket's gathered weights, 0 where they are whole anyway."""
        if not self.shards["params"] or self.worlds[b.experts] == 1:
            return 0
        nbytes = self.weight_bytes(b)
        if backward and b.fp8:
            nbytes += fp8_copies(self.run.precision, b.fp8, self.run.implementation.gpu_arch)
        return nbytes

    def whole_gradients(self, b: Bucket) -> int:
        """Bytes of a bucket's gradients before they are reduced, 0 where the main gradients are whole anyway."""
        if b.frozen or not self.shards["grads"] or self.worlds[b.experts] == 1:
            return 0
        return b.size * self.reduced_width

    def reduced_apart(self, b: Bucket) -> int:
        """Bytes of this rank's part of a sum, which older releases make apart: all of the bucket where one rank has it
        (``GradReducePipeline``: ``torch.empty_like(grad_shard)``). A small part of a unit's is less than the rest of
        the unit needs before."""
        world = self.worlds[b.experts]
        if not self.shards["grads"] or FSDP_MAIN_DTYPES(self.run.implementation) or (b.unit and world > 1):
            return 0
        return b.size // world * self.gradient_width

    def output_gradient(self, b: Bucket) -> int:
        """Bytes of the output layer's own gradient while it is copied into its bucket."""
        return 0 if self.run.implementation.gradient_accumulation_fusion else b.output * self.width


# ---- places of modules ----


class Places(NamedTuple):
    """Where the modules of a chunk are in its forward pass: the embedding at 0, then layer by layer."""

    #: Of every unit the place of its first module.
    first: tuple[int, ...]
    layers: range
    norm: int
    mtp: range
    loss: int


def places_of(units: Sequence[Unit]) -> Places:
    layers = sum(unit.times for unit in units if unit.label is Label.LAYER)
    depths = sum(unit.times for unit in units if unit.label is Label.MTP)
    norm = layers + 1
    loss = norm + depths + 1
    ends = {Label.EMBEDDING: 0, Label.FINAL_NORM: norm, Label.LOSS: loss, Label.MTP: norm + 1}
    first = []
    at = 1
    for unit in units:
        if unit.label is Label.LAYER:
            first.append(at)
            at += unit.times
        else:
            first.append(ends[unit.label])
    return Places(tuple(first), range(1, norm), norm, range(norm + 1, loss), loss)


def _is_mamba(layer: LayerSpec | None) -> bool:
    return layer is not None and isinstance(layer.mixer, MambaSpec)


def _shapes(unit: Unit, experts: bool) -> list[tuple[Parameter, int]]:
    return [(p, times) for parameters, times in unit.parameters.runs(experts) for p in parameters]


def _own_tensors(units: Sequence[Unit], experts: bool, width: int) -> int:
    return sum(
        unit.times * times * rounded_bytes(p, width)
        for unit in units for parameters, times in unit.parameters.runs(experts) for p in parameters
    )  # fmt: skip


# ---- what moves ----


class _Flow:
    """Gathered weights and waiting gradients of one chunk, place by place."""

    def __init__(
        self, engine: MegatronFSDP, buckets: Sequence[Bucket], units: Sequence[Unit], places: Places, limit: int | None
    ) -> None:
        self.engine, self.buckets, self.places = engine, buckets, places
        impl = engine.run.implementation
        self.ahead = FSDP_PREFETCHES_AHEAD(impl)
        self.keeps_root = FSDP_KEEPS_ROOT(impl)
        self.impl = impl
        root = [b for b in buckets if not b.unit]
        self.root_bytes = sum(n + block_rest(n) for n in map(engine.whole_weights, root))
        if impl.expandable_segments:
            self.root_bytes = sum(map(engine.whole_weights, root))
        #: Sums over the buckets before each: elements, and bytes that units gather forward and backward.
        self.sizes = [0, *accumulate(b.size for b in buckets)]
        self.bytes = [
            [0, *accumulate(engine.whole_weights(b, backward) if b.unit else 0 for b in buckets)]
            for backward in (False, True)
        ]
        self.of_place: dict[int, tuple[int, int]] = {}
        for i, b in enumerate(buckets):
            if b.unit:
                low, _ = self.of_place.get(b.first, (i, i))
                self.of_place[b.first] = low, i + 1
        self.budget, self.capacity = self._budget(units, limit)

    def _budget(self, units: Sequence[Unit], limit: int | None) -> tuple[int | None, int | None]:
        """Elements gathered ahead (before ``FSDP_PREFETCHES_AHEAD``: at once), and elements that wait to be reduced.

        ``limit``: elements of a bucket outside of units.
        """
        asked = self.engine.run.data_parallel.suggested_communication_unit_size
        running = [unit for unit in units if self.engine.is_unit(unit)]
        number = sum(unit.times for unit in running)
        two = 2 * (sum(unit.times * unit.parameters.numel for unit in running) // number) if number else None
        if not self.ahead:
            size = asked or two or (2 * limit if limit else None)
            return size, size
        size = asked or COMMUNICATION_UNIT
        if not asked and FSDP_PREFETCH_FITS_UNITS(self.impl):
            size = max(size, two or limit or 0)
        return size // 2, size

    def engine_bytes(self) -> EngineBytes:
        """What is there beside each link of the chunk."""
        forward, backward = self.gathered(backward=False), self.gathered(backward=True)
        beside = [
            Concurrent(f, b + made.backward, b + made.backward_at_end, made.least_backward and b + made.least_backward)
            for f, b, made in zip(forward, backward, self.gradients(), strict=True)
        ]
        places = self.places
        return EngineBytes(
            layers=tuple(beside[place] for place in places.layers),
            embedding=beside[0],
            final_norm=beside[places.norm],
            mtp=most([beside[place] for place in places.mtp] or [NOTHING]),
            loss=beside[places.loss],
        )

    # ---- weights ----

    def _window(self, low: int, high: int, backward: bool) -> tuple[int, int]:
        """The buckets that are whole while ``low`` to ``high`` are needed: these, and what is gathered ahead."""
        budget = self.budget
        if budget is None:
            return (max(0, low - 1), high) if backward else (low, min(len(self.buckets), high + 1))
        if not self.ahead:
            budget -= self.sizes[high] - self.sizes[low]
            if budget <= 0:
                return low, high
        if backward:
            return max(0, bisect_right(self.sizes, self.sizes[low] - budget) - 1), high
        return low, min(len(self.buckets), bisect_left(self.sizes, self.sizes[high] + budget))

    def gathered(self, *, backward: bool) -> list[int]:
        """Units' whole weights in bytes at every place of a pass."""
        found = [0] * (self.places.loss + 1)
        sums = self.bytes[backward]
        for place, own in self.of_place.items():
            low, high = self._window(*own, backward=backward)
            found[place] = sums[high] - sums[low]
        for place in (self.places.norm, self.places.loss, *(() if backward else (0,))):
            found[place] = self._beside_root(backward)
        return found

    def _beside_root(self, backward: bool) -> int:
        """Units' whole weights in bytes while modules outside of units run: their hooks gather the next units too,
        but for releases in which the first backward pass leaves them in a state that does not. The oldest free all
        when backward begins."""
        root = [i for i, b in enumerate(self.buckets) if not b.unit]
        if not root or self.keeps_root or (backward and not self.ahead):
            return 0
        end = max(self._window(i, i + 1, backward=False)[1] for i in root)
        return self.bytes[False][end] - self.bytes[False][root[0]]

    def between_steps(self) -> int:
        """Whole weights in bytes after a step: those gathered for the next, unless the norm of all parameters is
        logged, for which all are freed (Megatron-LM ``calc_params_l2_norm: stop_communication``)."""
        if not self.buckets or not self.engine.shards["params"]:
            return 0
        first = self.buckets[0]
        if not self.ahead:
            return self.root_bytes if not first.unit else self.engine.whole_weights(first)
        kept = self.root_bytes if self.keeps_root else 0
        if self.engine.run.optimizer.log_params_norm:
            return kept
        _, high = self._window(0, 1, backward=False)
        root = self.root_bytes if not first.unit else kept
        return root + self.bytes[False][high]

    # ---- gradients ----

    def gradients(self) -> list[Concurrent]:
        """Whole gradients in bytes at every place of the backward pass: those being made, and those reduced that
        were not freed yet. At a place buckets come one after the other, those of experts first."""
        engine = self.engine
        each = FSDP_REDUCES_EACH_PARAMETER(self.impl)
        at_place: list[list[Bucket]] = [[] for _ in range(self.places.loss + 1)]
        for b in reversed(self.buckets):
            if not b.frozen:
                for place in {b.first, b.last}:
                    at_place[place].append(b)
        found: list[Concurrent] = []
        queue = _Queue(engine, self.capacity)
        made = 0
        for place in reversed(range(len(at_place))):
            if not each and at_place[place] and at_place[place][0].unit:
                found.append(self._unit_at_once(at_place[place], made + queue.bytes))
                for b in at_place[place]:
                    queue.push(b)
                continue
            experts = least = 0
            most_made = made + queue.bytes
            for b in at_place[place]:
                if b.last == place:
                    made += engine.whole_gradients(b)
                most_made = max(most_made, made + queue.bytes)
                if b.experts:
                    experts = most_made
                if place == self.places.loss:  # Made when what the logits need is gone.
                    least = max(least, made + queue.bytes + engine.output_gradient(b))
                if b.first == place:
                    least = max(least, made + queue.bytes + engine.reduced_apart(b))
                    made -= engine.whole_gradients(b)
                    queue.push(b)
            if place == self.places.loss:
                found.append(Concurrent(least_backward=least))
            else:
                found.append(Concurrent(0, experts or most_made, most_made, least))
        return found[::-1]

    def _unit_at_once(self, buckets: Sequence[Bucket], waiting: int) -> Concurrent:
        """A unit whose gradients go into their buckets when its backward is done and its weights are freed."""
        engine = self.engine
        own = [b.numel * engine.width for b in buckets]
        most_made, copied = sum(own), 0
        for b in reversed(buckets):
            copied += engine.whole_gradients(b)
            most_made = max(most_made, copied + sum(own))
            own.pop()
        freed = sum(engine.whole_weights(b, backward=True) for b in buckets)
        first = waiting + buckets[0].tail * engine.width
        last = waiting + sum(b.numel for b in buckets) * engine.width if buckets[0].experts else first
        return Concurrent(0, first, last, waiting + most_made - freed)


class _Queue:
    """Buckets that were reduced and not freed yet."""

    def __init__(self, engine: MegatronFSDP, capacity: int | None) -> None:
        self.engine, self.capacity = engine, capacity
        self.bytes = self.elements = 0
        self._buckets: deque[Bucket] = deque()

    def push(self, b: Bucket) -> None:
        """Those at its head are freed until what remains fits the capacity (where there is none, but for one)."""
        held = self._buckets
        while held and (len(held) > 1 if self.capacity is None else self.elements > self.capacity):
            oldest = held.popleft()
            self.elements -= oldest.size
            self.bytes -= self.engine.whole_gradients(oldest)
        held.append(b)
        self.elements += b.size
        self.bytes += self.engine.whole_gradients(b)


# ---- sizes ----


def aligned_to_rows(shapes: Sequence[tuple[tuple[int, ...], int]], world: int) -> int:
    """Elements of a bucket of tensors, (shape, how many in a row), that every rank gets whole rows of; without an end
    for ``world`` 0.

    Tensors start at multiples of the least common multiple of their rows; what does not fill its last row shares it
    with another such tensor, and with small ones.
    Source: ``param_and_grad_buffer.py: _get_parameter_groups`` (step 3), ``build_data_parallel_buffer_index``.
    """
    row = 0
    for shape, _ in sorted(shapes, key=lambda s: -prod(s[0][1:])):
        own, numel = prod(shape[1:]), prod(shape)
        if row == 0:
            row = own
        elif not (own == row or (row % own == 0 and numel % row == 0) or numel < row):
            row = lcm(row, own)
    total = 0
    odd: list[int] = []
    small: list[int] = []
    for shape, times in shapes:
        numel = prod(shape)
        if numel % row == 0:
            total += times * numel
        else:
            (small if numel < row else odd).extend([numel] * times)
    total += _rows_of_odd(odd, small, row)
    return pad(total, world * row) if world else total


def _rows_of_odd(odd: list[int], small: list[int], row: int) -> int:
    """Elements of tensors that do not end with a row, and of those smaller than one."""
    total = 0
    while odd:
        numel = odd.pop(0)
        total += (numel // row + 1) * row
        space = row - numel % row
        for i, other in enumerate(odd):
            if other % row <= space:
                del odd[i]
                space -= other % row
                total += other // row * row
                break
        left = []
        for numel in small:
            if numel <= space:
                space -= numel
            else:
                left.append(numel)
        small = left
    return total + sum(small)


# ---- optimizer ----


def fsdp_states(run: RunSpec) -> tuple[OptimizerState, ...]:
    """The optimizer's states under Megatron-FSDP, which keeps fp32 main parameters of parameters in any dtype.

    Source: ``ParamAndGradBuffer._init_each_parameter_group_buffers`` (``main_weight_buffer``). Before
    ``FSDP_MAIN_DTYPES`` a precision-aware optimizer keeps its own instead (Megatron-LM ``training.py: get_model``:
    ``preserve_fp32_weights``).
    """
    states = optimizer_states(run)
    if run.optimizer.fused_main_parameters and not FSDP_MAIN_DTYPES(run.implementation):
        return states
    return (
        OptimizerState(State.MAIN_PARAMETERS, 4),
        *(s for s in states if s.state is not State.MAIN_PARAMETERS),
    )


def _copies_gradients(run: RunSpec) -> bool:
    """Whether the optimizer is handed fp32 copies of main gradients in half precision, which stay until the next
    step (``ParamAndGradBuffer.update_main_grads``)."""
    return gradient_width(run) == 2 and not run.optimizer.use_precision_aware_optimizer


ENGINE = MegatronFSDP
