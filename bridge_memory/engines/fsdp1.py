"""FSDP1 (``FullyShardedDataParallel``): the parameters of a unit are one flat tensor, of which every rank keeps a part
in the parameters' own dtype, with its gradient and optimizer states.

A unit's whole flat parameter is there in ``param_dtype`` while the unit runs, the root's from forward to the end of
backward; with ``BACKWARD_PRE`` that of the unit before is gathered ahead. Autograd joins the gradients of a unit's
parameters in one flat gradient, beside them; it is cast to ``reduce_dtype``, padded where it must be, and reduced.

Adapters are units of their own, as the Trainer wraps them (peft ``utils/other.py: fsdp_auto_wrap_policy``). The layer
before is then gathered with a layer's first adapter, late in its backward; it is counted from its beginning.

Source: torch 2.13 ``distributed/fsdp/_flat_param.py: FlatParamHandle._init_flat_param_and_metadata, unshard,
_alloc_padded_unsharded_flat_param``, ``_runtime_utils.py: _pre_forward, _post_forward_reshard, _pre_backward_hook,
_post_backward_hook, _reduce_grad, _should_free_in_backward``, ``_limiter_utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.engines.fsdp2 import FSDP2, Group
from bridge_memory.engines.torch_modules import Kept, Model, Module, rounded, trained_width
from bridge_memory.engines.torch_optimizers import torch_states
from bridge_memory.spec import RunSpec

#: Bytes to which parameters of a flat tensor are aligned with ``use_orig_params`` (``_flat_param.py:
#: _get_aligned_numel``).
ALIGNMENT = 16


class FSDP1(FSDP2):
    """See the module docstring."""

    #: Whole parameters are gathered in place.
    keeps_output = False
    #: What a reduction takes goes with it.
    keeps_reduced = False

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        super().__init__(run, rank=rank)
        self.strategy = run.fsdp.sharding_strategy
        if self.strategy == "NO_SHARD":
            self.ranks = 1
        #: Gradients of microbatches that are not reduced stay in the dtype in which they are computed.
        self.waiting_width = self.compute_width

    def _resharded(self, group: Group) -> bool:
        return not group.root and self.strategy in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def _prefetches(self) -> bool:
        return self.run.fsdp.backward_prefetch == "BACKWARD_PRE"

    def _shard(self, modules: Sequence[Module], *, trained: bool) -> int:
        """Elements of a rank's part of the flat tensor of these modules."""
        align = ALIGNMENT // self.width if self.run.fsdp.use_orig_params else 1
        numel = 0
        for module in modules:
            for p, times in module.trained_parameters() if trained else module.parameters():
                numel += times * (-(-p.numel // align) * align)
        return -(-numel // self.ranks)

    def _group(self, modules: Sequence[Module], *, root: bool) -> Group:
        whole = self._shard(modules, trained=False) * self.ranks
        trained = self._shard(modules, trained=True)
        gathers = self.ranks > 1 or self.compute_width != self.width
        full = rounded(whole * self.compute_width) if gathers else 0
        flat = rounded(trained * self.ranks * self.compute_width)
        shard = rounded(trained * self.reduce_width)
        # Beside the gradients one by one, of which the flat one is made: it and the whole parameters; then, in their
        # place, it and what it is cast to, and the part that comes of it.
        cast = rounded(trained * self.ranks * self.reduce_width) if self.reduce_width != self.compute_width else 0
        return Group(
            tuple(m.place for m in modules), root, full, full if self._prefetches else 0,
            rounded(whole // self.ranks * self.compute_width) if self.compute_width != self.width else 0,
            max(flat + full, cast + shard), 0, rounded(trained * self.width),
        )

    def _building(self, model: Model, groups: Sequence[Group]) -> int | None:
        """Not modelled."""
        return None

    def _saving(self, model: Model) -> int | None:
        """Not modelled."""
        return None

    def _kept(self, model: Model, groups: Sequence[Group]) -> list[Kept]:
        """Of the flat tensors."""
        states = torch_states(self.run)
        of_place = {place: i for i, g in enumerate(groups) for place in g.places}
        modules: list[list[Module]] = [[] for _ in groups]
        for module in model.modules:
            modules[of_place[module.place]].append(module)
        found = []
        for group in modules:
            every, trained = self._shard(group, trained=False), self._shard(group, trained=True)
            wide = trained_width(self.run, self.width)
            sizes = [s.nbytes((trained,), wide, False) if trained else 0 for s in states]
            weights = rounded(every * self.width)
            if wide != self.width:
                weights = rounded((every - trained) * self.width) + rounded(trained * wide)
            found.append(
                Kept(weights, rounded(trained * wide), tuple(sizes), max([0, *sizes[-1:]]), trained)
            )  # fmt: skip
        return found


ENGINE = FSDP1
