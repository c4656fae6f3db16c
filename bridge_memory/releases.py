"""Every rule that depends on a release of megatron-core, Transformer Engine or PyTorch.

A rule is named after what a release does, cites the function that does it, and is called with an object that has the
releases of the run (an ``ImplementationSpec``)::

    QKV_OUTPUT_HELD = since(
    core=(0, 15),
    before="frees q, k and v once they are rotated",
    after="holds q, k and v as they were before the rotary embedding",
)
    if QKV_OUTPUT_HELD(impl): ...

Releases that are not known: an unset one counts as today's (``DEFAULT_...``), and a megatron-core outside the known
range as the nearer end of that range (every rule changes within it, so comparing does that). Imports nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Release = tuple[int, int]

#: megatron-core releases whose rules are known: read in the sources of 0.12 to 0.19, measured from 0.9 to 0.20.
RELEASES = ((0, 9), (0, 20))
# If unset, the releases that a plan of today would run, the newest on the package index with those that Megatron Bridge
# 0.6.2 is installed with (its wheel pins none of them: ``torch>=2.6.0``, the others without a release). A measured run
# that does not state its releases is not read by these but by ``accuracy/runs.py: UNSTATED``.
#: megatron-core if unset.
DEFAULT_MEGATRON_CORE = (0, 19)
#: The last megatron-core that gives models the parameters that transformers gives them: see
#: ``QUERY_NORM_WITHOUT_LATENT``.
CORE_WITH_PUBLISHED_PARAMETERS = (0, 18)
#: Transformer Engine if unset.
DEFAULT_TRANSFORMER_ENGINE = (2, 20)
#: Megatron Bridge if unset, for reading a ConfigContainer.
DEFAULT_MEGATRON_BRIDGE = (0, 6)
#: PyTorch if unset.
DEFAULT_TORCH = (2, 11)
#: The oldest releases that an answer speaks of unasked: those that Megatron Bridge 0.3 runs with, and the oldest
#: Transformer Engine that was compared with the real code.
OLDEST_NAMED = {"megatron_core": (0, 15), "transformer_engine": (2, 11), "torch": (2, 6)}
#: Engines and layers outside of Megatron: the release in whose sources their rules were read. No rule of theirs depends
#: on the release, so there is no option for it.
ENGINE_RELEASES = {"DeepSpeed": (0, 19), "torchtitan": (0, 2), "torchtune": (0, 6)}

#: Numbers of a release, then suffixes of a candidate or a build: "0.15.0rc8", "2.9.0a0+145a3a7", "2.13.0+cpu".
_RELEASE = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.\d+)*(?:[.\-_]?(?:a|b|rc|dev|post)\d*)*(?:\+[\w.\-]*)?", re.ASCII | re.IGNORECASE
)


class Releases(Protocol):
    """An object with the releases of a run; None: not known."""

    @property
    def megatron_core(self) -> Release | None: ...
    @property
    def transformer_engine(self) -> Release | None: ...
    @property
    def torch(self) -> Release | None: ...


class Running(NamedTuple):
    """The releases of a run, for a reader that has no ImplementationSpec yet."""

    megatron_core: Release | None = None
    transformer_engine: Release | None = None
    torch: Release | None = None


#: What a release of Megatron Bridge is installed with where its wheel pins it, the newest allowed: 0.3.1 asks for
#: ``megatron-core<0.17.0`` and ``transformer-engine<2.13.0``; wheels of 0.4 to 0.6 leave both open.
PINNED_BY_BRIDGE = {(0, 3): Running((0, 16), (2, 12))}


class Watch(Protocol):
    """What is asked of the rules of one run, and may answer otherwise: see ``decisive``."""

    def asked(self, rule: Rule, holds: bool) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """True from these releases on; None: the package does not matter.

    ``before`` and ``after``: what releases without and with it do, after "it", for rules that move peaks.
    """

    core: Release | None = None
    te: Release | None = None
    torch: Release | None = None
    before: str = ""
    after: str = ""

    def __call__(self, impl: Releases) -> bool:
        watch: Watch | None = getattr(impl, "watch", None)
        return self.holds(impl) if watch is None else watch.asked(self, self.holds(impl))

    def holds(self, impl: Releases) -> bool:
        """The answer, which nobody watches."""
        if self.core is not None and (impl.megatron_core or DEFAULT_MEGATRON_CORE) < self.core:
            return False
        if self.te is not None and (impl.transformer_engine or DEFAULT_TRANSFORMER_ENGINE) < self.te:
            return False
        return self.torch is None or (impl.torch or DEFAULT_TORCH) >= self.torch

    def __str__(self) -> str:
        """The first releases for which it holds, as people write them: "megatron-core 0.14"."""
        return " and ".join(f"{package} {release_words(release)}" for package, release in self._named())

    @property
    def number(self) -> str:
        """As ``str`` without the packages' names: "0.14"."""
        return " and ".join(release_words(release) for _, release in self._named())

    def _named(self) -> list[tuple[str, Release]]:
        packages = (("megatron-core", self.core), ("Transformer Engine", self.te), ("PyTorch", self.torch))
        return [(package, release) for package, release in packages if release is not None]


