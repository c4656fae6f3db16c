"""Parameters of the whole model as Hugging Face counts them: tied weights once, no padding, MTP separately."""

from __future__ import annotations

from dataclasses import replace

from bridge_memory.inventory.layer import embedding_block, final_norm_block, layer_block, mtp_block, output_block
from bridge_memory.inventory.tail import final_norm_name
from bridge_memory.releases import CORE_WITH_PUBLISHED_PARAMETERS
from bridge_memory.spec import BatchSpec, ImplementationSpec, MLASpec, ModelSpec, MoESpec, ParallelSpec, RunSpec
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.transformers import DEFAULT_TRANSFORMERS, FAMILIES, NOT_IN_MEGATRON, TransformersSpec
from bridge_memory.tapes.blocks import Block
from bridge_memory.tapes.context import BlockContext, context_of


def model_parameters(model: ModelSpec) -> tuple[int, int]:
    """(elements of the unsharded model, elements of all MTP depths, which the first does not include).

    The first: embedding, decoder layers, final norm, output layer unless tied; and the router's expert bias if the
    published count includes it (in Megatron it is a buffer). The second: without the embedding and output layer that
    the depths share. Both are cached with the model.
    """
    known = model.parameter_counts
    if known is None:
        ctx = _whole(model)
        known = (_decoder(model, ctx), _mtp(model, ctx))
        model.keep_parameter_counts(known)
    return known


def _numel(block: Block) -> int:
    return block.parameters.numel


def _whole(model: ModelSpec) -> BlockContext:
    """Without sharding and padding of the vocabulary, of a megatron-core that builds what transformers builds."""
    plain = replace(model, make_vocab_size_divisible_by=0)
    length = min(128, plain.max_position_embeddings or 128)
    if model.model_type in NOT_IN_MEGATRON:
        since = TransformersSpec(transformers_version=max(DEFAULT_TRANSFORMERS, FAMILIES[model.model_type].since))
        impl = ImplementationSpec(transformer_impl="transformers")
        return context_of(
            RunSpec(model=plain, batch=BatchSpec(seq_length=length), implementation=impl, transformers=since)
        )
    impl = ImplementationSpec()  # that of most runs, which then need no other traces
    if any(isinstance(mixer, MLASpec) for mixer in limits_of(model).mixers):
        impl = replace(impl, megatron_core=CORE_WITH_PUBLISHED_PARAMETERS)
    batch = BatchSpec(seq_length=length, packed_sequences=model.diffusion is not None)
    return context_of(RunSpec(model=plain, parallel=ParallelSpec(), batch=batch, implementation=impl))


def _decoder(model: ModelSpec, ctx: BlockContext) -> int:
    total = _numel(embedding_block(model, ctx))
    for kind, start, beyond in model.layer_runs:
        # transformers' own layers declare the bias where it is a parameter.
        bias = _published_expert_bias(kind.ffn) if ctx.torch_layers is None else 0
        total += (beyond - start) * (_numel(layer_block(kind, ctx)) + bias)
    if model.diffusion is None:
        total += _numel(final_norm_block(final_norm_name(model), ctx))
    untied = not model.share_embeddings_and_output_weights
    return total + _numel(output_block(model.output_bias, untied, ctx))


def _published_expert_bias(ffn: object) -> int:
    counted = isinstance(ffn, MoESpec) and ffn.router_enable_expert_bias and ffn.expert_bias_in_published_count
    return ffn.num_experts if counted and isinstance(ffn, MoESpec) else 0


def _mtp(model: ModelSpec, ctx: BlockContext) -> int:
    if model.mtp_layer is None or not model.mtp_num_layers:
        return 0
    depths = 1 if model.mtp_use_repeated_layer else model.mtp_num_layers
    return depths * _numel(mtp_block(model.mtp_layer, ctx))
