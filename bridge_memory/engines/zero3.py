"""DeepSpeed's ZeRO-3: every parameter is divided over the ranks; whole ones are gathered while their module runs, and
some that come next, or again soon, beside them.

For good: the flat partition of the weights, fp32 main parameters and optimizer states of it by sub-group, gradients of
it, the bucket of ``reduce_bucket_size`` elements, and small parameters whole. A module's parameters are freed after
it unless they are used again within ``max_reuse_distance``; each fetch gathers ahead what comes next in the order of
the last step, until ``prefetch_bucket_size`` elements are on their way or ``max_live_parameters`` are whole. What is
gathered together has one flat buffer, from which each parameter is copied.

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
from bridge_memory.engines.torch_modules import Model, model_of, parameter_width, rounded
from bridge_memory.engines.zero_1_and_2 import NORM_WIDTH, zero_states
from bridge_memory.inventory.chain import Concurrent
from bridge_memory.inventory.context import LIBRARY
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import DTYPE_BYTES, RunSpec


class Weight(NamedTuple):
    """One parameter, in elements."""

    place: int
    numel: int
    #: Of the largest partition.
    part: int
    trains: bool
    #: Whole for good.
    stays: bool


class Live(NamedTuple):
    """Bytes of gathered parameters at every place, forward and backward, and after."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
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

    # ---- what is kept ----

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What every rank keeps and moves."""
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
            concurrent=(model.engine_bytes(self._beside(model, weights, live)),), host=tuple(host),
            first_as_later=False, building=self._building(weights, groups, kept), saving=self._gathered(weights),
        )

    def _building(
        self, weights: Sequence[Weight], groups: Sequence[int], kept: Sequence[tuple[Line, int]]
    ) -> int | None:
        """Whole weights, divided one by one; then, without any, main parameters beside zeros of the largest sub-group
        (``initialize_optimizer_states``); at last all that is ``kept`` but the optimizer's states, which the first step
        makes, and beside it each trained parameter whole in turn (``create_reduce_and_remove_grad_hooks``). None where
        states are offloaded.
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
        """The largest parameter, whole (``engine.py: _zero3_consolidated_16bit_state_dict`` gathers those of one module
        at a time); nothing where none is gathered to save."""
        if not self.z.stage3_gather_16bit_weights_on_model_save:
            return 0
        return rounded(max((w.numel for w in weights if not w.stays), default=0) * self.width)

    def weights(self, model: Model) -> list[Weight]:
        """Every parameter in the order of the model."""
        found = []
        threshold = self.z.stage3_param_persistence_threshold
        left = self.z.stage3_model_persistence_threshold
        for module in model.modules:
            trained = [(p, times, True) for p, times in module.trained_parameters()]
            frozen = [(p, times, False) for parameters, times in module.frozen.rows for p in parameters]
            for p, times, trains in (*trained, *frozen):
                for _ in range(times):
                    stays = p.numel <= threshold and (left is None or p.numel <= left)
                    if stays and left is not None:
                        left -= p.numel
                    found.append(Weight(module.place, p.numel, -(-p.numel // self.ranks), trains, stays))
        return found

    def _amounts(self, weights: Sequence[Weight], groups: Sequence[int]) -> Iterator[tuple[Line, int]]:
        exact, adapters = Provenance.EXACT, self.run.peft.freezes
        shard = "dp" if self.ranks > 1 else ""
        trained = sum(w.part for w in weights if w.trains)
        frozen = sum(rounded(w.part * self.width) for w in weights if not w.trains)
        yield Line(Role.WEIGHTS, State.PARAMETERS, "weights", False, exact, False, shard), (
            rounded(trained * self.width) + frozen
        )
        whole = sum(rounded(w.numel * self.width) for w in weights if w.stays)
        yield Line(Role.WEIGHTS, State.PARAMETERS, "small weights, whole", False), whole
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
            yield Line(Role.WEIGHTS, State.NONE, "second partition of the weights (hpZ)", False), second
        if self.z.contiguous_gradients:
            bucket = rounded(self.z.reduce_bucket_size * self.communicated_width)
            yield Line(Role.GRADIENTS, State.NONE, "bucket of gradients", False), bucket

    def _placed(
        self, kept: Sequence[tuple[Line, int]], groups: Sequence[int]
    ) -> tuple[list[tuple[Line, int]], list[tuple[str, int]]]:
        """(on the GPU, in host memory): optimizer states, main parameters and gradients go together; with a ratio the
        last of the sub-groups, whole ones (``_create_fp32_partitions``)."""
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
            # initialize_optimizer_states: the gradient that the optimizer takes, which _release_sub_group leaves.
            here, there = (sum(rounded(n * self.main_width) for n in part) for part in (groups[:stay], groups[stay:]))
            how = "pinned" if z.offload_optimizer_pin_memory else "pageable"
            if there:
                host.append((f"main gradients ({how})", there))
            gpu.append((Line(Role.GRADIENTS, State.NONE, "main gradients of sub-groups that stay", False), here))
        if z.offload_param_device == "nvme":
            buffers = z.offload_param_buffer_count * z.offload_param_buffer_size * self.width
            host.append(("buffers of weights from NVMe (pinned)", buffers))
        return gpu, host

    # ---- what moves ----

    def _beside(self, model: Model, weights: Sequence[Weight], live: Live) -> list[Concurrent]:
        """Whole parameters, and the buffers that they are copied from and gradients are reduced in."""
        forward, backward, left = live
        copies, last = self._reductions(model, weights)
        found = [Concurrent(f, b + c, b + c) for f, b, c in zip(forward, backward, copies, strict=True)]
        # The last reduction comes once all gradients lie in the bucket.
        found[0] = found[0]._replace(least_backward=left + last)
        loss = model.places.loss
        found[loss] = Concurrent(forward[loss], backward[loss], backward[loss])
        return found

    def _followed(self, model: Model) -> tuple[tuple[Weight, ...], Live]:
        """Weights and their replay, which a search meets again with every micro batch and with checkpoints: kept by all
        that ``weights`` and ``_live`` read."""
        z = self.z
        of_modules = tuple([
            (module.place, *[
                (p.numel, times, trains)
                for trains, held in ((True, module.trained), (False, module.frozen))
                for parameters, times in held.rows for p in parameters
            ])
            for module in model.modules
        ])  # fmt: skip
        key = (
            "zero3", of_modules, model.number, self.ranks, self.width, z.stage3_param_persistence_threshold,
            z.stage3_model_persistence_threshold, z.stage3_max_live_parameters, z.stage3_prefetch_bucket_size,
            z.stage3_max_reuse_distance, self.run.model.share_embeddings_and_output_weights,
        )  # fmt: skip
        found: tuple[tuple[Weight, ...], Live] | None = LIBRARY.replays.get(key)
        if found is None:
            weights = tuple(self.weights(model))
            found = weights, self._live(model, weights)
            LIBRARY.count_recording()
            LIBRARY.replays[key] = found
        return found

    def _live(self, model: Model, weights: Sequence[Weight]) -> Live:
        """A replay of the coordinator."""
        z = self.z
        tied = self.run.model.share_embeddings_and_output_weights
        order = list(range(len(weights)))
        places = [w.place for w in weights]
        if tied:  # The output layer takes the embedding's weight.
            order += [i for i, w in enumerate(weights) if w.place == 0][:1]
            places += [model.places.loss] * (len(order) - len(weights))
        number = len(order)
        trace = [(order[i], places[i], False) for i in range(number)]
        trace += [(order[i], places[i], True) for i in reversed(range(number))]
        uses: dict[int, deque[int]] = {}
        for step, (i, _, _) in enumerate(trace):
            uses.setdefault(i, deque()).append(step)
        live: set[int] = set()
        available = held = 0
        sizes = [rounded(w.numel * self.width) for w in weights]
        until = list(accumulate((weights[i].numel for i, _, _ in trace), initial=0))
        forward, backward = [0] * model.number, [0] * model.number
        head = 0
        for step, (i, place, back) in enumerate(trace):
            peak = backward if back else forward
            flat = 0
            if not weights[i].stays and i not in live:
                live.add(i)
                available, held = available + weights[i].numel, held + sizes[i]
            head = max(head, step + 1)
            budget = min(z.stage3_max_live_parameters - available, z.stage3_prefetch_bucket_size)
            ahead = several = 0
            while head < len(trace) and ahead < budget:
                j = trace[head][0]
                head += 1
                if not weights[j].stays and j not in live:
                    live.add(j)
                    ahead += weights[j].numel
                    several += 1
                    available, held = available + weights[j].numel, held + sizes[j]
            # What is on its way together lies in one buffer, and is copied out of it.
            flat = ahead * self.width if several > 1 else 0
            peak[place] = max(peak[place], held + flat)
            uses[i].popleft()
            following = uses[i][0] if uses[i] else None
            # Within the reuse distance (``__params_to_release``): what runs between is below it.
            soon = following is not None and until[following] - until[step + 1] < z.stage3_max_reuse_distance
            if i in live and not soon and (following is None or following >= head):
                live.remove(i)
                available, held = available - weights[i].numel, held - sizes[i]
        return Live(tuple(forward), tuple(backward), held)

    def _reductions(self, model: Model, weights: Sequence[Weight]) -> tuple[list[int], int]:
        """Bytes that the reduction of a full bucket copies, at the place whose gradient does not fit any more; and what
        the last copies, after backward."""
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
        """``__avg_scatter_grads``: cast where the dtype differs, joined where there are several. Without
        ``reduce_scatter`` the bucket itself is reduced (``__avg_scatter_contiguous_grads``)."""
        if self.z.contiguous_gradients and not self.z.reduce_scatter:
            return elements * self.communicated_width if self.communicated_width != self.width else 0
        cast = elements * self.communicated_width if self.communicated_width != self.width else 0
        return cast + (elements * self.communicated_width if number > 1 else 0)

    def _step(self, groups: Sequence[int], largest: int) -> tuple[int, str]:
        """(bytes, name) of the most that the step makes: sub-group by sub-group."""
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
        beside = "" if most == flattened else " and the optimizer's temporaries"
        return most, f"{name}{beside} of a sub-group"


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
