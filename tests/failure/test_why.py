"""Why a job failed: the cause of every kind of failure text, the run in it, and what is measured beside it."""

from __future__ import annotations

import io
import json
import pickle
import sys
import time
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, SpecError, peaks
from bridge_memory.cli import main
from bridge_memory.failure.runs import Trainer, printed_in
from bridge_memory.failure.steps import ALLOCATED, HOST, fastest, series_of
from bridge_memory.failure.texts import Kind, failures
from bridge_memory.failure.why import why_file, why_text

sys.path.insert(0, str(Path(__file__).parent))
import texts  # type: ignore[import-not-found]

GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize("name", texts.EVERY)
def test_the_text_alone_says_the_cause_and_what_to_do(name: str) -> None:
    text, cause, word = texts.EVERY[name]
    found = why_text(text)
    assert str(found.cause) == cause, found.findings
    assert word in " ".join(remedy.do for remedy in found.remedies)
    assert found.cause == "not memory" or found.remedies


def test_the_figures_of_torch_2_0_are_read() -> None:
    """Outside: 39.59 of capacity less 0.5 free and 37.20 reserved, as the message says nothing of the process."""
    f = failures(texts.TORCH_2_0).events[0].figures
    assert f.device == 3 and f.tried == round(1.96 * GIB) and f.free == 512 * MIB
    assert f.unallocated == pytest.approx(1.10 * GIB, abs=8 * MIB)
    assert f.outside == pytest.approx((39.59 - 0.5 - 37.20) * GIB, abs=8 * MIB)
    assert f.needed == pytest.approx(38.06 * GIB, abs=8 * MIB)


def test_a_process_that_holds_what_torch_reserved_is_this_one() -> None:
    """In a container the driver's number of a process is not the process's own."""
    f = failures(texts.IN_A_CONTAINER).events[0].figures
    assert f.in_use == round(77.90 * GIB) and not f.others and f.private == 64 * MIB
    f = failures(texts.ANOTHER_PROCESS).events[0].figures
    assert [pid for pid, _ in f.others] == [175080] and f.in_use == round(47.27 * GIB)


def test_a_figure_below_zero_is_not_known() -> None:
    """torch prints 2**64 bytes for a limit that is none."""
    assert failures(texts.ASYNC_ALLOCATOR).events[0].figures.allowed is None


def test_the_place_and_the_rank_are_those_of_the_traceback() -> None:
    event = why_text(texts.IN_A_CONTAINER).event
    assert (event.rank, event.place) == (5, "backward")
    event = why_text(texts.TORCH_2_9).event
    assert (event.rank, event.place) == (0, "optimizer step")


def test_state_is_what_counts_where_the_optimizer_step_fails() -> None:
    """Activations are gone by then: no smaller batch helps."""
    assert "batch" not in " ".join(r.do for r in why_text(texts.TORCH_2_9).remedies)


def test_the_variable_is_called_as_the_message_calls_it() -> None:
    text = texts.TORCH_2_9.replace("210.00 MiB", "9.00 GiB").replace("76.90", "68.00")
    assert "PYTORCH_ALLOC_CONF=expandable" in why_text(text).remedies[0].do


def test_a_kill_that_follows_is_not_the_cause() -> None:
    """torchrun kills the other ranks; the rank that ran out of memory decides."""
    found = why_text(texts.TORCHRUN + texts.IN_A_CONTAINER + texts.TORCHRUN)
    assert found.event.kind is Kind.TORCH and found.counts[Kind.SIGKILL] >= 2


def test_one_rank_that_needs_more_than_the_others_is_an_imbalance() -> None:
    lines = [
        f"[Rank {rank}] (after 20 iterations) memory (MB) | allocated: 30000.0 | max allocated: {52000 + rank}.0 | "
        "reserved: 60000.0 | max reserved: 60000.0" for rank in (0, 1, 2, 3, 6, 7)
    ]
    found = why_text("\n".join([*lines, texts.IN_A_CONTAINER]))
    assert found.cause == "imbalance" and "rank 5 needed 75.55 GiB" in found.findings[0].words


