"""A Megatron Bridge ConfigContainer, validated or not -> RunSpec. Imports neither torch nor megatron.

Bridge changes a container before it trains. The reader applies the same changes to a view, never to the container:
``training/config.py: runtime_config_update`` (mixed precision and communication overlap set fields of model, optimizer
and DDP; distributed-optimizer settings are synchronised) and the parts of megatron-core's
``TransformerConfig.__post_init__`` that change memory. Any object with the same attributes can be read.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge_memory.cards.generations import DEFAULT_GENERATION
from bridge_memory.readers.container_fields import container_part, data_parallel_size, vocabulary
from bridge_memory.readers.container_registry import (
    CORE_ATTENTION_OF_SPECS,
    CP_LOSS_BY_TOKEN,
    DENSE_MTP_SPECS,
    FP32_ROUTER_SPECS,
    FULL_QK_SPECS,
    LOCAL_LAYER_SPECS,
    NO_PRE_LAYERNORM_SPECS,
    OTHER_LAYER_SPECS,
    PLAIN_LAYER_SPECS,
    POST_LAYERNORM_SPECS,
    SCALED_QUERIES_SPECS,
    SEQUENCE_PARALLEL_WITH_TP,
    STAGE_LAYOUTS,
)
from bridge_memory.readers.container_unmodelled import (
    PARTS,
    distillation_of,
    encoders_of,
    language_model_frozen,
    not_modelled,
    provider_of,
    teacher_of,
    unmodelled_encoders,
)
from bridge_memory.readers.diffusion_provider import is_diffusion, patches_of, wan_model
from bridge_memory.readers.encoders import describe_encoder
from bridge_memory.readers.environment import implementation_of
from bridge_memory.readers.fields import shown
from bridge_memory.readers.nemotron_provider import videos_of
from bridge_memory.readers.transformer_config import FALCON_H1, GEMMA4_DENSE, model_from_transformer_config, pattern_of
from bridge_memory.releases import (
    ADOPTED_BESIDE_CORE,
    BRIDGE_ADOPTS_OPTIM_STATES,
    BRIDGE_EXPERTS_OUTSIDE_TP,
    BRIDGE_FLEX_ATTENTION,
    BRIDGE_FUSES_FSDP_GRADIENTS,
    BRIDGE_SYNCS_PARAM_GATHER,
    DEFAULT_MEGATRON_BRIDGE,
    FSDP_MAIN_DTYPES,
    PINNED_BY_BRIDGE,
    Release,
    Running,
    release_in,
)
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
    divide,
)
from bridge_memory.spec.checkpoint import CheckpointSpec
from bridge_memory.spec.dtypes import dtype_name
from bridge_memory.spec.layout_string import layout_string
from bridge_memory.spec.parts import GRAPHED_MODULES
from bridge_memory.spec.unmodelled import ADAPTERS, UNKNOWN_SIZE, Effect, Unmodelled

#: Elements of a gradient bucket that CommOverlapConfig sets (``_get_optimizer_overlap_cfgs``).
COMM_OVERLAP_BUCKET = 128 * 1024 * 1024

#: Bridge's precision recipes by name (``training/mixed_precision.py``): the fields that change memory.
_RECIPES: dict[str, dict[str, Any]] = {
    "mixed": {},
    "with_fp8_delayed_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "with_mxfp8_mixed": {
        "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "with_fp8_current_scaling_mixed": {
        "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True,
        "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1,
    },
    "with_fp8_subchannel_scaling_mixed": {"fp8": "hybrid", "fp8_recipe": "blockwise", "fp8_param_gather": False},
    # Bridge 0.6; 0.3 keeps parameters in bf16.
    "with_nvfp4_mixed": {"fp4": "e2m1", "fp4_param": True, "fp8_param_gather": False},
}  # fmt: skip
#: Recipes that differ from another in the layers that stay in bf16: name -> (the other, fields).
_OTHER_ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_3_super_bf16_with_nvfp4_mixed": (
        "bf16_with_nvfp4_mixed", {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 14}
    ),
    "nemotron_3_ultra_bf16_with_nvfp4_mixed": (
        "bf16_with_nvfp4_mixed",
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 16},
    ),
}  # fmt: skip
_ENDS_OF_TWO = {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 2}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def run_from_config_container(
    config: Any,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    gpu_arch: str = DEFAULT_GENERATION,
    megatron_core: Release | None = None,
    transformer_engine: Release | None = None,
    torch: Release | None = None,
    name: str | None = None,
    implementation: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Read a ConfigContainer of Megatron Bridge as the run that ``pretrain(config, ...)`` would start.

    Args:
        config: The ConfigContainer, or any object with its groups.
        world_size: GPUs of the job. None: the container's data_parallel_size times its model-parallel sizes, else
            ``config.world_size``, torch.distributed's, or WORLD_SIZE.
        num_microbatches: Microbatches per step. None: from the global batch size.
        gpu_arch: The generation of the GPU.
        megatron_core: The release that runs, as (major, minor). None: the one that this process has imported.
        transformer_engine: Likewise.
        torch: Likewise.
        name: What results call the run.
        implementation: Fields of ``ImplementationSpec`` that the machine determines. Its attention_backend is used only
            if the container's is "auto".

    Returns:
        The run. Its ``not_modelled`` lists what changes memory and is not modelled.

    Raises:
        SpecError: A field is missing or invalid, or the number of GPUs is unknown.

    Example:
        >>> import math
        >>> from types import SimpleNamespace as Group
        >>> from bridge_memory import run_from_config_container
        >>> def silu(x):
        ...     return x / (1 + math.exp(-x))
        >>> config = Group(  # ConfigContainer(...), or a recipe's
        ...     model=Group(
        ...         num_layers=24, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16, num_query_groups=4,
        ...         gated_linear_unit=True, activation_func=silu, add_bias_linear=False, normalization="RMSNorm",
        ...         position_embedding_type="rope", seq_length=4096, vocab_size=32000, bf16=True,
        ...         tensor_model_parallel_size=2,
        ...     ),
        ...     train=Group(micro_batch_size=1, global_batch_size=16),
        ...     optimizer=Group(optimizer="adam", use_distributed_optimizer=True),
        ...     ddp=Group(grad_reduce_in_fp32=True),
        ... )
        >>> run = run_from_config_container(config, world_size=8)
        >>> run.parallel.data_parallel_size, run.num_microbatches
        (4, 4)
    """
    found = implementation or {}
    bridge = _imported("megatron.bridge") or DEFAULT_MEGATRON_BRIDGE
    pinned = PINNED_BY_BRIDGE.get(bridge, Running())
    running = Running(
        found.get("megatron_core") or megatron_core or _imported("megatron.core") or pinned.megatron_core,
        found.get("transformer_engine") or transformer_engine or _imported("transformer_engine")
        or pinned.transformer_engine,
        found.get("torch") or torch or _imported("torch"),
    )  # fmt: skip
    return run_of_container(
        config, running, world_size=world_size, num_microbatches=num_microbatches, gpu_arch=gpu_arch, name=name,
        implementation=implementation, bridge=bridge,
    )  # fmt: skip


