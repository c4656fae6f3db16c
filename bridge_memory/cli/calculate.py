"""``bridge-memory calculate --config FILE``: a run in the form of GPU memory calculators, tensor by tensor."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.output import add_output_arguments
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.calculator import GPUMemoryCalculator
    from bridge_memory.estimation import Estimate
    from bridge_memory.verdict import Fit

SCHEMA = "bridge-memory/calculate/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--config", metavar="FILE", help="JSON with model, training, parallelism, engine and hardware")
    parser.add_argument("file", nargs="?", metavar="FILE", help="the same")
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """The flags of what is printed."""
    output = add_output_arguments(parser, f"by the schema {SCHEMA}")
    output.add_argument("-v", "--verbose", action="store_true", help="every table and assumption")
    output.add_argument("--unit", default="GiB", metavar="UNIT",
                        help="GiB (default), MiB, GB, MB or bytes, of the table")


def run(args: argparse.Namespace) -> int:
    """Estimate and print. Returns the exit code."""
    from bridge_memory.calculator import GPUMemoryCalculator

    paths = [path for path in (args.config, args.file) if path is not None]
    if len(paths) != 1:
        raise SpecError("give one file, with --config FILE; examples are in the folder examples")
    return show(GPUMemoryCalculator.from_file(paths[0]), args)


def show(calculator: GPUMemoryCalculator, args: argparse.Namespace, more: Mapping[str, Any] | None = None) -> int:
    """Print the answer of ``calculator``, in JSON with ``more``."""
    from bridge_memory.report.units import check_unit

    unit = check_unit(args.unit)
    result = calculator.calculate()
    if args.json:
        from bridge_memory.report.json import estimate_to_json

        answer = estimate_to_json(result.estimate, [result.fit])
        document = {"schema": SCHEMA, "result": result.to_dict(), "estimate": answer, **(more or {})}
        json.dump(document, sys.stdout, indent=2)
        print()
        return 0
    batch = result.recommended_batch_size
    words = "not even 1 sequence" if batch is None else f"{batch} sequence{'s' * (batch > 1)} a GPU"
    _print(result.estimate, result.fit, unit, args)
    print(f"Largest batch that fits {calculator.gpu.name}: {words}")
    return 0


def _print(estimate: Estimate, fit: Fit, unit: str, args: argparse.Namespace) -> None:
    if args.verbose or args.format != "text":
        from bridge_memory.report.table import print_estimate

        print_estimate(estimate, [fit], unit=unit)
        return
    from bridge_memory.report.printing import print_blocks
    from bridge_memory.report.short import short_blocks

    print_blocks(short_blocks(estimate, [fit], unit=unit, more="-v has all of it"))
