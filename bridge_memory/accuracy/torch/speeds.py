"""Measured speed of engines outside of megatron-core: a row of ``tests/data/engines/speeds.jsonl`` -> the run that it
was and its time. Rows that cannot be read say why.

But for three modes of checkpointing (torchao's) no source varies these engines' options at one model, batch and number
of GPUs, so that there is little to rank: what can be said is how far predicted times are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.readers import resolve_model
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    FSDPOptions,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.speed.hardware import HARDWARE, Hardware


class Speed(NamedTuple):
    """One row."""

    number: int
    #: Source, and what its rows have in common.
    kind: str
    run: RunSpec
    hardware: Hardware
    #: Measured, a step.
    seconds: float


class Unread(NamedTuple):
    """A row that is no run here, and the reason."""

    number: int
    reason: str


_GPUS = {
    "h100_80gb": "H100", "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB", "A100 80GB": "A100-80GB", "H100": "H100",
    "H100 96GB HBM2e 500W": "H100", "H200": "H200", "A800 80GB": "A800",
}  # fmt: skip
#: MPT of llm-foundry (``scripts/train/yamls/pretrain/mpt-*.yaml``): hidden size, heads, layers. The parameters that
#: they make are within a per cent of those that each row states.
_MPT = {
    "MPT-125m": (768, 12, 12), "MPT-350m": (1024, 16, 24), "MPT-760m": (1536, 12, 24), "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32), "MPT-7b": (4096, 32, 32), "MPT-13b": (5120, 40, 40), "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}  # fmt: skip
_MPT_VOCABULARY = 50368
_LLAMAS = {
    "Llama 3.1 8B": "meta-llama/Llama-3.1-8B", "Llama 3 8B": "meta-llama/Meta-Llama-3-8B",
    "Llama2 7b": "meta-llama/Llama-2-7b-hf", "Llama2 13b": "meta-llama/Llama-2-13b-hf",
    "Llama2 70b": "meta-llama/Llama-2-70b-hf",
    "Llama 3 8B (torchtitan PR 778; model not restated beside the table)": "meta-llama/Meta-Llama-3-8B",
}  # fmt: skip


def speed_of(row: Mapping[str, Any]) -> Speed | Unread:
    """One row."""
    try:
        hardware = HARDWARE.get(_GPUS.get(str(row.get("gpu")), ""))
        if hardware is None:
            raise SpecError(f"no figures of the GPU {row.get('gpu')}")
        rate = row.get("tokens_per_s_per_gpu")
        if not rate:
            raise SpecError("tokens per second are not stated")
        kind, run = _run(row)
    except SpecError as error:
        return Unread(row.get("id", 0), str(error))
    tokens = (run.batch.global_batch_size or 0) * run.batch.seq_length
    return Speed(row.get("id", 0), kind, run, hardware, tokens / (float(rate) * run.parallel.world_size))


def _run(row: Mapping[str, Any]) -> tuple[str, RunSpec]:
    framework = str(row.get("framework"))
    if framework == "composer FSDP1":
        return "llm-foundry, FSDP1", _composer(row)
    if framework == "PyTorch FSDP1":
        if row.get("recompute") != "No AC":
            raise SpecError("which layers selective checkpointing takes is not stated")
        return "fms-fsdp, FSDP1", _of_torch(row, "fsdp1")
    if framework == "torchtitan FSDP2":
        return _torchtitan(row)
    raise SpecError(f"{framework}: micro batch and sequences of a step are not stated")


def mpt(name: str, length: int) -> ModelSpec:
    """MPT as llm-foundry trains it: no biases, GELU, embeddings tied, a position learned for each of ``length``."""
    hidden, heads, layers = _MPT[name]
    base = resolve_model("openai/GPT-3-175B")
    layer = LayerSpec(
        AttentionSpec(heads, heads, hidden // heads, rotary=False),
        MLPSpec(4 * hidden, gated=False, activation="gelu"),
    )  # fmt: skip
    return replace(
        base, name=name, hidden_size=hidden, layers=(layer,) * layers, vocab_size=_MPT_VOCABULARY,
        max_position_embeddings=length, share_embeddings_and_output_weights=True,
    )  # fmt: skip


def _composer(row: Mapping[str, Any]) -> RunSpec:
    """Layers are counted as Megatron's with fused norms and FlashAttention, which MPT has too, and the optimizer's step
    in bf16. PURE reduces in bf16."""
    name = str(row.get("model"))
    if name not in _MPT:
        raise SpecError(f"the model {name} is not known by its sizes")
    reduce = "bf16" if str(row.get("optimizer")).endswith("PURE") else "fp32"
    full = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    gpus, micro, accumulation = row["gpus"], row["mbs"], row["ga"]
    strategy = str(row.get("optimizer")).split(" ", 1)[0]
    return RunSpec(
        model=mpt(name, row["seq"]), parallel=ParallelSpec(world_size=gpus),
        batch=BatchSpec(seq_length=row["seq"], micro_batch_size=micro, global_batch_size=micro * accumulation * gpus),
        recompute=full if row.get("recompute") == "full" else RecomputeSpec(),
        data_parallel=DataParallelSpec(engine="fsdp1"), implementation=ImplementationSpec(attention_backend="flash"),
        fsdp=FSDPOptions(sharding_strategy=strategy, param_dtype="bf16", reduce_dtype=reduce),
    )  # fmt: skip


def _torchtitan(row: Mapping[str, Any]) -> tuple[str, RunSpec]:
    technique, recompute = str(row.get("technique") or ""), str(row.get("recompute"))
    full = recompute == "full"
    if row.get("source") == "pytorch/ao":
        if not str(row.get("precision")).startswith("bfloat16, eager"):
            raise SpecError("float8 or torch.compile: no time is modelled for it")
        modes: dict[str, dict[str, Any]] = {
            "No AC": {}, "Full AC": {"gradient_checkpointing": True},
            "Selective per layer AC": {"selective_ac_option": "2"},
        }  # fmt: skip
        # Its micro batch is not stated; tokens per second hardly depend on it.
        return "torchao, FSDP2, eager", _of_torch({**row, "mbs": row.get("mbs") or 1}, "fsdp2", **modes[recompute])
    if technique not in ("FSDP", "FSDP 8, CP 1"):
        raise SpecError("torch.compile, float8, TP, CP or PP: no time is modelled for it, or not stated")
    mode: dict[str, Any] = {"gradient_checkpointing": True} if full else {"selective_ac_option": "op"}
    return "torchtitan, FSDP2, eager", _of_torch(row, "fsdp2", **mode)


def _of_torch(row: Mapping[str, Any], engine: str, **mode: Any) -> RunSpec:
    """torchtitan's layers, fp32 weights gathered in bf16."""
    name = _LLAMAS.get(str(row.get("model")))
    if name is None:
        raise SpecError(f"the model {row.get('model')} is not known by its sizes")
    gpus, micro = row["gpus"], row["mbs"]
    hybrid = "HSDP" in str(row.get("optimizer"))
    options: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "shard_degree": 8} if hybrid else {}
    return RunSpec(
        model=resolve_model(name), parallel=ParallelSpec(world_size=gpus), precision=PrecisionSpec(params_dtype="fp32"),
        batch=BatchSpec(seq_length=row["seq"], micro_batch_size=micro, global_batch_size=micro * gpus),
        data_parallel=DataParallelSpec(engine=engine), optimizer=OptimizerSpec(optimizer="adamw"),
        implementation=ImplementationSpec(transformer_impl="torchtitan"), transformers=TransformersSpec(**mode),
        fsdp=FSDPOptions(param_dtype="bf16", reduce_dtype="fp32", **options),
    )  # fmt: skip
