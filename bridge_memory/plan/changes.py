"""What could be changed in a run, one option at a time: what each frees at the highest peak, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.estimation import estimate, model_state, peaks
from bridge_memory.plan.megatron.space import useful_modules
from bridge_memory.plan.megatron.splits import NO_SPLIT, splits
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.parts import OFFLOAD_MODULES
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.transformers import usable_attention
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.step_time import not_timed, step_time
from bridge_memory.verdict import fits, headroom

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu

#: Changes that stand a chance in a pair or a set: the rest frees less than the best of these alone.
MOST_COMBINED = 12
#: Beside them those that cost least time are tried in a set that has to reach a target.
CHEAPEST_COMBINED = 4
#: Bytes: less is a number of GiB that was meant.
LEAST_TARGET = 1 << 20
#: Kind of changes to what the optimizer keeps: offloaded states are fp32 whatever their dtypes.
OPTIMIZER_STATES = "optimizer dtypes"
#: Groups of a RunSpec of which changes of Megatron's runs leave the parameters and what is kept of them alone.
OF_PASSES = frozenset({"recompute", "batch", "implementation"})
#: GPU generation that has fp8 -> the recipe that NVIDIA's own recipes take there.
_FP8_RECIPES = {"hopper": "tensorwise", "blackwell": "mxfp8"}


class Change(NamedTuple):
    """One option, changed: fields of a RunSpec (``RunSpec.with_fields``) and their new values.

    Example:
        >>> from bridge_memory import Change
        >>> Change("gradient dtype", (("grad_reduce_in_fp32", False),)).words
        'grad_reduce_in_fp32=False'
    """

    #: Changes of one kind exclude each other.
    kind: str
    fields: tuple[tuple[str, Any], ...]

    @property
    def moves_layers(self) -> bool:
        """Whether stages hold other layers with it."""
        return self.kind in ("PP", "split")

    @property
    def words(self) -> str:
        return ", ".join(f"{name}={_shown(value)}" for name, value in self.fields)


class _Changed(NamedTuple):
    """A run with one or more changes and its time, before its peaks are asked for."""

    changes: tuple[Change, ...]
    run: RunSpec
    #: As ``Effect.slowdown``.
    slowdown: float | None


class Effect(NamedTuple):
    """What one or more changes do to a run, in bytes and as a factor of time.

    Example:
        >>> from bridge_memory import RunSpec, peaks, whatif
        >>> effect = whatif(RunSpec(model="meta-llama/Llama-3.2-1B"), gpu="H100").singles[0]
        >>> effect.peak == max(stage.peak_bytes for stage in peaks(effect.run))
        True
    """

    changes: tuple[Change, ...]
    run: RunSpec
    #: Highest peak of all stages.
    peak: int
    #: Of the highest peak before, less than zero where it grows.
    freed: int
    #: Time a sequence over that before; None where the time model does not know.
    slowdown: float | None

    @property
    def words(self) -> str:
        return "; ".join(change.words for change in self.changes)


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _change(kind: str, **fields: Any) -> Change:
    return Change(kind, tuple(fields.items()))


def changes(run: RunSpec) -> Iterator[Change]:
    """Every change of one option that keeps the model, the GPUs and the batch of a step. Not all are legal."""
    if not run.data_parallel.of_megatron:
        yield from _outside_of_megatron(run)
        return
    p, b, o, r, i, d = run.parallel, run.batch, run.optimizer, run.recompute, run.implementation, run.data_parallel
    modules = r.modules if r.granularity == "selective" else ()
    for module in useful_modules(run):
        if module not in modules and r.granularity != "full":
            yield _change(
                f"recompute {module}", recompute_granularity="selective", recompute_modules=(*modules, module)
            )
    if r.granularity != "full":
        yield _change(
            "full recompute", recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        half = max(1, run.model.num_layers // (p.pp * p.vpp) // 2)
        yield _change(
            "full recompute", recompute_granularity="full", recompute_method="block", recompute_num_layers=half
        )
    if b.micro_batch_size > 1:
        yield _change("micro batch", micro_batch_size=b.micro_batch_size // 2)
    yield from _sizes(run)
    if not p.sp and p.tp > 1:
        yield _change("sequence parallel", sequence_parallel=True)
    if not d.use_distributed_optimizer and not d.fsdp:
        yield _change("distributed optimizer", use_distributed_optimizer=True)
    if run.precision.params_dtype == "bf16" and o.optimizer == "adam" and not o.optimizer_cpu_offload:
        if not o.use_precision_aware_optimizer:
            sharded = {} if d.use_distributed_optimizer else {"use_distributed_optimizer": True}
            yield _change(
                OPTIMIZER_STATES, use_precision_aware_optimizer=True, **sharded, exp_avg_dtype="bf16",
                exp_avg_sq_dtype="bf16",
            )
        if o.use_precision_aware_optimizer and (o.exp_avg_dtype, o.exp_avg_sq_dtype) != ("fp8", "fp8"):
            yield _change(OPTIMIZER_STATES, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")
    if d.grad_reduce_in_fp32 and run.precision.params_dtype == "bf16":
        yield _change("gradient dtype", grad_reduce_in_fp32=False)
    if not o.optimizer_cpu_offload:
        # Megatron-LM refuses it without the other option, and megatron-core cannot resume it.
        aware = run.precision.params_dtype == "bf16" and o.optimizer == "adam" and d.use_distributed_optimizer
        more = {"use_precision_aware_optimizer": True} if aware and not o.use_precision_aware_optimizer else {}
        yield _change(OPTIMIZER_STATES, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0, **more)
    if not i.cross_entropy_loss_fusion:
        fused = "te" if i.te else "native"
        yield _change("loss fusion", cross_entropy_loss_fusion=True, cross_entropy_fusion_impl=fused)
    if run.model.has_experts:
        for dispatcher in ("alltoall", "allgather", "flex"):
            if dispatcher != i.moe_token_dispatcher_type:
                yield _change("dispatcher", moe_token_dispatcher_type=dispatcher)
        if not i.moe_permute_fusion and i.te:
            yield _change("permute fusion", moe_permute_fusion=True)
    if i.te and not i.offload_modules:
        for module in OFFLOAD_MODULES:
            yield _change("activation offload", offload_modules=(module,))
    precision = run.precision
    if i.te and precision.params_dtype == "bf16" and not precision.quantizes and i.gpu_arch in _FP8_RECIPES:
        recipe = _FP8_RECIPES[i.gpu_arch]
        eight = {"fp8": "hybrid", "precision.fp8_recipe": recipe, "optimizer.fp8_recipe": recipe}
        yield _change("fp8", **eight)
        yield _change("fp8", **eight, **{"precision.fp8_param": True})


def _outside_of_megatron(run: RunSpec) -> Iterator[Change]:
    """Those of the engines that shard over data-parallel ranks alone."""
    b, o, i, engine = run.batch, run.optimizer, run.implementation, run.data_parallel.engine
    if b.micro_batch_size > 1:
        yield _change("micro batch", micro_batch_size=b.micro_batch_size // 2)
    if i.torchtitan:
        yield from _of_torchtitan(run)
    elif i.torchtune:
        yield from _of_torchtune(run)
    elif i.torch_layers:
        yield from _of_transformers(run)
    if o.optimizer in ("adam", "adamw"):
        if o.torch_implementation == "foreach":
            yield _change("optimizer kernels", torch_implementation="fused")
        yield _change(OPTIMIZER_STATES, **{"optimizer.optimizer": "adamw_8bit"})
    yield from _of_engine(run)
    # Megatron's layers stay beside DeepSpeed's ZeRO: another engine would run others.
    others = () if engine == "megatron_deepspeed" else ("zero2", "zero3") if engine.startswith("zero") else ("fsdp2",)
    for other in others:
        if (other > engine or not engine.startswith("zero")) and other != engine:
            yield _change("engine", engine=other)


def _of_transformers(run: RunSpec) -> Iterator[Change]:
    hf = run.transformers
    if not hf.gradient_checkpointing:
        yield _change("gradient checkpointing", gradient_checkpointing=True)
    elif hf.reentrant:
        yield _change("gradient checkpointing", use_reentrant=False)
    usable = usable_attention(run.model.model_type, hf)
    if hf.attn_implementation != "flash_attention_2" and "flash_attention_2" in usable:
        yield _change("attention", attn_implementation="flash_attention_2")
    if hf.attn_implementation == "eager" and "sdpa" in usable:
        yield _change("attention", attn_implementation="sdpa")
    for kernel in ("fused_linear_cross_entropy", "swiglu", "rms_norm"):
        if kernel not in hf.liger_kernel:
            yield _change("Liger kernels", liger_kernel=(*hf.liger_kernel, kernel))


def _of_torchtitan(run: RunSpec) -> Iterator[Change]:
    hf = run.transformers
    if not hf.gradient_checkpointing:
        yield _change("gradient checkpointing", gradient_checkpointing=True, selective_ac_option=None)
        if hf.selective_ac_option is None:
            for option in ("op", "2"):
                yield _change("gradient checkpointing", selective_ac_option=option)


def _of_torchtune(run: RunSpec) -> Iterator[Change]:
    hf = run.transformers
    if not hf.gradient_checkpointing:
        yield _change("gradient checkpointing", gradient_checkpointing=True)
    elif not hf.enable_activation_offloading:
        yield _change("activation offloading", enable_activation_offloading=True)
    if not hf.torch_compile:
        yield _change("torch.compile", torch_compile=True)
    if not hf.num_output_chunks:
        yield _change("chunked loss", num_output_chunks=8)
    if not hf.optimizer_in_bwd and run.data_parallel.engine == "single" and run.num_microbatches == 1:
        yield _change("optimizer in backward", optimizer_in_bwd=True)


def _of_engine(run: RunSpec) -> Iterator[Change]:
    """Options of the engine itself: what it divides and when, its buckets, its dtypes, what it keeps on the host."""
    engine, f, z = run.data_parallel.engine, run.fsdp, run.deepspeed
    if engine == "ddp" and not run.ddp.gradient_as_bucket_view:
        yield _change("buckets", ddp_gradient_as_bucket_view=True)
    if engine in ("fsdp1", "fsdp2"):
        if engine == "fsdp2" and f.reshard_after_forward is False:
            yield _change("sharding", fsdp_reshard_after_forward=True)
        if engine == "fsdp1" and f.sharding_strategy != "FULL_SHARD":
            yield _change("sharding", fsdp_sharding_strategy="FULL_SHARD", fsdp_shard_degree=None)
        if engine == "fsdp2" and f.shard_degree is not None:
            yield _change("shard degree", fsdp_shard_degree=None)
        if (f.reduce_dtype or run.compute_dtype) == "fp32" and run.compute_dtype != "fp32":
            yield _change("gradient dtype", fsdp_reduce_dtype=run.compute_dtype)
        if run.num_microbatches > 1 and not run.data_parallel.sync_each_batch:
            yield _change("accumulation", sync_each_batch=True)
        if not f.offload_params:
            yield _change("offload", fsdp_offload_params=True)
    if run.data_parallel.of_deepspeed:
        if z.overlap_comm is not True and engine in ("zero1", "zero2"):
            yield _change("overlap", overlap_comm=True)
        if z.overlap_comm is not False and engine == "zero3":
            yield _change("overlap", overlap_comm=False)
        if z.reduce_bucket_size > 100_000_000:
            yield _change("buckets", reduce_bucket_size=100_000_000)
        if z.offload_optimizer_device == "none":
            yield _change("offload", offload_optimizer_device="cpu")
    if engine == "zero3":
        yield _change("offload", offload_param_device="cpu")
        if z.offload_optimizer_device == "none":
            yield _change("offload", offload_optimizer_device="cpu", offload_param_device="cpu")


def _sizes(run: RunSpec) -> Iterator[Change]:
    """Parallel sizes twice and half as large, and other splits of the layers."""
    p = run.parallel
    for kind, field, size in (
        ("TP", "tensor_model_parallel_size", p.tp), ("PP", "pipeline_model_parallel_size", p.pp),
        ("CP", "context_parallel_size", p.cp), ("EP", "expert_model_parallel_size", p.ep),
    ):  # fmt: skip
        if kind == "EP" and not run.model.has_experts:
            continue
        for changed in {2 * size, size // 2} - {0}:
            yield _change(kind, **{field: changed})
            if kind == "PP":  # with a split that so many stages can have, where the run's own is none
                yield from _splits(run, changed, p.vpp if changed > 1 else 1, kind, **{field: changed})
    if run.model.has_experts and p.tp > 1:
        yield _change("ETP", expert_tensor_parallel_size=1 if p.etp > 1 else p.tp)
    if p.pp == 1 or run.model.hybrid:
        return
    for vpp in {1, p.vpp, 2 * p.vpp, p.vpp // 2} - {0}:
        yield from _splits(run, p.pp, vpp, "split")


def _splits(run: RunSpec, pp: int, vpp: int, kind: str, **fields: Any) -> Iterator[Change]:
    """``fields`` with the splits of the layers over ``pp`` stages of ``vpp`` chunks that the run has not."""
    for split in splits(run.model, pp, vpp):
        asked = {**NO_SPLIT, **split, "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None}
        differ = {name: value for name, value in asked.items() if getattr(run.parallel, name) != value}
        if differ:
            yield _change(kind, **fields, **differ)


class WhatIf:
    """What changes do to one run. ``whatif`` makes one; each change is applied once, when it is asked for.

    Example:
        >>> from bridge_memory import RunSpec, whatif
        >>> changes = whatif(RunSpec(model="meta-llama/Llama-3.2-1B"), gpu="H100")
        >>> changes.pairs(3)[0].freed >= changes.singles[0].freed
        True
    """

    def __init__(self, run: RunSpec, hardware: Hardware | None = None) -> None:
        self.run, self.hardware = run, hardware
        #: Highest peak of all stages, bytes.
        self.before = max(s.peak_bytes for s in peaks(run))
        self._runs: dict[tuple[Change, ...], RunSpec | None] = {}
        self._changed: dict[tuple[Change, ...], _Changed | None] = {}
        self._applied: dict[tuple[Change, ...], Effect | None] = {}

    @cached_property
    def _seconds(self) -> float:
        return _seconds(self.run, self.hardware) if self.hardware and not not_timed(self.run) else 0.0

    @cached_property
    def singles(self) -> list[Effect]:
        """Single changes, the most freed first, without those that free nothing or that the run cannot have."""
        found = [self.effect((change,)) for change in dict.fromkeys(changes(self.run))]
        return sorted([e for e in found if e is not None and e.freed > 0], key=lambda e: -e.freed)

    def pairs(self, most: int = MOST_COMBINED) -> list[Effect]:
        """Pairs of the ``most`` singles that free most, likewise."""
        found = map(self.effect, _sets(self.singles[:most], 2))
        return sorted([e for e in found if e is not None and e.freed > 0], key=lambda e: -e.freed)

    def cheapest(self, target: int, *, largest: int = 3) -> Effect | None:
        """The set of at most ``largest`` changes with which no stage exceeds ``target`` bytes and a sequence takes
        least time; one whose cost is unknown only where no other reaches it. None where none does.

        Sets of three are made of the MOST_COMBINED changes that free most and the CHEAPEST_COMBINED that then cost
        least, sets of two of three times as many; fp8, and what has no time, only where nothing else reaches it.
        """
        if not isinstance(target, (int, float)) or not target >= LEAST_TARGET:
            raise SpecError(f"target ({show(target)}) is no peak in bytes; give some, such as 60 * 2**30")
        timed = [e for e in self.singles if e.slowdown is not None]
        usual = [e for e in timed if e.changes[0].kind != "fp8"]
        tried = (self._cheapest(singles, target, largest) for singles in (usual, timed, self.singles))
        return next((found for found in tried if found is not None), None)

    def _cheapest(self, singles: Sequence[Effect], target: int, largest: int) -> Effect | None:
        found = [*singles]
        for number in range(2, largest + 1):
            most = MOST_COMBINED * (3 if number == 2 else 1)
            rest = sorted(singles[most:], key=lambda e: e.slowdown or 0.0)[:CHEAPEST_COMBINED]
            sets = _sets([*singles[:most], *rest], number)
            found += [e for e in map(self.effect, sets) if e is not None]
        return min(
            [e for e in found if e.peak <= target],
            key=lambda e: (e.slowdown is None, e.slowdown or 0.0, len(e.changes), e.peak), default=None,
        )  # fmt: skip

    def effect(self, chosen: tuple[Change, ...]) -> Effect | None:
        """What these do together; None where the run cannot have them."""
        if chosen not in self._applied:
            self._applied[chosen] = self._apply(chosen)
        return self._applied[chosen]

    def to_try(self, gpu: Gpu, without: Callable[[RunSpec], bool] = lambda run: False) -> Iterator[Effect]:
        """Single changes with which a step fits ``gpu``, in the order to try them, but for those with runs of which
        ``without`` holds. A change is timed where model state alone leaves room; its peak is estimated in its turn."""
        found = []
        for change in dict.fromkeys(changes(self.run)):
            run = self._run((change,))
            if run is not None and self._has_room(run, gpu) and not without(run):
                changed = self._change((change,))
                found += [] if changed is None else [changed]
        for _, alike in groupby(sorted(found, key=_cost), key=_cost):
            effects = [self.effect(c.changes) for c in alike]
            for effect in in_order_to_try(e for e in effects if e is not None and e.freed > 0):
                if makes_it_fit(effect, gpu):
                    yield effect

    def _has_room(self, run: RunSpec, gpu: Gpu) -> bool:
        """Whether model state alone, of which no peak is less, fits."""
        try:
            state = self._state if keeps_state(self.run, run) else max(model_state(run))
            return headroom(gpu, state, run) >= 0
        except SpecError:
            return False

    @cached_property
    def _state(self) -> int:
        return max(model_state(self.run))

    def _change(self, chosen: tuple[Change, ...]) -> _Changed | None:
        """The run with these changes, and its time; None where the run cannot have them."""
        if chosen not in self._changed:
            self._changed[chosen] = self._timed(chosen)
        return self._changed[chosen]

    def _timed(self, chosen: tuple[Change, ...]) -> _Changed | None:
        changed, slowdown = self._run(chosen), None
        if changed is None:
            return None
        if self.hardware is not None and self._seconds and not not_timed(changed):
            try:
                slowdown = _seconds(changed, self.hardware) / self._seconds
            except SpecError:
                return None
        return _Changed(chosen, changed, slowdown)

    def _run(self, chosen: tuple[Change, ...]) -> RunSpec | None:
        """The run with these changes; None where there is none."""
        if chosen not in self._runs:
            self._runs[chosen] = self._with(chosen)
        return self._runs[chosen]

    def _with(self, chosen: tuple[Change, ...]) -> RunSpec | None:
        fields: dict[str, Any] = {}
        for change in chosen:
            for name, value in change.fields:
                if name == "recompute_modules" and name in fields:
                    value = tuple(dict.fromkeys((*fields[name], *value)))
                elif name in fields and fields[name] != value:
                    return None
                fields[name] = value
        try:
            return self.run.with_fields(**fields)
        except SpecError:
            return None

    def _apply(self, chosen: tuple[Change, ...]) -> Effect | None:
        changed = self._change(chosen)
        if changed is None:
            return None
        try:
            peak = max(s.peak_bytes for s in peaks(changed.run))
        except SpecError:
            return None
        return Effect(chosen, changed.run, peak, self.before - peak, changed.slowdown)


def _sets(singles: Sequence[Effect], number: int) -> Iterator[tuple[Change, ...]]:
    """Sets of changes of different kinds."""
    for chosen in combinations([e.changes[0] for e in singles], number):
        if len({change.kind for change in chosen}) == number:
            yield chosen


def _seconds(run: RunSpec, hardware: Hardware) -> float:
    """Seconds a sequence: where no global batch size is given, a step's sequences vary with the sizes."""
    return step_time(run, hardware).seconds / run.sequences_per_step


