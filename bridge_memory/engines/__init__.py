"""Engines: who keeps parameters, gradients and optimizer state over data-parallel ranks, and what moves meanwhile.

``by_name.engine_of(run)`` finds a run's engine, which gives a ``StageState`` for the units of a stage's chunks.
``optimizer_states`` is the one table of what optimizers keep.
"""
