"""What a run asks for that no formula covers, or that megatron-core takes and does nothing with.

Both are listed by name, never dropped in silence: the first under "not modelled", the second among the assumptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from bridge_memory.releases import (
    CUBLAS_WORKSPACES_FREED,
    EXPERTS_FUSED_BY_OPS,
    EXPERTS_IN_ONE_PARAMETER,
    LAYER_WISE_LAYOUT,
    SPARSE_ATTENTION_KERNELS,
    known_releases,
    nearest_known,
    release_words,
)
from bridge_memory.spec.adapters import idle_targets, names_layers
from bridge_memory.spec.driver import DISPATCHERS, driver_buffers
from bridge_memory.spec.engine_options import DEFAULT_DEEPSPEED_OPTIONS, DEFAULT_FSDP_OPTIONS
from bridge_memory.spec.graphs import static_masks
from bridge_memory.spec.layout import Layout
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.model import AttentionSpec, GatedDeltaNetSpec, MambaSpec, MLASpec, ModelSpec
from bridge_memory.spec.parts import ImplementationSpec
from bridge_memory.spec.run import RunSpec
from bridge_memory.spec.transformers import family_of


class Effect(str, Enum):
    """Where something that is not modelled can move the peak."""

    UP = "up"
    DOWN = "down"
    EITHER = "either"
    #: Nobody here knows.
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Gap(str):
    """A sentence that names what is not modelled, and how it can move the peak.

    Lists of what is not modelled are lists of sentences; a sentence that is none of these may move the peak anywhere.

    ``order``: how large it is, in words: its formula, or what is about as large. ``least``, ``most``: bytes, on every
    rank, between which it moves the peak; None where no bound is known. What can only add moves it by 0 at least, what
    can only save by 0 at most. ``outside``: it is not in what torch reports of training steps: memory outside its
    allocator, or of a checkpoint that is saved.
    """

    effect: Effect
    order: str
    least: int | None
    most: int | None
    outside: bool

    def __new__(
        cls,
        sentence: str,
        effect: Effect,
        *,
        order: str,
        least: int | None = None,
        most: int | None = None,
        outside: bool = False,
    ) -> Gap:
        gap = super().__new__(cls, sentence)
        gap.effect = effect
        gap.order = order
        gap.least = 0 if least is None and effect is Effect.UP else least
        gap.most = 0 if most is None and effect is Effect.DOWN else most
        gap.outside = outside
        return gap

    def __getnewargs_ex__(self) -> tuple[tuple[str, Effect], dict[str, str | int | bool | None]]:
        """What a copy is made of."""
        names = ("order", "least", "most", "outside")
        return (str(self), self.effect), {name: getattr(self, name) for name in names}


#: The order of what nobody here knows, or of what is of the user's own making; of what several lists name.
UNKNOWN_SIZE = "nobody here knows how large"
TOWER = "some 18 bytes for each of its parameters that train, 2 for the others, and its activations"
ADAPTERS = "some 18 bytes for each weight of the adapters, and their inputs"


def as_gap(sentence: str) -> Gap:
    """``sentence`` itself where it says how it moves the peak; else a gap of unknown effect."""
    return sentence if isinstance(sentence, Gap) else Gap(sentence, Effect.UNKNOWN, order=UNKNOWN_SIZE)


class Bounds(NamedTuple):
    """Bytes between which a number lies; None where no bound is known."""

    least: int | None
    most: int | None


def bounds(nbytes: int, not_modelled: Iterable[str]) -> Bounds:
    """Between what ``nbytes`` lie once everything that is ``not_modelled`` has moved them; each counts once."""
    least: int | None = nbytes
    most: int | None = nbytes
    for gap in map(as_gap, dict.fromkeys(not_modelled)):
        least = None if least is None or gap.least is None else least + gap.least
        most = None if most is None or gap.most is None else most + gap.most
    return Bounds(None if least is None else max(0, least), most)


class Needs(NamedTuple):
    """The most bytes that something needs on any rank, by which a gap is bounded; None where nobody knows."""

    #: Forward and backward passes, beyond what is there between steps.
    passes: int | None = None
    #: The backward pass of one layer, with what the layer saved.
    layer: int | None = None


def gaps(run: RunSpec, needs: Needs | None = None) -> tuple[Gap, ...]:
    """One sentence a gap, each beginning with the field's name."""
    return tuple(_gaps(run, needs or Needs()))


