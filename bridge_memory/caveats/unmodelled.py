"""Unmodelled features of a run, by name, with bounds where known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bridge_memory.releases import (
    EXPERTS_IN_ONE_PARAMETER,
    FUSED_ADAM_KNOWS_DTENSORS,
    FUSED_ADAM_MAKES_WHOLE_STATES,
    PACKS_EXCHANGED_BY_KERNEL,
    SINKS_IN_PACKED_SEQUENCES,
    SPARSE_ATTENTION_KERNELS,
    core_of,
    release_words,
)
from bridge_memory.spec.adapters import names_layers
from bridge_memory.spec.dtypes import DTYPE_BYTES
from bridge_memory.spec.encoders import recorded
from bridge_memory.spec.graphs import static_masks
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import AttentionSpec, EncoderSpec, GatedDeltaNetSpec, MLASpec, MoESpec
from bridge_memory.spec.parts import ALL_LINEAR
from bridge_memory.spec.run import RunSpec
from bridge_memory.spec.unmodelled import ADAPTERS, ENCODER, Bounds, Effect, Unmodelled
from bridge_memory.workspaces.driver import DISPATCHERS, driver_buffers


class Needs(NamedTuple):
    """Largest bytes needed on any rank, which bound an unmodelled feature; None where not known."""

    #: Forward and backward passes, beyond static memory.
    passes: int | None = None
    #: The backward pass of one layer with its saved tensors.
    layer: int | None = None
    #: What CUDA graphs add on every rank; None for runs without them too.
    graphs: Bounds | None = None


def unmodelled_features(run: RunSpec, needs: Needs | None = None) -> tuple[Unmodelled, ...]:
    """One sentence per unmodelled feature, beginning with the field's name. ``needs``: for bounds."""
    return tuple(_unmodelled(run, needs or Needs()))