def core_of(impl: Releases) -> Release:
    """The megatron-core whose rules apply."""
    return impl.megatron_core or DEFAULT_MEGATRON_CORE


class TransformersReleases(Protocol):
    """An object with the release of transformers."""

    @property
    def transformers_version(self) -> Release: ...


class TransformersRule(NamedTuple):
    """True from this release of transformers on."""

    first: Release

    def __call__(self, spec: TransformersReleases) -> bool:
        return spec.transformers_version >= self.first

    def __str__(self) -> str:
        return f"transformers {release_words(self.first)}"


def since(
    *,
    core: Release | None = None,
    te: Release | None = None,
    torch: Release | None = None,
    before: str = "",
    after: str = "",
) -> Rule:
    """A rule that holds from these releases on; if several are given, all must be reached. ``before``, ``after``: what
    releases do without it and with it, after "it"."""
    return Rule(core, te, torch, before, after)


#: A release of each package but megatron-core, for messages.
_LIKE = {"torch": "2.11", "transformer_engine": "2.20"}


def parse_release(text: str, field: str = "megatron_core") -> Release:
    """"0.16", "v0.16.1" or "0.15.0rc8" -> (0, 16). Raises ValueError with one line that names ``field``."""
    match = _RELEASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{field} ({text[:40]!r}) is not a release such as {_LIKE.get(field, '0.16')}")
    return int(match[1]), int(match[2])


def release_in(text: object) -> Release | None:
    """The release in a package's version string, such as ``torch.__version__``; None if there is none."""
    try:
        return parse_release(str(text))
    except ValueError:
        return None


def release_words(release: Release) -> str:
    """A release as people write it: "0.16"."""
    return f"{release[0]}.{release[1]}"


def nearest_known(release: Release) -> Release:
    """``release`` if its rules are known, else the nearer end of the known range."""
    return min(max(release, RELEASES[0]), RELEASES[1])


def known_releases() -> str:
    """The range of megatron-core releases whose rules are known: "0.9 to 0.20"."""
    return " to ".join(map(release_words, RELEASES))


# ---- megatron-core: supported options ----
# TC = ``transformer/transformer_config.py: TransformerConfig.__post_init__``.

#: Layers can be split by a string: ``transformer/pipeline_parallel_layer_layout.py``.
LAYOUT_STRINGS = since(core=(0, 13))
#: ``TransformerConfig.cuda_graph_impl`` takes "full_iteration" (before, it was a scope of "local").
GRAPH_OF_THE_ITERATION = since(core=(0, 18))
#: ``TransformerConfig.offload_modules``: saved tensors of single modules go to host memory.
OFFLOADS_BY_MODULE = since(core=(0, 16))
#: Checks of what CUDA graphs cover beside recomputation and dropless experts (``TransformerConfig.__post_init__``).
GRAPHS_CHECKED = since(core=(0, 16))
#: ``cuda_graph_modules`` takes the place of ``cuda_graph_scope``.
GRAPHED_BY_MODULES = since(core=(0, 18))
#: MTP in such a string; NotImplementedError before (``PipelineParallelLayerLayout.validate_layer_layout``).
LAYOUT_STRINGS_WITH_MTP = since(core=(0, 14))
#: MTP in such a string before the last stage (the same function).
LAYOUT_STRINGS_WITH_MTP_ANYWHERE = since(core=(0, 16))
#: Hybrid models support numbers of layers for the first and last stage: ``ssm/mamba_block.py: MambaStack``, which
#: ignored them before (``_select_layers_for_pipeline_parallel``).
HYBRID_END_STAGES = since(core=(0, 16))
#: Biases of experts are checked (TC): refused, until the next rule; before, accepted with every option.
EXPERT_BIASES_CHECKED = since(core=(0, 13))
#: Biases of experts are accepted without expert tensor parallelism (TC).
EXPERT_BIASES_WITHOUT_ETP = since(core=(0, 15))
#: Fewer query groups than tensor-parallel ranks, keys and values then replicated (TC).
QUERY_GROUPS_REPLICATED = since(core=(0, 16))
#: ``recompute_modules`` accepts shared_experts (TC).
SHARED_EXPERTS_RECOMPUTED = since(core=(0, 14))
#: The delayed recipe of fp8 is refused with recomputed moe_act or layernorm (TC).
DELAYED_FP8_EXCLUDES_RECOMPUTED_PARTS = since(core=(0, 14))
#: ``overlap_moe_expert_parallel_comm`` (TC).
EXPERT_COMMUNICATION_OVERLAPS = since(core=(0, 14))
#: Muon with a distributed optimizer and with fp16, which ``optimizer/muon.py: get_megatron_muon_optimizer`` of 0.16
#: refuses; measured runs with 0.20 do both.
MUON_SHARDED = since(core=(0, 17))
#: Megatron-LM lays a layer-wise optimizer's parameters out before DDP does, unless use_layer_wise_param_layout is off
#: (``megatron/training/training.py: wrap_model_chunks_with_ddp``).
LAYER_WISE_LAYOUT = since(core=(0, 18))
#: The last group of the uniform method may be shorter at a chunk's end: in 0.12 to 0.16 it runs past the last layer (an
#: IndexError in ``transformer/transformer_block.py: _checkpointed_forward``).
UNIFORM_GROUPS_MAY_END_SHORT = since(core=(0, 17))