def run_of_container(
    config: Any,
    running: Running,
    *,
    world_size: int | None = None,
    num_microbatches: int | None = None,
    gpu_arch: str = DEFAULT_GENERATION,
    name: str | None = None,
    implementation: Mapping[str, Any] | None = None,
    bridge: Release | None = None,
) -> RunSpec:
    """``run_from_config_container`` with the releases given in ``running``; None in it stays unknown.

    ``bridge``: the release of Megatron Bridge, which changes the container before it trains. None: the container was
    made from Megatron-LM's arguments, and nothing changes it.
    """
    model = container_part(config, "model")
    _refuse(config, model)
    data_parallel = _data_parallel(config, model, world_size)
    view = _Views(config, model, data_parallel, bridge)
    tp, pp, cp = (
        _get(model, f"{kind}_parallel_size", 1) for kind in ("tensor_model", "pipeline_model", "context")
    )
    model_spec = _model(config, view, name, running.megatron_core)
    teacher = teacher_of(container_part(config, "model"))
    if teacher is not None:
        try:
            teacher = run_of_container(
                _WithModel(config, teacher), running, world_size=tp * pp * cp * data_parallel,
                num_microbatches=num_microbatches, gpu_arch=gpu_arch, implementation=implementation, bridge=bridge,
            )
        except SpecError as error:
            raise SpecError(f"model.teacher: {error}") from error
    batch = _batch(config, view, data_parallel, num_microbatches)
    return RunSpec(
        model=model_spec,
        parallel=_parallel(view, tp * pp * cp * data_parallel),
        batch=batch,
        precision=_precision(view),
        optimizer=_optimizer(config, view),
        data_parallel=_data_parallel_spec(config, view, running),
        peft=_peft(getattr(config, "peft", None), container_part(config, "model")),
        checkpoint=_checkpoint(getattr(config, "checkpoint", None), running, fsdp=view.fsdp, bridge=bridge),
        recompute=_recompute(view),
        implementation=_on_machine(
            _implementation(config, view, gpu_arch, running),
            {**_environment(config, gpu_arch, running), **(implementation or {})},
        ),
        teacher=teacher,
        assumptions=_assumptions(config),
        # A container made from Megatron-LM's arguments has its own list.
        not_modelled=(*getattr(config, "not_modelled", ()), *_not_modelled(config, view)),
    )


class _WithModel:
    """A container with another model and without adapters: the one that a distillation's teacher is read from."""

    def __init__(self, config: Any, model: Any) -> None:
        self._config, self.model, self.peft = config, model, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


# ---------------------------------------------------------------------------------------------------------------
# Views: the container with the changes that Bridge makes before training
# ---------------------------------------------------------------------------------------------------------------


def _get(part: Any, key: str, default: Any = None) -> Any:
    value = getattr(part, key, None)
    return default if value is None else value


class _View:
    """One part of the container, with some fields overridden. Attribute access works as on the part."""

    def __init__(self, part: Any, over: Mapping[str, Any]) -> None:
        self._part = part
        self._over = dict(over)

    @property
    def __wrapped__(self) -> Any:
        return self._part

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        if key in self._over:
            return self._over[key]
        return getattr(self._part, key)

    def lay_over(self, fields: Mapping[str, Any]) -> None:
        """Override those of ``fields`` that the part has, as Bridge does."""
        self._over.update({k: v for k, v in fields.items() if hasattr(self._part, k)})


