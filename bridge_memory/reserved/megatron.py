"""A stage of megatron-core, storage by storage: model and buffers, microbatches in the order of the schedule, steps.

DDP copies the parameters into its flat buffers and frees them (``param_and_grad_buffer.py: _ParamAndGradBuffer``), the
optimizer's states come one a parameter, and those of Adam at the end of the first step. All is on one stream, on which
NCCL's streams allocate nothing, but for overlapped exchanges of experts.

Overlapped, a layer runs in nodes: exchanges with what follows the second one (the sum with shared experts, the
residual) on a stream of their own, in turns with the nodes of another microbatch's backward pass. What a node allocates
is of its stream. Inputs that a node frees, and gradients that it takes, are recorded on its stream: blocks of the other
one are free when the GPU has come so far. The host runs ahead of it until it waits for the number of tokens that a
forward exchange brings (``models/common/model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``;
``pipeline_parallel/utils.py: ScheduleNode``; ``models/gpt/fine_grained_callables.py``). MTP depths run after the
layers, and take no turns here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from bridge_memory.components import Component, Lifetime, Role
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.encoders.chain import pixel_bytes
from bridge_memory.inventory.layer import embedding_block, final_norm_block, layer_block, mtp_block, output_block
from bridge_memory.inventory.layer_links import fully_recomputed, ignores_full_recompute
from bridge_memory.inventory.megatron.embedding import learned_positions
from bridge_memory.inventory.shared_weights import NOTHING_WAITS, PendingGradients, pending_gradients
from bridge_memory.inventory.stack import chunk_units, named_parameters
from bridge_memory.inventory.tail import (
    final_norm_name,
    has_own_output_weight,
    hidden_states_bytes,
    holds_final_norm,
)
from bridge_memory.releases import MTP_LOSS_OUTSIDE, OVERLAPPED_LAYERS_FREED
from bridge_memory.reserved.encoders import Encoders
from bridge_memory.schedule.events import Moment, num_warmup, schedule_table, walk
from bridge_memory.schedule.peak import few_microbatches
from bridge_memory.spec import LayerSpec, RunSpec
from bridge_memory.spec.encoders import MEGATRON_KINDS
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.tapes.alive import NODES, TURNS
from bridge_memory.tapes.allocation_trace import Nodes, Passes, Storages, tape_of
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of
from bridge_memory.workspaces.caching_allocator import CachingAllocator, Call, Calls, Trace

ENGINE = "megatron_ddp"
#: Training steps that are replayed; after the second, more memory is reserved only by chance.
STEPS = 3
COMPUTE, EXCHANGE = "compute", "communication"
#: Numbers of tokens between which overlapped layers of experts change, if routing is not even.
_VARIANTS = 4
#: An optimizer's state for each parameter is in fp32, or half of it.
_STATE_WIDTH = 4

#: A backward pass: the storage of the output's gradient -> those of the inputs' gradients.
Back = Callable[[int | None], dict[int, int]]


def why_not(run: RunSpec) -> str | None:
    impl = run.implementation
    asked = {
        "MTP on a stage apart from its losses, or of megatron-core before 0.14": _has_depths(run)
        and (not MTP_LOSS_OUTSIDE(impl) or not _depths_are_with_the_losses(run)),
        "deferred weight gradients of the output layer": impl.defer_embedding_wgrad_compute,
        "offloaded activations": bool(impl.cpu_offloading_num_layers or impl.offload_modules),
        "CUDA graphs": impl.cuda_graph_impl != "none",
        "a teacher": run.teacher is not None or impl.distillation != "none",
        "encoders of megatron-core's layers that run again": _not_replayed(run),
        "adapters": run.peft.trains_adapters or run.peft.freezes,
        "outputs that stages keep": run.parallel.pp > 1 and not impl.deallocate_pipeline_outputs,
        "shards of saved inputs": run.recompute.granularity == "full" and run.recompute.distribute_saved_activations,
        "embeddings of every layer": bool(run.model.per_layer_vocab_size),
        "recomputed hyper-connections beside overlapped exchanges": run.recompute.selects("mhc")
        and impl.overlap_moe_expert_parallel_comm,
    }  # fmt: skip
    missing = [name for name, given in asked.items() if given]
    return f"reserved memory with {', '.join(missing)} is not replayed" if missing else None


def _not_replayed(run: RunSpec) -> bool:
    """Whether a model has encoders of megatron-core's layers, which run again."""
    found = [e.structure for e in context_of(run).encoders if e.items] if run.model.encoders else []
    return run.recompute.granularity is not None and any(s.kind in MEGATRON_KINDS for s in found)


