"""Seconds of one training step, with their parts: work over rates, the pipeline's order, what is not overlapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

from bridge_memory.engines.megatron_ddp import BUCKET_MINIMUM, BUCKET_PER_RANK
from bridge_memory.engines.optimizer_states import gradient_width, optimizer_states
from bridge_memory.engines.peft import adapter_units
from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.layer_links import ignores_full_recompute, offloaded_layers, recomputed_layers
from bridge_memory.inventory.megatron.moe import ranks_per_token
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MLASpec,
    MoESpec,
    RunSpec,
)
from bridge_memory.spec.dtypes import DTYPE_BYTES
from bridge_memory.spec.layout import ChunkShape, StageShape, layout
from bridge_memory.spec.parts import DEEPEP_SMS
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.encoders import encoder_work
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.kernels import Kernels, kernels_of
from bridge_memory.speed.megatron.waiting import waiting
from bridge_memory.speed.megatron.work import (
    FUSED_BACKWARD,
    Product,
    Work,
    experts_activation_traffic,
    layer_work,
    mtp_work,
    output_work,
    shared_experts_work,
)
from bridge_memory.tapes.context import BlockContext, context_of
from bridge_memory.tapes.parameters import elements
from bridge_memory.tapes.symbolic import any_nonzero, chosen, computed, largest, smallest

T = TypeVar("T")

#: Of a reduction, gather or copy that overlaps, what stays to be seen: assumed, one in twenty, the first or last one.
LEAST_EXPOSED = 0.05
#: Bytes an element that a step of an offloaded optimizer reads and writes in host memory: torch's fused Adam passes
#: over gradient, parameter and both moments once (``aten/src/ATen/native/cpu/FusedAdamKernel.cpp``), its SGD with
#: momentum takes four operations. Assumed: threads enough for the bandwidth of host memory (OMP_NUM_THREADS, which
#: torchrun sets to 1).
_HOST_STEP = {"adam": 28, "sgd": 32}
#: Operations of the host where a pass enters and leaves a chunk of a pipeline, beside its layers: what is received is
#: allocated, received and waited for, what is sent is sent and waited for, the output is freed but for its graph, and
#: autograd is entered (megatron-core ``pipeline_parallel/p2p_communication.py: _communicate``, ``schedules.py:
#: deallocate_output_tensor, custom_backward``).
_BOUNDARY = 8
#: Rows and columns of a result that one processor makes at a time: cuBLAS's most efficient tile, upright or lying.
_TILE = 256, 128


class Parts(NamedTuple):
    """Seconds."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor_parallel: float = 0.0
    expert_parallel: float = 0.0
    context_parallel: float = 0.0
    host: float = 0.0
    #: Of activations that go to host memory and back, what the passes do not hide.
    offload: float = 0.0

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        # A zero is not added to arrays, nor are they to a zero, or taken once.
        once = type(times) in (int, float) and times == 1
        return Parts(*[
            a if _is_none(b) else (b if once else times * b) if _is_none(a) else a + (b if once else times * b)
            for a, b in zip(self, other, strict=True)
        ])  # fmt: skip

    @property
    def total(self) -> float:
        return added(self)


def _is_none(seconds: Any) -> bool:
    return type(seconds) is float and not seconds


def added(seconds: Iterable[float]) -> float:
    """One after the other: what ``sum`` does to numbers depends on Python's release, to arrays it does this."""
    total: float = 0.0
    for one in seconds:
        total = total + one
    return total


class StepTime(NamedTuple):
    """Seconds of one step, and what they are made of."""

    #: The busiest stage's passes over all microbatches.
    passes: Parts
    #: Of ``passes``, what runs again for recomputation.
    recomputation: float
    #: That stage's waiting for others while the pipeline fills and drains.
    bubble: float
    #: Sends and receives between stages that nothing hides.
    pipeline: float
    #: Gradients reduced and parameters gathered that nothing hides.
    data_parallel: float
    optimizer: float
    #: That stage's waiting in between, for stages whose virtual stages take longer than its own beside them.
    waiting: float = 0.0

    @property
    def seconds(self) -> float:
        return self.passes.total + self.bubble + self.waiting + self.pipeline + self.data_parallel + self.optimizer

    @property
    def idle(self) -> float:
        """All of its waiting for other stages."""
        return self.bubble + self.waiting

    @property
    def exposed_communication(self) -> float:
        """All communication that nothing hides, that with host memory included, but for the optimizer's."""
        parts = self.passes
        inside = parts.tensor_parallel + parts.expert_parallel + parts.context_parallel + parts.offload
        return inside + self.data_parallel + self.pipeline


