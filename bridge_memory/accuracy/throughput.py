"""Measured throughput: a row of a corpus -> the run that it was and its time. Rows that cannot be read say why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bridge_memory.accuracy.corpus import read_corpus
from bridge_memory.accuracy.runs import UNSTATED, with_unstated
from bridge_memory.readers import resolve_model
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.speed.hardware import HARDWARE, Hardware
from bridge_memory.speed.megatron.kernels import Kernels
from bridge_memory.speed.megatron.work import model_flops


class MeasuredRun(NamedTuple):
    """One row: seconds a step (None where it ran out of memory)."""

    number: int
    group: str
    source: str
    run: RunSpec
    hardware: Hardware
    kernels: Kernels
    seconds: float | None
    out_of_memory: bool
    #: Whether layers, pipeline and optimizer are Megatron's own (of Aleph Alpha and BigScience some of them are not).
    megatron: bool = True


class Unread(NamedTuple):
    """A row that is no run here, and the reason."""

    number: int
    group: str
    reason: str


_GPUS = {
    "A100 80GB": "A100-80GB", "a100_80gb": "A100-80GB", "A100 80GB SXM": "A100-80GB", "a100_40gb": "A100-40GB",
    "A800 80GB": "A800", "H100": "H100", "h100_80gb": "H100", "H100 80GB": "H100", "H200": "H200", "B200": "B200",
    "GB200": "GB200", "GB300": "GB300", "B300": "B300", "V100": "V100-32GB", "V100 32GB/16GB": "V100-32GB",
    "MI300": "MI300X",
}  # fmt: skip

#: Bytes a second of the network of one of BigScience's nodes: four Omni-Path adapters of 100 Gbit/s, for eight A100
#: (``bigscience/train/tr11-176B-ml/README.md``) or for four V100.
_JEAN_ZAY = 4 * 12.5e9

#: Heads of BigScience's rows that state none: two runs that its tables list twice have 64 where they have a number.
_BIGSCIENCE_HEADS = 64
#: Rows of BLOOM's vocabulary (``train/tr11-176B-ml/tr11-176B-ml.slurm``: ``--pad-vocab-size-to``), which
#: the runs before its section on rebalancing do not have: a stage with its output layer would have been far slower.
_BLOOM_VOCABULARY = 250880

#: Of the first layers of a model: (preset, layers).
_FIRST_LAYERS = {
    "llama3-70b (12 layers)": ("meta-llama/Meta-Llama-3-70B", 12),
    "llama3-405b (4 layers)": ("meta-llama/Llama-3.1-405B", 4),
    "deepseekv2 (4 layers)": ("deepseek-ai/DeepSeek-V2", 4), "deepseekv3 (4 layers)": ("deepseek-ai/DeepSeek-V3", 4),
}  # fmt: skip


def read_throughput(path: Path) -> list[MeasuredRun | Unread]:
    """Every row of a corpus of throughput. Raises SpecError for text that is none."""
    return [measured(row.data) for row in read_corpus(path)]


def measured(row: Mapping[str, Any]) -> MeasuredRun | Unread:
    """One row."""
    number, group = row.get("id", 0), row.get("layout_group") or ""
    try:
        hardware = HARDWARE.get(_GPUS.get(str(row.get("gpu")), ""))
        if hardware is None:
            raise SpecError(f"no figures of the GPU {row.get('gpu')}")
        if _of_bigscience(row):
            hardware = hardware._replace(network=_JEAN_ZAY / (4 if hardware.generation == "volta" else 8))
        run, kernels = _run(row)
        seconds = _seconds(row, run)
    except SpecError as error:
        return Unread(number, group, str(error))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        return Unread(number, group, f"malformed ({type(error).__name__})")
    out = row.get("status") == "OOM"
    if seconds is None and not out:
        return Unread(number, group, "no step time, no tokens per second and, of a dense model, no FLOPS are stated")
    own = not any(name in str(row.get("framework")) for name in ("AA-Scaling", "DeepSpeed"))
    source, seconds = str(row.get("source")), None if out else seconds
    return MeasuredRun(number, group, source, run, hardware, kernels, seconds, out, own)


def _seconds(row: Mapping[str, Any], run: RunSpec) -> float | None:
    if row.get("step_time_s"):
        return float(row["step_time_s"])
    rate, batch = row.get("tokens_per_s_per_gpu"), run.batch
    if batch.global_batch_size and rate:
        return batch.global_batch_size * batch.seq_length / (float(rate) * run.parallel.world_size)
    rate = row.get("tflops_per_gpu")
    if batch.global_batch_size and rate and not run.model.has_experts:
        return model_flops(run) / (float(rate) * 1e12 * run.parallel.world_size)
    return None


def _run(row: Mapping[str, Any]) -> tuple[RunSpec, Kernels]:
    missing = [name for name in ("tp", "pp", "mbs", "gbs", "seq", "gpus") if not row.get(name)]
    if missing:
        raise SpecError(f"{' and '.join(missing)} not stated")
    if row.get("fsdp"):
        raise SpecError("Megatron-FSDP or FSDP: no time is modelled for it")
    if str(row.get("task")) not in ("pretrain", "sft"):  # the same step; adapters leave most weights without gradients
        raise SpecError(f"task {row.get('task')}")
    framework = str(row.get("framework"))
    if not any(name in framework for name in ("Megatron", "megatron", "AA-Scaling", "NeMo")):
        raise SpecError(f"{framework} is not Megatron")
    model = _model(row)
    parallel = ParallelSpec(
        world_size=row["gpus"], tensor_model_parallel_size=row["tp"], pipeline_model_parallel_size=row["pp"],
        virtual_pipeline_model_parallel_size=row["vp"] if (row.get("vp") or 1) > 1 else None,
        context_parallel_size=row.get("cp") or 1, expert_model_parallel_size=row.get("ep") or 1,
        expert_tensor_parallel_size=1 if model.has_experts else None,
        sequence_parallel=_sequence_parallel(row, framework),
    )  # fmt: skip
    if row["pp"] > 1 and "AA-Scaling" in framework:
        parallel = replace(parallel, **_dealt_by_scaling(model, row["pp"]))
    elif row["pp"] > 1 and len(model.layers) % (row["pp"] * parallel.vpp):
        dealt = _split if _rebalanced(row) or "DeepSpeed" not in framework else _dealt_by_deepspeed
        parallel = replace(parallel, **dealt(len(model.layers), row["pp"] * parallel.vpp))
    batch = BatchSpec(seq_length=row["seq"], micro_batch_size=row["mbs"], global_batch_size=row["gbs"])
    implementation, kernels = _implementation(row, framework)
    implementation = replace(with_unstated(implementation), megatron_core=UNSTATED.megatron_core)
    today = framework.startswith(("megatron-bridge", "NeMo"))
    data_parallel = DataParallelSpec(
        overlap_grad_reduce=today, overlap_param_gather=today,
        use_distributed_optimizer=row.get("optimizer") != "ZeRO stage 0",
        # Aleph Alpha's 13B fits one 80 GB card with ZeRO-1 alone, so its gradients are as wide as its parameters, as
        # those of DeepSpeed's ZeRO in fp16 are. BLOOM's training, in bf16, adds them up in fp32.
        grad_reduce_in_fp32=_rebalanced(row) or not any(name in framework for name in ("AA-Scaling", "DeepSpeed")),
    )  # fmt: skip
    run = RunSpec(
        model=model, parallel=parallel, batch=batch, precision=_precision(row), recompute=_recompute(row),
        implementation=implementation, data_parallel=data_parallel,
    )  # fmt: skip
    return run, kernels


def _of_bigscience(row: Mapping[str, Any]) -> bool:
    return str(row.get("source", "")).startswith("bigscience")


def _rebalanced(row: Mapping[str, Any]) -> bool:
    """Whether embedding and output layer count as layers where stages are made, as in BLOOM's own training
    (``tr11-176B-ml.slurm``: ``--pp-partition-method 'type:transformer|embedding'``). The source tells its runs of that
    kind, which have BLOOM's vocabulary, in a section of their own; all of them have two layers less than their stages
    hold, and hold 15 GB a GPU more than those before them, as bf16 with gradients added up in fp32 beside would."""
    return _of_bigscience(row) and "Rebalancing layers" in str(row.get("ref"))


def _sequence_parallel(row: Mapping[str, Any], framework: str) -> bool | None:
    """Aleph Alpha's sheets have the column where they varied it; without tensor parallelism it means nothing."""
    if "AA-Scaling" in framework:
        return bool(row.get("sequence_parallel")) and row["tp"] > 1
    return False if _of_bigscience(row) else None


