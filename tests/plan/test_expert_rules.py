"""What an expert would refuse as a first row: one row by hand for each rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bridge_memory import RunSpec, Verdict, peaks
from bridge_memory.plan.found import Found, Listed, Refused, Row
from bridge_memory.plan.megatron import expert
from bridge_memory.plan.megatron.expert import Judged, PassedOver, recomputation_apart, refusals
from bridge_memory.spec.run import GROUPS
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of

ROOT = Path(__file__).parents[2]

mechanisms = partial(expert.mechanisms, domain=8)

MOE, DENSE = "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}


def row(
    model: str, seconds: float, headroom: int, groups: Mapping[str, Mapping[str, Any]], again: float = 0.0
) -> Row[Any]:
    """``again``: seconds of recomputation."""
    groups = {"batch": {"global_batch_size": 64}, **groups}
    run = RunSpec(model=model, **{name: GROUPS[name](**fields) for name, fields in groups.items()})
    time = SimpleNamespace(seconds=seconds, peak=1 << 30, recomputation=again)
    return Row(run, 1 << 30, 0, headroom, time)  # type: ignore[arg-type]


class Every(Listed[Any]):
    def choice(self, number: int) -> object:
        return number


def found_of(*rows: Row[Any]) -> Found:
    """A row keeps the reserve whose headroom is not negative."""
    return Found(Every(rows), len(rows), 0, Refused(), False, 0, 0, None, lambda one: one.headroom >= 0)


def asked(*rows: Row[Any], domain: int = 8) -> tuple[str, ...]:
    """Refusals of the first of ``rows``."""
    return refusals(Judged(rows[0], found_of(*rows), domain))


def parallel(**fields: int | str) -> dict[str, dict[str, Any]]:
    return {"parallel": {"world_size": 16, **fields}}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(DENSE, 1, 0, parallel(tensor_model_parallel_size=8))], ""),
        ([row(DENSE, 1, 0, parallel(tensor_model_parallel_size=16))], "NVLink"),
        ([row(MOE, 1, 0, parallel()), row(MOE, 2, 0, parallel(expert_model_parallel_size=8))], "EP 1 for 128 experts"),
        ([row(MOE, 1, 0, parallel()), row(MOE, 2, -1, parallel(expert_model_parallel_size=8))], ""),
        ([row(MOE, 1, 0, parallel(expert_model_parallel_size=8)), row(MOE, 2, 0, parallel())], ""),
        ([row(DENSE, 1, 0, FULL, again=0.2), row(DENSE, 1.04, 0, {})], "full recomputation"),
        ([row(DENSE, 1, 0, FULL, again=0.2), row(DENSE, 1.06, 0, {})], ""),
        ([row(DENSE, 1, 0, FULL, again=0.2), row(DENSE, 1.04, -1, {})], ""),
        ([row(DENSE, 1, -1, {})], "reserve"),
        ([row(DENSE, 1, 0, {**parallel(pipeline_model_parallel_size=4), "batch": {"global_batch_size": 12}})],
         "3 microbatches for 4 pipeline stages"),
        ([row(DENSE, 1, 0, {**parallel(context_parallel_size=8), "batch": {"seq_length": 4096}})],
         "CP 8 leaves 512 tokens"),
        ([row("Qwen/Qwen3-0.6B", 1, 0, parallel(tensor_model_parallel_size=8))], "128 columns"),
    ],
)  # fmt: skip
def test_each_rule_refuses_what_it_says(rows: list[Row[Any]], reason: str) -> None:
    found = asked(*rows)
    if not reason:
        assert found == ()
    else:
        assert len(found) == 1 and reason in found[0]


EIGHT = parallel(expert_model_parallel_size=8)
EXPERTS = {"recompute": {"granularity": "selective", "modules": ("moe",)}}


def sequences(cp: int, micro_batch: int) -> dict[str, dict[str, int]]:
    batch = {"micro_batch_size": micro_batch, "global_batch_size": 64}
    return {**parallel(context_parallel_size=cp), "batch": batch}


@pytest.mark.parametrize(
    ("others", "last", "reason"),
    [
        ([row(MOE, 2, 0, parallel(expert_model_parallel_size=8))], row(MOE, 1, 0, parallel()), "EP 1 for 128 experts"),
        ([row(MOE, 2, -1, parallel(expert_model_parallel_size=8))], row(MOE, 1, 0, parallel()), None),
        ([row(DENSE, 1.04, 0, {})], row(DENSE, 1, 0, FULL, again=0.2), "full recomputation"),
        ([row(DENSE, 1.06, 0, {})], row(DENSE, 1, 0, FULL, again=0.2), None),
        # Half of the layers again is less than all experts twice.
        ([row(MOE, 1.04, 0, {**EIGHT, **EXPERTS}, again=0.12)], row(MOE, 1, 0, {**EIGHT, **FULL}, again=0.1), None),
        ([row(MOE, 1.04, 0, {**EIGHT, **FULL}, again=0.1)], row(MOE, 1, 0, {**EIGHT, **EXPERTS}, again=0.3),
         "much recomputation"),
        ([row(MOE, 1.06, 0, {**EIGHT, **FULL}, again=0.1)], row(MOE, 1, 0, {**EIGHT, **EXPERTS}, again=0.3), None),
        # Two halves of two sequences on two ranks each are one sequence a rank.
        ([row(DENSE, 1, 0, sequences(1, 1))], row(DENSE, 1.1, 0, sequences(2, 2)), "context parallelism"),
        ([row(DENSE, 1, 0, sequences(1, 2))], row(DENSE, 1.1, 0, sequences(2, 2)), None),
        ([row(DENSE, 1, 0, sequences(1, 1))], row(DENSE, 1.1, 0, sequences(2, 1)), None),
        ([], row(DENSE, 1.1, 0, sequences(2, 2)), None),
    ],
)  # fmt: skip
def test_a_search_passes_over_what_nobody_queues(others: list[Row[Any]], last: Row[Any], reason: str | None) -> None:
    found = found_of(*others, last)
    said = PassedOver()(last, found)
    assert said is None if reason is None else said is not None and reason in said
    ranked = found._replace(refuses=PassedOver()).ranked(5)
    assert (last in ranked.rows) is (reason is None) and sum(ranked.refused.values()) == (reason is not None)


def test_a_small_row_leads_where_a_thousand_faster_ones_are_tight() -> None:
    tight = row(DENSE, 1, -1, parallel())
    small, smaller = (replace(row(DENSE, 8 + n, 0, parallel()), peak=(1 << 30) - n) for n in (1, 2))
    ranked = found_of(*(tight,) * 2000, smaller, small).ranked(3)
    assert ranked.rows == (small, tight, tight) and ranked.keeping == 1


def test_what_refuses_all_refuses_nothing() -> None:
    only = row(MOE, 1, 0, parallel())
    ranked = found_of(only)._replace(refuses=lambda one, found: "why not").ranked(3)
    assert ranked.rows == (only,) and not ranked.refused


def test_what_recomputes_more_and_frees_nothing_is_not_shown() -> None:
    """Nor an exchange of nothing by another dispatcher; what frees memory, or shares no sizes, is."""
    def selective(*modules: str) -> dict[str, Any]:
        return {"recompute": {"granularity": "selective", "modules": modules}}

    gathers = {**parallel(), "implementation": {"moe_token_dispatcher_type": "allgather"}}
    ranks = parallel(expert_model_parallel_size=8)
    shown = row(MOE, 1, 0, ranks), row(MOE, 1.2, 0, parallel()), row(MOE, 1.3, 1, {**ranks, **selective("layernorm")})
    hidden = row(MOE, 1.1, 0, {**ranks, **selective("moe_act")}), row(MOE, 1.21, 0, gathers)
    more = row(MOE, 1.4, 1, {**ranks, **selective("layernorm", "moe_act")})
    found = found_of(*shown, *hidden, more)._replace(alike=recomputation_apart)
    assert found.ranked(9).rows == shown


def test_a_mechanism_has_to_save_its_share_of_the_step() -> None:
    """The first has a pipeline and virtual stages, the second tensor parallelism alone, the third nothing."""
    staged = parallel(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2)
    rows = [row(DENSE, 1, 0, staged), row(DENSE, 1.01, 0, parallel(tensor_model_parallel_size=2))]
    rows.append(row(DENSE, 1.045, 0, parallel()))
    assert [mechanisms(one) for one in rows] == [
        (2, False, 4, 1, 8, -1), (1, False, 2, 1, 1, -1), (0, False, 1, 1, 1, -1),
    ]  # fmt: skip
    found = found_of(*rows)._replace(mechanisms=mechanisms)
    assert found.ranked(3).rows == (rows[1], rows[0], rows[2])
    few = row(DENSE, 1.015, 0, parallel(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=1))
    assert found_of(rows[0], few)._replace(mechanisms=mechanisms).ranked(2).rows == (few, rows[0])
    two = row(DENSE, 1.03, 0, parallel())  # saves two mechanisms, and is as fast as 4 % allow
    assert found_of(rows[0], two)._replace(mechanisms=mechanisms).ranked(2).rows == (two, rows[0])


def test_a_split_by_hand_and_much_recomputation_are_mechanisms() -> None:
    """A pipeline whose layers are split by hand, beside tensor parallelism alone; the MoE layers again, 17 % of the
    step, beside none of it over more ranks, and there over eight ranks and not sixteen."""
    by_hand = parallel(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*18|t*14L")
    rows = row(DENSE, 1, 0, by_hand), row(DENSE, 1.015, 0, parallel(tensor_model_parallel_size=2))
    found = found_of(*rows)._replace(mechanisms=mechanisms)
    assert found.ranked(2).rows == (rows[1], rows[0])
    again = {"recompute": {"granularity": "selective", "modules": ("moe",)}}
    few, more, most = (parallel(expert_model_parallel_size=n) for n in (4, 8, 16))
    rest = row(MOE, 1.03, 0, most), row(MOE, 1.031, 0, more)
    fastest, light = row(MOE, 1, 0, {**few, **again}, again=0.17), row(MOE, 1, 0, {**few, **again}, again=0.01)
    assert found_of(fastest, *rest)._replace(mechanisms=mechanisms).ranked(3).rows[0] == rest[1]
    assert found_of(light, *rest)._replace(mechanisms=mechanisms).ranked(3).rows[0] == light


def test_no_more_gpus_a_replica_for_fewer_mechanisms() -> None:
    staged = parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    rows = row(DENSE, 1, 0, staged), row(DENSE, 1.01, 0, parallel(tensor_model_parallel_size=4))
    assert found_of(*rows)._replace(mechanisms=mechanisms).ranked(2).rows == rows


@pytest.mark.parametrize("number", (1, 3))
def test_what_may_not_fit_as_a_whole_job_is_behind_what_does(number: int) -> None:
    """However many rows are asked for, the same one is first; where no job fits for sure, the order stays."""
    rows = tuple(row(DENSE, seconds, 0, parallel(tensor_model_parallel_size=2)) for seconds in (1, 1.2, 1.4))
    found = found_of(*rows)
    sure = found._replace(whole=lambda one: Verdict.FITS if one.time.seconds > 1.1 else Verdict.TIGHT).ranked(number)
    assert sure.rows == (rows[1], rows[2], rows[0])[:number] and sure.keeping == min(number, 2)
    none = found._replace(whole=lambda one: Verdict.TIGHT).ranked(number)
    assert none.rows == rows[:number] and none.keeping == number


def test_published_layouts_are_as_many_as_the_table_has() -> None:
    document = yaml.safe_load((ROOT / "scripts" / "published_layouts.yaml").read_text())
    rows = document["layouts"] if isinstance(document, dict) else document
    table = (ROOT / "references" / "generated" / "expert_acceptance.md").read_text()
    assert len(rows) >= 40 and f" of {len(rows)} fit" in table


def test_what_exchanges_may_take_less_is_no_reason_for_recomputation() -> None:
    """Experts on two ranks with full recomputation, 8 % faster than on eight without it: of that no more than 4 % stay
    where the exchanges, a fifth of the step over eight ranks, take as little as measured runs allow."""
    few, many = (parallel(expert_model_parallel_size=n) for n in (2, 8))
    rows = row(MOE, 1, 0, {**few, **FULL}, again=0.2), row(MOE, 1.08, 0, many)
    doubt = lambda one: 0.05 if one is rows[1] else 0.01  # noqa: E731
    for found, reasons in ((found_of(*rows), 0), (found_of(*rows)._replace(doubt=doubt), 1)):
        assert len(refusals(Judged(rows[0], found, 8))) == reasons
        assert (PassedOver()(rows[0], found) is not None) is bool(reasons)


def test_of_a_tie_experts_on_all_ranks_of_a_domain_lead() -> None:
    """And not on those of two."""
    two, eight, sixteen = (row(MOE, s, 0, parallel(expert_model_parallel_size=n)) for s, n in
                           ((1, 2), (1.01, 8), (1.005, 16)))  # fmt: skip
    assert found_of(two, sixteen, eight)._replace(mechanisms=mechanisms).ranked(3).rows[0] == eight
    slow = row(MOE, 1.06, 0, parallel(expert_model_parallel_size=8))
    assert found_of(two, slow)._replace(mechanisms=mechanisms).ranked(2).rows[0] == two
    doubt = lambda one: 0.06 if one is slow else 0.01  # noqa: E731
    assert found_of(two, slow)._replace(mechanisms=mechanisms, doubt=doubt).ranked(2).rows[0] == slow


def test_exchanges_over_the_network_are_a_mechanism_and_the_first_that_a_tie_avoids() -> None:
    """Sixteen ranks of experts where eight are a domain, beside eight of them and a pipeline: as many mechanisms, and a
    replica of as many GPUs as the fastest's."""
    network = row(MOE, 1.001, 0, parallel(expert_model_parallel_size=16))
    both = row(MOE, 1, 0, parallel(expert_model_parallel_size=16, pipeline_model_parallel_size=2, world_size=32))
    inside = row(MOE, 1.002, 0, parallel(expert_model_parallel_size=8, pipeline_model_parallel_size=2))
    assert [mechanisms(one)[:2] for one in (network, both, inside)] == [(1, True), (2, True), (1, False)]
    assert found_of(both, network, inside)._replace(mechanisms=mechanisms).ranked(3).rows[0] == inside
    assert partial(expert.mechanisms, domain=72)(network)[:2] == (0, False)


