"""Blocks of megatron-core and Transformer Engine: what each saves for backward."""
