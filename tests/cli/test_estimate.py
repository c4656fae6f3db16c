"""``bridge-memory estimate`` as a user meets it: output that adds up, and one clear line for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bridge_memory.cli import main
from bridge_memory.readers.resolve import resolve_config

DEEPSEEK = [
    "estimate", "deepseek-ai/DeepSeek-V3", "--tp", "4", "--pp", "4", "--ep", "8", "--num-gpus", "128",
    "--num-layers-in-last-pipeline-stage", "16",
]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a refusal prints."""
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("bridge-memory: error: ")
    return lines[0]


def as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    code, out, err = run(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_main_job(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *DEEPSEEK)
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("FITS B200, GB200, B300; TIGHT on H200; DOES NOT FIT ")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert "671.03" in run(capsys, *DEEPSEEK, "-v")[1]


def test_json_says_what_the_issue_asks(capsys: pytest.CaptureFixture[str]) -> None:
    result = as_json(capsys, *DEEPSEEK)
    assert result["schema"] == "bridge-memory/estimate/3"
    assert result["model"]["parameters"] == 671_026_404_352
    assert [len(s["layers"]) for s in result["stages"]] == [15, 15, 15, 16]
    for stage in result["stages"]:
        assert stage["peak_bytes"] == sum(c["bytes"] for c in stage["components"])
    heaviest = max(result["stages"], key=lambda s: s["peak_bytes"])
    assert (result["peak"]["stage"], result["peak"]["bytes"]) == (heaviest["stage"], heaviest["peak_bytes"])


def test_short_and_long_names_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    short = as_json(capsys, "estimate", "Llama-3.1-8B", "--tp", "2", "--pp", "2", "--num-gpus", "8")
    long = as_json(
        capsys, "estimate", "meta-llama/llama-3.1-8b", "--tensor-model-parallel-size", "2",
        "--pipeline-model-parallel-size", "2", "--world-size", "8",
    )
    assert short == long


def test_a_config_is_read_from_a_file_a_folder_and_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = dict(resolve_config("Qwen/Qwen3-0.6B")[1])
    (tmp_path / "config.json").write_text(json.dumps(config))
    sources = ([str(tmp_path)], [str(tmp_path / "config.json")], ["--custom-config", json.dumps(config)])
    counts = [as_json(capsys, "estimate", *source)["model"]["parameters"] for source in sources]
    assert counts == [596_049_920] * 3


def test_megatron_arguments_describe_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """GPT-2 small by Megatron's flags: 12 layers of 768, vocabulary 50257 padded to 50304, learned positions."""
    text = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
            --max-position-embeddings 1024 \
            --micro-batch-size 4 --global-batch-size 32 --bf16"
    result = as_json(capsys, "estimate", "--megatron-args", text, "--num-gpus", "8")
    assert result["stages"][0]["parameters"] == 124_439_808 + (50304 - 50257) * 768


def test_a_launchers_options_say_how_many_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun's nodes times processes; they are none of Megatron's arguments."""
    text = (
        "torchrun {} pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --micro-batch-size 1 --vocab-size 1000 --bf16"
    )
    launched = as_json(capsys, "estimate", "--megatron-args", text.format("--nnodes 4 --nproc_per_node=8"))
    assert launched["parallelism"]["world_size"] == 32 and launched["not_modelled"] == []
    assert launched == as_json(capsys, "estimate", "--megatron-args", text.format(""), "--num-gpus", "32")
    line = refused(capsys, "estimate", "--megatron-args", text.format("--nproc_per_node $GPUS"))
    assert "--num-gpus" in line and "torchrun" in line


@pytest.mark.slow
def test_mtp_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with_mtp = as_json(capsys, *DEEPSEEK)["stages"][-1]["parameters"]
    without = as_json(capsys, *DEEPSEEK, "--mtp-num-layers", "0")["stages"][-1]["parameters"]
    assert without < with_mtp


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["nonsense/model-that-is-not"], ["nonsense/model-that-is-not"]),
        (["Llama-3.1-8B", "--tp", "3"], ["num_attention_heads (32)", "--tp (3)"]),
        (["Llama-3.1-8B", "--tp", "0"], ["--tp (0)"]),
        (["Llama-3.1-8B", "--tp", "two"], ["--tp", "two"]),
        (["Llama-3.1-8B", "--pp", "5"], ["num_layers (32)", "--pp (5)"]),
        (["deepseek-ai/DeepSeek-V3", "--pp", "4"], ["num_layers", "61", "4", "16"]),
        (["Qwen/Qwen3-30B-A3B", "--ep", "3"], ["num_moe_experts (128)", "--ep (3)"]),
        (["Qwen/Qwen3-30B-A3B", "--tp", "2", "--etp", "4", "--ep", "8", "--num-gpus", "16"], ["16"]),
        (["Llama-3.1-8B", "--sequence-parallel"], ["--sequence-parallel needs --tp"]),
        (["Llama-3.1-8B", "--vpp", "2"], ["--vpp (2) needs --pp"]),
        (["Llama-3.1-8B", "--num-gpus", "12", "--tp", "8"], ["--num-gpus (12)", "--tp (8)"]),
        (["Llama-3.1-8B", "--pp", "2", "--num-layers-in-first-pipeline-stage", "40"], ["40"]),
        (["Llama-3.1-8B", "--ep", "2"], ["--ep (2)"]),
        (["Llama-3.1-8B", "--recompute-modules", "core_attn"], ["--recompute-modules", "--recompute-granularity"]),
        (["Llama-3.1-8B", "--recompute-granularity", "selective", "--recompute-modules", "nope"], ["nope"]),
        (["Llama-3.1-8B", "--stage", "1"], ["--stage 1"]),
        (["Llama-3.1-8B", "--unit", "furlong"], ["--unit", "furlong"]),
        (["Llama-3.1-8B", "--gpu", "H1000"], ["H1000"]),
        (["Llama-3.1-8B", "--gpu", "H100", "--gpu", "A100-80GB", "--fp8", "e4m3"], ["--fp8 (e4m3)", "A100-80GB", "8."]),
        (["Llama-3.1-8B", "--gpu", "H200", "--fp8", "e4m3", "--fp8-recipe", "mxfp8"], ["mxfp8", "H200", "9.0", "B200"]),
        (["Llama-3.1-8B", "--megatron-core", "9.9"], ["--megatron-core (9.9)", "0.9 to 0.20"]),
        (["Llama-3.1-8B", "--megatron-core", "0.8"], ["--megatron-core (0.8)", "use --megatron-core 0.9"]),
        (["Llama-3.1-8B", "--transformer-impl", "local", "--cp", "2"], ["--cp (2)", "set --transformer-impl to"]),
        (["Llama-3.1-8B", "--recompute-granularity", "full", "--recompute-method", "uniform",
          "--recompute-num-layers", "5", "--megatron-core", "0.16"],
         ["--recompute-num-layers (5)", "32 layers", "use 4"]),
        (["Llama-3.1-8B", "--force"], ["--force", "--output"]),
        (["Qwen/Qwen3-30B-A3B", "--moe-imbalance", "2"], ["--moe-imbalance (2) is more than --ep (1)"]),
        (["Llama-3.1-8B", "--optimizer", "muon", "--megatron-core", "0.16"],
         ["--use-distributed-optimizer (the default)", "--optimizer muon", "add --no-use-distributed-optimizer"]),
        (["Llama-3.1-8B", "--tensor-model-parallel-size", "3"], ["--tensor-model-parallel-size (3)"]),
        (["Llama-3.1-8B", "--engine", "megatron_fsdp"], ["--engine (megatron_fsdp) needs --data-parallel-sharding"]),
        (["Llama-3.1-8B", "--attention-backend", "flash", "--gpu", "V100-32GB"], ["--attention-backend (flash)",
                                                                                  "--gpu (volta)"]),
        (["--megatron-args", "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
          "--max-position-embeddings 128 --micro-batch-size 1 --vocab-size 1000 --tensor-model-parallel-size 3",
          "--num-gpus", "3"], ["num_attention_heads (4)", "--tensor-model-parallel-size (3)"]),
        (["--megatron-args", "--num-layers 2", "--num-gpus", "8", "--recompute-granularity", "full"],
         ["--recompute-granularity belongs inside --megatron-args"]),
        (["--megatron-args", "--num-layers 2", "--num-gpus", "8", "--num-layers", "2"], ["--num-layers belongs"]),
        (["--megatron-args", "--num-layers 2", "--num-gpus", "8", "--bf16"], ["--bf16 belongs"]),
        (["Llama-3.1-8B", "--pp", "4", "--num-layers-per-virtual-pipeline-stage", "3"],
         ["--num-layers-per-virtual-pipeline-stage (3)", "(8)"]),
        (["Llama-3.1-8B", "--pp", "4", "--num-layers-per-virtual-pipeline-stage", "2", "--vpp", "4"], ["--vpp"]),
        (["Llama-3.1-8B", "--no-such-flag"], ["--no-such-flag"]),
        (["Llama-3.1-8B", "--seq-length", "-4096"], ["--seq-length (-4096)"]),
        (["Llama-3.1-8B", "--custom-config", "{}"], ["exactly one"]),
        (["--custom-config", "{"], ["JSON"]),
        (["--custom-config", '{"model_type": "no_such_family"}'], ["no_such_family"]),
        (["--custom-config", '{"model_type": "llama", "hidden_size": -1}'], ["hidden_size"]),
        (["--megatron-args", "--num-layers 2"], ["--num-gpus"]),
        ([], ["MODEL"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], names: list[str]
) -> None:
    line = refused(capsys, "estimate", *argv)
    assert all(name in line for name in names), line


#: Flags that take an integer, on a command that they fit.
INTEGERS = {
    "tensor_model_parallel_size": "Llama-3.2-1B --num-gpus 8 --tp", "pipeline_model_parallel_size": "Llama-3.2-1B --pp",
    "context_parallel_size": "Llama-3.2-1B --num-gpus 8 --cp", "expert_model_parallel_size": "Qwen3-30B-A3B --ep",
    "expert_tensor_parallel_size": "Qwen3-30B-A3B --tp 2 --etp", "world_size": "Llama-3.2-1B --num-gpus",
    "virtual_pipeline_model_parallel_size": "Llama-3.2-1B --pp 2 --vpp", "seq_length": "Llama-3.2-1B --seq-length",
    "num_layers_in_first_pipeline_stage": "Llama-3.2-1B --pp 2 --num-layers-in-first-pipeline-stage",
    "num_layers_in_last_pipeline_stage": "Llama-3.2-1B --pp 2 --num-layers-in-last-pipeline-stage",
    "microbatch_group_size_per_vp_stage": "Llama-3.2-1B --pp 2 --vpp 2 --microbatch-group-size-per-vp-stage",
    "num_distributed_optimizer_instances": "Llama-3.2-1B --num-gpus 8 --num-distributed-optimizer-instances",
    "micro_batch_size": "Llama-3.2-1B --micro-batch-size", "global_batch_size": "Llama-3.2-1B --global-batch-size",
    "cpu_offloading_num_layers": "Llama-3.2-1B --cpu-offloading-num-layers",
    "mtp_num_layers": "Qwen3-30B-A3B --mtp-num-layers", "num_layers": "Llama-3.2-1B --num-layers",
    "make_vocab_size_divisible_by": "Llama-3.2-1B --make-vocab-size-divisible-by",
    "recompute_num_layers": "Llama-3.2-1B --recompute-granularity full --recompute-method uniform "
                            "--recompute-num-layers",
    "stage": "Llama-3.2-1B --stage",
}  # fmt: skip


@pytest.mark.parametrize("value", ["-1", "1000000000", "1000000000000", "1" + "0" * 30])
@pytest.mark.parametrize("field", INTEGERS)
def test_an_absurd_number_is_blamed_on_its_own_field(
    capsys: pytest.CaptureFixture[str], field: str, value: str
) -> None:
    if (field, value) == ("global_batch_size", "1000000000"):
        pytest.skip("long, not absurd: so many microbatches")
    line = refused(capsys, "estimate", *INTEGERS[field].split(), value)
    before = line.split(";")[0]
    assert INTEGERS[field].split()[-1] in before, line
    assert value in before or "absurdly large" in before, line
    assert len(line) < 300


def test_only_blackwell_fits_mxfp8(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing named: the cards that cannot compute in it are told from those that are too small; workspaces are
    those of a card that can."""
    argv = ["estimate", "Llama-3.2-1B", "--num-gpus", "8", "--fp8", "e4m3", "--fp8-recipe", "mxfp8"]
    code, out, _ = run(capsys, *argv, "-v")
    assert code == 0
    verdicts = {line.split()[0]: line for line in out.splitlines() if line.endswith((" yes", " no fp8", " no mxfp8"))}
    assert verdicts["A100-80GB"].endswith("no fp8") and verdicts["H200"].endswith("no mxfp8")
    assert verdicts["B200"].endswith("yes")
    assert "library workspaces as on a Blackwell GPU" in out
    named = as_json(capsys, *argv, "--gpu", "B200")
    assert named["stages"] == as_json(capsys, *argv)["stages"]


@pytest.mark.slow
def test_the_advice_for_61_layers_works(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "estimate", "deepseek-ai/DeepSeek-V3", "--pp", "4")
    advice = re.search(r"set --num-layers-in-last-pipeline-stage to (\d+)", line)
    assert advice, line
    code, _, _ = run(
        capsys, "estimate", "deepseek-ai/DeepSeek-V3", "--pp", "4", "--num-layers-in-last-pipeline-stage", advice[1]
    )
    assert code == 0


def test_truncated_and_absurd_files_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = json.dumps(dict(resolve_config("Qwen/Qwen3-0.6B")[1]))
    path = tmp_path / "config.json"
    for content in (text[: len(text) // 2], "[1, 2]", "", '"llama"', text.replace("28", '"many"', 1)):
        path.write_text(content)
        refused(capsys, "estimate", str(path))
    path.write_bytes(b"\xff\xfe\x00bad")
    refused(capsys, "estimate", str(path))
    refused(capsys, "estimate", str(tmp_path / "missing" / "config.json"))


def test_a_count_beyond_any_model_does_not_eat_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    config = dict(resolve_config("Qwen/Qwen3-30B-A3B")[1])
    line = refused(capsys, "estimate", "--custom-config", json.dumps({**config, "num_experts": 3_000_000}))
    assert "num_moe_experts" in line


def test_output_is_whole_and_never_overwritten(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "estimate.json"
    argv = ["estimate", "Llama-3.1-8B", "--json", "--output", str(path)]
    status, out, said = run(capsys, *argv)
    assert (status, out) == (0, "") and said.startswith(f"bridge-memory: wrote {path} (json): FITS ")
    before = path.read_text()
    assert json.loads(before)["schema"] == "bridge-memory/estimate/3"
    assert "--force" in refused(capsys, *argv, "--tp", "2")
    assert path.read_text() == before
    assert run(capsys, *argv, "--tp", "2", "--force")[0] == 0
    assert path.read_text() != before
    refused(capsys, "estimate", "Llama-3.1-8B", "--output", str(tmp_path / "no" / "such" / "folder" / "x"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["estimate.json"]


def test_residuals_of_the_very_run_are_added_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One measured GiB beyond the prediction of stage 0 becomes a component with its provenance."""
    from bridge_memory.calibration import Residual, config_digest, save
    from bridge_memory.estimation import estimate
    from bridge_memory.readers import resolve_model
    from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec

    run_spec = RunSpec(
        model=resolve_model("Llama-3.1-8B"), parallel=ParallelSpec(world_size=8), batch=BatchSpec(global_batch_size=8)
    )
    before = estimate(run_spec).stages[0].peak_bytes
    path = tmp_path / "calibration.json"
    measured = Residual(
        run_spec.model.name, config_digest(run_spec), 0, "peak", before, before + (1 << 30), {"torch": "2.9"}
    )
    save(path, [measured])
    argv = ["estimate", "Llama-3.1-8B", "--num-gpus", "8", "--global-batch-size", "8", "--calibration", str(path)]
    stage = as_json(capsys, *argv)["stages"][0]
    assert stage["peak_bytes"] == before + (1 << 30)
    assert any(c["provenance"] == "measured" and "residual" in c["name"] for c in stage["components"])
    assert "calibration" in refused(capsys, *argv[:-1], str(tmp_path / "missing.json"))


def test_sequences_are_no_longer_than_a_table_of_learned_positions(capsys: pytest.CaptureFixture[str]) -> None:
    assert "seq_length 1024 (--seq-length)" in run(capsys, "estimate", "openai-community/gpt2", "-v")[1]
    line = refused(capsys, "estimate", "openai-community/gpt2", "--seq-length", "2048")
    assert "--seq-length (2048)" in line and "max_position_embeddings (1024)" in line


def test_mtp_repeats_the_last_layer_that_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's first layers are dense, and so is MTP's where only they are left: eh_proj [7168, 2 x 7168], three
    norms and such a layer (``gpt_layer_specs.py: get_gpt_mtp_block_spec_for_backend``)."""

    def parameters(*flags: str) -> int:
        stages = as_json(capsys, "estimate", "deepseek-ai/DeepSeek-V3", *flags)["stages"]
        return sum(stage["parameters"] for stage in stages)

    one, two = (parameters("--num-layers", n, "--mtp-num-layers", "0") for n in ("1", "2"))
    assert parameters("--num-layers", "2") - two == two - one + 2 * 7168 * 7168 + 3 * 7168
