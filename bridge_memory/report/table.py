"""An Estimate as a report for people: what is trained, every stage, the peak, what it fits on, what was supposed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from bridge_memory.estimate import Estimate, StageEstimate
from bridge_memory.gpus import CONTEXT_BYTES, FRAGMENTATION, Fit, outside_bytes
from bridge_memory.report.document import Column, Document, Facts, Grid, Notes, Part, Title, one_line
from bridge_memory.report.show import print_document
from bridge_memory.report.units import UNITS, Unit, count, ranges
from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.details import DetailRow

#: The parts of a peak, in the order in which they are shown.
_PARTS = ("weights", "gradients", "optimizer", "buffers", "activation", "transient")


def print_estimate(
    result: Estimate,
    fitting: Sequence[Fit],
    *,
    unit: str = "GiB",
    stage: int | None = None,
    details: Mapping[int, Sequence[DetailRow]] | None = None,
    stream: TextIO,
) -> None:
    """Print the report. ``stage`` shows only that one; ``details`` are rows of ``stage_details`` by stage."""
    print_document(document(result, fitting, unit=unit, stage=stage, details=details), stream)


def document(
    result: Estimate,
    fitting: Sequence[Fit],
    *,
    unit: str = "GiB",
    stage: int | None = None,
    details: Mapping[int, Sequence[DetailRow]] | None = None,
) -> Document:
    """The report's parts, in order."""
    u = UNITS[unit]
    shown = [s for s in result.stages if stage is None or s.stage == stage]
    parts: list[Part] = [Title(_title(result)), Facts(tuple(_facts(result.run)))]
    parts += _stage_grids(result, shown, u)
    for s in shown if details is not None else ():
        parts += _stage_details(s, details.get(s.stage, ()) if details else (), u)
    if fitting:
        parts.append(_fits(result, fitting, u))
        parts.append(Notes("Margin", (_margin(result),)))
    if result.assumptions:
        parts.append(Notes("Assumed", tuple(map(one_line, dict.fromkeys(result.assumptions)))))
    if result.not_modelled:
        parts.append(Notes("Not modelled", tuple(map(one_line, dict.fromkeys(result.not_modelled)))))
    return parts


# --------------------------------------------------------------------------------------------------
# What is trained
# --------------------------------------------------------------------------------------------------


def _title(result: Estimate) -> str:
    model = result.run.model
    text = f"{model.name} ({model.model_type}): {count(result.parameters)} parameters"
    if result.mtp_parameters:
        depths = f"{model.mtp_num_layers} MTP layer{'s' if model.mtp_num_layers > 1 else ''}"
        text += f" + {count(result.mtp_parameters)} of {depths}"
    return one_line(f"{text}, {model.num_layers} layers of width {model.hidden_size}")


def _facts(run: RunSpec) -> Iterator[tuple[str, str]]:
    p, b, o, r, i = run.parallel, run.batch, run.optimizer, run.recompute, run.implementation
    sizes = f"tp {p.tp}{' with sequence parallel' if p.sp else ''}, pp {p.pp}"
    if p.vpp > 1:
        sizes += f" x {p.vpp} virtual"
    sizes += f", cp {p.cp}, dp {p.data_parallel_size}"
    if run.model.has_experts:
        sizes += f"; experts: ep {p.ep}, etp {p.etp}, dp {p.expert_data_parallel_size}"
    yield "GPUs", f"{p.world_size}: {sizes}"
    total = b.micro_batch_size * run.num_microbatches * p.data_parallel_size
    yield (
        "batch",
        f"{total} sequences of {b.seq_length} tokens: {run.num_microbatches} microbatches of {b.micro_batch_size} "
        f"on each of {p.data_parallel_size} replicas",
    )
    yield "precision", _precision(run)
    yield "optimizer", f"{o.optimizer}{', distributed' if o.use_distributed_optimizer else ''}{_optimizer_extras(run)}"
    yield "recompute", _recompute(run) if r.granularity else "none"
    code = f"megatron-core {'.'.join(map(str, i.megatron_core))}, {i.transformer_impl}, {i.attention_backend} attention"
    loss = f"{i.cross_entropy_fusion_impl} fused" if i.cross_entropy_loss_fusion else "unfused"
    yield "code", f"{code}, {loss} cross entropy"


