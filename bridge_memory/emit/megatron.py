"""A layout in the words of those who run it: this command line's, Megatron-LM's, Megatron Bridge's."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from bridge_memory.arguments.flags import FLAGS
from bridge_memory.emit.commands import Emitted, estimate_words, flag_words, given_fields
from bridge_memory.plan.megatron.space import AXES
from bridge_memory.plan.megatron.splits import NO_SPLIT, split_fields
from bridge_memory.spec import ParallelSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.fields import called
from bridge_memory.spec.run import GROUPS

#: "group.field" of what makes a layout.
_FIELDS = (*(field for fields in AXES.values() for field in fields), "parallel.sequence_parallel")
_ONE_UNLESS_GIVEN = frozenset(AXES[axis][0] for axis in ("tp", "pp", "vpp", "cp", "ep"))
#: Switches of a layout, which are off unless something turns them on.
_SWITCHES = {
    "parallel.sequence_parallel": False, **{f"parallel.{n}": off for n, off in NO_SPLIT.items() if off is False}
}  # fmt: skip
#: The last spelling of a flag is Megatron-LM's.
_MEGATRONS = {flag.field: flag.names.split()[-1] for flag in FLAGS}


def emitted(how: str, run: RunSpec, args: argparse.Namespace, gpu: str) -> Emitted:
    """A layout in one of the formats of ``formats.FORMATS`` for megatron-core."""
    if how == "megatron-args":
        return Emitted(megatron_arguments(run))
    return Emitted(bridge_overrides(run) if how == "bridge" else estimate_command(run, args, gpu))


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
    return found


def estimate_command(run: RunSpec, args: argparse.Namespace, gpu: str) -> str:
    """The ``estimate`` command that shows this layout; ``args``: the flags that were given beside it."""
    layout = layout_fields(run)
    given = {name: value for name, value in given_fields(args).items() if name not in layout}
    return shlex.join(estimate_words(run, args, gpu, {**given, **layout}))


def megatron_arguments(run: RunSpec) -> str:
    """The layout as Megatron-LM's arguments."""
    words: list[str] = []
    for name, value in layout_fields(run).items():
        words += flag_words(_MEGATRONS[name], value, " ")
    if run.batch.global_batch_size:
        words += ["--global-batch-size", str(run.batch.global_batch_size)]
    return shlex.join(words)


def bridge_overrides(run: RunSpec) -> str:
    """The layout as assignments to Megatron Bridge's ConfigContainer ``cfg``, one a line: all of it, since a recipe has
    a layout of its own that is not the default."""
    lines = []
    # Said where it is tensor parallelism too: a provider may have resolved its own None before.
    found = {**dict.fromkeys(_FIELDS), **layout_fields(run), AXES["etp"][0]: run.parallel.etp}
    if not run.model.has_experts:
        found = {name: value for name, value in found.items() if name not in (*AXES["ep"], *AXES["etp"])}
    if run.recompute.granularity != "selective":
        del found["recompute.modules"]  # means nothing then
    for name, value in found.items():
        group, _, field = name.partition(".")
        if value is None:
            value = {**dict.fromkeys(_ONE_UNLESS_GIVEN - set(AXES["vpp"]), 1), **_SWITCHES}.get(name)
        owner = "train" if group == "batch" else "model"
        shown = list(value) if isinstance(value, tuple) else value
        text = str(shown) if shown is None or isinstance(shown, bool) else json.dumps(shown)
        lines.append(f"cfg.{owner}.{called(GROUPS[group], field)} = {text}")
    if run.batch.global_batch_size:
        lines.append(f"cfg.train.global_batch_size = {run.batch.global_batch_size}")
    return "\n".join(lines)


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
