"""``bridge-memory rehearse`` with Transformer Engine: options that it once stopped at, as a user gives them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.rehearsal.patches.routing import dealt, spread
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.spec import ParallelSpec, RunSpec


def rows(capsys: pytest.CaptureFixture[str], command: str) -> dict[str, dict[str, Any]]:
    code = main(["rehearse", *command.split(), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return {row["name"]: row for row in json.loads(out)["rows"]}


def held_to(table: dict[str, dict[str, Any]]) -> None:
    for name in ("parameters (elements)", "weights", "gradients", "optimizer state"):
        assert table[name]["difference"] == 0, table[name]
    for name in ("saved for backward, per microbatch", "forward peak", "backward peak", "peak"):
        assert abs(table[name]["difference"]) <= 0.005 * table[name]["found"], table[name]


LLAMA = "meta-llama/Llama-2-7b-hf --num-layers 1 --seq-length 1024"
QWEN = "Qwen/Qwen3-30B-A3B --num-layers 1 --ep 8 --seq-length 1024"


@pytest.mark.parametrize(
    "command",
    [
        f"{QWEN} --moe-router-fusion",
        f"{LLAMA} --tp 2 --num-gpus 4 --overlap-grad-reduce --overlap-param-gather",
        f"{LLAMA} --fp8 hybrid --no-gradient-accumulation-fusion",
        f"{LLAMA} --fp8 hybrid --fp8-recipe tensorwise --no-gradient-accumulation-fusion",
        f"{LLAMA} --deterministic-mode",
        f"{LLAMA} --tp 2 --cp 2 --deterministic-mode",
        f"{LLAMA} --attention-backend unfused",
        f"{QWEN} --attention-backend unfused",
        # 384 experts, of which each gets 10 or 11 of a rank's 4096 tokens
        "moonshotai/Kimi-K2-Instruct --num-layers 2 --tp 2 --ep 8 --etp 1 --num-gpus 8 --seq-length 1024",
        f"{LLAMA} --precision fp32",
        # one group of B and C on a rank, which both ranks of context parallelism need
        "nvidia/Nemotron-H-56B-Base-8K --num-layers 1 --tp 8 --cp 2 --num-gpus 16 --seq-length 2048",
        # megatron-core 0.13 turns them round
        f"{LLAMA} --micro-batch-size 2",
        f"{LLAMA} --micro-batch-size 2 --attention-backend unfused",
    ],
)
def test_it_runs_and_agrees(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    held_to(rows(capsys, command))


def test_an_error_of_torch_under_megatron_is_a_refusal_of_megatron() -> None:
    """A shape that does not fit, in a function of megatron-core: no fault of the rehearsal."""
    from bridge_memory.rehearsal.world import StackRefusal, refusals_named

    namespace: dict[str, Any] = {"__name__": "megatron.core.somewhere"}
    exec("import torch\ndef split(x): return torch.nn.functional.linear(x, x[:, :1])", namespace)
    with pytest.raises(StackRefusal, match=r"megatron-core \(somewhere.py: split\)"), refusals_named():
        namespace["split"](torch.zeros(2, 3))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_parameters_are_kept_in_fp8(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer of Llama-2-7b has 4 x 4096 x 4096 + 3 x 4096 x 11008 weights in linears: one byte each; embedding and
    output layer of 32,000 x 4096 and three norms two. Beside that Hopper keeps the other layout, a byte each again."""
    table = rows(capsys, f"{LLAMA} --fp8 hybrid --fp8-recipe {recipe} --fp8-param-gather")
    held_to(table)
    linears = 4 * 4096 * 4096 + 3 * 4096 * 11008
    rest = 2 * (2 * 32_000 * 4096 + 3 * 4096)
    # Buffers are padded to a multiple of 128 elements a bucket; blocks have their scales in fp32.
    assert table["weights"]["found"] == pytest.approx(linears + rest, rel=0.0001)
    copies = table["fp8 weight copies"]
    assert copies["found"] == pytest.approx(linears, rel=0.001)
    assert copies["predicted"] == pytest.approx(copies["found"], rel=0.0001)


