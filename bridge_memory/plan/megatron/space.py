"""The layouts that a search looks at: every combination of parallel sizes, split, micro batch and recomputation that
megatron-core would run, around a run whose other settings stay.

The grid keeps to what people use: powers of two for TP, CP and the micro batch, TP inside of one NVLink domain, one or
two splits of the layers for each number of chunks, a dozen sets of recomputed modules. ``exhaustive`` drops these rules
and keeps what divides. Of PP and EP it has every divisor: GPUs that are no power of two (BLOOM's 384) need them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.caveats.ignored import idle_modules
from bridge_memory.plan.found import Refused
from bridge_memory.plan.megatron.splits import NO_SPLIT, splits
from bridge_memory.spec import ParallelSpec, RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.parts import RECOMPUTE_MODULES
from bridge_memory.workspaces.driver import DEEPEP_TOKENS

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu

#: Axis -> "group.field" of what fixes it when it is given.
AXES: dict[str, tuple[str, ...]] = {
    "tp": ("parallel.tensor_model_parallel_size",),
    "pp": ("parallel.pipeline_model_parallel_size",),
    "vpp": ("parallel.virtual_pipeline_model_parallel_size",),
    "cp": ("parallel.context_parallel_size",),
    "ep": ("parallel.expert_model_parallel_size",),
    "etp": ("parallel.expert_tensor_parallel_size",),
    "mbs": ("batch.micro_batch_size",),
    "split": tuple(f"parallel.{name}" for name in NO_SPLIT),
    "recompute": ("recompute.granularity", "recompute.method", "recompute.num_layers", "recompute.modules"),
}
#: What an axis of settings beside sizes is, as ``AXES``; its values are runs (``Space.others``).
DISPATCHER = ("implementation.moe_token_dispatcher_type", "implementation.moe_flex_dispatcher_backend")
#: Axes of which the grid has powers of two alone.
POWERS = ("tp", "cp", "mbs")
#: Largest micro batch and context parallel size of the grid, where no range says another.
MOST_SEQUENCES, MOST_CP = 8, 16
#: Largest micro batch of a range.
MOST_RANGE = 1024


class Space(NamedTuple):
    """What varies, and around what."""

    #: All settings that stay; its parallel sizes are those that were given.
    base: RunSpec
    num_gpus: int
    #: GPUs that reach each other by NVLink.
    domain: int
    #: Axes that stay as ``base`` has them.
    fixed: frozenset[str] = frozenset()
    #: Axis -> smallest and largest value.
    ranges: Mapping[str, tuple[int, int]] = {}
    exhaustive: bool = False
    #: Sequences of a step; None: those of ``base``.
    global_batch_size: int | None = None
    #: Runs with other settings, around which the same sizes are looked at too.
    others: tuple[RunSpec, ...] = ()
    #: On what these runs differ, in words.
    varied: tuple[str, ...] = ()
    #: Axis -> the words of the only values that are looked at, and of those that are left out (``keeps``).
    only: Mapping[str, frozenset[str]] = {}
    without: Mapping[str, frozenset[str]] = {}

    def each(self) -> tuple[Space, ...]:
        """The space around every run. Of several, one that offloads modules has no layers that run again as a whole
        (``fit`` says why), and one with another communication of context parallelism no layout without it."""
        if not self.others:
            return (self,)
        found = []
        for base in (self.base, *self.others):
            without = dict(self.without)
            if base.implementation.offload_modules:
                without["recompute"] = without.get("recompute", frozenset()) | {"full"}
            if base.implementation.cp_comm_type != self.base.implementation.cp_comm_type:
                without["cp"] = without.get("cp", frozenset()) | {"1"}
            found.append(self._replace(base=base, others=(), without=without))
        return tuple(found)

    def keeps(self, axis: str, words: frozenset[str]) -> bool:
        """Whether a value that all of these words mean is looked at."""
        only = self.only.get(axis)
        return (only is None or bool(only & words)) and not self.without.get(axis, frozenset()) & words

    def one(self, axis: str) -> bool:
        """Whether an axis has one value, of ``base`` or of its range."""
        low, high = self.ranges.get(axis, (0, 1))
        return axis in self.fixed or low == high

    def sizes(
        self, axis: str, given: int, most: int, *, usual: int | None = None, among: Sequence[int] | None = None
    ) -> list[int]:
        """Values of an axis: up to ``usual``, or to where its range ends, and never above ``most``."""
        found = self._sizes(axis, given, most, usual, among)
        if axis not in self.only and axis not in self.without:
            return found
        return [n for n in found if self.keeps(axis, frozenset({str(n)}))]

    def _sizes(self, axis: str, given: int, most: int, usual: int | None, among: Sequence[int] | None) -> list[int]:
        if axis in self.fixed:
            return [given]
        low, high = self.ranges.get(axis, (1, most if usual is None else usual))
        known = among if among is not None else range(1, most + 1)
        keep = [n for n in known if low <= n <= min(high, most)]
        every = self.exhaustive or low == high or axis not in POWERS or axis in self.only
        return keep if every else [n for n in keep if n & (n - 1) == 0]

    def rule(self) -> str:
        """Which of all layouts are looked at, in words."""
        if self.exhaustive:
            return "every layout that divides"
        idle = set() if self.base.model.has_experts else {"ep"}
        powers = [axis for axis in POWERS if not self.one(axis)]
        divisors = [axis for axis in ("pp", "ep") if axis not in idle and not self.one(axis)]
        parts = [f"{', '.join(powers)} in powers of two"] if powers else []
        if divisors:
            parts.append(f"every {' and '.join(divisors)} that divides")
        if "split" not in self.fixed:
            parts.append("one or two splits of the layers for each number of virtual stages")
        parts += self.varied
        if "recompute" not in self.fixed:
            parts.append("recompute none, one, two or all modules, or whole layers")
        for how, of in (("only", self.only), ("without", self.without)):
            parts += [f"{how} {axis} {_words(axis, words)}" for axis, words in of.items()]
        return "; ".join(parts) or "nothing beyond what the flags give"


def _words(axis: str, words: frozenset[str]) -> str:
    if all(word.isdecimal() for word in words):
        numbers = sorted(map(int, words))
        run = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
        return f"{numbers[0]} to {numbers[-1]}" if run else ", ".join(map(str, numbers))
    return ", ".join(sorted(words))


def dispatcher_words(run: RunSpec) -> str:
    """"alltoall", "DeepEP"; "none" without experts."""
    impl = run.implementation
    if not run.model.has_experts:
        return "none"
    if impl.moe_token_dispatcher_type != "flex":
        return impl.moe_token_dispatcher_type
    return {"deepep": "DeepEP", "hybridep": "HybridEP"}[impl.moe_flex_dispatcher_backend]


def flex_backends(gpu: Gpu) -> tuple[str, ...]:
    """Backends of the flex dispatcher with kernels for a card, the usual one first.

    Source: Megatron Bridge ``training/flex_dispatcher_backend.py``, which takes Ampere too; DeepEP runs there only if
    it was built without what Hopper has (``setup.py``: DISABLE_SM90_FEATURES).
    """
    if gpu.arch not in ("hopper", "blackwell") or gpu.capability[0] > 10:
        return ()
    return ("hybridep",) if gpu.name.startswith("GB") else ("deepep", "hybridep")


def layouts(space: Space, refused: Refused) -> Iterator[list[RunSpec]]:
    """Every layout of the space, those together that differ in micro batch and recomputation alone."""
    for one in space.each():
        yield from _layouts(one, refused)


def _layouts(space: Space, refused: Refused) -> Iterator[list[RunSpec]]:
    base, gpus = space.base, space.num_gpus
    total = space.global_batch_size or base.batch.global_batch_size
    for parallel in _parallel(space):
        dp = gpus // (parallel.tp * parallel.pp * parallel.cp)
        alike: list[RunSpec] = []
        choices = list(recomputations(space, parallel.pp * parallel.vpp))
        for mbs in micro_batches(space):
            if total is not None and total % (mbs * dp):
                refused["global_batch_size"] += len(choices)
                continue
            batch = replace(base.batch, micro_batch_size=mbs, global_batch_size=total)
            for number, recompute in enumerate(choices):
                try:
                    alike.append(base.with_(parallel=parallel, batch=batch, recompute=recompute))
                except SpecError as error:
                    if not number:  # so are the others
                        refused.add(error, len(choices))
                        break
                    refused.add(error)
        if alike:
            yield alike


def micro_batches(space: Space) -> list[int]:
    """Sequences of a micro batch."""
    total = space.global_batch_size or space.base.batch.global_batch_size
    most = max(MOST_SEQUENCES, min(total or MOST_RANGE, MOST_RANGE))
    low, high = space.ranges.get("mbs", (1, most))
    if low == high:
        return [low] if space.keeps("mbs", frozenset({str(low)})) else []  # refused where it does not divide the step
    return space.sizes("mbs", space.base.batch.micro_batch_size, most, usual=MOST_SEQUENCES)


class Sizes(NamedTuple):
    """Parallel sizes; ``etp`` None where there are no experts."""

    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None

    def fields(self) -> dict[str, Any]:
        """As a ParallelSpec calls them."""
        return {
            "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp, "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }  # fmt: skip


def _parallel(space: Space) -> Iterator[ParallelSpec]:
    of_pipeline: dict[int, list[dict[str, Any]]] = {}
    for sizes in parallel_sizes(space):
        known = of_pipeline.get(sizes.pp)
        if known is None:
            known = of_pipeline[sizes.pp] = list(split_choices(space, sizes.pp))
        for fields in known:
            yield replace(space.base.parallel, world_size=space.num_gpus, **sizes.fields(), **fields)


def parallel_sizes(space: Space) -> Iterator[Sizes]:
    """Every combination of sizes that divides the GPUs."""
    base, gpus = space.base, space.num_gpus
    model, p = base.model, base.parallel
    experts, deepep = limits_of(model).experts_gcd, dispatcher_words(base) == "DeepEP"
    small = [n for n in range(1, isqrt(gpus) + 1) if gpus % n == 0]
    divisors = sorted({*small, *(gpus // n for n in small)})
    for tp in space.sizes("tp", p.tp, gpus, usual=space.domain, among=divisors):
        for pp in space.sizes("pp", p.pp, min(gpus // tp, model.num_layers), among=divisors):
            for cp in space.sizes("cp", p.cp, gpus // (tp * pp), usual=MOST_CP, among=divisors):
                if gpus % (tp * pp * cp):
                    continue
                for ep in space.sizes("ep", p.ep, max(1, experts), among=divisors):
                    if experts and 1 < base.implementation.moe_imbalance > ep:
                        continue  # one rank cannot have more than every token
                    for etp in (p.etp,) if "etp" in space.fixed else sorted({1, tp}) if experts else (tp,):
                        if experts and not space.keeps("etp", frozenset({str(etp)})):
                            continue
                        if experts and (gpus % (ep * etp * pp) or experts % ep):
                            continue
                        if deepep and 1 < ep * etp not in DEEPEP_TOKENS:
                            continue  # deep_ep/buffer.py: Buffer.get_dispatch_config refuses other groups
                        yield Sizes(tp, pp, cp, ep, etp if experts else None)


def split_choices(space: Space, pp: int) -> Iterator[dict[str, Any]]:
    """Fields of a ParallelSpec that say how many virtual stages there are, and how layers are split over them."""
    model, vpp_given = space.base.model, space.base.parallel.vpp
    if "split" in space.fixed and ("vpp" in space.fixed or space.base.parallel.pipeline_model_parallel_layout):
        yield {}  # a layout string says how many virtual stages there are
        return
    most = max(1, model.num_layers // pp) if pp > 1 and not model.hybrid else 1
    low, high = space.ranges.get("vpp", (1, most))
    numbers = (vpp_given,) if "vpp" in space.fixed else [n for n in range(1, most + 1) if low <= n <= high]
    for vpp in numbers:
        if not space.keeps("vpp", frozenset({str(vpp)})):
            continue
        if "split" in space.fixed:
            yield {"virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None}
            continue
        for fields in splits(model, pp, vpp, exhaustive=space.exhaustive):
            if not space.keeps("split", frozenset({split_kind(fields)})):
                continue
            yield {"virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None, **fields}


#: Words for splits of the layers.
SPLITS = ("even", "ends", "uneven", "layout")


def split_kind(fields: Mapping[str, Any]) -> str:
    """"even", "ends" (embedding or loss as layers), "uneven" (other first or last stages) or "layout" (a string)."""
    given = {name for name, value in fields.items() if value}
    if "pipeline_model_parallel_layout" in given:
        return "layout"
    if any("account_for" in name for name in given):
        return "ends"
    return "uneven" if any("num_layers_in" in name for name in given) else "even"


def recompute_kinds(r: RecomputeSpec) -> frozenset[str]:
    """Words that a recomputation goes by: "none"; "selective", its modules as "mlp+moe_act" and each of them; "full"
    and "block" or "uniform"."""
    if r.granularity == "selective":
        return frozenset({"selective", "+".join(r.modules), *r.modules})
    return frozenset({"full", str(r.method)}) if r.granularity == "full" else frozenset({"none"})


def recomputations(space: Space, chunks: int) -> Iterator[RecomputeSpec]:
    """What may run again in backward; ``chunks``: pp x vpp. ``only`` names sets of modules as a whole."""
    only = space.only.get("recompute")
    without = space.without.get("recompute", frozenset())
    for found in _recomputations(space, chunks):
        kinds = recompute_kinds(found)
        exact = kinds - set(found.modules) | {"+".join(found.modules)} if found.granularity == "selective" else kinds
        if (only is None or only & exact) and not without & kinds:
            yield found


def _recomputations(space: Space, chunks: int) -> Iterator[RecomputeSpec]:
    base = space.base.recompute
    if "recompute" in space.fixed:
        yield base
        return
    yield replace(base, granularity=None, method=None, num_layers=None)
    modules = useful_modules(space.base)
    most = len(modules) if space.exhaustive or "recompute" in space.only else 2
    for number in range(1, len(modules) + 1):
        if number <= most or number == len(modules):
            for chosen in combinations(modules, number):
                if "moe" in chosen and {"moe_act", "shared_experts"} & set(chosen):
                    continue  # the whole runs again already
                yield replace(base, granularity="selective", modules=chosen)
    layers = max(1, space.base.model.num_layers // chunks)
    quarters = range(1, layers) if space.exhaustive else sorted({layers // 4, layers // 2, 3 * layers // 4} - {0})
    for number in quarters:
        yield replace(base, granularity="full", method="block", num_layers=number)
    yield replace(base, granularity="full", method="uniform", num_layers=1)


def useful_modules(run: RunSpec) -> tuple[str, ...]:
    """Modules whose recomputation frees something in this model."""
    idle = set(idle_modules(run.model, run.implementation.te))
    if run.implementation.attention_kernel != "unfused":
        idle.add("core_attn")  # fused kernels keep no scores
    if not limits_of(run.model).mla:
        idle.add("mla_up_proj")
    return tuple(module for module in RECOMPUTE_MODULES if module not in idle)
