"""Layouts evaluated as arrays against the same layouts one by one: what is legal, every peak, every step time."""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
from found_rules import rules_of

from bridge_memory import BatchSpec, RunSpec, SpecError, peaks
from bridge_memory.cli import main
from bridge_memory.cli.megatron.search import WITHOUT_NUMPY
from bridge_memory.outside.amount import Range
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.found import Found, Limit, OneByOne, Refused
from bridge_memory.plan.megatron.many import Sheet, Sorted, fitting
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space, layouts
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time
from bridge_memory.tapes.batched import Differs, along, distinct, numbered, numbered_rows, parts, whole
from bridge_memory.tapes.symbolic import chosen, largest, smallest
from bridge_memory.verdict import headroom
from bridge_memory.workspaces.driver import driver_bytes

H100 = hardware_of("H100")


def space(model: str, gpus: int, *fixed: str, total: int = 64, length: int = 4096, **fields: Any) -> Space:
    exhaustive = fields.pop("exhaustive", False)
    base = RunSpec(model=model, batch=BatchSpec(seq_length=length, global_batch_size=total)).with_fields(**fields)
    return Space(base, gpus, 8, frozenset(fixed), exhaustive=exhaustive, global_batch_size=total)


def found(of: Space, gpu: str, *, batched: bool | None) -> Found:
    return search(
        of, H100, capacity=find_gpu(gpu).capacity_bytes, outside=partial(outside_bytes_of, gpu=find_gpu(gpu)),
        batched=batched,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of", "gpu"),
    (
        (space("meta-llama/Llama-3.2-1B", 4), "A100-40GB"),
        (space("meta-llama/Llama-3.1-70B", 32, "recompute", "mbs"), "H200"),
        pytest.param(space("Qwen/Qwen3-30B-A3B", 8, "split", "vpp"), "H200", marks=pytest.mark.slow),
        # Pipelines of which no layout is left: 3 x 4 replicas do not divide 64 sequences; and a rule that refuses by
        # sizes alone, before others.
        (space("meta-llama/Llama-3.1-8B", 12, "recompute"), "A100-40GB"),
        (space("Qwen/Qwen2.5-7B", 32, "recompute", "cp", "split"), "A100-40GB"),
        pytest.param(
            space("deepseek-ai/DeepSeek-V2-Lite", 8, "cp", "vpp", total=32), "H100", marks=pytest.mark.slow
        ),
    ),
    ids=lambda of: of.base.model.name if isinstance(of, Space) else of,
)
def test_together_is_one_by_one(of: Space, gpu: str) -> None:
    """The same rows in the same order, the same counts, the same refusals."""
    ours, theirs = found(of, gpu, batched=True), found(of, gpu, batched=False)
    assert ours._replace(rows=theirs.rows, one_by_one=OneByOne.ASKED, **rules_of(theirs)) == theirs
    assert 0 < len(theirs.rows) < theirs.looked_at
    assert list(ours.rows) == list(theirs.rows)
    assert ours.best(7) == theirs.best(7) and ours.front() == theirs.front()


def test_what_dispatchers_allocate_themselves_has_to_fit_too() -> None:
    """HybridEP's buffers grow with the tokens that a rank sends, so that layouts lose room unequally."""
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "moe_router_dtype": "fp32"}
    sizes = {"expert_model_parallel_size": 8, "world_size": 8}
    of = space("Qwen/Qwen3-30B-A3B", 8, "split", "vpp", "recompute", "ep", **flex, **sizes)
    ours, theirs = found(of, "H200", batched=True), found(of, "H200", batched=False)
    assert ours._replace(rows=theirs.rows, one_by_one=OneByOne.ASKED, **rules_of(theirs)) == theirs
    assert list(ours.rows) == list(theirs.rows)
    card = find_gpu("H200")
    assert all(
        row.headroom == headroom(card, row.peak, row.run)
        for row in ours.rows
    )
    assert len({driver_bytes(row.run) for row in ours.rows}) > 1
    # A card that holds a peak beside all else, to the byte, does not hold the buffers beside it.
    first = ours.rows[0]
    tight = card.capacity_bytes - first.headroom - driver_bytes(first.run)
    assert ours.tight > 0
    for batched in (True, False):
        few = search(of, H100, capacity=tight, outside=partial(outside_bytes_of, gpu=card), batched=batched)
        assert first.run not in [row.run for row in few.rows]


