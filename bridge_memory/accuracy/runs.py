"""The measured corpus: one JSON object a line -> runs, and what the estimate says about each measured rank.

A record's configuration is read as a user would state it; nothing here looks at what was measured to make a
prediction. See ``tests/data/measurements/README.md`` for the fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge_memory.components import State
from bridge_memory.estimate import StageEstimate, estimate
from bridge_memory.readers.megatron_args import run_from_megatron_args, stage_of_rank
from bridge_memory.spec import RunSpec, SpecError

if TYPE_CHECKING:
    from bridge_memory.accuracy.described import Description

MIB = 1 << 20


class NotComparable(Exception):
    """A record that says too little, or measures something that is not a training step. One line."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What torch reported on one rank, in bytes; None where the source does not say."""

    rank: int
    allocated_bytes: int | None
    max_allocated_bytes: int | None
    #: Steps done when the peak was read; 0 where the source does not say (late in training).
    after_step: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One measured run."""

    id: str
    family: str
    tier: int
    gpu: str
    world_size: int
    framework: Mapping[str, object]
    config: Mapping[str, object]
    measured: tuple[Measurement, ...]
    #: Parameters of the fullest rank as the run itself logged them (``report_theoretical_memory``), if it did.
    parameters_of_a_shard: float | None = None

    @property
    def arguments(self) -> Mapping[str, object]:
        args = self.config.get("args")
        return args if isinstance(args, Mapping) else {}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured rank next to its prediction. ``status``: "ok", "not_modelled" or "error"."""

    id: str
    family: str
    tier: int
    gpu: str
    rank: int | None
    status: str
    reason: str = ""
    predicted_allocated_bytes: int | None = None
    measured_allocated_bytes: int | None = None
    predicted_max_allocated_bytes: int | None = None
    measured_max_allocated_bytes: int | None = None
    features: tuple[str, ...] = ()
    #: The predicted stage, for explanations.
    stage: StageEstimate | None = None

    @property
    def allocated_error(self) -> float | None:
        """Signed relative error of the static memory; positive where the estimate is too high."""
        return _relative(self.predicted_allocated_bytes, self.measured_allocated_bytes)

    @property
    def max_allocated_error(self) -> float | None:
        """Signed relative error of the peak."""
        return _relative(self.predicted_max_allocated_bytes, self.measured_max_allocated_bytes)

    def as_json(self) -> dict[str, object]:
        names = (
            "id", "family", "tier", "rank", "status", "reason",
            "predicted_allocated_bytes", "measured_allocated_bytes",
            "predicted_max_allocated_bytes", "measured_max_allocated_bytes",
        )
        return {name: getattr(self, name) for name in names}


def _relative(predicted: int | None, measured: int | None) -> float | None:
    return predicted / measured - 1.0 if predicted is not None and measured else None