# ---- megatron-core: modules and parameters ----

#: ``add_bias_linear`` gives the router of experts a bias too (``transformer/moe/router.py: Router.__init__``).
ROUTER_BIAS = since(core=(0, 15))

#: The convolution of a Mamba mixer is two parameters of the mixer, conv1d_weight and conv1d_bias, instead of a module
#: conv1d (``ssm/mamba_mixer.py: MambaMixer.__init__``).
MAMBA_CONVOLUTION_IS_NO_MODULE = since(core=(0, 19))
#: A variable of ``ssm/mamba_mixer.py: MambaMixer.forward`` holds zxBCdt [s, b, .] until it returns; before, the copy
#: [b, s, .] is assigned to the same variable.
MAMBA_PROJECTION_HELD = since(core=(0, 15))

#: Routed experts are data-parallel over the ranks with the same experts also if EP is 1 and only ETP differs from TP
#: (``extensions/transformer_engine.py``, ``tensor_parallel/layers.py``: ``use_expert_pgs``; before, ``allreduce`` is
#: False with ``expert_model_parallel_size > 1`` alone).
EXPERTS_APART_WITH_ETP = since(
    core=(0, 19),
    before="shards routed experts over all data-parallel ranks where EP is 1 and ETP is not TP",
    after="shards routed experts over the ranks with the same experts where EP is 1",
)

# ---- megatron-core: what blocks save and hold ----