def test_memory_that_grows_step_by_step_is_a_leak() -> None:
    """75 MB a step over 190 steps: 14,250 MB in all."""
    lines = [
        f"[Rank 5] (after {step} iterations) memory (MB) | allocated: {40000 + 75 * step}.0 | max allocated: "
        f"{60000 + 75 * step}.0 | reserved: 70000.0" for step in range(10, 201, 10)
    ]
    found = why_text("\n".join([*lines, texts.IN_A_CONTAINER]))
    assert found.cause == "a leak by step" and found.findings[0].sure and found.growth is not None
    assert found.growth.slope == pytest.approx(75 * MIB) and found.growth.total == 75 * 190 * MIB
    assert "loss.item()" in found.remedies[0].do


@pytest.mark.parametrize("grows", (lambda n: 0.0, lambda n: float(n % 3), lambda n: min(n, 3) * 100.0))
def test_what_stays_varies_or_reaches_a_level_is_no_leak(grows: Any) -> None:
    lines = [
        f"[Rank 0] (after {n} iterations) memory (MB) | allocated: {40000 + grows(n)} | reserved: 1.0"
        for n in range(3, 30)
    ]
    assert fastest(series_of(lines)) is None


def test_a_log_of_verl_says_that_host_memory_grows() -> None:
    lines = [
        f"\x1b[36m(TaskRunner pid=12)\x1b[0m step:{n} - actor/loss:0.1 - perf/max_memory_allocated_gb:44.1 - "
        f"perf/cpu_memory_used_gb:{300 + 4.5 * n}" for n in range(1, 40)
    ]
    found = why_text("\n".join([*lines, texts.RAY]))
    assert found.cause == "a leak by step" and found.growth is not None and found.growth.series.figure == HOST
    assert found.growth.slope == pytest.approx(4.5 * GIB, rel=1e-3)


def test_memory_of_torchtitan_is_read_through_its_colours() -> None:
    lines = [
        f"[rank0]:[titan] 10:00:00 - root - INFO - \x1b[31mstep: {n:2}  "
        f"\x1b[32mloss:  9.1  \x1b[36mmemory: {40 + n}.50GiB(51.20%)  \x1b[34mtps: 7,000" for n in range(1, 12)
    ]
    (series,) = series_of(lines)
    assert series.points[0] == (1, round(41.5 * GIB)) and len(series.points) == 11


# ---- the run in the text ----


def megatron_log(failure: str) -> str:
    from small_jobs import megatron_lm_args

    args = {**vars(megatron_lm_args()), "num_layers": 8}
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {k} {'.' * (48 - len(k))} {v}" for k, v in sorted(args.items())]
    lines += ["-------------------- end of arguments ---------------------"]
    lines += [" [2026-01-01] iteration       12/     100 | consumed samples: 96 | elapsed time (ms): 1.0 |"]
    return "\n".join([*(f"0: {line}" for line in lines), failure])


def test_the_run_is_found_in_megatron_lms_log() -> None:
    found = why_text(megatron_log(texts.TORCH_2_0.replace("GPU 3", "GPU 0")))
    assert found.trainer is Trainer.MEGATRON and found.job is not None and found.phase is not None
    assert str(found.phase.phase) == "training" and found.event.step == 12


def test_the_run_is_found_in_bridges_yaml() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "readers"))
    from test_container_file import YAML  # type: ignore[import-not-found]

    pytest.importorskip("yaml")
    text = "> starting\nWORLD_SIZE: 8\n" + YAML + "\n> building model\n" + texts.IN_A_CONTAINER
    found = printed_in(text)
    assert found.trainer is Trainer.BRIDGE and found.run is not None
    assert found.run.parallel.tp == 2 and found.run.batch.global_batch_size == 16


def test_the_run_is_found_in_torchtitans_log() -> None:
    config = {
        "model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 2, "seq_len": 8192},
        "activation_checkpoint": {"mode": "none"},
    }  # fmt: skip
    start = "[rank0]:[titan] - root - INFO - "
    text = "\n".join([
        f"{start}Running with configs: {json.dumps(config, indent=2)}",
        f"{start}Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1, etp=1",
        texts.TORCH_2_9,
    ])  # fmt: skip
    found = why_text(text)
    assert found.run is not None and found.run.parallel.world_size == 8 and found.run.batch.seq_length == 8192
    assert any(r.do.startswith("--activation_checkpoint.mode ") and r.fits for r in found.remedies), found.remedies


