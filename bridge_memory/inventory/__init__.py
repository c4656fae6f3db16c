"""The inventory: which parameters a rank owns, what each block retains for backward, and its peaks.

``megatron/`` and ``torch/`` record each block's forward pass on a tape (``tapes``). ``layer`` and ``tail`` compose
layers and what follows them from blocks; ``stack`` composes chunks (virtual stages).
"""
