"""Which process groups of a layout become NCCL communicators on a rank, when first, and what each takes.

torch makes a communicator at the first collective of a group; nothing shortens that for a group of one rank. The groups
are those of megatron-core 0.13 to 0.19 ``parallel_state.py: initialize_model_parallel`` in its default order of ranks,
tp-cp-ep-dp-pp. Those of the Gloo backend hold no GPU memory.

Not counted: separate groups for all-gathers (``create_all_gather_groups``), GTP, hierarchical and hybrid context
parallelism, SHARP, ``nccl_ub``, GDRCopy, and what a reinforcement-learning trainer adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.outside import nccl
from bridge_memory.outside.amount import Amount, Range, total
from bridge_memory.outside.nccl import Machine, Release, Spread, Use, communicator_bytes
from bridge_memory.outside.phase import Phase
from bridge_memory.spec.layout_string import parse_layout_string
from bridge_memory.spec.model import GatedDeltaNetSpec, MambaSpec, ModelSpec, MoESpec, SideBySideSpec
from bridge_memory.spec.parts import WITH_MEGATRON_LAYOUTS, ParallelSpec
from bridge_memory.spec.run import RunSpec

_ORDER = {phase: place for place, phase in enumerate(Phase)}
#: A resumed job has built, loads, then steps.
_TIME = {phase: _ORDER[phase] for phase in Phase} | {Phase.RESUME: _ORDER[Phase.LOAD]}


class Dim(NamedTuple):
    """Ranks of a group along one dimension: how many, and the distance of neighbours."""

    size: int
    stride: int


class Group(NamedTuple):
    """The ranks of a process group: all combinations of its dimensions."""

    name: str
    dims: tuple[Dim, ...]

    @property
    def ranks(self) -> int:
        found = 1
        for dim in self.dims:
            found *= dim.size
        return found

    def members(self, rank: int) -> tuple[int, ...]:
        """The ranks of the group that ``rank`` is in, in order."""
        first = rank - sum(rank // dim.stride % dim.size * dim.stride for dim in self.dims if dim.size > 1)
        out = [first]
        for dim in self.dims:
            out = [one + place * dim.stride for one in out for place in range(dim.size)]
        return tuple(sorted(out))

    def spread(self, domain: int) -> Spread:
        """How its ranks lie over domains of ``domain`` ranks, whose first rank is a multiple of it."""
        local, ranks = 1, 1
        for dim in self.dims:
            ranks *= dim.size
            local *= min(dim.size, -(-domain // dim.stride))
        return Spread(ranks, -(-ranks // local))


class Communicator(NamedTuple):
    """A communicator on the rank of a stage that has the most: on the first stage rank 0, to which objects go."""

    #: As in ``parallel_state``, with "(pair)" for one of two ranks that unbatched sends make.
    name: str
    spread: Spread
    use: Use
    #: From when it exists; and from when it may, by what the run does not state (from where weights are loaded).
    first: Phase
    may: Phase
    #: It may never exist.
    optional: bool
    amounts: tuple[Amount, ...]

    @property
    def bytes(self) -> Range:
        """From ``first`` on."""
        return total(self.amounts)

    def there(self, phase: Phase) -> tuple[bool, bool]:
        """(whether it may exist in ``phase``, whether it does)."""
        now = _TIME[phase]
        return now >= _TIME[self.may], now >= _TIME[self.first] and not self.optional

    def at(self, phase: Phase) -> tuple[Amount, ...]:
        """What it takes in ``phase``, under its own name."""
        there, sure = self.there(phase)
        if not there:
            return ()
        return tuple(
            a._replace(name=f"NCCL {self.name}: {a.name}", least=a.least if sure else 0) for a in self.amounts
        )  # fmt: skip


class Traits(NamedTuple):
    """What decides which groups are used, beside the parallel sizes."""

    engine: str
    #: The distributed optimizer; ranks over which torch's FSDP shards, 0: all of them.
    sharded: bool
    shard_degree: int
    grad_norm: bool
    tied: bool
    experts: bool
    expert_bias: bool
    aux_loss: bool
    global_aux_loss: bool
    dispatcher: str
    cp_comm_type: str
    recurrent: bool
    per_token_loss: bool
    delayed_fp8: bool
    #: The loss reduces over the tensor-parallel group whatever its size.
    reduced_loss: bool
    #: Ranks exchange numbers of tokens before the all-to-all.
    counted: bool


class Sizes(NamedTuple):
    """The parallel sizes that decide which ranks are in a group."""

    world: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    instances: int
    virtual: bool
    sp: bool


def groups(p: ParallelSpec) -> dict[str, Group]:
    """The NCCL groups that megatron-core makes, by their descriptions without "_GROUP", and WORLD. Those of the first
    and last stage, EMBEDDING and POSITION_EMBEDDING, are given as on the first."""
    return groups_of(sizes_of(p))


@lru_cache(maxsize=1024)
def groups_of(sizes: Sizes) -> dict[str, Group]:
    """``groups`` by sizes."""
    world, tp, pp, cp, ep, etp, instances, _, _ = sizes
    stage = world // pp
    dp, edp = stage // (tp * cp), stage // (etp * ep)
    t, c, d, s = Dim(tp, 1), Dim(cp, tp), Dim(dp, tp * cp), Dim(pp, stage)
    et, e, ed = Dim(etp, 1), Dim(ep, etp), Dim(edp, etp * ep)
    dc = Dim(dp * cp, tp)
    intra = Dim(max(1, edp // instances), etp * ep)  # a dense model may have fewer than instances
    found = [
        Group("WORLD", (Dim(world, 1),)),
        Group("DATA_PARALLEL_GROUP_WITH_CP", (dc,)),
        Group("DATA_PARALLEL", (d,)),
        Group("CONTEXT_PARALLEL", (c,)),
        Group("MODEL_PARALLEL", (t, s)),
        Group("TENSOR_MODEL_PARALLEL", (t,)),
        Group("PIPELINE_MODEL_PARALLEL", (s,)),
        Group("EMBEDDING", (Dim(min(pp, 2), stage * max(1, pp - 1)),)),
        Group("POSITION_EMBEDDING", ()),
        Group("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", (t, c, d)),
        Group("TENSOR_AND_DATA_PARALLEL", (t, d)),
        Group("TENSOR_AND_CONTEXT_PARALLEL", (t, c)),
        Group("EXPERT_MODEL_PARALLEL", (e,)),
        Group("EXPERT_TENSOR_PARALLEL", (et,)),
        Group("EXPERT_TENSOR_AND_MODEL_PARALLEL", (et, e)),
        Group("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL", (et, e, s)),
        Group("EXPERT_DATA_PARALLEL", (ed,)),
        Group("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE", (et, e, intra, s)),
    ]
    if instances > 1:
        found += [
            Group("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", (Dim(dp * cp // instances, tp),)),
            Group("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0", (intra,)),
            Group("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1", (Dim(instances, etp * ep * intra.size),)),
        ]
    return {group.name: group for group in found}


class _Used(NamedTuple):
    group: str
    use: Use
    first: Phase = Phase.FIRST_STEP
    may: Phase = Phase.FIRST_STEP
    optional: bool = False
    #: A later use of a communicator that is listed before: what it adds.
    more: bool = False


def communicators(
    run: RunSpec, gpu: Gpu, stage: int, *, release: Release | None = None, cumem: bool = True
) -> tuple[Communicator, ...]:
    """The communicators of a rank of a pipeline stage, in the order of their first use.

    Args:
        run: The run.
        gpu: Its card: the generation, and how many are in a NVLink domain.
        stage: The pipeline stage.
        release: NCCL's; None: that of the run's torch.
        cumem: False for ``NCCL_CUMEM_ENABLE=0``.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, find_gpu
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8))
        >>> [found.name for found in communicators(run, find_gpu("H100"), 0)][0]
        'WORLD'
    """
    p = run.parallel
    ends = (stage == 0, stage == p.pp - 1)
    release = release or nccl.release_of_torch(run.implementation.torch)
    return of_stage(traits_of(run), sizes_of(p), nccl.machine_of(gpu), release, *ends, cumem)


def sizes_of(p: ParallelSpec) -> Sizes:
    """The sizes of a layout."""
    virtual = p.vpp > 1
    if p.pipeline_model_parallel_layout is not None:
        virtual = len(parse_layout_string(p.pipeline_model_parallel_layout)) > p.pp
    return Sizes(p.world_size, p.tp, p.pp, p.cp, p.ep, p.etp, p.num_distributed_optimizer_instances, virtual, p.sp)


def traits_of(run: RunSpec) -> Traits:
    """The traits of a run."""
    data, model, impl, precision = run.data_parallel, run.model, run.implementation, run.precision
    bias, aux, everywhere, recurrent = _layers(model)
    degree = 0
    if data.engine == "fsdp2":
        degree = run.fsdp.shard_degree or 0
    elif data.engine == "fsdp1" and "HYBRID" in run.fsdp.sharding_strategy:
        degree = nccl.DOMAIN
    elif data.engine == "zero3" and run.deepspeed.zero_hpz_partition_size > 1:
        degree = run.deepspeed.zero_hpz_partition_size
    return Traits(
        data.engine, data.use_distributed_optimizer, degree,
        run.optimizer.clip_grad > 0 or precision.params_dtype == "fp16",
        model.share_embeddings_and_output_weights or model.mtp_num_layers > 0, model.has_experts and not
        impl.torch_layers, bias, aux, everywhere, impl.moe_token_dispatcher_type, impl.cp_comm_type, recurrent,
        impl.calculate_per_token_loss, precision.fp8 is not None and precision.fp8_recipe == "delayed",
        not (impl.cross_entropy_loss_fusion and impl.cross_entropy_fusion_impl != "native"),
        not impl.moe_pad_expert_input_to_capacity,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _layers(model: ModelSpec) -> tuple[bool, bool, bool, bool]:
    """(an expert bias, an auxiliary loss, one over all ranks, layers with a recurrent state)."""
    kinds = [kind for kind in (*(run[0] for run in model.layer_runs), model.mtp_layer) if kind is not None]
    moes = [kind.ffn for kind in kinds if isinstance(kind.ffn, MoESpec)]
    losses = " ".join(str(moe.router_load_balancing_type) for moe in moes)
    recurrent = any(isinstance(kind.mixer, (MambaSpec, GatedDeltaNetSpec, SideBySideSpec)) for kind in kinds)
    return any(moe.router_enable_expert_bias for moe in moes), "aux_loss" in losses, "global" in losses, recurrent


def domain_of(machine: Machine, world: int) -> int:
    """GPUs of a domain that the job uses: all, unless that splits it unevenly; then a power of two (assumed: NVL72 is
    filled by 64)."""
    domain = machine.domain
    return domain if world <= domain or world % domain == 0 else 1 << (domain.bit_length() - 1)


@lru_cache(maxsize=8192)
def of_stage(
    traits: Traits, sizes: Sizes, machine: Machine, release: Release, first: bool, last: bool, cumem: bool = True
) -> tuple[Communicator, ...]:
    if traits.engine in WITH_MEGATRON_LAYOUTS:
        known = groups_of(sizes)
        used = _of_megatron(traits, sizes, first, last)
    else:
        known, used = _of_torch(traits, sizes)
    domain = domain_of(machine, sizes.world)
    out: list[Communicator] = []
    for one in used:
        spread = known[one.group.partition(" ")[0]].spread(domain)
        if one.group.endswith("(pair)"):
            spread = Spread(2, 1 if spread.local > 1 else 2)
        amounts = communicator_bytes(machine, spread, one.use, release, cumem)
        if one.more:
            before = {amount for found in out if found.name == one.group for amount in found.amounts}
            amounts = tuple(amount for amount in amounts if amount not in before and amount.name != "init")
        if Use.GATHER in one.use and not first:
            amounts = tuple(a._replace(most=_sent(machine, spread, release, cumem)) for a in amounts)
        out.append(Communicator(one.group, spread, one.use, one.first, one.may, one.optional, amounts))
    return tuple(sorted(out, key=lambda found: _TIME[found.first]))


def _sent(machine: Machine, spread: Spread, release: Release, cumem: bool) -> int:
    """Bytes of the sends of a gathered object, at most."""
    many = nccl.channels(machine, spread, release)[1]
    local = many.peer * nccl.local_connection(machine, cumem and nccl.rules(release).cumem).send
    return max(local, nccl.pool_bytes(many.p2p)) if spread.domains > 1 else local


def _of_torch(traits: Traits, sizes: Sizes) -> tuple[dict[str, Group], list[_Used]]:
    """Groups of PyTorch's and DeepSpeed's engines.

    DDP, FSDP: WORLD (a mesh of one dimension is the default group: torch ``device_mesh.py``); hybrid sharding: a group
    of shards and one of replicas. DeepSpeed: a clone of WORLD (``utils/groups.py: _clone_world_group``), and WORLD
    for barriers.
    """
    world = Group("WORLD", (Dim(sizes.world, 1),))
    if sizes.world == 1 or traits.engine == "single":
        return {}, []
    of_deepspeed = traits.engine.startswith("zero")
    degree = min(traits.shard_degree, sizes.world)
    known = {"WORLD": world, "CLONE_OF_WORLD": Group("CLONE_OF_WORLD", world.dims)}
    reduced = Use.ALL_REDUCE | Use.SHARDED
    used = [_Used("WORLD", Use.ALL_REDUCE if of_deepspeed or traits.engine == "ddp" else reduced, *_AT_BUILD)]
    if of_deepspeed:
        used.append(_Used("CLONE_OF_WORLD", reduced | Use.BROADCAST, *_AT_BUILD))
    if 1 < degree < sizes.world:
        known["SHARDS"] = Group("SHARDS", (Dim(degree, 1),))
        known["REPLICAS"] = Group("REPLICAS", (Dim(sizes.world // degree, degree),))
        used.append(_Used("SHARDS", Use.SHARDED, *_LOADED))
        if not of_deepspeed:
            used.append(_Used("REPLICAS", Use.ALL_REDUCE))
    return known, used


_AT_BUILD = (Phase.BUILD, Phase.BUILD)
_LOADED = (Phase.FIRST_STEP, Phase.LOAD)
_LOGGED = (Phase.TRAINING, Phase.FIRST_STEP)


def _of_megatron(traits: Traits, sizes: Sizes, first: bool, last: bool) -> list[_Used]:
    alone = sizes.world == 1
    used = [*_dense(traits, sizes, first, last), *_pipeline(traits, sizes, first, last), *_context(traits, sizes)]
    if traits.experts:
        used += _experts(traits, sizes)
    if traits.delayed_fp8 or traits.expert_bias:
        # ``extensions/transformer_engine.py: te_autocast`` (maxima of delayed scaling), ``moe_utils.py:
        # get_updated_expert_bias``.
        used.append(_Used("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", Use.SCALARS))
    elif traits.global_aux_loss:
        used.append(_Used("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", Use.SCALARS, optional=True))
    # On one GPU no source was found that measures them.
    return [one._replace(optional=True) for one in used] if alone else used


def _dense(traits: Traits, sizes: Sizes, first: bool, last: bool) -> Iterator[_Used]:
    # ``initialize.py``: barrier; ``optimizer/__init__.py: _get_param_groups``: all_gather_object.
    yield _Used("WORLD", Use.SCALARS, *_AT_BUILD)
    if sizes.world > 1:
        # ``dist_checkpointing/strategies/state_dict_saver.py``: gather_object; loading plans likewise.
        yield _Used("WORLD", Use.GATHER, Phase.SAVE, Phase.LOAD, more=True)
    sharded = traits.sharded or traits.engine == "megatron_fsdp"
    # ``param_and_grad_buffer.py: start_grad_sync, start_param_sync``; the loss is averaged on the last stage.
    gradients = Use.SHARDED if sharded else Use.ALL_REDUCE
    averaged = Use.SCALARS if last or traits.per_token_loss or traits.engine == "megatron_fsdp" else nccl.NOTHING
    if sizes.instances == 1:
        yield _Used("DATA_PARALLEL_GROUP_WITH_CP", gradients | averaged, *_LOADED)
    else:
        yield _Used("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", gradients)
        yield _Used("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1", Use.ALL_REDUCE)
        if averaged:
            yield _Used("DATA_PARALLEL_GROUP_WITH_CP", averaged, *_LOADED)
    tensor = Use.ALL_REDUCE | (Use.SHARDED if sizes.sp else nccl.NOTHING)
    if sizes.tp > 1:
        yield _Used("TENSOR_MODEL_PARALLEL", tensor, *_LOADED)
    else:
        # ``cross_entropy.py``, and ``fused_cross_entropy.py``; elsewhere where a batch is broadcast (``core/utils.py:
        # get_batch_on_this_tp_rank``, not in Bridge).
        yield _Used("TENSOR_MODEL_PARALLEL", Use.SCALARS, *_LOADED, not (last and traits.reduced_loss))
    # ``training.py: train_step``: logical_and_across_model_parallel_group; Bridge ``train.py`` likewise.
    yield _Used("MODEL_PARALLEL", Use.SCALARS)
    if sharded and traits.grad_norm:
        # ``optimizer/clip_grads.py: get_grad_norm_fp32``.
        yield _Used("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE", Use.SCALARS)
    if traits.tied and sizes.pp > 1 and (first or last):
        # ``language_module.py: setup_embeddings_and_output_layer``.
        yield _Used("EMBEDDING", Use.ALL_REDUCE, *_AT_BUILD)


def _pipeline(traits: Traits, sizes: Sizes, first: bool, last: bool) -> Iterator[_Used]:
    """``p2p_communication.py: _batched_p2p_ops, _p2p_ops``: without virtual stages in one group (Bridge and Megatron-LM
    set ``batch_p2p_comm`` by them), else a pair a neighbour. With 2 stages they send in this group and receive in
    WORLD."""
    logged = traits.experts and traits.aux_loss  # ``moe_logging.py: metric all-reduce``.
    collective = Use.BROADCAST if traits.per_token_loss else nccl.NOTHING
    if sizes.pp > 1:
        two = sizes.pp > 2 and (sizes.virtual or not (first or last))
        if not sizes.virtual:
            sent = Use.TWO_PEERS if two else Use.ONE_PEER
            yield _Used("PIPELINE_MODEL_PARALLEL", sent | collective, *_LOADED)
            if logged:
                yield _Used("PIPELINE_MODEL_PARALLEL", sent | collective | Use.SCALARS, *_LOGGED, True, True)
            return
        yield _Used("PIPELINE_MODEL_PARALLEL (pair)", Use.ONE_PEER)
        yield _Used("PIPELINE_MODEL_PARALLEL (pair)", Use.ONE_PEER if sizes.pp > 2 else nccl.NOTHING)
    if collective:
        yield _Used("PIPELINE_MODEL_PARALLEL", collective)
    elif logged:
        yield _Used("PIPELINE_MODEL_PARALLEL", Use.SCALARS, *_LOGGED, True)


def _context(traits: Traits, sizes: Sizes) -> Iterator[_Used]:
    """Transformer Engine ``context_parallel.py``: a ring batches its sends with 2 ranks alone, else a pair a neighbour;
    recurrent layers exchange by all-to-all."""
    if sizes.cp == 1:
        return
    kind, use = traits.cp_comm_type, nccl.NOTHING
    if "a2a" in kind or traits.recurrent:
        use |= Use.ALL_TO_ALL
    if kind == "all_gather":
        use |= Use.SHARDED
    if "p2p" in kind and sizes.cp == 2:
        use |= Use.ONE_PEER
    elif "p2p" in kind:
        yield _Used("CONTEXT_PARALLEL (pair)", Use.ONE_PEER)
        yield _Used("CONTEXT_PARALLEL (pair)", Use.ONE_PEER)
    if use:
        yield _Used("CONTEXT_PARALLEL", use)


def _experts(traits: Traits, sizes: Sizes) -> Iterator[_Used]:
    """``token_dispatcher.py``; buffers of DeepEP and HybridEP are in ``workspaces/driver.py``."""
    if traits.dispatcher.startswith("alltoall"):
        if sizes.ep > 1:
            yield _Used("EXPERT_MODEL_PARALLEL", Use.ALL_TO_ALL, *_LOADED)
        if sizes.etp > 1:
            yield _Used("EXPERT_TENSOR_PARALLEL", Use.SHARDED)
    # Numbers of tokens, all tokens, or handles of buffers.
    if sizes.ep * sizes.etp > 1 and (traits.counted or not traits.dispatcher.startswith("alltoall")):
        yield _Used("EXPERT_TENSOR_AND_MODEL_PARALLEL", Use.SHARDED)
    gradients = Use.SHARDED if traits.sharded or traits.engine == "megatron_fsdp" else Use.ALL_REDUCE
    if sizes.instances == 1:
        yield _Used("EXPERT_DATA_PARALLEL", gradients, *_LOADED)
    else:
        yield _Used("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0", gradients)
    if traits.aux_loss:
        # ``router.py: _apply_aux_loss``; ``moe_logging.py``: also in a group of one rank. The coefficient may be 0.
        yield _Used("TENSOR_AND_CONTEXT_PARALLEL", Use.SCALARS, *_LOGGED, True)
        yield _Used("DATA_PARALLEL", Use.SCALARS, *_LOGGED, True)


def bytes_of(found: tuple[Communicator, ...], phase: Phase) -> Range:
    """Bytes of some communicators in a phase."""
    least = most = 0
    for one in found:
        there, sure = one.there(phase)
        if there:
            size = one.bytes
            most += size.most
            least += size.least if sure else 0
    return Range(least, most)
