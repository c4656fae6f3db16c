"""Evaluation on one rank of torch's engines or DeepSpeed's: forward passes that save nothing, beside what is alive
between steps and what the engine gathers.

As the Trainer does it for a loss alone (transformers ``trainer.py: evaluation_loop, prediction_step``, with
``prediction_loss_only``, its choice without ``compute_metrics``): logits go with their batch. With metrics it keeps the
logits of all batches on the GPU until ``eval_accumulation_steps``, which is not counted. Batches are as in training
unless ``eval_micro_batch_size`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bridge_memory.components import Provenance
from bridge_memory.engines.by_name import engine_of
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.inventory.torch.blocks import embedding_block
from bridge_memory.inventory.torch.chain import mask_bytes
from bridge_memory.job.megatron.evaluation import as_evaluated, beside, forward_passes
from bridge_memory.job.torch.building import rank_of
from bridge_memory.job.torch.saving import between_steps
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.spec import AttentionSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import EngineBytes, Label
from bridge_memory.tapes.context import context_of

_LOOP = "trainer.py: evaluation_loop, prediction_loss_only"


def evaluation(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What is alive at the highest moment of an evaluation after a training step. Raises SpecError: there is no such
    stage."""
    return tuple(a for a in (*between_steps(rank_of(run, stage), stage), *forward_only(run, stage)) if a.most)


def forward_only(run: RunSpec, stage: int, *, may_cache: bool = True) -> tuple[Amount, ...]:
    """What passes without a backward hold at their highest moment, beside what persists; ``may_cache``: the model's
    config decides whether they keep keys and values. Raises SpecError: there is no such stage."""
    rank, parts = rank_of(run, stage), stage_parts(run, stage)
    evaluated = _evaluated(run)
    ctx = context_of(as_evaluated(evaluated))
    # Variables of the model's forward: masks, and the rotary tables.
    held = 0
    if ctx.torch_layers is not None:
        held = mask_bytes(run.model, ctx) + embedding_block(run.model, ctx).cost.retained
    engine = _engine_bytes(evaluated)
    moments = []
    at = 0
    for moment in forward_passes(evaluated, 0):
        gathered = beside(engine, moment.name, at)
        at += moment.name == Label.LAYER.value
        inside = moment.name not in (Label.EMBEDDING.value, Label.LOSS.value)
        own = moment.nbytes + (held if inside else 0) - (moment.held if not inside else 0)
        moments.append((max(own + gathered.forward, gathered.least_forward), own, moment.name))
    most, own, name = max(moments)
    batch = parts.batch * evaluated.batch.micro_batch_size // run.batch.micro_batch_size
    return tuple(a for a in (
        exactly("batch", batch, Provenance.FORMULA),
        exactly("parameters gathered for all passes", rank.state.gathered, Provenance.FORMULA),
        exactly(f"forward pass without gradients: {name}", own, Provenance.ASSUMED, _LOOP),
        exactly("parameters gathered", max(most - own, 0), Provenance.FORMULA),
        Amount("keys and values of all layers, with config.use_cache", 0, may_cache * _cached(evaluated),
               Provenance.ASSUMED,
               "cache_utils.py: DynamicCache"),
    ) if a.most)  # fmt: skip


def _evaluated(run: RunSpec) -> RunSpec:
    """The run with the batches of evaluation, without checkpoints."""
    batch = run.transformers.eval_micro_batch_size or run.batch.micro_batch_size
    hf = replace(
        run.transformers, gradient_checkpointing=False, use_reentrant=None, checkpoint_submodules=False,
        selective_ac_option=None, enable_activation_offloading=False, lora_dropout=0.0,
    )
    return run.with_(transformers=hf, batch=replace(run.batch, micro_batch_size=batch, global_batch_size=None))


def _engine_bytes(run: RunSpec) -> EngineBytes | None:
    units = chunk_units(run.model, layout(run.model, run.parallel).shapes(run.model)[0][0], context_of(run))
    found = engine_of(run).stage([units]).concurrent
    return found[0] if found else None


def _cached(run: RunSpec) -> int:
    """Bytes of the DynamicCache of transformers' classes where training has none: the Trainer leaves it to the config.
    """
    if run.implementation.own_layers or run.transformers.use_cache:
        return 0
    return sum(_keys_and_values(run))


def _keys_and_values(run: RunSpec) -> Iterator[int]:
    s, b = run.batch.rows
    width = context_of(run).act
    for layer in run.model.layers:
        if isinstance(layer.mixer, AttentionSpec):
            yield 2 * s * b * layer.mixer.num_query_groups * layer.mixer.kv_channels * width
