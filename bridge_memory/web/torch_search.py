"""The search of the page under PyTorch's engines and DeepSpeed: other configurations of an engine, or other engines."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.template import template
from bridge_memory.emit.torch_words import checkpointing_words, offload_words, overlap_words, sharded_words
from bridge_memory.plan.torch.space import AXES, Space, engines_of, is_of
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.run import GROUPS

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.plan.found import Found, Row

_ENGINE, _GPUS, _BATCH = "data_parallel.engine", "parallel.world_size", "batch.global_batch_size"


def search(
    args: argparse.Namespace, gpu: Gpu, vary: Collection[str], progress: Callable[[int, int], None]
) -> tuple[Found, int, bool]:
    """(what fits, the sequences of a step, whether they were given). ``args``: flags of the run; ``vary``: axes of
    ``plan.torch.space``, of which "engine" means every engine that has a step time. Raises SpecError."""
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.torch.search import search as searched
    from bridge_memory.speed.hardware import hardware_of

    gpus = getattr(args, _GPUS, None)
    if gpus is None:
        raise SpecError("--num-gpus is missing; say on how many GPUs the model has to train")
    given = hasattr(args, _BATCH)
    if not given:
        setattr(args, _BATCH, 8 * gpus)
    engines = engines_of(["any"] if "engine" in vary else [getattr(args, _ENGINE)], gpus)
    for name in {field for axis in vary for field in AXES[axis]} - {_ENGINE}:
        vars(args).pop(name, None)
    bases: dict[str, RunSpec] = {}
    refusal: SpecError | None = None
    for engine in engines:
        try:
            bases[engine] = template(_under(args, engine), gpu, ())[1]
        except SpecError as error:
            refusal = refusal or error
    if not bases and refusal is not None:
        raise refusal
    hardware = hardware_of(gpu.name)
    space = Space(bases, hardware.domain, frozenset(AXES.keys() - set(vary)))
    found = searched(space, hardware, capacity=gpu.capacity_bytes, outside=partial(outside_bytes_of, gpu=gpu),
                     progress=progress)  # fmt: skip
    return found, getattr(args, _BATCH), given


def _under(args: argparse.Namespace, engine: str) -> argparse.Namespace:
    """The flags under an engine, without those of another."""
    flags = copy.copy(args)
    for name in [name for name in vars(flags) if "." in name and not is_of(engine, name)]:
        delattr(flags, name)
    setattr(flags, _ENGINE, engine)
    return flags


def row(one: Row[Any], given: Collection[str]) -> dict[str, Any]:
    """A row, with the options that make it of a question with the options ``given``; None drops one."""
    run = one.run
    return {
        "options": _options(run, given), "engine": run.data_parallel.engine, "mbs": run.batch.micro_batch_size,
        "microbatches": run.num_microbatches, "recompute": checkpointing_words(run), "sharded": sharded_words(run),
        "overlap": overlap_words(run), "offload": offload_words(run), "peak_bytes": one.peak, "stage": one.stage,
        "headroom_bytes": one.headroom, "step_seconds": one.time.seconds,
        "tokens_per_second_per_gpu": one.tokens_per_second_per_gpu,
    }  # fmt: skip


def _options(run: RunSpec, given: Collection[str]) -> dict[str, Any]:
    from bridge_memory.web.options import options

    engine = run.data_parallel.engine
    varied = {field for fields in AXES.values() for field in fields}
    chosen: dict[str, Any] = {}
    for option in options().values():
        group, _, field = option.field.partition(".")
        if option.field in varied and is_of(engine, option.field):
            value = getattr(getattr(run, group), field)
            if value != getattr(GROUPS[group](), field):
                chosen[option.name] = option.plain(value)
            elif option.name in given:
                chosen[option.name] = None
        elif option.name in given and (option.field in varied or not is_of(engine, option.field)):
            chosen[option.name] = None
    return {**chosen, "num-gpus": run.parallel.world_size, "global-batch-size": run.batch.global_batch_size,
            "engine": engine}  # fmt: skip
