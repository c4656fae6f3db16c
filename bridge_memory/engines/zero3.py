"""DeepSpeed's ZeRO-3: every parameter is sharded over the ranks, and gathered while its module runs, together with some
that are needed next or again soon.

Persistent: the flat partition of the weights, its fp32 main parameters and optimizer states by sub-group, its
gradients, the bucket of ``reduce_bucket_size`` elements, and small parameters, unsharded. A module's parameters are
freed after it unless they are used again within ``max_reuse_distance``. Each fetch prefetches in the order of the last
step, until ``prefetch_bucket_size`` elements are in flight or ``max_live_parameters`` are gathered. Parameters gathered
together share one flat buffer, from which each is copied.

Source: deepspeed 0.19.8 ``runtime/zero/stage3.py: DeepSpeedZeroOptimizer_Stage3.__init__, _setup_for_real_optimizer,
__avg_scatter_grads, partition_grads, _prepare_fp32_grad_for_sub_group, step``, ``partitioned_param_coordinator.py:
PartitionedParameterCoordinator._fetch_sub_module_impl, __params_to_release``, ``partition_parameters.py:
AllGatherCoalescedHandle.wait``, ``parameter_offload.py: DeepSpeedZeRoOffload.mark_persistent_parameters``, ``comm/
coalesced_collectives.py: reduce_scatter_coalesced``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.engine import Line, StageState
from bridge_memory.engines.torch_modules import Model, Module, hidden_bytes, model_of, parameter_width, rounded
from bridge_memory.engines.zero_1_and_2 import NORM_WIDTH, zero_states
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.chain import Concurrent
from bridge_memory.tapes.context import TRACE_CACHE
from bridge_memory.tapes.parameters import Parameter

#: Between the name of a linear and those of its adapter's parameters (``peft.py: lora_parameters``).
ADAPTER = ".adapter."
#: Parameters of up to ``stage3_param_persistence_threshold`` elements, from the end of the first step on.
WHOLE_FOR_GOOD = "persistent small weights, not sharded"


class Weight(NamedTuple):
    """One parameter, in elements."""

    place: int
    numel: int
    #: Of the largest partition.
    part: int
    trains: bool
    #: Persistent: never sharded.
    stays: bool
    #: Number of its module, whose parameters are fetched together, and that module's name inside of its block.
    module: int
    path: str


class Fetch(NamedTuple):
    """A module that is about to run."""

    place: int
    back: bool
    #: Numbers of its parameters.
    weights: tuple[int, ...]


class Live(NamedTuple):
    """Bytes of gathered parameters at every place in forward and backward, between the passes, and after them."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    #: While the last module runs forward, and backward.
    last: tuple[int, int]
    between: int
    after: int


