"""Megatron-LM's arguments, told in any way, -> RunSpec."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.megatron_args.arguments import Arguments
from bridge_memory.readers.megatron_args.container import MegatronLM, container_of
from bridge_memory.readers.megatron_args.parsing import RawArguments, is_namespace, read_arguments
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, Release
from bridge_memory.spec import RunSpec, SpecError

_ARCHITECTURES = (
    (r"GB\d{3}|B\d{3}\b|blackwell|RTX.?(PRO|50)", "blackwell"),
    (r"H\d{2,3}\b|H20\b|GH200|hopper", "hopper"),
    (r"A\d{2,3}\b|RTX.?(30|A\d)|ampere|L40|L4\b|ada", "ampere"),
)


def run_from_megatron_args(
    args: Mapping[str, object] | Sequence[str] | str | object,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    megatron_core: Release | str | None = None,
    transformer_engine: Release | str | None = None,
    env: Mapping[str, object] | None = None,
) -> RunSpec:
    """A RunSpec from Megatron-LM arguments, unset ones at Megatron-LM's defaults for that release.

    ``args``: a dict (``{"--num-layers": 32}``), a list of words, a command line, the text of a launch
    script or of a functional test's YAML, or the parsed arguments (``megatron.training.get_args()``).
    ``world_size``: number of ranks; taken from a script's torchrun options or the parsed arguments where they
    have it. ``gpu``: a GPU's name, for workspace sizes. ``env``: its CUBLAS_WORKSPACE_CONFIG,
    PYTORCH_CUDA_ALLOC_CONF and NVTE_* variables matter.

    Raises SpecError for missing or contradictory arguments. Arguments that change memory and are not
    modelled, and arguments that nobody here knows, are listed in ``RunSpec.not_modelled``.
    """
    core = release(megatron_core) or DEFAULT_MEGATRON_CORE
    config = _container(read_arguments(args), core, world_size, env or {})
    if config.world_size is None:
        raise SpecError("world_size is unknown; give the number of GPUs (--world-size N)")
    return run_from_config_container(
        config,
        world_size=config.world_size,
        gpu_arch=gpu_architecture(gpu),
        megatron_core=core,
        transformer_engine=release(transformer_engine),
        env=config.env,
    )


def container(config: Any, megatron_core: Release = DEFAULT_MEGATRON_CORE) -> Any:
    """``config`` itself, or the container that says what Megatron-LM's parsed arguments say. Raises SpecError."""
    return _container(read_arguments(config), megatron_core, None, {}) if is_namespace(config) else config


def _container(
    raw: RawArguments, core: Release, world_size: int | None, env: Mapping[str, object]
) -> MegatronLM:
    known = {**raw.env, **{k: str(v) for k, v in env.items()}}
    a = Arguments(RawArguments(raw.values, known, raw.world_size, raw.parsed))
    return container_of(a, core, world_size or raw.world_size or a["world_size"])


def release(version: Release | str | None) -> Release | None:
    """``"0.15.0rc8"`` -> ``(0, 15)``; None where there is no release number in the text."""
    if version is None or isinstance(version, tuple):
        return version
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def gpu_architecture(gpu: str | None) -> str:
    """"ampere", "hopper" or "blackwell" from a GPU's name; hopper where the name says nothing."""
    for pattern, architecture in _ARCHITECTURES:
        if gpu and re.search(pattern, gpu, re.IGNORECASE):
            return architecture
    return "hopper"
