"""NeMo-RL's configuration (``examples/configs/grpo_math_1B.yaml`` and what builds on it).

Source: NeMo-RL 7ea279a ``models/policy/workers/megatron_policy_worker.py``, ``models/policy/__init__.py``,
``algorithms/grpo.py``, ``distributed/model_utils.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.readers.engines.files import table_of
from bridge_memory.rollout.inference import InferenceSpec
from bridge_memory.rollout.setup import PostTraining, Reference
from bridge_memory.rollout.sources.common import MOST_BYTES, defaults, model_of
from bridge_memory.rollout.sources.hydra import Options, flat
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.errors import bounded

_GIVE = "give NeMo-RL's YAML"
#: Files that build on one another.
_DEEPEST = 8
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "bf16": "bf16"}
_HARMLESS = re.compile(
    r"^(env|logger|checkpointing|data|loss_fn|grpo|dpo|sft|defaults|cluster)\.|^policy\.(tokenizer|scheduler|"
    r"max_grad_norm|make_sequence_length|dynamic_batching|sequence_packing\.(algorithm|sequence_length_round)|"
    r"generation_batch_size|optimizer\.|hf_config_overrides|reward_model_cfg|automodel_kwargs|dtensor_cfg|"
    r"megatron_cfg\."
    r"(scheduler|converter_type|pipeline_dtype|freeze_moe|moe_router_(load|bias)|env_vars|fp8_cfg$|"
    r"optimizer\.(lr|min_lr|weight|"
    r"bf16|fp16|params_dtype|adam_|sgd_|clip)|distributed_data_parallel_config|layernorm_epsilon|bias_activation|"
    r"moe_per_layer|train_iters|force_overwrite|gradient_accumulation_fusion|use_linear_ce|peft\.enabled)|generation\.("
    r"max_new_tokens|temperature|top_|stop_|vllm_cfg\.(use_deep_gemm|num_(last|first)|skip_tokenizer|load_format|"
    r"hf_overrides|"
    r"enable_vllm_metrics)|colocated\.resources))"
)


def read_nemo_rl(
    source: str, words: Sequence[str] = (), *, release: str = "", model: str | None = None, text: str | None = None
) -> PostTraining:
    """The job of a YAML, over what it builds on. Arguments and errors as in ``verl.read_verl``."""
    options = Options(defaults("nemo_rl_defaults"), "NeMo-RL")
    tables = _chain(source, 0, text)
    if not any("policy" in table for table in tables):
        raise SpecError(f"{bounded(source, 80)} has no policy; {_GIVE}")
    for table in tables:
        options.update(flat({k: v for k, v in table.items() if k != "defaults"}))
    options.override([f"++{word.lstrip('+')}" for word in words])
    return _read(options, release, model, text is None)


def _chain(path: str, depth: int, text: str | None = None) -> list[Mapping[str, Any]]:
    """The file, after those that its ``defaults`` name, of which ``grpo_math_1B.yaml`` is known."""
    if depth > _DEEPEST:
        raise SpecError(f"{bounded(path, 80)} builds on more than {_DEEPEST} files; {_GIVE} as one")
    table = table_of(read_text(path, _GIVE, MOST_BYTES) if text is None else text, path)
    base = table.get("defaults")
    names = [base] if isinstance(base, str) else base if isinstance(base, list) else []
    found: list[Mapping[str, Any]] = []
    for name in names:
        beside = os.path.join(os.path.dirname(path), str(name))
        if text is None and os.path.exists(beside):
            found += _chain(beside, depth + 1)
        elif os.path.basename(str(name)) not in ("grpo_math_1B.yaml", "_self_"):
            raise SpecError(
                f"{bounded(str(name), 80)}, on which {bounded(path, 80)} builds, is not beside it; put it there"
            )
    return [*found, table]


def _need(o: Options, name: str) -> int:
    found = o.integer(name)
    if found is None:
        raise SpecError(f"{name} is not given; give a whole number")
    return found


def _read(o: Options, release: str, given: str | None, files: bool) -> PostTraining:
    assumptions: list[str] = []
    not_modelled: list[str] = []
    model, said = model_of(o.text("policy.model_name"), "policy.model_name", given, files=files)
    assumptions += [said] * bool(said)
    if not o.flag("policy.generation.colocated.enabled", True):
        raise SpecError(
            "policy.generation.colocated.enabled (False): an engine on GPUs of its own is not modelled; give True"
        )
    if o.flag("grpo.async_grpo.enabled"):
        raise SpecError(
            "grpo.async_grpo.enabled (True) needs an engine on GPUs of its own, which is not modelled; give False"
        )
    world = _need(o, "cluster.gpus_per_node") * _need(o, "cluster.num_nodes")
    longest = _need(o, "policy.max_total_sequence_length")
    megatron = o.flag("policy.megatron_cfg.enabled")
    packed, dynamic = o.flag("policy.sequence_packing.enabled"), o.flag("policy.dynamic_batching.enabled")
    rows = _need(o, "policy.train_micro_batch_size"), _need(o, "policy.logprob_batch_size")
    trainer = _of_megatron(o, model, world, packed, not_modelled) if megatron else _of_dtensor(
        o, model, world, packed, assumptions, not_modelled
    )  # fmt: skip
    cp = trainer.parallel.cp
    part = "policy.sequence_packing" if packed else "policy.dynamic_batching"
    limited = packed or dynamic
    update = _need(o, f"{part}.train_mb_tokens") if limited else rows[0] * longest
    logs = _need(o, f"{part}.logprob_mb_tokens") if limited else rows[1] * longest
    chunk = o.integer("policy.logprob_chunk_size") or 0
    if chunk and not o.flag("policy.megatron_cfg.defer_fp32_logits") and megatron:
        assumptions.append("policy.logprob_chunk_size has no effect on the logits without defer_fp32_logits")
        chunk = 0
    skipped = o.flag("grpo.skip_reference_policy_logprobs_calculation")
    reference = Reference.NONE if skipped else Reference.SWAPPED
    engine = _engine(o, model, longest, not_modelled)
    batch = _need(o, "policy.train_global_batch_size")
    not_modelled += [bounded(name, 120) for name in o.unread() if not _HARMLESS.search(name)]
    assumptions.append("weights are sent through buffers of 30 % of what is free, which fit by construction")
    number = re.match(r"v?(\d+)\.(\d+)", release)
    return PostTraining(
        framework="nemo-rl", release=(int(number[1]), int(number[2])) if number else (0, 0), trainer=trainer,
        engine=engine, longest=longest, update_tokens=max(update, longest), log_prob_tokens=max(logs, longest),
        update_sequences=max(1, batch // (world // (trainer.parallel.tp * trainer.parallel.pp * cp))),
        deferred_logits=megatron and o.flag("policy.megatron_cfg.defer_fp32_logits"), hard_limit=True,
        dynamic=limited and trainer.batch.packed_sequences, log_prob_entropy=False, chunk_size=chunk,
        param_offload=True, optimizer_offload=True, reference=reference, sleep_level=1,
        passes_keep_optimizer=not o.flag("policy.offload_optimizer_for_logprob"),
        gpus_per_node=_need(o, "cluster.gpus_per_node"), assumptions=tuple(assumptions),
        not_modelled=tuple(not_modelled),
    )  # fmt: skip


def _of_megatron(o: Options, model: ModelSpec, world: int, packed: bool, not_modelled: list[str]) -> RunSpec:
    part = "policy.megatron_cfg"
    tp = _need(o, f"{part}.tensor_model_parallel_size")
    ends: dict[str, Any] = {
        name: value for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (value := o.integer(f"{part}.{name}")) is not None
    }  # fmt: skip
    parallel = ParallelSpec(
        world_size=world, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=_need(o, f"{part}.pipeline_model_parallel_size"),
        virtual_pipeline_model_parallel_size=o.integer(f"{part}.virtual_pipeline_model_parallel_size"),
        context_parallel_size=_need(o, f"{part}.context_parallel_size"),
        expert_model_parallel_size=_need(o, f"{part}.expert_model_parallel_size"),
        expert_tensor_parallel_size=o.integer(f"{part}.expert_tensor_parallel_size"),
        sequence_parallel=o.flag(f"{part}.sequence_parallel") and tp > 1, **ends,
    )  # fmt: skip
    if o.flag(f"{part}.peft.enabled"):
        not_modelled.append(f"{part}.peft")
    if o.get(f"{part}.fp8_cfg.enabled"):
        not_modelled.append(f"{part}.fp8_cfg")
    optimizer: dict[str, Any] = {
        "use_precision_aware_optimizer": o.flag(f"{part}.optimizer.use_precision_aware_optimizer")
    }
    if o.flag(f"{part}.optimizer.optimizer_cpu_offload"):
        fraction = o.number(f"{part}.optimizer.optimizer_offload_fraction") or 1.0
        optimizer |= {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    if not o.flag(f"{part}.optimizer.use_distributed_optimizer", True):
        optimizer.pop("use_precision_aware_optimizer")
    recompute = RecomputeSpec(granularity="full", method="uniform", num_layers=1) if o.flag(
        f"{part}.activation_checkpointing"
    ) else RecomputeSpec()  # fmt: skip
    impl: dict[str, Any] = {}
    if model.has_experts:
        impl = {"moe_permute_fusion": o.flag(f"{part}.moe_permute_fusion"),
                "moe_router_dtype": o.get(f"{part}.moe_router_dtype")}  # fmt: skip
    dtype = _DTYPES.get(o.text("policy.precision", "bfloat16"), "bf16")
    in_fp32 = o.flag(f"{part}.distributed_data_parallel_config.grad_reduce_in_fp32")
    return RunSpec(
        model=model, parallel=parallel, batch=BatchSpec(packed_sequences=packed),
        precision=PrecisionSpec(params_dtype=dtype), optimizer=OptimizerSpec(**optimizer), recompute=recompute,
        data_parallel=DataParallelSpec(
            use_distributed_optimizer=o.flag(f"{part}.optimizer.use_distributed_optimizer", True),
            grad_reduce_in_fp32=in_fp32,
        ),
        implementation=ImplementationSpec(**impl),
    )  # fmt: skip


def _of_dtensor(
    o: Options, model: ModelSpec, world: int, packed: bool, assumptions: list[str], not_modelled: list[str]
) -> RunSpec:
    from bridge_memory.spec import FSDPOptions
    from bridge_memory.spec.transformers import TransformersSpec

    part = "policy.dtensor_cfg"
    for name in ("tensor_parallel_size", "context_parallel_size"):
        if _need(o, f"{part}.{name}") > 1:
            not_modelled.append(f"{part}.{name}: tensor or context parallelism of transformers' layers")
    assumptions.append("DTensor policy: FSDP2 with fp32 weights, bf16 in layers")
    checkpointing = o.flag(f"{part}.activation_checkpointing")
    hf: dict[str, Any] = {"gradient_checkpointing": checkpointing, "attention_mask": "none" if packed else "padded"}
    if checkpointing:
        hf["use_reentrant"] = False
    if packed:
        hf["attn_implementation"] = "flash_attention_2"
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=world), batch=BatchSpec(packed_sequences=packed),
        precision=PrecisionSpec(params_dtype="fp32"),
        data_parallel=DataParallelSpec(engine="fsdp2", sync_each_batch=True),
        fsdp=FSDPOptions(param_dtype=_DTYPES.get(o.text("policy.precision"), "bf16"), reduce_dtype="fp32",
                         offload_params=o.flag(f"{part}.cpu_offload")),
        transformers=TransformersSpec(**hf),
    )  # fmt: skip


def _engine(o: Options, model: ModelSpec, longest: int, not_modelled: list[str]) -> InferenceSpec:
    backend = o.text("policy.generation.backend", "vllm")
    if backend not in ("vllm", "sglang"):
        raise SpecError(f"policy.generation.backend ({bounded(backend, 40)}) is not modelled; give vllm or sglang")
    own = o.table("policy.generation.vllm_kwargs")
    if backend == "sglang":
        part = "policy.generation.sglang_cfg"
        return InferenceSpec(
            model=model, framework="sglang", max_model_len=o.integer(f"{part}.context_length") or longest,
            tensor_parallel_size=o.integer(f"{part}.tensor_parallel_size") or o.integer(f"{part}.tp_size") or 1,
            mem_fraction_static=o.number(f"{part}.mem_fraction_static"),
        )  # fmt: skip
    part = "policy.generation.vllm_cfg"
    tp, ep = _need(o, f"{part}.tensor_parallel_size"), _need(o, f"{part}.expert_parallel_size")
    fields: dict[str, Any] = {}
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if type(own.get(name)) is int:
            fields[name] = own.pop(name)
    precision = o.text(f"{part}.precision", "bfloat16")
    if precision == "fp8":
        fields["quantization"] = "fp8_blockwise"
    not_modelled += [f"policy.generation.vllm_kwargs.{bounded(key, 60)}" for key, value in own.items()
                     if not key.startswith("compilation_config") and value not in (None, {})]  # fmt: skip
    return InferenceSpec(
        model=model, tensor_parallel_size=tp, data_parallel_size=max(1, ep // tp) if ep > 1 else 1,
        expert_parallel=ep > 1, pipeline_parallel_size=_need(o, f"{part}.pipeline_parallel_size"),
        gpu_memory_utilization=o.number(f"{part}.gpu_memory_utilization"),
        max_model_len=o.integer(f"{part}.max_model_len") or longest, enforce_eager=o.flag(f"{part}.enforce_eager"),
        served=o.flag(f"{part}.async_engine"), **fields,
    )  # fmt: skip
