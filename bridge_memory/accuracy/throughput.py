"""Measured throughput: a row of a corpus -> the run that it was and its time. Rows that cannot be read say why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bridge_memory.accuracy.corpus import read_corpus
from bridge_memory.accuracy.runs import UNSTATED, with_unstated
from bridge_memory.accuracy.settings import precision_called, recipe_of, settings_of
from bridge_memory.cards.names import gpu_called
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
from bridge_memory.speed.megatron.step_time import not_timed
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
    #: The preset's name without its maker, or the source's word; one for all sizes of GPT of one source.
    family: str = ""


class Unread(NamedTuple):
    """A row that is no run here, and the reason."""

    number: int
    group: str
    reason: str


#: GPUs as sources write them, where ``gpu_called`` does not know the words.
_GPUS = {
    "a100_80gb": "A100-80GB", "A100 80GB SXM": "A100-80GB", "a100_40gb": "A100-40GB", "A800 80GB": "A800",
    "h100_80gb": "H100", "V100": "V100-32GB", "V100 32GB/16GB": "V100-32GB", "MI300": "MI300X",
}  # fmt: skip
#: A node's network as sources write it: "16 x 400 Gbit/s a node of 8 GPUs", "25 GB/s a GPU".
_NODE = re.compile(r"(\d+) x (\d+) Gbit/s a node of (\d+)")
_A_GPU = re.compile(r"(\d+(?:\.\d+)?) GB/s a GPU")

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
        row = _with_sizes(row)
        hardware = _hardware(row)
        run, kernels = _run(row)
        seconds = _seconds(row, run)
    except SpecError as error:
        return Unread(number, group, str(error))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        return Unread(number, group, f"malformed ({type(error).__name__})")
    out = row.get("status") == "OOM"
    if seconds is None and not out:
        return Unread(number, group, "no step time, no tokens per second and, of a dense model, no FLOPS are stated")
    own = not any(name in str(row.get("framework")) for name in ("AA-Scaling", "DeepSpeed", "fork"))
    source, seconds = str(row.get("source")), None if out else seconds
    return MeasuredRun(number, group, source, run, hardware, kernels, seconds, out, own, _family(row))


def _family(row: Mapping[str, Any]) -> str:
    name = str(row.get("model")).partition(" (")[0]
    known = preset_called(name)
    return known.partition("/")[2] if known else re.sub(r"(?i)^(gpt) [\d.]+b$", r"\1", name)


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


def _with_sizes(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row that names its recipe, with the sizes that it leaves to it. Raises SpecError if they are not those that its
    own figures are of."""
    if not row.get("recipe") or row.get("tp"):
        return row
    recipe = recipe_of(row)
    if recipe is None:
        raise SpecError("tp is not stated, and its recipe is none of those at hand")
    sizes = {name: recipe[name] for name in ("task", "gpus", "tp", "pp", "vp", "cp", "ep", "mbs", "gbs", "seq")}
    found = {**row, **{name: value for name, value in sizes.items() if name == "task" or not row.get(name)}}
    tokens = float(row.get("tokens_per_s_per_gpu") or 0) * row["gpus"] * float(row.get("step_time_s") or 0)
    if tokens and not 0.98 < tokens / (found["gbs"] * found["seq"]) < 1.02:
        raise SpecError("its recipe at hand has other tokens a step than tokens_per_s_per_gpu x step_time_s")
    return found


def _hardware(row: Mapping[str, Any]) -> Hardware:
    name = str(row.get("gpu"))
    card = gpu_called(_GPUS.get(name, name))
    hardware = HARDWARE.get(card.name) if card is not None else None
    if hardware is None:
        raise SpecError(f"no figures of the GPU {name}")
    if _of_bigscience(row):
        return hardware._replace(network=_JEAN_ZAY / (4 if hardware.generation == "volta" else 8))
    network = str(row.get("network"))
    node, a_gpu = _NODE.search(network), _A_GPU.search(network)
    if node:
        return hardware._replace(network=int(node[1]) * int(node[2]) / 8 * 1e9 / int(node[3]))
    return hardware._replace(network=float(a_gpu[1]) * 1e9) if a_gpu else hardware


