"""Measured memory of engines outside of megatron-core: a row of a corpus -> the run that it was and its figures.

``tests/data/engines/README.md`` lists the fields. A row that leaves a fact open is not read and says which, unless its
source's own script or default settles it: that is an assumption of the run, and stands with the row. What the estimate
does not model is a gap of the run: the row is predicted and not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge_memory.accuracy.corpus import RecordLine
from bridge_memory.estimation import estimate
from bridge_memory.readers import resolve_model
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.reserved import replayed, why_not
from bridge_memory.residual import relative
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.engine_options import DeepSpeedOptions, FSDPOptions
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.spec.unmodelled import Effect, Unmodelled

GIB, GB = 1 << 30, 10**9
#: Grades that are scored, and how far off a prediction may be.
TARGETS = {"A": 0.03, "B": 0.08}
#: What torch's figures are called here, and which of the estimate's stands beside each; a replay beside reserved
#: memory.
ALLOCATED, PEAK, RESERVED = "allocated", "peak", "reserved"


_ALLOCATED_ALONE = "the estimate is of allocated memory, which is a lower bound"
#: No row says how torch's allocator was set.
_AS_IT_IS = "torch's allocator as it is by default"


class Figure(NamedTuple):
    """One measured number, in bytes."""

    meaning: str
    nbytes: int


class Reading(NamedTuple):
    """A row that is a run."""

    run: RunSpec
    figures: tuple[Figure, ...]


class Outcome(NamedTuple):
    """One figure of a row beside its prediction.

    ``status``: "counted"; "unmodelled", predicted without what ``reason`` names; "unread", no run, for this reason.
    """

    id: str
    source: str
    model: str
    what: str
    grade: str
    status: str
    reason: str = ""
    meaning: str = ""
    measured_bytes: int | None = None
    predicted_bytes: int | None = None
    assumptions: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """(measured - predicted) / measured."""
        return relative(self.measured_bytes, self.predicted_bytes)


class Total(NamedTuple):
    """Errors of a grade. A row's error is the mean of its figures', a group's (one source and model) that of its rows:
    ``mean`` is over groups. ``within``: figures that meet the grade's target."""

    grade: str
    rows: int
    groups: int
    figures: int
    within: int
    mean: float
    worst: float


def is_of_torch(rows: Sequence[RecordLine]) -> bool:
    """Whether the first record is one of these."""
    return bool(rows) and {"engine", "measured", "grade"} <= rows[0].data.keys()


def outcomes(rows: Sequence[RecordLine]) -> list[Outcome]:
    """Every figure of every row whose grade is scored; one outcome for a row that is not read."""
    return [outcome for row in rows if str(row.data.get("grade")) in TARGETS for outcome in _outcomes(row)]


def totals(found: Sequence[Outcome]) -> list[Total]:
    """One a grade that has counted figures."""
    answer = []
    for grade, target in TARGETS.items():
        by_group: dict[tuple[str, str], dict[str, list[float]]] = {}
        errors = []
        for o in found:
            if o.grade == grade and o.status == "counted" and o.error is not None:
                by_group.setdefault((o.source, o.model), {}).setdefault(o.id, []).append(abs(o.error))
                errors.append(abs(o.error))
        if errors:
            means = [_mean([_mean(e) for e in rows.values()]) for rows in by_group.values()]
            answer.append(
                Total(grade, sum(map(len, by_group.values())), len(by_group), len(errors),
                      sum(e <= target for e in errors), _mean(means), max(errors))
            )  # fmt: skip
    return answer


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _outcomes(row: RecordLine) -> list[Outcome]:
    data = row.data
    what = str(data.get("technique") or data.get("optimizer") or data.get("recompute") or "")
    head = Outcome(
        str(data.get("id")), str(data.get("source")), str(data.get("model") or "not stated"), what,
        str(data["grade"]), "unread",
    )  # fmt: skip
    try:
        run, figures = read(data)
        answer = estimate(run)
    except SpecError as error:
        return [head._replace(reason=str(error))]
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        return [head._replace(reason=f"malformed ({type(error).__name__})")]
    unmodelled = [str(feature) for feature in answer.unmodelled if not feature.outside]
    stage = answer.stages[0]
    found = []
    for figure in figures:
        why, assumed = unmodelled, run.assumptions
        predicted = stage.static_bytes if figure.meaning == ALLOCATED else stage.peak_bytes
        if figure.meaning == RESERVED:
            reason = why_not(run)
            if reason is None:
                again = replayed(run)
                predicted = again.segments
                with_pages = f"{again.expandable / GIB:.2f} GiB with expandable_segments"
                assumed = (*assumed, f"{_AS_IT_IS} ({with_pages})")
            else:
                why = [*unmodelled, f"{reason}: {_ALLOCATED_ALONE}"]
        found.append(
            head._replace(
                status="unmodelled" if why else "counted", reason="; ".join(why), meaning=figure.meaning,
                measured_bytes=figure.nbytes, predicted_bytes=predicted, assumptions=assumed,
            )
        )
    return found


