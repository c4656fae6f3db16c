"""Loops of one's own: plain PyTorch, accelerate, DeepSpeed's engine, torchtitan's JobConfig."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import ParallelSpec, RunSpec
from bridge_memory.calibration import journal
from bridge_memory.calibration.records import ReportRecord
from bridge_memory.live import MemoryReport, install
from bridge_memory.live.cuda import Reading
from bridge_memory.live.runs import model_of, run_of_accelerator, run_of_deepspeed, run_of_torchtitan
from bridge_memory.readers.presets import preset_path
from bridge_memory.spec import SpecError

GIB = 1 << 30
RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))
CONFIG = json.loads(Path(preset_path("meta-llama/Llama-3.2-1B")).read_text())


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, GIB, 2 * GIB, 3 * GIB, 3 * GIB, 80 * GIB, 4 * GIB)


def moments(path: Path) -> list[tuple[int, str]]:
    return [(r.iteration, r.moment) for r in journal.read(path) if isinstance(r, ReportRecord)]


def test_a_plain_loop(tmp_path: Path) -> None:
    shown: list[str] = []
    with MemoryReport(tmp_path / "r.jsonl", run=RUN, every=4, emit=shown.append, read=reading) as report:
        for _ in range(9):
            report.step()
    assert moments(tmp_path / "r.jsonl") == [
        (0, "model built"), (1, "after step 1"), (2, "steady"), (4, "steady"), (8, "steady"),
    ]
    assert len(shown) == 5 and "predicted" in shown[0] and "Theoretical" not in "".join(shown)


def test_the_run_may_be_known_later_and_its_failure_is_no_end(tmp_path: Path) -> None:
    asked = []

    def later() -> RunSpec:
        asked.append(1)
        if len(asked) == 1:
            raise RuntimeError("the model is not there yet")
        return RUN

    report = MemoryReport(tmp_path / "r.jsonl", run=later, emit=lambda text: None, read=reading)
    report.start()
    report.forget()
    report.step()
    records = [r for r in journal.read(tmp_path / "r.jsonl") if isinstance(r, ReportRecord)]
    assert records[0].stages[0].predicted_peak is None and records[1].stages[0].predicted_peak


@pytest.mark.parametrize("run", [None, lambda: 3, lambda: "Llama", lambda: 1 / 0], ids=["none", "3", "text", "error"])
def test_what_is_no_run_leaves_torchs_figures(run: Any) -> None:
    shown: list[str] = []
    report = MemoryReport(None, run=run, emit=shown.append, read=reading)
    report.start()
    report.step()
    report.end()
    assert len(shown) == 2 and "2.00" in shown[1]


def test_an_error_of_the_loop_is_the_loops() -> None:
    with pytest.raises(ZeroDivisionError), MemoryReport(None, run=RUN, emit=lambda text: None, read=reading):
        raise ZeroDivisionError


class Model:
    """A Hugging Face model as far as it is asked, inside of a wrapper."""

    def __init__(self, **changes: Any) -> None:
        config = {**CONFIG, **changes}
        self.config = SimpleNamespace(to_dict=lambda: config, _attn_implementation="sdpa", use_cache=False)
        self.is_gradient_checkpointing = True

    def parameters(self) -> list[Any]:
        return []


def test_deepspeeds_engine() -> None:
    engine = SimpleNamespace(
        module=Model(), config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "gradient_clipping": 0.5,
        }, basic_optimizer=type("FusedAdam", (), {"defaults": {}})(),
    )  # fmt: skip
    run = run_of_deepspeed(engine, seq_length=512)
    assert run.data_parallel.engine == "zero2" and run.deepspeed.reduce_bucket_size == 1000
    assert (run.batch.micro_batch_size, run.batch.seq_length, run.batch.global_batch_size) == (4, 512, 8)
    assert (run.optimizer.optimizer, run.optimizer.torch_implementation) == ("adamw", "fused")
    assert run.transformers.gradient_checkpointing and run.model.hidden_size == 2048


def test_a_wrapped_model_is_looked_into() -> None:
    assert model_of(SimpleNamespace(module=SimpleNamespace(_orig_mod=Model()))).hidden_size == 2048
    with pytest.raises(SpecError, match="no Hugging Face config"):
        model_of(SimpleNamespace())


@dataclass
class Titan:
    """torchtitan's JobConfig, as far as it differs from its defaults."""

    model: Any = field(default_factory=lambda: {"name": "llama3", "flavor": "8B"})
    training: Any = field(default_factory=lambda: {"local_batch_size": 2, "seq_len": 4096})
    activation_checkpoint: Any = field(default_factory=lambda: {"mode": "none"})


