"""One entry of the layer stack, put together from its blocks; costs are cached by layer kind and context.

Source: megatron-core ``transformer/transformer_layer.py: TransformerLayer.forward``, ``ssm/mamba_layer.py``.
"""

from __future__ import annotations

from functools import lru_cache

from bridge_memory.inventory.attention import record_attention
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.embedding import record_embedding
from bridge_memory.inventory.mla import record_mla
from bridge_memory.inventory.mlp import record_mlp
from bridge_memory.inventory.moe import record_moe
from bridge_memory.inventory.mtp import depth_is_recomputed, record_mtp_inputs, record_next_embedding
from bridge_memory.inventory.output import record_final_norm, record_output
from bridge_memory.inventory.recorder import BlockInventory, Recorder
from bridge_memory.inventory.ssm import record_gated_delta_net, record_mamba
from bridge_memory.inventory.tape import T
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
)


@lru_cache(maxsize=8192)
def layer_inventory(layer: LayerSpec, ctx: BlockContext) -> BlockInventory:
    """Parameters and cost of one decoder layer. Names are relative to ``decoder.layers.<i>.``."""
    r = Recorder(ctx)
    r.tape.module = "layer input"
    x = r.tape.input("hidden_states", ctx.hidden_bytes)
    r.tape.output(_record_layer(r, layer, x))
    r.tape.touch(x)
    return r.inventory()


@lru_cache(maxsize=1024)
def mtp_inventory(layer: LayerSpec, ctx: BlockContext) -> BlockInventory:
    """One MTP depth without its output layer. Names are relative to ``mtp.layers.<i>.``."""
    r = Recorder(ctx)
    r.tape.module = "MTP projection"
    x = r.tape.input("hidden_states", ctx.hidden_bytes)
    embedded = record_next_embedding(r)
    with r.tape.checkpoint("MTP depth", (x, embedded), enabled=depth_is_recomputed(ctx)):
        joined = record_mtp_inputs(r, x, embedded)
        first = len(r.parameters)
        y = _record_layer(r, layer, joined)
        r.tape.touch(joined)  # a variable of ``_proj_and_transformer_layer`` until the layer has returned
        r.parameters[first:] = [p.under("transformer_layer.") for p in r.parameters[first:]]
        out = r.norm("final_layernorm", y, ctx.hidden_size, ctx.tokens_sp)
    r.tape.output(out)
    r.tape.touch(x)
    return r.inventory()


@lru_cache(maxsize=1024)
def embedding_inventory(model: ModelSpec, ctx: BlockContext) -> BlockInventory:
    """Token and position embeddings."""
    r = Recorder(ctx)
    r.tape.module = "embedding"
    record_embedding(r, model)
    return r.inventory()


@lru_cache(maxsize=1024)
def final_norm_inventory(name: str, ctx: BlockContext) -> BlockInventory:
    """The norm after the last decoder layer."""
    r = Recorder(ctx)
    r.tape.module = "final norm"
    record_final_norm(r, name)
    return r.inventory()


@lru_cache(maxsize=1024)
def output_inventory(
    output_bias: bool, own_weight: bool, ctx: BlockContext, input_counted: bool = False
) -> BlockInventory:
    """Output layer and loss; ``own_weight`` and ``input_counted`` as in ``output.record_output``."""
    r = Recorder(ctx)
    r.tape.module = "logits and loss"
    record_output(r, output_bias=output_bias, own_weight=own_weight, input_counted=input_counted)
    return r.inventory()


_MODULES: dict[type, str] = {
    AttentionSpec: "attention",
    MLASpec: "attention (MLA)",
    MambaSpec: "Mamba mixer",
    GatedDeltaNetSpec: "gated delta net",
    MLPSpec: "MLP",
    MoESpec: "MoE",
}


def _record_layer(r: Recorder, layer: LayerSpec, x: T) -> T:
    mixer, ffn = layer.mixer, layer.ffn
    if mixer is not None:
        biased = False
        r.tape.module = _MODULES[type(mixer)]
        if isinstance(mixer, AttentionSpec):
            y, name = record_attention(r, mixer, x), "self_attn_bda"
            biased = mixer.add_output_bias
        elif isinstance(mixer, MLASpec):
            y, name = record_mla(r, mixer, x), "self_attn_bda"
        elif isinstance(mixer, MambaSpec):
            y, name = record_mamba(r, mixer, x), "mamba_bda"
        else:
            assert isinstance(mixer, GatedDeltaNetSpec)
            y, name = record_gated_delta_net(r, mixer, x), "self_attn_bda"
        if layer.post_layernorms:
            y = r.norm("self_attention.linear_proj.post_layernorm", y, r.ctx.hidden_size, r.ctx.tokens_sp)
        residual = x
        x = r.bias_dropout_add(name, y, residual, bias=biased)
        r.tape.touch(residual)
    if ffn is not None:
        r.tape.module = _MODULES[type(ffn)]
        if isinstance(ffn, MLPSpec):
            y, biased = record_mlp(r, ffn, x), ffn.add_bias
        else:
            y, biased = record_moe(r, ffn, x), False
        if layer.post_layernorms:
            y = r.norm("mlp.linear_fc2.post_layernorm", y, r.ctx.hidden_size, r.ctx.tokens_sp)
        residual = x
        x = r.bias_dropout_add("mlp_bda", y, residual, bias=biased)
        r.tape.touch(residual)
    return x
