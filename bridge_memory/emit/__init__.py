"""A run in the words of its trainer: flags, Megatron-LM arguments, Bridge overrides, DeepSpeed, accelerate."""
