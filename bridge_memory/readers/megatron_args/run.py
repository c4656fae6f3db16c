"""Megatron-LM's arguments, in any form -> RunSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.cards.generations import AMD, DEFAULT_GENERATION
from bridge_memory.cards.names import gpu_of_name
from bridge_memory.readers.environment import implementation_of
from bridge_memory.readers.megatron_args.arguments import Arguments
from bridge_memory.readers.megatron_args.container import MegatronLM, container_of
from bridge_memory.readers.megatron_args.model_override import with_model, with_model_sizes
from bridge_memory.readers.megatron_args.parsing import RawArguments, is_namespace, read_arguments
from bridge_memory.releases import Release, Running
from bridge_memory.spec import ModelSpec, RunSpec, SpecError
from bridge_memory.spec.gpus import amd_assumption
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
    """Read Megatron-LM's arguments as a run. Unset arguments have Megatron-LM's defaults for the release.

    Args:
        args: A command line, a list of words, a dict such as ``{"--num-layers": 32}``, the text of a launch script or
            of a functional test's YAML, or the parsed arguments (``megatron.training.get_args()``).
        world_size: GPUs of the job. None: those of the script's torchrun options or of the parsed arguments.
        gpu: A GPU's name, which determines the sizes of workspaces.
        megatron_core: The release that runs, as (0, 16) or "0.16.1".
        transformer_engine: Likewise.
        torch: Likewise.
        env: The job's environment. CUBLAS_WORKSPACE_CONFIG, PYTORCH_CUDA_ALLOC_CONF and NVTE_* are read.
        model: The model, which overrides the architecture in the arguments. Sizes that both give must agree.

    Returns:
        The run. Its ``not_modelled`` lists arguments that change memory and are not modelled, and unknown ones.

    Raises:
        SpecError: Arguments are missing, or contradict each other.

    Example:
        >>> from bridge_memory import run_from_megatron_args
        >>> run = run_from_megatron_args(
        ...     "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --bf16 "
        ...     "--max-position-embeddings 4096 --vocab-size 32000 --micro-batch-size 1 --global-batch-size 64 "
        ...     "--tensor-model-parallel-size 2",
        ...     world_size=8,
        ... )
        >>> run.num_microbatches
        16
    """
    # config_container imports megatron_args: imported here, there is no circle.
    from bridge_memory.readers.config_container import run_of_container

    running = Running(
        read_release(megatron_core, "megatron_core"),
        read_release(transformer_engine, "transformer_engine"),
        read_release(torch, "torch"),
    )
    raw = read_arguments(args)
    config = _container(raw if model is None else with_model_sizes(raw, model), running, world_size, env or {})
    if config.world_size is None:
        raise SpecError("world_size is unknown; give the number of GPUs (--world-size N)")
    arch = gpu_architecture(gpu)
    decided, assumed = implementation_of(config.env, arch, running)
    known = gpu_of_name(gpu) if gpu else None
    if gpu and known and known.vendor == AMD:
        assumed = (*assumed, amd_assumption(gpu, arch))
    run = run_of_container(
        config, running, world_size=config.world_size, gpu_arch=arch, implementation=decided
    )
    if model is not None:
        run = with_model(run, raw, model)
    return replace(run, assumptions=(*run.assumptions, *assumed)) if assumed else run


def container(config: Any, running: Running | None = None) -> Any:
    """A container for ``config``: Megatron-LM's parsed arguments are converted, anything else is returned unchanged.
    Raises SpecError."""
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
    """The NVIDIA generation that a GPU's name implies (``generations.GENERATIONS``), or the default one."""
    known = gpu_of_name(gpu) if gpu else None
    return (known and known.generation) or DEFAULT_GENERATION