def _unmodelled(run: RunSpec, needs: Needs) -> Iterator[Unmodelled]:
    impl, precision, optimizer = run.implementation, run.precision, run.optimizer
    if impl.cuda_graph_impl != "none":
        found = needs.graphs or Bounds(static_masks(run).least, None)
        yield Unmodelled(
            f"cuda_graph_impl ({impl.cuda_graph_impl}): the private memory pools of CUDA graphs", Effect.UP,
            order="static inputs of every graph, up to what forward and backward passes need",
            least=found.least, most=found.most, of_job=True,
        )
    whole = FUSED_ADAM_MAKES_WHOLE_STATES(impl) and not FUSED_ADAM_KNOWS_DTENSORS(impl)
    if whole and impl.te and run.data_parallel.engine == "megatron_fsdp" and optimizer.optimizer == "adam":
        yield Unmodelled(
            "Megatron-FSDP with Transformer Engine 2.10 or 2.11: FusedAdam makes states of whole parameters, on every "
            "rank",
            Effect.UP,
            order="8 bytes a parameter; a step of which may fail",
        )
    flex = impl.moe_token_dispatcher_type == "flex" and run.model.has_experts and not impl.torch_layers
    if flex and not any(found.name in DISPATCHERS for found in driver_buffers(run)):
        # transformer/moe/fused_a2a.py: get_buffer, which ends with an assertion.
        n = run.parallel.ep * run.parallel.etp
        yield Unmodelled(
            f"moe_token_dispatcher_type (flex): the communication buffers of {impl.moe_flex_dispatcher_backend}, which "
            f"has no configuration for a group of {n} ranks",
            Effect.UP,
            order="some hundred MiB up to a few GiB",
            outside=True,
        )
    if impl.moe_apply_probs_on_input:
        yield Unmodelled(
            "moe_apply_probs_on_input: the scaled copy of the tokens", Effect.EITHER,
            order="as large as the dispatched tokens, in every layer")  # fmt: skip
    if run.implementation.torch_layers:
        yield from _of_transformers(run, needs)
    yield from _of_encoders(run)
    if run.teacher is not None:
        yield Unmodelled(
            f"teacher ({run.teacher.model.name}): its forward pass, of which only the logits are counted", Effect.UP,
            order="what one of its layers makes in a pass without gradients; between stages 2 s b h bytes more "
            "for each microbatch in flight",
        )
    yield from _of_engines(run)
    if optimizer.log_params_norm and optimizer.fused_main_parameters:
        # Megatron-LM training/utils.py: calc_params_l2_norm reads fp32 main parameters where megatron-core has them.
        yield Unmodelled(
            "log_params_norm with use_precision_aware_optimizer: fp32 copies of the parameters in steps that log it",
            Effect.UP,
            order="4 bytes for each parameter of the rank",
        )
    if optimizer.paged:
        # bitsandbytes optim/optimizer.py: get_state_buffer, of 100,000 elements on; the driver moves pages to the host
        # where the GPU is full.
        yield Unmodelled(
            "paged: optimizer states are unified memory, outside of torch's allocator, and move to host memory when "
            "the "
            "GPU is full; counted as if all on the GPU",
            Effect.DOWN,
            order="up to all optimizer states",
        )
    if run.peft.scheme == "lora" and not run.peft.trains_adapters:
        yield Unmodelled(
            f"peft ({run.peft.scheme}): activations, which are counted as if every weight trained", Effect.EITHER,
            order="the saved inputs of frozen linears, in every layer",
        )
        yield Unmodelled(
            f"peft ({run.peft.scheme}): adapters, their gradients and optimizer state", Effect.UP, order=ADAPTERS
        )
    if run.peft.trains_adapters and names_layers(run.peft):
        yield Unmodelled(
            "peft.target_modules with the number of a layer: activations, counted as if its adapters were in every "
            "layer",
            Effect.EITHER,
            order="the inputs of the adapters, in the layers that have none",
        )
    if run.batch.packed_sequences:
        yield from _packed(run)
    if impl.cpu_offloading_num_layers and not run.model.hybrid:
        # TE cpu_offload.py: one layer on its way to the host, one ahead of its backward pass on its way back.
        yield Unmodelled(
            "cpu_offloading_num_layers: the two layers in flight between GPU and host", Effect.UP,
            order="up to what two layers save, and the backward pass of one",
            most=None if needs.layer is None else 2 * needs.layer,
        )
    if precision.fp4_param and run.data_parallel.fsdp:
        yield Unmodelled(
            "fp4_param with engine megatron_fsdp: weights are counted in the dtype of the others", Effect.DOWN,
            order="up to 1.4 bytes for each weight of linears")  # fmt: skip
    if precision.quantizes and precision.params_dtype == "fp32":
        # TE module/linear.py: _Linear.forward takes fp32 activations (its bias goes to bf16).
        yield Unmodelled(
            f"{precision.format_words} with params_dtype fp32: what stays in fp32 beside the "
            f"{precision.format_words[:3]} copies",
            Effect.UP,
            order="2 to 4 bytes for each element that linears save",
        )
    limits = limits_of(run.model)
    if limits.mla and not impl.te and not impl.torch_layers:
        # transformer/multi_latent_attention.py: MultiLatentAttention.__init__ hands k_channels to core attention.
        yield Unmodelled(
            "transformer_impl (local) with multi-latent attention: megatron-core builds it with Transformer Engine "
            "only; counted as if local attention took values of another width than keys",
            Effect.UNKNOWN,
            order="as large as what attention saves, the scores among it, in every layer",
        )
    if precision.fp8_dot_product_attention and precision.fp8 and run.parallel.cp > 1:
        yield Unmodelled(
            f"fp8_dot_product_attention with context_parallel_size ({run.parallel.cp}): attention is counted as in "
            f"{precision.params_dtype}, whose queries, keys and values are twice as large (mxfp8: as large)",
            Effect.EITHER,
            order="a byte for each element of queries, keys and values, in every layer",
        )
    yield from _of_sparse_attention(run)
    if impl.deterministic_mode and any(isinstance(m, GatedDeltaNetSpec) for m in limits.mixers):
        # ssm/gated_delta_net.py: torch_chunk_gated_delta_rule, and torch's convolution.
        yield Unmodelled(
            "deterministic_mode with gated delta nets: their rule runs in torch operations in fp32, which save what "
            "its kernel does not; counted as the kernel",
            Effect.UP,
            order="some 100 to 200 bytes for each feature of the values of a token, in every such layer",
        )
    tp = run.parallel.tp
    if limits.full_qk_norm and tp > 1 and run.model.diffusion is None:
        # Megatron Bridge 0.3.1 models/olmoe/olmoe_provider.py: OLMoESelfAttention builds norms of all the heads on
        # every rank and feeds them the rank's own heads, which TE's RMSNorm refuses.
        yield Unmodelled(
            f"q and k norms over all heads with tensor_model_parallel_size ({tp}): Megatron Bridge 0.3.1 runs them on "
            "one rank only; counted as divided over the ranks",
            Effect.UNKNOWN,
            order="a few KiB of weights and t times what q and k norms save, in every layer",
        )


