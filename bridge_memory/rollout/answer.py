"""A post-training job on a card: its phases, the one that binds, and what would fit.

``answer`` gives the phases of a job. ``limits`` solves it the other way round: the largest share of the card for the
engine, the largest micro batches, what has to be offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.outside.amount import Range, total
from bridge_memory.rollout import trainer as of_trainer
from bridge_memory.rollout.host import RolloutHost, host_of
from bridge_memory.rollout.inference import InferenceMemory
from bridge_memory.rollout.phases import (
    AWAKE,
    Phase,
    PhaseMemory,
    TrainerPhase,
    amount_json,
    both,
    engine_of,
    refuse,
    reserved_in_update,
    trainer_phases,
)
from bridge_memory.rollout.setup import FRAMEWORKS, PostTraining
from bridge_memory.spec import RecomputeSpec, SpecError
from bridge_memory.verdict import FRAGMENTATION, Verdict, reserved_bytes

SCHEMA = "bridge-memory/rollout/1"
#: Shares are found to this digit, as people write them.
_STEP = 100
#: Token limits are found to a multiple of this.
_TOKENS = 1024
_MOST_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Rollout:
    """A post-training job on one GPU model: of each phase the stage with the highest driver peak, and every stage.

    Example:
        >>> from bridge_memory import post_training
        >>> job = post_training("slime", "--colocate --hf-checkpoint Qwen/Qwen3-4B --actor-num-gpus-per-node 8 "
        ...                     "--rollout-max-response-len 4096 --tensor-model-parallel-size 2", "H100")
        >>> job.binds.driver.most <= job.gpu.capacity_bytes
        True
    """

    setup: PostTraining
    gpu: Gpu
    phases: tuple[PhaseMemory, ...]
    stages: tuple[tuple[PhaseMemory, ...], ...]
    engine: InferenceMemory
    host: RolloutHost
    #: Trainer's side, without the engine: what ``limits`` starts from.
    side: tuple[tuple[TrainerPhase, ...], ...]

    @property
    def verdict(self) -> Verdict:
        """That of the phase that binds; unknown where something is not modelled and it does not fail for sure."""
        found = self.binds.verdict(self.gpu.capacity_bytes)
        return Verdict.UNKNOWN if self.not_modelled and found is not Verdict.DOES_NOT_FIT else found

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Options that can move memory and are not modelled."""
        return tuple(dict.fromkeys((*self.setup.not_modelled, *self.setup.trainer.not_modelled)))

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Of the job, the trainer and the engine."""
        return tuple(dict.fromkeys((
            *self.setup.assumptions, *self.setup.trainer.assumptions, *self.engine.assumptions,
        )))  # fmt: skip

    @property
    def first_failing(self) -> PhaseMemory | None:
        """The first phase that does not fit for sure."""
        capacity = self.gpu.capacity_bytes
        return next((p for p in self.phases if p.verdict(capacity) is Verdict.DOES_NOT_FIT), None)

    @property
    def binds(self) -> PhaseMemory:
        """The first phase that does not fit; else the one with least room."""
        return self.first_failing or max(self.phases, key=lambda p: p.driver.most)

    def limits(self) -> Limits:
        """What would fit. Raises SpecError."""
        return limits(self)

    def as_json(self, solved: Limits | None = None) -> dict[str, Any]:
        """By the schema ``SCHEMA``; ``solved``: what ``limits`` gave."""
        return as_json(self, solved)

    @property
    def share(self) -> float | None:
        """gpu_memory_utilization or mem_fraction_static, as it was given."""
        return getattr(self.setup.engine, self.setup.share_name)  # type: ignore[no-any-return]

    def phase(self, name: Phase) -> PhaseMemory | None:
        """The phase of this name, on its fullest stage."""
        return next((p for p in self.phases if p.phase is name), None)


class Share(NamedTuple):
    """The largest share of a card for the engine."""

    #: At which every phase fits at the upper end of its range; None: none does.
    safe: float | None
    #: At which every phase may fit, at the lower end.
    possible: float | None
    #: The phase that keeps ``safe`` from rising, or that fits at no share.
    binds: Phase
    #: The engine's cache at ``safe``: tokens, and sequences of the longest length.
    kv_tokens: Range | None
    sequences: Range | None


class Offload(NamedTuple):
    """A choice of what leaves the GPU during rollouts, and the share that it allows."""

    parameters: bool
    optimizer: bool
    safe: float | None
    binds: Phase


@dataclass(frozen=True, slots=True)
class Limits:
    """What would fit: the largest share of a card for the engine, the largest micro batches, what to offload.

    Example:
        >>> from bridge_memory import post_training
        >>> found = post_training("slime", "--colocate --hf-checkpoint Qwen/Qwen3-4B --actor-num-gpus-per-node 8 "
        ...                       "--rollout-max-response-len 4096 --tensor-model-parallel-size 2", "H100").limits()
        >>> found.share.safe <= found.share.possible
        True
    """

    share: Share
    #: Largest tokens of a micro batch at which the update and the pass for old log-probabilities fit for sure, as their
    #: option says it (a GPU); None: no such limit fits.
    update_tokens: int | None
    log_prob_tokens: int | None
    offloads: tuple[Offload, ...]
    #: What to change first; "" where all fits.
    first: str


def answer(setup: PostTraining, gpu: Gpu) -> Rollout:
    """The phases of a job on a card. Raises SpecError."""
    refuse(setup)
    side = trainer_phases(setup, gpu)
    return _answer(setup, gpu, side)


def _answer(setup: PostTraining, gpu: Gpu, side: Sequence[Sequence[TrainerPhase]]) -> Rollout:
    engine = engine_of(setup, gpu, side)
    stages = [both(setup, stage, engine) for stage in side]
    worst = tuple(max(of, key=lambda phase: phase.driver.most) for of in zip(*stages, strict=True))
    return Rollout(
        setup, gpu, worst, tuple(map(tuple, stages)), engine, host_of(setup, engine), tuple(map(tuple, side))
    )


def limits(found: Rollout) -> Limits:
    """What would fit. Raises SpecError."""
    share = largest_share(found)
    setup = found.setup
    room = _room(found)
    update = _largest_tokens(
        found, Phase.UPDATE, lambda tokens, stage: of_trainer.update_bytes(setup.update_run(tokens), stage), room
    )
    logs = None
    if setup.log_probs:
        logs = _largest_tokens(
            found, Phase.LOG_PROBS,
            lambda tokens, stage: total(of_trainer.forward(setup.log_prob_run(tokens), stage)).most, room,
        )  # fmt: skip
    offloads = tuple(_offloads(found))
    return Limits(share, update, logs, offloads, _first(found, share, update, logs, offloads))


def largest_share(found: Rollout) -> Share:
    """By bisection: with a larger share no phase needs less, and the engine starts from some share on."""
    capacity, setup, gpu = found.gpu.capacity_bytes, found.setup, found.gpu
    known: dict[int, tuple[InferenceMemory, list[PhaseMemory]]] = {}

    def at(step: int) -> tuple[InferenceMemory, list[PhaseMemory]]:
        if step not in known:
            other = setup.with_share(step / _STEP)
            engine = engine_of(other, gpu, found.side)
            known[step] = engine, [p for stage in found.side for p in both(other, stage, engine)]
        return known[step]

    def largest(*good: Verdict, surely: bool) -> int:
        def small(step: int) -> bool:  # It fails for want of a share, not of free memory.
            engine = at(step)[0]
            failed = not engine.starts if surely else not engine.may_start
            return failed and not engine.why_not.startswith("free memory")

        def fits(step: int) -> bool:
            return all(p.verdict(capacity) in good for p in at(step)[1])

        low = _bisected(0, _STEP, small) + 1
        if low >= _STEP or not fits(low):
            return 0
        return _bisected(low, _STEP, fits)

    possible = largest(Verdict.FITS, Verdict.TIGHT, surely=False)
    safe = largest(Verdict.FITS, surely=True) if possible else 0
    if safe:
        engine, _ = at(safe)
        beyond = at(min(safe + 1, _STEP - 1))[1]
        binding = next((p.phase for p in beyond if p.verdict(capacity) is not Verdict.FITS), found.binds.phase)
        return Share(
            safe / _STEP, possible / _STEP, binding, engine.kv_tokens, engine.concurrent_sequences(setup.longest)
        )
    # The phase that fits at no share: of those without the engine's cache the worst, else the engine's start.
    others = [p for p in found.phases if p.phase not in AWAKE and p.verdict(capacity) is not Verdict.FITS]
    binding = max(others, key=lambda p: p.driver.most).phase if others else Phase.ENGINE_START
    return Share(None, possible / _STEP or None, binding, None, None)


def _bisected(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The last number from ``low`` below ``high`` for which ``holds``, which does for ``low`` and none above one."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _room(found: Rollout) -> dict[Phase, dict[int, int]]:
    """phase -> stage -> bytes that its passes may take beside everything else, at the upper ends."""
    capacity = found.gpu.capacity_bytes
    room: dict[Phase, dict[int, int]] = {}
    for stage in found.stages:
        for p in stage:
            beyond = total([*p.outside, p.engine_bytes]).most
            room.setdefault(p.phase, {})[p.stage] = capacity - beyond
    return room


def _largest_tokens(
    found: Rollout, phase: Phase, passes: Callable[[int, int], int], room: dict[Phase, dict[int, int]]
) -> int | None:
    """Tokens a GPU, before context parallelism multiplies them."""
    setup, cp = found.setup, found.setup.trainer.parallel.cp
    if phase not in room:
        return None
    beside: dict[int, int] = {}
    for stage in found.stages:
        for p in stage:
            if p.phase is phase:
                now = setup.update_tokens if phase is Phase.UPDATE else setup.log_prob_tokens
                beside[p.stage] = total(p.allocated).most - passes(setup.worst(now), p.stage)

    def needs(tokens: int) -> dict[int, int] | None:
        try:
            return {stage: passes(setup.worst(tokens), stage) + beside[stage] for stage in beside}
        except SpecError:
            return None

    # What an update reserves beyond its peak is about the same share of a larger one.
    updates = [p for of in found.stages for p in of if p.phase is phase is Phase.UPDATE]
    shares = {p.stage: p.reserved.most / total(p.allocated).most - 1 for p in updates}

    def by_share(number: int) -> bool:
        all_of = needs(number * unit)
        return all_of is not None and all(
            n + reserved_bytes(n, shares.get(stage, FRAGMENTATION)) <= room[phase][stage] for stage, n in all_of.items()
        )  # fmt: skip

    def fits(number: int) -> bool:
        all_of = needs(number * unit)
        if all_of is None:
            return False
        held = reserved_in_update(
            setup.update_run(number * unit), {stage: Range(n, n) for stage, n in all_of.items()},
            {stage: -nbytes for stage, nbytes in room[phase].items()},
        )  # fmt: skip
        return all(each.most <= room[phase][stage] for stage, each in held.items())

    unit = _TOKENS * cp if setup.dynamic else setup.longest
    least = -(-setup.longest // unit) if setup.dynamic else 1
    most = _MOST_TOKENS // unit
    low = _last(by_share, least - 1, most)
    if phase is Phase.UPDATE:
        low = _near(fits, low, least - 1, most)
    if low < least:
        return None
    return low * unit // cp if setup.dynamic else low


def _last(holds: Callable[[int], bool], low: int, most: int, step: int = 1) -> int:
    """The last number from ``low`` to ``most`` for which ``holds``, as for ``low``: by steps that double, then by
    halving."""
    while low + step < most and holds(low + step):
        low, step = low + step, 2 * step
    return _bisected(low, min(low + step, most), holds)


def _near(holds: Callable[[int], bool], guess: int, least: int, most: int) -> int:
    """As ``_last`` from ``least``, near ``guess``."""
    step, low = 1, guess
    while low > least and not holds(low):
        low, step = max(least, low - step), 2 * step
    return _last(holds, low, most) if low == guess else _bisected(low, low + step // 2, holds)


def _offloads(found: Rollout) -> list[Offload]:
    """The choices that the framework has, the least offloading first."""
    setup = found.setup
    if setup.framework in ("slime", "nemo-rl"):  # Both always offload everything.
        choices = [(True, True)]
    elif setup.framework == "trl":  # It has no such option.
        choices = [(False, False)]
    else:
        choices = [(False, False), (False, True), (True, True)]
    out = []
    for parameters, optimizer in choices:
        if (parameters, optimizer) == (setup.param_offload, setup.optimizer_offload):
            share = largest_share(found)
        else:
            other = setup.with_(param_offload=parameters, optimizer_offload=optimizer)
            share = largest_share(answer(other, found.gpu))
        out.append(Offload(parameters, optimizer, share.safe, share.binds))
    return out


def _first(found: Rollout, share: Share, update: int | None, logs: int | None, offloads: Sequence[Offload]) -> str:
    """What to change first: of the changes that make every phase fit for sure, the one that costs least; where no
    single one does, the words say so."""
    capacity, setup = found.gpu.capacity_bytes, found.setup
    if all(p.verdict(capacity) is Verdict.FITS for p in found.phases):
        return ""
    if share.safe:
        return f"{setup.share_name} {share.safe:g}"
    for words, changed in _changes(setup, update, logs):
        try:
            if (safe := largest_share(answer(changed, found.gpu)).safe) is not None:
                now = found.share
                lower = f", and {setup.share_name} {safe:g}" if now is None or safe < now else ""
                return words + lower
        except SpecError:
            continue
    binds = f"no single change makes {share.binds} fit for sure"
    return f"{binds}: a layout that divides the model further (--search), or more GPUs" if setup.of_megatron else (
        f"{binds}: more GPUs"
    )  # fmt: skip


def _changes(setup: PostTraining, update: int | None, logs: int | None) -> Iterator[tuple[str, PostTraining]]:
    """Changes by what they cost, with the words for each."""
    run = setup.trainer
    if not setup.sleep_level and setup.framework != "trl":
        engine = replace(setup.engine, sleep_mode=True)
        yield "let the engine sleep while the trainer runs", setup.with_(sleep_level=2, engine=engine)
    if setup.framework in ("verl", "ms-swift"):
        if not setup.optimizer_offload:
            yield "offload the optimizer", setup.with_(optimizer_offload=True)
        if not (setup.param_offload and setup.optimizer_offload):
            yield "offload parameters and optimizer", setup.with_(param_offload=True, optimizer_offload=True)
    unit = run.parallel.cp if setup.dynamic else setup.longest
    words: list[str] = []
    fields: dict[str, Any] = {}
    for name, most, what in (("update_tokens", update, "the update"), ("log_prob_tokens", logs, "log-probs")):
        if most and most * unit < getattr(setup, name):
            fields[name] = most * unit
            of = "tokens" if setup.dynamic else "sequences"
            words.append(f"at most {most:,} {of} a GPU in a micro batch of {what}")
    if fields:
        yield " and ".join(words), setup.with_(**fields)
    if setup.framework == "verl" and not setup.fused_kernels:
        yield "fused kernels (use_fused_kernels)", setup.with_(fused_kernels=True)
    if run.implementation.torch_layers:
        if not run.transformers.gradient_checkpointing:
            hf = replace(run.transformers, gradient_checkpointing=True, use_reentrant=False)
            yield "gradient checkpointing", setup.with_(trainer=run.with_(transformers=hf))
        return
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    recomputed = run.with_(recompute=full)
    if run.recompute != full:
        yield "recompute every layer (recompute_granularity full)", setup.with_(trainer=recomputed)
    if not run.optimizer.optimizer_cpu_offload and run.data_parallel.use_distributed_optimizer:
        optimizer = replace(run.optimizer, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
        yield "the optimizer on the host (optimizer_cpu_offload)", setup.with_(trainer=run.with_(optimizer=optimizer))
        both_of = "the optimizer on the host (optimizer_cpu_offload) and every layer recomputed"
        yield both_of, setup.with_(trainer=recomputed.with_(optimizer=optimizer))


def as_json(found: Rollout, solved: Limits | None = None) -> dict[str, Any]:
    """By the schema ``SCHEMA``; ranges are [least, most] in bytes."""
    setup, capacity, engine = found.setup, found.gpu.capacity_bytes, found.engine
    failing = found.first_failing
    over = None
    if failing is not None:
        over = max(0, failing.driver.least - capacity)
    return {
        "schema": SCHEMA, "framework": FRAMEWORKS[setup.framework],
        "release": ".".join(map(str, setup.release)) if setup.release != (0, 0) else None,
        "model": setup.model.name, "gpu": found.gpu.name, "gpus": setup.trainer.parallel.world_size,
        "capacity_bytes": capacity, "verdict": str(found.verdict),
        "binds": {"phase": str(found.binds.phase), "stage": found.binds.stage},
        "first_failing": None if failing is None else {
            "phase": str(failing.phase), "stage": failing.stage, "over_bytes": over, "why": failing.why_not,
        },
        "phases": [p.as_json(capacity) for p in found.phases],
        "stages": [[p.as_json(capacity) for p in stage] for stage in found.stages],
        "engine": {
            "framework": setup.engine.framework, "release": ".".join(map(str, setup.engine.release_numbers)),
            "share": setup.share_name, "value": found.share, "starts": engine.starts, "may_start": engine.may_start,
            "why_not": engine.why_not, "kv_tokens": list(engine.kv_tokens),
            "kv_bytes_per_token": engine.kv_bytes_per_token, "blocks": list(engine.num_blocks),
            "longest": setup.longest, "sequences": list(engine.concurrent_sequences(setup.longest)),
            "components": [amount_json(a) for a in engine.components],
        },
        "host": found.host.as_json(),
        "limits": None if solved is None else {
            "share": {
                "name": setup.share_name, "safe": solved.share.safe, "possible": solved.share.possible,
                "binds": str(solved.share.binds),
                "kv_tokens": solved.share.kv_tokens and list(solved.share.kv_tokens),
                "sequences": solved.share.sequences and list(solved.share.sequences),
            },
            "unit": "tokens" if setup.dynamic else "sequences",
            "update": solved.update_tokens, "log_probs": solved.log_prob_tokens,
            "offloads": [
                {"parameters": o.parameters, "optimizer": o.optimizer, "safe": o.safe, "binds": str(o.binds)}
                for o in solved.offloads
            ],
            "first": solved.first,
        },
        "assumptions": list(found.assumptions), "not_modelled": list(found.not_modelled),
    }  # fmt: skip
