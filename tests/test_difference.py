"""What differs between runs: the fields, what each changes, and components that add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory import ParallelSpec, RecomputeSpec, RunSpec, SpecError, diff, peaks
from bridge_memory.cli import main

RUN = RunSpec(model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2))


def test_components_add_up_to_the_difference_of_the_peaks() -> None:
    other = RUN.with_fields(tensor_model_parallel_size=4, grad_reduce_in_fp32=False)
    found = diff({"a": RUN, "b": other})
    tops = [max(s.peak_bytes for s in peaks(run)) for run in (RUN, other)]
    assert found.more(1) == tops[1] - tops[0] == sum(part.more for part in found.components(1))
    assert {field.name for field in found.fields(1)} == {"tensor_model_parallel_size", "grad_reduce_in_fp32"}


def test_a_field_alone_is_what_the_estimate_says_of_it() -> None:
    """bf16 gradients: 2 bytes less for each of the parameters of a rank of two."""
    found = diff([RUN, RUN.with_fields(grad_reduce_in_fp32=False, tensor_model_parallel_size=4)])
    (gradients,) = [field for field in found.fields(1) if field.name == "grad_reduce_in_fp32"]
    alone = max(s.peak_bytes for s in peaks(RUN.with_fields(grad_reduce_in_fp32=False)))
    assert gradients.alone == alone - max(s.peak_bytes for s in peaks(RUN))
    assert (gradients.before, gradients.after) == (True, False)


def test_fields_that_go_together_are_one() -> None:
    """Full recomputation is refused without its method."""
    other = RUN.with_(recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
    (field,) = diff([RUN, other]).fields(1)
    assert field.name == "recompute_granularity, recompute_method, recompute_num_layers"
    assert field.alone == diff([RUN, other]).more(1) < 0


def test_what_has_no_effect_is_no_difference() -> None:
    assert diff([RUN, RUN.with_fields(moe_token_dispatcher_type="flex")]).fields(1) == ()


def test_releases_can_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["Qwen/Qwen3-8B --megatron-core 0.13", "Qwen/Qwen3-8B --megatron-core 0.19"]
    assert main(["diff", *sides, "--with", "--num-gpus 8 --tp 2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["differences"]
    assert [field["field"] for field in found["fields"]] == ["megatron_core"]
    assert found["more_bytes"] == found["fields"][0]["alone_bytes"]


def test_files_of_trainers_are_told_by_their_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero = tmp_path / "ds.json"
    zero.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}')
    script = tmp_path / "launch.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --vocab-size 32000 --bf16\n"
    )
    assert main(["diff", str(zero), "Llama-3.1-8B --engine zero2", "--with", "--num-gpus 8", "--json"]) == 2
    assert "ds.json: " in capsys.readouterr().err  # it names no model
    assert main(["diff", str(script), str(script), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["gpus"] for c in found["configurations"]] == [8, 8] and not found["differences"][0]["fields"]


def test_a_table_of_several_names_each(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [f"Qwen/Qwen3-8B --num-gpus 8 --tp {tp}" for tp in (1, 2, 4)]
    assert main(["diff", *sides, "--gpu", "H100", "--format", "md"]) == 0
    out = capsys.readouterr().out
    assert all(side in out for side in sides) and "| A |" in out and "| C |" in out


def test_the_exit_code_says_that_a_peak_grew(capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["Qwen/Qwen3-8B --num-gpus 8 --tp 4", "Qwen/Qwen3-8B --num-gpus 8 --tp 2"]
    assert main(["diff", *sides, "--tolerance", "1"]) == 1
    assert main(["diff", *sides[::-1], "--tolerance", "1"]) == 0
    assert main(["diff", *sides, "--tolerance", "1000"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("sides", (["Qwen3-8B"], ["Qwen3-8B", "a 'b"], ["Qwen3-8B", "Qwen3-8B --tpp 2"]))
def test_wrong_input_is_one_line(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *sides]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_one_run_is_refused() -> None:
    with pytest.raises(SpecError, match="two or more"):
        diff([RUN])


def test_margins_of_two_kinds_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    one = "Llama-3.2-1B --engine single --num-gpus 1"
    assert main(["diff", f"{one} --peft lora", one, "--gpu", "H100"]) == 0  # adapters are not replayed
    assert "(fragmentation as measured elsewhere, not replayed); B" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", one, f"{one} --seq-length 2048", "--gpu", "H100"]) == 0
    assert "margin:" not in capsys.readouterr().out