def _of_encoders(run: RunSpec) -> Iterator[Unmodelled]:
    for encoder in run.model.encoders:
        known = encoder.structure is not None and recorded(run.implementation.torch_layers, encoder.structure)
        if run.implementation.torch_layers:
            if run.implementation.own_layers or not known:
                yield Unmodelled(
                    f"{encoder.name}: activations of images and sounds, whose parameters are counted with those of no "
                    "layer", Effect.UP, order=ENCODER,
                )
            elif _adapters_match(run, encoder):
                yield Unmodelled(
                    f"{encoder.name}: what adapters of its linears keep, if they are put there", Effect.UP,
                    order="inputs of the adapted linears and the activations after the first, in every layer of it",
                )
        elif encoder.structure is not None:
            if encoder.structure.kind == "radio" and (run.precision.fp8 or run.precision.fp4):
                yield Unmodelled(  # its config is a copy of the language model's
                    f"{encoder.name}: linears in fp8 or fp4, counted in the dtype of the parameters", Effect.EITHER,
                    order="inputs of its linears and their copies, some 6 elements of its width a patch in every layer",
                )
            if encoder.frozen and run.data_parallel.engine != "megatron_ddp":
                yield Unmodelled(
                    f"{encoder.name}: frozen parameters are counted as if they trained with engine "
                    f"{run.data_parallel.engine}", Effect.DOWN, order="some 16 bytes for each of its frozen parameters",
                )
        elif not _encodes_with_gradients(run, encoder):
            # Its projector keeps its features, no more of them than the sequence has tokens; token embeddings are
            # copied and get the features.
            tokens = run.batch.rows[0] * run.batch.rows[1]
            width = encoder.projector // run.model.hidden_size
            yield Unmodelled(
                f"{encoder.name}: the features of its projector, and token embeddings among which they are put",
                Effect.UP, order="as large as one to four hidden states, on the first stage",
                most=DTYPE_BYTES[run.precision.params_dtype] * tokens * (run.parallel.pp * width + 4
                                                                         * run.model.hidden_size),
            )
        else:
            yield Unmodelled(
                f"{encoder.name}: activations of images and sounds", Effect.UP,
                order="on the first stage; some 17 elements of its width for each patch of a microbatch in every layer "
                "of it, and with torch's attention scores of patches by patches",
            )


#: Linears of transformers' encoders, which targets of adapters that are bare names match too: of those with one
#: projection of queries, keys and values, and of the others.
_JOINED = frozenset({"qkv", "proj", "gate_proj", "up_proj", "down_proj", "all-linear"})
_SEPARATE = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2", "all-linear",
})  # fmt: skip


def _adapters_match(run: RunSpec, encoder: EncoderSpec) -> bool:
    joined = encoder.structure is not None and encoder.structure.kind in ("qwen2_5_vl", "glm4v")
    return run.peft.scheme == "lora" and bool((_JOINED if joined else _SEPARATE) & {*run.peft.target_modules})


def _encodes_with_gradients(run: RunSpec, encoder: EncoderSpec) -> bool:
    """Whether layers of an encoder of unknown structure train. LoRA freezes those of transformers' modules."""
    if run.peft.scheme == "lora" and not encoder.sharded:
        return False
    return not any("encoder".startswith(name) for name in encoder.frozen)


