"""Settings beside sizes that a search varies: each value is some fields of a RunSpec, by a word.

A space is searched around every combination of their values (``Space.others``), each as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import lcm, prod
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.plan.megatron.space import AXES, DISPATCHER, Space, flex_backends
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.gpus import check_computes, lacks

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu

Fields = Mapping[str, Any]
#: Combinations of values in one search, at most: each takes as long as a search of its own.
MOST_COMBINATIONS = 256

_PLAIN = {"precision.fp8": None, "precision.fp4": None, "precision.fp8_param": False, "precision.fp4_param": False}


def _fp8(recipe: str, form: str = "hybrid") -> dict[str, Any]:
    """Whether parameters are kept in fp8 stays as it is given."""
    return {
        "precision.fp8": form, "precision.fp8_recipe": recipe, "optimizer.fp8_recipe": recipe, "precision.fp4": None,
        "precision.fp4_param": False,
    }  # fmt: skip


#: Word for a precision -> fields, as ``sweep`` calls them too.
PRECISIONS: dict[str, Fields] = {
    "bf16": _PLAIN, "fp8": _fp8("delayed"), "fp8-tensorwise": _fp8("tensorwise"), "fp8-blockwise": _fp8("blockwise"),
    "mxfp8": _fp8("mxfp8", "e4m3"), "nvfp4": {"precision.fp8": None, "precision.fp8_param": False,
                                              "precision.fp4": "e2m1"},
}  # fmt: skip

_OFFLOADED = "optimizer.optimizer_cpu_offload", "optimizer.optimizer_offload_fraction"
_OVERLAP = "data_parallel.overlap_grad_reduce", "data_parallel.overlap_param_gather"


def _named(fields: Sequence[str], values: Mapping[str, Sequence[Any]]) -> dict[str, Fields]:
    return {word: dict(zip(fields, of_word, strict=True)) for word, of_word in values.items()}


class Setting(NamedTuple):
    """An axis of settings."""

    #: The values that have a word.
    values: Mapping[str, Fields]
    #: What it is, for people.
    what: str

    @property
    def fields(self) -> tuple[str, ...]:
        """"group.field" of all that its values set."""
        return tuple(dict.fromkeys(name for fields in self.values.values() for name in fields))


SETTINGS: dict[str, Setting] = {
    "dispatcher": Setting(
        _named(DISPATCHER, {"alltoall": ("alltoall", "deepep"), "allgather": ("allgather", "deepep"),
                             "deepep": ("flex", "deepep"), "hybridep": ("flex", "hybridep")}),
        "of experts' tokens",
    ),
    "precision": Setting(PRECISIONS, "of linears"),
    "offload": Setting({}, "modules whose saved tensors go to host memory"),
    "optimizer_offload": Setting({}, "share of the optimizer in host memory, from 0 to 1"),
    "graphs": Setting(
        {word: {"implementation.cuda_graph_impl": word} for word in
         ("none", "local", "transformer_engine", "full_iteration")},
        "implementation of CUDA graphs",
    ),
    "dp_overlap": Setting(
        _named(_OVERLAP, {"none": (False, False), "grads": (True, False), "grads+params": (True, True)}),
        "data-parallel communication that passes hide",
    ),
    "ep_overlap": Setting(
        {"off": {"implementation.overlap_moe_expert_parallel_comm": False},
         "on": {"implementation.overlap_moe_expert_parallel_comm": True}},
        "exchanges of experts' tokens that another microbatch hides",
    ),
    "cp_comm": Setting(
        {word: {"implementation.cp_comm_type": word} for word in ("p2p", "a2a", "all_gather", "a2a+p2p")},
        "communication of context parallelism",
    ),
    "packing": Setting(
        {"off": {"batch.packed_sequences": False}, "on": {"batch.packed_sequences": True}}, "packed sequences",
    ),
}  # fmt: skip
_OFFLOAD_FIELD = "implementation.offload_modules"
#: Axis -> "group.field" of what it sets.
FIELDS: dict[str, tuple[str, ...]] = {
    **{axis: setting.fields for axis, setting in SETTINGS.items()}, "offload": (_OFFLOAD_FIELD,),
    "optimizer_offload": _OFFLOADED,
}  # fmt: skip


#: What a value sets beside, which flags give for other reasons too.
SET_BESIDE = ("optimizer.use_precision_aware_optimizer",)


def value_of(axis: str, word: str, run: RunSpec) -> Fields:
    """The fields of ``run`` that a word of an axis sets. Raises SpecError."""
    setting = SETTINGS[axis]
    if word in setting.values:
        return setting.values[word]
    if axis == "offload":
        return {_OFFLOAD_FIELD: () if word == "none" else tuple(word.split("+"))}
    if axis == "optimizer_offload":
        try:
            share = float(word)
        except ValueError:
            share = -1.0
        if not 0 <= share <= 1:
            raise SpecError(f"optimizer_offload ({word}) is no share; give 0 to 1")
        if not share:
            return {_OFFLOADED[0]: False}
        # Megatron-LM's arguments ask for it (``training/arguments.py: validate_args``).
        return {**dict(zip(_OFFLOADED, (True, share), strict=True)), SET_BESIDE[0]: True}
    raise SpecError(f"{axis} ({word}) is unknown; use {', '.join(setting.values)}")


def usual_words(axis: str, run: RunSpec, card: Gpu) -> tuple[str, ...]:
    """The values of an axis that is named alone: those that the card and the model have."""
    if axis == "dispatcher":
        return ("alltoall", *flex_backends(card)) if run.model.has_experts else ()
    if axis == "ep_overlap" and not run.model.has_experts:
        return ()
    if axis == "precision":
        able = []
        for word, fields in PRECISIONS.items():
            of_card = {name.partition(".")[2]: v for name, v in fields.items() if name.startswith("precision.")}
            if not lacks(card, replace(run.precision, **of_card)):
                able.append(word)
        return tuple(able)
    if axis == "offload":
        from bridge_memory.plan.megatron.fit import useful_offloads

        return ("none", *("+".join(modules) for modules in useful_offloads(run)))
    if axis == "optimizer_offload":
        return "0", "0.5", "1"
    return tuple(SETTINGS[axis].values)


def word_of(axis: str, run: RunSpec) -> str:
    """The word of an axis for a run."""
    impl, o = run.implementation, run.optimizer
    if axis == "dispatcher" and not run.model.has_experts:
        return "none"
    if axis == "offload":
        return "+".join(impl.offload_modules) or "none"
    if axis == "optimizer_offload":
        return f"{o.optimizer_offload_fraction:g}" if o.optimizer_cpu_offload else "0"
    if axis == "dispatcher" and impl.moe_token_dispatcher_type != "flex":
        return impl.moe_token_dispatcher_type
    if axis == "precision" and not run.precision.quantizes:
        return run.precision.params_dtype
    for word, fields in SETTINGS[axis].values.items():
        if all(_at(run, name) == value for name, value in fields.items() if not name.endswith("_param")
               and not name.startswith("optimizer.")):  # fmt: skip
            return word
    if axis == "precision" and run.precision.fp8:  # a recipe in a format that is not the usual one
        words = {fields.get("precision.fp8_recipe"): word for word, fields in PRECISIONS.items()}
        return f"{words[run.precision.fp8_recipe]}-{run.precision.fp8}"
    return ",".join(str(_at(run, name)) for name in FIELDS[axis])


def words_of(run: RunSpec) -> tuple[str, ...]:
    """Of every axis."""
    return tuple([word_of(axis, run) for axis in SETTINGS])


def _at(run: RunSpec, name: str) -> Any:
    group, _, field = name.partition(".")
    return getattr(getattr(run, group), field)


def shown_word(axis: str, run: RunSpec) -> str:
    """``word_of``, as tables show it."""
    return {"deepep": "DeepEP", "hybridep": "HybridEP"}.get(word := word_of(axis, run), word)


def setting_words(run: RunSpec) -> list[str]:
    """The settings of a run that a search may vary and that are not Megatron's defaults, in words."""
    words = {axis: shown_word(axis, run) for axis in SETTINGS}
    usual = {"dispatcher": ("alltoall", "none"), "precision": ("bf16",), "cp_comm": ("p2p",)}
    return [
        word if axis in ("dispatcher", "precision") else f"{axis.replace('_', ' ')} {word}"
        for axis, word in words.items() if word not in usual.get(axis, ("none", "off", "0"))
    ]  # fmt: skip