def _gaps(run: RunSpec, needs: Needs) -> Iterator[Gap]:
    impl, precision, optimizer = run.implementation, run.precision, run.optimizer
    if impl.cuda_graph_impl != "none":
        # A graph's pool is apart from what runs outside of it, static inputs and outputs among it: at most, what the
        # passes need is there twice (TE graph.py: _make_graphed_callables; core transformer/cuda_graphs.py,
        # full_cuda_graph.py). Hidden states are no more than without graphs: an input is the output before it or takes
        # its place, and outputs go when they are copied (_reuse_graph_input_output_buffers, CudagraphBufferMetadata).
        masks = static_masks(run)
        yield Gap(
            f"cuda_graph_impl ({impl.cuda_graph_impl}): the private memory pools of CUDA graphs", Effect.UP,
            order="static inputs of every graph, up to what forward and backward passes need",
            least=masks.least, most=None if needs.passes is None else needs.passes + masks.most,
        )
    flex = impl.moe_token_dispatcher_type == "flex" and run.model.has_experts and not impl.hugging_face
    if flex and not any(found.name in DISPATCHERS for found in driver_buffers(run)):
        # transformer/moe/fused_a2a.py: get_buffer, which ends with an assertion.
        n = run.parallel.ep * run.parallel.etp
        yield Gap(
            f"moe_token_dispatcher_type (flex): the communication buffers of {impl.moe_flex_dispatcher_backend}, which "
            f"has no configuration for a group of {n} ranks",
            Effect.UP,
            order="some hundred MiB up to a few GiB",
            outside=True,
        )
    if impl.moe_apply_probs_on_input:
        yield Gap("moe_apply_probs_on_input: the scaled copy of the tokens", Effect.EITHER,
                  order="as large as the dispatched tokens, in every layer")  # fmt: skip
    if run.implementation.hugging_face:
        yield from _of_transformers(run, needs)
    yield from _of_towers(run)
    if run.teacher is not None:
        yield Gap(
            f"teacher ({run.teacher.model.name}): its forward pass, of which only the logits are counted", Effect.UP,
            order="what one of its layers makes in a pass without gradients; between stages 2 s b h bytes of its own "
            "for each microbatch in flight",
        )
    yield from _of_engines(run)
    if optimizer.log_params_norm and optimizer.fused_main_parameters:
        # Megatron-LM training/utils.py: calc_params_l2_norm reads fp32 main parameters where megatron-core has them.
        yield Gap(
            "log_params_norm with use_precision_aware_optimizer: fp32 copies of the parameters in steps that log it",
            Effect.UP,
            order="4 bytes for each parameter of the rank",
        )
    if optimizer.paged:
        # bitsandbytes optim/optimizer.py: get_state_buffer, of 100,000 elements on; the driver moves pages to the host
        # where the GPU is full.
        yield Gap(
            "paged: optimizer states are unified memory, outside of torch's allocator, and move to the host under "
            "pressure; counted as if all on the GPU",
            Effect.DOWN,
            order="up to all optimizer states",
        )
    if run.peft.freezes and not run.peft.trains_adapters:
        yield Gap(
            f"peft ({run.peft.scheme}): activations, which are counted as if every weight trained", Effect.EITHER,
            order="the saved inputs of frozen linears, in every layer",
        )
        yield Gap(f"peft ({run.peft.scheme}): adapters, their gradients and optimizer state", Effect.UP, order=ADAPTERS)
    if run.peft.trains_adapters and names_layers(run.peft):
        yield Gap(
            "peft.target_modules with the number of a layer: activations, counted as if its adapters were in every "
            "layer",
            Effect.EITHER,
            order="the inputs of the adapters, in the layers that have none",
        )
    if run.batch.packed_sequences:
        yield from _packed(run)
    if impl.cpu_offloading_num_layers and not run.model.hybrid:
        # TE cpu_offload.py: one layer on its way to the host, one ahead of its backward pass on its way back.
        yield Gap(
            "cpu_offloading_num_layers: the two layers in flight between GPU and host", Effect.UP,
            order="up to what two layers save, and the backward pass of one",
            most=None if needs.layer is None else 2 * needs.layer,
        )
    if precision.fp4_param and run.data_parallel.fsdp:
        yield Gap("fp4_param with engine megatron_fsdp: weights are counted in the dtype of the others", Effect.DOWN,
                  order="up to 1.4 bytes for each weight of linears")  # fmt: skip
    if precision.quantizes and precision.params_dtype == "fp32":
        # TE module/linear.py: _Linear.forward takes fp32 activations (its bias goes to bf16).
        yield Gap(
            f"{precision.format_words} with params_dtype fp32: what stays in fp32 beside the "
            f"{precision.format_words[:3]} copies",
            Effect.UP,
            order="2 to 4 bytes for each element that linears save",
        )
    limits = limits_of(run.model)
    if limits.mla and not impl.te and not impl.hugging_face:
        # transformer/multi_latent_attention.py: MultiLatentAttention.__init__ hands k_channels to core attention.
        yield Gap(
            "transformer_impl (local) with multi-latent attention: megatron-core builds it with Transformer Engine "
            "only; counted as if the local attention took values of another width than keys",
            Effect.UNKNOWN,
            order="as large as what attention saves, the scores among it, in every layer",
        )
    if precision.fp8_dot_product_attention and precision.fp8 and run.parallel.cp > 1:
        yield Gap(
            f"fp8_dot_product_attention with context_parallel_size ({run.parallel.cp}): attention is counted as in "
            f"{precision.params_dtype}, whose queries, keys and values are twice as large (mxfp8: as large)",
            Effect.EITHER,
            order="a byte for each element of queries, keys and values, in every layer",
        )
    yield from _of_sparse_attention(run)
    if run.parallel.cp > 1 and any(isinstance(m, GatedDeltaNetSpec) for m in limits.mixers):
        # ssm/gated_delta_net.py: GatedDeltaNet.forward permutes in_proj's output before and after the exchange.
        yield Gap(
            f"context_parallel_size ({run.parallel.cp}) with gated delta nets: copies of the projected tokens on their "
            "way between ranks",
            Effect.UP,
            order="two copies of in_proj's output, of one layer",
        )
    tp = run.parallel.tp
    if limits.full_qk_norm and tp > 1:
        # Megatron Bridge 0.3.1 models/olmoe/olmoe_provider.py: OLMoESelfAttention builds norms of all the heads on
        # every rank and feeds them the rank's own heads, which TE's RMSNorm refuses.
        yield Gap(
            f"q and k norms over all heads with tensor_model_parallel_size ({tp}): Megatron Bridge 0.3.1 runs them on "
            "one rank only; counted as divided over the ranks",
            Effect.UNKNOWN,
            order="a few KiB of weights and t times what q and k norms save, in every layer",
        )


