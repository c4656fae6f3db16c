"""A stage of megatron-core in the phases of a job."""
