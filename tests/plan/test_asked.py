"""--vary, --fix and --exclude: what of a space is searched, and commands that say a row's number again."""

from __future__ import annotations

import json
import random
import shlex

import pytest

from bridge_memory import RunSpec
from bridge_memory.cli import main
from bridge_memory.estimation import model_state
from bridge_memory.plan.changes import WhatIf, changes, keeps_state
from bridge_memory.plan.megatron.asked import EVERY, read
from bridge_memory.plan.megatron.settings import SETTINGS, usual_words
from bridge_memory.spec import SpecError
from bridge_memory.spec.gpus import find_gpu

MOE = ["search", "Qwen/Qwen1.5-MoE-A2.7B", "--num-gpus", "8", "--gpu", "B200", "--global-batch-size", "64"]


def found(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    code = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code in (0, 1), err
    return json.loads(out)


@pytest.mark.slow
def test_emitted_commands_say_the_same_peak(capsys: pytest.CaptureFixture[str]) -> None:
    """Random values of three axes of settings at a time: the command of the first row, through ``estimate``."""
    chance, number = random.Random(3), 0
    base = RunSpec(model="Qwen/Qwen1.5-MoE-A2.7B")
    seen: set[str] = set()
    while number < 14:
        vary = ["tp=1/2", "ep=2..8", "cp=1/2", "mbs=1"]
        for axis in chance.sample(sorted(SETTINGS), 3):
            words = usual_words(axis, base, find_gpu("B200"))
            vary.append(f"{axis}={'/'.join(chance.sample(words, min(2, len(words))))}")
        arguments = [*MOE, "--vary", ",".join(vary), "--fix", "recompute=none"]
        if main([*arguments, "--json", "--top", "4"]) != 0:
            capsys.readouterr()
            continue
        best = json.loads(capsys.readouterr().out)["best"]
        row = chance.randrange(len(best))
        assert main([*arguments, "--emit", "estimate", "--row", str(row + 1), "--top", "4"]) == 0
        command = shlex.split(capsys.readouterr().out.strip())
        assert main([*command[1:], "--json"]) == 0
        estimate = json.loads(capsys.readouterr().out)
        peak = max(stage["peak_bytes"] for stage in estimate["stages"])
        assert peak == best[row]["peak_bytes"], shlex.join(command)
        seen |= {axis for axis in SETTINGS if best[row][axis] not in ("none", "off", "0", "alltoall", "p2p", "bf16")}
        number += 1
    assert len(seen) >= 6


def test_values_are_named_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    best = found([*MOE, "--vary", "tp=1/4 ep recompute=moe_act+layernorm/none", "--exclude", "ep=1", "--top", "20"],
                 capsys)["best"]
    assert {row["tp"] for row in best} <= {1, 4} and 1 not in {row["ep"] for row in best}
    assert {row["recompute"] for row in best} == {"moe_act,layernorm", "none"}
    best = found([*MOE, "--vary", "tp,mbs,recompute,dispatcher", "--exclude", "recompute=full/moe_act,mbs=1",
                  "--exclude", "dispatcher=deepep/hybridep", "--top", "30"], capsys)["best"]
    assert not any("full" in row["recompute"] or "moe_act" in row["recompute"] or row["mbs"] == 1 for row in best)
    assert {row["dispatcher"] for row in best} == {"alltoall"}
    fixed = found([*MOE, "--fix", "tp=2", "--fix", "recompute=none precision=mxfp8", "--vary", "ep,mbs"], capsys)
    assert {(row["tp"], row["recompute"], row["precision"]) for row in fixed["best"]} == {(2, "none", "mxfp8")}
    assert fixed["axes"]["precision"] == ["mxfp8"] and fixed["one_by_one"] is None
    # One value is a range of one, and a flag.
    assert found([*MOE, "--vary", "tp=2,mbs"], capsys)["best"] == found([*MOE, "--tp", "2..2", "--vary", "mbs"],
                                                                        capsys)["best"]


def test_precisions_that_a_card_does_not_compute_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """``estimate`` refuses them on that card: no row may have one. Hopper has no mxfp8 and no NVFP4, Ampere no fp8."""
    asked = [*MOE[:2], "--num-layers", "2", "--num-gpus", "2", "--global-batch-size", "4", "--fix", "recompute=none"]
    answer = found([*asked, "--gpu", "H100", "--vary", "mbs=1,precision=mxfp8/fp8/nvfp4"], capsys)
    assert {row["precision"] for row in answer["best"]} == {"fp8"}
    assert [line.partition(":")[0] for line in answer["left_out"]] == ["precision mxfp8", "precision nvfp4"]
    assert main([*asked, "--gpu", "A100-80GB", "--vary", "mbs=1,precision=fp8"]) == 2
    assert "--fp8 (hybrid) does not run on --gpu A100-80GB" in capsys.readouterr().err
    assert main(["estimate", *asked[1:6], "--gpu", "A100-80GB", "--fp4", "e2m1"]) == 2
    said = capsys.readouterr().err
    assert "drop --fp4, or name a GPU that has nvfp4" in said and "fp8" not in said


def test_all_settings_at_once_are_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    vary = "ep,precision=bf16/mxfp8,offload=none/core_attn,optimizer_offload=0/1,graphs=none/local,cp_comm=p2p/a2a,cp"
    answer = found([*MOE, "--vary", f"{vary},dp_overlap=none/grads+params"], capsys)
    assert answer["one_by_one"] is None and answer["looked_at"] > 500
    assert {axis for axis, words in answer["axes"].items() if len(words) > 1} == {
        "precision", "offload", "optimizer_offload", "graphs", "cp_comm", "dp_overlap"
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    (
        (["--vary", "tpp"], "--vary tpp is none of"), (["--vary", "tp=x"], "is no size"),
        (["--fix", "tp=2/4"], "several values"), (["--exclude", "ep"], "has no values"),
        (["--exclude", "graphs=fast"], "graphs (fast) is unknown"), (["--fix", "recompute=all"], "is unknown"),
        (["--vary", "tp", "--tp", "2"], "does not go with a flag"), (["--vary", "tp=8..2"], "smaller size first"),
        (["--vary", "precision", "--fp8", "hybrid"], "does not go with a flag"),
        (["--vary", "tp", "--fix", "tp=2"], "does not go with --vary tp"),
        (["--vary", "precision,graphs,offload,optimizer_offload,cp_comm"], "combinations, more than"),
        (["--vary", "tp=2,tp=4"], "names tp twice"),
        (["--fix", "offload=attention"], "--offload-modules ('attention') is unknown"),
        (["--fix", "optimizer_offload=2"], "is no share"),
    ),
)  # fmt: skip
def test_wrong_items_are_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MOE, *arguments]) == 2
    assert said in capsys.readouterr().err


def test_every_axis_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["search", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f" {axis}," in text or f" {axis};" in text for axis in EVERY)
    assert read("--vary", ["cp=1..4"]) == {"cp": ("1", "2", "3", "4")}
    with pytest.raises(SpecError):
        read("--vary", ["cp=0"])


def test_changes_of_passes_keep_model_state() -> None:
    """What ``try first`` takes for the model state of a changed run is what ``model_state`` says of it."""
    others = {"micro_batch_size": 4, "cross_entropy_loss_fusion": False}
    for name, fields in (("Qwen/Qwen1.5-MoE-A2.7B", {"parallel.world_size": 8}), ("meta-llama/Llama-3.2-1B", others)):
        run = RunSpec(model=name).with_fields(**fields)
        looked = 0
        found = WhatIf(run)
        for change in changes(run):
            changed = found._run((change,))
            if changed is not None and keeps_state(run, changed):
                assert model_state(changed) == model_state(run), change
                looked += 1
        assert looked > 8