def _has_depths(run: RunSpec) -> bool:
    return run.model.mtp_num_layers > 0 and run.model.mtp_layer is not None


def _depths_are_with_the_losses(run: RunSpec) -> bool:
    shapes = [shape for stage in layout(run.model, run.parallel).shapes(run.model) for shape in stage]
    return all(bool(shape.num_depths) == shape.output for shape in shapes)


def trace_of(run: RunSpec, stage: int, uneven: float = 1.0, steps: int = STEPS) -> Trace:
    """What training on a rank of ``stage`` asks its allocator for. ``uneven``: overlapped layers of experts get at each
    pass between the run's number of tokens and this times it, some more, some less."""
    assert why_not(run) is None, why_not(run)
    job = _Job(run, stage, uneven, repeats=True)
    first = job.start()
    if uneven > 1:
        return Trace([*first, *(call for step in range(1, steps) for call in job.step(step))], [], 0, 0)
    if steps == 1:
        return Trace(first, [], 0, 0)
    before = job.storages.made
    return Trace(first, job.step(1), job.storages.made - before, steps - 1)


def sizes_vary(run: RunSpec) -> bool:
    """Whether tensors of experts change their sizes from pass to pass while two streams take turns: with routing that
    is not even, blocks of one size are free when another size is asked for, and neither stream can use the other's."""
    impl = run.implementation
    dropless = impl.moe_expert_capacity_factor is None and impl.moe_expert_rank_capacity_factor is None
    return (
        impl.overlap_moe_expert_parallel_comm and run.parallel.ep > 1 and dropless
        and not impl.moe_pad_expert_input_to_capacity
    )  # fmt: skip


class _Streams:
    """Allocators, as the host sees them: what runs allocates on its stream; what another stream may still use is free
    later."""

    def __init__(self, allocators: Sequence[CachingAllocator | Calls]) -> None:
        self.allocators = allocators
        self.running = COMPUTE
        #: Whether storages that are freed are recorded on the stream that runs.
        self.recording = False
        self._of: dict[int, str] = {}
        self._recorded: dict[int, str] = {}
        #: Freed, in order: (the number, the stream whose work until then must be done).
        self._waiting: list[tuple[int, str]] = []
        self._done = 0

    def report(self, number: int, nbytes: int | None) -> None:
        if nbytes is not None:
            self._of[number] = self.running
            for allocator in self.allocators:
                allocator.allocate(number, nbytes, self.running)
            return
        stream = self._of.pop(number)
        by = self._recorded.pop(number, self.running if self.recording else stream)
        if by != stream:
            self._waiting.append((number, by))
        for allocator in self.allocators:
            (allocator.free if by == stream else allocator.free_later)(number)

    def record(self, number: int) -> None:
        """``number`` is used by the stream that runs, until it is freed."""
        if self._of.get(number, self.running) != self.running:
            self._recorded[number] = self.running

    def mark(self) -> None:
        """What is on the compute stream by now, the next exchange waits for."""
        self._done = len(self._waiting)

    def wait(self, *, everything: bool = False) -> None:
        """The host waits for the exchange's stream, or for the GPU."""
        left = []
        for place, (number, by) in enumerate(self._waiting):
            if everything or by == EXCHANGE or place < self._done:
                for allocator in self.allocators:
                    allocator.reuse(number)
            else:
                left.append((number, by))
        self._waiting, self._done = left, 0


class _Variables:
    """Hidden states of ``nbytes`` that the schedule refers to in addition to its chunks (``Moment.hidden``)."""

    def __init__(self, storages: Storages, nbytes: int) -> None:
        self._storages, self.nbytes = storages, nbytes
        self._held: list[int] = []

    def take(self, number: int) -> None:
        """A reference that the schedule drops at the next pass, or later."""
        if number in self._held:
            self._storages.drop(number)
        else:
            self._held.append(number)

    def hold(self, number: int) -> None:
        """Hold so many: the newest, and new ones where there are fewer, which have been received."""
        older = max(0, len(self._held) - number)
        self._storages.drop_all(self._held[:older])
        del self._held[:older]
        self._held += [self._storages.make(self.nbytes) for _ in range(number - len(self._held))]