#: A variable of ``attention.py: Attention.forward`` (``qkv_output``) holds q, k and v as they were before the rotary
#: embedding.
QKV_OUTPUT_HELD = since(core=(0, 15))
#: Local attention supports sliding windows (``transformer/dot_product_attention.py: DotProductAttention.__init__``).
LOCAL_WINDOWS = since(core=(0, 15))
#: The gate of attention's output is sharded if there are fewer query groups than ranks (``attention.py:
#: SelfAttention.get_query_key_value_tensors``); before, it is as wide as the group, and ``_apply_output_gate`` fails.
GATES_WITH_REPLICATED_GROUPS = since(core=(0, 17))
#: Transformer Engine's attention gets [s, b, a, d]; before, with fused rotary embedding, copies in [b, s, a, d], and
#: the output is copied back (``extensions/transformer_engine.py: TEDotProductAttention.forward``).
ATTENTION_TOKENS_FIRST = since(core=(0, 14))
#: Every layer makes local attention's causal mask; before, it is cached (``transformer/utils.py:
#: get_default_causal_mask``).
MASK_MADE_BY_EACH_LAYER = since(core=(0, 16))
#: Transformer Engine's down-projections are replicated on every rank (``models/gpt/gpt_layer_specs.py``:
#: ``backend.linear()``; ``backend.column_parallel_linear()`` before).
WHOLE_DOWN_PROJECTIONS = since(core=(0, 14))
#: The norms of the latents are not recomputed with the up-projections (``multi_latent_attention.py:
#: MLASelfAttention.get_query_key_value_tensors``).
NORMS_BEFORE_UP_PROJECTIONS = since(core=(0, 16))
#: Without a query latent, qk_layernorm norms the hidden states once more in Transformer Engine's linear_q_proj
#: (``mla_qk_norm_config.py: QKNormConfigResolver``); before, the query has no norm then.
QUERY_NORM_WITHOUT_LATENT = since(core=(0, 19))
#: fp8_dot_product_attention is passed to the recipe of mxfp8 too (``fp8_utils.py: get_fp8_recipe``); before, of delayed
#: and tensorwise scaling only.
MXFP8_ATTENTION = since(core=(0, 18), te=(2, 15))
#: Attention in fp8 saves one statistic of the softmax; before, two (TE ``cpp_extensions/fused_attn.py:
#: fused_attn_fwd``).
FP8_ATTENTION_KEEPS_ONE_STATISTIC = since(te=(2, 15))
#: cuDNN's attention with a sink is not used where only deterministic algorithms are allowed
#: (``dot_product_attention/utils.py: get_attention_backend``).
SINKS_ARE_NOT_DETERMINISTIC = since(te=(2, 12))
#: The fused router computes scores in fp32, which it saves; before, in the dtype of the logits (``csrc/extensions/
#: router.cpp: fused_topk_with_score_function_fwd, fused_score_for_moe_aux_loss_fwd``).
FUSED_ROUTER_SCORES_IN_FP32 = since(te=(2, 13))
#: With double buffers, Megatron-FSDP gathers no unit ahead of modules outside of units (PGB: ``AllGatherPipeline``).
FSDP_ROOT_ALONE = since(core=(0, 19))
#: Sparse attention is absorbed multi-latent attention with a choice of kernels
#: (``transformer/experimental_attention_variant/dsa.py, dsa_kernels.py``); before, other operations run it.
SPARSE_ATTENTION_KERNELS = since(core=(0, 19))
#: Variables of ``multi_latent_attention.py: MultiLatentAttention.forward`` hold the latents.
LATENTS_HELD = since(
    core=(0, 16),
    before="frees the latents of attention before its kernel runs",
    after="holds the latents of attention while its kernel runs",
)
#: Values of packed sequences are padded to the width of keys (``multi_latent_attention.py:
#: _prepare_mla_core_attention_value``).
PACKED_VALUES_PADDED = since(core=(0, 18))
#: Gated units clamp both halves if ``activation_func_clamp_value`` is set, and the unfused one adds glu_linear_offset
#: to a copy of its linear half (``mlp.py: MLP.forward``, ``fused_bias_geglu.py: weighted_bias_quick_geglu_impl``).
GATES_CLAMPED = since(core=(0, 15))
#: The exchange back and the unpermutation are separate methods, so that no variable holds the sent tokens during the
#: unpermutation (``moe_layer.py: MoELayer.combine, postprocess``).
COMBINED_IN_TWO_STEPS = since(
    core=(0, 16),
    before="holds the exchanged tokens while they are unpermuted",
    after="frees the exchanged tokens before they are unpermuted",
)
#: fc2 of shared experts that overlap the exchange runs where a variable holds the sent tokens (``token_dispatcher.py:
#: MoEAlltoAllTokenDispatcher.token_combine``); before, in ``combine_postprocess``.
SHARED_EXPERTS_FINISH_WITH_THE_EXCHANGE = since(core=(0, 18))
#: fc1 of shared experts saves its input, unquantized, under fp8 except with the delayed recipe (``shared_experts.py:
#: SharedExpertMLP.__init__``, ``moe_layer.py: set_for_recompute_pre_mlp_layernorm``).
SHARED_INPUT_KEPT = since(core=(0, 14))
#: A variable of ``experts.py: TEGroupedMLP.forward`` holds fc1's output.
FC1_OUTPUT_HELD = since(
    core=(0, 16),
    before="frees the output of experts' fc1 early",
    after="holds the output of experts' fc1 until fc2 is done",
)
#: A recomputed linear in NVFP4 makes its weight's column-wise copy, which the pass without gradients had not made
#: (TE ``module/base.py: get_weight_workspace``).
NVFP4_RECOMPUTED = since(te=(2, 12))
#: DDP's buffers hold parameters in NVFP4 (``distributed/param_and_grad_buffer.py``, ``fp4_utils.py:
#: modify_nvfp4_rowwise_storage``).
NVFP4_PARAMETERS_IN_BUFFERS = since(core=(0, 17))
#: The flex dispatcher with HybridEP also runs where every rank has all experts
#: (``transformer/moe/token_dispatcher.py: MoEFlexTokenDispatcher.__init__``).
HYBRID_EP_ALONE = since(core=(0, 17))
#: Experts' rows in NVFP4 are padded to multiples of 128; before, of 64 (``quantization.py:
#: get_align_size_for_quantization``).
FP4_PADDED_TO_128 = since(te=(2, 12))
#: ``use_transformer_engine_op_fuser`` includes experts (``experts.py: TEGroupedMLP._fused_forward``).
EXPERTS_FUSED_BY_OPS = since(core=(0, 18))
#: The unfused permutation is a stable argsort of the whole routing map, [E, N]; the selected indices are a view, which
#: keeps the int64 order of all of it alive. Before, masked_select saves the map and the probabilities by expert
#: (``moe_utils.py: permute``).
PERMUTED_BY_ARGSORT = since(
    core=(0, 17),
    before="permutes tokens with masked_select",
    after="permutes tokens by a sort of the whole routing map",
)
#: The auxiliary loss computes sigmoid scores in fp32 (``moe_utils.py: compute_routing_scores_for_aux_loss``).
AUXILIARY_SCORES_IN_FP32 = since(core=(0, 17))
#: Scores of the router stay in fp32 until they are normalized (``moe_utils.py: topk_routing_with_score_function``).
ROUTER_SCORES_IN_FP32 = since(core=(0, 18))
#: The gated delta net convolves [s, b, .], so that the convolution saves a view of in_proj's output instead of a copy;
#: it norms queries and keys together, and computes g and beta in one kernel (``ssm/gated_delta_net.py``).
DELTA_NET_TOKENS_FIRST = since(
    core=(0, 18),
    before="copies the input of the convolution in gated delta nets",
    after="convolves a view in gated delta nets",
)
#: The MoE router multiplies with Transformer Engine's GEMM in both implementations (``moe_utils.py:
#: RouterGatingLinearFunction``).
ROUTER_USES_TE_GEMM = since(core=(0, 14))
#: If mxfp8 parameters are gathered in the buffer of gradients, other parameters are views of a separate buffer; before,
#: that buffer exists but is not used (``param_and_grad_buffer.py: _ParamAndGradBuffer.__init__``).
OTHERS_MAPPED_BESIDE_MXFP8 = since(core=(0, 17))
#: In deterministic mode the unfused unpermutation adds rows with ``index_add_``, which saves them for backward, and the
#: router's tables are filled with ``index_put_`` (``moe_utils.py: unpermute, topk_routing_with_score_function``; also
#: in 0.15.3, but not in most earlier releases of 0.15).
ROWS_ADDED_DETERMINISTICALLY = since(core=(0, 16))
#: ``MoELayer`` has no alltoall_seq dispatcher any more (``transformer/moe/moe_layer.py``).
SEQUENCE_DISPATCHER_GONE = since(core=(0, 13))
#: Hybrid models have MTP depths (``models/mamba/mamba_model.py``, later ``models/hybrid/hybrid_model.py``); before, the
#: option is accepted but none is built.
HYBRID_MTP = since(core=(0, 17))
#: megatron-core's own linears use the dummy gradient of ``DUMMY_WEIGHT_GRADIENTS_KEPT`` too
#: (``tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication.backward``).
OWN_LINEARS_USE_DUMMY_WEIGHT_GRADIENTS = since(core=(0, 14))