def test_one_call_leaves_nothing_for_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    unfused = rows(capsys, f"{LLAMA} --attention-backend unfused")
    assert dict(os.environ) == before
    fused = rows(capsys, f"{LLAMA} --attention-backend fused")
    held_to(unfused)
    held_to(fused)
    # The probabilities of 32 heads over 1024 x 1024 in bf16, less a log-sum-exp in fp32 a head and token, and
    # two random numbers of 8 bytes.
    saved = "saved for backward, per microbatch"
    assert unfused[saved]["found"] - fused[saved]["found"] == 2 * 32 * 1024 * 1024 - 4 * 32 * 1024 - 16


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (f"{QWEN} --moe-token-dispatcher-type flex", "DeepEP"),
        (f"{LLAMA} --cp 4 --cp-comm-type a2a+p2p", "a2a+p2p"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_one_line(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", *command.split()]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and said in err and "internal error" not in err


def test_a_stage_is_seen_by_the_last_rank_of_its_ring() -> None:
    """TP 2, CP 4: ranks 0 to 7 of the first stage; of rank 0's ring 0, 2, 4, 6 the last attends with all of its queries
    to everything before it."""
    sizes = ParallelSpec(world_size=8, tensor_model_parallel_size=2, context_parallel_size=4)
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=sizes)
    found = rehearse(run, 0)
    assert found.rank == 6
    passes = found.chunks[0].passes
    stage = estimate(run).stages[0]
    assert stage.peak_bytes > passes.forward_bytes


def test_experts_of_every_rank_get_their_share_of_a_rest() -> None:
    """32,768 tokens over 384 experts on 3 ranks: 85 and a third each, and 10,922 or 10,923 a rank."""
    counts = spread(32_768, 384)
    assert sum(counts) == 32_768 and set(counts) == {85, 86}
    assert {sum(counts[i : i + 128]) for i in (0, 128, 256)} <= {10_922, 10_923}


def test_experts_of_quantized_gemms_lack_half_a_multiple_on_average() -> None:
    """128 experts of 100 rows, 16 a rank: as many on every rank, and padded to 16 by 7 to 8 rows each."""
    counts = spread(12_800, 128, multiple=16, together=16)
    assert {sum(counts[i : i + 16]) for i in range(0, 128, 16)} == {1_600}
    assert 7 <= sum(-n % 16 for n in counts) / 128 <= 8


def test_what_other_ranks_send_is_as_much_from_each() -> None:
    """512 experts that get 8 or 9 rows from 7 ranks, 4,480 in all: 640 from each, and as many to either half."""
    rows = dealt([8, 9, 9, 9] * 128, 7)
    assert [sum(column) for column in zip(*rows, strict=True)] == [8, 9, 9, 9] * 128
    assert {sum(row) for row in rows} == {640}
    assert {sum(row[:256]) for row in rows} == {320}


def test_experts_of_few_rows_never_get_less_than_none() -> None:
    counts = spread(30, 8, multiple=32, together=4)
    assert sum(counts) == 30 and min(counts) >= 0


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.2-1B"])
def test_clamped_gates_are_kept_beside_the_others(name: str) -> None:
    """Unfused: clamping saves the gate and the linear half, and makes two more tensors (``mlp.py``, ``experts.py``)."""
    from bridge_memory import BatchSpec, ImplementationSpec, resolve_model
    from bridge_memory.inventory.layer import layer_block
    from bridge_memory.rehearsal.run import rehearse_layer
    from bridge_memory.rehearsal.world import installed_release
    from bridge_memory.tapes.context import context_of

    model = resolve_model(name)
    layer = model.layers[0]
    found = []
    for value in (None, 7.0):
        kind = replace(layer, ffn=replace(layer.ffn, clamp_value=value))
        run = RunSpec(
            model=replace(model, layers=(kind,)), batch=BatchSpec(seq_length=512),
            implementation=ImplementationSpec(
                attention_backend="fused", bias_activation_fusion=False, megatron_core=installed_release(),
            ),
        )  # fmt: skip
        real, cost = rehearse_layer(run, 0), layer_block(kind, context_of(run)).cost
        assert cost.retained == pytest.approx(real.saved_bytes + real.held_bytes, rel=0.005)
        assert cost.forward_peak == pytest.approx(real.forward_peak.bytes, rel=0.005)
        assert cost.backward_peak == pytest.approx(real.backward_peak.bytes, rel=0.005)
        found.append(cost.retained)
    assert found[1] > 1.05 * found[0]
