"""What the closed forms read of a container, with Megatron Bridge's defaults for what is not set.

A container is anything with the attributes that Bridge's functions read: a ``ConfigContainer`` or a
``SimpleNamespace`` with ``model``, ``train``, ``optimizer`` and ``data_parallel_size``. Whatever Bridge 0.6.2 answers
is answered; where it fails on a container that was not validated, what ``validate()`` would set is taken, and what
nobody can know is refused.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

from bridge_memory.readers.container_fields import container_part, vocabulary
from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.spec import SpecError, show
from bridge_memory.table2.closed_forms import Activations, Layers, ModelState

_DIVISORS = ("hidden_size", "num_attention_heads", "virtual_pipeline_model_parallel_size")


def model_state(config: Any) -> ModelState:
    """Raises SpecError naming the field that is missing or wrong."""
    model = container_part(config, "model")
    layers = _layers(model)
    hidden = _number(model, "hidden_size")
    heads = _number(model, "num_attention_heads")
    ffn = _ffn(model, hidden)
    shared = _count(model, "moe_shared_expert_intermediate_size", 0)
    latent = getattr(model, "moe_latent_size", None) if layers.moe else None
    kv_channels = getattr(model, "kv_channels", None)
    tp = _size(model, "tensor_model_parallel_size")
    return ModelState(
        layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=getattr(model, "num_query_groups", None) or heads,
        kv_channels=_number(model, "kv_channels") if kv_channels is not None else hidden // heads,
        ffn_hidden_size=ffn,
        projections=3.0 if counts_a_gate(model) else 2.0,
        vocab_size=_padded_vocab_size(config, tp),
        share_embeddings_and_output_weights=bool(getattr(model, "share_embeddings_and_output_weights", False)),
        num_experts=model.num_moe_experts if layers.moe else 0,
        moe_ffn_hidden_size=_count(model, "moe_ffn_hidden_size", ffn) if layers.moe else 0,
        moe_shared_expert_intermediate_size=shared,
        moe_latent_size=latent,
        tp=tp,
        pp=_size(model, "pipeline_model_parallel_size"),
        vpp=getattr(model, "virtual_pipeline_model_parallel_size", None),
        cp=_size(model, "context_parallel_size"),
        ep=_size(model, "expert_model_parallel_size"),
        etp=_size(model, "expert_tensor_parallel_size"),
        data_parallel_size=_size(config, "data_parallel_size"),
        use_distributed_optimizer=bool(
            getattr(getattr(config, "optimizer", None), "use_distributed_optimizer", False)
        ),
        num_layers_in_first_pipeline_stage=_stated(model, "num_layers_in_first_pipeline_stage"),
        num_layers_in_last_pipeline_stage=_stated(model, "num_layers_in_last_pipeline_stage"),
    )


def activations(config: Any) -> Activations:
    """Raises SpecError naming the field that is missing or wrong."""
    model, train = container_part(config, "model"), container_part(config, "train")
    layers = _layers(model)
    hidden = _number(model, "hidden_size")
    ffn = _ffn(model, hidden)
    moe_width = 0
    if layers.moe:
        top_k = _count(model, "moe_router_topk", _count(model, "num_experts_routed_to", 1))
        moe_width = _count(model, "moe_ffn_hidden_size", ffn) * top_k
        moe_width += _count(model, "moe_shared_expert_intermediate_size", 0)
    tp, pp = _size(model, "tensor_model_parallel_size"), _size(model, "pipeline_model_parallel_size")
    vpp = getattr(model, "virtual_pipeline_model_parallel_size", None)
    dataset = getattr(config, "dataset", None)
    unset = getattr(model, "seq_length", None) is None and getattr(dataset, "seq_length", None) is not None
    return Activations(
        layers=layers,
        seq_length=_number(dataset if unset else model, "seq_length"),
        micro_batch_size=_number(train, "micro_batch_size", part="train"),
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        moe_width=moe_width,
        vocab_size=_padded_vocab_size(config, tp) if pp == 1 else None,
        tp=tp,
        pp=pp,
        vpp=None if vpp is None else _number(model, "virtual_pipeline_model_parallel_size"),
        cp=_size(model, "context_parallel_size"),
    )


def activations_are_reported(config: Any) -> bool:
    """Bridge's report has activations only where its formula holds: sequence parallel, selective recomputation."""
    model = container_part(config, "model")
    selective = getattr(model, "recompute_granularity", None) == "selective"
    return bool(getattr(model, "sequence_parallel", False)) and selective