def test_torchtitans_job_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = run_of_torchtitan(Titan())
    assert (run.data_parallel.engine, run.parallel.world_size, run.batch.micro_batch_size) == ("fsdp2", 8, 2)
    assert run.model.name == "meta-llama/Llama-3.1-8B"
    with pytest.raises(SpecError, match="not known here; give model="):
        run_of_torchtitan(Titan(model={"name": "llama3", "flavor": "9B"}))


def test_accelerate_itself_on_the_cpu(tmp_path: Path) -> None:
    """A loop with the real Accelerator, a real optimizer and a tiny Llama."""
    torch = pytest.importorskip("torch")
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256
    )
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = transformers.LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
    report = MemoryReport(
        tmp_path / "r.jsonl", emit=lambda text: None, read=reading,
        run=lambda: run_of_accelerator(accelerator, model, micro_batch_size=2, seq_length=32, optimizer=optimizer),
    )
    ids = torch.zeros((2, 32), dtype=torch.long)
    with report:
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                report.step()
    assert moments(tmp_path / "r.jsonl") == [(0, "model built"), (1, "after step 1"), (2, "steady")]
    run = report._config
    assert (run.data_parallel.engine, run.batch.global_batch_size) == ("single", 4)
    assert (run.optimizer.optimizer, run.optimizer.torch_implementation) == ("adamw", "fused")
    assert run.transformers.use_cache  # transformers 4 makes a cache in training too


@pytest.mark.parametrize(("options", "engine", "fields"), [
    ({"fsdp_version": 1, "sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True, "cpu_offload": True,
      "auto_wrap_policy": "transformer_based_wrap", "backward_prefetch": "BACKWARD_PRE"}, "fsdp1",
     {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True, "offload_params": True,
      "backward_prefetch": "BACKWARD_PRE", "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "param_dtype": "bf16"}),
    ({"fsdp_version": 2, "reshard_after_forward": False, "auto_wrap_policy": "transformer_based_wrap"}, "fsdp2",
     {"reshard_after_forward": False, "auto_wrap_policy": "torchtitan", "reduce_dtype": "bf16"}),
    ({"fsdp_version": 2}, "fsdp2", {"reshard_after_forward": None, "auto_wrap_policy": "NO_WRAP"}),
], ids=["fsdp1", "kept", "default"])  # fmt: skip
def test_accelerates_fsdp_plugin(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], engine: str, fields: dict[str, Any]
) -> None:
    """The real plugin of a process among eight."""
    pytest.importorskip("torch")
    utils = pytest.importorskip("accelerate.utils")
    monkeypatch.setenv("WORLD_SIZE", "8")
    accelerator = SimpleNamespace(
        distributed_type="FSDP", mixed_precision="bf16", gradient_accumulation_steps=1,
        state=SimpleNamespace(fsdp_plugin=utils.FullyShardedDataParallelPlugin(**options)),
    )
    optimizer = type("AdamW", (), {"defaults": {}})()
    run = run_of_accelerator(accelerator, Model(), micro_batch_size=1, seq_length=64, optimizer=optimizer)
    assert run.data_parallel.engine == engine and run.parallel.world_size == 8
    assert {name: getattr(run.fsdp, name) for name in fields} == fields


def test_nothing_is_written_unless_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with MemoryReport(run=RUN, emit=lambda text: None, read=reading) as report:
        report.step()
    with install(emit=lambda text: None, read=reading):
        pass
    assert list(tmp_path.iterdir()) == []
    report.write_to("run/memory_report.jsonl", html="run/memory.html")
    report.step()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["memory.html", "memory_report.jsonl"]
