"""``bridge-memory estimate``: the memory of every pipeline stage of a run, before it is launched."""

from __future__ import annotations

import argparse
import json
import sys

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.cli.run_arguments import run_on_gpus
from bridge_memory.cli.run_flags import add_run_arguments
from bridge_memory.releases import known_releases, nearest_known, release_words
from bridge_memory.report.json import SCHEMA
from bridge_memory.spec import SpecError
from bridge_memory.spec.release import read_release


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_run_arguments(parser)
    output = add_output_arguments(parser, f"by the schema {SCHEMA}")
    output.add_argument("--verbose", action="store_true", help="every parameter and saved tensor of each stage")
    output.add_argument("--unit", default="GiB", metavar="UNIT",
                        help="GiB (default), MiB, GB, MB or bytes, in any case; --format json is in bytes")
    output.add_argument("--stage", type=int, metavar="N", help="show only this pipeline stage")
    output.add_argument("--gpu", action="append", default=[], metavar="NAME",
                        help="GPUs to compare with (H100,B200, or repeated; `bridge-memory gpus` lists them)")
    output.add_argument("--calibration", metavar="FILE",
                        help="a calibration.json of the live report: residuals of this very run are added and shown")


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
    from bridge_memory.estimate import estimate
    from bridge_memory.report.gpus import find_gpu, fits
    from bridge_memory.report.units import check_unit

    unit = check_unit(args.unit)
    gpus = [find_gpu(name.strip()) for names in args.gpu for name in names.split(",")]
    _check_release(args.megatron_core)
    spec = run_on_gpus(args, gpus)
    result = estimate(spec)
    if args.calibration is not None:
        from bridge_memory.calibration import calibrated, load

        result = calibrated(result, load(args.calibration))
    if args.stage is not None and not 0 <= args.stage < len(result.stages):
        raise SpecError(
            f"--stage {args.stage} does not exist; with pipeline_model_parallel_size {len(result.stages)} the stages "
            f"are 0 to {len(result.stages) - 1}"
        )
    fitting = fits(result, gpus)
    details = None
    if args.verbose:
        from bridge_memory.report.details import stage_details

        shown = range(len(result.stages)) if args.stage is None else [args.stage]
        details = {i: stage_details(result, i) for i in shown}
    if args.json:
        from bridge_memory.report.json import estimate_to_json

        json.dump(estimate_to_json(result, fitting, stage=args.stage, details=details), sys.stdout, indent=2)
        print()
    else:
        from bridge_memory.report.table import print_estimate

        print_estimate(result, fitting, unit=unit, stage=args.stage, details=details)
    return 0
