"""What decides the peak beside what the user chose: options without effect, assumptions, releases that were not stated.

Each is a whole estimate of the run with that one thing changed (``peaks``), so that its size is no guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.estimation import Estimate, peaks
from bridge_memory.releases import (
    DEFAULT_MEGATRON_CORE,
    DEFAULT_TORCH,
    DEFAULT_TRANSFORMER_ENGINE,
    OLDEST_NAMED,
    Release,
    Rule,
    release_words,
)
from bridge_memory.spec import ImplementationSpec, RunSpec, SpecError
from bridge_memory.spec.unmodelled import NoEffect

#: Shares of the peak from which on an unstated release, and an assumption, are worth a line.
OF_RELEASE, OF_ASSUMPTION = 0.01, 0.02
#: Tokens of the most loaded rank, over those of balanced routing, that an answer is also given for: twice.
IMBALANCE = 2.0


class Kind(str, Enum):
    """Why a line stands on the first screen."""

    NO_EFFECT = "no effect"
    ASSUMPTION = "assumption"
    RELEASE = "release"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Decisive:
    """Something that decides the number and that the user may not know of.

    ``words``: of an option without effect the sentence, else the condition for ``peak_bytes``: "with megatron-core
    0.17". ``why``: what makes the difference there, "" if no words are known.
    """

    kind: Kind
    words: str
    peak_bytes: int | None = None
    why: str = ""


def decisive(result: Estimate) -> tuple[Decisive, ...]:
    """Options without effect, then assumptions and releases by how far they move the highest peak."""
    run, peak = result.run, result.peak_stage.peak_bytes
    idle = [Decisive(Kind.NO_EFFECT, str(s)) for s in dict.fromkeys(result.assumptions) if isinstance(s, NoEffect)]
    found = [*_assumptions(run, peak), *_releases(run, peak)]
    return (*idle, *sorted(found, key=lambda one: -abs((one.peak_bytes or peak) - peak)))


def _peak(run: Callable[[], RunSpec]) -> int | None:
    """The highest peak of another run; None if there is no such run."""
    try:
        return max(stage.peak_bytes for stage in peaks(run()))
    except SpecError:
        return None


# ---- assumptions ----


def _assumptions(run: RunSpec, peak: int) -> Iterator[Decisive]:
    for words, other in _alternatives(run):
        found = _peak(other)
        if found is not None and abs(found - peak) > OF_ASSUMPTION * peak:
            yield Decisive(Kind.ASSUMPTION, words, found)


def _alternatives(run: RunSpec) -> Iterator[tuple[str, Callable[[], RunSpec]]]:
    """(condition in words, the run under it) for what a user leaves open."""
    p, impl, batch = run.parallel, run.implementation, run.batch
    experts = run.model.has_experts
    if experts and impl.moe_imbalance == 1.0 and not impl.moe_pad_expert_input_to_capacity and p.ep >= IMBALANCE:
        yield (
            "with twice the balanced tokens on one rank (moe_imbalance)",
            lambda: run.with_fields(moe_imbalance=IMBALANCE),
        )
    if experts and run.data_parallel.of_megatron and p.expert_tensor_parallel_size is None and p.tp > 1:
        yield "with expert_tensor_parallel_size 1 (unset, it is TP)", lambda: run.with_fields(
            expert_tensor_parallel_size=1
        )
    if batch.global_batch_size is None:
        of_all = batch.micro_batch_size * p.data_parallel_size
        for number in (1, 4 * run.num_microbatches):
            if number != run.num_microbatches:
                yield f"with a global batch of {number * of_all}", lambda number=number: run.with_fields(  # type: ignore[misc]
                    global_batch_size=number * of_all
                )
    spec = run.transformers
    sharded = run.data_parallel.engine in ("fsdp1", "fsdp2") and run.fsdp.param_dtype is None
    if sharded and run.precision.params_dtype == "bf16" and not (spec.load_in_4bit or spec.load_in_8bit):
        yield (
            "with fp32 weights, as accelerate's mixed_precision bf16 keeps them",
            lambda: run.with_(
                precision=replace(run.precision, params_dtype="fp32"),
                fsdp=replace(run.fsdp, param_dtype="bf16", reduce_dtype="bf16"),
            ),
        )


# ---- releases ----


class _Package(NamedTuple):
    """A package of ``ImplementationSpec``: its field, its name, the release of a Rule for it, the one assumed."""

    field: str
    name: str
    of: Callable[[Rule], Release | None]
    assumed: Release


_PACKAGES = (
    _Package("megatron_core", "megatron-core", lambda rule: rule.core, DEFAULT_MEGATRON_CORE),
    _Package("transformer_engine", "Transformer Engine", lambda rule: rule.te, DEFAULT_TRANSFORMER_ENGINE),
    _Package("torch", "torch", lambda rule: rule.torch, DEFAULT_TORCH),
)


class _Watching:
    """Collects the rules of one run, and answers ``flipped`` otherwise."""

    def __init__(self, flipped: Rule | None = None) -> None:
        self.rules: dict[Rule, None] = {}
        self.flipped = flipped

    def asked(self, rule: Rule, holds: bool) -> bool:
        self.rules[rule] = None
        return holds != (rule is self.flipped)


class _Watched(ImplementationSpec):
    """An ImplementationSpec that is equal to itself alone, so that no cache answers in place of the rules."""

    __slots__ = ("watch",)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class _AtRelease(NamedTuple):
    """A run with one release of a package: its highest peak (None if it is refused), and the rules that it asks."""

    peak_bytes: int | None
    rules: tuple[Rule, ...]


def _at(run: RunSpec, releases: Mapping[str, Release], flipped: Rule | None = None) -> _AtRelease:
    """``run`` with ``releases``, by fields of ``ImplementationSpec``; ``flipped``: a rule that answers otherwise."""
    kind = run.model, run.data_parallel, run.transformers
    there: dict[str, Any] = dict(releases)
    impl, watch = _watched(kind, replace(run.implementation, **there), flipped)
    return _AtRelease(_peak(lambda: run.with_(implementation=impl)), tuple(watch.rules))


@lru_cache(maxsize=128)
def _watched(kind: object, release: ImplementationSpec, flipped: Rule | None) -> tuple[_Watched, _Watching]:
    """One for all runs of a ``kind``, whose traces it shares: its rules are those that any of them asked. One that a
    run does not ask moves nothing, so that nothing else is said of it."""
    impl = object.__new__(_Watched)
    for field in fields(ImplementationSpec):
        object.__setattr__(impl, field.name, getattr(release, field.name))
    watch = _Watching(flipped)
    object.__setattr__(impl, "watch", watch)
    return impl, watch


def _releases(run: RunSpec, peak: int) -> Iterator[Decisive]:
    """Releases next to those assumed where a rule of the run changes, newer and older ones, if the peak moves."""
    unstated = [package for package in _PACKAGES if getattr(run.implementation, package.field) is None]
    if not unstated:
        return
    assumed = _at(run, {})
    for package in unstated:
        found = _by_release(run, package, assumed)
        for newer in (True, False):
            yield from _that_move(run, peak, package, found, newer)


def _by_release(run: RunSpec, package: _Package, assumed: _AtRelease) -> dict[Release, _AtRelease]:
    """The run at the assumed release, and at every other one where a rule changes."""
    found = {package.assumed: assumed}
    while True:
        # A release may ask rules that others do not.
        firsts = {first for at in found.values() for rule in at.rules if (first := package.of(rule)) is not None}
        others = {first if first > package.assumed else _before(first) for first in firsts}
        new = sorted(other for other in others - found.keys() if other >= OLDEST_NAMED[package.field])
        if not new:
            return found
        for other in new:
            found[other] = _at(run, {package.field: other})


def _that_move(
    run: RunSpec, peak: int, package: _Package, found: Mapping[Release, _AtRelease], newer: bool
) -> Iterator[Decisive]:
    last, nearer = peak, package.assumed
    others = (release for release in found if release != package.assumed and (release > package.assumed) == newer)
    for other in sorted(others, reverse=not newer):
        nbytes = found[other].peak_bytes
        if nbytes is None:
            return  # what the run needs is not there
        if min(abs(nbytes - peak), abs(nbytes - last)) > OF_RELEASE * peak:
            words = f"with {package.name} {release_words(other)}"
            yield Decisive(Kind.RELEASE, words, nbytes, _why(run, package, found, nearer, other))
            last = nbytes
        nearer = other


def _released(impl: ImplementationSpec, package: _Package, release: Release) -> ImplementationSpec:
    there: dict[str, Any] = {package.field: release}
    return replace(impl, **there)


def _before(release: Release) -> Release:
    """The last release before this one; before a first minor release any of the major release before it."""
    return (release[0], release[1] - 1) if release[1] else (release[0] - 1, 99)


def _why(
    run: RunSpec, package: _Package, found: Mapping[Release, _AtRelease], nearer: Release, release: Release
) -> str:
    """What ``release`` does that ``nearer`` does not, in the words of the rule that moves the peak most by itself."""
    here, there = (_released(run.implementation, package, one) for one in (nearer, release))
    rules = [
        rule for rule in dict.fromkeys((*found[nearer].rules, *found[release].rules))
        if rule.holds(here) != rule.holds(there)
    ]  # fmt: skip
    if len(rules) > 1:
        base = found[nearer].peak_bytes or 0
        moved: dict[Rule, int] = {}
        for rule in rules:
            alone = _at(run, {package.field: nearer}, flipped=rule).peak_bytes
            moved[rule] = abs((alone or base) - base)
        rules = sorted(rules, key=lambda rule: -moved[rule])
    if not rules:
        return ""
    words = rules[0].after if rules[0].holds(there) else rules[0].before
    return words and f"it {words}"
