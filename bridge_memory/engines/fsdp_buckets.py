"""Megatron-FSDP's buckets: which parameters are gathered and reduced together, a bucket's size with padding, and its
bytes unsharded and sharded.

Source: megatron-core ``distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py: _get_parameter_groups,
build_data_parallel_buffer_index``; before 0.14 ``distributed/custom_fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

from bridge_memory.engines.megatron_ddp import fp8_copies
from bridge_memory.engines.optimizer_states import gradient_width
from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.stack import Unit
from bridge_memory.releases import FSDP_ALIGNS_ROWS, FSDP_MAIN_DTYPES, MAMBA_LAYERS_ARE_UNITS
from bridge_memory.spec import DTYPE_BYTES, LayerSpec, MambaSpec, RunSpec
from bridge_memory.tapes.chain import NOTHING, Concurrent, EngineBytes, Label, most
from bridge_memory.tapes.parameters import PARAM_ALIGNMENT, Parameter, Use, pad

#: Elements: end of every bucket before ``FSDP_ALIGNS_ROWS``, together with the data-parallel size.
BUCKET_ALIGNMENT = 2 * PARAM_ALIGNMENT


class Bucket(NamedTuple):
    """Parameters that are gathered and reduced together, in elements on one rank."""

    #: Elements with padding, and without.
    size: int
    numel: int
    #: Elements of weights that are fp8 tensors.
    fp8: int
    experts: bool
    #: Places in the chunk of the first and the last module that need it.
    first: int
    last: int
    #: It belongs to a unit, and is gathered and freed with it.
    unit: bool
    frozen: bool = False
    #: Elements of the output layer's weight.
    output: int = 0
    #: Elements of the parameters whose gradients are made first.
    tail: int = 0


class Sharding:
    """The layout of one run's parameters, and which parts of a bucket are sharded over data-parallel ranks."""

    def __init__(self, run: RunSpec) -> None:
        precision, d = run.precision, run.data_parallel
        self.run = run
        self.worlds = run.parallel.shard_worlds
        self.shards = {what: d.shards(what) for what in ("optim", "grads", "params")}
        self.width = DTYPE_BYTES[precision.params_dtype]
        self.gradient_width = gradient_width(run)
        self.reduced_width = DTYPE_BYTES[d.grad_comm_dtype] if d.grad_comm_dtype else self.gradient_width
        self.fp8_param = precision.fp8 is not None and run.implementation.te and precision.fp8_param

    # ---- layout ----

    def of_chunk(self, units: Sequence[Unit], places: Places, limit: int | None) -> list[Bucket]:
        """The buckets of a chunk in megatron-core's order; ``limit``: elements at which a bucket outside of units ends.
        """
        frozen = self.run.peft.freezes
        #: Buckets of units; and, at the first parameter outside of units, a placeholder for all of those.
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
        """Whether Megatron-FSDP treats it as a unit (``mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__``). An
        MTP depth counts as one, though its norms and projection are outside of its transformer layer."""
        if not self.shards["params"] or unit.label not in (Label.LAYER, Label.MTP):
            return False
        return not _is_mamba(unit.layer) or MAMBA_LAYERS_ARE_UNITS(self.run.implementation)

    def _cut(
        self, parameters: Sequence[tuple[Parameter, int, int]], experts: bool, limit: int | None, frozen: bool
    ) -> Iterator[Bucket]:
        """Buckets outside of units; each ends with the parameter that fills it."""
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

    def of_adapters(self, units: Sequence[Unit]) -> list[Bucket]:
        """Buckets of adapters, which are separate from those of frozen weights."""
        return [
            self._bucket(_shapes(unit, experts), experts, 0, 0, True, False)
            for unit in adapter_units(self.run, units)
            for experts in (False, True) if any(True for _ in unit.parameters.runs(experts))
        ]  # fmt: skip

    # ---- bytes ----

    def ranks(self, what: str, experts: bool) -> int:
        """Number of ranks over which "optim", "grads" or "params" are sharded, of dense or of expert parameters."""
        return self.worlds[experts] if self.shards[what] else 1

    def share(self, b: Bucket) -> int:
        """Elements of a bucket's optimizer state on the rank with the most; padding has none."""
        return min(b.numel, b.size // self.ranks("optim", b.experts))

    def weight_bytes(self, b: Bucket) -> int:
        """Bytes of a bucket's weights, unsharded."""
        return b.size * self.width - b.fp8 * (self.width - 1)

    def whole_weights(self, b: Bucket, backward: bool = False) -> int:
        """Bytes of a bucket's gathered weights; 0 if weights are not sharded."""
        if self.ranks("params", b.experts) == 1:
            return 0
        nbytes = self.weight_bytes(b)
        if backward and b.fp8:
            nbytes += fp8_copies(self.run.precision, b.fp8, self.run.implementation.gpu_arch)
        return nbytes

    def whole_gradients(self, b: Bucket) -> int:
        """Bytes of a bucket's unreduced gradients; 0 if main gradients are not sharded."""
        if b.frozen or self.ranks("grads", b.experts) == 1:
            return 0
        return b.size * self.reduced_width

    def reduced_apart(self, b: Bucket) -> int:
        """Bytes of this rank's reduced shard, for which older releases make a new tensor; the whole bucket with a
        single rank (``GradReducePipeline``: ``torch.empty_like(grad_shard)``). Shards of units are not counted: they
        are smaller than what the unit needed before."""
        world = self.worlds[b.experts]
        if not self.shards["grads"] or FSDP_MAIN_DTYPES(self.run.implementation) or (b.unit and world > 1):
            return 0
        return b.size // world * self.gradient_width

    def output_gradient(self, b: Bucket) -> int:
        """Bytes of the output layer's gradient while it is copied into its bucket."""
        return 0 if self.run.implementation.gradient_accumulation_fusion else b.output * self.width


# ---- places of modules ----


class Places(NamedTuple):
    """Places of a chunk's modules in its forward pass: the embedding at 0, then layer by layer."""

    #: For every unit the place of its first module.
    first: tuple[int, ...]
    layers: range
    norm: int
    mtp: range
    loss: int

    def engine_bytes(self, by_place: Sequence[Concurrent]) -> EngineBytes:
        """``EngineBytes`` from bytes at every place."""
        return EngineBytes(
            layers=tuple(by_place[place] for place in self.layers),
            embedding=by_place[0],
            final_norm=by_place[self.norm],
            mtp=most([by_place[place] for place in self.mtp] or [NOTHING]),
            loss=by_place[self.loss],
        )


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


# ---- sizes ----


def aligned_to_rows(shapes: Sequence[tuple[tuple[int, ...], int]], world: int) -> int:
    """Elements of a bucket of tensors, (shape, how many in a row), of which every rank gets whole rows; without padding
    at the end for ``world`` 0.

    Tensors start at multiples of the least common multiple of their row sizes; a tensor that does not fill its last row
    shares it with another such tensor, and with small ones.
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
    """Elements taken by tensors that do not fill their last row, and by those smaller than a row."""
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
