"""Fallback reader for dense decoders whose family has no reader: uses the common Hugging Face field names."""

from __future__ import annotations

from dataclasses import replace

from bridge_memory.readers.families.common import ACTIVATIONS, Family
from bridge_memory.readers.families.dense import dense_model
from bridge_memory.readers.fields import Fields, shown
from bridge_memory.spec import ModelSpec, SpecError

#: Decoders whose attention and MLP run in parallel after one norm: Megatron has no such layer.
_PARALLEL = ("cohere", "cohere2", "falcon", "phi", "gptj", "codegen", "stablelm_alpha")
#: Activations that are gated in every published decoder with these field names.
_GATED = ("silu",)
_DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def read_generic(f: Fields) -> ModelSpec:
    """A dense decoder with attention and MLPs; everything that had to be assumed is in ``assumptions``."""
    architectures = [a for a in f.items("architectures") or () if isinstance(a, str)]
    if f.flag("is_encoder_decoder") or (
        architectures and not any(a.endswith(_DECODER_ENDINGS) for a in architectures)
    ):
        raise f.error(f"model_type {shown(f.model_type)} ({shown(architectures)}) is not a decoder")
    if f.model_type in _PARALLEL:
        raise f.error(f"model_type {shown(f.model_type)} runs attention and MLP in parallel; Megatron cannot")
    f.unknown_class = True
    try:
        return _read(f)
    except SpecError as error:
        raise SpecError(
            f"{error} (model_type {shown(f.model_type)} has no specific reader; read by the usual names)"
        ) from None


def _read(f: Fields) -> ModelSpec:
    norms = {"layer_norm": False, "layernorm": False, "rms_norm": True, "rmsnorm": True}
    kind = f.text("norm_type", default="")
    rms = norms.get(kind.lower(), f.has("rms_norm_eps"))
    if f.config.get("mlp_type") == "default":  # StarCoder 2: fc1, activation, fc2
        f.ignore("mlp_type")
    keys = ("hidden_activation", "hidden_act", "activation_function")
    act = next((f.config[k] for k in keys if f.has(k)), None)
    gated = ACTIVATIONS.get(act) in _GATED if isinstance(act, str) else True
    bias = f.flag("use_bias", "bias", default=False)
    f.assume(
        f"model_type {shown(f.model_type)} has no specific reader: read as a dense decoder with "
        f"{'RMSNorm' if rms else 'LayerNorm'}, {'a gated' if gated else 'an ungated'} MLP"
        f"{', biases on all linears' if bias else ''} and rotary positions"
    )
    if not f.has("tie_word_embeddings"):
        f.assume("tie_word_embeddings is absent: tied, transformers' default")
    family = Family(
        tied=True,
        bias_keys=("attention_bias", "qkv_bias", "use_qkv_bias"),
        qkv_bias=bias,
        mlp_bias=bias,
        gated=gated,
        normalization="RMSNorm" if rms else "LayerNorm",
        window="all",
    )
    return replace(dense_model(f, family), generic=True)
