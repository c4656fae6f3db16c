"""Field figures of a whole job: which phases a figure is of, the range predicted of it, and whether it lies inside."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bridge_memory
from bridge_memory.accuracy.corpus import RecordLine, read_corpus
from bridge_memory.accuracy.described.figures import Figure, Meaning, figures_of
from bridge_memory.accuracy.described.outcomes import Outcome, like_with_like, outcomes_of, totals
from bridge_memory.accuracy.described.setting import card_of
from bridge_memory.accuracy.described.whole import captured, predicted
from bridge_memory.cli import main
from bridge_memory.job.job import Job, PhaseMemory
from bridge_memory.outside.amount import Range, exactly
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import RunSpec, SpecError

RUNS = Path(__file__).parents[1] / "data" / "field" / "runs.jsonl"
ROWS = {row.data["id"]: row.data for row in read_corpus(RUNS)}
MIB, GIB = 1 << 20, 1 << 30


def scored(data: dict[str, Any]) -> list[Outcome]:
    return outcomes_of(RecordLine("here", data))


def row(
    verbatim: dict[str, Any], meaning: str = "", args: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """A dense model of Megatron Bridge's on two stages."""
    args = {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 16, "precision": "bf16"} | (args or {})
    return {
        "id": "a/row", "family": "a", "grade": "A", "framework": "Megatron Bridge 0.6, megatron-core 0.19, TE 2.14",
        "gpu": "H100 80GB", "world_size": 8, "model": "Qwen3-4B",
        "config": {"kind": "described", "args": args, "parallel": {"TP": 1, "PP": 2}},
        "measured_verbatim": verbatim, "measured_meaning": meaning, "kind": "run",
    } | fields  # fmt: skip


# --------------------------------------------------------------------------------------------------
# What a figure is
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "load"),
    [
        ("nvidia-smi (includes context, NCCL and checkpoint load)", True), ("includes the checkpoint-load", True),
        ("nvidia-smi, excluding the checkpoint load", False), ("sampled after checkpoint load", False),
        ("nvidia-smi", None), ("includes context. Without checkpoint load", False), ("includes NCCL", None),
        ("not including checkpoint load", False), ("run maxima are hidden by the checkpoint-load transient", None),
    ],
)  # fmt: skip
def test_whether_the_drivers_peak_includes_the_load(said: str, load: bool | None) -> None:
    (found,) = figures_of({"measured_verbatim": {"driver_peak_GiB": 3.0}, "measured_meaning": said})
    assert (found.meaning, found.load) == (Meaning.DRIVER, load)


