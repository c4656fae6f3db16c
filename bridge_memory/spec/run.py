"""RunSpec: what is trained, and how. Frozen, validated on construction, with Megatron's field names.

A reader (``bridge_memory.readers``) produces a ``ModelSpec``; a command line, a ConfigContainer or a Megatron-LM
argument list produces the rest. Estimation and everything after it depend only on the ``RunSpec``, never on its source.

Every refusal is a ``SpecError`` (a ``ValueError``) of one line that names the field, its value and the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from os import PathLike
from typing import TYPE_CHECKING, Any

from bridge_memory.spec.checkpoint import DEFAULT_CHECKPOINT_SPEC, CheckpointSpec
from bridge_memory.spec.engine_options import (
    DEFAULT_DDP_OPTIONS,
    DEFAULT_DEEPSPEED_OPTIONS,
    DEFAULT_FSDP_OPTIONS,
    DDPOptions,
    DeepSpeedOptions,
    FSDPOptions,
)
from bridge_memory.spec.errors import SpecError, show
from bridge_memory.spec.fields import called
from bridge_memory.spec.layout import layout
from bridge_memory.spec.model import ModelSpec, MoESpec
from bridge_memory.spec.parts import (
    ALL_LINEAR,
    MEGATRON_TARGETS,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    layers_by_default,
)
from bridge_memory.spec.transformers import (
    COMPILED,
    DEFAULT_TRANSFORMERS_SPEC,
    TransformersSpec,
    as_transformers_builds,
)
from bridge_memory.spec.validation import validate

#: Group of a RunSpec -> its class.
GROUPS: dict[str, type] = {
    "parallel": ParallelSpec,
    "batch": BatchSpec,
    "precision": PrecisionSpec,
    "optimizer": OptimizerSpec,
    "data_parallel": DataParallelSpec,
    "peft": PeftSpec,
    "recompute": RecomputeSpec,
    "implementation": ImplementationSpec,
    "ddp": DDPOptions,
    "fsdp": FSDPOptions,
    "deepspeed": DeepSpeedOptions,
    "transformers": TransformersSpec,
    "checkpoint": CheckpointSpec,
}
_TYPES = (ModelSpec, *GROUPS.values(), tuple, tuple)


#: The default of ``RunSpec.implementation``. Identity with this object means that the user chose none.
UNSET_IMPLEMENTATION = ImplementationSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One training run: what is trained, and how. Construction validates it.

    ``model`` may be anything that ``resolve_model`` takes: a preset, a path or a Hub id. ``with_fields`` returns a copy
    with single fields changed, ``with_`` one with whole groups replaced.

    Raises:
        SpecError: A field is invalid, or fields contradict each other.

    Example:
        >>> from bridge_memory import BatchSpec, ParallelSpec, RunSpec
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-70B",
        ...     parallel=ParallelSpec(world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
        ...     batch=BatchSpec(seq_length=8192, global_batch_size=256),
        ... )
        >>> run.num_microbatches
        64
        >>> wider = run.with_fields(pipeline_model_parallel_size=4, recompute_granularity="selective")
        >>> wider.parallel.data_parallel_size
        2
    """

    model: ModelSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    data_parallel: DataParallelSpec = field(default_factory=DataParallelSpec)
    peft: PeftSpec = field(default_factory=PeftSpec)
    recompute: RecomputeSpec = field(default_factory=RecomputeSpec)
    #: Default: Megatron's layers with Transformer Engine, or transformers' with an engine that trains those.
    implementation: ImplementationSpec = UNSET_IMPLEMENTATION
    #: Options of engines outside megatron-core; those of engines that are not used stay at their defaults.
    ddp: DDPOptions = DEFAULT_DDP_OPTIONS
    fsdp: FSDPOptions = DEFAULT_FSDP_OPTIONS
    deepspeed: DeepSpeedOptions = DEFAULT_DEEPSPEED_OPTIONS
    #: How transformers runs the model; for ``transformer_impl`` transformers, torchtitan and torchtune only.
    transformers: TransformersSpec = DEFAULT_TRANSFORMERS_SPEC
    #: Of megatron-core's engines only.
    checkpoint: CheckpointSpec = DEFAULT_CHECKPOINT_SPEC
    #: The teacher of a distillation, as a separate run: frozen, on the student's ranks.
    teacher: RunSpec | None = None
    #: Assumptions and unmodelled features that the source of the run adds to the model's.
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    if TYPE_CHECKING:  # For type checkers: the constructor also takes a model's name, the field is a ModelSpec.

        def __init__(
            self,
            *,
            model: ModelSpec | str,
            parallel: ParallelSpec = ...,
            batch: BatchSpec = ...,
            precision: PrecisionSpec = ...,
            optimizer: OptimizerSpec = ...,
            data_parallel: DataParallelSpec = ...,
            peft: PeftSpec = ...,
            recompute: RecomputeSpec = ...,
            implementation: ImplementationSpec = ...,
            ddp: DDPOptions = ...,
            fsdp: FSDPOptions = ...,
            deepspeed: DeepSpeedOptions = ...,
            transformers: TransformersSpec = ...,
            checkpoint: CheckpointSpec = ...,
            teacher: RunSpec | None = ...,
            assumptions: tuple[str, ...] = ...,
            not_modelled: tuple[str, ...] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        if (
            type(self.model), type(self.parallel), type(self.batch), type(self.precision), type(self.optimizer),
            type(self.data_parallel), type(self.peft), type(self.recompute), type(self.implementation),
            type(self.ddp), type(self.fsdp), type(self.deepspeed), type(self.transformers), type(self.checkpoint),
            type(self.assumptions), type(self.not_modelled),
        ) != _TYPES:  # fmt: skip
            object.__setattr__(self, "model", _model(self.model))
            _check_groups(self)
        if self.teacher is not None and type(self.teacher) is not RunSpec:
            raise SpecError(f"teacher ({show(self.teacher)}) is not a RunSpec; give RunSpec(model=...)")
        if self.implementation is UNSET_IMPLEMENTATION:
            fields, assumed = layers_by_default(self.data_parallel.engine)
            if fields:
                object.__setattr__(self, "implementation", ImplementationSpec(**fields))
                object.__setattr__(self, "assumptions", (*self.assumptions, *assumed))
        hf = self.transformers
        if self.implementation.own_layers and hf.gradient_checkpointing and hf.use_reentrant is None:
            # torch ``checkpoint_wrapper``: NO_REENTRANT, in torchtitan and torchtune.
            object.__setattr__(self, "transformers", replace(hf, use_reentrant=False))
        if self.implementation.torch_layers:
            object.__setattr__(self, "model", as_transformers_builds(self.model))
            if self.peft.scheme == "lora" and self.peft.target_modules == MEGATRON_TARGETS:
                object.__setattr__(self, "peft", replace(self.peft, target_modules=(ALL_LINEAR,)))
                note = f"adapters on every linear but the output layer (peft.target_modules {ALL_LINEAR})"
                object.__setattr__(self, "assumptions", (*self.assumptions, note))
        precision = self.precision
        on = precision.quantizes
        ends = precision.num_layers_at_start_in_bf16 * on, precision.num_layers_at_end_in_bf16 * on
        object.__setattr__(self, "model", self.model.with_unquantized_ends(*ends))
        validate(self)

    @property
    def compute_dtype(self) -> str:
        """The dtype of parameters in the forward pass: FSDP's param_dtype if set, else ``params_dtype``."""
        mixed = self.fsdp.param_dtype if self.data_parallel.engine in ("fsdp1", "fsdp2") else None
        return mixed or self.params_dtype

    @property
    def params_dtype(self) -> str:
        """The dtype in which parameters are stored, quantised ones aside."""
        return "fp32" if self.transformers.prepare_model_for_kbit_training else self.precision.params_dtype

    @property
    def adapters_dtype(self) -> str:
        """The dtype in which adapters are stored. With quantised weights they stay in fp32 (peft
        ``tuners/tuners_utils.py: cast_adapter_dtype, _move_adapter_to_device_of_base_layer``). DeepSpeed casts the
        whole model (``runtime/engine.py: _configure_distributed_model``)."""
        hf = self.transformers
        if not self.implementation.torch_layers or self.data_parallel.of_deepspeed:
            return self.params_dtype
        return "fp32" if hf.autocast_adapter_dtype or hf.quantized else self.params_dtype

    @property
    def adapters_compute_dtype(self) -> str:
        """The dtype in which adapters compute and their gradients are produced: FSDP's mixed precision casts them."""
        mixed = self.fsdp.param_dtype if self.data_parallel.engine in ("fsdp1", "fsdp2") else None
        return mixed or self.adapters_dtype

    @property
    def layer_gradients_stay(self) -> bool:
        """Whether all weight gradients of a layer are alive at once until its backward pass ends.

        They are if no hook consumes them one by one and they are not accumulated into existing gradients. A compiled
        layer returns all of its gradients at its end.
        """
        engine = self.data_parallel.engine
        if engine in ("fsdp1", "fsdp2") or self.layers_compiled:
            return True
        if self.transformers.optimizer_in_bwd:
            return False
        taken = self.ddp.gradient_as_bucket_view if engine == "ddp" else bool(self.deepspeed.overlap_comm)
        return engine in ("single", "ddp", "zero1") and not taken and self.num_microbatches == 1

    @property
    def layers_compiled(self) -> bool:
        """Whether layers are counted as compiled by torch.compile.

        They are for dense layers of the families in ``COMPILED``, without adapters, autocast, Liger, KV cache, eager
        attention or padding masks, and with engines whose hooks cause no graph breaks.
        """
        spec, impl = self.transformers, self.implementation
        return (
            spec.torch_compile and impl.torch_layers
            and (impl.own_layers or self.model.model_type in COMPILED)
            and self.data_parallel.engine in ("single", "ddp", "fsdp1", "fsdp2")
            and not self.peft.freezes and spec.autocast is None and not spec.liger_kernel and not spec.use_cache
            and spec.attn_implementation != "eager" and spec.attention_mask != "padded"
            and not any(isinstance(kind.ffn, MoESpec) for kind in dict.fromkeys(self.model.layers))
        )

    @property
    def fuses_rotation(self) -> bool:
        """Whether ``apply_rope_fusion`` has its effect.

        Megatron-LM and Megatron Bridge turn it off with YaRN (``arguments.py: validate_args``, ``utils/fusions.py:
        validate_rope_fusion_compatibility``). So does megatron-core from 0.16 on where YaRN multiplies cosine and sine,
        unless sequences are packed (``rope_utils.py: apply_rotary_pos_emb``).
        """
        return self.implementation.apply_rope_fusion and not self.model.yarn

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel replica (``num_microbatches_calculator``)."""
        p, b = self.parallel, self.batch
        if b.global_batch_size is None:
            split = p.pipeline_model_parallel_layout
            return p.pp * (p.vpp if split is None else layout(self.model, p).virtual_pipeline_model_parallel_size)
        return b.global_batch_size // (b.micro_batch_size * p.data_parallel_size)

    @property
    def sequences_per_step(self) -> int:
        """Over the whole job: ``global_batch_size``, or as many as the microbatches are."""
        return self.num_microbatches * self.batch.micro_batch_size * self.parallel.data_parallel_size

    @property
    def teacher_here(self) -> RunSpec | None:
        """The teacher with this run's parallel sizes; its layers are split over stages by its own fields. Raises
        SpecError where it does not go with them."""
        if self.teacher is None:
            return None
        p = self.parallel
        names = ["world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"]
        if self.teacher.model.has_experts:
            names += ["expert_model_parallel_size", "expert_tensor_parallel_size"]
        given = {name: getattr(p, name) for name in names}
        # As whole numbers: where this stands for many runs, of those that share a teacher.
        sizes: dict[str, Any] = {name: None if size is None else int(size) for name, size in given.items()}
        parallel = replace(self.teacher.parallel, sequence_parallel=p.sequence_parallel, **sizes)
        return replace(self.teacher, parallel=parallel)

    def with_(self, **groups: Any) -> RunSpec:
        """A copy with whole groups replaced, validated again."""
        return replace(self, **groups)

    def with_fields(self, **values: Any) -> RunSpec:
        """A copy with single fields replaced, validated again.

        Fields go by Megatron's names. ``group.field`` is the full name, required if two groups have the field:
        ``with_fields(**{"precision.fp8_recipe": "mxfp8"})``. Whole groups may be given too.

        Raises:
            SpecError: No group, or more than one, has the field; or the copy is not a valid run.
        """
        changed: dict[str, dict[str, Any]] = {}
        whole: dict[str, Any] = {}
        for name, value in values.items():
            group, member = _owner(name)
            if member:
                changed.setdefault(group, {})[member] = value
            else:
                whole[group] = _model(value) if group == "model" else value
        for group, members in changed.items():
            whole[group] = replace(whole.get(group, getattr(self, group)), **members)
        return replace(self, **whole)


# --------------------------------------------------------------------------------------------------
# Checks of the constructor's arguments
# --------------------------------------------------------------------------------------------------

_resolve: Callable[[str | PathLike[str]], ModelSpec] | None = None


def read_names_with(resolve: Callable[[str | PathLike[str]], ModelSpec]) -> None:
    """Register the function that resolves a model's name. ``bridge_memory.readers`` calls it on import, so that this
    package need not import the readers."""
    global _resolve
    _resolve = resolve


def _model(given: object) -> ModelSpec:
    if isinstance(given, ModelSpec):
        return given
    if isinstance(given, (str, PathLike)):
        if _resolve is None:
            raise SpecError(f"model ({show(given)}) is a name, and nothing here reads it; import bridge_memory.readers")
        return _resolve(given)
    fix = "a ModelSpec, or a preset's name, a path or a Hub id"
    if isinstance(given, Mapping):
        fix = "model_from_hf_config(config, name) of a Hugging Face config, or a preset's name"
    raise SpecError(f"model ({show(given)}) is not a ModelSpec; give {fix}")


def _check_groups(run: RunSpec) -> None:
    for name, cls in GROUPS.items():
        given = getattr(run, name)
        if not isinstance(given, cls):
            article = "an" if cls.__name__[0] in "AEIO" else "a"
            raise SpecError(f"{name} ({show(given)}) is not {article} {cls.__name__}; give {_written(cls, given)}")
    for name in ("assumptions", "not_modelled"):
        given = getattr(run, name)
        if not isinstance(given, tuple):
            raise SpecError(f"{name} ({show(given)}) is not a tuple of sentences; give one")


def _written(cls: type, given: object) -> str:
    """The constructor call to write in place of ``given``, with its items if it is a dict of the group's fields."""
    names = [f.name for f in fields(cls)]
    if isinstance(given, Mapping) and given and all(key in names for key in given):
        inside = ", ".join(f"{key}={show(value)}" for key, value in given.items())
        return f"{cls.__name__}({inside})"
    return f"{cls.__name__}({names[0]}=..., {names[1]}=...)"


@cache
def _owners() -> dict[str, tuple[tuple[str, str], ...]]:
    """Name of a field -> the (group, field) pairs that have it. The field is "" for a field of RunSpec itself, which
    takes precedence."""
    found: dict[str, list[tuple[str, str]]] = {}
    for group, cls in {"model": ModelSpec, **GROUPS}.items():
        for f in fields(cls):
            if f.init:
                found.setdefault(called(cls, f.name), []).append((group, f.name))
                found[f"{group}.{f.name}"] = [(group, f.name)]
    for f in fields(RunSpec):
        found[f.name] = [(f.name, "")]
    return {name: tuple(owners) for name, owners in found.items()}


#: Short names of sizes: properties of ParallelSpec, not fields.
_SHORT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size", "sp": "sequence_parallel",
}  # fmt: skip


def _owner(name: str) -> tuple[str, str]:
    owners = _owners().get(name, ())
    if len(owners) == 1:
        return owners[0]
    if owners:
        full = " or ".join(f"{group}.{member}" for group, member in owners)
        raise SpecError(f"{name} is a field of {len(owners)} groups; write {full}")
    from difflib import get_close_matches

    near = [_SHORT[name]] if name in _SHORT else get_close_matches(name, _owners(), n=3, cutoff=0.6)
    hint = f"use {' or '.join(near)}" if near else f"the groups are model, {', '.join(GROUPS)}"
    raise SpecError(f"{name if name.isidentifier() else show(name)} is no field of a RunSpec; {hint}")
