"""``bridge-memory search`` under PyTorch's engines and DeepSpeed: configurations that fit a GPU, the fastest first."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.arguments.files import named
from bridge_memory.arguments.flags import spelling
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.measured import named_seconds
from bridge_memory.cli.phased import job_notes
from bridge_memory.cli.progress import Progress
from bridge_memory.cli.ranked import Shown, Style, headroom_bytes, how_words, print_found, try_words
from bridge_memory.components import GIB
from bridge_memory.emit.commands import Emitted
from bridge_memory.emit.formats import emitted, formats_of
from bridge_memory.emit.torch_words import checkpointing_words, liger_words, offload_words, overlap_words, sharded_words
from bridge_memory.estimation import estimate
from bridge_memory.garbage import few_collections
from bridge_memory.plan.found import Found, Row
from bridge_memory.plan.nearest import TIMES
from bridge_memory.plan.reserve import reserve_words
from bridge_memory.plan.torch.mixed import mixed_precision_fields
from bridge_memory.plan.torch.nearest import nearest, smallest
from bridge_memory.plan.torch.space import AXES, ON_DEMAND, Space, changed_fields, engines_of, is_of
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.parts import WITH_MEGATRON_LAYOUTS
from bridge_memory.speed.measured import log_ratio
from bridge_memory.speed.torch.step_time import NOT_FITTED, TIMED, StepTime, not_timed, step_time
from bridge_memory.verdict import headroom

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.speed.hardware import Hardware

SCHEMA = "bridge-memory/torch-search/2"
_ENGINE, _MICRO, _GPUS, _BATCH = (
    "data_parallel.engine", "batch.micro_batch_size", "parallel.world_size", "batch.global_batch_size"
)  # fmt: skip


def asked_engines(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The words of ``--engine``, where they or the files beside MODEL, or ``--vary engine``, ask for a search of other
    engines than Megatron's; None where they do not."""
    given = getattr(args, _ENGINE, None)
    if given is not None:
        words = given if isinstance(given, tuple) else (given,)
        return None if len(words) == 1 and words[0] in WITH_MEGATRON_LAYOUTS else words
    if args.vary is not None and "engine" in args.vary.replace(",", " ").split():
        return ("any",)
    files = named(args)
    if files:
        run = run_on_gpus(_without_ranges(args), [])
        return (run.data_parallel.engine,) if run.data_parallel.engine in TIMED else None
    return None


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Search and print. Returns 0, 1 where nothing fits, or 130 where Ctrl-C ended it."""
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.torch.search import search
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.speed.hardware import hardware_of

    gpu = find_gpu(args.gpu)
    hardware = hardware_of(gpu.name)
    if args.cache:
        raise SpecError(f"--cache is for layouts of megatron-core, not for engine {', '.join(words)}; drop it")
    formats = formats_of("torch")
    if args.emit is not None and args.emit not in formats:
        raise SpecError(f"--emit {args.emit} is for layouts of megatron-core; use {', '.join(formats)}")
    space, left_out = _space(args, gpu, hardware.domain, words)
    num_gpus = getattr(args, _GPUS)
    slower, said = _measured(args.measured_step_time, space, hardware)
    searched = partial(
        search, hardware=hardware, capacity=gpu.capacity_bytes - headroom_bytes(args),
        outside=partial(outside_bytes_of, gpu=gpu), backend=args.backend, slower=slower,
        jobs=args.jobs or (1 if args.backend is None else -1),
    )  # fmt: skip
    with few_collections(), Progress("configuration") as progress:
        found = searched(space, progress=progress, share=progress.done).on(gpu)
    nothing = found.looked_at and not found.rows and not found.stopped and args.format in ("text", "html")
    document: dict[str, Any] = {
        "schema": SCHEMA, "looked_at": found.looked_at, "fit": len(found.rows), "too_large": found.too_large,
        "tight": found.tight,
        "refused": dict(found.refused), "stopped": found.stopped, "grid": space.rule(),
        "one_by_one": found.one_by_one and found.one_by_one.value, "notes": [*left_out, *said],
    }  # fmt: skip
    of_jobs = list(job_notes((row.run for row in found.ranked(args.top).rows), gpu, args.top)) if args.phases else []
    document |= {"jobs": [record for _, record in of_jobs]} if args.phases else {}
    base = next(iter(space.bases.values()))
    return print_found(
        Shown(
            STYLE, found, base, gpu, num_gpus,
            space=(f"searched: {space.rule()}", *how_words(found), *left_out, *said),
            otherwise=_otherwise(args, space, gpu, lambda other: searched(other).on(gpu)) if nothing else (),
            times=_notes(found, space, args), not_timed=_not_timed, document=document,
            emit=lambda row: _emitted(row, args, space, gpu), brief=args.brief,
            last=[words for words, _ in of_jobs], reserve=reserve_words(base.model.has_experts),
        ),
        args,
    )  # fmt: skip


def _otherwise(
    args: argparse.Namespace, space: Space, gpu: Gpu, searched: Callable[[Space], Found]
) -> list[str]:
    """What the smallest configuration takes where nothing fits, and what to change, with the configuration that then
    fits."""
    given = frozenset({axis for axis, fields in AXES.items() if vars(args).keys() & set(fields)})
    run, lines = smallest(space, given), []
    if run is not None:
        (stage,) = estimate(run).stages
        missing = -headroom(gpu, stage.peak_bytes, run)
        parts = {
            "weights": stage.weights_bytes, "gradients": stage.gradients_bytes,
            "optimizer states": stage.optimizer_bytes,
        }  # fmt: skip
        rest = stage.peak_bytes - sum(parts.values())
        words = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in {**parts, "all else": rest}.items())
        lines.append(
            f"the smallest lacks {missing / GIB:.1f} GiB, {configuration_words(run)}: a peak of "
            f"{stage.peak_bytes / GIB:.1f} GiB, of that {words}"
        )
    for near in nearest(space, given, searched):
        lines.append(try_words(near, row_words(near.row)))
    if len(lines) < 2:
        lines.append(
            f"try: --engine any, or a GPU with more memory: on {TIMES[-1]} times as many, and with offloading, nothing "
            "fits either"
        )
    return lines


# ---- what is searched ----


def _space(
    args: argparse.Namespace, gpu: Gpu, domain: int, words: Sequence[str]
) -> tuple[Space, tuple[str, ...]]:
    """The configurations that the flags leave open, and why an engine has none."""
    for flag in ("container", "bridge_recipe", "megatron_args"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag.replace('_', '-')} is megatron-core's; name the MODEL and an engine's own flags")
    if not hasattr(args, _GPUS):
        raise SpecError("--num-gpus is missing; say on how many GPUs the model has to train")
    if not hasattr(args, _BATCH):
        raise SpecError(
            "--global-batch-size is missing; configurations are compared at the same sequences per step: give your "
            "run's, for example --global-batch-size 128"
        )
    ranges = [name for name, value in vars(args).items() if isinstance(value, tuple) and name.startswith("parallel.")]
    if ranges:
        raise SpecError(
            f"{spelling(ranges[0])} takes no range here: engine {', '.join(words)} divides no layer; drop it"
        )
    engines = engines_of(words, getattr(args, _GPUS))
    micro = getattr(args, _MICRO, None)
    fixed = _fixed(args, engines)
    bases, left_out = _bases(args, engines, gpu)
    space = Space(bases, domain, fixed, exhaustive=args.exhaustive)
    return (space._replace(micro_batches=micro) if isinstance(micro, tuple) else space), left_out


def _fixed(args: argparse.Namespace, engines: Sequence[str]) -> frozenset[str]:
    given = {name for name, value in vars(args).items() if not (name == _MICRO and isinstance(value, tuple))}
    fixed = {axis for axis, fields in AXES.items() if given & set(fields)} - {"engine"}
    files = named(args).keys()
    if files:  # what they say, or leave at its default
        fixed |= {"mbs", "shard", "reshard", "accumulation", "overlap"}
        fixed |= {"checkpointing"} if files - {"deepspeed"} else set()
    if args.vary is None:
        return frozenset(fixed | set(ON_DEMAND))
    asked = [name for name in args.vary.replace(",", " ").split() if name]
    if asked == ["all"]:
        return frozenset(fixed)
    for name in asked:
        if name not in AXES:
            raise SpecError(f"--vary {name} is none of {', '.join(AXES)}; name some of these, or all")
        if {*AXES[name]} & given and name != "engine":
            raise SpecError(f"--vary {name} does not go with a flag that fixes it; drop one of them")
    if "engine" in asked and len(engines) == 1:
        raise SpecError(f"--vary engine does not go with --engine {engines[0]}; drop one, or use --engine any")
    return frozenset(AXES.keys() - set(asked))


def _without_ranges(args: argparse.Namespace) -> argparse.Namespace:
    """Flags of ``estimate`` alone."""
    flags = copy.copy(args)
    if isinstance(getattr(flags, _MICRO, None), tuple):
        delattr(flags, _MICRO)
    return flags


def _bases(
    args: argparse.Namespace, engines: Sequence[str], gpu: Gpu
) -> tuple[dict[str, RunSpec], tuple[str, ...]]:
    """The run of every engine. Options of the other engines' own are not its; one that no engine has is refused."""
    plain, files = _without_ranges(args), named(args)
    if files and (len(engines) > 1 or args.mixed_precision is not None):
        flag = "--mixed-precision" if args.mixed_precision is not None else "--engine of several"
        raise SpecError(f"{flag} does not go with --{next(iter(files)).replace('_', '-')}, which says it; drop one")
    for name in list(vars(plain)):
        if "." in name and not any(is_of(engine, name) for engine in engines):
            raise SpecError(f"{spelling(name)} is no option of engine {' or '.join(engines)}; drop it")
    bases: dict[str, RunSpec] = {}
    refusals: dict[str, SpecError] = {}
    for engine in engines:
        flags = copy.copy(plain)
        for name in [name for name in vars(flags) if "." in name and not is_of(engine, name)]:
            delattr(flags, name)
        if hasattr(flags, _ENGINE) or not files:
            setattr(flags, _ENGINE, engine)
        for name, value in _mixed(args, engine).items():
            setattr(flags, name, value)
        try:
            bases[engine] = run_on_gpus(flags, [gpu])
        except SpecError as error:
            refusals[engine] = error
    if not bases:
        raise next(iter(refusals.values()))
    return bases, tuple(f"engine {engine} is left out: {error}" for engine, error in refusals.items())