def _of_towers(run: RunSpec) -> Iterator[Gap]:
    for tower in run.model.towers:
        if run.implementation.hugging_face:
            yield Gap(
                f"{tower.name}: {tower.parameters} parameters with their gradients and optimizer state, and "
                "activations", Effect.UP, order=TOWER,
            )
        else:
            yield Gap(
                f"{tower.name}: activations, of images and sounds", Effect.UP,
                order="on the first stage; some 17 elements of its width for each patch of a microbatch in every layer "
                "of it, and with torch's attention scores of patches by patches",
            )


def _of_sparse_attention(run: RunSpec) -> Iterator[Gap]:
    found = [m.sparse for m in limits_of(run.model).mixers if isinstance(m, MLASpec) and m.sparse is not None]
    if not found or run.implementation.hugging_face:
        return
    for kernels in sorted({sparse.kernels for sparse in found if sparse.kernels != "none"}):
        # dsa_cudnn_kernels.py: _TOPK_WRAPPER_MAX_SCRATCH_BYTES, for the choice; FlashMLA's backward sums the key's
        # gradient in fp32.
        like = "" if kernels == "cudnn" else ", counted as cuDNN's"
        yield Gap(
            f"dsa_kernel_backend ({kernels}): scratch of its kernels (up to 2 GiB while keys are chosen){like}",
            Effect.UP,
            order="up to 2 GiB, and the key's gradient in fp32, of one layer",
        )
    if not SPARSE_ATTENTION_KERNELS(run.implementation):
        yield Gap(
            f"sparse attention with megatron-core {release_words(run.implementation.megatron_core)}: counted as in "
            f"{SPARSE_ATTENTION_KERNELS.number}",
            Effect.EITHER,
            order="the scores of the indexer and of attention, b n s s / t elements, in every layer",
        )


