"""The vocabulary of ``config.args`` and ``config.parallel``: each known word -> what its value says of the run.

Any field of a RunSpec is a word under Megatron's name for it. Beside these are people's own names, and Megatron's
arguments and environment variables that are harmless or listed as unmodelled (``readers/megatron_args``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bridge_memory.accuracy.described import texts
from bridge_memory.accuracy.described.draft import (
    FIELDS,
    Draft,
    Phrase,
    UnknownWord,
    as_flag,
    as_integer,
    as_names,
    as_number,
    read_phrases,
    state_field,
    word_of,
)
from bridge_memory.readers.container_registry import HARMLESS as HARMLESS_FIELDS
from bridge_memory.readers.environment import VARIABLES
from bridge_memory.readers.megatron_args.harmless import HARMLESS
from bridge_memory.readers.megatron_args.unmodelled import UNMODELLED
from bridge_memory.readers.megatron_args.unmodelled import same as same_value
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.parts import ENGINES, RECOMPUTE_MODULES
from bridge_memory.spec.unmodelled import Effect, Unmodelled

Read = Callable[[Draft, object, str], None]


# --------------------------------------------------------------------------------------------------
# Kinds of values
# --------------------------------------------------------------------------------------------------


def _text(phrases: Sequence[Phrase]) -> Read:
    def read(draft: Draft, value: object, where: str) -> None:
        if isinstance(value, bool):
            value = str(value)
        if isinstance(value, (list, tuple)):
            value = ", ".join(as_names(value, where))
        read_phrases(value, phrases, draft, where)

    return read


def _as(name: str) -> Read:
    """Another name of a field."""
    return lambda draft, value, where: state_field(draft, name, value)


def _fact(name: str) -> Read:
    return lambda draft, value, where: draft.fact(name, as_integer(value, where))


def _flag(name: str, phrases: Sequence[Phrase]) -> Read:
    """A field that is a flag, or words about it."""

    def read(draft: Draft, value: object, where: str) -> None:
        if isinstance(value, str) and texts.DOUBT.pattern.fullmatch(value.strip().lower()):
            draft.assume(f"{where.rpartition('.')[2]} is in doubt ({value.strip()}): counted as not stated")
            return
        first, _, rest = value.partition(",") if isinstance(value, str) else (value, "", "")
        if not isinstance(first, str) or first.strip().lower() in ("true", "false", "on", "off", "yes", "no"):
            draft.state(FIELDS[name][0], as_flag(first, where))
            read_phrases(rest, phrases, draft, where)
        else:
            read_phrases(value, phrases, draft, where)

    return read


def _nothing(draft: Draft, value: object, where: str) -> None:
    """What says nothing of memory, in any words."""


def _elsewhere(draft: Draft, value: object, where: str) -> None:
    """Options that stand in the row's source and not in the row."""
    draft.assume(f"options that stand in the source are not in the row ({where})")


# --------------------------------------------------------------------------------------------------
# Words with a rule of their own
# --------------------------------------------------------------------------------------------------


def _fp8(draft: Draft, value: object, where: str) -> None:
    if value is False or (isinstance(value, str) and value.strip().lower() in ("none", "off", "false", "")):
        draft.state("precision.fp8", None)
        return
    read_phrases(f"fp8 {value}" if isinstance(value, str) else "fp8", texts.PRECISION, draft, where)


def _dtype_flag(dtype: str) -> Read:
    def read(draft: Draft, value: object, where: str) -> None:
        if as_flag(value, where):
            draft.fact("params_dtype", dtype)

    return read


def _recompute(draft: Draft, value: object, where: str) -> None:
    if isinstance(value, bool):
        value = "full" if value else "none"
    elif isinstance(value, (list, tuple)):
        value = f"selective {', '.join(as_names(value, where))}" if value else "none"
    if isinstance(value, str) and value.strip() in ("", "[]"):
        value = "none"
    read_phrases(value, texts.RECOMPUTE, draft, where)


def _modules(draft: Draft, value: object, where: str) -> None:
    for name in as_names(value, where):
        if name not in RECOMPUTE_MODULES:
            raise UnknownWord(where, name)
        draft.facts.setdefault("recomputed modules", []).append(name)


def _optimizer(draft: Draft, value: object, where: str) -> None:
    draft.fact("optimizer stated", True)
    read_phrases(value, texts.OPTIMIZER, draft, where)


