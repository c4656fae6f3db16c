"""The phases of a post-training step on one GPU: what trainer and engine hold, and what the driver counts of both.

Order: the engine starts beside the trainer, rolls out, sleeps; old and reference log-probabilities, the critic, the
update; weights go to the engine; its KV cache wakes.

Source: verl 0.9.1 ``workers/engine_workers.py: ActorRolloutRefWorker.update_weights``, ``workers/engine/base.py:
BaseEngineCtx``, ``utils/megatron_utils.py: offload_megatron_model_to_cpu, load_megatron_model_to_gpu``; NeMo-RL
``models/policy/workers/megatron_policy_worker.py: prepare_for_lp_inference, offload_before_refit,
offload_after_refit``; slime ``backends/megatron_utils/actor.py: sleep, wake_up``; TRL ``trainer/grpo_trainer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB, Provenance
from bridge_memory.job.job import reserved_in_training
from bridge_memory.outside.amount import Amount, Range, total
from bridge_memory.outside.context import outside
from bridge_memory.outside.phase import Phase as JobPhase
from bridge_memory.rollout import trainer as of_trainer
from bridge_memory.rollout.inference import InferenceMemory, inference_memory
from bridge_memory.rollout.setup import PostTraining, Reference
from bridge_memory.rollout.trainer import States
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.verdict import Verdict, reserved_bytes, within

#: NeMo-RL's share of free memory for weights on their way (``megatron_policy_worker.py: prepare_refit_info``).
_REFIT_SHARE = 0.3
#: slime's ``--update-weight-buffer-size``: bytes of a bucket.
SLIME_BUCKET = 512 << 20
#: What a trainer keeps of its context and libraries with all tensors paused and process groups destroyed; row 52 of
#: the measured runs (slime v0.1.0, GLM-4.5: 3 to 5 GB).
PAUSED = Amount("context and libraries, process groups destroyed", 1 * GIB, 5 * GIB, Provenance.MEASURED,
                "slime v0.1.0: 3 to 5 GB")  # fmt: skip


class Phase(str, Enum):
    """A stretch of a post-training step."""

    ENGINE_START = "engine start"
    ROLLOUT = "rollout"
    SLEEP = "sleep"
    LOG_PROBS = "old log-probs"
    REFERENCE = "reference"
    VALUES = "critic values"
    CRITIC = "critic update"
    UPDATE = "update"
    SYNC = "weight sync"
    WAKE = "KV cache wakes"
    VALIDATION = "validation"

    def __str__(self) -> str:
        return self.value


#: Phases in which the engine holds all that it ever does.
AWAKE = (Phase.ENGINE_START, Phase.ROLLOUT, Phase.WAKE, Phase.VALIDATION)


class Held(NamedTuple):
    """Which of the trainer's states are on the GPU."""

    parameters: bool
    gradients: bool
    optimizer: bool


class PhaseMemory(NamedTuple):
    """One phase on a rank of one of the trainer's stages, bytes.

    ``allocated``: of the trainer, as torch counts it; ``reserved``: with what its allocator keeps; ``outside``: of it,
    beside torch; ``engine``: the inference engine's, with its process.
    """

    phase: Phase
    stage: int
    allocated: tuple[Amount, ...]
    reserved: Range
    outside: tuple[Amount, ...]
    engine: tuple[Amount, ...]
    #: Bytes of ``engine``: its cache takes what its other parts leave, so that this is no sum of ranges.
    engine_bytes: Range
    #: Why the engine does not start for sure, "" if it does; and whether it can.
    why_not: str = ""
    may_start: bool = True

    @property
    def driver(self) -> Range:
        """What the driver counts on the GPU."""
        found = total([*self.outside, self.engine_bytes])
        return Range(self.reserved.least + found.least, self.reserved.most + found.most)

    def verdict(self, capacity_bytes: int) -> Verdict:
        """Tight: it fits at the lower end of its range, and not at the upper."""
        found = within(self.driver, capacity_bytes)
        if not self.may_start:
            return Verdict.DOES_NOT_FIT
        return Verdict.TIGHT if self.why_not and found is Verdict.FITS else found

    def as_json(self, capacity_bytes: int) -> dict[str, Any]:
        """By ``$defs/phase`` of ``rollout.schema.json``; ranges are [least, most]."""
        return {
            "name": str(self.phase), "stage": self.stage, "verdict": str(self.verdict(capacity_bytes)),
            "driver_bytes": list(self.driver), "trainer_allocated_bytes": list(total(self.allocated)),
            "trainer_reserved_bytes": list(self.reserved), "trainer_outside_bytes": list(total(self.outside)),
            "engine_bytes": list(self.engine_bytes), "why_not": self.why_not,
            "trainer": [amount_json(a) for a in self.allocated], "outside": [amount_json(a) for a in self.outside],
            "engine": [amount_json(a) for a in self.engine],
        }  # fmt: skip