def _of_sparse_attention(run: RunSpec) -> Iterator[Unmodelled]:
    found = [m.sparse for m in limits_of(run.model).mixers if isinstance(m, MLASpec) and m.sparse is not None]
    if not found or run.implementation.torch_layers:
        return
    if any(sparse.kernels not in ("none", "cudnn") for sparse in found):
        yield Unmodelled(
            "dsa_kernel_backend (tilelang): scratch of its kernels, counted as cuDNN's", Effect.EITHER,
            order="up to 2 GiB, and the key's gradient in fp32, of one layer",
        )
    if not SPARSE_ATTENTION_KERNELS(run.implementation):
        yield Unmodelled(
            f"sparse attention with megatron-core {release_words(core_of(run.implementation))}: counted as in "
            f"{SPARSE_ATTENTION_KERNELS.number}",
            Effect.EITHER,
            order="the scores of the indexer and of attention, b n s s / t elements, in every layer",
        )


def _of_engines(run: RunSpec) -> Iterator[Unmodelled]:
    engine = run.data_parallel.engine
    if engine == "fsdp1" and not run.fsdp.limit_all_gathers:
        yield Unmodelled(
            "fsdp_limit_all_gathers (False): units gathered before earlier ones have run", Effect.UP,
            order="the whole weights of the units gathered ahead, up to all of the model's")  # fmt: skip
    if run.deepspeed.zero_hpz_partition_size > 1:
        yield Unmodelled(
            "zero_hpz_partition_size: unsharded weights are counted as if gathered from the primary partition",
            Effect.EITHER, order="as large as the whole weights of one module")  # fmt: skip


