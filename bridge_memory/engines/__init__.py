"""Data-parallel engines: how they shard parameters, gradients and optimizer state, and what they gather and reduce.

``by_name.engine_of(run)`` returns a run's engine, which returns a ``StageState`` for the units of a stage's chunks.
``optimizer_states`` is the only table of the states that optimizers keep.
"""