def _dealt_by_deepspeed(layers: int, chunks: int) -> dict[str, Any]:
    """``partition_balanced`` of DeepSpeed's ``runtime/utils.py`` over transformer layers alone: every stage takes as
    many as the largest has to, until none are left."""
    most = -(-layers // chunks)
    sizes = [min(most, max(0, layers - i * most)) for i in range(chunks)]
    texts = ["t" * n for n in sizes]
    return {"pipeline_model_parallel_layout": "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "L"])}


def _dealt_by_scaling(model: ModelSpec, chunks: int) -> dict[str, Any]:
    """``pipe_partition_balanced`` of Aleph Alpha's ``scaling`` (``core/nn/parallel_module/pipeline_partitioning.py``)
    over the parameters of the embedding, the layers, the last norm and the output layer: as many to each stage as the
    largest has to take. Assumed: the runs name no method. ``pipe_partition_uniform``, over things instead of
    parameters, differs on two stages alone, where the times of the 13B speak against it; it is taken where the other
    would leave a stage empty."""
    ffn = model.layers[0].ffn
    if not isinstance(ffn, MLPSpec):
        raise SpecError("how its layers are split over stages is not stated")
    hidden, words = model.hidden_size, model.vocab_size * model.hidden_size
    layer = hidden * (4 * hidden + 3 * ffn.ffn_hidden_size + 2)
    weights = (words, *[layer] * len(model.layers), hidden, words)
    stages = _smallest_bottleneck(weights, chunks) or _uniform(len(weights), chunks)
    last = len(model.layers) + 1
    texts = ["t" * max(0, min(stop, last) - max(start, 1)) for start, stop in pairwise(stages)]
    return {"pipeline_model_parallel_layout": "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "L"])}


def _uniform(things: int, chunks: int) -> list[int]:
    """The first thing of every stage, and how many there are: as many each, what is left one by one to the first."""
    each, left = divmod(things, chunks)
    return [i * each + min(i, left) for i in range(chunks + 1)]


@cache
def _smallest_bottleneck(weights: tuple[int, ...], chunks: int) -> list[int] | None:
    """The first thing of every stage, and how many there are, where the heaviest stage is as light as can be; None
    where that leaves a stage with nothing."""

    def firsts(most: int) -> list[int]:
        found, held = [0], 0
        for i, weight in enumerate(weights):
            if held + weight > most:
                found.append(i)
                held = 0
            held += weight
        return [*found, len(weights)]

    to = [0, *accumulate(weights)]
    sums = {to[j] - to[i] for i in range(len(weights)) for j in range(i + 1, len(weights) + 1)}
    tried = map(firsts, sorted(x for x in sums if x >= max(weights)))
    found = next(stages for stages in tried if len(stages) <= chunks + 1)
    return found if len(found) == chunks + 1 else None


def _split(layers: int, chunks: int) -> dict[str, Any]:
    for on in ((True, True), (False, True), (True, False)):
        if (layers + sum(on)) % chunks == 0:
            return {
                "account_for_embedding_in_pipeline_split": on[0], "account_for_loss_in_pipeline_split": on[1],
            }  # fmt: skip
    raise SpecError("how its layers are split over stages is not stated")


def _model(row: Mapping[str, Any]) -> ModelSpec:
    name = str(row.get("model"))
    known = preset_called(name)
    if known is not None:
        return resolve_model(known)
    if name in _FIRST_LAYERS:
        preset, layers = _FIRST_LAYERS[name]
        model = resolve_model(preset)
        dense = 1 if model.has_experts else layers
        chosen = model.layers[:1] * dense + model.layers[-1:] * (layers - dense)
        return replace(model, layers=chosen, mtp_num_layers=0, mtp_layer=None)
    facts = row.get("model_facts") or {}
    if facts.get("hidden") and facts.get("layers"):
        hidden = facts["hidden"]
        heads = facts.get("heads") or (_BIGSCIENCE_HEADS if _of_bigscience(row) else hidden // 128)
        if name.startswith("LLaMA-") and facts.get("ffn"):
            # Aleph Alpha's: the vocabulary is the paper's, in all sizes.
            base, vocabulary = resolve_model("meta-llama/Llama-2-13b-hf"), 128000
            layer = LayerSpec(AttentionSpec(heads, heads, hidden // heads), MLPSpec(facts["ffn"], gated=True))
        elif name.lower().startswith(("gpt", "megatron-", "turing-")):
            base = resolve_model("openai/GPT-3-175B")
            vocabulary = _BLOOM_VOCABULARY if _rebalanced(row) else base.vocab_size
            layer = LayerSpec(
                AttentionSpec(heads, heads, hidden // heads, True, True, rotary=False),
                MLPSpec(facts.get("ffn") or 4 * hidden, gated=False, activation="gelu", add_bias=True),
            )
        else:
            raise SpecError(f"of the model {name} sizes are stated, but not what its layers are")
        return replace(base, hidden_size=hidden, layers=(layer,) * facts["layers"], vocab_size=vocabulary)
    raise SpecError(f"the model {name} is not known by its sizes")


def _precision(row: Mapping[str, Any]) -> PrecisionSpec:
    text = str(row.get("precision")).lower()
    if "fp4" in text:
        raise SpecError("NVFP4: no time is modelled for it")
    if "fp8" not in text:
        return PrecisionSpec()
    recipe = "mxfp8" if "mx" in text else "tensorwise" if "cs" in text else "delayed"
    return PrecisionSpec(fp8="hybrid", fp8_recipe=recipe)


def _recompute(row: Mapping[str, Any]) -> RecomputeSpec:
    text = str(row.get("recompute") or "none")
    if text.startswith("full"):
        return RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    if text.startswith("selective"):
        modules = tuple(x for x in text.split("`") if x.replace("_", "").isalpha())
        return RecomputeSpec(granularity="selective", modules=modules) if modules else RecomputeSpec()
    return RecomputeSpec()


def _implementation(row: Mapping[str, Any], framework: str) -> tuple[ImplementationSpec, Kernels]:
    attention = row.get("attention")
    arch = {"A": "ampere", "V": "volta", "H": "hopper"}.get(str(row.get("gpu"))[0].upper(), "blackwell")
    if attention is not None:
        flash = attention.startswith("flash")
        kernels = Kernels(
            fused_norm="RMS" in attention, first_flash_attention="v1" in attention, unfused_attention=not flash,
            plain_softmax=attention == "torch", separate_sends=True,
        )  # fmt: skip
        backend = "flash" if flash else "unfused"
        impl = ImplementationSpec(gpu_arch=arch, attention_backend=backend, gradient_accumulation_fusion=False)
        return impl, kernels
    if _of_bigscience(row):
        impl = ImplementationSpec(gpu_arch=arch, transformer_impl="local", gradient_accumulation_fusion=False)
        kernels = Kernels(
            unfused_attention=True, pipeline_in_parts=True, separate_sends=True, blocking_launches=True
        )
        return impl, kernels
    impl = ImplementationSpec(gpu_arch=arch, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    return impl, Kernels(tensor_parallel_overlap=framework.startswith(("megatron-bridge", "NeMo")))
