"""Where torchtune's layers differ from transformers' Llama: rotary embedding, and the chunked loss.

Source: torchtune 0.6.1 ``modules/position_embeddings.py: RotaryPositionalEmbeddings.forward``, ``modules/
transformer.py: TransformerDecoder.chunked_output``, ``modules/loss/ce_chunked_output_loss.py:
CEWithChunkedOutputLoss``. Its norm casts back before it multiplies by the weight, as Llama's does (only release 0.6 has
``F.rms_norm`` in fp32).
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.ops import FP32, Array, Torch


def rotated(t: Torch, query: Array, key: Array) -> tuple[Array, Array]:
    """Pairs of features are rotated in fp32. Packed samples have position ids, with which query and key each gather
    rows of the table, [b, s, d / 2, 2]; their products save these."""
    return _turned(t, "query", query), _turned(t, "key", key)


def _turned(t: Torch, name: str, x: Array) -> Array:
    ctx = t.r.ctx
    table = t.constant(f"rotary table of the {name}", ctx.tokens * ctx.rotary_dim, FP32)
    wide = t.cast(f"{name} in fp32", x, FP32)
    half = wide.elements // 2
    first, second = (t.slice(f"{name}: {which} of the pairs", wide, half) for which in ("first", "second"))
    parts = []
    for which, one, other in (("first", first, second), ("second", second, first)):
        straight = t.mul(f"{name}: {which} times cos", one, table._replace(elements=half))
        crossed = t.mul(f"{name}: {which} times sin", other, table._replace(elements=half))
        parts.append(t.add(f"{name}: {which} rotated", straight, crossed))
    out = t.cat(f"{name}: pairs rotated", *parts)
    t.keep_alive(x, wide, table, *parts)
    return t.cast(f"rotated {name}", out, x.width)


def chunked_loss(t: Torch, x: Array) -> Array:
    """The output layer on one chunk of the sequences after the other, then the loss of each: the logits of all chunks
    are alive together, in the compute dtype. Backward makes the gradients of all logits first, then a gradient of the
    whole weight for each chunk; the first two are summed in a third (``inventory/shared_weights.py``), later ones into
    it."""
    ctx, hf = t.r.ctx, t.hf
    h, v, n = ctx.hidden_size, ctx.padded_vocab, hf.spec.num_output_chunks
    rows = ctx.batch * ((ctx.seq + n - 1) // n)
    chunks = t.split("chunks of the hidden states", x, *(rows * h for _ in range(n)))
    if bool(ctx.batch > 1):
        chunks = tuple(t.copy(f"chunk {i}, contiguous", chunk) for i, chunk in enumerate(chunks))
    weight = v * h * t.parameter_width
    trains = t.trains("lm_head.weight")
    waits = trains and hf.gradients_stay
    logits = []
    for i, chunk in enumerate(chunks):
        inputs, more = [chunk], weight
        if i == n - 1 and waits:  # the first whose backward runs: its gradient, later replaced by the sum, stays
            inputs, more = [chunk, t.waiting("lm_head.weight", v * h)], 0
        elif i < n - 1 and not waits:
            more = 2 * weight
        if i == n - 2 and trains:
            chunk = _summed_in_a_third(t, chunk, 2 * weight if waits else 3 * weight)
            inputs[0] = chunk
        logits.append(
            t.make(
                f"logits of chunk {i}", inputs, rows * v, t.compute_width, saves=(chunk.tensor,) if trains else (),
                backward_workspace=more if trains else 0, trains=trains,
            )
        )
    targets = t.constant("shifted labels", ctx.tokens, 8)
    losses = []
    for i, part in enumerate(logits):
        losses.append(loss_of(t, f" of chunk {i}", part, targets, rows))
    out = losses[0]
    for i, other in enumerate(losses[1:], 1):
        out = t.add(f"loss: sum of {i + 1}", out, other)
    t.keep_alive(*logits, targets)
    return out


def _summed_in_a_third(t: Torch, chunk: Array, nbytes: Any) -> Array:
    """The input of an output layer's chunk, marked so that the sum of weight gradients is made after its backward."""
    view = t.tape.tensor(f"{chunk.tensor.name}, as it is read", 0, grad_bytes=chunk.bytes * chunk.differentiable)
    view.whole = chunk.tensor.whole or chunk.tensor
    t.tape.op("sum of the output weight's gradients", chunk.tensor, view, backward_workspace=nbytes, alias=True)
    return Array(view, chunk.elements, chunk.width)


def loss_of(t: Torch, name: str, logits: Array, targets: Array, rows: Any) -> Array:
    """Cross entropy of logits. Compiled, it saves the logits and two numbers per row, and makes the gradient in the
    logits' dtype (``partitioners.py: min_cut_rematerialization_partition``); else it saves the log-softmax in fp32."""
    if t.hf.compiled_loss:
        statistics = ("maxima", "log sums")
        kept = [t.tape.tensor(f"{what} of the logits{name}", FP32 * rows, grad=False) for what in statistics]
        return t.make(f"loss{name}", (logits,), 1, FP32, saves=(logits.tensor, targets.tensor, *kept), also=kept)
    wide = t.cast(f"logits in fp32{name}", logits, FP32)
    log_probabilities = t.saves_output(f"log-softmax of the logits{name}", wide)
    return t.make(f"loss{name}", (log_probabilities,), 1, FP32, saves=(log_probabilities.tensor, targets.tensor))
