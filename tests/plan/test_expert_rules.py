"""What an expert would refuse as a first row: one row by hand for each rule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from bridge_memory import RunSpec
from bridge_memory.plan.found import Found, Listed, Refused, Row
from bridge_memory.plan.megatron.expert import Judged, refusals
from bridge_memory.spec.run import GROUPS

ROOT = Path(__file__).parents[2]

MOE, DENSE = "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"
FULL = {"recompute": {"granularity": "full", "method": "uniform", "num_layers": 1}}


def row(model: str, seconds: float, headroom: int, groups: Mapping[str, Mapping[str, Any]]) -> Row[Any]:
    groups = {"batch": {"global_batch_size": 64}, **groups}
    run = RunSpec(model=model, **{name: GROUPS[name](**fields) for name, fields in groups.items()})
    return Row(run, 1 << 30, 0, headroom, SimpleNamespace(seconds=seconds, peak=1 << 30))  # type: ignore[arg-type]


def asked(*rows: Row[Any], domain: int = 8) -> tuple[str, ...]:
    """Refusals of the first of ``rows``; a row keeps the reserve whose headroom is not negative."""

    class Every(Listed[Any]):
        def choice(self, number: int) -> object:
            return number

    found = Found(Every(rows), len(rows), 0, Refused(), False, 0, 0, None, lambda one: one.headroom >= 0)
    return refusals(Judged(rows[0], found, domain))


def parallel(**fields: int) -> dict[str, dict[str, int]]:
    return {"parallel": {"world_size": 16, **fields}}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(DENSE, 1, 0, parallel(tensor_model_parallel_size=8))], ""),
        ([row(DENSE, 1, 0, parallel(tensor_model_parallel_size=16))], "NVLink"),
        ([row(MOE, 1, 0, parallel()), row(MOE, 2, 0, parallel(expert_model_parallel_size=8))], "EP 1 for 128 experts"),
        ([row(MOE, 1, 0, parallel()), row(MOE, 2, -1, parallel(expert_model_parallel_size=8))], ""),
        ([row(MOE, 1, 0, parallel(expert_model_parallel_size=8)), row(MOE, 2, 0, parallel())], ""),
        ([row(DENSE, 1, 0, FULL), row(DENSE, 1.04, 0, {})], "full recomputation"),
        ([row(DENSE, 1, 0, FULL), row(DENSE, 1.06, 0, {})], ""),
        ([row(DENSE, 1, 0, FULL), row(DENSE, 1.04, -1, {})], ""),
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


def test_published_layouts_are_as_many_as_the_table_has() -> None:
    document = yaml.safe_load((ROOT / "scripts" / "published_layouts.yaml").read_text())
    rows = document["layouts"] if isinstance(document, dict) else document
    table = (ROOT / "references" / "generated" / "expert_acceptance.md").read_text()
    assert len(rows) >= 40 and f" of {len(rows)} fit" in table
