"""A name in a report leads to the line that makes the tensor, as references/architecture.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bridge_memory import (
    BatchSpec,
    Estimate,
    ImplementationSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    estimate,
)
from bridge_memory.components import Role
from bridge_memory.report.details import stage_details

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bridge_memory"
PAGE = ROOT / "references" / "architecture.md"
#: What of a layer is the same in every block: linears, norms, residual sums.
SHARED = {"tapes/recorder.py", "inventory/layer.py"}
MODELS = (
    "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "meta-llama/Llama-3.1-8B", "bigscience/bloom", "MiniMaxAI/MiniMax-M2",
)
RUNS = {
    "Transformer Engine": {"precision": PrecisionSpec(fp8="hybrid")},
    "local": {"implementation": ImplementationSpec(transformer_impl="local")},
    "recomputed": {
        "recompute": RecomputeSpec(granularity="selective", modules=("core_attn", "layernorm")),
        "parallel": ParallelSpec(world_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=1),
    },
}


@cache
def sources(*rooms: str) -> dict[str, str]:
    return {
        str(path.relative_to(PACKAGE)): path.read_text() for room in rooms for path in (PACKAGE / room).rglob("*.py")
        if path.parent.name not in ("torch", "encoders")  # those of another implementation, under names of their own
    }


def files_of_parts() -> dict[str, str]:
    """Component -> file, from the page's table."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 2 and (file := re.fullmatch(r"`(inventory/[\w/]+\.py)`", cells[1])):
            found.update(dict.fromkeys(re.sub(r", and .*", "", cells[0]).split(", "), file[1]))
    return found


def searches(name: str) -> Iterator[str]:
    """The whole name, then ever fewer of its words, each time without what is before the last dot too."""
    words = name.split()
    for number in range(len(words), 0, -1):
        some = " ".join(words[:number])
        yield some
        yield some.rpartition(".")[2]


def found_in(name: str, *rooms: str) -> set[str]:
    """The files that the first search with an answer names."""
    for text in searches(name):
        files = {file for file, source in sources(*rooms).items() if text in source}
        if files:
            return files
    return set()


@pytest.fixture(scope="module", params=[(m, kind) for m in MODELS for kind in RUNS], ids=" ".join)
def result(request: pytest.FixtureRequest) -> Estimate:
    model, kind = request.param
    fields = RUNS[kind]
    if (model, kind) == ("openai/gpt-oss-20b", "local"):  # its experts have biases, and are refused on one rank
        fields = {**fields, "parallel": ParallelSpec(world_size=2, expert_model_parallel_size=2)}
    return estimate(RunSpec(model=model, batch=BatchSpec(seq_length=1024), **fields))


def test_the_page_names_a_file_for_every_part_that_is_retained(result: Estimate) -> None:
    parts = {c.part.value for c in result.stages[0].components if c.role is Role.ACTIVATION}
    assert parts <= files_of_parts().keys()


def test_a_saved_tensor_is_found_at_once_or_in_the_file_of_its_component(result: Estimate) -> None:
    files = files_of_parts()
    for row in stage_details(result, 0):
        if row.section != "parameters":
            where = found_in(row.name, "inventory")
            assert len(where) == 1 or where & {files[row.note], *SHARED}, f"{row.name} ({row.note}): {where}"


def test_everything_else_is_found_by_its_name(result: Estimate) -> None:
    stage = result.stages[0]
    assert found_in(stage.peak_operation, "inventory")
    texts = [*sources("engines", "workspaces", "inventory", "tapes").values(), (PACKAGE / "components.py").read_text()]
    for c in (*stage.components, *stage.carried_over):
        if c.role not in (Role.ACTIVATION, Role.TRANSIENT):
            name = c.name.removesuffix(" (routed experts)")
            assert any(name in text for text in texts), name
