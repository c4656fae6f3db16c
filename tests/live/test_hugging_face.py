"""The Trainer of transformers, on the CPU, with a tiny model: its report, and that it goes on whatever that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from bridge_memory import SpecError  # noqa: E402
from bridge_memory.calibration import journal  # noqa: E402
from bridge_memory.calibration.records import ReportRecord, RunRecord  # noqa: E402
from bridge_memory.live.cuda import Reading  # noqa: E402
from bridge_memory.live.hugging_face import MemoryReportCallback  # noqa: E402
from bridge_memory.live.runs import run_of_trainer  # noqa: E402

GIB = 1 << 30


def tiny(**changes: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, **changes,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Sequences(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(48) % 256
        return {"input_ids": ids, "labels": ids.clone()}


def reading(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, GIB, 2 * GIB, 3 * GIB, 3 * GIB, 80 * GIB, 4 * GIB)


def train(tmp_path: Path, callback: Any, model: Any = None, **args: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=4, use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=4, disable_tqdm=True, **args,
    )  # fmt: skip
    trainer = transformers.Trainer(
        tiny() if model is None else model, arguments, train_dataset=Sequences(), callbacks=[callback]
    )
    trainer.train()
    return trainer


def test_a_report_when_built_and_after_steps(tmp_path: Path) -> None:
    """Two sequences of 48 tokens, as the loader gave them; 20 GiB-free figures of torch beside what is predicted."""
    shown: list[str] = []
    callback = MemoryReportCallback(tmp_path / "r.jsonl", emit=shown.append, read=reading)
    trainer = train(tmp_path, callback)
    assert trainer.state.global_step == 4
    records = list(journal.read(tmp_path / "r.jsonl"))
    reports = [r for r in records if isinstance(r, ReportRecord)]
    assert [r.moment for r in reports] == ["model built", "after step 1", "steady", "steady"]
    stage = reports[-1].stages[0]
    assert stage.max_allocated == 2 * GIB and stage.predicted_peak is not None and stage.predicted_peak > 0
    run = callback._run()
    assert (run.batch.micro_batch_size, run.batch.seq_length, run.batch.global_batch_size) == (2, 48, 2)
    assert (run.data_parallel.engine, run.model.hidden_size, run.precision.params_dtype) == ("single", 64, "fp32")
    assert "predicted" in shown[-1] and not trainer.model._forward_pre_hooks
    assert any(isinstance(r, RunRecord) for r in records)


def test_the_trainer_writes_for_prometheus_and_prints_tables_where_asked(tmp_path: Path) -> None:
    shown: list[str] = []
    callback = MemoryReportCallback(
        None, prometheus="{output_dir}/memory.prom", tables=True, every=1, emit=shown.append, read=reading
    )
    train(tmp_path, callback)
    assert f"bridge_memory_max_allocated_bytes{{stage=\"0\"}} {2 * GIB}\n" in (tmp_path / "out/memory.prom").read_text()
    assert len(shown) > 3 and all("\n" in one for one in shown)
    with pytest.raises(SpecError, match=r"does not end in \.prom"):
        MemoryReportCallback(prometheus="memory.txt")


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_the_phases_of_the_trainer(tmp_path: Path, strategy: str) -> None:
    """Its own loop, saves and evaluations, which a hook of the model and a save beside it count independently."""
    from allocator import Allocator

    gpu = Allocator()
    callback = MemoryReportCallback(tmp_path / "r.jsonl", emit=lambda text: None, read=gpu.read)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), per_device_train_batch_size=4, max_steps=8, use_cpu=True, report_to=[],
        save_strategy=strategy, eval_strategy=strategy, eval_steps=2, save_steps=4, logging_steps=4, disable_tqdm=True,
    )  # fmt: skip
    model = tiny()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Sequences(), eval_dataset=Sequences(), callbacks=[callback]
    )
    gpu.begin("build")
    gpu.use(10, keep=10)
    steps = []

    def forward(module: Any, args: Any) -> None:
        if module.training:
            steps.append(1)
        with gpu.phase(("training" if len(steps) > 1 else "first step") if module.training else "evaluation"):
            gpu.use(8 if module.training else 3)

    saved = trainer._save_checkpoint

    def save(*args: Any, **kwargs: Any) -> None:
        with gpu.phase("save"):
            gpu.use(1)
        saved(*args, **kwargs)

    model.register_forward_pre_hook(forward)
    trainer._save_checkpoint = save
    gpu.begin("between")
    trainer.train()
    _, phases = journal.phases((tmp_path / "r.jsonl").read_text().splitlines())
    assert phases is not None
    found = {phase.phases[0]: phase for phase in phases.phases}
    assert list(found) == ["build", "first step", "training", "evaluation", "save"]
    for name, phase in found.items():
        gpu.holds(phase, name)
    # 8 steps of 4 to an epoch: evaluated every 2 steps or every epoch, saved every 4 either way.
    assert (found["evaluation"].times, found["save"].times) == ({"steps": 4, "epoch": 2}[strategy], 2)
    (least, most) = found["save"].allocated or (0, 0)
    assert (least, most) == (10 * GIB, 11 * GIB)


@pytest.mark.parametrize("options, written", [
    ({}, ["out/memory_report.jsonl"]),
    ({"path": None}, []),
    ({"path": None, "html": "{output_dir}/memory.html"}, ["out/memory.html"]),
    ({"path": "{output_dir}/logs/r.jsonl"}, ["out/logs/r.jsonl"]),
    ({"path": "here.jsonl"}, ["here.jsonl"]),
], ids=["default", "none", "page", "named folder", "a path"])  # fmt: skip
def test_files_are_written_where_the_trainer_writes_or_where_one_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], written: list[str]
) -> None:
    """And nowhere else: not in the folder where the script was started."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path, MemoryReportCallback(**options, emit=lambda text: None, read=reading))
    found = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".html")]
    assert found == written


