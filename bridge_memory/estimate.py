"""RunSpec -> Estimate: every stage's bytes, by component, with provenance.

``estimate(run)`` is the whole product in one call; see ``Estimate`` for what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bridge_memory.components import STATIC_ROLES, Component, Lifetime, Part, Provenance, Role
from bridge_memory.engines.megatron_ddp import model_states
from bridge_memory.inventory.chain import ChunkInventory
from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.counts import model_parameters, mtp_parameters
from bridge_memory.inventory.layer_links import runs_plain
from bridge_memory.inventory.stack import first_alike, stage_inventories
from bridge_memory.schedule.peak import ChunkCost, dynamic_peak
from bridge_memory.spec import RunSpec
from bridge_memory.spec.gaps import gaps, ignored
from bridge_memory.spec.layout import Chunk, layout
from bridge_memory.spec.validation import check_layout
from bridge_memory.workspaces.lasting import lasting_buffers
from bridge_memory.workspaces.libraries import batch_bytes, gathered_parameter_bytes

#: The phase in which a stage's peak lies when forward and backward need less than the optimizer.
OPTIMIZER_STEP = "optimizer step"


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
    #: What lives from the end of one step to the start of the next, and so not at the peak (unless that is
    #: where the peak is: then they are among the components).
    leftovers: tuple[Component, ...] = ()

    def bytes_of(self, *roles: Role | str) -> int:
        return sum(c.bytes for c in self.components if c.role in roles)

    @property
    def weights_bytes(self) -> int:
        return self.bytes_of(Role.WEIGHTS)

    @property
    def gradients_bytes(self) -> int:
        return self.bytes_of(Role.GRADIENTS)

    @property
    def optimizer_bytes(self) -> int:
        return self.bytes_of(Role.OPTIMIZER)

    @property
    def buffers_bytes(self) -> int:
        """Lasting buffers: workspaces, RoPE tables, expert-bias buffers."""
        return self.bytes_of(Role.BUFFERS)

    @property
    def static_bytes(self) -> int:
        """What torch reports as allocated after an optimizer step."""
        return self.bytes_of(*STATIC_ROLES) + sum(c.bytes for c in self.leftovers)

    @property
    def activation_bytes(self) -> int:
        """Saved for backward and alive at the peak."""
        return self.bytes_of(Role.ACTIVATION)

    @property
    def transient_bytes(self) -> int:
        return self.bytes_of(Role.TRANSIENT)

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
    ctx = context_of(run)
    plan = layout(run.model, run.parallel)
    check_layout(run, plan)
    states = model_states(run, ctx)
    holdings: dict[int, _Holdings] = {}
    stages = []
    for rank, twin in enumerate(first_alike(run.model, run.parallel)):
        if twin == rank:
            holdings[rank] = _holdings(run, plan.stages[rank], states[rank], ctx)
        stages.append(_stage(run, rank, plan.stages[rank], holdings[twin], ctx))
    return Estimate(
        run=run,
        stages=tuple(stages),
        parameters=model_parameters(run.model),
        mtp_parameters=mtp_parameters(run.model),
        assumptions=run.model.assumptions + run.assumptions + _assumptions(run, ctx) + ignored(run, plan),
        not_modelled=run.model.not_modelled + run.not_modelled + gaps(run),
    )


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What a stage holds whatever its place in the pipeline; stages of the same layers share it."""

    parameters: int
    static: tuple[Component, ...]
    leftovers: tuple[Component, ...]
    batch: int
    #: Bytes of parameters that Megatron-FSDP gathers while a layer runs.
    gathered: int
    inventories: tuple[ChunkInventory, ...]
    costs: tuple[ChunkCost, ...]


def _holdings(
    run: RunSpec, chunks: tuple[Chunk, ...], state: tuple[int, tuple[Component, ...]], ctx: BlockContext
) -> _Holdings:
    lasting, leftovers = lasting_buffers(run, chunks, ctx)
    inventories = tuple(stage_inventories(run.model, chunks, ctx))
    return _Holdings(
        parameters=state[0],
        static=(*state[1], *lasting),
        leftovers=tuple(leftovers),
        batch=batch_bytes(run, chunks),
        gathered=gathered_parameter_bytes(run, chunks, ctx),
        inventories=inventories,
        costs=tuple(stage_costs(inventories)),
    )


