"""Log-probabilities of tokens, and the entropy of the logits, as reinforcement-learning trainers compute them from a
Megatron model's logits in place of its cross entropy. L = T V / t logits of this rank.

Source: megatron-core ``transformer/module.py: Float16Module.forward`` (the model's output in fp32). verl 0.9.1
``workers/engine/megatron/transformer_impl.py: _lm_head_logits_processor``, ``utils/megatron/tensor_parallel.py:
_VocabParallelEntropy``. NeMo-RL ``distributed/model_utils.py: DistributedLogprob, ChunkedDistributedLogprob``. slime
``utils/ppo_utils.py: compute_log_probs``.
"""

from __future__ import annotations

from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_policy(r: Recorder, logits: Tensor, elements: int) -> Tensor:
    """From the logits [T, V / t] to one log-probability a token, and its entropy with ``policy_entropy``."""
    ctx, tape, impl = r.ctx, r.tape, r.ctx.impl
    wide = logits if ctx.act == 4 else tape.make("logits in fp32", logits, 4 * elements)
    if impl.policy_loss == "nemo-rl":
        return _nemo_rl(r, wide, elements)
    # Divided by the temperature in place; backward divides the gradient in a new tensor.
    (scaled,) = tape.views("logits over the temperature", wide, ("logits over the temperature", 4 * elements))
    if impl.policy_loss == "slime":
        return _slime(r, scaled, elements)
    if not impl.policy_entropy:
        return _cross_entropy(r, scaled)
    # ``logits_bak``: the cross entropy overwrites it, while the entropy keeps the logits.
    copy = tape.make("copy of the logits", scaled, 4 * elements, alias=True)
    entropy = _entropy(r, scaled, elements)
    return tape.make("policy loss", (entropy, _cross_entropy(r, copy)), 4 * ctx.tokens)


def _cross_entropy(r: Recorder, logits: Tensor) -> Tensor:
    """megatron-core's, on fp32 logits: in place (``VocabParallelCrossEntropy.calculate_logits_max`` copies none)."""
    tokens = r.ctx.tokens
    target = r.tape.tensor("target mask and ids", 9 * tokens, grad=False)
    return r.tape.make(
        "log-probabilities", logits, 4 * tokens, saves=(logits, target), also=(target,), in_place=True
    )


def _entropy(r: Recorder, logits: Tensor, elements: int) -> Tensor:
    """Keeps the logits and their softmax, which its gradient overwrites. Chunk by chunk a pass without gradients keeps
    the softmax of one chunk."""
    ctx, tape, chunk = r.ctx, r.tape, r.ctx.impl.policy_chunk_size
    if chunk and r.ctx.impl.policy_forward_only:
        some = 4 * chunk * (elements // ctx.tokens)
        return tape.make("entropy", logits, 4 * ctx.tokens, workspace=some)
    softmax = tape.tensor("softmax of the logits (fp32)", 4 * elements, grad=False)
    return tape.make(
        "entropy", logits, 4 * ctx.tokens, saves=(softmax, logits), also=(softmax,), in_place=1,
        # The gradient of a slice is as large as what it was cut from.
        backward_workspace=4 * elements if chunk else 0,
    )


def _nemo_rl(r: Recorder, wide: Tensor, elements: int) -> Tensor:
    """Beside the logits: the shifted ones, their exponentials or log-softmax, and the softmax, which is kept."""
    ctx, tape, chunk = r.ctx, r.tape, r.ctx.impl.policy_chunk_size
    target = tape.tensor("target mask and ids", 9 * ctx.tokens, grad=False)
    if chunk:
        some = 4 * chunk * (elements // ctx.tokens)
        return tape.make(
            "log-probabilities", wide, 4 * ctx.tokens, saves=(wide, target), also=(target,), workspace=3 * some,
            backward_workspace=4 * some,
        )
    softmax = tape.tensor("softmax of the logits (fp32)", 4 * elements, grad=False)
    loss = tape.make(
        "log-probabilities", wide, 4 * ctx.tokens, saves=(softmax, target), also=(softmax, target),
        workspace=4 * elements,
    )
    tape.keep_alive(wide)
    return loss


def _slime(r: Recorder, scaled: Tensor, elements: int) -> Tensor:
    """The fused cross entropy of a copy, and the entropy of the logits."""
    ctx, tape = r.ctx, r.tape
    copy = tape.make("copy of the logits", scaled, 4 * elements, alias=True)
    loss = _cross_entropy(r, copy)
    if not ctx.impl.policy_entropy:
        tape.keep_alive(scaled)
        return loss
    return tape.make("policy loss", (_entropy(r, scaled, elements), loss), 4 * ctx.tokens)
