"""A run whose layout is not given yet: what ``search`` and ``balance`` vary."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from bridge_memory.cli.run_arguments import run_on_gpus
from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.report.gpus import Gpu


def template(args: argparse.Namespace, gpu: Gpu, without: Iterable[str]) -> tuple[dict[str, Any], RunSpec]:
    """(fields of ``without``, "group.field", that flags gave; the run that all other flags describe).

    The run's batch has the global batch size that was given, which its own number of GPUs may not divide. Layouts made
    of it are validated one by one. Raises SpecError.
    """
    flags = copy.copy(args)
    given = {name: vars(flags).pop(name) for name in without if hasattr(flags, name)}
    run = run_on_gpus(flags, [gpu])
    total = given.get("batch.global_batch_size")
    if total is None:
        return given, run
    batch = replace(run.batch, global_batch_size=total)
    made = object.__new__(RunSpec)
    for f in fields(RunSpec):
        object.__setattr__(made, f.name, batch if f.name == "batch" else getattr(run, f.name))
    return given, made
