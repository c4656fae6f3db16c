"""Megatron-LM's arguments -> a ConfigContainer with the configs that Megatron-LM derives from them.

Sources: ``megatron/training/arguments.py: validate_args``, ``core_transformer_config_from_args``,
``megatron/training/training.py: get_megatron_ddp_config, get_megatron_optimizer_config`` and, for vocabularies,
``megatron/training/tokenizer/tokenizer.py`` and ``megatron/core/tokenizers``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from bridge_memory.readers.megatron_args.arguments import READ, Arguments
from bridge_memory.readers.patterns import HybridPattern
from bridge_memory.readers.transformer_config import pattern_of
from bridge_memory.releases import FSDP_SHARDS_ALL, NULL_TOKENIZER_COUNTS_ALL, Running
from bridge_memory.spec import SpecError, divide, show
from bridge_memory.spec.layout_string import parse_layout_string
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect, Unmodelled

#: Tokens of the GPT-2 byte-pair vocabulary (``gpt2-vocab.json``), Megatron-LM's usual tokenizer.
GPT2_VOCABULARY = 50257

#: A bucket size, in elements, larger than any rank's parameters: one bucket.
ONE_BUCKET = (1 << 40) - 1

NAME = "megatron-lm"


@dataclass(frozen=True, slots=True)
class MegatronLM:
    """The parts of a ConfigContainer that its reader needs."""

    model: SimpleNamespace
    train: SimpleNamespace
    optimizer: SimpleNamespace
    ddp: SimpleNamespace
    logger: SimpleNamespace
    dataset: SimpleNamespace
    checkpoint: SimpleNamespace
    world_size: int | None
    #: Environment variables that the source of the arguments states.
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = NAME
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()


def container_of(a: Arguments, running: Running, world_size: int | None) -> MegatronLM:
    """The container of ``a``, with fields named as in TransformerConfig, OptimizerConfig and
    DistributedDataParallelConfig; ``core_transformer_config_from_args`` copies most by name. Raises SpecError."""
    values = {name: a[name] for name in READ}
    values.update(_architecture(a))
    values.update(_position(a))
    vocabulary, assumed = _vocabulary(a, running)
    values.update(vocabulary)
    unmodelled = list(a.not_modelled())
    if values["experimental_attention_variant"] not in (None, "gated_delta_net", "dsa"):
        variant = f"--experimental-attention-variant {values['experimental_attention_variant']}"
        unmodelled.append(Unmodelled(f"{variant}: another attention", Effect.UNKNOWN, order=UNKNOWN_SIZE))
        values["experimental_attention_variant"] = None
    values.update(_stages(a, values))
    values.update(_implementation(a))
    micro = a.required("micro_batch_size")
    return MegatronLM(
        model=SimpleNamespace(**values),
        train=SimpleNamespace(
            micro_batch_size=micro, global_batch_size=a["global_batch_size"] or _global_batch(a, micro, world_size)
        ),
        optimizer=SimpleNamespace(**{**values, **_optimizer(a)}),
        ddp=SimpleNamespace(**_ddp(a, running)),
        logger=SimpleNamespace(log_params_norm=a["log_params_norm"], log_interval=a["log_interval"]),
        dataset=SimpleNamespace(
            skip_getting_attention_mask_from_dataset=not a["create_attention_mask_in_dataloader"]
        ),
        checkpoint=SimpleNamespace(**_checkpoint(a)),
        world_size=world_size,
        env=a.env,
        assumptions=(assumed,) if assumed else (),
        not_modelled=tuple(unmodelled),
    )


def _checkpoint(a: Arguments) -> dict[str, Any]:
    """Under the names of Megatron Bridge."""
    alike = (
        "ckpt_format", "dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient",
        "async_save", "use_persistent_ckpt_worker", "finetune",
    )  # fmt: skip
    return {name: a[name] for name in alike} | {
        # validate_args
        "stream_ckpt_dequant": a["stream_ckpt_dequant"] and not (a["fp8"] and a["fp8_recipe"] == "tensorwise"),
        "fully_parallel_save": a["ckpt_fully_parallel_save"], "fully_parallel_load": a["ckpt_fully_parallel_load"],
        "load_optim": not a["no_load_optim"], "save_optim": not a["no_save_optim"],
    }  # fmt: skip


def _architecture(a: Arguments) -> dict[str, Any]:
    hidden, swiglu = a.required("hidden_size"), a["swiglu"]
    a.required("num_attention_heads")
    if swiglu and a["squared_relu"]:  # core_transformer_config_from_args
        raise SpecError("--squared-relu does not go with --swiglu; drop one of them")
    gated = swiglu or a["quick_geglu"]
    # validate_args: 4h; for SwiGLU two thirds of that, rounded down to a multiple of 64.
    ffn = a["ffn_hidden_size"] or (int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden)
    bias_gelu_fusion = a["bias_gelu_fusion"] and a["add_bias_linear"]  # validate_args
    balancing = a["moe_router_load_balancing_type"]
    return {
        "ffn_hidden_size": ffn,
        "num_query_groups": a["num_query_groups"] if a["group_query_attention"] else None,
        "gated_linear_unit": gated,
        "activation_func": "silu" if swiglu else "squared_relu" if a["squared_relu"] else (
            "quick_gelu" if gated else "gelu"
        ),
        "bias_activation_fusion": a["bias_swiglu_fusion"] if swiglu else bias_gelu_fusion,
        "num_moe_experts": a["num_experts"] or None,
        "moe_router_load_balancing_type": balancing[0] if len(balancing) == 1 else list(balancing),
        "share_embeddings_and_output_weights": not a["untie_embeddings_and_output_weights"],
        "window_size": _window(a["window_size"]),
    }


def _window(value: Any) -> tuple[int, ...] | None:
    numbers = re.findall(r"-?\d+", str(value))
    if any(len(n) > 18 for n in numbers):
        raise SpecError(f"--window-size is {show(value)}; give two numbers of tokens")
    return tuple(map(int, numbers)) or None


def _position(a: Arguments) -> dict[str, Any]:
    """``validate_args``: ``--no-position-embedding`` is accepted only with rope and has no effect; of the rotary
    embeddings only "rope" can be fused."""
    kind = "rope" if a["use_rotary_position_embeddings"] else a["position_embedding_type"]
    return {
        "position_embedding_type": kind,
        "apply_rope_fusion": a["apply_rope_fusion"] and kind == "rope",
        "max_sequence_length": a["max_position_embeddings"],
    }


def _vocabulary(a: Arguments, running: Running) -> tuple[dict[str, Any], str]:
    """(fields of the vocabulary before padding, an assumption or "")."""
    size, padded, multiple = a["vocab_size"], a["padded_vocab_size"], a["make_vocab_size_divisible_by"]
    tokenizer, assumed = a["tokenizer_type"] or "GPT2BPETokenizer", ""
    if size is None and not a.parsed:
        size = GPT2_VOCABULARY
        if padded is None and tokenizer not in ("GPT2BPETokenizer", "GPT2BPE"):
            assumed = f"GPT-2's {size} tokens: the size of {tokenizer} is not in the arguments"
    elif size is not None and tokenizer == "NullTokenizer" and (
        a["legacy_tokenizer"] or not NULL_TOKENIZER_COUNTS_ALL(running)
    ):
        size += 1
    pads = a["pad_vocab_size"]
    if padded is not None:
        by = multiple * a["tensor_model_parallel_size"]
        # The padded size is final. If padding vocab_size gives the same, keep vocab_size, which says more.
        if not (pads and size is not None and -(-size // by) * by == padded):
            size, pads = padded, False
    return {"vocab_size": size, "should_pad_vocab": pads}, assumed


def _stages(a: Arguments, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the number of layers and of the pipeline layout."""
    pattern = _hybrid_pattern(a)
    layers = len(pattern.layers) if pattern is not None else a.required("num_layers", "encoder_num_layers")
    layout = (a["pipeline_model_parallel_layout"] or "").replace("\\", "").strip("'\"") or None
    return {
        "num_layers": layers,
        "is_hybrid_model": pattern is not None,
        "seq_length": a.required("seq_length", "encoder_seq_length"),
        "num_layers_in_first_pipeline_stage": a["decoder_first_pipeline_num_layers"],
        "num_layers_in_last_pipeline_stage": a["decoder_last_pipeline_num_layers"],
        "pipeline_model_parallel_layout": layout,
        "virtual_pipeline_model_parallel_size": _virtual_stages(a, layers, layout),
    }