def _offload(draft: Draft, value: object, where: str) -> None:
    """True, or the fraction that is offloaded."""
    if not isinstance(value, bool) and isinstance(value, (int, float)):
        fraction = as_number(value, where)
        draft.fact("optimizer offloaded", fraction > 0)
        if 0 < fraction < 1:
            draft.state("optimizer.optimizer_offload_fraction", fraction)
    elif isinstance(value, str):
        read_phrases(value, texts.OPTIMIZER, draft, where)
    else:
        draft.fact("optimizer offloaded", as_flag(value, where))


def _vocabulary(draft: Draft, value: object, where: str) -> None:
    draft.fact("vocabulary of the run", as_integer(value, where))


def _dropout(draft: Draft, value: object, where: str) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        draft.change_model(name, as_number(value, where))


def _one_dropout(name: str) -> Read:
    return lambda draft, value, where: draft.change_model(name, as_number(value, where))


def _balanced(draft: Draft, value: object, where: str) -> None:
    """Megatron's option balances whatever the data."""
    draft.fact("forced balance", as_flag(value, where))


def _liger(draft: Draft, value: object, where: str) -> None:
    draft.fact("liger", as_flag(value, where))


def _allocator(draft: Draft, value: object, where: str) -> None:
    """``PYTORCH_CUDA_ALLOC_CONF``; what stands in brackets is a remark."""
    words = re.sub(r"\([^()]*\)", "", value) if isinstance(value, str) else value
    if isinstance(words, bool):
        words = f"expandable_segments:{words}"
    if isinstance(words, str) and words.strip().lower() in ("default", "unset", "none", "off", "not set", ""):
        return
    if not isinstance(words, str) or not re.fullmatch(r"\s*(?:[a-z_]+\s*[:=]\s*[\w.\[\]]+\s*,?\s*)*", words):
        raise UnknownWord(where, value)
    draft.env["PYTORCH_CUDA_ALLOC_CONF"] = words.replace("=", ":")


def _experiment(draft: Draft, value: object, where: str) -> None:
    """A run's name that lists its sizes ("pretrain_llama3_8b_bf16_gpus8_tp1_pp1_cp1_vpNone_ep1_mbs4_gbs128")."""
    for name, size in re.findall(r"(?:^|_)(tp|pp|cp|vp|ep|etp|mbs|gbs|gpus)(\d{1,6}|None)(?=_|$)", str(value)[:400]):
        if size != "None":
            (SIZES | KEYS)[name](draft, int(size), where)


def _engine(draft: Draft, value: object, where: str) -> None:
    name = word_of(value)
    zero = re.fullmatch(r"(?:deepspeed_)?zero_?(?:stage_)?([0123])", name)
    if zero:
        draft.fact("zero", int(zero[1]))
    elif name in ENGINES:
        draft.state("data_parallel.engine", name)
    else:
        raise UnknownWord(where, value)


def _sharded(draft: Draft, value: object, where: str) -> None:
    """FSDP's degree, which is the data-parallel size."""
    draft.fact("data parallel size", as_integer(value, where))
    draft.fact("fsdp", "fsdp1" if where.lower().endswith("fsdp1") else "fsdp2")


def _sequence(draft: Draft, value: object, where: str) -> None:
    """A flag of Megatron's, or the degree of Ulysses' sequence parallelism."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not 1 <= value <= 1024:
            raise UnknownWord(where, value)
        if value > 1:
            draft.leave_out(
                f"Ulysses' sequence parallelism over {value} ranks: each is counted with whole sequences", Effect.DOWN,
                "activations of all tokens but a rank's own",
            )
    else:
        draft.state("parallel.sequence_parallel", as_flag(value, where))


def _pipeline(draft: Draft, value: object, where: str) -> None:
    words = word_of(value)
    if words not in ("1f1b", "interleaved", "interleaved_1f1b"):
        raise UnknownWord(where, value)


_STRATEGIES = {"zero1": "optim", "zero2": "optim_grads", "zero3": "optim_grads_params", "none": "no_shard"}


def _strategy(draft: Draft, value: object, where: str) -> None:
    name = word_of(value)
    state_field(draft, "data_parallel_sharding_strategy", _STRATEGIES.get(name.replace("_", ""), name))


def _deepep(draft: Draft, value: object, where: str) -> None:
    if as_flag(value, where):
        read_phrases("deepep", texts.DISPATCHER, draft, where)


def _recomputes(name: str) -> Read:
    """A flag of older releases."""

    def read(draft: Draft, value: object, where: str) -> None:
        if as_flag(value, where):
            draft.facts.setdefault("recomputed modules", []).append(name)

    return read


def _gradients_in_bf16(draft: Draft, value: object, where: str) -> None:
    if as_flag(value, where):
        draft.state("data_parallel.grad_reduce_in_fp32", False)


def _ends_in_bf16(draft: Draft, value: object, where: str) -> None:
    """Megatron's default is one layer at each end."""
    draft.fact("ends in bf16", as_flag(value, where))


