"""Megatron-LM's arguments with a model that is given separately (``--model``) and overrides their architecture.

A script that trains from a checkpoint may omit the architecture (``--use-checkpoint-args``); and naming a model is an
easy way to try another one with the same script. Sizes that both give must agree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridge_memory.readers.megatron_args.parsing import RawArguments, Value
from bridge_memory.spec import LayerSpec, ModelSpec, RunSpec, SpecError, show
from bridge_memory.spec.model import AttentionSpec, MLASpec, MLPSpec, MoESpec

#: Arguments of the architecture (``arguments.py: _add_network_size_args``, ``_add_moe_args``, ``_add_mla_args``,
#: ``_add_tokenizer_args``), which the model replaces. Dropout and load balancing are not among them.
_OF_THE_MODEL = frozenset({
    "add_bias_linear", "add_qkv_bias", "decoder_num_layers", "disable_bias_linear", "encoder_num_layers",
    "ffn_hidden_size", "group_query_attention", "hidden_size", "kv_channels", "kv_lora_rank",
    "max_position_embeddings", "merge_file", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_enable_expert_bias",
    "moe_router_group_topk", "moe_router_num_groups", "moe_router_score_function", "moe_router_topk",
    "moe_shared_expert_gate", "moe_shared_expert_intermediate_size", "mtp_num_layers", "multi_latent_attention",
    "normalization", "num_attention_heads", "num_experts", "num_layers", "num_query_groups", "padded_vocab_size",
    "position_embedding_type", "q_lora_rank", "qk_head_dim", "qk_layernorm", "qk_pos_emb_head_dim", "quick_geglu",
    "rotary_base", "rotary_percent", "rotary_scaling_factor", "squared_relu", "swiglu", "tokenizer_model",
    "tokenizer_type", "untie_embeddings_and_output_weights", "use_rope_scaling", "use_rotary_position_embeddings",
    "v_head_dim", "vocab_file", "vocab_size",
})  # fmt: skip
#: Arguments of the architecture that must equal the model's. A vocabulary may be padded, and a script may use fewer
#: positions.
_HAVE_TO_AGREE = frozenset({
    "ffn_hidden_size", "hidden_size", "kv_channels", "moe_ffn_hidden_size", "moe_router_topk",
    "num_attention_heads", "num_experts", "num_layers", "num_query_groups",
})  # fmt: skip


def with_model_sizes(raw: RawArguments, model: ModelSpec) -> RawArguments:
    """``raw`` with its architecture replaced by that of ``model``. Raises SpecError if sizes of both differ."""
    sizes = size_arguments(model)
    if "mtp_num_layers" in raw.values:
        sizes["mtp_num_layers"] = raw.values["mtp_num_layers"]
    for name in sorted(_HAVE_TO_AGREE & sizes.keys()):
        given, size = raw.values.get(name), sizes[name]
        if given is not None and str(given) != str(size):
            option = f"--{name.replace('_', '-')}"
            raise SpecError(
                f"{option} of the Megatron arguments is {show(given)}, that of {model.name} is {size}; drop {option} "
                "or name another model"
            )
    kept = {name: value for name, value in raw.values.items() if name not in _OF_THE_MODEL}
    return replace(raw, values=kept | {name: value for name, value in sizes.items() if value is not False})


def with_model(run: RunSpec, raw: RawArguments, model: ModelSpec) -> RunSpec:
    """``run`` with ``model`` instead of the model read from the arguments of ``with_model_sizes``.

    Dropout, load balancing and, if given, the number of MTP depths stay those of the arguments. Raises SpecError.
    """
    read = {"mtp_num_layers"}
    ignored = sorted(f"--{name.replace('_', '-')}" for name in raw.values if name in _OF_THE_MODEL - read)
    assumptions = list(run.assumptions)
    if ignored:
        names = ", ".join(ignored)
        assumptions.append(f"what is trained is {model.name}; of the Megatron arguments {names} are not read")
    if not {"hidden_dropout", "attention_dropout"} & raw.values.keys():
        assumptions.append(
            f"dropout {run.model.hidden_dropout:g}, Megatron-LM's default (--hidden-dropout, --attention-dropout)"
        )
    balancing = next((x.ffn.router_load_balancing_type for x in run.model.layers if isinstance(x.ffn, MoESpec)), None)

    def balanced(layer: LayerSpec) -> LayerSpec:
        if balancing is None or not isinstance(layer.ffn, MoESpec):
            return layer
        return replace(layer, ffn=replace(layer.ffn, router_load_balancing_type=balancing))

    kinds = {layer: balanced(layer) for layer in {*model.layers, *filter(None, [model.mtp_layer])}}
    depths = raw.values.get("mtp_num_layers", model.mtp_num_layers)
    if not str(depths).isdecimal():
        raise SpecError(f"--mtp-num-layers of the Megatron arguments is {show(depths)}; give a number of 0 or more")
    own = replace(
        model, mtp_num_layers=int(str(depths)),
        hidden_dropout=run.model.hidden_dropout, attention_dropout=run.model.attention_dropout,
        layers=tuple(kinds[layer] for layer in model.layers),
        mtp_layer=None if model.mtp_layer is None else kinds[model.mtp_layer],
    )  # fmt: skip
    return replace(run, model=own, assumptions=tuple(assumptions))


#: For a model without attention: a number of heads that any usual tensor parallel size divides.
_NO_ATTENTION = AttentionSpec(num_attention_heads=1 << 10, num_query_groups=1 << 10, kv_channels=1)


def size_arguments(model: ModelSpec) -> dict[str, Value]:
    """A model's sizes as Megatron-LM's arguments: those that other arguments are checked against."""
    ffns = [layer.ffn for layer in model.layers]
    dense = next((ffn for ffn in ffns if isinstance(ffn, MLPSpec)), None)
    experts = next((ffn for ffn in ffns if isinstance(ffn, MoESpec)), None)
    attention = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionSpec)), None)
    latent = next((layer.mixer for layer in model.layers if isinstance(layer.mixer, MLASpec)), None)
    wide: Any = dense or experts
    heads = (attention or latent or _NO_ATTENTION).num_attention_heads
    learned = model.position_embedding_type == "learned_absolute" and model.max_position_embeddings > 0
    sizes: dict[str, Value] = {
        "num_layers": model.num_layers, "hidden_size": model.hidden_size, "num_attention_heads": heads,
        "max_position_embeddings": model.max_position_embeddings if learned else 1 << 20,
        "vocab_size": model.vocab_size,
        "swiglu": bool(wide and wide.gated and wide.activation == "silu"),
        "disable_bias_linear": not (wide and wide.add_bias), "normalization": model.normalization,
        "position_embedding_type": "learned_absolute" if learned else "rope",
        "untie_embeddings_and_output_weights": not model.share_embeddings_and_output_weights,
        "mtp_num_layers": model.mtp_num_layers,
    }  # fmt: skip
    if dense is not None:
        sizes["ffn_hidden_size"] = dense.ffn_hidden_size
    if attention is not None:
        sizes["kv_channels"] = attention.kv_channels
        if attention.num_query_groups != heads:
            sizes |= {"group_query_attention": True, "num_query_groups": attention.num_query_groups}
    if experts is not None:
        sizes |= {"num_experts": experts.num_experts, "moe_ffn_hidden_size": experts.moe_ffn_hidden_size,
                  "moe_router_topk": experts.topk}  # fmt: skip
    return sizes
