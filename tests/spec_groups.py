"""A RunSpec's groups from flat fields: tests name a field and need not know its group."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bridge_memory.spec.run import GROUPS


def groups_of(**values: Any) -> dict[str, Any]:
    """``RunSpec``'s keyword arguments; ``peft_dim`` stands for ``PeftSpec.dim``, ``recompute_method`` and so on."""
    given: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, _, field = name.partition("_")
        if group in ("peft", "recompute") and field in {f.name for f in fields(GROUPS[group])}:
            given.setdefault(group, {})[field] = value
            continue
        owner = next(g for g, cls in GROUPS.items() if name in {f.name for f in fields(cls)})
        given.setdefault(owner, {})[name] = value
    return {group: GROUPS[group](**fields_) for group, fields_ in given.items()}
