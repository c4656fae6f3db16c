"""``bridge-memory estimate``: the memory of every pipeline stage of a run, before it is launched."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bridge_memory.arguments.flags import add_run_arguments, number
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.output import USUAL, add_output_arguments
from bridge_memory.components import GIB
from bridge_memory.garbage import few_collections
from bridge_memory.releases import known_releases, nearest_known, release_words
from bridge_memory.report.document import one_line
from bridge_memory.report.json import SCHEMA
from bridge_memory.spec import SpecError
from bridge_memory.spec.release import read_release

if TYPE_CHECKING:
    from bridge_memory.estimation import Estimate
    from bridge_memory.job.job import Job
    from bridge_memory.report.document import Block
    from bridge_memory.verdict import Fit
    from bridge_memory.workspaces.caching_allocator import Reserved

EXIT_DOES_NOT_FIT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    output = add_output_arguments(
        parser, f"by the schema {SCHEMA}", formats=(*USUAL, "perfetto", "snapshot"), own=("csv", "html")
    )
    output.add_argument("-v", "--verbose", action="count", default=0,
                        help="every table, with --stage N also each parameter and saved tensor of that stage; -vv: of "
                             "all stages")
    output.add_argument("--brief", action="store_true", help="print only the verdict, in one line")
    output.add_argument("--reserved", action="store_true",
                        help="also reserved memory: some steps replayed in torch's allocator (engines "
                             "megatron_ddp, fsdp2 and single)")
    output.add_argument("--phases", action=argparse.BooleanOptionalAction, default=None,
                        help="the whole job on one --gpu (build, load, training, evaluation, save and resume) as torch "
                             "and the driver count it, in full (default: in short); --no-phases: the step alone, with "
                             "a measured share for fragmentation")
    output.add_argument("--host-memory", type=number, metavar="GiB",
                        help="with --phases: host memory of a node, to be judged too")
    output.add_argument("--require-fit", action="store_true",
                        help=f"exit code {EXIT_DOES_NOT_FIT} unless it fits every --gpu (tight counts as fitting)")
    output.add_argument("--unit", default="GiB", metavar="UNIT",
                        help="GiB (default), MiB, GB, MB or bytes, in any case; --format json is in bytes")
    output.add_argument("--stage", type=int, metavar="N", help="show only this pipeline stage")
    output.add_argument("--gpu", action="append", default=[], metavar="NAME",
                        help="GPUs to judge: H100,B200, or the flag repeated (default: the common ones)")
    output.add_argument("--calibration", metavar="FILE",
                        help="MemoryReport's calibration.json: add and show the residuals measured for this run")


def _check_release(text: str | None) -> None:
    """A release that nobody has is a typing error; a newer one than is known is better said than guessed."""
    release = read_release(text, "megatron_core")
    if release is not None and nearest_known(release) != release:
        raise SpecError(
            f"megatron_core ({text}) is not one of the releases whose rules are known, {known_releases()}; use "
            f"--megatron-core {release_words(nearest_known(release))}"
        )


def run(args: argparse.Namespace) -> int:
    """Estimate and print. Returns the exit code."""
    with few_collections():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from bridge_memory.emit.fixes import try_first
    from bridge_memory.estimation import estimate
    from bridge_memory.report.units import check_unit
    from bridge_memory.reserved import why_not
    from bridge_memory.spec.gpus import find_gpu
    from bridge_memory.verdict import Verdict, fits

    unit = check_unit(args.unit)
    if args.require_fit and not args.gpu:
        raise SpecError("--require-fit needs a GPU to fit; add --gpu NAME (`bridge-memory gpus` lists them)")
    if args.brief and (args.verbose or args.format != "text" or args.stage is not None):
        raise SpecError("--brief prints one line for all stages; drop --verbose, --stage and other formats")
    if args.reserved and (args.brief or args.format not in ("text", "md", "json")):
        raise SpecError("--reserved is shown as text, md and json; drop it, or --brief and other formats")
    if args.phases and (args.brief or args.format not in ("text", "md", "json", "html")):
        raise SpecError("--phases is shown as text, md, json and html; drop it, or --brief and other formats")
    gpus = list(dict.fromkeys(find_gpu(name.strip()) for names in args.gpu for name in names.split(",")))
    _check_release(args.megatron_core)
    spec = run_on_gpus(args, gpus)
    if args.host_memory is not None and not args.phases:
        raise SpecError("--host-memory does nothing without --phases; add it or drop the flag")
    if args.host_memory is not None and not 1 <= args.host_memory * GIB < float("inf"):  # bytes
        raise SpecError(f"--host-memory ({args.host_memory:g}) is no amount of memory; give the GiB of a node")
    if args.phases and len(gpus) != 1:
        raise SpecError(f"--phases is about one GPU, not {len(gpus) or 'none'}; give --gpu NAME once")
    result = estimate(spec)
    if args.reserved and (reason := why_not(spec)) is not None:
        raise SpecError(f"--reserved: {reason}; drop it")
    if args.calibration is not None:
        from bridge_memory.calibration import calibrated, load

        result = calibrated(result, load(args.calibration))
    if args.stage is not None and not 0 <= args.stage < len(result.stages):
        raise SpecError(
            f"--stage {args.stage} does not exist; with pipeline_model_parallel_size {len(result.stages)} the stages "
            f"are 0 to {len(result.stages) - 1}"
        )
    fitting = fits(result, gpus)
    jobs = []
    asked = args.phases or (args.phases is None and args.format in ("text", "md", "json", "html"))
    if asked:
        from bridge_memory.job.job import jobs_of, judged

        host = None if args.host_memory is None else int(args.host_memory * GIB)
        jobs = jobs_of(result, fitting, host)
        fitting = judged(fitting, jobs)
    fix = ""
    if len(gpus) == 1 and not fitting[0].lacks:
        if jobs and jobs[0].verdict is Verdict.DOES_NOT_FIT:
            from bridge_memory.cli.needs import Needs

            needs = Needs(jobs[0], spec)
            if fitting[0].verdict is Verdict.DOES_NOT_FIT or needs(spec) is None:
                fix = try_first(spec, gpus[0], needs, needs.hopeless)
        elif not jobs and fitting[0].verdict is Verdict.DOES_NOT_FIT:
            fix = try_first(spec, gpus[0])
    if args.output is not None:
        from bridge_memory.report.answer import answer_of

        args.answer = answer_of(result, fitting, unit=unit, fix=fix, jobs=jobs).words
    _print(args, result, fitting, unit, fix, jobs)
    of_jobs = {verdict for job in jobs for verdict in (job.verdict, job.host_verdict)}
    fit = all(fit.fits for fit in fitting) and not {Verdict.DOES_NOT_FIT, Verdict.UNKNOWN} & of_jobs
    return EXIT_DOES_NOT_FIT if args.require_fit and not fit else 0


def _print(
    args: argparse.Namespace, result: Estimate, fitting: Sequence[Fit], unit: str, fix: str, jobs: Sequence[Job]
) -> None:
    from bridge_memory.report.printing import print_blocks

    details = reserved = None
    if args.reserved:
        from bridge_memory.reserved import replayed

        reserved = replayed(result.run, args.stage)
    if args.verbose > 1 or (args.verbose and (args.json or args.stage is not None)):
        from bridge_memory.report.details import stage_details

        shown = range(len(result.stages)) if args.stage is None else [args.stage]
        details = {i: stage_details(result, i) for i in shown}
    if args.brief:
        from bridge_memory.report.answer import answer_of, brief

        print(one_line(brief(result, fitting, answer_of(result, fitting, unit=unit, fix=fix, jobs=jobs), unit)))
    elif args.json:
        from bridge_memory.report.json import estimate_to_json

        document = estimate_to_json(result, fitting, stage=args.stage, details=details, fix=fix, jobs=jobs)
        if reserved is not None:
            document["reserved"] = reserved.as_json()
        json.dump(document, sys.stdout, indent=2)
        print()
    elif args.format == "snapshot":
        from bridge_memory.report.snapshot import snapshot
        from bridge_memory.report.write import write_text

        stage = result.peak_stage.stage if args.stage is None else args.stage
        write_text(args.output, snapshot(result, stage), force=args.force)
    elif args.format in ("html", "csv", "perfetto"):
        print(_written(args, result, fitting, unit, fix, jobs), end="")
    elif args.verbose or args.format == "md":
        from bridge_memory.report.table import estimate_blocks

        blocks = estimate_blocks(result, fitting, unit=unit, stage=args.stage, details=details, fix=fix, jobs=jobs)
        print_blocks([*blocks, *_reserved_blocks(reserved, unit), *_job_blocks(jobs, unit, args.stage, fitting)])
    else:
        from bridge_memory.report.short import short_blocks

        after = [*_reserved_blocks(reserved, unit)]
        if args.phases:
            from bridge_memory.report.phases import job_table, job_words

            table = job_table(jobs[0], unit, args.stage, fitting[0].verdict)
            after.append(table._replace(title=job_words(jobs[0], unit)))
        blocks = short_blocks(
            result, fitting, unit=unit, stage=args.stage, fix=fix, more="-v has all of it", jobs=jobs,
            phases=not args.phases, after=after,
        )  # fmt: skip
        print_blocks([*blocks, *after])


def _job_blocks(jobs: Sequence[Job], unit: str, stage: int | None, fitting: Sequence[Fit]) -> list[Block]:
    from bridge_memory.report.phases import job_blocks

    return job_blocks(jobs[0], unit, stage, fitting[0].verdict) if len(fitting) == 1 and jobs else []


def _reserved_blocks(found: Reserved | None, unit: str) -> list[Block]:
    """What ``torch.cuda.max_memory_reserved`` would give, as the allocator is set."""
    from bridge_memory.report.document import Bullets
    from bridge_memory.report.units import format_bytes

    if found is None:
        return []
    modes = (
        ("as torch's allocator is by default", found.segments, found.segments_of),
        ("with expandable_segments:True", found.expandable, found.expandable_of),
    )
    lines = [
        f"{format_bytes(total, unit)} {mode} ("
        + ", ".join(f"{name} {format_bytes(nbytes, unit)}" for name, nbytes in streams) + ")"
        for mode, total, streams in modes
    ]
    lines.append(f"of which {format_bytes(found.allocated, unit)} are allocated at the most")
    lines.append("what no tensor is in is given back before the device is full")
    return [Bullets("Reserved, stream by stream", tuple(lines))]


def _written(
    args: argparse.Namespace, result: Estimate, fitting: Sequence[Fit], unit: str, fix: str, jobs: Sequence[Job]
) -> str:
    """In the formats that are no tables of text."""
    if args.format == "html":
        from bridge_memory.report.page.one_file import estimate_page

        return estimate_page(result, fitting, flags=args.command_line, fix=fix, unit=unit, stage=args.stage, jobs=jobs)
    if args.format == "perfetto":
        from bridge_memory.report.trace import perfetto

        return perfetto(result, args.stage)
    from bridge_memory.report.table import components_csv

    return components_csv(result, args.stage)
