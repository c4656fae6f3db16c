"""Log-probabilities of tokens, and the entropy of the logits, as reinforcement-learning trainers compute them from a
transformers model's logits in place of its loss. L = T V logits.

Source: verl 0.9.1 ``workers/engine/fsdp/transformer_impl.py: prepare_model_outputs``, ``utils/torch_functional.py:
logprobs_from_logits_flash_attn, entropy_from_logits`` (flash-attn's Triton cross entropy; the entropy compiled, as by
default). TRL before 1.0, ms-swift
``trainer/utils.py: selective_log_softmax`` (a row at a time, whose results backward needs).
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
