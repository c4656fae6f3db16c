"""Reserved memory: the estimate's storages one by one, replayed through torch's allocator. Held to the real engines in
``tests/rehearsal/test_torch_run.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge_memory
from bridge_memory import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.reserved import replayed, why_not
from bridge_memory.reserved.torch_engines import ALL_GATHER, COMPUTE, REDUCE_SCATTER
from bridge_memory.spec import DataParallelSpec, ImplementationSpec, OptimizerSpec, PrecisionSpec
from bridge_memory.spec.engine_options import FSDPOptions
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.tapes.allocation_trace import Passes, Storages
from bridge_memory.tapes.tape import Tape

MIB, PAGE = 1 << 20, 20 << 20


def run_of(
    model: str = "meta-llama/Llama-3.1-8B", engine: str = "fsdp2", ranks: int = 8, *, titan: bool = False,
    **transformers: Any,
) -> RunSpec:  # fmt: skip
    sharded = engine == "fsdp2"
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=ranks),
        batch=BatchSpec(seq_length=8192, micro_batch_size=1, global_batch_size=ranks),
        precision=PrecisionSpec(params_dtype="fp32" if sharded else "bf16"),
        optimizer=OptimizerSpec(optimizer="adamw"), data_parallel=DataParallelSpec(engine=engine),
        fsdp=FSDPOptions(param_dtype="bf16", reduce_dtype="fp32") if sharded else FSDPOptions(),
        transformers=TransformersSpec(attention_mask="none", **transformers),
        implementation=ImplementationSpec(transformer_impl="torchtitan" if titan else "transformers"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_of(), id="fsdp2"),
        pytest.param(run_of(engine="single", ranks=1), id="single"),
        pytest.param(run_of(titan=True, selective_ac_option="op"), id="operations kept"),
        pytest.param(run_of(titan=True, gradient_checkpointing=True, use_reentrant=False), id="layers run again"),
        pytest.param(run_of("Qwen/Qwen3-8B"), id="norms of heads"),
        pytest.param(run_of("meta-llama/Llama-3.2-1B"), id="tied"),
    ],
)
def test_most_is_allocated_where_the_estimate_says(run: RunSpec) -> None:
    """Two ways to one figure: the estimate adds up what links of a chain have at their highest moments, the replay what
    comes and goes."""
    assert why_not(run) is None
    found = replayed(run)
    assert found.allocated == pytest.approx(estimate(run).stages[0].peak_bytes, rel=0.002)
    assert min(found.segments, found.expandable) > found.allocated


def test_every_stream_of_fsdp2_has_memory_of_its_own() -> None:
    """Gradients of 8,030,261,248 parameters in fp32 over 8 ranks, and nothing else, are made on the stream that reduces
    them; two outputs of all-gathers, of the embedding's and the output layer's [128256, 4096] in bf16 in the first, and
    an input, are there together on that which gathers."""
    run = run_of()
    streams = dict(replayed(run).expandable_of)
    assert set(streams) == {COMPUTE, ALL_GATHER, REDUCE_SCATTER}
    gradients = 8_030_261_248 * 4 // 8
    assert streams[REDUCE_SCATTER] == -(-gradients // PAGE) * PAGE
    layer = 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336 + 2 * 4096)
    root = 2 * (2 * 128256 * 4096 + 4096)
    assert root + layer + layer // 8 <= streams[ALL_GATHER] <= root + layer + layer // 8 + root // 8 + 2 * PAGE
    assert dict(replayed(run_of(engine="single", ranks=1)).expandable_of).keys() == {COMPUTE}


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (run_of(engine="zero3"), "engine zero3 is not replayed"),
        (run_of(gradient_checkpointing=True, use_reentrant=True), "with reentrant checkpoints is not replayed"),
        (
            run_of().with_(batch=BatchSpec(seq_length=8192, micro_batch_size=1, global_batch_size=16)),
            "with more than one microbatch a step is not replayed",
        ),
        (run_of(keeps_outputs=True), "reserved memory with keeps_outputs is not replayed"),
    ],
    ids=["zero3", "reentrant", "accumulation", "outputs"],
)
def test_what_is_not_followed_is_named(run: RunSpec, words: str) -> None:
    assert words in str(why_not(run))


# ---- a block, storage by storage ----


def _chain() -> Tape:
    """y = b(a(x)): a keeps x and has 3 MiB of scratch backward, b keeps its own output."""
    tape = Tape()
    x = tape.input("x", 4 * MIB)
    y = tape.tensor("y", 8 * MIB)
    tape.op("a", x, y, saves=(x,), backward_workspace=3 * MIB)
    z = tape.tensor("z", 2 * MIB)
    tape.op("b", y, z, saves=(z,))
    tape.output(z)
    tape.kept_by_checkpoint.append(z)
    return tape


def _allocation_trace(again: bool, keeps: bool) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Allocations (+) and frees (-) in MiB, forward and backward."""
    sizes: dict[int, int] = {}
    events: list[tuple[str, int]] = []

    def report(number: int, nbytes: int | None) -> None:
        if nbytes is not None:
            sizes[number] = nbytes // MIB
        events.append(("+" if nbytes is not None else "-", sizes[number]))

    storages = Storages(report)
    block = Passes(_chain(), storages, recompute=again, keeps=keeps)
    x = storages.make(4 * MIB)
    out, back = block.forward(x)
    storages.drop(x)
    storages.drop(out)
    forward = events[:]
    events.clear()
    gradients = back(storages.make(2 * MIB))
    storages.drop_all(gradients.values())
    assert sorted(kind for kind, _ in forward + events) == sorted("+-" * (len(forward + events) // 2))
    return forward, events


def test_a_block_keeps_what_its_operations_save() -> None:
    forward, backward = _allocation_trace(again=False, keeps=False)
    assert forward == [("+", 4), ("+", 8), ("+", 2), ("-", 8)]  # x and z stay
    # The gradient of z, of y beside it; z goes, then its gradient; that of x, scratch; x, the gradient of y, of x.
    assert backward == [
        ("+", 2), ("+", 8), ("-", 2), ("-", 2), ("+", 4), ("+", 3), ("-", 3), ("-", 4), ("-", 8), ("-", 4),
    ]  # fmt: skip


def test_a_block_that_runs_again_keeps_its_input() -> None:
    forward, backward = _allocation_trace(again=True, keeps=False)
    assert forward == [("+", 4), ("+", 8), ("+", 2), ("-", 8), ("-", 2)]
    assert backward[:4] == [("+", 2), ("+", 8), ("+", 2), ("-", 8)]


def test_what_a_checkpoint_keeps_is_not_made_again() -> None:
    forward, backward = _allocation_trace(again=True, keeps=True)
    assert forward == [("+", 4), ("+", 8), ("+", 2), ("-", 8)]
    assert backward[:3] == [("+", 2), ("+", 8), ("-", 8)]


@pytest.mark.parametrize("again", [False, True])
def test_passes_of_one_block_are_alike_and_apart(again: bool) -> None:
    """Two microbatches in flight: each asks for what one alone does, and frees its own."""
    alive: dict[int, int] = {}
    events: list[int] = []

    def report(number: int, nbytes: int | None) -> None:
        events.append((-alive.pop(number) if nbytes is None else alive.setdefault(number, nbytes)) // MIB)

    storages = Storages(report)
    block = Passes(_chain(), storages, recompute=again)
    backs, seen = [], []
    for _ in range(2):
        x = storages.make(4 * MIB)
        out, back = block.forward(x)
        storages.drop_all((x, out))
        backs.append(back)
    for back in (backs[1], backs[0]):
        events.clear()
        storages.drop_all(back(storages.make(2 * MIB)).values())
        seen.append(events[:])
        assert len(alive) == (0 if back is backs[0] else 1 if again else 2)  # the other's x, and z
    alone = [nbytes if kind == "+" else -nbytes for kind, nbytes in _allocation_trace(again, keeps=False)[1]]
    assert seen == [alone, alone]


# ---- the command ----

ARGV = ("estimate", "meta-llama/Llama-3.1-8B", "--engine", "fsdp2", "--num-gpus", "8", "--global-batch-size", "8")


def test_the_command_prints_it_beside_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGV, "--reserved"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Reserved, stream by stream" in text and "GiB with expandable_segments:True (compute" in text
    assert main([*ARGV, "--reserved", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    reserved = found["reserved"]
    assert reserved["segments"] == sum(reserved["streams"].values())
    assert reserved["allocated"] == pytest.approx(found["peak"]["bytes"], rel=0.002)
    schema = json.loads((Path(bridge_memory.__file__).parent / "report" / "estimate.schema.json").read_text())
    pytest.importorskip("jsonschema").Draft202012Validator(schema).validate(found)
    assert main([*ARGV, "--json"]) == 0
    assert "reserved" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--engine", "zero3"), "--reserved: reserved memory of --engine zero3 is not replayed; drop it"),
        (("--brief",), "--reserved is shown as text, md and json"),
        (("--global-batch-size", "16"), "with more than one microbatch a step is not replayed"),
    ],
    ids=["engine", "brief", "accumulation"],
)
def test_where_there_is_none_it_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    assert main([*ARGV, "--reserved", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err
