"""The blocks of a model as transformers builds it: embedding, decoder layer, final norm, output layer and loss."""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.blocks import Block, block
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.parameters import Use
from bridge_memory.inventory.recorder import Recorder
from bridge_memory.inventory.transformers.attention import Shared, record_attention
from bridge_memory.inventory.transformers.loss import record_output
from bridge_memory.inventory.transformers.mlp import record_mlp
from bridge_memory.inventory.transformers.norms import norm
from bridge_memory.inventory.transformers.ops import Array, Torch
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec

#: Prefix of a decoder layer's names.
LAYER_PREFIX = "model.layers.{}."


def embedding_block(model: ModelSpec, ctx: BlockContext) -> Block:
    """Token embeddings, and what the model makes once for all layers: rotary tables, the mask."""
    rotary = model.rotary_dim if model.position_embedding_type == "rope" else 0

    def record(r: Recorder) -> None:
        r.tape.part = Part.EMBEDDING
        t = Torch(r)
        v, h, tokens = r.ctx.padded_vocab, r.ctx.hidden_size, r.ctx.tokens
        r.parameter("model.embed_tokens.weight", (v, h), use=Use.EMBEDDING)
        ids = t.input("token ids", tokens, 8, grad=False, counted=False)
        x = t.make(
            "input embeddings", (ids,), tokens * h, t.parameter_width, trains=True, saves=(ids.tensor,),
            backward_workspace=v * h * t.parameter_width,
        )
        if rotary:
            for name in ("cos", "sin"):
                table = t.constant(f"rotary table: {name}", r.ctx.seq * rotary, t.parameter_width)
                # Layers keep it.
                t.tape.op(f"rotary table: {name}, kept by layers", table.tensor, (), saves=(table.tensor,))
        t.tape.output(x.tensor)

    return block(ctx, ("transformers embedding", rotary), record)


def layer_block(layer: LayerSpec, ctx: BlockContext, *, reached: bool = True) -> Block:
    """One decoder layer. Names are relative to ``LAYER_PREFIX``."""

    def record(r: Recorder) -> None:
        t = Torch(r)
        r.without_gradients = t.hf.spec.gradient_checkpointing
        r.tape.part = Part.LAYER_INPUT
        x = t.input("hidden_states", r.ctx.tokens * r.ctx.hidden_size, r.ctx.residual, grad=reached)
        shared = _shared(t)
        r.tape.output(_record_layer(t, layer, x, shared).tensor)
        t.keep_alive(x)

    return block(ctx, ("transformers layer", layer, reached), record)


def _shared(t: Torch) -> Shared:
    ctx = t.r.ctx
    cos, sin = (
        t.input(f"rotary table: {name}", ctx.seq, t.parameter_width, grad=False, counted=False)
        for name in ("cos", "sin")
    )
    return Shared(cos, sin)


def _record_layer(t: Torch, layer: LayerSpec, x: Array, shared: Shared) -> Array:
    r, ctx = t.r, t.r.ctx
    tokens, h = ctx.tokens, ctx.hidden_size
    mixer, ffn = layer.mixer, layer.ffn
    assert isinstance(mixer, AttentionSpec) and isinstance(ffn, MLPSpec)
    r.tape.part = Part.ATTENTION
    normed = norm(t, "input_layernorm", x, tokens, h)
    y = record_attention(t, mixer, normed, shared)
    t.keep_alive(normed)
    residual = t.add("hidden states after attention", x, y)
    t.keep_alive(y)
    r.tape.part = Part.MLP
    normed = norm(t, "post_attention_layernorm", residual, tokens, h)
    y = record_mlp(t, ffn, normed)
    t.keep_alive(normed)
    out = t.add("hidden states after the MLP", residual, y)
    t.keep_alive(residual, y)
    return out


def final_norm_block(ctx: BlockContext) -> Block:
    """The norm after the last layer."""

    def record(r: Recorder) -> None:
        r.tape.part = Part.FINAL_NORM
        t = Torch(r)
        x = t.input("hidden_states", r.ctx.tokens * r.ctx.hidden_size, r.ctx.residual)
        r.tape.output(norm(t, "model.norm", x, r.ctx.tokens, r.ctx.hidden_size).tensor)
        t.keep_alive(x)

    return block(ctx, ("transformers final norm",), record)


def output_block(output_bias: bool, own_weight: bool, ctx: BlockContext) -> Block:
    """Output layer and loss."""

    def record(r: Recorder) -> None:
        r.tape.part = Part.LOSS
        t = Torch(r)
        x = t.input("normed hidden states", r.ctx.tokens * r.ctx.hidden_size, r.ctx.residual)
        r.tape.output(record_output(t, x, output_bias=output_bias, own_weight=own_weight).tensor)

    return block(ctx, ("transformers output", output_bias, own_weight), record)