class _Pass(NamedTuple):
    """A microbatch in a chunk, between its overlapped passes."""

    x: int | None
    #: Its layers in nodes, and the blocks before and after them.
    layers: list[Nodes]
    before: list[Back]
    after: list[Back]


class _Depths:
    """MTP depths and all losses after them, as one block: depths pass on hidden states, which are joined; each loss has
    its part of them (``multi_token_prediction.py: MultiTokenPredictionBlock.forward``; ``gpt_model.py: _postprocess``).
    """

    def __init__(self, depth: Passes, loss: Passes, number: int, hidden: int, storages: Storages) -> None:
        self._depth, self._loss, self._number, self._hidden, self._storages = depth, loss, number, hidden, storages

    def forward(self, x: int | None) -> tuple[int | None, Back]:
        """As ``Passes.forward``; there is no output that the caller has to drop but the last loss's."""
        assert x is not None
        storages, depths, losses = self._storages, list[Back](), list[Back]()
        states = [storages.hold(x)]
        for _ in range(self._number):
            out, its_back = self._depth.forward(states[-1])
            depths.append(its_back)
            states.append(out)
        joined = storages.make((1 + self._number) * self._hidden)
        storages.drop_all(states)
        outs = []
        for _ in range(1 + self._number):
            out, its_back = self._loss.forward(joined)  # a view of its part
            losses.append(its_back)
            outs.append(out)
        storages.drop(joined)
        storages.drop_all(outs[:-1])

        def back(gradient: int | None) -> dict[int, int]:
            parts = [losses.pop()(gradient if not n else None).get(0) for n in range(1 + self._number)]
            whole = storages.make((1 + self._number) * self._hidden)
            storages.drop_all([part for part in parts if part is not None])
            into = storages.hold(whole)
            found: dict[int, int] = {}
            while depths:
                found = depths.pop()(into)
                into = found.pop(0)
                storages.drop_all(found.values())
                summed = storages.make(self._hidden)
                storages.drop(into)
                into = summed
            storages.drop(whole)
            return {0: into}

        return outs[-1], back


#: A part of a chunk; layers that are recomputed together are a list.
Block = Passes | _Depths | Encoders | list[Passes]


