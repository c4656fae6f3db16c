"""A run whose layout is not given yet: what ``search`` and ``balance`` vary."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.spec import RunSpec, SpecError

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu


def template(args: argparse.Namespace, gpu: Gpu, without: Iterable[str]) -> tuple[dict[str, Any], RunSpec]:
    """(fields of ``without``, "group.field", that flags gave; the run that all other flags describe). Raises
    SpecError."""
    for flag in ("container", "bridge_recipe"):
        if getattr(args, flag) is not None:
            raise SpecError(f"--{flag.replace('_', '-')} fixes every option; name the MODEL and what of it to keep")
    if args.megatron_args is not None:
        raise SpecError("--megatron-args says a layout of its own, and here layouts vary; name MODEL and its flags")
    flags = copy.copy(args)
    given = {name: vars(flags).pop(name) for name in without if hasattr(flags, name)}
    return given, run_on_gpus(flags, [gpu])
