"""Multi-token prediction: one depth joins the hidden states with the next token's embedding and runs a layer.

Source: megatron-core ``transformer/multi_token_prediction.py: MultiTokenPredictionLayer``. The output layer and loss
of each depth are ``output.record_output``; the stage that runs MTP without holding the embedding has a copy of it.
"""

from __future__ import annotations

from bridge_memory.inventory.recorder import Recorder
from bridge_memory.inventory.tape import T


def record_mtp_inputs(r: Recorder, x: T) -> T:
    """enorm, hnorm, concatenation and eh_proj: [T_sp, h] -> [T_sp, h]."""
    ctx, tape = r.ctx, r.tape
    h, act = ctx.hidden_size, ctx.act
    shard = ctx.tokens_sp * h * act
    embedded = tape.make("embedding of the next token", x, shard)
    e = r.norm("enorm", embedded, h, ctx.tokens_sp)
    n = r.norm("hnorm", x, h, ctx.tokens_sp)
    both = tape.make("concatenated", (e, n), 2 * shard)
    part = r.column_linear("eh_proj", both, 2 * h, h // ctx.tp)
    if ctx.tp == 1:
        return part
    whole = ctx.tokens * h * act
    gathered = tape.make("eh_proj gathered", part, whole)
    return tape.make("eh_proj scattered", gathered, shard) if ctx.sp else gathered
