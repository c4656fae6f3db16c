"""What commands print of megatron-core alone."""