def _of_engines(run: RunSpec) -> Iterator[Gap]:
    engine = run.data_parallel.engine
    if engine == "fsdp1" and not run.fsdp.limit_all_gathers:
        yield Gap("fsdp_limit_all_gathers (False): units that are gathered before others have run", Effect.UP,
                  order="the whole weights of the units gathered ahead, up to all of the model's")  # fmt: skip
    if run.deepspeed.zero_hpz_partition_size > 1:
        yield Gap("zero_hpz_partition_size: whole weights are counted as if gathered from the first partition",
                  Effect.EITHER, order="as large as the whole weights of one module")  # fmt: skip


def _of_transformers(run: RunSpec, needs: Needs) -> Iterator[Gap]:
    spec = run.transformers
    batch, of_training = spec.eval_micro_batch_size or 0, run.batch.micro_batch_size
    if batch > of_training:
        # trainer.py: evaluation_loop, without gradients: no more than the passes of training would need for that batch.
        # Liger's fused loss makes logits there that it does not in training (``skip_logits``).
        passes = None if spec.liger_kernel or needs.passes is None else needs.passes
        yield Gap(
            f"eval_strategy: evaluation, of {batch} sequences a GPU where training has {of_training}", Effect.UP,
            order="activations of one layer and the logits, of that batch", outside=True,
            most=None if passes is None else -(-passes * (batch - of_training) // of_training),
        )
    if spec.torch_compile and not run.layers_compiled:
        # What it fuses is not kept, and what it recomputes is its partitioner's choice.
        yield Gap("torch_compile: fused operations keep less; counted as they run without it", Effect.DOWN,
                  order="up to what its element-wise operations save, in every layer")  # fmt: skip
    if "swiglu" in spec.liger_kernel and run.model.has_experts and EXPERTS_IN_ONE_PARAMETER(spec):
        # liger_kernel/transformers/swiglu.py: LigerExperts.
        yield Gap("liger_kernel (swiglu): its fused experts; counted as transformers' grouped ones", Effect.DOWN,
                  order="as large as the experts' activations once, in every layer")  # fmt: skip
    if spec.load_in_8bit:
        # backends/cuda/ops.py: int8_vectorwise_quant; features over llm_int8_threshold go apart, in the input's dtype.
        yield Gap("load_in_8bit: features with outliers, which are multiplied apart and kept", Effect.UP,
                  order="2 bytes for each token and feature with outliers")  # fmt: skip
        if spec.gradient_checkpointing and not spec.reentrant:
            # autograd/_functions.py: MatMul8bitLt.forward keeps ``ctx.tensors``, which no checkpoint takes away.
            yield Gap("load_in_8bit with checkpoints that are not reentrant: inputs of its linears stay", Effect.UP,
                      order="3 bytes for each element of the linears' inputs, in every layer")  # fmt: skip
    if run.model.has_experts and EXPERTS_IN_ONE_PARAMETER(spec) and run.compute_dtype == "fp32":
        # integrations/moe.py: _can_use_grouped_mm takes bf16 alone.
        yield Gap("experts with parameters in fp32: one by one in transformers 5; counted as grouped", Effect.EITHER,
                  order="as large as the experts' activations once, in every layer")  # fmt: skip
    if spec.mixer_kernels and spec.attention_mask == "padded" and run.model.hybrid:
        # modeling_nemotron_h.py: cuda_kernels_forward runs convolution, scan, norm and projection apart.
        yield Gap("attention_mask (padded) with mixer_kernels: Mamba's convolution, norm and projection run apart; "
                  "counted as one kernel", Effect.UP,
                  order="6 bytes for each inner feature of a token, in every Mamba layer")  # fmt: skip
    if spec.attn_implementation == "flash_attention_2" and spec.attention_mask == "padded":
        yield Gap(
            "attention_mask (padded) with flash_attention_2: padding is taken out of queries, keys and values; counted "
            "as if there were none",
            Effect.EITHER,
            order="as large as queries, keys and values, in every layer",
        )


def _packed(run: RunSpec) -> Iterator[Gap]:
    """What depends on how long the sequences of a pack are, which a run does not say."""
    impl, limits = run.implementation, limits_of(run.model)
    sparse_alone = not any(
        isinstance(m, AttentionSpec) or (isinstance(m, MLASpec) and m.sparse is None) for m in limits.mixers
    )
    if sparse_alone:
        return
    if run.parallel.cp > 1 and impl.cp_comm_type != "p2p":
        # TE context_parallel.py: thd_cp_rank_order_to_sequence_order, reorder_seq_chunks_after_a2a_before_attn_thd.
        yield Gap(
            f"packed_sequences with cp_comm_type ({impl.cp_comm_type}) and context_parallel_size ({run.parallel.cp}): "
            "what attention makes in passing to put the sequences' parts in order, counted as for one that is not "
            "packed",
            Effect.EITHER,
            order="as large as keys and values of one layer",
        )
    if impl.attention_kernel == "unfused" or run.precision.params_dtype == "fp32":
        # TE backends.py: UnfusedDotProductAttention.forward, which puts every sequence into a row of the longest.
        yield Gap("packed_sequences with unfused attention: scores of the whole pack are counted", Effect.DOWN,
                  order="b n s s / t elements less those of each sequence, in every layer")  # fmt: skip
    elif any(isinstance(m, AttentionSpec) and m.learnable_softmax_sink for m in limits.mixers):
        # TE dot_product_attention/utils.py: get_attention_backend
        yield Gap(
            "packed_sequences with a learnable softmax sink: cuDNN before 9.18 leaves them to unfused attention, whose "
            "scores are not counted",
            Effect.UP,
            order="b n s s / t elements of each step that attention makes of the scores, in every layer",
        )
    if any(isinstance(m, (MambaSpec, GatedDeltaNetSpec)) for m in limits.mixers):
        yield Gap(
            "packed_sequences in Mamba and gated delta net layers: chunks and states of every sequence of a pack",
            Effect.EITHER,
            order="as large as a state and a padded chunk for each sequence of a pack, in every such layer",
        )


def ignored(run: RunSpec, plan: Layout) -> tuple[str, ...]:
    """What the run asks for to no effect, and what is supposed for want of a known rule; one sentence each."""
    return tuple((*_idle_recomputation(run, plan), *_without_effect(run), *_supposed(run)))


def _idle_recomputation(run: RunSpec, plan: Layout) -> Iterator[str]:
    """Source: ``transformer/transformer_layer.py: TransformerLayer.__init__`` and ``transformer/moe/``."""
    r = run.recompute
    if r.granularity == "selective" and r.modules != ("core_attn",):
        wants = idle_modules(run.model, run.implementation.te)
        for name in r.modules:
            if name in wants:
                yield f"recompute_modules ({name}) does nothing without {wants[name]}"
    elif r.granularity == "full" and r.num_layers:
        sizes = [len(chunk.layers) for chunks in plan.stages for chunk in chunks]
        if r.method == "block" and r.num_layers > max(sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) is more than any stage or virtual stage has ({max(sizes)}): "
                "all layers are recomputed"
            )
        elif r.method == "uniform" and not run.model.hybrid and any(size % r.num_layers for size in sizes):
            yield (
                f"recompute_num_layers ({r.num_layers}) leaves a last group of fewer layers, which megatron-core up to "
                "0.16 refuses"
            )