def test_what_the_model_and_the_arguments_say(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], optim="adamw_torch", gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    model = tiny(attn_implementation="eager")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    run = run_of_trainer(arguments, model, seq_length=32)
    assert run.optimizer.torch_implementation == "foreach" and run.batch.global_batch_size == 6
    assert run.transformers.gradient_checkpointing and run.transformers.use_reentrant is False
    assert run.transformers.attn_implementation == "eager"
    assert run.transformers.transformers_version == tuple(map(int, transformers.__version__.split(".")[:2]))
    half = run_of_trainer(arguments, model.to(torch.bfloat16), seq_length=32)
    assert half.precision.params_dtype == "bf16" and half.transformers.autocast is None


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def broken(*args: Any) -> Any:
    raise RuntimeError("broken on purpose")


@pytest.mark.parametrize("options", [
    {"read": broken}, {"emit": broken}, {"path": "/proc/none/r.jsonl"}, {"calibration": "/proc/none/c.json"},
], ids=lambda options: ",".join(options))  # fmt: skip
def test_whatever_fails_training_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    callback = MemoryReportCallback(**{"path": None, "emit": lambda text: None, "read": reading, **options})
    assert train(tmp_path, callback).state.global_step == 4


@pytest.mark.parametrize("options", [{"run": Broken()}, {"seq_length": -3}], ids=lambda options: ",".join(options))
def test_what_is_no_argument_is_refused_before_training(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=next(iter(options))):
        MemoryReportCallback(None, **options)


def test_a_model_without_a_config_gets_torchs_figures(tmp_path: Path) -> None:
    class Plain(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            logits = self.out(self.embed(input_ids))
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    shown: list[str] = []
    callback = MemoryReportCallback(None, emit=shown.append, read=reading)
    assert train(tmp_path, callback, Plain()).state.global_step == 4
    assert "2.00" in shown[-1]


def test_a_callback_that_breaks_the_hook_leaves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = MemoryReportCallback(None, emit=lambda text: None, read=reading)
    monkeypatch.setattr(callback._report, "forget", broken)
    assert train(tmp_path, callback).state.global_step == 4


@pytest.mark.parametrize("adapted", [False, True], ids=("whole", "adapters"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mixed", [False, True], ids=("plain", "autocast"))
def test_weights_and_states_are_those_of_the_model_that_was_built(
    tmp_path: Path, adapted: bool, dtype: str, mixed: bool
) -> None:
    """Every parameter of the real model in its own dtype, in blocks of 512 bytes; moments of those that train."""
    from bridge_memory.components import Role
    from bridge_memory.estimation import estimate

    model = tiny().to(getattr(torch, dtype))
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], use_dora=False))
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=mixed)
    run = run_of_trainer(args, model, seq_length=48, micro_batch_size=2)
    assert run.peft.trains_adapters is adapted and (run.transformers.autocast is None) is not (
        mixed and dtype == "float32"
    )
    stage = estimate(run).peak_stage

    def blocks(parameters: Any) -> int:
        return sum(-(-p.numel() * p.element_size() // 512) * 512 for p in parameters)

    assert stage.bytes_of(Role.WEIGHTS) == blocks(model.parameters())
    trained = [p for p in model.parameters() if p.requires_grad]
    steps = 512 * len(trained)  # a counter of the fused kernel each
    assert 0 <= stage.bytes_of(Role.OPTIMIZER) - 2 * blocks(trained) <= steps
    assert not [feature for feature in run.not_modelled if "debug" in feature or "all trained" in feature]


def test_what_no_one_set_of_training_arguments_is_neither_a_gap_nor_an_assumption(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    run = run_of_trainer(args, tiny(), seq_length=48)
    assert not run.not_modelled and not any("fsdp" in s or "transformers 4" in s for s in run.assumptions)
