"""Multi-token prediction: one depth joins the hidden states with the next token's embedding and runs a layer.

Source: megatron-core ``transformer/multi_token_prediction.py: MultiTokenPredictionLayer``. The output layer and loss
of each depth are ``output.record_output``. A stage with MTP but without the embedding has a copy of the embedding.
"""

from __future__ import annotations

from bridge_memory.inventory.megatron.embedding import embed, position_rows
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_next_embedding(
    r: Recorder, positions: int | None = 0, *, waits: bool = False
) -> Tensor:
    """The embedding of the next token, [T_sp, h]; it is not part of what is recomputed.

    ``positions``: rows of a table of learned positions (``embedding.learned_positions``), whose ids are rolled
    as token ids are. ``waits``: its gradient of that table is the first of several.
    """
    ids = r.tape.tensor("next token ids", 8 * r.ctx.tokens, grad=False)
    r.tape.op("roll", (), ids)
    if positions == 0:
        return embed(r, ids)
    place = r.tape.tensor("next position ids", 8 * r.ctx.tokens, grad=False)
    r.tape.op("roll", (), place)
    return embed(r, ids, positions=position_rows(r.ctx, positions), place=place, waits=waits)


def record_mtp_inputs(r: Recorder, x: Tensor, embedded: Tensor) -> Tensor:
    """enorm, hnorm, concatenation and eh_proj: [T_sp, h] -> [T_sp, h]."""
    ctx, tape = r.ctx, r.tape
    h, act = ctx.hidden_size, ctx.act
    shard = ctx.tokens_sp * h * act
    e = r.norm("enorm", embedded, h, ctx.tokens_sp)
    n = r.norm("hnorm", x, h, ctx.tokens_sp)
    both = tape.make("concatenated", (e, n), 2 * shard)
    part = r.column_linear("eh_proj", both, 2 * h, h // ctx.tp)
    if ctx.tp == 1:
        return part
    whole = ctx.tokens * h * act
    # The ranks' parts are gathered one after the other and concatenated along h.
    gathered = tape.make(
        "eh_proj gathered", part, whole, workspace=whole, backward_workspace=whole if ctx.sp else 0
    )
    if ctx.sp:
        # This rank's tokens are a view, so that the layer keeps the whole tensor alive (``mappings.py:
        # _split_along_first_dim``); their gradient is gathered.
        gathered.grad_bytes = shard
    return gathered