#: Each with another way to differ: MTP, latent attention and pairs of modules; experts; mixers of hybrids; eight bits
#: with bf16 ends; local layers with scores; no distributed optimizer; buckets; offloading; adapters; packed sequences.
MANY = {
    "V3": space("deepseek-ai/DeepSeek-V3", 512, total=8192),
    "235B": space("Qwen/Qwen3-235B-A22B", 64, "split", total=512, expert_tensor_parallel_size=1),
    "70B": space("meta-llama/Llama-3.1-70B", 64, total=512, length=8192),
    "Nemotron-H": space("nvidia/Nemotron-H-56B-Base-8K", 32, total=128),
    "fp8": space("deepseek-ai/DeepSeek-V3", 256, "vpp", total=2048, fp8="hybrid", **{"precision.fp8_recipe": "mxfp8"}),
    "local": space("meta-llama/Llama-3.1-8B", 16, "cp", transformer_impl="local"),
    "buckets": space(
        "meta-llama/Llama-3.2-1B", 16, overlap_grad_reduce=True, overlap_param_gather=True,
        use_distributed_optimizer=True,
    ),
    "not distributed": space("Qwen/Qwen3-30B-A3B", 16, "vpp", use_distributed_optimizer=False),
    "muon": space(
        "meta-llama/Llama-3.2-1B", 8, use_distributed_optimizer=False, **{"optimizer.optimizer": "muon"},
        use_layer_wise_distributed_optimizer=True,
    ),
    "offloading": space("Qwen/Qwen3-30B-A3B", 16, "vpp", "cp", offload_modules=("core_attn", "expert_fc1")),
    "lora": space("meta-llama/Llama-3.1-8B", 8, "split", **{"peft.scheme": "lora", "peft.dim": 16}),
    "packed": space("meta-llama/Llama-3.1-8B", 16, "split", packed_sequences=True),
    "instances": space(
        "Qwen/Qwen3-30B-A3B", 64, "vpp", "etp", num_distributed_optimizer_instances=2, world_size=64, total=256
    ),
    "allgather": space("Qwen/Qwen3-30B-A3B", 16, "vpp", "cp", moe_token_dispatcher_type="allgather"),
    # One expert a rank, whose map backward keeps; a router that keeps its own.
    "local expert": space("mistralai/Mixtral-8x7B-v0.1", 16, "vpp", moe_token_dispatcher_type="allgather"),
    "fused router": space("mistralai/Mixtral-8x7B-v0.1", 16, "vpp", "cp", moe_router_fusion=True),
    # FlashAttention's splits count the heads of a rank.
    "deterministic": space("meta-llama/Llama-3.1-8B", 16, "cp", deterministic_mode=True, gpu_arch="ampere"),
    "sequence parallel off": space("meta-llama/Llama-3.1-8B", 8, "split", sequence_parallel=False),
}  # fmt: skip


#: They take ten seconds each.
LARGE = {"V3", "fp8"}


@pytest.mark.parametrize(
    ("name", "number"),
    [pytest.param(n, 20, marks=pytest.mark.slow) if n in LARGE else (n, 20) for n in MANY]
    + [pytest.param(n, 340, marks=pytest.mark.slow) for n in MANY],
)
def test_random_layouts_are_those_of_peaks_and_step_time(name: str, number: int) -> None:
    """To the byte and to the last bit; with the slow ones 5,100 and more."""
    of = MANY[name]
    sheet, refused = Sheet(of), Refused()
    wide = Limit(322 << 30, lambda run: Range(0, 0))
    groups = [few for few in fitting(sheet, H100, DEFAULT, wide, refused) if len(few.peaks)]
    chance = random.Random(f"{name} {number}")
    assert sum(few.looked_at for few in groups) > 100 and len({few.pipeline.pp for few in groups}) > 1
    for _ in range(number):
        few = chance.choice(groups)
        i = chance.randrange(len(few.peaks))
        run = sheet.run(few.pipeline, *few.places(i))
        assert few.peaks[i] == max(stage.peak_bytes for stage in peaks(run)), run
        assert few.seconds[i] == step_time(run, H100).seconds, run
    rows = Sorted([(sheet, group) for group in groups])
    found = []
    for i in range(len(rows)):
        _, few, at = rows.place(i)
        found.append((few.seconds[at], few.peaks[at], few.order(sheet, at)))
    assert found == sorted(found) and len(found) == sum(len(few.peaks) for few in groups)
    assert list(rows.peaks()) == [peak for _, peak, _ in found]


@pytest.mark.parametrize("name", ("local", "not distributed", "packed", "sequence parallel off", "muon", "lora"))
def test_what_is_legal_and_why_not(name: str) -> None:
    of = MANY[name]
    sheet, ours, theirs = Sheet(of), Refused(), Refused()
    legal = [(pipeline, sheet.legal(pipeline, ours)) for pipeline in sheet.pipelines]
    runs = [(run.parallel, run.batch, run.recompute) for alike in layouts(of, theirs) for run in alike]
    assert ours == theirs and sum(which.sum() for _, which in legal) == len(runs)
    chance, known = random.Random(name), set(runs)
    for pipeline, which in legal:
        places = list(zip(*which.nonzero(), strict=True))
        for place in chance.sample(places, min(5, len(places))):
            run = sheet.run(pipeline, *place)
            assert (run.parallel, run.batch, run.recompute) in known


