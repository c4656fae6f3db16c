"""DeepSpeed's ZeRO-1 and 2: unsharded flat weights on every rank, fp32 main parameters and optimizer states of one
partition of them.

Stage 2 reduces gradients while backward runs: each is copied into a bucket of ``reduce_bucket_size`` elements, and when
that is full, gradients of this rank's partition are copied out of it. Stage 1 keeps unsharded gradients until the end
of backward. The step flattens the partition's gradients and casts them to fp32. The estimate is of the rank with the
largest gradients in its partition, and counts them from the first reduction on.

Source: deepspeed 0.19.8 ``runtime/zero/stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__, setup_buckets,
reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads, average_tensor, copy_grads_in_partition,
_use_compact_grad_partition_buffer, get_grad_norm_direct, step``, ``runtime/bf16_optimizer.py: BF16_Optimizer`` (stage 1
with bf16 parameters and fp32 gradients), ``runtime/engine.py: _do_optimizer_sanity_check, communication_data_type``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line, StageState
from bridge_memory.engines.torch_modules import (
    Kinds,
    Model,
    Module,
    accumulates,
    hidden_bytes,
    made_before,
    model_of,
    parameter_width,
    rounded,
)
from bridge_memory.engines.zero_buckets import Flat, Gradients, Held, Plan, Replay, Widths, contiguous, replay
from bridge_memory.inventory.stack import Unit, chunk_units
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import Concurrent, most
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import ParameterList

#: Elements: partitions start at multiples of it (``nccl_start_alignment_factor``).
ALIGNMENT = 2
#: Bytes per element in which norms are computed (``zero/utils.py: get_norm_dtype``).
NORM_WIDTH = 8


class ZeRO12:
    """See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        z, engine = run.deepspeed, run.data_parallel.engine
        self.run = run
        self.kinds = Kinds()
        self.stage_number = z.stage if engine == "megatron_deepspeed" else int(engine[-1])
        self.width = parameter_width(run)
        self.accumulated_width = DTYPE_BYTES[z.grad_accum_dtype] if z.grad_accum_dtype else self.width
        self.ranks = run.parallel.data_parallel_size
        self.offloads = z.offload_optimizer_device != "none"
        self.overlaps = bool(z.overlap_comm)
        half = run.precision.params_dtype == "bf16"
        self.of_bf16_optimizer = (
            self.stage_number == 1 and half and self.accumulated_width == 4 and not self.offloads
        )
        # ``BF16_Optimizer`` has no hooks: the engine reduces after the last backward (``engine.py:
        # allreduce_gradients``).
        self.in_hooks = self.stage_number == 2 or (self.overlaps and not self.of_bf16_optimizer)
        #: Whether reductions are added into an fp32 partition of gradients.
        self.compact = self.accumulated_width == 4 != self.width
        communicated = DTYPE_BYTES[z.communication_data_type] if z.communication_data_type else self.width
        #: Stage 1 casts each gradient into a new tensor, which goes into the bucket (``use_grad_accum_attribute``).
        self.copies = self.stage_number == 1 and self.compact and not self.of_bf16_optimizer
        self.own_width = self.accumulated_width if self.copies else self.width
        self.widths = Widths(self.own_width, communicated, self.compact)
        self.main_width = 2 if z.bf16_master_weights_and_grads else 4
        self.state_width = 2 if z.bf16_optimizer_states else 4

    # ---- what is kept ----

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What every rank keeps."""
        run = self.run
        model = model_of(run, chunks[0])
        flat = self.flat(model)
        many = accumulates(run)
        gradients, whole = self._gradients(flat), 0
        if self.stage_number == 1 and (many or not self.overlaps or self.of_bf16_optimizer):
            whole = self._whole(model)
        kept = list(self._amounts(flat, gradients, fresh=self._is_fresh(many=many)))
        if self.of_bf16_optimizer:
            own = Line(
                Role.GRADIENTS, State.GRADIENTS, "gradients in bf16", False, adapters=run.peft.freezes, fresh=not many,
                zeroed=True,
            )
            kept.append((own, whole))
        host: list[tuple[str, int]] = []
        if self.offloads:
            host = self._host(flat, kept)
            kept = [(line, n) for line, n in kept if line.role is not Role.OPTIMIZER]
        # None keeps its gradients: which rank has most depends on when it makes copies for norms.
        flats = [flat] if gradients or not self.offloads else self._flats(model)
        by_rank = [self._concurrent(model, each, gradients, whole, many=many) for each in flats]
        by_place = [most(held) for held in zip(*by_rank, strict=True)]
        step, name = self._step(flat, gradients, self._left_to_step(model, flat))
        largest = max((p.numel for m in model.modules for p, _ in m.trained_parameters()), default=0)
        if self.offloads:
            buffer = Line(Role.BUFFERS, State.NONE, "staging buffer of one gradient, to host memory", False)
            kept.append((buffer, rounded(largest * self.width)))
            host.append(("buffer of one gradient", rounded(largest * self.width)))
        return StageState(
            model.numel, tuple((line, n) for line, n in kept if n), in_step=step, step_name=name,
            accumulated=whole if many and not self.of_bf16_optimizer else 0,
            concurrent=(model.engine_bytes(by_place),), host=tuple(host), building=self._building(flat), saving=0,
        )

    def _building(self, flat: Flat) -> int | None:
        """The original and the flat weights together, if there is room for both (``flatten_on_accelerator``); then main
        parameters with a copy in the weights' dtype, and with zeros of their size (``initialize_optimizer_states``).
        None if not modelled: ``BF16_Optimizer``, offloading."""
        if self.of_bf16_optimizer or self.offloads:
            return None
        whole = rounded(flat.padded * self.width)
        main, copied = rounded(flat.partition * self.main_width), rounded(flat.partition * self.width)
        return flat.frozen_bytes + whole + max(whole, main + copied, 2 * main)

    def _gradients(self, flat: Flat) -> int:
        """Bytes of the gradients with which the step starts. With an offloaded optimizer each is copied to host memory
        once it is reduced, and freed (``copy_grads_in_partition, async_inplace_copy_grad_to_fp32_buffer_from_gpu``);
        a compact partition of them stays on the GPU (``_build_compact_grad_partition_buffer``)."""
        if self.of_bf16_optimizer:
            return rounded(flat.padded * 4)
        if self.compact:
            return rounded(flat.partition * 4)
        return 0 if self.offloads else rounded(flat.touched * self.width)

    def _amounts(self, flat: Flat, gradients: int, *, fresh: bool) -> Iterator[tuple[Line, int]]:
        exact = Provenance.EXACT
        adapters = self.run.peft.freezes
        shard = "dp" if self.ranks > 1 else ""
        yield Line(Role.WEIGHTS, State.PARAMETERS, "weights", False), rounded(flat.padded * self.width) + (
            flat.frozen_bytes
        )
        stays = self.of_bf16_optimizer
        yield Line(
            Role.GRADIENTS, State.GRADIENTS, "gradients" if stays else "gradients of the partition", False, exact,
            adapters, "" if stays else shard, fresh and not stays, not stays,
        ), gradients
        yield Line(
            Role.OPTIMIZER, State.MAIN_PARAMETERS, "main parameters", False, exact, adapters, shard
        ), rounded(flat.partition * self.main_width)
        for state in zero_states(self.run):
            yield Line(Role.OPTIMIZER, state, state.value, False, exact, adapters, shard), rounded(
                flat.partition * self.state_width
            )

    def _whole(self, model: Model) -> int:
        return sum(map(self._own_bytes, model.modules))

    def _own_bytes(self, module: Module) -> int:
        """Bytes of a module's gradients in separate tensors."""
        return self.kinds.of("own", (module,), lambda: sum(
            times * rounded(p.numel * self.own_width) for p, times in module.trained_parameters()
        ))  # fmt: skip

    def _copied(self, module: Module) -> int:
        """Bytes of the cast of a module's largest gradient, which is made with it."""
        largest = max((p.numel for p, _ in module.trained_parameters()), default=0)
        return rounded(largest * self.own_width) if self.copies else 0

    def _left_to_step(self, model: Model, flat: Flat) -> int:
        """Bytes of cast gradients of other ranks' partitions, which nothing frees before the step, and of the buckets
        of which they are views (``copy_grads_in_partition`` frees only this rank's)."""
        if not self.copies or self.offloads:
            return 0
        if not contiguous(self.run):
            return self._whole(model)
        size, made = self.run.deepspeed.reduce_bucket_size, self._gradients_of(model)
        others = [n for start, n in zip(made.starts, made.numels, strict=True) if not flat.own_part(start, n)]
        small = sum(n for n in others if n <= size)
        buckets = min(-(-small // size), 2 if self.overlaps else 1)
        return buckets * rounded(size * self.own_width) + sum(rounded(n * self.own_width) for n in others if n > size)

    def _host(self, flat: Flat, kept: Sequence[tuple[Line, int]]) -> list[tuple[str, int]]:
        pinned = "pinned" if self.run.deepspeed.offload_optimizer_pin_memory else "pageable"
        found = [(f"{line.name} ({pinned})", n) for line, n in kept if line.role is Role.OPTIMIZER]
        found.append((f"main gradients ({pinned})", rounded(flat.partition * self.main_width)))
        found.append((f"weights of the partition ({pinned})", rounded(flat.partition * self.width)))
        return found

    # ---- what moves ----

    def _concurrent(
        self, model: Model, flat: Flat, gradients: int, whole: int, *, many: bool
    ) -> list[Concurrent]:  # fmt: skip
        """Buckets and gradients at every place."""
        run, z = self.run, self.run.deepspeed
        buffer_width = self.accumulated_width if self.stage_number == 1 and self.compact else self.width
        one = rounded(z.reduce_bucket_size * buffer_width) if contiguous(run) else 0
        bucket = 0 if self.of_bf16_optimizer else one * (2 if self.overlaps else 1)
        if not self.in_hooks:
            sizes = [self._own_bytes(m) for m in model.modules]
            made = made_before(model, [0 if many else n for n in sizes])
            # The bucket stays from the first gradient to the last microbatch.
            waits = bucket if many else 0
            stay = self.of_bf16_optimizer
            found = [Concurrent(waits, n + bucket, n + bucket, gradients=n if stay else 0) for n in made]
            if self.copies:
                self._with_casts(model, found, many=many)
            found[model.places.loss] = Concurrent(waits, waits, waits, bucket)
            if stay:  # reduced in the dtype of communication (``engine.py: allreduce_bucket``)
                width = DTYPE_BYTES[z.communication_data_type or run.precision.params_dtype]
                copied = rounded(flat.padded * width) if width != 4 else 0
                found[0] = found[0]._replace(least_backward=(0 if many else whole) + copied)
            else:
                held = self._at_end(model, flat, gradients)
                most = (0 if many else whole) + bucket + held.most - held.freed
                if most > found[0].least_backward:
                    found[0] = found[0]._replace(least_backward=most, freed_at_least=held.freed if many else 0)
            return found
        return self._in_hooks(model, flat, bucket)

    def _with_casts(self, model: Model, found: list[Concurrent], *, many: bool) -> None:
        """Each gradient is cast when it is made: those of a layer stay in that form; the embedding's follows its sum.
        """
        for module in model.modules:
            place, copied = module.place, self._copied(module)
            held = found[place]
            more = copied if many else self._own_bytes(module) * (self.own_width - self.width) // self.own_width
            if place in (0, model.places.loss):
                made = copied + copied * self.width // self.own_width
                found[place] = held._replace(least_backward=max(held.least_backward, held.backward + made))
            else:
                found[place] = held._replace(
                    backward=held.backward + more, backward_at_end=held.backward_at_end + more
                )

    def _at_end(self, model: Model, flat: Flat, gradients: int) -> Held:
        """Bytes while unsharded gradients, which are counted elsewhere, are reduced after backward. Gradients that are
        copied into the bucket are freed; one larger than the bucket stays, unless it is this rank's."""
        plan = self._plan(flat, gradients, hooks=False, partitioned=False, counted_elsewhere=True)
        reductions = replay(self._gradients_of(model), plan).reductions
        return max((r.held for r in reductions), key=lambda held: held.most - held.freed, default=Held())

    def _plan(self, flat: Flat, own: int, *, hooks: bool, partitioned: bool, counted_elsewhere: bool) -> Plan:
        z = self.run.deepspeed
        return Plan(
            flat, self.widths, z.reduce_bucket_size, contiguous(self.run), z.reduce_scatter, self.overlaps, hooks,
            partitioned, counted_elsewhere, own, NORM_WIDTH if self.offloads else 0,
        )  # fmt: skip

    def _gradients_of(self, model: Model) -> Gradients:
        return gradients_of(model, self.ranks if self.run.deepspeed.round_robin_gradients else 1)

    def flat(self, model: Model) -> Flat:
        """The flat parameters of the rank with the most memory: of the one with the largest gradients in its partition,
        the first and the last, the one that has most when a bucket is reduced. The order of reductions can make it the
        first or the last."""
        flats = self._flats(model)
        return max(flats, key=lambda flat: self._most_reducing(model, flat))

    def _flats(self, model: Model) -> list[Flat]:
        """Those of the rank with the largest gradients in its partition, of the first and of the last."""
        dealt = self.run.deepspeed.round_robin_gradients
        found = flat_of(model, self.ranks, self.width, dealt=dealt)
        ranks = dict.fromkeys((found.fullest, 0, self.ranks - 1))
        return [flat_of(model, self.ranks, self.width, dealt=dealt, rank=rank) for rank in ranks]

    def _most_reducing(self, model: Model, flat: Flat) -> tuple[int, int]:
        """(sum over reductions in hooks of the bytes that stay for this rank, which are alive together with
        activations; peak bytes of the reductions)."""
        gradients = self._gradients(flat)
        if self.of_bf16_optimizer:
            return 0, gradients
        if not self.in_hooks:
            held = self._at_end(model, flat, gradients)
            return 0, held.most - held.freed
        events = self._hooked(model, flat).reductions
        return sum(r.held.stays for r in events), max((r.held.most - r.held.freed for r in events), default=0)

    def _hooked(self, model: Model, flat: Flat) -> Replay:
        """Reductions during the last microbatch's backward."""
        many = accumulates(self.run)
        #: Gradients of the partition, if not alive throughout.
        new = self._gradients(flat) if self._is_fresh(many=many) or not self.compact else 0
        second = self.stage_number == 2
        plan = self._plan(flat, new, hooks=True, partitioned=second, counted_elsewhere=many and not second)
        return replay(self._gradients_of(model), plan)

    def _in_hooks(self, model: Model, flat: Flat, bucket: int) -> list[Concurrent]:
        """Buckets, and what reductions during backward make and leave."""
        many = accumulates(self.run)
        fresh, last_alone = self._is_fresh(many=many), self.run.num_microbatches == 2
        #: Stage 1 allocates its buckets in the first microbatch.
        waits = bucket if many and self.stage_number == 1 else 0
        events, before = self._hooked(model, flat)

        def net(held: Held) -> tuple[int, int]:
            """(bytes in addition to what is counted elsewhere, how much of that is freed). Before the last of several
            microbatches nothing is freed."""
            freed = held.freed if last_alone else min(held.freed, held.most)
            return bucket + held.most - freed, freed

        first = Held()
        found = []
        for place in reversed(range(model.number)):
            first = before.get(place, first)
            held, freed = net(first)
            moments = [net(r.held) for r in events if r.place == place]
            least = freed_at_least = 0
            if place == model.places.loss:
                least, freed_at_least = max([(held, freed), *moments])
                held, freed = waits, 0
            elif place in (model.places.norm, 0):  # its only gradient is made last
                if place == 0:  # then those in the bucket are reduced
                    moments += [net(r.held) for r in events if r.place == -1]
                least, freed_at_least = max(moments, default=(0, 0))
                least += hidden_bytes(self.run) if least and place else 0
            else:
                # The block's peak includes the gradient that is being made.
                inside = [
                    net(r.held._replace(most=r.held.most - (0 if self.copies else r.trigger)))
                    for r in events if r.place == place
                ]  # fmt: skip
                held += max((self._copied(m) for m in model.modules if m.place == place), default=0)
                held, freed = max([(held, freed), *inside])
            stays = first.stays if fresh else 0
            found.append(Concurrent(waits, held, held, least, max(0, min(stays, held)), freed, freed_at_least))
        return found[::-1]

    def _is_fresh(self, *, many: bool) -> bool:
        """Whether every backward pass allocates the gradients of the partition."""
        return not many or self.stage_number == 1

    def _step(self, flat: Flat, gradients: int, left: int) -> tuple[int, str]:
        """(bytes, name) of the step's peak, beyond persistent model state and the gradients of the partition. ``left``:
        bytes of other partitions' gradients, which are freed after the norm (``free_grad_in_param_list``)."""
        if self.offloads:
            return 0, "optimizer step on the host"
        part, o = flat.partition, self.run.optimizer
        roots = 0
        if o.optimizer in ("adam", "adamw"):
            roots = {"foreach": 1, "for-loop": 2, "fused": 0}[o.torch_implementation] * rounded(part * self.state_width)
        if self.of_bf16_optimizer:  # gradients in bf16 are freed after the step
            return roots, "the optimizer's temporaries"
        # If the dtypes differ: flattened, then cast; else only flattened.
        cast = rounded(part * self.main_width)
        flattened = 0 if self.compact else cast + (rounded(part * self.width) if self.width != self.main_width else 0)
        norm = left + rounded(flat.largest * NORM_WIDTH)
        stepping = roots if self.compact else cast + roots - gradients
        most = max(flattened, norm, stepping)
        if most == norm:
            return most, "the largest gradient in fp64, for the norm"
        name = "fp32 gradients" if self.main_width == 4 else "bf16 gradients"
        return most, name if most == flattened else f"{name} and the optimizer's temporaries"


def gradients_of(model: Model, dealt: int) -> Gradients:
    """Of all trained parameters. ``dealt``: to so many ranks in turn (``_round_robin_reorder``)."""
    return _gradients(tuple([(module.place, module.trained) for module in model.modules]), dealt)


@lru_cache(maxsize=8)  # the same for all configurations of a search
def _gradients(modules: tuple[tuple[int, ParameterList], ...], dealt: int) -> Gradients:
    places, numels = list[int](), list[int]()
    for place, trained in modules:
        before = len(numels)
        for parameters, times in trained.rows:
            for p in parameters:
                numels += [p.numel] * times
        places += [place] * (len(numels) - before)
    starts, at = [0] * len(numels), 0
    for rank in range(dealt):
        for i in range(rank, len(numels), dealt):
            starts[i], at = at, at + numels[i]
    return Gradients(tuple(places), tuple(numels), tuple(starts))


def flat_of(model: Model, ranks: int, width: int, *, dealt: bool = False, rank: int | None = None) -> Flat:
    """The flat parameters in the order of the model, the order of the optimizer's only group; or assigned to the ranks
    round-robin (``dealt``; ``_round_robin_reorder``). ``rank``: whose partition; None: the rank with the most memory.
    """
    made = gradients_of(model, ranks if dealt else 1)
    numel, padded, partition, touched, largest = _partitioned(made, ranks)
    frozen = sum(
        times * rounded(p.numel * width) for m in model.modules for parameters, times in m.frozen.rows
        for p in parameters
    )  # fmt: skip
    # In the step a rank has its gradients, and either all of them flattened in fp32 or the largest in fp64.
    flattened = partition * (4 + width if width != 4 else 4)
    fullest = rank
    if fullest is None:
        fullest = max(range(ranks), key=lambda r: touched[r] * width + max(largest[r] * NORM_WIDTH, flattened))
    return Flat(numel, padded, partition, touched[fullest], largest[fullest], fullest, frozen)


@lru_cache(maxsize=64)  # the same for all configurations of a search
def _partitioned(made: Gradients, ranks: int) -> tuple[int, int, int, list[int], list[int]]:
    """(elements of all parameters, padded, of one partition; of every rank, elements of the parameters that its
    partition touches, and of the largest part in it)."""
    numel = sum(made.numels)
    padded = -(-numel // (ALIGNMENT * ranks)) * ALIGNMENT * ranks
    partition = padded // ranks
    touched, largest = [0] * ranks, [0] * ranks
    for at, n in zip(made.starts, made.numels, strict=True):
        low, high = at // partition, (at + n - 1) // partition
        for r in range(low, high + 1):
            touched[r] += n
            largest[r] = max(largest[r], min(at + n, (r + 1) * partition) - max(at, r * partition))
    return numel, padded, partition, touched, largest


def fullest_rank(run: RunSpec) -> int:
    """The data-parallel rank for which ZeRO-1 or 2 is estimated."""
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    model = model_of(run, chunk_units(run.model, shape, context_of(run)))
    return ZeRO12(run).flat(model).fullest


def zero_states(run: RunSpec) -> tuple[State, ...]:
    """Optimizer states of a partition of main parameters."""
    o = run.optimizer
    if o.optimizer == "sgd":
        return (State.MOMENTUM,) if o.sgd_momentum else ()
    return (State.EXP_AVG,) if o.optimizer == "lion" else (State.EXP_AVG, State.EXP_AVG_SQ)


ENGINE = ZeRO12