def _without_effect(run: RunSpec) -> Iterator[str]:
    """Options that belong to a run and change no byte of it."""
    optimizer, data_parallel, impl = run.optimizer, run.data_parallel, run.implementation
    if data_parallel.overlap_param_gather and not data_parallel.fsdp:
        # distributed/param_and_grad_buffer.py: parameters are gathered where they are kept.
        yield "overlap_param_gather makes no tensor that stays"
    by_ops = impl.use_transformer_engine_op_fuser and impl.te_grouped_gemm and EXPERTS_FUSED_BY_OPS(impl)
    if by_ops and run.model.has_experts and run.recompute.selects("moe_act"):
        yield "recompute_modules (moe_act) does nothing with use_transformer_engine_op_fuser"
    if impl.min_offloaded_tensor_size != ImplementationSpec().min_offloaded_tensor_size and not impl.offload_modules:
        yield f"min_offloaded_tensor_size ({impl.min_offloaded_tensor_size}) does nothing without offload_modules"
    if impl.delay_wgrad_compute and not impl.te:
        # tensor_parallel/layers.py: backward_dw, which does nothing.
        yield "delay_wgrad_compute delays nothing with transformer_impl local"
    if impl.calculate_per_token_loss:
        yield "calculate_per_token_loss makes no tensor that stays"
    if optimizer.main_grads_dtype != "fp32" and data_parallel.grad_reduce_in_fp32:
        yield (
            f"main_grads_dtype ({optimizer.main_grads_dtype}) makes gradient buffers no smaller: grad_reduce_in_fp32 "
            "keeps them in fp32"
        )
    engine, deepspeed = data_parallel.engine, run.deepspeed
    if deepspeed.allgather_bucket_size != DEFAULT_DEEPSPEED_OPTIONS.allgather_bucket_size:
        # deepspeed runtime/utils.py: all_gather_dp_groups, where torch has all_gather_into_tensor.
        yield "allgather_bucket_size makes no tensor: parameters are gathered in place, in one piece"
    if engine == "zero3":
        for name in ("overlap_comm", "round_robin_gradients"):
            if getattr(deepspeed, name):
                yield f"{name} makes no tensor that stays with engine zero3"
    if engine == "fsdp2" and run.fsdp.backward_prefetch != DEFAULT_FSDP_OPTIONS.backward_prefetch:
        yield "backward_prefetch is FSDP1's: fully_shard always gathers the layer before"
    if impl.hugging_face and not impl.own_layers:
        has = family_of(run.model.model_type, run.transformers).liger
        for name in run.transformers.liger_kernel:
            if name not in has:
                yield f"liger_kernel ({name}): Liger has none for model_type {run.model.model_type}"
    if run.peft.trains_adapters:
        for target in idle_targets(
            run.peft, run.model, limits_of(run.model), hugging_face=impl.hugging_face
        ):
            yield f"peft.target_modules ({target}) names no linear of this model"
    if impl.use_legacy_models:
        yield "use_legacy_models: the layers of the removed legacy model are counted as megatron-core's local ones"


