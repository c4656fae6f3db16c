"""The prediction for each measured rank of a record, with the measured figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge_memory.accuracy.features import features_of, scale_of
from bridge_memory.accuracy.records import Measurement, Record
from bridge_memory.accuracy.runs import NotARun, NotComparable, run_of
from bridge_memory.components import MADE_BY_FIRST_STEP
from bridge_memory.estimation import StageEstimate, estimate, explain
from bridge_memory.residual import relative
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.ranks import stage_of_rank


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measured rank with its prediction.

    ``status``: "ok"; "not_modelled", whose ``reason`` says what is missing or why there is nothing to compare;
    "not_a_run", which no estimate of a run can be compared with; or "error", a bug. ``scale``: one of
    ``features.SCALES``, "" where the run could not be read. ``stage``: the predicted stage, for explanations.
    """

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
    scale: str = ""
    stage: StageEstimate | None = None

    @property
    def allocated_error(self) -> float | None:
        """Of the static memory: (measured - predicted) / measured."""
        return relative(self.measured_allocated_bytes, self.predicted_allocated_bytes)

    @property
    def max_allocated_error(self) -> float | None:
        """Of the peak: (measured - predicted) / measured."""
        return relative(self.measured_max_allocated_bytes, self.predicted_max_allocated_bytes)

    def as_json(self) -> dict[str, object]:
        names = (
            "id", "family", "tier", "rank", "status", "reason",
            "predicted_allocated_bytes", "measured_allocated_bytes",
            "predicted_max_allocated_bytes", "measured_max_allocated_bytes",
        )
        return {name: getattr(self, name) for name in names}


#: Share of a peak: unmodelled features that move it by no more leave a record comparable.
_SMALL = 0.05
#: Largest relative difference of two parameter counts of the same model (padding, biases).
_SAME_MODEL = 0.05


def predict(record: Record) -> list[Outcome]:
    """An outcome per measured rank; one without a rank where nothing was measured."""
    run: RunSpec | None = None
    try:
        run = run_of(record)
        answer = estimate(run)
        _check_comparable(record, answer.stages)
    except NotARun as reason:
        return _unpredicted(record, run, "not_a_run", f"skipped: {reason}")
    except NotComparable as reason:
        return _unpredicted(record, run, "not_modelled", f"skipped: {reason}")
    except SpecError as error:
        return _unpredicted(record, run, "not_modelled", str(error))
    except Exception as error:  # a bug must not hide the other records
        return _unpredicted(record, run, "error", f"{type(error).__name__}: {error}")
    # Features outside of torch's figures of training steps, and small ones, leave the two comparable.
    small = _SMALL * max(stage.peak_bytes for stage in answer.stages)
    listed = [g for g in answer.unmodelled if not g.outside]
    unmodelled = [g for g in listed if g.most is None or g.most > small]
    pp_before_dp = "--use-tp-pp-dp-mapping" in record.arguments
    features, scale = features_of(run), scale_of(run, record.highest_bytes)
    dynamic_scale = "--loss-scale" not in record.arguments
    outcomes = []
    for m in record.measured:
        stage = answer.stages[stage_of_rank(run.parallel, m.rank, pp_before_dp=pp_before_dp)]
        if run.optimizer.use_layer_wise_distributed_optimizer and not pp_before_dp:
            # Whole parameters are distributed: the stage estimate is of the most loaded rank, perhaps not this one.
            stage = explain(run, stage.stage, rank=m.rank)
        outcomes.append(
            Outcome(
                record.id, record.family, record.tier, record.gpu, m.rank,
                "not_modelled" if unmodelled else "ok", "; ".join(unmodelled),
                stage.static_bytes, m.allocated_bytes,
                peak_after(stage, run, m.after_step, dynamic_scale=dynamic_scale), m.max_allocated_bytes,
                features, scale, stage,
            )
        )
    return outcomes


def predict_all(records: Iterable[Record]) -> list[Outcome]:
    return [outcome for record in records for outcome in predict(record)]


def _check_comparable(record: Record, stages: Iterable[StageEstimate]) -> None:
    """Raise NotComparable where nothing was measured, or where the run's own log contradicts its arguments."""
    if not record.measured:
        raise NotComparable("nothing was measured")
    stated = record.logged_parameters
    largest = max(stage.parameters for stage in stages)
    if stated and abs(largest / stated - 1) > _SAME_MODEL:
        raise NotComparable(
            f"its own log counts {stated:.4g} parameters in the largest shard, its arguments make {largest:.4g}; "
            "one of the two is not the run"
        )


def _unpredicted(record: Record, run: RunSpec | None, status: str, reason: str) -> list[Outcome]:
    ranks = record.measured or (Measurement(-1, None, None),)
    return [
        Outcome(
            record.id, record.family, record.tier, record.gpu, m.rank if m.rank >= 0 else None, status, reason,
            None, m.allocated_bytes, None, m.max_allocated_bytes,
            scale=scale_of(run, record.highest_bytes) if run is not None else "",
        )
        for m in ranks
    ]


#: fp16's dynamic loss scale starts at 2^32 and halves after every overflowing step (after the second one,
#: ``optimizer/grad_scaler.py: DynamicGradScaler``); at 2^23 the gradients of a loss still overflow 65504. The
#: optimizer is not called in such a step.
_FP16_SKIPPED_STEPS = 10


def peak_after(stage: StageEstimate, run: RunSpec, steps: int, *, dynamic_scale: bool = True) -> int:
    """The peak as of a number of steps (0: late in training): before the first optimizer step there are no moments.

    Adam's moments are made in the first step that is not skipped, so no earlier forward or backward pass ran
    beside them. ``stage.peak_bytes`` is the peak of every later step. ``dynamic_scale``: of fp16, the loss scale is.
    """
    moments = _moments(stage)
    if _skipped(run, steps, dynamic_scale):
        return stage.peak_bytes - moments
    return max(stage.static_bytes, stage.peak_bytes - moments) if steps == 1 else stage.peak_bytes


def static_after(stage: StageEstimate, run: RunSpec, steps: int, *, dynamic_scale: bool = True) -> int:
    """Static memory as of a number of steps, likewise."""
    return stage.static_bytes - _moments(stage) * _skipped(run, steps, dynamic_scale)


def _moments(stage: StageEstimate) -> int:
    return sum(c.bytes for c in stage.components if c.state in MADE_BY_FIRST_STEP)


def _skipped(run: RunSpec, steps: int, dynamic_scale: bool) -> bool:
    """Whether all steps so far were skipped."""
    return run.precision.params_dtype == "fp16" and dynamic_scale and 0 < steps <= _FP16_SKIPPED_STEPS
