"""One layer, composed of its blocks, and the blocks before and after the layers.

Source: megatron-core ``transformer/transformer_layer.py: TransformerLayer.forward``, ``ssm/mamba_layer.py``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.attention import record_attention
from bridge_memory.inventory.megatron.compressed_attention import record_compressed_attention
from bridge_memory.inventory.megatron.embedding import learned_positions, record_embedding
from bridge_memory.inventory.megatron.gemma4 import record_gemma4_layer, record_layer_embeddings
from bridge_memory.inventory.megatron.hyper_connections import contract, join, through_streams
from bridge_memory.inventory.megatron.mla import record_mla
from bridge_memory.inventory.megatron.mlp import record_mlp
from bridge_memory.inventory.megatron.moe import record_moe
from bridge_memory.inventory.megatron.mtp import record_mtp_inputs, record_next_embedding
from bridge_memory.inventory.megatron.output import record_final_norm, record_output
from bridge_memory.inventory.megatron.side_by_side import record_side_by_side
from bridge_memory.inventory.megatron.ssm import record_gated_delta_net, record_mamba
from bridge_memory.inventory.megatron.wan import record_wan_head, record_wan_inputs, record_wan_layer
from bridge_memory.inventory.torch import blocks as torch_layers
from bridge_memory.releases import MTP_MODEL_LAYER
from bridge_memory.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SideBySideSpec,
)
from bridge_memory.tapes.blocks import Block, block
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def layer_block(layer: LayerSpec, ctx: BlockContext, *, reached: bool = True) -> Block:
    """Parameters and cost of one decoder layer. Names are relative to ``decoder.layers.<i>.``.

    ``reached``: its input has a gradient, which it does not if everything before it is frozen.
    """
    if ctx.torch_layers is not None:
        return torch_layers.layer_block(layer, ctx, reached=reached)

    def record(r: Recorder) -> None:
        r.without_gradients = r.ctx.recomputes_fully
        r.discards_streams = r.ctx.residual_streams > 1 and r.ctx.recomputes("mhc")
        r.tape.part = Part.LAYER_INPUT
        x = r.tape.input("hidden_states", r.ctx.hidden_bytes, requires_grad=reached)
        r.tape.output(_record_layer(r, layer, x))
        r.tape.keep_alive(x)

    return block(ctx, ("layer", layer, reached), record)


def mtp_block(
    layer: LayerSpec, ctx: BlockContext, positions: int | None = 0, *, waits: bool = False
) -> Block:
    """One MTP depth without its output layer. Names are relative to ``mtp.layers.<i>.``.

    ``positions`` and ``waits`` as for ``mtp.record_next_embedding``.
    """

    # Depths are built and run in fp8 contexts only (``multi_token_prediction.py: _proj_and_transformer_layer``).
    layer = replace(layer, unquantized=ctx.fp8_recipe == "nvfp4")

    def record(r: Recorder) -> None:
        r.tape.part = Part.MTP
        r.unquantized = layer.unquantized or r.unquantized
        x = r.tape.input("hidden_states", r.ctx.hidden_bytes)
        embedded = record_next_embedding(r, positions, waits=waits)
        cut_off = r.ctx.mtp_without_gradients
        with r.tape.checkpoint("MTP depth", () if cut_off else (x, embedded), enabled=r.ctx.mtp_recomputed):
            streams = r.ctx.residual_streams > 1
            with r.delays("weight gradients"):
                joined = join(r, x, embedded) if streams else record_mtp_inputs(r, x, embedded)
                with r.within("mtp_model_layer." if MTP_MODEL_LAYER(r.ctx.impl) else "transformer_layer."):
                    y = _record_layer(r, layer, joined)
            r.tape.keep_alive(joined)  # a variable of ``_proj_and_transformer_layer`` until the layer has returned
            y = contract(r, "", y) if streams else y
            out = r.norm("final_layernorm", y, r.ctx.hidden_size, r.ctx.tokens_sp)
        if cut_off:
            out.grad_bytes = 0
        r.tape.output(out)
        r.tape.keep_alive(x)

    return block(ctx, ("MTP", layer, positions, waits), record)


def embedding_block(model: ModelSpec, ctx: BlockContext) -> Block:
    """Token and position embeddings."""
    if ctx.torch_layers is not None:
        return torch_layers.embedding_block(model, ctx)
    if ctx.diffusion is not None:
        return block(ctx, ("diffusion inputs", ctx.diffusion), partial(record_wan_inputs, spec=ctx.diffusion))
    positions, norm = learned_positions(model), model.embedding_layernorm
    rows, width = model.per_layer_vocab_size, model.layers[0].all_layers_width if model.layers else 0

    def record(r: Recorder) -> None:
        r.tape.part = Part.EMBEDDING
        embedded = record_embedding(r, positions, norm, scaled=bool(rows))
        if rows:
            r.tape.output(record_layer_embeddings(r, width, len(model.layers), rows, embedded))

    return block(ctx, ("embedding", positions, norm, rows, width, len(model.layers) if rows else 0), record)


def final_norm_block(name: str, ctx: BlockContext) -> Block:
    """The norm after the last decoder layer."""
    if ctx.torch_layers is not None:
        return torch_layers.final_norm_block(ctx)

    def record(r: Recorder) -> None:
        r.tape.part = Part.FINAL_NORM
        record_final_norm(r, name)

    return block(ctx, ("final norm", name), record)


def output_block(
    output_bias: bool, own_weight: bool, ctx: BlockContext, input_counted: bool = False, softcapped: bool = False,
    distilled: bool = False,
) -> Block:
    """Output layer and loss; ``own_weight``, ``input_counted``, ``softcapped`` and ``distilled`` as in
    ``output.record_output``."""
    if ctx.torch_layers is not None:
        return torch_layers.output_block(output_bias, own_weight, ctx)
    if ctx.diffusion is not None:
        return block(ctx, ("diffusion head", ctx.diffusion), partial(record_wan_head, spec=ctx.diffusion))

    def record(r: Recorder) -> None:
        r.tape.part = Part.LOSS
        record_output(
            r, output_bias=output_bias, own_weight=own_weight, input_counted=input_counted, softcapped=softcapped,
            distilled=distilled,
        )

    return block(ctx, ("output", output_bias, own_weight, input_counted, softcapped, distilled), record)


_PARTS: dict[type, Part] = {
    AttentionSpec: Part.ATTENTION,
    CompressedAttentionSpec: Part.COMPRESSED_ATTENTION,
    MLASpec: Part.MLA,
    MambaSpec: Part.MAMBA,
    GatedDeltaNetSpec: Part.GATED_DELTA_NET,
    MLPSpec: Part.MLP,
    MoESpec: Part.MOE,
}


def _record_layer(r: Recorder, layer: LayerSpec, x: Tensor) -> Tensor:
    with r.delays("weight gradients"):
        return record_parts(r, layer, x)


def record_parts(r: Recorder, layer: LayerSpec, x: Tensor) -> Tensor:
    """The mixer and the feed-forward block of a layer, each with its norm and its residual."""
    mixer, ffn = layer.mixer, layer.ffn
    r.unquantized = layer.unquantized
    if layer.arrangement == "wan":
        return record_wan_layer(r, layer, x)
    if layer.arrangement != "megatron":
        return record_gemma4_layer(r, layer, x)
    if isinstance(mixer, SideBySideSpec):
        assert ffn is None or isinstance(ffn, MLPSpec)
        return record_side_by_side(r, mixer, ffn, x)
    if isinstance(mixer, CompressedAttentionSpec):
        return _record_streams(r, mixer, ffn, x)
    if mixer is not None:
        biased = False
        _begin(r, mixer)
        if isinstance(mixer, AttentionSpec):
            y, name = record_attention(r, mixer, x, normed=not layer.pre_layernorms), "self_attn_bda"
            biased = mixer.add_output_bias
        elif isinstance(mixer, MLASpec):
            y, name = record_mla(r, mixer, x), "self_attn_bda"
            biased = mixer.add_output_bias
        elif isinstance(mixer, MambaSpec):
            y, name = record_mamba(r, mixer, x), "mamba_bda"
        else:
            assert isinstance(mixer, GatedDeltaNetSpec)
            y, name = record_gated_delta_net(r, mixer, x), "self_attn_bda"
        if layer.post_layernorms:
            y = r.norm("self_attention.linear_proj.post_layernorm", y, r.ctx.hidden_size, r.ctx.tokens_sp)
        residual = x
        x = r.bias_dropout_add(name, y, residual, bias=biased)
        r.tape.keep_alive(residual)
    if ffn is not None:
        _begin(r, ffn)
        if isinstance(ffn, MLPSpec):
            y, biased = record_mlp(r, ffn, x, normed=not layer.pre_layernorms), ffn.add_bias
        else:
            y, biased = record_moe(r, ffn, x), False
        if layer.post_layernorms:
            y = r.norm("mlp.linear_fc2.post_layernorm", y, r.ctx.hidden_size, r.ctx.tokens_sp)
        residual = x
        x = r.bias_dropout_add("mlp_bda", y, residual, bias=biased)
        r.tape.keep_alive(residual)
    return x


def _begin(r: Recorder, block: object) -> None:
    """What follows is part of this block; in an encoder all is the encoder's."""
    if r.tape.part is not Part.ENCODER:
        r.tape.part = _PARTS[type(block)]


def _record_streams(r: Recorder, mixer: CompressedAttentionSpec, ffn: FeedForward | None, x: Tensor) -> Tensor:
    """A layer of DeepSeek-V4: hyper-connections around both blocks."""

    def attention(one: Tensor) -> Tensor:
        r.tape.part = Part.COMPRESSED_ATTENTION
        return record_compressed_attention(r, mixer, one)

    def feed_forward(one: Tensor) -> Tensor:
        assert ffn is not None
        r.tape.part = _PARTS[type(ffn)]
        return record_mlp(r, ffn, one) if isinstance(ffn, MLPSpec) else record_moe(r, ffn, one)

    r.tape.part = Part.HYPER_CONNECTIONS
    x = through_streams(r, "self_attention_hyper_connection", x, attention)
    return through_streams(r, "mlp_hyper_connection", x, feed_forward) if ffn is not None else x