def idle_modules(model: ModelSpec, te: bool) -> dict[str, str]:
    """Module of selective recomputation that finds nothing in ``model`` -> what it wants, in words."""
    limits = limits_of(model)
    experts = bool(limits.moes)
    wants = {
        "moe": (experts, "a model with experts"),
        "moe_act": (experts, "a model with experts"),
        "shared_experts": (limits.shared_experts, "a model with shared experts"),
        "mlp": (limits.dense, "a model with dense MLP layers"),
        # Transformer Engine's norms before linears are part of them; only those before experts and MLA are modules.
        "layernorm": (experts or limits.mla or not te, "experts, multi-latent attention or transformer_impl local"),
    }
    return {name: want for name, (found, want) in wants.items() if not found}


def _supposed(run: RunSpec) -> Iterator[str]:
    impl = run.implementation
    if impl.hugging_face:
        yield from _supposed_of_transformers(run)
    for found in driver_buffers(run):
        with_what = f", {found.supposed}" if found.supposed else ""
        yield (
            f"{found.of} ({found.nbytes / (1 << 30):.2f} GiB on every rank{with_what}) lie outside of "
            "torch's allocator: they are in the margin of each GPU and in no peak"
        )
    if run.batch.packed_sequences:
        yield "packed sequences fill every micro batch: micro_batch_size x seq_length tokens"
    core, nearest = impl.megatron_core, nearest_known(impl.megatron_core)
    if core != nearest:
        yield (
            f"megatron_core ({release_words(core)}) is not one of the releases whose rules are known, "
            f"{known_releases()}: those of {release_words(nearest)} are taken"
        )
    if impl.torch is not None and CUBLAS_WORKSPACES_FREED(impl):
        yield f"torch ({release_words(impl.torch)}) has a cuBLAS workspace during each product only: none is counted"
    if run.optimizer.use_layer_wise_distributed_optimizer and LAYER_WISE_LAYOUT(impl):
        yield (
            "use_layer_wise_distributed_optimizer is taken to deal out whole parameters, as without Megatron-LM's "
            "use_layer_wise_param_layout, which is on by default there and divides embeddings, norms and biases evenly"
        )
    if run.parallel.cp == 1:
        return
    if impl.cp_comm_type == "a2a+p2p":
        yield f"cp_comm_type ({impl.cp_comm_type}) is taken to hold what the ring of p2p holds"
    if impl.cp_comm_type in ("a2a", "all_gather") and limits_of(run.model).mla:
        # TE attention/dot_product_attention/context_parallel.py: attn_forward_func_with_cp.
        yield (
            f"cp_comm_type ({impl.cp_comm_type}) is taken with multi-latent attention, which Transformer Engine 2.11 "
            "refuses and 2.20 does not"
        )