def stage_costs(inventories: Sequence[ChunkInventory]) -> list[ChunkCost]:
    """The chunks of a stage for the timeline. What the others leave behind in backward is counted beside a running
    chunk, whether or not they have run forward since: an upper bound where there are virtual stages."""
    left = sum(i.left for i in inventories)
    return [
        ChunkCost(i.saved, i.forward_peak + left - i.left, i.backward_peak + left - i.left) for i in inventories
    ]


def _stage(
    run: RunSpec, rank: int, chunks: tuple[Chunk, ...], held: _Holdings, ctx: BlockContext
) -> StageEstimate:
    components = [*held.static]
    leftovers, inventories, batch = held.leftovers, held.inventories, held.batch
    moment = dynamic_peak(
        run.parallel.pp,
        rank,
        run.num_microbatches,
        held.costs,
        group_size=run.parallel.microbatch_group_size_per_vp_stage,
        hidden_bytes=ctx.hidden_bytes,
        overlap_moe_expert_parallel_comm=run.implementation.overlap_moe_expert_parallel_comm,
    )
    running = inventories[moment.chunk]
    operation = running.forward_operation if moment.phase == "forward" else running.backward_operation
    saved: dict[str, int] = {}
    for inventory, alive in zip(inventories, moment.alive, strict=True):
        for module, nbytes in inventory.modules:
            saved[module] = saved.get(module, 0) + alive * nbytes
    imbalance_known = run.implementation.moe_pad_expert_input_to_capacity
    components += [
        Component(
            f"activations: {module}", nbytes, Role.ACTIVATION,
            Provenance.ASSUMED if module in _ROUTED and not imbalance_known else Provenance.FORMULA,
            lifetime=Lifetime.RETAINED, part=Part(module), routed=module in _ROUTED,
        )
        for module, nbytes in saved.items() if nbytes
    ]
    if moment.hidden_bytes:
        components.append(
            _transient("pipeline sends and receives", moment.hidden_bytes, Part.PIPELINE)
        )
    if batch:
        components.append(_transient("batch: tokens, labels, masks", batch, Part.BATCH))
    gathered = held.gathered
    if gathered:
        components.append(_transient("parameters gathered by Megatron-FSDP", gathered, Part.DATA_PARALLEL))
    transient = moment.bytes - moment.hidden_bytes - sum(saved.values())
    components.append(_transient(f"in passing: {operation}", transient, Part.RUNNING))
    phase = moment.phase
    if sum(c.bytes for c in leftovers) > moment.bytes + batch + gathered:
        # Nothing of forward and backward is as large as what the optimizer step leaves behind.
        components = [*held.static, *leftovers]
        leftovers, phase, operation = (), OPTIMIZER_STEP, "main gradients in fp32"
    return StageEstimate(
        stage=rank,
        layers=tuple(i for chunk in chunks for i in chunk.layers),
        parameters=held.parameters,
        in_flight_microbatches=max(moment.alive),
        components=tuple(components),
        peak_phase=phase,
        peak_operation=operation,
        leftovers=leftovers,
    )


def _transient(name: str, nbytes: int, part: Part) -> Component:
    return Component(name, nbytes, Role.TRANSIENT, Provenance.FORMULA, lifetime=Lifetime.TRANSIENT, part=part)


#: Modules whose size depends on how evenly the router spreads tokens.
_ROUTED = ("MoE experts", "MoE router and dispatch")


def _assumptions(run: RunSpec, ctx: BlockContext) -> tuple[str, ...]:
    out = []
    impl = run.implementation
    if run.model.has_experts and not impl.moe_pad_expert_input_to_capacity:
        out.append(
            "routing is balanced over the experts"
            if impl.moe_imbalance == 1.0
            else f"the most loaded rank gets {impl.moe_imbalance:g} times the balanced number of tokens"
        )
    if impl.deterministic_mode or impl.nvte_deterministic:
        out.append("deterministic_mode: attention's backward needs no more scratch than it does otherwise")
    if runs_plain(run.model, ctx):
        asked = []
        if run.recompute.granularity == "full":
            asked.append("recompute_granularity (full)")
        if impl.cpu_offloading_num_layers:
            asked.append(f"cpu_offloading_num_layers ({impl.cpu_offloading_num_layers})")
        out += [f"{name} does nothing: megatron-core's MambaStack of hybrids does not ask for it" for name in asked]
    return tuple(out)
