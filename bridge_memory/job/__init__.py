"""A job from start to save: the phases beside the step, memory outside of torch's allocator, host memory, routing."""
