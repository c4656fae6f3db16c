"""FSDP1 (``FullyShardedDataParallel``): the parameters of a unit are one flat tensor, of which every rank keeps a shard
in the parameters' dtype, with the shard's gradient and optimizer states.

A unit's gathered flat parameter is alive in ``param_dtype`` while the unit runs, the root's from forward to the end of
backward; with ``BACKWARD_PRE`` the unit before is gathered ahead in backward. Autograd concatenates the gradients of a
unit's parameters in a new flat gradient, which is cast to ``reduce_dtype``, padded if necessary, and reduced.

Adapters are separate units, as the Trainer wraps them (peft ``utils/other.py: fsdp_auto_wrap_policy``). The layer
before is then gathered with a layer's first adapter, late in its backward.

Source: torch 2.13 ``distributed/fsdp/_flat_param.py: FlatParamHandle._init_flat_param_and_metadata, unshard,
_alloc_padded_unsharded_flat_param``, ``_runtime_utils.py: _pre_forward, _post_forward_reshard, _pre_backward_hook,
_post_backward_hook, _reduce_grad, _should_free_in_backward``, ``_limiter_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from bridge_memory.engines.fsdp2 import FSDP2, Group
from bridge_memory.engines.torch_modules import Kept, Model, Module, broadcast_buffers, rounded
from bridge_memory.engines.torch_optimizers import torch_states
from bridge_memory.spec import RunSpec

#: Bytes to which parameters of a flat tensor are aligned with ``use_orig_params`` (``_flat_param.py:
#: _get_aligned_numel``).
ALIGNMENT = 16


class Flat(NamedTuple):
    """The flat tensor of one unit."""

    #: Elements of a rank's shard.
    shard: int
    #: Bytes per element of the shard, and of the gathered tensor.
    width: int
    computed: int
    trains: bool
    #: Bytes of the tensors from which it is made.
    tensors: int


class FSDP1(FSDP2):
    """See the module docstring."""

    #: Parameters are gathered in place: there is no separate flat output.
    keeps_output = False
    #: The input of a reduction is freed with it.
    keeps_reduced = False

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        super().__init__(run, rank=rank)
        self.strategy = run.fsdp.sharding_strategy
        if self.strategy == "NO_SHARD":
            self.ranks = 1
        #: Gradients of microbatches that are not reduced stay in the compute dtype.
        self.waiting_width = self.gradient_width
        #: The layer before is gathered only when a layer's first adapter runs backward.
        self.late = run.peft.freezes and self.strategy != "NO_SHARD" and run.fsdp.backward_prefetch != "NO_PREFETCH"

    def reshards(self, group: Group) -> bool:
        """Whether a unit is freed after forward; with NO_SHARD that is its copy in ``param_dtype`` (``_flat_param.py:
        FlatParamHandle.post_reshard``)."""
        copied = self.strategy == "NO_SHARD" and self.compute_width != self.width
        return not group.root and (copied or self.strategy in ("FULL_SHARD", "HYBRID_SHARD"))

    @property
    def _prefetches(self) -> bool:
        return self.run.fsdp.backward_prefetch == "BACKWARD_PRE"

    def units(self, modules: Sequence[Module]) -> list[Flat]:
        """The flat tensors of a group's modules: one of all parameters; with adapters, one of the frozen parameters and
        then one for each parameter of an adapter."""
        return self.kinds.of("units", modules, lambda: self._units(modules))

    def _units(self, modules: Sequence[Module]) -> list[Flat]:
        run, flats, numel, tensors = self.run, list[Flat](), 0, 0
        align = ALIGNMENT // self.width if run.fsdp.use_orig_params else 1
        for module in modules:
            trained = {id(p) for p, _ in module.trained_parameters()}
            for p, times, width, computed in self.gathered_parameters(module):
                if run.peft.freezes and id(p) in trained:
                    own = rounded(p.numel * width)
                    flats += [Flat(-(-p.numel // self.ranks), width, computed, True, own)] * times
                else:
                    tensors += times * rounded(p.numel * width)
                    numel += times * (-(-p.numel // align) * align)
        if numel:
            shard = -(-numel // self.ranks)
            one = Flat(shard, self.width, self.compute_width, not run.peft.freezes, tensors)
            flats.insert(0, one)
        return flats

    def whole_bytes(self, flat: Flat) -> int:
        """Bytes of a gathered flat tensor; 0 if the shard itself is used."""
        gathers = self.ranks > 1 or flat.computed != flat.width
        return rounded(flat.shard * self.ranks * flat.computed) if gathers else 0

    def _group_bytes(self, modules: Sequence[Module]) -> tuple[int, int, int, int, int, int]:
        flats = self.units(modules)
        frozen = [flat for flat in flats if not flat.trains]
        trained = [flat for flat in flats if flat.trains]
        full = sum(map(self.whole_bytes, frozen)) + max(map(self.whole_bytes, trained), default=0)
        casts = [rounded(flat.shard * flat.computed) for flat in flats if flat.computed != flat.width]
        return (
            full, full if self._prefetches else 0, max(casts, default=0), max(map(self._reduced, trained), default=0),
            0, sum(rounded(f.shard * f.width) for f in trained),
        )  # fmt: skip

    def _reduced(self, flat: Flat) -> int:
        """Bytes of a reduction: first the flat gradient, made from the separate gradients while the gathered parameters
        are alive; then the flat gradient, its cast, and the reduced shard; with NO_SHARD, what it is cast back to
        instead of a shard (``_runtime_utils.py: _reduce_grad_no_shard``)."""
        whole = flat.shard * self.ranks
        cast = rounded(whole * self.reduce_width) if self.reduce_width != flat.computed else 0
        part = rounded(flat.shard * self.reduce_width)
        if self.strategy == "NO_SHARD":
            part = rounded(whole * flat.width) if flat.width != self.reduce_width else 0
            # And the sum with gradients of earlier microbatches.
            part += rounded(whole * flat.computed) if self.waits else 0
        return max(rounded(whole * flat.computed) + self.whole_bytes(flat), cast + part)

    def wrapping(self, model: Model, groups: Sequence[Group], *, on_gpu: bool) -> int:
        """Peak bytes while units are wrapped, inner units first: the unit's flat tensor, and the copy of this rank's
        shard, before the unit's tensors are freed (``FlatParamHandle.flatten_tensors_into_flat_param, shard``).

        ``on_gpu``: all parameters are on the GPU before, else each unit is moved there by itself, and there receives
        the first rank's parameters (``_init_utils.py: _move_module_to_device, _sync_module_parameters``)."""
        allocated = most = sum(
            self.kinds.of("wrapping", (module,), partial(self._as_modules, module))[0] for module in model.modules
        ) if on_gpu else 0
        for modules in self.of_groups(model, groups):
            flats = list(reversed(self.units(modules)))
            if not on_gpu:
                allocated += sum(flat.tensors for flat in flats)
                sizes = [n for m in modules for p, times, w, _ in self.gathered_parameters(m)
                         for n in [p.numel * w] * times]  # fmt: skip
                most = max(most, allocated + broadcast_buffers(sizes))
            for flat in flats:
                shard, whole = rounded(flat.shard * flat.width), rounded(flat.shard * self.ranks * flat.width)
                copied = shard if self.strategy != "NO_SHARD" else 0
                most = max(most, allocated + whole + copied)
                allocated += (0 if self.run.fsdp.offload_params else shard) - flat.tensors
        return most

    def _saving(self, model: Model) -> int | None:
        """On rank 0: the largest unit, gathered in the parameters' dtype before it is copied to the host (torch
        ``_state_dict_utils.py: _full_pre_state_dict_hook``, with ``offload_to_cpu`` and ``rank0_only``, which
        accelerate ``utils/dataclasses.py: FullyShardedDataParallelPlugin.set_state_dict_type`` sets)."""
        if self.run.fsdp.offload_params:
            return None
        if self.ranks == 1:
            return 0
        groups = self.groups(model)
        flats = [f for modules in self.of_groups(model, groups) for f in self.units(modules)]
        return max((rounded(f.shard * self.ranks * f.width) for f in flats), default=0)

    def of_groups(self, model: Model, groups: Sequence[Group]) -> list[list[Module]]:
        of_place = {place: i for i, g in enumerate(groups) for place in g.places}
        modules: list[list[Module]] = [[] for _ in groups]
        for module in model.modules:
            modules[of_place[module.place]].append(module)
        return modules

    def _kept(self, model: Model, groups: Sequence[Group]) -> list[Kept]:
        """Model state of the flat tensors."""
        states = torch_states(self.run)
        found = []
        for modules in self.of_groups(model, groups):
            for flat in self.units(modules):
                nbytes = rounded(flat.shard * flat.width)
                sizes = [s.nbytes((flat.shard,), flat.width, False) if flat.trains else 0 for s in states]
                held = flat.shard if flat.trains else 0
                own = nbytes if flat.trains else 0
                found.append(Kept(nbytes, own, tuple(sizes), max([0, *sizes[-1:]]), held, int(flat.trains)))
        return found


ENGINE = FSDP1
