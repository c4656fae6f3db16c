"""``bridge-memory rehearse``: run the real megatron-core for one rank, on one GPU or on none, and compare."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.rehearsal.runnable import experts_one_by_one, on_meta, take_transformer_engine, with_core_here
from bridge_memory.report.summary import runs_with
from bridge_memory.residual import REHEARSED, REHEARSED_PERCENT
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.parts import WITH_TRANSFORMERS

#: That of a run which names none.
DEFAULT_ENGINE = "megatron_ddp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    group = parser.add_argument_group("rehearsal")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--stage", type=int, metavar="N",
                       help="a rank of this pipeline stage: the first; with --cp the last of its ring (default 0)")
    where.add_argument("--rank", type=int, metavar="R", help="this global rank")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu",
                       help="cpu: on meta tensors, without allocating; cuda: for real on one GPU")
    group.add_argument("--gpu", metavar="NAME",
                       help="rehearse for this GPU's generation (cpu; default Hopper, Blackwell for mxfp8)")
    group.add_argument("--steps", type=int, default=2, metavar="N", help="training steps with --device cuda")
    group.add_argument("--layer", type=int, metavar="N",
                       help="one decoder layer on its own, tensor by tensor (cpu)")
    group.add_argument("--verbose", action="store_true", help="every saved tensor, and what is alive at the peaks")
    add_output_arguments(parser, "the rows of the comparison, or what was measured")
    group.add_argument("--record", metavar="FILE.jsonl", help="append a measured record (cuda)")
    group.add_argument("--snapshot", metavar="FILE.pickle", help="write torch's memory snapshot (cuda)")


def run(args: argparse.Namespace) -> int:
    """Rehearse and print. Returns the exit code."""
    from bridge_memory.rehearsal.world import beyond_newest, quiet, require_megatron

    if getattr(args, "data_parallel.engine", DEFAULT_ENGINE) in WITH_TRANSFORMERS:
        with quiet():
            return _engine(args)
    with quiet():
        why_not = take_transformer_engine() if args.device == "cpu" else ""
        require_megatron()
        spec = described(args)
        if args.device == "cuda":
            return _on_gpu(args, spec)
        for flag in ("record", "snapshot"):
            if getattr(args, flag):
                raise SpecError(f"--{flag} records a real run; it needs --device cuda")
        with beyond_newest() as notes:
            return _on_meta(args, spec, why_not, notes)


def _engine(args: argparse.Namespace) -> int:
    """torch's or DeepSpeed's own engine under transformers' model, phase by phase."""
    from bridge_memory.readers.resolve import parse_config, resolve_config
    from bridge_memory.rehearsal.torch.run import as_on_cpu, differences, rehearse_engine, require, with_layers
    from bridge_memory.rehearsal.torch.summary import lines, rows
    from bridge_memory.reserved import replayed
    from bridge_memory.reserved import why_not as not_replayed

    for flag in ("stage", "layer", "gpu", "snapshot", "record"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag} is for megatron-core's engines; drop it")
    if args.device != "cpu":
        raise SpecError("--device cuda is for megatron-core's engines; drop it")
    spec = as_on_cpu(run_on_gpus(args, []))
    require(spec)
    from bridge_memory.rehearsal.torch.reserved import lines as reserved_lines
    from bridge_memory.rehearsal.torch.reserved import why_not

    if args.custom_config is not None:
        config = parse_config(args.custom_config, "custom config")
    else:
        _, config = resolve_config(args.model)
    config = with_layers(config, args.num_layers)
    if args.rank is not None and not 0 <= args.rank < spec.parallel.world_size:
        raise SpecError(f"--rank ({args.rank}) is not one of 0 to {spec.parallel.world_size - 1}")
    found = rehearse_engine(spec, config, rank=args.rank)
    table = rows(spec, found.phases)
    notes = differences(spec)
    predicted = replayed(spec) if found.reserved is not None and not_replayed(spec) is None else None
    if found.reserved is None:
        notes.append(why_not(spec) or "")
    if args.json:
        json.dump(
            {
                "schema": "bridge-memory/rehearse-torch/3", "model": spec.model.name, "run": runs_with(spec),
                "num_layers": spec.model.num_layers, "engine": spec.data_parallel.engine, "device": "cpu",
                "notes": notes, "rows": [row.as_json() for row in table],
                "reserved": found.reserved.as_json() if found.reserved is not None else None,
                "predicted_reserved": predicted.as_json() if predicted is not None else None,
            },
            sys.stdout, indent=2,
        )  # fmt: skip
        sys.stdout.write("\n")
        return 0
    ranks = spec.parallel.world_size
    print(f"{spec.model.name}: {spec.model.num_layers} layers, {spec.data_parallel.engine_title}, a rank of {ranks}")
    print(runs_with(spec))
    for note in notes:
        print(f"note: {note}")
    print("\n".join(lines(table)))
    if found.reserved is not None:
        both = (predicted.segments, predicted.expandable) if predicted is not None else (None, None)
        print("\n".join(reserved_lines(found.reserved, *both)))
    return 0


def described(args: argparse.Namespace) -> RunSpec:
    """The run, by the rules of the megatron-core that is installed, which is the one that will run."""
    from bridge_memory.rehearsal.world import installed_release
    from bridge_memory.releases import release_words
    from bridge_memory.spec.gpus import find_gpu

    if args.gpu is not None and args.device == "cuda":
        raise SpecError("--gpu goes with --device cpu; --device cuda runs on the GPU that is here")
    gpus = [find_gpu(args.gpu)] if args.gpu is not None else []
    here = installed_release()
    if here is not None and args.megatron_core is None:
        args.megatron_core = release_words(here)  # readers of other configs go by it
    return with_core_here(run_on_gpus(args, gpus))