def makes_it_fit(effect: Effect, gpu: Gpu) -> bool:
    """Whether the verdict of the changed run is that it fits."""
    return headroom(gpu, effect.peak, effect.run) >= 0 and fits(estimate(effect.run), [gpu])[0].fits


def keeps_state(run: RunSpec, changed: RunSpec) -> bool:
    """Whether a change (``changes``) of a run is one of its passes alone: its model state is the same. Engines beside
    Megatron's DDP keep other things when passes change."""
    if run.data_parallel.engine != "megatron_ddp":
        return False
    return all(group in OF_PASSES or getattr(run, group) == getattr(changed, group) for group in GROUPS)


def _cost(of: Effect | _Changed) -> tuple[bool, bool, float]:
    """By step time; fp8, and what has no time, only after all else."""
    return of.slowdown is None, of.changes[0].kind == "fp8", of.slowdown or 0.0


def in_order_to_try(effects: Iterable[Effect]) -> list[Effect]:
    """Changes in the order to try them: those of equal cost by their peaks."""
    return sorted(effects, key=lambda e: (*_cost(e), e.peak))


def to_try_first(fitting: Iterable[Effect]) -> Effect | None:
    """Of changes that make a run fit the one to try first."""
    return next(iter(in_order_to_try(fitting)), None)
