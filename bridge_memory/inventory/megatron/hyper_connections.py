"""Hyper-connections (mHC): n residual streams, mixed before and after each block with weights computed per token.

Source: Megatron-LM's main branch of 2026, not yet in megatron-core 0.19: ``transformer/hyper_connection.py:
HyperConnectionModule, learned_output_contract``, ``multi_token_prediction.py``. Streams are [T, n h]. In torch the
weights are computed from an fp32 copy; fused kernels read the streams directly. The mixing itself is compiled.

recompute_modules (mhc), ``tensor_parallel/random.py: MHCCheckpointManager``, ``transformer_block.py:
_build_mhc_recompute_layer_plan``, ``transformer_layer.py: HyperConnectionTransformerLayer``: the aggregated stream,
its norm, and the mixed streams of both blocks are outputs of checkpoints (``CheckpointWithoutOutput``). All of a
chunk's lose their storage when its last layer has run forward, and are recomputed together when that layer's backward
begins. The first layer's input and the last one's output stay, and so do the weights of the streams with what computing
them saves, the fp32 copy included: they are not recomputed. MTP depths are outside of the block, and counted with
everything.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def through_streams(r: Recorder, name: str, streams: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
    """Aggregate the streams [T, n h] to one [T, h], run ``block`` on it, and add its output to the mixed streams."""
    ctx, tape = r.ctx, r.tape
    n, h = ctx.residual_streams, ctx.hidden_size
    width = n * n + 2 * n
    r.parameter(f"{name}.mapping_proj.weight", (width, n * h))
    for alpha in ("alpha_pre", "alpha_post", "alpha_res"):
        r.parameter(f"{name}.{alpha}", (1,))
    r.parameter(f"{name}.bias", (width,))
    tokens, before = ctx.tokens, tape.part
    source = streams
    if not ctx.fused_hyper_connections:
        source = tape.make("streams in fp32", streams, 4 * tokens * n * h)
    # Projection and norm, then the logits of the weights (4 bytes each), and what their sigmoids save.
    small = 4 * tokens * width
    kept = tape.tensor("projected streams", small + 8 * tokens, grad=False)
    logits = tape.make("mixing weights in fp32", source, small, saves=(source, kept), also=(kept,), save_output=True)
    mixing = tape.make("mixing weights", logits, tokens * width * ctx.act)
    one = tape.make("aggregated streams", (streams, mixing), tokens * h * ctx.act, saves=(streams, mixing))
    r.discard_streams(streams, one)
    y = block(one)
    tape.part = before
    out = tape.make("mixed streams", (streams, mixing, y), ctx.hidden_bytes, saves=(streams, mixing, y))
    tape.keep_alive(streams, mixing, y)
    return out


def expand(r: Recorder, x: Tensor) -> Tensor:
    """One stream repeated n times, at the beginning of the decoder."""
    return r.tape.make("streams", x, r.ctx.hidden_bytes)


def contract(r: Recorder, prefix: str, streams: Tensor) -> Tensor:
    """The weighted sum of the streams, at the end of the decoder (or an MTP depth): [T, n h] -> [T, h], one kernel."""
    ctx, n, h = r.ctx, r.ctx.residual_streams, r.ctx.hidden_size
    r.parameter(f"{prefix}hc_head_fn", (n, n * h))
    r.parameter(f"{prefix}hc_head_base", (n,))
    r.parameter(f"{prefix}hc_head_scale", (1,))
    kept = r.tape.tensor("weights of the streams", 4 * ctx.tokens * (n + 1), grad=False)
    return r.tape.make("contracted streams", streams, ctx.tokens * h * ctx.act, saves=(streams, kept), also=(kept,))


def join(r: Recorder, streams: Tensor, embedded: Tensor) -> Tensor:
    """The input of an MTP depth: streams and embedding are normed and projected, and the embedding is added to every
    stream."""
    ctx, tape = r.ctx, r.tape
    n, h, rows = ctx.residual_streams, ctx.hidden_size, ctx.tokens
    e = r.norm("enorm", embedded, h, rows)
    normed = r.norm("hnorm", streams, h, rows * n)
    e = r.plain_linear("e_proj", e, rows, h, h)
    projected = r.plain_linear("h_proj", normed, rows * n, h, h)
    out = tape.make("joined streams", (e, projected), ctx.hidden_bytes)
    tape.keep_alive(projected)
    return out
