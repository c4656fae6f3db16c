"""Whether a run fits where something that it asks for is not modelled: known, bounded, or unknown, and said first."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import bridge_memory.caveats.unmodelled as caveats
from bridge_memory.cards.rows import GPUS
from bridge_memory.cli import main
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.outside.amount import Range
from bridge_memory.readers import resolve_model
from bridge_memory.report.json import estimate_to_json
from bridge_memory.report.table import print_estimate
from bridge_memory.spec import BatchSpec, RunSpec
from bridge_memory.spec.unmodelled import Bounds, Effect, Unmodelled, as_feature, bounds
from bridge_memory.verdict import FRAGMENTATION, Verdict, fits, verdict_of

GIB = 1 << 30


@cache
def plain() -> Estimate:
    """GPT-2 small on one GPU: some 2 GiB, which every card has."""
    return estimate(RunSpec(model=resolve_model("openai-community/gpt2"), batch=BatchSpec(seq_length=1024)))


def with_gaps(*unmodelled: str) -> Estimate:
    return replace(plain(), not_modelled=unmodelled)


def gap_of(sentence: str, effect: Effect, **known: Any) -> Unmodelled:
    return Unmodelled(sentence, effect, order="as large as it is", **known)


UP, DOWN = gap_of("a: more", Effect.UP), gap_of("b: less", Effect.DOWN)
EITHER, WORDS = gap_of("c: either", Effect.EITHER), "d: a sentence of somebody else's"


# ---- gaps and bounds ----


@pytest.mark.parametrize(
    ("unmodelled", "least", "most"),
    [
        ((), 100, 100),
        ((UP,), 100, None),
        ((DOWN,), None, 100),
        ((EITHER,), None, None),
        ((WORDS,), None, None),
        ((UP, DOWN), None, None),
        ((UP, WORDS), None, None),
        ((gap_of("e", Effect.UP, least=20),), 120, None),
        ((gap_of("e", Effect.UP, most=5),), 100, 105),
        ((gap_of("e", Effect.UP, least=3, most=5), gap_of("f", Effect.UP, least=10, most=20)), 113, 125),
        ((gap_of("e", Effect.DOWN, least=-30),), 70, 100),
        ((gap_of("e", Effect.EITHER, least=-30, most=7),), 70, 107),
        ((gap_of("e", Effect.DOWN, least=-300),), 0, 100),
        ((gap_of("e", Effect.UP, least=20), gap_of("e", Effect.UP, least=20)), 120, None),
    ],
)
def test_gaps_move_a_number_within_bounds(unmodelled: tuple[str, ...], least: int | None, most: int | None) -> None:
    assert bounds(100, unmodelled) == Bounds(least, most)
    assert bounds(100, reversed(unmodelled)) == Bounds(least, most)


def test_a_gap_is_its_sentence_and_survives_a_copy() -> None:
    import copy
    import pickle

    feature = gap_of("x: y", Effect.UP, least=1, most=2, outside=True)
    assert feature == "x: y" and hash(feature) == hash("x: y") and json.dumps(feature) == '"x: y"'
    for made in (copy.deepcopy(feature), pickle.loads(pickle.dumps(feature)), as_feature(feature)):
        assert (made, made.effect, made.least, made.most, made.outside) == ("x: y", Effect.UP, 1, 2, True)
        assert made.order == feature.order
    assert as_feature("z").effect is Effect.UNKNOWN


def test_every_gap_of_a_run_says_where_it_moves_the_peak() -> None:
    run = plain().run.with_fields(cuda_graph_impl="local", moe_apply_probs_on_input=True)
    assert [feature.effect for feature in caveats.unmodelled_features(run)] == [Effect.UP, Effect.EITHER]


# ---- verdicts ----

#: What a card of 10 GiB has for a peak beside a GiB outside of torch, and fragmentation.
TEN = 10 * GIB
ROOM = int((TEN - GIB) / (1 + FRAGMENTATION))


@pytest.mark.parametrize(
    ("least", "most", "verdict"),
    [
        (ROOM, ROOM, Verdict.FITS), (ROOM + 2, ROOM + 2, Verdict.DOES_NOT_FIT),
        (ROOM, None, Verdict.UNKNOWN), (ROOM + 2, None, Verdict.DOES_NOT_FIT),
        (None, ROOM, Verdict.FITS), (None, ROOM + 2, Verdict.UNKNOWN),
        (0, ROOM + 2, Verdict.UNKNOWN), (0, ROOM, Verdict.FITS), (None, None, Verdict.UNKNOWN),
    ],
)  # fmt: skip
def test_bounds_decide_where_they_are_on_one_side_of_the_card(
    least: int | None, most: int | None, verdict: Verdict
) -> None:
    assert verdict_of(Bounds(least, most), TEN, Range(GIB, GIB)) is verdict


def test_what_may_lie_outside_of_torch_makes_a_verdict_tight() -> None:
    """A peak of 8 GiB, 8.584 with fragmentation, of 10: with at most 1.4 GiB outside it fits."""
    one = Bounds(8 * GIB, 8 * GIB)
    ranges = {Range(GIB, int(1.4 * GIB)): Verdict.FITS, Range(GIB, 2 * GIB): Verdict.TIGHT}
    ranges[Range(int(1.5 * GIB), 2 * GIB)] = Verdict.DOES_NOT_FIT
    assert {outside: verdict_of(one, TEN, outside) for outside in ranges} == ranges


def of_cards(result: Estimate, *names: str) -> list[str]:
    return [str(fit.verdict) for fit in fits(result, [GPUS[name] for name in names])]


def test_what_can_only_add_leaves_does_not_fit_and_what_can_only_save_leaves_fits() -> None:
    small = replace(GPUS["T4"], capacity_bytes=plain().peak_stage.peak_bytes)
    for unmodelled, large_card, small_card in (
        ((), "fits", "does not fit"),
        ((UP,), "unknown", "does not fit"),
        ((DOWN,), "fits", "unknown"),
        ((EITHER,), "unknown", "unknown"),
        ((WORDS,), "unknown", "unknown"),
        ((gap_of("e", Effect.UP, most=1 << 20),), "fits", "does not fit"),
        ((gap_of("e", Effect.UP, least=500 * GIB),), "does not fit", "does not fit"),
    ):
        found = fits(with_gaps(*unmodelled), [GPUS["H100"], small])
        assert [str(fit.verdict) for fit in found] == [large_card, small_card], unmodelled
        assert [fit.fits for fit in found] == [large_card == "fits", small_card == "fits"]


def test_headroom_is_of_the_estimate_alone() -> None:
    (known,), (bounded,) = fits(plain(), [GPUS["H100"]]), fits(with_gaps(UP), [GPUS["H100"]])
    assert known.headroom_bytes == bounded.headroom_bytes > 0


def test_a_card_that_cannot_compute_a_run_is_not_unknown() -> None:
    run = plain().run.with_fields(fp8="e4m3", **{"precision.fp8_recipe": "mxfp8"})
    result = replace(estimate(run), not_modelled=(WORDS,))
    assert of_cards(result, "H100", "B200") == ["does not fit", "unknown"]


# ---- where it is said ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(result: Estimate, stream: io.StringIO, *names: str) -> str:
    print_estimate(result, fits(result, [GPUS[name] for name in names]) if names else (), stream=stream)
    return " ".join(re.sub("\x1b\\[[0-9;]*m", "", stream.getvalue()).split())


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_verdict_is_the_first_thing_that_is_printed(stream: Any) -> None:
    gib = f"{plain().peak_stage.peak_bytes / GIB:.2f} GiB"
    start = "Estimate of openai-community/gpt2: peak"
    (fit,) = fits(plain(), ["H100"])
    line = printed(plain(), stream(), "H100")
    numbers = re.search(r"peak ([\d.]+) \+ margin ([\d.]+) of 79.1 GiB, ([\d.]+) free", line)
    assert numbers is not None
    peak, margin, free = map(Decimal, numbers.groups())
    assert peak + margin + free == Decimal("79.1") and abs(free - Decimal(fit.headroom_bytes) / GIB) <= Decimal("0.05")
    spare = f"FITS H100: peak {peak} + margin {margin} of 79.1 GiB, {free} free"
    open_ = f"UNKNOWN for H100: modelled peak {peak} + margin {margin} of 79.1 GiB; not modelled:"
    for unmodelled, words in (
        ((), f"{gib} {spare}"),
        ((UP,), f"at least {gib} {open_} a"),
        ((DOWN,), f"at most {gib} {spare}; not modelled: b"),
        ((WORDS,), f"{gib}, higher or lower {open_} d"),
        ((UP, WORDS, EITHER), f"{gib}, higher or lower {open_} a, d and 1 more"),
    ):
        text = printed(with_gaps(*unmodelled), stream(), "H100")
        assert text.startswith(f"{start} {words} accuracy: "), text[:200]
        row = text.split("fits ----")[-1] if stream is io.StringIO else text
        assert ("unknown: features that are not modelled" in row) == bool(unmodelled)
    alone = f"{start} at least {gib} peak at least {gib}, in forward; not modelled: a accuracy: "
    assert printed(with_gaps(UP), stream()).startswith(alone)


def test_a_bound_of_both_sides_is_printed_as_a_range() -> None:
    low = plain().peak_stage.peak_bytes
    text = printed(with_gaps(gap_of("x: y", Effect.UP, least=GIB, most=2 * GIB)), io.StringIO(), "H100", "T4")
    assert f": peak {(low + GIB) / GIB:.2f} GiB to {(low + 2 * GIB) / GIB:.2f} GiB FITS H100 (" in text
    assert "x: y (adds memory, at least 1.00 GiB, at most 2,048.0 MiB)" in text


def test_every_gap_says_where_it_moves_the_peak() -> None:
    text = printed(with_gaps(UP, DOWN, EITHER, WORDS, gap_of("e: f", Effect.UP, outside=True)), io.StringIO())
    for words in (
        "a: more (adds memory: as large as it is)", "b: less (saves memory: as large as it is)",
            "c: either (may add or save memory: as large as it is)",
            f"{WORDS} (effect unknown: size unknown)",
            "e: f (adds memory: as large as it is, not in what torch reports of training steps)",
        ):  # fmt: skip
        assert words in text


def test_json_has_the_verdict_and_the_schema_knows_it() -> None:
    schema = Path(caveats.__file__).parents[1] / "report" / "estimate.schema.json"
    validator = pytest.importorskip("jsonschema").Draft202012Validator(json.loads(schema.read_text()))
    peak = plain().peak_stage.peak_bytes
    for unmodelled, answer, least, most in (
        ((), "fits", peak, peak), ((UP,), "unknown", peak, None), ((DOWN,), "fits", None, peak),
        ((gap_of("e", Effect.UP, least=500 * GIB),), "does not fit", peak + 500 * GIB, None),
    ):  # fmt: skip
        result = with_gaps(*unmodelled)
        doc = json.loads(json.dumps(estimate_to_json(result, fits(result, [GPUS["H100"]]))))
        validator.validate(doc)
        verdict = doc["verdict"]
        assert list(doc)[:2] == ["schema", "verdict"]
        assert [verdict[k] for k in ("answer", "peak_at_least_bytes", "peak_at_most_bytes")] == [answer, least, most]
        assert verdict[answer.replace(" ", "_")] == ["H100"]
        assert doc["not_modelled"] == [feature["what"] for feature in doc["unmodelled"]] == list(unmodelled)
        assert [feature["effect"] for feature in doc["unmodelled"]] == [
            str(as_feature(feature).effect) for feature in unmodelled
        ]
    without_cards = estimate_to_json(plain(), ())
    validator.validate(json.loads(json.dumps(without_cards)))
    assert without_cards["verdict"]["answer"] is None


def test_several_cards_have_one_answer() -> None:
    small = replace(GPUS["T4"], capacity_bytes=GIB)
    some = estimate_to_json(plain(), fits(plain(), [GPUS["H100"], small]))["verdict"]
    assert (some["answer"], some["fits"], some["does_not_fit"]) == ("fits on some", ["H100"], [small.name])
    unknown = estimate_to_json(with_gaps(UP), fits(with_gaps(UP), [GPUS["H100"], small]))["verdict"]
    assert (unknown["answer"], unknown["unknown"], unknown["does_not_fit"]) == ("unknown", ["H100"], [small.name])


ARGUMENTS = (
    "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --bf16"
)


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("", "fits"), ("--tp-comm-overlap", "fits"), ("--freeze-all-layers", "fits"),
        ("--fp8-output-proj", "unknown"),
        ("--brand-new-option 3", "unknown"), ("--fp8-amax-history-len 2048", "fits"), ("--log-throughput", "fits"),
    ],
)  # fmt: skip
def test_an_option_changes_the_verdict_of_the_command_line(
    option: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 whatever the verdict: it says whether there is an estimate."""
    words = ["estimate", "--megatron-args", f"{ARGUMENTS} {option}", "--num-gpus", "1", "--gpu", "H100"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"]["answer"] == answer
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith(answer.upper())
