"""Single fields of a run's specs: their types, names and ranges, whatever the rest of the run says.

Each spec object is checked once: a search builds many runs from the same few optimizer and implementation specs.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from bridge_memory.spec import (
    BatchSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    SpecError,
)

#: Larger than any size of a run: a slip of the keyboard or a broken config.
MOST = 2**40
MOST_GPUS = 2**24
#: Where a number that is still far beyond any run is smaller.
_MOST_OF = {"world_size": MOST_GPUS, "seq_length": 2**28, "micro_batch_size": 2**20, "global_batch_size": 2**32}
#: megatron-core releases whose rules are known: read in the sources of 0.12 to 0.16, measured from 0.9 to 0.20.
RELEASES = ((0, 9), (0, 20))


class _Kind(NamedTuple):
    """Fields that share a rule: what their types may be, and what to tell the user to give."""

    names: tuple[str, ...]
    get: Callable[[object], tuple[Any, ...]]
    types: frozenset[type]
    give: str
    #: For each name, the number that is too large.
    mosts: tuple[int, ...]


def _kind(types: tuple[type, ...], give: str, *names: str) -> _Kind:
    # One name more, so that attrgetter returns a tuple even for a single field.
    mosts = tuple(_MOST_OF.get(name, MOST) for name in names)
    return _Kind(names, attrgetter(*names, "__class__"), frozenset(types), give, mosts)


_NONE = type(None)
_INT = ((int,), "a positive integer")
_MAYBE_INT = ((int, _NONE), "a positive integer or None")
_COUNT = ((int,), "an integer of 0 or more")
_BOOL = ((bool,), "True or False")
_MAYBE_BOOL = ((bool, _NONE), "True, False or None")
_NAME = ((str,), "a name")
_MAYBE_NAME = ((str, _NONE), "a name or None")
_NUMBER = ((int, float), "a number of 0 or more")

_KINDS: dict[type, tuple[_Kind, ...]] = {
    ParallelSpec: (
        _kind(*_INT, "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
              "context_parallel_size", "expert_model_parallel_size", "num_distributed_optimizer_instances"),
        _kind(*_MAYBE_INT, "virtual_pipeline_model_parallel_size", "expert_tensor_parallel_size",
              "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
              "microbatch_group_size_per_vp_stage"),
        _kind(*_BOOL, "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        _kind(*_MAYBE_BOOL, "sequence_parallel"),
        _kind((str, _NONE), "a string such as 'Et*3|(tt|)*29,m|L' (layout_string makes it of the list form)",
              "pipeline_model_parallel_layout"),
    ),
    BatchSpec: (
        _kind(*_INT, "seq_length", "micro_batch_size"),
        _kind(*_MAYBE_INT, "global_batch_size"),
    ),
    PrecisionSpec: (
        _kind(*_NAME, "params_dtype", "fp8_recipe"),
        _kind(*_MAYBE_NAME, "fp8"),
        _kind(*_BOOL, "fp8_param", "fp32_residual_connection", "attention_softmax_in_fp32"),
        _kind(*_COUNT, "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    ),
    OptimizerSpec: (
        _kind(*_NAME, "optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
              "peft"),
        _kind(*_MAYBE_NAME, "data_parallel_sharding_strategy"),
        _kind(*_BOOL, "use_distributed_optimizer", "grad_reduce_in_fp32", "overlap_grad_reduce",
              "overlap_param_gather", "use_precision_aware_optimizer", "store_param_remainders",
              "optimizer_cpu_offload", "fused_optimizer"),
        _kind(*_MAYBE_INT, "ddp_bucket_size"),
        _kind(*_NUMBER, "sgd_momentum", "optimizer_offload_fraction", "clip_grad"),
        _kind(*_COUNT, "lora_dim"),
        _kind((tuple,), "a tuple of names", "lora_target_modules"),
    ),
    RecomputeSpec: (
        _kind(*_MAYBE_NAME, "granularity", "method"),
        _kind(*_MAYBE_INT, "num_layers"),
        _kind((tuple,), "a tuple of names", "modules"),
        _kind(*_BOOL, "distribute_saved_activations"),
    ),
    ImplementationSpec: (
        _kind(*_NAME, "transformer_impl", "attention_backend", "cross_entropy_fusion_impl", "cp_comm_type",
              "cuda_graph_impl", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "gpu_arch"),
        _kind(*_MAYBE_NAME, "moe_router_dtype"),
        _kind(*_BOOL, "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion",
              "bias_dropout_fusion", "apply_rope_fusion", "persist_layer_norm", "cross_entropy_loss_fusion",
              "create_attention_mask", "calculate_per_token_loss", "deterministic_mode",
              "defer_embedding_wgrad_compute", "delay_wgrad_compute", "moe_grouped_gemm", "moe_permute_fusion",
              "moe_router_fusion", "moe_pad_expert_input_to_capacity", "moe_shared_expert_overlap",
              "moe_apply_probs_on_input", "overlap_moe_expert_parallel_comm"),
        _kind(*_NUMBER, "moe_imbalance"),
        _kind((int, float, _NONE), "a number of 0 or more, or None", "moe_expert_capacity_factor"),
        _kind(*_COUNT, "cpu_offloading_num_layers"),
        _kind((int, _NONE), "a number of bytes or None", "cublas_workspace_bytes"),
        _kind((tuple,), "a release as (major, minor)", "megatron_core"),
        _kind((tuple,), "a tuple of names", "offload_modules"),
    ),
}  # fmt: skip

_STATE_DTYPES = ("fp32", "fp16", "bf16", "fp8")
#: Known names, None apart.
_CHOICES: dict[type, dict[str, tuple[str, ...]]] = {
    PrecisionSpec: {
        "params_dtype": ("bf16", "fp16", "fp32"),
        "fp8": ("hybrid", "e4m3"),
        "fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),
    },
    OptimizerSpec: {
        "optimizer": ("adam", "sgd", "muon"),
        # OptimizerConfig's own words for each.
        "main_grads_dtype": ("fp32", "bf16"),
        "main_params_dtype": ("fp32", "fp16"),
        "exp_avg_dtype": _STATE_DTYPES,
        "exp_avg_sq_dtype": _STATE_DTYPES,
        "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
        "peft": ("none", "lora"),
    },
    RecomputeSpec: {
        "granularity": ("full", "selective"),
        "method": ("uniform", "block"),
        "modules": ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    },
    ImplementationSpec: {
        "transformer_impl": ("transformer_engine", "local"),
        "attention_backend": ("auto", "flash", "fused", "unfused", "local"),
        "cross_entropy_fusion_impl": ("native", "te", "linear"),
        "cp_comm_type": ("p2p", "a2a", "all_gather", "a2a+p2p"),
        "cuda_graph_impl": ("none", "local", "transformer_engine", "full_iteration"),
        "moe_token_dispatcher_type": ("alltoall", "allgather", "flex", "alltoall_seq"),
        "moe_flex_dispatcher_backend": ("deepep", "hybridep"),
        "moe_router_dtype": ("fp32", "fp64"),
        "gpu_arch": ("ampere", "hopper", "blackwell"),
        # TransformerConfig.__post_init__, fine_grained_activation_offloading.
        "offload_modules": (
            "core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear",
        ),
    },
}  # fmt: skip

_checked: dict[int, object] = {}


def check_fields(spec: object) -> None:
    """Raise SpecError for a field of the wrong type, an unknown name or a number out of its range."""
    if _checked.get(id(spec)) is spec:
        return
    for names, get, types, give, mosts in _KINDS[type(spec)]:
        values = get(spec)[:-1]
        if not types.issuperset(map(type, values)):
            wrong = next(n for n, value in zip(names, values, strict=True) if type(value) not in types)
            raise SpecError(f"{_named(spec, wrong)} ({show(getattr(spec, wrong))}) is not {give}; give {give}")
        if int in types:
            lowest = 1 if give.startswith("a positive") else 0
            for name, value, most in zip(names, values, mosts, strict=True):
                if value is not None and not lowest <= value < most:
                    raise out_of_range(_named(spec, name), value, lowest, most)
    for name, known in _CHOICES.get(type(spec), {}).items():
        value = getattr(spec, name)
        for one in value if type(value) is tuple else (value,):
            if one is not None and one not in known:
                raise SpecError(f"{_named(spec, name)} ({show(one)}) is unknown; use one of {', '.join(known)}")
    if type(spec) is OptimizerSpec:
        check_fraction("optimizer_offload_fraction", spec.optimizer_offload_fraction, below_one=False)
        check_fraction("sgd_momentum", spec.sgd_momentum, below_one=True)
    elif type(spec) is ImplementationSpec:
        _check_numbers(spec)
    if len(_checked) > 1000:
        _checked.clear()
    _checked[id(spec)] = spec


def _check_numbers(i: ImplementationSpec) -> None:
    if len(i.megatron_core) != 2 or any(type(n) is not int for n in i.megatron_core):
        raise SpecError(f"megatron_core ({show(i.megatron_core)}) is not a release; give one such as (0, 16)")
    if i.moe_imbalance < 1:
        raise SpecError(
            f"moe_imbalance ({i.moe_imbalance}) is below 1; give the most loaded rank's tokens over the balanced number"
        )
    if i.moe_expert_capacity_factor == 0:
        raise SpecError("moe_expert_capacity_factor (0) drops every token; give a positive number, or None")


def _named(spec: object, name: str) -> str:
    """Megatron's name of a field."""
    return f"recompute_{name}" if type(spec) is RecomputeSpec and not name.startswith("dist") else name


