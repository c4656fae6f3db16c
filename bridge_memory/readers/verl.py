"""verl's configuration -> the run of its actor: the update of the policy, which is the training of a step.

Source: verl 0.8 ``trainer/config/_generated_ppo_trainer.yaml`` and ``_generated_ppo_megatron_trainer.yaml``,
``workers/engine/fsdp/transformer_impl.py``, ``workers/engine/megatron/transformer_impl.py``. Rollout, reference, critic
and reward share the GPUs; they are no part of the run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge_memory.readers.resolve import resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    FSDPOptions,
    ImplementationSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
    show,
)
from bridge_memory.spec.transformers import TransformersSpec

_GIVE = "give verl's configuration, with actor_rollout_ref, data and trainer"
#: A snapshot in the Hub's cache.
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)")


def run_from_verl(config: Mapping[str, Any]) -> RunSpec:
    """The training of the actor of verl's configuration, of which values are resolved.

    Raises:
        SpecError: It is no configuration of verl, the strategy is another than megatron, fsdp and fsdp2, or the model
            is not known here.
    """
    actor = _table(config, "actor_rollout_ref", "actor")
    model = _model(_table(config, "actor_rollout_ref", "model").get("path"))
    trainer = _table(config, "trainer")
    world = _whole(trainer, "n_gpus_per_node", 1) * _whole(trainer, "nnodes", 1)
    length = _whole(_table(config, "data"), "max_prompt_length", 512) + _whole(
        _table(config, "data"), "max_response_length", 512
    )
    assumptions = ["the update of the actor alone; rollout, reference and critic are beside it on the same GPUs"]
    micro = actor.get("ppo_micro_batch_size_per_gpu")
    if actor.get("use_dynamic_bsz"):
        # Sequences are packed up to so many tokens a micro batch; ranks of context parallelism share them.
        length, micro = _whole(actor, "ppo_max_token_len_per_gpu", 16384), 1
        assumptions.append(f"micro batches of {length} packed tokens a GPU, as ppo_max_token_len_per_gpu says")
    elif not isinstance(micro, int):
        micro = 1
        assumptions.append("micro batches of 1 sequence: ppo_micro_batch_size_per_gpu is not given")
    strategy = actor.get("strategy")
    if strategy == "megatron":
        return _megatron(actor, model, world, length, micro, assumptions)
    if strategy in ("fsdp", "fsdp2"):
        return _fsdp(config, actor, model, world, length, micro, assumptions)
    raise SpecError(f"actor.strategy ({show(strategy)}) is not read; give megatron, fsdp or fsdp2")


def _table(config: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    found: Any = config
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise SpecError(f"{'.'.join(names)} is missing; {_GIVE}")
    return found


def _whole(table: Mapping[str, Any], name: str, default: int) -> int:
    value = table.get(name, default)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise SpecError(f"{name} ({show(value)}) is no positive number; correct it")
    return value


def _model(path: object) -> ModelSpec:
    """By its path, by its name in the Hub's cache, or by the last part of its path."""
    if not isinstance(path, str) or not path:
        raise SpecError(f"model.path ({show(path)}) is missing; {_GIVE}")
    cached = _CACHED.search(path)
    names = [f"{cached[1]}/{cached[2]}"] if cached else []
    names += [path, path.rstrip("/").rsplit("/", 1)[-1]]
    for name in dict.fromkeys(names[:-1]):
        try:
            return resolve_model(name)
        except SpecError:
            continue
    return resolve_model(names[-1])


