"""Output layer and loss: logits, their fp32 copy and its log-softmax.

Source: ``models/llama/modeling_llama.py: LlamaForCausalLM.forward``, ``loss/loss_utils.py: ForCausalLMLoss``.
"""

from __future__ import annotations

from bridge_memory.inventory.torch import liger, torchtune
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.inventory.torch.policy import policy_loss, trl_loss
from bridge_memory.tapes.parameters import Use


def record_output(t: Torch, x: Array, *, output_bias: bool, own_weight: bool) -> Array:
    """Normed hidden states [T, h] -> the mean loss."""
    r, ctx = t.r, t.r.ctx
    tokens, h, v = ctx.tokens, ctx.hidden_size, ctx.padded_vocab
    if own_weight:
        r.parameter("lm_head.weight", (v, h), use=Use.OUTPUT)
    if output_bias:
        r.parameter("lm_head.bias", (v,))
    if t.hf.liger("fused_linear_cross_entropy"):
        return liger.fused_loss(t, x)
    if t.hf.spec.cut_cross_entropy:
        return trl_loss(t, x) if ctx.impl.policy_loss == "trl" else _cut_loss(t, x)
    if t.hf.spec.num_output_chunks:
        return torchtune.chunked_loss(t, x)
    logits = t.linear("lm_head", x, tokens, h, v, declare=False, label="logits")
    raw = logits
    if t.hf.family.softcapped:
        for what in ("divided", "tanh", "multiplied"):
            before = logits
            logits = (t.saves_output if what == "tanh" else t.scale)(f"logits, {what}", logits)
            t.keep_alive(before)
    elif t.hf.family.scaled_residuals:
        logits = t.scale("logits, divided", logits)
        t.keep_alive(raw)
    if t.hf.family.wide_logits:  # by ``forward``, whose variable holds the result
        logits = t.cast("logits in fp32", logits, FP32)
    if ctx.impl.policy_loss != "none":
        return policy_loss(t, logits)
    targets = t.constant("shifted labels", tokens, 8)
    if t.hf.compiled_loss:
        loss = torchtune.loss_of(t, "", logits, targets, tokens)
        t.keep_alive(x, logits, targets)
        return loss
    wide = t.cast("logits in fp32", logits, FP32)
    if t.hf.liger("cross_entropy"):
        loss = liger.loss_of(t, wide, targets)
        t.keep_alive(x, logits, wide, targets)
        return loss
    log_probabilities = t.saves_output("log-softmax of the logits", wide)
    loss = t.make(
        "loss", (log_probabilities,), 1, FP32, saves=(log_probabilities.tensor, targets.tensor),
    )
    # torchtune ``TransformerDecoder.unembed``: no variable holds the logits before the cast.
    t.keep_alive(x, None if t.hf.modules == "torchtune" else logits, wide, targets)
    return loss


def _cut_loss(t: Torch, x: Array) -> Array:
    """cut-cross-entropy 25.1 ``cce.py: LinearCrossEntropyFunction``: blocks of logits exist only in registers. It saves
    its input, the log-sum-exp, the labels, and a mean logit per vocabulary entry (to sort the vocabulary); backward
    makes the gradients of input and weight (``cce_backward.py: cce_backward_kernel``)."""
    ctx = t.r.ctx
    tokens, h, v = ctx.tokens, ctx.hidden_size, ctx.padded_vocab
    targets = t.constant("shifted labels", tokens, 8)
    kept = [
        t.tape.tensor(name, FP32 * n, grad=False) for name, n in (("log-sum-exp", tokens), ("mean logits", v))
    ]
    trains = t.trains("lm_head.weight")
    inputs, own = [x], 0
    if trains and t.hf.gradients_stay:
        inputs.append(t.waiting("lm_head.weight", v * h))
    elif trains:
        own = v * h * t.parameter_width
    loss = t.make(
        "loss", inputs, 1, FP32, saves=(x.tensor, targets.tensor, *kept), also=kept, workspace=2 * FP32 * tokens,
        backward_workspace=own, trains=trains,
    )
    t.keep_alive(x, targets)
    return loss
