"""FSDP2 and a single GPU under torch's own modules, storage by storage.

FSDP2's own storages by stream (torch 2.13 ``distributed/fsdp/_fully_shard/``):

* all-gather: a unit's shards cast to ``param_dtype`` and the flat output (``_fsdp_collectives.py:
  foreach_all_gather``).
* compute: its unsharded parameters (``foreach_all_gather_copy_out``), its unsharded gradients, the flat input of their
  reduction (``foreach_reduce``).
* reduce-scatter: the reduction's output, cast to the parameters' dtype, of which gradients are views until the next
  step.

All steps are alike; reserved memory settles after the second, when optimizer states have their final place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from math import prod

from bridge_memory.components import Role
from bridge_memory.engines.fsdp2 import FSDP2, Group
from bridge_memory.engines.torch_modules import Model, Module, model_of, shard
from bridge_memory.engines.torch_optimizers import step_bytes, torch_states
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.inventory.torch.blocks import embedding_block, final_norm_block, layer_block, output_block
from bridge_memory.inventory.torch.chain import mask_bytes
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.tapes.allocation_trace import Passes, Storages, tape_of
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.parameters import Use
from bridge_memory.workspaces.caching_allocator import Call, Calls, Trace

#: Training steps that are replayed; after the second, more memory is reserved only by chance.
STEPS = 4
#: Options of transformers' modules that tapes of blocks or this module support; a run with any other is refused.
_FOLLOWED = frozenset({
    "attn_implementation", "attention_mask", "sdpa_kernel", "gradient_checkpointing", "checkpoint_submodules",
    "use_reentrant", "liger_kernel", "selective_ac_option", "torch_compile", "compile_loss", "num_output_chunks",
    "cut_cross_entropy", "experts_implementation", "transformers_version", "use_cache",
})  # fmt: skip
COMPUTE, ALL_GATHER, REDUCE_SCATTER = "compute", "all-gather", "reduce-scatter"


def why_not(run: RunSpec) -> str | None:
    """Why a run cannot be replayed, in one line; None if it can."""
    t, f = run.transformers, run.fsdp
    engine = run.data_parallel.engine
    if engine not in ("fsdp2", "single"):
        return f"reserved memory of engine {engine} is not replayed"
    asked = {
        "layers other than transformers' and torchtitan's": not run.implementation.torch_layers,
        "more than one microbatch a step": run.num_microbatches > 1,
        "encoders": bool(run.model.encoders),
        "adapters": run.peft.trains_adapters or run.peft.freezes,
        "reentrant checkpoints": t.gradient_checkpointing and t.reentrant,
        "checkpoints of every nth layer": t.selective_ac_option not in (None, "op"),
        "offloading": f.offload_params,
        "an optimizer that is not torch's": run.optimizer.optimizer not in ("adam", "adamw", "sgd")
        or run.optimizer.paged,
    }  # fmt: skip
    if engine == "fsdp2":
        asked |= {
            "replicas of shards": (f.shard_degree or run.parallel.data_parallel_size) < run.parallel.data_parallel_size,
            "forward prefetching": f.forward_prefetch,
            "a shared embedding that torchtitan's policy wraps twice": run.model.share_embeddings_and_output_weights
            and f.auto_wrap_policy == "torchtitan",
        }
    plain = TransformersSpec()
    other = [field.name for field in fields(t) if field.name not in _FOLLOWED]
    asked |= {name: getattr(t, name) != getattr(plain, name) for name in other}
    missing = [name for name, given in asked.items() if given]
    return f"reserved memory with {', '.join(missing)} is not replayed" if missing else None


def trace_of(run: RunSpec) -> Trace:
    """What training asks the allocator for, with the whole model, on the rank with the largest shards. Raises SpecError
    for what the estimate refuses; ``why_not`` says what cannot be replayed."""
    assert why_not(run) is None, why_not(run)
    job = _Job(run)
    first = [*job.start(), *job.step(1)]
    before = job.storages.made
    return Trace(first, job.step(2), job.storages.made - before, STEPS - 2)


class _Job:
    """A training job, storage by storage."""

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self._calls = Calls(stream=COMPUTE)
        self.storages = Storages(self._calls.report, self._calls.play)
        self.parts = stage_parts(run, 0)
        ctx = context_of(run)
        shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
        self.model: Model = model_of(run, chunk_units(run.model, shape, ctx))
        self.blocks = self._blocks()
        #: Bytes of the attention masks that all layers share; checkpoints hold them until the end of backward.
        self.masks = mask_bytes(run.model, ctx)
        t = run.transformers
        self.holds_masks = t.gradient_checkpointing or t.selective_ac_option is not None
        fsdp2 = run.data_parallel.engine == "fsdp2"
        self.engine = FSDP2(run) if fsdp2 else None
        self.groups: list[Group] = self.engine.groups(self.model) if self.engine else []
        self.at = {place: g for g in self.groups for place in g.places}
        self.width = DTYPE_BYTES[run.params_dtype]
        self.compute_width = DTYPE_BYTES[run.compute_dtype]
        self.ranks = self.engine.ranks if self.engine else 1
        self.gradient_width = self.compute_width if self.engine else self.width
        self.modules: dict[int, list[Module]] = {}
        for module in self.model.modules:
            self.modules.setdefault(module.place, []).append(module)
        #: By the group's places: gathered parameters, and gradients made so far; and gradients that wait for the step.
        self.whole: dict[tuple[int, ...], list[int]] = {}
        self.made: dict[tuple[int, ...], list[int]] = {}
        self.waiting: list[int] = []
        self.gathered: tuple[tuple[int, ...], int] | None = None
        self.reducing: int | None = None

    def _make(self, nbytes: int, stream: str = COMPUTE) -> int:
        self._calls.stream = stream
        number = self.storages.make(nbytes)
        self._calls.stream = COMPUTE
        return number

    # ---- the model ----

    def _blocks(self) -> list[Passes]:
        """The passes of the block at every place."""
        run, t = self.run, self.run.transformers
        model = run.model
        ctx = context_of(run)
        again, keeps = t.gradient_checkpointing or t.selective_ac_option == "op", t.selective_ac_option == "op"
        known: dict[object, Passes] = {}

        def passes(key: object, block: Callable[..., object], *, again: bool = False) -> Passes:
            if key not in known:
                known[key] = Passes(tape_of(ctx, block), self.storages, recompute=again, keeps=keeps)
            return known[key]

        out = [passes(Label.EMBEDDING, lambda c: embedding_block(model, c))]
        for kind in model.layers:
            out.append(passes(kind, lambda c, kind=kind: layer_block(kind, c), again=again))
        out.append(passes(Label.FINAL_NORM, lambda c: final_norm_block(c)))
        own = not model.share_embeddings_and_output_weights
        out.append(passes(Label.LOSS, lambda c: output_block(model.output_bias, own, c)))
        return out

    # ---- training ----

    def start(self) -> list[Call]:
        """The shards and the first step: the model is constructed on the meta device and then sharded."""
        last = len(self.blocks) - 1  # the first has no input, the last no gradient of its output
        self._calls.check(sum(block.calls(place > 0, place < last) for place, block in enumerate(self.blocks)))
        for module in self.model.modules:
            for p, times in module.parameters():
                for _ in range(times):
                    self._make(prod(shard(p.shape, self.ranks)) * self.width)
        for component in self.parts.persistent:
            if component.role is Role.BUFFERS:
                self._make(component.bytes)
        return self.step(0)

    def step(self, number: int) -> list[Call]:
        """A step; all but the first, 0, ask for the same."""
        batch = self._make(self.parts.batch)
        self.storages.drop_all(self.waiting)
        self.waiting = []
        self._passes()
        self.storages.drop(batch)
        self._update(first=number == 0)
        return self._calls.taken()

    def _passes(self) -> None:
        back = []
        masks = self._make(self.masks)
        last: int | None = None
        x: int | None = None
        for place, block in enumerate(self.blocks):
            group = self.at.get(place)
            if place == 0:
                last = self._enter_root(last)
            if group is not None and not group.root and place == group.places[0]:
                last = self._enter(group, last)
            at_loss = place == len(self.blocks) - 1
            if at_loss and last is not None and not (group is not None and group.root):
                self.storages.drop(last)
                last = None
            out, its_back = block.forward(x)
            back.append(its_back)
            if x is not None:
                self.storages.drop(x)
            x = out
            if group is not None and place == group.places[-1] and self._reshards(group):
                self.storages.drop_all(self.whole.pop(group.places))
        if last is not None:
            self.storages.drop(last)
        if not self.holds_masks:
            self.storages.drop(masks)
        units = [g for g in self.groups if not g.root]
        if len(units) < len(self.groups) and units and units[-1].places not in self.whole:
            # The root's first hook gathers the last unit ahead.
            self.gathered = units[-1].places, self._gather(units[-1])
        gradient: int | None = None
        for place in reversed(range(len(self.blocks))):
            group = self.at.get(place)
            if group is not None and not group.root and group.places not in self.whole:
                self._enter_backward(group)
            found = back.pop()(gradient)
            if x is not None and place == len(self.blocks) - 1:
                self.storages.drop(x)
            gradient = found.pop(0, None)
            self._keep_gradients(place, list(found.values()))
            if group is not None and not group.root and place == group.places[0]:
                self._reduce(group)
        if gradient is not None:
            self.storages.drop(gradient)
        for group in self.groups:
            if group.root:
                self._reduce(group)
        if self.reducing is not None:
            self.storages.drop(self.reducing)
            self.reducing = None
        if self.holds_masks:
            self.storages.drop(masks)

    def _keep_gradients(self, place: int, given: list[int]) -> None:
        """Keep the gradients that the block's tape reported (one for each matrix), and allocate those of its other
        parameters."""
        group = self.at.get(place)
        made = self.made.setdefault(group.places, []) if group is not None else self.waiting
        made += given
        if place == 0 and self.run.model.share_embeddings_and_output_weights:
            # Added to the output layer's gradient, in a third tensor (``inventory/shared_weights.py``).
            dense = max(made, key=self.storages.size)
            own = self._make(self.storages.size(dense))
            made[made.index(dense)] = self._make(self.storages.size(dense))
            self.storages.drop_all((dense, own))
            return
        reported = Counter(map(self.storages.size, given))
        for module in self.modules.get(place, ()):
            for p, times in module.trained_parameters():
                for _ in range(times):
                    nbytes = p.numel * self.gradient_width
                    if reported[nbytes]:
                        reported[nbytes] -= 1
                    else:
                        made.append(self._make(nbytes))

    # ---- FSDP2 ----

    def _reshards(self, group: Group) -> bool:
        assert self.engine is not None
        return self.engine.reshards(group)

    def _gather(self, group: Group) -> int:
        """The storage of the flat output of a unit's all-gather."""
        cast = self._make(group.cast, ALL_GATHER)
        output = self._make(group.output, ALL_GATHER)
        self.storages.drop(cast)
        return output

    def _copy_out(self, group: Group) -> None:
        self.whole[group.places] = [
            self._make(prod(shard(p.shape, self.ranks)) * self.ranks * self.compute_width)
            for place in group.places for module in self.modules.get(place, ())
            for p, times in module.parameters() for _ in range(times)
        ]  # fmt: skip

    def _enter_root(self, last: int | None) -> int | None:
        for group in self.groups:
            if group.root:
                last = self._enter(group, last)
        return last

    def _enter(self, group: Group, last: int | None) -> int:
        """Gather a unit in forward; the previous flat output is freed after this unit's copy-out."""
        output = self._gather(group)
        self._copy_out(group)
        if last is not None:
            self.storages.drop(last)
        return output

    def _enter_backward(self, group: Group) -> None:
        """Gather a unit in backward, unless it was gathered ahead; then gather the unit before it ahead."""
        ahead = self.gathered
        output = ahead[1] if ahead is not None and ahead[0] == group.places else self._gather(group)
        self._copy_out(group)
        self.storages.drop(output)
        units = [g for g in self.groups if not g.root]
        number = units.index(group)
        self.gathered = None
        if number and units[number - 1].places not in self.whole:
            self.gathered = units[number - 1].places, self._gather(units[number - 1])

    def _reduce(self, group: Group) -> None:
        """``FSDPParamGroup.post_backward``: frees parameters, then the input of the last reduction, then gradients once
        they are copied into the input of this one."""
        self.storages.drop_all(self.whole.pop(group.places, ()))
        if self.reducing is not None:
            self.storages.drop(self.reducing)
        self.reducing = self._make(group.reduced)
        self.storages.drop_all(self.made.pop(group.places, ()))
        output = self._make(group.reduced_shard, REDUCE_SCATTER)
        if self.engine is not None and self.engine.reduce_width != self.width:
            # Cast to the parameters' dtype, on the same stream (``_to_dtype_if_needed``).
            cast = self._make(group.gradients, REDUCE_SCATTER)
            self.storages.drop(output)
            output = cast
        self.waiting.append(output)

    # ---- the optimizer ----

    def _update(self, *, first: bool) -> None:
        states = torch_states(self.run)
        made = step_bytes(self.run)
        roots: list[int] = []
        sizes = []
        for module in self.model.modules:
            for p, times in module.trained_parameters():
                shape = shard(p.shape, self.ranks)
                each = [s.nbytes(shape, self.width, p.use is Use.EMBEDDING) for s in states]
                sizes += [each] * times
        if first:
            for each in sizes:
                for nbytes in each:
                    self._make(nbytes)
        for each in sizes:
            roots += [self._make(each[-1]) for _ in range(made.together if each else 0)]
        self.storages.drop_all(roots)