def read(row: Mapping[str, Any]) -> Reading:
    """One row. Raises SpecError for a row that is no run here, or leaves open what its memory depends on."""
    reader = _READERS.get(str(row.get("source")))
    if reader is None:
        raise SpecError(f"the source {row.get('source')} is not read")
    return reader(row)


# --------------------------------------------------------------------------------------------------
# Facts of a row
# --------------------------------------------------------------------------------------------------

def _preset(row: Mapping[str, Any]) -> str:
    """The preset that its model's name means; what stands in brackets behind it, and torchtune's "full bf16", is of the
    table it is from."""
    name = str(row.get("model"))
    preset = preset_called(name.partition("(")[0].removesuffix(" full bf16 "))
    if preset is None:
        raise SpecError(f"the sizes of the model {name} are not stated, or it is no language model")
    return preset


def _batch(row: Mapping[str, Any], ranks: int) -> BatchSpec:
    """One microbatch a step: no row of these says more."""
    missing = [name for name in ("mbs", "seq") if not row.get(name)]
    if missing:
        raise SpecError(f"{' and '.join(missing)} not stated")
    return BatchSpec(seq_length=row["seq"], micro_batch_size=row["mbs"], global_batch_size=row["mbs"] * ranks)


def _gpus(row: Mapping[str, Any]) -> int:
    if not row.get("gpus"):
        raise SpecError("gpus not stated")
    return int(row["gpus"])


def _figure(row: Mapping[str, Any], meaning: str) -> Figure:
    """GB are decimal, GiB binary, as printed."""
    measured = row["measured"]
    return _in(GIB, measured["gib"], meaning) if "gib" in measured else _in(GB, measured["gb"], meaning)


def _in(unit: int, value: float, meaning: str) -> Figure:
    if not value > 0:
        raise SpecError(f"the measured figure ({value}) is not positive")
    return Figure(meaning, round(value * unit))


# --------------------------------------------------------------------------------------------------
# Sources
# --------------------------------------------------------------------------------------------------


#: Of torchtitan's benchmarks those that ran before embeddings and output layer were units of their own, and before
#: AdamW was fused by default (``parallelisms/parallelize_llama.py: apply_fsdp``; ``config_manager.py:
#: optimizer.fused``, as both still were in early 2025).
_EARLY_TORCHTITAN = "benchmarks/llama3_h100_202412_torchtitan.md"


def _torchtitan(row: Mapping[str, Any]) -> Reading:
    """fp32 shards, bf16 compute, fp32 reductions: the row's notes and torchtitan's defaults."""
    degrees = row["parallel"]
    early = str(row.get("ref")).startswith(_EARLY_TORCHTITAN)
    unmodelled = []
    selective = "selective" in row["recompute"]
    technique = row.get("technique")
    # A table's precision is of all its rows; one whose technique is a rung of a ladder has what it names.
    without = technique is not None and selective and "Float8" not in technique
    if "Float8" in row["precision"] and not without:
        unmodelled.append(
            Unmodelled("Float8: counted in bf16", Effect.EITHER, order="a byte for each element that linears save")
        )
    if technique is None:
        unmodelled.append(Unmodelled("whether it is compiled is not stated: counted as not", Effect.DOWN,
                        order="what element-wise operations save"))
    run = RunSpec(
        model=_preset(row), parallel=ParallelSpec(
            world_size=_gpus(row), tensor_model_parallel_size=degrees.get("tp", 1),
            pipeline_model_parallel_size=degrees.get("pp", 1), context_parallel_size=degrees.get("cp", 1),
        ),
        batch=_batch(row, degrees["fsdp"]), precision=PrecisionSpec(params_dtype="fp32"),
        optimizer=OptimizerSpec(optimizer="adamw", torch_implementation="foreach" if early else "fused"),
        data_parallel=DataParallelSpec(engine="fsdp2"),
        fsdp=FSDPOptions(
            param_dtype="bf16", reduce_dtype="fp32",
            auto_wrap_policy="TRANSFORMER_BASED_WRAP" if early else "torchtitan",
        ),
        transformers=TransformersSpec(
            attention_mask="none", gradient_checkpointing=row["recompute"] == "full",
            use_reentrant=False if row["recompute"] == "full" else None,
            selective_ac_option="op" if selective else None, torch_compile="compile" in str(technique),
            compile_loss=False if "_2024" in str(row.get("ref")) else None,
        ),
        implementation=ImplementationSpec(transformer_impl="torchtitan"),
        assumptions=(
            *("selective_ac_option op, as llama3_8b.toml has it",) * selective,
            *("the loss is not compiled in releases of 2024",) * ("compile" in str(technique)),
        ), not_modelled=tuple(unmodelled),
    )  # fmt: skip
    return Reading(run, (_figure(row, RESERVED),))


