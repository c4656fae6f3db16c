"""Run the real megatron-core for one rank of a job, on one GPU or on none: an oracle for the inventory."""