def _untied(untied: bool) -> Read:
    return lambda draft, value, where: draft.change_model(
        "share_embeddings_and_output_weights", as_flag(value, where) is not untied
    )


def _switch(draft: Draft, value: object, where: str) -> None:
    """A switch of something that its number of layers or its modules say, or these modules."""
    if isinstance(value, (list, tuple)) or (isinstance(value, str) and value.startswith("[")):
        state_field(draft, "offload_modules", value)
    else:
        as_flag(value, where)


def _offloads(draft: Draft, value: object, where: str) -> None:
    """What is in host memory, in words."""
    read_phrases(value, texts.OFFLOADED, draft, where)


def _left_out(effect: Effect, order: str) -> Read:
    """A switch of a feature that is not modelled."""

    def read(draft: Draft, value: object, where: str) -> None:
        if as_flag(value, where):
            draft.leave_out(f"{where.rpartition('.')[2]}: not counted", effect, order)

    return read


def _registered(draft: Draft, value: object, where: str) -> None:
    if as_flag(value, where):
        draft.leave_out("nccl_ub: buffers that NCCL registers", Effect.EITHER, "what a separate memory pool rounds up")


def _of_the_model(draft: Draft, value: object, where: str) -> None:
    """A fact of the architecture, which the model's name settles."""
    draft.assume(f"{where.rpartition('.')[2]} is taken as the published model has it")


def _megatron_fsdp(draft: Draft, value: object, where: str) -> None:
    if as_flag(value, where):
        draft.state("data_parallel.engine", "megatron_fsdp")


