"""FSDP2 (``fully_shard``): every parameter's first dimension is divided over the ranks, padded, in its own dtype; so
are gradients and optimizer states. A unit's parameters are whole while it runs, in ``param_dtype``.

Forward a unit has its parameters and the flat output of their all-gather, which goes with the copy-out of the next
unit's; backward its parameters and the output of the unit before it, gathered ahead. Its whole gradients are copied
into one flat input of the reduce-scatter in ``reduce_dtype``, which stays until the next unit's. The root's parameters
(those of no unit) stay whole from the beginning of forward to the end of backward, and their gradients are reduced
last.

Source: torch 2.13 ``distributed/fsdp/_fully_shard/_fsdp_param_group.py: FSDPParamGroup.unshard, wait_for_unshard,
post_backward, _backward_prefetch``, ``_fsdp_collectives.py: foreach_all_gather, foreach_reduce``, ``_fsdp_param.py:
FSDPParam._init_sharded_param, to_accumulated_grad_if_needed``, ``_fsdp_state.py: FSDPState._root_post_backward_
final_callback``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from bridge_memory.engines.engine import StageState
from bridge_memory.engines.torch_modules import (
    Kept,
    Kinds,
    Model,
    Module,
    accumulates,
    amounts_of,
    hidden_bytes,
    in_step,
    kept_of,
    model_of,
    offloaded_activations,
    parameter_width,
    rounded,
    shard,
    trained_width,
)
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.chain import Concurrent, Label
from bridge_memory.tapes.parameters import Parameter

#: Of what a layer hands on: an RMS norm's input in fp32, which is kept, two gradients and a product of that size, and
#: the gradient that goes around the norm (transformers ``LlamaRMSNorm.forward``).
NORM_BACKWARD = 9


#: Of a group: the places of its modules, in the order of the model.
Places = tuple[int, ...]


class Group(NamedTuple):
    """Parameters that are gathered and reduced together, in bytes on one rank."""

    places: Places
    root: bool
    #: Whole parameters, each a tensor of its own, the flat output of their all-gather, and its input where it is cast.
    whole: int
    output: int
    cast: int
    #: Flat input and output of the reduction of its gradients, and these gradients as they are kept.
    reduced: int
    reduced_shard: int
    gradients: int


class Gathered(NamedTuple):
    """A parameter, and bytes of an element as it is kept and as it is gathered. A gathering of several dtypes is one of
    bytes (``_get_param_all_gather_inputs``)."""

    parameter: Parameter
    times: int
    kept_width: int
    width: int


class FSDP2:
    """See the module docstring."""

    #: The flat output of a gathering is there until the next copy-out; the flat input of a reduction until the next.
    keeps_output = True
    keeps_reduced = True
    #: Whether a unit is gathered late in the backward of the one after it.
    late = False

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        """``rank`` changes nothing: the first one, whose shards are never shorter than others', is meant."""
        f = run.fsdp
        self.run = run
        self.kinds = Kinds()
        self.width = parameter_width(run)
        self.compute_width = DTYPE_BYTES[run.compute_dtype]
        #: The same of what trains: adapters may be wider.
        self.trained_width = trained_width(run, self.width)
        self.gradient_width = DTYPE_BYTES[run.adapters_compute_dtype] if run.peft.freezes else self.compute_width
        self.reduce_width = DTYPE_BYTES[f.reduce_dtype] if f.reduce_dtype else self.gradient_width
        self.ranks = f.shard_degree or run.parallel.data_parallel_size
        self.replicated = self.ranks < run.parallel.data_parallel_size
        #: Whole gradients wait for the last microbatch.
        self.waits = accumulates(run) and not run.data_parallel.sync_each_batch
        self.waiting_width = self.reduce_width

    # ---- what is kept ----

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What every rank keeps and moves."""
        run = self.run
        model = model_of(run, chunks[0])
        groups = self.groups(model)
        held = self._kept(model, groups)
        step, name = in_step(run, held)
        # One flat tensor a group (``foreach_reduce``: ``as_strided`` views of the output).
        of_groups = sum(g.gradients for g in groups)
        shards = f"dp{' (of a replica)' * self.replicated}" if self.ranks > 1 else ""
        fresh = self.waits or not accumulates(run)
        amounts = [
            (line, of_groups if i == 1 else n)
            for i, (line, n) in enumerate(amounts_of(run, held, fresh=fresh, shard_name=shards)) if n
        ]
        root = sum(g.whole for g in groups if g.root)
        beside, accumulated = self.passes(model, groups, fresh=fresh), sum(self.accumulated_gradients(model))
        host = offloaded_activations(run, model)
        if run.fsdp.offload_params:
            how = "pinned" if run.fsdp.pin_memory else "pageable"
            host += tuple((f"{line.name} ({how})", n) for line, n in amounts)
            amounts, step = [], 0
            beside = [b._replace(backward=b.backward - b.gradients, backward_at_end=b.backward - b.gradients,
                                 gradients=0) for b in beside]  # fmt: skip
        return StageState(
            model.numel, tuple(amounts), gathered=root, accumulated=accumulated, in_step=step, step_name=name,
            concurrent=(model.engine_bytes(beside),), host=host, building=self._building(model, groups),
            saving=self._saving(model),
        )

    def _building(self, model: Model, groups: Sequence[Group]) -> int | None:
        return None if self.run.fsdp.offload_params else self.wrapping(model, groups, on_gpu=True)

    def wrapping(self, model: Model, groups: Sequence[Group], *, on_gpu: bool) -> int:
        """Peak bytes while units are wrapped: the unit's parameters and its shards, for which its parameters go; the
        root comes last. ``on_gpu``: all parameters are on the GPU before, else each unit is moved there by itself
        (``_fsdp_init.py: _move_states_to_device``)."""
        whole, shards = [0] * len(groups), [0] * len(groups)
        of_place = {place: i for i, g in enumerate(groups) for place in g.places}
        for module in model.modules:
            held, its_shards = self.kinds.of("wrapping", (module,), partial(self._as_modules, module))
            whole[of_place[module.place]] += held
            shards[of_place[module.place]] += its_shards
        allocated = most = sum(whole) if on_gpu else 0
        for of_unit, its_shards in zip(whole, shards, strict=True):
            allocated += 0 if on_gpu else of_unit
            most = max(most, allocated + its_shards)
            allocated += (0 if self.run.fsdp.offload_params else its_shards) - of_unit
        return most

    def _as_modules(self, module: Module) -> tuple[int, int]:
        """Bytes of a module's parameters and of their shards, each a tensor of its own."""
        whole = shards = 0
        for p, times, width, _ in self.gathered_parameters(module):
            whole += times * rounded(prod(p.shape) * width)
            shards += times * rounded(prod(shard(p.shape, self.ranks)) * width)
        return whole, shards

    def _saving(self, model: Model) -> int | None:
        """The largest parameter, gathered whole in its own dtype before it goes to the host (torch ``checkpoint/state_
        dict.py: get_model_state_dict``, as accelerate ``utils/fsdp_utils.py: save_fsdp_model`` asks for it)."""
        if self.run.fsdp.offload_params:
            return None
        each = (self.kinds.of("saving", (module,), partial(self._largest, module)) for module in model.modules)
        return rounded(max(each, default=0) * self.ranks) if self.ranks > 1 else 0

    def _largest(self, module: Module) -> int:
        each = (prod(shard(p.shape, self.ranks)) * width for p, _, width, _ in self.gathered_parameters(module))
        return max(each, default=0)

    def _kept(self, model: Model, groups: Sequence[Group]) -> list[Kept]:
        return kept_of(self.run, model, self.width, self.ranks)

    def groups(self, model: Model) -> list[Group]:
        """The groups of a model, the root last."""
        policy = self.run.fsdp.auto_wrap_policy
        of: dict[object, list[Module]] = {}
        for module in model.modules:
            key: object = "root"
            if policy != "NO_WRAP" and module.label in (Label.LAYER, Label.MTP):
                key = module.place
            elif policy == "torchtitan":
                key = "embedding" if module.label is Label.EMBEDDING else "end"
            of.setdefault(key, []).append(module)
        found = [self._group(modules, root=False) for key, modules in of.items() if key != "root"]
        if "root" in of:
            found.append(self._group(of["root"], root=True))
        return found

    def _group(self, modules: Sequence[Module], *, root: bool) -> Group:
        places = tuple([m.place for m in modules])
        return Group(places, root, *self.kinds.of("group", modules, partial(self._group_bytes, modules)))

    def _group_bytes(self, modules: Sequence[Module]) -> tuple[int, int, int, int, int, int]:
        """The bytes of a ``Group``, in the order of its fields."""
        ranks = self.ranks
        #: Bytes of whole parameters, of gathered shards and of those that are cast; trained elements of a shard.
        whole = shards = cast = trained = 0
        for module in modules:
            for p, times, kept, computed in self.gathered_parameters(module):
                n = prod(shard(p.shape, ranks))
                whole += times * rounded(n * ranks * computed)
                shards += times * n * computed
                cast += times * n * computed * (computed != kept)
            trained += sum(times * prod(shard(p.shape, ranks)) for p, times in module.trained_parameters())
        return (
            whole, rounded(shards * ranks) if ranks > 1 else 0, rounded(cast) if ranks > 1 else 0,
            rounded(trained * ranks * self.reduce_width), rounded(trained * self.reduce_width),
            rounded(trained * self.trained_width),
        )  # fmt: skip

    def gathered_parameters(self, module: Module) -> Iterator[Gathered]:
        """Of ``module``: those that train, then the frozen ones."""
        for p, times in module.trained_parameters():
            yield Gathered(p, times, self.trained_width, self.gradient_width)
        for parameters, times in module.frozen.rows:
            for p in parameters:
                yield Gathered(p, times, self.width, self.compute_width)

    def accumulated_gradients(self, model: Model) -> list[int]:
        """Whole gradients of earlier microbatches at every place, in the dtype in which they will be reduced."""
        sizes = [0] * model.number
        for module in model.modules if self.waits else ():
            sizes[module.place] += self._separate(module, self.waiting_width)
        return sizes

    def _separate(self, module: Module, width: int) -> int:
        """Bytes of a module's gradients, each a tensor of its own."""
        return self.kinds.of(f"separate {width}", (module,), lambda: sum(
            times * rounded(p.numel * width) for p, times in module.trained_parameters()
        ))  # fmt: skip

    # ---- what moves ----

    def passes(self, model: Model, groups: Sequence[Group], *, fresh: bool) -> list[Concurrent]:
        """What is held beside every place, without the root's whole parameters. ``fresh``: gradients are made in this
        backward, and do not lie there from earlier microbatches."""
        forward = self._forward(model, groups)
        backward = _Backward(self, model, groups, fresh=fresh).places()
        return [
            b._replace(forward=f.forward, least_forward=f.least_forward)
            for f, b in zip(forward, backward, strict=True)
        ]

    def reshards(self, group: Group) -> bool:
        """After forward; of the root it does not matter, since backward starts with it."""
        return not group.root and self.run.fsdp.reshard_after_forward is not False

    def _forward(self, model: Model, groups: Sequence[Group]) -> list[Concurrent]:
        """At every place: what is held while it runs, and when its unit is gathered: then the previous output is still
        alive, which a variable holds to the end of the copy (``wait_for_unshard: prev_all_gather_state``)."""
        unit_of = units_by_place(groups)
        root = next((g for g in groups if g.root), None)
        of_root, last_output = (root.places, root.output) if root is not None else ((), 0)
        if not self.keeps_output:
            last_output = 0
        whole = 0
        gathered: set[Places] = set()
        found = []
        for place in range(model.number):
            unit, gathering = unit_of.get(place), 0
            if unit is not None and unit.places not in gathered:
                gathered.add(unit.places)
                if self.keeps_output:
                    gathering = whole + last_output + unit.output + max(unit.whole, unit.cast)
                    gathering += hidden_bytes(self.run)
                    last_output = unit.output
                whole += unit.whole
            loss_outside = place == model.places.loss and place not in of_root
            running = whole + (0 if loss_outside else last_output)
            if self.run.fsdp.forward_prefetch and unit is not None:
                running += self._gathered_ahead(groups, unit)
            found.append(Concurrent(running, least_forward=gathering))
            if unit is not None and place == unit.places[-1] and self.reshards(unit):
                whole -= unit.whole
        return found

    def _gathered_ahead(self, groups: Sequence[Group], unit: Group) -> int:
        """What of the unit after ``unit`` is held while that runs forward."""
        following = groups[groups.index(unit) + 1 :][:1]
        return sum(g.output if self.keeps_output else g.whole for g in following if not g.root)

    def whole_gradients(self, model: Model) -> list[int]:
        """Of every place, as autograd makes them."""
        sizes = [0] * model.number
        for module in model.modules:
            sizes[module.place] += self._separate(module, self.gradient_width)
        return sizes

    def all_reduced(self, group: Group) -> int:
        """With replicas the output of a reduce-scatter in another dtype than the parameters' stays until backward ends
        (``FSDPParamGroup._all_reduce_state``)."""
        return group.reduced_shard if self.replicated and self.reduce_width != self.trained_width else 0


