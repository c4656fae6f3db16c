"""Final norm, output layer and cross entropy of the last stage.

Source: megatron-core ``models/gpt/gpt_model.py: _postprocess``, ``tensor_parallel/cross_entropy.py``,
``fusions/fused_{cross_entropy,linear_cross_entropy}.py``; TE ``cross_entropy.py``, ``common/triton/cross_entropy.py``.
L = T V / t logits of this rank.
"""

from __future__ import annotations

from bridge_memory.inventory.megatron.distillation import record_divergence, teachers_logits
from bridge_memory.inventory.megatron.hyper_connections import contract
from bridge_memory.inventory.megatron.policy import record_policy
from bridge_memory.releases import LOSS_GRADIENT_IN_FP32, LOSS_KEEPS_A_COPY
from bridge_memory.spec import divide
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder, Scratch
from bridge_memory.tapes.tape import Tensor


def record_final_norm(r: Recorder, name: str = "decoder.final_layernorm") -> None:
    """The norm after the last layer, [T_sp, h]."""
    x = r.tape.input("hidden_states", r.ctx.hidden_bytes)
    if r.ctx.residual_streams > 1:
        x = contract(r, "decoder.", x)
    if r.ctx.te and r.ctx.residual != r.ctx.act:
        # Transformer Engine's norm takes its weight's dtype (``ops/basic/rmsnorm.py: RMSNorm.op_forward``).
        x = r.tape.make("hidden states in the norm's dtype", x, x.bytes // r.ctx.residual * r.ctx.act)
    r.tape.output(r.norm(name, x, r.ctx.hidden_size, r.ctx.tokens_sp))


def record_output(
    r: Recorder, *, output_bias: bool, own_weight: bool, input_counted: bool = False, softcapped: bool = False,
    distilled: bool = False,
) -> None:
    """Output layer and loss, from normed hidden states [T_sp, h] to a scalar.

    ``own_weight``: this block holds an output weight (untied, or a tied copy on another stage than the embedding's);
    False if it uses a weight counted elsewhere. ``input_counted``: another block saves the hidden states too, and
    counts them. ``distilled``: the loss is that of ``ImplementationSpec.distillation``. ``softcapped``: c tanh(logits /
    c) follows, which saves the tanh (megatron-bridge ``models/gemma/gemma2_provider.py: logit_softcapping``).
    """
    ctx, tape = r.ctx, r.tape
    rows = divide(ctx.padded_vocab, ctx.tp, "padded vocab_size", "tensor_model_parallel_size")
    h = ctx.hidden_size
    if own_weight:
        r.parameter("output_layer.weight", (rows, h), sharded=ctx.tp > 1, use=Use.OUTPUT)
    if output_bias:
        r.parameter("output_layer.bias", (rows,), sharded=ctx.tp > 1)
    hidden = ctx.tokens_sp * h * ctx.act
    x = tape.input("normed hidden states", 0 if input_counted else hidden)
    x.grad_bytes = hidden
    elements = ctx.tokens * rows
    whole = ctx.tokens * h * ctx.act
    impl = ctx.impl
    wgrad = r.weight_grad((rows, h), te=False)
    if impl.cross_entropy_loss_fusion and impl.cross_entropy_fusion_impl == "linear":
        # The full logits never exist: chunks of the vocabulary are made, used and freed; the log-sum-exp of each token
        # is saved (fusions/linear_cross_entropy/).
        lse = tape.tensor("log-sum-exp", 8 * ctx.tokens, grad=False)
        loss = tape.make("cross entropy", x, 4 * ctx.tokens, saves=(x, lse), also=(lse,),
                         workspace=whole if ctx.sp else 0, backward_workspace=2 * whole + wgrad)
        tape.output(loss)
        return
    teacher = teachers_logits(r, elements) if distilled else None
    # megatron-core's own ColumnParallelLinear, with Transformer Engine too.
    if r.frozen:
        entering = tape.make("gathered hidden states", x, whole) if ctx.sp else x
        logits = tape.make("logits", entering, elements * ctx.act)
    else:
        if ctx.sp:
            r.keep(Scratch.MPU, whole)
        if ctx.sp and impl.defer_embedding_wgrad_compute:
            for buffer in (1, 2):  # mpu_0 and mpu_1: one is gathered into while the other is multiplied
                r.keep(Scratch.MPU, whole, (buffer,))
        logits = tape.make(
            "logits", x, elements * ctx.act, saves=(x,), backward_workspace=(whole if ctx.sp else 0) + wgrad
        )
    if softcapped:
        divided = tape.make("divided logits", logits, elements * ctx.act)
        tanh = tape.make("tanh of the logits", divided, elements * ctx.act, save_output=True)
        tape.keep_alive(logits)
        logits = tape.make("softcapped logits", tanh, elements * ctx.act)
    if impl.policy_loss != "none":
        tape.output(record_policy(r, logits, elements))
        return
    if teacher is None or impl.distillation != "logits":
        loss = _cross_entropy(r, logits, elements)
        tape.output(loss)
    tape.keep_alive(logits, x)  # variables of ``_postprocess``
    if teacher is not None:
        tape.output(record_divergence(r, logits, teacher, elements))


def _cross_entropy(r: Recorder, logits: Tensor, elements: int) -> Tensor:
    """Loss of each token, fp32 [T]."""
    ctx, tape = r.ctx, r.tape
    tokens = ctx.tokens
    if ctx.impl.cross_entropy_loss_fusion and ctx.impl.cross_entropy_fusion_impl == "te":
        # The kernel writes the gradient over the logits (common/triton/cross_entropy.py). Its scratch: the maximum, the
        # sum and the target's logit of every token in fp32, of this rank and gathered from all ranks.
        scratch = 12 * tokens * (1 + (ctx.tp if ctx.tp > 1 else 0))
        if LOSS_KEEPS_A_COPY(ctx.impl):
            copy = tape.tensor("copy of the logits", elements * ctx.act, grad=False)
            statistics = tape.tensor("maximum and sum of the logits", 8 * tokens, grad=False)
            return tape.make(
                "cross entropy", logits, 4 * tokens, saves=(copy, statistics), also=(copy, statistics), in_place=True,
                workspace=16 * tokens * (1 + ctx.tp) if ctx.tp > 1 else 0,
            )
        if LOSS_GRADIENT_IN_FP32(ctx.impl):
            # Autograd casts it to the logits' dtype.
            gradient = tape.tensor("gradient of the logits (fp32)", 4 * elements, grad=False)
            return tape.make(
                "cross entropy", logits, 4 * tokens, saves=(gradient,), also=(gradient,), workspace=scratch,
                in_place=ctx.act == 4,
            )
        return tape.make("cross entropy", logits, 4 * tokens, saves=(logits,), workspace=scratch, in_place=True)
    target = tape.tensor("target mask and ids", tokens * 9, grad=False)
    fp32 = 4 * elements
    if ctx.act == 4 and not ctx.impl.cross_entropy_loss_fusion:
        # Logits are fp32, and ``calculate_logits_max`` does not copy them: the operations below run in place on them.
        return tape.make("cross entropy", logits, 4 * tokens, saves=(logits, target), also=(target,), in_place=True)
    # The fp32 copy is overwritten by exp, softmax and the gradient in turn; autograd casts the gradient back to the
    # logits' dtype (VocabParallelCrossEntropy.forward, backward).
    softmax = tape.tensor("softmax of the logits (fp32)", fp32, grad=False)
    # Compiled ("native" fusion), these in-place operations need a second fp32 tensor: the compiler functionalizes
    # mutations and copies back (fusions/fused_cross_entropy.py, core/jit.py: jit_fuser).
    scratch = fp32 if ctx.impl.cross_entropy_loss_fusion else 0
    return tape.make(
        "cross entropy", logits, 4 * tokens, saves=(softmax, target), also=(softmax, target),
        workspace=scratch, backward_workspace=scratch,
    )
