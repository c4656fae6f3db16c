"""Megatron-LM's arguments, told in any way, -> RunSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.cards.generations import AMD, DEFAULT_GENERATION
from bridge_memory.cards.names import gpu_of_name
from bridge_memory.readers.environment import implementation_of
from bridge_memory.readers.megatron_args.arguments import Arguments
from bridge_memory.readers.megatron_args.beside_model import beside_model, trained
from bridge_memory.readers.megatron_args.container import MegatronLM, container_of
from bridge_memory.readers.megatron_args.parsing import RawArguments, is_namespace, read_arguments
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, Release, Running
from bridge_memory.spec import ModelSpec, RunSpec, SpecError
from bridge_memory.spec.gpus import taken_as_nvidia
from bridge_memory.spec.release import read_release


def run_from_megatron_args(
    args: Mapping[str, object] | Sequence[str] | str | object,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    megatron_core: Release | str | None = None,
    transformer_engine: Release | str | None = None,
    torch: Release | str | None = None,
    env: Mapping[str, object] | None = None,
    model: ModelSpec | None = None,
) -> RunSpec:
    """A RunSpec from Megatron-LM arguments, unset ones at Megatron-LM's defaults for that release.

    ``args``: a dict (``{"--num-layers": 32}``), a list of words, a command line, the text of a launch
    script or of a functional test's YAML, or the parsed arguments (``megatron.training.get_args()``).
    ``world_size``: number of ranks; taken from a script's torchrun options or the parsed arguments where they
    have it. ``gpu``: a GPU's name, for workspace sizes. ``env``: its CUBLAS_WORKSPACE_CONFIG,
    PYTORCH_CUDA_ALLOC_CONF and NVTE_* variables matter. ``model``: what is trained, where the arguments need
    not say it; sizes that both say have to agree. ``megatron_core``, ``transformer_engine``, ``torch``: the
    releases that run, as (0, 16) or "0.16.1".

    Raises SpecError for missing or contradictory arguments. Arguments that change memory and are not
    modelled, and arguments that nobody here knows, are listed in ``RunSpec.not_modelled``.
    """
    # Containers ask megatron_args what a field of the same name is to memory.
    from bridge_memory.readers.config_container import run_of_container

    running = Running(
        read_release(megatron_core, "megatron_core") or DEFAULT_MEGATRON_CORE,
        read_release(transformer_engine, "transformer_engine"),
        read_release(torch, "torch"),
    )
    raw = read_arguments(args)
    config = _container(raw if model is None else beside_model(raw, model), running, world_size, env or {})
    if config.world_size is None:
        raise SpecError("world_size is unknown; give the number of GPUs (--world-size N)")
    arch = gpu_architecture(gpu)
    decided, supposed = implementation_of(config.env, arch, running)
    known = gpu_of_name(gpu) if gpu else None
    if gpu and known and known.vendor == AMD:
        supposed = (*supposed, taken_as_nvidia(gpu, arch))
    run = run_of_container(
        config, running, world_size=config.world_size, gpu_arch=arch, implementation=decided
    )
    if model is not None:
        run = trained(run, raw, model)
    return replace(run, assumptions=(*run.assumptions, *supposed)) if supposed else run


def container(config: Any, running: Running | None = None) -> Any:
    """``config`` itself, or the container that says what Megatron-LM's parsed arguments say. Raises SpecError."""
    if not is_namespace(config):
        return config
    return _container(read_arguments(config), running or Running(), None, {})


def _container(
    raw: RawArguments, running: Running, world_size: int | None, env: Mapping[str, object]
) -> MegatronLM:
    known = {**raw.env, **{k: str(v) for k, v in env.items()}}
    a = Arguments(RawArguments(raw.values, known, raw.world_size, raw.parsed))
    return container_of(a, running, world_size or raw.world_size or a["world_size"])


def gpu_architecture(gpu: str | None) -> str:
    """The generation that a GPU's name says (``generations.GENERATIONS``); hopper where it says none of NVIDIA's."""
    known = gpu_of_name(gpu) if gpu else None
    return (known and known.generation) or DEFAULT_GENERATION
