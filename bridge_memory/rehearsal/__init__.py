"""Run one rank of a job with the real megatron-core, on one GPU or on none, to test the inventory against it."""
