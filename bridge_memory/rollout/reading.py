"""A framework's configuration as a ``PostTraining``, on a card."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.cards.gpu import Gpu
from bridge_memory.rollout.setup import PostTraining
from bridge_memory.spec import SpecError
from bridge_memory.spec.gpus import check_computes, gpu_assumptions

#: Kinds of configurations.
KINDS = ("verl", "nemo_rl", "slime", "trl", "ms_swift")
#: What only a configuration of a kind has in it, all of them; the first kind counts.
_MARKS = {
    "verl": (r"\bactor_rollout_ref[\"']?[.:]|\bverl\.trainer\.main_ppo",),
    "nemo_rl": (r"^policy:", r"^[ \t]+generation:|^defaults:[ \t]{0,9}\S{0,200}grpo_"),
    "ms_swift": (r"\bswift[ \t]+rlhf\b|--rlhf_type\b|\brlhf_type[\"']?:",),
    "slime": (r"--rollout-(?:max-response-len|batch-size|num-gpus-per-engine|num-gpus)\b",),
    "trl": (r"\b(?:use_vllm|vllm_mode|num_generations)[\"']?:",),
}
#: Kinds that state the number of GPUs.
STATES_GPUS = ("verl", "nemo_rl", "slime")


def kind_of(text: str) -> str:
    """One of ``KINDS`` that a text is a configuration of; "" for none of them."""
    return next((kind for kind, marks in _MARKS.items() if all(re.search(one, text, re.M) for one in marks)), "")


def read(
    kind: str, source: str, words: Sequence[str] = (), *, release: str = "", model: str | None = None,
    world_size: int | None = None, engine_release: str = "", text: str | None = None, alone: bool = False,
) -> PostTraining:  # fmt: skip
    """The job of a configuration.

    Args:
        kind: One of ``KINDS``.
        source: A file, or arguments as text; for verl a release too.
        words: Overrides, KEY=VALUE: verl and NeMo-RL alone.
        release: Of the framework; empty: as its options say.
        model: In place of the configuration's.
        world_size: GPUs, for TRL and ms-swift, whose arguments do not say it.
        engine_release: Of vLLM or SGLang; empty: as the framework takes it.
        text: What would be in the file ``source``, which is then only its name: no file is read, and ``model`` and the
            configuration's are embedded ones.
        alone: Of the policy alone: a critic is not read.

    Raises:
        SpecError: The configuration cannot be read, or asks for what is not modelled.
    """
    given: dict[str, Any] = {"release": release, "model": model, "text": text}
    if kind == "verl":
        from bridge_memory.rollout.sources.verl import read_verl

        setup = read_verl(source, words, critic=not alone, **given)
    elif kind == "nemo_rl":
        from bridge_memory.rollout.sources.nemo_rl import read_nemo_rl

        setup = read_nemo_rl(source, words, **given)
    elif words:
        raise SpecError(f"{words[0]} is no argument of {kind.replace('_', '-')}; put it into its configuration")
    elif kind == "slime":
        from bridge_memory.rollout.sources.slime import read_slime

        setup = read_slime(source, **given)
    else:
        from bridge_memory.rollout.sources.trl import read_ms_swift, read_trl

        reader = {"trl": read_trl, "ms_swift": read_ms_swift}[kind]
        setup = reader(source, world_size=world_size, **given)
    if engine_release:
        setup = setup.with_(engine=replace(setup.engine, release=engine_release))
    return setup


def on_card(setup: PostTraining, gpu: Gpu) -> PostTraining:
    """As the generation of the card computes it. Raises SpecError where it does not."""
    check_computes(gpu, setup.trainer.precision)
    setup = setup.with_(assumptions=(*setup.assumptions, *gpu_assumptions(gpu, setup.trainer)))
    if gpu.arch is None or gpu.arch == setup.trainer.implementation.gpu_arch:
        return setup
    impl = replace(setup.trainer.implementation, gpu_arch=gpu.arch)
    critic = setup.critic
    if critic is not None:
        of_critic = replace(critic.run.implementation, gpu_arch=gpu.arch)
        critic = replace(critic, run=critic.run.with_(implementation=of_critic))
    return setup.with_(trainer=setup.trainer.with_(implementation=impl), critic=critic)
