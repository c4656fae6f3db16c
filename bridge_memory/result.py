"""Estimate: memory per pipeline stage, in totals and by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from bridge_memory.components import GIB, STATIC_ROLES, Component, Role
from bridge_memory.releases import core_of
from bridge_memory.spec import RunSpec
from bridge_memory.spec.parts import ENGINE_OPTIONS
from bridge_memory.spec.unmodelled import Bounds, Unmodelled, as_feature, bounds

#: Schema of ``Estimate.to_dict``.
SCHEMA = "bridge-memory/estimate/3"
#: The phase of a stage's peak if the optimizer's step needs more than forward and backward.
OPTIMIZER_STEP = "optimizer step"


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One pipeline stage, as one of its GPUs holds it. Bytes; a total is the sum of the components that it names.

    Example:
        >>> from bridge_memory import RunSpec, explain
        >>> stage = explain(RunSpec(model="meta-llama/Llama-3.2-1B"), 0)
        >>> stage.weights_bytes == 2 * stage.parameters
        True
        >>> stage.static_bytes < stage.peak_bytes
        True
    """

    stage: int
    #: 0-based decoder layers of this stage, over all its virtual stages, in their order.
    layers: tuple[int, ...]
    #: Parameters of one rank (elements).
    parameters: int
    #: For each virtual stage, the number of microbatches whose activations are alive at the peak.
    in_flight: tuple[int, ...]
    components: tuple[Component, ...]
    #: "forward", "backward", "loss", "optimizer step", with the operation that makes the peak.
    peak_phase: str
    peak_operation: str = ""
    #: Alive from the end of one step to the start of the next, and so not at the peak. If the peak is there, they are
    #: among ``components`` instead.
    carried_over: tuple[Component, ...] = ()
    #: Host memory of a rank: (name, bytes).
    host: tuple[tuple[str, int], ...] = ()
    #: Peak of each phase of training that is modelled, from constructing the engine to saving: (name, bytes).
    phases: tuple[tuple[str, int], ...] = ()

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, which no other total includes."""
        return sum(nbytes for _, nbytes in self.host)

    @property
    def in_flight_microbatches(self) -> int:
        """Microbatches in flight on the virtual stage that has most."""
        return max(self.in_flight)

    def bytes_of(self, *roles: Role | str) -> int:
        """Bytes of the components with one of these roles."""
        return sum(c.bytes for c in self.components if c.role in roles)

    @property
    def weights_bytes(self) -> int:
        """Parameters."""
        return self.bytes_of(Role.WEIGHTS)

    @property
    def gradients_bytes(self) -> int:
        """Gradients and their buffers."""
        return self.bytes_of(Role.GRADIENTS)

    @property
    def optimizer_bytes(self) -> int:
        """Main parameters and moments."""
        return self.bytes_of(Role.OPTIMIZER)

    @property
    def buffers_bytes(self) -> int:
        """Persistent buffers: workspaces, RoPE tables, expert-bias buffers."""
        return self.bytes_of(Role.BUFFERS)

    @property
    def static_bytes(self) -> int:
        """What ``torch.cuda.memory_allocated`` reports after an optimizer step."""
        return self.bytes_of(*STATIC_ROLES) + sum(c.bytes for c in self.carried_over)

    @property
    def activation_bytes(self) -> int:
        """Saved for backward and alive at the peak."""
        return self.bytes_of(Role.ACTIVATION)

    @property
    def transient_bytes(self) -> int:
        """Temporaries of the operation at the peak."""
        return self.bytes_of(Role.TRANSIENT)

    @property
    def peak_bytes(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` reports, from the second step on."""
        return sum(c.bytes for c in self.components)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of every pipeline stage of a run. ``str()`` of it is one line a stage, in GiB.

    Example:
        >>> from bridge_memory import RunSpec, estimate
        >>> result = estimate(RunSpec(model="meta-llama/Llama-3.2-1B"))
        >>> result.peak_stage.stage, len(result.stages)
        (0, 1)
        >>> result.to_dict()["peak"]["bytes"] == result.peak_stage.peak_bytes
        True
    """

    run: RunSpec
    #: One for each pipeline stage, in order.
    stages: tuple[StageEstimate, ...]
    #: Parameters of the whole model (elements), tied weights once, MTP separately.
    parameters: int
    #: Parameters of its MTP layers.
    mtp_parameters: int
    #: What was assumed, a sentence each.
    assumptions: tuple[str, ...]
    #: What changes memory and is not modelled, a sentence each.
    not_modelled: tuple[str, ...]

    @property
    def peak_stage(self) -> StageEstimate:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda s: s.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """Host memory of the rank with most of it."""
        return max(stage.host_bytes for stage in self.stages)

    @property
    def unmodelled(self) -> tuple[Unmodelled, ...]:
        """Features that are not modelled, each once, with how they can change the peak."""
        return tuple(map(as_feature, dict.fromkeys(self.not_modelled)))

    @property
    def peak_bounds(self) -> Bounds:
        """Bounds in bytes of the highest peak, given the effects of everything that is not modelled."""
        return bounds(self.peak_stage.peak_bytes, self.not_modelled)

    def to_dict(self, *, stage: int | None = None) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for ``json.dumps`` (schema ``SCHEMA``, without its verdict).

        ``stage``: include only this one in ``stages``; the peak is still that of the whole run.
        """
        model, worst = self.run.model, self.peak_stage
        return {
            "schema": SCHEMA,
            "model": {
                "name": model.name,
                "model_type": model.model_type,
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "vocab_size": model.vocab_size,
                "parameters": self.parameters,
                "mtp_num_layers": model.mtp_num_layers,
                "mtp_parameters": self.mtp_parameters,
            },
            "parallelism": _parallelism(self.run),
            "training": _training(self.run),
            "stages": [_stage(s) for s in self.stages if stage in (None, s.stage)],
            "peak": {
                "stage": worst.stage,
                "bytes": worst.peak_bytes,
                "phase": worst.peak_phase,
                "operation": worst.peak_operation,
            },
            "assumptions": list(dict.fromkeys(self.assumptions)),
            "not_modelled": [str(feature) for feature in self.unmodelled],
            "unmodelled": [_feature(feature) for feature in self.unmodelled],
        }

    def __str__(self) -> str:
        """A summary with one line per stage."""
        worst = self.peak_stage
        lines = [f"{self.run.model.name}: peak {worst.peak_bytes / GIB:.2f} GiB on stage {worst.stage}"]
        if len(self.stages) > 1:
            lines += [
                f"  stage {s.stage}: static {s.static_bytes / GIB:.2f}, peak {s.peak_bytes / GIB:.2f} GiB "
                f"({s.peak_phase}: {s.peak_operation})"
                for s in self.stages
            ]
        if self.not_modelled:
            lines.append(f"  not modelled: {'; '.join(dict.fromkeys(self.not_modelled))}")
        return "\n".join(lines)