#: With overlapped expert communication, a layer's schedule nodes are freed when it has run backward; before, they hold
#: inputs and gradients until the chunk is done (``model_chunk_schedule_plan.py:
#: TransformerModelChunkSchedulePlan.run``).
OVERLAPPED_LAYERS_FREED = since(core=(0, 16))

# ---- megatron-core: options of Megatron-LM's training scripts ----

#: Megatron-LM's NullTokenizer uses ``--vocab-size`` unchanged; before, it adds its end-of-document token.
NULL_TOKENIZER_COUNTS_ALL = since(core=(0, 15))
#: The default of Megatron-LM's ``--data-parallel-sharding-strategy`` is optim_grads_params; before, no_shard
#: (``megatron/training/arguments.py`` of 0.17.1 and 0.18.0).
FSDP_SHARDS_ALL = since(core=(0, 18))

# ---- megatron-core: Megatron-FSDP ----
# In ``distributed/fsdp/src/megatron_fsdp``: FSDP = ``megatron_fsdp.py: MegatronFSDP``, PGB =
# ``param_and_grad_buffer.py``.

#: Buckets are padded so that every rank has whole rows (PGB: ``build_data_parallel_buffer_index``).
FSDP_ALIGNS_ROWS = since(core=(0, 14))
#: A budget of elements is gathered ahead of the running unit, half a billion by default; before, the budget includes
#: the running unit (PGB: ``AllGatherPipeline.all_gather_params``; FSDP ``_init_fsdp_param_and_grad_buffer``).
FSDP_PREFETCHES_AHEAD = since(core=(0, 14))
#: That budget is at least one unit (the same function); before, a fixed billion elements wait.
FSDP_PREFETCH_FITS_UNITS = since(
    core=(0, 16),
    before="reduces gradients of up to a billion elements at once",
    after="sizes its buckets by the units",
)
#: Gradients are copied into their bucket one by one, when they are made; before, when their unit's backward is done
#: (FSDP ``_register_fsdp_hooks``: ``register_post_accumulate_grad_hook``).
FSDP_REDUCES_EACH_PARAMETER = since(core=(0, 16))
#: Main parameters and gradients have configurable dtypes, ``megatron_fsdp_main_params_dtype`` and
#: ``megatron_fsdp_main_grads_dtype`` (``distributed_data_parallel_config.py``).
FSDP_MAIN_DTYPES = since(core=(0, 17))
#: Nothing tells the buffers of a precision-aware optimizer, so that gradients are cast to the dtype of the optimizer's
#: parameters (PGB: ``ParamAndGradBuffer.update_main_grads``); until ``FSDP_KNOWS_PRECISION_AWARE``.
FSDP_CASTS_GRADIENTS = since(core=(0, 14))
#: FusedAdam takes the gradients of the buffers, and has no main parameters beside Megatron-FSDP's (``optimizer/
#: __init__.py: get_megatron_optimizer``).
FSDP_KNOWS_PRECISION_AWARE = since(core=(0, 18))
#: Parameters outside of units stay gathered between steps (PGB: ``AllGatherPipeline.reset``), and their modules gather
#: no units ahead after the first backward pass (FSDP ``_root_pre_backward`` marks all modules).
FSDP_KEEPS_ROOT = since(
    core=(0, 18),
    before="frees parameters outside of units between steps",
    after="keeps parameters outside of units gathered",
)
#: Mamba layers are units (``mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__``).
MAMBA_LAYERS_ARE_UNITS = since(core=(0, 19))

# ---- megatron-core: blocks after the layers, and recomputation ----

