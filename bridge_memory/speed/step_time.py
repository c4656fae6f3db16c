"""Seconds of one training step, with their parts: work over rates, the pipeline's order, what is not overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.engines.megatron_ddp import BUCKET_MINIMUM, BUCKET_PER_RANK
from bridge_memory.engines.optimizer_states import gradient_width
from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.layer_links import fully_recomputed, ignores_full_recompute
from bridge_memory.inventory.parameters import elements
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.spec import LayerSpec, MLASpec, MoESpec, RunSpec
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.kernels import Kernels, kernels_of
from bridge_memory.speed.work import (
    LayerWork,
    Product,
    Work,
    experts_activation_traffic,
    layer_work,
    mtp_work,
    output_work,
)

#: Attention backward runs five products where forward runs two (FlashAttention, section 3: it makes the scores anew).
_ATTENTION_BACKWARD = 2.5
#: Bytes of optimizer state and parameters that Adam's kernel reads and writes an element of its shard, fp32 states:
#: gradient in; main parameter and two moments in and out; the parameter out.
_ADAM_BYTES = 4 + 2 * 3 * 4 + 2
#: Of a reduction or gather that overlaps, what stays to be seen: assumed, a bucket in twenty, the first or last one.
LEAST_EXPOSED = 0.05


class Parts(NamedTuple):
    """Seconds."""

    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    tensor_parallel: float = 0.0
    expert_parallel: float = 0.0
    context_parallel: float = 0.0
    host: float = 0.0

    def plus(self, other: Parts, times: float = 1.0) -> Parts:
        return Parts(*[a + times * b for a, b in zip(self, other, strict=True)])

    @property
    def total(self) -> float:
        return sum(self)


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

    @property
    def seconds(self) -> float:
        return self.passes.total + self.bubble + self.pipeline + self.data_parallel + self.optimizer


class _Rates:
    """What this run reaches of the hardware."""

    def __init__(self, run: RunSpec, hardware: Hardware, c: Constants) -> None:
        self.c, self.hardware = c, hardware
        eight = run.precision.fp8 is not None and hardware.fp8_flops
        share = c.gemm(hardware.generation)
        self.flops = hardware.flops * share
        self.quantized = hardware.fp8_flops * share * c.gemm_fp8 if eight else self.flops
        self.attention = hardware.flops * share * c.attention
        self.memory = hardware.memory * c.memory
        self.nvlink = hardware.nvlink * c.nvlink
        self.network = hardware.network * c.network

    def product(self, p: Product) -> float:
        c = self.c
        reached = (
            p.rows / (p.rows + c.gemm_half_rows)
            * p.columns / (p.columns + c.gemm_half_columns)
            * p.inner / (p.inner + c.gemm_half_columns)
        )
        return p.flops / ((self.quantized if p.quantized else self.flops) * reached)

    def exchange(self, nbytes: float, times: int, ranks: int) -> float:
        """``nbytes`` out of one rank, in ``times`` collectives of ``ranks`` neighbours."""
        if not nbytes:
            return 0.0
        inside = ranks <= self.hardware.domain
        latency = self.c.nvlink_latency if inside else self.c.network_latency
        return nbytes / (self.nvlink if inside else self.network) + times * latency


def step_time(
    run: RunSpec, hardware: Hardware, constants: Constants = DEFAULT, kernels: Kernels | None = None
) -> StepTime:
    """The time of one step of ``run``; ``kernels``: those that its fields mean."""
    return Step(run, hardware, constants, kernels).time()


def not_timed(run: RunSpec) -> tuple[str, ...]:
    """What of ``run`` moves its step time and is not in the model, by the names of its fields."""
    impl = run.implementation
    asked = {
        "engine": run.data_parallel.fsdp, "peft": run.peft.freezes,
        "optimizer_cpu_offload": run.optimizer.optimizer_cpu_offload, "offload_modules": bool(impl.offload_modules),
        "cpu_offloading_num_layers": bool(impl.cpu_offloading_num_layers),
        "cuda_graph_impl": impl.cuda_graph_impl != "none",
        "overlap_moe_expert_parallel_comm": impl.overlap_moe_expert_parallel_comm,
    }  # fmt: skip
    return tuple(name for name, is_asked in asked.items() if is_asked)


class _Pass(NamedTuple):
    """Forward and backward of one chunk for one microbatch."""

    forward: Parts
    backward: Parts
    again: float

    @property
    def total(self) -> float:
        return self.forward.total + self.backward.total


class Step:
    """One run's step; the work is counted once, so that asking ``at`` other constants is cheap."""

    def __init__(
        self, run: RunSpec, hardware: Hardware, c: Constants = DEFAULT, kernels: Kernels | None = None
    ) -> None:
        kernels = kernels or kernels_of(run)
        self.run, self.c, self.kernels = run, c, kernels
        self.hardware = hardware
        self.rates = _Rates(run, hardware, c)
        self.ctx: BlockContext = context_of(run)
        self.ignored = ignores_full_recompute(run.model, self.ctx)
        #: FlashAttention 1 reaches about half of what its successor does (Dao 2023, figure 4).
        self._slower = 2.0 if kernels.first_flash_attention else 1.0
        self._halves: dict[Work, tuple[Parts, Parts]] = {}
        self._chunks: dict[ChunkShape, _Pass] = {}
        self._work: dict[LayerSpec, LayerWork] = {}
        self._elements: dict[Sequence[ChunkShape], tuple[float, float, float]] = {}
        self._shapes = layout(run.model, run.parallel).shapes(run.model)

    def at(self, c: Constants) -> StepTime:
        """The time with other constants."""
        self.c, self.rates = c, _Rates(self.run, self.hardware, c)
        self._halves.clear()
        self._chunks.clear()
        return self.time()

    def time(self) -> StepTime:
        """The time of one step."""
        run = self.run
        p, m = run.parallel, run.num_microbatches
        shapes = self._shapes
        stages = [[self._chunk(shape) for shape in stage] for stage in shapes]
        totals = [sum(x.total for x in stage) for stage in stages]
        slowest = max(range(len(totals)), key=totals.__getitem__)
        hop = self._hop()
        interleaved = p.vpp > 1
        bubble = (sum(totals) - totals[slowest]) / p.vpp + 2 * (p.pp - 1) * hop
        # 1F1B receives before it can go on; interleaved schedules receive while another chunk runs.
        sends = 0.0 if interleaved or p.pp == 1 else 2 * m * hop
        passes = Parts()
        again = 0.0
        for x in stages[slowest]:
            passes = passes.plus(x.forward, m).plus(x.backward, m)
            again += m * x.again
        data_parallel = max(self._data_parallel(s, stages[i]) for i, s in enumerate(shapes))
        optimizer = max(self._parameters(s)[2] for s in shapes) * _ADAM_BYTES / self.rates.memory
        return StepTime(passes, again, bubble, sends, data_parallel, optimizer)

    def seconds_of(self, stage: Sequence[ChunkShape]) -> float:
        """Seconds of all passes of one microbatch through a stage that holds this."""
        return sum(self._chunk(shape).total for shape in stage)

    # ---- one chunk ----

    def _half(self, work: Work) -> tuple[Parts, Parts]:
        found = self._halves.get(work)
        if found is None:
            found = self._halves[work] = self._forward(work), self._backward(work)
        return found

    def _forward(self, w: Work) -> Parts:
        r = self.rates
        attention = self._slower * w.attention / r.attention
        return Parts(
            sum(map(r.product, w.products)), attention, w.traffic / r.memory, *self._sends(w, attention),
            self.c.layer / 2 if w.products else 0.0,
        )

    def _backward(self, w: Work) -> Parts:
        r = self.rates
        attention = self._slower * _ATTENTION_BACKWARD * w.attention / r.attention
        return Parts(
            2 * sum(map(r.product, w.products)), attention, 2 * w.traffic / r.memory, *self._sends(w, attention / 2),
            self.c.layer if w.products else 0.0,
        )

    def _sends(self, w: Work, attention: float) -> tuple[float, float, float]:
        p = self.run.parallel
        tensor = self.rates.exchange(w.tensor_parallel * (p.tp - 1) / p.tp, w.tensor_collectives, p.tp)
        if self.kernels.tensor_parallel_overlap:
            tensor *= self.c.tensor_parallel_exposed
        expert = self.rates.exchange(w.expert_parallel, w.expert_exchanges, p.etp * p.ep)
        ring = self.rates.exchange(w.context_parallel * (p.cp - 1), p.cp - 1, p.tp * p.cp)
        return tensor, expert, max(0.0, ring - attention)

    def _layer(self, layer: LayerSpec, *, recomputed: bool) -> _Pass:
        work = self._work.get(layer)
        if work is None:
            work = self._work[layer] = layer_work(layer, self.run, self.ctx, self.kernels)
        mixer, ffn = work
        (mixer_forward, mixer_backward), (ffn_forward, ffn_backward) = self._half(mixer), self._half(ffn)
        forward, backward = mixer_forward.plus(ffn_forward), mixer_backward.plus(ffn_backward)
        again = forward if recomputed else self._again(layer, mixer_forward, ffn_forward)
        return _Pass(forward, backward.plus(again), again.total)

    def _again(self, layer: LayerSpec, mixer_forward: Parts, ffn_forward: Parts) -> Parts:
        """What selective recomputation runs again."""
        ctx = self.ctx
        again = Parts()
        if ctx.recomputes("core_attn"):
            again = again.plus(Parts(attention=mixer_forward.attention))
        whole = isinstance(layer.ffn, MoESpec) and ctx.recomputes("moe")
        if whole or (not isinstance(layer.ffn, MoESpec) and ctx.recomputes("mlp")):
            return again.plus(ffn_forward)
        if isinstance(layer.ffn, MoESpec) and ctx.recomputes("moe_act"):
            again = again.plus(Parts(traffic=experts_activation_traffic(layer.ffn, ctx) / self.rates.memory))
        if ctx.recomputes("layernorm"):
            norms = 4 * ctx.tokens_sp * ctx.hidden_size * ctx.act
            again = again.plus(Parts(traffic=norms / self.rates.memory))
        if isinstance(layer.mixer, MLASpec) and ctx.recomputes("mla_up_proj"):
            again = again.plus(Parts(products=sum(map(self.rates.product, _up_projections(layer.mixer, ctx)))))
        return again

    def _chunk(self, shape: ChunkShape) -> _Pass:
        found = self._chunks.get(shape)
        if found is None:
            found = self._chunks[shape] = self._passes(shape)
        return found

    def _passes(self, shape: ChunkShape) -> _Pass:
        model, ctx = self.run.model, self.ctx
        recomputed, _ = fully_recomputed(shape.num_layers, ctx, ignored=self.ignored)
        forward, backward, again = Parts(), Parts(), 0.0

        def add(one: _Pass, times: int) -> None:
            nonlocal forward, backward, again
            forward, backward = forward.plus(one.forward, times), backward.plus(one.backward, times)
            again += times * one.again

        for kind, count in shape.layers:
            first = max(0, min(count, recomputed))
            if first:
                add(self._layer(kind, recomputed=True), first)
            if count > first:
                add(self._layer(kind, recomputed=False), count - first)
            recomputed -= count
        losses = int(shape.output)
        if shape.num_depths and model.mtp_layer is not None:
            add(self._layer(model.mtp_layer, recomputed=ctx.mtp_recomputed), shape.num_depths)
            joined = self._half(mtp_work(model, ctx))
            add(_Pass(*joined, 0.0), shape.num_depths)
            losses += shape.num_depths
        if losses:
            add(_Pass(*self._half(output_work(model, ctx)), 0.0), losses)
        return _Pass(forward, backward, again)

    # ---- between ranks ----

    def _hop(self) -> float:
        """A hidden state from one stage to the next."""
        p = self.run.parallel
        return self.rates.exchange(self.ctx.hidden_bytes, 1, p.world_size) if p.pp > 1 else 0.0

    def _parameters(self, stage: Sequence[ChunkShape]) -> tuple[float, float, float]:
        """Elements of a rank: dense, of experts, and those whose optimizer state is its own."""
        found = self._elements.get(stage)
        if found is None:
            found = self._elements[stage] = self._count(stage)
        return found

    def _count(self, stage: Sequence[ChunkShape]) -> tuple[float, float, float]:
        dense = experts = 0
        for shape in stage:
            for unit in chunk_units(self.run.model, shape, self.ctx):
                (of_dense,), (of_experts,) = unit.parameters.sums(((elements, 0),))
                dense += unit.times * of_dense
                experts += unit.times * of_experts
        one, other = self.run.parallel.shard_worlds
        divided = self.run.data_parallel.use_distributed_optimizer
        own = dense / one + experts / other if divided else dense + experts
        return dense, experts, own

    def _data_parallel(self, stage: Sequence[ChunkShape], passes: Sequence[_Pass]) -> float:
        """Gradients reduced and parameters gathered, less what overlaps with the last backward and first forward."""
        run, p = self.run, self.run.parallel
        dense, experts, _ = self._parameters(stage)
        d = run.data_parallel
        # Gradients are reduced over all replicas, and parameters gathered from those that share a state; without a
        # distributed optimizer the second half of the all-reduce moves gradients.
        out, back = gradient_width(run), self.ctx.act if d.use_distributed_optimizer else gradient_width(run)
        instances = p.num_distributed_optimizer_instances if d.use_distributed_optimizer else 1
        reduce = gather = 0.0
        for numel, ranks, beside in (
            (dense, p.data_parallel_size * p.cp, p.tp), (experts, p.expert_data_parallel_size, p.etp * p.ep),
        ):
            if ranks == 1 or not numel:
                continue
            sharing = max(1, ranks // instances)
            if sharing > 1:
                reduce += self._ring(numel, out, sharing, beside)
                gather += self._ring(numel, back, sharing, beside)
            if instances > 1:  # the own part between instances, an all-reduce
                reduce += self._ring(numel / sharing, 2 * out, instances, beside * sharing)
        backward = sum(x.backward.total for x in passes)
        forward = sum(x.forward.total for x in passes)
        if d.overlap_grad_reduce:
            reduce = max(reduce - backward, reduce * LEAST_EXPOSED)
        if d.overlap_param_gather:
            gather = max(gather - forward, gather * LEAST_EXPOSED)
        return reduce + gather

    def _ring(self, numel: float, width: float, ranks: int, stride: int) -> float:
        """A reduce-scatter or an all-gather over ``ranks`` that are ``stride`` apart, bucket by bucket. The members of
        a group in one domain share its network adapters: each has those of the ranks between them."""
        domain = self.hardware.domain
        sent = numel * width * (ranks - 1) / ranks
        if stride * ranks <= domain:
            return self.rates.exchange(sent, 1, stride * ranks)
        inside = max(1, min(ranks, domain // stride))
        buckets = 1 + numel / max(BUCKET_MINIMUM, BUCKET_PER_RANK * ranks)
        steps = ranks / inside  # a ring passes every domain once
        rate = min(self.rates.network * inside, self.rates.nvlink)
        return sent / rate + buckets * steps * self.c.network_latency


def _up_projections(mixer: MLASpec, ctx: BlockContext) -> tuple[Product, ...]:
    heads = mixer.num_attention_heads // ctx.tp
    queries = heads * (mixer.qk_head_dim + mixer.qk_pos_emb_head_dim)
    keys = Product(ctx.tokens, heads * (mixer.qk_head_dim + mixer.v_head_dim), mixer.kv_lora_rank)
    return (keys, Product(ctx.tokens, queries, mixer.q_lora_rank)) if mixer.q_lora_rank else (keys,)
