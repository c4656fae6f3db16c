"""RunSpec -> Estimate: every stage's bytes, by component, with provenance.

``estimate(run)`` is the whole product in one call; see ``Estimate`` for what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge_memory.spec import RunSpec

#: How a component's bytes came about (design: "Two methods, never mixed up").
PROVENANCES = ("exact", "formula", "measured", "assumed")
#: What a component is; static = the first four.
KINDS = ("weights", "gradients", "optimizer", "buffers", "activation", "transient")
STATIC_KINDS = ("weights", "gradients", "optimizer", "buffers")


@dataclass(frozen=True, slots=True)
class Component:
    """One named part of a stage's memory at its peak.

    ``bytes`` on one rank; ``kind`` one of KINDS; ``provenance`` one of PROVENANCES; ``shard`` names the
    groups that divide it, as in "tp x dp x cp" ("" where every rank holds it whole).
    """

    name: str
    bytes: int
    kind: str
    provenance: str
    shard: str = ""


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One physical pipeline rank. Totals are sums over ``components``, nothing else."""

    stage: int
    #: 0-based decoder layers held by this stage, over all its virtual chunks, in chunk order.
    layers: tuple[int, ...]
    #: Parameters in one rank's shard (elements).
    parameters: int
    in_flight_microbatches: int
    components: tuple[Component, ...]
    #: "forward", "backward", "loss", "optimizer step", with the operation that makes the peak.
    peak_phase: str
    peak_operation: str = ""
    #: Peak of every phase that was considered, for the curious: ((phase, bytes), ...).
    phases: tuple[tuple[str, int], ...] = ()

    def bytes_of(self, *kinds: str) -> int:
        return sum(c.bytes for c in self.components if c.kind in kinds)

    @property
    def weights_bytes(self) -> int:
        return self.bytes_of("weights")

    @property
    def gradients_bytes(self) -> int:
        return self.bytes_of("gradients")

    @property
    def optimizer_bytes(self) -> int:
        return self.bytes_of("optimizer")

    @property
    def buffers_bytes(self) -> int:
        """Lasting buffers: workspaces, RoPE tables, expert-bias buffers."""
        return self.bytes_of("buffers")

    @property
    def static_bytes(self) -> int:
        """What torch reports as allocated after an optimizer step."""
        return self.bytes_of(*STATIC_KINDS)

    @property
    def activation_bytes(self) -> int:
        """Saved for backward and alive at the peak."""
        return self.bytes_of("activation")

    @property
    def transient_bytes(self) -> int:
        return self.bytes_of("transient")

    @property
    def peak_bytes(self) -> int:
        """What torch reports as max allocated, from the second step on."""
        return sum(c.bytes for c in self.components)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer, per pipeline stage."""

    run: RunSpec
    stages: tuple[StageEstimate, ...]
    #: Parameters of the whole model, tied weights once, MTP apart.
    parameters: int
    mtp_parameters: int
    assumptions: tuple[str, ...]
    not_modelled: tuple[str, ...]

    @property
    def peak_stage(self) -> StageEstimate:
        return max(self.stages, key=lambda s: s.peak_bytes)


def estimate(run: RunSpec) -> Estimate:
    """Estimate every pipeline stage of ``run`` with the inventory method. Raises SpecError."""
    raise NotImplementedError
