"""Log-probabilities of tokens, and the entropy of the logits, as reinforcement-learning trainers compute them from a
Megatron model's logits in place of its cross entropy. L = T V / t logits of this rank.

Source: megatron-core ``transformer/module.py: Float16Module.forward`` (the model's output in fp32). verl 0.9.1
``workers/engine/megatron/transformer_impl.py: _lm_head_logits_processor``, ``utils/megatron/tensor_parallel.py:
_VocabParallelEntropy``. NeMo-RL 0433dae ``distributed/model_utils.py: DistributedLogprob, ChunkedDistributedLogprob``.
slime since #2152 ``utils/ppo_utils.py: _VocabParallelLogProbEntropy``, ``backends/megatron_utils/loss.py:
get_log_probs_and_entropy``.
"""

from __future__ import annotations

from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_policy(r: Recorder, logits: Tensor, elements: int) -> Tensor:
    """From the logits [T, V / t] to one log-probability a token, and its entropy with ``policy_entropy``."""
    ctx, tape, impl = r.ctx, r.tape, r.ctx.impl
    wide = logits
    if ctx.act != 4 and not impl.policy_defers_fp32:
        wide = tape.make("logits in fp32", logits, 4 * elements)
    if impl.policy_loss == "nemo-rl":
        return _nemo_rl(r, wide, elements)
    if impl.policy_loss == "slime":
        return _slime(r, wide, elements)
    # Divided by the temperature in place; backward divides the gradient in a new tensor.
    (scaled,) = tape.views("logits over the temperature", wide, ("logits over the temperature", 4 * elements))
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


def _nemo_rl(r: Recorder, logits: Tensor, elements: int) -> Tensor:
    """Beside the logits, and their copy in fp32 if they are not: log-softmax, one more tensor while it is made, and the
    softmax, which is kept. In chunks the logits are; backward makes one-hot targets of a chunk in int64, twice."""
    ctx, tape, chunk = r.ctx, r.tape, r.ctx.impl.policy_chunk_size
    target = tape.tensor("target mask and ids", 9 * ctx.tokens, grad=False)
    if chunk:
        some = chunk * (elements // ctx.tokens)
        return tape.make(
            "log-probabilities", logits, 4 * ctx.tokens, saves=(logits, target), also=(target,), workspace=12 * some,
            backward_workspace=24 * some,
        )
    softmax = tape.tensor("softmax of the logits (fp32)", 4 * elements, grad=False)
    narrow = ctx.impl.policy_defers_fp32 and ctx.act != 4
    loss = tape.make(
        "log-probabilities", logits, 4 * ctx.tokens, saves=(softmax, target), also=(softmax, target),
        workspace=(8 if narrow else 4) * elements, backward_workspace=4 * elements if narrow else 0,
    )
    tape.keep_alive(logits)
    return loss


def _slime(r: Recorder, wide: Tensor, elements: int) -> Tensor:
    """The softmax, which its gradient overwrites; with an entropy that trains the logits too."""
    ctx, tape, impl, chunk = r.ctx, r.tape, r.ctx.impl, r.ctx.impl.policy_chunk_size
    scaled = tape.make("logits over the temperature", wide, 4 * elements) if impl.policy_rescales else wide
    some = min(chunk or ctx.tokens, ctx.tokens) * (elements // ctx.tokens)
    if impl.policy_forward_only:
        found = tape.make("log-probabilities", scaled, 4 * ctx.tokens, workspace=4 * some)
    else:
        softmax = tape.tensor("softmax of the logits (fp32)", 4 * elements, grad=False)
        target = tape.tensor("target mask and ids", 9 * ctx.tokens, grad=False)
        kept = (softmax, target, scaled) if impl.policy_entropy else (softmax, target)
        # The entropy's gradient is a separate tensor, of one chunk; gradients of chunks alone are joined in one.
        more = some if impl.policy_entropy else elements if chunk else 0
        found = tape.make(
            "log-probabilities", scaled, 4 * ctx.tokens, saves=kept, also=(softmax, target), in_place=1,
            backward_workspace=4 * more,
        )
    tape.keep_alive(wide, scaled)
    return found
