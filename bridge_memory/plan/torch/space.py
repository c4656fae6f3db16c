"""The configurations of a run under PyTorch's engines and DeepSpeed that a search looks at: what a user of DDP, FSDP or
ZeRO can change while the GPUs and the sequences of a step stay.

There is no tensor, pipeline or context parallelism here: an engine, what it divides over which ranks, the micro batch,
what runs again in backward, and on demand offloading, attention and Liger's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from bridge_memory.plan.found import Refused
from bridge_memory.spec import ModelSpec, RunSpec, SpecError
from bridge_memory.spec.parts import ENGINE_OPTIONS, ENGINES, WITH_MEGATRON_LAYOUTS
from bridge_memory.spec.transformers import family_of, usable_attention
from bridge_memory.speed.torch.step_time import TIMED

#: Axis -> "group.field" of what fixes it when it is given.
AXES: dict[str, tuple[str, ...]] = {
    "engine": ("data_parallel.engine",),
    "mbs": ("batch.micro_batch_size",),
    "checkpointing": (
        "transformers.gradient_checkpointing", "transformers.use_reentrant", "transformers.selective_ac_option",
        "recompute.granularity", "recompute.method", "recompute.num_layers", "recompute.modules",
    ),
    "reshard": ("fsdp.reshard_after_forward", "fsdp.sharding_strategy"),
    "shard": ("fsdp.shard_degree", "fsdp.sharding_strategy", "deepspeed.zero_hpz_partition_size"),
    "accumulation": ("data_parallel.sync_each_batch",),
    "overlap": ("ddp.gradient_as_bucket_view", "deepspeed.overlap_comm"),
    "offload": ("fsdp.offload_params", "deepspeed.offload_optimizer_device", "deepspeed.offload_param_device"),
    "attention": ("transformers.attn_implementation",),
    "liger": ("transformers.liger_kernel",),
}  # fmt: skip
#: Axes that vary only where they are named (``--vary``): what they change is a choice of its own.
ON_DEMAND = ("offload", "attention", "liger")
#: Those that vary where nobody says what does; engines only where several are asked for.
USUAL = tuple(axis for axis in AXES if axis not in (*ON_DEMAND, "engine"))
#: Axes of the engine itself, and of what one GPU runs.
_OF_ENGINE = ("shard", "reshard", "accumulation", "overlap", "offload")
_OF_PASSES = ("checkpointing", "attention", "liger")
#: Words that mean several engines.
SEVERAL = {"any": TIMED, "fsdp": ("fsdp1", "fsdp2"), "zero": ("zero1", "zero2", "zero3")}
#: Largest micro batch of the grid.
MOST_SEQUENCES = 64
#: Kernels that ``use_liger_kernel`` switches on (liger-kernel ``monkey_patch.py: apply_liger_kernel_to_*``).
LIGER_DEFAULTS = ("rope", "rms_norm", "swiglu", "geglu", "fused_linear_cross_entropy")
FUSED_LOSS = "fused_linear_cross_entropy"

Fields = dict[str, Any]


class Space(NamedTuple):
    """What varies, and around what."""

    #: Engine -> the run that the flags describe with it, on all GPUs and with all sequences of the step.
    bases: Mapping[str, RunSpec]
    #: GPUs that reach each other by NVLink.
    domain: int
    #: Axes that stay as the bases have them.
    fixed: frozenset[str] = frozenset(ON_DEMAND)
    #: Smallest and largest micro batch.
    micro_batches: tuple[int, int] = (1, MOST_SEQUENCES)
    exhaustive: bool = False

    def rule(self) -> str:
        """Which of all configurations are looked at, in words."""
        several = {axis for axis in _OF_AXIS if any(len(_values(self, axis, b)) > 1 for b in self.bases.values())}
        several |= {"mbs"} - self.fixed | ({"engine"} if len(self.bases) > 1 else set())
        varies = [axis for axis in AXES if axis in several]
        if not varies:
            return "nothing beyond what the flags give"
        often = "every micro batch that divides" if self.exhaustive else "mbs in powers of two"
        others = f"all of {', '.join(axis for axis in varies if axis != 'mbs')}" if varies != ["mbs"] else ""
        return "; ".join(words for words in (often * ("mbs" in varies), others) if words)


def engines_of(words: Sequence[str], num_gpus: int) -> tuple[str, ...]:
    """The engines that words of ``--engine`` mean, each once. One GPU has no other to run DDP with, and several share
    nothing without an engine: of "any" these are left out. Raises SpecError."""
    found: list[str] = []
    for word in words:
        if word not in ENGINES and word not in SEVERAL:
            raise SpecError(f"engine ({word}) is unknown; use {', '.join((*TIMED, *SEVERAL))}")
        if word in WITH_MEGATRON_LAYOUTS and len(words) > 1:
            raise SpecError(
                f"engine ({word}) does not stand beside others: its layouts are those of megatron-core; search it by "
                "itself"
            )
        if word in ENGINES and word not in TIMED:
            raise SpecError(f"engine ({word}) has no step time to rank by; use {', '.join((*TIMED, *SEVERAL))}")
        idle = "ddp" if num_gpus == 1 else "single"
        found += [engine for engine in SEVERAL.get(word, (word,)) if word != "any" or engine != idle]
    return tuple(dict.fromkeys(found))


def is_of(engine: str, field: str) -> bool:
    """Whether "group.field" means something under an engine: options of another engine do not."""
    group, _, name = field.partition(".")
    if group not in ("ddp", "fsdp", "deepspeed"):
        return True
    if ENGINE_OPTIONS.get(engine) != group:
        return False
    return name not in {"fsdp1": ("reshard_after_forward", "pin_memory"), "fsdp2": (
        "sharding_strategy", "limit_all_gathers", "use_orig_params"
    )}.get(engine, ())  # fmt: skip


def configurations(space: Space, refused: Refused) -> Iterator[list[RunSpec]]:
    """Every run of the space, those together that differ in micro batch, checkpointing and kernels alone."""
    models: dict[ModelSpec, ModelSpec] = {}
    for given in space.bases.values():
        # Equal models are one object, which is fast to compare.
        base = given.with_(model=models.setdefault(given.model, given.model))
        total, ranks = base.batch.global_batch_size, base.parallel.data_parallel_size
        of_engine = [_values(space, axis, base) for axis in _OF_ENGINE]
        of_passes = [_values(space, axis, base) for axis in _OF_PASSES]
        for kept in product(*of_engine):
            alike: list[RunSpec] = []
            for mbs in _micro_batches(space, base):
                number = 1
                for values in of_passes:
                    number *= len(values)
                if total is not None and total % (mbs * ranks):
                    refused["global_batch_size"] += number
                    continue
                for passed in product(*of_passes):
                    fields: Fields = {} if mbs == base.batch.micro_batch_size else {"batch.micro_batch_size": mbs}
                    for chosen in (*kept, *passed):
                        fields |= chosen
                    try:
                        alike.append(base.with_fields(**fields) if fields else base)
                    except SpecError as error:
                        refused.add(error)
            if alike:
                yield alike


def _micro_batches(space: Space, base: RunSpec) -> list[int]:
    if "mbs" in space.fixed:
        return [base.batch.micro_batch_size]
    low, high = space.micro_batches
    sizes = range(low, high + 1)
    return list(sizes) if space.exhaustive else [n for n in sizes if n & (n - 1) == 0]


def _values(space: Space, axis: str, base: RunSpec) -> list[Fields]:
    """The values of one axis under an engine, each as the fields that it changes; the first changes none."""
    if axis in space.fixed:
        return [{}]
    found = _OF_AXIS[axis](space, base)
    same = [fields for fields in found if all(_at(base, name) == value for name, value in fields.items())]
    return [{}, *(fields for fields in found if fields not in same)] if same else found


def changed_fields(run: RunSpec, base: RunSpec) -> Fields:
    """"group.field" -> value, of what a search changed in ``base`` to make ``run``."""
    names = dict.fromkeys(name for fields in AXES.values() for name in fields)
    return {name: _at(run, name) for name in names if _at(run, name) != _at(base, name)}


def _at(run: RunSpec, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(run, group), field)


def _checkpointing(space: Space, base: RunSpec) -> list[Fields]:
    on, kind, part = AXES["checkpointing"][:3]
    if not base.implementation.torch_layers:
        full = {"recompute.granularity": "full", "recompute.method": "uniform", "recompute.num_layers": 1}
        return [{"recompute.granularity": None}, full]
    if base.implementation.torchtitan:
        options = ("op", "2", *(map(str, range(3, 17)) if space.exhaustive else ()))
        return [{on: False, part: None}, {on: True, part: None}, *({on: False, part: option} for option in options)]
    if base.implementation.torchtune:
        return [{on: False, kind: None}, {on: True, kind: False}]
    return [{on: False, kind: None}, {on: True, kind: True}, {on: True, kind: False}]


def _reshard(space: Space, base: RunSpec) -> list[Fields]:
    """Of FSDP1 ``_shard`` says the strategies over all ranks or over some; this one which frees after forward."""
    if base.data_parallel.engine == "fsdp2":
        both = [{"fsdp.reshard_after_forward": value} for value in (None, False)]
        return [*both, {"fsdp.reshard_after_forward": True}] if space.exhaustive else both
    if base.data_parallel.engine == "fsdp1" and "shard" in space.fixed:
        return [{"fsdp.sharding_strategy": name} for name in _strategies(base.fsdp.shard_degree is not None)]
    return [{}]


def _strategies(hybrid: bool) -> tuple[str, str]:
    return ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") if hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")


def _shard(space: Space, base: RunSpec) -> list[Fields]:
    """All ranks, or those of a node, or with ``exhaustive`` every divisor; of FSDP1 with what is freed after forward,
    since one word says both."""
    engine, ranks = base.data_parallel.engine, base.parallel.data_parallel_size
    some = [n for n in range(2, ranks) if ranks % n == 0] if space.exhaustive else [space.domain]
    degrees = [n for n in some if 1 < n < ranks and ranks % n == 0]
    if engine == "fsdp2":
        return [{"fsdp.shard_degree": n} for n in (None, *degrees)]
    if engine == "fsdp1":
        names = 1 if "reshard" in space.fixed else 2
        return [
            {"fsdp.sharding_strategy": name, "fsdp.shard_degree": n}
            for n in (None, *degrees) for name in _strategies(n is not None)[:names]
        ]  # fmt: skip
    if engine == "zero3":
        return [{"deepspeed.zero_hpz_partition_size": n} for n in (1, *degrees)]
    return [{}]


def _accumulation(space: Space, base: RunSpec) -> list[Fields]:
    """FSDP keeps whole gradients from one microbatch to the next unless it reduces them in each."""
    if base.data_parallel.engine not in ("fsdp1", "fsdp2"):
        return [{}]
    return [{"data_parallel.sync_each_batch": value} for value in (False, True)]


def _overlap(space: Space, base: RunSpec) -> list[Fields]:
    engine = base.data_parallel.engine
    if engine == "ddp":
        return [{"ddp.gradient_as_bucket_view": value} for value in (False, True)]
    if engine.startswith("zero"):  # None: on with stage 3 alone
        return [{"deepspeed.overlap_comm": value} for value in (None, engine != "zero3")]
    return [{}]


def _offload(space: Space, base: RunSpec) -> list[Fields]:
    engine, (fsdp, optimizer, parameters) = base.data_parallel.engine, AXES["offload"]
    if engine in ("fsdp1", "fsdp2"):
        return [{fsdp: value} for value in (False, True)]
    if not engine.startswith("zero"):
        return [{}]
    found: list[Fields] = [{optimizer: "none"}, {optimizer: "cpu"}]
    if engine == "zero3":
        found = [{parameters: "none", **fields} for fields in found] + [{optimizer: "cpu", parameters: "cpu"}]
    return found


def _attention(space: Space, base: RunSpec) -> list[Fields]:
    if not base.implementation.torch_layers or base.implementation.own_layers:
        return [{}]
    usable = usable_attention(base.model.model_type, base.transformers)
    names = [name for name in ("sdpa", "flash_attention_2", "eager") if name in usable]
    return [{"transformers.attn_implementation": name} for name in names]


def _liger(space: Space, base: RunSpec) -> list[Fields]:
    """None, the fused loss alone, and what ``use_liger_kernel`` means for the family."""
    if not base.implementation.torch_layers or base.implementation.own_layers:
        return [{}]
    there = family_of(base.model.model_type, base.transformers).liger
    usual = tuple(name for name in LIGER_DEFAULTS if name in there)
    sets = dict.fromkeys([(), *([(FUSED_LOSS,)] if FUSED_LOSS in there else []), usual])
    return [{"transformers.liger_kernel": names} for names in sets]


_OF_AXIS = {
    "checkpointing": _checkpointing, "reshard": _reshard, "shard": _shard,
    "accumulation": _accumulation, "overlap": _overlap, "offload": _offload,
    "attention": _attention, "liger": _liger,
}  # fmt: skip
