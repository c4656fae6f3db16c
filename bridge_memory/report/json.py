"""An Estimate as JSON, schema ``bridge-memory/estimate/2`` (``estimate.schema.json`` beside this file).

Keys may be added to a version of the schema; none is renamed or dropped without a new version. Bytes are ints on
one rank; parameters are elements.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bridge_memory.result import SCHEMA, Estimate

if TYPE_CHECKING:
    from bridge_memory.report.gpus import Fit

#: The JSON Schema (draft 2020-12) of what ``estimate_to_json`` returns.
SCHEMA_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "estimate.schema.json")

__all__ = ["SCHEMA", "SCHEMA_PATH", "estimate_to_json"]


def estimate_to_json(result: Estimate, fits: Sequence[Fit], *, stage: int | None = None) -> dict[str, Any]:
    """``result.to_dict()`` and what it fits on. ``stage`` leaves only that one among ``stages``."""
    out = result.to_dict(stage=stage)
    return {k: v for k, v in out.items() if k not in _LAST} | {"fits": [asdict(f) for f in fits]} | {
        k: out[k] for k in _LAST
    }


_LAST = ("assumptions", "not_modelled")