class ZeRO3:
    """See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        """``rank`` changes nothing: partitions are padded to one size."""
        z = run.deepspeed
        self.run, self.z = run, z
        self.width = parameter_width(run)
        self.ranks = run.parallel.data_parallel_size
        self.accumulated_width = DTYPE_BYTES[z.grad_accum_dtype] if z.grad_accum_dtype else self.width
        self.communicated_width = DTYPE_BYTES[z.communication_data_type] if z.communication_data_type else self.width
        self.main_width = 2 if z.bf16_master_weights_and_grads else 4
        self.state_width = 2 if z.bf16_optimizer_states else 4
        self.offloads = z.offload_optimizer_device != "none"
        self.offloads_parameters = z.offload_param_device != "none"
        #: Estimate the first step: there is no trace of modules yet, and small parameters are sharded too.
        self.first = False

    def first_step(self) -> ZeRO3:
        """The same engine for the passes of the first step."""
        engine = ZeRO3(self.run)
        engine.first = True
        return engine

    # ---- what is kept ----

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What every rank keeps, gathers and reduces."""
        run, z = self.run, self.z
        model = model_of(run, chunks[0])
        weights, live = self._followed(model)
        trained = [w.part for w in weights if w.trains]
        groups = sub_groups(trained, z.sub_group_size)
        kept = list(self._amounts(weights, groups))
        gpu, host = self._placed(kept, groups)
        step, name = self._step(groups, max(trained, default=0))
        return StageState(
            model.numel, tuple((line, n) for line, n in gpu if n), in_step=step, step_name=name,
            concurrent=(model.engine_bytes(self._concurrent(model, weights, live)),), host=tuple(host),
            building=self._building(weights, groups, kept), saving=self._gathered(weights),
        )

    def _building(
        self, weights: Sequence[Weight], groups: Sequence[int], kept: Sequence[tuple[Line, int]]
    ) -> int | None:
        """The largest of three moments. Unsharded weights, which are partitioned one by one. Partitioned weights with
        main parameters and zeros of the largest sub-group (``initialize_optimizer_states``). Everything ``kept`` except
        optimizer states, which the first step makes, with the largest trained parameter, since each is gathered in turn
        (``create_reduce_and_remove_grad_hooks``). None if anything is offloaded.
        """
        if self.offloads or self.offloads_parameters:
            return None
        whole = sum(rounded(w.numel * self.width) for w in weights)
        divided = sum(rounded(w.part * self.width) for w in weights)
        main = sum(rounded(n * self.main_width) for n in groups)
        largest = rounded(max((w.part for w in weights), default=0) * self.width)
        states = zero_states(self.run)
        made = sum([nbytes for line, nbytes in kept if line.state not in states])
        made += rounded(max((w.numel for w in weights if w.trains and not w.stays), default=0) * self.width)
        return max(whole + largest, divided + main + rounded(max(groups, default=0) * self.main_width), made)

    def _gathered(self, weights: Sequence[Weight]) -> int:
        """Bytes of the largest parameter, gathered (``engine.py: _zero3_consolidated_16bit_state_dict`` gathers the
        parameters of one module at a time); 0 if a save gathers none."""
        if not self.z.stage3_gather_16bit_weights_on_model_save:
            return 0
        return rounded(max((w.numel for w in weights if not w.stays), default=0) * self.width)

    def weights(self, model: Model) -> list[Weight]:
        """Every parameter in the order in which modules run forward."""
        found = []
        threshold = self.z.stage3_param_persistence_threshold
        left = self.z.stage3_model_persistence_threshold
        module = 0
        for block in model.modules:
            for parameters, trains in in_order(block):
                path = parameters[0].name.rpartition(".")[0]
                for p in parameters:
                    stays = p.numel <= threshold and (left is None or p.numel <= left)
                    if stays and left is not None:
                        left -= p.numel
                    found.append(Weight(block.place, p.numel, -(-p.numel // self.ranks), trains, stays, module, path))
                module += 1
        return found

    def _amounts(self, weights: Sequence[Weight], groups: Sequence[int]) -> Iterator[tuple[Line, int]]:
        exact, adapters = Provenance.EXACT, self.run.peft.freezes
        shard = "dp" if self.ranks > 1 else ""
        trained = sum(w.part for w in weights if w.trains)
        frozen = sum(rounded(w.part * self.width) for w in weights if not w.trains)
        yield Line(Role.WEIGHTS, State.PARAMETERS, "weights", False, exact, False, shard), (
            rounded(trained * self.width) + frozen
        )
        whole = 0 if self.first else sum(rounded(w.numel * self.width) for w in weights if w.stays)
        yield Line(Role.WEIGHTS, State.PARAMETERS, WHOLE_FOR_GOOD, False), whole
        yield Line(Role.GRADIENTS, State.GRADIENTS, "gradients", False, exact, adapters, shard), rounded(
            trained * self.accumulated_width
        )
        yield Line(Role.OPTIMIZER, State.MAIN_PARAMETERS, "main parameters", False, exact, adapters, shard), sum(
            rounded(n * self.main_width) for n in groups
        )
        for state in zero_states(self.run):
            yield Line(Role.OPTIMIZER, state, state.value, False, exact, adapters, shard), sum(
                rounded(n * self.state_width) for n in groups
            )
        if self.z.zero_hpz_partition_size > 1:
            # groups.py: _create_zero_param_parallel_group has no group larger than the job.
            group = min(self.z.zero_hpz_partition_size, self.ranks)
            second = sum(rounded(-(-w.numel // group) * self.width) for w in weights)
            yield Line(Role.WEIGHTS, State.NONE, "secondary partition of the weights (hpZ)", False), second
        if self.z.contiguous_gradients:
            bucket = rounded(self.z.reduce_bucket_size * self.communicated_width)
            yield Line(Role.GRADIENTS, State.NONE, "bucket of gradients", False), bucket

    def _placed(
        self, kept: Sequence[tuple[Line, int]], groups: Sequence[int]
    ) -> tuple[list[tuple[Line, int]], list[tuple[str, int]]]:
        """(lines on the GPU, lines in host memory). Optimizer states, main parameters and gradients are offloaded
        together; with a ratio, only the last sub-groups, as a whole (``_create_fp32_partitions``)."""
        z, gpu, host = self.z, [], []
        stay = int((1 - z.offload_optimizer_ratio) * len(groups))
        for line, nbytes in kept:
            of_optimizer = line.role is Role.OPTIMIZER
            divided = bool(line.shard) or self.ranks == 1
            away = z.offload_optimizer_device if of_optimizer or line.state is State.GRADIENTS else "none"
            pinned = z.offload_optimizer_pin_memory
            if line.state is State.PARAMETERS and divided and line.shard:
                away, pinned = z.offload_param_device, z.offload_param_pin_memory
            moved = nbytes if away != "none" else 0
            if moved and of_optimizer:
                width = self.main_width if line.state is State.MAIN_PARAMETERS else self.state_width
                moved = sum(rounded(n * width) for n in groups[stay:])
            if moved:
                how = "NVMe" if away == "nvme" else "pinned" if pinned else "pageable"
                host.append((f"{line.name} ({how})", moved))
            gpu.append((line, nbytes - moved))
        if z.offload_optimizer_device == "cpu":
            # initialize_optimizer_states: the optimizer's gradient, which _release_sub_group does not free.
            on_gpu, on_host = (
                sum(rounded(n * self.main_width) for n in part) for part in (groups[:stay], groups[stay:])
            )
            how = "pinned" if z.offload_optimizer_pin_memory else "pageable"
            if on_host:
                host.append((f"main gradients ({how})", on_host))
            gpu.append((Line(Role.GRADIENTS, State.NONE, "main gradients of sub-groups on the GPU", False), on_gpu))
        if z.offload_param_device == "nvme":
            buffers = z.offload_param_buffer_count * z.offload_param_buffer_size * self.width
            host.append(("staging buffers of weights from NVMe (pinned)", buffers))
        return gpu, host

    # ---- what moves ----

    def _concurrent(self, model: Model, weights: Sequence[Weight], live: Live) -> list[Concurrent]:
        """Gathered parameters, the buffers from which they are copied, and buffers in which gradients are reduced."""
        forward, backward, last_running, between, left = live
        copies, last = self._reductions(model, weights)
        found = [Concurrent(f, b + c, b + c) for f, b, c in zip(forward, backward, copies, strict=True)]
        # The last reduction runs when all gradients are in the bucket.
        found[0] = found[0]._replace(least_backward=left + last)
        loss = model.places.loss
        # The output layer's weight is fetched while only the logits, or their gradient, are alive.
        table = next((w for w in reversed(weights) if w.place == loss), weights[0])
        logits = table.numel // self.run.model.hidden_size * hidden_bytes(self.run) // self.run.model.hidden_size
        own, hidden = rounded(table.numel * self.width) * table.trains, hidden_bytes(self.run)
        found[loss] = Concurrent(
            between, between, between, max(backward[loss] + logits, last_running[1] + logits + hidden + own),
            least_forward=max(forward[loss], last_running[0] + logits) + hidden,
        )
        return found

    def _followed(self, model: Model) -> tuple[tuple[Weight, ...], Live]:
        """Weights and their replay. Cached by everything that ``weights`` and ``_live`` read, since layouts of a search
        that differ in micro batch or recomputation share them."""
        z = self.z
        kinds = {(id(module.trained), id(module.frozen)): module for module in model.modules}
        of_kinds = {
            kind: tuple([
                (p.name, p.numel, times, trains)
                for trains, held in ((True, module.trained), (False, module.frozen))
                for parameters, times in held.rows for p in parameters
            ])
            for kind, module in kinds.items()
        }  # fmt: skip
        of_modules = tuple([(m.place, m.prefix, of_kinds[id(m.trained), id(m.frozen)]) for m in model.modules])
        key = (
            "zero3", of_modules, model.number, self.ranks, self.width, z.stage3_param_persistence_threshold,
            z.stage3_model_persistence_threshold, z.stage3_max_live_parameters, z.stage3_prefetch_bucket_size,
            z.stage3_max_reuse_distance, self.run.model.share_embeddings_and_output_weights,
            self.run.transformers.gradient_checkpointing, self.run.peft.freezes,
            (self.first, self.first and self.run.num_microbatches > 1),
        )  # fmt: skip
        found: tuple[tuple[Weight, ...], Live] | None = TRACE_CACHE.replays.get(key)
        if found is None:
            weights = tuple(self.weights(model))
            found = weights, self._live(model, weights)
            TRACE_CACHE.count_trace()
            TRACE_CACHE.replays[key] = found
        return found

    def _live(self, model: Model, weights: Sequence[Weight]) -> Live:
        """A replay of the coordinator over one forward and backward pass."""
        fetches = self._fetches(model, weights)
        if not self.first:
            return _Coordinator(self, model.number, weights, fetches, traced=True, whole=True).live()
        # The order is traced from the second microbatch on; small parameters persist from the first step's end on.
        untraced = _Coordinator(self, model.number, weights, fetches, traced=False, whole=False).live()
        if self.run.num_microbatches == 1:
            return untraced
        traced = _Coordinator(self, model.number, weights, fetches, traced=True, whole=False).live()
        return Live(
            tuple(map(max, untraced.forward, traced.forward)), tuple(map(max, untraced.backward, traced.backward)),
            (max(untraced.last[0], traced.last[0]), max(untraced.last[1], traced.last[1])),
            max(untraced.between, traced.between), max(untraced.after, traced.after),
        )

    def _fetches(self, model: Model, weights: Sequence[Weight]) -> list[Fetch]:
        """Modules in the order in which they run, forward and backward; in backward the modules of a checkpointed layer
        run forward again first. Backward does not reach modules before the first adapter."""
        modules: dict[int, list[int]] = {}
        for i, w in enumerate(weights):
            modules.setdefault(w.module, []).append(i)
        own = [Fetch(weights[held[0]].place, False, tuple(held)) for held in modules.values()]
        paths = [weights[fetch.weights[0]].path for fetch in own]
        loss, layers = model.places.loss, set(model.places.layers)
        if self.run.model.share_embeddings_and_output_weights:  # the output layer uses the embedding's weight
            own.append(Fetch(loss, False, tuple([i for i, w in enumerate(weights) if w.place == 0][:1])))
            paths.append("")
        # Modules around others have no parameters, but each prefetches: the model, and all of it but the output layer;
        # layers, and what is in them. Backward comes to them before it comes to what they contain.
        forward, upward = [Fetch(0, False, ())] * 2, list[Fetch]()
        for n, fetch in enumerate(own):
            around = Fetch(fetch.place, False, ())
            if fetch.place in layers:
                before, after = (
                    paths[m] if 0 <= m < len(own) and own[m].place == fetch.place else None for m in (n - 1, n + 1)
                )
                forward += [around] * _containers(paths[n], before)
                upward += [fetch, *[around] * _containers(paths[n], after)]
            else:
                upward += [Fetch(loss, False, ()), fetch] if n == len(own) - 1 else [fetch]
            forward.append(fetch)
        upward.append(Fetch(loss, False, ()))
        reached = 0
        if self.run.peft.freezes:
            reached = next((n for n, f in enumerate(upward) if any(weights[i].trains for i in f.weights)), 0)
        backward = [fetch._replace(back=True) for fetch in upward[reached:]][::-1]
        if self.run.transformers.gradient_checkpointing:
            again = {place: [f._replace(back=True) for f in forward if f.place == place] for place in layers}
            twice: list[Fetch] = []
            for fetch in backward:
                if fetch.place in again:
                    twice += again.pop(fetch.place)
                twice.append(fetch)
            backward = twice
        return [*forward, *backward]

    def _reductions(self, model: Model, weights: Sequence[Weight]) -> tuple[list[int], int]:
        """(bytes that reductions of a full bucket copy, at the place whose gradient does not fit; bytes that the last
        one copies, after backward)."""
        copies = [0] * model.number
        elements = number = 0
        for w in reversed(weights):
            if not w.trains:
                continue
            if elements and elements + w.numel > self.z.reduce_bucket_size:
                copies[w.place] = max(copies[w.place], self._copied(elements, number))
                elements = number = 0
            elements, number = elements + w.numel, number + 1
        return copies, self._copied(elements, number)

    def _copied(self, elements: int, number: int) -> int:
        """Bytes that ``__avg_scatter_grads`` copies: a cast if the dtype differs, a concatenation if there are several
        gradients. Without ``reduce_scatter`` the bucket itself is reduced (``__avg_scatter_contiguous_grads``)."""
        if self.z.contiguous_gradients and not self.z.reduce_scatter:
            return elements * self.communicated_width if self.communicated_width != self.width else 0
        cast = elements * self.communicated_width if self.communicated_width != self.width else 0
        return cast + (elements * self.communicated_width if number > 1 else 0)

    def _step(self, groups: Sequence[int], largest: int) -> tuple[int, str]:
        """(bytes, name) of the step's temporaries; it steps one sub-group after the other."""
        if self.offloads:
            return 0, "optimizer step on the host"
        o, group = self.run.optimizer, max(groups, default=0)
        temporaries = 0
        if o.optimizer in ("adam", "adamw"):
            temporaries = {"foreach": 1, "for-loop": 2, "fused": 0}[o.torch_implementation]
        # _prepare_fp32_grad_for_sub_group: flattened, then cast to the dtype of the main parameters.
        cast = rounded(group * self.main_width)
        flattened = cast + (rounded(group * self.accumulated_width) if self.accumulated_width != self.main_width else 0)
        stepping = cast + temporaries * rounded(group * self.state_width)
        norm = rounded(largest * NORM_WIDTH)
        most = max(flattened, stepping, norm)
        if most == norm:
            return most, "the largest gradient in fp64, for the norm"
        name = "fp32 gradients" if self.main_width == 4 else "bf16 gradients"
        temporary = "" if most == flattened else " and the optimizer's temporaries"
        return most, f"{name}{temporary} of a sub-group"


def in_order(block: Module) -> Iterator[tuple[tuple[Parameter, ...], bool]]:
    """(parameters of a module, whether they train) for every module of a block, in the order of the model; adapters
    follow their linear."""
    adapters: dict[str, list[Parameter]] = {}
    for parameters, _ in block.trained.rows if block.frozen.rows else ():
        for p in parameters:
            adapters.setdefault(p.name.rpartition(ADAPTER)[0], []).append(p)
    met: set[str] = set()
    for parameters, times in block.frozen.rows or block.trained.rows:
        of_module: dict[str, list[Parameter]] = {}
        for p in parameters:
            of_module.setdefault(p.name.rpartition(".")[0], []).append(p)
        linears = {path: p.numbered(0).under(block.prefix).name.rpartition(".")[0]
                  for path, (p, *_) in of_module.items()}  # fmt: skip
        for _ in range(times):
            for path, held in of_module.items():
                yield tuple(held), not block.frozen.rows
                met.add(linears[path])
                for adapter in adapters.get(linears[path], ()):
                    yield (adapter,), True
    for path, others in adapters.items():
        if path not in met:  # adapters whose targets are full names
            for adapter in others:
                yield (adapter,), True


def _containers(path: str, other: str | None) -> int:
    """Modules of a layer, itself among them, that contain the one at ``path`` and not the one at ``other``, which is
    called before or after it; None: that one is not of the layer."""
    around = path.split(".")[:-1]
    if other is None:
        return len(around) + 1
    shared = 0
    for a, b in zip(around, other.split(".")[:-1], strict=False):
        if a != b:
            break
        shared += 1
    return len(around) - shared


class _Coordinator:
    """``PartitionedParameterCoordinator`` over one forward and backward pass, in bytes."""

    def __init__(
        self, engine: ZeRO3, places: int, weights: Sequence[Weight], fetches: Sequence[Fetch], *, traced: bool,
        whole: bool,
    ) -> None:  # fmt: skip
        """``traced``: the order of modules is known, so that they are prefetched. ``whole``: small parameters are
        persistent already."""
        z = engine.z
        self.weights, self.fetches, self.traced = weights, fetches, traced
        self.places, self.width, self.ranks = places, engine.width, engine.ranks
        self.bucket, self.most_live = z.stage3_prefetch_bucket_size, z.stage3_max_live_parameters
        self.reuse = z.stage3_max_reuse_distance
        #: Numbers of weights that are available; of those in flight, with their all-gather; bytes of each.
        self.gathered = {i for i, w in enumerate(weights) if w.stays and whole}
        self.in_flight: dict[int, _Gathering] = {}
        self.sizes: dict[int, int] = {}
        self.available = self.held = 0

    def live(self) -> Live:
        fetches, weights = self.fetches, self.weights
        queue: deque[tuple[int, int]] = deque()
        if self.traced:
            queue.extend((i, step) for step, fetch in enumerate(fetches) for i in fetch.weights)
        #: Elements of all modules before each.
        until = list(accumulate((sum(weights[i].numel for i in f.weights) for f in fetches), initial=0))
        uses: dict[int, deque[int]] = {}
        for step, fetch in enumerate(fetches):
            for i in fetch.weights:
                uses.setdefault(i, deque()).append(step)
        taken = dict.fromkeys(uses, -1)  # the step for which each was taken from the queue last
        most = [0] * self.places, [0] * self.places
        between, last = 0, [0, 0]
        for step, (place, back, own) in enumerate(fetches):
            peak = most[back]
            self._gather([i for i in own if i not in self.gathered and i not in self.in_flight])
            peak[place] = max(peak[place], self.held)
            for i in own:
                if i in self.in_flight:
                    peak[place] = max(peak[place], self._wait(i))
            missing = {i for i in own if taken[i] < step} if self.traced else set()
            while queue and missing:
                i, at = queue.popleft()
                taken[i] = at
                missing.discard(i)
            self._ahead(queue, taken)
            peak[place] = max(peak[place], self.held)
            if place == self.places - 1:
                last[back] = self.held
            for i in own:
                uses[i].popleft()
                following = uses[i][0] if uses[i] else None
                soon = following is not None and until[following] - until[step + 1] < self.reuse
                passed = following is not None and taken[i] >= following
                if not self.traced or not (weights[i].stays or soon or passed):
                    self._release(i)
            if not back:
                between = self.held
        return Live(tuple(most[0]), tuple(most[1]), (last[0], last[1]), between, self.held)

    def _ahead(self, queue: deque[tuple[int, int]], taken: dict[int, int]) -> None:
        budget = min(self.most_live - self.available, self.bucket)
        elements, chosen = 0, dict[int, None]()
        while queue and elements < budget:
            i, at = queue.popleft()
            taken[i] = at
            if i not in self.gathered and i not in self.in_flight and i not in chosen:
                chosen[i] = None
                elements += self.weights[i].numel
        self._gather(list(chosen))

    def _gather(self, chosen: Sequence[int]) -> None:
        """All-gather: one weight into a separate tensor, several into one flat buffer, each padded to the ranks."""
        if not chosen:
            return
        nbytes = rounded(sum(self.weights[i].part * self.ranks for i in chosen) * self.width)
        self.available += sum(self.weights[i].numel for i in chosen)
        self.held += nbytes
        gathering = _Gathering(tuple(chosen), nbytes)
        for i in chosen:
            self.in_flight[i] = gathering
            self.sizes[i] = nbytes if len(chosen) == 1 else rounded(self.weights[i].numel * self.width)

    def _wait(self, i: int) -> int:
        """Wait for a weight. The first wait copies all weights out of their buffer, the last frees it; returns the
        peak.
        """
        gathering = self.in_flight.pop(i)
        several = len(gathering.weights) > 1
        if not gathering.copied:
            gathering.copied = True
            self.gathered.update(gathering.weights)
            self.held += sum(self.sizes[other] for other in gathering.weights) if several else 0
        most = self.held
        gathering.left -= 1
        if several and not gathering.left:
            self.held -= gathering.nbytes
        return most

    def _release(self, i: int) -> None:
        if i in self.gathered:
            self.gathered.discard(i)
            self.available -= self.weights[i].numel
            self.held -= self.sizes[i]


class _Gathering:
    """One all-gather of several parameters."""

    __slots__ = ("copied", "left", "nbytes", "weights")

    def __init__(self, weights: tuple[int, ...], nbytes: int) -> None:
        self.weights, self.nbytes = weights, nbytes
        self.copied = False
        #: Weights not yet waited for.
        self.left = len(weights)


def sub_groups(parts: Sequence[int], most: int) -> list[int]:
    """Elements of the sub-groups (``_create_fp16_sub_groups``): each ends with the parameter that fills it."""
    if sum(parts) <= most:
        return [sum(parts)] if parts else []
    found: list[int] = []
    held = 0
    for n in parts:
        held += n
        if held >= most:
            found.append(held)
            held = 0
    return [*found, held] if held else found


ENGINE = ZeRO3