class _Rates:
    """What this run reaches of the hardware."""

    def __init__(
        self, run: RunSpec, ctx: BlockContext, hardware: Hardware, c: Constants, kernels: Kernels
    ) -> None:
        self.c, self.hardware = c, hardware
        precision, later = run.precision, hardware.generation == "blackwell"
        share = c.gemm(hardware.generation, ultra=hardware.ultra)
        self.flops = self.quantized = hardware.flops * share
        #: How much faster narrower products pass over their terms: a tile's ends take the same time.
        self.narrower = 1.0
        if precision.fp4 is not None and hardware.fp4_flops:
            self.quantized = hardware.fp4_flops * share * c.gemm_fp4
            self.narrower = hardware.fp4_flops / hardware.flops
        elif precision.quantizes and hardware.fp8_flops:
            scaled = c.block_scaled if precision.fp8_recipe == "mxfp8" else 1.0
            self.quantized = hardware.fp8_flops * share * (c.gemm_fp8_blackwell if later else c.gemm_fp8) * scaled
            self.narrower = hardware.fp8_flops / hardware.flops
        in_fp8 = ctx.fp8_attention and hardware.fp8_flops
        self.attention = (hardware.fp8_flops if in_fp8 else hardware.flops) * share * c.attention
        self.scan = hardware.flops * c.scan
        self.memory = hardware.memory * c.memory
        self.host_memory = hardware.host_memory * c.host_memory
        # Every rank of a node copies at once, and each copy is read or written in host memory.
        self.host_link = min(hardware.host_link * c.host_link, self.host_memory)
        self.nvlink = hardware.nvlink * (c.nvlink_sharp if later or hardware.generation == "hopper" else c.nvlink)
        self.nvlink_exchange = hardware.nvlink * c.nvlink_exchange
        impl = run.implementation
        if impl.moe_token_dispatcher_type == "flex" and impl.moe_flex_dispatcher_backend == "deepep":
            processors = impl.moe_flex_dispatcher_num_sms or DEEPEP_SMS
            self.nvlink_exchange = min(self.nvlink_exchange, processors * c.deepep_sm)
        self.network = hardware.network * c.network
        self.network_exchange = hardware.network * (c.efa_exchange if kernels.efa else c.network_exchange)
        # A graph of the whole iteration has no host that waits for counts.
        graph = run.implementation.cuda_graph_impl == "full_iteration"
        self.counts_exchanged = 0.0 if graph else c.exchange_latency
        self.network_latency = c.network_latency
        if kernels.efa:
            deepep = run.implementation.moe_token_dispatcher_type == "flex"
            self.network_latency = c.efa_latency_deepep if deepep else c.efa_latency

    def product(self, p: Product) -> Any:
        """Seconds of [rows, inner] by [inner, columns]."""
        return self._product(p, p.rows, p.columns, p.inner, uneven=p.expert)

    def gradients(self, p: Product, *, frozen: bool = False) -> Any:
        """Seconds of the products that give the gradients of its input and, unless ``frozen``, of its weight."""
        of_input = self._product(p, p.rows, p.inner, p.columns, uneven=p.expert)
        return of_input if frozen else of_input + self._product(p, p.columns, p.inner, p.rows)

    def _product(self, p: Product, rows: Any, columns: Any, inner: Any, *, uneven: bool = False) -> Any:
        """A processor works on one tile of the result at a time, so that the last of several rounds may leave some idle
        (NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantization). ``uneven``: rows are of
        experts, and differ from one to the next, so that the last tile of each is filled by half."""
        processors = self.hardware.processors
        high, low = ((rows / side + 0.5) if uneven else -(-rows // side) for side in _TILE)
        upright = high * -(-columns // _TILE[1])
        lying = low * -(-columns // _TILE[0])
        rounds = -(-(p.times * smallest(upright, lying)) // processors)
        ends = self.c.gemm_half_inner * (self.narrower if p.quantized else 1)
        flops = 2.0 * _TILE[0] * _TILE[1] * processors * rounds * (inner + ends)
        return flops / (self.quantized if p.quantized else self.flops)

    def exchange(self, nbytes: Any, times: Any, ranks: Any) -> Any:
        """``nbytes`` out of one rank, in ``times`` collectives of ``ranks`` neighbours."""
        c, inside = self.c, ranks <= self.hardware.domain
        latency = chosen(inside, c.nvlink_latency, c.network_latency)
        return chosen(nbytes > 0, nbytes / chosen(inside, self.nvlink, self.network) + times * latency, 0.0)

    def gathered(self, nbytes: Any, times: Any, ranks: Any) -> Any:
        """``nbytes`` out of one rank, in ``times`` gathers or reductions over ``ranks`` neighbours. Where they are more
        than a domain, a ring leaves each domain once, by all of its network adapters."""
        c, domain = self.c, self.hardware.domain
        rate = smallest(self.network * domain, self.nvlink)
        far = nbytes / rate + times * ranks / domain * c.network_latency
        near = nbytes / self.nvlink + times * c.nvlink_latency
        return chosen(nbytes > 0, chosen(ranks <= domain, near, far), 0.0)

    def experts(self, w: Work, ranks: Any, stride: Any) -> Any:
        """The exchanges with experts on ``ranks`` that are ``stride`` apart."""
        if not any_nonzero(w.expert_parallel):
            return 0.0
        if w.expert_gathers:
            return self.gathered(w.expert_parallel, w.expert_exchanges, ranks * stride)
        return self.all_to_all(w, ranks, stride)

    def all_to_all(self, w: Work, ranks: Any, stride: Any) -> Any:
        """As many bytes to each of them, by NVLink inside of a domain and beside it by the network. Ranks have equal
        parts of as few domains as hold them: 128 have 64 of the 72 GPUs of two."""
        c, domain = self.c, self.hardware.domain
        nodes = -(-ranks // largest(1, domain // stride))
        near = ranks / nodes
        far = w.expert_parallel * (ranks - near) / largest(1, ranks - 1)
        routed = w.expert_copies
        if routed is not None:  # a copy for each other node with experts of a token, and for each rank of a node
            copy = w.expert_parallel / routed.topk * ranks / largest(1, ranks - 1) + w.probabilities / nodes
            taken = partial(ranks_per_token, routed)
            far = copy * (nodes - 1) / nodes * computed(taken, nodes)
            inside = copy * (near - 1) / near * computed(taken, ranks)
        else:
            inside = w.expert_parallel * (near - 1) / largest(1, ranks - 1)
        latency = chosen(near < ranks, self.network_latency, c.nvlink_latency)
        near_by = inside / self.nvlink_exchange
        seconds = largest(far / self.network_exchange, near_by) + w.expert_exchanges * latency
        return chosen(w.expert_parallel > 0, seconds, 0.0)


def step_time(
    run: RunSpec, hardware: Hardware, constants: Constants = DEFAULT, kernels: Kernels | None = None
) -> StepTime:
    """The time of one step of ``run``; ``kernels``: those that its fields mean."""
    return Step(run, hardware, constants, kernels).time()


def optimizer_traffic(run: RunSpec) -> float:
    """Bytes that the optimizer's kernels read and write an element of a shard: the gradient in, of the main gradients'
    width; main parameter and states in and out; the parameter out."""
    o = run.optimizer
    gradient = DTYPE_BYTES[o.main_grads_dtype] if o.use_precision_aware_optimizer else 4
    return gradient + 2 * sum(state.width for state in optimizer_states(run)) + DTYPE_BYTES[run.precision.params_dtype]


def not_timed(run: RunSpec) -> tuple[str, ...]:
    """What of ``run`` moves its step time and is not in the model, by the names of its fields."""
    o = run.optimizer
    asked = {
        "engine": run.data_parallel.engine != "megatron_ddp", "transformer_impl": run.implementation.torch_layers,
        "optimizer_cpu_offload": o.optimizer_cpu_offload and o.optimizer not in _HOST_STEP,
    }  # fmt: skip
    return tuple(name for name, is_asked in asked.items() if is_asked)


class _Pass:
    """Forward and backward of one chunk for one microbatch, and of backward what runs again."""

    def __init__(self, forward: Parts, backward: Parts, recomputation: float, launching: float = 0.0) -> None:
        """``launching``: seconds in which the host launches forward; backward takes twice that."""
        self.forward, self.backward, self.recomputation = forward, backward, recomputation
        self.launching = launching
        #: Of the last boundary.
        self._late: tuple[float, tuple[Any, Any]] = 0.0, (0.0, 0.0)

    @cached_property
    def forward_total(self) -> float:
        return self.forward.total

    @cached_property
    def backward_total(self) -> float:
        return self.backward.total

    @property
    def total(self) -> float:
        return self.forward_total + self.backward_total

    def late(self, boundary: float) -> tuple[Any, Any]:
        """Seconds of ``boundary``, which the host takes once forward and once backward beside what it launches, that
        the kernels do not hide: they run on while the host is behind by less than they take."""
        if self._late[0] != boundary:
            forward = self.launching + boundary - (self.forward_total - self.forward.host)
            backward = 2 * self.launching + boundary - (self.backward_total - self.backward.host)
            found = smallest(boundary, largest(0.0, forward)), smallest(boundary, largest(0.0, backward))
            self._late = boundary, found
        return self._late[1]

    def timed(self, boundary: float) -> tuple[Any, Any]:
        """Seconds forward and backward, with those that are ``late``."""
        forward, backward = self.late(boundary)
        return self.forward_total + forward, self.backward_total + backward


class Step:
    """One run's step, or those of many runs at once (``run`` and ``ctx`` have arrays)."""

    def __init__(
        self, run: RunSpec, hardware: Hardware, c: Constants = DEFAULT, kernels: Kernels | None = None,
        passes: Passes | None = None, asked: Any = None,
    ) -> None:
        """``passes``: those of a run that differs in pipeline and GPUs alone; ``asked``: which of many runs are asked
        for (None: one run)."""
        self.run, self._asked = run, asked
        self.passes = passes or Passes(run, context_of(run), hardware, c, kernels)
        #: Of every stage. Equal chunks are one object, so that looking them up by that hashes no layers.
        self._shapes = layout(run.model, run.parallel).shapes(run.model)
        kinds: dict[tuple[int, ...], int] = {}
        #: Of every stage which of those that differ it is.
        self._kind = [kinds.setdefault(tuple(map(id, shapes)), len(kinds)) for shapes in self._shapes]
        self._distinct = [self._shapes[self._kind.index(number)] for number in range(len(kinds))]
        self._seconds: dict[ChunkShape, float] = {}

    def at(self, c: Constants) -> StepTime:
        """The time with other constants; the work is not counted again."""
        self.passes.at(c)
        self._seconds.clear()
        return self.time()

    def time(self) -> StepTime:
        """The time of one step."""
        run, passes = self.run, self.passes
        p, m = run.parallel, run.num_microbatches
        # Equal chunks of a stage are counted and not added one by one.
        chunks = {id(shape): passes.chunk(shape) for shape in self._each_chunk()}
        stages = [
            [(chunks[key], times) for key, times in Counter(map(id, shapes)).items()] for shapes in self._distinct
        ]  # fmt: skip
        boundary = self._boundary()
        late = {x: added(x.late(boundary)) for of in stages for x, _ in of}
        totals = [added((x.total + late[x]) * times for x, times in of) for of in stages]
        hop = self._hop()
        # 1F1B receives before it can go on; interleaved schedules receive while another chunk runs.
        messages = 4 if passes.kernels.separate_sends and p.pp > 2 else 2
        sends: Any = 0.0 if p.vpp > 1 or p.pp == 1 else messages * m * hop
        slowest: Any = 0
        total = totals[0]
        for number, seconds in enumerate(totals[1:], 1):
            later = seconds > total
            slowest, total = chosen(later, number, slowest), chosen(later, seconds, total)
        found: list[Any] = []
        for number, of in enumerate(stages):
            here = slowest == number
            if not any_nonzero(here if self._asked is None else here & self._asked):
                continue
            work, recomputation = Parts(), 0.0
            for x, times in of:
                passed = times * m
                work = work.plus(x.forward, passed).plus(x.backward, passed)
                work = work._replace(host=work.host + passed * late[x])
                recomputation = recomputation + passed * x.recomputation
            own = [recomputation, *work]
            found = [chosen(here, a, b) for a, b in zip(own, found, strict=True)] if found else own
        recomputation, *parts = found
        bubble = (added(totals[kind] for kind in self._kind) - total) / p.vpp + 2 * (p.pp - 1) * hop
        if p.vpp > 1 and p.pp > 1:  # what one direction of a link takes longer than the chunks beside it
            sends = m * largest(0.0, p.vpp * hop - total)
        data_parallel = largest(*map(self._data_parallel, self._distinct, stages))
        optimizer = self._optimizer(largest(*map(self._own_elements, self._distinct)))
        return StepTime(Parts(*parts), recomputation, bubble, sends, data_parallel, optimizer, self.waiting(m))

    def waiting(self, microbatches: Any = None) -> Any:
        """Seconds in which the slowest stage waits for others, beside the bubble; None: a microbatch of a long step."""
        p = self.run.parallel
        if p.pp == 1 or p.vpp == 1 or len(self._distinct) == 1:
            return 0.0
        boundary, chunk = self._boundary(), self.passes.chunk
        timed = {id(shape): chunk(shape).timed(boundary) for shape in self._each_chunk()}
        of_kind = [[timed[id(shape)] for shape in shapes] for shapes in self._distinct]
        times = [of_kind[kind] for kind in self._kind]
        group = p.microbatch_group_size_per_vp_stage or p.pp
        if self._asked is None:
            return waiting(times, microbatches, group)
        from bridge_memory.speed.megatron.waiting_of_many import waiting_of_many

        return waiting_of_many(times, microbatches, group, self._asked)

    def _each_chunk(self) -> Iterable[ChunkShape]:
        """Every chunk that differs, once."""
        return {id(shape): shape for shapes in self._distinct for shape in shapes}.values()

    def _optimizer(self, own: Any) -> Any:
        """The optimizer's step over ``own`` elements. Of the offloaded share gradients go to the host in fp32, its
        step runs there beside the GPU's, and parameters come back; without ``overlap_cpu_optimizer_d2h_h2d`` one after
        the other (megatron-core ``optimizer/cpu_offloading/hybrid_optimizer.py: HybridDeviceOptimizer.step``)."""
        run, rates = self.run, self.passes.rates
        o, here = run.optimizer, own * optimizer_traffic(run) / rates.memory
        if not o.optimizer_cpu_offload or o.optimizer not in _HOST_STEP:
            return here
        away = own * o.optimizer_offload_fraction
        back = DTYPE_BYTES[run.precision.params_dtype] if o.fused_main_parameters else DTYPE_BYTES["fp32"]
        moved = away * (DTYPE_BYTES["fp32"] + back) / rates.host_link
        there = away * _HOST_STEP[o.optimizer] / rates.host_memory
        return moved + largest(here * (1 - o.optimizer_offload_fraction), there)

    def seconds_of(self, stage: Sequence[ChunkShape]) -> float:
        """Seconds of all passes of one microbatch through a stage that holds this."""
        return added(map(self._seconds_of_chunk, stage))

    def _seconds_of_chunk(self, shape: ChunkShape) -> float:
        found = self._seconds.get(shape)
        if found is None:
            x = self.passes.chunk(shape)
            found = self._seconds[shape] = x.total + added(x.late(self._boundary()))
        return found

    def _boundary(self) -> float:
        """Host seconds around a chunk's pass; none where a graph of the whole step launches it. Where the host waits
        for every kernel its time is in ``layer_blocking``."""
        passes = self.passes
        whole = self.run.implementation.cuda_graph_impl == "full_iteration"
        if self.run.parallel.pp == 1 or whole or passes.kernels.blocking_launches:
            return 0.0
        return _BOUNDARY * passes.c.launch

    def _hop(self) -> Any:
        """A hidden state from one stage to the next."""
        p, rates = self.run.parallel, self.passes.rates
        nbytes = self.passes.ctx.hidden_bytes
        if p.pp == 1:
            return 0.0
        if not self.passes.kernels.pipeline_in_parts or p.sp:
            return rates.exchange(nbytes, 1, p.world_size)
        gathered = rates.exchange(nbytes * (p.tp - 1) / p.tp, 1, p.tp)
        return rates.exchange(nbytes / p.tp, 1, p.world_size) + gathered

    def _own_elements(self, stage: StageShape) -> Any:
        """Elements of a rank whose optimizer state is its own."""
        dense, experts = self.passes.elements(stage)
        one, other = self.run.parallel.shard_worlds
        divided = self.run.data_parallel.use_distributed_optimizer
        return dense / one + experts / other if divided else dense + experts

    def _data_parallel(self, stage: StageShape, passes: Sequence[tuple[_Pass, int]]) -> Any:
        """Gradients reduced and parameters gathered, less what overlaps with the last backward and first forward.
        ``passes``: those of the stage's chunks, and of how many."""
        run, p = self.run, self.run.parallel
        dense, experts = self.passes.elements(stage)
        d = run.data_parallel
        # Gradients are reduced over all replicas, and parameters gathered from those that share a state; without a
        # distributed optimizer the second half of the all-reduce moves gradients.
        out, back = gradient_width(run), self.passes.ctx.act if d.use_distributed_optimizer else gradient_width(run)
        instances = p.num_distributed_optimizer_instances if d.use_distributed_optimizer else 1
        reduce: Any = 0.0
        gather: Any = 0.0
        for numel, ranks, beside in (
            (dense, p.data_parallel_size * p.cp, p.tp), (experts, p.expert_data_parallel_size, p.etp * p.ep),
        ):
            if not any_nonzero(numel):
                continue
            sharing = largest(1, ranks // instances)
            moves = (sharing > 1) & (numel > 0)
            reduce = reduce + chosen(moves, self._ring(numel, out, sharing, beside), 0.0)
            gather = gather + chosen(moves, self._ring(numel, back, sharing, beside), 0.0)
            if instances > 1:  # the own part between instances, an all-reduce
                own = self._ring(numel / sharing, 2 * out, instances, beside * sharing)
                reduce = reduce + chosen((ranks > 1) & (numel > 0), own, 0.0)
        if d.overlap_grad_reduce:
            reduce = largest(reduce - added(x.backward_total * times for x, times in passes), reduce * LEAST_EXPOSED)
        if d.overlap_param_gather:
            gather = largest(gather - added(x.forward_total * times for x, times in passes), gather * LEAST_EXPOSED)
        return reduce + gather

    def _ring(self, numel: Any, width: float, ranks: Any, stride: Any) -> Any:
        """A reduce-scatter or an all-gather over ``ranks`` that are ``stride`` apart, bucket by bucket. The members of
        a group in one domain share its network adapters: each has those of the ranks between them."""
        rates = self.passes.rates
        domain = rates.hardware.domain
        sent = numel * width * (ranks - 1) / ranks
        near = rates.exchange(sent, 1, stride * ranks)
        inside = largest(1, smallest(ranks, domain // stride))
        buckets = 1 + numel / largest(BUCKET_MINIMUM, BUCKET_PER_RANK * ranks)
        steps = ranks / inside  # a ring passes every domain once
        rate = smallest(rates.network * inside, rates.nvlink)
        far = sent / rate + buckets * steps * rates.c.network_latency
        return chosen(stride * ranks <= domain, near, far)


class Passes:
    """Forward and backward of any chunk, for one microbatch: of a run what does not depend on its pipeline."""

    def __init__(
        self, run: RunSpec, ctx: BlockContext, hardware: Hardware, c: Constants, kernels: Kernels | None = None
    ) -> None:
        kernels = kernels or kernels_of(run)
        self.run, self.ctx, self.c, self.kernels = run, ctx, c, kernels
        self.hardware = hardware
        self.rates = _Rates(run, ctx, hardware, c, kernels)
        self.ignored = ignores_full_recompute(run.model, self.ctx)
        #: FlashAttention 1 reaches about half of what its successor does (Dao 2023, figure 4).
        self._slower = 2.0 if kernels.first_flash_attention else 1.0
        self._halves: dict[int, tuple[Work, tuple[Parts, Parts]]] = {}
        self._chunks: dict[ChunkShape, _Pass] = {}
        self._layers: dict[tuple[LayerSpec, str], _Pass] = {}
        self._work: dict[Any, Any] = {}
        self._elements: dict[StageShape, tuple[Any, Any]] = {}

    def at(self, c: Constants) -> None:
        """Take other constants; the work is not counted again."""
        self.c, self.rates = c, _Rates(self.run, self.ctx, self.hardware, c, self.kernels)
        self._halves.clear()
        self._layers.clear()
        self._chunks.clear()

    def evict(self, few: int) -> None:
        """Of all chunks so far, where there are more than ``few``."""
        if len(self._chunks) > few:
            self._chunks.clear()
        self._elements.clear()

    def chunk(self, shape: ChunkShape) -> _Pass:
        """The passes of one chunk."""
        found = self._chunks.get(shape)
        if found is None:
            found = self._chunks[shape] = self._passes(shape)
        return found

    def elements(self, stage: StageShape) -> tuple[Any, Any]:
        """Elements of a rank's parameters on a stage: dense, and of experts."""
        found = self._elements.get(stage)
        if found is None:
            dense: Any = 0
            experts: Any = 0
            for shape, chunks in Counter(stage).items():
                units = chunk_units(self.run.model, shape, self.ctx.bare())
                for unit in adapter_units(self.run, units) if self.run.peft.freezes else units:
                    (of_dense,), (of_experts,) = unit.parameters.sums(((elements, 0),))
                    times = chunks * unit.times
                    dense, experts = dense + times * of_dense, experts + times * of_experts
            found = self._elements[stage] = dense, experts
        return found

    # ---- one chunk ----

    def _half(self, work: Work, beside: Work | None = None) -> tuple[Parts, Parts]:
        """Forward and backward of ``work``; ``beside``: the other half of its layer."""
        found = self._halves.get(id(work))
        if found is None:
            forward, backward = self._forward(work), self._backward(work)
            if beside is not None and self.run.implementation.overlap_moe_expert_parallel_comm:
                forward, backward = self._overlapped(forward, backward, beside)
            both = self._launched(work, 1, forward), self._launched(work, 2, backward)
            found = self._halves[id(work)] = work, both
        return found[1]

    def _overlapped(self, forward: Parts, backward: Parts, beside: Work) -> tuple[Parts, Parts]:
        """With what is exposed of exchanges where one microbatch runs forward beside another backward, layer by layer
        (``model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``): exchanges of the one are hidden by no more
        than what the other computes."""
        exposed = []
        computed_beside = (self._backward(beside), backward), (self._forward(beside), forward)
        for own, others in zip((forward, backward), computed_beside, strict=True):
            computing = added(part for other in others for part in other[:3])
            hidden = (1 - self.c.expert_parallel_exposed) * smallest(own.expert_parallel, computing)
            exposed.append(own._replace(expert_parallel=own.expert_parallel - hidden))
        return exposed[0], exposed[1]

    def _forward(self, w: Work) -> Parts:
        r = self.rates
        attention = self._slower * w.attention / r.attention
        products, attended = added(map(r.product, w.products)), attention + w.scan / r.scan
        traffic = (w.traffic + w.casts) / r.memory + w.kernels * self.c.kernel
        return Parts(products, attended, traffic, *self._sends(w, attention, 1))

    def _backward(self, w: Work) -> Parts:
        r, frozen = self.rates, self.run.peft.freezes
        attention = self._slower * FUSED_BACKWARD * w.attention / r.attention
        traffic = 2 * w.traffic + w.casts_backward + (0.0 if frozen else self._accumulated(w))
        products = added(r.gradients(p, frozen=frozen) for p in w.products)
        attended = attention + FUSED_BACKWARD * w.scan / r.scan
        between = 2 * w.kernels * self.c.kernel
        return Parts(products, attended, traffic / r.memory + between, *self._sends(w, attention, 2))

    def _launched(self, w: Work, passed: int, kernels: Parts) -> Parts:
        """``kernels`` with the host's time that they do not hide: a fixed part, and what launching takes longer than
        they run. ``passed``: 1 forward; backward launches twice as many."""
        if not w.products:
            return kernels
        if self.kernels.blocking_launches:
            return kernels._replace(host=passed * self.c.layer_blocking / 2)
        late = largest(0.0, passed * self._launching(w) - kernels.total)
        return kernels._replace(host=chosen(w.launches > 0, passed * self.c.layer / 2, 0.0) + late)

    def _launching(self, w: Work) -> Any:
        """Seconds in which the host launches a block forward."""
        return w.launches * self.c.launch + w.expert_launches * self.c.launch_expert

    def _accumulated(self, w: Work) -> Any:
        """Bytes that are read and written where a microbatch's gradients of matrices are added to those before it,
        beyond the result that every product writes: the buffer, in place of the product's result
        (``fused_weight_gradient_mlp_cuda``), or beside it, which is read once more."""
        fused = self.run.implementation.gradient_accumulation_fusion
        width = 2 * gradient_width(self.run) + (-self.ctx.act if fused else self.ctx.act)
        return width * added(p.columns * p.inner * p.times for p in w.products)

    def _sends(self, w: Work, attention: Any, passed: int) -> tuple[Any, Any, Any]:
        """``passed``: how often keys and values go round, or their gradients."""
        p = self.run.parallel
        tensor = self.rates.gathered(w.tensor_parallel * (p.tp - 1) / p.tp, w.tensor_collectives, p.tp)
        if self.kernels.tensor_parallel_overlap:
            tensor *= self.c.tensor_parallel_exposed
        experts = self.rates.experts(w, p.ep, p.etp)
        if passed == 1:  # backward knows who sends what
            if any_nonzero(w.routing_map):
                experts = experts + self.rates.gathered(w.routing_map * (p.ep - 1), 1, p.ep * p.etp)
            if not w.expert_gathers:
                experts = experts + chosen(w.expert_parallel > 0, self.rates.counts_exchanged, 0.0)
        return tensor, experts, self._context(w, attention, passed)

    def _context(self, w: Work, attention: Any, passed: int) -> Any:
        """Context parallelism's communication that nothing hides (Transformer Engine's ``context_parallel.py``)."""
        p, how = self.run.parallel, self.run.implementation.cp_comm_type
        if not any_nonzero(w.context_parallel):
            return 0.0
        if how == "a2a":  # queries, keys and values by heads, and back by tokens
            nbytes = (w.context_parallel + w.context_queries) * (p.cp - 1) / p.cp
            return self.rates.exchange(nbytes, 2, p.tp * p.cp)
        ring = passed * self.rates.exchange(w.context_parallel * (p.cp - 1), p.cp - 1, p.tp * p.cp)
        if how == "all_gather":
            return ring
        # Each step's attention but the last runs while the next keys and values come.
        return largest(0.0, ring - attention * (p.cp - 1) / p.cp)

    def _layer(self, layer: LayerSpec, how: str) -> _Pass:
        """``how``: "whole" and "not at all" say what runs again, else the switch of that name does."""
        found = self._layers.get((layer, how))
        if found is None:
            recomputed = how == "whole" if how in ("whole", "not at all") else self.ctx.switch(how)
            found = self._layers[layer, how] = self._of_layer(layer, recomputed)
        return found

    def _of_layer(self, layer: LayerSpec, recomputed: Any) -> _Pass:
        mixer, ffn = self._once(layer, lambda: layer_work(layer, self.run, self.ctx, self.kernels))
        (mixer_forward, mixer_backward), (ffn_forward, ffn_backward) = self._half(mixer), self._half(ffn, mixer)
        forward, backward = mixer_forward.plus(ffn_forward), mixer_backward.plus(ffn_backward)
        recomputation = self._recomputation(layer, mixer_forward, ffn_forward)
        recomputation = Parts(*[chosen(recomputed, a, b) for a, b in zip(forward, recomputation, strict=True)])
        again = recomputation.total
        backward = backward.plus(recomputation)
        if self.run.implementation.offload_modules:
            sent = chosen(recomputed, 0, layer_block(layer, self.ctx).cost.offloaded)
            forward, backward = self._offloaded(forward, sent), self._offloaded(backward, sent)
        return _Pass(forward, backward, again, added(map(self._launching, (mixer, ffn))))

    def _offloaded(self, passes: Parts, nbytes: Any) -> Parts:
        """A pass with what moving ``nbytes`` to or from host memory takes longer. Each layer's copies have a stream of
        their own, beside the next layer's forward pass, and one layer ahead of its backward pass, which waits for them
        (``fine_grained_activation_offload.py: bulk_offload_group, on_group_commit_backward``). Forward does not wait
        for them; a copy that takes longer than a layer delays the first reloads by as much."""
        seconds = nbytes / self.rates.host_link
        return passes._replace(offload=largest(seconds - passes.total, seconds * LEAST_EXPOSED))

    def _recomputation(self, layer: LayerSpec, mixer_forward: Parts, ffn_forward: Parts) -> Parts:
        """What selective recomputation runs again."""
        ctx, rates = self.ctx, self.rates
        routed = isinstance(layer.ffn, MoESpec)
        # Scans are no core attention (``mamba_layer.py``, ``gated_delta_net.py`` have no checkpoint).
        attends = isinstance(layer.mixer, AttentionSpec | MLASpec | CompressedAttentionSpec)
        attention: Any = chosen(ctx.switch("core_attn"), mixer_forward.attention, 0.0) if attends else 0.0
        # Norms that are modules of their own; others are part of the linear after them.
        norms = isinstance(layer.mixer, MLASpec | CompressedAttentionSpec) + routed
        if not ctx.te:
            norms = (attends or isinstance(layer.mixer, GatedDeltaNetSpec)) + (layer.ffn is not None)
        norm = 2 * ctx.tokens_sp * ctx.hidden_size * ctx.act
        traffic: Any = chosen(ctx.switch("layernorm"), norms * norm / rates.memory, 0.0) if norms else 0.0
        products: Any = 0.0
        if isinstance(layer.ffn, MoESpec):
            experts = experts_activation_traffic(layer.ffn, ctx) / rates.memory
            traffic = chosen(ctx.switch("moe_act"), experts, 0.0) + traffic
        if isinstance(layer.mixer, MLASpec):
            up = added(map(rates.product, _up_projections(layer.mixer, ctx)))
            products = chosen(ctx.switch("mla_up_proj"), up, 0.0)
        names = [*["core_attn"] * attends, *["moe_act"] * routed, *["mla_up_proj"] * isinstance(layer.mixer, MLASpec)]
        overlaps = self.run.implementation.moe_shared_expert_overlap  # no recomputation (``moe_layer.py``)
        if isinstance(layer.ffn, MoESpec) and layer.ffn.shared_expert_intermediate_size and not overlaps:
            shared = shared_experts_work(layer.ffn, ctx)
            products = chosen(ctx.switch("shared_experts"), added(map(rates.product, shared.products)), 0.0) + products
            traffic = chosen(ctx.switch("shared_experts"), shared.traffic / rates.memory, 0.0) + traffic
            names.append("shared_experts")
        blocking = self.kernels.blocking_launches
        entered = (self.c.layer_blocking if blocking else self.c.layer) / 2
        regions = {name: chosen(ctx.switch(name), entered, 0.0) for name in names}
        # Every region is entered again by the host.
        host = added(regions.values())
        if norms:
            host = host + chosen(ctx.switch("layernorm"), norms * entered, 0.0)
        inside = Parts(products, attention, traffic, host=host)
        all_of_it = ctx.switch("moe" if routed else "mlp")
        return Parts(*[
            chosen(all_of_it, a, b) for a, b in zip(inside.plus(ffn_forward), inside, strict=True)
        ])  # fmt: skip

    def _once(self, what: Any, count: Callable[[], T]) -> T:
        """The work of one thing, counted once."""
        found = self._work.get(what)
        if found is None:
            found = self._work[what] = count()
        return found

    def _passes(self, shape: ChunkShape) -> _Pass:
        model, ctx = self.run.model, self.ctx
        recomputed = recomputed_layers(shape.num_layers, ctx, ignored=self.ignored)
        recomputation: Any
        launching: Any
        forward, backward, recomputation, launching = Parts(), Parts(), 0.0, 0.0

        def add(one: _Pass, times: Any) -> None:
            nonlocal forward, backward, recomputation, launching
            forward, backward = forward.plus(one.forward, times), backward.plus(one.backward, times)
            recomputation = recomputation + times * one.recomputation
            launching = launching + times * one.launching

        for kind, count in shape.layers:
            first = largest(0, smallest(count, recomputed))
            if any_nonzero(first):
                add(self._layer(kind, "whole"), first)
            if any_nonzero(count - first):
                add(self._layer(kind, "not at all"), count - first)
            recomputed = recomputed - count
        if offloaded_layers(model, ctx):
            whole = self._whole_layers_offloaded(shape)
            forward, backward = self._offloaded(forward, whole), self._offloaded(backward, whole)
        losses = int(shape.output)
        if shape.num_depths and model.mtp_layer is not None:
            add(self._layer(model.mtp_layer, "mtp_recomputed"), shape.num_depths)
            joined = self._half(self._once("joined", lambda: mtp_work(model, ctx)))
            add(_Pass(*joined, 0.0), shape.num_depths)
            losses += shape.num_depths
        if losses:
            add(_Pass(*self._half(self._once("output", lambda: output_work(model, ctx))), 0.0), losses)
        if shape.embedding and ctx.encoders:
            for one, times in self._encoders():
                add(one, times)
        return _Pass(forward, backward, recomputation, launching)

    def _encoders(self) -> Iterator[tuple[_Pass, Any]]:
        """Blocks of encoders, which run beside the embedding, and how often each is there. Full recomputation runs
        layers of megatron-core's modules again."""
        ctx, r, batch = self.ctx, self.rates, self.run.batch
        samples = ctx.seq * ctx.cp // batch.seq_length if ctx.packed else ctx.batch
        blocks = self._once("encoders", lambda: encoder_work(self.run))
        recomputed = recomputed_layers(sum(w.times for w in blocks if w.layer and w.sharded), ctx)
        for w in blocks:
            ranks: Any = ctx.tp if w.sharded else 1
            products = [p._replace(rows=samples * p.rows, columns=p.columns / ranks) for p in w.products]
            share = samples / ranks
            forward = Parts(
                added(map(r.product, products)), share * w.attention / r.attention, share * w.read_forward / r.memory
            )
            backward = Parts()
            if w.operations_backward:
                backward = Parts(
                    added(r.gradients(p, frozen=not w.trains) for p in products),
                    share * FUSED_BACKWARD * w.attention / r.attention, share * w.read_backward / r.memory,
                )
            forward, backward = (
                kernels._replace(host=largest(0.0, self.c.launch * number - kernels.total))
                for kernels, number in ((forward, w.operations), (backward, w.operations_backward))
            )
            again: Any = 0
            if w.layer and w.sharded:
                again = largest(0, smallest(w.times, recomputed))
                recomputed = recomputed - w.times
            if any_nonzero(again):
                yield _Pass(forward, backward.plus(forward), forward.total), again
            yield _Pass(forward, backward, 0.0), w.times - again

    def _whole_layers_offloaded(self, shape: ChunkShape) -> Any:
        """Bytes of a chunk's layers that ``cpu_offloading_num_layers`` moves, spread over the passes of all layers
        (Transformer Engine's ``cpu_offload_v1.py: layer_window_map``)."""
        nbytes: Any = 0
        rest = offloaded_layers(self.run.model, self.ctx)
        for kind, count in shape.layers:
            if rest > 0:
                nbytes = nbytes + min(count, rest) * layer_block(kind, self.ctx).cost.retained
            rest -= count
        return nbytes


def _up_projections(mixer: MLASpec, ctx: BlockContext) -> tuple[Product, ...]:
    heads = mixer.num_attention_heads // ctx.tp
    queries = heads * (mixer.qk_head_dim + mixer.qk_pos_emb_head_dim)
    keys = Product(ctx.tokens, heads * (mixer.qk_head_dim + mixer.v_head_dim), mixer.kv_lora_rank)
    return (keys, Product(ctx.tokens, queries, mixer.q_lora_rank)) if mixer.q_lora_rank else (keys,)