def amount_json(found: Amount) -> dict[str, Any]:
    """As the schema has an amount."""
    return {
        "name": found.name, "bytes": [found.least, found.most], "provenance": str(found.provenance),
        "source": found.source,
    }  # fmt: skip


class Trainer:
    """The trainer's side of a job: every phase on every stage, without the engine. Computed once, whatever share of
    the card the engine gets."""

    def __init__(self, setup: PostTraining, gpu: Gpu) -> None:
        self.setup, self.gpu = setup, gpu
        self.stages = of_trainer.stages_of(setup)
        self._states: dict[int, States] = {}
        self._critic: dict[int, States] = {}

    def states(self, stage: int) -> States:
        """The policy's."""
        if stage not in self._states:
            self._states[stage] = of_trainer.states(self.setup.update_run(), stage)
        return self._states[stage]

    def critic(self, stage: int) -> States:
        """The critic's; its pipeline may have other stages."""
        if stage not in self._critic:
            run = self.setup.critic_run(forward_only=False)
            stage = min(stage, run.parallel.pp - 1)
            self._critic[stage] = of_trainer.states(run, stage, "critic: ")
        return self._critic[stage]

    def resident(self, stage: int, held: Held, *, critic: Held | None = None) -> list[Amount]:
        """What is on the GPU beside a pass: states as ``held``, the critic's as ``critic`` (None: as it rests), and a
        reference that stays."""
        setup, own = self.setup, self.states(stage)
        found = [*own.lasting]
        for names, there in zip(own[:3], held, strict=True):
            found += names if there else ()
        if setup.reference is Reference.GPU:
            found += of_trainer.of_reference(setup.reference_run(), stage)
        if setup.critic is not None:
            at = self.critic(stage)
            stays = not setup.critic.param_offload
            rests = critic or Held(stays, stays, not setup.critic.optimizer_offload)
            for names, there in zip(at[:3], rests, strict=True):
                found += names if there else ()
        return found

    def outside(self, stage: int, phase: Phase) -> tuple[Amount, ...]:
        """Context, communicators that a collective has opened by then, and buffers of libraries."""
        by_then = JobPhase.LOAD if phase is Phase.ENGINE_START else JobPhase.TRAINING
        return outside(self.setup.trainer, self.gpu, stage, by_then)


def held(setup: PostTraining, phase: Phase) -> Held:
    """The policy's states on the GPU in a phase."""
    rests = Held(not setup.param_offload, not setup.param_offload, not setup.optimizer_offload)
    if phase in (*AWAKE, Phase.SLEEP, Phase.VALUES, Phase.CRITIC):
        return rests
    if phase is Phase.UPDATE or (setup.framework == "slime" and phase is not Phase.SYNC):
        return Held(True, True, True)
    if setup.framework == "slime":  # Weights are sent from their host copy while the trainer is paused.
        return Held(False, False, False)
    if phase is Phase.SYNC and _sends_from_host(setup):
        return rests
    if setup.framework == "nemo-rl":
        # The optimizer leaves before weights are sent, gradients with it; in passes it stays unless asked for.
        return Held(True, False, False) if phase is Phase.SYNC else Held(True, False, setup.passes_keep_optimizer)
    if phase is Phase.REFERENCE and setup.reference in (Reference.GPU, Reference.LOADED, Reference.STREAMED):
        return rests
    return Held(True, rests.gradients, rests.optimizer)