class _Views:
    """model, optimizer and ddp as Bridge changes them (``runtime_config_update``)."""

    def __init__(self, config: Any, model: Any, data_parallel: int, bridge: Release | None) -> None:
        self.model = _View(model, {})
        self.optimizer = _View(getattr(config, "optimizer", None), {})
        self.ddp = _View(getattr(config, "ddp", None), {})
        precision = mixed_precision_fields(getattr(config, "mixed_precision", None))
        for view in (self.model, self.optimizer, self.ddp):
            view.lay_over(precision)
        #: Whether Megatron-FSDP is used; it implies the distributed optimizer
        #: (``_validate_and_apply_megatron_fsdp_configs``).
        self.fsdp = bool(
            _get(self.ddp, "use_megatron_fsdp", False)
            or _get(self.ddp, "use_custom_fsdp", False)
            or _get(getattr(config, "dist", None), "use_megatron_fsdp", False)
        )
        self.distributed = bool(
            _get(self.optimizer, "use_distributed_optimizer", False)
            or _get(self.ddp, "use_distributed_optimizer", False)
            or (self.fsdp and bridge is not None)
        )
        overlap = getattr(config, "comm_overlap", None)
        # Only if Bridge has not set it up yet: otherwise the container's fields already include the result.
        if overlap is not None and getattr(overlap, "data_parallel_size", None) is None:
            self._overlap(overlap, data_parallel)
        if bridge is not None:
            self._validated(config, bridge)

    def _validated(self, config: Any, bridge: Release) -> None:
        """Apply what ``ConfigContainer.validate`` and ``TransformerConfig.finalize`` set."""
        model, dataset = self.model, getattr(config, "dataset", None)
        experts = _get(model, "expert_model_parallel_size", 1) > 1
        if experts and _get(model, "expert_tensor_parallel_size") is None and bridge >= BRIDGE_EXPERTS_OUTSIDE_TP:
            model.lay_over({"expert_tensor_parallel_size": 1})
        gathers = _get(self.ddp, "overlap_param_gather", False) or _get(self.optimizer, "overlap_param_gather", False)
        if gathers and bridge >= BRIDGE_SYNCS_PARAM_GATHER:
            self.ddp.lay_over({"overlap_param_gather": True})
        if self.fsdp:
            self.optimizer.lay_over({"reuse_grad_buf_for_mxfp8_param_ag": False})
            if bridge < BRIDGE_FUSES_FSDP_GRADIENTS:
                model.lay_over({"gradient_accumulation_fusion": False})
        self._finalized_by_its_class()
        _, packed = _packing(dataset)
        hybridep = _get(model, "moe_token_dispatcher_type") == "flex" and (
            _get(model, "moe_flex_dispatcher_backend") == "hybridep"
        )
        if packed and hybridep and _cuda_graphs(model) == "none":
            model.lay_over({"moe_hybridep_pad_uneven_dispatch_inputs": True})

    def _finalized_by_its_class(self) -> None:
        """Apply what the ``finalize`` of specific providers sets."""
        model = self.model
        provider = provider_of(model.__wrapped__)
        if provider in CP_LOSS_BY_TOKEN and _get(model, "context_parallel_size", 1) > 1:
            model.lay_over({"calculate_per_token_loss": True})
        if provider in SEQUENCE_PARALLEL_WITH_TP and _get(model, "tensor_model_parallel_size", 1) > 1:
            model.lay_over({"sequence_parallel": True})
        layouts, pp = STAGE_LAYOUTS.get(provider, {}), _get(model, "pipeline_model_parallel_size", 1)
        keys = _words(
            "pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
        )
        if pp in layouts and _get(model, "num_layers", 1) % pp and all(_get(model, key) is None for key in keys):
            model.lay_over({"pipeline_model_parallel_layout": layouts[pp]})

    def _overlap(self, overlap: Any, data_parallel: int) -> None:
        """Apply ``CommOverlapConfig.setup``: its defaults, overridden by the user's values."""
        user = getattr(overlap, "user_comm_overlap_cfg", None) or overlap

        def chosen(key: str, default: Any) -> Any:
            return _get(user, key, default)

        enough = _get(self.model, "tensor_model_parallel_size", 1) > 1 and _get(
            self.model, "sequence_parallel", False
        )
        self.model.lay_over(
            {
                "tp_comm_overlap": bool(chosen("tp_comm_overlap", False) and enough),
                "defer_embedding_wgrad_compute": chosen("defer_embedding_wgrad_compute", False),
                "wgrad_deferral_limit": chosen("wgrad_deferral_limit", -1),
                "overlap_moe_expert_parallel_comm": chosen("overlap_moe_expert_parallel_comm", False),
                "delay_wgrad_compute": chosen("delay_wgrad_compute", False),
            }
        )
        # Bridge checks only DDP's use_distributed_optimizer, before it synchronises the settings.
        if not _get(self.ddp, "use_distributed_optimizer", False):
            return
        many = data_parallel > 1
        fields = {
            "bucket_size": chosen("bucket_size", COMM_OVERLAP_BUCKET if many else None),
            "overlap_grad_reduce": chosen("overlap_grad_reduce", many),
            "overlap_param_gather": chosen("overlap_param_gather", many),
            "overlap_param_gather_with_optimizer_step": chosen("overlap_param_gather_with_optimizer_step", False),
        }
        self.optimizer.lay_over(fields)
        self.ddp.lay_over(fields)


def mixed_precision_fields(value: Any) -> dict[str, Any]:
    """The fields that ``config.mixed_precision`` (None, a recipe's name or a MixedPrecisionConfig) sets."""
    if value is None:
        return {}
    if isinstance(value, str):
        return _named_precision(value)
    keys = _words(
        "fp32 fp16 bf16 params_dtype grad_reduce_in_fp32 fp8 fp8_recipe first_last_layers_bf16 "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_wgrad fp8_amax_history_len fp4 "
        "fp8_dot_product_attention fp8_multi_head_attention reuse_grad_buf_for_mxfp8_param_ag"
    )
    fields = {key: getattr(value, key) for key in keys if hasattr(value, key)}
    for name in ("fp8_param", "fp4_param"):
        # MixedPrecisionConfig keeps the two the same; each is a field of another part.
        fields[name] = fields[f"{name}_gather"] = bool(
            getattr(value, name, None) or getattr(value, f"{name}_gather", False)
        )
    return fields


def _named_precision(text: str) -> dict[str, Any]:
    word = text.replace("-", "_")
    word, ends = _OTHER_ENDS.get(word, (word, {}))
    recipes = _RECIPES
    for prefix in ("nemotron_h_", "nanov2_"):
        if word.startswith(prefix):
            word, ends = word.removeprefix(prefix), dict(_ENDS_OF_TWO)
            if prefix == "nanov2_":
                ends["fp8_recipe"] = "blockwise"
    match = re.fullmatch(r"(bf16|fp16)_(\w+)", word)
    if match is None or match.group(2) not in recipes:
        raise SpecError(
            f"mixed_precision ({text[:60]!r}) is not one of Bridge's recipes that are known here; "
            "give a MixedPrecisionConfig"
        )
    half, scheme = match.groups()
    # bf16_mixed reduces gradients in fp32, fp16_mixed does not.
    fields = {
        "fp32": False, "bf16": half == "bf16", "fp16": half == "fp16", "params_dtype": half, "fp8": None,
        # MixedPrecisionConfig's default, also without fp8; OptimizerConfig reads it.
        "fp8_recipe": "tensorwise",
        "fp4": None, "fp4_param": False, "grad_reduce_in_fp32": half == "bf16", "first_last_layers_bf16": False,
        "fp8_param_gather": False, "reuse_grad_buf_for_mxfp8_param_ag": False,
        **recipes[scheme], **ends,
    }  # fmt: skip
    fields["fp8_param"], fields["fp4_param_gather"] = fields["fp8_param_gather"], fields["fp4_param"]
    return fields


# ---------------------------------------------------------------------------------------------------------------
# The groups of a RunSpec
# ---------------------------------------------------------------------------------------------------------------


def _refuse(config: Any, model: Any) -> None:
    """Raise SpecError for options that would make every number meaningless."""
    provider_of(model)
    if _get(getattr(config, "dist", None), "use_torch_fsdp2", False):
        raise SpecError(
            "dist.use_torch_fsdp2 is set; a container is not read as a run of PyTorch FSDP2; estimate its model with "
            "--engine fsdp2, or set it to False for Megatron's DDP or FSDP"
        )


def _data_parallel(config: Any, model: Any, world_size: int | None) -> int:
    if world_size is None:
        return data_parallel_size(config)
    return data_parallel_size(_Holder(model, world_size))