def _run(row: Mapping[str, Any]) -> tuple[RunSpec, Kernels]:
    framework = str(row.get("framework"))
    if not any(name in framework for name in ("Megatron", "megatron", "AA-Scaling", "NeMo", "Primus")):
        raise SpecError(f"{framework} is not Megatron")
    if row.get("fsdp"):
        raise SpecError("Megatron-FSDP or FSDP: no time is modelled for it")
    missing = [name for name in ("tp", "pp", "mbs", "gbs", "seq", "gpus") if not row.get(name)]
    if missing:
        raise SpecError(f"{' and '.join(missing)} not stated")
    if str(row.get("task")) not in ("pretrain", "sft", "lora"):  # fine-tuning runs the same step
        raise SpecError(f"task {row.get('task')}")
    settings = settings_of(row)
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in settings.fields.items()}
    if row.get("task") == "lora" and fields.get("peft.scheme", "none") == "none":
        raise SpecError("task lora: its adapters are not stated")
    model = _model(row)
    bridge = framework.startswith("megatron-bridge")
    if bridge and not settings.source:
        if "A/B" in str(row.get("notes")):
            raise SpecError("what it differs in from the other row of its A/B is not stated")
        if model.has_experts:
            raise SpecError("its dispatcher is not stated, and no recipe of its release with this layout is at hand")
    depths = fields.pop("model.mtp_num_layers", fields.pop("mtp_num_layers", None))
    model = _with_depths(model, row, depths, fields.pop("model.mtp_use_repeated_layer", False))
    split = {name.partition(".")[2] or name: fields.pop(name) for name in list(fields) if name in _SPLITS}
    parallel = ParallelSpec(
        world_size=row["gpus"], tensor_model_parallel_size=row["tp"], pipeline_model_parallel_size=row["pp"],
        virtual_pipeline_model_parallel_size=row["vp"] if (row.get("vp") or 1) > 1 else None,
        context_parallel_size=row.get("cp") or 1, expert_model_parallel_size=row.get("ep") or 1,
        expert_tensor_parallel_size=row.get("etp") or 1 if model.has_experts else None,
        sequence_parallel=_sequence_parallel(row, framework),
    )  # fmt: skip
    if row["pp"] > 1 and "AA-Scaling" in framework:
        split = _dealt_by_scaling(model, row["pp"])
    elif not split and row["pp"] > 1 and len(model.layers) % (row["pp"] * parallel.vpp):
        dealt = _split if _rebalanced(row) or "DeepSpeed" not in framework else _dealt_by_deepspeed
        split = dealt(len(model.layers), row["pp"] * parallel.vpp)
    parallel = replace(parallel, **split)
    batch = BatchSpec(seq_length=row["seq"], micro_batch_size=row["mbs"], global_batch_size=row["gbs"])
    implementation, kernels = _implementation(row)
    today = framework.startswith(("megatron-bridge", "NeMo"))
    data_parallel = DataParallelSpec(
        overlap_grad_reduce=today, overlap_param_gather=today,
        use_distributed_optimizer=row.get("optimizer") != "ZeRO stage 0",
        # Aleph Alpha's 13B fits one 80 GB card with ZeRO-1 alone, so its gradients are as wide as its parameters, as
        # those of DeepSpeed's ZeRO in fp16 are. BLOOM's training, in bf16, adds them up in fp32.
        grad_reduce_in_fp32=_rebalanced(row) or not any(name in framework for name in ("AA-Scaling", "DeepSpeed")),
    )  # fmt: skip
    core, precision = _core(framework), _precision(row)
    if isinstance(row.get("config"), str):
        fields = _exported(str(row["config"]))
    fields = {**_of_nemo(row), **fields}
    if settings.core is not None:  # a recipe says how it differs from a RunSpec's defaults, and no more
        core, precision, data_parallel = settings.core, PrecisionSpec(), DataParallelSpec()
        implementation = ImplementationSpec(gpu_arch=implementation.gpu_arch)
    run = RunSpec(
        model=model, parallel=parallel, batch=batch, precision=precision, recompute=_recompute(row),
        implementation=replace(with_unstated(implementation), megatron_core=core), data_parallel=data_parallel,
    )  # fmt: skip
    run = _with_settings(run, row, fields)
    if run.data_parallel.engine != "megatron_ddp":
        raise SpecError("Megatron-FSDP or FSDP: no time is modelled for it")
    untimed = not_timed(run)
    if untimed:
        raise SpecError(f"{' and '.join(untimed)}: no time is modelled")
    overlap, efa = run.implementation.tp_comm_overlap, "EFA" in str(row.get("network"))
    config = row.get("config")
    grouped = isinstance(config, Mapping) and str(config.get("moe_experts_impl")).startswith("torch_grouped")
    return run, kernels._replace(tensor_parallel_overlap=overlap, efa=efa, grouped_experts=grouped)


def _exported(script: str) -> dict[str, Any]:
    """What MLPerf's shell scripts export, where a run has a field for it."""
    said = dict(re.findall(r"^export (\w+)=\"?(\w+)", script, re.MULTILINE))
    names = {"TP_COMM_OVERLAP": "tp_comm_overlap", "FP8_PARAM_GATHER": "fp8_param"}
    return {field: said[name].lower() in ("true", "1") for name, field in names.items() if name in said}