@pytest.mark.parametrize("batched", (True, False))
def test_more_processes_find_the_same(batched: bool) -> None:
    of = space("meta-llama/Llama-3.2-1B", 4, "cp", "vpp")
    gpu = find_gpu("A100-40GB")
    card = {"capacity": gpu.capacity_bytes, "outside": partial(outside_bytes_of, gpu=gpu)}
    one, two = (search(of, H100, batched=batched, jobs=jobs, **card) for jobs in (1, 2))  # type: ignore[arg-type]
    assert list(one.rows) == list(two.rows) and len(one.rows) > 9
    assert one._replace(rows=two.rows, **rules_of(two)) == two


def test_without_numpy_layouts_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    of = space("meta-llama/Llama-3.2-1B", 2, "vpp", "mbs")
    ours = found(of, "H100", batched=True)
    for name in ("numpy", "bridge_memory.plan.megatron.many"):
        monkeypatch.setitem(sys.modules, name, None)
    theirs = found(of, "H100", batched=None)
    assert theirs.one_by_one is OneByOne.NUMPY and list(theirs.rows) == list(ours.rows)


def test_a_search_says_that_numpy_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["search", "meta-llama/Llama-3.2-1B", "--num-gpus", "1", "--gpu", "H100", "--global-batch-size", "8"]
    command += ["--vary", "mbs", "--json"]
    assert main(command) == 0
    ours = capsys.readouterr()
    for name in ("numpy", "bridge_memory.plan.megatron.many"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(command) == 0
    theirs = capsys.readouterr()
    assert json.loads(theirs.out)["best"] == json.loads(ours.out)["best"]
    assert ours.err == "" and theirs.err == f"{WITHOUT_NUMPY}\n"


# ---- arrays in the place of numbers ----


def test_an_array_answers_a_question_only_as_one() -> None:
    size = along(0, [1, 2, 4])
    assert size > 0 and not size > 4 and int(along(1, [3, 3])) == 3
    with pytest.raises(Differs) as differs:
        bool(size > 1)
    pieces = whole((3, 2, 1)).divided(differs.value.values)
    assert sorted(tuple(part.positions[0]) for part in pieces) == [(0,), (1, 2)]
    with pytest.raises(Differs):
        range(size)
    kept = size
    size += 1  # makes another, as of a number
    assert kept.ravel().tolist() == [1, 2, 4] and size.ravel().tolist() == [2, 3, 5]


@pytest.mark.parametrize("shape", ((0, 3), (1, 1), (40, 2), (300, 4)))
def test_distinct_numbers_are_those_of_numpy(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(3).integers(-3, 4, shape)
    assert distinct(values).tolist() == np.unique(values).tolist()
    few, which = numbered(values)
    assert (few[which] == values).all() and which.shape == shape
    rows, back = numbered_rows(values)
    theirs, their_back = np.unique(values, axis=0, return_inverse=True)
    assert rows == [tuple(row) for row in theirs.tolist()] and back.tolist() == their_back.ravel().tolist()


def test_parts_go_the_way_that_each_run_would_go() -> None:
    sizes, others = along(0, [1, 2, 3, 4, 5]), along(1, [1, 2, 3])

    def collatz(a: Any, b: Any) -> Any:
        if a % 2:
            return 3 * a + (b if b > 2 else -b)
        return largest(a // 2, b) if a > b else smallest(a, b) + chosen(b == 2, 10, 20)

    for part, value in parts(whole((5, 3, 1)), lambda part: collatz(part.take(sizes), part.take(others))):
        for i, a in enumerate(part.positions[0]):
            for j, b in enumerate(part.positions[1]):
                ours = np.broadcast_to(value, part.shape)[i, j, 0]
                assert ours == collatz(int(sizes[a, 0, 0]), int(others[0, b, 0]))


def test_a_refusal_is_counted_under_what_it_is_about() -> None:
    refused = Refused()
    for text in (
        "the number of microbatches (4 = global_batch_size / 2) is smaller than 8; set it", "num_layers (61) is not 62",
        "pipeline_model_parallel_layout 'tt' has 2 (of 4) layers", "sequence_parallel: drop it",
    ):  # fmt: skip
        refused.add(SpecError(text), 2)
    assert set(refused) == {
        "the number of microbatches", "num_layers", "pipeline_model_parallel_layout", "sequence_parallel",
    } and set(refused.values()) == {2}  # fmt: skip
