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
from math import prod
from typing import NamedTuple

from bridge_memory.engines.engine import StageState
from bridge_memory.engines.torch_modules import (
    Kept,
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


class Group(NamedTuple):
    """Parameters that are gathered and reduced together, in bytes on one rank."""

    #: Of its modules, in the order of the model.
    places: tuple[int, ...]
    root: bool
    #: Whole parameters, each a tensor of its own, the flat output of their all-gather, and its input where it is cast.
    whole: int
    output: int
    cast: int
    #: Flat input and output of the reduction of its gradients, and these gradients as they are kept.
    reduced: int
    reduced_shard: int
    gradients: int


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
        beside, accumulated = self.passes(model, groups, fresh=fresh), sum(self._accumulated_of(model))
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
        """The model whole, and unit by unit its shards, for which the unit's parameters go; the root comes last."""
        if self.run.fsdp.offload_params:
            return None
        whole, shards = [0] * len(groups), [0] * len(groups)
        of_place = {place: i for i, g in enumerate(groups) for place in g.places}
        for module in model.modules:
            for p, times, width, _ in self._wide(module):
                whole[of_place[module.place]] += times * rounded(prod(p.shape) * width)
                shards[of_place[module.place]] += times * rounded(prod(shard(p.shape, self.ranks)) * width)
        there = most = sum(whole)
        for unit, parts in zip(whole, shards, strict=True):
            most = max(most, there + parts)
            there += parts - unit
        return most

    def _saving(self, model: Model) -> int | None:
        """The largest parameter, gathered whole in its own dtype before it goes to the host (torch ``checkpoint/state_
        dict.py: get_model_state_dict``, as accelerate ``utils/fsdp_utils.py: save_fsdp_model`` asks for it)."""
        if self.run.fsdp.offload_params:
            return None
        each = (prod(shard(p.shape, self.ranks)) * width for m in model.modules for p, _, width, _ in self._wide(m))
        return rounded(max(each, default=0) * self.ranks) if self.ranks > 1 else 0

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
        ranks = self.ranks
        whole = shards = cast = trained = 0
        for module in modules:
            for p, times, kept, computed in self._wide(module):
                n = prod(shard(p.shape, ranks))
                whole += times * rounded(n * ranks * computed)
                shards += times * n * computed
                cast += times * n * computed * (computed != kept)
            trained += sum(times * prod(shard(p.shape, ranks)) for p, times in module.trained_parameters())
        return Group(
            tuple(m.place for m in modules), root, whole, rounded(shards * ranks) if ranks > 1 else 0,
            rounded(cast) if ranks > 1 else 0,
            rounded(trained * ranks * self.reduce_width), rounded(trained * self.reduce_width),
            rounded(trained * self.trained_width),
        )

    def _wide(self, module: Module) -> Iterator[tuple[Parameter, int, int, int]]:
        """(parameter, how many of them, bytes of an element as it is kept, and as it is gathered). A gathering of
        several dtypes is one of bytes (``_get_param_all_gather_inputs``)."""
        for p, times in module.trained_parameters():
            yield p, times, self.trained_width, self.gradient_width
        for parameters, times in module.frozen.rows:
            for p in parameters:
                yield p, times, self.width, self.compute_width

    def _accumulated_of(self, model: Model) -> list[int]:
        """Whole gradients of earlier microbatches at every place, in the dtype in which they will be reduced."""
        sizes = [0] * model.number
        for module in model.modules if self.waits else ():
            sizes[module.place] += sum(
                times * rounded(p.numel * self.waiting_width) for p, times in module.trained_parameters()
            )
        return sizes

    # ---- what moves ----

    def passes(self, model: Model, groups: Sequence[Group], *, fresh: bool) -> list[Concurrent]:
        """What is there beside every place, without the root's whole parameters."""
        forward, entering = self._forward(model, groups)
        backward, gradients, reducing, gone, gone_then, begins = self._backward(model, groups, fresh=fresh)
        return [
            Concurrent(f, b, b, least, g, there, then, first, back)
            for f, b, least, g, there, then, first, back in zip(
                forward, backward, reducing, gradients, gone, gone_then, entering, begins, strict=True
            )
        ]

    def _resharded(self, group: Group) -> bool:
        """After forward; of the root it does not matter, since backward starts with it."""
        return not group.root and self.run.fsdp.reshard_after_forward is not False

    def _forward(self, model: Model, groups: Sequence[Group]) -> tuple[list[int], list[int]]:
        """At every place: what is there while it runs, and when its unit is gathered: then the output before is still
        there, which a variable holds to the end of the copy (``wait_for_unshard: prev_all_gather_state``)."""
        at = {place: g for g in groups for place in g.places}
        whole = 0
        last = next((g.output for g in groups if g.root), 0) if self.keeps_output else 0
        entered: set[int] = set()
        found = []
        entering = [0] * model.number
        for place in range(model.number):
            group = at.get(place)
            if group is not None and not group.root and group.places[0] not in entered:
                entered.add(group.places[0])
                if self.keeps_output:
                    gathered = whole + last + group.output + max(group.whole, group.cast)
                    entering[place] = gathered + hidden_bytes(self.run)
                whole, last = whole + group.whole, group.output if self.keeps_output else 0
            loss_outside = place == model.places.loss and (group is None or not group.root)
            found.append(whole + (0 if loss_outside else last))
            if self.run.fsdp.forward_prefetch and group is not None and not group.root:
                found[place] += self._gathered_ahead(groups, group)
            if group is not None and place == group.places[-1] and self._resharded(group):
                whole -= group.whole
        return found, entering

    def _gathered_ahead(self, groups: Sequence[Group], group: Group) -> int:
        """What of the unit after ``group`` is there while that runs forward."""
        following = groups[groups.index(group) + 1 :][:1]
        return sum(g.output if self.keeps_output else g.whole for g in following if not g.root)

    def _backward(
        self, model: Model, groups: Sequence[Group], *, fresh: bool
    ) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int]]:
        """At every place: (everything, of it the gradients that the step waits for, everything while its unit's
        gradients are reduced, whole gradients of earlier microbatches that are gone at the one and at the other,
        everything while its unit's parameters are copied out of what gathered them)."""
        at = {place: g for g in groups for place in g.places}
        units = [g for g in groups if not g.root]
        stays = bool(units) and not self._resharded(units[0])
        whole = sum(g.whole for g in units) if stays else 0
        before = {g.places: earlier for earlier, g in zip([None, *units], units, strict=False)}
        root = next((g for g in groups if g.root), None)
        # The root's first hook gathers the last unit ahead.
        ahead = units[-1].output if root is not None and units and not stays else 0
        sizes = self._whole_gradients(model)
        reduced = made = waiting = replicated = gone = 0
        of_groups = self._accumulated_of(model)
        entered: set[tuple[int, ...]] = set()
        backward, gradients, reducing = [0] * model.number, [0] * model.number, [0] * model.number
        begins = [0] * model.number
        gone_at, gone_then = [0] * model.number, [0] * model.number
        input_gradient = hidden_bytes(self.run)
        for place in reversed(range(model.number)):
            group = at.get(place)
            if group is not None and not group.root and group.places not in entered:
                entered.add(group.places)
                if not stays:
                    earlier = before[group.places]
                    whole, gathered, ahead = whole + group.whole, ahead, earlier.output if earlier is not None else 0
                    if self.keeps_output and gathered > ahead:
                        begins[place] = gathered - ahead + input_gradient
            waits = 0 if self.waits else waiting
            backward[place] = whole + ahead + reduced + made * fresh + waits + replicated - gone
            begins[place] += backward[place] if begins[place] else 0
            gradients[place], gone_at[place] = made * fresh, gone
            if self.waits and self.run.num_microbatches > 2 and backward[place] < whole + ahead:
                # One that is reduced neither now nor before.
                backward[place], gradients[place], gone_at[place] = whole + ahead, 0, 0
            waiting += sizes[place]
            if self.late and group is not None and not group.root:
                # Found while its first norm runs backward, beside what that makes in fp32.
                earlier = before[group.places]
                backward[place] -= ahead
                gathered = earlier.whole if earlier is not None and not stays else 0
                late = backward[place] + gathered + NORM_BACKWARD * input_gradient
                ahead = gathered
            else:
                late = 0
            if group is not None and not group.root and place == group.places[0] and place:
                whole -= group.whole
                waits = 0 if self.waits else waiting
                reducing[place] = (
                    whole + ahead + waits + group.reduced + group.reduced_shard + made * fresh + replicated
                    + input_gradient - gone
                )
                reducing[place] = max(reducing[place], late)
                gone_then[place] = gone
                gone += sum(of_groups[p] for p in group.places)
                waiting -= sum(sizes[p] for p in group.places)
                reduced, made = group.reduced if self.keeps_reduced else 0, made + group.gradients
                replicated += self._all_reduced(group)
        # What is left is reduced in the end: the root, and an embedding of its own.
        left = [g for g in groups if g.root or 0 in g.places]
        most = 0
        for group in left:
            freed = group.whole
            whole -= 0 if group.root else freed
            parts = whole + group.reduced + group.reduced_shard + made * fresh + (0 if self.waits else waiting) - gone
            parts += replicated - (freed if group.root else 0)
            if parts > most:
                most, gone_then[0] = parts, gone
            made += group.gradients
            waiting -= sum(sizes[p] for p in group.places)
            gone += sum(of_groups[p] for p in group.places)
        reducing[0] = most
        return backward, gradients, reducing, gone_at, gone_then, begins

    def _whole_gradients(self, model: Model) -> list[int]:
        """Of every place, as autograd makes them."""
        sizes = [0] * model.number
        for module in model.modules:
            nbytes = sum(times * rounded(p.numel * self.gradient_width) for p, times in module.trained_parameters())
            sizes[module.place] += nbytes
        return sizes

    def _all_reduced(self, group: Group) -> int:
        """With replicas the output of a reduce-scatter in another dtype than the parameters' stays until backward ends
        (``FSDPParamGroup._all_reduce_state``)."""
        return group.reduced_shard if self.replicated and self.reduce_width != self.trained_width else 0


ENGINE = FSDP2