@pytest.mark.parametrize(
    ("verbatim", "nbytes"),
    [
        ({"OOM": "80.4 GiB allocated by PyTorch and ~7 GiB held outside it (CUDA context)"}, 7 * GIB),
        ({"OOM": "70 GiB in torch, 512 MiB outside of it"}, 512 * MIB),
        ({"outside_torch_GiB": 6.5}, int(6.5 * GIB)), ({"outside PyTorch, GB": 5}, 5 * 10**9),
        ({"OOM": "80.4 GiB allocated, 7 GiB outside it"}, None),  # outside of what
        ({"OOM": "80.4 GiB allocated by PyTorch. The host has 7 GiB outside it"}, None),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_memory_outside_torch(verbatim: dict[str, Any], nbytes: int | None) -> None:
    found = figures_of({"measured_verbatim": verbatim, "measured_meaning": ""})
    assert [f.nbytes for f in found if f.meaning is Meaning.OUTSIDE] == ([] if nbytes is None else [nbytes])
    assert ("OOM" in verbatim) is any("out of memory" in f.not_compared for f in found)


def test_a_figure_that_its_source_takes_for_the_loads_is_no_figure_of_training() -> None:
    refused = "peak, meaning unstated; {}: do not score against training"
    for words, meaning in (
        ("likely the checkpoint-load transient", Meaning.LOAD), ("it is the checkpoint load", Meaning.LOAD),
        ("nobody knows", None), ("hidden by the checkpoint-load transient", None),
    ):  # fmt: skip
        data = {"measured_verbatim": {"peak_GB": 9.0}, "measured_meaning": refused.format(words)}
        assert [f.meaning for f in figures_of(data)] == [meaning], words
    for data in ROWS.values():  # the other rows that speak of a load name their memory
        if "checkpoint-load" in str(data.get("measured_meaning")) and "do not score" not in data["measured_meaning"]:
            assert Meaning.LOAD not in {f.meaning for f in figures_of(data)}


def test_the_card_is_that_of_a_rows_words() -> None:
    names = {
        "GH200 95GB": "GH200-96GB", "H200 (1-4)": "H200", "H100 80GB (p5)": "H100", "B300 or GB300 (216.9 GB reserved)":
        "B300", "H100-class (875 TFLOP/s FP8; 80 GB)": "H100",
    }  # fmt: skip
    for words, name in names.items():
        card = card_of(words)
        assert card is not None and card.name == name, words
    for other in ("unnamed 80GB", "", None, 3, "Z9999", ["H100"] * 0, "(H100)"):
        assert card_of(other) is None, other


# --------------------------------------------------------------------------------------------------
# What is predicted of it
# --------------------------------------------------------------------------------------------------


def _phase(name: Phase, allocated: int, reserved: tuple[int, int], outside: int, stage: int = 0) -> PhaseMemory:
    return PhaseMemory(name, stage, (exactly("x", allocated),), Range(*reserved), (exactly("y", outside),))


def _job(*phases: PhaseMemory, missing: tuple[str, ...] = ()) -> Job:
    others = tuple(p._replace(stage=1, reserved=Range(1, 2)) for p in phases)
    made = SimpleNamespace(phases=phases, stages=(phases, others), not_modelled=missing)
    return made  # type: ignore[return-value]


STEPS = (
    _phase(Phase.BUILD, 30, (31, 33), 1), _phase(Phase.LOAD, 40, (70, 75), 2),
    _phase(Phase.FIRST_STEP, 50, (60, 62), 5), _phase(Phase.TRAINING, 55, (61, 64), 5),
    _phase(Phase.EVALUATION, 55, (61, 68), 5),
    _phase(Phase.SAVE, 55, (61, 66), 5), _phase(Phase.RESUME, 80, (85, 90), 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("meaning", "load", "expected"),
    [
        (Meaning.DRIVER, False, (66, 73)), (Meaning.DRIVER, None, (66, 77)), (Meaning.DRIVER, True, (72, 92)),
        (Meaning.OUTSIDE, None, (5, 5)), (Meaning.RESERVED, None, (61, 64)), (Meaning.LOAD, None, (40, 92)),
    ],
)  # fmt: skip
def test_the_range_is_of_the_phases_that_a_figure_is_of(
    meaning: Meaning, load: bool | None, expected: tuple[int, int]
) -> None:
    """At least what surely ran, at most what may have run: whether a job evaluated or saved is not said."""
    figure = Figure("x", meaning, 1, load=load)
    assert predicted(_job(*STEPS), figure, None) == expected
    if meaning is Meaning.RESERVED:
        assert predicted(_job(*STEPS), figure, 1) == (1, 2)


def test_a_load_that_is_not_modelled_is_refused() -> None:
    job = _job(*(p for p in STEPS if p.phase not in (Phase.LOAD, Phase.RESUME)), missing=("engine zero9",))
    for figure in (Figure("x", Meaning.LOAD, 1), Figure("x", Meaning.DRIVER, 1, load=True)):
        with pytest.raises(SpecError, match="load of a checkpoint is not modelled: engine zero9"):
            predicted(job, figure, None)
    assert predicted(job, Figure("x", Meaning.DRIVER, 1), None) == (66, 73)


def test_the_load_of_another_engine_is_compared_too() -> None:
    zero = ROWS["arctic/run-h200-sp1-llama-8b-baseline.yml"]
    (found,) = scored(zero | {"measured_meaning": "nvidia-smi, includes checkpoint load"})
    assert found.status == "counted" and found.predicted_bytes is not None


def test_a_row_whose_card_is_not_known_says_so() -> None:
    (found,) = scored(row({"driver_peak_GiB": 40.0}, gpu="unnamed 80GB"))
    assert found.status == "not compared" and "the GPU is not named" in found.reason


def test_a_figure_of_a_rank_is_of_its_stage() -> None:
    """The first stage of two keeps more microbatches; the last has the logits."""
    found = {}
    for name in ("driver_GiB_rank0", "driver_GiB_last_rank", "driver_GiB_all_GPUs"):
        (found[name],) = scored(row({name: 40.0}))
    first, last, every = (o.range_bytes for o in found.values())
    assert first is not None and last is not None and every is not None
    assert first != last and every.most == max(first.most, last.most)


# --------------------------------------------------------------------------------------------------
# CUDA graphs
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("impl", "steps"),
    [("full_iteration", (0, 4, 100)), ("transformer_engine", (0, 4, 100)), ("local", (0, 1, 3, 4, 100)), ("none", ())],
)  # fmt: skip
def test_graphs_are_captured_after_steps_that_warm_up(impl: str, steps: tuple[int, ...]) -> None:
    run = RunSpec(model="Qwen/Qwen3-4B").with_fields(cuda_graph_impl=impl)
    assert tuple(after for after in (0, 1, 3, 4, 100) if captured(run, after)) == steps


def test_reserved_memory_before_a_capture_is_that_of_the_run_without_graphs() -> None:
    """Three steps warm up by default (megatron-core 0.16 to 0.19: ``transformer_config.py``)."""
    graphs = {"cuda_graph_impl": "full_iteration"}
    one = {"max_reserved_GB_after_it1_rank0": 40.0}
    (plain,), (early,) = scored(row(one)), scored(row(one, args=graphs))
    assert early.predicted_bytes == plain.predicted_bytes and early.range_bytes is None and early.inside is None
    assert any("captured after 3 steps" in sentence for sentence in early.left_open)
    (late,) = scored(row({"max_reserved_GB_after_it9_rank0": 40.0}, args=graphs))
    assert late.range_bytes is not None and plain.predicted_bytes is not None
    assert late.range_bytes.most > plain.predicted_bytes
    assert late.status == "counted" and not late.unmodelled  # the pools are what is predicted


@pytest.mark.parametrize("name", ["E-046-6934039", "E-035a"])
def test_nothing_but_graphs_is_lacking_of_these_rows(name: str) -> None:
    """E-046 overlaps expert-parallel exchanges, whose two streams are replayed; E-035a does not."""
    (found,) = (o for o in scored(ROWS[f"geodesic/nano30b-pretrain/{name}"]) if o.range_bytes is not None)
    assert found.meaning is Meaning.RESERVED
    assert not any("is not replayed" in sentence for sentence in found.unmodelled)
    assert not any("memory pools of CUDA graphs" in sentence for sentence in found.unmodelled)


# --------------------------------------------------------------------------------------------------
# How far off it is
# --------------------------------------------------------------------------------------------------


def _outcome(measured: int, low: int, high: int, **fields: Any) -> Outcome:
    return Outcome(
        "r", "f", "A", "counted", meaning=Meaning.DRIVER, measured_bytes=measured, predicted_bytes=(low + high) // 2,
        range_bytes=Range(low, high),
    )._replace(**fields)  # fmt: skip


def test_a_residual_is_from_the_nearer_end() -> None:
    for measured, inside, nearer in ((89, False, 90), (90, True, 90), (100, True, 100), (111, False, 110)):
        found = _outcome(measured, 90, 110)
        assert found.inside is inside
        assert found.residual == pytest.approx((measured - nearer) / measured)
    assert _outcome(100, 90, 110)._replace(range_bytes=None).inside is None
    assert _outcome(82, 90, 110).within is False and _outcome(84, 90, 110).within is True  # of 8 %
    (total,) = totals([_outcome(100, 110, 140), _outcome(100, 60, 140, id="s")])
    assert (total.kind, total.figures, total.within) == ("driver", 2, 1) and total.mean == pytest.approx(0.05)


def test_a_range_is_no_evidence_of_how_far_off_a_number_is() -> None:
    peak = Outcome("r", "f", "A", "counted", meaning=Meaning.PEAK, measured_bytes=50, predicted_bytes=49)
    ranged = _outcome(100, 90, 110, meaning=Meaning.RESERVED)
    assert like_with_like([ranged]) is None
    assert like_with_like([ranged, peak]) == peak


@pytest.mark.slow
def test_its_json_is_valid_by_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    folder = Path(bridge_memory.__file__).parent / "report"
    schema = json.loads((folder / "accuracy_described.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert main(["accuracy", str(RUNS), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(document)
    for key in document:
        assert not validator.is_valid({k: v for k, v in document.items() if k != key}), key
    for key in document["figures"][0]:
        damaged = copy.deepcopy(document)
        del damaged["figures"][0][key]
        assert not validator.is_valid(damaged), key
    for figure in (f for f in document["figures"] if f["range_bytes"] is not None):
        least, most = figure["range_bytes"]
        assert least <= figure["predicted_bytes"] <= most
        assert figure["inside"] is (least <= figure["measured_bytes"] <= most)


def test_the_table_says_whether_a_figure_lies_in_its_range(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    data = row({"driver_peak_GiB": 40.0})
    (found,) = scored(data)
    assert found.range_bytes is not None
    least, most = (n / GIB for n in found.range_bytes)
    for value, word in ((most + 1, "not in"), ((least + most) / 2, "in")):
        file.write_text(json.dumps(data | {"measured_verbatim": {"driver_peak_GiB": value}}) + "\n")
        assert main(["accuracy", str(file)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f" {word} {least:.2f}" in shown
        number = int(word == "in")
        assert f"1 predictions are ranges, residuals from the nearer end; {number} figures lie inside" in shown


@pytest.mark.parametrize("seed", range(12))
def test_odd_words_around_figures_of_a_job_do_not_crash(seed: int) -> None:
    """Any pieces of these texts in any order, with any size of job: scored, or not compared for a reason."""
    draw = random.Random(seed)
    pieces = [
        "includes", "excluding", "checkpoint load", "likely the checkpoint-load", "7 GiB held outside it", "PyTorch",
        "nvidia-smi", "do not score", "driver", "reserved", "rank 3", "last rank", "after 2 iterations", "0", ";",
    ]  # fmt: skip
    for _ in range(12):
        words = [draw.choice(pieces) for _ in range(draw.randrange(1, 9))]
        name = draw.choice(["driver_GiB", "reserved_GB", "OOM", "GiB", "outside_torch_GB", "peak_GiB"])
        value = draw.choice([" ".join(words), 12.5, 0.0, 1e-9, 139])
        impl = draw.choice(["none", "local", "transformer_engine", "full_iteration"])
        size = {"TP": draw.choice([1, 2]), "PP": draw.choice([1, 2, 4])}
        data = row({name: value, "GiB": 3.0}, " ".join(draw.sample(words, len(words))), {"cuda_graph_impl": impl})
        data["config"]["parallel"] = size
        data["gpu"] = draw.choice(["H100", "A100 40GB", "GB200", "unnamed"])
        for o in scored(data):
            assert o.status in ("counted", "unmodelled") or o.reason, data
            assert "malformed" not in o.reason, (o.reason, data)
            assert o.range_bytes is None or 0 <= o.range_bytes.least <= o.range_bytes.most, data
            json.dumps(o.as_json())
