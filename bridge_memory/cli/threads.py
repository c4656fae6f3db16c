"""Threads of numpy's products."""

from __future__ import annotations

import os


def multiply_in_one_thread() -> None:
    """For numpy, if it is not imported yet. Matrices of a search are small: threads of OpenBLAS that wait for the next
    product take a fifth of its CPU seconds, and bring nothing."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
