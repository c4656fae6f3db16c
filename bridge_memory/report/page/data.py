"""The data of a page as JSON, schema ``bridge-memory/page/2`` (``page.schema.json`` in ``report``).

Nothing here is computed a second time: stages are those of the Estimate, the timeline is ``bridge_memory.timeline``,
and the tensors of the treemap add up to the components, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from bridge_memory.components import Component, Part, Provenance, Role
from bridge_memory.decisive import decisive
from bridge_memory.estimation import Estimate, StageEstimate, StageParts, stage_parts
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.job.job import Job
from bridge_memory.report.answer import answer_of, peak_words
from bridge_memory.report.decided import sentences
from bridge_memory.report.details import layer_name
from bridge_memory.report.phases import phases_data
from bridge_memory.report.summary import configuration
from bridge_memory.report.table import alike, moves_words
from bridge_memory.report.units import ranges
from bridge_memory.result import OPTIMIZER_STEP
from bridge_memory.spec import ModelSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of
from bridge_memory.timeline import Step, Timeline, timeline_of
from bridge_memory.verdict import Fit

SCHEMA = "bridge-memory/page/2"
#: Phase of a pass -> its number in ``passes``.
PHASES = ("forward", "backward", "overlapped")

Node = dict[str, Any]


def page_data(
    result: Estimate,
    fits: Sequence[Fit] = (),
    *,
    flags: str = "",
    fix: str = "",
    unit: str = "GiB",
    drawn: Collection[int] | None = None,
    jobs: Sequence[Job] = (),
) -> dict[str, Any]:
    """Everything that a page shows of ``result``.

    ``flags``: the command that reproduces it; ``fix``: a change that makes it fit, in words; ``drawn``: stages that get
    a timeline and a treemap (None: one of each group of equal stages); ``jobs``: on GPUs of ``fits``; of a
    single one its phases.
    """
    answer = answer_of(result, fits, unit=unit, fix=fix, jobs=jobs)
    groups = alike(result.stages)
    chosen = {group[0].stage for group in groups} if drawn is None else set(drawn)
    return {
        "schema": SCHEMA,
        "title": result.run.model.name,
        "peak": {
            "stage": result.peak_stage.stage, "bytes": result.peak_stage.peak_bytes,
            "words": peak_words(result, unit),
        },
        "verdict": {
            "answer": answer.verdict, "words": answer.words, "evidence": answer.evidence,
            "band": None if answer.band is None else asdict(answer.band), "band_words": answer.band_words,
        },
        "flags": flags,
        "configuration": [list(pair) for pair in configuration(result)],
        "decisive": list(sentences(decisive(result), unit)),
        "gpus": [fit.step_json() for fit in fits],
        "stages": [_stage(group) for group in groups],
        "timelines": {str(n): timeline_data(result, n) for n in sorted(chosen)},
        "treemaps": {str(n): treemap_data(result, n) for n in sorted(chosen)},
        "assumptions": list(dict.fromkeys(result.assumptions)),
        "not_modelled": [{"what": str(feature), "moves": moves_words(feature, unit)} for feature in result.unmodelled],
        **({"job": phases_data(jobs[0], fits, unit)} if len(fits) == 1 and jobs else {}),
    }  # fmt: skip


def _stage(group: Sequence[StageEstimate]) -> dict[str, Any]:
    one = group[0]
    return {
        "stage": one.stage, "label": ranges([s.stage for s in group]), "number": len(group),
        "layers": ranges(sorted(i for s in group for i in s.layers)), "num_layers": len(one.layers),
        "parameters": one.parameters, "in_flight": list(one.in_flight), "static_bytes": one.static_bytes,
        "peak_bytes": one.peak_bytes, "peak_phase": one.peak_phase, "peak_operation": one.peak_operation,
        "parts": {str(role): one.bytes_of(role) for role in Role},
        "components": [_component(c) for c in sorted(one.components, key=lambda c: -c.bytes)],
        "carried_over": [_component(c) for c in one.carried_over],
    }  # fmt: skip


def _component(c: Component) -> dict[str, Any]:
    return {
        "name": c.name, "bytes": c.bytes, "role": str(c.role), "provenance": str(c.provenance), "shard": c.shard,
        "lifetime": str(c.lifetime), "part": str(c.part),
    }  # fmt: skip


# ---- the step over time ----


def timeline_data(result: Estimate, stage: int) -> dict[str, Any]:
    """One stage over one training step. ``charts.js: expand`` makes of it the points of ``timeline.Timeline.points``.

    A pass is [phase, microbatch, chunk, hidden states held, bytes carried over by others], of an overlapped one
    [..., forward microbatch, forward chunk, bytes of both] follow; a step of a chunk is [name, kind, keeps, forward,
    backward, forward operation, backward operation, gradients made before, kept by the steps before], with names as
    indices into ``words``.
    """
    timeline = timeline_of(result, stage)
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    chunks = []
    for number, chunk in enumerate(timeline.chunks):
        steps = [
            [word(step_name(step)), word(_kind(step, result.run.model)), step.keeps, step.forward, step.backward,
             word(step.forward_operation), word(step.backward_operation), step.gradients, step.before]
            for step in chunk.steps
        ]  # fmt: skip
        name = f"virtual stage {number}" if len(timeline.chunks) > 1 else "the stage"
        chunks.append(
            {"name": name, "saved": chunk.saved, "sent": chunk.sent, "steps": steps}
        )
    peak = timeline.peak()
    return {
        "stage": stage,
        "persistent": {str(role): nbytes for role, nbytes in timeline.persistent.items()},
        "fresh": timeline.fresh,
        "carried_over": timeline.carried_over,
        "always": timeline.always,
        "in_step": timeline.in_step,
        "hidden_state": timeline.hidden_state,
        "microbatches": timeline.microbatches,
        "followed": timeline.followed,
        "chunks": chunks,
        "passes": list(_passes(timeline)),
        "words": list(words),
        "peak": {
            "bytes": peak.total, "pass": peak.pass_number, "step": peak.step,
            "operation": timeline.operation(peak),
        },
    }  # fmt: skip


def _passes(timeline: Timeline) -> Iterator[list[int]]:
    for one in timeline.passes:
        row = [PHASES.index(one.phase), one.microbatch, one.chunk, one.hidden, one.carried_over]
        if one.phase == "overlapped":
            row += [one.forward_microbatch, one.forward_chunk, one.peak]
        yield row


def step_name(step: Step) -> str:
    if not step.layers:
        return _of_label(step.label)
    return f"layer{'s' * (len(step.layers) > 1)} {ranges(step.layers)}"


def _of_label(label: Label) -> str:
    return "output layer and loss" if label is Label.LOSS else label.value


def _kind(step: Step, model: ModelSpec) -> str:
    kinds = " and ".join(dict.fromkeys(layer_name(model.layers[i]) for i in step.layers))
    return _KINDS[step.label].format(kinds)


_KINDS = {label: "" for label in Label} | {
    Label.LAYER: "{}", Label.RECOMPUTED: "{}, recomputed", Label.OFFLOADED: "{}, offloaded",
}  # fmt: skip


# ---- the peak in parts ----


def treemap_data(result: Estimate, stage: int) -> Node:
    """The peak of a stage as a tree: component, kind of layer, tensor. Children add up to their parents."""
    one = result.stages[stage]
    parts = stage_parts(result.run, stage)
    weights = _parameters(result.run, stage)
    saved = {} if one.peak_phase == OPTIMIZER_STEP else _saved(parts, result.run.model)
    children = []
    for c in sorted(one.components, key=lambda c: -c.bytes):
        if not c.bytes:
            continue
        node: Node = {**_component(c)}
        inside: Mapping[str, Mapping[str, int]] = {}
        if c.role is Role.ACTIVATION:
            inside = saved.get((c.part, c.provenance), {})
        elif c.state:
            inside = _widened(weights.get((c.experts, c.adapters), {}), c.bytes)
        nodes = [_group(name, tensors) for name, tensors in inside.items() if sum(tensors.values())]
        if nodes and sum(node["bytes"] for node in nodes) == c.bytes:
            node["children"] = sorted(nodes, key=lambda n: -n["bytes"])
            # Which tensors lie in the shard of one data-parallel rank is not modelled; each gets its share.
            node["shares"] = bool(c.state) and not {"dp", "edp"}.isdisjoint(c.shard.split(" x "))
        children.append(node)
    return {"name": f"peak of stage {stage}", "bytes": one.peak_bytes, "children": children}


def _group(name: str, tensors: Mapping[str, int]) -> Node:
    rows = sorted(tensors.items(), key=lambda item: -item[1])
    return {
        "name": name, "bytes": sum(tensors.values()),
        "children": [{"name": tensor, "bytes": nbytes} for tensor, nbytes in rows if nbytes],
    }  # fmt: skip


Groups = dict[str, dict[str, int]]


def _add(groups: Groups, group: str, tensor: str, nbytes: int) -> None:
    inside = groups.setdefault(group, {})
    inside[tensor] = inside.get(tensor, 0) + nbytes


def _parameters(run: RunSpec, stage: int) -> dict[tuple[bool, bool], Groups]:
    """(of experts, of adapters) -> kind of layer -> parameter -> elements on one rank."""
    out: dict[tuple[bool, bool], Groups] = {}
    ctx = context_of(run)
    for shape in layout(run.model, run.parallel).shapes(run.model)[stage]:
        for unit in chunk_units(run.model, shape, ctx):
            name = _of_label(unit.label) if unit.layer is None else layer_name(unit.layer)
            for parameters, count in unit.parameters.rows:
                for p in parameters:
                    groups = out.setdefault((p.expert, False), {})
                    _add(groups, name, p.name, prod(p.shape) * count * unit.times)
    return out


def _widened(groups: Groups, nbytes: int) -> Groups:
    """Elements as bytes, where ``nbytes`` is a whole number of bytes per element; else nothing."""
    elements = sum(n for tensors in groups.values() for n in tensors.values())
    if not elements or nbytes % elements:
        return {}
    width = nbytes // elements
    return {name: {tensor: n * width for tensor, n in tensors.items()} for name, tensors in groups.items()}


def _saved(parts: StageParts, model: ModelSpec) -> dict[tuple[Part, Provenance], Groups]:
    """Activations of microbatches in flight at the peak: part and provenance -> kind of layer -> tensor -> bytes."""
    out: dict[tuple[Part, Provenance], Groups] = {}
    for chunk, links, times in parts.alive_at_peak():
        layers, at = parts.layers[chunk], 0
        for link, count in links:
            of_layers = link.label in (Label.LAYER, Label.RECOMPUTED, Label.OFFLOADED)
            name = _of_label(link.label)
            if of_layers:
                name = layer_name(model.layers[layers[at]])
                at += count * link.layers
            if link.cost is not None:
                for t in link.cost.tensors:
                    _add(out.setdefault((t.part, t.provenance), {}), name, t.name, t.bytes * count * times)
            for key, nbytes in link.more:
                _add(out.setdefault(key, {}), name, str(key[0]), nbytes * count * times)
    return out
