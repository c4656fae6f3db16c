"""An Estimate as JSON, schema ``bridge-memory/estimate/2`` (``estimate.schema.json`` beside this file).

Keys may be added to a version of the schema; none is renamed or dropped without a new version. Bytes are ints on
one rank; parameters are elements.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bridge_memory.components import Component
from bridge_memory.estimate import Estimate, StageEstimate
from bridge_memory.spec import RunSpec

if TYPE_CHECKING:
    from bridge_memory.report.gpus import Fit

SCHEMA = "bridge-memory/estimate/2"
#: The JSON Schema (draft 2020-12) of what ``estimate_to_json`` returns.
SCHEMA_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "estimate.schema.json")


def estimate_to_json(result: Estimate, fits: Sequence[Fit], *, stage: int | None = None) -> dict[str, Any]:
    """``result`` and what it fits on as plain dicts, lists, strings and numbers, ready for ``json.dumps``.

    ``stage`` leaves only that one among ``stages``; the peak and what it fits on are those of the whole run.
    """
    model, worst = result.run.model, result.peak_stage
    return {
        "schema": SCHEMA,
        "model": {
            "name": model.name,
            "model_type": model.model_type,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "parameters": result.parameters,
            "mtp_num_layers": model.mtp_num_layers,
            "mtp_parameters": result.mtp_parameters,
        },
        "parallelism": _parallelism(result.run),
        "training": _training(result.run),
        "stages": [_stage(s) for s in result.stages if stage in (None, s.stage)],
        "peak": {
            "stage": worst.stage,
            "bytes": worst.peak_bytes,
            "phase": worst.peak_phase,
            "operation": worst.peak_operation,
        },
        "fits": [_plain(fit) for fit in fits],
        "assumptions": list(dict.fromkeys(result.assumptions)),
        "not_modelled": list(dict.fromkeys(result.not_modelled)),
    }


def _plain(group: Any) -> dict[str, Any]:
    """A dataclass of plain values as a dict; tuples become lists."""
    values = {f.name: getattr(group, f.name) for f in fields(group)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _parallelism(run: RunSpec) -> dict[str, Any]:
    """Megatron's sizes, with what follows from them filled in."""
    p = run.parallel
    return {
        **_plain(p),
        "expert_tensor_parallel_size": p.etp,
        "sequence_parallel": p.sp,
        "data_parallel_size": p.data_parallel_size,
        "expert_data_parallel_size": p.expert_data_parallel_size,
    }


def _training(run: RunSpec) -> dict[str, Any]:
    batch = run.batch
    return {
        **_plain(batch),
        "global_batch_size": run.num_microbatches * batch.micro_batch_size * run.parallel.data_parallel_size,
        "num_microbatches": run.num_microbatches,
        "precision": _plain(run.precision),
        "optimizer": _plain(run.optimizer),
        "data_parallel": _plain(run.data_parallel),
        "peft": _plain(run.peft),
        "recompute": _plain(run.recompute),
        "implementation": _plain(run.implementation),
    }


def _components(components: Sequence[Component]) -> list[dict[str, Any]]:
    return [c._asdict() for c in components]


def _stage(stage: StageEstimate) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "layers": list(stage.layers),
        "num_layers": len(stage.layers),
        "parameters": stage.parameters,
        "in_flight_microbatches": stage.in_flight_microbatches,
        "components": _components(stage.components),
        "leftovers": _components(stage.leftovers),
        "weights_bytes": stage.weights_bytes,
        "gradients_bytes": stage.gradients_bytes,
        "optimizer_bytes": stage.optimizer_bytes,
        "buffers_bytes": stage.buffers_bytes,
        "activation_bytes": stage.activation_bytes,
        "transient_bytes": stage.transient_bytes,
        "static_bytes": stage.static_bytes,
        "peak_bytes": stage.peak_bytes,
        "peak_phase": stage.peak_phase,
        "peak_operation": stage.peak_operation,
    }