class _Holder:
    """A container with only a model and a world size."""

    def __init__(self, model: Any, world_size: int) -> None:
        self.model = model
        self.world_size = world_size


def _model(config: Any, view: _Views, name: str | None, core: Release | None) -> ModelSpec:
    model = view.model
    if is_diffusion(provider_of(container_part(config, "model"))):
        title = name or getattr(config, "name", None) or type(container_part(config, "model")).__name__
        return wan_model(model, getattr(config, "dataset", None), title)
    vocab, padded = vocabulary(config)
    assumptions = list(getattr(config, "assumptions", ()))
    if _get(model, "vocab_size") is None:
        assumptions.append("the vocabulary is the tokenizer's, padded")
    spec_name, _ = _layer_spec(model)
    provider: Any = model
    kinds = {base.__name__ for base in type(container_part(config, "model")).__mro__}
    heterogeneous = _get(model, "heterogeneous_block_specs") or "HeterogeneousTransformerConfig" in kinds
    if heterogeneous and not _get(model, "per_block_parameters"):
        provider = _finalized(model)
    encoders = encoders_of(container_part(config, "model"))
    assumptions += [f"{describe_encoder(encoder)}, on the first stage" for encoder in encoders]
    found = model_from_transformer_config(
        provider,
        vocab_size=vocab,
        name=name or getattr(config, "name", None) or type(container_part(config, "model")).__name__,
        # An argument of GPTModel; Bridge's providers pass their seq_length.
        max_sequence_length=_get(model, "max_sequence_length") or _get(model, "seq_length", 0),
        make_vocab_size_divisible_by=_get(model, "make_vocab_size_divisible_by", 128) if padded else 0,
        post_layernorms=spec_name in POST_LAYERNORM_SPECS,
        pre_layernorms=spec_name not in NO_PRE_LAYERNORM_SPECS,
        core_attention=CORE_ATTENTION_OF_SPECS.get(spec_name, ""),
        full_qk_layernorm=spec_name in FULL_QK_SPECS,
        dense_mtp=spec_name in DENSE_MTP_SPECS,
        router_in_fp32=spec_name in FP32_ROUTER_SPECS,
        provider=provider_of(container_part(config, "model")),
        megatron_core=core,
        assumptions=tuple(assumptions),
    )
    return replace(found, encoders=encoders) if encoders else found


def _layer_spec(model: Any) -> tuple[str, bool]:
    """(name of the layer spec, whether it is the local implementation).

    The name is that of the function that makes the spec, or of the spec's class; "" if there is none. Gemma 4 without
    experts is always built of local modules.
    """
    if provider_of(getattr(model, "__wrapped__", model)) in GEMMA4_DENSE:
        return "", True
    keys = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec")
    spec = next((found for key in keys if (found := getattr(model, key, None)) is not None), None)
    if spec is None:
        return "", False
    spec = getattr(spec, "func", spec)  # functools.partial
    name = getattr(spec, "__name__", type(spec).__name__)
    return name, name in LOCAL_LAYER_SPECS