#: ``GPTModel._postprocess`` computes the losses of the MTP depths from the concatenated hidden states of all depths;
#: before, ``MultiTokenPredictionBlock.forward`` computes each after its depth.
MTP_LOSS_OUTSIDE = since(core=(0, 14))
#: MTP depths have fp8 parameters if parameters are gathered in fp8 (``multi_token_prediction.py:
#: MultiTokenPredictionBlock._build_layers``); before, their weights are in the parameters' dtype and have copies.
MTP_BUILT_IN_FP8 = since(core=(0, 15))
#: The losses of MTP depths are computed in a separate function; before, a variable of ``GPTModel._postprocess`` holds a
#: depth's logits during the main loss.
MTP_LOGITS_FREED = since(
    core=(0, 17),
    before="holds the logits of MTP depths during the main loss",
    after="frees the logits of MTP depths before the main loss",
)
#: MTP supports packed sequences (``multi_token_prediction.py: MultiTokenPredictionLayer.forward``).
MTP_TAKES_PACKED_SEQUENCES = since(core=(0, 16))
#: The number of the sequence of each token of a pack, which Mamba layers need, is made with the pack
#: (``packed_seq_params.py: PackedSeqParams.__post_init__``).
SEQUENCES_NUMBERED_ONCE = since(
    core=(0, 17),
    before="numbers the sequences of a pack in every Mamba layer",
    after="numbers the sequences of a pack once for all Mamba layers",
)
#: So do gated delta nets (``ssm/gated_delta_net.py: GatedDeltaNet.forward``).
DELTA_NETS_TAKE_PACKED_SEQUENCES = since(core=(0, 18))
#: A model with MTP has its final norm on the stage of its last decoder layer (``transformer_block.py:
#: has_final_layernorm_in_this_stage``).
FINAL_NORM_AFTER_LAST_LAYER = since(core=(0, 16))
#: MTP depths are recomputed (``multi_token_prediction.py: MultiTokenPredictionLayer._checkpointed_forward``).
MTP_DEPTHS_RECOMPUTED = since(core=(0, 14))
#: The checkpoint of a depth in fp8 has gradients for its inputs (``multi_token_prediction.py: _checkpointed_forward``).
#: Before, they are keyword arguments of Transformer Engine's checkpoint, which only differentiates positional ones (TE
#: ``distributed.py: _CheckpointFunction``): the depth runs without gradients and has no backward.
MTP_CHECKPOINT_DIFFERENTIATES = since(core=(0, 18))
#: The layer of a depth is named mtp_model_layer; before, transformer_layer (``multi_token_prediction.py:
#: MultiTokenPredictionLayer.__init__``).
MTP_MODEL_LAYER = since(core=(0, 17))
#: Hybrid models support full recomputation (``models/hybrid/hybrid_block.py: HybridStack.forward``); before,
#: ``ssm/mamba_block.py: MambaStack.forward`` runs layers one by one in any case (selective recomputation works inside
#: them).
HYBRID_LAYERS_RECOMPUTED = since(
    core=(0, 18), before="ignores full recomputation in hybrid models", after="recomputes layers of hybrid models"
)

#: The flex dispatcher overlaps shared experts too (``transformer_config.py: TransformerConfig.__post_init__``).
FLEX_OVERLAPS_SHARED_EXPERTS = since(core=(0, 18))

#: A discarded output is recomputed into its old storage; before, it is copied into that, and both storages stay
#: (``tensor_parallel/random.py: CheckpointWithoutOutput._recompute``).
RECOMPUTED_IN_PLACE = since(
    core=(0, 17),
    before="keeps two storages of every output that it recomputes",
    after="recomputes outputs into their old storage",
)

#: Gated delta nets support context parallelism by exchanging tokens for heads (TC; ``ssm/gated_delta_net.py``).
DELTA_NETS_EXCHANGE_HEADS = since(core=(0, 18))


# ---- Megatron Bridge (its release is not part of a run): defaults that it sets in a ConfigContainer ----

#: An unset expert_tensor_parallel_size is 1 with expert parallelism; before, TP as in megatron-core
#: (``models/transformer_config.py: _set_moe_expert_tensor_parallel_default``).
BRIDGE_EXPERTS_OUTSIDE_TP = (0, 6)
#: From this release of Megatron Bridge on Gemma 3's SigLIP is built without its pooling head, whatever its config says
#: (``models/gemma_vl/modeling_gemma3_vl.py``); 0.3 builds it unless the config disables it.
BRIDGE_DROPS_POOLING_HEAD = (0, 6)
#: FusedAdam takes the fp32 moments of a checkpoint for its own (``training/optim.py:
#: memory_efficient_fp32_optimizer_state_loading``, pull request 4936; in 0.6.0 to 0.6.2, not in 0.5.1).
BRIDGE_ADOPTS_OPTIM_STATES = (0, 6)
#: The megatron-core that goes with that release of Megatron Bridge.
ADOPTED_BESIDE_CORE = since(core=(0, 19))
#: Gemma 2's attention is torch's FlexAttention where there is neither a mask nor dropout (read in 0.3 and 0.6).
BRIDGE_FLEX_ATTENTION = (0, 6)
#: overlap_param_gather of DDP and of the optimizer are kept equal (``training/config.py:
#: _validate_and_sync_distributed_optimizer_settings``).
BRIDGE_SYNCS_PARAM_GATHER = (0, 5)
#: Weight gradients may be fused into Megatron-FSDP's main gradients; before, ``ConfigContainer.validate`` switches
#: gradient_accumulation_fusion off with it, so that there are no dummy weight gradients (read in 0.3 and 0.6).
BRIDGE_FUSES_FSDP_GRADIENTS = (0, 4)

# ---- Transformer Engine ----

