"""Megatron Bridge's printed line. Log parsers depend on its exact text."""

from __future__ import annotations


def theoretical_footprint_line(weight_and_optimizer: float, activation: float | None, unit: str = "MB") -> str:
    """The line of Bridge's ``report_theoretical_memory``; values in ``unit`` ("MB" there means 2^20 bytes)."""
    if activation is None:
        return f"Theoretical memory footprints: weight and optimizer={weight_and_optimizer:.2f} {unit}"
    total = weight_and_optimizer + activation
    return (
        f"Theoretical memory footprints: weight and optimizer={weight_and_optimizer:.2f} {unit}, "
        f"activation={activation:.2f} {unit}, total={total:.2f} {unit}"
    )