def _two_copies_of_queries(model: Any, micro_batch: int) -> int:
    """Bytes of the queries of one layer, in fp32, and of their gradient."""
    heads = _get(model, "num_attention_heads", 1)
    width = _get(model, "kv_channels", _get(model, "hidden_size", 0) // heads)
    return int(2 * 4 * micro_batch * _get(model, "seq_length", 0) * heads * width)


def _unmodelled_layer_spec(model: Any, dataset: Any, micro_batch: int) -> Iterator[Unmodelled]:
    name, _ = _layer_spec(model)
    if name in OTHER_LAYER_SPECS:
        effect, what, order = OTHER_LAYER_SPECS[name]
        most = None
        if name in SCALED_QUERIES_SPECS:
            most = _two_copies_of_queries(model, micro_batch)
        elif name in FP32_ROUTER_SPECS:
            most = 2 * _get(model, "num_layers", 1) * _get(model, "num_moe_experts", 0) * _get(model, "hidden_size", 0)
        yield Unmodelled(f"model.transformer_layer_spec ({name}): {what}", effect, order=order, most=most)
    elif CORE_ATTENTION_OF_SPECS.get(name) == "flex":
        bridge = release_in(getattr(sys.modules.get("megatron.bridge"), "__version__", None)) or DEFAULT_MEGATRON_BRIDGE
        masks = not _get(dataset, "skip_getting_attention_mask_from_dataset", True)
        if bridge < BRIDGE_FLEX_ATTENTION or masks or _get(model, "attention_dropout", 0.0):
            # models/gemma/gemma2_provider.py: Gemma2DotProductAttention
            yield Unmodelled(
                f"model.transformer_layer_spec ({name}): Gemma 2's unfused attention, which keeps the scores of every "
                "head; counted as FlexAttention",
                Effect.UP,
                order="b n s s / t elements of each step that attention makes of the scores, in every layer",
            )
    elif name and name not in PLAIN_LAYER_SPECS | LOCAL_LAYER_SPECS | POST_LAYERNORM_SPECS | FULL_QK_SPECS:
        yield Unmodelled(
            f"model.transformer_layer_spec ({name}): modules that are not known here, counted as those that the "
            "config describes",
            Effect.UNKNOWN,
            order=UNKNOWN_SIZE,
        )


def _finalized(model: Any) -> Any:
    """A copy after ``finalize``, which parses the per-layer sizes of heterogeneous providers."""
    try:
        made = copy.deepcopy(model._part)
        made.finalize()
    except Exception as error:
        raise SpecError(
            f"model.per_block_parameters is not set and finalize() failed ({type(error).__name__}); "
            "call config.model.finalize()"
        ) from None
    return made


def _batch(config: Any, view: _Views, data_parallel: int, num_microbatches: int | None) -> BatchSpec:
    train = getattr(config, "train", None)
    if is_diffusion(provider_of(container_part(config, "model"))):
        return _diffusion_batch(config, view, data_parallel, num_microbatches)
    seq_length = _get(view.model, "seq_length") or _get(getattr(config, "dataset", None), "seq_length")
    if not seq_length:
        raise SpecError("model.seq_length is not set; set it (or dataset.seq_length)")
    data_length = _get(getattr(config, "dataset", None), "seq_length", seq_length)
    if data_length != seq_length:
        raise SpecError(
            f"model.seq_length ({seq_length}) differs from dataset.seq_length ({data_length}); make them equal"
        )
    micro = _get(train, "micro_batch_size")
    if micro is None:
        raise SpecError("train.micro_batch_size is not set; set it")
    total = _get(train, "global_batch_size")
    if num_microbatches is not None:
        total = micro * data_parallel * num_microbatches
    dataset = getattr(config, "dataset", None)
    _, packed = _packing(dataset)
    return BatchSpec(
        seq_length=_pack_size(dataset) or seq_length, micro_batch_size=micro, global_batch_size=total,
        packed_sequences=packed, **_media(container_part(config, "model"), dataset),
    )


def _diffusion_batch(config: Any, view: _Views, data_parallel: int, num_microbatches: int | None) -> BatchSpec:
    """Patches take the place of tokens; the datasets make one pack whatever the micro batch."""
    train = getattr(config, "train", None)
    micro, total = _get(train, "micro_batch_size", 1), _get(train, "global_batch_size")
    if micro != 1:
        raise SpecError(f"train.micro_batch_size ({micro}) is not 1: Wan's datasets make one pack of it; set it to 1")
    if num_microbatches is not None:
        total = data_parallel * num_microbatches
    tokens = patches_of(view.model, getattr(config, "dataset", None))
    return BatchSpec(seq_length=tokens, micro_batch_size=1, global_batch_size=total, packed_sequences=True)


def _media(model: Any, dataset: Any) -> dict[str, Any]:
    """The images of a sample, where the dataset states them (Megatron Bridge ``data/builders/mock_vlm_sft.py``), for a
    model whose encoder is recorded. The processor scales an image to whole merged patches."""
    if not any(encoder.structure is not None and not encoder.structure.audio for encoder in encoders_of(model)):
        return {}
    number, size = _get(dataset, "num_images"), _get(dataset, "image_size")
    found: dict[str, Any] = {}
    found |= videos_of(_get(dataset, "task_encoder"))
    if type(number) is int and number >= 0:
        found["images_per_sample"] = number
    room = images_of_packs(dataset)
    if room:
        found["images_per_sample"] = room
    if isinstance(size, (tuple, list)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        found["image_size"] = f"{size[0]}x{size[1]}"
    return found


def images_of_packs(dataset: Any) -> int:
    """The most images of a pack of Step-3.7's dataset, whose samples have one each: its tokens between two others and
    one of text at least, padded (``models/stepfun/data/flickr8k/{template,packing}.py``); 0: no such dataset."""
    tokens, packs, padded, samples = (
        value if type(value := _get(dataset, name, 0)) is int else 0
        for name in ("image_token_count", "max_packing_seqlen", "seqlen_divisible_by", "sample_count")
    )
    if tokens < 1 or packs < 1:
        return 0
    each = -(-(tokens + 3) // max(1, padded)) * max(1, padded)
    room: int = max(1, packs // each)
    return min(room, samples) if samples > 0 else room


def _parallel(view: _Views, world_size: int) -> ParallelSpec:
    m = view.model
    tp, pp = _get(m, "tensor_model_parallel_size", 1), _get(m, "pipeline_model_parallel_size", 1)
    vpp, layout = _get(m, "virtual_pipeline_model_parallel_size"), _get(m, "pipeline_model_parallel_layout")
    pattern = pattern_of(m)
    if pattern is not None and pattern.splits_pipeline:
        layout = pattern.layout
        vpp = divide(
            len(pattern.segments), pp, "segments of hybrid_layer_pattern", "pipeline_model_parallel_size",
            "split it into a multiple of them with |",
        )
    expert_tp, group = _get(m, "expert_tensor_parallel_size"), _get(m, "microbatch_group_size_per_vp_stage")
    return ParallelSpec(
        world_size=world_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp and vpp > 1 else None,
        context_parallel_size=_get(m, "context_parallel_size", 1),
        expert_model_parallel_size=_get(m, "expert_model_parallel_size", 1),
        # ModelParallelConfig.__post_init__ sets it to TP by default, which None stands for.
        expert_tensor_parallel_size=None if expert_tp == tp else expert_tp,
        sequence_parallel=bool(_get(m, "sequence_parallel", False)) and tp > 1,
        num_layers_in_first_pipeline_stage=_get(m, "num_layers_in_first_pipeline_stage"),
        num_layers_in_last_pipeline_stage=_get(m, "num_layers_in_last_pipeline_stage"),
        account_for_embedding_in_pipeline_split=bool(_get(m, "account_for_embedding_in_pipeline_split", False)),
        account_for_loss_in_pipeline_split=bool(_get(m, "account_for_loss_in_pipeline_split", False)),
        pipeline_model_parallel_layout=layout_string(layout),
        microbatch_group_size_per_vp_stage=None if group == pp else group,
        num_distributed_optimizer_instances=_get(view.ddp, "num_distributed_optimizer_instances", 1),
    )


def _params_dtype(view: _Views) -> str:
    """The dtype of parameters: bf16 or fp16 if set (Float16Module converts the model), else model.params_dtype."""
    m = view.model
    bf16, fp16 = bool(_get(m, "bf16", False)), bool(_get(m, "fp16", False))
    if bf16 and fp16:
        raise SpecError("model.bf16 and model.fp16 are both True; keep one")
    if bf16 or fp16:
        return "bf16" if bf16 else "fp16"
    return dtype_name(_get(m, "params_dtype", "fp32"), "model.params_dtype")


def _precision(view: _Views) -> PrecisionSpec:
    m = view.model
    fp8, recipe = _get(m, "fp8") or None, _get(m, "fp8_recipe", "delayed")
    fp4 = _get(m, "fp4") or None
    ends = 1 if _get(m, "first_last_layers_bf16", False) else 0
    return PrecisionSpec(
        params_dtype=_params_dtype(view),
        fp8=fp8,
        # Without fp8 the recipe has no effect.
        fp8_recipe=str(getattr(recipe, "value", recipe)) if fp8 else "delayed",
        fp8_param=bool(fp8 and (_get(m, "fp8_param", False) or _get(view.ddp, "fp8_param_gather", False))),
        fp8_dot_product_attention=bool(fp8 and _get(m, "fp8_dot_product_attention", False)),
        fp4=fp4,
        fp4_param=bool(fp4 and (_get(m, "fp4_param", False) or _get(view.ddp, "fp4_param_gather", False))),
        num_layers_at_start_in_bf16=_get(m, "num_layers_at_start_in_bf16", 1) * ends,
        num_layers_at_end_in_bf16=_get(m, "num_layers_at_end_in_bf16", 1) * ends,
        fp32_residual_connection=bool(_get(m, "fp32_residual_connection", False)),
        attention_softmax_in_fp32=bool(_get(m, "attention_softmax_in_fp32", True)),
    )


def _transformer_impl(model: Any) -> str:
    if provider_of(getattr(model, "__wrapped__", model)) == FALCON_H1:
        return "transformer_engine"
    return str(_get(model, "transformer_impl", "transformer_engine"))


def _optimizer(config: Any, view: _Views) -> OptimizerSpec:
    o = view.optimizer
    name = str(_get(o, "optimizer", "adam"))
    offload = bool(_get(o, "optimizer_cpu_offload", False))
    recipe = _get(o, "fp8_recipe")
    return OptimizerSpec(
        optimizer=name.removeprefix("dist_"),
        sgd_momentum=_get(o, "sgd_momentum", 0.9),
        clip_grad=_get(o, "clip_grad", 1.0),
        use_precision_aware_optimizer=bool(_get(o, "use_precision_aware_optimizer", False)),
        main_grads_dtype=dtype_name(_get(o, "main_grads_dtype", "fp32"), "optimizer.main_grads_dtype"),
        main_params_dtype=dtype_name(_get(o, "main_params_dtype", "fp32"), "optimizer.main_params_dtype"),
        exp_avg_dtype=dtype_name(_get(o, "exp_avg_dtype", "fp32"), "optimizer.exp_avg_dtype"),
        exp_avg_sq_dtype=dtype_name(_get(o, "exp_avg_sq_dtype", "fp32"), "optimizer.exp_avg_sq_dtype"),
        store_param_remainders=bool(_get(o, "store_param_remainders", True)),
        fp8_recipe=None if recipe is None else str(getattr(recipe, "value", recipe)),
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=float(_get(o, "optimizer_offload_fraction", 0.0)) if offload else 1.0,
        log_params_norm=bool(_get(getattr(config, "logger", None), "log_params_norm", False)),
        use_layer_wise_distributed_optimizer=name.startswith("dist_")
        or bool(_get(o, "use_layer_wise_distributed_optimizer", False)),
    )


def _checkpoint(c: Any, running: Running, *, fsdp: bool, bridge: Release | None) -> CheckpointSpec:
    """``ConfigContainer.checkpoint``. Megatron-FSDP has one format, fsdp_dtensor; Bridge always streams."""
    alike = (
        "dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient", "also_save_hf_checkpoint"
    )
    return CheckpointSpec(
        ckpt_format="torch_dist" if fsdp else str(_get(c, "ckpt_format", "torch_dist")),
        ckpt_fully_parallel_save=bool(_get(c, "fully_parallel_save", True)),
        ckpt_fully_parallel_load=bool(_get(c, "fully_parallel_load", False)),
        # Without the persistent process it is switched off (``arguments.py: validate_args``).
        async_save=bool(_get(c, "async_save", False) and _get(c, "use_persistent_ckpt_worker", True)),
        stream_ckpt_dequant=bridge is not None or bool(_get(c, "stream_ckpt_dequant", True)),
        load_optim=bool(_get(c, "load_optim", True)) and not _get(c, "finetune", False),
        save_optim=bool(_get(c, "save_optim", True)),
        adopt_optim_states=bridge is not None and bridge >= BRIDGE_ADOPTS_OPTIM_STATES and ADOPTED_BESIDE_CORE(running),
        **{name: bool(_get(c, name, False)) for name in alike},
    )


def _data_parallel_spec(config: Any, view: _Views, running: Running) -> DataParallelSpec:
    d = view.ddp
    wide = bool(_get(d, "grad_reduce_in_fp32", False))
    fsdp = view.fsdp
    if fsdp and FSDP_MAIN_DTYPES(running):
        wide = _dtype_or_none(d, "megatron_fsdp_main_grads_dtype") == "fp32"
    return DataParallelSpec(
        engine="megatron_fsdp" if fsdp else "megatron_ddp",
        use_distributed_optimizer=view.distributed,
        grad_reduce_in_fp32=wide or _params_dtype(view) == "fp32",
        overlap_grad_reduce=bool(_get(d, "overlap_grad_reduce", False)),
        overlap_param_gather=bool(_get(d, "overlap_param_gather", False)),
        bucket_size=_get(d, "bucket_size"),
        data_parallel_sharding_strategy=_get(d, "data_parallel_sharding_strategy", "no_shard") if fsdp else None,
        suggested_communication_unit_size=_get(d, "suggested_communication_unit_size") if fsdp else None,
        grad_comm_dtype=_dtype_or_none(d, "megatron_fsdp_grad_comm_dtype") if fsdp else None,
        **_double_buffer(d, fsdp),
    )


def _double_buffer(ddp: Any, fsdp: bool) -> dict[str, bool]:
    """``param_and_grad_buffer.py: ParamAndGradBuffer.__init__``: nccl_ub implies double buffering."""
    if not fsdp or not (_get(ddp, "fsdp_double_buffer", False) or _get(ddp, "nccl_ub", False)):
        return {}
    names = ("fsdp_db_use_persist_buf_on_alloc_fail", "megatron_fsdp_max_pool_double_buffer")
    return {"fsdp_double_buffer": True, **{name: bool(_get(ddp, name, False)) for name in names}}


def _dtype_or_none(ddp: Any, name: str) -> str | None:
    value = _get(ddp, name)
    return None if value is None else dtype_name(value, f"ddp.{name}")


def _peft(peft: Any, model: Any) -> PeftSpec:
    """``ConfigContainer.peft``. With any scheme the base model is frozen; only LoRA's adapters are counted. Without
    one, ``freeze_language_model`` may freeze all but the encoders."""
    if peft is None:
        return PeftSpec(scheme="frozen") if language_model_frozen(model) else PeftSpec()
    fields: dict[str, Any] = {}
    if type(peft).__name__ in ("LoRA", "VLMLoRA"):
        fields["dim"] = int(_get(peft, "dim", 32))
        if _get(peft, "target_modules"):
            fields["target_modules"] = tuple(peft.target_modules)
    return PeftSpec(scheme="lora", **fields)


#: Modules of selective recomputation in newer releases that are not modelled -> what they recompute.
_RECOMPUTED_ELSEWHERE = {
    "gdn_norm_out": "the gated norm of gated delta nets (megatron-core 0.19), counted as kept",
}


def _modules(m: Any) -> Sequence[Any] | None:
    found = _get(m, "recompute_modules")
    if found is None or isinstance(found, list | tuple):
        return found
    raise SpecError(f"model.recompute_modules ({shown(found)}) is no list; give one of names, such as [core_attn]")


def _recompute(view: _Views) -> RecomputeSpec:
    m = view.model
    granularity, modules = _get(m, "recompute_granularity"), _modules(m)
    if _get(m, "moe_layer_recompute", False):  # deprecated; TransformerConfig.__post_init__ makes it selective
        granularity = granularity or "selective"
        modules = [*(("core_attn",) if modules is None else modules), "moe"]
    if granularity is None:
        return RecomputeSpec()
    modules = None if modules is None else [name for name in modules if name not in _RECOMPUTED_ELSEWHERE]
    layers, method = _get(m, "recompute_num_layers"), _get(m, "recompute_method")
    if granularity == "full" and method == "block" and layers == 0:
        return RecomputeSpec()
    return RecomputeSpec(
        granularity=granularity,
        method=method,
        num_layers=layers if granularity == "full" else None,
        modules=("core_attn",) if modules is None else tuple(dict.fromkeys(modules)),
        distribute_saved_activations=bool(_get(m, "distribute_saved_activations", False)),
    )


def _implementation(
    config: Any,
    view: _Views,
    gpu_arch: str,
    running: Running,
) -> ImplementationSpec:
    m = view.model
    _, local = _layer_spec(m)
    on: dict[str, Any] = {
        key: bool(_get(m, key, False))
        for key in _words(
            "gradient_accumulation_fusion masked_softmax_fusion bias_activation_fusion bias_dropout_fusion "
            "apply_rope_fusion cross_entropy_loss_fusion calculate_per_token_loss "
            "deterministic_mode defer_embedding_wgrad_compute delay_wgrad_compute apply_query_key_layer_scaling "
            "use_transformer_engine_op_fuser use_legacy_models use_fused_weighted_squared_relu "
            "moe_grouped_gemm moe_permute_fusion moe_router_fusion "
            "moe_pad_expert_input_to_capacity moe_shared_expert_overlap moe_apply_probs_on_input "
            "overlap_moe_expert_parallel_comm moe_paged_stash tp_comm_overlap"
        )
    }
    if _get(m, "position_embedding_type", "rope") in ("yarn", "mrope"):
        on["apply_rope_fusion"] = False  # ``utils/fusions.py: validate_rope_fusion_compatibility``
    dispatcher = str(_get(m, "moe_token_dispatcher_type", "allgather"))
    if _get(m, "moe_enable_deepep", False):
        dispatcher = "flex"
    comm = _get(m, "cp_comm_type", "p2p")
    backend = _get(m, "attention_backend", "auto")
    return ImplementationSpec(
        # Falcon-H1's layers always use Transformer Engine's modules.
        transformer_impl="local" if local else _transformer_impl(m),
        megatron_core=running.megatron_core,
        transformer_engine=running.transformer_engine,
        torch=running.torch,
        attention_backend=str(getattr(backend, "name", backend)).rsplit(".", 1)[-1],
        cross_entropy_fusion_impl=str(_get(m, "cross_entropy_fusion_impl", "native")),
        distillation=distillation_of(container_part(config, "model")),
        create_attention_mask=not _get(
            getattr(config, "dataset", None), "skip_getting_attention_mask_from_dataset", True
        ),
        cp_comm_type=_CP_COMM_TYPES.get(comm := str(comm if isinstance(comm, str) else [*comm, "p2p"][0]), comm),
        cuda_graph_impl=_cuda_graphs(m),
        cuda_graph_modules=_graphed_modules(m),
        # ModelParallelConfig's default is off; an object without the field counts as on.
        deallocate_pipeline_outputs=bool(_get(m, "deallocate_pipeline_outputs", True)),
        moe_token_dispatcher_type="alltoall" if dispatcher == "alltoall_seq" else dispatcher,
        moe_flex_dispatcher_backend=str(_get(m, "moe_flex_dispatcher_backend", "deepep")),
        # TransformerConfig.__post_init__ falls back to the backend-specific fields.
        moe_flex_dispatcher_num_sms=_get(
            m, "moe_flex_dispatcher_num_sms", _get(m, "moe_deepep_num_sms", _get(m, "moe_hybridep_num_sms"))
        ),
        moe_router_dtype=_router_dtype(m),
        moe_expert_capacity_factor=_get(m, "moe_expert_capacity_factor"),
        moe_expert_rank_capacity_factor=_get(m, "moe_expert_rank_capacity_factor"),
        # Its sign chooses between the average and the actual number of tokens.
        moe_paged_stash_buffer_size_factor_cuda=abs(_get(m, "moe_paged_stash_buffer_size_factor_cuda", 1.1)),
        moe_mlp_glu_interleave_size=_get(m, "moe_mlp_glu_interleave_size"),
        moe_z_loss_coeff=_get(m, "moe_z_loss_coeff"),
        moe_router_padding_for_quantization=bool(
            _get(m, "moe_router_padding_for_quantization", False) or _get(m, "moe_router_padding_for_fp8", False)
        ),
        wgrad_deferral_limit=max(0, _get(m, "wgrad_deferral_limit", 0)),
        cpu_offloading_num_layers=_get(m, "cpu_offloading_num_layers", 0) if _get(m, "cpu_offloading") else 0,
        offload_modules=tuple(_get(m, "offload_modules", ()))
        if _get(m, "fine_grained_activation_offloading", False)
        else (),
        min_offloaded_tensor_size=_get(m, "min_offloaded_tensor_size", 1 << 20),
        gpu_arch=gpu_arch,
        **on,
    )


#: Sparse attention's spelling -> the usual one (``dsa_layout.py: normalize_cp_comm_type``).
_CP_COMM_TYPES = {"allgather": "all_gather"}


def _cuda_graphs(model: Any) -> str:
    if _get(model, "enable_cuda_graph", False):
        return "local"
    if _get(model, "external_cuda_graph", False):
        return "transformer_engine"
    return str(_get(model, "cuda_graph_impl", "none"))


def _graphed_modules(model: Any) -> tuple[str, ...]:
    """The modules that CUDA graphs cover; () without graphs, or for whole layers.

    ``TransformerConfig`` holds a list or a comma-separated string of names or enum members. "full", and names that are
    no module of a layer, mean whole layers (``cuda_graph_config.py: normalize_cuda_graph_modules``). The older field
    takes precedence if set.
    """
    if _cuda_graphs(model) == "none":
        return ()
    keys = _words("cuda_graph_scope cuda_graph_scope_deprecated cuda_graph_modules")
    given: Any = next((found for key in keys if (found := _get(model, key))), ())
    items = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    names = [str(getattr(item, "name", item)).rpartition(".")[2].strip() for item in items]
    return tuple(dict.fromkeys(name for name in names if name in GRAPHED_MODULES))


def _router_dtype(model: Any) -> str | None:
    """The router's dtype. Only the strings "fp32" and "fp64" have an effect, torch.float32 has none
    (``moe/router.py: Router.gating``)."""
    value = _get(model, "moe_router_dtype")
    return value if isinstance(value, str) and value in ("fp32", "fp64") else None


def _environment(config: Any, gpu_arch: str, running: Running) -> dict[str, Any]:
    """Fields of ImplementationSpec that the container's ``env_vars`` determine. The process's environment takes
    precedence (``apply_environment_variables``)."""
    named = _get(config, "env_vars", {})
    env = {key: os.environ.get(key, str(value)) for key, value in named.items()}
    if not env:
        return {}
    fields, _ = implementation_of(env, gpu_arch, running)
    return fields


def _pack_size(dataset: Any) -> int:
    """Tokens of a full pack of a dataset that is packed before training; 0: it is not."""
    # Fields of Bridge 0.6, then those of earlier releases.
    specs = _get(dataset, "offline_packing_specs") if _get(dataset, "enable_offline_packing", False) else None
    specs = specs or _get(dataset, "packed_sequence_specs")
    size = getattr(specs, "packed_sequence_size", 0) or _get(dataset, "max_packing_seqlen", 0)
    return max(0, size) if isinstance(size, int) else 0


def _packing(dataset: Any) -> tuple[bool, bool]:
    """(whether the sequences of a micro batch are packed into one row, whether that or packed offline)."""
    in_batch = bool(_get(dataset, "enable_in_batch_packing", False) or _get(dataset, "pack_sequences_in_batch", False))
    return in_batch, in_batch or _pack_size(dataset) > 0


def _assumptions(config: Any) -> tuple[str, ...]:
    """Assumptions about what the container leaves open."""
    out = []
    dataset, model = getattr(config, "dataset", None), container_part(config, "model")
    in_batch, packed = _packing(dataset)
    if in_batch:  # which makes packs of varying length (``variable_seq_lengths``)
        out.append("dataset.enable_in_batch_packing: every sequence of a pack is taken to have seq_length tokens")
    packs, length = _pack_size(dataset), _get(model, "seq_length")
    if packs not in (0, length):  # ``data/batch_utils.py: prepare_finetuning_batch`` takes their length
        out.append(f"dataset: a microbatch has the {packs} tokens of a pack, not the {length} of model.seq_length")
    if not packed and getattr(dataset, "pad_to_max_length", None) is False and not (
        _get(model, "pipeline_model_parallel_size", 1) > 1 or _get(model, "expert_model_parallel_size", 1) > 1
    ):
        out.append("dataset.pad_to_max_length is off: every micro batch is taken to have a sequence of seq_length")
    if any(one.structure is not None and one.structure.kind == "moonvit" for one in encoders_of(model)):
        # models/kimi_vl/modeling_kimi_k25_vl.py: _configure_kimi_vision_attention
        out.append("model.vision_config: MoonViT attends with flash-attn; without it Bridge runs eager attention")
    if _get(model, "moe_router_dtype") is not None and _router_dtype(model) is None:
        out.append(
            f"model.moe_router_dtype ({str(model.moe_router_dtype)[:20]}) is neither fp32 nor fp64: megatron-core "
            "routes in the dtype of the parameters"
        )
    return tuple(out)


def _on_machine(spec: ImplementationSpec, found: Mapping[str, Any]) -> ImplementationSpec:
    """``spec`` with the fields ``found`` on the machine; an attention_backend that the container sets is kept."""
    named = spec.attention_backend != "auto"
    return replace(spec, **{key: found[key] for key in found if key != "attention_backend" or not named})


def _not_modelled(config: Any, view: _Views) -> tuple[str, ...]:
    """The run's unmodelled features; each sentence begins with its field."""
    model = container_part(config, "model")
    parts = {part: getattr(config, part, None) for part in PARTS}
    parts |= {"model": view.model, "optimizer": view.optimizer, "ddp": view.ddp}
    micro = _get(getattr(config, "train", None), "micro_batch_size", 1)
    out = [
        *not_modelled(parts), *unmodelled_encoders(model),
        *_unmodelled_layer_spec(view.model, parts["dataset"], micro),
    ]
    if any(encoder.structure is not None for encoder in encoders_of(model)):  # counted where features are put in
        out = [one for one in out if not one.startswith("model.scatter_embedding_sequence_parallel:")]
    if _get(model, "freeze_language_model", False) and not language_model_frozen(model):
        out.append(
            Unmodelled(
                "model.freeze_language_model: the language model is counted as if it trained", Effect.DOWN,
                order="gradients, optimizer state and part of the activations: all but the weights",
            )
        )
    if _get(model, "freeze_mtp_model", False):
        out.append(
            Unmodelled(
                "model.freeze_mtp_model: the MTP depths are counted as if they trained", Effect.DOWN,
                order="gradients and optimizer state of the MTP depths",
            )
        )
    for name in _modules(model) or ():
        if name in _RECOMPUTED_ELSEWHERE:
            out.append(
                Unmodelled(
                    f"model.recompute_modules ({name}): {_RECOMPUTED_ELSEWHERE[name]}", Effect.DOWN,
                    order="as large as what these modules save, in every layer",
                )
            )
    peft = getattr(config, "peft", None)
    if peft is not None and type(peft).__name__ not in ("LoRA", "VLMLoRA"):
        out.append(
            Unmodelled(
                f"peft: {type(peft).__name__}, of which only the frozen weights are counted", Effect.UP,
                order=ADAPTERS,
            )
        )
    return tuple(out)


def _imported(package: str) -> Release | None:
    """The release of a package if this process has imported it; never imports it."""
    return release_in(getattr(sys.modules.get(package), "__version__", None))
