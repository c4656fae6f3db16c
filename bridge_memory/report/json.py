"""An Estimate as JSON, by the schema ``bridge-memory/estimate/1`` (``estimate.schema.json`` beside this file)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bridge_memory.components import Component
from bridge_memory.estimate import Estimate, StageEstimate
from bridge_memory.gpus import Fit

SCHEMA = "bridge-memory/estimate/1"


def estimate_to_json(result: Estimate, fitting: Sequence[Fit] = (), *, stage: int | None = None) -> dict[str, Any]:
    """Plain dicts, lists, ints and strings. Bytes are ints on one GPU; ``stage`` leaves only that one in ``stages``.

    ``peak`` and ``fits`` always speak of the whole run.
    """
    run, model, peak = result.run, result.run.model, result.peak_stage
    p = run.parallel
    return {
        "schema": SCHEMA,
        "model": {
            "name": model.name,
            "model_type": model.model_type,
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "parameters": result.parameters,
            "mtp_num_layers": model.mtp_num_layers,
            "mtp_parameters": result.mtp_parameters,
        },
        "parallelism": {
            **_plain(p),
            "sequence_parallel": p.sp,
            "expert_tensor_parallel_size": p.etp,
            "data_parallel_size": p.data_parallel_size,
            "expert_data_parallel_size": p.expert_data_parallel_size,
        },
        "training": {
            **_plain(run.batch),
            "num_microbatches": run.num_microbatches,
            "precision": _plain(run.precision),
            "optimizer": _plain(run.optimizer),
            "recompute": _plain(run.recompute),
            "implementation": {
                **_plain(run.implementation),
                "megatron_core": ".".join(map(str, run.implementation.megatron_core)),
            },
        },
        "stages": [_stage(s) for s in result.stages if stage is None or s.stage == stage],
        "peak": {"stage": peak.stage, "bytes": peak.peak_bytes},
        "fits": [
            {
                "gpu": f.gpu.name,
                "capacity_bytes": f.capacity_bytes,
                "margin_bytes": f.margin_bytes,
                "headroom_bytes": f.headroom_bytes,
                "fits": f.fits,
            }
            for f in fitting
        ],
        "assumptions": list(result.assumptions),
        "not_modelled": list(result.not_modelled),
    }


def _stage(s: StageEstimate) -> dict[str, Any]:
    return {
        "stage": s.stage,
        "layers": list(s.layers),
        "parameters": s.parameters,
        "in_flight_microbatches": s.in_flight_microbatches,
        "components": [_component(c) for c in s.components],
        "between_steps": [_component(c) for c in s.leftovers],
        "weights_bytes": s.weights_bytes,
        "gradients_bytes": s.gradients_bytes,
        "optimizer_bytes": s.optimizer_bytes,
        "buffers_bytes": s.buffers_bytes,
        "activation_bytes": s.activation_bytes,
        "transient_bytes": s.transient_bytes,
        "static_bytes": s.static_bytes,
        "peak_bytes": s.peak_bytes,
        "peak_phase": s.peak_phase,
        "peak_operation": s.peak_operation,
    }


def _component(c: Component) -> dict[str, Any]:
    return {"name": c.name, "bytes": c.bytes, "kind": c.kind, "provenance": c.provenance, "shard": c.shard}


def _plain(spec: Any) -> dict[str, Any]:
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
