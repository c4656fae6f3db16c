"""Evaluation on one Megatron rank: forward passes that save nothing, beside everything that training keeps.

Source: Bridge ``training/eval.py: evaluate`` (``torch.no_grad``, ``model.eval()``), megatron-core ``pipeline_parallel/
schedules.py`` with ``forward_only``: no inputs or outputs are kept for a backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.components import Provenance
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.engine import StageState
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.layer import embedding_block, layer_block
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.inventory.tail import tail_blocks
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.spec import RecomputeSpec, RunSpec
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.tapes.alive import Atoms, BlockCost, Structure
from bridge_memory.tapes.allocation_trace import tape_of
from bridge_memory.tapes.chain import NOTHING, Concurrent, EngineBytes, Label
from bridge_memory.tapes.context import BlockContext, context_of

_FSDP = "megatron_fsdp.py: pre_forward, post_forward"
_SCHEDULE = "schedules.py: forward_only"


def why_not(run: RunSpec) -> str | None:
    """Why evaluation is not modelled for ``run``; None where it is."""
    if run.data_parallel.engine not in ("megatron_ddp", "megatron_fsdp"):
        return f"engine {run.data_parallel.engine}: evaluation is not modelled"
    if run.teacher is not None or run.implementation.distillation != "none":
        return "a teacher: evaluation is not modelled"
    return None


def evaluation(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment of an evaluation after a training step; None if that is not modelled.

    Batches are as in training. Raises SpecError: there is no such stage.
    """
    parts = stage_parts(run, stage)
    if why_not(run) is not None:
        return None
    kept = [exactly(c.name, c.bytes, c.provenance) for c in (*parts.persistent, *parts.between_steps)]
    return tuple(a for a in (*kept, *forward_only(run, stage)) if a.most)


def forward_only(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What passes without a backward hold at their highest moment, beside what persists. Raises SpecError: there is no
    such stage."""
    parts = stage_parts(run, stage)
    engine = _gathered(run, stage)
    most, moment = _highest(forward_passes(run, stage), engine)
    hidden, shapes = parts.hidden_state, layout(run.model, run.parallel).shapes(run.model)[stage]
    shape = shapes[moment.chunk]
    pipeline = run.parallel.pp > 1
    sent = hidden if pipeline and not (shape.output and len(shapes) == 1) else 0
    waiting = hidden if len(shapes) > 1 else 0
    return tuple(a for a in (
        exactly("batch", parts.batch, Provenance.FORMULA),
        exactly("parameters gathered", most - moment.nbytes, Provenance.FORMULA, _FSDP),
        exactly("input of the chunk", moment.held, Provenance.FORMULA, "gpt_model.py: GPTModel.forward, decoder_input"),
        exactly(f"forward pass without gradients: {moment.name}", moment.nbytes - moment.held, Provenance.FORMULA),
        exactly("output of the microbatch before", sent, Provenance.FORMULA, _SCHEDULE),
        Amount("inputs received early", 0, waiting, Provenance.ASSUMED, _SCHEDULE),
    ) if a.most)  # fmt: skip


def _gathered(run: RunSpec, stage: int) -> StageState | None:
    """What Megatron-FSDP gathers: units are gathered and freed as in training's forward passes. None: nothing is."""
    if run.data_parallel.engine != "megatron_fsdp":
        return None
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
    return engine_of(run).stage([chunk_units(run.model, shape, ctx) for shape in shapes])


def _highest(passes: Iterable[Moment], engine: StageState | None) -> tuple[int, Moment]:
    """The highest moment, with what the engine gathers beside it and beyond what is gathered between steps."""
    found: list[tuple[int, Moment]] = []
    more = engine.gathered - engine.gathered_between_steps if engine else 0
    layers: Counter[int] = Counter()
    for moment in passes:
        concurrent = engine.concurrent[moment.chunk] if engine else None
        gathered = beside(concurrent, moment.name, layers[moment.chunk])
        layers[moment.chunk] += moment.name == Label.LAYER.value
        most = max(moment.nbytes + gathered.forward, gathered.least_forward) + more
        found.append((max(most, moment.nbytes), moment))
    return max(found, key=lambda one: one[0])


def beside(engine: EngineBytes | None, name: str, layer: int) -> Concurrent:
    """What an engine holds beside a block of a forward pass."""
    if engine is None:
        return NOTHING
    if name == Label.LAYER.value:
        return engine.layers[layer]
    of = {
        Label.EMBEDDING.value: engine.embedding, Label.FINAL_NORM.value: engine.final_norm,
        Label.MTP.value: engine.mtp, Label.LOSS.value: engine.loss,
    }  # fmt: skip
    return of.get(name, NOTHING)


class Moment(NamedTuple):
    """The peak of one block: its chunk, what runs, all bytes of the pass, and of these the chunk's input."""

    chunk: int
    name: str
    nbytes: int
    held: int


def forward_passes(run: RunSpec, stage: int) -> Iterator[Moment]:
    """The peak of every block of a forward pass, in order; without what persists from one pass to the next."""
    ctx, known = _evaluated(run)

    def cost(key: object, block: Callable[[BlockContext], Any]) -> BlockCost:
        if key not in known:
            known[key] = without_gradients(ctx, block)
        return known[key]

    for number, shape in enumerate(layout(run.model, run.parallel).shapes(run.model)[stage]):
        blocks = list(_blocks(run, shape, ctx, cost))
        # Attributes of modules stay from one microbatch to the next.
        attributes = sum(c.no_grad_retained for _, c in blocks)
        entered = False
        for label, c in blocks:
            held = ctx.hidden_bytes if entered else 0
            entered = entered or label is not Label.EMBEDDING
            yield Moment(number, label.value, attributes - c.no_grad_retained + held + c.no_grad_peak, held)
        if not blocks:
            yield Moment(number, "nothing", ctx.hidden_bytes, ctx.hidden_bytes)



def _blocks(
    run: RunSpec, shape: ChunkShape, ctx: BlockContext, cost: Callable[..., BlockCost]
) -> Iterator[tuple[Label, BlockCost]]:
    model = as_evaluated(run).model
    if shape.embedding:
        yield Label.EMBEDDING, cost("embedding", lambda c: embedding_block(model, c))
    for kind, count in shape.layers:
        for _ in range(count):
            yield Label.LAYER, cost(kind, lambda c, kind=kind: layer_block(kind, c))
    for at, (_, label) in enumerate(tail_blocks(model, shape, ctx)):
        yield label, cost((shape, at), lambda c, at=at: tail_blocks(model, shape, c)[at][0])


@lru_cache(maxsize=8)
def _evaluated(run: RunSpec) -> tuple[BlockContext, dict[object, BlockCost]]:
    """What blocks cost in an evaluation is the same on all stages."""
    return context_of(as_evaluated(run)), {}


def as_evaluated(run: RunSpec) -> RunSpec:
    """The run whose forward passes evaluation runs: without dropout, and without checkpoints."""
    model = replace(run.model, hidden_dropout=0.0, attention_dropout=0.0)
    return replace(run, model=model, recompute=RecomputeSpec())


def without_gradients(ctx: BlockContext, block: Callable[[BlockContext], Any]) -> BlockCost:
    """The cost of a block with its peak under ``torch.no_grad``, which estimates of training trace for layers that are
    recomputed in full only."""
    atoms = Atoms()
    structure = Structure(tape_of(ctx, block), atoms).offloading(ctx.cache.offloads)
    return BlockCost(structure, list(atoms.sizes))