def _hybrid_pattern(a: Arguments) -> HybridPattern | None:
    named = {key: a[key] for key in READ if key.startswith("hybrid_")}
    marked = a["is_hybrid_model"] or "mamba" in (a["spec"] or "")
    drawn = named["hybrid_layer_pattern"] or named["hybrid_override_pattern"]
    layers = None if drawn else a.required("num_layers", "encoder_num_layers")
    return pattern_of(SimpleNamespace(**named, is_hybrid_model=marked, num_layers=layers), NAME)


def _virtual_stages(a: Arguments, layers: int, layout: str | None) -> int | None:
    """Virtual stages (``validate_args``): with a layout string, its number of stages over PP."""
    pp = a["pipeline_model_parallel_size"]
    given = a["num_virtual_stages_per_pipeline_rank"] or a["virtual_pipeline_model_parallel_size"]
    if layout is not None:
        size = divide(len(parse_layout_string(layout)), pp, "stages of --pipeline-model-parallel-layout",
                      "--pipeline-model-parallel-size", "list a multiple of it")
    elif given:
        size = given
    elif (per_chunk := a["num_layers_per_virtual_pipeline_stage"]) is not None:
        slots = layers + a["account_for_embedding_in_pipeline_split"] + a["account_for_loss_in_pipeline_split"]
        a_stage = divide(slots, pp, "--num-layers", "--pipeline-model-parallel-size", "use a layer layout")
        size = divide(a_stage, per_chunk, "layers a pipeline stage",
                      "--num-layers-per-virtual-pipeline-stage", "choose a divisor")
    else:
        return None
    return int(size) if size > 1 else None


