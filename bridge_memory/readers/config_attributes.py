"""Typed access to the attributes of a megatron-core TransformerConfig, or of any object with the same names."""

from __future__ import annotations

from math import isfinite
from typing import Any

from bridge_memory.readers.fields import MAX_SIZE, shown
from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.releases import Release
from bridge_memory.spec import SpecError


class ConfigAttributes:
    """Typed attribute access that raises SpecError, with the releases that rules of ``releases`` depend on."""

    transformer_engine: Release | None = None
    torch: Release | None = None

    def __init__(self, config: object, name: str, megatron_core: Release | None) -> None:
        self.config = config
        self.name = name
        self.megatron_core = megatron_core

    def error(self, message: str) -> SpecError:
        return SpecError(f"{self.name}: {message}")

    def get(self, key: str, default: Any = None) -> Any:
        value = getattr(self.config, key, None)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(f"{key} is not set on {type(self.config).__name__}")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_SIZE:
            raise self.error(f"{key} is {shown(value)}; it must be a positive integer")
        return value

    def count(self, key: str, default: int = 0) -> int:
        """As ``size``, or 0."""
        return 0 if self.get(key, default) == 0 else self.size(key, default)

    def number(self, key: str, default: float = 0.0) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error(f"{key} is {shown(value)}; it must be a number")
        return float(value)

    def pattern(self, key: str, layers: int, *, sparse: bool = False) -> tuple[bool, ...]:
        return layer_pattern(self.get(key), layers, f"{self.name}: {key}", sparse=sparse)