def _sends_from_host(setup: PostTraining) -> bool:
    """verl's FSDP2 stages one parameter after another (``fsdp/transformer_impl.py: get_per_tensor_param,
    _skip_staging``, since 0.9)."""
    engine, plain = setup.trainer.data_parallel.engine, setup.trainer.peft.scheme == "none"
    return setup.framework == "verl" and setup.release >= (0, 9) and engine == "fsdp2" and plain


def phases_of(setup: PostTraining) -> list[Phase]:
    """Those that the job has, in order."""
    found = [Phase.ENGINE_START, Phase.ROLLOUT]
    if setup.sleep_level:
        found.append(Phase.SLEEP)
    if setup.log_probs:
        found.append(Phase.LOG_PROBS)
    if setup.reference is not Reference.NONE:
        found.append(Phase.REFERENCE)
    if setup.critic is not None:
        found += [Phase.VALUES, Phase.CRITIC]
    return [*found, Phase.UPDATE, Phase.SYNC, Phase.WAKE, *([Phase.VALIDATION] if setup.validates else [])]


class TrainerPhase(NamedTuple):
    """The trainer's side of a phase on a stage."""

    phase: Phase
    stage: int
    allocated: tuple[Amount, ...]
    reserved: Range
    outside: tuple[Amount, ...]

    @property
    def driver(self) -> Range:
        beyond = total(self.outside)
        return Range(self.reserved.least + beyond.least, self.reserved.most + beyond.most)


def trainer_phases(setup: PostTraining, gpu: Gpu) -> list[list[TrainerPhase]]:
    """Stage -> the trainer's side of every phase. Raises SpecError where the trainer's layout is refused."""
    side = Trainer(setup, gpu)
    updates = {stage: tuple(a for a in _update(side, stage) if a.most) for stage in side.stages}
    held = reserved_in_update(
        setup.update_run(), {stage: total(parts) for stage, parts in updates.items()},
        {stage: total(side.outside(stage, Phase.UPDATE)).most for stage in side.stages},
    )  # fmt: skip
    return [list(_of_stage(side, stage, updates[stage], held[stage])) for stage in side.stages]


def reserved_in_update(run: RunSpec, allocated: Mapping[int, Range], outside: Mapping[int, int]) -> dict[int, Range]:
    """Stage -> what the trainer reserves in the update ``run``, where the stage has ``allocated`` at its peak, with
    what is there beside the step, and ``outside`` bytes beside torch. As in the whole job (``job.job``), the stages
    with the highest driver peak are replayed. Raises SpecError."""
    found = {stage: Range(least, most + reserved_bytes(most)) for stage, (least, most) in allocated.items()}
    known: set[int] = set()
    while (stage := max(found, key=lambda stage: found[stage].most + outside[stage])) not in known:
        known.add(stage)
        held, peak = reserved_in_training(run, stage), of_trainer.update_bytes(run, stage)
        if held is None:
            break
        least, most = allocated[stage]
        more = max(0, most - peak)
        found[stage] = Range(
            max(least, held.least + least - peak) if least >= peak else least,
            max(most, held.most + more + reserved_bytes(more)),
        )  # fmt: skip
    return found


def _of_stage(side: Trainer, stage: int, update: tuple[Amount, ...], held: Range) -> Iterator[TrainerPhase]:
    """``update``: the parts of that phase; ``held``: what they reserve."""
    setup = side.setup
    kept = Range(0, 0)
    for phase in phases_of(setup):
        if phase is Phase.UPDATE:
            parts, found = update, held
        else:
            parts = tuple(a for a in _parts(side, stage, phase) if a.most)
            least, most = total(parts)
            found = Range(least, most + reserved_bytes(most))
        if _empties(setup, phase):
            kept = Range(0, 0)
        # Reserved memory does not fall by itself; but what one pass leaves another uses.
        found = Range(found.least, max(found.most, kept.most))
        kept = found
        rests = phase in (*AWAKE, Phase.SLEEP, Phase.SYNC)
        around = (PAUSED,) if setup.framework == "slime" and rests and setup.param_offload else (
            side.outside(stage, phase)
        )
        yield TrainerPhase(phase, stage, parts, found, around)


