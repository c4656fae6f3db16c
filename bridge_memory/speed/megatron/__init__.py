"""Step time of megatron-core's layouts."""
