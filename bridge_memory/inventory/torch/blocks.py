"""The blocks of a model as transformers builds it: embedding, decoder layers, final norm, output layer with loss."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from bridge_memory.components import Part
from bridge_memory.inventory.torch import bloom, gpt2, longcat, nemotron_h
from bridge_memory.inventory.torch.attention import Shared, record_attention
from bridge_memory.inventory.torch.delta_net import record_delta_net
from bridge_memory.inventory.torch.experts import last_saver, record_moe
from bridge_memory.inventory.torch.kimi_delta import record_kimi_delta
from bridge_memory.inventory.torch.loss import record_output
from bridge_memory.inventory.torch.mamba import record_mamba
from bridge_memory.inventory.torch.mamba_1 import record_mamba_1
from bridge_memory.inventory.torch.mla import record_mla
from bridge_memory.inventory.torch.mlp import record_mlp
from bridge_memory.inventory.torch.norms import layer_norm, norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.inventory.torch.short_conv import record_short_conv
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    Mamba1Spec,
    MambaSpec,
    Mixer,
    MLASpec,
    MLPSpec,
    ModelSpec,
    ShortConvSpec,
)
from bridge_memory.tapes.blocks import Block, block
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder


def embedding_block(model: ModelSpec, ctx: BlockContext) -> Block:
    """Token embeddings, and the rotary tables, which the model makes once for all layers."""
    rotary = model.rotary_dim if model.position_embedding_type == "rope" else 0
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0

    heads = {kind.mixer.num_attention_heads for kind in model.layers if isinstance(kind.mixer, AttentionSpec)}
    alibi = max(heads) if model.position_embedding_type == "alibi" else 0
    scaled = bool(scaled_embeddings(model, ctx))

    def record(r: Recorder) -> None:
        r.tape.part = Part.EMBEDDING
        t = Torch(r)
        v, h, tokens = r.ctx.padded_vocab, r.ctx.hidden_size, r.ctx.tokens
        family = t.hf.family
        r.parameter(f"{family.prefix}{family.embedding}.weight", (v, h), use=Use.EMBEDDING)
        ids = t.input("token ids", tokens, 8, grad=False, counted=False)
        x = t.make(
            "input embeddings", (ids,), tokens * h, t.parameter_width, trains=not r.frozen, saves=(ids.tensor,),
            backward_workspace=v * h * t.parameter_width,
        )
        if positions:
            x = _with_positions(t, x, positions)
        if model.embedding_layernorm:
            x = layer_norm(t, f"{family.prefix}{family.embedding}_layernorm", x, tokens, h)
        if scaled:
            x = t.scale("input embeddings, scaled", x)
        # torchtitan's and torchtune's table is a buffer (workspaces/persistent.py: rotary_tables).
        made = int(rotary * family.rotary_share) if family.rotary not in ("complex", "torchtune") else 0
        rows = positions_of(t) * (family.rotary_axes if family.rotary == "gathered" else 1)
        tables = [(name, rows * made // table_share(t)) for name in (_table_names(t) if made else ())]
        if alibi and t.hf.spec.gradient_checkpointing:
            tables.append(("slopes of the positions", tokens * alibi))
        for name, elements in tables:
            table = t.constant(name, elements, table_width(t))
            # Layers save it, or their checkpoints hold it; of what they gather from it they save a copy.
            if family.rotary == "gathered" and not t.hf.spec.gradient_checkpointing:
                continue
            t.tape.op(f"{name}, kept by layers", table.tensor, (), saves=(table.tensor,), trains=True)
        t.tape.output(x.tensor)

    return block(ctx, ("transformers embedding", rotary, positions, alibi, model.embedding_layernorm, scaled), record)


def scaled_embeddings(model: ModelSpec, ctx: BlockContext) -> str:
    """Where the input embeddings are scaled, as in ``Family.scaled_embeddings``."""
    assert ctx.torch_layers is not None
    return "model" if model.scaled_embeddings else ctx.torch_layers.family.scaled_embeddings


def _with_positions(t: Torch, x: Array, positions: int) -> Array:
    """``GPT2Model.forward``: learned position embeddings, which all sequences share, and dropout."""
    ctx = t.r.ctx
    h, trains = ctx.hidden_size, not t.r.frozen
    t.r.parameter(f"{t.hf.family.prefix}wpe.weight", (positions, h), use=Use.EMBEDDING)
    places = t.constant("positions", ctx.seq, 8)
    found = t.make(
        "position embeddings", (places,), ctx.seq * h, t.parameter_width, trains=trains, saves=(places.tensor,),
        backward_workspace=positions * h * t.parameter_width,
    )
    # With adapters and checkpoints the token embeddings become a leaf, which the graph holds (peft ``peft_model.py:
    # _prepare_model_for_gradient_checkpointing``).
    leaf = t.r.frozen and t.hf.spec.gradient_checkpointing
    both = t.make(
        "embeddings of tokens and positions", (x, found), x.elements, x.width, trains=leaf,
        saves=(x.tensor,) if leaf else (),
    )
    out = t.dropout("embedding dropout", both, ctx.hidden_dropout)
    t.keep_alive(x, found, both)
    return out


def _table_names(t: Torch) -> tuple[str, ...]:
    if t.hf.family.rotary == "polar":
        return ("rotary table: cos",)  # complex64, one number for a pair
    names = ("rotary table: cos", "rotary table: sin")
    return (*names, *(f"{name} of sliding layers" for name in names)) if t.hf.family.local_rotary else names


def table_width(t: Torch) -> int:
    return FP32 if t.hf.family.rotary_in_fp32 or t.hf.family.rotary in ("polar", "torchtune") else t.parameter_width


def positions_of(t: Torch) -> Any:
    """Positions of a table: all sequences share them, unless they have axes."""
    return t.r.ctx.tokens if t.hf.family.rotary_axes > 1 else t.r.ctx.seq


def table_share(t: Torch) -> int:
    """2 if tables hold each value once, 1 if they hold it for both halves of a head."""
    return 2 if t.hf.family.rotary == "half tables" else 1


def layer_block(layer: LayerSpec, ctx: BlockContext, *, reached: bool = True) -> Block:
    """One decoder layer. Parameter names are relative to the layer. ``reached``: its input has a gradient."""

    def record(r: Recorder) -> None:
        t = Torch(r)
        r.without_gradients = t.hf.spec.gradient_checkpointing or t.hf.spec.selective_ac_option is not None
        r.tape.part = Part.LAYER_INPUT
        x = t.input("hidden_states", r.ctx.tokens * r.ctx.hidden_size, r.ctx.residual, grad=reached)
        shared = _shared(t)
        # torchtitan recomputes whole layers (``activation_checkpoint.early_stop`` is False), and so does a compiled
        # one.
        whole = t.hf.family.norm == "fused" or t.compiled
        if t.hf.spec.gradient_checkpointing and not t.hf.spec.reentrant and not whole:
            t.last_saver = _last_saver(t, layer)
        r.tape.output(_record_layer(t, layer, x, shared).tensor)
        t.keep_cast_weights()
        t.keep_alive(x)

    return block(ctx, ("transformers layer", layer, reached), record)


def _last_saver(t: Torch, layer: LayerSpec) -> str:
    """The last operation of a layer that saves anything."""
    if t.hf.family.layer == "gpt2":
        return gpt2.last_saver(t)
    if t.hf.family.layer == "bloom":
        return bloom.LAST_SAVER_WITH_DROPOUT if t.r.ctx.hidden_dropout else bloom.LAST_SAVER
    if t.hf.family.layer == "nemotron_h":
        return nemotron_h.last_saver(t, layer)
    if t.hf.family.layer == "longcat_flash":
        return longcat.LAST_SAVER
    last = t.hf.family.norms[-1]
    if not last:
        assert layer.ffn is not None
        if not isinstance(layer.ffn, MLPSpec):
            return last_saver(t, layer.ffn)
        module = t.hf.family.mlp
        down = f"{module}.{t.hf.family.linears[-1]}"
        if t.r.frozen and t.adapts(down):
            dora = t.r.ctx.adapters is not None and t.r.ctx.adapters.use_dora
            return f"{down} LoRA output times magnitudes" if dora else f"{down}.lora_B output"
        # Linears in 4 or 8 bits save nothing through the hooks of a checkpoint.
        return f"{module} product" if t.quantizes(Use.LAYER) else f"{down} output"
    return f"{last} output" if t.hf.family.norm == "llama" else f"{last} times weight in fp32"


def _shared(t: Torch) -> Shared:
    ctx = t.r.ctx
    elements = positions_of(t) * int(ctx.rotary_dim * t.hf.family.rotary_share) // table_share(t)
    if t.hf.family.rotary == "torchtune":
        table = t.input("rotary table", elements, FP32, grad=False, counted=False)
        return Shared(table, table)
    cos, sin = (
        t.input(f"rotary table: {name}", elements, table_width(t), grad=False, counted=False)
        for name in ("cos", "sin")
    )
    return Shared(cos, sin)


def _record_layer(t: Torch, layer: LayerSpec, x: Array, shared: Shared) -> Array:
    """``LlamaDecoderLayer.forward``, with the norms of the family."""
    if t.hf.family.layer == "gpt2":
        return gpt2.record_gpt2_layer(t, layer, x)
    if t.hf.family.layer == "bloom":
        return bloom.record_bloom_layer(t, layer, x)
    if t.hf.family.layer == "nemotron_h":
        return nemotron_h.record_nemotron_layer(t, layer, x)
    if t.hf.family.layer == "longcat_flash":
        return longcat.record_longcat_layer(t, layer, x, shared)
    r = t.r
    mixer, ffn = layer.mixer, layer.ffn
    assert ffn is not None
    before, after, before_ffn, after_ffn = t.hf.family.norms
    r.tape.part = part_of(mixer)
    y = _normed(t, before, x)
    entered = y
    with _checkpointed_submodule(t, "attention", y, *(table for table in shared if table is not None)):
        y = _mixed(t, mixer, y, shared)
    t.keep_alive(entered)
    x = _added(t, "hidden states after attention", x, _normed(t, after, y))
    r.tape.part = Part.MLP if isinstance(ffn, MLPSpec) else Part.MOE
    y = _normed(t, before_ffn, x)
    entered = y
    with _checkpointed_submodule(t, "MLP", y):
        y = record_mlp(t, ffn, y) if isinstance(ffn, MLPSpec) else record_moe(t, ffn, y)
    if t.hf.compiled and y.tensor in r.tape.kept_by_checkpoint:
        r.tape.kept_by_checkpoint.remove(y.tensor)  # as ``chain.py: _with_products_kept`` says
    t.keep_alive(entered, *t.returned)
    return _added(t, "hidden states after the MLP", x, _normed(t, after_ffn, y))


def part_of(mixer: Mixer | None) -> Part:
    """The part of memory that a mixer belongs to."""
    if isinstance(mixer, MLASpec):
        return Part.MLA
    if isinstance(mixer, GatedDeltaNetSpec):
        return Part.GATED_DELTA_NET
    if isinstance(mixer, KimiDeltaSpec):
        return Part.KIMI_DELTA
    if isinstance(mixer, ShortConvSpec):
        return Part.SHORT_CONVOLUTION
    return Part.MAMBA if isinstance(mixer, MambaSpec | Mamba1Spec) else Part.ATTENTION


def _mixed(t: Torch, mixer: Mixer | None, x: Array, shared: Shared) -> Array:
    """[T, h] -> [T, h]."""
    if isinstance(mixer, AttentionSpec):
        return record_attention(t, mixer, x, shared)
    if isinstance(mixer, GatedDeltaNetSpec):
        return record_delta_net(t, mixer, x)
    if isinstance(mixer, KimiDeltaSpec):
        return record_kimi_delta(t, mixer, x)
    if isinstance(mixer, ShortConvSpec):
        return record_short_conv(t, mixer, x)
    if isinstance(mixer, Mamba1Spec):
        return record_mamba_1(t, mixer, x)
    if isinstance(mixer, MambaSpec):
        return record_mamba(t, mixer, x)
    assert isinstance(mixer, MLASpec)
    return record_mla(t, mixer, x, shared)


def _normed(t: Torch, name: str, x: Array) -> Array:
    if not name:
        return x
    with _checkpointed_submodule(t, name, x):
        return norm(t, name, x, t.r.ctx.tokens, t.r.ctx.hidden_size)


def _checkpointed_submodule(t: Torch, name: str, *given: Array) -> AbstractContextManager[None]:
    """A submodule that saves its inputs and is recomputed in backward, if submodules are checkpointed separately."""
    inputs = [array.tensor for array in given]
    return t.tape.checkpoint(name, inputs, enabled=t.hf.spec.checkpoint_submodules)


def _added(t: Torch, name: str, residual: Array, y: Array) -> Array:
    """``residual + dropout(y)``; variables hold both until then."""
    term = t.dropout(f"{name}: dropout", y, t.r.ctx.hidden_dropout)
    if t.hf.family.scaled_residuals:
        term = t.scale(f"{name}: scaled", term)
    out = t.add(name, residual, term)
    t.keep_alive(residual, y)
    return out


def final_norm_block(ctx: BlockContext) -> Block:
    """The norm after the last layer."""

    def record(r: Recorder) -> None:
        r.tape.part = Part.FINAL_NORM
        t = Torch(r)
        t.compiled = t.hf.compiled_whole
        x = t.input("hidden_states", r.ctx.tokens * r.ctx.hidden_size, r.ctx.residual)
        name = f"{t.hf.family.prefix}{t.hf.family.final_norm}"
        r.tape.output(norm(t, name, x, r.ctx.tokens, r.ctx.hidden_size).tensor)
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
