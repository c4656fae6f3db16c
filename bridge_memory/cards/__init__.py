"""GPUs: one row a card (``rows``), and what a name, a compute capability or a generation says of one.

Imports nothing of the package. No figure of a GPU stands anywhere else in it.
"""