def _torchao(row: Mapping[str, Any]) -> Reading:
    """Neither of its two tables states a batch."""
    _preset(row)
    _batch(row, 1)
    raise SpecError("whether the figure is allocated or reserved is not stated")


#: torchtune's ladder: every rung has what is below it.
_LADDER = (
    "+ Packed Dataset", "+ Compile", "+ Chunked Cross Entropy", "+ Activation Checkpointing",
    "+ Fuse optimizer step into backward", "+ Activation Offloading", "+ 8-bit AdamW",
)  # fmt: skip


def _torchtune(row: Mapping[str, Any]) -> Reading:
    """A packed batch is full; without packing the lengths of samples count."""
    technique = str(row.get("technique"))
    if technique in ("LoRA", "QLoRA"):
        raise SpecError("rank and targets of LoRA are not stated")
    if technique == "Full finetune":
        raise SpecError("checkpointing and optimizer are not stated")
    if technique not in _LADDER:
        raise SpecError("samples are not packed, and their lengths are not stated")
    has = _LADDER[: _LADDER.index(technique) + 1]
    run = RunSpec(
        model=_preset(row), batch=_batch(row, 1), data_parallel=DataParallelSpec(engine="single"),
        optimizer=OptimizerSpec(
            optimizer="adamw_8bit" if "+ 8-bit AdamW" in has else "adamw", torch_implementation="fused", clip_grad=0.0,
        ),
        transformers=TransformersSpec(
            attention_mask="none", torch_compile="+ Compile" in has,
            num_output_chunks=8 if "+ Chunked Cross Entropy" in has else 0,
            gradient_checkpointing="+ Activation Checkpointing" in has,
            optimizer_in_bwd="+ Fuse optimizer step into backward" in has,
            enable_activation_offloading="+ Activation Offloading" in has,
        ),
        implementation=ImplementationSpec(transformer_impl="torchtune"),
        not_modelled=(
            Unmodelled("whose 8-bit AdamW is not stated: counted as bitsandbytes', whose step makes nothing", Effect.UP,
                order="copies of the largest parameter and its states in fp32, as torchao's compiled step makes them"),
        ) * ("+ 8-bit AdamW" in has),
        assumptions=("AdamW is torch's, fused, as torchtune's own configurations of it",),
    )
    return Reading(run, (_figure(row, PEAK),))


def _automodel(row: Mapping[str, Any]) -> Reading:
    """``FSDP2Manager.mp_policy``: all in bf16. ``auto_model.py: from_pretrained(use_liger_kernel=True)`` is the
    default: Liger's own defaults, whose fused loss is not reached, since the recipe hands the model no labels.
    Checkpoints are of norms, attention and MLP (``components/distributed/parallelizer.py``)."""
    technique = str(row.get("technique"))
    cut = "LC-CE" in technique
    alone = technique == "Baseline"
    ranks = 1 if alone else _gpus(row)
    run = RunSpec(
        model=_preset(row), parallel=ParallelSpec(world_size=ranks), batch=_batch(row, ranks),
        optimizer=OptimizerSpec(optimizer="adamw"),
        data_parallel=DataParallelSpec(engine="single" if alone else "fsdp2"),
        fsdp=FSDPOptions() if alone else FSDPOptions(param_dtype="bf16", reduce_dtype="bf16"),
        transformers=TransformersSpec(
            checkpoint_submodules="Checkpointing" in technique or cut, cut_cross_entropy=cut, keeps_outputs=True,
            liger_kernel=("rope", "rms_norm", "swiglu"),
        ),
        assumptions=(
            "weights in bf16, as the checkpoint's", "Liger's kernels, Automodel's default where they are "
            "installed", "the step holds the model's output until backward is over", "GB are 2^30 bytes, as its "
            "recipe divides", *("the row below adds FSDP with dp_size 8: the baseline is one GPU",) * alone,
        ),
    )  # fmt: skip
    # ``recipes/llm/train_ft.py``: ``torch.cuda.max_memory_allocated() / 1024**3``.
    return Reading(run, (_in(GIB, row["measured"]["gb"], PEAK),))