def _global_batch(a: Arguments, micro: int, world_size: int | None) -> int | None:
    """Megatron-LM's default: one microbatch per data-parallel replica."""
    ranks = a["tensor_model_parallel_size"] * a["pipeline_model_parallel_size"] * a["context_parallel_size"]
    return None if world_size is None else micro * (world_size // ranks)


def _implementation(a: Arguments) -> dict[str, Any]:
    granularity, modules = a["recompute_granularity"], a["recompute_modules"]
    return {
        "transformer_impl": "local" if a["use_legacy_models"] else a["transformer_impl"],
        "recompute_granularity": "selective" if granularity is None and a["recompute_activations"] else granularity,
        "recompute_modules": modules,
        "cpu_offloading": a["cpu_offloading"] or a["cpu_offloading_num_layers"] > 0,
    }


def _optimizer(a: Arguments) -> dict[str, Any]:
    """Muon with a distributed optimizer means the layer-wise optimizer, which distributes whole parameters
    (layer_wise_optimizer.py)."""
    name, sharded = a["optimizer"], a["use_distributed_optimizer"] or a["use_megatron_fsdp"]
    whole = name.startswith("dist_") or ("muon" in name and sharded)
    return {
        "use_distributed_optimizer": sharded and "muon" not in name,
        "use_layer_wise_distributed_optimizer": a["use_layer_wise_distributed_optimizer"] or whole,
        # It does not change where parameters are stored, only the buckets (_ddp).
        "overlap_param_gather_with_optimizer_step": False,
    }


def _unless_auto(dtype: str) -> str | None:
    """``arguments.py: map_dtype``."""
    return None if dtype == "auto" else dtype


def _ddp(a: Arguments, running: Running) -> dict[str, Any]:
    # validate_args: bf16 accumulates gradients in fp32 unless --grad-reduce-in-bf16; fp16 does not.
    fp32_gradients = a["accumulate_allreduce_grads_in_fp32"] or (
        a["bf16"] and not a["grad_reduce_in_bf16"] and a["main_grads_dtype"].endswith(("fp32", "float32"))
    )
    return {
        "grad_reduce_in_fp32": fp32_gradients,
        "overlap_grad_reduce": a["overlap_grad_reduce"],
        "overlap_param_gather": a["overlap_param_gather"],
        "use_distributed_optimizer": _optimizer(a)["use_distributed_optimizer"],
        # training/models/dist_utils.py: _ddp_wrap makes one bucket per chunk.
        "bucket_size": ONE_BUCKET if a["overlap_param_gather_with_optimizer_step"] else a["ddp_bucket_size"],
        "num_distributed_optimizer_instances": a["num_distributed_optimizer_instances"],
        "use_megatron_fsdp": a["use_megatron_fsdp"],
        "megatron_fsdp_main_grads_dtype": _unless_auto(a["megatron_fsdp_main_grads_dtype"]),
        "megatron_fsdp_grad_comm_dtype": (
            "bf16" if a["grad_reduce_in_bf16"] else _unless_auto(a["megatron_fsdp_grad_comm_dtype"])
        ),
        "suggested_communication_unit_size": a["suggested_communication_unit_size"],
        **{
            name: a[name]
            for name in ("fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail",
                         "megatron_fsdp_max_pool_double_buffer", "nccl_ub")
        },
        "data_parallel_sharding_strategy": a["data_parallel_sharding_strategy"]
        or ("optim_grads_params" if FSDP_SHARDS_ALL(running) else "no_shard"),
        "fp8_param_gather": a["fp8_param_gather"],
        "fp4_param_gather": a["fp4_param_gather"] or a["fp4_param"],
    }