class StagePeak(NamedTuple):
    """One pipeline stage in numbers: bytes on one of its GPUs.

    ``static_bytes`` is what is allocated between steps; ``peak_bytes`` what ``torch.cuda.max_memory_allocated`` reports
    from the second step on.

    Example:
        >>> from bridge_memory import RunSpec, peaks
        >>> (stage,) = peaks(RunSpec(model="meta-llama/Llama-3.2-1B"))
        >>> stage.stage, stage.static_bytes < stage.peak_bytes
        (0, True)
    """

    stage: int
    static_bytes: int
    peak_bytes: int


def _plain(group: Any) -> dict[str, Any]:
    """A dataclass of plain values as a dict; tuples become lists."""
    values = {f.name: getattr(group, f.name) for f in fields(group)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _parallelism(run: RunSpec) -> dict[str, Any]:
    """Megatron's parallel sizes, with derived ones filled in."""
    p = run.parallel
    return {
        **_plain(p),
        "expert_tensor_parallel_size": p.etp,
        "sequence_parallel": p.sp,
        "data_parallel_size": p.data_parallel_size,
        "expert_data_parallel_size": p.expert_data_parallel_size,
    }


def _training(run: RunSpec) -> dict[str, Any]:
    batch, engine = run.batch, run.data_parallel.engine
    return {
        **_plain(batch),
        "global_batch_size": run.sequences_per_step,
        "num_microbatches": run.num_microbatches,
        "precision": _plain(run.precision),
        "optimizer": _plain(run.optimizer),
        "data_parallel": _plain(run.data_parallel),
        "peft": _plain(run.peft),
        "recompute": _plain(run.recompute),
        "implementation": {**_plain(run.implementation), "megatron_core": list(core_of(run.implementation))},
        **({ENGINE_OPTIONS[engine]: _plain(getattr(run, ENGINE_OPTIONS[engine]))} if engine in ENGINE_OPTIONS else {}),
        **({"transformers": _plain(run.transformers)} if run.implementation.torch_layers else {}),
    }


def _feature(feature: Unmodelled) -> dict[str, Any]:
    return {
        "what": str(feature),
        "effect": str(feature.effect),
        "order": feature.order,
        "at_least_bytes": feature.least,
        "at_most_bytes": feature.most,
        "outside": feature.outside,
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
        "in_flight": list(stage.in_flight),
        "components": _components(stage.components),
        "carried_over": _components(stage.carried_over),
        "phases": [{"name": name, "peak_bytes": nbytes} for name, nbytes in stage.phases],
        "host": [{"name": name, "bytes": nbytes} for name, nbytes in stage.host],
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