def _of_transformers(run: RunSpec, needs: Needs) -> Iterator[Unmodelled]:
    spec = run.transformers
    batch, of_training = spec.eval_micro_batch_size or 0, run.batch.micro_batch_size
    if batch > of_training:
        # trainer.py: evaluation_loop, without gradients: no more than the passes of training would need for that batch.
        # Liger's fused loss makes logits there that it does not in training (``skip_logits``).
        passes = None if spec.liger_kernel or needs.passes is None else needs.passes
        yield Unmodelled(
            f"eval_strategy: evaluation, of {batch} sequences per GPU where training has {of_training}", Effect.UP,
            order="activations of one layer and the logits, of that batch", outside=True, of_job=True,
            most=None if passes is None else -(-passes * (batch - of_training) // of_training),
        )
    if spec.torch_compile and not run.layers_compiled:
        # What it fuses is not kept, and what it recomputes is its partitioner's choice.
        yield Unmodelled(
            "torch_compile: fused operations keep less; counted as they run without it", Effect.DOWN,
            order="up to what its element-wise operations save, in every layer")  # fmt: skip
    if "swiglu" in spec.liger_kernel and run.model.has_experts and EXPERTS_IN_ONE_PARAMETER(spec):
        # liger_kernel/transformers/swiglu.py: LigerExperts.
        yield Unmodelled(
            "liger_kernel (swiglu): its fused experts; counted as transformers' grouped ones", Effect.DOWN,
            order="as large as the experts' activations once, in every layer")  # fmt: skip
    moe = next((layer.ffn for layer in run.model.layers if isinstance(layer.ffn, MoESpec)), None)
    linears = ("w1", "w2", "w3") if run.model.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    targets = {*run.peft.target_modules} & {ALL_LINEAR, *linears} if run.peft.freezes else set()
    if moe is not None and targets and EXPERTS_IN_ONE_PARAMETER(spec):
        # peft 0.21 utils/transformers_weight_conversion.py: _convert_peft_config_moe; tuners/lora/layer.py:
        # ParamWrapper: the weight plus the product of its adapters is one tensor, which grouped products save.
        copy = moe.num_experts * (2 + moe.gated) * run.model.hidden_size * moe.moe_ffn_hidden_size
        copy *= DTYPE_BYTES[run.compute_dtype]
        yield Unmodelled(
            f"target_modules ({', '.join(sorted(targets))}) with transformers 5: adapters of the experts' joined "
            "weights, which peft 0.21 adds to a copy of them; no adapters of experts are counted", Effect.UP,
            order=f"the copy alone {copy / 2**20:,.1f} MiB in every layer with experts, until its backward",
        )
    if spec.load_in_8bit:
        # backends/cuda/ops.py: int8_vectorwise_quant; features over llm_int8_threshold go apart, in the input's dtype.
        yield Unmodelled(
            "load_in_8bit: features with outliers, which are multiplied separately and saved", Effect.UP,
            order="2 bytes for each token and feature with outliers")  # fmt: skip
        if spec.gradient_checkpointing and not spec.reentrant:
            # autograd/_functions.py: MatMul8bitLt.forward keeps ``ctx.tensors``, which no checkpoint takes away.
            yield Unmodelled(
                "load_in_8bit with non-reentrant checkpoints: inputs of its linears stay allocated", Effect.UP,
                order="3 bytes for each element of the linears' inputs, in every layer")  # fmt: skip
    granite = run.model.model_type == "granitemoehybrid"  # products one by one in every release
    if run.model.has_experts and not granite and EXPERTS_IN_ONE_PARAMETER(spec) and run.compute_dtype == "fp32":
        # integrations/moe.py: _can_use_grouped_mm takes bf16 alone.
        yield Unmodelled(
            "experts with parameters in fp32 run one by one in transformers 5; counted as grouped", Effect.EITHER,
            order="as large as the experts' activations once, in every layer")  # fmt: skip
    if spec.mixer_kernels and spec.attention_mask == "padded" and run.model.hybrid:
        # modeling_nemotron_h.py: cuda_kernels_forward runs convolution, scan, norm and projection apart.
        yield Unmodelled(
            "attention_mask (padded) with mixer_kernels: Mamba's convolution, norm and projection run separately; "
            "counted as one kernel", Effect.UP,
                  order="6 bytes for each inner feature of a token, in every Mamba layer")  # fmt: skip
    if spec.attn_implementation == "flash_attention_2" and spec.attention_mask == "padded":
        yield Unmodelled(
            "attention_mask (padded) with flash_attention_2: padding is removed from queries, keys and values; counted "
            "as if there were none",
            Effect.EITHER,
            order="as large as queries, keys and values, in every layer",
        )


def _packed(run: RunSpec) -> Iterator[Unmodelled]:
    """Features that depend on the lengths of the packed sequences, which a run does not specify."""
    impl, limits = run.implementation, limits_of(run.model)
    sparse_alone = not any(
        isinstance(m, AttentionSpec) or (isinstance(m, MLASpec) and m.sparse is None) for m in limits.mixers
    )
    if sparse_alone:
        return
    by_kernel = impl.cp_comm_type == "a2a" and PACKS_EXCHANGED_BY_KERNEL(impl)
    if run.parallel.cp > 1 and impl.cp_comm_type != "p2p" and not by_kernel:
        # TE context_parallel.py: thd_cp_rank_order_to_sequence_order, reorder_seq_chunks_after_a2a_before_attn_thd.
        yield Unmodelled(
            f"packed_sequences with cp_comm_type ({impl.cp_comm_type}) and context_parallel_size ({run.parallel.cp}): "
            "temporaries of attention that reorder the parts of the sequences; counted as for one sequence that is not "
            "packed",
            Effect.EITHER,
            order="as large as keys and values of one layer",
        )
    if impl.attention_kernel == "unfused" or run.precision.params_dtype == "fp32":
        # TE backends.py: UnfusedDotProductAttention.forward, which puts every sequence into a row of the longest.
        yield Unmodelled(
            "packed_sequences with unfused attention: scores of the whole pack are counted", Effect.DOWN,
            order="b n s s / t elements less those of each sequence, in every layer")  # fmt: skip
    elif any(
        isinstance(m, AttentionSpec) and m.learnable_softmax_sink for m in limits.mixers
    ) and not SINKS_IN_PACKED_SEQUENCES(impl):
        # TE dot_product_attention/utils.py: get_attention_backend
        yield Unmodelled(
            "packed_sequences with a learnable softmax sink: Transformer Engine before 2.12 and cuDNN before 9.18 "
            "(torch 2.11 brings 9.19) leave them to unfused attention, whose scores are not counted",
            Effect.UP,
            order="b n s s / t elements of each step that attention makes of the scores, in every layer",
        )
    if any(isinstance(m, GatedDeltaNetSpec) for m in limits.mixers):
        yield Unmodelled(
            "packed_sequences in gated delta net layers: chunks and states of every sequence of a pack",
            Effect.EITHER,
            order="as large as a state and a padded chunk for each sequence of a pack, in every such layer",
        )

