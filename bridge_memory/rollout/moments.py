"""Moments of a post-training step at which frameworks write memory lines: which of the trainer's states are on the GPU,
and what the engine has awake.

Source: verl 0.7.0 ``workers/{fsdp,megatron}_workers.py``, 0.9.1 ``workers/engine_workers.py: update_weights``,
``workers/engine/fsdp/transformer_impl.py``; NeMo-RL ``megatron_policy_worker.py: offload_before_refit``; slime
``backends/megatron_utils/actor.py: sleep, wake_up``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from bridge_memory.components import GIB
from bridge_memory.outside.amount import Amount, Range, total
from bridge_memory.rollout.answer import Rollout
from bridge_memory.rollout.phases import AWAKE, Phase, PhaseMemory
from bridge_memory.rollout.setup import Reference
from bridge_memory.rollout.trainer import states
from bridge_memory.verdict import reserved_bytes


class Trainer(str, Enum):
    """What the trainer has on the GPU."""

    #: As it rests during rollouts; before the first step, without what that step makes.
    RESTS = "trainer rests"
    STARTS = "trainer rests, before the first step"
    WEIGHTS = "weights alone"
    PARAMETERS = "parameters are there"
    GRADIENTS = "parameters and gradients are there"
    ALL = "parameters, gradients and optimizer are there"
    REFERENCE = "the reference is there"
    #: Either at rest or loaded: two functions write the same words.
    EITHER = "trainer rests, or is loaded"
    #: torch counts what is paused as allocated.
    PAUSED = "trainer is paused"


class Engine(str, Enum):
    """What the inference engine has on the GPU."""

    ABSENT = "no engine yet"
    ASLEEP = "engine asleep"
    WEIGHTS = "engine's weights awake"
    AWAKE = "engine awake"


class Moment(NamedTuple):
    """Of a line."""

    trainer: Trainer
    engine: Engine

    def __str__(self) -> str:
        return f"{self.trainer.value}; {self.engine.value}"


_R, _E = Trainer, Engine
_RESTS_ASLEEP = Moment(_R.RESTS, _E.ASLEEP)
#: Words of a line in lower case -> its moment. The first that matches counts.
_ANY: tuple[tuple[str, Moment], ...] = (
    (r"before rollout offload|.*after resume kv.*|after switch to rollout mode", Moment(_R.RESTS, _E.AWAKE)),
    (r"after rollout offload|before resume weights|after switch to trainer mode", _RESTS_ASLEEP),
    (r"after offload model to cpu|after resume weights", Moment(_R.RESTS, _E.WEIGHTS)),
    (r"after load actor params during rollout_mode", Moment(_R.PARAMETERS, _E.ASLEEP)),
    (r"after load actor params( and grad)? during compute_log_prob", Moment(_R.PARAMETERS, _E.ASLEEP)),
    (r"after load actor params and grad during update_actor", Moment(_R.GRADIENTS, _E.ASLEEP)),
    (r"after load actor optimizer during update_actor|(before|after) update_policy", Moment(_R.ALL, _E.ASLEEP)),
    (r"after load ref params.*|after ref compute_log_prob.*", Moment(_R.REFERENCE, _E.ASLEEP)),
    (r"(before|after) compute_log_prob.*", Moment(_R.EITHER, _E.ASLEEP)),
    (r"(before|after) (compute_ref_log_prob|update_actor|compute_values|update_critic)", _RESTS_ASLEEP),
    (r"after offload (actor|ref|critic) .*during (update_.*|compute_.*)", _RESTS_ASLEEP),
    (r"after offload ref params", _RESTS_ASLEEP),
    (r"after fsdp|after actor fsdp init", Moment(_R.WEIGHTS, _E.ABSENT)),
    (r"after offload model/optimizer/grad during init|after offload actor optimizer during init|before building .*",
     Moment(_R.STARTS, _E.ABSENT)),
    (r"gpu memory before optimizer offload", Moment(_R.ALL, _E.ASLEEP)),
    (r"gpu memory after optimizer offload", Moment(_R.PARAMETERS, _E.ASLEEP)),
    (r"gpu memory after refit complete", Moment(_R.RESTS, _E.WEIGHTS)),
    (r"(before offload|after wake_up) model|(before|after) trainrayactor\.clear_memory", Moment(_R.ALL, _E.ASLEEP)),
    (r"(after offload|before wake_up) model", Moment(_R.PAUSED, _E.ASLEEP)),
)  # fmt: skip


def moment_of(found: Rollout, head: str) -> Moment | None:
    """Of a line's words; None: not known."""
    head, setup = head.lower(), found.setup
    later = setup.framework == "verl" and setup.release > (0, 7)
    if re.fullmatch(r"(before|after) update_weights", head):
        if setup.framework == "slime":
            return Moment(_R.PAUSED, _E.WEIGHTS)
        return Moment(_R.EITHER, _E.WEIGHTS)
    if re.fullmatch(r"(before|after) (load|offload)_fsdp_model_to_(gpu|cpu)", head):
        inside = head in ("after load_fsdp_model_to_gpu", "before offload_fsdp_model_to_cpu")
        # From 0.8 on the engine's weights wake first.
        return Moment(_R.PARAMETERS if inside else _R.RESTS, _E.WEIGHTS if later else _E.ASLEEP)
    return next((moment for pattern, moment in _ANY if re.fullmatch(pattern, head)), None)