def _supposed_of_transformers(run: RunSpec) -> Iterator[str]:
    spec = run.transformers
    family = family_of(run.model.model_type, spec)
    if run.model.model_type == "kimi_k2":
        yield "kimi_k2's own class is remote code: counted as transformers' deepseek_v3, whose shapes it has"
    if spec.attn_implementation == "sdpa" and "sdpa" not in family.attention:
        yield f"model_type {run.model.model_type} has no sdpa: eager attention is counted (--attn-implementation)"
    elif spec.attn_implementation == "sdpa" and spec.sdpa_kernel is None:
        yield (
            "scaled_dot_product_attention runs FlashAttention where it is handed no mask, else the memory-efficient "
            "kernel (--sdpa-kernel)"
        )
    if spec.attn_implementation == "flash_attention_2" and family.eager == "sinks":
        yield (
            "flash_attention_2 is counted as the kernels of FlashAttention 3 that take sinks, which keep the same; "
            "transformers 5 takes these in its place, 4 runs without the sinks unless "
            "attn_implementation=\"kernels-community/vllm-flash-attn3\" is asked for"
        )
    if run.model.hybrid or any(isinstance(layer.mixer, GatedDeltaNetSpec) for layer in run.model.layers):
        packages = "mamba_ssm" if run.model.hybrid else "flash-linear-attention"
        runs = (
            f"run in the kernels of causal_conv1d and {packages}" if spec.mixer_kernels else
            f"run in torch's operations, as without causal_conv1d and {packages}, whose kernels keep far less "
            "(--mixer-kernels)"
        )
        yield f"{'Mamba layers' if run.model.hybrid else 'gated delta nets'} {runs}"
    if spec.attention_mask == "ones":
        yield "batches come with an attention mask of ones, of which no mask of scores is made (--attention-mask)"