def _as_flags(spec: RunSpec) -> list[str]:
    """Flags that make ``estimate`` of the same command line the estimate of ``spec``, as far as what is installed
    decides: releases, and what cannot run without Transformer Engine."""
    from bridge_memory.releases import core_of, release_words

    i = spec.implementation
    flags = ["--megatron-core", release_words(core_of(i))]
    if i.te and i.transformer_engine is not None:
        flags += ["--transformer-engine", release_words(i.transformer_engine)]
    if not i.te:
        flags += ["--transformer-impl", i.transformer_impl]
        flags += ["--no-moe-grouped-gemm"] * (spec.model.has_experts and not i.moe_grouped_gemm)
    return flags


def _on_meta(args: argparse.Namespace, spec: RunSpec, why_not: str, notes: list[str]) -> int:
    spec = on_meta(spec, why_not, notes)
    if args.megatron_args is None and args.container is None and args.bridge_recipe is None:
        notes.append(f"predicted: as `estimate` with {' '.join(_as_flags(spec))}")
    if args.layer is not None:
        return _one_layer(args, spec, notes)
    from bridge_memory.rehearsal.run import rehearse
    from bridge_memory.rehearsal.summary import lines, rows, shared

    done = rehearse(spec, args.stage, rank=args.rank, architecture=_architecture(args))
    table = rows(done)
    if args.json:
        json.dump(
            {
                "schema": "bridge-memory/rehearsal/2", "model": spec.model.name, "run": runs_with(spec),
                "rank": done.rank, "stage": done.stage, "device": "cpu", "notes": notes, "flags": _as_flags(spec),
                "rows": [r.as_json() for r in table], "shared": shared(done),
            },
            sys.stdout, indent=2,
        )  # fmt: skip
        sys.stdout.write("\n")
        return 0
    print(f"{spec.model.name}: rank {done.rank} of {spec.parallel.world_size}, pipeline stage {done.stage}")
    print(runs_with(spec))
    for note in notes:
        print(f"note: {note}")
    print("\n".join([*lines(table), *(f"note: {text}" for text in shared(done))]))
    if args.verbose:
        _print_details(done)
    return 0


def _one_layer(args: argparse.Namespace, spec: RunSpec, notes: list[str]) -> int:
    from bridge_memory.rehearsal.compare import compare_layer

    for flag in ("stage", "rank", "verbose"):
        if getattr(args, flag) is not None and getattr(args, flag) is not False:
            raise SpecError(
                f"--{flag} does not go with --layer, which is rehearsed tensor by tensor on a rank of its "
                "stage; drop it"
            )
    if not 0 <= args.layer < spec.model.num_layers:
        raise SpecError(f"--layer ({args.layer}) is not one of 0 to {spec.model.num_layers - 1}")
    done = compare_layer(spec, args.layer, _architecture(args))
    if args.json:
        head = {
            "schema": "bridge-memory/rehearsed-layer/2", "model": spec.model.name, "run": runs_with(spec),
            "device": "cpu", "notes": notes,
        }  # fmt: skip
        json.dump({**head, **done.as_json()}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    columns = f"predicted, rehearsed, {REHEARSED} in bytes and {REHEARSED_PERCENT}"
    print(f"{spec.model.name}: decoder layer {args.layer}; {columns}")
    print("\n".join([*(f"note: {note}" for note in notes), *done.lines()]))
    return 0


def _architecture(args: argparse.Namespace) -> Any:
    """With --mapping mbridge, mbridge's own TransformerConfig; None where the model comes from our reading."""
    if args.mapping != "mbridge" or args.megatron_args is not None:
        return None
    from bridge_memory.readers.mbridge_mapping import mbridge_of
    from bridge_memory.readers.resolve import parse_config, resolve_config

    if args.custom_config is not None:
        config = parse_config(args.custom_config, "custom config")
    else:
        name, config = resolve_config(args.model)
    return mbridge_of(config, name).config


def _print_details(done: Any) -> None:
    for chunk in done.chunks:
        passes = chunk.passes
        print(f"\nchunk {chunk.chunk}: saved for backward")
        for record in passes.saved:
            print(f"  {record}")
        for title, alive in (("held by variables", passes.held), ("persistent", passes.persistent)):
            print(f"chunk {chunk.chunk}: {title}")
            for a in alive:
                print(f"  {a.module}: {a.made_by}, {a.bytes:,} bytes")
        for title, peak in (("forward", passes.forward_peak), ("backward", passes.backward_peak)):
            print(f"chunk {chunk.chunk}: {title} peak at {peak.module}: {peak.operation}; the largest then")
            for a in peak.largest:
                print(f"  {a.module}: {a.made_by}, {a.bytes:,} bytes")


def _on_gpu(args: argparse.Namespace, spec: RunSpec) -> int:
    from bridge_memory.rehearsal.gpu import rehearse_on_gpu

    if args.layer is not None:
        raise SpecError("--layer is rehearsed with --device cpu")
    notes: list[str] = []
    spec = experts_one_by_one(spec, notes)
    measured = rehearse_on_gpu(
        spec, args.stage, rank=args.rank, steps=args.steps, snapshot=args.snapshot,
        architecture=_architecture(args),
    )  # fmt: skip
    if args.record:
        from bridge_memory.rehearsal.record import append_record

        append_record(args.record, measured.as_record())
    if args.json:
        json.dump(measured.as_record(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    print("\n".join([*(f"note: {n}" for n in notes), *measured.lines()]))
    return 0