def varied_settings(space: Space) -> frozenset[str]:
    """The axes of settings on which the runs of a space differ."""
    runs = (space.base, *space.others)
    return frozenset(axis for axis in SETTINGS if len({word_of(axis, run) for run in runs}) > 1)


def varied_words(runs: Sequence[RunSpec]) -> list[str]:
    """"dispatcher alltoall or DeepEP" of every axis on which runs differ."""
    found = []
    for axis in SETTINGS:
        words = list(dict.fromkeys(shown_word(axis, run) for run in runs))
        found += [f"{axis} {' or '.join(words)}"] if len(words) > 1 else []
    return found


class Settled(NamedTuple):
    """The runs around which a space is searched, and why some combinations have none."""

    runs: tuple[RunSpec, ...]
    refused: tuple[str, ...]


def settled(
    run: RunSpec, asked: Mapping[str, Sequence[str]], free: Mapping[str, tuple[int, int]], card: Gpu
) -> Settled:
    """``run`` with every combination of the words of ``asked`` that ``card`` computes. ``free``: axes of sizes that
    vary, and their ends: a run that its own sizes refuse is tried with others, since it need not be one of the
    layouts. Raises SpecError."""
    number = prod(len(words) for words in asked.values())
    if number > MOST_COMBINATIONS:
        axes = " x ".join(f"{axis} {len(words)}" for axis, words in asked.items())
        raise SpecError(f"vary ({axes}) is {number:,} combinations, more than {MOST_COMBINATIONS}; name fewer values")
    found: dict[RunSpec, None] = {}
    refused: dict[str, None] = {}
    first: SpecError | None = None
    for words in product(*asked.values()):
        fields: dict[str, Any] = {}
        for axis, word in zip(asked, words, strict=True):
            fields |= value_of(axis, word, run)
        try:
            one = _with(run, fields, free)
            if "precision" in asked:
                check_computes(card, one.precision)
            found[one] = None
        except SpecError as error:
            first = first or error
            refused[f"{', '.join(f'{a} {w}' for a, w in zip(asked, words, strict=True))}: {error}"] = None
    if not found:
        assert first is not None
        raise first
    return Settled(tuple(found), tuple(refused))


