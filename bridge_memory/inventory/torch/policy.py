"""Log-probabilities of tokens, and the entropy of the logits, as reinforcement-learning trainers compute them from a
transformers model's logits in place of its loss. L = T V logits.

Source: verl 0.9.1 ``workers/engine/fsdp/transformer_impl.py: prepare_model_outputs``, ``utils/torch_functional.py:
logprobs_from_logits_flash_attn, entropy_from_logits`` (flash-attn's Triton cross entropy; the entropy compiled, as by
default). TRL before 1.0, ms-swift ``trainer/utils.py: selective_log_softmax`` (a row at a time, whose results backward
needs); TRL 1.16 ``kernels/chunked_logprob.py: ChunkedLogProbFunction``. NeMo-RL
``models/policy/workers/dtensor_policy_worker_v2.py``.
"""

from __future__ import annotations

from bridge_memory.inventory.torch.ops import FP32, Array, Torch


def policy_loss(t: Torch, logits: Array) -> Array:
    """From the logits [T, V] to one log-probability a token, and its entropy with ``policy_entropy``."""
    ctx, impl = t.r.ctx, t.r.ctx.impl
    tokens, v = ctx.tokens, ctx.padded_vocab
    targets = t.constant("shifted labels", tokens, 8)
    if impl.policy_loss == "trl":
        # Divided by the temperature in place; a row's log-softmax at a time, whose results backward needs.
        rows = t.make("log-probabilities", (logits,), logits.elements, logits.width, saves=(), save_output=True)
        loss = t.make("chosen log-probabilities", (rows,), tokens, FP32, saves=(targets.tensor,))
        t.keep_alive(logits)
        return loss
    if impl.policy_loss == "nemo-rl":
        wide = t.cast("logits in fp32", logits, FP32)
        rows = t.saves_output("log-softmax of the logits", wide)
        loss = t.make("chosen log-probabilities", (rows,), tokens, FP32, saves=(targets.tensor,))
        t.keep_alive(logits, wide)
        return loss
    statistics = t.tape.tensor("log-sum-exp", FP32 * tokens, grad=False)
    found = t.make(
        "log-probabilities", (logits,), tokens, FP32, saves=(logits.tensor, statistics, targets.tensor),
        also=(statistics,), in_place=0 if impl.policy_entropy else 1,
    )
    if impl.policy_entropy:
        if impl.policy_chunk_size and impl.policy_forward_only:
            # A chunk in fp32, its softmax and their product.
            chunk = impl.policy_chunk_size * v * FP32
            entropy = t.make("entropy", (logits,), tokens, FP32, workspace=3 * chunk)
        else:
            # Compiled: reductions over the logits, which are all that is kept.
            entropy = t.make("entropy", (logits,), tokens, FP32, saves=(logits.tensor,))
        found = t.make("policy loss", (found, entropy), tokens, FP32)
    t.keep_alive(logits)
    return found


#: TRL's tiles: tokens, and entries of the vocabulary.
_TILE_TOKENS, _TILE_VOCABULARY = 4096, 32768


def trl_loss(t: Torch, x: Array) -> Array:
    """From the hidden states [T, h] to log-probabilities and entropies, a tile of logits at a time. Gradients of hidden
    states and of the head are summed in fp32, and cast in the end."""
    ctx = t.r.ctx
    tokens, h, v = ctx.tokens, ctx.hidden_size, ctx.padded_vocab
    width = t.compute_width if t.hf.autocast else x.width
    tile = min(tokens, _TILE_TOKENS) * _TILE_VOCABULARY * width
    if t.hf.autocast:
        tile += _TILE_VOCABULARY * h * width  # of the head
    targets = t.constant("shifted labels", tokens, 8)
    scored = t.make("hidden states of labels", (x,), tokens * h, x.width, saves=(targets.tensor,))
    trains = t.trains("lm_head.weight")
    inputs, own = [scored], 0
    if trains and t.hf.gradients_stay:
        inputs.append(t.waiting("lm_head.weight", v * h))
    elif trains and t.parameter_width != FP32:
        own = v * h * t.parameter_width
    backward = tile + (tokens * h * FP32 if scored.width != FP32 else 0) + own
    if trains and (t.parameter_width != FP32 or not t.hf.gradients_stay):
        backward += v * h * FP32
    kept = [t.tape.tensor(name, FP32 * tokens, grad=False) for name in ("log-sum-exp", "entropy")]
    # Seven statistics of a token.
    loss = t.make(
        "log-probabilities", inputs, tokens, FP32, saves=(scored.tensor, targets.tensor, *kept), also=kept,
        workspace=tile + 7 * FP32 * tokens, backward_workspace=backward, trains=trains,
    )
    t.keep_alive(x, scored, targets)
    return loss
