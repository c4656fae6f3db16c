"""The loss of a distillation: divergence of the student's logits from the teacher's, in fp32.

Source: modelopt 0.47 ``torch/distill/plugins/megatron.py: LogitsKLLoss.forward``, the default of a ConfigContainer with
a teacher unless its ``kd_config`` sets another (Megatron Bridge ``models/distillation_provider.py``). L = T V / t
logits.
"""

from __future__ import annotations

from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def teachers_logits(r: Recorder, elements: int) -> Tensor:
    """The teacher's logits of the microbatch, [T, V / t]: it runs before the student, and a hook on its output layer
    keeps them."""
    logits = r.tape.tensor("teacher's logits", elements * r.ctx.act, grad=False)
    r.tape.op(logits.name, (), logits)
    return logits


def record_divergence(r: Recorder, logits: Tensor, teacher: Tensor, elements: int) -> Tensor:
    """Loss of each token, fp32 [T]. Logits are cast, then divided by the temperature. With tensor parallelism the
    softmax is written in separate operations, else it is torch's. Variables of the function hold all named results."""
    tape, tokens, wide = r.tape, r.ctx.tokens, 4 * elements
    divided = tape.tensor("teacher's logits over temperature", wide, grad=False)
    tape.op(divided.name, teacher, divided, workspace=wide)
    cast = tape.make("student's logits in fp32", logits, wide)
    student = tape.make("student's logits over temperature", cast, wide)
    target = tape.tensor("teacher's log probabilities", wide, grad=False)
    if r.ctx.tp > 1:
        tape.op("sum of the teacher's exponentials", divided, (), workspace=wide)
        exponentials = tape.make("student's exponentials", student, wide, save_output=True)
        total = tape.make("sum of the student's exponentials", exponentials, 4 * tokens)
        logarithm = tape.make("logarithm of the sum", total, 4 * tokens, saves=(total,))
        tape.op(target.name, divided, target)
        own = tape.make("student's log probabilities", (student, logarithm), wide, alias=True)
    else:
        own = tape.make("student's log probabilities", student, wide, save_output=True)
        tape.op(target.name, divided, target)
    probabilities = tape.tensor("teacher's probabilities", wide, grad=False)
    tape.op(probabilities.name, target, probabilities)
    difference = tape.make("difference of log probabilities", (own, target), wide)
    divergence = tape.make("divergence", (difference, probabilities), wide, saves=(probabilities,))
    divergence.grad_bytes = 4 * tokens  # one number a token, expanded
    loss = tape.make("distillation loss", divergence, 4 * tokens)
    tape.keep_alive(teacher, logits, divided, student, target, own)
    return loss