def _mixed(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Fields that accelerate's ``mixed_precision`` means to an engine, and torch's AdamW, where nobody says another
    optimizer."""
    dtype = args.mixed_precision
    if dtype is None:
        return {}
    for name in ("precision.params_dtype", "transformers.autocast", "fsdp.param_dtype", "fsdp.reduce_dtype"):
        if hasattr(args, name):
            raise SpecError(f"{spelling(name)} is set by --mixed-precision {dtype} too; drop one of them")
    fields: dict[str, Any] = {} if hasattr(args, "optimizer.optimizer") else {"optimizer.optimizer": "adamw"}
    found = mixed_precision_fields(engine, dtype)
    return {**fields, **{name: value for name, value in found.items() if not hasattr(args, name)}}


_HOW = "write it like fsdp2,mbs2,checkpointing:full=3.1 (checkpointing: none or full)"


def _measured(texts: Sequence[str], space: Space, hardware: Hardware) -> tuple[float, tuple[str, ...]]:
    """(how much slower measured steps are than predicted ones, in words). What a step does not name is as in the flags.
    One factor for all times: ranks stay."""
    logs, shown = [], []
    for text in texts:
        name, flag, seconds = named_seconds(text, _HOW)
        predicted = step_time(_named_run(name, flag, space), hardware).seconds
        logs.append(log_ratio(flag, seconds, predicted))
        shown.append(f"{name}: predicted {predicted:.3g} s")
    if not logs:
        return 1.0, ()
    slower = exp(sum(logs) / len(logs))
    return slower, (f"all times x {slower:.3g} by the measured step times ({', '.join(shown)}); ranks stay",)


def _named_run(name: str, flag: str, space: Space) -> RunSpec:
    """The run of "fsdp2,mbs2,checkpointing:full"; without an engine that of the only one."""
    engines = [word for word in name.split(",") if word in space.bases]
    if len(engines) > 1 or (not engines and len(space.bases) > 1):
        raise SpecError(f"{flag} names no engine, or several, of {', '.join(space.bases)}; {_HOW}")
    base = space.bases[engines[0] if engines else next(iter(space.bases))]
    fields: dict[str, Any] = {}
    for word in filter(None, name.split(",")):
        kind, _, mode = word.partition(":")
        if word in space.bases:
            continue
        if word.startswith("mbs") and word[3:].isascii() and word[3:].isdecimal():
            fields[_MICRO] = int(word[3:])
        elif kind == "checkpointing" and mode in ("none", "full") and base.implementation.torch_layers:
            fields["transformers.gradient_checkpointing"] = mode == "full"
        else:
            raise SpecError(f"{flag} has {show(word)}, which says nothing here; {_HOW}")
    try:
        return base.with_fields(**fields) if fields else base
    except SpecError as error:
        raise SpecError(f"{flag}: {error}") from None


# ---- what is printed ----


class Cells(NamedTuple):
    """One row, in words."""

    engine: str
    mbs: str
    steps: str
    checkpointing: str
    sharded: str
    overlap: str
    offload: str
    attention: str
    liger: str
    peak: str
    headroom: str
    step: str
    rate: str
    compute: str
    exposed: str
    recompute: str
    optimizer: str
    host: str


_HEADINGS = Cells(
    "engine", "mbs", "accum", "checkpointing", "sharded", "options", "offload", "attention", "liger", "peak GiB",
    "free GiB", "step s", "tokens/s/GPU", "compute", "exposed comm", "recompute time", "optimizer", "host",
)  # fmt: skip
_WORDS = frozenset({"engine", "checkpointing", "sharded", "options", "offload", "attention", "liger"})
#: Cells that say nothing where all rows have them.
_IDLE = frozenset({"", "none", "0%", "1", "sdpa"})


def cells(row: Row[StepTime]) -> Cells:
    """One row, in words."""
    run, t = row.run, row.time
    shares = (t.forward + t.backward - t.recomputation, t.exposed_communication, t.recomputation, t.optimizer, t.host)
    return Cells(
        run.data_parallel.engine, str(run.batch.micro_batch_size), str(run.num_microbatches), checkpointing_words(run),
        sharded_words(run), overlap_words(run), offload_words(run), run.transformers.attn_implementation,
        liger_words(run), f"{row.peak / GIB:.2f}", f"{row.headroom / GIB:.2f}", f"{t.seconds:#.3g}",
        f"{row.tokens_per_second_per_gpu:,.0f}", *(f"{share / t.seconds:.0%}" for share in shares),
    )  # fmt: skip


def _notes(found: Found, space: Space, args: argparse.Namespace) -> list[str]:
    same = len(found.rows) - len(found.best())
    duplicates = f"{same:,} of those that fit take the same memory and time as another and are not shown"
    return [
        *([duplicates] if same else []),
        f"{NOT_FITTED} (references/search.md); compute, exposed comm (communication that no pass hides), "
        "recompute time (of checkpointing), optimizer and host (offloading) are parts of step s",
        *_dtype_notes(space, args),
    ]


def _not_timed(rows: Sequence[Row[StepTime]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for row in rows for name in not_timed(row.run)))


def _dtype_notes(space: Space, args: argparse.Namespace) -> list[str]:
    """Engines that keep other dtypes are no equals; and what trains in 16 bits alone loses small updates."""
    zero = [engine for engine in space.bases if engine.startswith("zero")]
    others = [engine for engine, run in space.bases.items() if engine not in zero and run.params_dtype != "fp32"]
    if args.mixed_precision is not None or not others:
        return []
    base = space.bases[others[0]]
    alone = f"{', '.join(others)}: parameters and optimizer states in {base.params_dtype} alone"
    if zero:
        have = f"where {', '.join(zero)} have fp32 ones; --mixed-precision bf16 sets all of them up as accelerate does"
        return [f"{alone}, {have}"]
    if base.peft.freezes:
        return []
    return [f"{alone}, in which small updates round away; --mixed-precision bf16 keeps fp32 ones, as accelerate does"]


def row_words(row: Row[StepTime]) -> str:
    """"fsdp2, micro batch 2, checkpointing full, sharded all, sdpa attention"."""
    return configuration_words(row.run)


def configuration_words(run: RunSpec) -> str:
    """As ``row_words``."""
    overlap, offload = overlap_words(run), offload_words(run)
    words = [run.data_parallel.engine, f"micro batch {run.batch.micro_batch_size}"]
    words += [f"checkpointing {checkpointing_words(run)}", f"sharded {sharded_words(run)}"]
    words += [overlap] * bool(overlap) + [f"offload {offload}"] * (offload != "none")
    return ", ".join([*words, f"{run.transformers.attn_implementation} attention"])


def record(row: Row[StepTime]) -> dict[str, Any]:
    """One row for programs."""
    run = row.run
    c = cells(row)
    return {
        "engine": c.engine, "mbs": run.batch.micro_batch_size, "microbatches": run.num_microbatches,
        "checkpointing": c.checkpointing, "sharded": c.sharded, "options": c.overlap, "offload": c.offload,
        "attention": c.attention, "liger_kernel": ",".join(run.transformers.liger_kernel), "peak_bytes": row.peak,
        "headroom_bytes": row.headroom, "step_seconds": row.time.seconds,
        **{f"{name}_seconds": value for name, value in row.time._asdict().items()},
    }  # fmt: skip


def _emitted(row: Row[StepTime], args: argparse.Namespace, space: Space, gpu: Gpu) -> Emitted:
    engine = row.run.data_parallel.engine
    changed = {**changed_fields(row.run, space.bases[engine]), **_mixed(args, engine)}
    return emitted(args.emit, "torch", row.run, _without_ranges(args), gpu.name, changed)


STYLE = Style(
    "configuration", _HEADINGS, of_words=_WORDS, always=frozenset({"engine", "mbs", "step s"}), idle=_IDLE,
    cells=cells, words=row_words, record=record, settings=frozenset(_HEADINGS[: _HEADINGS.index("peak GiB")]),
    spare=("compute", "host", "optimizer", "recompute time", "exposed comm", "tokens/s/GPU", "free GiB"),
)  # fmt: skip
