"""Layouts of megatron-core."""