#: People's names of options, beside those of Megatron.
KEYS: dict[str, Read] = {
    **dict.fromkeys(("micro_batch_size", "mbs", "local_batch_size", "local_batch", "batch_size_per_gpu",
                     "per_device_train_batch_size", "micro_batch"), _as("micro_batch_size")),
    **dict.fromkeys(("global_batch_size", "gbs", "global_batch"), _as("global_batch_size")),
    **dict.fromkeys(("seq_length", "seq", "seq_len", "sequence_length", "max_length", "max_seq_length", "context",
                     "context_length", "encoder_seq_length"), _as("seq_length")),
    **dict.fromkeys(("precision", "mixed_precision", "dtype", "params_dtype", "grads", "gradients"),
                    _text([*texts.PRECISION, *texts.OPTIMIZER])),
    "fp8": _fp8, "fp8_recipe": _fp8, "fp8_format": _fp8, "bf16": _dtype_flag("bf16"), "fp16": _dtype_flag("fp16"),
    **dict.fromkeys(("fp8_param", "fp8_param_gather", "fp8_params"), _as("fp8_param")),
    "accumulate_allreduce_grads_in_fp32": _as("grad_reduce_in_fp32"),
    "optimizer": _optimizer,
    **dict.fromkeys(("precision_aware", "precision_aware_optimizer", "use_precision_aware_optimizer"),
                    _flag("use_precision_aware_optimizer", texts.OPTIMIZER)),
    **dict.fromkeys(("dist_opt", "distributed_optimizer", "use_distributed_optimizer"),
                    _flag("use_distributed_optimizer", texts.OPTIMIZER)),
    **dict.fromkeys(("optimizer_cpu_offload", "optimizer_offload", "cpu_offload_optimizer"), _offload),
    **dict.fromkeys(("recompute", "recomputation", "activation_checkpointing", "gradient_checkpointing", "ac",
                     "activation_recompute", "act_ckpt"), _recompute),
    "recompute_modules": _modules,
    **dict.fromkeys(("dispatcher", "moe_token_dispatcher_type", "moe_dispatcher", "token_dispatcher",
                     "moe_flex_dispatcher_backend"), _text(texts.DISPATCHER)),
    **dict.fromkeys(("moe_experts_impl", "experts_impl", "experts"), _text(texts.EXPERTS)),
    "cross_entropy_loss_fusion": _flag("cross_entropy_loss_fusion", texts.CROSS_ENTROPY),
    **dict.fromkeys(("cross_entropy", "loss", "ce", "cross_entropy_fusion_impl"), _text(texts.CROSS_ENTROPY)),
    **dict.fromkeys(("cuda_graph", "cuda_graphs", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope"),
                    _text(texts.GRAPHS)),
    **dict.fromkeys(("attention", "attn", "flash", "attention_backend", "attn_implementation", "use_flash_attn",
                     "flash_attention"), _text(texts.ATTENTION)),
    **dict.fromkeys(("data", "dataset", "packing"), _text(texts.DATA)),
    **dict.fromkeys(("packed", "packed_sequences"), _flag("packed_sequences", texts.DATA)),
    **dict.fromkeys(("fp32_ssm_state", "ssm_state"), _text(texts.SSM_STATE)),
    **dict.fromkeys(("vocab", "vocab_size", "vocabulary"), _vocabulary),
    **dict.fromkeys(("mtp", "mtp_num_layers", "mtp_layers"), _fact("mtp")),
    **dict.fromkeys(("num_layers", "layers"), _fact("layers")),
    "hidden_size": _fact("hidden size of the row"),
    **dict.fromkeys(("bias_gelu_fusion", "bias_swiglu_fusion"), _as("bias_activation_fusion")),
    "ddp_bucket_size": _as("bucket_size"),
    "decoder_first_pipeline_num_layers": _as("num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": _as("num_layers_in_last_pipeline_stage"),
    "megatron_fsdp_grad_comm_dtype": _as("grad_comm_dtype"),
    **dict.fromkeys(("moe_deepep_num_sms", "moe_hybridep_num_sms"), _as("moe_flex_dispatcher_num_sms")),
    "moe_enable_deepep": _deepep, "moe_layer_recompute": _recomputes("moe"),
    "recompute_activations": _recomputes("core_attn"), "grad_reduce_in_bf16": _gradients_in_bf16,
    "moe_router_padding_for_fp8": _as("moe_router_padding_for_quantization"), "nccl_ub": _registered,
    **dict.fromkeys(("num_virtual_stages_per_pipeline_rank", "virtual_pipeline", "virtual_pipeline_size"),
                    _as("virtual_pipeline_model_parallel_size")),
    **dict.fromkeys(("grad_accum", "gradient_accumulation_steps", "gradient_accumulation", "num_microbatches", "ga"),
                    _fact("microbatches")),
    **dict.fromkeys(("dp_shard", "data_parallel_shard_degree"), _as("fsdp_shard_degree")),
    **dict.fromkeys(("float8", "quantize", "quantization"), _fp8),
    **dict.fromkeys(("cpu_offload", "offload"), _offloads),
    "async_tp": _left_out(Effect.EITHER, "symmetric buffers of a layer's gathered inputs"),
    "loss_parallel": _left_out(Effect.DOWN, "logits of all ranks but this one"),
    "first_last_layers_bf16": _ends_in_bf16, "untie_embeddings_and_output_weights": _untied(True),
    "share_embeddings_and_output_weights": _untied(False),
    **dict.fromkeys(("cpu_offloading", "fine_grained_activation_offloading"), _switch),
    **dict.fromkeys(
        ("moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_router_score_function", "moe_router_topk",
         "moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk", "normalization",
         "num_experts", "num_moe_experts", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
         "moe_ffn_hidden_size", "kv_channels", "swiglu", "add_bias_linear", "add_qkv_bias", "qk_layernorm",
         "group_query_attention", "position_embedding_type", "rotary_percent", "moe_layer_freq",
         "moe_shared_expert_intermediate_size", "multi_latent_attention", "hybrid_override_pattern",
         "hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim", "mamba_num_heads", "mamba_num_groups"),
        _of_the_model),
    "dropout": _dropout, "hidden_dropout": _one_dropout("hidden_dropout"),
    "attention_dropout": _one_dropout("attention_dropout"),
    "moe_router_force_load_balancing": _balanced, "liger": _liger, "extras": _text(texts.EXTRAS),
    **dict.fromkeys(("compile", "torch_compile"), _as("torch_compile")),
    **dict.fromkeys(("peft", "lora", "adapters"), _text(texts.LORA)),
    **dict.fromkeys(("alloc_conf", "allocator", "expandable_segments", "pytorch_cuda_alloc_conf"), _allocator),
    **dict.fromkeys(("zero_stage", "zero"), _fact("zero")), "engine": _engine, "experiment": _experiment,
    **dict.fromkeys(("use_megatron_fsdp", "megatron_fsdp", "use_custom_fsdp"), _megatron_fsdp),
    **dict.fromkeys(("data_parallel_sharding_strategy", "sharding_strategy", "sharding"), _strategy),
    **dict.fromkeys(("full_args", "patch", "config", "ds_config", "recipe", "script"), _elsewhere),
    # Lengths of runs and what their hosts do; "timing_log_level", "NaN checks" and garbage collection are Python's.
    **dict.fromkeys(("steps", "host_bundle", "manual_gc", "job", "arm", "notes", "comment", "hardware", "nodes",
                     "iterations", "train_iters", "num_workers", "num_dataset_workers",
                     "log_interval", "model_name", "checkpoint", "warm_start"), _nothing),
}  # fmt: skip

#: Words of ``config.parallel``; those of ``config.args`` are known there too.
SIZES: dict[str, Read] = {
    **dict.fromkeys(("tp", "tensor_parallel"), _as("tensor_model_parallel_size")),
    **dict.fromkeys(("pp", "pipeline_parallel"), _as("pipeline_model_parallel_size")),
    **dict.fromkeys(("vp", "vpp", "virtual_pp"), _as("virtual_pipeline_model_parallel_size")),
    **dict.fromkeys(("cp", "context_parallel"), _as("context_parallel_size")),
    **dict.fromkeys(("ep", "expert_parallel"), _as("expert_model_parallel_size")),
    **dict.fromkeys(("etp", "expert_tensor_parallel"), _as("expert_tensor_parallel_size")),
    **dict.fromkeys(("dp", "data_parallel"), _fact("data parallel size")),
    **dict.fromkeys(("edp", "expert_data_parallel"), _fact("expert data parallel size")),
    **dict.fromkeys(("fsdp", "fsdp1", "fsdp2"), _sharded), "sp": _sequence, "sequence_parallel": _sequence,
    **dict.fromkeys(("zero", "zero_stage"), _fact("zero")),
    "stage": _fact("stage"), "engine": _engine, "gpus": _fact("gpus"), "world_size": _fact("gpus"),
    "schedule": _pipeline,
}  # fmt: skip

#: Environment variables of libraries outside of torch's allocator.
_OUTSIDE = re.compile(
    r"(?:TORCH_)?NCCL_\w+|CUDA_DEVICE_MAX_CONNECTIONS|NVTE_(?:FWD|BWD)_LAYERNORM_SM_MARGIN|"
    r"(?:OMP|UB|NVSHMEM|TOKENIZERS|GLOO|FI|MPICH|UCX|OMPI|SLURM|WANDB|HF|MKL|NVLINK)_\w+|PYTHON\w*"
)
_HARMLESS_FIELDS = frozenset(name for fields in HARMLESS_FIELDS.values() for name in fields)


class _Alone:
    """Other arguments for conditions of unmodelled features: a row has none of them parsed."""

    parsed = False

    def __getitem__(self, name: str) -> Any:
        return None


def read_words(draft: Draft, words: object, where: str, vocabulary: Mapping[str, Read]) -> None:
    """Every word of a mapping. Raises UnknownWord for one that is not known; a null value is a word not stated, but for
    recomputation and MTP, where it is none."""
    if not isinstance(words, Mapping):
        raise SpecError(f"{where} ({show(words)}) is not a mapping of words to values; give one")
    for key, value in words.items():
        read_word(draft, str(key), value, f"{where}.{str(key)[:60]}", vocabulary)


def read_word(draft: Draft, key: str, value: object, where: str, vocabulary: Mapping[str, Read]) -> None:
    word = word_of(key)
    read = vocabulary.get(word) or KEYS.get(word)
    if read is None and _environment(draft, key, value):
        return
    if value is None:
        if read is _recompute:
            draft.fact("recompute", "none")
        elif word.startswith("mtp"):
            draft.fact("mtp", 0)
        elif not _known(word, vocabulary):
            raise UnknownWord(where, key)
    elif read is not None:
        read(draft, value, where)
    elif word in FIELDS:
        state_field(draft, word, value)
    elif word in UNMODELLED:
        feature = UNMODELLED[word]
        if not same_value(value, feature.default) and str(value) not in feature.also:
            found = feature.described(_Alone(), f"{word} {show(value)}") if feature.most is None else Unmodelled(
                f"{word} {show(value)}: {feature.what}", feature.effect, order=feature.order, outside=feature.outside)
            draft.unmodelled.append(found)
    elif not _known(word, vocabulary):
        raise UnknownWord(where, key)


def _known(word: str, vocabulary: Mapping[str, Read]) -> bool:
    return any(word in known for known in (vocabulary, KEYS, FIELDS, UNMODELLED, HARMLESS, _HARMLESS_FIELDS))


def _environment(draft: Draft, key: str, value: object) -> bool:
    if key in VARIABLES:
        draft.env[key] = str(value)
        return True
    return _OUTSIDE.fullmatch(key) is not None
