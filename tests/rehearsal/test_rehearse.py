"""A whole rank: what megatron-core's DDP and distributed optimizer lay out, and the command around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from spec_groups import groups_of

from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal import run, world
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.world import fake_world
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
)

LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)


def deepseek(**optimizer: Any) -> RunSpec:
    """DeepSeek-V3 over 1024 GPUs as NVIDIA lays it out, on the local implementation."""
    return RunSpec(
        model=resolve_model("deepseek-ai/DeepSeek-V3"),
        parallel=ParallelSpec(
            world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
            expert_model_parallel_size=64, expert_tensor_parallel_size=1,
            pipeline_model_parallel_layout="Et*4|(tttt|)*14tmL",
        ),
        batch=BatchSpec(seq_length=4096),
        **groups_of(**optimizer),
        implementation=LOCAL,
    )  # fmt: skip


@pytest.mark.parametrize("stage", [0, 7, 15])
def test_deepseek_v3_weights_gradients_and_optimizer_state_to_the_byte(stage: int) -> None:
    """Padded buffers of megatron-core's DDP, masters and moments of its distributed optimizer."""
    run = deepseek()
    found, ours = rehearse(run, stage), estimate(run).stages[stage]
    assert found.parameters == ours.parameters
    assert found.weights_bytes == ours.weights_bytes
    assert found.gradients_bytes == ours.gradients_bytes
    assert found.optimizer_bytes == ours.optimizer_bytes


def test_gradients_in_the_parameter_dtype_are_half() -> None:
    half, full = (rehearse(deepseek(grad_reduce_in_fp32=flag), 1) for flag in (False, True))
    assert 2 * half.gradients_bytes == full.gradients_bytes


def test_without_the_distributed_optimizer_every_rank_holds_twelve_bytes() -> None:
    """fp32 master and two moments of every parameter."""
    found = rehearse(deepseek(use_distributed_optimizer=False), 1)
    assert found.optimizer_bytes == 12 * found.parameters


def test_interleaved_chunks_are_rehearsed_apart() -> None:
    run = RunSpec(
        model=resolve_model("meta-llama/Llama-3.2-1B"),
        parallel=ParallelSpec(
            world_size=8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=4,
        ),
        implementation=LOCAL,
    )  # fmt: skip
    first, last = rehearse(run, 0), rehearse(run, 1)
    assert len(first.chunks) == len(last.chunks) == 4
    # Two of 16 layers a chunk; the first chunk embeds, the last one makes the logits.
    assert "embedding.word_embeddings.weight" in first.chunks[0].parameters
    assert first.chunks[1].passes.saved_bytes == first.chunks[3].passes.saved_bytes
    assert last.chunks[3].passes.saved_bytes > last.chunks[2].passes.saved_bytes + 4 * 4096 * 128256 // 2


def test_a_world_inside_a_world_is_refused() -> None:
    parallel = ParallelSpec(world_size=2)
    with fake_world(parallel, 0), pytest.raises(SpecError, match="already initialised"), fake_world(parallel, 1):
        pass


COMMAND = ["rehearse", "meta-llama/Llama-3.2-1B", "--tp", "2", "--num-gpus", "4", "--seq-length", "2048"]


def test_the_command_prints_prediction_and_rehearsal_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--transformer-impl", "local"]) == 0
    text = capsys.readouterr().out
    weights = next(line for line in text.splitlines() if line.startswith("weights  "))
    cells = weights.split()
    assert cells[1] == cells[3]
    assert "peak" in text


def test_the_command_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["stage"] == 0
    assert {r["name"] for r in answer["rows"]} >= {"weights", "gradients", "optimizer state", "peak"}


def test_without_megatron_the_command_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert main(COMMAND) == 2
    said = capsys.readouterr().err.strip()
    assert "pip install '.[megatron]'" in said  # no index has a package of that name
    assert "\n" not in said


def test_a_rank_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--rank", "4"]) == 2
    assert "\n" not in capsys.readouterr().err.strip()


def test_the_gpu_path_asks_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([*COMMAND, "--device", "cuda"]) == 2
    assert "needs a GPU" in capsys.readouterr().err