#: Grouped experts are Transformer Engine's (``TEGroupedMLP``) instead of the legacy ``GroupedMLP`` (megatron-core
#: ``extensions/transformer_engine.py: TEColumnParallelGroupedLinear``).
TE_GROUPED_GEMM = since(te=(1, 9))
#: One dummy weight gradient per shape is kept (``module/base.py: get_dummy_wgrad``); before, each backward makes a new
#: one.
DUMMY_WEIGHT_GRADIENTS_KEPT = since(te=(2, 3))
#: Values are padded to the width of keys for FlashAttention 2, which then supports them (``dot_product_attention.py:
#: _pad_qkv_head_dim``, ``utils.py: get_attention_backend``: fa2_padded_head_dim).
FLASH_PADS_VALUES = since(te=(2, 17))
#: linear_proj saves attention's output instead of an fp8 copy, except with the delayed recipe (megatron-core
#: ``attention.py: Attention.__init__``).
PROJ_KEEPS_ORIGINAL = since(core=(0, 14), te=(2, 6))
#: a2a and all_gather support heads of unequal widths, as in multi-latent attention (``context_parallel.py:
#: attn_forward_func_with_cp``; 2.11 refuses them, 2.20 supports them).
UNEQUAL_HEADS_EXCHANGED = since(te=(2, 12))
#: all_gather saves its output only; before, also those of its two steps (``context_parallel.py:
#: AttnFuncWithCPAndKVAllGather``).
STEPS_OF_ALL_GATHER_DROPPED = since(
    te=(2, 15),
    before="saves the outputs of both steps of all_gather",
    after="saves one output of all_gather",
)
#: all_gather's forward makes a second output, of zeros, to which packed sequences add (the same function).
ALL_GATHER_MAKES_TWO_OUTPUTS = since(te=(2, 18))
#: The fused cross entropy writes its gradient into a new fp32 tensor, which is saved; before, over the logits
#: (``triton/cross_entropy.py: cross_entropy_forward``).
LOSS_GRADIENT_IN_FP32 = since(
    te=(2, 18),
    before="writes the gradient of the fused cross entropy over the logits",
    after="keeps the gradient of the fused cross entropy in fp32",
)
#: The fused cross entropy saves a copy of the logits, over which backward writes the gradient, and two fp32 statistics
#: per token (the same function; megatron-core does not set ``overwrite_input``).
LOSS_KEEPS_A_COPY = since(
    te=(2, 19),
    before="keeps the gradient of the fused cross entropy, not a copy of the logits",
    after="keeps a copy of the logits for the fused cross entropy",
)
#: The fused cross entropy refuses logits in fp16 (``cross_entropy.py: _validate_inputs``; read in 2.18 and 2.19).
LOSS_REFUSES_FP16 = since(te=(2, 19))
#: Backward of unfused attention's softmax makes a new gradient, as a functional operator; before, it writes over the
#: output's gradient (``dot_product_attention/softmax.py``).
SOFTMAX_MAKES_A_GRADIENT = since(
    te=(2, 19),
    before="writes the softmax's gradient over that of its output",
    after="makes a new gradient of the softmax",
)
#: If both moments are bf16 they are updated in place; before, and for any other narrow state, a step makes fp32 copies
#: (``optimizers/fused_adam.py: FusedAdam.fuse_unscale``, step).
BF16_MOMENTS_UPDATED_IN_PLACE = since(
    te=(2, 13),
    before="makes fp32 copies of bf16 moments in a step",
    after="updates bf16 moments in place",
)
#: p2p adds each step's output to the sum at once, so that the outputs of two steps and few buffers of keys and values
#: are alive; before, those of all steps until the end (``context_parallel.py: AttnFuncWithCPAndKVP2P``).
RING_SUMS_EACH_STEP = since(
    te=(2, 20),
    before="keeps the outputs of all steps of the ring",
    after="adds up each step of the ring at once",
)
#: NVIDIA's containers include a FlashAttention (2.4.1) with a deterministic backward (``dot_product_attention/utils.py:
#: get_attention_backend``).
FLASH_IS_DETERMINISTIC = since(te=(1, 6))

#: Parts of packed sequences that ranks exchange (a2a) are put in order by one kernel, with the copies of other layouts
#: (``context_parallel.py: flash_attn_a2a_communicate``; by indices in 2.11; not read between).
PACKS_EXCHANGED_BY_KERNEL = since(te=(2, 20))

#: States that an optimizer in host memory gets from a fully reshardable checkpoint reach its part on the device
#: (``distrib_optimizer.py: load_parameter_state_from_fully_reshardable``; read in 0.16 and 0.19).
WHOLE_STATES_SENT_TO_DEVICE = since(core=(0, 19))
#: FusedAdam makes the states of a DTensor as large as the whole parameter, until ``FUSED_ADAM_KNOWS_DTENSORS``
#: (``fused_adam.py: FusedAdam._initialize_state``; read in 2.4 and 2.9 to 2.16).
FUSED_ADAM_MAKES_WHOLE_STATES = since(te=(2, 10))
#: They are as large as this rank's part again (the same function).
FUSED_ADAM_KNOWS_DTENSORS = since(te=(2, 12))

# ---- PyTorch ----