def load_runs(path: str | Path) -> list[Record]:
    """Read a corpus. Raises SpecError, naming the line, for text that is not a record."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecError(f"{path}: {reason}; give a file with one JSON record a line") from None
    return [read_record(line, f"{path} line {n}") for n, line in enumerate(lines, 1) if line.strip()]


def read_record(line: str, where: str) -> Record:
    """One line of a corpus; ``where`` names it in a refusal. Raises SpecError."""
    try:
        data = json.loads(line)
    except ValueError:
        raise SpecError(f"{where} is not JSON; give one record a line") from None
    if not isinstance(data, dict):
        raise SpecError(f"{where} is not a JSON object; give one record a line")
    try:
        measured = tuple(_measurements(data))
        return Record(
            id=str(data["id"]),
            family=str(data.get("family", data["id"])),
            tier=int(data.get("tier", 0)),
            gpu=str(data.get("gpu", "")),
            world_size=int(data["world_size"]),
            framework=dict(data.get("framework") or {}),
            config=dict(data["config"]),
            measured=measured,
            parameters_of_a_shard=_logged_parameters(data),
        )
    except KeyError as error:
        raise SpecError(f"{where} has no field {error}; see the corpus README for a record") from None
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where} is malformed ({error}); see the corpus README for a record") from None


def _measurements(data: Mapping[str, object]) -> Iterator[Measurement]:
    for m in data.get("measured") or ():  # type: ignore[attr-defined]
        yield Measurement(
            int(m["rank"]), _bytes(m.get("allocated_bytes")), _bytes(m.get("max_allocated_bytes")),
            int(m.get("after_step", 0)),
        )
    verbatim = data.get("measured_verbatim")
    if not isinstance(verbatim, Mapping):
        return
    # Megatron's report_memory prints MB of 2^20 bytes.
    name, ranks = next(((str(k), v) for k, v in verbatim.items() if str(k).startswith("per_rank_MB")), ("", {}))
    if isinstance(ranks, Mapping):
        for rank, m in ranks.items():
            steps = 1 if "after 1 iterations" in name else 0
            allocated, peak = _bytes(m["allocated"] * MIB), _bytes(m["max_allocated"] * MIB)
            yield Measurement(int(rank), allocated, peak, steps)
    # Megatron Bridge's report_memory divides by 1e9.
    peak = verbatim.get("peak_allocated_GB_after_iteration_2")
    if isinstance(peak, (int, float)):
        yield Measurement(0, None, _bytes(peak * 1e9))
    peak = verbatim.get("max_allocated_bytes_mean_over_20_iters")
    if isinstance(peak, (int, float)):
        yield Measurement(0, None, _bytes(peak))


def _logged_parameters(data: Mapping[str, object]) -> float | None:
    verbatim = data.get("measured_verbatim")
    value = verbatim.get("log: params in most loaded shard (B)") if isinstance(verbatim, Mapping) else None
    return float(value) * 1e9 if isinstance(value, (int, float)) else None


def _bytes(value: object) -> int | None:
    return round(float(value)) if isinstance(value, (int, float)) else None


def run_of(record: Record) -> RunSpec:
    """The run that a record describes. Raises NotComparable or SpecError."""
    kind = record.config.get("kind")
    args = record.arguments
    if kind == "run_spec":
        return _run_spec(record)
    if kind == "megatron_args" or any(str(k).startswith("--") for k in args):
        core = record.framework.get("megatron_core")
        te = record.framework.get("transformer_engine")
        env = record.config.get("env")
        return run_from_megatron_args(
            args,
            world_size=record.world_size,
            gpu=record.gpu,
            megatron_core=str(core) if core else None,
            transformer_engine=_te_release(str(te or ""), str(record.framework.get("container", ""))),
            env=env if isinstance(env, Mapping) else None,
        )
    from bridge_memory.accuracy.described import moe_layer_run, recipe_run

    described = _description(record)
    if described.is_recipe:
        return recipe_run(described)
    if described.is_moe_layer:
        return moe_layer_run(described)
    raise NotComparable("described in words that this reader does not know")


def _run_spec(record: Record) -> RunSpec:
    from bridge_memory.readers.run_spec import run_from_json

    run = run_from_json(record.config.get("run"))
    world = run.parallel.world_size
    if world != record.world_size:
        raise SpecError(f"world_size ({record.world_size}) is not that of the recorded run ({world}); correct one")
    return run


def _description(record: Record) -> Description:
    from bridge_memory.accuracy.described import Description

    return Description(record.config, record.gpu, record.world_size)


def _stages(record: Record, run: RunSpec) -> tuple[tuple[StageEstimate, ...], tuple[str, ...]]:
    """Predicted stages and what the estimate does not model."""
    if record.config.get("kind") == "described" and _description(record).is_moe_layer:
        from bridge_memory.accuracy.described import moe_layer_stage

        return (moe_layer_stage(run),), ()
    answer = estimate(run)
    return answer.stages, answer.not_modelled


#: Transformer Engine of NVIDIA's PyTorch containers (their release notes), (major, minor).
_CONTAINER_TE = {
    "24.01": (1, 2), "24.10": (1, 11), "25.03": (2, 1), "25.05": (2, 3), "25.06": (2, 4), "25.09": (2, 7),
    "25.11": (2, 9),
}


def _te_release(stated: str, container: str) -> tuple[int, int] | None:
    """The release a record states, else the one its container ships; None for a git revision or neither."""
    named = re.search(r"(?:^|release_v)(\d+)\.(\d+)", stated)
    if named:
        return int(named.group(1)), int(named.group(2))
    shipped = re.search(r"pytorch:(\d\d\.\d\d)", container)
    return _CONTAINER_TE.get(shipped.group(1)) if shipped and not stated else None


def predict(record: Record) -> list[Outcome]:
    """One outcome for every measured rank (one without a rank where nothing could be predicted)."""

    def failed(status: str, reason: str) -> list[Outcome]:
        ranks = record.measured or (Measurement(-1, None, None),)
        return [
            Outcome(
                record.id, record.family, record.tier, record.gpu, m.rank if m.rank >= 0 else None, status,
                reason, None, m.allocated_bytes, None, m.max_allocated_bytes,
            )
            for m in ranks
        ]

    try:
        run = run_of(record)
        stages, unmodelled = _stages(record, run)
    except NotComparable as reason:
        return failed("not_modelled", f"skipped: {reason}")
    except SpecError as error:
        return failed("not_modelled", str(error))
    except Exception as error:  # a bug must not hide the other records
        return failed("error", f"{type(error).__name__}: {error}")
    if not record.measured:
        return failed("not_modelled", "skipped: nothing was measured")
    stated = record.parameters_of_a_shard
    largest = max(stage.parameters for stage in stages)
    if stated and abs(largest / stated - 1) > _SAME_MODEL:
        why = f"skipped: its own log counts {stated:.4g} parameters in the fullest shard, its arguments make"
        return failed("not_modelled", f"{why} {largest:.4g}; one of the two is not the run")
    gaps = tuple(dict.fromkeys((*run.not_modelled, *run.model.not_modelled, *unmodelled)))
    pp_before_dp = "--use-tp-pp-dp-mapping" in record.arguments
    features = features_of(run)
    outcomes = []
    for m in record.measured:
        stage = stages[stage_of_rank(m.rank, run.parallel, pp_before_dp=pp_before_dp)]
        outcomes.append(
            Outcome(
                record.id, record.family, record.tier, record.gpu, m.rank,
                "not_modelled" if gaps else "ok", "; ".join(gaps),
                stage.static_bytes, m.allocated_bytes, peak_after(stage, run, record, m.after_step),
                m.max_allocated_bytes,
                features, stage,
            )
        )
    return outcomes


#: Relative difference of two parameter counts that still speak of one model (padding, biases).
_SAME_MODEL = 0.05

#: fp16's dynamic loss scale starts at 2^32 and halves after every overflowing step (after the second one,
#: ``optimizer/grad_scaler.py: DynamicGradScaler``); at 2^23 the gradients of a loss still overflow 65504. The
#: optimizer is not called in such a step.
_FP16_SKIPPED_STEPS = 10


def peak_after(stage: StageEstimate, run: RunSpec, record: Record, steps: int) -> int:
    """The peak as of a number of steps: before the first optimizer step there are no optimizer moments.

    Adam's moments are made in the first step that is not skipped, so no earlier forward or backward pass ran
    beside them. ``stage.peak_bytes`` is the peak of every later step.
    """
    moments = sum(c.bytes for c in stage.components if c.state in (State.EXP_AVG, State.EXP_AVG_SQ))
    dynamic_scale = run.precision.params_dtype == "fp16" and "--loss-scale" not in record.arguments
    if dynamic_scale and 0 < steps <= _FP16_SKIPPED_STEPS:
        return stage.peak_bytes - moments
    return max(stage.static_bytes, stage.peak_bytes - moments) if steps == 1 else stage.peak_bytes


def predict_all(records: Iterable[Record]) -> list[Outcome]:
    return [outcome for record in records for outcome in predict(record)]


def features_of(run: RunSpec) -> tuple[str, ...]:
    """Words for what a run uses, to group errors by."""
    p, d, i = run.parallel, run.data_parallel, run.implementation
    layers = run.model.layers
    moe = any(_is(layer.ffn, "MoESpec") for layer in layers)
    words = {
        i.transformer_impl: True,
        "legacy model": i.use_legacy_models,
        "distributed optimizer": d.use_distributed_optimizer,
        "Megatron-FSDP": d.fsdp,
        f"optimizer {run.optimizer.optimizer}": True,
        run.precision.params_dtype: True,
        "fp8": run.precision.fp8 is not None,
        "fp8 parameters": run.precision.fp8_param,
        "TP": p.tp > 1,
        "PP": p.pp > 1,
        "VPP": p.vpp > 1,
        "CP": p.cp > 1,
        "EP": p.ep > 1,
        "MoE": moe,
        "grouped GEMM": moe and i.moe_grouped_gemm,
        f"dispatcher {i.moe_token_dispatcher_type}": moe,
        "MLA": any(_is(layer.mixer, "MLASpec") for layer in layers),
        "Mamba": any(_is(layer.mixer, "MambaSpec") for layer in layers),
        "MTP": run.model.mtp_num_layers > 0,
        "recompute": run.recompute.granularity is not None,
        f"attention {i.attention_backend}": True,
        "dropout": run.model.hidden_dropout > 0,
        "untied": not run.model.share_embeddings_and_output_weights,
        "fused cross entropy": i.cross_entropy_loss_fusion,
        "per-token loss": i.calculate_per_token_loss,
        "overlap grad reduce": d.overlap_grad_reduce,
        "overlap param gather": d.overlap_param_gather,
        i.gpu_arch: True,
    }
    return tuple(word for word, used in words.items() if used)


def _is(block: object, kind: str) -> bool:
    return type(block).__name__ == kind


def non_default_options(run: RunSpec) -> list[str]:
    """``field=value`` of every parallel, optimizer and implementation option away from its default."""
    from dataclasses import fields

    groups = (run.parallel, run.optimizer, run.data_parallel, run.peft, run.implementation)
    held = ((f, getattr(group, f.name)) for group in groups for f in fields(group))
    return [f"{f.name}={value}" for f, value in held if value != f.default]
