"""The linears of a model, and how tensor parallelism shards the LoRA adapter of each.

Source: Megatron Bridge 0.3.1 to 0.6.2, ``peft/utils.py: get_adapter_attributes_from_linear, ParallelLinearAdapter``.
For a row-parallel base linear, linear_in is row-parallel (LoRA's rank is not split) and linear_out is column-parallel
in its output. For any other base, linear_in is column-parallel in LoRA's rank. Its linear_out is sharded as the base,
and column-parallel in its output if the base is replicated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.spec.errors import divide
from bridge_memory.spec.limits import Limits
from bridge_memory.spec.model import AttentionSpec, CompressedAttentionSpec, MLASpec, ModelSpec
from bridge_memory.spec.parts import ALL_LINEAR, PeftSpec

#: Linears whose input is split over TP (RowParallelLinear).
ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")
#: Linears that are replicated over TP (TELinear with parallel_mode "duplicated"; TopKRouter).
DUPLICATED = ("linear_q_down_proj", "linear_kv_down_proj", "router", "fc1_latent_proj", "fc2_latent_proj")

#: Names of the linears of every family of transformers in ``FAMILIES``.
OF_TRANSFORMERS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate_up_proj", "gate", "shared_expert_gate", "lm_head",
    "c_attn", "c_proj", "c_fc", "in_proj_qkvz", "in_proj_ba", "in_proj", "out_proj", "wg", "router",
    "input_linear", "output_linear", "layer", "fc1_latent_proj", "fc2_latent_proj", "x_proj", "dt_proj", "b_proj",
    "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
)  # fmt: skip


class Linear(NamedTuple):
    """A kind of linear, by its module's name."""

    name: str
    #: Whether it is a linear of routed experts, which ETP shards.
    experts: bool = False
    #: (field name, size) of its output, if the adapter shards the output and the linear itself does not.
    features: tuple[str, int] | None = None


def idle_targets(peft: PeftSpec, model: ModelSpec, limits: Limits, *, torch_layers: bool) -> Iterator[str]:
    """Targets that match no linear of the model. Targets with ``*`` and full names are not checked here."""
    names = set(OF_TRANSFORMERS) if torch_layers else {linear.name for linear in linears_of(model, limits)}
    for target in peft.target_modules:
        if torch_layers and target == ALL_LINEAR:
            continue
        if target not in names and "*" not in target and "." not in target:
            yield target


def split_rank(dim: int, ranks: Any, *, experts: bool) -> Any:
    """LoRA's rank (``dim``) of a column-parallel linear_in, on each of ``ranks`` GPUs. Raises SpecError."""
    return divide(dim, ranks, "peft.dim", _divisor(experts), f"choose a multiple of {ranks}")


def divide_features(name: str, features: Any, ranks: Any, *, experts: bool) -> Any:
    """Output features of a column-parallel linear_out on each of ``ranks`` GPUs. Raises SpecError."""
    return divide(features, ranks, name, _divisor(experts), "choose a divisor: its adapter is divided")


def _divisor(experts: bool) -> str:
    return "expert_tensor_parallel_size" if experts else "tensor_model_parallel_size"


def is_target(peft: PeftSpec, linear: str, module: str) -> bool:
    """Whether ``module``, a full name that ends with the name ``linear``, gets an adapter (``module_matcher.py``)."""
    if ALL_LINEAR in peft.target_modules:
        return linear in OF_TRANSFORMERS and linear != "lm_head"
    return any(_matches(target, linear, module) for target in peft.target_modules)


def in_any_layer(peft: PeftSpec) -> PeftSpec:
    """``peft`` with every layer number in its targets replaced by 0."""
    return replace(peft, target_modules=tuple(_LAYER_NUMBER.sub("0", t) for t in peft.target_modules))


def names_layers(peft: PeftSpec) -> bool:
    """Whether any target contains a layer number."""
    return any(_LAYER_NUMBER.search(target) for target in peft.target_modules)


_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def _matches(target: str, linear: str, module: str) -> bool:
    if target == linear:
        return True
    return re.fullmatch(re.escape(target).replace(r"\*", "(.*)"), module) is not None


def linears_of(model: ModelSpec, limits: Limits) -> Iterator[Linear]:
    """The kinds of linear of ``model`` as megatron-core builds it."""
    hidden = ("hidden_size", model.hidden_size)
    for m in limits.mixers:
        if isinstance(m, AttentionSpec):
            yield Linear("linear_qkv")
            yield Linear("linear_proj", features=hidden)
        elif isinstance(m, CompressedAttentionSpec):
            yield Linear("linear_q_down_proj", features=("q_lora_rank", m.q_lora_rank))
            yield Linear("linear_q_up_proj")
            yield Linear("linear_kv_proj")
            yield Linear("linear_proj", features=hidden)
        elif isinstance(m, MLASpec):
            if m.q_lora_rank is None:
                yield Linear("linear_q_proj")
            else:
                yield Linear("linear_q_down_proj", features=("q_lora_rank", m.q_lora_rank))
                yield Linear("linear_q_up_proj")
            yield Linear(
                "linear_kv_down_proj",
                features=("kv_lora_rank + qk_pos_emb_head_dim", m.kv_lora_rank + m.qk_pos_emb_head_dim),
            )
            yield Linear("linear_kv_up_proj")
            yield Linear("linear_proj", features=hidden)
        else:  # Mamba, gated delta net
            yield Linear("in_proj")
            yield Linear("out_proj", features=hidden)
    if limits.dense or limits.shared_experts:
        yield Linear("linear_fc1")
        yield Linear("linear_fc2", features=hidden)
    for moe in limits.moes:
        yield Linear("router", features=("num_moe_experts", moe.num_experts))
        yield Linear("linear_fc1", experts=True)
        width = ("moe_latent_size", moe.latent_size) if moe.latent_size else hidden
        if moe.latent_size:
            yield Linear("fc1_latent_proj", features=width)
            yield Linear("fc2_latent_proj", features=hidden)
        yield Linear("linear_fc2", experts=True, features=width)
    if model.mtp_num_layers:
        yield Linear("eh_proj")
    if not model.share_embeddings_and_output_weights:
        yield Linear("output_layer")
