"""A layout in words: this command line's, and the formats for megatron-core."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from bridge_memory.arguments.flags import FLAGS
from bridge_memory.emit.commands import Emitted, estimate_words, given_fields
from bridge_memory.emit.megatron_args import megatron_arguments
from bridge_memory.plan.megatron.settings import FIELDS, SET_BESIDE
from bridge_memory.plan.megatron.space import AXES
from bridge_memory.plan.megatron.splits import split_fields
from bridge_memory.spec import ParallelSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.run import GROUPS

#: "group.field" of what makes a layout.
_OF_AXES = tuple(field for fields in AXES.values() for field in fields)
_FIELDS = (*_OF_AXES, "parallel.sequence_parallel")
_FLAGGED = frozenset(flag.field for flag in FLAGS)
#: Groups of what settings set, at Megatron's defaults.
_DEFAULTS = {group: GROUPS[group]() for group in ("precision", "optimizer", "implementation", "data_parallel", "batch")}
_ONE_UNLESS_GIVEN = frozenset(AXES[axis][0] for axis in ("tp", "pp", "vpp", "cp", "ep"))


def emitted(how: str, run: RunSpec, args: argparse.Namespace, gpu: str) -> Emitted:
    """A layout in one of the formats of ``formats.FORMATS`` for megatron-core."""
    if how == "megatron-args":
        return megatron_arguments(run)
    if how == "bridge":
        from bridge_memory.emit.bridge import bridge_overrides

        return bridge_overrides(run)
    return Emitted(estimate_command(run, args, gpu))


def layout_fields(run: RunSpec) -> dict[str, Any]:
    """"group.field" of what makes the layout of ``run``, as far as it is not Megatron's default."""
    p, r = run.parallel, run.recompute
    found: dict[str, Any] = {}
    for name in _FIELDS:
        group, _, field = name.partition(".")
        value = getattr(getattr(run, group), field)
        if name == "parallel.sequence_parallel":
            value = p.sp
        elif name == "recompute.modules" and r.granularity != "selective":
            continue
        elif name == "parallel.virtual_pipeline_model_parallel_size" and p.pipeline_model_parallel_layout:
            continue  # the string says it
        default = p.tp if name in AXES["etp"] else 1 if name in _ONE_UNLESS_GIVEN else None
        if value is False or value == default or value is None:
            continue
        found[name] = value
    for name in dict.fromkeys((*(name for fields in FIELDS.values() for name in fields), *SET_BESIDE)):
        group, _, field = name.partition(".")
        value = getattr(getattr(run, group), field)
        if value == getattr(_DEFAULTS[group], field) or name not in _FLAGGED:
            continue
        if (name in FIELDS["dispatcher"] and not run.model.has_experts) or (name in FIELDS["cp_comm"] and p.cp == 1):
            continue  # it does nothing, and flags that do nothing are refused
        found[name] = value
    return found


def estimate_command(run: RunSpec, args: argparse.Namespace, gpu: str) -> str:
    """The ``estimate`` command that shows this layout; ``args``: the flags that were given beside it."""
    layout = layout_fields(run)
    # What a search varies is as the row has it, also where a flag says another.
    varied = {*_OF_AXES, *(name for fields in FIELDS.values() for name in fields)}
    given = {name: value for name, value in given_fields(args).items() if name not in layout and name not in varied}
    return shlex.join(estimate_words(run, args, gpu, {**given, **layout}))


def split_words(p: ParallelSpec) -> str:
    """"even", "first 7, last 9", "embedding and loss as layers", or the layout string."""
    fields = split_fields(p)
    if "pipeline_model_parallel_layout" in fields:
        return str(fields["pipeline_model_parallel_layout"])
    ends = [name for name in ("embedding", "loss") if f"account_for_{name}_in_pipeline_split" in fields]
    counts = [
        f"{name} {fields[field]}" for name in ("first", "last")
        if (field := f"num_layers_in_{name}_pipeline_stage") in fields
    ]
    return f"{' and '.join(ends)} as layers" if ends else ", ".join(counts) or "even"


def recompute_words(r: RecomputeSpec) -> str:
    """"mlp,moe_act", "full block 4" or "none"."""
    if r.granularity == "selective":
        return ",".join(r.modules)
    return f"full {r.method} {r.num_layers}" if r.granularity == "full" else "none"
