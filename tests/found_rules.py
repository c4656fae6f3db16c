"""What a search keeps, passes over and improves rows by: objects of its own, which its result is compared without."""

from __future__ import annotations

from typing import Any

from bridge_memory.plan.found import Found


def rules_of(found: Found) -> dict[str, Any]:
    return {"keeps": found.keeps, "refuses": found.refuses, "improves": found.improves}