def units_by_place(groups: Sequence[Group]) -> dict[int, Group]:
    """Place -> its unit, for places of units."""
    return {place: g for g in groups if not g.root for place in g.places}


class _Backward:
    """Backward from the last place to the first, and what the engine holds beside each, in bytes.

    Before a unit's first place it is gathered, or was gathered ahead; after its last one its parameters go and its
    gradients are reduced. The root, and an embedding that is a separate unit, are reduced at the end of backward.
    """

    def __init__(self, engine: FSDP2, model: Model, groups: Sequence[Group], *, fresh: bool) -> None:
        self.engine, self.groups, self.fresh = engine, groups, fresh
        self.unit_of = units_by_place(groups)
        units = [g for g in groups if not g.root]
        self.previous = dict(zip((g.places for g in units), [None, *units], strict=False))
        self.input_gradient = hidden_bytes(engine.run)
        #: Whole gradients of each place: of this microbatch, and the sum of earlier ones.
        self.own, self.accumulated = engine.whole_gradients(model), engine.accumulated_gradients(model)
        #: Units that keep their parameters from forward on.
        self.resident = bool(units) and not engine.reshards(units[0])
        self.parameters = sum(g.whole for g in units) if self.resident else 0
        #: Of the unit before, gathered ahead; the root's first hook gathers the last unit.
        has_root = len(units) < len(groups)
        self.ahead = units[-1].output if has_root and units and not self.resident else 0
        self.gathered: set[Places] = set()
        #: Input of the last reduction, which the engine may keep until the next.
        self.reduced = 0
        #: This rank's shards of reduced gradients.
        self.shards = 0
        #: Whole gradients of this microbatch that are not reduced yet.
        self.unreduced = 0
        #: Outputs of reduce-scatters that wait for their all-reduce.
        self.unreplicated = 0
        #: Sums of earlier microbatches that are reduced by now, and freed.
        self.freed = 0

    def places(self) -> list[Concurrent]:
        """Of every place, the first one first."""
        found = [self._at(place) for place in reversed(range(len(self.own)))]
        found.reverse()
        least, freed = self._last_reductions()
        found[0] = found[0]._replace(least_backward=least, freed_at_least=freed)
        return found

    def _at(self, place: int) -> Concurrent:
        """Beside ``place``; moves on past it."""
        unit = self.unit_of.get(place)
        copied_out = 0 if unit is None or unit.places in self.gathered else self._gather(unit)
        beside = self._running(copied_out)
        self.unreduced += self.own[place]
        late = 0
        if unit is not None and self.engine.late:
            running = beside.backward - self.ahead
            # The unit before is found while the first norm runs backward, beside what that makes in fp32.
            previous = self.previous[unit.places]
            self.ahead = previous.whole if previous is not None and not self.resident else 0
            late = running + self.ahead + NORM_BACKWARD * self.input_gradient
            beside = beside._replace(backward=running)
        if unit is not None and place == unit.places[0] and place:
            self.parameters -= unit.whole
            reducing = self.parameters + self.ahead + self._reducing(unit) + self.input_gradient
            beside = beside._replace(least_backward=max(reducing, late), freed_at_least=self.freed)
            self._reduce(unit)
            self.reduced = unit.reduced if self.engine.keeps_reduced else 0
            self.unreplicated += self.engine.all_reduced(unit)
        return beside._replace(backward_at_end=beside.backward)

    def _gather(self, unit: Group) -> int:
        """Make ``unit`` whole and gather the unit before it ahead. Returns what its copy-out takes beside all that
        there is while it runs: 0 where the next output is no smaller."""
        self.gathered.add(unit.places)
        if self.resident:
            return 0
        previous, output = self.previous[unit.places], self.ahead
        self.parameters += unit.whole
        self.ahead = previous.output if previous is not None else 0
        return output - self.ahead + self.input_gradient if self.engine.keeps_output and output > self.ahead else 0

    def _running(self, copied_out: int) -> Concurrent:
        """While a place runs."""
        parameters, shards = self.parameters + self.ahead, self._fresh_shards()
        held = parameters + self.reduced + shards + self._waiting() + self.unreplicated - self.freed
        entering = held + copied_out if copied_out else 0
        if self.engine.waits and self.engine.run.num_microbatches > 2 and held < parameters:
            # One that is reduced neither now nor before.
            return Concurrent(backward=parameters, entering_backward=entering)
        return Concurrent(backward=held, gradients=shards, freed=self.freed, entering_backward=entering)

    def _reducing(self, group: Group) -> int:
        """Gradients while those of ``group`` are reduced."""
        reduction = group.reduced + group.reduced_shard
        return reduction + self._fresh_shards() + self._waiting() + self.unreplicated - self.freed

    def _reduce(self, group: Group) -> None:
        self.shards += group.gradients
        self.unreduced -= sum(self.own[place] for place in group.places)
        self.freed += sum(self.accumulated[place] for place in group.places)

    def _last_reductions(self) -> tuple[int, int]:
        """The most allocated while the remaining gradients are reduced after backward, and what that frees."""
        most = freed = 0
        for group in self.groups:
            if not group.root and 0 not in group.places:
                continue
            if not group.root:
                self.parameters -= group.whole
            # The root's parameters, which are counted apart, are gone.
            held = self.parameters + self._reducing(group) - (group.whole if group.root else 0)
            if held > most:
                most, freed = held, self.freed
            self._reduce(group)
        return most, freed

    def _fresh_shards(self) -> int:
        return self.shards if self.fresh else 0

    def _waiting(self) -> int:
        """Whole gradients of this microbatch, where they are not counted among those of all microbatches."""
        return 0 if self.engine.waits else self.unreduced


ENGINE = FSDP2