def _empties(setup: PostTraining, phase: Phase) -> bool:
    """Whether the allocator's cache is emptied before a phase: around rollouts by all but TRL and ms-swift; with every
    load and offload (verl ``load_megatron_model_to_gpu``, ``offload_fsdp_model_to_cpu``), and by verl's workers up to
    0.7 after every call (``megatron_workers.py: aggressive_empty_cache``)."""
    if setup.framework in ("trl", "ms-swift"):
        return False
    if phase in (*AWAKE, Phase.SLEEP, Phase.SYNC) or setup.param_offload or setup.optimizer_offload:
        return True
    return setup.framework == "verl" and setup.release <= (0, 7)


def _parts(side: Trainer, stage: int, phase: Phase) -> list[Amount]:
    """Of the trainer, as torch counts it."""
    setup, at = side.setup, held(side.setup, phase)
    paused = setup.framework == "slime" and setup.param_offload
    if phase is Phase.ENGINE_START and not paused:
        # Optimizer states are made by the first step, which comes after.
        later = side.states(stage).later | (side.critic(stage).later if setup.critic is not None else frozenset())
        return [a for a in side.resident(stage, at) if a.name not in later]
    if phase in (*AWAKE, Phase.SLEEP):
        return [] if paused else side.resident(stage, at)
    if phase is Phase.LOG_PROBS:
        return [*side.resident(stage, at), *_pass(setup, Phase.LOG_PROBS, stage)]
    if phase is Phase.REFERENCE:
        return [*side.resident(stage, at), *_reference(setup, stage)]
    if phase is Phase.SYNC:
        resident = [] if paused else side.resident(stage, at)
        return [*resident, *_sync(side, stage)]
    critic = setup.critic
    assert critic is not None
    forward = phase is Phase.VALUES
    run = setup.critic_run(forward_only=forward)
    of_critic = min(stage, run.parallel.pp - 1)
    if forward:
        loaded = Held(True, not critic.param_offload, not critic.optimizer_offload)
        return [*side.resident(stage, at, critic=loaded), *of_trainer.forward(run, of_critic)]
    nothing = Held(False, False, False)
    own = [a._replace(name=f"critic: {a.name}") for a in of_trainer.update(run, of_critic)]
    return [*side.resident(stage, at, critic=nothing), *own]


def _pass(setup: PostTraining, phase: Phase, stage: int) -> tuple[Amount, ...]:
    """A pass without a backward: with its limit of tokens, and with the most that balancing makes of it."""
    of = setup.log_prob_run if phase is Phase.LOG_PROBS else setup.reference_run
    tokens = setup.log_prob_tokens if phase is Phase.LOG_PROBS else setup.reference_tokens or setup.log_prob_tokens
    found = of_trainer.forward(of(), stage)
    if setup.rows_are_packed:
        return _shorter(of_trainer.forward(of(setup.longest), stage), found)
    return _between(found, lambda: total(of_trainer.forward(of(setup.worst(tokens)), stage)).most, setup)


def _shorter(short: tuple[Amount, ...], found: tuple[Amount, ...]) -> tuple[Amount, ...]:
    """``found``, of a micro batch whose sequences are all at their longest; at least ``short``: one is."""
    least = dict.fromkeys((a.name for a in found), 0)
    for a in short:
        if a.name in least:
            least[a.name] += a.least
    out = []
    for a in found:
        here = min(least[a.name], a.least)
        least[a.name] -= here
        out.append(a._replace(least=here))
    return tuple(out)


def _between(found: tuple[Amount, ...], worst: Any, setup: PostTraining) -> tuple[Amount, ...]:
    """``found``, and what micro batches over the limit add."""
    if setup.hard_limit or not setup.dynamic:
        return found
    more = worst() - total(found).most
    return (*found, Amount("micro batches over the token limit", 0, max(more, 0), Provenance.ASSUMED,
                           "seqlen_balancing.py: at most a sequence more"))  # fmt: skip


