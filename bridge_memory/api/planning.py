"""``search``, ``fit``, ``whatif`` and ``balance``: which configurations fit, what to recompute or offload, what a
change frees, how layers are split."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp, lcm
from typing import TYPE_CHECKING, Any

from bridge_memory.cards.gpu import Gpu
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ModelSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.fields import MOST_GPUS
from bridge_memory.spec.gpus import check_computes, find_gpu, gpu_assumptions
from bridge_memory.spec.layout import layout
from bridge_memory.spec.parts import ENGINE_OF_FRAMEWORK, WITH_MEGATRON_LAYOUTS
from bridge_memory.spec.run import GROUPS
from bridge_memory.verdict import largest_peak

if TYPE_CHECKING:
    from bridge_memory.plan.changes import WhatIf
    from bridge_memory.plan.found import Found
    from bridge_memory.plan.megatron.balance import Balanced
    from bridge_memory.plan.megatron.fit import Fitted
    from bridge_memory.speed.constants import Constants
    from bridge_memory.speed.hardware import Hardware

MOST_JOBS = 256

Ranges = Mapping[str, tuple[int, int]]


def search(
    run: RunSpec | ModelSpec | str | os.PathLike[str],
    *,
    gpu: str | Gpu,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    engine: str | Sequence[str] | None = None,
    keep: Iterable[str] = (),
    vary: Iterable[str] | None = None,
    fix: Iterable[str] = (),
    exclude: Iterable[str] = (),
    ranges: Mapping[str, tuple[int, int]] | None = None,
    exhaustive: bool = False,
    headroom_bytes: int = 0,
    mixed_precision: str | None = None,
    measured: Sequence[tuple[RunSpec, float]] = (),
    jobs: int | None = None,
    backend: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Found:
    """Find the configurations of a run that fit a GPU, the fastest first.

    The parallel sizes, the split of the layers, the micro batch and the recomputation of ``run`` vary.
    Everything else of it stays.

    Args:
        run: What is trained: a RunSpec, or a model as ``resolve_model`` takes it, with every other setting at its
            default.
        gpu: The GPU, by a name that ``find_gpu`` knows.
        num_gpus: GPUs of the job. None: ``world_size`` of the run.
        global_batch_size: Sequences of a step, equal for all configurations. None: that of the run.
        engine: An engine, several, or "any", "fsdp" or "zero". None: that of the run.
        keep: Axes that stay as the run has them: tp, pp, vpp, cp, ep, etp, mbs, split, recompute. Of PyTorch's and
            DeepSpeed's engines: mbs, checkpointing, reshard, shard, accumulation, overlap, offload, attention, liger.
        vary: The only axes that vary. None: all but ``keep``; offload, attention and liger vary only where they are
            named. Under megatron-core's engines items are those of ``--vary``: ``"tp=2/4"``, ``"pp=1..8"``,
            ``"recompute=none/mlp+moe_act"``, ``"precision=bf16/mxfp8"``. Of a model that is named alone the dispatcher
            of tokens varies too.
        fix: Items with one value each, such as ``"tp=4"``. For megatron-core's engines.
        exclude: Items whose values are left out, such as ``"ep=1"``, ``"recompute=full"``. For megatron-core's engines.
        ranges: Axis -> its smallest and largest value, of tp, pp, vpp, cp, ep and mbs.
        exhaustive: Every size that divides, instead of powers of two.
        headroom_bytes: Bytes that must stay free on the GPU beside the margin.
        mixed_precision: "bf16" or "fp16": dtypes as accelerate sets them. For PyTorch's and DeepSpeed's engines.
        measured: Runs and the seconds of their measured steps, by which the time model is calibrated.
        jobs: Processes. None: 1, or with ``backend`` all that it has.
        backend: A backend of joblib: "loky", "dask", "dask=ADDRESS" or "ray".
        cache: A folder that keeps the cost of blocks for later searches. For megatron-core's engines.
        progress: Called with the number of configurations evaluated, and of those that fit.

    Returns:
        ``rows`` hold ``run``, ``peak`` and ``headroom`` in bytes, and ``time.seconds`` of a step. ``front()`` holds the
        rows than which no other is both faster and smaller. ``refused`` counts refusals by field, ``left_out`` says
        which values that were asked for no layout can have.

    Raises:
        SpecError: The GPUs or the batch are missing, an axis is unknown, or no layout divides the GPUs.

    Example:
        >>> from bridge_memory import search
        >>> found = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=8, global_batch_size=64)
        >>> fastest = found.rows[0]
        >>> fastest.run.parallel.data_parallel_size, fastest.run.batch.global_batch_size
        (8, 64)
        >>> all(row.headroom >= 0 for row in found.rows)
        True
        >>> engines = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=8, global_batch_size=64, engine="fsdp",
        ...                  vary=["engine", "checkpointing"])
        >>> sorted({row.run.data_parallel.engine for row in engines.rows})
        ['fsdp1', 'fsdp2']
        >>> few = search("meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=8, global_batch_size=64,
        ...              vary=["tp=1..4", "mbs"], fix=["recompute=none"], exclude=["tp=2"])
        >>> sorted({row.run.parallel.tp for row in few.rows})
        [1, 4]
    """
    card = _card(gpu)
    given = run if isinstance(run, RunSpec) else None
    if num_gpus is None:
        if given is None:
            raise SpecError("num_gpus is missing; say on how many GPUs the model has to train")
        num_gpus = given.parallel.world_size
    if type(num_gpus) is not int or not 1 <= num_gpus < MOST_GPUS:
        raise SpecError(f"num_gpus ({show(num_gpus)}) is no number of GPUs; give 1 or more")
    if global_batch_size is None and given is not None:
        global_batch_size = given.batch.global_batch_size
    if global_batch_size is None:
        raise SpecError("global_batch_size is missing; configurations are compared at the same sequences per step")
    BatchSpec(global_batch_size=global_batch_size)  # refuses what is no number of sequences
    if backend is not None and not isinstance(backend, str):
        raise SpecError(f"backend ({show(backend)}) is no name; give loky, dask, dask=ADDRESS or ray")
    if cache is not None and not isinstance(cache, (str, os.PathLike)):
        raise SpecError(f"cache ({show(cache)}) is no path; give a folder")
    if progress is not None and not callable(progress):
        raise SpecError(f"progress ({show(progress)}) is no function; give one of two numbers")
    if jobs is not None and (type(jobs) is not int or not 1 <= jobs <= MOST_JOBS):
        raise SpecError(f"jobs ({show(jobs)}) is not a number of processes; give 1 to {MOST_JOBS}")
    _check_headroom(headroom_bytes)
    if not isinstance(run, RunSpec):
        run = RunSpec(model=run if isinstance(run, ModelSpec) else resolve_model(run))
    fixing, excluding = _names("fix", fix), _names("exclude", exclude)
    words = _engine_words(engine, run)
    options: dict[str, Any] = {
        "capacity": card.capacity_bytes - headroom_bytes, "outside": partial(outside_bytes_of, gpu=card),
        "progress": progress, "backend": backend, "jobs": jobs or (1 if backend is None else -1),
    }  # fmt: skip
    if len(words) == 1 and words[0] in WITH_MEGATRON_LAYOUTS:
        if mixed_precision is not None:
            raise SpecError(
                f"mixed_precision ({show(mixed_precision)}) is for PyTorch's and DeepSpeed's engines; drop it, or set "
                "precision of the run"
            )
        if given is not None and vary is None:  # all settings stay
            fixing += [] if any(item.startswith("dispatcher") for item in fixing) else ["dispatcher"]
        return _search_megatron(
            _with_engine(run, words[0]), card, num_gpus, global_batch_size, keep, vary, fixing, excluding, ranges,
            exhaustive, measured, None if cache is None else os.fspath(cache), options,
        )  # fmt: skip
    for argument, items in (("fix", fixing), ("exclude", excluding)):
        if items:
            raise SpecError(f"{argument} ({show(items[0])}) is for layouts of megatron-core; drop it, or use keep")
    if cache is not None:
        raise SpecError(f"cache ({show(os.fspath(cache))}) is for layouts of megatron-core; drop it")
    return _search_torch(run, card, num_gpus, global_batch_size, words, keep, vary, ranges, exhaustive,
                         mixed_precision, measured, options)  # fmt: skip


def fit(
    run: RunSpec,
    *,
    gpu: str | Gpu,
    vary: Iterable[str] = ("recompute", "offload", "optimizer"),
    headroom_bytes: int = 0,
) -> Fitted:
    """Find what a run has to recompute or offload to fit a GPU in the least time, while its layout stays.

    Every valid combination of megatron-core's recomputation, of the modules whose saved tensors go to host memory, and
    of how much of the optimizer is there, is estimated.

    Args:
        run: The run as it is, of one of megatron-core's engines.
        gpu: The GPU, by a name that ``find_gpu`` knows.
        vary: What varies: recompute, offload (``offload_modules``) and optimizer (``optimizer_offload_fraction``).
        headroom_bytes: Bytes that must stay free on the GPU beside the margin.

    Returns:
        ``ranked(n)``: the rows that keep the reserve, the fastest first, each of the next with a lower peak; tight ones
        after them. ``rows`` are all that fit, as those of ``search``; ``lowest`` has the lowest peak of all.

    Raises:
        SpecError: The GPU is not known or cannot compute the run, or the engine is none of megatron-core's.

    Example:
        >>> from bridge_memory import BatchSpec, ParallelSpec, RunSpec, fit
        >>> run = RunSpec(
        ...     model="Qwen/Qwen3-8B",
        ...     parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2),
        ...     batch=BatchSpec(seq_length=16384, global_batch_size=64),
        ... )
        >>> fastest = fit(run, gpu="H100").ranked(1).rows[0]
        >>> fastest.headroom >= 0 and fastest.run.parallel == run.parallel
        True
    """
    from bridge_memory.plan.megatron.fit import fit as fitted
    from bridge_memory.speed.hardware import hardware_of

    card = _card(gpu)
    placed = on_gpu(_checked_run(run), card)
    _check_headroom(headroom_bytes)
    return fitted(
        placed, hardware_of(card.name), capacity=card.capacity_bytes - headroom_bytes,
        outside=partial(outside_bytes_of, gpu=card), vary=_names("vary", vary),
    ).on(card)  # fmt: skip


def whatif(run: RunSpec, *, gpu: str | Gpu) -> WhatIf:
    """Find what changing one option of a run frees at its highest peak, and what it costs.

    Every change keeps the model, the GPUs and the batch of a step.

    Args:
        run: The run as it is.
        gpu: The GPU, by a name that ``find_gpu`` knows. Times are those of this GPU.

    Returns:
        ``before`` is the highest peak of all stages in bytes. ``singles`` are the changes that free memory, the most
        first. ``pairs()`` are two changes at once. ``cheapest(target)`` is the set of at most three changes that
        brings every stage to ``target`` bytes and costs least time, or None. Each has ``freed`` and ``peak`` in bytes,
        ``slowdown`` (the time of a step over that before; None where the time model does not know), the changed
        ``run``, and ``words``.

    Raises:
        SpecError: The GPU is not known, or cannot compute the run.

    Example:
        >>> from bridge_memory import BatchSpec, ParallelSpec, RunSpec, whatif
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-8B",
        ...     parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2),
        ...     batch=BatchSpec(micro_batch_size=2, global_batch_size=16),
        ... )
        >>> changes = whatif(run, gpu="H100")
        >>> best = changes.singles[0]
        >>> best.freed == changes.before - best.peak > 0
        True
        >>> reached = changes.cheapest(60 * 2**30)
        >>> reached.peak <= 60 * 2**30
        True
    """
    from bridge_memory.plan.changes import WhatIf
    from bridge_memory.speed.hardware import HARDWARE

    card = _card(gpu)
    placed = on_gpu(_checked_run(run), card)
    return WhatIf(placed, HARDWARE.get(card.name))


def balance(
    run: RunSpec,
    *,
    pipeline_model_parallel_size: int | None = None,
    virtual_pipeline_model_parallel_size: int | None = None,
    gpu: str | Gpu | None = None,
    fastest: bool = False,
) -> Balanced:
    """Split the layers of a run over its pipeline stages so that the highest peak is as low as can be.

    Args:
        run: The run. Its own split, or Megatron's, is returned where no other has a lower peak or a faster slowest
            stage.
        pipeline_model_parallel_size: Pipeline stages. None: those of the run. A model whose layers this number does
            not divide can be given here, where ``ParallelSpec`` alone would be refused.
        virtual_pipeline_model_parallel_size: Chunks of layers on every stage. None: those of the run; with
            ``pipeline_model_parallel_size`` 1.
        gpu: The GPU, for the seconds of every stage, by a name that ``find_gpu`` knows.
        fastest: The split whose slowest stage is fastest among those that fit ``gpu``, instead of that of the lowest
            peak.

    Returns:
        ``run`` with the split, ``layers`` of every chunk in the order in which a microbatch passes them, ``peaks`` of
        every stage in bytes, and with ``gpu`` the ``seconds`` of one microbatch on every stage.

    Raises:
        SpecError: There is one stage, the engine has none, or no split fits.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, balance, peaks
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-8B",
        ...     parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=4),
        ... )
        >>> split = balance(run)
        >>> sum(split.layers), len(split.peaks)
        (32, 4)
        >>> split.peak <= max(stage.peak_bytes for stage in peaks(run))
        True
    """
    from bridge_memory.plan.megatron.balance import any_split, best_split, check_balanced
    from bridge_memory.speed.hardware import HARDWARE, hardware_of

    if fastest and gpu is None:
        raise SpecError("fastest (True) needs gpu, the GPU whose times and memory count; give it")
    _checked_run(run)
    p = run.parallel
    v: int | None = layout(run.model, p).virtual_pipeline_model_parallel_size
    if pipeline_model_parallel_size is not None:
        p, v = replace(p, pipeline_model_parallel_size=pipeline_model_parallel_size), 1
    if virtual_pipeline_model_parallel_size is not None:
        v = virtual_pipeline_model_parallel_size
    if p.pp == 1:
        check_balanced(run if run.parallel.pp == 1 else run.with_(parallel=p))
    p = replace(p, virtual_pipeline_model_parallel_size=None if type(v) is int and v == 1 else v)
    base = any_split(run, p)
    check_balanced(base)
    hardware, capacity = None, None
    if gpu is not None:
        card = _card(gpu)
        run, base = on_gpu(run, card), on_gpu(base, card)
        hardware = hardware_of(card.name) if fastest else HARDWARE.get(card.name)
        capacity = largest_peak(card, base) if fastest else None
    own = (p.pp, p.vpp) == (run.parallel.pp, layout(run.model, run.parallel).virtual_pipeline_model_parallel_size)
    return best_split(base, run if own else None, hardware, capacity=capacity)


def on_gpu(run: RunSpec, gpu: Gpu) -> RunSpec:
    """``run`` by the rules of a GPU's generation, with what is assumed of it. Raises SpecError where the GPU cannot
    compute it."""
    check_computes(gpu, run.precision)
    if gpu.arch is not None and gpu.arch != run.implementation.gpu_arch:
        run = run.with_(implementation=replace(run.implementation, gpu_arch=gpu.arch))
    supposed = gpu_assumptions(gpu, run)
    return run.with_(assumptions=(*run.assumptions, *supposed)) if supposed else run


def _card(gpu: str | Gpu) -> Gpu:
    return gpu if isinstance(gpu, Gpu) else find_gpu(gpu)


def _check_headroom(headroom_bytes: int) -> None:
    if type(headroom_bytes) is not int or headroom_bytes < 0:
        raise SpecError(f"headroom_bytes ({show(headroom_bytes)}) is not a size; give bytes of 0 or more")


def _checked_run(run: RunSpec) -> RunSpec:
    if not isinstance(run, RunSpec):
        raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec(model=...)")
    return run


# ---- what is searched ----


def _engine_words(engine: str | Sequence[str] | None, run: RunSpec) -> tuple[str, ...]:
    if engine is None:
        return (run.data_parallel.engine,)
    words = (engine,) if isinstance(engine, str) else tuple(engine) if isinstance(engine, Iterable) else ()
    if not words or not all(isinstance(word, str) for word in words):
        raise SpecError(f"engine ({show(engine)}) names none; give an engine, several, or any")
    return tuple(ENGINE_OF_FRAMEWORK.get(word, word) for word in words)


def _with_engine(run: RunSpec, engine: str) -> RunSpec:
    """The run under an engine, without the options of others."""
    from bridge_memory.spec.parts import ENGINE_OPTIONS, MEGATRON_ENGINES

    if engine == run.data_parallel.engine:
        return run
    own = ENGINE_OPTIONS.get(engine)
    others = {name: GROUPS[name]() for name in ("ddp", "fsdp", "deepspeed") if name != own}
    if engine not in MEGATRON_ENGINES:
        others["checkpoint"] = GROUPS["checkpoint"]()
    return run.with_(data_parallel=replace(run.data_parallel, engine=engine), **others)


def _axes(
    known: Iterable[str], keep: Iterable[str], vary: Iterable[str] | None, ranges: Ranges, on_demand: Iterable[str] = ()
) -> frozenset[str]:
    """The axes that stay. Raises SpecError for one that is not known, or that both varies and stays."""
    known = tuple(known)
    named = {"keep": _names("keep", keep), "vary": None if vary is None else _names("vary", vary), "ranges": [*ranges]}
    for argument, names in named.items():
        for name in names or ():
            if name not in known and (argument, name) != ("vary", "all"):
                raise SpecError(f"{argument} ({show(name)}) is none of {', '.join(known)}; name some of these")
    kept, asked = set(named["keep"] or ()), named["vary"]
    for name in sorted(kept & {*(asked or ()), *ranges}):
        raise SpecError(f"keep ({name}) does not go with {'ranges' if name in ranges else 'vary'}; drop one of them")
    if asked is not None and "all" in asked:
        return frozenset(kept)
    if asked is None:
        return frozenset(kept | set(on_demand))
    return frozenset(set(known) - set(asked) - ranges.keys())


def _names(argument: str, names: Iterable[str]) -> list[str]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise SpecError(f"{argument} ({show(names)}) is no list of names; give one")
    return list(names)


def _checked_ranges(ranges: Ranges | None, known: Iterable[str]) -> Ranges:
    """Raises SpecError for what is no range of an axis that has sizes."""
    known = tuple(known)
    if ranges is not None and not isinstance(ranges, Mapping):
        raise SpecError(f"ranges ({show(ranges)}) is no dict; give axes and their ends, such as {{'tp': (1, 8)}}")
    for axis, range_ in (ranges or {}).items():
        if axis not in known:
            raise SpecError(f"ranges ({show(axis)}) is none of {', '.join(known)}; name some of these")
        sizes = range_ if isinstance(range_, tuple) else ()
        if len(sizes) != 2 or any(type(n) is not int for n in sizes) or not 1 <= sizes[0] <= sizes[1]:
            raise SpecError(f"ranges of {axis} ({show(range_)}) is no range; give its ends, such as (1, 8)")
    return ranges or {}


def _search_megatron(
    run: RunSpec, card: Gpu, num_gpus: int, total: int, keep: Iterable[str], vary: Iterable[str] | None,
    fix: Sequence[str], exclude: Sequence[str], ranges: Ranges | None, exhaustive: bool,
    measured: Sequence[tuple[RunSpec, float]], cache: str | None, options: Mapping[str, Any],
) -> Found:  # fmt: skip
    from bridge_memory.plan.megatron.asked import Asked, asked_space, read
    from bridge_memory.plan.megatron.search import search as searched
    from bridge_memory.plan.megatron.settings import SETTINGS
    from bridge_memory.plan.megatron.space import AXES
    from bridge_memory.speed.constants import DEFAULT
    from bridge_memory.speed.hardware import hardware_of

    ranges = _checked_ranges(ranges, ("tp", "pp", "vpp", "cp", "ep", "mbs"))
    named = None if vary is None else _names("vary", vary)
    varied = None if named is None or "all" in named else read("vary", named)
    asked = Asked(varied, read("fix", fix), read("exclude", exclude), "")
    kept = frozenset(_names("keep", keep))
    fixed = _axes(AXES, kept, named and [n for n in (varied or ["all"]) if n not in SETTINGS], ranges)
    for axis in sorted(kept & asked.fix.keys()):
        raise SpecError(f"keep ({axis}) does not go with fix; drop one of them")
    valued = {axis for words in (varied or {}, asked.fix) for axis, values in words.items() if values}
    fixed = (fixed | (asked.fix.keys() & AXES.keys())) - valued
    if run.parallel.pipeline_model_parallel_layout is not None and "split" in fixed and "pp" not in fixed:
        raise SpecError(
            f"keep (split) keeps pipeline_model_parallel_layout, a split over {run.parallel.pp} stages; keep pp too, "
            "or let split vary"
        )
    hardware = hardware_of(card.name)
    space, left_out = asked_space(
        on_gpu(_without(run, AXES.keys() - fixed, AXES), card), card, num_gpus, hardware.domain, total, fixed=kept,
        ranges=ranges, exhaustive=exhaustive, asked=asked, given=frozenset(),
    )  # fmt: skip
    constants = _calibrated(measured, hardware) if measured else DEFAULT
    found = searched(space, hardware, constants=constants, cache=cache, **options)
    return found.on(card)._replace(left_out=left_out)


def _without(run: RunSpec, axes: Iterable[str], of_axis: Mapping[str, Sequence[str]]) -> RunSpec:
    """The run with the fields of ``axes`` at their defaults, on the fewest GPUs that the others allow."""
    defaults = {"parallel": ParallelSpec(), "batch": BatchSpec(), "recompute": RecomputeSpec()}
    changed: dict[str, dict[str, Any]] = {name: {} for name in defaults}
    for field in (field for axis in axes for field in of_axis[axis]):
        group, _, member = field.partition(".")
        changed[group][member] = getattr(defaults[group], member)
    p = replace(run.parallel, **changed["parallel"])
    p = replace(p, world_size=lcm(p.tp * p.pp * p.cp, p.etp * p.ep * p.pp))
    batch = replace(run.batch, **changed["batch"], global_batch_size=None)
    return run.with_(parallel=p, batch=batch, recompute=replace(run.recompute, **changed["recompute"]))


def _calibrated(measured: Sequence[tuple[RunSpec, float]], hardware: Hardware) -> Constants:
    from bridge_memory.speed.measured import MeasuredStep, calibrated

    steps = [MeasuredStep(f"measured[{i}]", *_step(i, step)) for i, step in enumerate(measured)]
    return calibrated(steps, hardware).constants


def _step(number: int, step: object) -> tuple[RunSpec, float]:
    """Raises SpecError for what is no measured step."""
    if isinstance(step, tuple) and len(step) == 2 and isinstance(step[0], RunSpec):
        run, seconds = step
        if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 < seconds < 1e6:
            return run, float(seconds)
    raise SpecError(f"measured[{number}] ({show(step)}) is no measured step; give (RunSpec, seconds)")


def _search_torch(
    run: RunSpec, card: Gpu, num_gpus: int, total: int, words: Sequence[str], keep: Iterable[str],
    vary: Iterable[str] | None, ranges: Ranges | None, exhaustive: bool, mixed_precision: str | None,
    measured: Sequence[tuple[RunSpec, float]], options: Mapping[str, Any],
) -> Found:  # fmt: skip
    from bridge_memory.plan.torch.search import search as searched
    from bridge_memory.plan.torch.space import AXES, ON_DEMAND, Space, engines_of
    from bridge_memory.speed.hardware import hardware_of

    engines = engines_of(words, num_gpus)
    ranges = _checked_ranges(ranges, ("mbs",))
    fixed = _axes(AXES, keep, vary, ranges, ON_DEMAND)
    hardware = hardware_of(card.name)
    bases, refusals = _bases(run, card, num_gpus, total, words, engines, mixed_precision)
    space = Space(bases, hardware.domain, fixed - {"engine"}, exhaustive=exhaustive)
    if "mbs" in ranges:
        space = space._replace(micro_batches=ranges["mbs"])
    slower = _slower(measured, hardware)
    found = searched(space, hardware, slower=slower, **options)
    for error in refusals:
        found.refused.add(error)
    return found.on(card)


def _bases(
    run: RunSpec, card: Gpu, num_gpus: int, total: int, words: Sequence[str], engines: Sequence[str],
    mixed_precision: str | None,
) -> tuple[dict[str, RunSpec], list[SpecError]]:  # fmt: skip
    """The run of every engine, and what refused those that have none. One that is named is there, or the refusal is
    raised."""
    from bridge_memory.plan.torch.mixed import DTYPES, mixed_precision_fields

    if mixed_precision is not None and mixed_precision not in DTYPES:
        raise SpecError(f"mixed_precision ({show(mixed_precision)}) is unknown; use {' or '.join(DTYPES)}")
    bases: dict[str, RunSpec] = {}
    refusals: list[SpecError] = []
    for engine in engines:
        fields: dict[str, Any] = {}
        if mixed_precision is not None:
            fields = mixed_precision_fields(engine, mixed_precision)
            if run.optimizer.optimizer == "adam":
                fields["optimizer.optimizer"] = "adamw"
        try:
            base = run.with_(
                parallel=replace(run.parallel, world_size=num_gpus),
                batch=replace(run.batch, global_batch_size=None, micro_batch_size=1),
            )
            base = _with_engine(base, engine)
            batch = replace(run.batch, global_batch_size=total)
            bases[engine] = on_gpu(base.with_(batch=batch).with_fields(**fields), card)
        except SpecError as error:
            if engine in words:
                raise
            refusals.append(error)
    if not bases:
        raise refusals[0]
    return bases, refusals


def _slower(measured: Sequence[tuple[RunSpec, float]], hardware: Hardware) -> float:
    """By how much measured steps are longer than predicted ones, as one factor: ranks stay."""
    from bridge_memory.speed.measured import log_ratio
    from bridge_memory.speed.torch.step_time import step_time

    logs = []
    for i, step in enumerate(measured):
        run, seconds = _step(i, step)
        logs.append(log_ratio(f"measured[{i}]", seconds, step_time(run, hardware).seconds))
    return exp(sum(logs) / len(logs)) if logs else 1.0