class _Job:
    """A rank of one stage, storage by storage. ``repeats``: passes of later steps are those of the first."""

    def __init__(self, run: RunSpec, stage: int, uneven: float = 1.0, *, repeats: bool = False) -> None:
        self._repeats = repeats
        self.run, self.stage = run, stage
        self._calls = Calls(stream=COMPUTE)
        self.streams = _Streams((self._calls,))
        #: The passes of a step that is not overlapped: calls, the number of the first storage, and of how many.
        self._recorded: tuple[list[Call], int, int] | None = None
        #: Of the last step: what is kept until the next.
        self._between: list[int] = []
        self.storages = self._new_storages()
        self.ctx = context_of(run)
        self.parts = stage_parts(run, stage)
        self.shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
        self.known: dict[object, Passes] = {}
        self.chunks = [self._chunk(shape) for shape in self.shapes]
        self._pixels = pixel_bytes(self.ctx)
        #: The chunks with other numbers of tokens, of which every pass of a layer takes one.
        self.variants = [self.chunks]
        self._chosen = Random(0)
        if uneven > 1:
            balanced = run.implementation.moe_imbalance
            for turn in range(1, _VARIANTS):
                factor = 1 + (uneven - 1) * turn / (_VARIANTS - 1)
                self.ctx = context_of(run.with_fields(moe_imbalance=balanced * factor))
                self.known = {}
                self.variants.append([self._chunk(shape) for shape in self.shapes])
            self.ctx = context_of(run)
        #: Elements of every parameter, by whether it is of routed experts.
        self.numels: dict[bool, list[int]] = {False: [], True: []}
        for shape in self.shapes:
            for parameter in named_parameters(chunk_units(run.model, shape, self.ctx)):
                self.numels[parameter.expert].append(parameter.numel)

    def _new_storages(self) -> Storages:
        """They report each allocation, with its bytes, and each free."""
        if self.run.implementation.overlap_moe_expert_parallel_comm:
            return Storages(self.streams.report)
        return Storages(self._calls.report, self._calls.play)

    # ---- the model ----

    def _passes(self, key: object, block: Callable[..., object], *, again: bool = False) -> Passes:
        if (key, again) not in self.known:
            self.known[key, again] = Passes(tape_of(self.ctx, block), self.storages, recompute=again)
        return self.known[key, again]

    def _layer(self, kind: LayerSpec, *, again: bool = False) -> Passes:
        return self._passes(kind, lambda c: layer_block(kind, c), again=again)

    def _chunk(self, shape: ChunkShape) -> list[Block]:
        """The blocks of a chunk in order; layers that are recomputed together are a list."""
        model, ctx = self.run.model, self.ctx
        out: list[Block] = []
        if shape.embedding:
            out.append(self._passes("embedding", lambda c: embedding_block(model, c)))
            if any(encoder.items for encoder in ctx.encoders):
                out.append(Encoders(ctx, self.storages))
        kinds = [kind for kind, count in shape.layers for _ in range(count)]
        again, size = fully_recomputed(len(kinds), ctx, ignored=ignores_full_recompute(model, ctx))
        for at in range(0, again, size):
            group = kinds[at : min(at + size, again)]
            out.append(self._layer(group[0], again=True) if len(group) == 1 else [self._layer(k) for k in group])
        out += [self._layer(kind) for kind in kinds[again:]]
        if holds_final_norm(model, shape, ctx):
            out.append(self._passes("final norm", lambda c: final_norm_block(final_norm_name(model), c)))
        if shape.output:
            own = has_own_output_weight(model, shape)
            loss = self._passes(
                "loss", lambda c: output_block(model.output_bias, own, c, softcapped=model.softcapped_logits)
            )
            out.append(loss if not shape.num_depths else self._depths(loss, shape.num_depths))
        return out

    def _depths(self, loss: Passes, number: int) -> _Depths:
        layer = self.run.model.mtp_layer
        assert layer is not None
        depth = self._passes("MTP", lambda c: mtp_block(layer, c, learned_positions(self.run.model)))
        return _Depths(depth, loss, number, hidden_states_bytes(self.ctx), self.storages)

    def _forward(self, chunk: int, x: int | None) -> tuple[int | None, list[Back]]:
        """Run a chunk; the caller keeps its reference to the input ``x`` and gets one to the output."""
        back: list[Back] = []
        inside, blocks = x, self.chunks[chunk]
        discarding = [at for at, block in enumerate(blocks) if isinstance(block, Passes) and block.discards]
        again: list[int] = []
        for at, block in enumerate(blocks):
            out: int | None
            its_back: Back
            if isinstance(block, list):
                out, its_back = self._group(block, inside)
            elif isinstance(block, Passes):
                out, its_back = block.forward(inside, again)
            else:
                out, its_back = block.forward(inside)
            if discarding and at == discarding[0]:  # its input is no checkpoint's output
                again = [number for number in again if number != inside]
            if discarding and at == discarding[-1]:
                its_back = self._discarded(list(dict.fromkeys(again)), its_back)
            back.append(its_back)
            if inside is not None and inside is not x:
                self.storages.drop(inside)
            inside = out
        return inside, back

    def _discarded(self, numbers: Sequence[int], last: Back) -> Back:
        """The chunk's storages of these ``numbers`` are freed, and made again when its ``last`` layer with any runs
        backward."""
        for number in numbers:
            self.storages.discard(number)

        def back(gradient: int | None) -> dict[int, int]:
            for number in numbers:
                self.storages.refill(number)
            return last(gradient)

        return back

    def _group(self, blocks: list[Passes], x: int | None) -> tuple[int, Back]:
        """Layers recomputed together: only their input is kept. Backward runs all of them forward, saving, first."""
        assert x is not None
        self.storages.hold(x)
        inside = self.storages.hold(x)
        for block in blocks:
            out = block.forward_alone(inside)
            self.storages.drop(inside)
            inside = out

        def back(gradient: int | None) -> dict[int, int]:
            found, at = [], self.storages.hold(x)
            for block in blocks:
                out, its_back = block.forward(at)
                found.append(its_back)
                self.storages.drop(at)
                at = out
            grads: dict[int, int] = {}
            for its_back in reversed(found):
                grads = its_back(gradient)
                gradient = grads.get(0)
            self.storages.drop(at)
            self.storages.drop(x)
            return grads

        return inside, back

    # ---- training ----

    def start(self) -> list[Call]:
        """The model, its buffers, and the first step."""
        parts = self.parts
        made = [c for c in parts.persistent if c.lifetime is Lifetime.MODEL]
        built = {experts: self._built(made, experts=experts) for experts in (False, True)}
        for experts, parameters in built.items():
            for component in made:
                if component.experts is experts and component.role in (Role.WEIGHTS, Role.GRADIENTS):
                    self.storages.make(component.bytes)
            self.storages.drop_all(parameters)
        for component in made:
            if component.role not in (Role.WEIGHTS, Role.GRADIENTS):
                self._each(component)
        for component in parts.persistent:
            if component.lifetime is Lifetime.FIRST_PASS:
                self.storages.make(component.bytes)
        return self._calls.taken() + self.step(0)

    def step(self, number: int) -> list[Call]:
        """A step; all but the first, 0, ask for the same, but where layers differ from pass to pass."""
        parts = self.parts
        batch = self.storages.make(parts.batch)
        self.storages.drop_all(self._between)
        if self.run.implementation.overlap_moe_expert_parallel_comm:
            self._overlapped(parts.hidden_state)
        else:
            self._passes_of_step(parts.hidden_state)
        self.storages.drop(batch)
        if not number:
            for component in parts.persistent:
                if component.lifetime not in (Lifetime.MODEL, Lifetime.FIRST_PASS):
                    self._each(component)
        self.storages.drop(self.storages.make(parts.in_step))
        self._between = [self.storages.make(c.bytes) for c in parts.between_steps]
        return self._calls.taken()

    def _passes_of_step(self, hidden: int) -> None:
        """All microbatches, which ask for the same in every step, of storages with higher numbers."""
        if self._recorded is not None:
            calls, first, number = self._recorded
            self._calls.again(calls, self.storages.made - first)
            self.storages.skip(number)
            return
        before, first = self._calls.taken(), self.storages.made
        self._microbatches(hidden)
        calls = self._calls.taken()
        if self._repeats and all(storage >= first for storage, _, _ in calls):
            self._recorded = calls, first, self.storages.made - first
        self._calls.again([*before, *calls])

    def _built(self, made: Sequence[Component], *, experts: bool) -> list[int]:
        """The parameters as modules build them, before DDP's buffers."""
        held = sum(c.bytes for c in made if c.role is Role.WEIGHTS and c.experts is experts)
        width = held // max(1, sum(self.numels[experts]))
        return [self.storages.make(numel * width) for numel in self.numels[experts]]

    def _each(self, component: Component) -> None:
        """A component parameter by parameter: a rank's shard of a flat buffer is of whole parameters but for two."""
        left = component.bytes
        if component.role is not Role.OPTIMIZER:
            self.storages.make(left)
            return
        for numel in self.numels[component.experts]:
            part = min(left, numel * _STATE_WIDTH)
            if part:
                self.storages.make(part)
            left -= part
        self.storages.make(left)

    def _microbatches(self, hidden: int) -> None:
        """The passes of a step. A chunk's input is held to the end of its backward, and the gradient of its output."""
        waiting: dict[tuple[int, int], tuple[int | None, list[Back]]] = {}
        variables = _Variables(self.storages, hidden)
        for (forward, microbatch, chunk), moment in zip(self._order(), self._moments(), strict=True):
            variables.hold(moment.hidden)
            shape = self.shapes[chunk]
            if forward:
                x = None if shape.embedding else self.storages.make(hidden)
                pixels = self.storages.make(self._pixels if shape.embedding else 0)
                out, back = self._forward(chunk, x)
                self.storages.drop(pixels)
                if out is not None and out is not x:  # sent and freed, but where it is saved
                    (self.storages.drop if shape.output else variables.take)(out)
                waiting[microbatch, chunk] = x, back
                continue
            x, back = waiting.pop((microbatch, chunk))
            gradient = None if shape.output else self.storages.make(hidden)
            held = None if gradient is None else self.storages.hold(gradient)
            at_embedding, at_loss = self._tied(shape)
            kept: int | None = None  # the output layer's gradient, until the embedding's is added to it
            while back:
                gradient = back.pop()(gradient).get(0)
                if at_loss.own and kept is None:
                    kept = self.storages.make(at_embedding.before)
            if at_embedding.own:
                self.storages.drop_all([self.storages.make(at_embedding.own), self.storages.make(at_embedding.total)])
            if kept is not None:
                self.storages.drop(kept)
            for number in (x, held, gradient):
                if number is not None:
                    variables.take(number)
        variables.hold(0)

    def _tied(self, shape: ChunkShape) -> tuple[PendingGradients, PendingGradients]:
        """Gradients of the weight that a chunk's embedding and output layer share, at each of the two."""
        if not (self.run.model.share_embeddings_and_output_weights and shape.embedding and shape.output):
            return NOTHING_WAITS, NOTHING_WAITS
        at_embedding, at_loss = pending_gradients((Label.EMBEDDING, Label.LOSS), self.ctx, tied=True)
        return at_embedding, at_loss

    def _order(self) -> Iterator[tuple[bool, int, int]]:
        """(forward, microbatch, chunk) of every pass of this rank."""
        for forward, back in self._pairs():
            for is_forward, one in ((True, forward), (False, back)):
                if one is not None:
                    yield is_forward, *one

    def _schedule(self) -> tuple[int, int, int, int, int, bool]:
        """Arguments of ``walk``: the pipeline, this rank, as many microbatches as there are moments, the virtual
        stages, their group, and whether passes overlap."""
        p, v = self.run.parallel, len(self.shapes)
        group = p.microbatch_group_size_per_vp_stage or p.pp
        extra = self.run.implementation.overlap_moe_expert_parallel_comm
        return p.pp, self.stage, few_microbatches(p.pp, self.run.num_microbatches, v, group, extra), v, group, extra

    def _moments(self) -> Iterator[Moment]:
        """The moments of ``_order``, or of ``_pairs`` where passes overlap."""
        return walk(*self._schedule())

    def _pairs(self) -> Iterator[tuple[tuple[int, int] | None, tuple[int, int] | None]]:
        """(microbatch, chunk) of a pass forward and of the one backward after it, of this rank. None: only the
        other."""
        pp, _, number, v, group, extra = self._schedule()
        table = schedule_table(number, v, group)
        first = num_warmup(pp, self.stage, number, v, group, extra)
        backward = [(microbatch, v - 1 - chunk) for microbatch, chunk in table]
        for place in range(len(table) + first):
            yield table[place] if place < len(table) else None, backward[place - first] if place >= first else None

    # ---- overlapped ----

    def _overlapped(self, hidden: int) -> None:
        """The passes of a step, where a forward and a backward pass run in turns."""
        waiting: dict[tuple[int, int], _Pass] = {}
        variables = _Variables(self.storages, hidden)
        for (forward, back), moment in zip(self._pairs(), self._moments(), strict=True):
            variables.hold(moment.hidden)
            of_back = None if back is None else waiting.pop(back)
            found = self._both(
                variables, None if forward is None else forward[1], of_back, 0 if back is None else back[1]
            )
            if forward is not None:
                waiting[forward] = found
        variables.hold(0)
        self.streams.wait(everything=True)  # the norm of the gradients

    def _after(self, shape: ChunkShape) -> int:
        """Blocks of a chunk after its layers, which run when all of these have. (The final norm is of the last layer's
        last node.)"""
        return holds_final_norm(self.run.model, shape, self.ctx) + shape.output

    def _both(self, variables: _Variables, forward: int | None, back: _Pass | None, chunk: int) -> _Pass:
        """One pass forward of chunk ``forward`` and one backward of ``chunk``, layer by layer in turns. Returns the
        pass that has run forward."""
        storages, hidden = self.storages, variables.nbytes
        new = _Pass(None, [], [], [])
        inside = gradient = held = None
        blocks: list[Passes | _Depths | Encoders] = []
        if forward is not None:
            chosen = [self._chosen.choice(self.variants)[forward][at] for at in range(len(self.chunks[forward]))]
            blocks = [block for block in chosen if not isinstance(block, list)]
            assert len(blocks) == len(self.chunks[forward]), "layers are not recomputed together where they overlap"
            shape = self.shapes[forward]
            new = new._replace(x=None if shape.embedding else storages.make(hidden))
            inside = new.x if new.x is None else storages.hold(new.x)
            pixels = storages.make(self._pixels if shape.embedding else 0)
            while shape.embedding and (not new.before or isinstance(blocks[0], Encoders)):
                out, its_back = blocks.pop(0).forward(inside)
                new.before.append(its_back)
                if inside is not None:
                    storages.drop(inside)
                inside = out
        kept: int | None = None  # as in ``_microbatches``
        at_embedding, at_loss = self._tied(self.shapes[chunk])
        if back is not None:
            gradient = None if self.shapes[chunk].output else storages.make(hidden)
            held = None if gradient is None else storages.hold(gradient)
            while back.after:
                gradient = back.after.pop()(gradient).get(0)
                if at_loss.own and kept is None:
                    kept = storages.make(at_embedding.before)
        after = len(blocks) - (0 if forward is None else self._after(self.shapes[forward]))
        layers, tail = [block for block in blocks[:after] if isinstance(block, Passes)], blocks[after:]
        to_the_end: list[int] = []
        done = storages.drop if OVERLAPPED_LAYERS_FREED(self.run.implementation) else to_the_end.append
        for place in range(max(len(layers), len(back.layers) if back is not None else 0)):
            f = layers[place] if place < len(layers) else None
            b = back.layers.pop() if back is not None and back.layers else None
            turns = _Turns(self.streams, done, None if f is None else f.nodes(inside), b)
            out, gradient = turns.run(gradient)
            if f is not None:
                assert turns.forward is not None
                new.layers.append(turns.forward)
                if inside is not None:
                    storages.drop(inside)
                inside = out
        for block in tail:
            out, its_back = block.forward(inside)
            new.after.append(its_back)
            if inside is not None:
                storages.drop(inside)
            inside = out
        if forward is not None:
            storages.drop(pixels)
        if inside is not None:
            is_loss = forward is not None and self.shapes[forward].output
            (storages.drop if tail and is_loss else variables.take)(inside)
        if back is not None:
            while back.before:
                gradient = back.before.pop()(gradient).get(0)
            if at_embedding.own:
                storages.drop_all([storages.make(at_embedding.own), storages.make(at_embedding.total)])
            if kept is not None:
                storages.drop(kept)
            for number in (back.x, held, gradient):
                if number is not None:
                    variables.take(number)
        storages.drop_all(to_the_end)
        return new