def _reference(setup: PostTraining, stage: int) -> list[Amount]:
    """Weights that are there for the pass, and the pass."""
    run = setup.reference_run()
    if setup.reference is Reference.STREAMED:
        found = of_trainer.forward(of_trainer.streamed(run), stage)
        return [*found]
    loaded = of_trainer.of_reference(run, stage) if setup.reference is Reference.LOADED else ()
    return [*loaded, *_pass(setup, Phase.REFERENCE, stage)]


def _update(side: Trainer, stage: int) -> list[Amount]:
    setup = side.setup
    run = setup.update_run()
    step = of_trainer.update(run, stage)
    if setup.rows_are_packed:
        shorter = setup.update_run(setup.longest).batch.seq_length
        step = _shorter(of_trainer.update(run.with_(batch=replace(run.batch, seq_length=shorter)), stage), step)
    step = _between(
        step, lambda: of_trainer.update_bytes(setup.update_run(setup.worst(setup.update_tokens)), stage), setup
    )
    nothing = Held(False, False, False)
    beside = side.resident(stage, nothing)[len(side.states(stage).lasting) :]
    return [*step, *beside]


def _sync(side: Trainer, stage: int) -> list[Amount]:
    """Weights on their way to the engine, beside the trainer's states and the engine's weights."""
    setup = side.setup
    if setup.trainer.peft.scheme != "none" and setup.sleep_level == 1:
        return [Amount("adapters, whole", 0, 256 << 20, Provenance.ASSUMED, "adapters alone are sent")]
    found = [*of_trainer.export(setup.update_run(), stage)]
    if setup.bucket_bytes:
        found.append(Amount("bucket of weights on their way", setup.bucket_bytes, setup.bucket_bytes,
                            Provenance.FORMULA, "bucketed_weight_transfer.py: BucketedWeightSender"))  # fmt: skip
    return found


def engine_of(setup: PostTraining, gpu: Gpu, side: Sequence[Sequence[TrainerPhase]]) -> InferenceMemory:
    """The engine's memory, started beside the trainer as it rests. Raises SpecError."""
    starts = [of.driver for stage in side for of in stage if of.phase is Phase.ENGINE_START]
    beside = Range(max(one.least for one in starts), max(one.most for one in starts))
    return inference_memory(setup.engine, gpu, other_bytes=beside)


def both(setup: PostTraining, side: Sequence[TrainerPhase], engine: InferenceMemory) -> list[PhaseMemory]:
    """The phases of one stage with the engine in them."""
    found = []
    for of in side:
        parts, nbytes = _engine(setup, of.phase, engine)
        starts = of.phase is Phase.ENGINE_START
        found.append(PhaseMemory(
            of.phase, of.stage, of.allocated, of.reserved, of.outside, parts, nbytes,
            engine.why_not if starts else "", engine.may_start if starts else True,
        ))  # fmt: skip
    return found


def _engine(setup: PostTraining, phase: Phase, engine: InferenceMemory) -> tuple[tuple[Amount, ...], Range]:
    """What the engine holds in a phase."""
    context = _contexts(engine) if setup.in_process else ()
    less = total(context)
    if phase in AWAKE or not setup.sleep_level:
        found = engine.total
        return engine.components, Range(max(0, found.least - less.least), max(0, found.most - less.most))
    if phase is Phase.SYNC:
        parts = engine.awake(("weights",), setup.sleep_level).components
    else:
        parts = engine.asleep(setup.sleep_level).components
    parts = tuple(a for a in parts if a not in context)
    return parts, total(parts)


def _contexts(engine: InferenceMemory) -> tuple[Amount, ...]:
    """The context and kernels of the engine's process, which one process with the trainer has once."""
    return tuple(a for a in engine.components if a.name in ("CUDA context", "loaded kernels"))


def refuse(setup: PostTraining) -> None:
    """Raises SpecError where nothing of the trainer's phases is modelled."""
    reason = of_trainer.why_no_passes(setup.trainer)
    if reason is not None:
        raise SpecError(f"{reason}; use megatron_ddp, or an engine of torch")