def is_mimo(config: Any) -> bool:
    """Bridge's MIMO provider is no TransformerConfig. Told by name: Bridge may be absent."""
    return any(cls.__name__ == "MegatronMIMOProvider" for cls in type(getattr(config, "model", None)).__mro__)


def counts_a_gate(model: Any) -> bool:
    """Bridge's rule: gated_linear_unit, and the activation is torch's silu (compared by name: torch may be absent)."""
    function = getattr(model, "activation_func", None)
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return bool(getattr(model, "gated_linear_unit", False)) and name in ("silu", "swiglu")


def _layers(model: Any) -> Layers:
    count = _size(model, "num_layers")
    kinds: tuple[bool, ...] = (False,) * count
    if (getattr(model, "num_moe_experts", None) or 0) > 0:
        frequency = getattr(model, "moe_layer_freq", 1)
        if isinstance(frequency, list | tuple) and len(frequency) == count:
            kinds = tuple(bool(kind) for kind in frequency)
        else:
            number = int(frequency) if isinstance(frequency, bool) else frequency
            kinds = layer_pattern(number, count, "model.moe_layer_freq")
    return Layers(kinds, max(0, getattr(model, "mtp_num_layers", None) or 0))


def _padded_vocab_size(config: Any, tp: int) -> float:
    """Bridge ``_get_vocab_size``: padded unless ``should_pad_vocab`` says no."""
    model = container_part(config, "model")
    vocab, pads = getattr(model, "vocab_size", None), getattr(model, "should_pad_vocab", True)
    if vocab is None:
        vocab, pads = vocabulary(config)
    else:
        vocab = _number(model, "vocab_size")
    if not pads:
        return vocab
    by = getattr(model, "make_vocab_size_divisible_by", None)
    multiple = (128 if by is None else by) * tp
    if vocab <= 0 or multiple <= 0:
        fields = f"model.vocab_size ({show(vocab)}) or make_vocab_size_divisible_by ({show(by)})"
        raise SpecError(f"{fields} is not positive")
    return int(-(-vocab // multiple) * multiple)


def _ffn(model: Any, hidden: Any) -> Any:
    return 4 * hidden if getattr(model, "ffn_hidden_size", None) is None else _number(model, "ffn_hidden_size")


def _stated(model: Any, name: str) -> int | None:
    return None if getattr(model, name, None) is None else _size(model, name)


def _number(holder: Any, name: str, *, part: str = "model") -> Any:
    """A number that Bridge calculates with as it is. Raises SpecError where it is 0 and Bridge divides by it."""
    value = getattr(holder, name, None)
    if value is None:
        raise SpecError(f"{part}.{name} is not set; set it")
    if not isinstance(value, Real) or (value == 0 and name in _DIVISORS):
        raise SpecError(f"{part}.{name} ({show(value)}) is not a positive whole number; set it to one")
    return value


def _size(holder: Any, name: str) -> int:
    """A whole number of at least 1, and 1 where it is not set."""
    value = getattr(holder, name, None)
    return 1 if value is None else _whole(value, name, 1)


def _count(holder: Any, name: str, default: Any) -> Any:
    """A whole number of at least 0, and ``default`` as it is where it is not set."""
    value = getattr(holder, name, None)
    return default if value is None else _whole(value, name, 0)


def _whole(value: Any, name: str, least: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise SpecError(f"{name} ({show(value)}) is not a whole number of at least {least}; set it to one")
    return number
