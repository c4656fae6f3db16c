"""Blocks of megatron-core and Transformer Engine: their parameters, saved tensors and temporaries."""