def verl(strategy: str) -> dict[str, Any]:
    """The keys of verl 0.8's configuration that are read."""
    return {
        "actor_rollout_ref": {
            "actor": {
                "strategy": strategy, "ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": False,
                "fsdp_config": {"model_dtype": "fp32", "dtype": "bfloat16", "param_offload": True, "fsdp_size": -1},
                "megatron": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
                             "context_parallel_size": 1, "sequence_parallel": True,
                             "override_transformer_config": {"recompute_granularity": None}},
            },
            "model": {"path": "/models/Qwen3-8B", "enable_gradient_checkpointing": False},
            "rollout": {"name": "vllm", "log_prob_micro_batch_size_per_gpu": 4},
        },
        "data": {"max_prompt_length": 1024, "max_response_length": 7168},
        "trainer": {"n_gpus_per_node": 8, "nnodes": 1},
    }  # fmt: skip


@pytest.mark.parametrize(("strategy", "engine"), (("fsdp2", "fsdp2"), ("fsdp", "fsdp1"), ("megatron", "megatron_ddp")))
def test_the_actor_is_found_in_verls_log(strategy: str, engine: str) -> None:
    printed = "\n".join(f"\x1b[36m(TaskRunner pid=77)\x1b[0m {line}" for line in pformat(verl(strategy)).split("\n"))
    found = why_text(printed + "\n" + texts.IN_A_CONTAINER)
    assert found.trainer is Trainer.VERL and found.run is not None
    # Four sequences are packed into one row of as many tokens (use_remove_padding).
    assert found.run.data_parallel.engine == engine and found.run.batch.seq_length == 4 * 8192
    assert any("actor_rollout_ref" in r.do for r in found.remedies)


# ---- measured beside predicted ----

RUN = RunSpec(
    model="meta-llama/Llama-3.1-70B",
    parallel=ParallelSpec(world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
    batch=BatchSpec(seq_length=8192, micro_batch_size=2, global_batch_size=128),
)  # fmt: skip


def test_what_a_change_frees_is_what_the_estimate_says() -> None:
    found = why_text(texts.WRAPPED, RUN)
    assert found.cause == "too large" and found.findings[0].sure
    change = next(r for r in found.remedies if r.do == "--micro-batch-size 1")
    assert found.run is not None and found.gpu is not None and found.gpu.name == "H100"
    before, after = (
        max(s.peak_bytes for s in peaks(run)) for run in (found.run, found.run.with_fields(micro_batch_size=1))
    )
    assert change.frees_bytes == before - after and change.fits


def test_a_change_that_frees_less_than_was_missing_does_not_make_it_fit() -> None:
    parallel = ParallelSpec(world_size=8, tensor_model_parallel_size=2)
    found = why_text(texts.WRAPPED, RunSpec(model="meta-llama/Llama-3.1-8B", parallel=parallel))  # it fits as it is
    missing = found.event.figures.missing
    assert missing and any(r.fits for r in found.remedies)
    assert all(r.frees_bytes >= missing for r in found.remedies if r.fits)


def test_more_outside_than_is_predicted_is_said() -> None:
    found = why_text(texts.OUTSIDE, RUN)
    assert found.cause == "outside of PyTorch" and found.findings[0].sure


def test_the_same_numbers_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(texts.IN_A_CONTAINER)
    flags = ["meta-llama/Llama-3.1-70B", "--tp", "8", "--pp", "2", "--num-gpus", "64", "--seq-length", "8192",
             "--micro-batch-size", "2", "--global-batch-size", "128", "--gpu", "H100"]  # fmt: skip
    assert main(["why", str(log), *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cause"] == "too large" and document["figures"]["missing_bytes"] == round(1.05 * GIB)
    assert main(["why", str(log), *flags]) == 0
    out = capsys.readouterr().out
    assert "TOO LARGE" in out and len(out.splitlines()) <= 40 and max(map(len, out.splitlines())) <= 100


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(texts.NCCL.encode())))
    assert main(["why", "-"]) == 0
    assert "NCCL" in capsys.readouterr().out


def test_a_text_without_a_failure_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("iteration 3/ 10\nall is well; nobody was Killed here today\n")
    assert main(["why", str(tmp_path / "x")]) == 2
    assert "holds no failure of memory" in capsys.readouterr().err


def test_a_snapshot_says_what_failed(tmp_path: Path) -> None:
    """torch records the failed allocation as an event "oom" with its size and what was free."""
    blocks = [{"address": 0, "size": 3 * GIB, "requested_size": 3 * GIB, "state": "active_allocated", "frames": []},
              {"address": 3 * GIB, "size": 2 * GIB, "state": "inactive"}]  # fmt: skip
    segment = {"device": 0, "address": 0, "total_size": 5 * GIB, "blocks": blocks}
    oom = {"action": "oom", "size": 2 * GIB + 1, "device_free": GIB, "addr": 0, "stream": 0, "frames": []}
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[oom]]}, protocol=4))
    from bridge_memory import find_gpu

    found = why_file(str(path), gpu=find_gpu("V100-16GB"))
    f = found.event.figures
    assert (f.allocated, f.unallocated, f.tried, f.free) == (3 * GIB, 2 * GIB, 2 * GIB + 1, GIB)
    assert found.cause == "fragmented"