def _megatron(
    actor: Mapping[str, Any], model: ModelSpec, world: int, length: int, micro: int, assumptions: list[str]
) -> RunSpec:
    m = _table(actor, "megatron")
    changed = m.get("override_transformer_config") or {}
    changed = changed if isinstance(changed, Mapping) else {}
    cp, tp = _whole(m, "context_parallel_size", 1), _whole(m, "tensor_model_parallel_size", 1)
    length = length * cp if actor.get("use_dynamic_bsz") else length
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if m.get(name):
            assumptions.append(f"{name}: on the GPU while the actor is updated, on the host in the other phases")
    granularity = changed.get("recompute_granularity")
    modules = changed.get("recompute_modules") or ("core_attn",)
    recompute = RecomputeSpec()
    if granularity == "full":
        recompute = RecomputeSpec(
            granularity="full", method=changed.get("recompute_method") or "uniform",
            num_layers=changed.get("recompute_num_layers") or 1,
        )
    elif granularity == "selective":
        recompute = RecomputeSpec(granularity="selective", modules=tuple(modules))
    return RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=world, tensor_model_parallel_size=tp, context_parallel_size=cp,
            pipeline_model_parallel_size=_whole(m, "pipeline_model_parallel_size", 1),
            virtual_pipeline_model_parallel_size=m.get("virtual_pipeline_model_parallel_size"),
            expert_model_parallel_size=_whole(m, "expert_model_parallel_size", 1),
            expert_tensor_parallel_size=m.get("expert_tensor_parallel_size"),
            sequence_parallel=bool(m.get("sequence_parallel", True)) and tp > 1,
        ),
        batch=BatchSpec(micro_batch_size=micro, seq_length=length),
        recompute=recompute,
        data_parallel=DataParallelSpec(use_distributed_optimizer=bool(m.get("use_distributed_optimizer", True))),
        assumptions=tuple(assumptions),
    )  # fmt: skip


def _fsdp(
    config: Mapping[str, Any], actor: Mapping[str, Any], model: ModelSpec, world: int, length: int, micro: int,
    assumptions: list[str],
) -> RunSpec:  # fmt: skip
    """Weights are kept in ``model_dtype`` and computed in ``dtype``; gradients are reduced in fp32."""
    f = _table(actor, "fsdp_config")
    names = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    kept, computed = names.get(str(f.get("model_dtype"))), names.get(str(f.get("dtype", "bfloat16")))
    if kept is None or computed is None:
        raise SpecError(f"model_dtype ({show(f.get('model_dtype'))}) is not read; give fp32 or bf16")
    for name in ("param_offload", "optimizer_offload"):
        if f.get(name):
            assumptions.append(f"{name}: on the GPU while the actor is updated, on the host in the other phases")
    ulysses = f.get("ulysses_sequence_parallel_size") or actor.get("ulysses_sequence_parallel_size") or 1
    if isinstance(ulysses, int) and ulysses > 1:
        assumptions.append(f"sequences divided over {ulysses} ranks (Ulysses): its all-to-all buffers are not counted")
        length = max(1, length if actor.get("use_dynamic_bsz") else length // ulysses)
    two = actor.get("strategy") == "fsdp2"
    shared = f.get("fsdp_size", -1)
    options: dict[str, Any] = {"param_dtype": computed, "reduce_dtype": "fp32"}
    if two:
        options["reshard_after_forward"] = bool(f.get("reshard_after_forward", True))
        options["offload_params"] = bool(f.get("offload_policy"))
        if isinstance(shared, int) and 1 < shared < world:
            options["shard_degree"] = shared
    elif isinstance(shared, int) and 1 < shared < world:
        options |= {"sharding_strategy": "HYBRID_SHARD", "shard_degree": shared}
    checkpointing = bool(_table(config, "actor_rollout_ref", "model").get("enable_gradient_checkpointing", True))
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=world),
        batch=BatchSpec(micro_batch_size=micro, seq_length=length),
        precision=PrecisionSpec(params_dtype=kept),
        optimizer=OptimizerSpec(optimizer="adamw"),
        data_parallel=DataParallelSpec(engine="fsdp2" if two else "fsdp1"),
        implementation=ImplementationSpec(transformer_impl="transformers"),
        transformers=TransformersSpec(
            gradient_checkpointing=checkpointing, use_reentrant=False if checkpointing else None,
            attn_implementation="flash_attention_2",
        ),
        fsdp=FSDPOptions(**options),
        assumptions=tuple(assumptions),
    )  # fmt: skip