def _precision(run: RunSpec) -> str:
    p, o = run.precision, run.optimizer
    text = p.params_dtype
    if p.fp8:
        text += f", fp8 {p.fp8} ({p.fp8_recipe}{', fp8 parameters' if p.fp8_param else ''})"
    return f"{text}, gradients in {'fp32' if o.grad_reduce_in_fp32 else p.params_dtype}"


def _optimizer_extras(run: RunSpec) -> str:
    o = run.optimizer
    text = ""
    if o.use_precision_aware_optimizer:
        text += (
            f", precision-aware (main gradients {o.main_grads_dtype}, parameters {o.main_params_dtype}, moments "
            f"{o.exp_avg_dtype} and {o.exp_avg_sq_dtype})"
        )
    if o.optimizer_cpu_offload:
        text += f", {o.optimizer_offload_fraction:.0%} in host memory"
    return text


def _recompute(run: RunSpec) -> str:
    r = run.recompute
    if r.granularity == "selective":
        return f"selective: {', '.join(r.modules) or 'nothing'}"
    return f"full, {r.method}, {r.num_layers} layer{'' if r.num_layers == 1 else 's'} a group"


# --------------------------------------------------------------------------------------------------
# The stages
# --------------------------------------------------------------------------------------------------


def _stage_grids(result: Estimate, stages: Sequence[StageEstimate], u: Unit) -> list[Part]:
    groups = _alike(stages)
    between = any(s.leftovers for s in stages)
    worst = result.peak_stage.stage
    static_rows, peak_rows = [], []
    marked = None
    for i, group in enumerate(groups):
        s = group[0]
        name = ranges([g.stage for g in group])
        ticks = dict(zip(_PARTS, u.apportion([s.bytes_of(kind) for kind in _PARTS]), strict=True))
        lasting = [ticks[kind] for kind in _PARTS[:4]]
        left = u.ticks(sum(c.bytes for c in s.leftovers))
        static_rows.append(
            (
                name, _layers(group), count(s.parameters), *map(u.show, lasting),
                *((u.show(left),) if between else ()), u.show(sum(lasting) + left),
            )
        )
        peak_rows.append(
            (
                name, u.show(sum(lasting)), str(s.in_flight_microbatches), u.show(ticks["activation"]),
                u.show(ticks["transient"]), u.show(sum(ticks.values())), s.peak_phase,
            )
        )
        if any(g.stage == worst for g in group):
            marked = i
    static = Grid(
        f"Static: allocated after a step, {u.name} on each GPU",
        (
            Column("stage"), Column("layers"), Column("params"), Column("weights"), Column("gradients"),
            Column("optimizer"), Column("buffers"), *((Column("left"),) if between else ()), Column("static"),
        ),
        tuple(static_rows),
        marked,
    )
    peak = Grid(
        f"Peak: max allocated in a step, {u.name} on each GPU",
        (
            Column("stage"), Column("lasting"), Column("in flight"), Column("activations"), Column("transient"),
            Column("peak"), Column("in", left=True),
        ),
        tuple(peak_rows),
        marked,
    )
    legend = ["lasting: weights, gradients, optimizer and buffers; in flight: microbatches whose activations are held"]
    if between:
        legend.append("left: from one step's end to the next step's start only, so not at the peak")
    s = result.peak_stage
    where = f"{s.peak_phase}: {s.peak_operation}" if s.peak_operation else s.peak_phase
    total = u.show(sum(u.apportion([s.bytes_of(kind) for kind in _PARTS])))
    verdict = one_line(f"The peak is on stage {s.stage}: {total} {u.name}, in {where}")
    return [static, peak, Notes(verdict, tuple(legend))]