def test_a_summary_of_bridge_gives_the_flags_that_it_says() -> None:
    """As ``log_non_default_values`` of Megatron Bridge 0.6 formats it; it has no vocabulary."""
    log = """======================================================================
Configuration Summary (Non-Default Values vs Megatron Core)
======================================================================

[model] Non-default values (vs Mcore TransformerConfig):
  expert_model_parallel_size: 8  (Mcore default: 1)
  params_dtype: torch.bfloat16  (Mcore default: torch.float32)
  recompute_modules: ['moe_act', 'layernorm']  (Mcore default: None)
  tensor_model_parallel_size: 2  (Mcore default: 1)

[train]:
  global_batch_size: 256
  micro_batch_size: 1
"""
    found = why_text("> initialized with world size 64\n" + log + texts.OUTSIDE)
    (note,) = [note for note in found.notes if "run_config.yaml" in note]
    assert found.trainer is Trainer.BRIDGE and found.run is None
    for flag in (
        "--num-gpus 64", "--tp 2", "--ep 8", "--micro-batch-size 1", "--global-batch-size 256",
        "--recompute-modules moe_act,layernorm",
    ):  # fmt: skip
        assert flag in note, note


# ---- hostile ----


@pytest.mark.parametrize("data", [
    b"", b"\x00" * 4096, bytes(range(256)) * 64, "\ufeffno failure \u0661".encode("utf-16"), b"\xff\xfe" + b"\x80" * 99,
    b"\x80\x04" + b"garbage" * 9, b"\x1f\x8b\x08" + b"\x00" * 40, b"PK\x03\x04" + b"\x00" * 40,
], ids=["empty", "zeros", "all bytes", "utf-16", "half a mark", "half a pickle", "gzip", "zip"])
def test_a_file_of_something_else_is_refused_in_a_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(SpecError) as refused:
        why_file(str(tmp_path / "log"))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_failure_is_found_in_any_encoding(tmp_path: Path) -> None:
    """Windows' shells write UTF-16; a log may hold what is no UTF-8 and progress bars without line breaks."""
    for data in (
        texts.OUTSIDE.encode("utf-16"), b"\xc3\x28\xff 12%|#\r 13%|##\r" * 999 + texts.OUTSIDE.encode(),
        ("\ufeff" + texts.OUTSIDE).encode(),
    ):  # fmt: skip
        (tmp_path / "log").write_bytes(data)
        assert why_file(str(tmp_path / "log")).cause == "outside of PyTorch"


PARTS = [*(text for text, _, _ in texts.EVERY.values()), "\n", "{", "'", "\x1b[", "GPU 0 ("]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.text(max_size=200))
def test_no_text_ends_in_another_error(parts: list[str], noise: str) -> None:
    text = "".join(part[: len(noise) * 7 or None] for part in parts) + noise
    try:
        json.dumps(why_text(text).as_json())
    except SpecError as error:
        assert "\n" not in str(error)


def test_a_long_log_takes_linear_time() -> None:
    start = time.process_time()
    with pytest.raises(SpecError):
        why_text("Tried to allocate " * 200_000 + "GPU 0 has a total capacity of " * 200_000)
    why_text(texts.IN_A_CONTAINER * 3_000 + "x" * 20_000_000)
    assert time.process_time() - start < 10
    assert len(failures(texts.IN_A_CONTAINER * 3_000).events) == 1


def test_allocated_memory_comes_before_peaks() -> None:
    lines = [
        f"[Rank 0] (after {n} iterations) memory (MB) | allocated: {1000 + 10 * n}.0 | max allocated: {9000 + 90 * n}.0"
        for n in range(3, 20)
    ]
    found = fastest(series_of(lines))
    assert found is not None and found.series.figure == ALLOCATED