def _of_nemo(row: Mapping[str, Any]) -> dict[str, Any]:
    """What rows of NeMo leave to scripts of their source.

    MLPerf 5.0's Llama 3.1 405B: gradients in bf16 (``llama31_405b/implementations/*/pretrain.py``), the allocator
    and, with the container 25.01, parameters kept in eight bits (``config_common.sh``: FP8_PARAMS), which the rows of
    25.04 export themselves. GPT-3 175B in fp8: gradients in bf16, and Transformer Engine's userbuffers
    (NeMo-Framework-Launcher ``conf/training/gpt3/175b_fp8_performance.yaml``: grad_sync_dtype, ub_tp_comm_overlap).
    """
    source, model = str(row.get("source")), str(row.get("model"))
    if source.startswith("MLPerf Training v5.0") and model.startswith("Llama 3.1 405B"):
        found = {"grad_reduce_in_fp32": False, "expandable_segments": True}
        return found | ({"fp8_param": True} if "ngc25.01" in str(row.get("ref")) else {})
    if source.startswith("NVIDIA NeMo 24.07") and model.startswith("GPT3-175B"):
        return {"grad_reduce_in_fp32": False, "tp_comm_overlap": True}
    return {}


#: Fields of how layers are dealt to stages.
_SPLITS = tuple(
    prefix + name for prefix in ("", "parallel.") for name in (
        "pipeline_model_parallel_layout", "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
    )
)  # fmt: skip


def _with_settings(run: RunSpec, row: Mapping[str, Any], fields: dict[str, Any]) -> RunSpec:
    """The run with the fields of its ``config`` or recipe; what the row says itself of recomputation counts more than
    its recipe."""
    own = isinstance(row.get("config"), Mapping)
    if row.get("recompute") and not own:
        fields = {name: x for name, x in fields.items() if not name.startswith("recompute.")}
    if fields.get("recompute.granularity") == "full" and not fields.get("recompute.method"):
        fields |= {"recompute.method": "uniform", "recompute.num_layers": 1}
    if own and "recompute.granularity" in fields:
        run = run.with_fields(recompute=RecomputeSpec())
    return run.with_fields(**fields) if fields else run


def _with_depths(model: ModelSpec, row: Mapping[str, Any], depths: int | None, repeated: bool) -> ModelSpec:
    """The model with as many MTP depths as its recipe or its row says."""
    name = str(row.get("model"))
    depths = 0 if "w/o MTP" in name else depths
    if depths is None or depths == model.mtp_num_layers:
        return model
    if depths and model.mtp_layer is None:
        raise SpecError(f"mtp_num_layers is {depths}, and what an MTP layer of {name} holds is not known")
    return replace(
        model, mtp_num_layers=depths, mtp_layer=model.mtp_layer if depths else None, mtp_use_repeated_layer=repeated
    )


def _core(framework: str) -> tuple[int, int] | None:
    """The megatron-core that a row names, else the release of rows that name none."""
    found = re.search(r"(?:mcore|core)[ _]r?(\d+)\.(\d+)", framework)
    return (int(found[1]), int(found[2])) if found else UNSTATED.megatron_core


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
    name = str(row.get("model")).replace("\N{MULTIPLICATION SIGN}", "x")
    # "(w/ MTP)" is a setting (``_with_depths``); tokens that are dropped are an experts' capacity that is not stated.
    known = preset_called(re.sub(r" \((?:w/o MTP|w/ MTP|dropless)\)$", "", name))
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
        return PrecisionSpec(fp4="e2m1")
    if "fp8" not in text:
        return PrecisionSpec()
    if not str(row.get("framework")).startswith("megatron-bridge") and not any(x in text for x in ("mx", "cs")):
        return PrecisionSpec(fp8="hybrid")
    recipe = {"fp8mx": "mxfp8", "fp8cs": "tensorwise"}[precision_called(text)]
    if recipe == "mxfp8" and str(row.get("gpu")).startswith("H"):
        recipe = "blockwise"  # the page's other column: by blocks on Hopper, which has no MXFP8
    return PrecisionSpec(fp8="hybrid", fp8_recipe=recipe)


def _recompute(row: Mapping[str, Any]) -> RecomputeSpec:
    text = str(row.get("recompute") or "none")
    if text.startswith("full"):
        return RecomputeSpec(granularity="full", method="uniform", num_layers=1)
    if text.startswith("selective"):
        modules = tuple(x for x in text.split("`") if x.replace("_", "").isalpha())
        return RecomputeSpec(granularity="selective", modules=modules) if modules else RecomputeSpec()
    return RecomputeSpec()


def _implementation(row: Mapping[str, Any]) -> tuple[ImplementationSpec, Kernels]:
    attention = row.get("attention")
    arch = _hardware(row).generation
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
    return impl, Kernels()