MBRIDGE = {
    "dense, biases": ["Qwen/Qwen2-7B", "--tp", "2", "--num-gpus", "4"],
    "experts": ["Qwen/Qwen3-30B-A3B", "--ep", "8", "--pp", "4", "--num-gpus", "32", "--stage", "3"],
    "multi-latent attention": [
        "deepseek-ai/DeepSeek-V3", "--tp", "2", "--ep", "32", "--etp", "1", "--pp", "2", "--num-gpus", "128",
        "--num-layers", "8", "--mtp-num-layers", "0",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("Found empty `transformer-engine` meta package installed.", "pip uninstall transformer_engine"),
        ("", "does not import here: RuntimeError"),
    ],
)
def test_a_megatron_core_that_does_not_import_is_one_line(why: str, said: str, tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(f"raise RuntimeError({why!r})\n")
    command = ["rehearse", "Qwen/Qwen3-0.6B", "--num-gpus", "8", "--device", "cuda"]
    done = subprocess.run(
        [sys.executable, "-c", f"from bridge_memory.cli import main; raise SystemExit(main({command!r}))"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


def test_a_newer_megatron_core_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A note where it runs, one line and exit code 2 where it does not."""
    monkeypatch.setattr(world, "NEWEST_RELEASE", (0, 1))
    command = [*COMMAND, "--transformer-impl", "local"]
    assert main(command) == 0
    assert "is newer than 0.1, the newest that the estimate was tested against" in capsys.readouterr().out

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(run, "rehearse", breaks)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "does not run without a GPU there (no such thing)" in said and said.count("\n") == 1


@pytest.mark.parametrize("case", MBRIDGE)
def test_mbridges_own_config_makes_the_rank_that_is_predicted(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rehearsed modules take every architecture field from mbridge's TransformerConfig, none from ours."""
    pytest.importorskip("mbridge", exc_type=ImportError)
    assert main(["rehearse", *MBRIDGE[case], "--mapping", "mbridge", "--json", "--seq-length", "1024"]) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    for name in ("parameters (elements)", "weights", "gradients", "optimizer state"):
        assert rows[name]["difference"] == 0, name


#: Command lines whose rehearsal differs from the estimate's defaults: experts one by one, releases, ring attention.
PREDICTED = {
    "experts": "Qwen/Qwen3-30B-A3B --num-layers 2 --num-gpus 4 --ep 2 --seq-length 512",
    "experts over a pipeline": "deepseek-ai/DeepSeek-V2-Lite --num-layers 4 --mtp-num-layers 0 --num-gpus 4 --pp 2 "
    "--ep 2 --seq-length 512",
    "dense, TP and recomputation": "meta-llama/Llama-3.2-1B --num-layers 4 --num-gpus 4 --tp 2 --seq-length 512 "
    "--recompute-granularity selective --recompute-modules mlp",
    "context parallel": "meta-llama/Llama-3.2-1B --num-layers 4 --num-gpus 4 --cp 2 --seq-length 512",
}  # fmt: skip


@pytest.mark.parametrize("case", PREDICTED)
def test_the_predicted_column_is_the_estimate_of_the_run_it_names(
    case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``flags``: what is installed decides; with them ``estimate`` has every number of the column."""
    words = PREDICTED[case].split()
    code = main(["rehearse", *words, "--json"])
    said = capsys.readouterr()
    if code == 2 and "needs Transformer Engine" in said.err:
        pytest.skip("context parallelism needs Transformer Engine's Python")
    assert code == 0, said.err
    found = json.loads(said.out)
    rows = {row["name"]: row["predicted"] for row in found["rows"]}
    assert main(["estimate", *words, *found["flags"], "--json"]) == 0
    stage = json.loads(capsys.readouterr().out)["stages"][found["stage"]]
    assert rows["peak"] == stage["peak_bytes"]
    assert rows["parameters (elements)"] == stage["parameters"]
    assert (rows["weights"], rows["gradients"]) == (stage["weights_bytes"], stage["gradients_bytes"])
    assert rows["optimizer state"] == stage["optimizer_bytes"]


LAYER = [
    "rehearse", "Qwen/Qwen2-7B", "--tp", "2", "--num-gpus", "4", "--seq-length", "512", "--transformer-impl", "local",
    "--layer", "3",
]  # fmt: skip


def test_a_layer_of_mbridges_own_config_keeps_what_is_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mbridge", exc_type=ImportError)
    assert main([*LAYER, "--mapping", "mbridge", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layer"] == 3
    assert next(r["difference"] for r in answer["rows"] if r["name"] == "saved for backward") == 0
    assert answer["only_predicted"] == answer["only_found"] == []


def test_a_layer_is_built_from_the_architecture_that_is_given() -> None:
    """fc1's output and the activation are twice as wide: 6 bytes a token and inner unit more."""
    from dataclasses import replace as changed

    from bridge_memory.rehearsal.megatron_config import transformer_config
    from bridge_memory.rehearsal.run import rehearse_layer

    run = RunSpec(model=resolve_model("meta-llama/Llama-3.2-1B"), implementation=LOCAL)
    wide = changed(transformer_config(run), ffn_hidden_size=16384)
    more = rehearse_layer(run, 0, wide).saved_bytes - rehearse_layer(run, 0).saved_bytes
    assert more == 6 * run.batch.seq_length * 8192


def test_a_stand_in_of_a_weights_gradient_is_kept_for_ddps_hooks() -> None:
    """fc1's, 2 x 18944 / 2 x 3584 in bf16: the GEMM adds into the main gradient, and hooks get a tensor of that shape,
    one for all layers (``tensor_parallel/layers.py: linear_with_grad_accumulation...``, TE ``module/base.py:
    get_dummy_wgrad``)."""
    from bridge_memory.rehearsal.run import rehearse_layer

    run = RunSpec(
        model=resolve_model("Qwen/Qwen2-7B"), parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2),
        batch=BatchSpec(seq_length=512), implementation=LOCAL,
    )  # fmt: skip
    passes = rehearse_layer(run, 3)
    assert [a.bytes for a in passes.persistent].count(2 * 18944 * 3584) == 1
    assert 2 * 18944 * 3584 not in [a.bytes for a in passes.backward_peak.largest]


@pytest.mark.parametrize("flag", [["--stage", "0"], ["--rank", "0"], ["--verbose"]])
def test_what_a_layer_does_not_heed_is_refused(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAYER, *flag]) == 2
    said = capsys.readouterr().err.strip()
    assert "layer" in said
    assert "\n" not in said


IGNORED = {
    "offload_modules": {"implementation": replace(LOCAL, offload_modules=("moe_act",))},
    "cuda_graph_impl": {"implementation": replace(LOCAL, cuda_graph_impl="transformer_engine")},
}


@pytest.mark.parametrize("field", IGNORED)
def test_what_a_rehearsal_would_ignore_is_refused_by_name(field: str) -> None:
    from bridge_memory.rehearsal.refusals import refuse_what_is_ignored

    class Run:
        precision, optimizer, implementation = PrecisionSpec(), OptimizerSpec(), LOCAL
        batch, data_parallel, peft = BatchSpec(), DataParallelSpec(), PeftSpec()

    refuse_what_is_ignored(Run())  # type: ignore[arg-type]
    for name, value in IGNORED[field].items():
        setattr(Run, name, value)
    with pytest.raises(SpecError, match=field) as refusal:
        refuse_what_is_ignored(Run())  # type: ignore[arg-type]
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("release", "packages", "words"),
    [
        (None, (), "its Python is not installed"),
        ("2.21.0", (), "its release here (2.21.0) is none of 2.10 to 2.20"),
        ("2.11.0", ("pydantic",), "pydantic is not installed"),
    ],
)
def test_what_is_transformer_engines_alone_is_refused_without_it(
    release: str | None, packages: tuple[str, ...], words: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The local modules, which then stand in, would compute in bf16 on both sides and say nothing."""
    from bridge_memory.rehearsal import te_kernels
    from bridge_memory.rehearsal.te_kernels import loading

    monkeypatch.setattr(loading, "loaded", lambda: False)
    monkeypatch.setattr(te_kernels, "leave", lambda: None)
    monkeypatch.setitem(sys.modules, te_kernels.PACKAGE, None)
    if release is not None:
        monkeypatch.delitem(sys.modules, te_kernels.PACKAGE)
        (tmp_path / "transformer_engine").mkdir()
        (tmp_path / "transformer_engine" / "__init__.py").touch()
        about = tmp_path / f"transformer_engine-{release}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine\nVersion: {release}\n")
        monkeypatch.syspath_prepend(tmp_path)
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    te = ["--transformer-impl", "transformer_engine"]
    for more in (["--fp8", "hybrid"], ["--fp8", "hybrid", "--layer", "0"], ["--cp", "2", "--num-gpus", "8"]):
        assert main([*COMMAND, *te, *more]) == 2
        said = capsys.readouterr().err.strip()
        assert ("fp8 (hybrid)" if "--fp8" in more else "--cp (2)") in said
        assert words in said
        assert "pip install" in said
        assert "\n" not in said


def test_the_data_loaders_mask_is_not_a_layers() -> None:
    """Unfused softmax: with a mask in the batch no layer makes one of s x s bytes; autograd keeps the batch's."""
    run = RunSpec(
        model=resolve_model("meta-llama/Llama-3.2-1B"), batch=BatchSpec(seq_length=2048),
        implementation=replace(LOCAL, masked_softmax_fusion=False),
    )  # fmt: skip
    given = run.with_(implementation=replace(run.implementation, create_attention_mask=True))
    made, kept = (rehearse(r).chunks[0].passes.saved for r in (run, given))
    assert sum(r.bytes == 2048 * 2048 for r in made) == 16
    assert [r.made_by for r in kept if r.bytes == 2048 * 2048] == ["batch: empty"]


def test_an_architecture_from_elsewhere_is_what_is_built() -> None:
    """A config with twice the inner width gives the layers that width, whatever the spec says."""
    from dataclasses import replace as changed

    from bridge_memory.rehearsal.megatron_config import transformer_config

    run = RunSpec(model=resolve_model("meta-llama/Llama-3.2-1B"), implementation=LOCAL)
    wide = changed(transformer_config(run), ffn_hidden_size=16384)
    ours, theirs = rehearse(run), rehearse(run, architecture=wide)
    assert theirs.parameters - ours.parameters == 16 * 3 * 2048 * 8192


def test_a_model_that_mbridge_does_not_know_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mbridge", exc_type=ImportError)
    assert main(["rehearse", "openai/gpt-oss-20b", "--mapping", "mbridge"]) == 2
    assert "--mapping builtin" in capsys.readouterr().err


def test_an_address_that_comes_back_is_another_tensor() -> None:
    """The allocator hands a freed storage's address out again; what is alive must not be taken for what was."""
    import torch

    from bridge_memory.rehearsal.tracker import Tracker

    tracker, addresses, known = Tracker(), set(), set()
    with tracker.watching(torch.nn.Module()):
        for _ in range(100):
            tensor = torch.empty(16, device="meta")
            addresses.add(tensor.untyped_storage()._cdata)
            known |= tracker.keys()
            del tensor
    assert len(addresses) < 100
    assert len(known) == 100


def test_windows_in_some_layers_go_on_into_mtp() -> None:
    """Layers with and without a window are a list, in which MTP depths look themselves up as layers after the last."""
    mlp = MLPSpec(2048, gated=True)
    windowed, whole = (LayerSpec(AttentionSpec(8, 8, 64, window_size=w), mlp) for w in (128, None))
    model = ModelSpec(
        name="windows", model_type="test", hidden_size=512, vocab_size=1024, layers=(windowed, whole) * 2,
        mtp_num_layers=1, mtp_layer=whole,
    )  # fmt: skip
    run = RunSpec(model=model, implementation=ImplementationSpec(transformer_impl="local"))
    assert rehearse(run, 0).parameters == estimate(run).stages[0].parameters


def test_a_layout_string_brings_its_virtual_stages_by_itself() -> None:
    """Four layers in four chunks over two stages: the first stage holds the embedding (32,000 x 4096) and two layers of
    202,383,360 parameters, and no output layer, whether or not ``--vpp 2`` is said beside the string."""
    model = replace(llama := resolve_model("meta-llama/Llama-2-7b-hf"), layers=llama.layers[:4])
    for vpp in (None, 2):
        parallel = ParallelSpec(
            world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=vpp,
            pipeline_model_parallel_layout="Et|t|t|tL",
        )  # fmt: skip
        found = rehearse(RunSpec(model=model, parallel=parallel, implementation=LOCAL), 0)
        assert len(found.chunks) == 2
        assert found.parameters == 32_000 * 4096 + 2 * 202_383_360


def test_the_predicted_peak_is_the_estimates_and_what_both_columns_share_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["meta-llama/Llama-2-7b-hf", "--num-layers=4", "--pp=2", "--transformer-impl=local", "--seq-length=512"]
    assert main(["estimate", *argv, "--json", "--stage", "1"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert main(["rehearse", *argv, "--json", "--stage", "1"]) == 0
    done = json.loads(capsys.readouterr().out)
    table = {row["name"]: row for row in done["rows"]}
    assert table["peak"]["predicted"] == stage["peak_bytes"]
    shared = table["buffers, counted in both columns"]
    static = sum(table[name]["found"] for name in ("weights", "gradients", "optimizer state"))
    schedule = table["schedule peak above static memory"]["found"]
    assert shared["found"] == shared["predicted"] == table["peak"]["found"] - static - schedule
    assert any("the schedule" in text and "cuBLAS" in text and "batch" in text for text in done["shared"])


def test_the_real_stacks_own_errors_are_its_refusals_and_others_pass() -> None:
    import torch
    from megatron.core.tensor_parallel.utils import divide

    with pytest.raises(world.StackRefusal, match=r"megatron-core \(utils\.py: ensure_divisibility\) refuses"), \
            world.refusals_named():
        divide(7, 2)
    with pytest.raises(ZeroDivisionError), world.refusals_named():
        _ = 1 // 0
    with pytest.raises(RuntimeError, match="size") as error, world.refusals_named():
        torch.ones(2).view(3)
    assert not isinstance(error.value, SpecError)