#: cuBLAS workspaces are in torch's allocator (``aten/src/ATen/cuda/CublasHandlePool.cpp``, pull request 86645: no
#: library of the wheel of 1.13 has ``clearCublasWorkspaces``, that of 2.0 has); before, cuBLAS allocates its workspaces
#: itself.
CUBLAS_WORKSPACES_ALLOCATED = since(torch=(2, 0))
#: cuBLAS workspaces on Blackwell are as large as on Hopper (``aten/src/ATen/cuda/CublasHandlePool.cpp:
#: parseChosenWorkspaceSize``; in the wheels: compute capability 9 only in 2.11; 9, 10 and 12 in 2.12).
LARGE_CUBLAS_WORKSPACE_ON_BLACKWELL = since(
    torch=(2, 12),
    before="gives cuBLAS a small workspace on Blackwell",
    after="gives cuBLAS as large a workspace on Blackwell as on Hopper",
)
#: cuBLAS workspaces are freed after each product (the same file: ``getCurrentCUDABlasHandleWithWorkspace``), unless
#: TORCH_CUBLAS_WORKSPACE_CACHE is set; before, they persist.
CUBLAS_WORKSPACES_FREED = since(
    torch=(2, 15),
    before="keeps cuBLAS workspaces",
    after="frees cuBLAS workspaces after every product",
)

#: cuDNN's attention takes packed sequences with a softmax sink (TE ``dot_product_attention/utils.py:
#: get_attention_backend``: from cuDNN 9.18 on; the wheel of torch 2.10 needs 9.10, that of 2.11 needs 9.19).
SINKS_IN_PACKED_SEQUENCES = since(
    te=(2, 12), torch=(2, 11),
    before="computes the attention of packed sequences with softmax sinks unfused, with the scores of every head",
    after="computes the attention of packed sequences with softmax sinks in one kernel",
)

# ---- transformers ----

#: OLMo's classes rotate in fp32, and OLMo 2's norm multiplies in it (``models/olmo2/modeling_olmo2.py: Olmo2RMSNorm``).
OLMO_IN_FP32 = TransformersRule((4, 52))
#: ``masking_utils.py`` makes the masks of most classes; before, each class does.
SHARED_MASKS = TransformersRule((4, 53))
#: ``models/gpt2/modeling_gpt2.py: GPT2Model.forward`` uses these masks too.
SHARED_MASKS_OF_GPT2 = TransformersRule((4, 54))
#: ``integrations/sdpa_attention.py: sdpa_attention_forward`` no longer copies what is not contiguous.
SDPA_TAKES_VIEWS = TransformersRule((4, 56))
#: ``GptOssExperts.forward`` indexes an expert's weights by an int, which is a view; before, by a tensor, which copies
#: them.
EXPERTS_BY_NUMBER = TransformersRule((4, 56))
#: ``use_gqa_in_sdpa``: keys and values are no longer repeated for every query head.
SDPA_SHARES_KEYS = TransformersRule((4, 54))
#: A batch without a mask is treated as possibly packed, which position ids show (``masking_utils.py:
#: find_packed_sequence_indices``).
UNMASKED_MAY_BE_PACKED = TransformersRule((4, 54))
#: Whether it is packed is checked from the position ids (the same function).
PACKING_IS_CHECKED = TransformersRule((5, 0))
#: The weights of all experts are one three-dimensional parameter per projection, for grouped products
#: (``integrations/moe.py``).
EXPERTS_IN_ONE_PARAMETER = TransformersRule((5, 0))
#: Checkpoints are non-reentrant by default (``modeling_utils.py: PreTrainedModel.gradient_checkpointing_enable``).
CHECKPOINTS_NOT_REENTRANT = TransformersRule((5, 0))
#: Gemma scales embeddings in a separate module; OLMo 3 rotates in the dtype of its queries.
FAMILIES_OF_5 = TransformersRule((5, 0))
#: Rotary tables of the vision encoders of Qwen2.5-VL, GLM-4V and Qwen3-Omni are in fp32 whatever the module was cast to
#: (``Qwen2_5_VLVisionRotaryEmbedding.forward``).
ENCODERS_SHARE_TABLES = TransformersRule((5, 20))
#: ``Mistral3Model.get_image_features`` keeps the hidden states of ``vision_feature_layer`` alone.
ENCODERS_RETURN_WHAT_IS_SELECTED = TransformersRule((5, 23))
#: ``Qwen2_5_VLRotaryEmbedding.recomposition_frequencies`` joins the tables of three axes for all layers; before, each
#: layer did.
AXES_GATHERED_ONCE = TransformersRule((5, 17))
#: Models with encoders return what these returned (``Qwen2_5_VLModel.forward: mm_encoder_outputs``).
MODELS_RETURN_ENCODER_OUTPUTS = TransformersRule((5, 18))
#: ``Gemma2PreTrainedModel._supports_sdpa`` is False: sdpa has no soft-capped scores.
GEMMA_2_WITHOUT_SDPA = TransformersRule((5, 21))
#: Liger's releases from 0.8 on require transformers 5, and accumulate the output layer's gradient without an fp32
#: product (``ops/fused_linear_cross_entropy.py: fused_linear_cross_entropy_forward``); releases for transformers 4 make
#: one.
LIGER_ACCUMULATES_IN_PLACE = TransformersRule((5, 0))