def _alike(stages: Sequence[StageEstimate]) -> list[list[StageEstimate]]:
    """Neighbours that differ in nothing but their place and which layers they hold."""
    groups: list[list[StageEstimate]] = []
    for s in stages:
        if groups and _placeless(groups[-1][0]) == _placeless(s) and groups[-1][-1].stage + 1 == s.stage:
            groups[-1].append(s)
        else:
            groups.append([s])
    return groups


def _placeless(s: StageEstimate) -> tuple[StageEstimate, int]:
    return replace(s, stage=0, layers=()), len(s.layers)


def _layers(group: Sequence[StageEstimate]) -> str:
    """"0-14"; the number for a stage of several pieces; "5 each" for several stages."""
    first = group[0].layers
    if len(group) > 1:
        return f"{len(first)} each"
    text = ranges(first)
    return text if "," not in text else f"{len(first)} in {text.count(',') + 1}"


def _stage_details(s: StageEstimate, rows: Sequence[DetailRow], u: Unit) -> list[Part]:
    """Every component of the stage's peak, then the tensors that the inventory listed."""
    heading = Title(f"Stage {s.stage}, layers {ranges(s.layers)}, {s.parameters:,} parameters on each GPU")
    components = Grid(
        f"At the peak, in {one_line(s.peak_operation or s.peak_phase)}",
        (Column("bytes"), Column("kind", left=True), Column("known by", left=True), Column("component", left=True)),
        tuple((f"{c.bytes:,}", c.kind, c.provenance, one_line(c.name)) for c in s.components),
    )
    total = Notes(f"Total {sum(c.bytes for c in s.components):,} bytes", ())
    parts: list[Part] = [heading, components, total]
    if s.leftovers:
        parts.append(
            Grid(
                "Between steps only",
                (Column("bytes"), Column("known by", left=True), Column("component", left=True)),
                tuple((f"{c.bytes:,}", c.provenance, one_line(c.name)) for c in s.leftovers),
            )
        )
    for section in dict.fromkeys(r.section for r in rows):
        for block in dict.fromkeys(r.block for r in rows if r.section == section):
            listed = [r for r in rows if (r.section, r.block) == (section, block)]
            parts.append(
                Grid(
                    f"{section}: {block}",
                    (Column("bytes"), Column("times"), Column("tensor", left=True), Column("", left=True)),
                    tuple((f"{r.bytes:,}", str(r.count), one_line(r.name), one_line(r.note)) for r in listed),
                )
            )
    return parts


# --------------------------------------------------------------------------------------------------
# GPUs
# --------------------------------------------------------------------------------------------------


def _fits(result: Estimate, fitting: Sequence[Fit], u: Unit) -> Grid:
    peak = u.ticks(result.peak_stage.peak_bytes)
    rows = []
    for f in fitting:
        capacity, margin = u.ticks(f.capacity_bytes), u.ticks(f.margin_bytes)
        rows.append(
            (
                f.gpu.name, u.show(capacity), u.show(peak), u.show(margin), u.show(capacity - peak - margin),
                "fits" if f.fits else "does not fit",
            )
        )
    return Grid(
        f"GPUs, {u.name}",
        (
            Column("GPU", left=True), Column("usable"), Column("peak"), Column("margin"), Column("headroom"),
            Column("", left=True),
        ),
        tuple(rows),
    )


def _margin(result: Estimate) -> str:
    outside = outside_bytes(result.run.parallel.world_size)
    mib = 1 << 20
    text = f"{CONTEXT_BYTES // mib} MiB CUDA context"
    if outside > CONTEXT_BYTES:
        text += f", {(outside - CONTEXT_BYTES) // mib} MiB NCCL buffers"
    return f"{text}, {FRAGMENTATION:.1%} of the peak for fragmentation; `bridge-memory gpus` lists more GPUs"
