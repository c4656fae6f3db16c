"""scripts/maintain/convert_described.py: records that a source describes in words become records that can be read."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from bridge_memory.accuracy.predictions import predict
from bridge_memory.accuracy.records import load_runs
from bridge_memory.accuracy.runs import run_of
from bridge_memory.spec import RecomputeSpec

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "maintain" / "convert_described.py"))


def words(**changes) -> dict:
    """A Megatron Bridge recipe, told as a page of a manual tells it."""
    args = {
        "hf_model": "moonshotai/Moonlight-16B-A3B rev 1", "seq_length": 2048, "micro_batch_size": 2,
        "global_batch_size": 16, "sequence_parallel": True, "use_distributed_optimizer": True,
        "params_dtype": "bf16", "exp_avg_dtype": "fp32", "moe_grouped_gemm": True,
        "recompute_granularity": "selective", "recompute_modules": ["moe_act"],
    }
    record = {
        "id": "page/recipe", "gpu": "H100 80GB", "world_size": 16,
        "config": {
            "kind": "described", "args": args,
            "parallel": {"TP": 2, "PP": 1, "CP": 1, "EP": 4, "ETP": 1, "DP": 8, "VPP": None},
        },
        "measured_verbatim": {"peak_allocated_GB_after_iteration_2": 36.5},
    }
    return {**record, **changes}


@pytest.fixture
def convert(tmp_path: Path):
    def run(*records) -> list[dict]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("".join(json.dumps(r) + "\n" for r in records))
        assert SCRIPT["main"]([str(source), str(target)]) == 0
        return [json.loads(line) for line in target.read_text().splitlines()]

    return run


def test_a_recipe_becomes_the_run_that_it_tells(convert, tmp_path: Path) -> None:
    (new,) = convert(words())
    (record,) = load_runs(tmp_path / "out.jsonl")
    run = run_of(record)
    assert new["config"]["kind"] == "run_spec"
    p, b = run.parallel, run.batch
    assert (p.world_size, p.tp, p.pp, p.cp, p.ep, p.etp) == (16, 2, 1, 1, 4, 1)
    assert (b.seq_length, b.micro_batch_size, b.global_batch_size) == (2048, 2, 16)
    assert (run.model.num_layers, run.model.hidden_size) == (27, 2048)  # Moonlight's config.json
    assert run.recompute == RecomputeSpec(granularity="selective", modules=("moe_act",))
    assert record.measured[0].max_allocated_bytes == 36_500_000_000
    assert [o.status for o in predict(record)] == ["ok"]


def test_the_words_stay_and_can_be_converted_again(convert) -> None:
    (once,) = convert(words())
    assert once["config"]["described"]["args"] == words()["config"]["args"]
    assert convert(once) == [once]


def test_megatron_arguments_in_a_described_record_are_arguments(convert) -> None:
    args = {"--num-layers": 2, "--hidden-size": 1024, "--num-attention-heads": 8}
    verbatim = {
        "per_rank_MB (after 1 iterations)": {"0": {"allocated": 1.5, "max_allocated": 2.0, "reserved": 9.0}},
        "log: params in most loaded shard (B)": 0.25,
    }
    (new,) = convert(words(config={"kind": "described", "args": args, "parallel": {}}, measured_verbatim=verbatim))
    assert (new["config"]["kind"], new["config"]["args"]) == ("megatron_args", args)
    expected = {"rank": 0, "after_step": 1, "allocated_bytes": 3 << 19, "max_allocated_bytes": 2 << 20}
    assert new["measured"] == [expected]
    assert new["logged_parameters"] == 250_000_000


def test_one_layer_alone_is_not_a_run(convert, tmp_path: Path) -> None:
    args = {"token_dispatcher": "flex/deepep", "num_layers": 1, "hidden_size": 4096}
    verbatim = {"max_allocated_bytes_mean_over_20_iters": 1000}
    convert(words(config={"kind": "described", "args": args, "parallel": {}}, measured_verbatim=verbatim))
    (o,) = predict(load_runs(tmp_path / "out.jsonl")[0])
    assert (o.status, o.measured_max_allocated_bytes) == ("not_a_run", 1000)
    assert "one MoE layer" in o.reason


def test_other_records_are_copied_as_they_are(corpus: Path, tmp_path: Path) -> None:
    lines = corpus.read_text().splitlines()[90:100]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines) + "\n")
    assert SCRIPT["main"]([str(source), str(target)]) == 0
    assert target.read_bytes() == source.read_bytes()


def test_words_that_are_not_known_are_refused_and_nothing_is_written(tmp_path: Path, capsys) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(words(config={"kind": "described", "args": {"a": 1}})) + "\n")
    assert SCRIPT["main"]([str(source), str(target)]) == 2
    assert "page/recipe" in capsys.readouterr().err
    assert not target.exists()


def test_no_record_of_the_corpus_is_left_in_words(records) -> None:
    assert {r.config["kind"] for r in records} == {"megatron_args", "run_spec", "not_a_run"}
    assert all(r.measured for r in records)