def test_a_choice_whose_fastest_row_is_tight_keeps_its_slower_ones() -> None:
    """Virtual stages leave too little, and the same pipeline without them enough: it is not passed over for another."""
    class OneChoice(Every):
        def choice(self, number: int) -> object:
            return self[number].run.parallel.pp

    staged = row(DENSE, 1, -1, parallel(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2))
    plain = replace(row(DENSE, 1.1, 0, parallel(pipeline_model_parallel_size=4)), peak=1 << 29)
    slower = replace(row(DENSE, 1.2, 5, parallel(pipeline_model_parallel_size=4)), peak=1 << 28)
    other = row(DENSE, 1.3, 0, parallel(pipeline_model_parallel_size=2))
    found = found_of(staged, plain, slower, other)._replace(rows=OneChoice([staged, plain, slower, other]))
    ranked = found.ranked(4)
    assert ranked.rows == (plain, other, staged) and ranked.keeping == 2


def test_what_the_host_holds_up_is_said_where_it_fits_and_graphs_would_spare_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences with full recomputation take 1 s; one without takes 1.2 s, in 0.3 of which kernels wait for the
    host, and two without 1.1 s with nothing to spare."""
    def time(run: RunSpec, *_: Any) -> Any:
        one, full = run.batch.micro_batch_size == 1, run.recompute.granularity == "full"
        host = 0.3 if one else 0.0
        return SimpleNamespace(seconds=1.0 if full else 1.2 if one else 1.1, passes=SimpleNamespace(host=host))

    monkeypatch.setattr(expert, "step_time", time)
    batch = {"micro_batch_size": 2, "global_batch_size": 64}
    groups = {**parallel(expert_model_parallel_size=8), **FULL, "batch": batch}
    first = row(MOE, 1, 0, groups)
    run = first.run
    first = replace(first, time=time(run), peak=max(stage.peak_bytes for stage in peaks(run)))
    hardware = hardware_of("H100")

    def held(headroom: int, run: RunSpec = run) -> Any:
        return expert.held_by_the_host(replace(first, run=run, headroom=headroom), hardware, DEFAULT)

    found = held(1 << 36)
    assert found is not None
    assert (found[0].batch.micro_batch_size, found[0].recompute.granularity) == (1, None)
    assert held(0) is None  # no room for what it keeps
    assert held(1 << 36, run.with_fields(cuda_graph_impl="full_iteration")) is None
