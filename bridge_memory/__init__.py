"""bridge-memory: where every byte of GPU memory of a Megatron training run goes."""