class _Turns:
    """A layer forward and another backward, node by node in turns; either may be missing."""

    def __init__(
        self, streams: _Streams, done: Callable[[int], None], forward: Nodes | None, back: Nodes | None
    ) -> None:
        self.streams, self.forward, self._back, self._done = streams, forward, back, done

    def run(self, gradient: int | None) -> tuple[int | None, int | None]:
        """(the output of the one, the gradient of the other's input); ``gradient``: that of the other's output."""
        f, b, out, grads = self.forward, self._back, None, {} if gradient is None else {0: gradient}
        for backwards, node in TURNS:
            nodes = b if backwards else f
            if nodes is None or (len(nodes) == 1 and node):
                continue
            assert len(nodes) in (1, NODES), "a layer in nodes"
            self.streams.running = EXCHANGE if node % 2 else COMPUTE
            if not backwards:
                out = self._forward(nodes, node)
            else:
                grads = nodes.backward(node, grads.get(0), self._taken)
        self.streams.running = COMPUTE
        return out, grads.get(0)

    def _forward(self, nodes: Nodes, node: int) -> int | None:
        streams = self.streams
        if node == 1:
            streams.wait()
        if node == 3:
            for number in nodes.taken(node):
                streams.record(number)
        streams.recording = bool(node)
        out = nodes.forward(node)
        streams.recording = False
        if not node:
            streams.mark()
        return out

    def _taken(self, number: int) -> None:
        self.streams.recording = True
        self._done(number)
        self.streams.recording = False
