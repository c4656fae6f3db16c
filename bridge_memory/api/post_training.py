"""``post_training``: a reinforcement-learning job whose trainer and inference engine share GPUs, phase by phase."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bridge_memory.cards.gpu import Gpu
from bridge_memory.rollout.answer import Rollout, answer
from bridge_memory.rollout.reading import KINDS, on_card, read
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import find_gpu


def post_training(
    kind: str, source: str | os.PathLike[str], gpu: str | Gpu, *, overrides: Sequence[str] = (), release: str = "",
    model: str | None = None, world_size: int | None = None,
) -> Rollout:  # fmt: skip
    """What every phase of a post-training step holds: trainer, inference engine, and what the driver counts of both.

    Args:
        kind: "verl", "nemo_rl", "slime", "trl" or "ms_swift".
        source: The framework's configuration or launch script; for slime and ms-swift also arguments as text, for verl
            also a release, whose defaults hold.
        gpu: The GPU, by a name that ``find_gpu`` knows.
        overrides: KEY=VALUE, as on the command line of verl and NeMo-RL.
        release: Of the framework; empty: the one that knows the options.
        model: A preset, path or Hub id in place of the configuration's.
        world_size: GPUs, where the configuration does not say it (TRL, ms-swift).

    Returns:
        ``phases`` hold the stage with most of each phase, in bytes, between a least and a most; ``limits()`` solves for
        the largest share of the card for the engine and the largest micro batches.

    Raises:
        SpecError: The configuration cannot be read, or asks for what is not modelled.

    Example:
        >>> from bridge_memory import post_training
        >>> job = post_training("verl", "0.9", "H100", overrides=[
        ...     "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        ...     "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        ...     "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        ... ])
        >>> [str(phase.phase) for phase in job.phases][-3:]
        ['weight sync', 'KV cache wakes', 'validation']
        >>> str(job.verdict), job.limits().share.safe is not None
        ('fits', True)
    """
    if kind not in KINDS:
        raise SpecError(f"kind ({show(kind)}) is none of {', '.join(KINDS)}; give one")
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    if isinstance(overrides, str):
        raise SpecError(f"overrides ({show(overrides)}) is one text; give a list of KEY=VALUE")
    setup = read(kind, os.fspath(source), overrides, release=release, model=model, world_size=world_size)
    return answer(on_card(setup, card), card)