#: Sizes to try a run with, the most likely first.
_SIZES: tuple[dict[str, int], ...] = (
    {}, {"ep": 2}, {"ep": 3}, {"ep": 5}, {"ep": 2, "pp": 2, "vpp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2}, {"cp": 2},
    {"cp": 2, "ep": 2},
)  # fmt: skip


def _with(run: RunSpec, fields: Fields, free: Mapping[str, tuple[int, int]]) -> RunSpec:
    first: SpecError | None = None
    for sizes in _tried(free):
        try:
            p = run.parallel
            if sizes:
                named: dict[str, Any] = {AXES[axis][0].partition(".")[2]: size for axis, size in sizes.items()}
                p = replace(p, **named, world_size=1 << 20)
                p = replace(p, world_size=lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp))
            changed: dict[str, dict[str, Any]] = {}
            for name, value in fields.items():
                group, _, field = name.partition(".")
                changed.setdefault(group, {})[field] = value
            groups = {group: replace(getattr(run, group), **values) for group, values in changed.items()}
            return run.with_(**{"parallel": p, **groups})
        except SpecError as error:
            first = first or error
    assert first is not None
    raise first


def _tried(free: Mapping[str, tuple[int, int]]) -> Iterator[dict[str, int]]:
    for sizes in _SIZES:
        if all(axis in free and free[axis][0] <= size <= free[axis][1] for axis, size in sizes.items()):
            yield sizes