def _deepspeed_examples(row: Mapping[str, Any]) -> Reading:
    """``training/bf16_master_weight``: ``train.py`` and its two configs. The script prints GB of 2^30 bytes."""
    if not str(row["model"]).startswith("GPT 6.86B (32 layers, hidden 4096, heads 32)"):
        raise SpecError(f"the sizes of the model {row['model']} are not stated")
    layer = LayerSpec(
        AttentionSpec(32, 32, 128, add_qkv_bias=True, add_output_bias=True, rotary=False),
        MLPSpec(4 * 4096, gated=False, activation="gelu", add_bias=True),
    )
    model = replace(
        resolve_model("openai/GPT-3-175B"), name="SimpleTransformerModel", hidden_size=4096, layers=(layer,) * 32,
        vocab_size=50000, max_position_embeddings=512, share_embeddings_and_output_weights=False, output_bias=True,
        hidden_dropout=0.0, attention_dropout=0.0, assumptions=(),
    )  # fmt: skip
    low = "BF16 low-precision" in row["technique"]
    ranks = _gpus(row)
    run = RunSpec(
        model=model, parallel=ParallelSpec(world_size=ranks), batch=_batch(row, ranks),
        optimizer=OptimizerSpec(optimizer="adamw", torch_implementation="fused", clip_grad=0.0),
        data_parallel=DataParallelSpec(engine="zero3"),
        deepspeed=DeepSpeedOptions(
            reduce_bucket_size=50_000_000, overlap_comm=True, stage3_param_persistence_threshold=0,
            bf16_master_weights_and_grads=low, bf16_optimizer_states=low,
        ),
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        implementation=ImplementationSpec(
            transformer_impl="local", gpu_arch="hopper", gradient_accumulation_fusion=False
        ),
        assumptions=("the script's own layers are counted as megatron-core's local ones", "its default vocabulary"),
    )  # fmt: skip
    measured = row["measured"]
    figures = ("allocated_gb", ALLOCATED), ("peak_gb", PEAK)
    return Reading(run, tuple(_in(GIB, measured[name], meaning) for name, meaning in figures))


def _deepspeed(row: Mapping[str, Any]) -> Reading:
    """``examples/sdma_allgather``: ``train_qwen3_zero3.py``, which prints GB of 10^9 bytes, and
    ``ds_config_zero3_nosdma.json``. AdamW of a config is FusedAdam. transformers reads no attribute
    ``attn_implementation`` of a config in ``from_config``: attention is sdpa, whatever the script sets."""
    ranks = _gpus(row)
    run = RunSpec(
        model=_preset(row), parallel=ParallelSpec(world_size=ranks), batch=_batch(row, ranks),
        optimizer=OptimizerSpec(optimizer="adamw", torch_implementation="fused"),
        data_parallel=DataParallelSpec(engine="zero3"),
        deepspeed=DeepSpeedOptions(
            reduce_bucket_size=50_000_000, allgather_bucket_size=50_000_000, overlap_comm=True, sub_group_size=10**12
        ),
        transformers=TransformersSpec(keeps_outputs=True),
        assumptions=(
            "kernels on MI300X save what those on NVIDIA's GPUs save", "SDMA's own buffers are not counted",
        ),
    )  # fmt: skip
    return Reading(run, (_figure(row, PEAK),))


def _bigscience(row: Mapping[str, Any]) -> Reading:
    raise SpecError("memory while the engine is made, outside of training steps")


_READERS: dict[str, Callable[[Mapping[str, Any]], Reading]] = {
    "pytorch/torchtitan": _torchtitan, "pytorch/ao": _torchao, "pytorch/torchtune": _torchtune,
    "NVIDIA-NeMo/Automodel": _automodel, "deepspeedai/DeepSpeedExamples": _deepspeed_examples,
    "deepspeedai/DeepSpeed": _deepspeed, "bigscience-workshop/bigscience logs": _bigscience,
}  # fmt: skip