def predicted(found: Rollout, moment: Moment) -> tuple[Range | None, Range | None]:
    """(the trainer's allocated, the driver's) at a moment. Of verl's lines rank 0 writes them; else on the fullest
    stage."""
    stage = 0 if found.setup.framework == "verl" else found.binds.stage
    phases = {p.phase: p for p in found.stages[stage]}
    resting = phases[Phase.ENGINE_START if moment.trainer is _R.STARTS else Phase.ROLLOUT]
    allocated = _allocated(found, moment.trainer, resting)
    at = {_E.ASLEEP: Phase.SLEEP, _E.WEIGHTS: Phase.SYNC, _E.AWAKE: Phase.ROLLOUT, _E.ABSENT: Phase.ENGINE_START}
    phase = phases.get(at[moment.engine])
    driver = None
    if phase is not None:
        engine = Range(0, 0) if moment.engine is _E.ABSENT else phase.engine_bytes
        beside = total(phase.outside)
        held = Range(0, 0) if moment.trainer is _R.PAUSED else allocated
        driver = Range(held.least + beside.least + engine.least,
                       held.most + reserved_bytes(held.most) + beside.most + engine.most)  # fmt: skip
    if moment.trainer is _R.PAUSED:
        return None, driver
    return with_engine(found, allocated), driver


def peak(found: Rollout) -> Range:
    """torch's maximum since the process began, whichever pass made it."""
    stages = found.stages[:1] if found.setup.framework == "verl" else found.stages
    passes = [total(p.allocated) for stage in stages for p in stage if p.phase not in AWAKE]
    return with_engine(found, Range(max(one.least for one in passes), max(one.most for one in passes)))


def with_engine(found: Rollout, allocated: Range) -> Range:
    """With what an engine in the trainer's process has in torch's allocator beside its pool: graphs, tables."""
    if not found.setup.in_process:
        return allocated
    level = found.setup.sleep_level
    beside = found.engine.in_torch_asleep(level) if level else found.engine.total
    return Range(allocated.least, allocated.most + beside.most)


def _allocated(found: Rollout, trainer: Trainer, resting: PhaseMemory) -> Range:
    setup, base = found.setup, list(resting.allocated)
    own = states(setup.update_run(), resting.stage)
    if trainer is _R.WEIGHTS:
        return total(own.parameters)
    if trainer is _R.REFERENCE:
        phase = next((p for p in found.stages[resting.stage] if p.phase is Phase.REFERENCE), None)
        if phase is not None and setup.reference in (Reference.LOADED, Reference.GPU):
            there = {a.name for a in base}
            base += [a for a in phase.allocated if a.name.startswith("reference: ") and a.name not in there]
        return total(base)
    groups: dict[Trainer, Sequence[tuple[Amount, ...]]] = {
        _R.PARAMETERS: own[:1], _R.GRADIENTS: own[:2], _R.ALL: own[:3], _R.EITHER: own[:2],
    }  # fmt: skip
    if trainer is _R.PARAMETERS and setup.framework == "nemo-rl":
        base = [a for a in base if a not in (*own.gradients, *own.optimizer)]
    there = {a.name for a in base}
    more = total(a for group in groups.get(trainer, ()) for a in group if a.name not in there)
    least = total(base)
    return Range(least.least if trainer is _R.EITHER else least.least + more.least, least.most + more.most)


def binary(text: str) -> int:
    """Bytes of a log's "GB"."""
    return int(float(text) * GIB)
