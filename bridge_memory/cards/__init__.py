"""GPUs: one row per card (``rows``), and lookup by name, compute capability or generation.

Imports nothing of the package. Every figure about GPUs that the package uses is here.
"""