def check_ints(owner: object, *names: str) -> None:
    """Raise SpecError unless every named field is an int of 1 or more; True is not 1."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int:
            raise SpecError(f"{name} ({show(value)}) is not an integer; give a positive integer")
        if not 1 <= value < MOST:
            raise out_of_range(name, value, 1)


def check_fraction(name: str, value: object, *, below_one: bool) -> None:
    """Raise SpecError unless ``value`` is a number in [0, 1], or [0, 1)."""
    if not (type(value) in (int, float) and 0 <= value <= 1 and not (below_one and value == 1)):  # type: ignore[operator]
        raise SpecError(f"{name} ({show(value)}) is not in [0, 1{')' if below_one else ']'}; give a fraction")


def out_of_range(name: str, value: float, lowest: int, most: int = MOST) -> SpecError:
    if value >= most:
        return SpecError(f"{name} ({value:.3e}) is absurdly large; give a number below 2**{most.bit_length() - 1}")
    return SpecError(f"{name} ({value}) is below {lowest}; give {lowest} or more")


def release_words(release: tuple[int, int]) -> str:
    """A release as people write it: "0.16"."""
    return f"{release[0]}.{release[1]}"


def nearest_known(release: tuple[int, int]) -> tuple[int, int]:
    """``release`` itself where its rules are known, else the end of the known range that is nearer."""
    return min(max(release, RELEASES[0]), RELEASES[1])


def known_releases() -> str:
    """The range of megatron-core releases whose rules are known: "0.9 to 0.20"."""
    return " to ".join(map(release_words, RELEASES))


def show(value: object) -> str:
    """A user's value, short and on one line."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
